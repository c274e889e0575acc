"""Modules of image models, by all the names that adapters have for them.

One model is written with two sets of names: its authors' (one file: `input_blocks.1.1...`,
`double_blocks.0.img_attn.qkv`), and those of diffusers (`down_blocks.0.attentions.0...`,
`transformer_blocks.0.attn.to_q`), where a matrix of the authors may be several.  An adapter that
was trained with one set is applied to the other.  The rules are those of the conversions that
diffusers 0.42 and sd-scripts publish.  Reads names and shapes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from mstore.models.adapters.keys import DENOISER, TEXT, TEXT_2, TEXT_3

_WEIGHT: Final = ".weight"
_FUSED: Final = ".in_proj_weight"


class Place(NamedTuple):
    """Where a module's weight is in a base.

    tensor: its name. at, rows: of the tensor, the rows that are the module's. first: of the
    module's rows, the one that comes there; of all modules but parts of others, 0.  rows 0: all.
    """

    tensor: str
    at: int = 0
    rows: int = 0
    first: int = 0


_MODELS: Final[Mapping[str, tuple[str, ...]]] = {
    "model.diffusion_model.": (DENOISER,),
    "diffusion_model.": (DENOISER,),
    "unet:": (DENOISER,),
    "transformer:": (DENOISER,),
    "cond_stage_model.transformer.": (TEXT,),
    "cond_stage_model.model.": (TEXT,),
    "conditioner.embedders.0.transformer.": (TEXT,),
    "conditioner.embedders.0.model.": (TEXT_2,),
    "conditioner.embedders.1.model.": (TEXT_2,),
    "text_encoders.clip_l.transformer.": (TEXT,),
    "text_encoders.clip_g.transformer.": (TEXT_2,),
    "text_encoders.t5xxl.transformer.": (TEXT_3,),
    "text_encoder:": (TEXT,),
    "text_encoder_2:": (TEXT_2,),
    "text_encoder_3:": (TEXT_3,),
    "first_stage_model.": (),
    "vae.": (),
    "vae:": (),
}
"""Which model a tensor of a file of several models is of, by the begin of its name."""


def _unet_blocks() -> Iterator[tuple[str, str]]:
    """Yield begins of paths in a UNet of Stable Diffusion: its authors', and those of diffusers."""
    for block in range(4):
        for layer in range(2):
            number = 3 * block + layer + 1
            yield f"input_blocks.{number}.0.", f"down_blocks.{block}.resnets.{layer}."
            yield f"input_blocks.{number}.1.", f"down_blocks.{block}.attentions.{layer}."
        yield f"input_blocks.{3 * block + 3}.0.op", f"down_blocks.{block}.downsamplers.0.conv"
        for layer in range(3):
            number = 3 * block + layer
            yield f"output_blocks.{number}.0.", f"up_blocks.{block}.resnets.{layer}."
            yield f"output_blocks.{number}.1.", f"up_blocks.{block}.attentions.{layer}."
        for place in (1, 2):
            after = f"output_blocks.{3 * block + 2}.{place}.conv"
            yield after, f"up_blocks.{block}.upsamplers.0.conv"
    yield "middle_block.0.", "mid_block.resnets.0."
    yield "middle_block.1.", "mid_block.attentions.0."
    yield "middle_block.2.", "mid_block.resnets.1."
    yield "input_blocks.0.0", "conv_in"
    yield "out.0", "conv_norm_out"
    yield "out.2", "conv_out"
    yield "time_embed.0", "time_embedding.linear_1"
    yield "time_embed.2", "time_embedding.linear_2"
    yield "label_emb.0.0", "add_embedding.linear_1"
    yield "label_emb.0.2", "add_embedding.linear_2"


_UNET: Final = tuple(_unet_blocks())
_RESNET: Final = (
    *(("in_layers.0", "norm1"), ("in_layers.2", "conv1"), ("emb_layers.1", "time_emb_proj")),
    *(("out_layers.0", "norm2"), ("out_layers.3", "conv2"), ("skip_connection", "conv_shortcut")),
)
"""The same, within a block `resnets`."""


def _unet_names(path: str) -> Iterator[str]:
    """Yield what else a module of a UNet is called."""
    for theirs, ours in _UNET:
        for one, other in ((theirs, ours), (ours, theirs)):
            if not (path.startswith(one) if one.endswith(".") else path == one):
                continue
            rest = path.removeprefix(one)
            if ".resnets." in ours:
                to_ours = one == theirs
                names = dict(_RESNET) if to_ours else {b: a for a, b in _RESNET}
                if rest not in names:
                    continue
                rest = names[rest]
            yield other + rest


