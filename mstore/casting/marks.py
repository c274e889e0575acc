"""Marks: what files of weights say themselves of their scales, where no config.json does.

ComfyUI, and programs that write files for it, mark single files:

    scaled_fp8               a tensor, which says that layers X have an X.scale_weight
    X.comfy_quant            the format of X.weight: JSON, as bytes
    _quantization_metadata   in the header: the formats of all layers, as JSON

Owns these names and what the JSON says.  Does not own the scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from mstore.errors import Incompatible

HEADER_KEY: Final = "_quantization_metadata"
"""The key of a header's metadata."""

_SCALED: Final = "scaled_fp8"
_OF_LAYER: Final = ".comfy_quant"
_FORMAT: Final = re.compile(r"float8_(e4m3fn|e5m2)(_rowwise|_blockwise|_block3d)?")
"""The formats whose weights are the elements times the scales; others are packed or permuted."""


class Format(msgspec.Struct, frozen=True):
    """How a layer is quantized. block: rows and columns that share a scale, if it says so."""

    name: str
    block: tuple[int, int] | None

    @property
    def by_rows(self) -> bool:
        """Return whether each row has a scale."""
        return self.name.endswith("_rowwise")


class Marks(msgspec.Struct, frozen=True):
    """The marks of some files.

    formats: by layer. tensors: the names of marks. scaled: marks which say that weights have
    scales, and what the names of these begin with.
    """

    formats: dict[str, Format]
    tensors: frozenset[str]
    scaled: dict[str, str]

    def of(self, weight: str) -> Format | None:
        """Return the format of a weight, by its name."""
        return self.formats.get(weight.removesuffix(".weight"))


NO_MARKS: Final = Marks({}, frozenset(), {})


def marks_of(
    names: Iterable[str], read: Callable[[str], bytes], headers: Iterable[str], where: str
) -> Marks:
    """Return the marks of files.

    names: their tensors. read: returns the bytes of one, limited. headers: the texts of HEADER_KEY.
    where: the name of the model, for errors.

    Raises Incompatible for marks that say nothing, and for formats that casting does not know.
    """
    formats: dict[str, Format] = {}
    tensors = set()
    scaled = {}
    for text in headers:
        told = _object(text, f"{HEADER_KEY} of its header", where).get("layers")
        if not isinstance(told, dict):
            raise _unknown(f"{HEADER_KEY} of its header", where)
        formats.update((layer, _format(one, layer, where)) for layer, one in told.items())
    for name in names:
        if name.endswith(_OF_LAYER):
            tensors.add(name)
            layer = name.removesuffix(_OF_LAYER)
            formats[layer] = _format(_object(read(name), name, where), layer, where)
        elif name == _SCALED or name.endswith(f".{_SCALED}"):
            tensors.add(name)
            scaled[name] = name.removesuffix(_SCALED)
    if not formats and not tensors:
        return NO_MARKS
    return Marks(formats, frozenset(tensors), scaled)


def is_mark(name: str) -> bool:
    """Return whether a tensor of this name is a mark."""
    return name.endswith((_OF_LAYER, f".{_SCALED}")) or name == _SCALED


def _object(text: str | bytes, what: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _unknown(what, where) from None
    if not isinstance(found, dict):
        raise _unknown(what, where)
    return found


def _unknown(what: str, where: str) -> Incompatible:
    return Incompatible(f"{what[:200]} does not say how weights are quantized", where=where)


def _format(told: object, layer: str, where: str) -> Format:
    name = told.get("format") if isinstance(told, dict) else None
    if not isinstance(told, dict) or not isinstance(name, str):
        raise _unknown(layer, where)
    if not _FORMAT.fullmatch(name):
        raise Incompatible(
            f"{layer[:200]} is quantized as {name[:40]}: casting knows float8 with scales alone",
            where=where,
            hint="dequantize it with the program that quantized it",
        )
    size = told.get("group_size", told.get("block_size"))
    match size if isinstance(size, list) else [size, size]:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Format(name, (rows, columns))
    return Format(name, None)
