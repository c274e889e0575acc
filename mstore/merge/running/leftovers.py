"""Leftovers: the finished work of an interrupted merge.

Beside each pack in tmp/ lies a receipt, NAME.receipt: the chunks that the pack was written for, by
memo key, and their rows.

    0    16   "mstore receipt 1"
    16   32   BLAKE3 of the rest
    48   ...  MessagePack [[key, value, expert bytes], ...]

Of a pack that a worker put at a remote, NAME.away says in its place which that is: the same, with
"mstore away 1   " and MessagePack [remote's UUID, pack, bytes, table].

Nothing here is trusted: a receipt must match its hash, and of a pack here every block its id; a
delta is decoded with its base as currently stored.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.packs import NO_BASE, PAGE, Kind, SealedPack, SentPack, open_pack, read_footer
from mstore.blocks.reader import decoded, located, verify
from mstore.merge.running.slices import Result
from mstore.store.catalog import Catalog
from mstore.store.leases import AWAY, RECEIPT
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId, PackId

_RECEIPT_MAGIC: Final = b"mstore receipt 1"
_AWAY_MAGIC: Final = b"mstore away 1   "
_HASH_END: Final = 16 + 32
_MOST_BYTES: Final = 1 << 28
_rows = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, int]]).decode
_away = msgspec.msgpack.Decoder(tuple[str, bytes, int, bytes]).decode


def write_receipt(path: Path, results: Sequence[Result]) -> None:
    """Write the receipt of a pack, or of what stands for it, beside it. Raises StorageFailed.

    Not synced: a receipt that a power loss tears does not match its hash and is ignored.
    """
    _write(
        path.with_suffix(RECEIPT),
        _RECEIPT_MAGIC,
        [(one.key, one.value, one.expert_bytes) for one in results],
    )


def rows_of(receipt: Path) -> list[tuple[bytes, bytes, int]]:
    """Return memo key, row and expert bytes of each chunk of a receipt; none if it is damaged."""
    data = _read(receipt, _RECEIPT_MAGIC)
    try:
        return [] if data is None else _rows(data)
    except msgspec.MsgspecError:
        return []


def write_away(path: Path, remote: str, pack: SentPack) -> None:
    """Write what stands for a pack at a remote, whose UUID that is. Raises StorageFailed."""
    _write(path.with_suffix(AWAY), _AWAY_MAGIC, (remote, bytes(pack.id), pack.size, pack.table))


def pack_away(receipt: Path, remote: str) -> SentPack | None:
    """Return the pack at this remote that a receipt is of; None if it is of another, or damaged."""
    path = receipt.with_suffix(AWAY)
    data = _read(path, _AWAY_MAGIC) if fs.is_there(path) else None
    try:
        uuid, pack, size, table = ("", b"", 0, b"") if data is None else _away(data)
        return SentPack(PackId(pack), size, table) if uuid == remote else None
    except (msgspec.MsgspecError, ValueError):
        return None


def _write(path: Path, magic: bytes, value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    file = fs.NewFile(path)
    try:
        file.append(magic + blake3(data).digest() + data)
        file.close()
    except BaseException:
        file.abandon()
        raise


def _read(path: Path, magic: bytes) -> bytes | None:
    try:
        with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except Corrupt:
        return None
    if len(data) > _MOST_BYTES or not data.startswith(magic):
        return None
    is_sound = blake3(data[_HASH_END:]).digest() == data[len(magic) : _HASH_END]
    return data[_HASH_END:] if is_sound else None


def sound_pack(path: Path, catalog: Catalog) -> SealedPack | None:
    """Return the pack if it holds only blocks, each of which matches its id, or None."""
    try:
        return _read_whole(path, catalog)
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