class _Part(NamedTuple):
    """A module of diffusers that is some rows of one of the authors; share: of a hidden size."""

    name: str
    share: int


Rules = tuple[tuple[str, tuple[_Part, ...]], ...]
"""Modules of the authors, and those of diffusers that are the same or rows of them, in order."""


def _renamed(names: Mapping[str, str]) -> Rules:
    return tuple((name, (_Part(other, 1),)) for name, other in names.items())


def _thirds(name: str, other: str) -> Rules:
    """Return the rule of a matrix of queries, keys and values."""
    return ((name, tuple(_Part(other.format(one), 1) for one in "qkv")),)


_FLUX: Final[Rules] = (
    ("double_blocks.N.img_attn.proj", (_Part("transformer_blocks.N.attn.to_out.0", 1),)),
    (
        "double_blocks.N.img_attn.qkv",
        tuple(_Part(f"transformer_blocks.N.attn.to_{one}", 1) for one in "qkv"),
    ),
    ("double_blocks.N.img_mlp.0", (_Part("transformer_blocks.N.ff.net.0.proj", 1),)),
    ("double_blocks.N.img_mlp.2", (_Part("transformer_blocks.N.ff.net.2", 1),)),
    ("double_blocks.N.img_mod.lin", (_Part("transformer_blocks.N.norm1.linear", 1),)),
    ("double_blocks.N.txt_attn.proj", (_Part("transformer_blocks.N.attn.to_add_out", 1),)),
    (
        "double_blocks.N.txt_attn.qkv",
        tuple(_Part(f"transformer_blocks.N.attn.add_{one}_proj", 1) for one in "qkv"),
    ),
    ("double_blocks.N.txt_mlp.0", (_Part("transformer_blocks.N.ff_context.net.0.proj", 1),)),
    ("double_blocks.N.txt_mlp.2", (_Part("transformer_blocks.N.ff_context.net.2", 1),)),
    ("double_blocks.N.txt_mod.lin", (_Part("transformer_blocks.N.norm1_context.linear", 1),)),
    (
        "single_blocks.N.linear1",
        (
            *(_Part(f"single_transformer_blocks.N.attn.to_{one}", 1) for one in "qkv"),
            _Part("single_transformer_blocks.N.proj_mlp", 4),
        ),
    ),
    ("single_blocks.N.linear2", (_Part("single_transformer_blocks.N.proj_out", 1),)),
    ("single_blocks.N.modulation.lin", (_Part("single_transformer_blocks.N.norm.linear", 1),)),
    ("img_in", (_Part("x_embedder", 1),)),
    ("txt_in", (_Part("context_embedder", 1),)),
    ("time_in.in_layer", (_Part("time_text_embed.timestep_embedder.linear_1", 1),)),
    ("time_in.out_layer", (_Part("time_text_embed.timestep_embedder.linear_2", 1),)),
    ("vector_in.in_layer", (_Part("time_text_embed.text_embedder.linear_1", 1),)),
    ("vector_in.out_layer", (_Part("time_text_embed.text_embedder.linear_2", 1),)),
    ("guidance_in.in_layer", (_Part("time_text_embed.guidance_embedder.linear_1", 1),)),
    ("guidance_in.out_layer", (_Part("time_text_embed.guidance_embedder.linear_2", 1),)),
    ("final_layer.linear", (_Part("proj_out", 1),)),
)
"""Flux.  Not final_layer.adaLN_modulation.1: diffusers has its halves in the other order."""

_HUNYUAN: Final[Rules] = (
    *_thirds("double_blocks.N.img_attn_qkv", "transformer_blocks.N.attn.to_{}"),
    *_thirds("double_blocks.N.txt_attn_qkv", "transformer_blocks.N.attn.add_{}_proj"),
    *_renamed(
        {
            f"double_blocks.N.{one}": f"transformer_blocks.N.{other}"
            for one, other in (
                *(("img_attn_proj", "attn.to_out.0"), ("txt_attn_proj", "attn.to_add_out")),
                *(("img_mlp.fc1", "ff.net.0.proj"), ("img_mlp.fc2", "ff.net.2")),
                *(("txt_mlp.fc1", "ff_context.net.0.proj"), ("txt_mlp.fc2", "ff_context.net.2")),
                *(("img_mod.linear", "norm1.linear"), ("txt_mod.linear", "norm1_context.linear")),
            )
        }
    ),
    *_renamed({"single_blocks.N.modulation.linear": "single_transformer_blocks.N.norm.linear"}),
    *_thirds(
        "txt_in.individual_token_refiner.blocks.N.self_attn_qkv",
        "context_embedder.token_refiner.refiner_blocks.N.attn.to_{}",
    ),
    *_renamed(
        {
            f"txt_in.individual_token_refiner.blocks.N.{one}": (
                f"context_embedder.token_refiner.refiner_blocks.N.{other}"
            )
            for one, other in (
                ("self_attn_proj", "attn.to_out.0"),
                ("mlp.fc1", "ff.net.0.proj"),
                ("mlp.fc2", "ff.net.2"),
            )
        }
    ),
    *_FLUX,
)
"""HunyuanVideo; programs have its modules by Flux's names, too."""

