"""Combination: how a method makes one number of what its selection took of each expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import kernels
from mstore.merge.arithmetic.arguments import Chunk, Mix
from mstore.merge.arithmetic.row_factors import ChunkFactors
from mstore.merge.arithmetic.tiles import DIRECT
from mstore.merge.measures.grid import Companion
from mstore.merge.methods.parameters import Value, finite_single, single
from mstore.merge.methods.selection import Measured, Selection

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts
    from mstore.merge.methods.method import Operation

Bytes = npt.NDArray[np.uint8]
Kernel = Callable[[Mix, Chunk, Bytes, str, Bytes | None, npt.NDArray[Any] | None], tuple[int, ...]]
"""What computes a chunk, as `kernels.run` does."""

SMALLEST_DIVISOR: Final = 1e-8
"""A divisor nearer to zero than this (a float32 sum of weights) is replaced by 1."""


class Combination:
    """How a method combines what it selected: m_k = w_k * selected_k of each expert k.

    A method has one, with the functions that are the method's own, such as what factors follow from
    facts.  It has no state: what it is asked about is an operation, whose parameters and weights it
    knows.  A subclass has a `kind` and a `model`, and says what differs from a sum with fixed
    factors (`combinations.sum`), in these groups:

    - what is said of it: `unbounded`, `unconflicting`, `of_nan`, `facts`, `unkept`
    - what it needs of whole tensors: `needs_facts`, `settle`, `by_cosine`, `cosine`; or of a chunk:
      `chunk_factors`
    - what it needs beside base and experts: `companions`
    - what weights do: `normalizes`, `divisor`, `divided_by`, `dilutes`, `most`, `keeps_base`
    - what leaving out costs: `model`
    - how a chunk is computed: `kind`, `whole_kind`, `code`, `factors`, `kernel`
    - what determines its result: `who`
    """

    kind: ClassVar[int]
    """The kernel's code for it (`arithmetic.tiles`)."""
    whole_kind: ClassVar[int] = DIRECT
    """That for whole experts."""
    kernel: Kernel = staticmethod(kernels.run)
    """What computes a chunk; a function of a module, since it travels to workers."""
    model: ClassVar[type[Any]]
    """What leaving chunks out costs: a class of `methods.model`."""
    unbounded: ClassVar[str | None] = None
    """What it does, where the error of leaving something out has no bound because of it."""
    unconflicting: ClassVar[str | None] = "elects no signs, so nothing conflicts in it"
    """Why units cannot be ranked by conflict; None if they can."""
    of_nan: ClassVar[str | None] = None
    """What becomes of elements that are infinite or NaN, if not that the result may have them."""
    elects: ClassVar[bool] = False
    """Whether an expert of which nothing is left has no share in the divisor."""
    stacks: ClassVar[bool] = False
    """Whether the result is one expert's, so that layers may be stacked by it."""
    by_norms: ClassVar[bool] = True
    """Whether planning needs no more of deltas than what their norms do not exceed."""
    by_cosine: bool = False
    """Whether a tensor's factors follow from a cosine and the parameter `threshold`."""
    companions: ClassVar[tuple[Companion, ...]] = ()
    """What it asks for beside base and experts, sorted by role."""

    def check(self, operation: Operation) -> None:
        """Raise BadRequest for parameters or weights that do not fit together."""

    # -- facts -------------------------------------------------------------------------------

    def facts(self, select: type[Selection]) -> str | None:
        """Return what must be measured of whole tensors first, for lists of methods."""
        return None

    def needs_facts(self, operation: Operation) -> bool:
        """Return whether factors follow from facts of the whole tensor."""
        return False

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return the operation of a tensor, with its factors.

        measured: what the selection knows.  Raises BadRequest as `TensorFacts` does, and for what
        cannot be combined.
        """
        return operation

    def cosine(self, operation: Operation, facts: TensorFacts) -> float | None:
        """Return the cosine that `settle` compared with a threshold; None if there was none.

        Raises as `TensorFacts`.
        """
        return None

    def chunk_factors(self, parameters: Mapping[str, Value]) -> ChunkFactors | None:
        """Return how factors of rows, or of elements, follow from what is read; None for none."""
        return None

    # -- weights -----------------------------------------------------------------------------

    def normalizes(self, operation: Operation) -> bool:
        """Return whether the sum is divided: by `divisor`, or by the weights that count there."""
        return bool(operation.parameters.get("normalize", False))

    def divisor(self, operation: Operation) -> float:
        """Return the divisor of the sum, if it is the same for all elements, as a float32.

        The sequential float32 sum of all weights, including those of absent experts. 1 if there is
        no division, and, except for whole experts, if the sum is nearly zero.
        """
        if not self.normalizes(operation):
            return 1.0
        total = sum_of(operation.given)
        if not operation.selection.is_whole and abs(total) < single(SMALLEST_DIVISOR):
            return 1.0
        return total

    def divided_by(self, operation: Operation) -> str | None:
        """Return what divides by the sum of weights, so that an only weight has no effect."""
        return "normalize" if self.normalizes(operation) else None

    def dilutes(self, operation: Operation) -> bool:
        """Return whether an expert without a delta takes weight from the others."""
        return self.normalizes(operation)

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return what each expert's change is multiplied by, at most."""
        own = operation.farthest
        if operation.mixture is None:
            own /= abs(operation.divisor)
        return tuple(abs(weight) * own for weight in operation.weights)

    def linear_weights(self, operation: Operation) -> list[float] | None:
        """Return the weight of each expert if this adds models up, the rest being the base's.

        None if it is no such sum.
        """
        return None

    def keeps_base(self, operation: Operation) -> bool:
        """Return whether whole experts that are equal to the base make the base."""
        return self.normalizes(operation)

    def counts_base(self, selection: Selection) -> bool:
        """Return whether the base is a model like the experts: whole ones are added up."""
        return selection.lists_base

    def scales_equal(self, operation: Operation) -> bool:
        """Return whether a tensor changes that is equal in the base and in all experts."""
        return not operation.keeps_base

    def unkept(self, operation: Operation) -> str:
        """Return why no block of the output can stay as it is, where none can."""
        return (
            f"no block of {operation.method.name} with these parameters is the base's own, so none "
            "can be left as it is"
        )

    # -- computing ---------------------------------------------------------------------------

    def code(self, operation: Operation) -> int:
        """Return the kernel's code for it with these parameters."""
        return self.whole_kind if operation.selection.is_whole else self.kind

    def factors(self, operation: Operation) -> tuple[float, float]:
        """Return the kernel's two numbers for all experts: divisor, and factor of the sum."""
        return operation.divisor, operation.selection.factor(operation.factor)

    def who(self, operation: Operation, k: int, listed: int) -> bytes:
        """Return what a memo key says of which expert this is, or of whose companion.

        listed: how many experts and companions are read.
        """
        experts = len(operation.weights)
        if listed > experts:
            # One counts without the other.
            return (k % experts).to_bytes(2, "little") + bytes([k // experts])
        return k.to_bytes(2, "little") if operation.counts_all else b""


def sum_of(values: tuple[float, ...] | list[float]) -> float:
    """Return the sequential float32 sum.  Raises BadRequest if it is not finite.

    A float64 sum of two float32, rounded to float32, is their float32 sum.
    """
    total = values[0]
    for value in values[1:]:
        total = finite_single("the sum of the weights", total + value)
    return total
