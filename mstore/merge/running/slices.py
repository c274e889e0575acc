"""Slices: the self-contained pieces of work that a merge is cut into, and how ties pass on.

A slice is a run of chunks whose output makes one pack.  It needs no index: any process that can
enter its workplace can compute it (`runners.execute`).  A batch is the chunks of a slice that are
loaded and computed together: small chunks share one, of one tensor or of several, so that
neighbours are read in one call.  Values only; slices and receipts are pickled, compressed: a pack's
name and a delta's base come often, and 20 experts make most of a slice places of blocks.

A tensor whose chunks pass on ties is never cut: its chunks are in one slice.  Slices are
idempotent; what they write is garbage until it is published.

**Ties.** Exactly k elements of a tensor are kept, and of those that equal the threshold the ones
with the lowest flat index.  So a chunk must know how many ties come before it.

A merge walks a tensor from front to back (`TieLedger`): its chunks count their own ties and pass
the sum on in order; all other work on a chunk runs in parallel.  A chunk that is mixed before the
ones before it have reported must try, and mix again if a quota turns out to end in it.  In tensors
of few blocks that is most chunks, so a chunk rather waits if only one other is before it: both are
then loaded while the other is mixed, and nobody waits for long.  Where many threads work on one
tensor, waiting would cost more than trying.

Readers of a virtual tensor come in any order, repeatedly (`TiePrefix`).  So the quotas for every
chunk up to the furthest known one are kept, and a reader of a later chunk counts the ties of the
gap first.  A chunk that is being computed counts its own ties; others wait for that instead of
reading it a second time.

Safe for any number of threads.
"""

from __future__ import annotations

import builtins
import math
import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any, Final

import msgspec
import zstandard

from mstore.blocks.codecs import Policy
from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED
from mstore.merge.running.task import ChunkTask, TensorTask, item_size
from mstore.merge.running.workplace import Delivered, Workplace
from mstore.terms.ids import BlockId

SLICE_BYTES: Final = 128 << 20
"""Plain bytes of output per slice, unless a tensor that must not be cut has more."""


class TensorChunks(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in order, their memo keys, and the ties that finished chunks took.

    finished: (chunk, ties per expert) of chunks of this tensor that are not computed.
    """

    tensor: TensorTask
    chunks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    finished: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ledger(self) -> TieLedger:
        """Return a new ledger for these chunks."""
        numbers = [task.number for task in self.chunks]
        return TieLedger(self.tensor.quotas.tolist(), numbers, self.finished)


class Bounds(msgspec.Struct, frozen=True):
    """What computing may take: with these, memory stays within a limit (`engine.bounds`).

    threads: how many compute in parallel. ahead: batches under way beyond the current one.
    together: bytes of a side up to which small tensors share a batch (`batches`).
    """

    threads: int
    ahead: int
    together: int


class _Compressed:
    """A struct that is pickled compressed."""

    def __reduce__(self) -> tuple[object, ...]:
        fields = tuple([getattr(self, name) for name in self.__struct_fields__])  # type: ignore[attr-defined]
        return _unpacked, (type(self), zstandard.compress(pickle.dumps(fields, protocol=5)))


def _unpacked(kind: type[Any], data: bytes) -> Any:
    # What came so was a pickle before: who unpickles it trusts its sender in any case.
    return kind(*pickle.loads(zstandard.decompress(data)))  # noqa: S301


class Slice(_Compressed, msgspec.Struct, frozen=True, eq=False):
    """One piece of work.

    number: among those of its run. workplace: where it is computed. policy: how its output is
    coded, None if it is not kept. bounds: for the process that computes it.
    """

    number: int
    workplace: Workplace
    block_size: int
    policy: Policy | None
    bounds: Bounds
    runs: tuple[TensorChunks, ...]

    @property
    def label(self) -> str:
        """Its first tensor, its last one, and the chunks of each: for the eyes of people."""
        first, last = self.runs[0], self.runs[-1]
        begin = f"{first.tensor.name}[{first.chunks[0].number}]"
        end = f"{last.tensor.name}[{last.chunks[-1].number}]"
        return f"{self.number}: {begin} to {end}"

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that it reads from experts."""
        return sum(task.expert_bytes for run in self.runs for task in run.chunks)


class NotFinite(msgspec.Struct, frozen=True, gc=False):
    """Counts of elements that are infinite or NaN, and are finite in the base.

    made: those among them that are finite in every expert, too: the merge made them.
    """

    new: int = 0
    made: int = 0

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.new + other.new, self.made + other.made)


ALL_FINITE: Final = NotFinite()


