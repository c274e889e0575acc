"""The computer: from a batch of chunks to the ids and the encoded blocks of their output.

Loads (`loading`), runs the kernel (`compute`), hashes, and encodes the blocks that are not stored
yet.  Does not decide which batches there are or in which order they are computed, and writes
nothing.  Safe for any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks import codecs
from mstore.blocks.codecs import Encoded, Policy
from mstore.blocks.pack_store import Packs
from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED
from mstore.merge.running.compute import blend, count_new
from mstore.merge.running.loading import Loaded, Moved, Scratch, load, will_need
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.slices import Batch, Part, Result, Slice
from mstore.store.objects.tensor import partition
from mstore.terms.ids import BlockId


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


Known = Callable[[Sequence[BlockId]], Sequence[bool]]


class Computer:
    """Computes batches; safe for any number of threads.

    known: returns which of some blocks are already stored, so that they need no encoding; None if
    unknown. moved: as for `load`.  Both are called from any thread.
    """

    def __init__(
        self,
        packs: Packs,
        expert_meter: Meter,
        base_meter: Meter,
        known: Known | None = None,
        moved: Moved | None = None,
    ) -> None:
        self._packs = packs
        self._expert_meter = expert_meter
        self._base_meter = base_meter
        self._known = known
        self._moved = moved
        self._scratch = Scratch()
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
        loaded = iter(
            load(
                tasks,
                self._packs,
                self._scratch,
                self._expert_meter,
                self._base_meter,
                self._moved,
            )
        )
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
                draft = _draft(one, out.data, batch.slice.block_size)
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
        if policy is None:
            known: Sequence[bool] = [True] * len(ids)
        else:
            known = [False] * len(ids) if self._known is None else self._known(ids)
        is_known = iter(known)
        outputs = []
        for draft in drafts:
            tensor = draft.loaded.task.tensor
            # Blocks of another dtype are at other positions in the tensor than those of the base.
            like_base = tensor.out_dtype == tensor.base_dtype
            elements = codecs.elements_of(tensor.out_dtype)
            offset = draft.loaded.task.file_offset
            for number, (id, piece) in enumerate(zip(draft.ids, draft.pieces, strict=True)):
                encoded = None
                if not next(is_known) and policy is not None:
                    base = draft.loaded.delta_base(number) if like_base else None
                    encoded = codecs.encode(piece, elements, policy, base)
                outputs.append(Output(id, tensor.file, offset, encoded))
                offset += len(piece)
        return outputs

    def _blend(self, loaded: Loaded, part: Part, out: npt.NDArray[np.uint8]) -> tuple[int, ...]:
        """Run the kernel; return the ties that the chunk took, per threshold."""
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


def _draft(loaded: Loaded, out: memoryview, block_size: int) -> _Draft:
    pieces = [out[at : at + length] for at, length in partition(len(out), block_size)]
    return _Draft(loaded, pieces, tuple(BlockId.of(piece) for piece in pieces))
