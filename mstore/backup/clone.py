"""Clone: a new store with everything that another one has.

The clone gets a UUID of its own, so that the two are never confused: a backup of one is not a
backup of the other, and neither takes the other's packs for its own. Packs carry the UUID in their
headers, and a PackId covers it. So each pack is copied with a new header and gets a new id;
payloads and footers are copied unchanged. This rules out hard links, which are unwanted anyway: two
names of one file share its damage.

Unlike a backup, a clone is complete or absent: damage in the source aborts it.
"""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from mstore import fs
from mstore.backup import lacking, packs, source
from mstore.backup.backup import Moved
from mstore.backup.packs import PlacedPacks, Proof
from mstore.backup.ticks import Ticks
from mstore.blocks import index_copy
from mstore.blocks.index import Index
from mstore.blocks.packs import SealedPack, read_table
from mstore.blocks.schema import NamedPack
from mstore.check.findings import Findings
from mstore.errors import Conflict, Corrupt, Unavailable
from mstore.frozen import frozen
from mstore.ids import PackId
from mstore.phrases import call
from mstore.progress import ProgressCallback
from mstore.store import layout as layouts
from mstore.store import mirror
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.publishing import give_names

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
            staged: dict[PackId, Path] = {}
            own = [self._copy(pack, theirs, staged) for pack in theirs]
            with index.env.write() as transaction:
                index.name_packs(transaction, own)
            self._prove(index, own, staged)
            give_names(
                layout.packs,
                [SealedPack(pack, path, 0, ()) for pack, path in sorted(staged.items())],
                [],
            )
            fs.remove_tree(layout.incoming)
            mirror.write(layout, index)
            with index.env.read() as transaction:
                return CloneReport(
                    path=str(layout.root),
                    uuid=str(layout.uuid),
                    source=str(self._catalog.layout.root),
                    refs=index.count(transaction, "refs"),
                    snapshots=index.count(transaction, "snapshots"),
                    packs=len(own),
                    bytes_copied=sum(pack.size for pack in own),
                    seconds=0.0,
                )

    def _copy(
        self, pack: NamedPack, all_packs: list[NamedPack], staged: dict[PackId, Path]
    ) -> NamedPack:
        """Copy one pack of the source into the new store, with the new store's header."""
        path = self._layout.incoming / f"{pack.id.hex()}.pack"
        origin = self._catalog.packs.path(pack.id)
        tick = self._ticks.of("clone", sum(one.size for one in all_packs))
        try:
            packs.copy(origin, path, tick, store=self._layout.uuid.bytes)
            if not packs.is_whole(origin, pack):
                raise Corrupt("header, footer or length is damaged", where=str(origin))
            own = read_table(path)[0]
        except Corrupt as error:
            if not source.names(self._catalog.index, pack.id):
                raise Moved from error
            raise self._damaged(f"pack {pack.id.hex()}", error.what) from error
        staged[own] = path
        return NamedPack(pack.number, own, pack.size)

    def _prove(self, index: Index, own: list[NamedPack], staged: dict[PackId, Path]) -> None:
        findings = Findings()
        files = PlacedPacks(self._layout.packs, staged)
        try:
            layout = self._layout
            proof = Proof(index, files, layout.uuid.bytes, layout.block_size, findings)
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
