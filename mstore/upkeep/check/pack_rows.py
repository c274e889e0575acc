"""The rows of blocks and records, rebuilt from packs: the first half of a new index.

Of several packs with the same payload, the newest that reads correctly wins: there the payload was
moved last, to lie raw for instance (`upkeep.pins`). One that needs no base goes before one that
does. Deltas whose base is in no pack are left out. So is what is damaged; what this machine cannot
read now ends the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.location import Key, Row, base_of, raw_length
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Footer, Kind
from mstore.blocks.reader import RECORD_LIMIT, BlockReader
from mstore.store import pack_list
from mstore.store.layout import Layout
from mstore.store.objects.canonical import MAX_COUNT, decode
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, Buffer, ManifestId, PackId, TensorId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter
from mstore.upkeep.check.index_file import OldIndex
from mstore.upkeep.check.packs import payload


class PackRows:
    """Fills `blocks`, `records` and `packs` of a new index, and reads through these rows.

    homes: which packs have a snapshot's record. remarks: what was left out, and what is doubtful.
    """

    def __init__(
        self,
        layout: Layout,
        index: Index,
        packs: Packs,
        old: OldIndex,
        progress: ProgressCallback | None,
    ) -> None:
        self._layout = layout
        self._index = index
        self._old = old
        self._since = pack_list.read(layout).since
        self._progress = progress
        self._kept = packs
        self._reader = BlockReader(packs, layout.block_size)
        self._doubles: dict[Key, list[Row]] = {}
        self._whole: dict[TensorId, bool] = {}
        self._manifests: dict[ManifestId, bool] = {}
        self.homes: dict[bytes, set[PackId]] = {}
        self.remarks: list[str] = []

    def fill(self) -> int:
        """Take every pack of this store; return how many there are."""
        count = self._packs()
        self._settle_doubles()
        self._leave_out_orphans()
        return count

    def _packs(self) -> int:
        # Packs without a line may be later than the list.
        packs = sorted(
            self._kept.listed(),
            key=lambda pack: self._since.get(pack, MAX_COUNT),
            reverse=True,
        )
        sizes = [self._kept.size(pack) for pack in packs]
        tick = ProgressCounter("reindex", sum(sizes), self._progress)
        count = 0
        for id, size in zip(packs, sizes, strict=True):
            try:
                footer = self._kept.table(id)
            except Corrupt as error:
                self.remarks.append(f"pack {id.hex()} is left out: {error.what}")
                continue
            entries = footer.entries
            if id in self._old.condemned or not self._is_ours(footer):
                continue
            for entry in entries:
                if entry.kind == Kind.SNAPSHOT:
                    self.homes.setdefault(entry.id, set()).add(id)
            self._pack(footer)
            count += 1
            tick(size)
        return count

    def _is_ours(self, footer: Footer) -> bool:
        """Return whether to take a pack, with a remark where that is a guess.

        One without a line may be the latest of the store; one of another block size cannot be.
        """
        if footer.id in self._old.packs:
            return True
        if not fits(self._layout, self._kept, footer):
            self.remarks.append(
                phrase(
                    "pack {pack} is left out: it is of a store with another block size ({gc} moves "
                    "it to lost+found; {repair} takes copies from the store itself)",
                    pack=footer.id.hex(),
                    gc=call("gc"),
                    repair=call("repair", sources=("STORE",)),
                )
            )
            return False
        if footer.id not in self._since:
            self.remarks.append(
                f"pack {footer.id.hex()} is taken, and had no line in the pack list"
            )
        return True

    def _pack(self, pack: Footer) -> None:
        keys: list[Key] = []
        for entry in pack.entries:
            # Records of a kind that this version does not know get their rows as well.
            with suppress(ValueError):
                keys.append((Kind(entry.kind), entry.id))
        index = self._index
        with index.env.write() as transaction:
            known = {key: row for key in keys if (row := index.row(transaction, key)) is not None}
            # Delete known rows, to see the rows that this pack would have on its own.
            for key in known:
                index.delete_row(transaction, key)
            index.insert_pack(transaction, pack)
            for key, row in known.items():
                mine = index.row(transaction, key)
                assert mine is not None
                self._doubles.setdefault(key, [row]).append(mine)
                index.put_row(transaction, key, row)

    def _settle_doubles(self) -> None:
        """Choose, for each payload that several packs have, the newest that reads correctly."""
        index = self._index
        # Deltas last: their bases must be settled first.
        for is_delta in (False, True):
            settled = {
                key: row
                for key, found in self._doubles.items()
                if (row := self._first_right(key, found, is_delta=is_delta)) is not None
            }
            with index.env.write() as transaction:
                for key, row in settled.items():
                    index.put_row(transaction, key, row)
                    del self._doubles[key]

    def _first_right(self, key: Key, found: list[Row], *, is_delta: bool) -> Row | None:
        for row in found:
            if (base_of(row) is not None) == is_delta:
                with suppress(Corrupt):
                    payload(self._index, self._reader, key, row)
                    return row
        return None

    def _leave_out_orphans(self) -> None:
        """Drop deltas whose base is missing, or cannot be one."""
        index = self._index
        left_out = 0
        for batch in index.block_batches():
            deltas = [(id, row, base) for id, row in batch if (base := base_of(row))]
            if not deltas:
                continue
            with index.env.read() as transaction:
                bases = index.base_rows(transaction, [base for _, _, base in deltas])
            # The tables of a lazy remote may be lost, too: what is not here may be there.
            may_lack = index.elsewhere is not None
            orphans = [
                id
                for (id, row, _), base in zip(deltas, bases, strict=True)
                if not (base is None and may_lack)
                and (base is None or base_of(base) or raw_length(base) != raw_length(row))
            ]
            left_out += len(orphans)
            if orphans:
                with index.env.write() as transaction:
                    for id in orphans:
                        index.delete_row(transaction, (Kind.BLOCK, id))
        if left_out:
            self.remarks.append(f"{left_out} deltas are left out: their bases are in no pack")

    # -- reading by the rows -----------------------------------------------------------------

    def record(self, kind: Kind, id: bytes) -> Buffer | None:
        """Return the bytes of a record; None if it is missing or wrong."""
        with self._index.env.read() as transaction:
            row = self._index.row(transaction, (kind, id))
        if row is None:
            return None
        try:
            return payload(self._index, self._reader, (kind, id), row)
        except Corrupt:
            return None

    def is_complete(self, record: SnapshotRecord) -> bool:
        """Return whether everything that a snapshot consists of has its rows."""
        manifests = self._manifests_of(record)
        return manifests is not None and all(map(self._has_contents, manifests))

    def _manifests_of(self, record: SnapshotRecord) -> list[ManifestId] | None:
        """Return the contents that a snapshot needs; None if its plan cannot be read."""
        manifests = [record.manifest_id()]
        plan = record.plan_id()
        if plan is not None and record.is_virtual:
            data = self.record(Kind.PLAN, plan)
            if data is None:
                return None
            manifests += decode(Plan, data, plan.hex()).manifest_ids()
        return manifests

    def tensors_of(self, records: Iterable[SnapshotRecord]) -> set[bytes]:
        """Return the tensors of these snapshots, as far as their manifests can be read."""
        manifests = {id for one in records for id in self._manifests_of(one) or ()}
        found: set[bytes] = set()
        for id in manifests:
            data = self.record(Kind.MANIFEST, id)
            if data is not None:
                files = decode(Manifest, data, id.hex()).files
                found.update(part.tensor for file in files for part in file.parts)
        return found

    def _has_contents(self, id: ManifestId) -> bool:
        if id not in self._manifests:
            data = self.record(Kind.MANIFEST, id)
            self._manifests[id] = data is not None and all(
                self.has_tensor(part.tensor_id())
                for file in decode(Manifest, data, id.hex()).files
                for part in file.parts
            )
        return self._manifests[id]

    def has_tensor(self, id: TensorId) -> bool:
        """Return whether a tensor has its rows: its own, and those of all its blocks."""
        if id not in self._whole:
            data = self.record(Kind.TENSOR, id)
            if data is None:
                self._whole[id] = self.record(Kind.VIRTUAL, id) is not None
            else:
                blocks = [BlockId(b) for b in decode(Tensor, data, id.hex()).block_ids()]
                with self._index.env.read() as transaction:
                    rows = self._index.readable_rows(transaction, blocks)
                    # As above.
                    self._whole[id] = None not in rows or self._index.elsewhere is not None
        return self._whole[id]


def fits(layout: Layout, packs: Packs, footer: Footer) -> bool:
    """Return whether a pack can be one of this store, by its blocks and tensor records.

    Raises Corrupt, StorageFailed.
    """
    for entry in footer.entries:
        if entry.kind == Kind.BLOCK and entry.raw_length > layout.block_size:
            return False
        if entry.kind == Kind.TENSOR and entry.stored_length <= RECORD_LIMIT:
            data = packs.read(footer.id, entry.offset, entry.stored_length)
            with suppress(Corrupt):
                if not decode(Tensor, data, footer.id.hex()).fits(layout.block_size):
                    return False
    return True
