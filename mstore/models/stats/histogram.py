"""The histogram of |d| over a whole tensor, and the threshold that keeps its k largest.

Owns the sparse histogram (Histogram), the threshold (Threshold, `select`), its refinement by a
second look (`select_exact`), and the estimate of what a chunk holds above a threshold
(`tail_squares`).  Does not own how elements are counted (`deltas`) or how counts are stored
(`table`).  Pure functions and frozen values on numpy arrays: safe in any thread.

**Bins.**  Bit patterns of non-negative float32 numbers are ordered as the numbers are, so the top
16 bits of |d| cut the magnitudes into ordered bins: the sign bit's place is empty, 8 bits are
exponent, 7 are fraction.  A bin's *edge* is the one number in it whose low 16 bits are zero: the
smallest.  Elements on the edge are *exact* (for them the bin says all there is to say), the others
*inexact*.  A bf16 number is always exact; so is mostly, but not always, the difference of two.
Bin 0 starts at 0, but elements with d == 0 are never counted: all in it are inexact.  Bin 0x7F80
is infinity and bin 0x7FC0 is NaN, each counted as larger than what comes before.

**Rule of selection.**  All elements with |d| > value are kept, and of those with |d| == value the
`quota` of lowest flat index.  Together these are exactly k, or all that are not zero.
"""

from __future__ import annotations

import math
import struct
from typing import Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.models.stats.chunk import Rows, finite
from mstore.terms.errors import BadRequest, Corrupt

BINS: Final = 0x8000
NAN_BIN: Final = 0x7FC0

INFINITY_BIN: Final = 0x7F80
_DTYPES: Final = (np.dtype("<u2"), np.dtype("<u8"), np.dtype("<u8"))


class Histogram(msgspec.Struct, frozen=True, eq=False):
    """The occupied bins, ascending: how many elements each holds, and how many are inexact.

    Invariants: bins rise strictly up to NAN_BIN; every count is at least 1; inexact <= counts,
    equal to it in bin 0, and 0 where the bin is infinity or NaN.  The arrays are read-only.
    Elements with d == 0 are in no bin: the caller knows n, and `nonzeros` gives the rest.
    """

    bins: npt.NDArray[np.uint16]
    counts: npt.NDArray[np.uint64]
    inexact: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        bins, counts, inexact = self.bins, self.counts, self.inexact
        if bins.ndim != 1 or not bins.shape == counts.shape == inexact.shape:
            raise BadRequest("bins, counts and inexact counts are three arrays of one length")
        if (bins.dtype, counts.dtype, inexact.dtype) != _DTYPES:
            raise BadRequest("bins are uint16, counts and inexact counts are uint64")
        if bins.size:
            if (bins[1:] <= bins[:-1]).any() or bins[-1] > NAN_BIN:
                raise BadRequest(f"bins must rise strictly and end at {NAN_BIN:#06x}")
            if not counts.all() or (inexact > counts).any():
                raise BadRequest(
                    "a bin holds at least one element, and no more inexact ones than that"
                )
            # Bins rise, so bin 0 and infinity can only be at the ends.
            top = int(np.searchsorted(bins, INFINITY_BIN))
            if (bins[0] == 0 and inexact[0] != counts[0]) or inexact[top:].any():
                raise BadRequest("zeros are not counted, infinity and the quiet NaN are exact")
        for array in (self.bins, self.counts, self.inexact):
            array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return (
            np.array_equal(self.bins, other.bins)
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.inexact, other.inexact)
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_dense(cls, hist: npt.NDArray[np.int64]) -> Self:
        """Build from what `deltas.measure` fills: int64[32768, 2].  Raises BadRequest."""
        if hist.shape != (BINS, 2) or hist.dtype != np.int64:
            raise BadRequest(
                f"a dense histogram is int64[{BINS}, 2], not {hist.dtype}{list(hist.shape)}"
            )
        bins = np.flatnonzero(hist.any(axis=1))
        counts = hist[bins]
        if counts.size and counts.min() < 0:
            raise BadRequest("a dense histogram holds no negative counts")
        every, inexact = counts.astype(np.uint64).T
        return cls(bins.astype(np.uint16), every, inexact)

    @property
    def nonzeros(self) -> int:
        """Elements counted: those with d != 0."""
        return int(self.counts.sum())


