"""The lists of a remote. Their names prove the bytes, and not what a stranger made of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from mutation import Form

from mstore.blocks.packs import ENTRY, HEADER_BYTES
from mstore.remotes.layout import (
    LISTS,
    ListId,
    Named,
    NoteRow,
    PackRow,
    PackState,
    RefRow,
    RemoteMove,
    SnapshotRow,
    StatisticsRow,
    decode_list,
    encode_list,
)
from mstore.terms.errors import MstoreError
from targets.samples import A, B, C

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    """Read as a list of each kind, as a root would name it that fits."""
    for kind in LISTS:
        with suppress(MstoreError):
            rows = decode_list(_named(kind, data), data, "input")
            again = encode_list(kind, rows)[1]
            assert decode_list(_named(kind, again), again, "input") == rows


def _named(kind: str, data: bytes) -> Named:
    count, first = 1, ""
    with suppress(
        msgspec.MsgspecError, ValueError, RecursionError, TypeError, LookupError, AttributeError
    ):
        _, rows = msgspec.msgpack.decode(data)
        count, key = len(rows), rows[0][0]
        key = key if isinstance(key, bytes) else key.encode(errors="surrogatepass")
        first = (key + rows[0][1] if kind == "notes" else key).hex()
    return Named(kind, str(ListId.of(data)), first, count, max(1, len(data)), 1)


def seeds() -> Iterable[bytes]:
    move = RemoteMove(None, A, "push", 5, 1)
    packs = [
        PackRow(A, 1 << 20, PackState.LIVE, 0, 2, 1, B, 0, HEADER_BYTES + 2 * ENTRY.size),
        PackRow(B, 9, PackState.DELETED, 7, 0, 0, bytes(32), 0, 0),
    ]
    refs = [RefRow("a/b", "branch", A, (move,)), RefRow("v1", "tag", None, (move, move))]
    snapshots = [SnapshotRow(A, B, is_whole=True), SnapshotRow(B, B, is_whole=False)]
    for kind, rows in (
        ("refs", refs),
        ("snapshots", snapshots),
        ("packs", packs),
        ("notes", [NoteRow(A, B, C)]),
        ("statistics", [StatisticsRow(A, 3, B, 512)]),
    ):
        yield encode_list(kind, rows)[1]
