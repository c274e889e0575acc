"""The virtual tensor record: a tensor of a merge that was planned but not computed.

It takes the place of a tensor record in a real merge's manifest.  It holds everything that a reader
of headers, configs and sizes needs.  Its bytes are the plan's output for its inputs;
`merge.virtual` computes them on demand.  Equal ids mean equal bytes.  The same bytes may have
several ids (one per plan), and a TensorId once they are stored.
"""

from __future__ import annotations

from typing import ClassVar

from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import PlanId, VirtualId
from mstore.objects.canonical import DEFAULT_LIMITS, Count, IdBytes, Record, RecordLimits, too_long
from mstore.objects.tensor import BYTES, shape_problem


class VirtualTensor(Record, frozen=True, array_like=True, tag="virtual/1"):
    """The tensor called `tensor` in `plan`; tied names share the record of the first of them.

    dtype: a safetensors dtype name.  nbytes: length of the plain bytes, as dtype and shape say.
    """

    kind: ClassVar[Kind] = Kind.VIRTUAL
    id_type: ClassVar[type[VirtualId]] = VirtualId

    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    plan: IdBytes
    tensor: str

    def id(self) -> VirtualId:
        return VirtualId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        if self.dtype == BYTES:
            return "plain bytes are no tensor of a plan"
        return too_long("a tensor name", self.tensor, limits.name_bytes) or shape_problem(
            self.dtype, self.shape, self.nbytes, limits
        )

    def plan_id(self) -> PlanId:
        """The plan that computes it."""
        return PlanId(self.plan)

    def blocks(self, block_size: int) -> int:
        """Return the number of blocks; 0 for an empty tensor."""
        return -(-self.nbytes // block_size)

    def block_length(self, number: int, block_size: int) -> int:
        """Plain bytes of block `number`."""
        return min(block_size, self.nbytes - number * block_size)

    def check(self, where: str) -> None:
        """Raise Corrupt unless dtype and shape give the length."""
        problem = self.problem(DEFAULT_LIMITS)
        if problem is not None:
            raise Corrupt(problem, where=where)
