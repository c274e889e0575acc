"""Adapters of Stable Diffusion 3, Wan, HunyuanVideo and Qwen-Image, by the names of either side.

What diffusers 0.42 makes of a model, and fuses of an adapter, is what a merge makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from small_models import BLOCK
from test_image_adapters import baked, kohya, lora

from mstore import Store

Array = npt.NDArray[np.float32]
H = 16


def _stable_diffusion_3() -> dict[str, tuple[int, ...]]:
    """Two blocks; the first has a second attention, the last gives its context nothing back."""
    found: dict[str, tuple[int, ...]] = {
        "x_embedder.proj": (H, 4, 2, 2),
        "context_embedder": (H, 24),
        "final_layer.linear": (8, H),
        "final_layer.adaLN_modulation.1": (2 * H, H),
    }
    for one in "ty":
        found |= {f"{one}_embedder.mlp.0": (H, 8), f"{one}_embedder.mlp.2": (H, H)}
    for block in range(2):
        for stream in ("x_block", "context_block"):
            own = f"joint_blocks.{block}.{stream}"
            is_last = stream == "context_block" and block == 1
            found |= {
                f"{own}.attn.qkv": (3 * H, H),
                f"{own}.adaLN_modulation.1": ((2 if is_last else 6) * H, H),
            }
            if not is_last:
                found[f"{own}.attn.proj"] = (H, H)
                found |= {f"{own}.mlp.fc1": (4 * H, H), f"{own}.mlp.fc2": (H, 4 * H)}
    found |= {"joint_blocks.0.x_block.attn2.qkv": (3 * H, H)}
    return found | {"joint_blocks.0.x_block.attn2.proj": (H, H)}


def _wan() -> dict[str, tuple[int, ...]]:
    """One block of an image-to-video model."""
    found: dict[str, tuple[int, ...]] = {
        "patch_embedding": (H, 4, 1, 2, 2),
        "time_embedding.0": (H, 8),
        "time_embedding.2": (H, H),
        "time_projection.1": (6 * H, H),
        "text_embedding.0": (H, 24),
        "text_embedding.2": (H, H),
        "img_emb.proj.1": (H, 12),
        "img_emb.proj.3": (H, H),
        "head.head": (8, H),
        "blocks.0.ffn.0": (4 * H, H),
        "blocks.0.ffn.2": (H, 4 * H),
    }
    for attention in ("self_attn", "cross_attn"):
        more = ("k_img", "v_img") if attention == "cross_attn" else ()
        found |= {f"blocks.0.{attention}.{one}": (H, H) for one in ("q", "k", "v", "o", *more)}
    return found


def _hunyuan() -> dict[str, tuple[int, ...]]:
    """One block of each kind; diffusers splits `linear1` at the real model's width only."""
    found: dict[str, tuple[int, ...]] = {
        "img_in": (H, 8),
        "final_layer.linear": (8, H),
        "vector_in.in_layer": (H, 12),
        "single_blocks.0.linear2": (H, 5 * H),
        "single_blocks.0.modulation.linear": (3 * H, H),
    }
    for one in ("img", "txt"):
        own = f"double_blocks.0.{one}"
        found |= {f"{own}_attn_qkv": (3 * H, H), f"{own}_attn_proj": (H, H)}
        found |= {f"{own}_mlp.fc1": (4 * H, H), f"{own}_mlp.fc2": (H, 4 * H)}
        found[f"{own}_mod.linear"] = (6 * H, H)
    refiner = "txt_in.individual_token_refiner.blocks.0"
    found |= {f"{refiner}.self_attn_qkv": (3 * H, H), f"{refiner}.self_attn_proj": (H, H)}
    return found | {f"{refiner}.mlp.fc1": (4 * H, H), f"{refiner}.mlp.fc2": (H, 4 * H)}


FAMILIES = {
    "sd3_transformer_checkpoint": (_stable_diffusion_3, {"pos_embed": np.ones((1, 4, H), "f4")}),
    "wan_transformer": (_wan, {}),
    "hunyuan_video_transformer": (_hunyuan, {}),
}
SWAPPED = ("final_layer.adaLN", "context_block.adaLN", "norm_out", "norm1_context")
"""Modules that diffusers has with their halves in the other order, of Stable Diffusion 3 those of
the last block."""


def model(family: str) -> dict[str, Array]:
    """A model as its authors publish it."""
    shapes, more = FAMILIES[family]
    rng = np.random.default_rng(1)
    found = {name: values.copy() for name, values in more.items()}
    for path, shape in shapes().items():
        found[f"{path}.weight"] = rng.standard_normal(shape).astype(np.float32)
        found[f"{path}.bias"] = rng.standard_normal(shape[0]).astype(np.float32)
    return found


