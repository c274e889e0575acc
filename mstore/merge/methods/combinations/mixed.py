"""MIXED: a sum whose factors follow from inner products, of whole tensors or of each row.

Inner products follow from sums of squares of tensors and of their differences, <a, b> = (|a|^2 +
|b|^2 - |a - b|^2) / 2.  Deltas are small next to the base: their products follow from differences
alone, never from products of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mstore.merge.arithmetic.row_factors import RowFactors
from mstore.merge.measures import BEYOND
from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Operation
from mstore.merge.methods.parameters import Scalar, Value
from mstore.merge.methods.selection import Measured, Selection
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts

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
    of deltas although whole experts are mixed. row_factors: says for parameters how the factors of
    each row follow, None for those of the tensor; an operation with factors of rows has no facts.
    """

    by_norms = False

    def __init__(
        self,
        mix: Mix,
        *,
        pairs: bool = False,
        of_deltas: bool = False,
        row_factors: Callable[[Mapping[str, Value]], RowFactors | None] = lambda _: None,
    ) -> None:
        self._mix = mix
        self._pairs = pairs
        self._of_deltas = of_deltas
        self._row_factors = row_factors

    def check(self, operation: Operation) -> None:
        """Raise BadRequest for rows of nothing."""
        if (
            operation.row_factors is not None
            and operation.selection.is_whole
            and not any(operation.given)
        ):
            raise BadRequest(
                f"{operation.method.name} of two experts of weight 0 is nothing",
                hint="give one of them a weight",
            )

    def facts(self, select: type[Selection]) -> str:
        """Return whose inner products."""
        if self._of_deltas or not select.is_whole:
            return "inner products of the experts' deltas"
        others = "of all inputs with each other" if self._pairs else "of each expert with the base"
        return f"inner products {others}"

    def counts_base(self, selection: Selection) -> bool:
        """Return whether inner products are those of whole tensors, not of deltas."""
        return selection.is_whole and not self._of_deltas

    def needs_facts(self, operation: Operation) -> bool:
        """Return whether factors are the tensor's."""
        return operation.row_factors is None

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return the operation with what `mix` makes of the inner products."""
        if operation.row_factors is not None:
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

    def row_factors(self, parameters: Mapping[str, Value]) -> RowFactors | None:
        """Return what the method says."""
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
        """Return that all tensors change."""
        return (
            f"{operation.method.name} changes every block, so a share of them cannot stay as it is"
        )
