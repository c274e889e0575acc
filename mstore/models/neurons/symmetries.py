"""Symmetries: what of a model may be in another order, and on which axes of its tensors that is.

One row for each kind of tensor of an architecture.  Every entry was measured: with generic norms
and biases, the model computes the same (conformance/test_permute.py).

    residual          channels of the residual stream; a channel may also have the other sign, where
                      norms are RMSNorm: their weights move, and have no sign
    layers.N.neurons  of the MLP
    layers.N.heads    query heads, within the group of a key head, and these with their groups

Dimensions within a head stay: position encodings and q_norm/k_norm know them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from mstore.models.optional import is_optional
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible

RESIDUAL: Final = "residual"
NEURONS: Final = "neurons"
HEADS: Final = "heads"


class Axis(msgspec.Struct, frozen=True):
    """What an axis of a tensor is an axis of.

    symmetry: the name. is_signed: signs count on it. of_keys: it has the key heads. copies: how
    often it has all, one after the other.
    """

    symmetry: str
    is_signed: bool = False
    of_keys: bool = False
    copies: int = 1


Axes = tuple[Axis | None, ...]
"""Of one tensor; None: an axis that stays."""


class Symmetry(msgspec.Struct, frozen=True):
    """A set of channels, neurons or heads of one place.

    size: how many. keys: of heads, how many key heads; 0 of others.  is_signed: whether any of
    their axes is.
    """

    size: int
    keys: int
    is_signed: bool


class _Architecture(msgspec.Struct, frozen=True):
    """An architecture.

    prefix: what names may begin with. layer: what comes before a layer's number. heads, keys:
    entries of its config. tensors: what their axes are, by name without the prefix and with * for a
    layer's number; () is a tensor that stays.
    """

    prefix: str
    layer: str
    heads: str
    keys: str | None
    tensors: Mapping[str, Axes]


_SIGNED_STREAM: Final = Axis(RESIDUAL, is_signed=True)
_STREAM: Final = Axis(RESIDUAL)
_NEURONS: Final = Axis(NEURONS)
_HEADS: Final = Axis(HEADS)
_KEYS: Final = Axis(HEADS, of_keys=True)
_FUSED: Final = Axis(HEADS, copies=3)

_LLAMA: Final = _Architecture(
    prefix="model.",
    layer="layers.",
    heads="num_attention_heads",
    keys="num_key_value_heads",
    tensors={
        "embed_tokens.weight": (None, _SIGNED_STREAM),
        "layers.*.input_layernorm.weight": (_STREAM,),
        "layers.*.self_attn.q_proj.weight": (_HEADS, _SIGNED_STREAM),
        "layers.*.self_attn.q_proj.bias": (_HEADS,),
        "layers.*.self_attn.k_proj.weight": (_KEYS, _SIGNED_STREAM),
        "layers.*.self_attn.k_proj.bias": (_KEYS,),
        "layers.*.self_attn.v_proj.weight": (_KEYS, _SIGNED_STREAM),
        "layers.*.self_attn.v_proj.bias": (_KEYS,),
        "layers.*.self_attn.o_proj.weight": (_SIGNED_STREAM, _HEADS),
        "layers.*.self_attn.o_proj.bias": (_SIGNED_STREAM,),
        "layers.*.post_attention_layernorm.weight": (_STREAM,),
        "layers.*.mlp.gate_proj.weight": (_NEURONS, _SIGNED_STREAM),
        "layers.*.mlp.gate_proj.bias": (_NEURONS,),
        "layers.*.mlp.up_proj.weight": (_NEURONS, _SIGNED_STREAM),
        "layers.*.mlp.up_proj.bias": (_NEURONS,),
        "layers.*.mlp.down_proj.weight": (_SIGNED_STREAM, _NEURONS),
        "layers.*.mlp.down_proj.bias": (_SIGNED_STREAM,),
        "norm.weight": (_STREAM,),
        "lm_head.weight": (None, _SIGNED_STREAM),
        "score.weight": (None, _SIGNED_STREAM),
    },
)

_QWEN3: Final = replace(
    _LLAMA,
    tensors={
        **_LLAMA.tensors,
        "layers.*.self_attn.q_norm.weight": (),
        "layers.*.self_attn.k_norm.weight": (),
    },
)

_GPT2: Final = _Architecture(
    prefix="transformer.",
    layer="h.",
    heads="n_head",
    keys=None,
    # Its matrices are inputs by outputs.
    tensors={
        "wte.weight": (None, _STREAM),
        "wpe.weight": (None, _STREAM),
        "h.*.ln_1.weight": (_STREAM,),
        "h.*.ln_1.bias": (_STREAM,),
        "h.*.attn.c_attn.weight": (_STREAM, _FUSED),
        "h.*.attn.c_attn.bias": (_FUSED,),
        "h.*.attn.c_proj.weight": (_HEADS, _STREAM),
        "h.*.attn.c_proj.bias": (_STREAM,),
        # The causal mask, which old files have.
        "h.*.attn.bias": (),
        "h.*.attn.masked_bias": (),
        "h.*.ln_2.weight": (_STREAM,),
        "h.*.ln_2.bias": (_STREAM,),
        "h.*.mlp.c_fc.weight": (_STREAM, _NEURONS),
        "h.*.mlp.c_fc.bias": (_NEURONS,),
        "h.*.mlp.c_proj.weight": (_NEURONS, _STREAM),
        "h.*.mlp.c_proj.bias": (_STREAM,),
        "ln_f.weight": (_STREAM,),
        "ln_f.bias": (_STREAM,),
        "lm_head.weight": (None, _STREAM),
        "score.weight": (None, _STREAM),
    },
)

_VIT: Final = _Architecture(
    prefix="vit.",
    layer="encoder.layer.",
    heads="num_attention_heads",
    keys=None,
    tensors={
        "embeddings.cls_token": (None, None, _STREAM),
        "embeddings.mask_token": (None, None, _STREAM),
        "embeddings.position_embeddings": (None, None, _STREAM),
        "embeddings.patch_embeddings.projection.weight": (_STREAM, None, None, None),
        "embeddings.patch_embeddings.projection.bias": (_STREAM,),
        "encoder.layer.*.layernorm_before.weight": (_STREAM,),
        "encoder.layer.*.layernorm_before.bias": (_STREAM,),
        "encoder.layer.*.attention.attention.query.weight": (_HEADS, _STREAM),
        "encoder.layer.*.attention.attention.query.bias": (_HEADS,),
        "encoder.layer.*.attention.attention.key.weight": (_HEADS, _STREAM),
        "encoder.layer.*.attention.attention.key.bias": (_HEADS,),
        "encoder.layer.*.attention.attention.value.weight": (_HEADS, _STREAM),
        "encoder.layer.*.attention.attention.value.bias": (_HEADS,),
        "encoder.layer.*.attention.output.dense.weight": (_STREAM, _HEADS),
        "encoder.layer.*.attention.output.dense.bias": (_STREAM,),
        "encoder.layer.*.layernorm_after.weight": (_STREAM,),
        "encoder.layer.*.layernorm_after.bias": (_STREAM,),
        "encoder.layer.*.intermediate.dense.weight": (_NEURONS, _STREAM),
        "encoder.layer.*.intermediate.dense.bias": (_NEURONS,),
        "encoder.layer.*.output.dense.weight": (_STREAM, _NEURONS),
        "encoder.layer.*.output.dense.bias": (_STREAM,),
        "layernorm.weight": (_STREAM,),
        "layernorm.bias": (_STREAM,),
        "pooler.dense.weight": (None, _STREAM),
        "pooler.dense.bias": (),
        "classifier.weight": (None, _STREAM),
        "classifier.bias": (),
    },
)

ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "vit": _VIT,
}
"""By the config's `model_type`."""


