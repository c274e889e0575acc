"""Copying a store: its rows as of one commit, its packs, and what it lacks.

The copying process holds a lease, as a writer does: a pack that garbage collection condemns
meanwhile keeps its file until the lease ends. Where no lease can be taken (another user's store, a
full disk), a pack may be removed while it is copied; then the copy starts over with the current
rows.

Copies are proved: a footer by its name, a payload by its id. The proof reads back the copy, so it
also covers errors on the way there. It covers the payloads that rows lead to; payloads that no row
names, which may have been given up as damaged long ago, are copied unchecked. Crash promise: a copy
named `<name>.pack` is complete and synced; `<name>.part` is garbage.

A store that lost payloads and dropped their rows (`fsck --repair` does that where no good copy is
left) has no damaged pack, and neither has a copy of it. Only a walk from the names down to the
blocks tells what is missing; an older copy may still have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location, Row, base_of, moved, pack_number
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs, is_whole
from mstore.blocks.packs import Kind, PackGone, SealedPack
from mstore.blocks.reader import BlockReader, located
from mstore.blocks.schema import PACK_IDS, PACKS, TABLES, NamedPack
from mstore.blocks.tables import Table
from mstore.store import generation, listing
from mstore.store.catalog import Catalog, elsewhere_of
from mstore.store.config import Config
from mstore.store.layout import Layout
from mstore.store.leases import Lease
from mstore.terms.errors import (
    BadRequest,
    Corrupt,
    NotFound,
    StorageFailed,
    Unavailable,
    Unreadable,
)
from mstore.terms.ids import BlockId, PackId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, ProgressCounter
from mstore.upkeep.backup import remotes
from mstore.upkeep.check.findings import Findings
from mstore.upkeep.check.graph import Graph
from mstore.upkeep.check.packs import Payload, checked, in_pack_order, payload


def require_sound(catalog: Catalog) -> None:
    """Raise Corrupt if the index is outdated: a copy would make the loss permanent."""
    why = generation.lasting_doubt(catalog.layout, catalog.index, catalog.packs)
    if why is not None:
        raise Corrupt(why, where=str(catalog.layout.index), hint=call("reindex"))


def require_outside(layout: Layout, target: Path) -> None:
    """Raise BadRequest if `target` is the store, or lies in it."""
    own, other = os.path.realpath(layout.root), os.path.realpath(target)
    if other == own or other.startswith(own + os.sep):
        raise BadRequest(
            "this is the store itself" if other == own else "this lies in the store itself",
            where=str(target),
            hint="name a directory on another disk",
        )


@contextmanager
def held(catalog: Catalog, purpose: str) -> Iterator[None]:
    """Protect the packs that the index names from now on, if this user can take a lease."""
    lease = None
    with suppress(StorageFailed):
        lease = Lease(catalog.layout, catalog.index, purpose)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def copy_rows(source: Index, target: Index) -> list[NamedPack]:
    """Put all rows but those of packs into an empty index; return the packs.  Raises Corrupt."""
    source.env.refresh()
    with source.env.read() as reading, target.env.write() as writing:
        for table in TABLES:
            if not (table.is_own or table in (PACKS, PACK_IDS)):
                with writing.cursor(db=target.db(table.name)) as cursor:
                    cursor.putmulti(_checked(source, reading, table), append=True)
        return list(source.named_packs(reading))


def _checked(
    index: Index, transaction: IndexTransaction, table: Table[Any, Any]
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=index.db(table.name)) as cursor:
        for key, row in cursor:
            if table.has_check:
                table.item(key, row)
            yield key, row


_KEPT = "missing from the store; this backup keeps its copy"


def missing_in(catalog: Catalog) -> Findings:
    """Find what is missing on the way down from the names, and missing bases of deltas."""
    findings = Findings()
    Graph(catalog, findings).run(with_mirror=False)
    index = catalog.index
    for batch in index.block_batches():
        named = (base_of(row) for _, row in batch)
        bases = sorted({base for base in named if base is not None})
        with index.env.read() as transaction:
            rows = index.readable_rows(transaction, bases) if bases else []
        for base, row in zip(bases, rows, strict=True):
            if row is None:
                findings.tell_row(Kind.BLOCK, base, None, "the base of other blocks: missing")
    return findings


def kept_rows(catalog: Catalog, old: Index, findings: Findings) -> frozenset[Key]:
    """Copy missing rows from the old index to the new one; return their keys.

    Adds everything that the store lacks to the findings, restored or not. A restored record may
    need more, so this repeats until nothing more is restored.
    """
    back: set[Key] = set()
    while True:
        lacking = missing_in(catalog)
        wanted = {key for key, row in lacking.broken.items() if row is None}
        wanted |= {(Kind.SNAPSHOT, id) for id in lacking.incomplete}
        more = set(_restored(catalog.index, old, wanted - back))
        _list_again(catalog, (SnapshotId(id) for kind, id in more if kind == Kind.SNAPSHOT))
        back |= more
        if not more:
            break
    for kind, id in sorted(back):
        findings.tell_row(kind, id, None, _KEPT)
    findings.take(lacking)
    return frozenset(back)


def _restored(new: Index, old: Index, wanted: Iterable[Key]) -> Iterator[Key]:
    """Restore the rows in packs that the new index names as well; yield their keys."""
    with old.env.read() as reading, new.env.write() as writing:
        packs = old.named_packs(reading)
        numbers = {pack.number: new.pack_number(writing, pack.id) for pack in packs}
        for key in sorted(wanted):
            row = old.row(reading, key)
            number = None if row is None else numbers.get(pack_number(row))
            if row is None or number is None or new.row(writing, key) is not None:
                continue
            new.put_row(writing, key, moved(row, number))
            yield key


def _list_again(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> None:
    for id in snapshots:
        with suppress(NotFound, Corrupt):
            record = catalog.snapshot(id)
            with catalog.index.env.write() as transaction:
                listing.insert(catalog.index, transaction, record)


R = TypeVar("R")
Tick = Callable[[int], None]
"""Called with the number of bytes just done."""


PART = ".part"
_ATTEMPTS = 20
_READ_BYTES = 8 << 20


def copy(packs: Packs, pack: PackId, target: Path, tick: Tick) -> None:
    """Copy a pack durably; rename the copy to `target` when it is complete."""
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


class Proof:
    """Reads, decodes and hashes the payloads in some packs that rows of an index lead to.

    They are copies of packs in `source`. If they cannot be read (`Unreadable`), it is not the
    store's disk that fails: that ends the work, like every error but damage. A difference to what
    is only at a remote is compared with the source: a copy asks no remote.
    """

    def __init__(
        self, index: Index, files: Packs, source: Packs, block_size: int, findings: Findings
    ) -> None:
        self._index = index
        self._files = files
        self._source = source
        self._reader = BlockReader(files, block_size)
        self._findings = findings

    def run(self, packs: Sequence[NamedPack], tick: Tick, *, threads: int) -> None:
        """Prove these packs; add faults to the findings. Raises Unreadable, StorageFailed."""

        def groups() -> Iterator[list[Payload]]:
            for pack in packs:
                yield from in_pack_order(self._payloads(pack))
                tick(pack.size)

        for _, damaged in checked(groups(), self._read, threads):
            for one, error in damaged:
                if isinstance(error, Unreadable):
                    raise error
                self._findings.tell_row(one.kind, one.id, one.row, error.what)

    def _read(self, one: Payload) -> None:
        if self._leans(one.row):
            self._compare(one.location)
        else:
            payload(self._index, self._reader, (one.kind, one.id), one.row)

    def _leans(self, row: Row) -> bool:
        """Return whether it is a difference to a block that is only at a remote."""
        base = base_of(row)
        if base is None or self._index.elsewhere is None:
            return False
        with self._index.env.read() as transaction:
            under = self._index.base(transaction, BlockId(base))
            return under is not None and self._index.pack_number(transaction, under.pack) is None

    def _compare(self, at: Location) -> None:
        copied = bytes(self._files.read(at.pack, at.offset, at.stored_length))
        # The source may have collected the pack since.
        with suppress(PackGone):
            if self._source.read(at.pack, at.offset, at.stored_length) != copied:
                raise Corrupt("another payload than the store's", where=self._files.where(at.pack))

    def _payloads(self, pack: NamedPack) -> list[Payload]:
        """Return the payloads that rows have in this pack."""
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
                    found.append(Payload(kind, entry.id, location, row))
                else:
                    what = "index and pack footer do not agree"
                    self._findings.tell_row(kind, entry.id, row, what)
        return found


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
    """One attempt to copy a store, by the rows of one commit.

    lazy: whether the copy may lean on the remotes that the store leans on.
    """

    def __init__(
        self,
        catalog: Catalog,
        layout: Layout,
        threads: int,
        progress: ProgressCallback | None,
        *,
        lazy: bool,
    ) -> None:
        self._catalog = catalog
        self._config = catalog.config
        self._lazy = lazy
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
            named = copy_rows(self._catalog.index, index)
            with index.env.write() as transaction:
                index.name_packs(transaction, named)
            if self._lazy:
                self._lean(index)
            yield index, named

    @property
    def _kept(self) -> Path:
        """Where the copy of what is kept of remotes lies, until it is put in place."""
        return self._layout.incoming / "remotes"

    def _lean(self, index: Index) -> None:
        """Let the new index lean on the remotes of the source.

        Later than its rows: a fetch has settings and tables in place before its commit.
        """
        self._config = Config.load(self._catalog.layout)
        fs.remove_tree(self._kept)
        remotes.copy_kept(self._catalog.layout, self._config, self._kept, self._layout.remotes)
        index.elsewhere = elsewhere_of(self._kept, self._config)

    def _opened(self, staged: Mapping[PackId, Path]) -> PackFiles:
        """Open the packs of the copy, and those that are not in place yet."""
        return PackFiles(self._layout.packs, staged=staged)

    def _copy(self, phase: str, missing: Sequence[NamedPack]) -> dict[PackId, Path]:
        """Return where copies of packs lie in tmp/incoming/, whole."""
        tick = ProgressCounter(phase, sum(pack.size for pack in missing), self._progress)
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

    def _lose(self, pack: PackId, error: Corrupt) -> None:
        """Go on without a pack that the source has lost."""
        self._findings.tell_pack(pack, error.what)

    def _prove(self, index: Index, copies: Sequence[NamedPack], files: Packs) -> None:
        tick = ProgressCounter("verify", sum(pack.size for pack in copies), self._progress)
        source = self._catalog.packs
        proof = Proof(index, files, source, self._layout.block_size, self._findings)
        proof.run(copies, tick, threads=self._threads)
