"""Loading: the blocks that chunks need, from packs into memory, each checked against its id.

Decodes stored blocks.  The base of a delta is usually the base's block at the same position, which
is read anyway; any other block is read as well.

A row that an adapter makes is computed from the base's row, once that is there, unless the chunk
is a sum of such rows, which needs none (`merge.arithmetic.adapters`).

Every read is charged to a meter before it happens: a block of an expert costs its bytes at rest,
and what is read only to decode a delta is charged to the base.  Needs packs but no index.

Memory: a `LoadBuffers` holds, for each thread that uses it, one row per side of the chunks that are
loaded together, and `SPARE_SIDES` more.  Reading, decoding and hashing release the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location, in_runs, run_of
from mstore.blocks.pack_store import PackReads
from mstore.blocks.packs import PackGone
from mstore.blocks.reader import Meter, decode_into, verify
from mstore.merge.running.task import ChunkTask, Row, StoredBlock
from mstore.numeric.codes import ITEMSIZES
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId
from mstore.terms.phrases import call

SPARE_SIDES: Final = 3
"""Sides that loading may need beyond the chunk's own.

They hold the bases of the base's deltas, those of an expert's deltas, and payloads before they are
decoded.
"""

_ROW_ALIGNMENT: Final = 64

Bytes = npt.NDArray[np.uint8]

Moved = Callable[[StoredBlock], Location]
"""Returns where a block is now, which may be where it was; raises Conflict if it is gone."""


class LoadBuffers(threading.local):
    """Buffers, per thread, grown to the largest size that the thread has requested."""

    def __init__(self) -> None:
        self._flat = np.empty(0, dtype=np.uint8)
        self._payloads = bytearray()

    def rows(self, count: int, length: int) -> Bytes:
        """Return uint8[count, >= length], contiguous, each row aligned; contents undefined."""
        stride = -(-max(length, 1) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        wanted = count * stride
        if self._flat.size < wanted:
            # np.empty alone promises 16 bytes.
            flat = np.empty(wanted + _ROW_ALIGNMENT, dtype=np.uint8)
            start = -flat.ctypes.data % _ROW_ALIGNMENT
            self._flat = flat[start : start + wanted]
        return self._flat[:wanted].reshape(count, stride)

    def payloads(self, length: int) -> memoryview:
        """Return room for this many encoded bytes."""
        if len(self._payloads) < length:
            self._payloads = bytearray(length)
        return memoryview(self._payloads)[:length]


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A chunk in memory: row 0 of `sides` is the base, row 1 + r is `task.rows[r]`.

    If the chunk adds products, only row 0 is there.

    plain: the bytes of the base's blocks, and of the blocks that they are differences to.
    """

    task: ChunkTask
    sides: Bytes
    plain: Mapping[BlockId, memoryview]

    def delta_base(self, number: int) -> tuple[BlockId, memoryview]:
        """Return what block `number` of an output like the base may be a difference to.

        That block is not itself a delta, and is in memory without another read.
        """
        source = self.task.base.sources[number]
        id = source.id if source.base is None else source.base.id
        return id, self.plain[id]


CheckedPlaces = dict[BlockId, Location]
"""Where raw blocks lay when they were checked against their ids."""


