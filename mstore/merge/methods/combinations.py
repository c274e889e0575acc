"""Combinations that several methods share: how one number is made of what they selected.

SUM: sum of m_k = w_k * selected_k, over the sum of all w_k if `normalize`.  ALONE: m_0, of the only
expert.

ELECTED: sum of the m_k that have the sign of the sum of all, over the sum of their w_k if
`normalize`.  With `by_count` they have the sign that most of them have; none has if as many are
positive as negative.

MIXED: a sum whose factors follow from inner products, of whole tensors or of each row.  FACTORED:
one in which every element has factors of its own, made of its base and experts.

Inner products follow from sums of squares of tensors and of their differences, <a, b> = (|a|^2 +
|b|^2 - |a - b|^2) / 2.  Deltas are small next to the base: their products follow from differences
alone, never from products of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from mstore.merge.arithmetic import element_factors
from mstore.merge.arithmetic.row_factors import ChunkFactors, RowFactors
from mstore.merge.arithmetic.tiles import ADDITIVE, ALONE, CONSENSUS, FACTORED, MAJORITY
from mstore.merge.measures import BEYOND
from mstore.merge.measures.estimates import elected
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Operation
from mstore.merge.methods.model import CostModel, scaled
from mstore.merge.methods.parameters import Parameter, Scalar, Value
from mstore.merge.methods.selection import Delta, Measured, Selection, Whole
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


_EXACT: Final = 1e-6
"""How far from 1 the weights of whole models may add up: they are float32."""
_OF_SUMS: Final = frozenset({"lambda", "normalize", "scale"})
"""Parameters of weighted sums; another one changes what is added."""


class Sum(Combination):
    """A sum with fixed factors."""

    kind = ADDITIVE
    model = CostModel

    def linear_weights(self, operation: Operation) -> list[float] | None:
        method, parameters = operation.method, operation.parameters
        is_whole = method.select is Whole
        is_all = type(self) is Sum and (is_whole or method.select is Delta)
        if not is_all or not {*parameters} <= _OF_SUMS:
            return None
        weights = [float(weight) for weight in operation.given]
        total = math.fsum(weights)
        factor = _number(parameters, "scale") * _number(parameters, "lambda")
        if parameters.get("normalize"):
            if not total:
                return None
            factor /= total
        elif is_whole and abs(total - 1) > _EXACT:
            return None
        return [weight * factor for weight in weights]


def _number(parameters: Mapping[str, object], name: str) -> float:
    value = parameters.get(name, 1.0)
    assert isinstance(value, int | float)
    return float(value)


class Alone(Sum):
    """One expert, times its weight."""

    whole_kind = ALONE
    stacks = True

    def keeps_base(self, operation: Operation) -> bool:
        return super().keeps_base(operation) or operation.weights == (1.0,)


class Factored(Sum):
    """A sum in which every element has factors of its own.

    factors: makes what they follow from, of parameters.
    """

    kind = FACTORED
    unbounded: ClassVar[str | None] = "makes the factors of an element of what is read of it"
    kernel = staticmethod(element_factors.run)

    def __init__(self, factors: Callable[[Mapping[str, Value]], ChunkFactors]) -> None:
        self._factors = factors

    def chunk_factors(self, parameters: Mapping[str, Value]) -> ChunkFactors:
        return self._factors(parameters)

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return 2 for each, times what it is weighed with: no factor is larger."""
        return tuple([2.0 * abs(weight) * operation.farthest for weight in operation.weights])


class ElectedModel(CostModel):
    """As `Model`, for elections."""

    votes: Sequence[float] | None = None

    def __init__(self, operation: Operation, grid: Grid) -> None:
        self._normalizes = operation.normalizes
        heavy = {abs(weight) for weight in operation.weights if weight}
        self._is_uneven = self._normalizes and len(heavy) > 1
        super().__init__(operation, grid)

    def _coefficients(self) -> Floats:
        """Return a guess.

        An operator that divides by the weights that agree gives an expert all of its delta where no
        heavier one is kept, whatever its own weight, and elsewhere its weight over the heaviest
        one's.  The positions that different experts keep are assumed independent.
        """
        weights, scale = self._weights, self._undivided()
        if not self._normalizes or not weights.any():
            plain: Floats = weights * scale
            return plain
        share = weights / weights.max()
        if not self._is_uneven:
            even: Floats = share * scale
            return even
        alone = np.ones(self._grid.shape)
        for weight, kept in zip(weights, self._kept, strict=True):
            alone[weights[:, 0] < weight] *= 1.0 - kept
        squares: Floats = np.where(weights > 0, alone + (1.0 - alone) * share**2, 0.0)
        return np.sqrt(squares) * scale

    def _with_lighter(self, roots: Floats) -> Floats:
        """Return `roots` plus what leaving a unit out lets in: float64[K, C].

        While a heavy expert is kept, lighter ones hardly count; without it their deltas appear.
        """
        weights = np.abs(np.array(self.operation.weights))
        full = scaled(np.sqrt(self._grid.copies) * self._undivided(), self.squares) ** 2
        full = np.where(np.isfinite(full), full, 0.0)
        squares = roots * roots
        for k, kept in enumerate(self._kept):
            for j in np.flatnonzero((weights > 0) & (weights < weights[k])).tolist():
                squares[k] += kept * full[j]
        found: Floats = np.sqrt(squares)
        return found

    def ranked(self, score: str) -> Floats:
        """Return roots that know of conflicts, if the score asks for them."""
        roots = super().ranked(score)
        if score == "conflict":
            # A delta without a norm has no direction; infinity stays infinity.
            share = agreement(self._grid.rows, self.operation.weights)
            squares = roots * roots * np.where(np.isinf(roots), 1.0, share)
            if self._normalizes:
                squares = squares + dilution(roots * roots, self._kept)
            return np.sqrt(squares)
        return self._with_lighter(roots) if self._is_uneven else roots

    def _apart(self, squares: Floats, kept: Floats, left_out: Bools) -> Floats:
        return elected(
            squares,
            kept,
            self.operation.weights,
            left_out,
            normalize=self._normalizes,
            votes=self.votes,
        )

    def _largest_weights(self) -> Floats:
        """Divided by the sum of the weights that agree, which may be just one of them."""
        return np.maximum(self._weights, 1.0) if self._normalizes else self._weights


