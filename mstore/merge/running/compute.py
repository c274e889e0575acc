"""Computing: from chunks to the ids and the encoded blocks of their output.

`blend` runs the kernel on a chunk in memory.  `Computer` loads batches (`loading`), blends, hashes,
and encodes the blocks that are not stored yet; it is safe for any number of threads.  `computed`
yields the batches of many slices in order, computed ahead on a pool of threads.  It owns how far
threads and disk work ahead, and that no chunk waits for ties that will never come.  Writes nothing.

Elements that become infinite or NaN and are finite in the base are counted: rows of the memo table
and receipts of interrupted merges keep the counts of their chunk, so they are known of every chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks import codecs
from mstore.blocks.codecs import Encoded, Policy
from mstore.blocks.pack_store import PackReads
from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.adapters import add_up
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED, count_ties
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.methods.selection import ChunkFacts
from mstore.merge.planning.costs import wanted_of
from mstore.merge.running.loading import (
    Bytes,
    LoadBuffers,
    Loaded,
    Moved,
    apply_adapters,
    load,
    will_need,
)
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.slices import (
    ALL_FINITE,
    Batch,
    BatchPart,
    Bounds,
    NotFinite,
    Result,
    Slice,
    TieLedger,
    batches,
)
from mstore.merge.running.task import ChunkTask, Tasks, TensorTask
from mstore.numeric.codes import INFINITIES, ITEMSIZES
from mstore.store.ahead import in_order, read_ahead
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import partition
from mstore.terms.errors import Incompatible
from mstore.terms.ids import BlockId


def blend(
    loaded: Loaded, quotas: npt.NDArray[np.int64] | Sequence[int], out: Bytes
) -> tuple[int, ...]:
    """Run the kernel into `out`, uint8[>= task.out_bytes]; return the result of `mix_chunk`.

    Raises Incompatible, with the tensor's name, for elements that the kernel refuses.
    """
    task, tensor = loaded.task, loaded.task.tensor
    if task.adds_products:
        experts = [task.rows[row].factors if row >= 0 else None for row in task.row_of]
        base, dtypes = loaded.sides[0], (tensor.base_dtype, tensor.out_dtype)
        add_up(tensor.mix, experts, base, dtypes[0], task.first_index, task.n, out, dtypes[1])
        return (0,) * len(experts)
    chunk = chunk_of(loaded, quotas)
    try:
        own = masks_of(tensor, chunk), weights_of(tensor, chunk)
        return tensor.kernel(tensor.mix, chunk, out, tensor.out_dtype, *own)
    except Incompatible as error:
        error.locate(tensor.name)
        raise


def masks_of(tensor: TensorTask, chunk: Chunk) -> Bytes | None:
    """Return uint8[K, n], 1 where an element is taken; None if the kernel itself selects."""
    length, numbers = tensor.row_length, tensor.numbers
    if numbers is not None:
        numbers = numbers[chunk.first_index // length :][: chunk.n // length]
    facts = ChunkFacts(length, tensor.mix.weights.tolist(), tensor.cut, numbers)
    return tensor.selection.masks(chunk, facts)


def weights_of(tensor: TensorTask, chunk: Chunk) -> Singles | None:
    """Return the factors that follow from a chunk; None if the tensor has them."""
    if tensor.chunk_factors is None:
        return None
    whole, weights = tensor.selection.is_whole, tensor.mix.weights.tolist()
    return tensor.chunk_factors.weights(chunk, tensor.shape, weights, whole=whole)


def chunk_of(loaded: Loaded, quotas: npt.NDArray[np.int64] | Sequence[int]) -> Chunk:
    """Return a chunk in the form that passes take; quotas as for `mix_chunk`."""
    task, tensor = loaded.task, loaded.task.tensor
    return Chunk(
        base=loaded.sides[0],
        base_dtype=tensor.base_dtype,
        rows=loaded.sides[1:],
        row_dtypes=[row.dtype for row in task.rows],
        row_of=task.row_of,
        n=task.n,
        first_index=task.first_index,
        thresholds=tensor.thresholds,
        quotas=quotas,
        keys=tensor.keys,
    )


def tie_counts(loaded: Loaded, wanted: Sequence[bool]) -> list[int]:
    """Count, per threshold, the elements that tie at it; 0 where it is not `wanted`."""
    task, tensor = loaded.task, loaded.task.tensor
    ties = [0] * len(wanted)
    for slot in range(len(wanted)):
        row = task.row_of[slot % len(task.row_of)]
        if row >= 0 and wanted[slot]:
            ties[slot] = count_ties(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
                float(tensor.thresholds[slot]),
            )
    return ties


class PlanChunks:
    """The chunks of a plan, each loaded alone, to look at and not to store.

    The meter of experts refuses a read beyond the plan.  Safe for any number of threads.
    """

    def __init__(self, catalog: Catalog, plan: Plan) -> None:
        planned = wanted_of(catalog, plan).read_bytes(catalog)
        self.expert_meter = Meter("expert", planned)
        self.base_meter = Meter("base")
        self.tasks = Tasks(catalog, plan, self.expert_meter)
        self._packs = catalog.packs
        self._scratch = LoadBuffers()

    def load(self, task: ChunkTask, ledger: TieLedger) -> tuple[Loaded, tuple[int, ...]]:
        """Return a chunk, and the quotas of ties that it may keep; waits for earlier chunks."""
        meters = self.expert_meter, self.base_meter
        (loaded,) = load([task], self._packs, self._scratch, *meters, self.tasks.moved)
        if task.adds_products:
            apply_adapters(loaded)
        return loaded, ledger.take(task.number, tie_counts(loaded, ledger.open)).quotas


_SIGN: Final = {2: 0x8000, 4: 0x80000000}


def not_finite(data: Bytes, dtype: str) -> npt.NDArray[np.bool_]:
    """Return bool[elements]: which of these stored elements are infinite or NaN."""
    size = ITEMSIZES[dtype]
    bits = data.view(f"<u{size}")
    found: npt.NDArray[np.bool_] = (bits & ~bits.dtype.type(_SIGN[size])) >= INFINITIES[dtype]
    return found


def count_new(loaded: Loaded, out: Bytes) -> NotFinite:
    """Count the elements of a chunk that are not finite in its output and finite in the base."""
    task, tensor = loaded.task, loaded.task.tensor
    if _is_finite(out, tensor.out_dtype):
        return ALL_FINITE
    base, *experts = loaded.sides
    new = not_finite(out, tensor.out_dtype)
    new &= ~not_finite(base[: task.n * ITEMSIZES[tensor.base_dtype]], tensor.base_dtype)
    made = new.copy()
    for row, side in zip(task.rows, experts, strict=True):
        # An adapter's product is made here: its factors may be finite.
        if row.factors is None:
            made &= ~not_finite(side[: task.n * ITEMSIZES[row.dtype]], row.dtype)
    return NotFinite(int(new.sum()), int(made.sum()))


def _is_finite(data: Bytes, dtype: str) -> bool:
    """Return whether all of these stored elements are finite.

    Two maxima, of the bits as signed and as unsigned numbers, take a fifth of the time of a mask
    and a comparison.  Of positive elements the largest bits are the first maximum, of negative
    ones the second.
    """
    size, infinity = ITEMSIZES[dtype], INFINITIES[dtype]
    if data.view(f"<i{size}").max() >= infinity:
        return False
    highest = int(data.view(f"<u{size}").max())
    return highest < _SIGN[size] | infinity


# -- batches -----------------------------------------------------------------------------------


class Output(msgspec.Struct, frozen=True, gc=False):
    """An output block, and its position in the output file.

    encoded: None if it need not be written.
    """

    id: BlockId
    file: str
    offset: int
    encoded: Encoded | None


class Computed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A batch's result.  The outputs are in `buffer`, until `Computer.recycle`."""

    slice: Slice
    results: tuple[Result, ...]
    outputs: tuple[Output, ...]
    buffer: npt.NDArray[np.uint8]


