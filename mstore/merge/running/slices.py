"""Slices: the self-contained pieces of work that a merge is cut into, and their results.

A slice is a run of chunks whose output makes one pack.  `execute` turns it into a sealed pack and a
receipt, needs no index, and may run in any process that sees the store's packs and its tmp
directory.  `Stream` computes slices on a pool of threads of this process instead, several chunks at
a time, and yields the chunks in order.  The engine decides which slices there are, and publishes
what they wrote.

A tensor whose chunks pass on ties is never cut: its chunks are in one slice.  Slices are
idempotent; what they write is garbage until it is published.
"""

from __future__ import annotations

import builtins
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.ahead import in_order
from mstore.blocks import codecs
from mstore.blocks.codecs import Encoded, Policy
from mstore.blocks.meter import Meter
from mstore.blocks.packs import PackFiles, PackWriter, SealedPack
from mstore.checkpoint.partition import partition
from mstore.ids import BlockId
from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED
from mstore.merge.running.compute import blend
from mstore.merge.running.loading import Loaded, Moved, Scratch, load, will_need
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.overflow import became_infinite
from mstore.merge.running.task import ChunkTask, TensorTask, item_size
from mstore.merge.running.ties import TieLedger

SLICE_BYTES: Final = 128 << 20
"""Plain bytes of output per slice, unless a tensor that must not be cut has more."""

GROUP_BYTES: Final = 1 << 20
"""Small chunks are loaded together until one side of them reaches this many bytes."""

_LEAST_BYTES: Final = 1 << 12
"""The least that a chunk counts: a group has at most 256 chunks."""


