"""emr and masked: one model of all experts, and what a mask leaves of a model.

EMR-Merging makes K models of one.  Of each element *elect* chooses a sign, that of the sum of the
deltas (negative where it is 0, as in the authors' code), and of the experts that agree the delta
that is largest: `emr` makes the base plus that.  So each element is the base's or one expert's own,
bit for bit.  *Mask* and *rescale* make an expert's model of it again: the elements whose sign the
expert shares, times one number.  `masked` makes that, with the number as the weight;
`mstore.merge.emr` makes masks and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.element_factors import ElementFactors
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.row_factors import ChunkFactors
from mstore.merge.measures.grid import Companion
from mstore.merge.methods.combinations import Factored
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.model import CostModel, States
from mstore.merge.methods.selection import Delta
from mstore.numeric.casts import singles
from mstore.store.objects.plan import BELOW, READ

MASK: Final = "mask"
"""The role of the mask of an expert: of each tensor one of the same name and shape."""


class _Elected(ElementFactors):
    """1 for the expert whose delta is the largest of the elected sign, the first of equal ones."""

    code = 13
    likely = 1.0

    def factors(self, base: Singles, sides: Sequence[Singles], weights: Sequence[float]) -> Singles:
        deltas = np.array([side - base for side in sides])
        # A NaN has no sign, and takes no part.
        deltas[np.isnan(deltas)] = 0
        total = deltas[0].copy()
        for own in deltas[1:]:
            total += own
        sizes = np.where(total > 0, deltas, -deltas)
        found = np.zeros_like(sizes)
        largest = sizes.max(axis=0)
        first = (sizes == largest).argmax(axis=0)
        found[first, np.arange(base.size)] = largest > 0
        return found


class Furthest(Delta, frozen=True):
    """The deltas, of which one is taken for an element."""

    estimated = "it counts all of what is left out, although others take its elements"
    by_norms = False
    sized_by_norms = False


class Unified(Factored):
    """For each element, one delta."""

    unbounded = "elects signs"
    of_nan = "a NaN has no sign and takes no part, an infinity may"

    def most(self, operation: Operation) -> tuple[float, ...]:
        """Return 1 for each, times the scale: an element is one expert's own."""
        return (operation.farthest,) * len(operation.weights)


class _Masks(ChunkFactors):
    """The weight where an expert's mask, whose row follows those of the experts, is not 0."""

    code = 14

    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factors of a chunk, float32[2 K, n]: those of masks are 0."""
        found = np.zeros((len(chunk.row_of), chunk.n), dtype=np.float32)
        half = len(chunk.row_of) // 2
        for own, row, weight in zip(found, chunk.row_of[half:], weights, strict=False):
            if row >= 0:
                taken = singles(chunk.rows[row], chunk.row_dtypes[row], chunk.n) != 0
                own[taken] = weight
        return found

    def bytes_each(self, experts: int) -> int:
        """Return those of the factors, and of one mask."""
        return 4 * (experts + 1)


class MaskedModel(CostModel):
    """As `CostModel`: an expert has no part in a tensor that its mask lacks."""

    def free(self) -> States:
        states = super().free()
        assert self._grid.together is not None
        [found] = self._grid.together.companions
        states[~found.is_there & (states == READ)] = BELOW
        return states


class Masked(Factored):
    """A sum of deltas, each with its mask: what is left out costs at most the whole delta."""

    model = MaskedModel
    unbounded = None
    companions = (Companion(MASK, is_read=True),)

    def most(self, operation: Operation) -> tuple[float, ...]:
        return tuple([abs(weight) * operation.farthest for weight in operation.weights])


EMR: Final = Method(
    name="emr",
    summary="base plus, of each element, the largest delta of the sign that the sum of all has",
    formula="base + s max(0, largest of s d_k), s the sign of sum d_k",
    source="Huang et al. 2024, arXiv 2405.17461 (EMR-Merging)",
    parameters=(),
    select=Furthest,
    combine=Unified(lambda _: _Elected()),
    weighted=False,
    is_ours=True,
)
MASKED: Final = Method(
    name="masked",
    summary="base plus the weighted deltas, each where its mask is not 0",
    formula="base + sum w_k d_k where mask_k is not 0",
    source="Huang et al. 2024, arXiv 2405.17461, for one expert",
    parameters=(),
    select=Delta,
    combine=Masked(lambda _: _Masks()),
    mind="what is left out of an expert is the base's",
    is_ours=True,
)