def load(
    tasks: Sequence[ChunkTask],
    packs: PackReads,
    scratch: LoadBuffers,
    expert_meter: Meter,
    base_meter: Meter,
    moved: Moved | None = None,
    checked: CheckedPlaces | None = None,
) -> list[Loaded]:
    """Read the chunks of one tensor; valid until the scratch is used again.

    Blocks that are adjacent in a pack are read in one call, also across chunks. moved: finds the
    new location of blocks whose pack is gone; None if a lease protects the packs. checked: raw
    blocks that need no check against their ids, to which others are added once they were checked.
    Raises BudgetExceeded, Corrupt, StorageFailed.
    """
    length = max([task.row_bytes for task in tasks])
    counts = [1 + len(task.rows) for task in tasks]
    rows = scratch.rows(sum(counts) + 2 * len(tasks), length)
    room, stride = rows.reshape(-1).data, rows.shape[1]
    plain: dict[BlockId, memoryview] = {}
    loaded = []
    base_side: Targets = []
    starts = []
    start = 0
    for task, count in zip(tasks, counts, strict=True):
        loaded.append(Loaded(task, rows[start : start + count], plain))
        base_side += _targets(task, task.base, room[start * stride :])
        starts.append(start + 1)
        start += count
    lasting, passing = (flat.data for flat in rows[start:].reshape(2, -1))
    reader = _Reader(packs, scratch, moved, checked)
    plain |= reader.read_bases(_bases(base_side).values(), lasting, base_meter)
    plain |= reader.read(base_side, plain, base_meter)
    # Experts of one family are mostly differences to the same blocks, which are read once.
    others: dict[BlockId, memoryview] = {}
    used = 0
    # An expert's blocks in adjacent chunks are usually adjacent at rest.
    for k in range(len(tasks[0].row_of)):
        wanted: Targets = []
        for task, start in zip(tasks, starts, strict=True):
            row = task.row_of[k]
            if _is_first(task, k) and task.rows[row].factors is None:
                wanted += _targets(task, task.rows[row], room[(start + row) * stride :])
        needed = {id: base for id, base in _bases(wanted).items() if id not in plain}
        news = {id: base for id, base in needed.items() if id not in others}
        if used + _plain_bytes(news) > len(passing):
            others, used, news = {}, 0, needed
        others |= reader.read_bases(news.values(), passing[used:], base_meter)
        used += _plain_bytes(news)
        reader.read(wanted, plain | others if others else plain, expert_meter)
    for one in loaded:
        if not one.task.adds_products:
            apply_adapters(one)
    return loaded


def apply_adapters(loaded: Loaded) -> None:
    """Compute the rows that adapters make of the base's."""
    task = loaded.task
    for number, row in enumerate(task.rows, start=1):
        if row.factors is not None:
            base = loaded.sides[0][: task.n * ITEMSIZES[task.base.dtype]]
            out = loaded.sides[number][: task.n * ITEMSIZES[row.dtype]]
            row.factors.apply(base, task.base.dtype, task.first_index, task.n, out)


def _is_first(task: ChunkTask, expert: int) -> bool:
    """Return whether an expert is the first of those that use its row."""
    row = task.row_of[expert]
    return row >= 0 and task.row_of.index(row) == expert


def _plain_bytes(sources: Mapping[BlockId, StoredBlock]) -> int:
    return sum(source.at.raw_length for source in sources.values())


def will_need(tasks: Sequence[ChunkTask], packs: PackReads) -> None:
    """Ask the kernel to read ahead what `load` is going to read; advice only, never an error."""
    sources = [source for task in tasks for source in task.base.sources]
    for k in range(len(tasks[0].row_of)):
        for task in tasks:
            row = task.row_of[k]
            if _is_first(task, k):
                sources += task.rows[row].sources
    bases = {source.base.id: source.base for source in sources if source.base is not None}
    if bases:
        there = {source.id for source in sources}
        sources += [base for id, base in bases.items() if id not in there]
    for run in in_runs([source.at for source in sources], lambda at: at):
        packs.will_need(*run_of(run))


Targets = list[tuple[StoredBlock, memoryview]]


def _place(target: tuple[StoredBlock, memoryview]) -> Location:
    return target[0].at


def _targets(task: ChunkTask, row: Row, room: memoryview) -> Targets:
    """Return where in `room` the blocks of one side go.

    Raises Corrupt if their lengths do not match the chunk.
    """
    targets, length = _placed(row.sources, room)
    if length != task.n * ITEMSIZES[row.dtype] or True in map(_is_odd, row.sources):
        # An index row does not prove that its length is valid.
        raise Corrupt(
            "block lengths differ from the tensor's",
            where=f"{task.tensor.name}, chunk {task.number}",
            hint=call("fsck"),
        )
    return targets


def _is_odd(source: StoredBlock) -> bool:
    """Return whether a block is larger at rest than plain, or not as long as its base."""
    at = source.at
    if source.base is not None and (
        source.base.at.raw_length != at.raw_length or _is_odd(source.base)
    ):
        return True
    return at.stored_length > at.raw_length or (
        at.codec == Codec.RAW and at.stored_length < at.raw_length
    )


def _bases(targets: Targets) -> dict[BlockId, StoredBlock]:
    return {source.base.id: source.base for source, _ in targets if source.base is not None}


