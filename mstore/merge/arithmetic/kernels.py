"""The fused kernels: one pass over a chunk of base and experts, stored bytes to stored bytes.

Owns the entry points with their checks, and the order of the float32 arithmetic of every operator:
sums over experts run in plan order, no product is contracted into a sum unless documented, no sum
is reassociated.  Does not own the arithmetic itself (`passes`), which experts are present,
thresholds or keys (the engine and the planner), nor the scalars that parameters become
(`merge.methods.method`).

The passes work on a chunk in tiles that stay in the first-level cache.  Every step over a tile is a
loop that LLVM vectorises.  Element types and operator flags are checked once per tile, so one
compiled function serves all.  `mix_chunk` and `count_ties` release the GIL, use the scratch of
their thread (`tiles`) and may run on any number of threads.  Compiled code is cached on disk
(`numeric.code_cache`).

Bits: equal float32 patterns of base and expert make the delta exactly zero (also for NaN and
infinity); a mix of zero gives the base element's own bits; any other NaN that arithmetic or a
change of element type produces is the canonical quiet one, since payloads differ by machine.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import (
    ADDITIVE,
    CONSENSUS,
    COUNTED,
    DIRECT,
    UNLIMITED,
    Scratch,
    address,
)
from mstore.merge.methods.method import Operation
from mstore.numeric.code_cache import Pass
from mstore.numeric.codes import ITEMSIZES, dtype_code

__all__ = ["COUNTED", "UNLIMITED", "Mix", "count_ties", "mix_chunk", "warm_up"]

_HERE: Final = Path(__file__)
_SOURCES: Final = (
    _HERE.parents[2] / "numeric" / "codes.py",
    _HERE.parents[2] / "numeric" / "floats.py",
    _HERE.with_name("philox.py"),
    _HERE.with_name("tiles.py"),
    _HERE.with_name("stages.py"),
    _HERE.with_name("passes.py"),
)
_PASSES: Final = "mstore.merge.arithmetic.passes"
_mix: Final = Pass(_PASSES, "mix", "iippiiiiipiipiippiipppppipipppp", _SOURCES)
_count: Final = Pass(_PASSES, "count", "iipiipiipp", _SOURCES)
_scratch: Final = Scratch()


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """One operation in the form that the kernel takes.

    `weights` is float32[K], or float32[K + 1] with the base first if that is a summand itself
    (`has_base`); `factors` is float32[3]: fixed divisor, lambda, rescale factor; `flags` is
    int64[4]: kind, normalize (for DIRECT: keeps the base), cuts per expert, random; `mask_limit`
    is as in `Operation`.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    mask_limit: int
    has_base: bool = False

    @classmethod
    def of(cls, operation: Operation) -> Mix:
        """Convert a settled `Operation`."""
        assert not operation.needs_facts
        kind = ADDITIVE
        if operation.is_whole:
            kind = DIRECT
        elif operation.is_elected:
            kind = CONSENSUS
        keeps = operation.keeps_base if operation.is_whole else operation.normalizes
        cuts = operation.is_trimmed + operation.is_band
        flags = (kind, keeps, cuts, operation.is_drawn)
        factors = (operation.divisor, operation.scale, operation.rescale)
        has_base = operation.mixture is not None
        weights = (operation.base_weight, *operation.weights) if has_base else operation.weights
        return cls(
            weights=np.array(weights, dtype=np.float32),
            factors=np.array(factors, dtype=np.float32),
            flags=np.array(flags, dtype=np.int64),
            mask_limit=operation.mask_limit,
            has_base=has_base,
        )

    @property
    def experts(self) -> int:
        """How many experts it mixes, K."""
        return self.weights.size - self.has_base

    def signature(self) -> bytes:
        """Return canonical bytes of all that affects the arithmetic here, except the weights.

        flags (4 x int64), factors (3 x float32), mask_limit (uint64), little-endian: 52 bytes, the
        same on every machine.  Two mixes of equal signature give equal bytes for equal chunks,
        weights, thresholds, quotas and keys.
        """
        return (
            self.flags.astype("<i8").tobytes()
            + self.factors.astype("<f4").tobytes()
            + self.mask_limit.to_bytes(8, "little")
        )