def bin_of(value: float) -> int:
    """Return the bin of a magnitude."""
    return _pattern(value) >> 16


class Threshold(msgspec.Struct, frozen=True):
    """Where the k largest |d| of a tensor end, as far as its histogram shows.

    `value` is the edge of the bin that contains the k-th largest, exactly a float32.  `above`
    counts elements in higher bins, `in_bin` those in this one, `inexact` those of them off the
    edge; `needed` of the bin's elements complete the k.  If fewer than k elements are not zero,
    `value` is 0, `above` is all of them, and the rest is 0: zeros would add nothing.
    """

    value: float
    above: int
    needed: int
    in_bin: int
    inexact: int

    @classmethod
    def none(cls) -> Self:
        """Return the threshold of a tensor that equals its base: it keeps nothing."""
        return cls(value=0.0, above=0, needed=0, in_bin=0, inexact=0)

    @property
    def exact(self) -> bool:
        """Whether `value` and `quota` keep exactly the k largest, without a second look.

        Inexact elements are larger than those on the edge.  If all of them are needed, the rule
        "larger than the edge, and so many on it" selects exactly; that also holds if the whole bin
        is needed.  If only some of the inexact ones are needed, the order among them decides, and
        the histogram does not know it.
        """
        return self.needed >= self.inexact

    @property
    def quota(self) -> int:
        """Elements with |d| == value to keep, lowest flat index first.

        If not `exact`, the bin's edge serves as the threshold, and all elements on it are kept.
        """
        return (self.needed if self.exact else self.in_bin) - self.inexact

    @property
    def kept(self) -> int:
        """Elements that `value` and `quota` keep: k, if `exact` and that many are not zero."""
        return self.above + self.inexact + self.quota

    @property
    def bin(self) -> int:
        """The bin of `value`, the input of `deltas.count_low`."""
        return bin_of(self.value)


def select(hist: Histogram, k: int, n: int) -> Threshold:
    """Return the threshold that keeps the `k` largest |d| of a tensor of `n` elements.

    k may exceed the number of non-zeros (see Threshold).  Raises BadRequest unless 1 <= k <= max(1,
    n), and if the histogram counts more than n elements.
    """
    nonzeros = hist.nonzeros
    if not 1 <= k <= max(1, n):
        raise BadRequest(f"cannot keep {k} of {n} elements")
    if nonzeros > n:
        raise BadRequest(f"the histogram counts {nonzeros} elements of a tensor of {n}")
    if k > nonzeros:
        return Threshold(value=0.0, above=nonzeros, needed=0, in_bin=0, inexact=0)
    at_least = np.cumsum(hist.counts[::-1])[::-1]
    # The last bin with k elements at or above its edge; at_least falls along the bins.
    place = int(np.flatnonzero(at_least >= k)[-1])
    in_bin = int(hist.counts[place])
    above = int(at_least[place]) - in_bin
    return Threshold(
        value=_float32(int(hist.bins[place]) << 16),
        above=above,
        needed=k - above,
        in_bin=in_bin,
        inexact=int(hist.inexact[place]),
    )


