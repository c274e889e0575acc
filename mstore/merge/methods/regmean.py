"""regmean: the base plus the deltas, each weighed in every direction by its expert's inputs.

For a linear layer with inputs x, the weights W that come nearest to all experts' outputs, sum over
k of w_k E|x_k W^T - x_k W_k^T|^2, are sum w_k W_k G_k (sum w_k G_k)^-1, with G_k = E[x_k^T x_k] the
Gram matrix of expert k's inputs.  As M_k = w_k G_k (sum w_k G_k)^-1 add up to 1, that is the base
plus the sum of the d_k M_k (Jin et al. 2023, arXiv 2212.09849).

The Gram matrix of an expert is a checkpoint of its own, of blocks on the diagonal (`grams`), with a
tensor of the name of each weight that has one.  Products of different inputs are multiplied by
`shrink`.  Tensors without, such as embeddings and norms, are averaged.

**What leaving experts out costs** has a certified bound: |d_k M_k| is at most |d_k| times the
largest singular value of M_k.  The factor of an expert in a plan is that number, rounded up; of an
averaged tensor it is the expert's share.  `model.Rounding` holds, too: deltas are float32, all sums
float64, and rounded once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3

from mstore.merge.arithmetic import chunk_sums, grams
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.chunk_sums import ChunkSums
from mstore.merge.arithmetic.row_factors import Facts, deltas_of
from mstore.merge.arithmetic.tiles import SUMMED
from mstore.merge.measures.grid import AnyShape, Companion, Grid, Shape
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.model import CostModel
from mstore.merge.methods.parameters import Parameter, Range, Value, next_single, single
from mstore.merge.methods.selection import Delta, Measured, Selection, common
from mstore.models.stats.chunks import row_length
from mstore.numeric.matmul import Doubles, Singles, add_blocks
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.merge.measures.facts import Side, TensorFacts

ROLE: Final = "gram"
"""The role of the Gram matrices of an expert's inputs."""
WIDTH: Final = Parameter("block", "int", 64, Range(0.0, 65536.0), words=(("full", 0),))
SHRINK: Final = Parameter("shrink", "float", 0.9, Range(0.0, 1.0))


def _of_inputs(name: str, shape: Shape) -> AnyShape | None:
    return (None, None) if len(shape) == 2 else None


