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
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs
from mstore.store import layout as layouts
from mstore.store import mirror, pack_list
from mstore.store.catalog import Catalog
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import PackId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, Report
from mstore.upkeep.backup import packs, source
from mstore.upkeep.backup.packs import Attempt, attempted


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
            return attempted(catalog, lambda: _Clone(catalog, layout, threads, progress).run())
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
                    packs=len(named),
                    bytes_copied=sum(pack.size for pack in named),
                    seconds=0.0,
                )

    def _list(self, index: Index, staged: Collection[PackId]) -> None:
        since = pack_list.read(self._catalog.layout).since
        with index.env.read() as transaction:
            number = index.generation(transaction)
        lines = {pack: since.get(pack, number) for pack in staged}
        pack_list.write(self._layout, pack_list.PackList(number, lines))

    def _lose(self, pack: PackId, error: Corrupt) -> None:
        raise self._damaged(f"pack {pack.hex()}", error.what) from error

    def _require_sound(self, index: Index, files: Packs) -> None:
        """Raise Corrupt if a payload is damaged, or anything is missing that names need."""
        catalog = Catalog(self._layout, self._catalog.config, index, files)
        self._findings.take(source.missing_in(catalog))
        if self._findings.problems:
            first = self._findings.problems[0]
            raise self._damaged(f"{first.kind} {first.where}", first.what)

    def _damaged(self, where: str, what: str) -> Corrupt:
        return Corrupt(
            f"{what}: the store is damaged, and no clone of it was made",
            where=where,
            hint=call("fsck", read_data=True, store=str(self._catalog.layout.root)),
        )
