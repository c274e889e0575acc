"""Copying the packs of a store, and proving the copies: a footer by its name, a payload by its id.

The proof reads back the copy, so it also covers errors on the way there. It covers the payloads
that rows lead to; payloads that no row names, which may have been given up as damaged long ago, are
copied unchecked. Crash promise: a copy named `<name>.pack` is complete and synced; `<name>.part` is
garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.location import Location, Row, pack_number
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs, is_whole
from mstore.blocks.packs import Kind, SealedPack
from mstore.blocks.reader import BlockReader, located
from mstore.blocks.schema import NamedPack
from mstore.store.ahead import in_groups, in_order
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.terms.errors import Corrupt, Unavailable, Unreadable
from mstore.terms.ids import PackId
from mstore.terms.report import Progress, ProgressCallback
from mstore.upkeep.backup import source
from mstore.upkeep.check.findings import Findings
from mstore.upkeep.check.packs import payload

R = TypeVar("R")
Tick = Callable[[int], None]
"""Called with the number of bytes just done."""


PART = ".part"
_ATTEMPTS = 20
_READ_BYTES = 8 << 20
_GROUP_BYTES = 8 << 20


def copy(packs: Packs, pack: PackId, target: Path, tick: Tick) -> None:
    """Copy a pack durably, except for its name; rename it to `target` when complete.

    Raises Corrupt if the source has lost the pack or a part of it, StorageFailed.
    """
    part = target.with_suffix(PART)
    fs.unlink(part, missing_ok=True)
    file = fs.NewFile(part)
    try:
        for data in packs.read_each(pack, ((at, _READ_BYTES) for at in count(0, _READ_BYTES))):
            if data:
                start = file.append(data)
                file.begin_writing_back(start, len(data))
                tick(len(data))
            if len(data) < _READ_BYTES:
                break
        file.protect()
        file.sync()
        file.close()
        fs.rename(part, target)
    except BaseException:
        file.abandon()
        raise


def staged(directory: Path, pack: PackId) -> Path:
    """Return where a copy lies until it is put."""
    return directory / f"{pack.hex()}.pack"


def put(target: Packs, copies: Mapping[PackId, Path]) -> None:
    """Keep these copies."""
    target.put([SealedPack(pack, path, 0, ()) for pack, path in sorted(copies.items())])


_Payload = tuple[Kind, bytes, Location, Row]
_Failure = tuple[Kind, bytes, Row, Corrupt]


class Proof:
    """Reads, decodes and hashes the payloads in some packs that rows of an index lead to.

    They are copies. If they cannot be read (`Unreadable`), it is not the store's disk that fails:
    that ends the work, like every error but damage.
    """

    def __init__(self, index: Index, files: Packs, block_size: int, findings: Findings) -> None:
        self._index = index
        self._files = files
        self._reader = BlockReader(files, block_size)
        self._findings = findings

    def run(self, packs: Sequence[NamedPack], tick: Tick, *, threads: int) -> None:
        """Prove these packs; add faults to the findings. Raises Unreadable, StorageFailed."""

        def groups() -> Iterator[list[_Payload]]:
            for pack in packs:
                payloads = self._payloads(pack)
                yield from in_groups(payloads, lambda one: one[2].stored_length, _GROUP_BYTES)
                tick(pack.size)

        with ThreadPoolExecutor(threads, "proof") as pool:
            proving = in_order(
                lambda group: pool.submit(self._failures, group), groups(), ahead=2 * threads
            )
            for _, failures in proving:
                for kind, id, row, error in failures:
                    self._findings.tell_row(kind, id, row, error.what)

    def _payloads(self, pack: NamedPack) -> list[_Payload]:
        """Return the payloads that rows have in this pack, in pack order."""
        try:
            footer = self._files.table(pack.id)
        except Unreadable:
            raise
        except Corrupt as error:
            self._findings.tell_pack(pack.id, error.what)
            return []
        if footer.size != pack.size:
            self._findings.tell_pack(pack.id, f"not {pack.size} bytes long")
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
                if located(pack.id, entry) == location:
                    found.append((kind, entry.id, location, row))
                else:
                    what = "index and pack footer do not agree"
                    self._findings.tell_row(kind, entry.id, row, what)
        found.sort(key=lambda payload: payload[2].offset)
        return found

    def _failures(self, group: list[_Payload]) -> list[_Failure]:
        failures = []
        for kind, id, _, row in group:
            try:
                payload(self._index, self._reader, (kind, id), row)
            except Unreadable:
                raise
            except Corrupt as error:
                failures.append((kind, id, row, error))
        return failures


class Moved(Exception):
    """A pack was collected while it was copied: no row names it any more."""


def attempted(catalog: Catalog, attempt: Callable[[], R]) -> R:
    """Try again while packs are collected meanwhile.  Raises Unavailable after many attempts."""
    for _ in range(_ATTEMPTS):
        with suppress(Moved):
            return attempt()
    raise Unavailable(
        "gc removes packs faster than they can be copied, and this user cannot hold a lease",
        where=str(catalog.layout.root),
        hint="run the command again when no gc is running",
    )


class Attempt:
    """One attempt to copy a store, by the rows of one commit."""

    def __init__(
        self, catalog: Catalog, layout: Layout, threads: int, progress: ProgressCallback | None
    ) -> None:
        self._catalog = catalog
        self._layout = layout
        self._threads = threads
        self._progress = progress
        self._findings = Findings()

    @contextmanager
    def _new_index(self, place: Path) -> Iterator[tuple[Index, list[NamedPack]]]:
        """Yield a new index with the rows of the source, and the packs that these name."""
        fs.remove_tree(place)
        fs.make_directory(place)
        with closing(Index(place, create=True)) as index:
            named = source.copy_rows(self._catalog.index, index)
            with index.env.write() as transaction:
                index.name_packs(transaction, named)
            yield index, named

    def _opened(self, staged: Mapping[PackId, Path]) -> PackFiles:
        """Open the packs of the copy, and those that are not in place yet."""
        return PackFiles(self._layout.packs, elsewhere=staged)

    def _copy(self, phase: str, missing: Sequence[NamedPack]) -> dict[PackId, Path]:
        """Return where copies of packs lie in tmp/incoming/, whole."""
        tick = self._tick(phase, sum(pack.size for pack in missing))
        found = {}
        for pack in missing:
            path = staged(self._layout.incoming, pack.id)
            if is_whole(self._opened({pack.id: path}), pack.id, pack.size):
                tick(pack.size)
                found[pack.id] = path
                continue
            try:
                copy(self._catalog.places[pack.place], pack.id, path, tick)
            except Corrupt as error:
                index = self._catalog.index
                index.env.refresh()
                with index.env.read() as transaction:
                    if index.pack_number(transaction, pack.id) is None:
                        raise Moved from error
                self._lose(pack.id, error)
            else:
                found[pack.id] = path
        return found

    def _tick(self, phase: str, total: int) -> Tick:
        """Return what adds up the bytes done of a phase that expects so many, and reports them."""
        done = 0

        def tick(more: int) -> None:
            nonlocal done
            done += more
            if self._progress is not None:
                self._progress(Progress(phase, done, max(total, done)))

        return tick

    def _lose(self, pack: PackId, error: Corrupt) -> None:
        """Go on without a pack that the source has lost."""
        self._findings.tell_pack(pack, error.what)

    def _prove(self, index: Index, copies: Sequence[NamedPack], files: Packs) -> None:
        tick = self._tick("verify", sum(pack.size for pack in copies))
        proof = Proof(index, files, self._layout.block_size, self._findings)
        proof.run(copies, tick, threads=self._threads)