class Result(msgspec.Struct, frozen=True, gc=False):
    """A computed chunk: ids of its output blocks, and its row for the memo table.

    expert_bytes: bytes read from experts for it.
    """

    tensor: str
    number: int
    blocks: tuple[BlockId, ...]
    key: bytes
    value: bytes
    expert_bytes: int
    not_finite: NotFinite


class Receipt(_Compressed, msgspec.Struct, frozen=True):
    """The result of a slice.

    pack: None if every block was already stored. worker: who computed it, as people call it.
    seconds: how long that took.
    """

    pack: Delivered | None
    results: tuple[Result, ...]
    expert_bytes: int
    base_bytes: int
    worker: str
    seconds: float


BATCH_BYTES: Final = 1 << 20
"""Small chunks are loaded together until one side of them reaches this many bytes."""

_LEAST_BYTES: Final = 1 << 12
"""The least that a chunk counts: a batch has at most 256 chunks."""


class BatchPart(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in a batch, and the tensor's ledger if they pass on ties."""

    run: TensorChunks
    tasks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    ledger: TieLedger | None


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks that are loaded together: of one tensor, or of several that are small."""

    slice: Slice
    parts: tuple[BatchPart, ...]

    @property
    def tasks(self) -> list[ChunkTask]:
        """All of them, in order."""
        return [task for part in self.parts for task in part.tasks]

    @property
    def stored_bytes(self) -> int:
        """Bytes at rest of its sides, without what these are differences to."""
        return sum([task.base.stored_bytes + task.expert_bytes for task in self.tasks])

    def fail(self, *, wholly: bool) -> None:
        """Report that this batch failed, and wake whoever waits for one of its chunks.

        wholly: no other chunk of its tensors will be computed either.
        """
        for part in self.parts:
            if part.ledger is not None:
                part.ledger.fail(-1 if wholly else part.tasks[0].number)


def batches(slice: Slice, together: int = BATCH_BYTES) -> Iterator[Batch]:
    """Batch a slice's chunks in order, small ones together.

    together: bytes of a side up to which tensors share a batch; 0 for no sharing.
    """
    parts: list[BatchPart] = []
    count, longest = 0, 0
    for run in slice.runs:
        tensor = run.tensor
        ledger = run.ledger() if tensor.hands_on else None
        step = batch_chunks(tensor.chunk_elements, tensor.base_dtype, tensor.out_dtype)
        for first in range(0, len(run.chunks), step):
            cut = builtins.slice(first, first + step)
            part = BatchPart(run, run.chunks[cut], run.keys[cut], ledger)
            length = max(_LEAST_BYTES, *(task.narrow_bytes for task in part.tasks))
            wide = max(longest, length)
            if parts and (count + len(part.tasks)) * wide > together:
                yield Batch(slice, tuple(parts))
                parts, count, wide = [], 0, length
            parts.append(part)
            count, longest = count + len(part.tasks), wide
    if parts:
        yield Batch(slice, tuple(parts))


def batch_chunks(chunk_elements: int, base_dtype: str, out_dtype: str) -> int:
    """How many chunks of a tensor make a batch."""
    width = min(item_size(base_dtype), item_size(out_dtype))
    return max(1, BATCH_BYTES // (chunk_elements * width))


class Grant(msgspec.Struct, frozen=True, gc=False):
    """What one chunk may keep, per expert.

    quotas: in the kernel's form (UNLIMITED: all of its ties). taken: how much of the tensor's
    limited quota that uses up; 0 if the quota has no limit.
    """

    quotas: tuple[int, ...]
    taken: tuple[int, ...]


def grant_of(left: Sequence[int], ties: Sequence[int]) -> Grant:
    """Return what a chunk with these ties may keep if `left` remains of the quotas."""
    quotas, taken = [], []
    for quota, count in zip(left, ties, strict=True):
        if quota == UNLIMITED:
            quotas.append(UNLIMITED)
            taken.append(0)
        else:
            # With no quota left, nobody counted, and there may be ties.
            quotas.append(UNLIMITED if 0 < quota >= count else quota)
            taken.append(min(count, quota))
    return Grant(tuple(quotas), tuple(taken))


class TieLedger:
    """For one tensor and all its experts; the chunks of `numbers` report once each, in any order.

    finished: (chunk, ties taken per expert) of chunks that do not report because their output
    exists.  Chunks in neither take no ties.
    """

    def __init__(
        self,
        quotas: Iterable[int],
        numbers: Iterable[int],
        finished: Iterable[tuple[int, Sequence[int]]] = (),
    ) -> None:
        self._left = list(quotas)
        self._numbers = sorted(numbers, reverse=True)
        self._finished = sorted(finished, key=lambda item: item[0], reverse=True)
        self._failed: float = math.inf
        self._turn = Condition()
        self._advance()

    @property
    def open(self) -> list[bool]:
        """Return which experts' ties must still be counted: those with quota left."""
        return [quota > 0 for quota in self._left]

    def asked(self, chunk: int) -> tuple[int, ...]:
        """Return, per expert, the quota that chunk `chunk` should try, before it reports.

        If no other chunk is before it, that is what is left of the quota, and will be granted.
        Waits while one is.  If more are, it is COUNTED where some quota is left; quotas only fall,
        so an outdated answer costs only time.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: chunk > self._failed or self._numbers[-2:-1] != [chunk] or self._spent
            )
            if self._numbers[-1:] == [chunk]:
                return tuple(self._left)
            return tuple(COUNTED if quota > 0 else quota for quota in self._left)

    @property
    def _spent(self) -> bool:
        return not any(self.open)

    def take(self, chunk: int, ties: Sequence[int]) -> Grant:
        """Return how many of its `ties` per expert chunk `chunk` may keep.

        Waits for earlier chunks.  For an expert that is not `open`, ties need not be counted.

        Raises RuntimeError if one of the earlier chunks failed.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: chunk > self._failed or (self._numbers and self._numbers[-1] == chunk)
            )
            if chunk > self._failed:
                raise RuntimeError("an earlier chunk of this tensor failed")
            grant = grant_of(self._left, ties)
            self._subtract(grant.taken)
            self._numbers.pop()
            self._advance()
            self._turn.notify_all()
            return grant

    def _advance(self) -> None:
        """Account for the finished chunks that come before the next one to report."""
        while self._finished and (not self._numbers or self._finished[-1][0] < self._numbers[-1]):
            self._subtract(self._finished.pop()[1])

    def _subtract(self, taken: Sequence[int]) -> None:
        for expert, count in enumerate(taken):
            if self._left[expert] != UNLIMITED:
                self._left[expert] -= min(count, self._left[expert])

    def fail(self, chunk: int) -> None:
        """Report that chunk `chunk` failed, and wake the later ones. -1: no more calls will come.

        Earlier chunks continue, so that the first error in chunk order is the one that caused the
        others.
        """
        with self._turn:
            self._failed = min(self._failed, chunk)
            self._turn.notify_all()


