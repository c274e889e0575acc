"""fisher: each element is the average of the experts', weighted by their Fisher information.

The Fisher of an expert is a checkpoint of its own: for each of the model's tensors one of the same
name and shape, the diagonal of the expert's Fisher information matrix.  With its element F_k, at
least `floor`, the result is the sum of the w_k F_k d_k over the sum of the w_k F_k, or 0 if that is
0 (`run`).

**What leaving experts out costs.**

An expert's share of an element is s_k = w_k F_k over the sum of these.  With deltas that are
orthogonal, the full merge minus the one without the experts O, of which R are left, is, squared,

    sum over O of s_k^2 d_k^2 + sum over R of (S_O r_k)^2 d_k^2,     r_k = s_k / S_R,

with S the sums of shares: where some are left out, those that are left weigh more.  So an expert
that is equal to the base counts, too.

**The model.** Known of Fishers are their sums over a chunk, and of their squares.  Shares are taken
to be distributed over its elements as those of Gamma variables are (Dirichlet), independently of
deltas: with means m_k that are the shares of the sums, and a concentration a, the sum of (mean)^2 /
variance over the experts.  Then r_k is independent of S_O, and with mean M of a share, or of a sum
of shares, of concentration c,

    E[s^2] = M^2 + M (1 - M) / (1 + c),

c = a for the shares, and a times the mean of S_R for the r_k.  If Fishers hardly vary, an expert
has its mean share everywhere; if few elements have all of one, it has either all of an element or
nothing of it.

An estimate, no bound: shares of single elements may be anything.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, Mix, pack
from mstore.merge.arithmetic.tiles import INFORMED, TOGETHER
from mstore.merge.measures.grid import Bools, Companion, Floats, Grid, added
from mstore.merge.methods.combination import Combination
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.model import CostModel, States
from mstore.merge.methods.parameters import MAX_SINGLE, Parameter, Range, single
from mstore.merge.methods.selection import Delta, Selection, common
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass
from mstore.numeric.sums import halved
from mstore.store.objects.plan import BELOW, EQUAL, READ
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option

_informed: Final = Pass(
    "mstore.merge.arithmetic.informed_passes",
    "informed",
    "p",
    (
        "numeric/codes.py",
        "numeric/floats.py",
        "merge/arithmetic/tiles.py",
        "merge/arithmetic/arguments.py",
        "merge/arithmetic/informed_passes.py",
    ),
)


def sums_of(data: npt.NDArray[np.uint8], dtype: str, n: int) -> tuple[float, float]:
    """Return the sum of n elements of a Fisher and that of their squares, the same on any machine.

    NaN if one of them is no information.
    """
    total = squares = 0.0
    wide = np.zeros(TOGETHER)
    for start in range(0, n, TOGETHER):
        count = min(TOGETHER, n - start)
        part = singles(data[start * ITEMSIZES[dtype] :], dtype, count)
        # Of a NaN both comparisons are false.
        if not (part.min() >= 0 and part.max() < np.inf):
            return math.nan, math.nan
        wide[:count], wide[count:] = part, 0.0
        total += halved(wide)
        squares += halved(wide * wide)
    return total, squares


def unsound_fisher(where: str | None) -> Incompatible:
    """Return the error for a Fisher that has other elements than information of 0 or more."""
    return Incompatible(
        "a Fisher has elements that are negative, infinite or NaN",
        where=where,
        hint="a Fisher is a mean of squared gradients: is this one, and does its type hold it?",
    )


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    row_weights: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Average a chunk into `out`.  As `kernels.run`; the Fishers come after the experts.

    Raises Incompatible for a Fisher that is negative or not finite.
    """
    packed = pack(mix, chunk, out, out_dtype)
    _informed(packed.at)
    if packed.read_ties()[0]:
        raise unsound_fisher(None)
    return ()


ROLE: Final = "fisher"
"""The role of the diagonal Fisher of an expert: of each tensor one of the same name and shape."""
FLOOR: Final = Parameter("floor", "float", 0.0, Range(0.0, MAX_SINGLE))


def _floor(operation: Operation) -> float:
    return single(common(operation.parameters, FLOOR))


