"""Scales of models with weights in 8 bits: which tensors they are, and what they multiply.

A weight X of 8 bits stands for float32(X) times a scale, rounded to float32: so the models' own
code and transformers read it.  The scale is a tensor beside it:

    X_scale_inv   DeepSeek and transformers ("fp8"): one for each block of rows and columns
    X_scale       compressed-tensors, FBGEMM, ModelOpt: one for all, for each row, or for each block
    scale_X       ComfyUI and musubi-tuner, beside `weight`: the same, or for each run of a row

Scales that mstore makes are ComfyUI's, one for all of a weight.  Despite its name, X_scale_inv is
a factor too.  Owns these names, what config.json says of them, and the product.  Does not own files
or rounding.

ComfyUI, and programs that write files for it, mark single files themselves:

    scaled_fp8               a tensor, which says that layers X have an X.scale_weight
    X.comfy_quant            the format of X.weight: JSON, as bytes
    _quantization_metadata   in the header: the formats of all layers, as JSON
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.numeric.casts import SIZES, widened
from mstore.numeric.codes import CASTABLE, EIGHT_BITS
from mstore.store.objects.shapes import EMBEDDINGS
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible
from mstore.terms.ids import Buffer
from mstore.terms.phrases import Option, few, phrase

HEADER_KEY: Final = "_quantization_metadata"
"""The key of a header's metadata."""

_SCALED: Final = "scaled_fp8"
_UNET: Final = "model.diffusion_model."
"""How the names of the tensors begin that a checkpoint of several models has scales of."""
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


Singles = npt.NDArray[np.float32]

QUANTIZATIONS: Final = ("quantization_config", "compression_config")
"""Keys of a config.json under which a quantization is stated; the second one is an old name."""

_PARTS: Final = ("text_config", "llm_config")
_SUFFIXES: Final = ("_scale_inv", "_scale")
_POINT: Final = "_zero_point"
_TURNED: Final = "scale_weight"
_SECOND: Final = "_scale_2"
"""Of scales in 8 bits, for weights in 4 bits."""
_OF_INPUTS: Final = (
    "input_scale",
    "activation_scale",
    "output_scale",
    "input_scale_ub",
    "scale_input",
)
"""Of what flows through a module; they stand beside its weight."""
_OF_CACHES: Final = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale")
"""Of what attention keeps."""
_WEIGHT: Final = "weight"
_TYPES: Final = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
_MATRIX: Final = 2
_NAMED: Final = 3


_LAYER: Final = re.compile(r".*\.\d+\..*\.weight")
_ROWS: Final = re.compile(r"(.*\.)?(\w*embed\w*|relative_attention_bias)\.weight")
"""Matrices of which rows are looked up."""


def scaled_weights(tensors: Mapping[str, Tensor]) -> tuple[list[str], str]:
    """Return the weights that files of ComfyUI have scales of, and how the mark of them is called.

    They are the matrices of numbered layers that are no embeddings; of a whole checkpoint, those of
    its diffusion model.
    """
    below = _UNET if any(name.startswith(_UNET) for name in tensors) else ""
    names = [
        name
        for name, record in tensors.items()
        if name.startswith(below) and len(record.shape) == _MATRIX and record.dtype in CASTABLE
        if _LAYER.fullmatch(name) and not (_ROWS.fullmatch(name) or EMBEDDINGS.search(name))
    ]
    return names, below + _SCALED


def scale_name(weight: str) -> str:
    """Return what ComfyUI calls the scale of a weight."""
    return weight.removesuffix(_WEIGHT) + _TURNED


class Quantization(msgspec.Struct, frozen=True):
    """What a config.json says of quantized weights.

    method: its name. block: rows and columns that share a scale, None if there are no blocks.
    """

    method: str
    block: tuple[int, int] | None


def quantization_of(config: Mapping[str, object]) -> Quantization | None:
    """Return what a config says, None if it states no quantization."""
    for fields in (config, *(config.get(key) for key in _PARTS)):
        for key in QUANTIZATIONS:
            told = fields.get(key) if isinstance(fields, Mapping) else None
            if isinstance(told, Mapping) and told:
                method = told.get("quant_method") or told.get("format")
                return Quantization(str(method or "an unknown method"), _block(told))
    return None


