"""Check: whether a store is what it says.  Reads only.

Structure, always: every pack's footer against its hash and name, every index row against a
footer entry, every ref and snapshot down to its blocks, the text mirror against the refs.  With
`read_data` also every byte: each payload is read, decoded and hashed.  Nothing is computed: of a
virtual snapshot, the plan and all that it needs must be there.  Findings are collected, not
raised; what belongs to no live operation is listed as garbage, which harms nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mstore.blocks.index import Location
from mstore.blocks.packs import Entry, Kind, pack_path, read_table
from mstore.errors import MstoreError
from mstore.ids import BlockId, CoverageId, Id, ManifestId, PackId, PlanId, SnapshotId, TensorId
from mstore.objects.canonical import Record, decode
from mstore.objects.coverage import Coverage
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.objects.snapshot import SnapshotRecord
from mstore.objects.tensor import Tensor
from mstore.objects.virtual import VirtualTensor
from mstore.reports import CheckReport, Problem, Progress
from mstore.store import leases, refs
from mstore.store.catalog import Catalog

_RECORDS: dict[Kind, type[Record]] = {
    Kind.TENSOR: Tensor,
    Kind.MANIFEST: Manifest,
    Kind.SNAPSHOT: SnapshotRecord,
    Kind.PLAN: Plan,
    Kind.COVERAGE: Coverage,
    Kind.VIRTUAL: VirtualTensor,
}


class Checker:
    """One run of fsck over one catalog."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        read_data: bool,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._read_data = read_data
        self._progress = progress
        self._problems: list[Problem] = []
        self._garbage: list[str] = []
        self._bytes_read = 0
        self._sound: set[TensorId] = set()
        self._planned: dict[PlanId, frozenset[str]] = {}

    def run(self) -> CheckReport:
        """Check everything."""
        began = time.monotonic()
        catalog = self._catalog
        with catalog.index.env.read() as transaction:
            packs = dict(catalog.index.packs(transaction))
            blocks = dict(catalog.index.blocks(transaction))
            records = list(catalog.index.records(transaction))
            names = dict(refs.walk(catalog.index, transaction))
        entries = self._packs(packs)
        for block, location in blocks.items():
            self._row("block", block, location, entries.get((Kind.BLOCK, bytes(block))))
        for kind, id, location in records:
            self._row(kind.name.lower(), id, location, entries.get((kind, id)))
        self._records(records)
        if self._read_data:
            self._payloads(blocks)
        snapshots = self._snapshots(names, blocks)
        self._mirror(names)
        self._name_the_hurt(names)
        root = catalog.layout.root
        self._garbage += [str(path.relative_to(root)) for path in leases.garbage(catalog.layout)]
        return CheckReport(
            read_data=self._read_data,
            packs=len(packs),
            blocks=len(blocks),
            records=len(records),
            snapshots=snapshots,
            refs=len(names),
            bytes_read=self._bytes_read,
            garbage=tuple(self._garbage),
            problems=tuple(self._problems),
            seconds=time.monotonic() - began,
        )

    @contextmanager
    def _finding(self, kind: str, where: str) -> Iterator[None]:
        try:
            yield
        except MstoreError as error:
            self._problems.append(Problem(kind, where, error.what))

    def _problem(self, kind: str, where: str, what: str) -> None:
        self._problems.append(Problem(kind, where, what))

    # -- packs and index ---------------------------------------------------------------------

    def _packs(self, packs: dict[PackId, int]) -> dict[tuple[int, bytes], dict[PackId, Entry]]:
        """Entries by (kind, id) and pack; problems and unindexed packs on the way."""
        catalog = self._catalog
        found: dict[tuple[int, bytes], dict[PackId, Entry]] = {}
        on_disk = {path.name: path for path in catalog.layout.packs.glob("*/*")}
        for pack, size in packs.items():
            path = pack_path(catalog.layout.packs, pack)
            on_disk.pop(path.name, None)
            if not path.exists():
                self._problem("pack", pack.hex(), "the file is missing")
                continue
            with self._finding("pack", pack.hex()):
                id, entries = read_table(path)
                if id != pack:
                    self._problem("pack", pack.hex(), f"header and footer are those of {id.short}")
                if path.stat().st_size != size:
                    self._problem("pack", pack.hex(), f"not {size} bytes long")
                for entry in entries:
                    found.setdefault((entry.kind, entry.id), {})[pack] = entry
        root = catalog.layout.root
        self._garbage += [str(path.relative_to(root)) for path in on_disk.values()]
        return found

    def _row(
        self, kind: str, id: bytes, location: Location, entries: dict[PackId, Entry] | None
    ) -> None:
        entry = (entries or {}).get(location.pack)
        if entry is None:
            # A pack that is missing or unreadable was reported once; not again for each row.
            if not any(p.where == location.pack.hex() for p in self._problems):
                what = f"not in the footer of pack {location.pack.short}"
                self._problem(kind, id.hex(), what)
            return
        told = (entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width)
        row = (
            location.offset,
            location.stored_length,
            location.raw_length,
            location.codec,
            location.width,
        )
        if told != row:
            self._problem(kind, id.hex(), "index and pack footer do not agree")

    def _records(self, records: list[tuple[Kind, bytes, Location]]) -> None:
        for kind, raw, location in records:
            with self._finding(kind.name.lower(), raw.hex()):
                type_ = _RECORDS[kind]
                data = self._catalog.record_bytes(type_.id_type(raw), location)
                record = decode(type_, data, raw.hex())
                if isinstance(record, Tensor):
                    record.check(self._catalog.block_size, raw.hex())
                elif isinstance(record, VirtualTensor):
                    record.check(raw.hex())

    def _payloads(self, blocks: dict[BlockId, Location]) -> None:
        # In pack order, so that a disk reads forward.
        ordered = sorted(blocks.items(), key=lambda item: (item[1].pack, item[1].offset))
        total = sum(location.stored_length for _, location in ordered)
        for block, location in ordered:
            with self._finding("block", block.hex()):
                self._catalog.read_block(block, location)
            self._bytes_read += location.stored_length
            if self._progress is not None:
                self._progress(Progress("fsck", self._bytes_read, total))

    # -- snapshots ---------------------------------------------------------------------------

    def _snapshots(self, names: dict[str, refs.Ref], blocks: dict[BlockId, Location]) -> int:
        known = set(self._catalog.snapshot_ids())
        for name, ref in names.items():
            if ref.snapshot_id() not in known:
                self._problem("ref", name, f"points at {ref.snapshot_id().short}, which is missing")
        for snapshot in sorted(known):
            with self._finding("snapshot", snapshot.hex()):
                self._snapshot(snapshot, known, blocks)
        return len(known)

    def _snapshot(
        self, id: SnapshotId, known: set[SnapshotId], blocks: dict[BlockId, Location]
    ) -> None:
        record = self._catalog.snapshot(id)
        for parent in record.parents:
            if parent.snapshot_id() not in known:
                missing = parent.snapshot_id().short
                self._problem("snapshot", id.hex(), f"its {parent.role} {missing} is missing")
        told: list[tuple[type[Record], Id | None]] = [
            (Plan, None if record.plan is None else PlanId(record.plan)),
            (Coverage, None if record.coverage is None else CoverageId(record.coverage)),
        ]
        for kind, named in told:
            if named is not None:
                self._catalog.record(kind, named)
        if record.is_virtual:
            plan = self._catalog.record(Plan, PlanId(record.plan or b""))
            for manifest in (plan.base_id(), *(expert.manifest_id() for expert in plan.experts)):
                self._manifest(manifest, blocks)
        self._manifest(record.manifest_id(), blocks)

    def _manifest(self, id: ManifestId, blocks: dict[BlockId, Location]) -> None:
        for file in self._catalog.manifest(id).files:
            if file.size != sum(part.nbytes for part in file.parts):
                self._problem("manifest", id.hex(), f"{file.path}: parts and size do not agree")
            for part in file.parts:
                tensor = part.tensor_id()
                if tensor in self._sound:
                    continue
                where = f"{file.path}: {part.name}" if part.name is not None else file.path
                record = self._catalog.content(tensor)
                kind = type(record).kind.name.lower()
                if record.nbytes != part.nbytes:
                    self._problem(kind, tensor.hex(), f"{where}: another length")
                self._sound.add(tensor)
                if isinstance(record, VirtualTensor):
                    self._virtual(tensor, record, where)
                    continue
                for number, block in enumerate(record.block_ids()):
                    location = blocks.get(block)
                    length = record.block_length(number, self._catalog.block_size)
                    if location is None:
                        self._problem("block", block.hex(), f"{where}: missing")
                    elif location.raw_length != length:
                        self._problem("block", block.hex(), f"{where}: another length")

    def _virtual(self, id: TensorId, record: VirtualTensor, where: str) -> None:
        id_of_plan = record.plan_id()
        if id_of_plan not in self._planned:
            plan = self._catalog.record(Plan, id_of_plan)
            self._planned[id_of_plan] = frozenset(tensor.name for tensor in plan.tensors)
        if record.tensor not in self._planned[id_of_plan]:
            self._problem("virtual", id.hex(), f"{where}: not in plan {id_of_plan.short}")

    def _name_the_hurt(self, names: dict[str, refs.Ref]) -> None:
        """Add to each broken block's finding one ref, file and tensor that need it."""
        broken = {problem.where for problem in self._problems if problem.kind == "block"}
        hurt: dict[str, str] = {}
        for name, ref in names.items() if broken else ():
            with suppress(MstoreError):
                record = self._catalog.snapshot(ref.snapshot_id())
                for file in self._catalog.manifest(record.manifest_id()).files:
                    for part in file.parts:
                        tensor = self._catalog.content(part.tensor_id())
                        for block in tensor.block_ids() if isinstance(tensor, Tensor) else ():
                            if block.hex() in broken:
                                place = f"{name}:{file.path}" + (
                                    f" {part.name}" if part.name else ""
                                )
                                hurt.setdefault(block.hex(), place)
        self._problems = [
            Problem(p.kind, p.where, f"{p.what}; needed by {hurt[p.where]}")
            if p.kind == "block" and p.where in hurt
            else p
            for p in self._problems
        ]

    def _mirror(self, names: dict[str, refs.Ref]) -> None:
        # A crash right after a commit leaves the mirror behind; the next writer refreshes it.
        path = self._catalog.layout.mirror
        if not names and not path.exists():
            return
        known = set(self._catalog.snapshot_ids())
        with self._finding("mirror", str(path)):
            for name, ref in refs.read_mirror(self._catalog.layout).items():
                if ref.snapshot_id() not in known:
                    missing = ref.snapshot_id().short
                    self._problem("mirror", str(path), f"{name} is at {missing}, which is missing")
