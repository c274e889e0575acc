"""Computing: from a task to the bytes of its output, and nothing else.

Reads the blocks that a task names, checks each against its id, and runs the kernel.  Needs packs
but no index; knows neither where the output goes nor in which order chunks are wanted.

Every read is charged to a meter before it happens.  Memory: a `Scratch` holds one side a row of
the chunks that are loaded together, for each thread that uses it.  Reading, hashing and the kernel
release the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mstore.blocks import codecs
from mstore.blocks.codecs import Codec
from mstore.blocks.meter import Meter
from mstore.blocks.packs import PackFiles
from mstore.errors import Corrupt
from mstore.ids import BlockId
from mstore.merge.arithmetic.kernels import Mix, count_ties, mix_chunk
from mstore.merge.running.task import ChunkTask, Row, Source, item_size

_ROW_ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


class Scratch(threading.local):
    """Row buffers, each thread's own, grown to the largest chunk that the thread has seen."""

    def __init__(self) -> None:
        self._flat = np.empty(0, dtype=np.uint8)

    def rows(self, count: int, length: int) -> Bytes:
        """uint8[count, >= length], contiguous, each row aligned; contents are anything."""
        stride = -(-max(length, 1) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        wanted = count * stride
        if self._flat.size < wanted:
            # np.empty alone promises 16 bytes.
            flat = np.empty(wanted + _ROW_ALIGNMENT, dtype=np.uint8)
            start = -flat.ctypes.data % _ROW_ALIGNMENT
            self._flat = flat[start : start + wanted]
        return self._flat[:wanted].reshape(count, stride)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk in memory: row 0 of `sides` is the base, row 1 + r is `task.rows[r]`."""

    task: ChunkTask
    sides: Bytes


def compute(
    task: ChunkTask,
    packs: PackFiles,
    mix: Mix,
    quotas: npt.NDArray[np.int64],
    scratch: Scratch,
    expert_meter: Meter,
    base_meter: Meter,
) -> Bytes:
    """The output of a chunk: uint8[task.out_bytes], the caller's own.

    quotas: int64[K], ties that THIS chunk may keep.  Raises BudgetExceeded, Corrupt,
    StorageFailed.
    """
    (loaded,) = load([task], packs, scratch, expert_meter, base_meter)
    out = np.empty(task.out_bytes, dtype=np.uint8)
    blend(loaded, mix, quotas, out)
    return out


def load(
    tasks: Sequence[ChunkTask],
    packs: PackFiles,
    scratch: Scratch,
    expert_meter: Meter,
    base_meter: Meter,
) -> list[Loaded]:
    """Read the chunks of one tensor; valid until the scratch is used again.

    Blocks that are neighbours in a pack are read in one go, also over several chunks.  Raises
    BudgetExceeded, Corrupt, StorageFailed.
    """
    length = max(task.row_bytes for task in tasks)
    counts = [1 + len(task.rows) for task in tasks]
    rows = scratch.rows(sum(counts), length)
    loaded = []
    start = 0
    for task, count in zip(tasks, counts, strict=True):
        loaded.append(Loaded(task, rows[start : start + count]))
        start += count
    _read([_targets(one, 0) for one in loaded], packs, base_meter)
    # An expert's blocks in neighbouring chunks are neighbours at rest more often than not.
    for k in range(len(tasks[0].row_of)):
        wanted = []
        for one in loaded:
            row = one.task.row_of[k]
            if row >= 0 and row not in one.task.row_of[:k]:
                wanted.append(_targets(one, 1 + row))
        _read(wanted, packs, expert_meter)
    return loaded


def blend(
    loaded: Loaded, mix: Mix, quotas: npt.NDArray[np.int64] | Sequence[int], out: Bytes
) -> list[int]:
    """Run the kernel into `out`, uint8[>= task.out_bytes]; returns the ties of COUNTED quotas."""
    task, tensor = loaded.task, loaded.task.tensor
    return mix_chunk(
        mix,
        loaded.sides[0],
        tensor.base_dtype,
        loaded.sides[1:],
        [row.dtype for row in task.rows],
        np.array(task.row_of, dtype=np.int64),
        task.n,
        task.first_index,
        tensor.thresholds,
        np.asarray(quotas, dtype=np.int64),
        tensor.keys,
        out,
        tensor.out_dtype,
    )


def tie_counts(loaded: Loaded, wanted: Sequence[bool]) -> list[int]:
    """Per expert the elements of a chunk that tie at its threshold; 0 where it is not `wanted`."""
    task, tensor = loaded.task, loaded.task.tensor
    ties = [0] * len(task.row_of)
    for k, row in enumerate(task.row_of):
        if row >= 0 and wanted[k]:
            ties[k] = count_ties(
                loaded.sides[0],
                tensor.base_dtype,
                loaded.sides[1 + row],
                task.rows[row].dtype,
                task.n,
                float(tensor.thresholds[k]),
            )
    return ties


def will_need(tasks: Sequence[ChunkTask], packs: PackFiles) -> None:
    """Ask the kernel to read ahead what `load` is going to read; advice only, never an error."""
    sources = [task.base.sources for task in tasks]
    for k in range(len(tasks[0].row_of)):
        for task in tasks:
            row = task.row_of[k]
            if row >= 0 and row not in task.row_of[:k]:
                sources.append(task.rows[row].sources)
    for run in _runs([(source, _NOWHERE) for side in sources for source in side]):
        length = sum(source.stored_length for source, _ in run)
        packs.will_need(run[0][0].pack, run[0][0].offset, length)


Targets = list[tuple[Source, memoryview]]
_NOWHERE = memoryview(b"")


def _targets(loaded: Loaded, side: int) -> Targets:
    """Where the blocks of one side go.  Raises Corrupt where their lengths are not the chunk's."""
    task = loaded.task
    row: Row = task.base if side == 0 else task.rows[side - 1]
    wanted = task.n * item_size(row.dtype)
    if sum(source.raw_length for source in row.sources) != wanted or any(
        source.stored_length > source.raw_length
        or (source.codec == Codec.RAW and source.stored_length < source.raw_length)
        for source in row.sources
    ):
        # An index row is not proof that a length is sane.
        raise Corrupt(
            "blocks of other lengths than the tensor has",
            where=f"{task.tensor.name}, chunk {task.number}",
            hint="mstore fsck",
        )
    view = loaded.sides[side].data
    targets = []
    done = 0
    for source in row.sources:
        targets.append((source, view[done : done + source.raw_length]))
        done += source.raw_length
    return targets


def _read(sides: Sequence[Targets], packs: PackFiles, meter: Meter) -> None:
    for run in _runs([target for side in sides for target in side]):
        meter.charge(sum(source.stored_length for source, _ in run))
        first, view = run[0]
        if first.codec == Codec.RAW:
            packs.read_scattered(first.pack, first.offset, [view for _, view in run])
        else:
            payload = packs.read(first.pack, first.offset, first.stored_length)
            view[:] = codecs.decode(first.codec, payload, first.width, first.raw_length)
        for source, view in run:
            _verify(source, view)


def _runs(targets: Targets) -> Iterator[Targets]:
    """Raw blocks that follow each other at rest, together; any other block by itself."""
    run: Targets = []
    for source, view in targets:
        if run:
            last = run[-1][0]
            if not (
                last.codec == source.codec == Codec.RAW
                and last.pack == source.pack
                and last.offset + last.stored_length == source.offset
            ):
                yield run
                run = []
        run.append((source, view))
    if run:
        yield run


def _verify(source: Source, data: memoryview) -> None:
    if BlockId.of(data) != source.id:
        raise Corrupt(
            f"the stored bytes do not match the id (pack {source.pack.short}, "
            f"offset {source.offset})",
            where=f"block {source.id}",
            hint="mstore fsck --read-data",
        )