def _placed(sources: Iterable[StoredBlock], room: memoryview) -> tuple[Targets, int]:
    """Return where in `room` blocks go, one after the other, and their bytes."""
    targets = []
    done = 0
    for source in sources:
        begin, done = done, done + source.at.raw_length
        targets.append((source, room[begin:done]))
    return targets, done


class _Reader:
    """Reads blocks, adjacent ones in one call, and checks each against its id."""

    def __init__(
        self,
        packs: PackReads,
        scratch: LoadBuffers,
        moved: Moved | None,
        checked: CheckedPlaces | None,
    ) -> None:
        self._packs = packs
        self._scratch = scratch
        self._moved = moved
        self._known = checked

    def read(
        self, targets: Targets, bases: Mapping[BlockId, memoryview], meter: Meter
    ) -> dict[BlockId, memoryview]:
        """Fill the targets; return their contents by id. bases: the bases of the deltas.

        Raises BudgetExceeded, Corrupt, StorageFailed.
        """
        for run in in_runs(targets, _place):
            meter.charge(sum([source.at.stored_length for source, _ in run]))
            try:
                self._checked(run, bases)
            except Corrupt:
                if not self._forgets(run):
                    raise
                self._checked(run, bases)
        return {source.id: view for source, view in targets}

    def read_bases(
        self, bases: Iterable[StoredBlock], room: memoryview, meter: Meter
    ) -> dict[BlockId, memoryview]:
        """Read the bases of deltas into `room`.

        They are not checked against their ids; the blocks decoded from them are.  Raises as `read`.
        """
        targets, _ = _placed(bases, room)
        for run in in_runs(targets, _place):
            meter.charge(sum([source.at.stored_length for source, _ in run]))
            self._decoded(run, {})
        return {source.id: view for source, view in targets}

    def _checked(self, run: Targets, bases: Mapping[BlockId, memoryview]) -> None:
        self._decoded(run, bases)
        for source, view in run:
            known = self._known if source.at.codec == Codec.RAW else None
            if known is None or known.get(source.id) != source.at:
                verify(source.id, source.at, view, _base_of(source, bases))
            if known is not None:
                known[source.id] = source.at

    def _forgets(self, run: Targets) -> bool:
        """Let go of kept copies of a run that was damaged; return whether another read may differ.

        A base that was damaged stays for this merge, because it was read for other blocks, too.
        The next merge reads it again.
        """
        for source, _ in run:
            if source.base is not None:
                at = source.base.at
                self._packs.forget(at.pack, at.offset, at.stored_length)
        places = [source.at for source, _ in run]
        return True in [self._packs.forget(at.pack, at.offset, at.stored_length) for at in places]

    def _decoded(self, run: Targets, bases: Mapping[BlockId, memoryview]) -> None:
        for source, payload, view in self._fetched(run):
            decode_into(source.id, source.at, payload, view, _base_of(source, bases))

    def _fetched(self, run: Targets) -> list[tuple[StoredBlock, memoryview, memoryview]]:
        """Read adjacent blocks: raw ones into their targets, other payloads for decoding."""
        coded = [source.at.stored_length for source, _ in run if source.at.codec != Codec.RAW]
        if not coded:
            self._fill(run, [view for _, view in run])
            return []
        room = self._scratch.payloads(sum(coded))
        payloads = []
        views = []
        for source, view in run:
            if source.at.codec == Codec.RAW:
                views.append(view)
                continue
            payload, room = room[: source.at.stored_length], room[source.at.stored_length :]
            views.append(payload)
            payloads.append((source, payload, view))
        self._fill(run, views)
        return payloads

    def _fill(self, run: Targets, views: list[memoryview]) -> None:
        first = run[0][0].at
        try:
            self._packs.read_scattered(first.pack, first.offset, views)
        except PackGone as gone:
            if self._moved is None:
                raise
            # Already charged: a moved block has the same length, and nothing was read yet.
            for (source, _), view in zip(run, views, strict=True):
                place = self._moved(source)
                if place == source.at:
                    gone.block = source.id
                    raise
                self._packs.read_scattered(place.pack, place.offset, [view])


def _base_of(source: StoredBlock, bases: Mapping[BlockId, memoryview]) -> memoryview | None:
    """Return what a delta is a difference to, None for another block."""
    return None if source.base is None else bases[source.base.id]
