"""Diff: how two snapshots differ, in files, tensors, blocks and norm.

Equal ids need no look at the data.  Nor does the relative distance of a changed tensor if there are
statistics of both sides against one base (`mstore.models.distances`); otherwise, or on request, all
blocks of one side and the differing ones of the other are read.

Virtual tensors have no block ids.  If the ids of two tensors differ, their blocks are computed.
That may show that the contents are the same: then the tensors count as equal, whatever their ids.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from mstore.checkpoint.dtypes import DTYPES
from mstore.checkpoint.models import renamed
from mstore.models.distances import Distance, Distances
from mstore.models.stats.store import StatsStore
from mstore.store.block_cache import BlockCache, Computing
from mstore.store.catalog import Catalog
from mstore.store.models import Input, Models, models_in, paired, require_pairs
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.view import array_dtype, tensor_blocks
from mstore.terms.errors import Incompatible
from mstore.terms.ids import ID_BYTES, Buffer, SnapshotId, TensorId
from mstore.terms.report import Report

_AHEAD = 4
_IN_STATISTICS = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"})
"""Types of which statistics take every value as it is."""
_TOGETHER = 256
"""How many tensor records are read together."""


class TensorDiff(Report, frozen=True):
    """One tensor on both sides."""

    name: str
    """the tensor"""
    status: str
    """added, removed, changed or equal"""
    dtype: str
    """in b, as safetensors spells it; in a if b lacks it"""
    shape: tuple[int, ...]
    """elements in each dimension in b; in a if b lacks it"""
    dtype_a: str | None
    """in a; None if a lacks it"""
    shape_a: tuple[int, ...] | None
    """in a; None if a lacks it"""
    blocks_total: int
    """blocks in all"""
    blocks_changed: int
    """blocks that differ"""
    relative_l2: float | None
    """norm of (b - a) / norm of a, in float64 (from statistics: of differences in float32); None if
    dtypes or shapes differ, the dtype is not floating point, the norm of a is 0, or statistics give
    only bounds"""
    changed_blocks: tuple[int, ...] | None
    """their numbers; None unless requested"""
    relative_l2_bounds: tuple[float, float] | None = None
    """the least and the most that relative_l2 can be; None unless statistics give only bounds"""
    relative_l2_estimate: float | None = None
    """an estimate between these bounds, from sketches; None without bounds"""
    not_finite: bool = False
    """whether relative_l2 is None because an element of a or b is infinite or NaN"""


class FileDiff(Report, frozen=True):
    """One file on both sides."""

    path: str
    """path inside the snapshot"""
    status: str
    """added, removed or changed"""
    size_a: int | None
    """bytes in a; None if a lacks it"""
    size_b: int | None
    """bytes in b; None if b lacks it"""


class DiffReport(Report, frozen=True):
    """How snapshot b differs from snapshot a; equal files and tensors are counted, not listed."""

    a: SnapshotId
    """first snapshot"""
    b: SnapshotId
    """second snapshot"""
    files: tuple[FileDiff, ...]
    """files that differ"""
    tensors: tuple[TensorDiff, ...]
    """tensors that differ"""
    files_equal: int
    """number of equal files"""
    tensors_equal: int
    """number of equal tensors"""
    blocks_total: int
    """blocks in all"""
    blocks_changed: int
    """blocks that differ"""


class _Side(msgspec.Struct, frozen=True):
    """One snapshot's tensor: its id, its record, and its blocks in order."""

    id: TensorId
    tensor: Tensor | VirtualTensor

    def block_count(self, block_size: int) -> int:
        return -(-self.tensor.nbytes // block_size)


class _Differ:
    """One comparison over one catalog."""

    def __init__(
        self,
        catalog: Catalog,
        computing: Callable[[], Computing] | None,
        pool: ThreadPoolExecutor,
        distances: Distances | None,
    ) -> None:
        self._catalog = catalog
        self._distances = distances
        self._cache = BlockCache(catalog, computing=computing)
        self._pool = pool

    def side(self, id: TensorId | None) -> _Side | None:
        """Return a tensor by its id."""
        return None if id is None else _Side(id, self._catalog.content(id))

    def compare(
        self, name: str, before: _Side | None, after: _Side | None, list_blocks: bool
    ) -> TensorDiff:
        """Compare two tensors whose ids differ, or report one that only one side has."""
        sides = [side for side in (before, after) if side is not None]
        count = max(side.block_count(self._catalog.block_size) for side in sides)
        if before is None or after is None:
            status = "added" if before is None else "removed"
            numbers, distance = list(range(count)), None
        else:
            numbers, distance = self._blocks(name, before, after)
            status = "changed" if numbers or not _same_form(before, after) else "equal"
        is_finite = distance is None or not math.isnan(distance.low)
        distance = distance if is_finite else None
        bounded = None if distance is None or distance.is_known else distance
        return TensorDiff(
            name=name,
            status=status,
            dtype=sides[-1].tensor.dtype,
            shape=sides[-1].tensor.shape,
            dtype_a=None if before is None else before.tensor.dtype,
            shape_a=None if before is None else before.tensor.shape,
            blocks_total=count,
            blocks_changed=len(numbers),
            relative_l2=None if distance is None or bounded is not None else distance.low,
            changed_blocks=tuple(numbers) if list_blocks else None,
            relative_l2_bounds=None if bounded is None else (bounded.low, bounded.high),
            relative_l2_estimate=None if bounded is None else bounded.estimate,
            not_finite=not is_finite,
        )

    def _blocks(self, name: str, before: _Side, after: _Side) -> tuple[list[int], Distance | None]:
        """Return the numbers of differing blocks, and ||after - before|| / ||before||."""
        left, right = before.tensor, after.tensor
        is_measured = _same_form(before, after) and left.dtype in _IN_STATISTICS
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            numbers = _differing(left, right)
            if self._distances is not None and is_measured:
                known = self._distances.of(name, before.id, after.id, (left, right))
                if known is not None:
                    return numbers, known
            dtype = _values_of(before) if _same_form(before, after) else None
            if dtype is None:
                return numbers, None
            differing = set(numbers)

            def read(number: int) -> tuple[float, float]:
                old = self._catalog.read_block(left.block(number))
                new = old
                if number in differing:
                    new = self._catalog.read_block(right.block(number))
                return _sums(old, new, dtype)

            # A single block has nothing to overlap with: passing it to a thread costs more than
            # reading it.
            every = map if left.block_count() == 1 else self._pool.map
            return numbers, _ratio(list(every(read, range(left.block_count()))))
        return self._computed(before, after)

    def _computed(self, before: _Side, after: _Side) -> tuple[list[int], Distance | None]:
        """Do the same if a side is virtual: all blocks of both, in step, a few at a time."""
        dtype = _values_of(before) if _same_form(before, after) else None
        size = self._catalog.block_size
        numbers: list[int] = []
        sums: deque[Any] = deque()
        pairs = []
        olds, news = self._stream(before), self._stream(after)
        for number in range(max(before.block_count(size), after.block_count(size))):
            old, new = next(olds, b""), next(news, b"")
            if np.array_equal(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)):
                new = old
            else:
                numbers.append(number)
            if dtype is not None:
                sums.append(self._pool.submit(_sums, old, new, dtype))
                if len(sums) > _AHEAD:
                    pairs.append(sums.popleft().result())
        pairs += [future.result() for future in sums]
        return numbers, None if dtype is None else _ratio(pairs)

    def _stream(self, side: _Side) -> Iterator[Buffer]:
        return tensor_blocks(self._catalog, self._cache, side.id)


