"""The fused kernels: one pass over a chunk of base and experts, stored bytes to stored bytes.

Owns the entry points with their checks, and the order of the float32 arithmetic of every operator:
sums over experts run in plan order, no product is contracted into a sum unless documented, no sum
is reassociated.  Does not own the arithmetic itself (`passes`), which experts are present,
thresholds or keys (the engine and the planner), nor the scalars that parameters become
(`merge.methods.method`).

The passes work on a chunk in tiles that stay in the first-level cache.  Every step over a tile is a
loop that LLVM vectorises.  Element types and operator flags are checked once per tile, so one
compiled function serves all.  `mix_chunk` and `count_ties` release the GIL, use the scratch of
their thread (`tiles`) and may run on any number of threads.

Bits: equal float32 patterns of base and expert make the delta exactly zero (also for NaN and
infinity); a mix of zero gives the base element's own bits; any other NaN that arithmetic or a
change of element type produces is the canonical quiet one, since payloads differ by machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.arguments import Chunk, Mix, pack, scratch
from mstore.merge.arithmetic.tiles import COUNTED, UNLIMITED, address
from mstore.numeric.codes import ITEMSIZES, dtype_code
from mstore.numeric.passes import Pass

__all__ = ["COUNTED", "UNLIMITED", "Mix", "count_ties", "mix_chunk", "run"]

_SOURCES: Final = (
    *("numeric/codes.py", "numeric/floats.py"),
    *("merge/arithmetic/draws.py", "merge/arithmetic/tiles.py", "merge/arithmetic/arguments.py"),
    *("merge/arithmetic/stages.py", "merge/arithmetic/straight.py", "merge/arithmetic/passes.py"),
)
_PASSES: Final = "mstore.merge.arithmetic.passes"
_mix: Final = Pass(_PASSES, "mix", "p", _SOURCES)
_count: Final = Pass(_PASSES, "count", "iipiipiipp", _SOURCES)


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
    row_weights: npt.NDArray[np.float32] | None = None,
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
    masks       uint8[K, n], only for methods that draw or select by variance: 1 keeps an element, 0
                drops it, in place of the draws of `keys`
    rescales    float32[K], only for methods that draw: what expert k's kept deltas are multiplied
                by, in place of the one rescale factor of `mix`
    row_weights float32[R, K], in place of the weights of `mix`: those of each row, if the chunk is
                R whole rows

    Returns for each threshold how many elements tie at it, where its quota is COUNTED, or how many
    of them were kept, where it is a number; 0 for others.  Raises BadRequest for another element
    type and ValueError for arrays that do not fit.
    """
    chunk = Chunk(
        *(base, base_dtype, rows, row_dtypes, row_of, n, first_index, thresholds, quotas, keys)
    )
    return run(mix, chunk, out, out_dtype, masks, row_weights, rescales)


def run(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8],
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    row_weights: npt.NDArray[np.float32] | None = None,
    rescales: npt.NDArray[np.float32] | None = None,
) -> tuple[int, ...]:
    """Merge a chunk into `out`; all as for `mix_chunk`."""
    # Kept alive until the pass is done: the pass receives only addresses.
    kept = None if masks is None else np.ascontiguousarray(masks, dtype=np.uint8)
    packed = pack(mix, chunk, out, out_dtype, kept, rescales, row_weights)
    _mix(packed.at)
    ties = packed.read_ties()
    return ties[1:] if mix.has_base else ties


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
        scratch.tiles_at,
        address(ties),
    )
    return int(ties[0])