def _block(told: Mapping[Any, Any]) -> tuple[int, int] | None:
    """Return the block of `weight_block_size`, or the only one that groups of modules have."""
    given: list[Any] = [told.get("weight_block_size")]
    groups = told.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        given.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    found = {(one[0], one[1]) for one in given if _is_block(one)}
    return found.pop() if len(found) == 1 else None


def _is_block(given: object) -> bool:
    if not isinstance(given, list) or len(given) != _MATRIX:
        return False
    return all(type(one) is int and one > 0 for one in given)


class Scale(msgspec.Struct, frozen=True):
    """The scale of one weight, as a grid.

    name, record: its tensor. weight: [matrices, rows, columns] of the weight. grid: the same of the
    scale, its first number 1 if all matrices share it. block: rows and columns for each number.
    """

    name: str
    record: Tensor
    weight: tuple[int, int, int]
    grid: tuple[int, int, int]
    block: tuple[int, int]


class Scales(msgspec.Struct, frozen=True):
    """The scales of one model.

    of: by the names of weights. dropped: tensors that mean nothing once weights are not scaled.
    """

    of: Mapping[str, Scale]
    dropped: frozenset[str]


NO_SCALES: Final = Scales({}, frozenset())


def scales_of(
    tensors: Mapping[str, Tensor],
    stated: Quantization | None,
    where: str,
    marks: Marks = NO_MARKS,
    skipped: Collection[str] = (),
) -> Scales:
    """Find the scales of a model.

    tensors: by name. stated: what its config says. where: its name, for errors. marks: what its
    files say. skipped: tensors that stay as they are, so a mark alone asks for no scales of them.

    Raises Incompatible: scales are missing, are not of this form, or belong to other types.
    """
    weights = [
        name
        for name, record in tensors.items()
        if record.dtype in EIGHT_BITS and name not in marks.tensors
    ]
    known = {name: _names(name, tensors) for name in weights}
    if stated is not None:
        _require_known(tensors, known, stated, where)
    if marks is not NO_MARKS:
        _require_marked(tensors, known, marks, skipped, where)
    _require_one_scale(tensors, where)
    of = {}
    for name, own in known.items():
        if own:
            told = marks.of(name)
            block = None if stated is None else stated.block
            if told is not None and told.block is not None:
                block = told.block
            by_rows = told is not None and told.by_rows
            of[name] = _scale(name, tensors, own, block, where, by_rows=by_rows)
    dropped = {*marks.tensors, *(name for own in known.values() for name in own)}
    if of:
        for name in weights:
            dropped.update(_beside(name, tensors))
        dropped.update(name for name in tensors if name.endswith(_OF_CACHES))
    return Scales(of, frozenset(dropped))


def are_scales(names: Sequence[str], tensors: Mapping[str, str]) -> bool:
    """Return whether all these tensors are scales of weights of 8 bits, or go with them.

    tensors: the types of all tensors of the model, by name.
    """
    weights = [name for name, dtype in tensors.items() if dtype in EIGHT_BITS]
    known = {one for name in weights for one in (*_names(name, tensors), *_beside(name, tensors))}
    return bool(names) and all(
        name in known or name.endswith(_OF_CACHES) or is_mark(name) for name in names
    )


def _names(weight: str, tensors: Mapping[str, object]) -> list[str]:
    names = [weight + suffix for suffix in _SUFFIXES]
    stem = weight.removesuffix(_WEIGHT)
    if stem != weight:
        names.append(stem + _TURNED)
    return [name for name in names if name in tensors]


def _beside(weight: str, tensors: Mapping[str, object]) -> Iterator[str]:
    stem = weight.removesuffix(_WEIGHT)
    stem = stem if stem != weight else f"{weight}_"
    return (stem + one for one in _OF_INPUTS if stem + one in tensors)


