"""ram: the mean of the deltas of those experts that move an element by more than epsilon.

ramplus_tl makes what one expert alone moves larger, the more of its elements others move, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.arithmetic.tiles import AVERAGED
from mstore.merge.measures.estimates import averaged
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.model import Model
from mstore.merge.methods.parameters import (
    LEAST_MOVE,
    MAX_SINGLE,
    Parameter,
    Range,
    Scalar,
    Value,
    finite_single,
    next_single,
    single,
)
from mstore.merge.methods.selection import Cuts, Measured, Selection, common
from mstore.merge.methods.selections.trimmed import kept_above, reached_by_nothing, tails
from mstore.store.objects.plan import Mixture, Threshold
from mstore.terms.ids import TensorId

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


class Above(Selection, frozen=True):
    """The deltas of a magnitude of `least` or more: the least float32 above epsilon."""

    least: float

    by_norms = False
    cuts = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameter epsilon."""
        return cls(experts, next_single(single(common(parameters, LEAST_MOVE))))

    def _threshold(self, grid: Grid) -> Floats:
        return np.full(grid.shape, self.least)

    def idle(self, grid: Grid) -> Bools:
        """Return where nothing is as large."""
        return reached_by_nothing(grid, self._threshold(grid))

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those above it."""
        return tails(grid, self._threshold(grid))

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return those of the whole delta."""
        return grid.whole

    def kept(self, grid: Grid) -> Floats:
        """Return the share above it."""
        return kept_above(grid, self._threshold(grid))

    def thresholds(self, planned: Sequence[Threshold]) -> Cuts | None:
        """Return the least move, with all ties."""
        return (
            np.full(self.experts, self.least, dtype=np.float32),
            np.full(self.experts, UNLIMITED, dtype=np.int64),
        )


class AveragedModel(Model):
    """As `Model`, for means of what moves."""

    def _apart(self, squares: Floats, kept: Floats, left_out: Bools) -> Floats:
        return averaged(squares, kept, self.operation.weights, left_out)


class Averaged(Combination):
    """The mean of the experts that move an element.

    lone: computes the factor of an element that one expert alone has, from how many of the expert's
    elements others have, too, and how many none has; only with `Above`.
    """

    kind = AVERAGED
    model = AveragedModel
    unbounded = "divides by how many move an element"

    def __init__(
        self, lone: Callable[[int, int, Mapping[str, Scalar]], float] | None = None
    ) -> None:
        self._lone = lone

    def facts(self, select: type[Selection]) -> str | None:
        """Return what is counted."""
        if self._lone is None:
            return None
        return "counts of elements that experts move alone, and with others"

    def needs_facts(self, operation: Operation) -> bool:
        """Return whether lone elements have factors."""
        return self._lone is not None

    def settle(self, operation: Operation, facts: TensorFacts, measured: Measured) -> Operation:
        """Return the operation with the factors of what each expert alone moves."""
        if self._lone is None:
            return operation
        assert isinstance(operation.selection, Above)
        least, ids = operation.selection.least, [id for id, _ in facts.sides[1:]]
        # What an expert shares follows from who the others are, in any order.
        keys = [
            (id, key)
            for k, id in enumerate(ids)
            for key in _keys(least, [other for j, other in enumerate(ids) if j != k])
        ]
        known = facts.once(keys, lambda: [one for own in _counts(least, facts) for one in own])
        numbers = list(map(int, known))
        return self.counted(operation, list(zip(numbers[::2], numbers[1::2], strict=True)))

    def counted(self, operation: Operation, counts: Sequence[tuple[int, int]]) -> Operation:
        """Return the operation of a tensor with these counts of each expert's selected elements.

        Of those that other experts have, too, and of those that none has.  Raises BadRequest for a
        factor that is not a finite float32.
        """
        assert self._lone is not None
        factors = tuple(self._lone(*own, operation.scalars) for own in counts)
        return operation.settled(Mixture(1.0, factors, keeps_base=True))


def _counts(least: float, facts: TensorFacts) -> list[list[int]]:
    """Count each expert's deltas of `least` and more where others have one, and where not."""
    chunks = facts.chunks()

    def count(number: int) -> npt.NDArray[np.int64]:
        found = np.zeros((chunks.experts, 2), dtype=np.int64)
        for deltas in chunks.deltas(number):
            kept = [np.abs(one) >= np.float32(least) for one in deltas]
            found += shared_counts(kept)
        return found

    total = np.zeros((chunks.experts, 2), dtype=np.int64)
    for own in facts.pool.map(count, chunks.numbers):
        total += own
    counts: list[list[int]] = total.tolist()
    return counts


def shared_counts(kept: Sequence[Bools]) -> list[tuple[int, int]]:
    """Return how many elements each expert moves that others move, too, and how many it alone does.

    kept: bool[n] of each expert, those that it moves.
    """
    # There may be thousands of experts.
    numbers = np.sum(kept, axis=0, dtype=np.uint16)
    many, lone = numbers > 1, numbers == 1
    return [(int(np.count_nonzero(own & many)), int(np.count_nonzero(own & lone))) for own in kept]


def _keys(least: float, others: Sequence[TensorId]) -> tuple[bytes, bytes]:
    """Return what the two counts of an expert are kept under."""
    what = struct.pack("<f", least) + b"".join(sorted(others))
    shared, alone = (blake3(kind + what).digest(length=16) for kind in (b"shared", b"alone"))
    return shared, alone


RAM: Final = Method(
    name="ram",
    summary="base plus the mean of the deltas of those experts that move an element",
    formula="base + mean of the d_k above epsilon",
    source="Reinforced Agent Merging 2026, arXiv 2601.13572",
    parameters=(LEAST_MOVE,),
    select=Above,
    combine=Averaged(),
    weighted=False,
)


def _lone(shared: int, alone: int, parameters: Mapping[str, Scalar]) -> float:
    """Return 1 + r * min(shared / alone, alpha), each step a float32."""
    r, alpha, least = (single(parameters[name]) for name in ("r", "alpha", "epsilon"))
    divisor = max(single(alone), least)
    # Without a divisor there is no element that the factor is for.
    share = single(min(single(shared) / divisor, alpha)) if divisor else alpha
    return 1.0 + finite_single("a factor of ramplus_tl", r * share)


RAMPLUS_TL: Final = Method(
    name="ramplus_tl",
    summary="ram with lone deltas made larger, by how much of a tensor experts share",
    formula="base + mean of the d_k above epsilon; a lone d_k times 1 + r * min(alpha, shared_k / "
    "alone_k)",
    source="Reinforced Agent Merging 2026, arXiv 2601.13572",
    parameters=(
        Parameter("r", "float", 0.1, Range(0.0, MAX_SINGLE)),
        Parameter("alpha", "float", 0.2, Range(0.0, MAX_SINGLE)),
        LEAST_MOVE,
    ),
    select=Above,
    combine=Averaged(_lone),
    weighted=False,
)
