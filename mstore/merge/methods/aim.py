"""aim: the base plus the deltas, less of them where the base's layers have large inputs.

Each column of a linear layer's weights belongs to an input.  With A_j the mean magnitude of input j
of the base over the largest one of that layer, column j of the sum of deltas is multiplied by 1 -
(1 - omega) A_j: what the base uses most moves least (Nobari et al. 2025, arXiv 2502.02421).  With
one expert, which is a merge by any other method, that is the last step of that merge.

Magnitudes are a checkpoint of its own, with a vector of the name of each weight that has inputs.
Tensors without, such as embeddings and norms, are summed as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic import chunk_sums
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.chunk_sums import ChunkSums
from mstore.merge.arithmetic.row_factors import Facts
from mstore.merge.arithmetic.tiles import SUMMED
from mstore.merge.measures.grid import AnyShape, Companion, Shape
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter, Range, Value
from mstore.merge.methods.selection import Delta, Measured, Selection, common
from mstore.models.stats.chunks import row_length
from mstore.numeric.matmul import Doubles, Singles
from mstore.store.objects.plan import BASE, Mixture
from mstore.terms.errors import Incompatible

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts

ROLE: Final = "activation"
"""The role of the mean magnitudes of the base's inputs."""
OMEGA: Final = Parameter("omega", "float", 0.4, Range(0.0, 1.0))


class Held(ChunkSums):
    """The weighted sum of the deltas, times a factor for each column; unbound, times 1.

    magnitudes: float32[columns], of each input. given: the experts' weights.
    """

    code = 12

    def __init__(
        self, omega: float, magnitudes: Singles | None = None, given: Sequence[float] = ()
    ) -> None:
        self._omega = omega
        self._magnitudes = magnitudes
        self._given = given

    def bound(self, given: Sequence[float], facts: Facts) -> Held:
        ((found,),) = facts
        return self if found is None else Held(self._omega, found, given)

    def factors(self, magnitudes: Singles) -> Doubles:
        """Return the factor of each column, float64[columns]."""
        wide = magnitudes.astype(np.float64)
        largest = float(wide.max())
        held: Doubles = 1.0 - (1.0 - self._omega) * (wide / largest if largest else wide)
        return held

    def key(self, shape: Sequence[int]) -> bytes:
        if self._magnitudes is None:
            return b""
        told = np.array([self._omega, row_length(shape), *self._given]).tobytes()
        return blake3(told + self._magnitudes.tobytes()).digest()

    def sums(self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float]) -> Doubles:
        found = chunk_sums.weighted(chunk, self._given or weights)
        if self._magnitudes is not None:
            held = self.factors(self._magnitudes)
            for first, rows, column, columns in chunk_sums.parts(chunk, row_length(shape)):
                own = found[first : first + rows * columns].reshape(rows, columns)
                own *= held[column : column + columns]
        return found


def _of_inputs(name: str, shape: Shape) -> AnyShape | None:
    return (shape[1],) if len(shape) == 2 else None


class Holding(Sum):
    """A sum of deltas with a factor for each column."""

    kind = SUMMED
    kernel = staticmethod(chunk_sums.run)
    companions = (
        Companion(
            ROLE,
            of=BASE,
            shape=_of_inputs,
            is_optional=True,
            called="vector of magnitudes",
            made="examples/gram.py",
        ),
    )

    def facts(self, select: type[Selection]) -> str:
        return "mean magnitudes of the base's inputs"

    def needs_facts(self, operation: Operation) -> bool:
        return True

    def chunk_factors(self, parameters: Mapping[str, Value]) -> Held:
        return Held(common(parameters, OMEGA))

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return it with the largest factor of a column, times each weight: a bound follows."""
        ((side,),) = facts.companions.values()
        largest = 1.0
        if side is not None:
            held = operation.chunk_factors
            assert isinstance(held, Held)
            omega = np.array([common(operation.parameters, OMEGA)]).tobytes()

            def measure() -> list[float]:
                return [float(held.factors(_sound(facts.array(side), facts.name)).max())]

            what = blake3(b"held" + omega).digest(length=16)
            (largest,) = facts.once([(side[0], what)], measure)
        factors = tuple([weight * largest for weight in operation.given])
        return operation.settled(Mixture(1.0, factors, keeps_base=True))


def _sound(magnitudes: npt.NDArray[np.float32], name: str) -> Singles:
    if not ((magnitudes >= 0) & (magnitudes < np.inf)).all():
        raise Incompatible("mean magnitudes of inputs are numbers from 0 on", where=name)
    return magnitudes


AIM: Final = Method(
    name="aim",
    summary="base plus the deltas, less of them in the columns whose inputs are large in the base",
    formula="base + (sum w_k d_k) (1 - (1 - omega) A_j) in column j, A_j the mean magnitude of the "
    "base's input j over the layer's largest; 1 where a tensor has none",
    source="Nobari et al. 2025, arXiv 2502.02421",
    parameters=(OMEGA,),
    select=Delta,
    combine=Holding(),
    mind="of what is left out nothing is added",
    is_ours=True,
)