def kept_squares(hist: Histogram, threshold: Threshold) -> float:
    """Return the sum of d^2 over the k largest |d|, to about one part in 128.

    A bin's elements off its edge count as if they were in the middle of it.
    """
    if not len(hist.bins):
        return 0.0
    values = (hist.bins.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    inexact = hist.inexact.astype(np.float64)
    exact = hist.counts.astype(np.float64) - inexact
    squares = exact * values**2 + inexact * (values * (1.0 + 2.0**-8)) ** 2
    above: float = math.fsum(squares[values > threshold.value].tolist())
    return above + threshold.needed * threshold.value**2 if threshold.needed else above


def select_exact(threshold: Threshold, low_hist: npt.NDArray[np.int64]) -> tuple[float, int]:
    """Return (value, quota) that keep exactly k, from a second look into the threshold's bin.

    `low_hist`, int64[65536], counts the bin's elements by their low 16 bits, over the whole tensor
    (`deltas.count_low`).  `value` is exactly a float32 and one that occurs, except if fewer than k
    elements are not zero.  Raises BadRequest for another shape, and Corrupt if the counts
    contradict the threshold: then the data do not match the histogram.
    """
    if low_hist.shape != (0x10000,) or low_hist.dtype != np.int64:
        raise BadRequest(
            f"low bits are counted in int64[65536], not {low_hist.dtype}{list(low_hist.shape)}"
        )
    if threshold.needed == 0:
        return threshold.value, threshold.quota
    # A bin of a small tensor has few elements.
    occupied = np.flatnonzero(low_hist)
    counts = low_hist[occupied]
    found = int(counts.sum())
    off_edge = found - int(low_hist[0])
    if (found, off_edge) != (threshold.in_bin, threshold.inexact) or (counts < 0).any():
        raise Corrupt(
            f"statistics do not belong to these blocks: a second look found {found} elements, "
            f"{off_edge} of them inexact, where {threshold.in_bin} and {threshold.inexact} "
            f"were counted",
            where=f"bin {threshold.bin:#06x}",
        )
    at_least = np.cumsum(counts[::-1])[::-1]
    place = int(np.flatnonzero(at_least >= threshold.needed)[-1])
    larger = int(at_least[place] - counts[place])
    return _float32(threshold.bin << 16 | int(occupied[place])), threshold.needed - larger


def tail_squares(rows: Rows, value: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Estimate, per chunk, the sum of d^2 over elements with |d| >= value: float64[chunks].

    Exact if that is nothing (max_abs < value) or all (value == 0).  Between these, assumes that |d|
    of the non-zero elements is exponentially distributed (d as Laplace's) with the measured mean:
    above t = value / mean lies the share exp(-t) (t^2 / 2 + t + 1) of the squares.  Clamps the
    result to what is certain: the largest element lies above, everything below adds up to at most
    value * sum |d|, and the part is no more than the whole.  Rows that are not finite give
    infinity: read them first.  The same bits on every machine.  `value` is one threshold, or
    float64[chunks], one per row.

    Raises BadRequest for a negative threshold.  A threshold that is not finite comes from a row
    that is not finite either: all other rows then hold nothing above it.
    """
    values = np.broadcast_to(np.asarray(value, dtype=np.float64), rows.shape)
    if np.any(values < 0.0):
        raise BadRequest(f"a threshold is a magnitude, not {values.min()}")
    total = rows["sum_squares"].astype(np.float64)
    largest = rows["max_abs"].astype(np.float64)
    magnitudes = rows["sum_abs"].astype(np.float64)
    usable = finite(rows)
    inside = usable & (largest >= values) & (largest > 0.0)
    tail = np.zeros(rows.shape, dtype=np.float64)
    tail[inside] = total[inside]
    cut = inside & (values > 0.0)
    if cut.any():
        # Capped at 2^11, where the share has long been 0, so that nothing overflows.
        t = np.minimum(values[cut] * rows["nonzeros"][cut] / magnitudes[cut], 2048.0)
        modelled = total[cut] * (exp_of_minus(t) * (0.5 * t * t + t + 1.0))
        certain = np.maximum(largest[cut] ** 2, total[cut] - values[cut] * magnitudes[cut])
        tail[cut] = np.minimum(np.maximum(modelled, certain), total[cut])
    tail[~usable] = np.inf
    return tail


def exp_of_minus(t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return exp(-t) for 0 <= t, to about 1e-15.

    np.exp differs in the last bit between processors and libraries.  The estimates order blocks in
    a plan, and every machine must make the same plan.  Uses only correctly rounded operations.
    """
    halvings = np.floor(t * 1.4426950408889634)
    rest = (t - halvings * 0.693147180369123816490) - halvings * 1.90821492927058770002e-10
    series = np.ones_like(t)
    for term in range(18, 0, -1):
        series = 1.0 - series * rest / term
    result: npt.NDArray[np.float64] = np.ldexp(series, -halvings.astype(np.int32))
    return result


def _float32(pattern: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", pattern))[0]
    return value


def _pattern(value: float) -> int:
    pattern: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return pattern
