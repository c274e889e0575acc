"""The dtypes of safetensors 0.8, and the bytes that a tensor of a dtype and shape takes.

Owns names and widths only. Code that computes with the bits owns their meaning: to a checkpoint
every dtype is bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from mstore.terms.errors import BadCheckpoint

# A larger tensor exceeds every offset, size and seek of the operating system.
MAX_TENSOR_BITS = 2**63 - 1


class DType(msgspec.Struct, frozen=True):
    """An element type as safetensors names it; `bits` per element, packed without padding."""

    name: str
    bits: int
    floating: bool


def _table(*dtypes: DType) -> Mapping[str, DType]:
    return MappingProxyType({dtype.name: dtype for dtype in dtypes})


# `floating` is True for real floating point. C64 is complex (two F32) and F8_E8M0 is a bare scale:
# neither can be added, trimmed or averaged as a real number, so neither counts.
DTYPES: Mapping[str, DType] = _table(
    DType("BOOL", 8, False),
    DType("F4", 4, True),
    DType("F6_E2M3", 6, True),
    DType("F6_E3M2", 6, True),
    DType("U8", 8, False),
    DType("I8", 8, False),
    DType("F8_E5M2", 8, True),
    DType("F8_E4M3", 8, True),
    DType("F8_E8M0", 8, False),
    DType("F8_E4M3FNUZ", 8, True),
    DType("F8_E5M2FNUZ", 8, True),
    DType("I16", 16, False),
    DType("U16", 16, False),
    DType("F16", 16, True),
    DType("BF16", 16, True),
    DType("I32", 32, False),
    DType("U32", 32, False),
    DType("F32", 32, True),
    DType("C64", 64, False),
    DType("F64", 64, True),
    DType("I64", 64, False),
    DType("U64", 64, False),
)


def nbytes(dtype: DType | str, shape: Sequence[int]) -> int:
    """Return the bytes of a packed row-major tensor; () is one element, any 0 makes it 0.

    Refuses shapes whose non-zero dimensions alone would not fit 63 bits of bits. So [0, 2**62,
    2**62] is refused although it is empty, as by numpy, because code that multiplies from the left
    would overflow. Raises BadCheckpoint for an unknown dtype, a negative or absurd shape, and a
    dtype narrower than a byte (F4, F6) whose elements do not end on a whole byte.
    """
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None:
        raise BadCheckpoint(f"unknown dtype {str(dtype)[:40]!r}")
    if shape and min(shape) < 0:
        raise BadCheckpoint("a dimension of its shape is negative")
    bits = math.prod(shape) * kind.bits
    if (bits or math.prod(filter(None, shape)) * kind.bits) > MAX_TENSOR_BITS:
        raise BadCheckpoint("its shape is absurd: the size overflows 63 bits")
    whole, rest = divmod(bits, 8)
    if rest:
        raise BadCheckpoint(f"its {kind.name} elements do not end on a whole byte")
    return whole
