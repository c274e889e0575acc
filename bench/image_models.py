"""Generated checkpoints of SDXL, one file each: true names and shapes, widths divided, float16.

For sizes and timing, not for pictures.  The base is normal noise of the deviation that weights
have.  A fine-tune moves each tensor by noise relative to it and keeps the VAE, as most do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

DEVIATION = 0.02
VAE = "first_stage_model."
DENOISER = "model.diffusion_model."
# Widths from which a dimension is divided: those below are kernels, and channels of pictures.
_WIDE = 64
_WIDTHS = (320, 640, 1280)
_DEPTHS = (0, 2, 10)
_EMBEDDED = 1280
_CONTEXT = 2048
Tensors = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tune:
    """A fine-tune.  denoiser, text: the size of its differences, relative to the base's weights."""

    name: str
    denoiser: float
    text: float


# What fine-tunes of SDXL move: little where only a style was trained, most in long trainings.
TUNES = (
    Tune("anime", 0.1, 0.03),
    Tune("dreamy", 0.03, 0.01),
    Tune("film", 0.02, 0.0),
    Tune("photo", 0.05, 0.01),
    Tune("toon", 0.07, 0.02),
)


def shapes() -> dict[str, Shape]:
    """Return the tensors of SDXL 1.0's file, which are 2,515, with their shapes."""
    return {
        **{f"{DENOISER}{name}": shape for name, shape in _denoiser()},
        **{f"conditioner.embedders.0.transformer.text_model.{n}": s for n, s in _clip_l()},
        **{f"conditioner.embedders.1.model.{name}": shape for name, shape in _clip_g()},
        **{f"{VAE}{name}": shape for name, shape in _vae()},
    }


