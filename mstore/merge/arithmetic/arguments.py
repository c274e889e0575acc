"""Arguments: what a compiled pass over a chunk takes: one operation (`Mix`) and one `Chunk`.

`pack` makes one run of bytes of both: int64 fields first (FIELDS), then the values per expert, per
threshold and per row, then words that the pass writes.  One packing call and one address cost less
than an array and an address per value.  Merge and attribution take the same.  Needs no compiler.

K experts have S thresholds: K, or 2 K, where the second K say which of the largest elements are
dropped.  If the base is a summand itself, it is the first expert, and has no row.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import FACTORED, SUMMED, Scratch, address
from mstore.numeric.codes import ITEMSIZES, dtype_code


class Mix(msgspec.Struct, frozen=True, eq=False):
    """One operation in the form that the kernel takes.

    `weights` is float32[K], or float32[K + 1] with the base first if that is a summand itself
    (`has_base`); with companions that are read, those of K experts, and the same again for each
    role; `factors` is float32[2]: fixed divisor, lambda times scale (NEAR: divisor, its reach;
    INFORMED: scale, the floor); `flags` is int64[4]: kind, normalize (for DIRECT: keeps the base),
    cuts per expert, masked (1: at random, or by variance, 2: by rank, 3: by what experts need, 4:
    by importance; 5 and more: none, and factors follow from the chunk, `ChunkFactors`).
    One per weight:
    `rescales` is float32, the factor of a drawn delta; `mask_limits` are as in `Selection`.
    `chances` are bytes of each expert that say what else its mask follows from.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    rescales: npt.NDArray[np.float32]
    mask_limits: tuple[int, ...]
    has_base: bool = False
    chances: tuple[bytes, ...] = ()

    @property
    def experts(self) -> int:
        """How many experts it mixes, K; companions that are read count, too."""
        return self.weights.size - self.has_base

    def signature(self) -> bytes:
        """Return canonical bytes of all that affects the arithmetic here, except the weights.

        flags (4 x int64), factors (2 x float32), rescale factor (float32), mask limit (uint64),
        little-endian: 52 bytes, the same on every machine.  The last two are 0 where experts differ
        in them; `own` then has them.  Two mixes of equal signature give equal bytes for equal
        chunks, weights, thresholds, quotas, keys and `own` parts.
        """
        one = self._alike
        rescale, limit = (self.rescales[:1], self.mask_limits[0]) if one else (np.zeros(1), 0)
        return (
            self.flags.astype("<i8").tobytes()
            + self.factors.astype("<f4").tobytes()
            + rescale.astype("<f4").tobytes()
            + limit.to_bytes(8, "little")
        )

    @property
    def _alike(self) -> bool:
        """Whether all experts have the same mask limit and rescale factor."""
        return len(set(self.mask_limits)) == 1 and len(set(self.rescales.tolist())) == 1

    def own(self) -> list[bytes]:
        """Return canonical bytes of what each expert has of its own, nothing if all are alike."""
        chances = list(self.chances) or [b""] * self.experts
        if self._alike:
            return chances
        rescales, limits = self.rescales[self.has_base :], self.mask_limits[self.has_base :]
        return [
            struct.pack("<fQ", rescale, limit) + chance
            for rescale, limit, chance in zip(rescales, limits, chances, strict=True)
        ]


# Numbers, and lengths in elements or bytes.
EXPERTS: Final = 0
KIND: Final = 1
NORMALIZES: Final = 2
CUTS: Final = 3
BASE_CODE: Final = 4
BASE_LENGTH: Final = 5
ROWS: Final = 6
STRIDE: Final = 7
CODES: Final = 8
OUT_CODE: Final = 9
OUT_LENGTH: Final = 10
LENGTH: Final = 11
FIRST_INDEX: Final = 12
MASKED: Final = 13
# Addresses of the chunk.
BASE_AT: Final = 14
ROWS_AT: Final = 15
OUT_AT: Final = 16
MASKS_AT: Final = 17
TILES_AT: Final = 18
DRAWS_AT: Final = 19
# Addresses within this run of bytes.
ROW_OF_AT: Final = 20
QUOTAS_AT: Final = 21
LIMITS_AT: Final = 22
CODES_AT: Final = 23
THRESHOLDS_AT: Final = 24
KEYS_AT: Final = 25
WEIGHTS_AT: Final = 26
RESCALES_AT: Final = 27
FACTORS_AT: Final = 28
TIES_AT: Final = 29
WORKING_AT: Final = 30
ROW_LENGTH: Final = 31
"""Elements that have the same weights: of a row, or all."""
FIELDS: Final = 32