def _require_known(
    tensors: Mapping[str, Tensor],
    known: Mapping[str, Sequence[str]],
    stated: Quantization,
    where: str,
) -> None:
    """Raise Incompatible for a quantization that is not, or not only, that of scaled 8 bits."""
    if not known:
        raise Incompatible(
            f"is quantized ({stated.method}) without weights in fp8: casting knows no other kind",
            where=where,
            hint="dequantize it with the program that quantized it",
        )
    lacking = [name for name, own in known.items() if not own]
    if lacking:
        raise Incompatible(
            f"its config.json says that it is quantized ({stated.method}), and there are no scales "
            f"of {few(lacking, _NAMED)}",
            where=where,
        )
    _require_no_others(tensors, known, where)


def _require_marked(
    tensors: Mapping[str, Tensor],
    known: Mapping[str, Sequence[str]],
    marks: Marks,
    skipped: Collection[str],
    where: str,
) -> None:
    """Raise Incompatible unless each weight that is marked is one of 8 bits with a scale."""
    lacking = [layer for layer in marks.formats if not known.get(f"{layer}.{_WEIGHT}")]
    if lacking:
        raise Incompatible(
            f"says that layers are quantized as {marks.formats[lacking[0]].name}, and there are no "
            f"weights in fp8 with scales of {few(lacking, _NAMED)}",
            where=where,
        )
    if marks.scaled and not any(known.values()):
        raise Incompatible(
            f"says that its weights have scales ({min(marks.scaled)}), and there are none",
            where=where,
        )
    for mark, below in sorted(marks.scaled.items()):
        # Norms and biases, which have one dimension, are stored without scales.
        lacking = [
            name
            for name, own in known.items()
            if name.startswith(below) and not own and name not in skipped
            if len(tensors[name].shape) >= _MATRIX
        ]
        if lacking:
            raise Incompatible(
                f"says that its weights have scales ({mark}), and there are none of "
                f"{few(lacking, _NAMED)}",
                where=where,
                hint=phrase("{skip} leaves them as they are", skip=Option("skip", tuple(lacking))),
            )
    _require_no_others(tensors, known, where)