def diff(
    catalog: Catalog,
    a: Input,
    b: Input,
    *,
    blocks: bool,
    threads: int,
    statistics: StatsStore | None = None,
    computing: Callable[[], Computing] | None = None,
) -> DiffReport:
    """Report differences from snapshot a to b.  `blocks` lists the numbers of the changed blocks.

    A model of either is compared alone; without, each with its namesake.
    statistics: what distances come from where they are known; None: from blocks, which are read.
    `computing` returns what computes the blocks of virtual snapshots.
    """
    left, right = (catalog.manifest_of(one.snapshot) for one in (a, b))
    is_whole = a.model is None and b.model is None
    ours, theirs = _sides(models_in(catalog, left), models_in(catalog, right), a, b, is_whole)
    found: list[TensorDiff] = []
    same: set[tuple[bytes, bytes]] = set()
    equal = total = changed = 0
    distances = None
    if statistics is not None:
        distances = Distances(catalog, statistics, a.snapshot, b.snapshot)
    with ThreadPoolExecutor(threads, "diff") as pool:
        differ = _Differ(catalog, computing, pool, distances)
        names = list(ours) + [name for name in theirs if name not in ours]
        for number, name in enumerate(names):
            if number % _TOGETHER == 0:
                near = names[number : number + _TOGETHER]
                ids = (side.get(one) for side in (ours, theirs) for one in near)
                catalog.preload_tensors([id for id in ids if id is not None])
                if distances is not None:
                    distances.prepare(near, ours, theirs)
            before, after = differ.side(ours.get(name)), differ.side(theirs.get(name))
            sides = [side for side in (before, after) if side is not None]
            total += max(side.block_count(catalog.block_size) for side in sides)
            if (
                before is not None
                and after is not None
                and (before.id == after.id or (before.id, after.id) in same)
            ):
                equal += 1
                continue
            item = differ.compare(name, before, after, blocks)
            if item.status == "equal" and before is not None and after is not None:
                same.add((before.id, after.id))
                equal += 1
                continue
            changed += item.blocks_changed
            found.append(item)
    files, files_equal = _files(left, right, same) if is_whole else ((), 0)
    return DiffReport(
        a.snapshot, b.snapshot, files, tuple(found), files_equal, equal, total, changed
    )


