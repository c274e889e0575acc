"""Selections that several methods share: at random, and by the rank of |d_k| in its tensor.

DRAWN: d_k with probability density, times 1 / density if `rescale`; else 0.  If `rescale` is "l1",
times the ratio of the L1 norms of d_k and of what is left of it, over the whole tensor.

RANKED: d_k with a probability that rises with the rank of |d_k| in its row from density - epsilon
to density + epsilon (`arithmetic.masks`); times that ratio of L1 norms if `rescale`; else 0.

TRIMMED: d_k if it is among the max(1, int(density * n)) largest.  BAND: d_k if int(gamma * n) are
larger, and it is among the int(density * n) largest of the rest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.masks import Ranks, Sides, mask_keys
from mstore.merge.measures import BEYOND
from mstore.merge.measures.grid import Bools, Floats, Grid
from mstore.merge.methods.parameters import (
    EPSILON,
    GAMMA,
    MASK_DENSITY,
    NORM,
    SEED,
    TRIM_DENSITY,
    Value,
    single,
)
from mstore.merge.methods.selection import (
    EVERY,
    ChunkFacts,
    Cut,
    Cuts,
    Masks,
    Measured,
    Region,
    Selection,
    each,
)
from mstore.models.stats.chunks import row_length as length_of
from mstore.models.stats.histogram import exp_of_minus, tail_squares
from mstore.store.objects.plan import Mixture, TrimThreshold
from mstore.terms.errors import BadRequest

if TYPE_CHECKING:
    from mstore.merge.measures.facts import Readers, TensorFacts


_SMALLEST_NORM: Final = 1e-7
"""Below this, a norm is not restored (as in mergekit)."""
_NORMS: Final = b"norms 3"
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
        measured = [
            k
            for k, side in enumerate(facts.experts)
            if not (facts.is_base(side) or weightless[k] or self.densities[k] >= 1)
        ]
        what = [
            (
                facts.sides[1 + k][0],
                blake3(_NORMS + struct.pack("<2d", *self._chances(k)) + keys[k].tobytes()).digest(
                    length=16
                ),
            )
            for k in measured
        ]
        ratios = facts.each(what, lambda few: self._ratios(facts, [measured[i] for i in few], keys))
        factors = [1.0] * self.experts
        lack = BEYOND, "the L1 norm of a delta cannot be restored"
        for k, ratio in zip(measured, ratios, strict=True):
            factors[k] = facts.finite(ratio, (0, 1 + k), lack)
        return Measured(factors=tuple(factors))

    def _chances(self, expert: int) -> tuple[float, float]:
        """Return what the probabilities of an expert's elements follow from."""
        return self.densities[expert], -1

    def _ratios(
        self, facts: TensorFacts, experts: Sequence[int], keys: npt.NDArray[np.uint32]
    ) -> list[float]:
        """Measure the L1 norm of deltas over that of what the mask leaves of them, of each expert.

        A chunk of the base is read once for all experts of one element type.
        """
        row = length_of(facts.base.shape) if self.needs_rows else 1
        readers = {k: facts.readers(1 + k, row) for k in experts}
        found: dict[int, float] = {}
        for chunk in dict.fromkeys(one[0] for one in readers.values()):
            own = {k: one for k, one in readers.items() if one[0] == chunk}
            norms = partial(self._norms_of_chunk, facts, own, keys)
            every = list(facts.pool.map(norms, range(-(-facts.elements // chunk))))
            for k, parts in zip(own, zip(*every, strict=True), strict=True):
                before, after = (math.fsum(column) for column in zip(*parts, strict=True))
                found[k] = 1.0 if min(before, after) < _SMALLEST_NORM else before / after
        return [found[k] for k in experts]

    def _norms_of_chunk(
        self,
        facts: TensorFacts,
        readers: Mapping[int, Readers],
        keys: npt.NDArray[np.uint32],
        number: int,
    ) -> list[tuple[float, float]]:
        """Return the norms of a chunk's deltas, before and after the mask, of some experts."""
        chunk, read_base, _ = next(iter(readers.values()))
        first = number * chunk
        base = read_base(number), facts.base.dtype
        n = min(chunk, facts.elements - first)
        found = []
        for k, (_, _, read) in readers.items():
            sides = (*base, read(number), facts.sides[1 + k][1].dtype, n)
            found.append(self._norms(facts, k, sides, keys[k], first))
        return found

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
        return grid.moved * self.shares

    @property
    def shares(self) -> Floats:
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
        return mask_keys(self.seed, self.experts, name)

    def words(self, keys: npt.NDArray[np.uint32]) -> bytes:
        return keys.astype("<u4", copy=False).tobytes()

    def place(self, cut: Cut | Region | None, first_index: int, length: int) -> bytes:
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
        rescale, seed = bool(parameters["rescale"]), parameters[SEED.name]
        assert isinstance(seed, int)
        densities, epsilons = (each(parameters, one, experts) for one in (MASK_DENSITY, EPSILON))
        return cls(experts, densities, seed, rescale, rescale, epsilons)

    def check(self, weights: Sequence[float], method: str) -> None:
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
        row = length_of(facts.base.shape)
        return Ranks(row, *self._chances(expert)).norms(sides, key, first)

    @property
    def limits(self) -> tuple[int, ...]:
        """All: each element has a probability of its own."""
        return (EVERY,) * self.experts

    def mask_bytes(self, read: int) -> int:
        return read

    def masks(self, chunk: Chunk, facts: ChunkFacts) -> Masks:
        found = np.empty((len(chunk.row_of), chunk.n), dtype=np.uint8)
        for k, row in enumerate(chunk.row_of):
            if row < 0 or self.densities[k] >= 1:
                found[k] = 1
                continue
            base, expert = (chunk.base, chunk.base_dtype), (chunk.rows[row], chunk.row_dtypes[row])
            ranks = Ranks(facts.row_length, *self._chances(k))
            ranks.mask(
                (*base, *expert, chunk.n), chunk.keys[k], chunk.first_index, found[k].view(np.bool_)
            )
        return found

    def chances(self) -> tuple[bytes, ...]:
        return tuple([struct.pack("<2d", *self._chances(k)) for k in range(self.experts)])


# Not slotted: a survey asks for ranks of every expert and tensor.
class Trimmed(Selection, frozen=True, dict=True):
    """The largest elements of each delta; densities: the share that is kept."""

    densities: tuple[float, ...]

    facts = "the magnitude at which density ends"
    untrimmed = None
    by_norms = False

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        return cls(experts, each(parameters, TRIM_DENSITY, experts))

    @cached_property
    def _trims(self) -> bool:
        return min(self.densities) < 1

    @property
    def trims(self) -> bool:
        """Whether an element of an expert is dropped."""
        return self._trims

    @property
    def score(self) -> Literal["norm", "trimmed"]:
        return "trimmed" if self._trims else "norm"

    def ranks(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return max(1, int(density * n)), at most n."""
        if not self._trims:
            return ()
        return (min(elements, max(1, int(self.densities[expert] * elements))),)

    def idle(self, grid: Grid) -> Bools:
        return reached_by_nothing(grid, grid.threshold) if self.trims else grid.nothing

    def squares(self, grid: Grid) -> Floats:
        return tails(grid, grid.threshold) if self.trims else grid.whole

    def certain(self, grid: Grid, squares: Floats) -> Floats:
        """Return those of the whole delta: what is above a threshold is only an estimate."""
        return grid.whole if self.trims else squares

    def scored(self, grid: Grid, squares: Floats, score: str) -> Floats:
        """Return those of the whole delta for the score that asks for no more."""
        return grid.whole if self.trims and score == "norm" else squares

    def kept(self, grid: Grid) -> Floats:
        return kept_above(grid, grid.threshold) if self.trims else grid.moved

    @property
    def planned(self) -> int:
        return self.cuts

    @property
    def cuts(self) -> int:
        return int(self.trims)

    def thresholds(self, planned: Sequence[TrimThreshold]) -> Cuts | None:
        if not self.trims:
            return None
        values = np.array([cut.value for cut in planned], dtype=np.float32)
        return values, np.array([cut.quota for cut in planned], dtype=np.int64)


def reached_by_nothing(grid: Grid, threshold: Floats) -> Bools:
    """Return bool[K, C]: where no delta is as large as the threshold."""
    # `<` and not `not >=`: a NaN is larger than everything and must be read.
    found: Bools = grid.nothing | (grid.known & (grid.column("max_abs") < threshold))
    return found


def tails(grid: Grid, threshold: Floats) -> Floats:
    """Return roughly the squares of what is above a threshold; infinite if unknown."""
    found = [
        tail_squares(rows, np.where(np.isnan(cuts), 0.0, cuts))
        for rows, cuts in zip(grid.rows, threshold, strict=True)
    ]
    return np.where(grid.known, np.array(found).reshape(grid.shape), np.inf)


def kept_above(grid: Grid, threshold: Floats, ceiling: Floats | None = None) -> Floats:
    """Return roughly the share of elements above a threshold, and not above a ceiling.

    Assumes exponentially distributed magnitudes, as in `tail_squares`.
    """
    magnitudes = grid.column("sum_abs")
    usable = (magnitudes > 0) & np.isfinite(magnitudes) & np.isfinite(threshold)
    mean = np.where(usable, magnitudes, 1.0) / np.maximum(grid.column("nonzeros"), 1.0)
    cut = np.minimum(np.where(usable, threshold, 0.0) / mean, 2048.0)
    above = exp_of_minus(cut)
    if ceiling is not None:
        finite = np.where(np.isfinite(ceiling), ceiling, np.inf)
        above = above - exp_of_minus(np.minimum(finite / mean, 2048.0))
    return np.where(usable, grid.moved * np.maximum(above, 0.0), 0.0)


class Band(Trimmed, frozen=True, dict=True):
    """The largest elements but the very largest; gammas: the share of those."""

    gammas: tuple[float, ...]

    facts = "the magnitudes at which density and gamma end"

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        densities = each(parameters, TRIM_DENSITY, experts)
        return cls(experts, densities, each(parameters, GAMMA, experts))

    def ranks(self, elements: int, expert: int = 0) -> tuple[int, ...]:
        """Return two; elements up to the second are dropped.

        If fewer than int(gamma * n) can be dropped, as many as can.
        """
        if not self.trims:
            return ()
        kept = int(self.densities[expert] * elements)
        last = min(elements, kept + int(self.gammas[expert] * elements))
        return last, last - kept

    def squares(self, grid: Grid) -> Floats:
        """Return roughly those above the threshold, without those above the ceiling."""
        if not self.trims:
            return grid.whole
        found = []
        for rows, low, high in zip(grid.rows, grid.threshold, grid.ceiling, strict=True):
            own = tail_squares(rows, np.where(np.isnan(low), 0.0, low))
            above = tail_squares(rows, np.where(np.isnan(high), np.inf, high))
            # A NaN (infinity minus infinity) stays unknown.
            with np.errstate(invalid="ignore"):
                found.append(np.where(np.isinf(own), own, np.maximum(own - above, 0.0)))
        return np.where(grid.known, grid.fitted(found), np.inf)

    def kept(self, grid: Grid) -> Floats:
        return kept_above(grid, grid.threshold, grid.ceiling) if self.trims else grid.moved

    @property
    def cuts(self) -> int:
        return 2 * int(self.trims)