def mix_chunk(
    mix: Mix,
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    rows: npt.NDArray[np.uint8],
    row_dtypes: Sequence[str],
    row_of: Sequence[int] | npt.NDArray[np.int64],
    n: int,
    first_index: int,
    thresholds: npt.NDArray[np.float32],
    quotas: Sequence[int] | npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint32],
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    rescales: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Merge `n` elements of one tensor, from flat index `first_index` on, into `out`.

    base        uint8[>= n * itemsize], contiguous, aligned to its element
    rows        uint8[>= P, stride], each row `n` elements that were read
    row_dtypes  P element types, one a row ("BF16", "F16" or "F32"; sources and output may differ)
    row_of      int64[K] for the K weights of `mix`: the row of expert k, or -1.  Experts may name
                one row together (blocks that they share).  Those without a row are absent: their
                delta is zero.  If all are, the output is the base, converted to its type (unless
                Operation.keeps_base says otherwise)
    thresholds  float32[K]: trimming keeps |d| above it, and
    quotas      int64[K]: that many |d| equal to it, lowest index first, in THIS chunk
                (UNLIMITED: all; COUNTED: all, and they are counted).  Both are read only if
                the operator needs thresholds.  Float32[2 K] and int64[2 K] if it drops the
                largest, too: what the second K would keep is dropped
    keys        uint32[K, 2] of random.mask_keys, read only if the operator is random
    out         uint8[>= n * itemsize]; bytes after the last element are left alone
    masks       uint8[K, n], only for methods that draw: 1 keeps an element, 0 drops it, in place
                of the draws of `keys`
    rescales    float32[K], only for methods that draw: what expert k's kept deltas are multiplied
                by, in place of the one rescale factor of `mix`

    Returns for each threshold how many elements tie at it, where its quota is COUNTED, or how many
    of them were kept, where it is a number; 0 for others.  Raises BadRequest for another element
    type and ValueError for arrays that do not fit.
    """
    base_code, out_code = dtype_code(base_dtype), dtype_code(out_dtype)
    row_codes, widest = _types(tuple(row_dtypes))
    kind, normalize, cuts, random = mix.flags.tolist()
    if mix.has_base:
        # An absent expert counts as the base.
        row_of = (-1, *row_of)
    experts = mix.weights.size
    slots = experts * max(1, cuts)
    if (
        base.size < n * ITEMSIZES[base_dtype]
        or out.size < n * ITEMSIZES[out_dtype]
        or len(row_dtypes) > rows.shape[0]
        or rows.shape[1] < n * widest
    ):
        raise ValueError("base, rows or out do not fit the chunk")
    if not (base.flags.c_contiguous and rows.flags.c_contiguous and out.flags.carray):
        raise ValueError("base, rows and out are contiguous, and out is written")
    if len(row_of) != experts or not -1 <= min(row_of) <= max(row_of) < len(row_dtypes):
        raise ValueError("row_of does not name one row, or none, of every expert")
    if cuts and not len(thresholds) == len(quotas) == slots:
        raise ValueError("thresholds or quotas are not one an expert")
    if masks is None and mix.mask_limit < 2**32 and keys.shape != (experts, 2):
        raise ValueError("keys are not one an expert")
    if not random and not (masks is None and rescales is None):
        raise ValueError("masks and rescales do not fit an operator that draws none")
    if masks is not None and masks.shape != (experts, n):
        raise ValueError("masks do not fit the chunk's experts and elements")
    if rescales is not None and rescales.shape != (experts,):
        raise ValueError("rescales are not one an expert")
    # Kept alive until the pass is done: the pass receives only addresses.
    kept = None if masks is None else np.ascontiguousarray(masks, dtype=np.uint8)
    factors = mix.factors.tobytes()
    small = _small(experts, slots, len(row_dtypes))
    room, at = _scratch.arguments(small.size)
    small.packer.pack_into(
        room,
        0,
        *row_of,
        *(quotas if cuts else (0,) * slots),
        row_codes,
        np.asarray(thresholds, dtype=np.float32).tobytes(),
        np.asarray(keys, dtype=np.uint32).tobytes(),
        mix.weights.tobytes(),
        factors[8:] * experts if rescales is None else rescales.astype(np.float32).tobytes(),
        factors,
    )
    row_of_at, quotas_at, codes_at, thresholds_at, keys_at, weights_at = small.offsets[:6]
    rescales_at, factors_at, ties_at, experts_at = small.offsets[6:]
    _mix(
        experts,
        kind,
        at + weights_at,
        at + factors_at,
        normalize,
        cuts,
        mix.mask_limit,
        base_code,
        base.size,
        address(base),
        rows.shape[0],
        rows.shape[1],
        address(rows),
        len(row_dtypes),
        out_code,
        at + codes_at,
        at + row_of_at,
        n,
        first_index,
        at + thresholds_at,
        at + quotas_at,
        at + keys_at,
        at + rescales_at,
        0 if kept is None else address(kept),
        int(masks is not None),
        address(out),
        out.size,
        _scratch.tiles_at,
        _scratch.draws_at,
        at + experts_at,
        at + ties_at,
    )
    ties = small.ties.unpack_from(room, ties_at)
    return ties[1:] if mix.has_base else ties


class _Small(NamedTuple):
    """The layout of all per-expert values in one run of bytes: a packer and the offsets.

    size: of everything, including what the pass writes: the ties, and its working words.
    """

    packer: struct.Struct
    offsets: tuple[int, ...]
    ties: struct.Struct
    size: int


@lru_cache(maxsize=64)
def _small(experts: int, slots: int, rows: int) -> _Small:
    """Return the layout for these numbers of experts, thresholds and rows.

    One packing call costs less than one array and one address per value.
    """
    eight, four = 8 * experts, 4 * experts
    sizes = (eight, 8 * slots, 8 * rows, 4 * slots, eight, four, four, 12)
    # The part that the pass writes starts at whole words again.
    written = -(-sum(sizes) // 8) * 8
    offsets = (*itertools.accumulate(sizes[:-1], initial=0), written, written + 8 * slots)
    packer = struct.Struct(
        "=" + "q" * (experts + slots) + "".join(f"{size}s" for size in sizes[2:])
    )
    # The words that the pass writes: ties, what is left of quotas, experts that take part.
    size = written + 8 * (2 * slots + experts)
    return _Small(packer, offsets, struct.Struct(f"={slots}q"), size)


@lru_cache(maxsize=64)
def _types(dtypes: tuple[str, ...]) -> tuple[bytes, int]:
    """Return the codes of these element types as int64[P], and the widest item size in bytes."""
    codes = struct.pack(f"={len(dtypes)}q", *map(dtype_code, dtypes))
    return codes, max((ITEMSIZES[dtype] for dtype in dtypes), default=0)


def count_ties(
    base: npt.NDArray[np.uint8],
    base_dtype: str,
    row: npt.NDArray[np.uint8],
    row_dtype: str,
    n: int,
    threshold: float,
) -> int:
    """Count the deltas, of a chunk's `n`, whose magnitude is exactly `threshold`, a float32.

    Arrays as for mix_chunk.  Raises BadRequest for another element type and ValueError for arrays
    that do not fit.
    """
    base_code, row_code = dtype_code(base_dtype), dtype_code(row_dtype)
    if base.size < n * ITEMSIZES[base_dtype] or row.size < n * ITEMSIZES[row_dtype]:
        raise ValueError("base or row is shorter than the chunk")
    if not (base.flags.c_contiguous and row.flags.c_contiguous):
        raise ValueError("base and row are contiguous")
    ties = np.zeros(1, dtype=np.int64)
    _count(
        base_code,
        base.size,
        address(base),
        row_code,
        row.size,
        address(row),
        n,
        struct.unpack("<I", struct.pack("<f", threshold))[0],
        _scratch.tiles_at,
        address(ties),
    )
    return int(ties[0])


def warm_up() -> None:
    """Load or compile both kernels, so that no later call has to."""
    _mix.load()
    _count.load()