_SD3: Final[Rules] = (
    *_thirds("joint_blocks.N.x_block.attn.qkv", "transformer_blocks.N.attn.to_{}"),
    *_thirds("joint_blocks.N.x_block.attn2.qkv", "transformer_blocks.N.attn2.to_{}"),
    *_thirds("joint_blocks.N.context_block.attn.qkv", "transformer_blocks.N.attn.add_{}_proj"),
    *_renamed(
        {
            f"joint_blocks.N.{one}": f"transformer_blocks.N.{other}"
            for one, other in (
                ("x_block.attn.proj", "attn.to_out.0"),
                ("x_block.attn2.proj", "attn2.to_out.0"),
                ("x_block.mlp.fc1", "ff.net.0.proj"),
                ("x_block.mlp.fc2", "ff.net.2"),
                ("x_block.adaLN_modulation.1", "norm1.linear"),
                ("context_block.attn.proj", "attn.to_add_out"),
                ("context_block.mlp.fc1", "ff_context.net.0.proj"),
                ("context_block.mlp.fc2", "ff_context.net.2"),
            )
        }
    ),
    *_renamed(
        {
            "x_embedder.proj": "pos_embed.proj",
            "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
            "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
            "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
            "final_layer.linear": "proj_out",
        }
    ),
)
"""Stable Diffusion 3.  Not the context's adaLN_modulation.1: that of the last block has its halves
in the other order."""

_WAN: Final[Rules] = _renamed(
    {
        f"blocks.N.{attention}.{one}": f"blocks.N.{other}.{theirs}"
        for attention, other in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for one, theirs in (
            *((part, f"to_{part}") for part in "qkv"),
            *(("o", "to_out.0"), ("norm_q", "norm_q"), ("norm_k", "norm_k")),
            *(("k_img", "add_k_proj"), ("v_img", "add_v_proj")),
        )
    }
    | {
        "blocks.N.ffn.0": "blocks.N.ffn.net.0.proj",
        "blocks.N.ffn.2": "blocks.N.ffn.net.2",
        "blocks.N.norm3": "blocks.N.norm2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "head.head": "proj_out",
    }
)

_FAMILIES: Final = (
    (re.compile(r"joint_blocks\.|pos_embed\.proj$"), _SD3),
    (re.compile(r"blocks\.\d+\.(self|cross)_attn\.|condition_embedder\."), _WAN),
    (re.compile(r"double_blocks\.\d+\.img_attn_|context_embedder\.token_refiner\."), _HUNYUAN),
    # Qwen-Image: its authors' names are those of diffusers.
    (re.compile(r"transformer_blocks\.\d+\.(img|txt)_(mod|mlp)\."), ()),
    (
        re.compile(
            r"(double|single)_blocks\.|single_transformer_blocks\.|transformer_blocks\.\d+\.attn\."
            r"|(img|txt)_in$|(x|context)_embedder$"
        ),
        _FLUX,
    ),
)
"""Transformers in place of a UNet, by the begin of a module of theirs, in either set of names."""

_OPEN_CLIP: Final[Rules] = (
    (
        "transformer.resblocks.N.attn",
        tuple(_Part(f"text_model.encoder.layers.N.self_attn.{one}_proj", 1) for one in "qkv"),
    ),
    (
        "transformer.resblocks.N.attn.out_proj",
        (_Part("text_model.encoder.layers.N.self_attn.out_proj", 1),),
    ),
    ("transformer.resblocks.N.mlp.c_fc", (_Part("text_model.encoder.layers.N.mlp.fc1", 1),)),
    ("transformer.resblocks.N.mlp.c_proj", (_Part("text_model.encoder.layers.N.mlp.fc2", 1),)),
)
_NUMBER: Final = re.compile(r"(?<=blocks\.|layers\.)\d+(?=\.)")
"""Which block a module is of: N in the rules."""


class _Fused(NamedTuple):
    """A module of diffusers as rows of one of the authors: their name, of how many shares which."""

    name: str
    begin: int
    share: int
    shares: int


