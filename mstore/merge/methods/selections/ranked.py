"""RANKED: d_k with a probability that rises with the rank of |d_k| in its row from
density - epsilon to density + epsilon (`arithmetic.masks`); times the ratio of L1 norms, over the
whole tensor, if `rescale`; else 0.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.spread import Cut
from mstore.merge.methods.parameters import EPSILON, MASK_DENSITY, SEED, Value
from mstore.merge.methods.selections.drawn import Drawn, Sides
from mstore.merge.methods.selections.selection import EVERY, Masks, Selection, each
from mstore.models.stats.chunks import row_length as length_of
from mstore.terms.errors import BadRequest

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


class Ranked(Drawn, frozen=True):
    """As `Drawn`, larger ones more often; epsilons: by how much at most."""

    epsilons: tuple[float, ...]

    facts = "L1 norms of deltas before and after the mask, with rescale"
    needs_rows = True

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameters density, epsilon, seed and rescale."""
        rescale, seed = bool(parameters["rescale"]), parameters[SEED.name]
        assert isinstance(seed, int)
        densities, epsilons = (each(parameters, one, experts) for one in (MASK_DENSITY, EPSILON))
        return cls(experts, densities, seed, rescale, rescale, epsilons)

    def check(self, weights: Sequence[float], method: str) -> None:
        """Raise BadRequest for probabilities beyond 0 and 1."""
        for density, epsilon in zip(self.densities, self.epsilons, strict=True):
            if density < 1 and not epsilon < density < 1 - epsilon:
                raise BadRequest(
                    f"density - epsilon and density + epsilon are between 0 and 1; density is "
                    f"{density:g}, epsilon {epsilon:g}",
                    where=method,
                )

    def _chances(self, expert: int) -> tuple[float, float]:
        return self.densities[expert], self.epsilons[expert]

    def _norms(
        self,
        facts: TensorFacts,
        expert: int,
        sides: Sides,
        key: npt.NDArray[np.uint32],
        first: int,
    ) -> tuple[float, float]:
        moved = masks.deltas(*sides)
        row = length_of(facts.base.shape)
        return masks.norms(moved, masks.ranked(moved, key, first, row, *self._chances(expert)))

    @property
    def masked(self) -> int:
        """By masks."""
        return 2

    @property
    def limits(self) -> tuple[int, ...]:
        """All: each element has a probability of its own."""
        return (EVERY,) * self.experts

    def mask_bytes(self, read: int) -> int:
        """Return a byte for each that is read."""
        return read

    def masks(
        self, chunk: Chunk, *, row_length: int, weights: Sequence[float], cut: Cut | None
    ) -> Masks:
        """Return the draws of each expert by the ranks in its rows."""
        found = np.ones((len(chunk.row_of), chunk.n), dtype=np.uint8)
        for k, row in enumerate(chunk.row_of):
            if row >= 0 and self.densities[k] < 1:
                expert = chunk.rows[row], chunk.row_dtypes[row]
                moved = masks.deltas(chunk.base, chunk.base_dtype, *expert, chunk.n)
                chances = row_length, *self._chances(k)
                found[k] = masks.ranked(moved, chunk.keys[k], chunk.first_index, *chances)
        return found

    def chances(self) -> tuple[bytes, ...]:
        """Return density and epsilon."""
        return tuple([struct.pack("<2d", *self._chances(k)) for k in range(self.experts)])