def of_diffusers(family: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The same as diffusers loads it."""
    import torch
    from diffusers.loaders import single_file_utils

    convert = getattr(single_file_utils, f"convert_{family}_to_diffusers")
    found = convert({name: torch.from_numpy(values.copy()) for name, values in tensors.items()})
    return {name: values.contiguous().numpy() for name, values in found.items()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


def drawn(
    tensors: Mapping[str, Array], key: str, *, flat: bool = False
) -> tuple[dict[str, Array], dict[str, Array]]:
    """An adapter of all modules that have one name in each set, and the model that it makes."""
    rng = np.random.default_rng(2)
    parts: dict[str, Array] = {}
    found = {name: values.copy() for name, values in tensors.items()}
    for name, values in tensors.items():
        path = name.removesuffix(".weight")
        if path == name or any(one in path for one in SWAPPED):
            continue
        layer = lora(values.shape, rng)
        parts |= layer.named(key + (path.replace(".", "_") if flat else path))
        found[name] += layer.delta
    return parts, found


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=1e-5, atol=1e-4), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_authors_model_takes_an_adapter_of_diffusers(
    store: Store, tmp_path: Path, family: str
) -> None:
    """Each module of diffusers is the authors' module, or the rows of it, that diffusers loads."""
    base = model(family)
    parts, expected = drawn(of_diffusers(family, base), "transformer.")
    assert len(parts) >= 3 * 18
    found = baked(store, tmp_path, base, parts)
    same(of_diffusers(family, found), expected)


@pytest.mark.parametrize("key", ["lora_unet_", "diffusion_model."])
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_model_takes_an_adapter_of_the_authors(
    store: Store, tmp_path: Path, family: str, key: str
) -> None:
    """kohya's and musubi's keys, and those of ComfyUI and ai-toolkit, name the authors' modules."""
    parts, expected = drawn(model(family), key, flat=key.endswith("_"))
    found = baked(store, tmp_path, of_diffusers(family, model(family)), parts)
    same(found, of_diffusers(family, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_the_base_itself(store: Store, tmp_path: Path, family: str) -> None:
    """A base of one set of names takes an adapter of the same, below any begin of its file."""
    base = {f"model.diffusion_model.{name}": values for name, values in model(family).items()}
    parts, expected = drawn(model(family), "lora_unet_", flat=True)
    found = baked(store, tmp_path, base, parts)
    same(found, {f"model.diffusion_model.{name}": values for name, values in expected.items()})


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
@pytest.mark.parametrize("side", ["authors", "diffusers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formats_have_names_for_every_module(
    store: Store, tmp_path: Path, family: str, side: str, format: str
) -> None:
    """kohya's format has the authors' names, that of diffusers its own; both give the same model
    again, and no module is written twice."""
    base = model(family) if side == "authors" else of_diffusers(family, model(family))
    parts, _ = drawn(base, "diffusion_model.")
    first = baked(store, tmp_path, base, parts)
    store.convert_adapter("lora", "base", name="as", format=format)
    store.checkout("as", tmp_path / "as")
    [file] = (tmp_path / "as").glob("*.safetensors")
    is_authors = any(
        "joint_blocks" in n or "self_attn" in n or "double_" in n for n in load_file(file)
    )
    assert is_authors == (format == "kohya")
    with Store.init(tmp_path / "again", block_size=BLOCK) as other:
        (tmp_path / "more").mkdir()
        same(baked(other, tmp_path / "more", base, load_file(file)), first)


@pytest.mark.parametrize(
    ("format", "key"),
    [("kohya", "lora_unet_{}_attn_to_q"), ("diffusers", "transformer.{}.attn.to_q")],
)
def test_qwen_image_has_one_set_of_names(
    store: Store, tmp_path: Path, format: str, key: str
) -> None:
    """Its authors' names are those of diffusers: kohya's format has no names of Flux for it."""
    shapes = {"img_in": (H, 8), "transformer_blocks.0.attn.to_q": (H, H)}
    shapes["transformer_blocks.0.img_mod.1"] = (6 * H, H)
    base = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    parts, _ = drawn(base, "diffusion_model.")
    baked(store, tmp_path, base, parts)
    store.convert_adapter("lora", "base", name="as", format=format)
    store.checkout("as", tmp_path / "as")
    found = load_file(next((tmp_path / "as").glob("*.safetensors")))
    alphas = sum(name.endswith(".alpha") for name in parts)
    assert len(found) == len(parts) - (alphas if format == "diffusers" else 0)
    block = "transformer_blocks.0"
    own = key.format(block.replace(".", "_") if format == "kohya" else block)
    assert f"{own}.{'alpha' if format == 'kohya' else 'lora_A.weight'}" in found


def _transformer(kind: str) -> Any:
    import diffusers

    small: dict[str, dict[str, Any]] = {
        "SD3Transformer2DModel": {
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 12,
            "out_channels": 4,
            "dual_attention_layers": (0,),
        },
        "WanTransformer3DModel": {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 8,
            "ffn_dim": 32,
            "num_layers": 2,
        },
        "QwenImageTransformer2DModel": {
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 4, 8),
        },
        "HunyuanVideoTransformer3DModel": {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 6),
        },
    }
    return getattr(diffusers, kind)(**small[kind])


WAN = {
    f"blocks.{block}.{one}.{ours}": f"blocks.{block}.{other}.{theirs}"
    for block in range(2)
    for one, other in (("self_attn", "attn1"), ("cross_attn", "attn2"))
    for ours, theirs in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
} | {
    f"blocks.{block}.ffn.{ours}": f"blocks.{block}.ffn.net.{theirs}"
    for block in range(2)
    for ours, theirs in (("0", "0.proj"), ("2", "2"))
}
QWEN = [
    f"transformer_blocks.{block}.{one}"
    for block in range(2)
    for one in (
        *("attn.to_q", "attn.to_out.0", "attn.add_k_proj", "attn.to_add_out"),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.2", "img_mod.1", "txt_mod.1"),
    )
]
HUNYUAN = {
    "double_blocks.0.img_attn_qkv": "transformer_blocks.0.attn.to_{}",
    "double_blocks.0.img_attn_proj": "transformer_blocks.0.attn.to_out.0",
    "double_blocks.0.img_mlp.fc1": "transformer_blocks.0.ff.net.0.proj",
    "double_blocks.0.txt_mlp.fc2": "transformer_blocks.0.ff_context.net.2",
    "double_blocks.0.txt_mod.linear": "transformer_blocks.0.norm1_context.linear",
    "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    "single_blocks.0.modulation.linear": "single_transformer_blocks.0.norm.linear",
}
SD3 = [
    f"transformer_blocks.0.{one}"
    for one in ("attn.to_q", "attn2.to_v", "attn.add_v_proj", "ff.net.0.proj", "norm1.linear")
]
PROGRAMS: Mapping[str, tuple[str, str, Mapping[str, str], str, str]] = {
    "wan of musubi": ("WanTransformer3DModel", "Wan", WAN, "lora_unet_", "kohya"),
    "wan of ComfyUI": ("WanTransformer3DModel", "Wan", WAN, "diffusion_model.", "peft"),
    "wan of diffusers": (
        "WanTransformer3DModel",
        "Wan",
        {one: one for one in WAN.values()},
        "transformer.",
        "peft",
    ),
    "qwen of musubi": (
        "QwenImageTransformer2DModel",
        "QwenImage",
        {one: one for one in QWEN},
        "lora_unet_",
        "kohya",
    ),
    "qwen of ComfyUI": (
        "QwenImageTransformer2DModel",
        "QwenImage",
        {one: one for one in QWEN},
        "diffusion_model.",
        "kohya",
    ),
    "qwen without a begin": (
        "QwenImageTransformer2DModel",
        "QwenImage",
        {one: one for one in QWEN},
        "",
        "default",
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        "HunyuanVideo",
        HUNYUAN,
        "diffusion_model.",
        "peft",
    ),
    "sd3 of diffusers": (
        "SD3Transformer2DModel",
        "SD3",
        {one: one for one in SD3},
        "transformer.",
        "peft",
    ),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_diffusers_fuses_the_same(store: Store, tmp_path: Path, case: str) -> None:
    """A file as a program writes it makes of a small model what diffusers fuses."""
    import torch
    from diffusers import loaders

    kind, mixin, modules, key, ends = PROGRAMS[case]
    torch.manual_seed(4)
    transformer = _transformer(kind)
    before = {k: v.detach().numpy().copy() for k, v in transformer.state_dict().items()}
    rng = np.random.default_rng(5)
    parts: dict[str, Array] = {}
    for ours, theirs in modules.items():
        rows, *rest = before[f"{theirs.format('q')}.weight"].shape
        layer = lora((rows * 3 if "{}" in theirs else rows, *rest), rng)
        if ends == "kohya":
            parts |= layer.named(kohya(ours, key) if key.endswith("_") else key + ours)
        else:
            more = ".default" if ends == "default" else ""
            parts[f"{key}{ours}.lora_A{more}.weight"] = layer.parts["lora_down.weight"]
            parts[f"{key}{ours}.lora_B{more}.weight"] = layer.parts["lora_up.weight"]
    save_file(parts, tmp_path / "adapter.safetensors")
    loader: Any = getattr(loaders, f"{mixin}LoraLoaderMixin")
    read = loader.lora_state_dict(tmp_path / "adapter.safetensors")
    transformer.load_lora_adapter(read, prefix="transformer")
    transformer.fuse_lora()
    transformer.unload_lora()
    found = baked(store, tmp_path, before, parts)
    changed = 0
    for name, values in transformer.state_dict().items():
        assert np.allclose(found[name], values.numpy(), rtol=1e-4, atol=1e-4), name
        changed += int((values.numpy() != before[name]).any())
    assert changed == len(modules) + 2 * sum("{}" in one for one in modules.values())