class _Tables(NamedTuple):
    """Rules by the authors' modules, and by those of diffusers."""

    parts: Mapping[str, tuple[_Part, ...]]
    fused: Mapping[str, tuple[_Fused, ...]]

    @classmethod
    def of(cls, rules: Rules, *, both_ways: bool = True) -> _Tables:
        found: dict[str, tuple[_Fused, ...]] = {}
        for name, parts in rules if both_ways else ():
            begin, shares = 0, sum(part.share for part in parts)
            for part in parts:
                own = _Fused(name, begin, part.share, shares)
                found[part.name] = (*found.get(part.name, ()), own)
                begin += part.share
        return cls(dict(rules), found)


_TRANSFORMERS: Final = tuple((sign, _Tables.of(rules)) for sign, rules in _FAMILIES)
_TEXTS: Final = _Tables.of(_OPEN_CLIP, both_ways=False)
_NONE: Final = _Tables({}, {})

Modules = Mapping[tuple[str, str], tuple[tuple[Place, ...], ...]]
"""By model and path: the places that one module is, and others that it might be."""


def modules_of(base: Mapping[str, tuple[int, ...]]) -> Modules:
    """Return the modules of a base by all their names, with `_` for `.`.  base: shapes by name."""
    found: dict[tuple[str, str], dict[tuple[Place, ...], None]] = {}
    for (model, path), several in named_modules(base).items():
        found.setdefault((model, path.replace(".", "_")), {}).update(dict.fromkeys(several))
    return {key: tuple(places) for key, places in found.items()}


def named_modules(base: Mapping[str, tuple[int, ...]]) -> Modules:
    """Return the same with paths as they are written."""
    found: dict[tuple[str, str], dict[tuple[Place, ...], None]] = {}
    parts: list[tuple[str, str, str, int]] = []
    for tensor, shape in base.items():
        end = _FUSED if tensor.endswith(_FUSED) else _WEIGHT
        if not tensor.endswith(end) or not shape:
            continue
        begin = max((one for one in _MODELS if tensor.startswith(one)), key=len, default="")
        models = _MODELS.get(begin, (DENOISER, TEXT, TEXT_2, TEXT_3))
        path = tensor.removeprefix(begin).removesuffix(end)
        parts += ((model, path, tensor, shape[0]) for model in models)
    paths = [path for model, path, *_ in parts if model == DENOISER]
    denoiser = next((own for sign, own in _TRANSFORMERS if any(map(sign.match, paths))), _NONE)
    tables = {DENOISER: denoiser, TEXT: _TEXTS, TEXT_2: _TEXTS}
    for model, path, tensor, rows in parts:
        for name, places in _names(model, tables.get(model, _NONE), path, tensor, rows):
            found.setdefault((model, name), {})[places] = None
    return {key: tuple(places) for key, places in _joined(found).items()}


def _names(
    model: str, tables: _Tables, path: str, tensor: str, rows: int
) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Yield what a tensor's module is called, and what of the tensor it is."""
    yield path, (Place(tensor),)
    if model == DENOISER:
        for name in _unet_names(path):
            yield name, (Place(tensor),)
    numbers = _NUMBER.findall(path)[:1]
    form = _NUMBER.sub("N", path, count=1)

    def named(name: str) -> str:
        return name.replace(".N.", f".{numbers[0]}.") if numbers else name

    parts = tables.parts.get(form, ())
    shares = sum(part.share for part in parts)
    begin = 0
    for part in parts:
        size = rows * part.share // shares
        whole = len(parts) == 1
        yield named(part.name), (Place(tensor) if whole else Place(tensor, begin, size),)
        begin += size
    for fused in tables.fused.get(form, ()):
        share = rows // fused.share
        place = Place(tensor, 0, rows, fused.begin * share)
        yield named(fused.name), (Place(tensor) if fused.shares == fused.share else place,)


def _joined(
    found: Mapping[tuple[str, str], Mapping[tuple[Place, ...], None]],
) -> dict[tuple[str, str], list[tuple[Place, ...]]]:
    """Put the rows together that are one module: parts of it that lie in several tensors."""
    joined = {}
    for key, several in found.items():
        parts = [place for places in several for place in places]
        if len(parts) > 1 and all(part.rows for part in parts):
            firsts = sorted(parts, key=lambda part: part.first)
            ends = [part.first + part.rows for part in firsts]
            if [part.first for part in firsts] == [0, *ends[:-1]]:
                joined[key] = [tuple(firsts)]
                continue
        joined[key] = list(several)
    return joined