_NOTHING: Final = np.empty(0, dtype=np.uint8)
scratch: Final = Scratch()


class Chunk(NamedTuple):
    """A chunk in memory; see `kernels.mix_chunk` for each field."""

    base: npt.NDArray[np.uint8]
    base_dtype: str
    rows: npt.NDArray[np.uint8]
    row_dtypes: Sequence[str]
    row_of: Sequence[int] | npt.NDArray[np.int64]
    n: int
    first_index: int
    thresholds: npt.NDArray[np.float32]
    quotas: Sequence[int] | npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint32]


class Packed(NamedTuple):
    """Packed arguments, valid until this thread packs again: their bytes, and their address."""

    room: memoryview
    at: int
    ties: struct.Struct
    ties_at: int

    def read_ties(self) -> tuple[int, ...]:
        """Return the ties that the pass wrote, one per threshold."""
        return self.ties.unpack_from(self.room, self.ties_at)


def pack(
    mix: Mix,
    chunk: Chunk,
    out: npt.NDArray[np.uint8] | None,
    out_dtype: str,
    masks: npt.NDArray[np.uint8] | None = None,
    rescales: npt.NDArray[np.float32] | None = None,
    row_weights: npt.NDArray[Any] | None = None,
) -> Packed:
    """Check that the arrays fit, and pack them; the caller keeps them alive while the pass runs.

    out: None for a pass that writes none. row_weights: as for `kernels.mix_chunk`; for FACTORED
    float32[K, n], those of each element, for SUMMED float64[n], what is added to it.  Raises
    BadRequest for another element type of the chunk and ValueError for arrays that do not fit.
    """
    base, rows, row_of, n = chunk.base, chunk.rows, chunk.row_of, chunk.n
    base_code, out_code = dtype_code(chunk.base_dtype), dtype_code(out_dtype)
    row_codes, widest = _types(tuple(chunk.row_dtypes))
    count = len(chunk.row_dtypes)
    kind, normalizes, cuts, random = mix.flags.tolist()
    if mix.has_base:
        # An absent expert counts as the base.
        row_of = (-1, *row_of)
    experts = mix.weights.size
    slots = experts * max(1, cuts)
    if (
        base.size < n * ITEMSIZES[chunk.base_dtype]
        or (out is not None and out.size < n * ITEMSIZES[out_dtype])
        or count > rows.shape[0]
        or rows.shape[1] < n * widest
    ):
        raise ValueError("base, rows or out do not fit the chunk")
    if not (base.flags.c_contiguous and rows.flags.c_contiguous):
        raise ValueError("base and rows are contiguous")
    if out is None:
        out = _NOTHING
    elif not out.flags.carray:
        raise ValueError("out is contiguous and can be written")
    if len(row_of) != experts or not -1 <= min(row_of) <= max(row_of) < count:
        raise ValueError("row_of does not name one row, or none, of every expert")
    if cuts and not len(chunk.thresholds) == len(chunk.quotas) == slots:
        raise ValueError("thresholds or quotas are not one an expert")
    if masks is None and min(mix.mask_limits) < 2**32 and chunk.keys.shape != (experts, 2):
        raise ValueError("keys are not one an expert")
    if not random and not (masks is None and rescales is None):
        raise ValueError("masks and rescales do not fit an operator that draws none")
    if masks is not None and (masks.shape != (experts, n) or not masks.flags.c_contiguous):
        raise ValueError("masks do not fit the chunk's experts and elements")
    if rescales is not None and rescales.shape != (experts,):
        raise ValueError("rescales are not one an expert")
    row_length = n
    if row_weights is not None:
        wide = np.dtype(np.float64 if kind == SUMMED else np.float32)
        if row_weights.dtype != wide:
            what = "sums" if kind == SUMMED else "factors"
            raise ValueError(f"row_weights that are {what} are {wide}, not {row_weights.dtype}")
    if row_weights is not None and kind in (FACTORED, SUMMED):
        # Attribution has sums of each expert.
        wanted = ((experts, n),) if kind == FACTORED else ((n,), (experts, n))
        if row_weights.shape not in wanted or not row_weights.flags.c_contiguous:
            raise ValueError("row_weights are not one an element, or one an expert and element")
    elif row_weights is not None:
        if row_weights.ndim != 2 or row_weights.shape[1] != experts or n % len(row_weights):
            raise ValueError("row_weights are not one an expert of whole rows")
        if not row_weights.flags.c_contiguous:
            raise ValueError("row_weights are contiguous")
        row_length = n // len(row_weights)
    layout = _layout(experts, slots, count)
    room, at = scratch.arguments(layout.size)
    layout.packer.pack_into(
        room,
        0,
        experts,
        kind,
        normalizes,
        cuts,
        base_code,
        base.size,
        rows.shape[0],
        rows.shape[1],
        count,
        out_code,
        out.size,
        n,
        chunk.first_index,
        masks is not None,
        address(base),
        address(rows),
        address(out),
        0 if masks is None else address(masks),
        scratch.tiles_at,
        scratch.draws_at,
        *_offsets(layout, at, row_weights),
        row_length,
        *row_of,
        *(chunk.quotas if cuts else (0,) * slots),
        *mix.mask_limits,
        row_codes,
        np.asarray(chunk.thresholds, dtype=np.float32).tobytes(),
        np.asarray(chunk.keys, dtype=np.uint32).tobytes(),
        mix.weights.tobytes(),
        (mix.rescales if rescales is None else rescales.astype(np.float32)).tobytes(),
        mix.factors.tobytes(),
    )
    return Packed(room, at, layout.ties, layout.offsets[TIES_AT - ROW_OF_AT])


