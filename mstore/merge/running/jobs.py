"""Jobs: the tensors of a run, each with the ids of its output blocks found so far."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mstore.ids import ID_BYTES, BlockId
from mstore.merge.running.memo_hits import Shape
from mstore.merge.running.not_finite import ALL_FINITE, NotFinite
from mstore.merge.running.task import Members, TensorTask
from mstore.objects.tensor import Tensor


class Job(msgspec.Struct):
    """One tensor in progress.  `ids` is complete once every chunk was put.

    not_finite: new elements so far.
    """

    tensor: TensorTask
    members: Members
    shape: Shape
    ids: bytearray
    not_finite: NotFinite = ALL_FINITE

    @classmethod
    def of(cls, tensor: TensorTask, members: Members, block_size: int) -> Job:
        """Return a job without any output yet."""
        shape = Shape(tensor, members, block_size)
        return cls(tensor, members, shape, bytearray(shape.blocks * ID_BYTES))

    def put(self, number: int, blocks: Sequence[BlockId], not_finite: NotFinite) -> None:
        """Set the blocks of a chunk, with its new elements that are not finite."""
        if not_finite is not ALL_FINITE:
            self.not_finite += not_finite
        at = number * self.shape.per_chunk * ID_BYTES
        self.ids[at : at + len(blocks) * ID_BYTES] = b"".join(blocks)

    def put_base(self, number: int) -> None:
        """Set the blocks of a chunk to those of the base."""
        span = self.shape.per_chunk * ID_BYTES
        at = slice(number * span, (number + 1) * span)
        self.ids[at] = self.members.base.blocks[at]

    def record(self) -> Tensor:
        """Return the output tensor."""
        tensor = self.tensor
        return Tensor(tensor.out_dtype, tensor.shape, tensor.out_bytes, bytes(self.ids))
