"""Diff: how two snapshots differ, in files, tensors, blocks and norm.

Equal ids need no look at the data.  The relative distance of a changed tensor reads only the
blocks that differ, and the other side's norm comes from the same pass or from the statistics.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mstore.checkpoint.dtypes import DTYPES
from mstore.errors import Incompatible
from mstore.ids import BlockId, SnapshotId
from mstore.objects.manifest import Manifest
from mstore.objects.tensor import Tensor
from mstore.reports import DiffReport, FileDiff, TensorDiff
from mstore.store.catalog import Catalog
from mstore.view import array_dtype


def diff(
    catalog: Catalog, a: SnapshotId, b: SnapshotId, *, blocks: bool, threads: int
) -> DiffReport:
    """From snapshot a to snapshot b.  `blocks` lists the numbers of the changed blocks."""
    left = catalog.manifest(catalog.snapshot(a).manifest_id())
    right = catalog.manifest(catalog.snapshot(b).manifest_id())
    files, files_equal = _files(left, right)
    ours, theirs = left.tensors(), right.tensors()
    found: list[TensorDiff] = []
    equal = total = changed = 0
    with ThreadPoolExecutor(threads, "diff") as pool:
        for name in list(ours) + [name for name in theirs if name not in ours]:
            before = catalog.tensor(ours[name]) if name in ours else None
            after = catalog.tensor(theirs[name]) if name in theirs else None
            total += max(t.block_count() for t in (before, after) if t is not None)
            if name in ours and ours[name] == theirs.get(name):
                equal += 1
                continue
            item = _tensor(catalog, name, before, after, blocks, pool)
            changed += item.blocks_changed
            found.append(item)
    return DiffReport(a, b, files, tuple(found), files_equal, equal, total, changed)


def _files(left: Manifest, right: Manifest) -> tuple[tuple[FileDiff, ...], int]:
    ours = {file.path: file for file in left.files}
    theirs = {file.path: file for file in right.files}
    found, equal = [], 0
    for path in sorted(ours.keys() | theirs.keys()):
        before, after = ours.get(path), theirs.get(path)
        if before == after:
            equal += 1
        elif before is None and after is not None:
            found.append(FileDiff(path, "added", None, after.size))
        elif before is not None and after is None:
            found.append(FileDiff(path, "removed", before.size, None))
        elif before is not None and after is not None:
            found.append(FileDiff(path, "changed", before.size, after.size))
    return tuple(found), equal


def _tensor(
    catalog: Catalog,
    name: str,
    before: Tensor | None,
    after: Tensor | None,
    list_blocks: bool,
    pool: ThreadPoolExecutor,
) -> TensorDiff:
    shown = after if after is not None else before
    assert shown is not None
    if before is None or after is None:
        status = "added" if before is None else "removed"
        numbers = list(range(shown.block_count()))
        distance = None
    else:
        status = "changed"
        same_form = (before.dtype, before.shape) == (after.dtype, after.shape)
        count = max(before.block_count(), after.block_count())
        numbers = [n for n in range(count) if _block(before, n) != _block(after, n)]
        distance = _distance(catalog, before, after, numbers, pool) if same_form else None
    return TensorDiff(
        name=name,
        status=status,
        dtype=shown.dtype,
        shape=shown.shape,
        blocks_total=shown.block_count(),
        blocks_changed=len(numbers),
        relative_l2=distance,
        changed_blocks=tuple(numbers) if list_blocks else None,
    )


def _block(tensor: Tensor, number: int) -> BlockId | None:
    return tensor.block(number) if number < tensor.block_count() else None


def _distance(
    catalog: Catalog, before: Tensor, after: Tensor, numbers: list[int], pool: ThreadPoolExecutor
) -> float | None:
    """||after - before|| / ||before|| in float64, block by block."""
    if not DTYPES[before.dtype].floating:
        return None
    try:
        dtype = array_dtype(before.dtype)
    except Incompatible:
        return None
    differing = set(numbers)

    def sums(number: int) -> tuple[float, float]:
        old = _values(catalog.read_block(before.block(number)), dtype)
        if number not in differing:
            return float(old @ old), 0.0
        delta = _values(catalog.read_block(after.block(number)), dtype) - old
        return float(old @ old), float(delta @ delta)

    with np.errstate(all="ignore"):
        pairs = list(pool.map(sums, range(before.block_count())))
    norm = math.fsum(pair[0] for pair in pairs)
    moved = math.fsum(pair[1] for pair in pairs)
    if not (math.isfinite(norm) and math.isfinite(moved)) or norm == 0:
        return None
    return math.sqrt(moved / norm)


def _values(data: bytes, dtype: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.frombuffer(data, dtype=dtype).astype(np.float64)
