"""Backups and clones: a directory brought to what the store is now, and a new store like it.

    lock of the destination -> lease in the source -> rows of one commit into a new index
    -> packs that the destination has not: copied to tmp/incoming/, synced, proved
    -> everything that names need is in the new index, or comes from the old one, or is reported
    -> locks of the destination: pack list -> packs get their names -> of a lazy copy, what is kept
       of remotes, and their settings -> the new index takes the place of the old one
    -> mirror, settings, format -> packs that the source has no more are removed

Before the new index is in place a crash leaves the state of the last backup, and in tmp/ what was
copied whole, from which the next run goes on.  After it, the new state.

A damaged payload of the source stops nothing: its disk may be failing, and what is whole is saved.
The report names what is damaged and what cannot be read because of it. Nothing is removed then: an
older pack of the destination may have the good copy. What the source has lost, rows included, the
backup keeps. Only damage is reported so (`terms.errors`). Any other error ends the run, and the
backup stays as it was.

A clone gets a UUID of its own, because from now on it has a history of its own: a backup of one is
not a backup of the other. Packs are no hard links: two names of one file share its damage. Unlike a
backup, a clone is complete or absent: damage in the source aborts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path

from msgspec.structs import replace

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.location import pack_number
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import HERE, Packs, Places, is_whole
from mstore.blocks.packs import PackGone
from mstore.blocks.schema import BACKUP, PRUNED, Condemned, NamedPack
from mstore.fs.rights import Sharing
from mstore.store import generation, leases, mirror, pack_list, refs, unnamed_packs
from mstore.store import layout as layouts
from mstore.store.catalog import Catalog
from mstore.store.leaning import Leaning, all_leaning, require_here
from mstore.store.pack_list import PackList
from mstore.store.refs import refs_in
from mstore.terms.errors import BadRequest, Conflict, Corrupt, StorageFailed
from mstore.terms.ids import PackId, SnapshotId
from mstore.terms.phrases import Call, Phrase, as_phrase, call, phrase
from mstore.terms.report import ProgressCallback, Report
from mstore.upkeep.backup import copying
from mstore.upkeep.backup.copying import Attempt, attempted
from mstore.upkeep.backup.destination import Destination
from mstore.upkeep.check.findings import Affected, AffectedTensors, Problem


class BackupReport(Report, frozen=True):
    """The result of `backup`; if there are `problems`, nothing was removed."""

    path: str
    """the backup"""
    uuid: str
    """the store's UUID, which the backup shares"""
    generation: int
    """number of commits that the store had published: the state of the backup"""
    refs: int
    """number of branches and tags"""
    snapshots: int
    """snapshots in the backup"""
    packs: int
    """packs in the backup"""
    packs_copied: int
    """packs that the backup lacked"""
    bytes_copied: int
    """size of the copied packs"""
    packs_removed: tuple[str, ...]
    """packs that the store no longer has, removed from the backup"""
    freed_bytes: int
    """size of the removed packs"""
    waiting_bytes: int
    """size of packs that may still be read; a later backup removes them"""
    put_aside: tuple[str, ...]
    """packs that no index knows, now in the backup's lost+found/"""
    problems: tuple[Problem, ...]
    """what is damaged in the store; empty: nothing that was copied is damaged"""
    affected: tuple[Affected, ...]
    """files and tensors that the damage makes unreadable"""
    leans_on: tuple[Leaning, ...]
    """what the backup lacks, and reads at lazy remotes as the store does"""
    hint: Phrase | None
    """the next command if something is damaged; None: nothing is"""
    seconds: float
    """how long it took"""


def backup(
    catalog: Catalog,
    target: Path,
    *,
    threads: int,
    lazy: bool = False,
    progress: ProgressCallback | None = None,
) -> BackupReport:
    """Bring the backup at `target` up to date; see `Store.backup`."""
    copying.require_outside(catalog.layout, target)
    copying.require_sound(catalog)
    if not lazy:
        hint = _or_lazy(call("prefetch", every=True), call("backup", str(target), lazy=True))
        require_here(all_leaning(catalog), "back up this store", hint=hint)
    path = Path(os.path.realpath(target))
    with (
        Destination.opened(catalog.layout, path, catalog.config.filesystem) as into,
        copying.held(catalog, f"backup to {path.name}"),
    ):

        def attempt() -> BackupReport:
            with closing(_Backup(catalog, into, threads, progress, lazy=lazy)) as one:
                return one.run()

        return attempted(catalog, attempt)


