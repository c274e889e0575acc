"""Element types that can be merged: their names, sizes, and codes inside compiled code.

Needs no compiler: planning and statistics at rest use only this.
"""

from __future__ import annotations

from typing import Final

from mstore.errors import BadRequest
from mstore.phrases import Option, phrase

BF16: Final = 0
F16: Final = 1
F32: Final = 2

CODES: Final[dict[str, int]] = {"BF16": BF16, "F16": F16, "F32": F32}
"""Maps an element type, as safetensors spells it, to its code inside compiled code."""

ITEMSIZES: Final[dict[str, int]] = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element."""


_SPELLINGS: Final = {
    "bfloat16": "BF16",
    "float16": "F16",
    "fp16": "F16",
    "float32": "F32",
    "fp32": "F32",
}

INFINITIES: Final[dict[str, int]] = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""The bits of positive infinity."""

LARGEST: Final[dict[str, float]] = {
    "BF16": float.fromhex("0x1.fep+127"),
    "F16": 65504.0,
    "F32": float.fromhex("0x1.fffffep+127"),
}
"""The largest finite element."""


def can_overflow(base: str, out: str) -> bool:
    """Return whether to check elements of a merge into type `out` for overflow.

    A type that holds everything that the base's type does overflows only if sums do; with the
    values in real models that concerns only float16.
    """
    return out == "F16" or LARGEST[out] < LARGEST[base]


def dtype_code(dtype: str) -> int:
    """Return the code of a mergeable element type. Raises BadRequest for any other."""
    try:
        return CODES[dtype]
    except KeyError:
        raise BadRequest(
            f"cannot merge elements of type {dtype}; types that can be: {', '.join(CODES)}"
        ) from None


def output_dtype(dtype: str) -> str:
    """Return an element type to write, as safetensors or torch spells it.  Raises BadRequest."""
    name = _SPELLINGS.get(dtype.lower(), dtype.upper())
    if name not in CODES:
        raise BadRequest(
            f"cannot write dtype {dtype!r}",
            hint=phrase("{dtype}, float16 or float32", dtype=Option("dtype", "bfloat16")),
        )
    return name
