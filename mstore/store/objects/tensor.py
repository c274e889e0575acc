"""Records of tensors: stored, virtual and applied ones.

A tensor record has dtype, shape and block list of one tensor, or of one file's plain bytes.

A block is a run of its bytes from its own start, all full but the last; it cuts bytes, not
elements, and an element of a whole number of bytes never lies in two blocks.

A virtual tensor is of a merge that was planned and not computed. It takes the place of a tensor
record in the merge's manifest, and says all that a reader of headers, configs and sizes needs. Its
bytes are the plan's output for its inputs; `merge.virtual` computes them on demand. Equal ids mean
equal bytes. The same bytes may have several ids (one per plan), and a TensorId once stored.

An applied tensor is what a low-rank adapter makes of a tensor of the base; it is stored nowhere.
Its record says what it is computed from, so it has an id, and its blocks have names: hashes of the
record and their position. Statistics, memo keys and plans take such names like those of stored
blocks, and none is ever the id of a stored block: they are hashes of another domain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from mstore.blocks.packs import Kind
from mstore.checkpoint.dtypes import nbytes
from mstore.store.objects.canonical import (
    DEFAULT_LIMITS,
    Count,
    IdBytes,
    Record,
    RecordLimits,
    too_long,
    too_many,
)
from mstore.terms.errors import BadCheckpoint, Corrupt
from mstore.terms.ids import ID_BYTES, BlockId, PlanId, TensorId, VirtualId


def block_count(nbytes: int, block_size: int) -> int:
    """Return how many blocks so many bytes take.  Raises ValueError for impossible sizes."""
    if nbytes < 0:
        raise ValueError(f"a length cannot be negative: {nbytes}")
    if block_size < 1:
        raise ValueError(f"a block holds at least one byte, not {block_size}")
    return -(-nbytes // block_size)


def partition(nbytes: int, block_size: int) -> list[tuple[int, int]]:
    """Return (offset, length) of each block in bytes, in order.  Raises as `block_count`."""
    starts = (index * block_size for index in range(block_count(nbytes, block_size)))
    return [(start, min(block_size, nbytes - start)) for start in starts]


def in_blocks(pieces: Iterable[bytes], block_size: int) -> Iterator[bytes]:
    """Yield the bytes of pieces of any length in blocks; all are full but the last."""
    rest = b""
    for piece in pieces:
        rest += piece
        whole = len(rest) - len(rest) % block_size
        for start in range(0, whole, block_size):
            yield rest[start : start + block_size]
        rest = rest[whole:]
    if rest:
        yield rest


# The dtype of headers and of files that are not safetensors: a plain run of bytes.
BYTES = "BYTES"


class Tensor(Record, frozen=True, array_like=True, tag="tensor/1", gc=False):
    """`blocks` is the concatenation of BlockIds; all but the last block are BLOCK_SIZE bytes long.

    dtype: a safetensors dtype name, or BYTES.  nbytes: length of the plain bytes.
    """

    kind: ClassVar[Kind] = Kind.TENSOR
    id_type: ClassVar[type[TensorId]] = TensorId

    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    blocks: bytes

    def id(self) -> TensorId:
        return TensorId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        if len(self.blocks) % ID_BYTES:
            return "its block list does not end on a whole id"
        return shape_problem(self.dtype, self.shape, self.nbytes, limits)

    def block_count(self) -> int:
        """Number of blocks; 0 for an empty tensor."""
        return len(self.blocks) // ID_BYTES

    def block(self, number: int) -> BlockId:
        """The id of block `number`."""
        return BlockId(self.blocks[number * ID_BYTES : (number + 1) * ID_BYTES])

    def block_ids(self) -> Iterator[BlockId]:
        """All block ids in order."""
        for number in range(self.block_count()):
            yield self.block(number)

    def block_length(self, number: int, block_size: int) -> int:
        """Plain bytes of block `number`."""
        return min(block_size, self.nbytes - number * block_size)

    def fits(self, block_size: int) -> bool:
        """Return whether the block list fits the length."""
        return len(self.blocks) == ID_BYTES * -(-self.nbytes // block_size)

    def check(self, block_size: int, where: str) -> None:
        """Raise Corrupt unless the block list fits the length."""
        if not self.fits(block_size):
            raise Corrupt("block list and length do not agree", where=where)


def shape_problem(
    dtype: str, shape: tuple[int, ...], length: int, limits: RecordLimits
) -> str | None:
    """Return why dtype and shape do not give a tensor of `length` bytes, or None."""
    problem = too_many("dimensions", len(shape), limits.rank)
    if problem is not None:
        return problem
    try:
        expected = shape[0] if dtype == BYTES and len(shape) == 1 else nbytes(dtype, shape)
    except BadCheckpoint as error:
        return error.what
    return None if expected == length else "dtype, shape and length do not agree"


class VirtualTensor(Record, frozen=True, array_like=True, tag="virtual/1"):
    """The tensor called `tensor` in `plan`; tied names share the record of the first of them."""

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

    def check(self, where: str) -> None:
        """Raise Corrupt unless dtype and shape give the length."""
        problem = self.problem(DEFAULT_LIMITS)
        if problem is not None:
            raise Corrupt(problem, where=where)


APPLIED_DTYPE = "F32"
"""The element type of applied tensors: nothing is rounded to the base's type before merging."""