def _or_lazy(prefetch: Call, lazy: Call) -> Phrase:
    return phrase(
        "{prefetch}, or let the copy lean on it, too: {lazy}", prefetch=prefetch, lazy=lazy
    )


class _Backup(Attempt):
    """One attempt, by the rows of one commit."""

    def __init__(
        self,
        catalog: Catalog,
        into: Destination,
        threads: int,
        progress: ProgressCallback | None,
        *,
        lazy: bool,
    ) -> None:
        super().__init__(catalog, into.layout, threads, progress, lazy=lazy)
        self._began = time.monotonic()
        self._into = into
        self._packs = self._opened({})
        self._helps = False
        """Whether the backup may have good copies of what is damaged in the source."""
        self._leans_on: tuple[Leaning, ...] = ()

    def close(self) -> None:
        """Close the packs of the destination."""
        self._packs.close()

    def run(self) -> BackupReport:
        """Copy, prove, publish.  Raises Moved where the source changed under it."""
        fresh = self._layout.incoming / "index"
        with self._new_index(fresh) as (index, named):
            self._require_later(index)
            missing = [pack for pack in named if not self._has(pack)]
            staged = self._copy("backup", missing)
            with closing(self._opened(staged)) as files:
                self._prove(index, [pack for pack in missing if pack.id in staged], files)
            self._finish(index, named, missing, staged)
            with index.env.read() as transaction:
                number = index.generation(transaction)
                names = dict(refs_in(index, transaction).walk())
                snapshots = index.count(transaction, "snapshots")
            lines = self._lines(index, number)
        removed, aside, waiting = self._publish(fresh, staged, lines)
        return BackupReport(
            path=str(self._layout.root),
            uuid=str(self._layout.uuid),
            generation=number,
            refs=len(names),
            snapshots=snapshots,
            packs=len(named),
            packs_copied=len(staged),
            bytes_copied=sum(pack.size for pack in missing if pack.id in staged),
            packs_removed=tuple(pack.pack.hex() for pack in removed),
            freed_bytes=sum(pack.size for pack in removed),
            waiting_bytes=waiting,
            put_aside=tuple(pack.hex() for pack in aside),
            problems=self._findings.problems,
            affected=self._affected(names),
            leans_on=self._leans_on,
            hint=self._hint(),
            seconds=time.monotonic() - self._began,
        )

    def _require_later(self, index: Index) -> None:
        """Raise Conflict if the backup is of a newer state, or of another history.

        A store that was restored from an older copy has the same UUID as its twin.
        """
        before = self._into.before
        if before is None:
            return
        with index.env.read() as transaction:
            own = index.generation(transaction)
            if before.names.generation > own:
                raise Conflict(
                    f"the backup is newer than this store (generation {before.names.generation}, "
                    f"{own})",
                    where=str(self._layout.root),
                    hint="name a new directory",
                )
            differing = mirror.differences(before.names, index, transaction)
        if differing:
            raise Conflict(
                f"the backup is of another history than this store's: {differing[0]} was never "
                "here what it is there",
                where=str(self._layout.root),
                hint="name a new directory",
            )

    def _has(self, pack: NamedPack) -> bool:
        before = self._into.before
        if before is not None and pack.id in before.damaged:
            # It may have been mended since, or be healed by whoever reads it from elsewhere.
            return False
        return is_whole(self._packs, pack.id, pack.size)

    def _finish(
        self,
        index: Index,
        named: Sequence[NamedPack],
        missing: Sequence[NamedPack],
        staged: dict[PackId, Path],
    ) -> None:
        """Mark the new index as a backup's, and add what only the older state has."""
        lost = {pack.number: pack.id for pack in missing}
        broken = self._findings.broken.values()
        numbers = {pack_number(row) for row in broken if row is not None}
        damaged = {lost[number] for number in numbers & lost.keys()} | set(self._findings.packs)
        with index.env.write() as transaction:
            number = index.generation(transaction)
            index.put(transaction, BACKUP, number, tuple(sorted(damaged)))
        kept = self._name_older(index, named)
        self._complete(index, staged)
        if not self._findings.problems:
            with index.env.write() as transaction:
                for pack in kept:
                    unnamed_packs.condemn(index, transaction, pack.id)

    def _name_older(self, index: Index, named: Sequence[NamedPack]) -> list[NamedPack]:
        """Add rows of packs that the backup has and the source no longer has; return these."""
        before = self._into.before
        if before is None:
            return []
        own = {pack.id for pack in named}
        old = {pack.id: pack.size for pack in before.packs}
        gone = [pack for pack in (*old, *before.condemned) if pack not in own]
        first = max((pack.number for pack in named), default=-1) + 1
        kept = [NamedPack(first + at, pack, self._size(pack, old)) for at, pack in enumerate(gone)]
        with index.env.write() as transaction:
            index.name_packs(transaction, kept)
        self._helps = bool(kept)
        return kept

    def _complete(self, index: Index, staged: dict[PackId, Path]) -> None:
        """Find what names need and the copy lacks; restore rows that only the backup still has."""
        with closing(self._opened(staged)) as files:
            new = Catalog(self._layout, self._config, index, files)
            if self._into.before is None:
                self._findings.take(copying.missing_in(new))
            else:
                with closing(Index(self._layout.index)) as old:
                    if copying.kept_rows(new, old, self._findings):
                        self._helps = True
            self._leans_on = all_leaning(new)

    def _size(self, pack: PackId, known: dict[PackId, int]) -> int:
        size = known.get(pack)
        if size is None:
            with suppress(PackGone):
                return self._packs.size(pack)
        return size or 0

    def _lines(self, index: Index, number: int) -> PackList:
        """Return the list of all packs that the new index knows."""
        with index.env.read() as transaction:
            known = pack_list.known_packs(index, transaction)
        return pack_list.made_of(known, number, self._layout, self._catalog.layout)

    def _publish(
        self, fresh: Path, staged: dict[PackId, Path], lines: PackList
    ) -> tuple[list[Condemned], Sequence[PackId], int]:
        """Put the new state in place.

        Returns the packs that were removed, those put aside, and the bytes that wait for readers.
        """
        layout, into = self._layout, self._into
        config = self._config.changed({"shared": Sharing.UMASK})
        with into.publishing():
            pack_list.write(layout, lines)
            copying.put(self._packs, staged)
            if self._lazy:
                into.lean(self._kept, config)
            into.replace_index(fresh)
            with closing(Index(layout.index)) as index:
                mirror.write(layout, index)
                into.settle(config, lazy=self._lazy)
                leases.sweep(layout, index)
                waiting = unnamed_packs.listed(index)
                is_read = bool(leases.holds(layout))
                places = Places({HERE: self._packs})
                removed = [] if is_read else unnamed_packs.sweep(layout, index, places)
                unknown = generation.unknown_packs(self._packs, index)
            aside = unnamed_packs.put_aside(layout, self._packs, unknown)
        with suppress(StorageFailed):
            fs.remove_tree(layout.incoming)
        left = sum(pack.size for pack in waiting) - sum(pack.size for pack in removed)
        return removed, aside, left

    def _affected(self, names: dict[str, refs.Ref]) -> tuple[Affected, ...]:
        """Return what of the backup cannot be read because of damage."""
        if not self._findings.problems:
            return ()
        with closing(Catalog.opened(self._layout)) as catalog:
            return AffectedTensors(catalog, self._findings).all(names, catalog.index.marked(PRUNED))

    def _hint(self) -> Phrase | None:
        if not self._findings.problems:
            return None
        place = str(self._layout.root) if self._helps else "PLACE"
        return as_phrase(call("repair", read_data=True, sources=(place,)))