class InformedModel(CostModel):
    """As `CostModel`, for averages by Fishers."""

    def __init__(self, operation: Operation, grid: Grid) -> None:
        super().__init__(operation, grid)
        assert grid.together is not None
        (self._fishers,) = grid.together.companions
        self._sums, self._squares_sums = np.moveaxis(self._fishers.totals, 1, 0)
        self._counts = self.free() == READ
        self._parts = self._informed()
        self._concentration = self._concentrated()
        self.roots = self._alone()

    def free(self) -> States:
        grid, fishers = self._grid, self._fishers
        states = np.full(grid.shape, READ, dtype=np.uint8)
        nothing = ~fishers.is_there
        if _floor(self.operation) == 0:
            nothing = nothing | (self._sums == 0)
        nothing[list(self.operation.weightless)] = True
        states[nothing] = BELOW
        still = grid.equal | (grid.known & (grid.column("nonzeros") == 0))
        # A Fisher counts where its expert does not move, as long as another one does.
        idle = ~((states == READ) & ~still).any(axis=0)
        states[:, idle] = np.where(grid.equal[:, idle], EQUAL, BELOW)
        return states

    def _informed(self) -> Floats:
        """Return w_k times the mean of F_k, float64[K, C]; 0 for who takes no part.

        Where not all are known, all are taken to be alike.
        """
        means = np.maximum(self._sums / self._grid.elements, _floor(self.operation))
        known = (~np.isnan(self._sums) | ~self._counts).all(axis=0)
        weights = np.array(self.operation.weights)[:, None]
        parts: Floats = np.where(self._counts, weights * np.where(known, means, 1.0), 0.0)
        return parts

    def _concentrated(self) -> Floats:
        """Return the concentration of shares, float64[C]: infinite where Fishers do not vary."""
        sums, elements = self._sums, self._grid.elements
        with np.errstate(invalid="ignore", divide="ignore"):
            varies = self._squares_sums * elements / (sums * sums) - 1.0
            own = np.where(varies > 0, 1.0 / varies, np.inf)
        # Who takes no part, or is not known, does not make shares more even.
        known = self._counts & ~np.isnan(varies)
        return added(np.where(known, own, 0.0))

    def _finite(self) -> Floats:
        """Return ||scale d_k||^2 times the names of the tensor, 0 where it is not known."""
        squares = self.squares * self._grid.copies * self.operation.factor_given**2
        return np.where(np.isfinite(squares), squares, 0.0)

    def _alone(self) -> Floats:
        """Return what leaving out one expert alone costs: float64[K, C]; infinite if unknown."""
        roots = np.zeros(self._grid.shape)
        for k in range(len(roots)):
            out = np.zeros_like(self._counts)
            out[k] = self._counts[k]
            roots[k] = np.sqrt(self.likely(out, self._counts & ~out))
        known = np.isfinite(self.squares) & np.isfinite(roots)
        return np.where(self._counts, np.where(known, roots, np.inf), 0.0)

    def largest(self, left: Floats) -> Floats:
        is_left = left > 0
        return self.likely(is_left, np.zeros_like(is_left))

    def ranked(self, score: str) -> Floats:
        return self.roots

    def likely(self, left_out: Bools, taken: Bools) -> Floats:
        out, rest = np.where(left_out, self._parts, 0.0), np.where(taken, self._parts, 0.0)
        total, kept = added(out + rest), added(rest)
        squares, concentration = self._finite(), self._concentration
        own = _square(_over(out, total), concentration) * squares
        lost = _square(_over(total - kept, total), concentration)
        with np.errstate(invalid="ignore"):
            # Infinity times nothing: there is no share then.
            left = np.nan_to_num(concentration * _over(kept, total), nan=0.0, posinf=np.inf)
        others = _square(_over(rest, kept), left) * squares
        return added(own) + lost * added(others)

    def reach(self) -> tuple[float, Floats]:
        """As `CostModel.reach`: an average moves no further than the expert that moves most."""
        grid = self._grid
        moved = np.where(grid.known, grid.column("max_abs"), 0.0).max(axis=0)
        moved = np.maximum.reduceat(moved, grid.starts[:-1])
        return 1.0, moved * abs(self.operation.factor_given)


class Informed(Combination):
    """The average by Fishers: a task has all experts, and after them their Fishers."""

    kind = INFORMED
    kernel = staticmethod(run)
    model = InformedModel
    unbounded = "divides by sums of Fishers"
    companions = (Companion(ROLE, is_read=True, totals=2, measure=sums_of, refuse=unsound_fisher),)

    def check(self, operation: Operation) -> None:
        if min(operation.weights) < 0:
            raise BadRequest(
                f"a weight of {operation.method.name} must not be negative: it divides by sums of "
                "weights",
                where=Option("experts"),
            )

    def facts(self, select: type[Selection]) -> str:
        return "sums of the experts' Fishers, and of their squares, chunk by chunk"

    def divided_by(self, operation: Operation) -> str:
        return "the method"

    def dilutes(self, operation: Operation) -> bool:
        """Return True: a Fisher counts where its expert does not move, too."""
        return True

    def most(self, operation: Operation) -> tuple[float, ...]:
        return (operation.farthest,) * len(operation.weights)

    def factors(self, operation: Operation) -> tuple[float, float]:
        return operation.factor, _floor(operation)


def _over(part: Floats, whole: Floats) -> Floats:
    share: Floats = np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 0.0)
    return share


def _square(mean: Floats, concentration: Floats) -> Floats:
    found: Floats = mean * mean + mean * (1.0 - mean) / (1.0 + concentration)
    return found


FISHER: Final = Method(
    name="fisher",
    summary="average of the experts, each element weighted by the expert's Fisher information",
    formula="sum w_k F_k expert_k / sum w_k F_k, F_k >= floor the expert's diagonal Fisher; the "
    "base where that is 0 / 0",
    source="Matena and Raffel 2022, arXiv 2111.09832",
    parameters=(FLOOR,),
    select=Delta,
    combine=Informed(),
    mind="what is left out of an expert has no part in the average: the others' elements weigh "
    "more there",
    is_ours=True,
)
