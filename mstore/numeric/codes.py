"""Element types that can be merged or cast: their names, sizes, and codes inside compiled code.

Needs no compiler: planning and statistics at rest use only this.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from mstore.terms.errors import BadRequest
from mstore.terms.phrases import Option, Phrase, call, phrase

BF16: Final = 0
F16: Final = 1
F32: Final = 2

CODES: Final[dict[str, int]] = {"BF16": BF16, "F16": F16, "F32": F32}
"""Maps an element type, as safetensors spells it, to its code inside compiled code."""

ITEMSIZES: Final[dict[str, int]] = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element."""

CASTS: Final[dict[str, str]] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The types that tensors can be cast to, and what torch calls them."""

EIGHT_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""The types of 8 bits that tensors can be cast from."""

CASTABLE: Final = EIGHT_BITS | CASTS.keys()
"""The types that tensors can be cast from."""

_SPELLINGS: Final = {
    **{name: dtype for dtype, name in CASTS.items()},
    "fp16": "F16",
    "fp32": "F32",
    "fp64": "F64",
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
        hint = phrase("{dtype}, float16 or float32", dtype=Option("dtype", "bfloat16"))
        if name in CASTS:
            later = call("cast", "REF", dtype=CASTS[name])
            hint = phrase("{now}; then {later}", now=hint, later=later)
        raise BadRequest(f"cannot write dtype {dtype!r}", hint=hint)
    return name


def cast_dtype(dtype: str) -> str:
    """Return an element type to cast to, as safetensors or torch spells it.  Raises BadRequest."""
    name = _SPELLINGS.get(dtype.lower(), dtype.upper())
    if name not in CASTS:
        first, *others = CASTS.values()
        raise BadRequest(
            f"cannot cast to dtype {dtype!r}",
            hint=phrase(
                "{dtype}, {others}", dtype=Option("dtype", first), others=", ".join(others)
            ),
        )
    return name


def cast_hint(dtypes: Collection[str], name: str, to: str = "BF16") -> Phrase | None:
    """Return the hint for elements without arithmetic here; None if they cannot be cast.

    dtypes: of those elements. name: of their model. to: the type that they should get.
    """
    if not CASTABLE.issuperset(dtypes):
        return None
    wanted = CASTS[to if to in CODES else "BF16"]
    return phrase("{cast} stores it in a type that can be", cast=call("cast", name, dtype=wanted))
