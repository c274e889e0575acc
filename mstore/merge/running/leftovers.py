"""Leftovers: what an interrupted merge had finished, so that the next one need not do it again.

Beside each sealed pack in tmp/ lies a receipt, NAME.receipt: which chunks the pack was written
for, by memo key, and their rows.

    0    16   "mstore receipt 1"
    16   32   BLAKE3 of the rest
    48   ...  MessagePack [[key, value, expert bytes], ...]

Nothing here is believed: a receipt must match its hash, and every block of a pack its id, before
the pack is used; a delta is decoded with the block that it is a difference to, as it is stored now.
A pack is looked at only when a chunk that the merge needs is in its receipt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.packs import NO_BASE, PAGE, Kind, SealedPack, open_pack, read_table
from mstore.blocks.reader import decoded, located, verify
from mstore.errors import MstoreError
from mstore.ids import BlockId
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.slices import Result
from mstore.store.catalog import Catalog
from mstore.store.leases import PACK, RECEIPT

_MAGIC: Final = b"mstore receipt 1"
_HASH_END: Final = len(_MAGIC) + 32
_MAX_RECEIPT: Final = 1 << 28
_STORE: Final = struct.Struct("<16x16s")
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, int]]).decode


def write_receipt(pack: SealedPack, results: Sequence[Result]) -> None:
    """Say beside a sealed pack what it was written for.  Raises StorageFailed.

    Not synced: one that a power loss tears is one that is not believed.
    """
    rows = msgspec.msgpack.encode([(r.key, r.value, r.expert_bytes) for r in results])
    file = fs.NewFile(pack.path.with_suffix(RECEIPT))
    try:
        file.append(_MAGIC + blake3(rows).digest() + rows)
        file.close()
    except BaseException:
        file.abandon()
        raise


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that was computed before: its row, and what was read of experts for it."""

    row: Remembered
    expert_bytes: int
    pack: Path


class Leftovers:
    """The leftovers in one directory, for this store.  Belongs to one thread."""

    def __init__(self, directory: Path, catalog: Catalog) -> None:
        self._catalog = catalog
        self._found: dict[bytes, Found] = {}
        self._packs: dict[Path, SealedPack | None] = {}
        for path in sorted(directory.glob(f"*{RECEIPT}")):
            for key, value, expert_bytes in _rows(path):
                row = Remembered.decode(value)
                if row is not None:
                    self._found[key] = Found(row, expert_bytes, path.with_suffix(PACK))

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self, key: bytes) -> Found | None:
        """What there is for a memo key, in a pack that is sound."""
        found = self._found.get(key)
        return None if found is None or self.pack(found.pack) is None else found

    def pack(self, path: Path) -> SealedPack | None:
        """A pack of these, None where it is damaged; read whole when it is first asked for."""
        if path not in self._packs:
            try:
                self._packs[path] = _sound(path, self._catalog)
            except MstoreError:
                self._packs[path] = None
        return self._packs[path]


def _rows(path: Path) -> list[tuple[bytes, bytes, int]]:
    try:
        with fs.translated(path), os.fdopen(open_pack(path), "rb") as file:
            data = file.read(_MAX_RECEIPT + 1)
        if len(data) > _MAX_RECEIPT or not data.startswith(_MAGIC):
            return []
        if blake3(data[_HASH_END:]).digest() != data[len(_MAGIC) : _HASH_END]:
            return []
        return _decode(data[_HASH_END:])
    except (MstoreError, msgspec.MsgspecError):
        return []


def _sound(path: Path, catalog: Catalog) -> SealedPack | None:
    """The pack, if it is this store's, holds blocks only, and each is what its id says."""
    id, entries = read_table(path)
    with fs.translated(path), os.fdopen(open_pack(path), "rb") as file:
        if _STORE.unpack(file.read(_STORE.size))[0] != catalog.layout.uuid.bytes:
            return None
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