class CloneReport(Report, frozen=True):
    """The result of `clone`: a new store, `uuid`, with everything that `source` had."""

    path: str
    """the new store"""
    uuid: str
    """its UUID"""
    source: str
    """the store that was copied"""
    refs: int
    """number of branches and tags"""
    snapshots: int
    """snapshots in it"""
    without_contents: tuple[SnapshotId, ...]
    """those of which only records came from a remote: ancestors, whose contents were left out"""
    packs: int
    """packs in it"""
    bytes_copied: int
    """size of these packs"""
    seconds: float
    """how long it took"""


def clone(
    origin: Path,
    target: Path,
    *,
    threads: int,
    lazy: bool = False,
    progress: ProgressCallback | None = None,
) -> CloneReport:
    """Make a store at `target` with everything that the one at `origin` has; see `Store.clone`."""
    began = time.monotonic()
    with closing(Catalog.open(origin)) as catalog:
        copying.require_outside(catalog.layout, target)
        copying.require_sound(catalog)
        (_require_lazy if lazy else _require_all_here)(catalog, origin, target)
        path = Path(os.path.realpath(target))
        with copying.held(catalog, f"clone to {path.name}"):
            made = _made(catalog, path, threads, progress, lazy=lazy)
            return replace(made, seconds=time.monotonic() - began)