HasBlocks = Callable[[Sequence[BlockId]], Sequence[bool]]


class Computer:
    """Computes batches; safe for any number of threads.

    has_blocks: returns which of some blocks are already stored, so that they need no encoding; None
    if unknown. moved: as for `load`.  Both are called from any thread.
    """

    def __init__(
        self,
        packs: PackReads,
        expert_meter: Meter,
        base_meter: Meter,
        has_blocks: HasBlocks | None = None,
        moved: Moved | None = None,
    ) -> None:
        self._packs = packs
        self._expert_meter = expert_meter
        self._base_meter = base_meter
        self._has_blocks = has_blocks
        self._moved = moved
        self._scratch = LoadBuffers()
        self._lock = threading.Lock()
        self._free: list[npt.NDArray[np.uint8]] = []

    def prefetch(self, batches: Sequence[Batch]) -> None:
        """Have the kernel read ahead what these batches will read."""
        will_need([task for batch in batches for task in batch.tasks], self._packs)

    def batch(self, batch: Batch) -> Computed:
        """Load, mix, hash and encode.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        try:
            return self._compute(batch)
        except BaseException:
            batch.fail(wholly=False)
            raise

    def _compute(self, batch: Batch) -> Computed:
        tasks = batch.tasks
        meters = self._expert_meter, self._base_meter
        loaded = iter(load(tasks, self._packs, self._scratch, *meters, self._moved))
        buffer = self._buffer(sum(task.out_bytes for task in tasks))
        results: list[Result] = []
        drafts: list[_Draft] = []
        start = 0
        for part in batch.parts:
            for key in part.keys:
                one = next(loaded)
                out = buffer[start : start + one.task.out_bytes]
                start += one.task.out_bytes
                taken = self._blend(one, part, out)
                blocks = partition(len(out), batch.slice.block_size)
                pieces = [out.data[at : at + length] for at, length in blocks]
                draft = _Draft(one, pieces, tuple(map(BlockId.of, pieces)))
                drafts.append(draft)
                odd = count_new(one, out)
                results.append(
                    Result(
                        tensor=one.task.tensor.name,
                        number=one.task.number,
                        blocks=draft.ids,
                        key=key,
                        value=Remembered.of(one.task, draft.ids, taken, odd).encode(),
                        expert_bytes=one.task.expert_bytes,
                        not_finite=odd,
                    )
                )
        outputs = self._outputs(drafts, batch.slice.policy)
        return Computed(batch.slice, tuple(results), tuple(outputs), buffer)

    def _outputs(self, drafts: Sequence[_Draft], policy: Policy | None) -> list[Output]:
        """Return the blocks of chunks, encoding those that are not encoded yet."""
        ids = [id for draft in drafts for id in draft.ids]
        stored: Sequence[bool] = [policy is None] * len(ids)
        if policy is not None and self._has_blocks is not None:
            stored = self._has_blocks(ids)
        is_stored = iter(stored)
        outputs = []
        for draft in drafts:
            tensor = draft.loaded.task.tensor
            # Blocks of another dtype are at other positions in the tensor than those of the base.
            like_base = tensor.out_dtype == tensor.base_dtype
            elements = codecs.elements_of(tensor.out_dtype)
            offset = draft.loaded.task.file_offset
            for number, (id, piece) in enumerate(zip(draft.ids, draft.pieces, strict=True)):
                encoded = None
                if not next(is_stored) and policy is not None:
                    base = draft.loaded.delta_base(number) if like_base else None
                    encoded = codecs.encode(piece, elements, policy, base)
                outputs.append(Output(id, tensor.file, offset, encoded))
                offset += len(piece)
        return outputs

    def _blend(
        self, loaded: Loaded, part: BatchPart, out: npt.NDArray[np.uint8]
    ) -> tuple[int, ...]:
        tensor = part.run.tensor
        if part.ledger is None:
            # The chunk may use the whole quota.
            return blend(loaded, tensor.quotas, out)
        # Usually all ties of a chunk are kept or none: mixing at once saves a counting pass.
        asked = part.ledger.asked(loaded.task.number)
        ties = blend(loaded, asked, out)
        grant = part.ledger.take(loaded.task.number, ties)
        tried = tuple(UNLIMITED if quota == COUNTED else quota for quota in asked)
        if COUNTED in asked and grant.quotas != tried:
            blend(loaded, grant.quotas, out)
        return grant.taken

    def _buffer(self, length: int) -> npt.NDArray[np.uint8]:
        # New memory costs page faults, so buffers are reused.
        with self._lock:
            for at, free in enumerate(self._free):
                if free.size >= length:
                    return self._free.pop(at)
            self._free.clear()
        return np.empty(length, dtype=np.uint8)

    def recycle(self, computed: Computed) -> None:
        """Take back the buffer of a result that is no longer used."""
        with self._lock:
            self._free.append(computed.buffer)


class _Draft(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A mixed chunk: its output as blocks, not encoded yet."""

    loaded: Loaded
    pieces: list[memoryview]
    ids: tuple[BlockId, ...]


# -- the batches of many slices ----------------------------------------------------------------


def computed(computer: Computer, bounds: Bounds, slices: Iterable[Slice]) -> Generator[Computed]:
    """Yield every batch of every slice, in order.  The first error in order ends it.

    The calling thread computes, too, while it would wait.  So no more threads are busy than the
    merge may have: a thread too many takes the processor from one that others wait for.
    """
    helps = bounds.threads > 1
    found = (batch for slice in slices for batch in batches(slice, bounds.together))
    with ThreadPoolExecutor(bounds.threads - helps, "merge") as pool:
        working = in_order(
            lambda batch: pool.submit(computer.batch, batch),
            read_ahead(found, lambda batch: batch.stored_bytes, computer.prefetch),
            ahead=bounds.ahead,
            stopping=_give_up,
            helping=computer.batch if helps else None,
        )
        # Before the pool ends: it would run everything queued first.
        with closing(working):
            for _, one in working:
                yield one


def _give_up(batches: Sequence[Batch]) -> None:
    for batch in batches:
        batch.fail(wholly=True)
