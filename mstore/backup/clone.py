"""Clone: a new store with everything that another one has.

The clone gets a UUID of its own, because from now on it has a history of its own: a backup of one
is not a backup of the other. Packs are copied unchanged. They are no hard links: two names of one
file share its damage.

Unlike a backup, a clone is complete or absent: damage in the source aborts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from mstore import fs
from mstore.backup import lacking, packs, source
from mstore.backup.backup import Moved
from mstore.backup.packs import Proof
from mstore.backup.ticks import Ticks
from mstore.blocks import index_copy
from mstore.blocks.index import Index
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import is_whole
from mstore.blocks.schema import NamedPack
from mstore.check.findings import Findings
from mstore.errors import Conflict, Corrupt, Unavailable
from mstore.frozen import frozen
from mstore.ids import PackId
from mstore.phrases import call
from mstore.progress import ProgressCallback
from mstore.store import layout as layouts
from mstore.store import mirror, pack_list
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout

_ATTEMPTS = 20


@frozen
class CloneReport:
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
    packs: int
    """packs in it"""
    bytes_copied: int
    """size of these packs"""
    seconds: float
    """how long it took"""


def clone(
    origin: Path, target: Path, *, threads: int, progress: ProgressCallback | None = None
) -> CloneReport:
    """Make a store at `target` with everything that the one at `origin` has; see `Store.clone`."""
    began = time.monotonic()
    with closing(Catalog.open(origin)) as catalog:
        source.require_outside(catalog.layout, target)
        source.require_sound(catalog)
        path = Path(os.path.realpath(target))
        with source.held(catalog, f"clone to {path.name}"):
            return replace(
                _made(catalog, path, threads, progress), seconds=time.monotonic() - began
            )


def _made(
    catalog: Catalog, path: Path, threads: int, progress: ProgressCallback | None
) -> CloneReport:
    layouts.require_local(
        path,
        catalog.config.filesystem,
        lambda kind: call("vouch", kind, store=str(catalog.layout.root)),
    )
    try:
        with layouts.creating(path, catalog.block_size, catalog.config.shared) as layout:
            catalog.config.save(layout)
            for _ in range(_ATTEMPTS):
                with suppress(Moved):
                    return _Clone(catalog, layout, threads, progress).run()
    except Conflict as error:
        error.advise("name a new directory")
        raise
    raise Unavailable(
        "gc removes packs faster than they can be copied, and this user cannot hold a lease",
        where=str(catalog.layout.root),
        hint="run the command again when no gc is running",
    )


class _Clone:
    """One attempt, by the rows of one commit."""

    def __init__(
        self, catalog: Catalog, layout: Layout, threads: int, progress: ProgressCallback | None
    ) -> None:
        self._catalog = catalog
        self._layout = layout
        self._threads = threads
        self._ticks = Ticks(progress)

    def run(self) -> CloneReport:
        """Copy, prove, publish. Raises Moved if packs of the source were collected meanwhile."""
        layout = self._layout
        for directory in (layout.index, layout.incoming):
            fs.remove_tree(directory)
        fs.make_directory(layout.index)
        fs.make_directory(layout.incoming, private=True)
        with closing(Index(layout.index, create=True)) as index:
            theirs = index_copy.copy(self._catalog.index, index)
            staged = {pack.id: self._copy(pack, theirs) for pack in theirs}
            with index.env.write() as transaction:
                index.name_packs(transaction, theirs)
            self._prove(index, theirs, staged)
            self._list(index, staged)
            with closing(PackFiles(layout.packs)) as own:
                packs.put(own, staged)
            fs.remove_tree(layout.incoming)
            mirror.write(layout, index)
            with index.env.read() as transaction:
                return CloneReport(
                    path=str(layout.root),
                    uuid=str(layout.uuid),
                    source=str(self._catalog.layout.root),
                    refs=index.count(transaction, "refs"),
                    snapshots=index.count(transaction, "snapshots"),
                    packs=len(theirs),
                    bytes_copied=sum(pack.size for pack in theirs),
                    seconds=0.0,
                )

    def _list(self, index: Index, staged: Collection[PackId]) -> None:
        since = pack_list.read(self._catalog.layout).since
        with index.env.read() as transaction:
            number = index.generation(transaction)
        lines = {pack: since.get(pack, number) for pack in staged}
        pack_list.write(self._layout, pack_list.PackList(number, lines))

    def _copy(self, pack: NamedPack, all_packs: list[NamedPack]) -> Path:
        """Copy one pack of the source, and return where the copy lies."""
        path = packs.staged(self._layout.incoming, pack.id)
        origin = self._catalog.places[pack.place]
        tick = self._ticks.of("clone", sum(one.size for one in all_packs))
        try:
            packs.copy(origin, pack.id, path, tick)
            if not is_whole(origin, pack.id, pack.size):
                where = origin.where(pack.id)
                raise Corrupt("header, footer or length is damaged", where=where)
        except Corrupt as error:
            if not source.names(self._catalog.index, pack.id):
                raise Moved from error
            raise self._damaged(f"pack {pack.id.hex()}", error.what) from error
        return path

    def _prove(self, index: Index, own: list[NamedPack], staged: dict[PackId, Path]) -> None:
        findings = Findings()
        files = PackFiles(self._layout.packs, elsewhere=staged)
        try:
            layout = self._layout
            proof = Proof(index, files, layout.block_size, findings)
            proof.run(
                own,
                self._ticks.of("verify", sum(pack.size for pack in own)),
                threads=self._threads,
            )
            findings.take(lacking.found(Catalog.over(layout, self._catalog.config, index, files)))
        finally:
            files.close()
        if findings.problems:
            first = findings.problems[0]
            raise self._damaged(f"{first.kind} {first.where}", first.what)

    def _damaged(self, where: str, what: str) -> Corrupt:
        return Corrupt(
            f"{what}: the store is damaged, and no clone of it was made",
            where=where,
            hint=call("fsck", read_data=True, store=str(self._catalog.layout.root)),
        )