class _Layout(NamedTuple):
    """A packer, and the offsets of all fields from ROW_OF_AT on.

    size: of everything, including what the pass writes: the ties, and its working words.
    """

    packer: struct.Struct
    offsets: tuple[int, ...]
    ties: struct.Struct
    size: int


def _offsets(layout: _Layout, at: int, row_weights: npt.NDArray[Any] | None) -> list[int]:
    """Return the addresses of the fields from ROW_OF_AT on; weights of rows lie elsewhere."""
    found = [at + offset for offset in layout.offsets]
    if row_weights is not None:
        found[WEIGHTS_AT - ROW_OF_AT] = address(row_weights)
    return found


@lru_cache(maxsize=64)
def _layout(experts: int, slots: int, rows: int) -> _Layout:
    """Return the layout for these numbers of experts, thresholds and rows."""
    eight, four = 8 * experts, 4 * experts
    sizes = (eight, 8 * slots, eight, 8 * rows, 4 * slots, eight, four, four, 8)
    starts = list(itertools.accumulate(sizes, initial=8 * FIELDS))
    # The part that the pass writes starts at whole words again.
    written = -(-starts[-1] // 8) * 8
    offsets = (*starts[:-1], written, written + 8 * slots)
    packer = struct.Struct(
        "=" + "q" * (FIELDS + 2 * experts + slots) + "".join(f"{size}s" for size in sizes[3:])
    )
    # The words that the pass writes: ties, what is left of quotas, experts that take part.
    size = written + 8 * (2 * slots + experts)
    return _Layout(packer, offsets, struct.Struct(f"={slots}q"), size)


@lru_cache(maxsize=64)
def _types(dtypes: tuple[str, ...]) -> tuple[bytes, int]:
    """Return the codes of these element types as int64[P], and the widest item size in bytes."""
    codes = struct.pack(f"={len(dtypes)}q", *map(dtype_code, dtypes))
    return codes, max((ITEMSIZES[dtype] for dtype in dtypes), default=0)
