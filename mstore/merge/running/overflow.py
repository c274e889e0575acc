"""Overflow: elements of a merge that became infinite because the output type cannot hold them.

Counts elements that are infinite in the output and finite in the base. Computed chunks are counted
while base and output are in memory; chunks that an earlier merge made are counted after they are
published (`counted`). `codes.can_overflow` says which types can overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.ids import ID_BYTES, BlockId
from mstore.merge.running.task import Members, TensorTask
from mstore.numeric.codes import INFINITIES, ITEMSIZES, can_overflow
from mstore.stats.chunks import blocks_per_chunk
from mstore.store.catalog import Catalog
from mstore.store.plan_rows import Overflow

Bytes = npt.NDArray[np.uint8]


def infinite(data: Bytes, dtype: str) -> npt.NDArray[np.bool_]:
    """Return bool[elements]: which of these stored elements are infinite."""
    bits = data.view(f"<u{ITEMSIZES[dtype]}")
    # Ignore the sign bit.
    found: npt.NDArray[np.bool_] = (bits & (2 ** (8 * ITEMSIZES[dtype] - 1) - 1)) == INFINITIES[
        dtype
    ]
    return found


def became_infinite(tensor: TensorTask, base: Bytes, out: Bytes) -> int:
    """Count the elements of a chunk that are infinite in `out` and not in `base`."""
    if not can_overflow(tensor.base_dtype, tensor.out_dtype):
        return 0
    now = infinite(out, tensor.out_dtype)
    # Usually there is none, and the base need not be checked.
    return int((now & ~infinite(base, tensor.base_dtype)).sum()) if now.any() else 0


class Tally(msgspec.Struct):
    """Overflow in one run: counts by tensor, and chunks that were not checked yet."""

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    elements: dict[str, int] = msgspec.field(default_factory=dict)
    unseen: list[tuple[TensorTask, Members, int, tuple[BlockId, ...]]] = msgspec.field(
        default_factory=list
    )

    def add(self, tensor: TensorTask, count: int) -> None:
        """Add the count of one computed chunk."""
        if count:
            self.counts[tensor.name] = self.counts.get(tensor.name, 0) + count
            self.elements[tensor.name] = tensor.elements

    def leave(
        self, tensor: TensorTask, members: Members, found: Mapping[int, Sequence[BlockId]]
    ) -> None:
        """Remember chunks that were made before, by number, with their output blocks."""
        if can_overflow(tensor.base_dtype, tensor.out_dtype):
            self.unseen += [(tensor, members, n, tuple(blocks)) for n, blocks in found.items()]


def counted(catalog: Catalog, tally: Tally) -> tuple[Overflow, ...]:
    """Return all overflow of a published merge, worst first. Raises Corrupt, StorageFailed."""
    for tensor, members, number, blocks in tally.unseen:
        out = _read(catalog, blocks)
        if infinite(out, tensor.out_dtype).any():
            span = ID_BYTES * blocks_per_chunk(
                tensor.base_dtype, tensor.chunk_elements, catalog.block_size
            )
            ids = members.base.blocks[number * span : (number + 1) * span]
            own = [BlockId(ids[at : at + ID_BYTES]) for at in range(0, len(ids), ID_BYTES)]
            tally.add(tensor, became_infinite(tensor, _read(catalog, own), out))
    tally.unseen.clear()
    ordered = sorted(tally.counts.items(), key=lambda one: (-one[1], one[0]))
    return tuple(Overflow(name, count, tally.elements[name]) for name, count in ordered)


def _read(catalog: Catalog, blocks: Iterable[BlockId]) -> Bytes:
    return np.frombuffer(b"".join(catalog.read_block(block) for block in blocks), dtype=np.uint8)
