"""Element factors: the factors of each element, where a method makes them of its base and experts.

They are float32, made with numpy before the compiled pass, step by step: sums, products, quotients
and comparisons, which IEEE 754 rounds in one way.  So they are the same for any chunks, threads and
machines.  The formulas are the methods' own.  The pass (`factored_passes`) adds up deltas times
their factors, in the order of experts; where an expert alone has a factor, and that is 1, the
result is its own element, bit for bit, and not the base plus a delta that was rounded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, Mix, pack
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.arithmetic.row_factors import ChunkFactors
from mstore.merge.arithmetic.tiles import TOGETHER
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.numeric.passes import Pass

_factored = Pass(
    "mstore.merge.arithmetic.factored_passes",
    "factored",
    "p",
    (
        *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/tiles.py"),
        *("merge/arithmetic/arguments.py", "merge/arithmetic/factored_passes.py"),
    ),
)


class ElementFactors(ChunkFactors):
    """How the factors of an element follow from the base and all experts."""

    @abstractmethod
    def factors(self, base: Singles, sides: Sequence[Singles], weights: Sequence[float]) -> Singles:
        """Return the factor of each element of each expert's delta, float32[K, n].

        sides: whole experts, the base for one that is not read.
        """

    def weights(
        self, chunk: Chunk, shape: Sequence[int], weights: Sequence[float], *, whole: bool
    ) -> Singles:
        """Return the factors of a chunk, float32[K, n]."""
        found = np.empty((len(chunk.row_of), chunk.n), dtype=np.float32)
        for start in range(0, chunk.n, TOGETHER):
            n = min(TOGETHER, chunk.n - start)
            base = _part(chunk.base, chunk.base_dtype, start, n)
            rows = [
                _part(row, dtype, start, n)
                for row, dtype in zip(chunk.rows, chunk.row_dtypes, strict=False)
            ]
            sides = [base if row < 0 else rows[row] for row in chunk.row_of]
            with np.errstate(all="ignore"):
                found[:, start : start + n] = self.factors(base, sides, weights)
        return found

    def bytes_each(self, experts: int) -> int:
        """Return those of the factors; what they are made of is a few pieces."""
        return 4 * experts


def _part(stored: npt.NDArray[np.uint8], dtype: str, start: int, n: int) -> Singles:
    return singles(stored[start * ITEMSIZES[dtype] :], dtype, n)


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    weights: Singles | None = None,
) -> tuple[int, ...]:
    """Merge a chunk into `out`, as `kernels.run`; weights: float32[K, n], of its elements."""
    packed = pack(mix, chunk, out, out_dtype, row_weights=weights)
    _factored(packed.at)
    return ()
