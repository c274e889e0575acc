"""AVERAGED: sum of the selected d_k, each over how many there are; w_k d_k if there is only one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic.agreement import shared_counts
from mstore.merge.arithmetic.tiles import AVERAGED
from mstore.merge.measures.estimates import averaged
from mstore.merge.measures.grid import Bools, Floats
from mstore.merge.methods.method import Combination, Operation
from mstore.merge.methods.model import Model
from mstore.merge.methods.parameters import Scalar
from mstore.merge.methods.selections.above import Above
from mstore.merge.methods.selections.selection import Measured, Selection
from mstore.store.objects.plan import Mixture
from mstore.terms.ids import TensorId

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


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


def _keys(least: float, others: Sequence[TensorId]) -> tuple[bytes, bytes]:
    """Return what the two counts of an expert are kept under."""
    what = struct.pack("<f", least) + b"".join(sorted(others))
    shared, alone = (blake3(kind + what).digest(length=16) for kind in (b"shared", b"alone"))
    return shared, alone
