"""Copying packs, and proving the copies: a footer by its name, each payload by its id.

The proof reads back the copy, so it also covers errors on the way there. It covers the payloads
that rows lead to; payloads that no row names, which may have been given up as damaged long ago, are
copied unchecked. Crash promise: a copy named `<name>.pack` is complete and synced; `<name>.part` is
garbage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mstore import fs
from mstore.ahead import in_order
from mstore.backup.ticks import Tick
from mstore.blocks.index import Index
from mstore.blocks.location import Location, Row, pack_number
from mstore.blocks.packs import NO_BASE, Entry, Kind, PackFiles, open_pack, read_footer
from mstore.blocks.reader import BlockReader
from mstore.blocks.schema import NamedPack
from mstore.check.findings import Findings, typed
from mstore.errors import Corrupt, Unreadable
from mstore.ids import BlockId, Buffer, PackId

PART = ".part"
_READ_BYTES = 8 << 20
_GROUP_BYTES = 8 << 20
_STORE_UUID = slice(16, 32)


def copy(source: Path, target: Path, tick: Tick, *, store: bytes | None = None) -> None:
    """Copy a pack durably, except for its name; rename it to `target` when complete.

    store: the UUID to write into the copy's header. Raises Corrupt if the source has lost the pack
    or a part of it, StorageFailed.
    """
    descriptor = open_pack(source)
    try:
        part = target.with_suffix(PART)
        fs.unlink(part, missing_ok=True)
        file = fs.NewFile(part)
        try:
            while data := _read(descriptor, file.size, source):
                if store is not None and not file.size:
                    data = data[: _STORE_UUID.start] + store + data[_STORE_UUID.stop :]
                start = file.append(data)
                file.begin_writing_back(start, len(data))
                tick(len(data))
            file.protect()
            file.sync()
            file.close()
            fs.rename(part, target)
        except BaseException:
            file.abandon()
            raise
    finally:
        os.close(descriptor)


def _read(descriptor: int, offset: int, path: Path) -> bytes:
    with fs.reading(path):
        return os.pread(descriptor, _READ_BYTES, offset)


def is_whole(path: Path, pack: NamedPack) -> bool:
    """Return whether a complete pack of this name is there, by its size, header and footer.

    Raises StorageFailed.
    """
    try:
        footer = read_footer(path)
    except Corrupt:
        return False
    return (footer.size, footer.id) == (pack.size, pack.id)


class PlacedPacks(PackFiles):
    """Packs to read, some of which lie outside `directory`."""

    def __init__(self, directory: Path, places: Mapping[PackId, Path]) -> None:
        super().__init__(directory)
        self._places = places

    def place(self, pack: PackId) -> str:
        """Return where this pack lies."""
        place = self._places.get(pack)
        return super().place(pack) if place is None else str(place)


_Payload = tuple[Kind, bytes, Location, Row]
_Failure = tuple[Kind, bytes, Row, Corrupt]


class Proof:
    """Reads, decodes and hashes the payloads in some packs that rows of an index lead to.

    They are copies: a disk that has lost them (`Unreadable`) is not that of the store, and ends the
    work as all errors do but damage.
    """

    def __init__(
        self, index: Index, files: PackFiles, store: bytes, block_size: int, findings: Findings
    ) -> None:
        self._index = index
        self._files = files
        self._reader = BlockReader(files, block_size)
        self._store = store
        self._findings = findings

    def run(self, packs: Sequence[NamedPack], tick: Tick, *, threads: int) -> None:
        """Prove these packs; add faults to the findings. Raises Unreadable, StorageFailed."""

        def groups() -> Iterator[list[_Payload]]:
            for pack in packs:
                yield from self._groups(pack)
                tick(pack.size)

        with ThreadPoolExecutor(threads, "proof") as pool:
            proving = in_order(
                lambda group: pool.submit(self._failures, group), groups(), ahead=2 * threads
            )
            for _, failures in proving:
                for kind, id, row, error in failures:
                    self._findings.tell_row(kind, id, row, error.what)

    def _groups(self, pack: NamedPack) -> Iterator[list[_Payload]]:
        group: list[_Payload] = []
        size = 0
        for payload in self._payloads(pack):
            group.append(payload)
            size += payload[2].stored_length
            if size > _GROUP_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _payloads(self, pack: NamedPack) -> list[_Payload]:
        """Return the payloads that rows have in this pack, in pack order."""
        path = self._files.path(pack.id)
        try:
            footer = read_footer(path)
        except Unreadable:
            raise
        except Corrupt as error:
            self._findings.tell_pack(pack.id, error.what)
            return []
        if (footer.id, footer.size, footer.store) != (pack.id, pack.size, self._store):
            self._findings.tell_pack(pack.id, f"not {pack.size} bytes long, or another pack")
            return []
        found = []
        index = self._index
        with index.env.read() as transaction:
            for entry in footer.entries:
                try:
                    kind = Kind(entry.kind)
                except ValueError:
                    # Nothing that this version reads leads there.
                    continue
                row = index.row(transaction, (kind, entry.id))
                if row is None or pack_number(row) != pack.number:
                    continue
                location = index.location(transaction, row)
                if _told(entry) == _told(location):
                    found.append((kind, entry.id, location, row))
                else:
                    what = "index and pack footer do not agree"
                    self._findings.tell_row(kind, entry.id, row, what)
        found.sort(key=lambda payload: payload[2].offset)
        return found

    def _failures(self, group: list[_Payload]) -> list[_Failure]:
        failures = []
        for kind, id, location, row in group:
            try:
                self._check(kind, id, location)
            except Unreadable:
                raise
            except Corrupt as error:
                failures.append((kind, id, row, error))
        return failures

    def _check(self, kind: Kind, id: bytes, location: Location) -> None:
        if kind != Kind.BLOCK:
            self._reader.record(typed(kind, id), location)
            return
        base = None if location.base == NO_BASE else self._base(BlockId(location.base))
        self._reader.block(BlockId(id), location, base)

    def _base(self, block: BlockId) -> Buffer:
        with self._index.env.read() as transaction:
            location = self._index.block(transaction, block)
        if location is None or location.base != NO_BASE:
            raise Corrupt(f"its base {block.short} is missing")
        return self._reader.block(block, location)


def _told(place: Entry | Location) -> tuple[object, ...]:
    return (
        place.offset,
        place.stored_length,
        place.raw_length,
        place.codec,
        place.width,
        place.base,
    )
