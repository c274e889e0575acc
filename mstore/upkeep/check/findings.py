"""Findings: what a check found, for people and for repair.

Only `Corrupt`, and `NotFound` of what must be there, become findings: any other error says what
this machine cannot do, and ends the check (`mstore.terms.errors`).

A *problem* is a line for people. For repair there are also the broken blocks and records, each with
the index row that was seen (None if there is none), and the damaged packs.

*Affected* are the snapshots, files and tensors that cannot be read because something is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from mstore.blocks.location import Key, Row, base_of, pack_number
from mstore.blocks.packs import Kind
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import Record
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.note import Note
from mstore.store.objects.plan import Coverage, Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.terms.errors import Corrupt, NotFound, Unreadable
from mstore.terms.ids import BlockId, Id, PackId, SnapshotId, TensorId
from mstore.terms.report import Report

RECORDS: dict[Kind, type[Record]] = {
    Kind.TENSOR: Tensor,
    Kind.MANIFEST: Manifest,
    Kind.SNAPSHOT: SnapshotRecord,
    Kind.PLAN: Plan,
    Kind.COVERAGE: Coverage,
    Kind.VIRTUAL: VirtualTensor,
    Kind.NOTE: Note,
}


class Problem(Report, frozen=True):
    """One finding of `fsck`."""

    kind: str
    """kind of problem"""
    where: str
    """the object or file"""
    what: str
    """what is wrong"""


class Findings:
    """What one check has found so far.

    broken: rows that cannot be used as they are; the value is the row that was seen. unreadable:
    those of them where the disk failed, not the bytes. packs: damaged packs and what is wrong with
    each; their rows are not in `broken`. incomplete: snapshots whose own index rows disagree with
    their record. stale_mirror: the mirror or the pack list is missing or damaged. is_index_wrong:
    rows of the index disagree with their checks, the mirror or the generations, so that only a new
    index helps.
    """

    def __init__(self) -> None:
        self._problems: dict[tuple[str, str, str], Problem] = {}
        self.garbage: list[str] = []
        self.broken: dict[Key, Row | None] = {}
        self.unreadable: set[Key] = set()
        self.packs: dict[PackId, str] = {}
        self.incomplete: set[bytes] = set()
        self.stale_mirror = False
        self.is_index_wrong = False

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the order in which they were found."""
        return tuple(self._problems.values())

    def tell(self, kind: str, where: str, what: str) -> None:
        """Add a problem for people."""
        self._problems.setdefault((kind, where, what), Problem(kind, where, what))

    def tell_row(self, kind: Kind, id: bytes, row: Row | None, what: str) -> None:
        """Add a block or record that is missing, or whose row or payload is wrong."""
        self.broken.setdefault((kind, bytes(id)), row)
        self.tell(kind.name.lower(), id.hex(), what)

    def tell_pack(self, pack: PackId, what: str) -> None:
        """Add a damaged pack."""
        self.packs.setdefault(pack, what)
        self.tell("pack", pack.hex(), what)

    def forget_row(self, kind: Kind, id: bytes) -> None:
        """Remove a row: another process changed it during the check, so it is not damaged."""
        self.broken.pop((kind, id), None)
        self._forget(kind.name.lower(), id.hex())

    def forget_pack(self, pack: PackId) -> None:
        """Remove a pack: it was collected during the check."""
        self.packs.pop(pack, None)
        self._forget("pack", pack.hex())

    def _forget(self, kind: str, where: str) -> None:
        gone = [key for key in self._problems if key[:2] == (kind, where)]
        for key in gone:
            del self._problems[key]

    def confirm(self, earlier: Findings) -> None:
        """Keep only what an earlier pass found as well: real damage shows in every pass."""
        seen = {key[:2] for key in earlier._problems}
        self._problems = {key: told for key, told in self._problems.items() if key[:2] in seen}
        self.broken = {key: row for key, row in self.broken.items() if key in earlier.broken}
        self.incomplete &= earlier.incomplete
        self.stale_mirror &= earlier.stale_mirror
        self.is_index_wrong &= earlier.is_index_wrong

    def take(self, other: Findings) -> None:
        """Add the findings of another pass over the same store."""
        for key, told in other._problems.items():
            self._problems.setdefault(key, told)
        for broken, row in other.broken.items():
            self.broken.setdefault(broken, row)
        self.unreadable |= other.unreadable
        self.incomplete |= other.incomplete
        self.stale_mirror |= other.stale_mirror
        self.is_index_wrong |= other.is_index_wrong

    @contextmanager
    def catching(self, kind: str, where: str) -> Iterator[None]:
        """Turn damage that an error inside the block tells of into a problem."""
        try:
            yield
        except (NotFound, Corrupt) as error:
            self.tell(kind, where, error.what)

    @contextmanager
    def catching_row(self, kind: Kind, id: bytes, row: Row | None) -> Iterator[None]:
        """Turn damage that an error inside the block tells of into a broken block or record."""
        try:
            yield
        except Corrupt as error:
            self.tell_row(kind, id, row, error.what)
            if isinstance(error, Unreadable):
                self.unreadable.add((kind, bytes(id)))