def _require_one_scale(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise Incompatible for scales that have scales."""
    second = [name for name in tensors if name.endswith(_WEIGHT + _SECOND)]
    if second:
        raise Incompatible(
            f"has scales of scales, as weights in 4 bits have: {few(second, _NAMED)}",
            where=where,
            hint="dequantize it with the program that quantized it",
        )


def _require_no_others(
    tensors: Mapping[str, Tensor], known: Mapping[str, Sequence[str]], where: str
) -> None:
    """Raise Incompatible for scales of weights that are not in 8 bits."""
    others = [name for name in tensors if name not in known and _names(name, tensors)]
    if others:
        kinds = ", ".join(sorted({tensors[name].dtype for name in others}))
        raise Incompatible(
            f"has scales of {kinds} elements: casting knows those of fp8 alone: "
            f"{few(others, _NAMED)}",
            where=where,
            hint="dequantize it with the program that quantized it",
        )


def _scale(
    name: str,
    tensors: Mapping[str, Tensor],
    own: Sequence[str],
    block: tuple[int, int] | None,
    where: str,
    *,
    by_rows: bool,
) -> Scale:
    """Return the scale of a weight. Raises Incompatible for one of another form."""
    if len(own) > 1:
        raise Incompatible(f"{name} has two scales: {', '.join(own)}", where=where)
    if name + _POINT in tensors:
        raise Incompatible(f"{name} has a zero point: casting knows scales alone", where=where)
    weight, record = tensors[name], tensors[own[0]]
    if record.dtype not in _TYPES:
        raise Incompatible(
            f"{own[0]} has elements of {record.dtype}; those of scales are "
            f"{', '.join(sorted(_TYPES))}",
            where=where,
        )
    *matrices, rows, columns = (1,) * (_MATRIX - len(weight.shape)) + weight.shape
    if math.prod(record.shape) == 1:
        sides = (math.prod(matrices), rows, columns)
        return Scale(own[0], record, sides, (1, 1, 1), (rows, columns))
    shape = record.shape
    by_rows = by_rows or own[0].endswith(_TURNED)
    if by_rows and shape == (rows,) and len(weight.shape) == _MATRIX:
        shape = (rows, 1)
    elif len(weight.shape) == _MATRIX and shape[:1] == (rows,) and shape[2:] == (1,):
        # Runs of each row, all of one length: without a remainder, only one length fits.
        runs = shape[1]
        if runs and columns % runs == 0:
            shape, block = shape[:2], (1, columns // runs)
    if len(shape) == len(weight.shape) >= _MATRIX:
        *leading, down, across = shape
        shares = all(one == 1 for one in leading)
        lengths = [
            _length(side, count, None if block is None else block[axis])
            for axis, (side, count) in enumerate(((rows, down), (columns, across)))
        ]
        if (shares or leading == matrices) and lengths[0] and lengths[1]:
            return Scale(
                own[0],
                record,
                (math.prod(matrices), rows, columns),
                (math.prod(leading), down, across),
                (lengths[0], lengths[1]),
            )
    told = "nothing states its blocks"
    if block is not None:
        told = f"its blocks are stated as {list(block)}"
    raise Incompatible(
        f"{own[0]} has shape {list(record.shape)} for a weight of {list(weight.shape)}, and {told}",
        where=where,
    )


def _length(side: int, count: int, block: int | None) -> int:
    """Return how many elements along a side share a number, of which there are `count`; 0 if none
    fits."""
    if count == 1:
        return max(1, side)
    if block is not None and count == -(-side // block):
        return block
    return int(count == side)


def apply(values: Singles, start: int, scale: Scale, stored: Buffer) -> None:
    """Multiply float32[n], elements of a weight from `start` in row-major order, by their scales.

    stored: the bytes of the whole scale.  Raises Incompatible for a scale that is not finite.
    """
    columns = scale.weight[2]
    end = start + values.size
    first, last = -(-start // columns), end // columns
    if first > last:
        # Within one row.
        _apply_to_part(values, start, scale, stored)
        return
    head, body = first * columns - start, last * columns - start
    if head:
        _apply_to_part(values[:head], start, scale, stored)
    if first < last:
        _apply_to_rows(values[head:body].reshape(-1, columns), first, scale, stored)
    if body < values.size:
        _apply_to_part(values[body:], last * columns, scale, stored)


def _apply_to_part(values: Singles, start: int, scale: Scale, stored: Buffer) -> None:
    """Do this for a part of one row."""
    row, column = divmod(start, scale.weight[2])
    at = np.arange(column, column + values.size) // scale.block[1]
    numbers = _numbers(np.array([row]), slice(at[0], at[-1] + 1), scale, stored)[0]
    values *= numbers[at - at[0]]


def _apply_to_rows(values: Singles, first: int, scale: Scale, stored: Buffer) -> None:
    """Do this for whole rows, float32[rows, columns]."""
    numbers = _numbers(np.arange(first, first + len(values)), slice(None), scale, stored)
    across = scale.block[1]
    whole = values.shape[1] // across
    # Splitting an axis makes a view.
    blocks = values[:, : whole * across].reshape(len(values), whole, across)
    blocks *= numbers[:, :whole, None]
    rest = values[:, whole * across :]
    rest *= numbers[:, whole:]


def _numbers(rows: npt.NDArray[np.int64], columns: slice, scale: Scale, stored: Buffer) -> Singles:
    """Return the scales of rows, counted through all matrices: float32[rows, columns of the grid].

    columns: of the grid.
    """
    matrix, row = np.divmod(rows, scale.weight[1])
    matrices, down, across = scale.grid
    at = row // scale.block[0]
    if matrices > 1:
        at += matrix * down
    dtype = scale.record.dtype
    bits = np.frombuffer(stored, dtype=np.uint8).reshape(matrices * down, across, SIZES[dtype])
    wanted = np.ascontiguousarray(bits[at, columns])
    found = widened(wanted.reshape(-1), dtype).reshape(wanted.shape[:2])
    if not np.isfinite(found).all():
        raise Incompatible("has elements that are not finite", where=scale.name)
    return found.astype(np.float32, copy=False)