_CONTEXT = "mstore 1 applied block"


class FactoredProduct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """scale * a product that stored tensors make, or some of its rows, at some rows of a tensor.

    form: how the tensors make a product (`mstore.models.adapters.forms`). first, rows: the rows of
    the product that count. at: the row of the tensor where they begin.
    """

    form: str
    factors: tuple[Tensor, ...]
    scale: float
    first: int
    rows: int
    at: int


class AppliedTensor(Tensor, frozen=True, array_like=True, tag="applied/1", gc=False):
    """base + products, in float32, for a matrix [rows, columns].

    A tensor of more dimensions counts as one of [first dimension, all others].  base: the base's
    tensor. products: of different rows. magnitude: for DoRA the norm of each row of the result,
    [rows]; None otherwise.
    """

    base: Tensor
    products: tuple[FactoredProduct, ...]
    magnitude: Tensor | None = None

    def id(self) -> TensorId:
        return TensorId.of(self.encode())

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the adapter that it is computed from."""
        more = () if self.magnitude is None else (self.magnitude,)
        return (*(one for product in self.products for one in product.factors), *more)

    @property
    def factor_bytes(self) -> int:
        """Plain bytes of the adapter's tensors."""
        return sum(one.nbytes for one in self.factors)

    @property
    def rows_together(self) -> int:
        """How many rows depend on each other, in groups; 0: elements do not depend on others."""
        return int(self.magnitude is not None)

    @property
    def is_sum(self) -> bool:
        """Whether it is base + products and nothing else."""
        return self.magnitude is None


class MultipliedTensor(AppliedTensor, frozen=True, array_like=True, tag="multiplied/1", gc=False):
    """base * what an adapter's tensors make of it, in float32.

    products: one, whose form says what its tensors multiply (`models.adapters.multipliers`).
    settings: numbers of the adapter's config that this form needs. group: `rows_together`.
    """

    settings: tuple[float, ...] = ()
    group: int = 1

    @property
    def rows_together(self) -> int:
        return self.group

    @property
    def is_sum(self) -> bool:
        return False


def applied(
    base: Tensor,
    products: tuple[FactoredProduct, ...],
    *,
    magnitude: Tensor | None,
    settings: tuple[float, ...] | None,
    group: int,
    block_size: int,
) -> AppliedTensor:
    """Return the record, with the names of its blocks.

    settings: None unless it is multiplied; then group counts, too.
    """
    nbytes = 4 * math.prod(base.shape)
    given = (APPLIED_DTYPE, base.shape, nbytes, b"", base, products, magnitude)
    whole = AppliedTensor(*given) if settings is None else MultipliedTensor(*given, settings, group)
    key = whole.encode()
    names = [
        blake3(number.to_bytes(8, "little") + key, derive_key_context=_CONTEXT).digest()
        for number in range(-(-nbytes // block_size))
    ]
    return replace(whole, blocks=b"".join(names))