def _pair(name: str, *shape: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _residual(at: str, before: int, after: int) -> Iterator[tuple[str, Shape]]:
    yield from _pair(f"{at}.in_layers.0", before)
    yield from _pair(f"{at}.in_layers.2", after, before, 3, 3)
    yield from _pair(f"{at}.emb_layers.1", after, _EMBEDDED)
    yield from _pair(f"{at}.out_layers.0", after)
    yield from _pair(f"{at}.out_layers.3", after, after, 3, 3)
    if before != after:
        yield from _pair(f"{at}.skip_connection", after, before, 1, 1)


def _transformer(at: str, width: int, depth: int) -> Iterator[tuple[str, Shape]]:
    yield from _pair(f"{at}.norm", width)
    yield from _pair(f"{at}.proj_in", width, width)
    for number in range(depth):
        block = f"{at}.transformer_blocks.{number}"
        for attention, context in (("attn1", width), ("attn2", _CONTEXT)):
            yield f"{block}.{attention}.to_q.weight", (width, width)
            yield f"{block}.{attention}.to_k.weight", (width, context)
            yield f"{block}.{attention}.to_v.weight", (width, context)
            yield from _pair(f"{block}.{attention}.to_out.0", width, width)
        yield from _pair(f"{block}.ff.net.0.proj", 8 * width, width)
        yield from _pair(f"{block}.ff.net.2", width, 4 * width)
        for norm in ("norm1", "norm2", "norm3"):
            yield from _pair(f"{block}.{norm}", width)
    yield from _pair(f"{at}.proj_out", width, width)


def _denoiser() -> Iterator[tuple[str, Shape]]:
    first = width = _WIDTHS[0]
    yield from _pair("time_embed.0", _EMBEDDED, first)
    yield from _pair("time_embed.2", _EMBEDDED, _EMBEDDED)
    yield from _pair("label_emb.0.0", _EMBEDDED, 2816)
    yield from _pair("label_emb.0.2", _EMBEDDED, _EMBEDDED)
    yield from _pair("input_blocks.0.0", first, 4, 3, 3)
    skipped, number = [first], 1
    for level, depth in zip(_WIDTHS, _DEPTHS, strict=True):
        for _ in range(2):
            yield from _residual(f"input_blocks.{number}.0", width, level)
            if depth:
                yield from _transformer(f"input_blocks.{number}.1", level, depth)
            width = level
            skipped.append(width)
            number += 1
        if level != _WIDTHS[-1]:
            yield from _pair(f"input_blocks.{number}.0.op", width, width, 3, 3)
            skipped.append(width)
            number += 1
    yield from _residual("middle_block.0", width, width)
    yield from _transformer("middle_block.1", width, _DEPTHS[-1])
    yield from _residual("middle_block.2", width, width)
    number = 0
    for level, depth in zip(reversed(_WIDTHS), reversed(_DEPTHS), strict=True):
        for turn in range(3):
            yield from _residual(f"output_blocks.{number}.0", width + skipped.pop(), level)
            width = level
            if depth:
                yield from _transformer(f"output_blocks.{number}.1", level, depth)
            if turn == 2 and level != _WIDTHS[0]:
                yield from _pair(f"output_blocks.{number}.2.conv", level, level, 3, 3)
            number += 1
    yield from _pair("out.0", first)
    yield from _pair("out.2", 4, first, 3, 3)


def _clip_l() -> Iterator[tuple[str, Shape]]:
    yield "embeddings.position_embedding.weight", (77, 768)
    yield "embeddings.position_ids", (1, 77)
    yield "embeddings.token_embedding.weight", (49408, 768)
    for number in range(12):
        layer = f"encoder.layers.{number}"
        for name in ("k_proj", "out_proj", "q_proj", "v_proj"):
            yield from _pair(f"{layer}.self_attn.{name}", 768, 768)
        yield from _pair(f"{layer}.mlp.fc1", 3072, 768)
        yield from _pair(f"{layer}.mlp.fc2", 768, 3072)
        yield from _pair(f"{layer}.layer_norm1", 768)
        yield from _pair(f"{layer}.layer_norm2", 768)
    yield from _pair("final_layer_norm", 768)


def _clip_g() -> Iterator[tuple[str, Shape]]:
    yield "logit_scale", ()
    yield "positional_embedding", (77, 1280)
    yield "text_projection", (1280, 1280)
    yield "token_embedding.weight", (49408, 1280)
    for number in range(32):
        layer = f"transformer.resblocks.{number}"
        yield f"{layer}.attn.in_proj_weight", (3840, 1280)
        yield f"{layer}.attn.in_proj_bias", (3840,)
        yield from _pair(f"{layer}.attn.out_proj", 1280, 1280)
        yield from _pair(f"{layer}.mlp.c_fc", 5120, 1280)
        yield from _pair(f"{layer}.mlp.c_proj", 1280, 5120)
        yield from _pair(f"{layer}.ln_1", 1280)
        yield from _pair(f"{layer}.ln_2", 1280)
    yield from _pair("ln_final", 1280)


def _vae() -> Iterator[tuple[str, Shape]]:
    def residual(at: str, before: int, after: int) -> Iterator[tuple[str, Shape]]:
        yield from _pair(f"{at}.norm1", before)
        yield from _pair(f"{at}.conv1", after, before, 3, 3)
        yield from _pair(f"{at}.norm2", after)
        yield from _pair(f"{at}.conv2", after, after, 3, 3)
        if before != after:
            yield from _pair(f"{at}.nin_shortcut", after, before, 1, 1)

    def middle(at: str) -> Iterator[tuple[str, Shape]]:
        yield from residual(f"{at}.block_1", 512, 512)
        yield from residual(f"{at}.block_2", 512, 512)
        yield from _pair(f"{at}.attn_1.norm", 512)
        for name in ("q", "k", "v", "proj_out"):
            yield from _pair(f"{at}.attn_1.{name}", 512, 512, 1, 1)

    widths = (128, 256, 512, 512)
    yield from _pair("quant_conv", 8, 8, 1, 1)
    yield from _pair("post_quant_conv", 4, 4, 1, 1)
    for side, ends, level, sample, turns in (
        ("encoder", ((128, 3), (8, 512)), "down", "downsample", 2),
        ("decoder", ((512, 4), (3, 128)), "up", "upsample", 3),
    ):
        yield from _pair(f"{side}.conv_in", *ends[0], 3, 3)
        yield from middle(f"{side}.mid")
        width = ends[0][0]
        order = range(4) if side == "encoder" else range(3, -1, -1)
        for at in order:
            for turn in range(turns):
                yield from residual(f"{side}.{level}.{at}.block.{turn}", width, widths[at])
                width = widths[at]
            if at != order[-1]:
                yield from _pair(f"{side}.{level}.{at}.{sample}.conv", width, width, 3, 3)
        yield from _pair(f"{side}.norm_out", width)
        yield from _pair(f"{side}.conv_out", *ends[1], 3, 3)


def divided(shape: Shape, by: int) -> Shape:
    """Return a shape whose wide dimensions are divided, rounded up."""
    return tuple(-(-one // by) if one >= _WIDE else one for one in shape)


def base(by: int) -> Tensors:
    """Return the base's tensors, widths divided."""
    rng = np.random.default_rng(1)
    made: Tensors = {}
    for name, whole in shapes().items():
        shape = divided(whole, by)
        if name.endswith("position_ids"):
            made[name] = np.arange(shape[1], dtype=np.int64).reshape(shape)
            continue
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
        # The scales of norms are near 1.
        is_scale = len(shape) == 1 and name.endswith(".weight")
        made[name] = np.asarray(values + np.float32(is_scale), np.float16)
    return made


def tuned(tensors: Mapping[str, Any], tune: Tune) -> Tensors:
    """Return a fine-tune of a base: some tensors moved up to twice as far as others, or half."""
    rng = np.random.default_rng([2, *tune.name.encode()])
    made: Tensors = {}
    for name, values in tensors.items():
        size = tune.denoiser if name.startswith(DENOISER) else tune.text
        if name.startswith(VAE) or values.dtype != np.float16 or not size:
            made[name] = values
            continue
        deviation = np.float32(size * DEVIATION * 2 ** rng.uniform(-1, 1))
        noise = rng.standard_normal(values.shape, dtype=np.float32)
        made[name] = (values.astype(np.float32) + deviation * noise).astype(np.float16)
    return made


def lora(by: int, rank: int, seed: int) -> Tensors:
    """Return a LoRA in kohya's form, of all attention and MLPs of the denoiser's transformers."""
    rng = np.random.default_rng([3, seed])
    made: Tensors = {}
    for name, whole in shapes().items():
        if ".transformer_blocks." in name and len(whole) == 2:
            rows, columns = divided(whole, by)
            key = "lora_unet_" + name.removeprefix(DENOISER).removesuffix(".weight")
            key = key.replace(".", "_")
            # Their product is some 5 % of the weights.
            for part, shape in (("down", (rank, columns)), ("up", (rows, rank))):
                values = rng.standard_normal(shape) * np.sqrt(0.05 * DEVIATION) / rank**0.25
                made[f"{key}.lora_{part}.weight"] = values.astype(np.float16)
            made[f"{key}.alpha"] = np.asarray(rank, np.float16)
    return made


def load(path: Path) -> Tensors:
    """Return the tensors of a file."""
    return load_file(path)


def save(path: Path, tensors: Tensors, **metadata: str) -> None:
    """Write a file, its header as such files have it."""
    arrays = {name: np.asarray(values) for name, values in tensors.items()}
    save_file(arrays, path, {"format": "pt", **metadata})
