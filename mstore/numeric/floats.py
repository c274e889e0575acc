"""Conversions between stored element types (bf16, fp16, fp32) and float32 bit patterns.

Owns the two conversions, as numba functions that the kernels inline; `codes` owns the element types
themselves. Does not own any arithmetic on values.

Everything works on the *bits* of a float32 in a uint32, so that a NaN never passes through
floating-point hardware and the results are the same on every machine: widening is exact and keeps
sign and payload of a NaN; narrowing rounds to nearest, ties to even, and overflows to infinity
(IEEE 754-2019, 4.3.1 and 7.4). Compiled functions keep no state and release the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba.extending import intrinsic

from mstore.numeric.codes import BF16, CODES, F16, F32, ITEMSIZES, dtype_code
from mstore.numeric.compiling import compiled, inlined

__all__ = [
    "BF16",
    "CODES",
    "F16",
    "F32",
    "ITEMSIZES",
    "QUIET_NAN",
    "bfloat_to_bits",
    "bits_float",
    "bits_to_bfloat",
    "bits_to_half",
    "dtype_code",
    "float_bits",
    "fused",
    "half_to_bits",
    "load_bits",
    "quieten",
    "quieten_all",
    "store_bits",
]

QUIET_NAN: Final = np.uint32(0x7FC00000)
"""The NaN of every arithmetic result: payload and sign of others differ between machines."""


# Operations on numba's 32-bit integers give 64-bit ones; the explicit np.uint32 casts back so that
# LLVM keeps eight lanes per 256-bit vector.


@inlined
def float_bits(value: Any) -> Any:
    """Return the bits of one float32."""
    return np.float32(value).view(np.uint32)


@inlined
def bits_float(bits: Any) -> Any:
    """Return the float32 of these bits."""
    return np.uint32(bits).view(np.float32)


def _fused(_context: Any, _product: Any, _factor: Any, _addend: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return numba.float32(numba.float32, numba.float32, numba.float32), generate


fused: Final[Any] = intrinsic(_fused)
"""fused(a, b, c): a * b + c of float32, rounded once (IEEE 754-2019, 5.4.1).

One instruction if the processor has it, else a call of the C library: the same bits.
"""


@inlined
def bfloat_to_bits(stored: Any) -> Any:
    """Return the float32 bits of one bf16 pattern."""
    return np.uint32(np.uint32(stored) << np.uint32(16))


@inlined
def half_to_bits(stored: Any) -> Any:
    """Return the float32 bits of one fp16 pattern.

    A subnormal is a small integer times 2^-24; the other cases only shift the exponent.
    """
    sign = np.uint32((np.uint32(stored) & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(stored) & np.uint32(0x7FFF))
    shifted = np.uint32(magnitude << np.uint32(13))
    small = float_bits(np.float32(np.int32(magnitude)) * np.float32(2.0**-24))
    normal = np.uint32(shifted + np.uint32(112 << 23))
    special = np.uint32(shifted | np.uint32(0x7F800000))
    bits = small if magnitude < np.uint32(0x0400) else normal
    bits = special if magnitude >= np.uint32(0x7C00) else bits
    return np.uint32(bits | sign)


@inlined
def bits_to_bfloat(bits: Any) -> Any:
    """Return the bf16 pattern nearest to a float32; a NaN must be exact in bf16."""
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@inlined
def bits_to_half(bits: Any) -> Any:
    """Return the fp16 pattern nearest to a float32; a NaN must be exact in fp16.

    Below 2^-14, adding 0.5 makes the hardware round at the last place of a subnormal half. Above,
    adding just under half of the last place kept (or half, if that is odd) rounds.
    """
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(
        np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    )
    small = np.uint32(float_bits(bits_float(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000))
    special = np.uint32(
        np.uint32(0x7C00)
        | (
            np.uint32((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
            if magnitude > np.uint32(0x7F800000)
            else np.uint32(0)
        )
    )
    pattern = small if magnitude < np.uint32(0x38800000) else rounded
    pattern = special if magnitude >= np.uint32(0x47800000) else pattern
    return np.uint16(pattern | sign)


# Loops run over slices, from zero: an index that might be negative would be wrapped around at every
# element, and the loop would not be vectorised.


@compiled
def load_bits(code: int, stored: Any, start: int, count: int, bits: Any, at: int) -> None:
    """Widen elements start..start+count of the bytes `stored` into bits[at : at+count]."""
    target = bits[at : at + count]
    if code == BF16:
        halves = stored[2 * start : 2 * (start + count)].view(np.uint16)
        for i in range(count):
            target[i] = bfloat_to_bits(halves[i])
    elif code == F16:
        halves = stored[2 * start : 2 * (start + count)].view(np.uint16)
        for i in range(count):
            target[i] = half_to_bits(halves[i])
    else:
        words = stored[4 * start : 4 * (start + count)].view(np.uint32)
        for i in range(count):
            target[i] = words[i]


@compiled
def store_bits(code: int, bits: Any, at: int, count: int, stored: Any, start: int) -> None:
    """Narrow bits[at : at+count] into elements start..start+count of the bytes `stored`.

    A NaN among them must be exact in the element type `code` (`quieten` makes any so).
    """
    source = bits[at : at + count]
    if code == BF16:
        halves = stored[2 * start : 2 * (start + count)].view(np.uint16)
        for i in range(count):
            halves[i] = bits_to_bfloat(source[i])
    elif code == F16:
        halves = stored[2 * start : 2 * (start + count)].view(np.uint16)
        for i in range(count):
            halves[i] = bits_to_half(source[i])
    else:
        words = stored[4 * start : 4 * (start + count)].view(np.uint32)
        for i in range(count):
            words[i] = source[i]


@inlined
def quieten(bits: Any) -> Any:
    """Return the same float32, or QUIET_NAN for any NaN."""
    nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return QUIET_NAN if nan else bits


@compiled
def quieten_all(bits: Any) -> None:
    """Make each NaN of an array QUIET_NAN."""
    for i in range(bits.size):
        bits[i] = quieten(bits[i])
