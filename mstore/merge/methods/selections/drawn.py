"""Selections at random.

DRAWN: d_k with probability density, times 1 / density if `rescale`; else 0.  If `rescale` is "l1",
times the ratio of the L1 norms of d_k and of what is left of it, over the whole tensor.

RANKED: d_k with a probability that rises with the rank of |d_k| in its row from density - epsilon
to density + epsilon (`arithmetic.masks`); times that ratio of L1 norms if `rescale`; else 0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import mask_keys
from mstore.merge.measures import BEYOND
from mstore.merge.measures.grid import Floats, Grid
from mstore.merge.methods.parameters import EPSILON, MASK_DENSITY, NORM, SEED, Value, single
from mstore.merge.methods.selection import EVERY, Cut, Masks, Measured, Selection, each
from mstore.models.stats.chunks import row_length as length_of
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest

if TYPE_CHECKING:
    from mstore.merge.measures.facts import TensorFacts


Sides = tuple[npt.NDArray[np.uint8], str, npt.NDArray[np.uint8], str, int]
"""Stored bytes of base and expert, each with its element type, and the number of elements."""
_SMALLEST_NORM: Final = 1e-7
"""Below this, a norm is not restored (as in mergekit)."""
_NORMS: Final = b"norms 2"
"""Names how norms are summed: another order may round otherwise."""


class Drawn(Selection, frozen=True):
    """The deltas that a random mask keeps.

    densities: the probability that it keeps an element. rescale: whether kept deltas are made
    larger, and by_norm: so that the L1 norm is restored.
    """

    densities: tuple[float, ...]
    seed: int
    rescale: bool
    by_norm: bool

    facts = f"L1 norms of deltas before and after the mask, with rescale={NORM}"
    weighs = False
    masked = 1

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return it with the parameters density, seed and rescale."""
        rescale, seed = parameters["rescale"], parameters[SEED.name]
        assert isinstance(seed, int)
        densities = each(parameters, MASK_DENSITY, experts)
        return cls(experts, densities, seed, bool(rescale), rescale == NORM)

    @property
    def needs_facts(self) -> bool:
        """Whether norms are restored, and something is dropped."""
        return self.by_norm and min(self.densities) < 1

    @property
    def cancels(self) -> bool:
        """Drawn elements differ between experts, unless all are kept."""
        return min(self.densities) >= 1

    def measure(self, facts: TensorFacts, weightless: Sequence[bool]) -> Measured:
        """Return the factors that restore the L1 norm of each expert's delta.

        The norms are those of the whole delta before and after the mask; the factor is 1 where one
        of them is below 1e-7.
        """
        if not self.needs_facts:
            return Measured()
        keys = mask_keys(self.seed, self.experts, facts.name)
        factors = []
        for k, side in enumerate(facts.experts):
            if facts.is_base(side) or weightless[k] or self.densities[k] >= 1:
                factors.append(1.0)
                continue
            what = _NORMS + struct.pack("<2d", *self._chances(k)) + keys[k].tobytes()
            key = [(facts.sides[side][0], blake3(what).digest(length=16))]
            (ratio,) = facts.once(key, partial(self._ratio, facts, side, keys[k]))
            lack = BEYOND, "the L1 norm of a delta cannot be restored"
            factors.append(facts.finite(ratio, (0, side), lack))
        return Measured(factors=tuple(factors))

    def _chances(self, expert: int) -> tuple[float, float]:
        """Return what the probabilities of an expert's elements follow from."""
        return self.densities[expert], -1

    def _ratio(self, facts: TensorFacts, side: int, key: npt.NDArray[np.uint32]) -> list[float]:
        """Measure the L1 norm of a delta over that of what the mask leaves of it, one number."""
        chunk, read_base, read_other = facts.readers(side, whole=self.needs_rows)

        def norms(number: int) -> tuple[float, float]:
            first = number * chunk
            n = min(chunk, facts.elements - first)
            own, data = read_base(number), read_other(number)
            sides = own, facts.base.dtype, data, facts.sides[side][1].dtype, n
            return self._norms(facts, side - 1, sides, key, first)

        found = list(facts.pool.map(norms, range(-(-facts.elements // chunk))))
        before, after = (math.fsum(column) for column in zip(*found, strict=True))
        return [1.0 if min(before, after) < _SMALLEST_NORM else before / after]

    def _norms(
        self,
        facts: TensorFacts,
        expert: int,
        sides: Sides,
        key: npt.NDArray[np.uint32],
        first: int,
    ) -> tuple[float, float]:
        """Return the norms of a chunk's delta, before and after the mask."""
        return masks.even_norms(*sides, key, first, self.limits[expert])

    def kept(self, grid: Grid) -> Floats:
        """Return what the mask leaves."""
        return grid.moved * self.shares

    @property
    def shares(self) -> Floats:
        """The densities."""
        return np.array(self.densities)[:, None]

    @property
    def mean_squares(self) -> Floats:
        """For d, kept with probability p, the mean square is p d^2, and d^2 / p with rescale."""
        return 1.0 / self.shares if self.rescale else self.shares

    @property
    def thinning(self) -> Floats:
        """The root of p: E[(m d / p)^2] = d^2 / p for a mask m that keeps with probability p."""
        return np.sqrt(self.shares) if self.rescale else super().thinning

    @property
    def limits(self) -> tuple[int, ...]:
        """round(density * 2^32), so 2^32 keeps all."""
        return tuple([round(density * 2**32) for density in self.densities])

    def rescales(self, mixture: Mixture | None) -> tuple[float, ...]:
        """Return those of the mixture, else 1 / density with rescale."""
        if mixture is not None:
            return mixture.experts
        if not self.rescale:
            return (1.0,) * self.experts
        return tuple([single(1.0 / density) for density in self.densities])

    def keys(self, name: str) -> npt.NDArray[np.uint32]:
        """Return those of the seed."""
        return mask_keys(self.seed, self.experts, name)

    def words(self, keys: npt.NDArray[np.uint32]) -> bytes:
        """Return the keys."""
        return keys.astype("<u4", copy=False).tobytes()

    def place(self, cut: Cut | None, first_index: int, length: int) -> bytes:
        """Return where in the tensor the chunk is: draws follow from that."""
        return first_index.to_bytes(8, "little")


class Ranked(Drawn, frozen=True):
    """As `Drawn`, larger ones more often; epsilons: by how much at most."""

    epsilons: tuple[float, ...]

    facts = "L1 norms of deltas before and after the mask, with rescale"
    needs_rows = True
    masked = 2

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