class Run(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in order, their memo keys, and the ties that known chunks took.

    known: (chunk, ties per expert) of chunks of this tensor that are not computed.
    """

    tensor: TensorTask
    chunks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    known: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ledger(self) -> TieLedger:
        """Return a new ledger for the chunks of this run."""
        numbers = [task.number for task in self.chunks]
        return TieLedger(self.tensor.quotas.tolist(), numbers, self.known)


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One piece of work.

    packs: the directory to read packs from. target: the pack to write; `execute` makes the name
    unique. policy: how its output is coded, None if it is not kept.
    """

    packs: Path
    target: Path
    store: bytes
    generation: int
    block_size: int
    policy: Policy | None
    runs: tuple[Run, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes at rest that it reads from experts."""
        return sum(task.expert_bytes for run in self.runs for task in run.chunks)


class Result(msgspec.Struct, frozen=True, gc=False):
    """A computed chunk: ids of its output blocks, and its row for the memo table.

    expert_bytes: bytes read from experts for it. infinite: elements that overflowed.
    """

    tensor: str
    number: int
    blocks: tuple[BlockId, ...]
    key: bytes
    value: bytes
    expert_bytes: int
    infinite: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of a slice. pack: None if every block was already stored."""

    pack: SealedPack | None
    results: tuple[Result, ...]
    expert_bytes: int
    base_bytes: int


class Part(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks of one tensor in a group, and the tensor's ledger if they pass on ties."""

    run: Run
    tasks: tuple[ChunkTask, ...]
    keys: tuple[bytes, ...]
    ledger: TieLedger | None


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Chunks that are loaded together: of one tensor, or of several that are small."""

    slice: Slice
    parts: tuple[Part, ...]

    @property
    def tasks(self) -> list[ChunkTask]:
        """All of them, in order."""
        return [task for part in self.parts for task in part.tasks]

    def fail(self, *, wholly: bool) -> None:
        """Report that this group failed, and wake whoever waits for one of its chunks.

        wholly: no other chunk of its tensors will be computed either.
        """
        for part in self.parts:
            if part.ledger is not None:
                part.ledger.fail(-1 if wholly else part.tasks[0].number)


class Output(msgspec.Struct, frozen=True, gc=False):
    """An output block, and its position in the output file.

    encoded: None if it need not be written.
    """

    id: BlockId
    file: str
    offset: int
    encoded: Encoded | None


class Computed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A group's result.  The outputs are in `buffer`, until `Computer.recycle`."""

    slice: Slice
    results: tuple[Result, ...]
    outputs: tuple[Output, ...]
    buffer: npt.NDArray[np.uint8]


Known = Callable[[Sequence[BlockId]], Sequence[bool]]


class Computer:
    """Computes groups; safe for any number of threads.

    known: returns which of some blocks are already stored, so that they need no encoding; None if
    unknown. moved: as for `load`.  Both are called from any thread.
    """

    def __init__(
        self,
        packs: PackFiles,
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

    def prefetch(self, group: Group) -> None:
        """Have the kernel read ahead what `group` will read."""
        will_need(group.tasks, self._packs)

    def group(self, group: Group) -> Computed:
        """Load, mix, hash and encode.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        try:
            return self._compute(group)
        except BaseException:
            group.fail(wholly=False)
            raise

    def _compute(self, group: Group) -> Computed:
        tasks = group.tasks
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
        for part in group.parts:
            for key in part.keys:
                one = next(loaded)
                out = buffer[start : start + one.task.out_bytes]
                start += one.task.out_bytes
                taken = self._blend(one, part, out)
                draft = _draft(one, out.data, group.slice.block_size)
                drafts.append(draft)
                results.append(
                    Result(
                        tensor=one.task.tensor.name,
                        number=one.task.number,
                        blocks=draft.ids,
                        key=key,
                        value=Remembered.of(one.task, draft.ids, taken).encode(),
                        expert_bytes=one.task.expert_bytes,
                        infinite=became_infinite(one.task.tensor, _base_of(one), out),
                    )
                )
        outputs = self._outputs(drafts, group.slice.policy)
        return Computed(group.slice, tuple(results), tuple(outputs), buffer)

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
        asked = part.ledger.asked
        ties = blend(loaded, asked, out)
        grant = part.ledger.take(loaded.task.number, ties)
        if grant.quotas != tuple(UNLIMITED if quota == COUNTED else quota for quota in asked):
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


def _base_of(loaded: Loaded) -> npt.NDArray[np.uint8]:
    """The base's bytes of a chunk."""
    task = loaded.task
    base: npt.NDArray[np.uint8] = loaded.sides[0]
    return base[: task.n * item_size(task.tensor.base_dtype)]


class _Draft(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A mixed chunk: its output as blocks, not encoded yet."""

    loaded: Loaded
    pieces: list[memoryview]
    ids: tuple[BlockId, ...]


def _draft(loaded: Loaded, out: memoryview, block_size: int) -> _Draft:
    pieces = [out[at : at + length] for at, length in partition(len(out), block_size)]
    return _Draft(loaded, pieces, tuple(BlockId.of(piece) for piece in pieces))


def groups(slice: Slice, together: int = GROUP_BYTES) -> Iterator[Group]:
    """Group a slice's chunks in order, small ones together.

    together: bytes of a side up to which tensors share a group; 0 for no sharing.
    """
    parts: list[Part] = []
    count, longest = 0, 0
    for run in slice.runs:
        ledger = run.ledger() if run.tensor.hands_on else None
        step = group_chunks(run.tensor)
        for first in range(0, len(run.chunks), step):
            cut = builtins.slice(first, first + step)
            part = Part(run, run.chunks[cut], run.keys[cut], ledger)
            length = max(_LEAST_BYTES, *(task.narrow_bytes for task in part.tasks))
            wide = max(longest, length)
            if parts and (count + len(part.tasks)) * wide > together:
                yield Group(slice, tuple(parts))
                parts, count, wide = [], 0, length
            parts.append(part)
            count, longest = count + len(part.tasks), wide
    if parts:
        yield Group(slice, tuple(parts))


def group_chunks(tensor: TensorTask) -> int:
    """How many chunks of a tensor make a group."""
    width = min(item_size(tensor.base_dtype), item_size(tensor.out_dtype))
    return max(1, GROUP_BYTES // (tensor.chunk_elements * width))


class Stream:
    """Computes slices on a pool of threads; yields chunks in order.

    The pool works `ahead` groups ahead of the current one, across slice boundaries. together: as
    for `groups`.
    """

    def __init__(
        self,
        computer: Computer,
        pool: ThreadPoolExecutor,
        *,
        ahead: int,
        together: int = GROUP_BYTES,
    ) -> None:
        self._computer = computer
        self._pool = pool
        self._ahead = ahead
        self._together = together

    def run(self, slices: Iterable[Slice]) -> Generator[Computed]:
        """Yield every group of every slice.  The first error in order ends it."""
        working = in_order(
            self._begin,
            (group for slice in slices for group in groups(slice, self._together)),
            ahead=self._ahead,
            stopping=_give_up,
        )
        with closing(working):
            for _, computed in working:
                yield computed

    def _begin(self, group: Group) -> Future[Computed]:
        self._computer.prefetch(group)
        return self._pool.submit(self._computer.group, group)


def _give_up(groups: Sequence[Group]) -> None:
    """Wake the chunks that wait for one of these groups."""
    for group in groups:
        group.fail(wholly=True)


class SliceWriter:
    """Takes the chunks of one slice in order and writes the new blocks into its pack.

    written: the blocks in this pack or in another of the same run; grows.  For one thread only.
    """

    def __init__(self, slice: Slice, written: set[BlockId]) -> None:
        self.slice = slice
        self._written = written
        self._writer: PackWriter | None = None
        self.results: list[Result] = []
        self.new: list[BlockId] = []

    def put(self, computed: Computed) -> None:
        """Write a group's new blocks.  Raises StorageFailed."""
        self.results += computed.results
        for output in computed.outputs:
            encoded = output.encoded
            if encoded is not None and output.id not in self._written:
                self._open().append_encoded(output.id, encoded, output.file, output.offset)
                self._written.add(output.id)
                self.new.append(output.id)

    def _open(self) -> PackWriter:
        if self._writer is None:
            self._writer = PackWriter(self.slice.target, self.slice.store, self.slice.generation)
        return self._writer

    def seal(self) -> SealedPack | None:
        """Finish the pack; None if no block was new.  May be called from another thread."""
        writer, self._writer = self._writer, None
        return None if writer is None else writer.seal()

    def release(self) -> PackWriter | None:
        """Return the unfinished pack for the caller to continue; None if no block was new."""
        writer, self._writer = self._writer, None
        return writer

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


def execute(slice: Slice) -> Receipt:
    """Compute a slice and write its pack, in this thread.

    For any concurrent.futures.Executor: needs only the paths that the slice names.  Each attempt
    writes a pack with a unique name, so a slice may run again after a worker died, or twice at
    once: one receipt counts, and the packs of other attempts are garbage in the same directory.
    Raises BudgetExceeded, Corrupt, StorageFailed; then nothing is left behind.
    """
    expert_meter, base_meter = Meter("expert", slice.expert_bytes), Meter("base")
    packs = PackFiles(slice.packs)
    attempt = slice.target.with_name(f"{slice.target.stem}-{secrets.token_hex(4)}.pack")
    writer = SliceWriter(replace(slice, target=attempt), set())
    try:
        computer = Computer(packs, expert_meter, base_meter)
        ahead: deque[Group] = deque()
        for group in groups(slice):
            computer.prefetch(group)
            ahead.append(group)
            if len(ahead) > 2:
                _pass_on(computer, ahead.popleft(), writer)
        while ahead:
            _pass_on(computer, ahead.popleft(), writer)
        pack = writer.seal()
    except BaseException:
        writer.abandon()
        raise
    finally:
        packs.close()
    return Receipt(pack, tuple(writer.results), expert_meter.total, base_meter.total)


def _pass_on(computer: Computer, group: Group, writer: SliceWriter) -> None:
    computed = computer.group(group)
    writer.put(computed)
    computer.recycle(computed)
