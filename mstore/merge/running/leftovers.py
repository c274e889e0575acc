"""Leftovers: the finished work of an interrupted merge.

Beside each pack in tmp/ lies a receipt, NAME.receipt: the chunks that the pack was written for, by
memo key, and their rows.

    0    16   "mstore receipt 1"
    16   32   BLAKE3 of the rest
    48   ...  MessagePack [[[key, value, expert bytes], ...], nil]

Where a worker has put the pack at a remote, none lies here, and in the place of nil stands which it
is: [remote's UUID, pack, bytes, table].

Nothing here is trusted: a receipt must match its hash, and of a pack here every block its id; a
delta is decoded with its base as currently stored.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.packs import NO_BASE, PAGE, Kind, SealedPack, SentPack, open_pack, read_footer
from mstore.blocks.reader import decoded, located, verify
from mstore.merge.running.slices import Result
from mstore.store.catalog import Catalog
from mstore.store.leases import RECEIPT
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId, PackId

_MAGIC: Final = b"mstore receipt 1"
_HASH_END: Final = 16 + 32
_MOST_BYTES: Final = 1 << 28
_Rows = list[tuple[bytes, bytes, int]]
_Away = tuple[str, bytes, int, bytes]
_decoded = msgspec.msgpack.Decoder(tuple[_Rows, _Away | None]).decode


def write_receipt(
    path: Path, results: Sequence[Result], away: tuple[str, SentPack] | None = None
) -> None:
    """Write the receipt of a pack beside it. Raises StorageFailed.

    away: the pack is at a remote, whose UUID that is, and not at `path`.

    Not synced: a receipt that a power loss tears does not match its hash and is ignored.
    """
    rows = [(one.key, one.value, one.expert_bytes) for one in results]
    there = None
    if away is not None:
        remote, pack = away
        there = remote, bytes(pack.id), pack.size, pack.table
    data = msgspec.msgpack.encode((rows, there))
    file = fs.NewFile(path.with_suffix(RECEIPT))
    try:
        file.append(_MAGIC + blake3(data).digest() + data)
        file.close()
    except BaseException:
        file.abandon()
        raise


def rows_of(receipt: Path) -> _Rows:
    """Return memo key, row and expert bytes of each chunk of a receipt; none if it is damaged."""
    return _read(receipt)[0]


def pack_away(receipt: Path, remote: str) -> SentPack | None:
    """Return the pack at this remote that a receipt is of; None if it is of another, or damaged."""
    _, there = _read(receipt)
    if there is None or there[0] != remote:
        return None
    _, pack, size, table = there
    try:
        return SentPack(PackId(pack), size, table)
    except ValueError:
        return None


def _read(path: Path) -> tuple[_Rows, _Away | None]:
    """Return what a receipt says; nothing if it is damaged."""
    try:
        with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if (
            len(data) <= _MOST_BYTES
            and data.startswith(_MAGIC)
            and blake3(data[_HASH_END:]).digest() == data[len(_MAGIC) : _HASH_END]
        ):
            return _decoded(data[_HASH_END:])
    except (Corrupt, msgspec.MsgspecError):
        pass
    return [], None


def sound_pack(path: Path, catalog: Catalog) -> SealedPack | None:
    """Return the pack if it is there, and holds only blocks, each of which matches its id."""
    try:
        return _read_whole(path, catalog) if fs.is_there(path) else None
    except (Corrupt, Incompatible):
        return None


def _read_whole(path: Path, catalog: Catalog) -> SealedPack | None:
    footer = read_footer(path)
    id, entries = footer.id, footer.entries
    with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
        for entry in sorted(entries, key=lambda entry: entry.offset):
            file.seek(entry.offset)
            longest = max(entry.raw_length, entry.stored_length)
            if entry.kind != Kind.BLOCK or longest > catalog.block_size:
                return None
            base = None if entry.base == NO_BASE else catalog.read_block(BlockId(entry.base))
            payload = file.read(entry.stored_length)
            if len(payload) != entry.stored_length:
                return None
            block, at = BlockId(entry.id), located(id, entry)
            verify(block, at, decoded(block, at, payload, base), base)
        size = file.seek(0, 2)
    return SealedPack(id, path, size, entries) if size % PAGE == 0 else None
