"""Applied tensors: what a low-rank adapter makes of a tensor of the base, as a record.

An applied tensor is stored nowhere.  Its record says what it is computed from, so it has an id, and
its blocks have names of their own: hashes of the record and their position.  Statistics, memo keys
and plans take such names like those of stored blocks.  No name of an applied block is ever the id
of a stored one: they are hashes of other domains.
"""

from __future__ import annotations

from blake3 import blake3

from mstore.store.objects.tensor import Tensor, block_count
from mstore.terms.ids import TensorId

DTYPE = "F32"
"""The element type of applied tensors: nothing is rounded to the base's type before merging."""

_CONTEXT = "mstore 1 applied block"


class AppliedTensor(Tensor, frozen=True, array_like=True, tag="applied/1", gc=False):
    """base + scale * (left @ right), in float32, for a matrix [rows, columns].

    base: the base's tensor. left: [rows, rank], or its transpose if `transposed`. right:
    [rank, columns], or its transpose. magnitude: for DoRA the norm of each row of the result,
    [rows]; None otherwise.
    """

    base: Tensor
    left: Tensor
    right: Tensor
    transposed: bool
    scale: float
    magnitude: Tensor | None = None

    def id(self) -> TensorId:
        return TensorId.of(self.encode())

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the adapter that it is computed from."""
        more = () if self.magnitude is None else (self.magnitude,)
        return (self.left, self.right, *more)

    @property
    def factor_bytes(self) -> int:
        """Plain bytes of the adapter's tensors."""
        return sum(one.nbytes for one in self.factors)

    @property
    def needs_rows(self) -> bool:
        """Whether an element depends on all of its row."""
        return self.magnitude is not None


def applied(
    base: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    transposed: bool,
    scale: float,
    magnitude: Tensor | None,
    block_size: int,
) -> AppliedTensor:
    """Return the record, with the names of its blocks."""
    nbytes = 4 * base.shape[0] * base.shape[1]
    whole = AppliedTensor(
        DTYPE, base.shape, nbytes, b"", base, left, right, transposed, scale, magnitude
    )
    key = whole.encode()
    names = [
        blake3(number.to_bytes(8, "little") + key, derive_key_context=_CONTEXT).digest()
        for number in range(block_count(nbytes, block_size))
    ]
    return AppliedTensor(
        DTYPE, base.shape, nbytes, b"".join(names), base, left, right, transposed, scale, magnitude
    )