def _require_all_here(catalog: Catalog, origin: Path, target: Path) -> None:
    """Raise Conflict if the store leans on a remote."""
    hint = _or_lazy(
        call("prefetch", every=True, store=str(origin)),
        call("clone", str(origin), str(target), lazy=True),
    )
    require_here(all_leaning(catalog), "clone this store", hint=hint)


def _require_lazy(catalog: Catalog, origin: Path, target: Path) -> None:
    """Raise BadRequest if the store has no lazy remote: nothing of it would be left out."""
    if not catalog.config.lazy_remotes:
        raise BadRequest(
            "this store has no lazy remote, so a clone of it has all of its blocks",
            where=str(origin),
            hint=call("clone", str(origin), str(target)),
        )


def _made(
    catalog: Catalog, path: Path, threads: int, progress: ProgressCallback | None, *, lazy: bool
) -> CloneReport:
    layouts.require_local(
        path,
        catalog.config.filesystem,
        lambda kind: call("vouch", kind, store=str(catalog.layout.root)),
    )
    try:
        with layouts.creating(path, catalog.block_size, catalog.config.shared) as layout:
            return attempted(
                catalog, lambda: _Clone(catalog, layout, threads, progress, lazy=lazy).run()
            )
    except Conflict as error:
        error.advise("name a new directory")
        raise


class _Clone(Attempt):
    """One attempt, by the rows of one commit."""

    def run(self) -> CloneReport:
        """Copy, prove, publish. Raises Moved if packs of the source were collected meanwhile."""
        layout = self._layout
        fs.remove_tree(layout.incoming)
        fs.make_directory(layout.incoming, private=True)
        with self._new_index(layout.index) as (index, named):
            staged = self._copy("clone", named)
            with closing(self._opened(staged)) as files:
                self._prove(index, named, files)
                self._require_sound(index, files)
            self._list(index, staged)
            with closing(PackFiles(layout.packs)) as own:
                copying.put(own, staged)
            # They may be a stranger's, and would be trusted as this user's own: only those come
            # that the user asked for.
            remotes = self._config.lazy_remotes if self._lazy else ()
            # What guards refs is for the new owner to say.
            replace(self._config, remotes=remotes, required_gates=()).save(layout)
            if self._lazy:
                fs.rename(self._kept, layout.remotes)
            fs.remove_tree(layout.incoming)
            mirror.write(layout, index)
            with index.env.read() as transaction:
                return CloneReport(
                    path=str(layout.root),
                    uuid=str(layout.uuid),
                    source=str(self._catalog.layout.root),
                    refs=index.count(transaction, "refs"),
                    snapshots=index.count(transaction, "snapshots"),
                    without_contents=(),
                    packs=len(named),
                    bytes_copied=sum(pack.size for pack in named),
                    seconds=0.0,
                )

    def _list(self, index: Index, staged: Collection[PackId]) -> None:
        with index.env.read() as transaction:
            number = index.generation(transaction)
        lines = pack_list.made_of(staged, number, self._catalog.layout)
        pack_list.write(self._layout, lines)

    def _lose(self, pack: PackId, error: Corrupt) -> None:
        raise self._damaged(f"pack {pack.hex()}", error.what) from error

    def _require_sound(self, index: Index, files: Packs) -> None:
        """Raise Corrupt if a payload is damaged, or anything is missing that names need."""
        catalog = Catalog(self._layout, self._config, index, files)
        self._findings.take(copying.missing_in(catalog))
        if self._findings.problems:
            first = self._findings.problems[0]
            raise self._damaged(f"{first.kind} {first.where}", first.what)

    def _damaged(self, where: str, what: str) -> Corrupt:
        return Corrupt(
            f"{what}: the store is damaged, and no clone of it was made",
            where=where,
            hint=call("fsck", read_data=True, store=str(self._catalog.layout.root)),
        )