def _sides(
    left: Models, right: Models, a: Input, b: Input, is_whole: bool
) -> tuple[Mapping[str, TensorId], Mapping[str, TensorId]]:
    """Return the tensors to compare, those of b by what a calls what they are compared with."""
    pairs = paired(left.named, right.named, (a.model, b.model))
    names = {theirs: ours for ours, theirs in pairs.items()}
    if is_whole:
        return left.tensors, renamed(right.tensors, {one: one for one in right.named} | names)
    require_pairs(left, right, pairs, a.name, b.name)
    return renamed(left.tensors, {one: one for one in pairs}), renamed(right.tensors, names)


def compared_files(
    ours: Mapping[str, int], theirs: Mapping[str, int], is_same: Callable[[str], bool]
) -> tuple[tuple[FileDiff, ...], int]:
    """Return the files that differ, and how many are equal; by path, given the sizes of each side.

    is_same: whether a file that both sides have is the same.
    """
    found, equal = [], 0
    for path in sorted(ours.keys() | theirs.keys()):
        size_a, size_b = ours.get(path), theirs.get(path)
        if size_a is not None and size_b is not None and is_same(path):
            equal += 1
            continue
        status = "added" if size_a is None else "removed" if size_b is None else "changed"
        found.append(FileDiff(path, status, size_a, size_b))
    return tuple(found), equal


def _files(
    left: Manifest, right: Manifest, same: set[tuple[bytes, bytes]]
) -> tuple[tuple[FileDiff, ...], int]:
    ours = {file.path: file for file in left.files}
    theirs = {file.path: file for file in right.files}
    return compared_files(
        {path: file.size for path, file in ours.items()},
        {path: file.size for path, file in theirs.items()},
        lambda path: _same_file(ours[path], theirs[path], same),
    )


def _same_file(before: File, after: File, same: set[tuple[bytes, bytes]]) -> bool:
    """Return whether records are equal, or name tensors found to have the same content."""
    if before == after:
        return True
    return (before.form, len(before.parts)) == (after.form, len(after.parts)) and all(
        one.name == other.name
        and (one.tensor == other.tensor or (one.tensor, other.tensor) in same)
        for one, other in zip(before.parts, after.parts, strict=True)
    )


def _same_form(before: _Side, after: _Side) -> bool:
    return (before.tensor.dtype, before.tensor.shape) == (after.tensor.dtype, after.tensor.shape)


def _differing(left: Tensor, right: Tensor) -> list[int]:
    """Return the numbers of blocks that differ, or that only one of the two has."""
    a, b = left.blocks, right.blocks
    starts = range(0, max(len(a), len(b)), ID_BYTES)
    return [at // ID_BYTES for at in starts if a[at : at + ID_BYTES] != b[at : at + ID_BYTES]]


def _values_of(side: _Side) -> np.dtype[Any] | None:
    """Return the numpy dtype for a tensor's distances; None if it has no distances."""
    if not DTYPES[side.tensor.dtype].floating:
        return None
    try:
        return array_dtype(side.tensor.dtype)
    except Incompatible:
        return None


def _sums(old: Buffer, new: Buffer, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return ||old||^2 and ||new - old||^2 of one block; NaN if an element is not finite."""
    with np.errstate(all="ignore"):
        before = np.frombuffer(old, dtype=dtype).astype(np.float64)
        after = before if new is old else np.frombuffer(new, dtype=dtype).astype(np.float64)
        norm, moved = float(before @ before), 0.0
        if new is not old:
            delta = after - before
            moved = float(delta @ delta)
        # Squares of float64 may overflow although all elements are finite.
        is_finite = math.isfinite(norm + moved)
        is_finite = is_finite or bool(np.isfinite(before).all() and np.isfinite(after).all())
        return (norm, moved) if is_finite else (math.nan, math.nan)


def _ratio(pairs: list[tuple[float, float]]) -> Distance | None:
    """Return the distance, NaN if an element is not finite; None if the norm is 0 or unknown."""
    norm = math.fsum(pair[0] for pair in pairs)
    moved = math.fsum(pair[1] for pair in pairs)
    if math.isnan(norm):
        return Distance.known(norm)
    if not (math.isfinite(norm) and math.isfinite(moved)) or norm == 0:
        return None
    return Distance.known(math.sqrt(moved / norm))
