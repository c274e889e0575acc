"""Refs and snapshots down to their blocks: check that everything readers need is stored.

Checks each tensor once, however many share it. A pruned snapshot must have its record, manifest,
plan and coverage, but not its tensors. Concurrent publishing and collecting may look like damage in
one pass; a second pass tells the two apart.
"""

from __future__ import annotations

from contextlib import suppress

from mstore.blocks.location import raw_length
from mstore.blocks.packs import Kind
from mstore.blocks.schema import NOTES, PRUNED
from mstore.snapshots import notes
from mstore.store import listing, mirror, pack_list, refs
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest, Part
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.refs import refs_in
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import Id, ManifestId, PlanId, SnapshotId, TensorId
from mstore.terms.phrases import few
from mstore.upkeep.check.findings import Findings


def _shown(ref: refs.Ref | None) -> str:
    return "no such ref" if ref is None else f"{ref.kind} {ref.snapshot_id().short}"


class Graph:
    """One pass over refs, snapshots and notes."""

    def __init__(self, catalog: Catalog, findings: Findings) -> None:
        self._catalog = catalog
        self._index = catalog.index
        self.findings = findings
        self._sound: set[TensorId] = set()
        self._planned: dict[PlanId, frozenset[str]] = {}
        self.names: dict[str, refs.Ref] = {}
        self.lost: list[str] = []
        self.pruned: set[SnapshotId] = set()
        self.snapshots = 0

    def run(self, *, with_mirror: bool = True) -> None:
        """Check everything, where rows are sound; a copy that is being made has no mirror yet."""
        with self._index.env.read() as transaction:
            self.names = dict(refs_in(self._index, transaction).walk())
        known = set(self._catalog.snapshot_ids())
        self.snapshots = len(known)
        for name, ref in self.names.items():
            if ref.snapshot_id() not in known:
                self.findings.incomplete.add(ref.snapshot)
                self.lost.append(name)
                what = f"points at {ref.snapshot_id().short}, which is missing"
                self.findings.tell("ref", name, what)
        self._unlisted(known)
        self.pruned = self._pruned()
        for snapshot in sorted(known):
            self._snapshot(snapshot, known, with_contents=snapshot not in self.pruned)
        self._notes(known)
        if with_mirror:
            self._mirror()
            self._pack_list()

    def _pruned(self) -> set[SnapshotId]:
        """Return the snapshots that need no contents; one that a ref names directly needs them."""
        marked = self._index.marked(PRUNED)
        return marked - {ref.snapshot_id() for ref in self.names.values()}

    def _unlisted(self, known: set[SnapshotId]) -> None:
        """Report snapshot records that are missing from the list of snapshots."""
        with self._index.env.read() as transaction:
            stored = set(self._index.record_ids(transaction, Kind.SNAPSHOT))
        for id in sorted(stored - known):
            self.findings.incomplete.add(id)
            what = "is stored and not in the index's list of snapshots"
            self.findings.tell("snapshot", id.hex(), what)

    def _snapshot(self, id: SnapshotId, known: set[SnapshotId], *, with_contents: bool) -> None:
        try:
            record = self._catalog.snapshot(id)
        except (NotFound, Corrupt) as error:
            self._lost(Kind.SNAPSHOT, id, error, "")
            return
        with self._index.env.read() as transaction:
            do_agree = listing.agree(self._index, transaction, id, record)
        if not do_agree:
            self.findings.incomplete.add(bytes(id))
            what = "its rows in the index do not agree with its record"
            self.findings.tell("snapshot", id.hex(), what)
        for parent in record.parents:
            if parent.snapshot_id() not in known:
                self.findings.incomplete.add(parent.snapshot)
                missing = parent.snapshot_id().short
                what = f"its {parent.role} {missing} is missing"
                self.findings.tell("snapshot", id.hex(), what)
        where = f"snapshot {id.short}"
        coverage = record.coverage_id()
        if coverage is not None:
            self._require(Kind.COVERAGE, coverage, where)
        plan = record.plan_id()
        has_plan = plan is not None and self._require(Kind.PLAN, plan, where)
        if plan is not None and has_plan and record.is_virtual and with_contents:
            with self.findings.catching("plan", plan.hex()):
                self._inputs(plan)
        self._manifest(record.manifest_id(), where, with_contents=with_contents)

    def _inputs(self, id: PlanId) -> None:
        for manifest in self._catalog.record(Plan, id).manifest_ids():
            self._manifest(manifest, f"plan {id.short}", with_contents=True)

    def _require(self, kind: Kind, id: Id, where: str) -> bool:
        with self._index.env.read() as transaction:
            is_stored = self._index.has_record(transaction, kind, id)
        if not is_stored:
            self._lost(kind, id, NotFound("missing"), where)
        return is_stored

    def _lost(self, kind: Kind, id: Id, error: NotFound | Corrupt, where: str) -> None:
        # A row with an unreadable record was reported with its pack; only a missing row is new.
        if isinstance(error, NotFound):
            what = f"{where}: missing" if where else "missing"
            self.findings.tell_row(kind, id, None, what)

    def _manifest(self, id: ManifestId, where: str, *, with_contents: bool) -> None:
        try:
            manifest = self._catalog.manifest(id)
        except (NotFound, Corrupt) as error:
            self._lost(Kind.MANIFEST, id, error, where)
            return
        if with_contents:
            self._files(id, manifest)

    def _files(self, id: ManifestId, manifest: Manifest) -> None:
        for file in manifest.files:
            if file.size != sum(part.nbytes for part in file.parts):
                what = f"{file.path}: parts and size do not agree"
                self.findings.tell("manifest", id.hex(), what)
            for part in file.parts:
                tensor = part.tensor_id()
                if tensor in self._sound:
                    continue
                self._sound.add(tensor)
                where = f"{file.path}: {part.name}" if part.name is not None else file.path
                try:
                    record = self._catalog.content(tensor)
                except (NotFound, Corrupt) as error:
                    self._lost(Kind.TENSOR, tensor, error, where)
                    continue
                self._content(part, record, where)

    def _content(self, part: Part, record: Tensor | VirtualTensor, where: str) -> None:
        tensor = part.tensor_id()
        if record.nbytes != part.nbytes:
            kind = type(record).kind.name.lower()
            self.findings.tell(kind, tensor.hex(), f"{where}: another length")
        if isinstance(record, VirtualTensor):
            with self.findings.catching("virtual", tensor.hex()):
                self._virtual(tensor, record, where)
            return
        blocks = list(record.block_ids())
        with self._index.env.read() as transaction:
            found = self._index.readable_rows(transaction, blocks)
        for number, (block, row) in enumerate(zip(blocks, found, strict=True)):
            if row is None:
                self.findings.tell_row(Kind.BLOCK, block, None, f"{where}: missing")
            elif raw_length(row) != record.block_length(number, self._catalog.block_size):
                what = f"{where}: another length"
                self.findings.tell_row(Kind.BLOCK, block, row, what)

    def _virtual(self, id: TensorId, record: VirtualTensor, where: str) -> None:
        id_of_plan = record.plan_id()
        if id_of_plan not in self._planned:
            plan = self._catalog.record(Plan, id_of_plan)
            self._planned[id_of_plan] = frozenset(tensor.name for tensor in plan.tensors)
        if record.tensor not in self._planned[id_of_plan]:
            what = f"{where}: not in plan {id_of_plan.short}"
            self.findings.tell("virtual", id.hex(), what)

    def _notes(self, known: set[SnapshotId]) -> None:
        with self._index.env.read() as transaction:
            rows = {
                (snapshot, note) for (snapshot, note), _ in self._index.walk(transaction, NOTES)
            }
        about = {id: one.snapshot_id() for id, one in notes.stored(self._catalog).items()}
        for snapshot, note in sorted(rows):
            if snapshot not in known:
                what = f"is about snapshot {snapshot.short}, which is missing"
                self.findings.tell("note", note.hex(), what)
            if about.get(note, snapshot) != snapshot:
                what = f"the index gives it to snapshot {snapshot.short}, which it is not about"
                self.findings.tell("note", note.hex(), what)
            self._require(Kind.NOTE, note, f"snapshot {snapshot.short}")
        for note, snapshot in about.items():
            if snapshot in known and (snapshot, note) not in rows:
                self.findings.tell(
                    "note", note.hex(), "is stored and not in the index's list of notes"
                )

    def _mirror(self) -> None:
        # A crash right after a commit leaves the mirror behind; the next writer refreshes it.
        path = self._catalog.layout.mirror
        if not self.names and not path.exists():
            return
        try:
            mirrored = mirror.read(self._catalog.layout)
        except Corrupt as error:
            self.findings.stale_mirror = True
            self.findings.tell("mirror", str(path), error.what)
            return
        # Unreadable rows of the index are reported elsewhere.
        with suppress(Corrupt), self._index.env.read() as transaction:
            for name in mirror.differences(mirrored, self._index, transaction):
                self.findings.is_index_wrong = True
                what = f"{name}: the mirror has {_shown(mirrored.refs.get(name))}, the index not"
                self.findings.tell("mirror", str(path), what)

    def _pack_list(self) -> None:
        """Check that the list has each pack. It was written before the index named them."""
        with self._index.env.read() as transaction:
            named = set(self._index.pack_ids(transaction))
        layout = self._catalog.layout
        told = pack_list.read(layout)
        if told.generation != pack_list.newest(layout):
            self.findings.stale_mirror = True
            self.findings.tell("pack list", str(layout.pack_list), "the newest cannot be read")
        if told.store not in (None, layout.uuid):
            what = f"the pack list is of store {told.store}"
            self.findings.tell("format", str(layout.root / "format"), what)
        missing = named - told.since.keys()
        if missing:
            self.findings.stale_mirror = True
            what = f"no readable list has a line for {few(sorted(map(bytes.hex, missing)))}"
            self.findings.tell("pack list", str(layout.pack_list), what)
