"""The catalog: an open store, for reading.

Owns the index and the open packs, which it reads as `mstore.store.payloads` does. Resolves
revisions, lists refs and snapshots, and has the writer lock, with which `mstore.store.transaction`
publishes. Safe for any number of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Kind
from mstore.store import generation, listing, mirror
from mstore.store import layout as layouts
from mstore.store import refs as ref_rows
from mstore.store.config import Config, RemoteConfig
from mstore.store.layout import Layout
from mstore.store.leases import Hold
from mstore.store.objects.canonical import MAX_COUNT
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.payloads import Payloads
from mstore.store.refs import refs_in
from mstore.store.remembered import RowNumbers
from mstore.terms.errors import Corrupt, NotFound, StorageFailed
from mstore.terms.ids import ID_BYTES, Identified, ManifestId, NoteId, Revision, SnapshotId
from mstore.terms.phrases import call

if TYPE_CHECKING:
    from mstore.blocks.elsewhere import RemoteBlocks


class Catalog(Payloads):
    """One open store."""

    def __init__(self, layout: Layout, config: Config, index: Index, packs: Packs) -> None:
        super().__init__(layout, index, packs)
        self.config = config
        self._candidates: dict[str, Hold] = {}
        self.row_numbers = RowNumbers()
        """What planning computed of rows, for the merge that follows."""
        self.author: Callable[[], str] = str
        """Asked when a snapshot or a note is made: by whom."""
        self.vouched: Callable[[SnapshotId, str], bool] = lambda snapshot, gate: False
        """Asked when a guarded ref moves: whether a trusted signer says that it may."""
        self.is_current_verdict: Callable[[str, NoteId], bool] = lambda gate, note: True
        """Asked when a guarded ref moves: whether a verdict is of the gate as it is defined now."""

    @classmethod
    def opened(cls, layout: Layout) -> Self:
        """Open the store at this place.  Raises Incompatible, Corrupt, StorageFailed."""
        config = Config.load(layout)
        layouts.require_local(layout.root, config.filesystem)
        fs.share(layout.root, config.shared)
        catalog = cls(layout, config, Index(layout.index), PackFiles(layout.packs))
        catalog._lean_on_lazy()
        return catalog

    @classmethod
    def create(cls, root: Path, block_size: int, config: Config | None = None) -> Catalog:
        """Create an empty store.  Raises Conflict, BadRequest, Incompatible, StorageFailed."""
        config = config or Config()
        layouts.require_local(
            root, config.filesystem, lambda kind: call("init", store=str(root), filesystem=kind)
        )
        with layouts.creating(root, block_size, config.shared) as layout:
            config.save(layout)
            index = Index(layout.index, create=True)
            try:
                mirror.write(layout, index)
            finally:
                index.close()
        return cls.opened(layout)

    @classmethod
    def open(cls, root: Path) -> Catalog:
        """Open an existing store.  Raises NotFound, Incompatible, Corrupt."""
        return cls.opened(layouts.locate(root))

    def close(self) -> None:
        """Close packs and index once running reads have ended.  Raises Unavailable inside one."""
        self.index.env.require_outside()
        for held in self._candidates.values():
            held.release()
        self.packs.close()
        self.index.close()
        self.layout.close()

    def follow_remotes(self) -> None:
        """Know the blocks of lazy remotes, as the settings name them now.

        Another process may have changed them.  Raises Corrupt naming the file, StorageFailed.
        """
        remotes = Config.load(self.layout).remotes
        self.config = msgspec.structs.replace(self.config, remotes=remotes)
        self._lean_on_lazy()

    def _lean_on_lazy(self) -> None:
        if self.index.elsewhere is not None:
            self.index.elsewhere.follow(lazy_tables(self.layout.remotes, self.config))
        elif (found := elsewhere_of(self.layout.remotes, self.config)) is not None:
            self.lean_on(found)

    def configure(self, changes: Mapping[str, object]) -> None:
        """Change settings of the store, now and for later opens.  Raises BadRequest."""
        with self.publishing():
            config = Config.load(self.layout).changed(changes)
            if "shared" in changes:
                layouts.share(self.layout, config.shared)
            config.save(self.layout)
        self.config = config

    def set_remotes(self, remotes: tuple[RemoteConfig, ...]) -> None:
        """Replace the remotes in the store's settings."""
        with self.publishing():
            config = msgspec.structs.replace(Config.load(self.layout), remotes=remotes)
            config.save(self.layout)
        self.config = config

    @contextmanager
    def publishing(self, *, packs: bool = False) -> Iterator[None]:
        """Hold the writer lock: one publisher at a time, across all processes.

        Reads inside the block see everything committed before. packs: the caller trusts the index
        with packs, so the packs are also checked for signs of a newer index.  Raises Corrupt if the
        index is not the newest, Unavailable if it was replaced.
        """
        layouts.require_writable(self.layout)
        # A copied store may lack it.
        fs.make_directory(self.layout.tmp, private=True, exist_ok=True)
        with fs.locked(self.layout.lock):
            self.index.env.require_in_place()
            generation.show_commits(self.index)
            generation.require_current(self.layout, self.index, self.packs, with_packs=packs)
            if packs and mirror.generation(self.layout) is None:
                # The index has all packs, so it is current.  Without a mirror, the packs of the
                # current publisher would make it look outdated before their commit.
                mirror.write(self.layout, self.index)
            yield

    @contextmanager
    def advancing(self) -> Iterator[IndexTransaction]:
        """Open the publishing transaction: it sets the next generation, then the mirror follows.

        Call with the writer lock held.
        """
        self.index.moved.clear()
        with self.index.env.write() as transaction:
            self.index.set_generation(transaction, self.index.generation(transaction) + 1)
            yield transaction
        # The commit stands whatever happens here; the next one writes the mirror.
        with suppress(StorageFailed, Corrupt):
            mirror.follow(self.layout, self.index, self.index.moved)

    @contextmanager
    def committing(self) -> Iterator[IndexTransaction]:
        """Take the writer lock and open the one index transaction that publishes."""
        with self.publishing(), self.advancing() as transaction:
            yield transaction

    def doubt(self) -> str | None:
        """Return why nothing can be written, None if the index is current; reading still works."""
        try:
            return generation.doubt(self.layout, self.index, self.packs)
        except StorageFailed:
            return None

    def generation(self) -> int:
        """Return how many commits the index in its place now has published; raises as `follow`."""
        if self.index.env.is_replaced():
            self.follow()
        with self.index.env.read() as transaction:
            return self.index.generation(transaction)

    # -- names -------------------------------------------------------------------------------

    def resolve(self, revision: Revision) -> SnapshotId:
        """Return the snapshot of a revision.  Raises NotFound, BadName, BadRequest (no text)."""
        given = revision.id if isinstance(revision, Identified) else revision
        if isinstance(given, SnapshotId):
            self.snapshot(given)
            return given
        parsed = ref_rows.parse_revision(given)
        try:
            with self.index.env.read() as transaction:
                snapshot = ref_rows.named_snapshot(self.index, transaction, parsed)
        except NotFound:
            # A model card names its parents by content, that is by ManifestId.
            found = self._of_content(parsed)
            if found is None:
                raise
            snapshot = found
        return ref_rows.walk_back(snapshot, parsed.steps, self.snapshot, given)

    def _of_content(self, revision: ref_rows.Revision) -> SnapshotId | None:
        """Return the newest snapshot of a ManifestId in full."""
        if revision.back is not None or len(revision.name) != 2 * ID_BYTES:
            return None
        try:
            manifest = ManifestId(bytes.fromhex(revision.name))
        except ValueError:
            return None
        found = self.snapshots_of(manifest)
        return found[0] if found else None

    def refs(self) -> dict[str, ref_rows.Ref]:
        """Return all refs by name."""
        with self.index.env.read() as transaction:
            return dict(refs_in(self.index, transaction).walk())

    def ref(self, name: str) -> ref_rows.Ref | None:
        """Return one ref, or None."""
        with self.index.env.read() as transaction:
            return refs_in(self.index, transaction).get(name)

    def hold_candidate(self, name: str, ref: ref_rows.Ref | None) -> None:
        """Keep the snapshot of a candidate until it moves or this is closed; None: let it go.

        Call it before the move is visible, with the writer lock held: no garbage collection is
        between the two.
        """
        new = None if ref is None else Hold(self.layout, ref.snapshot_id())
        old = self._candidates.pop(name, None)
        if new is not None:
            self._candidates[name] = new
        if old is not None:
            old.release()

    def snapshot_ids(self, digits: str = "") -> list[SnapshotId]:
        """Return every stored snapshot whose id begins with these hex digits, by id."""
        with self.index.env.read() as transaction:
            if digits:
                return listing.with_prefix(self.index, transaction, digits)
            return list(listing.ids(self.index, transaction))

    def times(self, ids: Iterable[SnapshotId]) -> dict[SnapshotId, int]:
        """Return the times of those of these snapshots that the index lists, in ns."""
        with self.index.env.read() as transaction:
            return listing.times(self.index, transaction, ids)

    def contents(self, ids: Iterable[SnapshotId]) -> dict[SnapshotId, ManifestId]:
        """Return the content of each of these snapshots that is not lost, from the index.

        Reads no record: a snapshot is there if the index lists it and has its record in a pack that
        exists.  Whatever is otherwise is left to the record.
        """
        wanted = set(ids)
        sound: set[bytes] = set()
        with self.index.env.read() as transaction:
            found = listing.contents(self.index, transaction, wanted)
            with suppress(Corrupt):
                spans = self.index.record_spans(transaction, Kind.SNAPSHOT, found)
                packs = {pack for pack in {span[0] for span in spans} if self.packs.is_there(pack)}
                sound = {span[4] for span in spans if span[0] in packs}
        found = {id: content for id, content in found.items() if id in sound}
        for id in wanted - found.keys():
            record = self.snapshot_if_there(id)
            if record is not None:
                found[id] = record.manifest_id()
        return found

    def children(self, id: SnapshotId) -> set[SnapshotId]:
        """Return the snapshots that have this one as a parent, from the index."""
        with self.index.env.read() as transaction:
            return listing.children(self.index, transaction, id)

    def nearest_first(
        self, start: SnapshotId, follow: Callable[[SnapshotRecord], Iterable[SnapshotId]]
    ) -> Iterator[tuple[SnapshotId, SnapshotRecord]]:
        """Yield a snapshot and what it leads to, each once, those of fewer steps first.

        follow: the parents of a record to go on with; missing ones are left out.  Raises NotFound
        if the start is missing.
        """
        waiting, seen = deque([start]), {start}
        while waiting:
            id = waiting.popleft()
            record = self.snapshot(id) if id == start else self.snapshot_if_there(id)
            if record is not None:
                yield id, record
                new = [one for one in dict.fromkeys(follow(record)) if one not in seen]
                waiting += new
                seen.update(new)

    def snapshots_of(self, manifest: ManifestId) -> list[SnapshotId]:
        """Return the snapshots with this content, newest first (ties by id)."""
        with self.index.env.read() as transaction:
            found = listing.with_content(self.index, transaction, manifest)
        return sorted(found, key=lambda id: (-self.snapshot(id).time_ns, id))


def elsewhere_of(remotes: Path, config: Config) -> RemoteBlocks | None:
    """Return where blocks lie that are not here; None if the store has no lazy remote.

    remotes: what is kept of them.
    """
    tables = lazy_tables(remotes, config)
    if not tables:
        return None
    # Late: it imports numpy, and few stores have one.
    from mstore.blocks.elsewhere import RemoteBlocks

    return RemoteBlocks(tables)


def lazy_tables(remotes: Path, config: Config) -> list[tuple[str, Path]]:
    """Return the lazy remotes of a store, each with the directory of its tables."""
    return [(one.name, layouts.tables_of(remotes / one.name)) for one in config.lazy_remotes]


def now_ns() -> int:
    """Return the time for snapshots and reflog lines, in nanoseconds since the epoch."""
    return min(max(time.time_ns(), 0), MAX_COUNT)
