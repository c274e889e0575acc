"""Virtual blocks: blocks of merges that were committed as plans, computed when they are read.

Owns the way from a virtual tensor and a block number to verified bytes: task, inputs, kernel, id.
Keeps no blocks in memory: that is the reader's cache (`store.block_cache`). The memo table keeps
the id of every block that was computed, even while the block itself is stored nowhere; a block that
comes out differently than before is Corrupt, and never returned. A block of a remembered id that
the cache on disk has is not computed (`merge.virtual.kept`).

The bytes are those of the real merge of the same plan. Reads of experts are charged as in that
merge, but chunk by chunk: each to a limit of what the plan reads for it, in bytes at rest at that
time, because readers stay while blocks are stored in another form.

Safe for any number of threads. Memory: one chunk of each side per thread, and what readers keep.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import numpy.typing as npt

from mstore.blocks.reader import Meter
from mstore.merge.methods.registry import changed
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.compute import blend, count_new, tie_counts
from mstore.merge.running.finished import Shape
from mstore.merge.running.loading import CheckedPlaces, LoadBuffers, Loaded, load, will_need
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.slices import TiePrefix, grant_of
from mstore.merge.running.task import ChunkTask, Tasks, TensorTask, item_size
from mstore.merge.virtual.kept import KeptBlocks
from mstore.store.block_cache import VirtualBlock
from mstore.store.catalog import Catalog
from mstore.store.disk_cache import ComputedBlock, DiskCache
from mstore.store.memo import Memo
from mstore.store.objects.plan import READ, Plan
from mstore.store.objects.tensor import Tensor, VirtualTensor, partition
from mstore.store.payloads import LOOKS
from mstore.terms.errors import Conflict, Corrupt, MstoreError
from mstore.terms.ids import BlockId, Buffer, PlanId, VirtualId
from mstore.terms.phrases import call

_BATCH = 32
_BATCHES_KEPT = 16


_Batch = dict[int, tuple[bytes, ChunkTask]]
_Made = list[tuple[ComputedBlock, Buffer]]


class _VirtualPlan:
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

    def __init__(
        self, catalog: Catalog, plan: _VirtualPlan, id: VirtualId, record: VirtualTensor
    ) -> None:
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
        self.shape = Shape(self.task, members, catalog.block_size)
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
    """Computes virtual blocks for the views of one store (`mstore.store.block_cache.Computing`).

    keep_again: asked for each chunk, whether its blocks are kept only if they were computed before:
    the memo table tells that.  What the same plan needs again, as readers dropped it, does not
    count.  check_always: whether raw blocks of inputs are checked against their ids each time that
    they are read, and not the first time only.
    """

    def __init__(
        self,
        catalog: Catalog,
        memo: Memo,
        cache: DiskCache,
        *,
        threads: int,
        keep_again: Callable[[], bool] = lambda: False,
        check_always: bool = False,
    ) -> None:
        self._catalog = catalog
        self._checked: CheckedPlaces | None = None if check_always else {}
        self._keep_again = keep_again
        self._first: dict[bytes, PlanId] = {}
        """The plan for which a chunk was computed here first, by its memo key."""
        self._kept = KeptBlocks(memo, cache)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "virtual")
        self._lock = threading.Lock()
        self._plans: dict[PlanId, _VirtualPlan] = {}
        self._tensors: dict[VirtualId, _Tensor] = {}
        self._batches: OrderedDict[tuple[_Tensor, int], _Batch] = OrderedDict()
        # Separate, because a chunk is already loaded when the ties of a gap are counted.
        self._scratch = LoadBuffers()
        self._gap_scratch = LoadBuffers()
        self._base_meter = Meter("base")

    def close(self) -> None:
        """Finish running computations, cancel waiting ones, and write what is to be kept."""
        self._pool.shutdown(cancel_futures=True)
        self._kept.flush()

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
        """Read or compute a group on the pool, and read its inputs ahead meanwhile."""
        found = self._tensor(tensor)
        number = group.start // found.per_chunk
        with suppress(MstoreError):
            # The worker meets the same error and reports it to the reader.
            key, task = self._chunk(found, number)
            named = self._blocks(found, number, task, self._kept.row(key))
            if named is None or not self._kept.has(named):
                will_need([task], self._catalog.packs)
        blocks: Future[list[Buffer]] = Future()
        work = self._pool.submit(self._make, found, number, blocks)
        # Where the pool is closed before it begins.
        work.add_done_callback(lambda done: done.cancelled() and blocks.cancel())
        return blocks

    def _make(self, tensor: _Tensor, number: int, blocks: Future[list[Buffer]]) -> None:
        """Read or compute a chunk; keep it once those who wait for it have it."""
        if not blocks.set_running_or_notify_cancel():
            return
        made: _Made = []
        try:
            blocks.set_result(self._read(tensor, number, made))
        except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
            blocks.set_exception(error)
        else:
            self._kept.keep(made)

    def _tensor(self, id: VirtualId) -> _Tensor:
        found = self._tensors.get(id)
        if found is None:
            record = self._catalog.record(VirtualTensor, id)
            with self._lock:
                plan = self._plans.get(record.plan_id())
                if plan is None:
                    plan = self._plans[record.plan_id()] = _VirtualPlan(
                        self._catalog, record.plan_id()
                    )
                found = self._tensors.get(id)
                if found is None:
                    found = self._tensors[id] = _Tensor(self._catalog, plan, id, record)
        return found

    def _chunk(self, tensor: _Tensor, number: int) -> tuple[bytes, ChunkTask]:
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

    # -- what is kept --------------------------------------------------------------------------

    def _blocks(
        self, tensor: _Tensor, number: int, task: ChunkTask, row: Remembered | None
    ) -> list[ComputedBlock] | None:
        """Return the blocks of a chunk by what is remembered of it; None if that does not fit."""
        if row is None or not tensor.shape.fits(number, row):
            return None
        pieces = partition(task.out_bytes, self._catalog.block_size)
        return [
            ComputedBlock(id, length) for id, (_, length) in zip(row.blocks, pieces, strict=True)
        ]

    def _read(self, tensor: _Tensor, number: int, made: _Made) -> list[Buffer]:
        """Return the blocks of a chunk: from the cache on disk; else computed, and in `made`."""
        key, task = self._chunk(tensor, number)
        row = self._kept.row(key)
        named = self._blocks(tensor, number, task, row)
        kept = None if named is None else self._kept.read(named)
        return self._compute(tensor, number, made, row) if kept is None else kept

    # -- computing -----------------------------------------------------------------------------

    def _compute(
        self, tensor: _Tensor, number: int, made: _Made, known: Remembered | None
    ) -> list[Buffer]:
        """Compute a chunk.  known: what is remembered of it."""
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
        row = Remembered.of(task, ids, taken, count_new(loaded, out))
        self._verify(tensor, number, key, known, row)
        if not self._keep_again() or self._first.get(key) != tensor.plan.id:
            made += zip(map(ComputedBlock, ids, map(len, blocks)), blocks, strict=True)
        return blocks

    def _verify(
        self, tensor: _Tensor, number: int, key: bytes, known: Remembered | None, made: Remembered
    ) -> None:
        """Compare a chunk with what is remembered of it, or remember it.  Raises Corrupt."""
        if known is None:
            self._first[key] = tensor.plan.id
            self._kept.remember(key, made)
        elif known.blocks != made.blocks:
            numbers = tensor.numbers(number)
            pairs = zip(known.blocks, made.blocks, numbers, strict=False)
            block = next((n for before, now, n in pairs if before != now), numbers[0])
            raise Corrupt(
                "the recomputed block differs from the memo table",
                where=f"plan {tensor.plan.id}, tensor {tensor.task.name}, block {block}",
                hint=changed(tensor.plan.tasks.operation(tensor.task.name).method.name)
                or call("fsck", read_data=True),
            )

    def _load(self, tensor: _Tensor, number: int, scratch: LoadBuffers) -> tuple[bytes, Loaded]:
        """Load a chunk, with its memo key; it is looked up again if its blocks moved meanwhile."""
        moved = tensor.plan.tasks.moved
        for look in range(LOOKS):
            try:
                key, task = self._chunk(tensor, number)
                meter = tensor.meter(task)
                (found,) = load(
                    [task],
                    self._catalog.packs,
                    scratch,
                    meter,
                    self._base_meter,
                    moved,
                    self._checked,
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
        """Count the ties of a chunk that was not computed, for the quotas of a later one."""
        if tensor.reused[number]:
            return [0] * len(wanted)
        row = self._kept.row(self._chunk(tensor, number)[0])
        if row is not None and tensor.shape.fits(number, row):
            return tensor.shape.ties(number, row)
        _, loaded = self._load(tensor, number, self._gap_scratch)
        return tie_counts(loaded, wanted)
