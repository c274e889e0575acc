"""Whole arrays from one element type to another, in numpy: every element is rounded once.

Rounding is to nearest, ties to even, from the exact value (IEEE 754-2019, 4.3.1).  Elements that
are too large become infinite; in F8_E4M3, which has no infinity, they become the largest number
with their sign, as in torch.  A NaN becomes the quiet NaN without sign and payload, as in merges.

Owns conversions of values.  `codes` owns which types there are, `floats` those in compiled code.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.numeric.codes import EIGHT_BITS

Singles = npt.NDArray[np.float32]

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32] | npt.NDArray[np.float64]

SIZES: Final[dict[str, int]] = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8} | dict.fromkeys(
    (*EIGHT_BITS, "F8_E8M0"), 1
)
"""Bytes per element."""

LARGEST_E4M3: Final = 448.0

_TOO_LARGE: Final[dict[str, float]] = {
    "BF16": float.fromhex("0x1.ffp+127"),
    "F16": 65520.0,
    "F32": float.fromhex("0x1.ffffffp+127"),
    "F8_E5M2": 61440.0,
}
"""The smallest magnitude that rounds to infinity: the tie above the largest number."""
_FITS_E4M3: Final = 464.0
"""The largest magnitude that rounds to 448, a tie."""

_NANS: Final[dict[str, int]] = {
    "BF16": 0x7FC0,
    "F16": 0x7E00,
    "F32": 0x7FC00000,
    "F64": 0x7FF8000000000000,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7F,
}
"""Quiet NaNs; those of 8 bits as torch writes them."""
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_ML_DTYPES: Final = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def widened(data: Bytes, dtype: str) -> Values:
    """Return stored elements as float64[n] if they are F64, else as float32[n], exactly.

    data: uint8, their bytes, little-endian.  Of F32 and F64 the result is a view.
    """
    if dtype == "F64":
        return data.view(np.float64)
    if dtype in _ML_DTYPES:
        found: Singles = np.take(_eight_bits(dtype), data)
        return found
    return singles(data, dtype, data.size // SIZES[dtype])


def narrowed(values: Values, dtype: str) -> tuple[Bytes, int]:
    """Return the elements as stored ones, uint8[bytes], and how many were too large for the type.

    An infinite element counts in F8_E4M3 alone, which has none.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        stored = _rounded(values, dtype)
    is_nan = np.isnan(values)
    if is_nan.any():
        stored.view(_WORDS[SIZES[dtype]])[is_nan] = _NANS[dtype]
    return stored.view(np.uint8), _too_large(values, dtype)


def _rounded(values: Values, dtype: str) -> npt.NDArray[Any]:
    """Return the elements in another type; a NaN is any NaN."""
    if dtype == "F64":
        return values.astype(np.float64)
    if dtype == "F32":
        return values.astype(np.float32)
    if dtype == "F16":
        return values.astype(np.float16)
    near = _to_odd(values) if values.dtype == np.float64 else values.view(np.float32)
    if dtype == "BF16":
        import ml_dtypes

        return near.astype(ml_dtypes.bfloat16)
    # The upper half of the bits, made odd if the lower one has any, has more places than are kept.
    bits = near.view(np.uint32)
    halves = (bits >> np.uint32(16)).astype(np.uint16)
    halves |= (bits & np.uint32(0xFFFF)) != 0
    return np.take(_of_halves(dtype), halves)


def _to_odd(values: Values) -> Singles:
    """Return float64[n] as float32[n], rounded to odd: a second rounding then equals a single one.

    Toward zero, and the last bit is set if that is not exact (Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    near = values.astype(np.float32)
    wide = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(wide) > np.abs(values)
    bits |= wide != values
    return near


def _too_large(values: Values, dtype: str) -> int:
    if dtype == "F8_E4M3":
        return int(np.count_nonzero(np.abs(values) > _FITS_E4M3))
    limit = _TOO_LARGE.get(dtype)
    if limit is None or (dtype == "F32" and values.dtype == np.float32):
        return 0
    beyond = np.abs(values) >= limit
    return int(np.count_nonzero(beyond & np.isfinite(values))) if beyond.any() else 0


@functools.cache
def _eight_bits(dtype: str) -> Singles:
    """Return the float32 of each pattern of a type of 8 bits: float32[256]."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    found: Singles = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    return found


@functools.cache
def _of_halves(dtype: str) -> Bytes:
    """Return the pattern of 8 bits nearest to each bfloat16: uint8[65536]."""
    import ml_dtypes

    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    if dtype == "F8_E4M3":
        values = np.clip(values, -LARGEST_E4M3, LARGEST_E4M3)
    with np.errstate(invalid="ignore"):
        rounded = values.astype(np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype])))
    found: Bytes = rounded.view(np.uint8)
    return found


def singles(data: npt.NDArray[np.uint8], dtype: str, n: int) -> npt.NDArray[np.float32]:
    """Return the first n elements of type BF16, F16 or F32 as float32[n], exactly.

    data: their stored bytes, little-endian.  Of F32 the result is a view.
    """
    if dtype == "F32":
        return data[: 4 * n].view(np.float32)
    words = data[: 2 * n].view(np.uint16)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