class Symmetries(msgspec.Struct, frozen=True):
    """Those of one model: by name, and the axes of each tensor that has some.

    Residual stream first, then layer by layer: the order in which they are matched.
    """

    named: Mapping[str, Symmetry]
    axes: Mapping[str, Axes]


def symmetries_of(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> Symmetries:
    """Return the symmetries of a model of these tensors.

    Raises Incompatible for an architecture, a tensor or a shape that is not known here.
    """
    kind = config.get("model_type")
    found = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if found is None:
        told = "its config.json states no architecture" if kind is None else f"it is a {kind}"
        raise Incompatible(
            f"{told}: symmetries are known of {', '.join(ARCHITECTURES)}", where=where
        )
    heads = _count(config, found.heads, where)
    keys = heads if found.keys is None else _count(config, found.keys, where, heads)
    if heads % keys:
        raise Incompatible(f"{heads} heads are no groups of {keys} key heads", where=where)
    axes: dict[str, Axes] = {}
    named: dict[str, Symmetry] = {}
    for name, tensor in tensors.items():
        own = _axes(found, kind, name, tensor, where)
        if own:
            axes[name] = own
        for axis, length in zip(own, tensor.shape, strict=bool(own)):
            if axis is None:
                continue
            is_of_heads = axis.symmetry.endswith(HEADS)
            count = keys if axis.of_keys else heads if is_of_heads else length
            one = Symmetry(
                heads if is_of_heads else length, keys if is_of_heads else 0, axis.is_signed
            )
            known = named.setdefault(axis.symmetry, one)
            named[axis.symmetry] = replace(known, is_signed=known.is_signed or one.is_signed)
            if known.size != one.size or length % (axis.copies * count):
                raise Incompatible(
                    f"tensor {name} has {length} in a place of {known.size} {axis.symmetry}",
                    where=where,
                )
    order = sorted(named, key=lambda name: (name != RESIDUAL, _layer(name), name))
    return Symmetries({name: named[name] for name in order}, axes)


def _count(config: Mapping[str, Any], key: str, where: str, otherwise: int | None = None) -> int:
    value = config.get(key, otherwise)
    if type(value) is not int or value < 1:
        raise Incompatible(f"its config.json states no {key}", where=where)
    return value


def _axes(found: _Architecture, kind: object, name: str, tensor: Tensor, where: str) -> Axes:
    """Return the axes of a tensor, none if it stays.  Raises Incompatible for one of no place."""
    own = name.removeprefix(found.prefix)
    layer = re.match(rf"{re.escape(found.layer)}(0|[1-9][0-9]*)\.", own)
    axes = found.tensors.get(own if layer is None else f"{found.layer}*.{own[layer.end() :]}")
    if axes is None and is_optional(name, tensor.dtype):
        return ()
    if axes is None or len(axes) not in (0, len(tensor.shape)):
        raise Incompatible(
            f"tensor {name} of {len(tensor.shape)} dimensions has no place in a {kind}", where=where
        )
    if layer is None:
        return axes
    return tuple(
        axis
        if axis is None or axis.symmetry == RESIDUAL
        else replace(axis, symmetry=f"layers.{layer[1]}.{axis.symmetry}")
        for axis in axes
    )


def _layer(name: str) -> int:
    return 0 if name == RESIDUAL else int(name.split(".")[1])
