"""Leftovers: finished work of an interrupted merge, for the next merge to reuse.

Beside each sealed pack in tmp/ lies a receipt, NAME.receipt: the chunks that the pack was written
for, by memo key, and their rows.

    0    16   "mstore receipt 1"
    16   32   BLAKE3 of the rest
    48   ...  MessagePack [[key, value, expert bytes], ...]

Nothing here is trusted: before a pack is used, its receipt must match its hash, and every block its
id; a delta is decoded with its base as currently stored. A pack is checked only if its receipt has
a chunk that the merge needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.packs import NO_BASE, PAGE, Kind, SealedPack, open_pack, read_footer
from mstore.blocks.reader import decoded, located, verify
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.slices import Result
from mstore.store.catalog import Catalog
from mstore.store.leases import PACK, RECEIPT
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId

_MAGIC: Final = b"mstore receipt 1"
_HASH_END: Final = len(_MAGIC) + 32
_MAX_RECEIPT: Final = 1 << 28
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, int]]).decode


def write_receipt(pack: SealedPack, results: Sequence[Result]) -> None:
    """Write the receipt of a sealed pack. Raises StorageFailed.

    Not synced: a receipt that a power loss tears does not match its hash and is ignored.
    """
    rows = msgspec.msgpack.encode([(r.key, r.value, r.expert_bytes) for r in results])
    file = fs.NewFile(pack.path.with_suffix(RECEIPT))
    try:
        file.append(_MAGIC + blake3(rows).digest() + rows)
        file.close()
    except BaseException:
        file.abandon()
        raise


class Found(msgspec.Struct, frozen=True):
    """A chunk that was computed before: its row, and how many expert bytes were read for it."""

    row: Remembered
    expert_bytes: int
    pack: Path


class Leftovers:
    """The leftovers in one directory, for this store. Belongs to one thread."""

    def __init__(self, directory: Path, catalog: Catalog) -> None:
        self._catalog = catalog
        self._found: dict[bytes, Found] = {}
        self._packs: dict[Path, SealedPack | None] = {}
        with fs.translated(directory):
            names = [name for name in fs.listed(directory) if name.endswith(RECEIPT)]
        for path in map(directory.joinpath, names):
            for key, value, expert_bytes in _rows(path):
                row = Remembered.decode(value)
                if row is not None:
                    self._found[key] = Found(row, expert_bytes, path.with_suffix(PACK))

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self, key: bytes) -> Found | None:
        """Return the entry of a memo key if its pack is sound, else None."""
        found = self._found.get(key)
        return None if found is None or self.pack(found.pack) is None else found

    def pack(self, path: Path) -> SealedPack | None:
        """Return one of these packs, None if it is damaged; reads it whole on first use."""
        if path not in self._packs:
            try:
                self._packs[path] = _sound(path, self._catalog)
            except (Corrupt, Incompatible):
                self._packs[path] = None
        return self._packs[path]


def _rows(path: Path) -> list[tuple[bytes, bytes, int]]:
    try:
        with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
            data = file.read(_MAX_RECEIPT + 1)
        if len(data) > _MAX_RECEIPT or not data.startswith(_MAGIC):
            return []
        if blake3(data[_HASH_END:]).digest() != data[len(_MAGIC) : _HASH_END]:
            return []
        return _decode(data[_HASH_END:])
    except (Corrupt, msgspec.MsgspecError):
        return []


def _sound(path: Path, catalog: Catalog) -> SealedPack | None:
    """Return the pack if it holds only blocks, and each matches its id."""
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