def typed_id(kind: Kind, id: bytes) -> Id:
    """Return the id in its own type."""
    return BlockId(id) if kind == Kind.BLOCK else RECORDS[kind].id_type(id)


class Affected(Report, frozen=True):
    """What of a snapshot cannot be read as it is: a tensor, a file, or all of it."""

    snapshot: SnapshotId
    """the snapshot's id"""
    refs: tuple[str, ...]
    """the refs of that snapshot; empty if it has none"""
    path: str | None
    """the file; None: the whole snapshot"""
    tensor: str | None
    """the tensor; None: a header or a plain file"""
    blocks: int
    """how many of its blocks are lost; 0: its record is lost"""


class AffectedTensors:
    """Finds the affected tensors, checking each once; re-reads blocks in damaged packs."""

    def __init__(self, catalog: Catalog, findings: Findings) -> None:
        self._catalog = catalog
        self._findings = findings
        self._blocks: dict[bytes, bool] = {}
        self._tensors: dict[TensorId, int] = {}
        with catalog.index.env.read() as transaction:
            numbers = [catalog.index.pack_number(transaction, pack) for pack in findings.packs]
        self._damaged = {number for number in numbers if number is not None}

    def all(
        self, names: dict[str, refs.Ref], pruned: AbstractSet[SnapshotId]
    ) -> tuple[Affected, ...]:
        """Return everything that is affected, by snapshot; empty if nothing is."""
        if not self._findings.broken and not self._findings.packs:
            return ()
        called = defaultdict(list)
        for name, ref in names.items():
            called[ref.snapshot_id()].append(name)
        found = []
        for id in sorted(self._catalog.snapshot_ids(), key=lambda id: (id not in called, id)):
            if id not in pruned:
                found += self._snapshot(id, tuple(called.get(id, ())))
        return tuple(found)

    def _snapshot(self, id: SnapshotId, names: tuple[str, ...]) -> list[Affected]:
        try:
            manifest = self._catalog.manifest_of(id)
        except (NotFound, Corrupt):
            return [Affected(id, names, None, None, 0)]
        found = []
        for file in manifest.files:
            for part in file.parts:
                lost = self._tensor(part.tensor_id())
                if lost is not None:
                    found.append(Affected(id, names, file.path, part.name, lost))
        return found

    def _tensor(self, id: TensorId) -> int | None:
        """Return how many of its blocks are lost; 0 if its record is, None if it is whole."""
        if id not in self._tensors:
            self._tensors[id] = self._looked_at(id)
        lost = self._tensors[id]
        return None if lost < 0 else lost

    def _looked_at(self, id: TensorId) -> int:
        try:
            content = self._catalog.content(id)
        except (NotFound, Corrupt):
            return 0
        if not isinstance(content, Tensor):
            return -1
        blocks = list(content.block_ids())
        index = self._catalog.index
        with index.env.read() as transaction:
            found = index.readable_rows(transaction, blocks)
        lost = sum(self._is_lost(block, row) for block, row in zip(blocks, found, strict=True))
        return lost or -1

    def _is_lost(self, block: BlockId, row: Row | None) -> bool:
        if row is None:
            return True
        if block not in self._blocks:
            self._blocks[block] = self._reads_wrong(block, row)
        return self._blocks[block]

    def _reads_wrong(self, block: BlockId, row: Row) -> bool:
        if (Kind.BLOCK, bytes(block)) in self._findings.broken:
            return True
        base = base_of(row)
        if base is not None:
            with self._catalog.index.env.read() as transaction:
                [under] = self._catalog.index.readable_rows(transaction, [base])
            if self._is_lost(BlockId(base), under):
                return True
        if pack_number(row) not in self._damaged:
            return False
        try:
            self._catalog.read_block(block)
        except Corrupt:
            return True
        return False