class Turned(ChunkSums):
    """The deltas of each expert times M_k = G_k (sum of all G_k)^-1 of Gram matrices, from the
    right; a weighted average of the deltas where a tensor has none.

    width: inputs of a block of the matrices; 0: as many as a row has elements. shrink: what
    correlations are multiplied by. packed: the Gram matrices (`grams`) of the experts that have a
    weight; given, numbers: these, and which experts they are; none before it is bound.
    """

    code = 11

    def __init__(
        self,
        width: int,
        shrink: float,
        packed: Sequence[grams.Bytes] = (),
        given: Sequence[float] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        self.width = width
        self.shrink = shrink
        self._packed = packed
        self._given = given
        self._numbers = numbers

    def width_of(self, row: int) -> int:
        """Return how many inputs a block has, of a row of so many elements."""
        return min(self.width, row) if self.width else row

    def row(self, shape: Sequence[int]) -> int:
        """Return the elements of a block of columns, or of a row that is no whole number of them:
        a chunk begins and ends with one.
        """
        if len(shape) < 2:
            return 1
        row = row_length(shape)
        width = self.width_of(row)
        return row if row % width else width

    def bound(self, given: Sequence[float], facts: Facts) -> Turned:
        (own,) = facts
        there = {k: one for k, one in enumerate(own) if one is not None and given[k]}
        weights = [given[k] for k in there]
        return Turned(self.width, self.shrink, [*there.values()], weights, [*there])

    @cached_property
    def _digest(self) -> bytes:
        told = np.array([self.shrink, *self._given]).tobytes()
        return blake3(told + b"".join(one.tobytes() for one in self._packed)).digest()

    def key(self, shape: Sequence[int]) -> bytes:
        return self._digest + np.array(shape, dtype=np.int64).tobytes() if self._packed else b""

    def tensor_bytes(self, shape: Sequence[int], experts: int) -> int:
        """Return the bytes of the matrices M_k of a tensor."""
        if len(shape) < 2:
            return 0
        row = row_length(shape)
        width = self.width_of(row)
        return grams.KEPT * 4 * experts * -(-row // width) * width * width

    def sums(self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float]) -> Doubles:
        if not self._packed:
            return chunk_sums.weighted(chunk, weights)
        inputs = row_length(shape)
        form = self.width_of(inputs), inputs
        turns = grams.kept_turns(self._digest, self._packed, self._given, self.shrink, form)
        found = np.zeros(chunk.n)
        for first, rows, column, columns in chunk_sums.parts(chunk, inputs):
            own = found[first : first + rows * columns].reshape(rows, columns)
            self._turn(chunk, turns.matrices, first, column, own)
        return found

    def _turn(
        self, chunk: Chunk, matrices: Singles, first: int, column: int, sums: Doubles
    ) -> None:
        """Add the turned deltas of a part of the chunk to `sums`, float64[rows, columns].

        first: its first element in the chunk. column: its first one in a row of the tensor.
        """
        rows, columns = sums.shape
        width = matrices.shape[2]
        blocks = slice(column // width, -(-(column + columns) // width))
        padded = (blocks.stop - blocks.start) * width
        room = sums if padded == columns else np.zeros((rows, padded))
        for k, number in enumerate(self._numbers):
            row = chunk.row_of[number]
            if row < 0:
                continue
            left = deltas_of(chunk, row, first, rows * columns).reshape(rows, columns)
            if padded != columns:
                left = np.pad(left, ((0, 0), (0, padded - columns)))
            add_blocks(room, left, matrices[k, blocks])
        if room is not sums:
            sums[:] = room[:, :columns]


class RegressedModel(CostModel):
    """As `CostModel`; its estimate takes a matrix to turn a delta by less than its largest value.

    That lies between an expert's share, as if inputs were alike in all experts, and the bound: the
    root of their product.
    """

    def __init__(self, operation: Operation, grid: Grid) -> None:
        super().__init__(operation, grid)
        total = sum(operation.given)
        pairs = zip(operation.given, operation.weights, strict=True)
        less = [math.sqrt(one / total / most) if most else 0.0 for one, most in pairs]
        self._typical = self._typical * np.array(less)[:, None]


class Regressed(Sum):
    """A sum of deltas that are turned by matrices of all experts' Gram matrices."""

    kind = SUMMED
    model = RegressedModel
    kernel = staticmethod(chunk_sums.run)
    companions = (
        Companion(
            ROLE,
            shape=_of_inputs,
            dtypes=("U8",),
            is_optional=True,
            called="Gram matrix",
            made="examples/gram.py",
        ),
    )

    def check(self, operation: Operation) -> None:
        if min(operation.given) < 0 or not any(operation.given):
            raise BadRequest(
                f"weights of {operation.method.name} must not be negative, nor all zero: it "
                "divides by their sum",
                where=Option("experts"),
            )

    def facts(self, select: type[Selection]) -> str:
        return "Gram matrices of the experts' inputs"

    def needs_facts(self, operation: Operation) -> bool:
        return True

    def chunk_factors(self, parameters: Mapping[str, Value]) -> Turned:
        return Turned(int(common(parameters, WIDTH)), common(parameters, SHRINK))

    def divided_by(self, operation: Operation) -> str:
        return "the method"

    def dilutes(self, operation: Operation) -> bool:
        """Return True: inputs of an expert that does not move count, too."""
        return True

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        (sides,) = facts.companions.values()
        own = [k for k, weight in enumerate(operation.given) if weight]
        there = [k for k in own if sides[k] is not None]
        if there and len(there) < len(own):
            raise Incompatible(
                f"{len(there)} of the {len(own)} Gram matrices have this tensor, and the others "
                "lack it",
                where=facts.name,
                hint=Option("skip", (facts.name,)),
            )
        total = float(sum(operation.given))
        factors = [weight / total for weight in operation.given]
        if there:
            factors = [0.0] * len(factors)
            weights = [operation.given[k] for k in there]
            found = [side for k in there if (side := sides[k]) is not None]
            norms = self._norms(operation, facts, found, weights)
            for k, norm in zip(there, norms, strict=True):
                factors[k] = norm
        return operation.settled(Mixture(1.0, tuple(factors), keeps_base=True))

    def _norms(
        self,
        operation: Operation,
        facts: TensorFacts,
        sides: Sequence[Side],
        weights: Sequence[float],
    ) -> list[float]:
        """Return the largest singular value of each expert's matrix, float32, rounded up."""
        own = operation.chunk_factors
        assert isinstance(own, Turned)
        width, shrink = own.width_of(facts.base.shape[1]), own.shrink
        told = struct.pack(f"<qd{len(sides)}d", width, shrink, *weights)
        what = blake3(told + b"".join(id for id, _ in sides)).digest(length=15)

        def measure() -> list[float]:
            packed = [facts.array(side) for side in sides]
            try:
                grams.require(packed, (width, facts.base.shape[1]))
                found = grams.turns(packed, weights, shrink)
            except Incompatible as error:
                error.locate(facts.name)
                raise
            return [_up(norm) for norm in found.norms.tolist()]

        keys = [(id, what + bytes([k % 256])) for k, (id, _) in enumerate(sides)]
        return facts.once(keys, measure)


def _up(value: float) -> float:
    """Return the smallest float32 that is not less."""
    near = single(value)
    return near if near >= value else next_single(near)


REGMEAN: Final = Method(
    name="regmean",
    summary="base plus the deltas, each weighed in every direction by its expert's inputs",
    formula="base + sum d_k M_k, M_k = w_k G_k (sum w_j G_j)^-1, G_k the Gram matrix of expert "
    "k's inputs; an average where a tensor has none",
    source="Jin et al. 2023, arXiv 2212.09849",
    parameters=(WIDTH, SHRINK),
    select=Delta,
    combine=Regressed(),
    mind="inputs of what is left out count, so the others do not fill its place",
    is_ours=True,
)