Left = tuple[int, ...]
Count = Callable[[int, list[bool]], Sequence[int]]


class TiePrefix:
    """The quotas of one tensor, for all its experts.

    Invariant: row c of `_rows` is what is left of the quotas before chunk c, for every c that
    exists; it depends only on the plan, so it never changes.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._experts = len(quotas)
        # A tensor may have thousands of chunks and twenty experts: use eight bytes each, no
        # objects.
        self._rows = array("q", quotas)
        self._busy: Counter[int] = Counter()
        self._turn = Condition()

    @contextmanager
    def counting(self, chunk: int) -> Iterator[None]:
        """Announce that chunk `chunk` is being read, so that others wait for its `report`."""
        with self._turn:
            self._busy[chunk] += 1
        try:
            yield
        finally:
            with self._turn:
                self._busy[chunk] -= 1
                self._turn.notify_all()

    def before(self, chunk: int, count: Count) -> Left:
        """Return what is left of each quota (UNLIMITED: no quota) before chunk `chunk`.

        Waits for earlier chunks that other threads count. Calls `count(number, open)` for the rest,
        one after another; it returns how many ties of each open quota a chunk has.
        """
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._known(chunk) or not self._busy[self._next])
                if self._known(chunk):
                    return self._left(min(chunk, self._next))
                gap = self._next
                left = self._left(gap)
                self._busy[gap] += 1
            try:
                self.report(gap, count(gap, [quota > 0 for quota in left]))
            finally:
                with self._turn:
                    self._busy[gap] -= 1
                    self._turn.notify_all()

    def report(self, chunk: int, ties: Sequence[int]) -> None:
        """Record the ties of each open quota in chunk `chunk`, whose `before` is known."""
        with self._turn:
            if chunk == self._next:
                self._rows.extend(
                    quota if quota == UNLIMITED else max(0, quota - count)
                    for quota, count in zip(self._left(chunk), ties, strict=True)
                )
                self._turn.notify_all()

    @property
    def _next(self) -> int:
        """The first chunk whose ties are unknown."""
        return len(self._rows) // self._experts - 1

    def _left(self, chunk: int) -> Left:
        return tuple(self._rows[chunk * self._experts : (chunk + 1) * self._experts])

    def _known(self, chunk: int) -> bool:
        # Once every quota is used up, nothing changes any more.
        return chunk <= self._next or not any(quota > 0 for quota in self._left(self._next))
