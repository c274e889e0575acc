"""Virtual blocks: blocks of merges that were committed as plans, computed when they are read.

Owns the way from a virtual tensor and a block number to verified bytes: task, inputs, kernel, id.
Keeps no blocks: that is the reader's cache (`store.block_cache`). The memo table keeps the id of
every block that was computed, even while the block itself is stored nowhere; a block that comes out
differently than before is Corrupt, and never returned.

The bytes are those of the real merge of the same plan. Reads of experts are charged as in that
merge, but chunk by chunk: each to a limit of what the plan reads for it, in bytes at rest at that
time, because readers stay while blocks are stored in another form.

Safe for any number of threads. Memory: one chunk of each side per thread, and what readers keep.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import numpy.typing as npt

from mstore.blocks.reader import Meter
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.compute import blend, count_new, tie_counts
from mstore.merge.running.loading import Loaded, Scratch, load, will_need
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.task import ChunkTask, Tasks, TensorTask, item_size
from mstore.merge.running.ties import TiePrefix, grant_of
from mstore.store.block_cache import VirtualBlock
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.objects.plan import READ, Plan
from mstore.store.objects.tensor import Tensor, VirtualTensor, partition
from mstore.store.payloads import LOOKS
from mstore.terms.errors import Conflict, Corrupt, MstoreError
from mstore.terms.ids import BlockId, Buffer, PlanId, VirtualId
from mstore.terms.phrases import call

_BATCH = 32
_BATCHES_KEPT = 16
_FLUSH_ROWS = 1024


_Batch = dict[int, tuple[bytes, ChunkTask]]


class _Plan:
    """A plan that virtual tensors name, and what it has cost so far."""

    def __init__(self, catalog: Catalog, id: PlanId) -> None:
        plan = catalog.record(Plan, id)
        check_fits(catalog, plan)
        self.id = id
        self.first_reads = Meter("expert")
        self.tasks = Tasks(catalog, plan, self.first_reads)
        self.keys = MemoKeys(self.tasks)
        self.names = {tensor.name for tensor in plan.tensors}


class _Tensor:
    """A virtual tensor: what its chunks have in common, and what is known of them."""

    def __init__(self, catalog: Catalog, plan: _Plan, id: VirtualId, record: VirtualTensor) -> None:
        where = f"virtual tensor {id}"
        if record.tensor not in plan.names:
            raise Corrupt(f"not in plan {plan.id}", where=where, hint=call("fsck"))
        self.plan = plan
        self.task: TensorTask = plan.tasks.tensor(record.tensor)
        if (record.dtype, record.shape) != (self.task.out_dtype, self.task.shape):
            raise Corrupt("its plan makes another dtype or shape", where=where, hint=call("fsck"))
        members = plan.tasks.members(record.tensor)
        self.base: Tensor = members.base
        self.states = members.states
        self.reused: npt.NDArray[np.bool_] = plan.tasks.reused(self.task)
        self.blocks = record.blocks(catalog.block_size)
        self.per_chunk = (
            self.task.chunk_elements * item_size(self.task.out_dtype) // catalog.block_size
        )
        self.prefix = TiePrefix(self.task.quotas.tolist()) if self.task.limited else None
        self._lock = threading.Lock()
        self._read: set[int] = set()

    def numbers(self, chunk: int) -> range:
        """Return the block numbers of a chunk."""
        return range(chunk * self.per_chunk, min((chunk + 1) * self.per_chunk, self.blocks))

    def chunks(self, first: int) -> _Batch:
        """Return memo key and task of each chunk of a batch, except the base's own chunks.

        Looks into the index once. Raises Corrupt if an input is not stored.
        """
        end = min(first + _BATCH, self.task.chunks)
        numbers = [number for number in range(first, end) if not self.reused[number]]
        keys = self.plan.keys.chunks(self.task, numbers)
        tasks = self.plan.tasks.chunks(self.task, numbers)
        return dict(zip(numbers, zip(keys, tasks, strict=True), strict=True))

    def meter(self, task: ChunkTask) -> Meter:
        """Return the meter to charge for reading this chunk's experts: only what is planned.

        Its limit is in bytes at rest as they are now: `pin`, `unpin` and `gc` change them.
        """
        planned = {
            row
            for row, states in zip(task.row_of, self.states, strict=True)
            if states[task.number] == READ
        }
        return Meter("expert", sum(task.rows[row].stored_bytes for row in planned))

    def count(self, number: int, length: int) -> None:
        """Count what was read of experts for a chunk, once."""
        with self._lock:
            if number in self._read:
                return
            self._read.add(number)
        self.plan.first_reads.charge(length)


class VirtualBlocks:
    """Computes virtual blocks for the views of one store (`mstore.store.block_cache.Computing`)."""

    def __init__(self, catalog: Catalog, memo: Memo, *, threads: int) -> None:
        self._catalog = catalog
        self._memo = memo
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "virtual")
        self._lock = threading.Lock()
        self._plans: dict[PlanId, _Plan] = {}
        self._tensors: dict[VirtualId, _Tensor] = {}
        self._batches: OrderedDict[tuple[_Tensor, int], _Batch] = OrderedDict()
        # Separate, because a chunk is already loaded when the ties of a gap are counted.
        self._scratch = Scratch()
        self._gap_scratch = Scratch()
        self._base_meter = Meter("base")
        self._unflushed = 0

    def close(self) -> None:
        """Finish running computations, cancel waiting ones, and write the memo table."""
        self._pool.shutdown(cancel_futures=True)
        self._flush()

    @property
    def first_expert_bytes(self) -> int:
        """Bytes of experts read so far, each chunk once however often it was computed."""
        with self._lock:
            return sum(plan.first_reads.total for plan in self._plans.values())

    # -- what views ask ------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """How many chunks a sequential reader should request ahead."""
        return 2 * self._threads + 1

    def place(self, block: VirtualBlock) -> BlockId | None:
        """Return the base's own block if no expert takes part in this one."""
        tensor = self._tensor(block.tensor)
        if tensor.reused[block.number // tensor.per_chunk]:
            return tensor.base.block(block.number)
        return None

    def group(self, block: VirtualBlock) -> range:
        """Return the blocks of the chunk that contains this one."""
        tensor = self._tensor(block.tensor)
        return tensor.numbers(block.number // tensor.per_chunk)

    def submit(self, tensor: VirtualId, group: range) -> Future[list[Buffer]]:
        """Compute a group on the pool, and read its inputs ahead meanwhile."""
        found = self._tensor(tensor)
        number = group.start // found.per_chunk
        with suppress(MstoreError):
            # The worker meets the same error and reports it to the reader.
            will_need([self._chunk(found, number)[1]], self._catalog.packs)
        return self._pool.submit(self._compute, found, number)

    def _tensor(self, id: VirtualId) -> _Tensor:
        found = self._tensors.get(id)
        if found is None:
            record = self._catalog.record(VirtualTensor, id)
            with self._lock:
                plan = self._plans.get(record.plan_id())
                if plan is None:
                    plan = self._plans[record.plan_id()] = _Plan(self._catalog, record.plan_id())
                found = self._tensors.get(id)
                if found is None:
                    found = self._tensors[id] = _Tensor(self._catalog, plan, id, record)
        return found

    def _chunk(self, tensor: _Tensor, number: int) -> tuple[bytes, ChunkTask]:
        """Return one chunk's memo key and task; loads those of its neighbours too."""
        first = number - number % _BATCH
        with self._lock:
            batch = self._batches.get((tensor, first))
            if batch is not None:
                self._batches.move_to_end((tensor, first))
                return batch[number]
        batch = tensor.chunks(first)
        with self._lock:
            self._batches[tensor, first] = batch
            while len(self._batches) > _BATCHES_KEPT:
                self._batches.popitem(last=False)
        return batch[number]

    def _forget(self, tensor: _Tensor, number: int) -> None:
        """Look this chunk up again when it is needed next."""
        with self._lock:
            self._batches.pop((tensor, number - number % _BATCH), None)

    # -- computing -----------------------------------------------------------------------------

    def _compute(self, tensor: _Tensor, number: int) -> list[Buffer]:
        with tensor.prefix.counting(number) if tensor.prefix is not None else nullcontext():
            key, loaded = self._load(tensor, number, self._scratch)
            quotas, taken = self._quotas(tensor, loaded)
        task = loaded.task
        out = np.empty(task.out_bytes, dtype=np.uint8)
        blend(loaded, quotas, out)
        blocks: list[Buffer] = [
            out.data[start : start + length]
            for start, length in partition(len(out), self._catalog.block_size)
        ]
        ids = [BlockId.of(block) for block in blocks]
        self._verify(tensor, number, key, Remembered.of(task, ids, taken, count_new(loaded, out)))
        return blocks

    def _verify(self, tensor: _Tensor, number: int, key: bytes, made: Remembered) -> None:
        """Compare ids with the memo table, or add them. Raises Corrupt if they differ."""
        row = self._memo.outputs([key])[0]
        known = None if row is None else Remembered.decode(row)
        if known is None:
            self._remember(key, made.encode())
        elif known.blocks != made.blocks:
            numbers = tensor.numbers(number)
            pairs = zip(known.blocks, made.blocks, numbers, strict=False)
            block = next((n for before, now, n in pairs if before != now), numbers[0])
            raise Corrupt(
                "the recomputed block differs from the memo table",
                where=f"plan {tensor.plan.id}, tensor {tensor.task.name}, block {block}",
                hint=call("fsck", read_data=True),
            )

    def _load(self, tensor: _Tensor, number: int, scratch: Scratch) -> tuple[bytes, Loaded]:
        """Load a chunk, with its memo key; it is looked up again if its blocks moved meanwhile."""
        moved = tensor.plan.tasks.moved
        for look in range(LOOKS):
            try:
                key, task = self._chunk(tensor, number)
                meter = tensor.meter(task)
                (found,) = load(
                    [task], self._catalog.packs, scratch, meter, self._base_meter, moved
                )
            except (Conflict, Corrupt):
                # Its blocks may be stored in another form since, or while, they were looked up.
                if look == LOOKS - 1:
                    raise
                self._forget(tensor, number)
            else:
                tensor.count(number, meter.total)
                return key, found
        raise AssertionError("the last look returns or raises")

    def _quotas(
        self, tensor: _Tensor, loaded: Loaded
    ) -> tuple[npt.NDArray[np.int64], Sequence[int]]:
        """Return the ties that a chunk may keep of each expert, and the used limited quotas."""
        if tensor.prefix is None:
            return tensor.task.quotas, [0] * len(tensor.task.quotas)
        left = tensor.prefix.before(
            loaded.task.number, lambda gap, wanted: self._count(tensor, gap, wanted)
        )
        ties = tie_counts(loaded, [quota > 0 for quota in left])
        tensor.prefix.report(loaded.task.number, ties)
        grant = grant_of(left, ties)
        return np.array(grant.quotas, dtype=np.int64), grant.taken

    def _count(self, tensor: _Tensor, number: int, wanted: list[bool]) -> Sequence[int]:
        """Count the ties of a chunk that was not read yet, for the quotas of a later one."""
        if tensor.reused[number]:
            return [0] * len(wanted)
        _, loaded = self._load(tensor, number, self._gap_scratch)
        return tie_counts(loaded, wanted)

    def _remember(self, key: bytes, row: bytes) -> None:
        self._memo.put_outputs([(key, row)])
        with self._lock:
            self._unflushed += 1
            due = self._unflushed >= _FLUSH_ROWS
        if due:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            self._unflushed = 0
        # The store may be another user's: without a memo row the block is recomputed unchecked.
        with suppress(MstoreError):
            self._memo.flush()