BY_COUNT: Final = Parameter("by_count", "bool", False, is_late=True)


class Elected(Combination):
    """A sum of what agrees on a sign."""

    kind = CONSENSUS
    model = ElectedModel
    unbounded = "elects signs"
    unconflicting = None
    of_nan = "a NaN has no sign and takes no part, an infinity may"
    elects = True

    def code(self, operation: Operation) -> int:
        return MAJORITY if operation.parameters.get(BY_COUNT.name, False) else self.kind

    def divisor(self, operation: Operation) -> float:
        """Return 1: elements divide by the weights that agree there."""
        return 1.0

    def dilutes(self, operation: Operation) -> bool:
        """Return False: weights that agree never include that of an expert without a delta."""
        return False

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return as much as if it were alone, where it divides by the weights that agree."""
        if self.normalizes(operation):
            return (operation.farthest,) * len(operation.weights)
        return super().most(operation)


def agreement(rows: Sequence[np.ndarray[Any, Any]], weights: Sequence[float]) -> Floats:
    """Estimate how much of each weighted delta the elected signs leave: float64[K, C].

    rows: CHUNK[C] per expert.  With rho the cosine of w_k d_k and sum_j w_j d_j, as their count
    sketches estimate it, (1 + rho) / 2: 1 for a delta with the sum's direction, 1/2 for an
    orthogonal one, 0 for its opposite. 1 where no direction is known.
    """
    directions = []
    for side, weight in zip(rows, weights, strict=True):
        exponents = side["sketch_exponent"].astype(np.int32)[:, None]
        directions.append(weight * np.ldexp(side["sketch"].astype(np.float64), exponents))
    consensus = np.zeros_like(directions[0])
    for direction in directions:
        consensus += direction
    heaviness = _inner(consensus, consensus)
    shares = []
    for direction in directions:
        norms = np.sqrt(_inner(direction, direction)) * np.sqrt(heaviness)
        # Below the smallest normal number a quotient would say nothing.
        known = norms > np.finfo(np.float64).tiny
        cosine = _inner(direction, consensus) / np.where(known, norms, 1.0)
        shares.append(np.where(known, np.clip((1.0 + cosine) / 2.0, 0.0, 1.0), 1.0))
    return np.array(shares)


def dilution(squares: Floats, kept: Floats) -> Floats:
    """Return the effect of leaving a unit out on heavier ones with a shared divisor: float64[K, C].

    squares, kept: float64[K, C], the squared norm of each sparsified delta and the share of
    elements that it keeps.  An operator that divides by the weights that agree takes the mean of a
    heavy and a light delta where both are kept and agree (half of those places, if signs are
    independent).  Without the light one, the heavy one stays whole, which is off by half of it, a
    quarter of its square.
    """
    finite = np.where(np.isfinite(squares), squares, 0.0)
    found = np.zeros_like(finite)
    for light, share in enumerate(kept):
        heavier = np.zeros_like(share)
        for other in finite:
            heavier = heavier + np.where(other > finite[light], other, 0.0)
        found[light] = share * heavier / 8.0
    return found


def _inner(a: Floats, b: Floats) -> Floats:
    products = a * b
    # Pairwise halving, as in `mstore.models.stats.chunk.inner`: one fixed order of additions.
    while products.shape[-1] > 1:
        half = products.shape[-1] // 2
        products = products[..., :half] + products[..., half:]
    found: Floats = products[..., 0]
    return found


Gram = Sequence[Sequence[float]]
"""Inner products, float64, of the base and each expert, whole tensors: rows and columns in this
order.  For a method that adds deltas, or asks for them (`of_deltas`), those of the deltas; the base
is then the zero vector.  NaN where they are not known: of an expert of weight 0, and of experts
with each other if the method does not need those."""
Mix = Callable[[Gram, Mapping[str, Scalar], Sequence[float]], Mixture]


class Mixed(Sum):
    """A sum with factors of each tensor.

    mix: makes them of inner products, parameters and weights.  pairs: whether it needs the inner
    products of experts with each other, not only with the base. of_deltas: whether they are those
    of deltas although whole experts are mixed. cosine: of methods that decide by one, makes it of
    inner products, None where there is none. row_factors: says for parameters how the factors of
    each row follow, None for those of the tensor; an operation with factors of rows has no facts.
    """

    by_norms = False

    def __init__(
        self,
        mix: Mix,
        *,
        pairs: bool = False,
        of_deltas: bool = False,
        cosine: Callable[[Gram], float | None] | None = None,
        row_factors: Callable[[Mapping[str, Value]], RowFactors | None] = lambda _: None,
    ) -> None:
        self._mix = mix
        self._pairs = pairs
        self._of_deltas = of_deltas
        self.by_cosine = cosine is not None
        self._cosine = cosine
        self._row_factors = row_factors

    def check(self, operation: Operation) -> None:
        if (
            operation.chunk_factors is not None
            and operation.selection.is_whole
            and not any(operation.given)
        ):
            raise BadRequest(
                f"{operation.method.name} of two experts of weight 0 is nothing",
                hint="give one of them a weight",
            )

    def facts(self, select: type[Selection]) -> str:
        if self._of_deltas or not select.is_whole:
            return "inner products of the experts' deltas"
        others = "of all inputs with each other" if self._pairs else "of each expert with the base"
        return f"inner products {others}"

    def counts_base(self, selection: Selection) -> bool:
        return selection.is_whole and not self._of_deltas

    def needs_facts(self, operation: Operation) -> bool:
        return operation.chunk_factors is None

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        if operation.chunk_factors is not None:
            return operation
        nothing = operation.settled(Mixture(1.0, (0.0,) * len(facts.experts), keeps_base=True))
        if operation.outer == 0:
            # The result is the base, whatever the factors would be.
            return nothing
        gram = self._gram(operation, facts)
        try:
            found = self.mixed(operation, gram)
        except BadRequest as error:
            what, _, hint = error.texts
            own = hint or Option("skip", facts.name)
            raise BadRequest(what, where=facts.name, hint=own) from error
        is_still = all(map(facts.is_base, facts.experts))
        if is_still and not (found.keeps_base or found.scales_equal):
            # What is equal in all inputs stays, whatever rounding makes of its factors.
            return nothing
        return found

    def cosine(self, operation: Operation, facts: TensorFacts) -> float | None:
        return None if self._cosine is None else self._cosine(self._gram(operation, facts))

    def mixed(self, operation: Operation, gram: Gram) -> Operation:
        """Return the operation of a tensor whose inner products are `gram`: (K + 1) squared.

        Raises BadRequest for vectors that the method cannot mix.
        """
        return operation.settled(self._mix(gram, operation.scalars, operation.given))

    def _gram(self, operation: Operation, facts: TensorFacts) -> Gram:
        """Return the inner products of one tensor: float64[K + 1, K + 1], the base first.

        The base is the origin if deltas are compared, else zero is.
        """
        lack = BEYOND, "its angles cannot be measured"
        experts = [k for k in facts.experts if not operation.weightless[k - 1]]
        counted = [0, *experts]
        gram = [[math.nan] * len(facts.sides) for _ in facts.sides]
        between: dict[tuple[int, int], float] = {}
        if self.counts_base(operation.selection):
            for i in counted:
                gram[i][i] = facts.squares(i, lack)
            between = {(0, i): facts.apart(i, lack) for i in experts}
        else:
            for i in counted:
                gram[i][i] = facts.apart(i, lack)
                gram[i][0] = gram[0][i] = 0.0
        if self._pairs:
            between |= facts.between(experts, lack)
        for (j, i), apart in between.items():
            gram[i][j] = gram[j][i] = (gram[i][i] + gram[j][j] - apart) / 2
        return gram

    def chunk_factors(self, parameters: Mapping[str, Value]) -> ChunkFactors | None:
        return self._row_factors(parameters)

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return 1 for each: means on spheres are no longer than what they are means of."""
        return (operation.farthest,) * len(operation.weights)

    def keeps_base(self, operation: Operation) -> bool:
        """Return what the mixture says; False while there is none."""
        return operation.mixture is not None and operation.mixture.keeps_base

    def scales_equal(self, operation: Operation) -> bool:
        """Return whether weights are taken as they are.

        It keeps its direction, and its norm if that is a mean.
        """
        return operation.selection.is_whole and not operation.parameters.get(
            "normalize_weights", True
        )

    def unkept(self, operation: Operation) -> str:
        return (
            f"{operation.method.name} changes every block, so a share of them cannot stay as it is"
        )
