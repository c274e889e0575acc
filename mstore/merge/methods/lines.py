"""lines: the base plus the weighted sum of the deltas, scaled by depth (LiNeS).

As in the authors' code (github.com/wang-kee/LiNeS), alpha is the factor of the first layer and of
every tensor that is in no layer, heads and last norms among them, and alpha + beta that of the last
layer.  Theirs looks for `.l.` in names and is told how many layers there are.  Here each stack of
layers is scaled by itself, over as many as it has: an encoder and a decoder, and each model of a
pipeline.  Theirs takes alpha from the norms of a merge (1 / K for a sum of K experts) and tries
values of beta, or beta = 1 - alpha for one expert; here both are given.

The factor alpha + beta * l / (L - 1) of layer l of L is computed in float64 and multiplied with
each weight; the products are rounded to float32 once.  The only layer of its stack is also the
last: alpha + beta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range
from mstore.merge.methods.selection import Delta, Measured, Selection, common
from mstore.store.objects.plan import Mixture

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


_ANY: Final = Range(-MAX_SINGLE, MAX_SINGLE)
ALPHA: Final = Parameter("alpha", "float", None, _ANY)
BETA: Final = Parameter("beta", "float", None, _ANY)


class Layered(Sum):
    """A sum with factors of each layer: they follow from the tensor's name alone."""

    def facts(self, select: type[Selection]) -> str:
        """Return the depth of tensors, which is read from their names."""
        return "the layers of tensors, which their names tell"

    def needs_facts(self, operation: Operation) -> bool:
        """Return True: where the tensor is."""
        return True

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return the operation with the factors of the tensor's layer."""
        return self.placed(operation, facts.layer)

    def placed(self, operation: Operation, layer: tuple[int, int] | None) -> Operation:
        """Return the operation of a tensor in this layer, of so many; None: in no layer.

        Raises BadRequest for a factor that is not a finite float32.
        """
        alpha, beta = (common(operation.parameters, one) for one in (ALPHA, BETA))
        number, count = layer or (0, 0)
        depth = number / (count - 1) if count > 1 else float(count)
        factor = alpha + beta * depth
        factors = tuple(weight * factor for weight in operation.given)
        return operation.settled(Mixture(1.0, factors, keeps_base=True))


LINES: Final = Method(
    name="lines",
    summary="base plus the weighted sum of the deltas, scaled by depth",
    formula="base + (alpha + beta * l / (L - 1)) * sum w_k d_k in layer l of L; base + alpha * sum "
    "w_k d_k in no layer",
    source="Wang et al. 2024, arXiv 2410.17146",
    parameters=(ALPHA, BETA),
    select=Delta,
    combine=Layered(),
    is_ours=True,
)
