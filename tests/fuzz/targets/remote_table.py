"""A pack's table at a remote: lengths are refused before memory is taken for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mutation import Form

from mstore.blocks.codecs import Codec
from mstore.blocks.pack_tables import entries_of, read_tables
from mstore.blocks.packs import ENTRY, HEADER_BYTES, NO_BASE, Kind, PackEntry, header
from mstore.remotes.layout import PackRow, PackState
from mstore.remotes.places import require_possible
from mstore.terms.ids import PackId
from targets.samples import A, B, C

FORM = Form.BYTES
BLOCK = 1 << 16
SIZE = 1 << 20


def target(data: bytes) -> None:
    count = max(0, len(data) - HEADER_BYTES) // ENTRY.size
    row = PackRow(
        bytes(PackId.of(data)), SIZE, PackState.LIVE, 0, count, 1, bytes(32), 0, len(data)
    )
    if row.problem() is not None:
        return
    table, _ = read_tables([(row.pack, data)], "input")
    require_possible(table, np.full(len(table), SIZE), BLOCK, "input")
    for entry in entries_of(table):
        assert entry.offset + entry.stored_length <= SIZE
        if entry.kind == Kind.BLOCK:
            assert max(entry.stored_length, entry.raw_length) <= BLOCK
            assert Codec(entry.codec).is_delta == (entry.base != NO_BASE)


def seeds() -> Iterable[bytes]:
    delta = next(one for one in Codec if one.is_delta)
    entries = [
        PackEntry(A, Kind.BLOCK, Codec.RAW, 1, 4096, BLOCK, BLOCK),
        PackEntry(B, Kind.BLOCK, delta, 2, 80_000, 100, BLOCK, A),
        PackEntry(C, Kind.SNAPSHOT, Codec.RAW, 1, 90_000, 200, 200),
    ]
    yield header(bytes(32)) + b"".join(entry.encode() for entry in sorted(entries, key=_order))


def _order(entry: PackEntry) -> tuple[int, bytes]:
    return entry.kind, entry.id
