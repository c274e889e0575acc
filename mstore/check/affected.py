"""Affected: the snapshots, files and tensors that cannot be read because something is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet

from mstore.blocks.location import Row, base_of, pack_number
from mstore.blocks.packs import Kind
from mstore.check.findings import Findings
from mstore.errors import Corrupt, NotFound
from mstore.frozen import frozen
from mstore.ids import BlockId, SnapshotId, TensorId
from mstore.objects.tensor import Tensor
from mstore.store import refs
from mstore.store.catalog import Catalog


@frozen
class Affected:
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
        self._numbers = self._damaged_numbers()

    def _damaged_numbers(self) -> set[int]:
        index = self._catalog.index
        with index.env.read() as transaction:
            return {
                number
                for pack in self._findings.packs
                if (number := index.pack_number(transaction, pack)) is not None
            }

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
            found = index.block_rows(transaction, blocks)
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
                under = self._catalog.index.row(transaction, (Kind.BLOCK, base))
            if self._is_lost(BlockId(base), under):
                return True
        if pack_number(row) not in self._numbers:
            return False
        try:
            self._catalog.read_block(block)
        except Corrupt:
            return True
        return False
