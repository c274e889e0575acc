"""What a merge of a plan would read now: without what the memo table saves, and from remotes.

Reads records, the memo table and the index, and no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import msgspec
import numpy as np

from mstore.blocks.elsewhere import REQUEST_BYTES
from mstore.blocks.location import in_runs, run_of
from mstore.merge.running.finished import TOGETHER, Shape, find_hits
from mstore.merge.running.memo_keys import MemoKeys
from mstore.merge.running.task import NamedRow, Tasks, TensorTask
from mstore.models.adapters.low_rank import stored_bytes
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.objects.plan import Plan
from mstore.terms.ids import BlockId, split_ids

_IDS_TOGETHER: Final = 32 << 20
_Chunks = list[tuple[TensorTask, list[int]]]
"""Tensors, and numbers of chunks of each."""


class Outstanding(msgspec.Struct, frozen=True):
    """What is left to read.

    saved: planned expert bytes that the memo table saves. not_here: bytes at rest that are neither
    stored here nor in the cache, of experts, of the base, and of what these are differences to.
    requests: about how many bring them.
    """

    saved: int
    not_here: int = 0
    requests: int = 0


def outstanding(catalog: Catalog, memo: Memo, plan: Plan, planned: int) -> Outstanding:
    """Return what a merge of a plan would read now; `planned` are its expert bytes."""
    is_lazy = catalog.index.elsewhere is not None
    if not (is_lazy or memo.has_outputs()):
        return Outstanding(0)
    tasks = Tasks(catalog, plan)
    left, is_hit = _left(catalog, memo, tasks)
    saved = planned - _expert_bytes(catalog, tasks, left) if is_hit else 0
    return Outstanding(saved, *_not_here(catalog, tasks, left)) if is_lazy else Outstanding(saved)


def _left(catalog: Catalog, memo: Memo, tasks: Tasks) -> tuple[_Chunks, bool]:
    """Return the chunks that are computed, and whether the memo table has others."""
    tensors = [tasks.tensor(one.name) for one in tasks.plan.tensors]
    made = [(one, np.flatnonzero(~tasks.reused(one)).tolist()) for one in tensors]
    if not memo.has_outputs():
        return made, False
    makes = MemoKeys(tasks)
    is_hit = False
    left: _Chunks = []
    for start in range(0, len(made), TOGETHER):
        some = made[start : start + TOGETHER]
        tensors = [one for one, _ in some]
        keys = [makes.by_number(one, numbers) for one, numbers in some]
        shapes = [Shape(one, tasks.members(one.name), catalog.block_size) for one in tensors]
        wanted = list(zip(shapes, keys, strict=True))
        hits = find_hits(memo, catalog.has_blocks, wanted)
        for tensor, numbers, found in zip(tensors, keys, hits, strict=True):
            is_hit |= bool(found.stored)
            left.append((tensor, [number for number in numbers if number not in found.stored]))
    return left, is_hit


def _expert_bytes(catalog: Catalog, tasks: Tasks, chunks: _Chunks) -> int:
    """Return the bytes that reading the experts of some chunks of tensors costs.

    An adapter's tensors are read whole if one chunk needs them; experts that are one adapter share
    what is read.
    """
    total = 0
    blocks = bytearray()
    for tensor, numbers in chunks:
        adapters = set()
        for number in numbers:
            (_, *rows), _ = tasks.named(tensor, number)
            for _, own, record in rows:
                if record is None:
                    blocks += own
                else:
                    adapters.add(record)
        total += sum(stored_bytes(catalog, list(adapters)))
        if len(blocks) >= _IDS_TOGETHER:
            total += int(catalog.stored_lengths(blocks).sum())
            blocks = bytearray()
    return total + int(catalog.stored_lengths(blocks).sum())


def _not_here(catalog: Catalog, tasks: Tasks, chunks: _Chunks) -> tuple[int, int]:
    """Return the bytes of these chunks that only remotes have, and about how many requests."""
    is_elsewhere, elsewhere = cache(catalog.packs.is_elsewhere), catalog.index.elsewhere
    assert elsewhere is not None
    blocks = dict.fromkeys(
        block
        for tensor, numbers in chunks
        for number in numbers
        for row in tasks.named(tensor, number)[0]
        for block in _blocks(row)
    )
    places = {
        (at.pack, at.offset): at
        for at in catalog.locate_with_bases(list(blocks)).values()
        if is_elsewhere(at.pack) and not elsewhere.is_kept(at)
    }
    ordered = [places[key] for key in sorted(places)]
    lengths = [run_of(run)[2] for run in in_runs(ordered, lambda at: at)]
    return sum(lengths), sum(-(-length // REQUEST_BYTES) for length in lengths)


def _blocks(row: NamedRow) -> Iterator[BlockId]:
    _, own, applied = row
    if applied is None:
        yield from map(BlockId, split_ids(own))
    else:
        for factor in applied.factors:
            yield from factor.block_ids()
