"""Adapters of image models: what diffusers fuses into a small pipeline is what a merge makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file
from small_models import BLOCK
from test_image_adapters import Layer, kohya, loha, lokr, lora

from mstore import MergeRequest, Store

Array = npt.NDArray[np.float32]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


def clip(kind: str = "CLIPTextModel", **more: Any) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=32,
        **more,
    )
    return getattr(transformers, kind)(config)


def unet(*, xl: bool) -> Any:
    import diffusers

    more: dict[str, Any] = {}
    if xl:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
            "use_linear_projection": True,
        }
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64 if xl else 32,
        attention_head_dim=8,
        **more,
    )


def pipeline(kind: str) -> Any:
    """A small pipeline; no tokenizers, which fusing needs none of."""
    import diffusers
    import torch

    torch.manual_seed(5)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, sample_size=8, latent_channels=4
    )
    if kind == "sd":
        return diffusers.StableDiffusionPipeline(
            vae=vae,
            text_encoder=clip(),
            tokenizer=None,
            unet=unet(xl=False),
            scheduler=diffusers.DDIMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    if kind == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=clip(),
            text_encoder_2=clip("CLIPTextModelWithProjection"),
            tokenizer=None,
            tokenizer_2=None,
            unet=unet(xl=True),
            scheduler=diffusers.EulerDiscreteScheduler(),
        )
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        vae=vae,
        text_encoder=clip(),
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def weights(pipe: Any) -> dict[str, Array]:
    """All tensors of a pipeline that an adapter may change, by model and name."""
    return {
        f"{model}:{name}": values.detach().float().numpy().copy()
        for model in ("unet", "transformer", "text_encoder", "text_encoder_2")
        if getattr(pipe, model, None) is not None
        for name, values in getattr(pipe, model).state_dict().items()
    }


def ours(store: Store, place: Path, adapter: Path) -> dict[str, Array]:
    """The same after a merge."""
    store.add(place, name="base")
    store.add(adapter, name="lora", base="base")
    request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", place.with_name("baked"))
    return {
        f"{file.parent.name}:{name}": values
        for file in place.with_name("baked").rglob("*.safetensors")
        if file.parent.name != "vae"
        for name, values in load_file(file).items()
    }


def unet_layers(weights: Mapping[str, Array]) -> list[str]:
    """Modules of a UNet that kohya trains: attention, and convolutions of resnets."""
    kinds = ("to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "proj_in", "proj_out")
    more = ("conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv")
    return [
        name.removesuffix(".weight")
        for name in weights
        if name.endswith(tuple(f".{kind}.weight" for kind in (*kinds, *more)))
        and name.startswith("unet:")
    ]


def text_layers(weights: Mapping[str, Array], model: str) -> list[str]:
    kinds = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    return [
        name.removesuffix(".weight")
        for name in weights
        if name.startswith(f"{model}:") and name.endswith(tuple(f".{k}.weight" for k in kinds))
    ]


def begins(kind: str) -> dict[str, str]:
    text = "lora_te_" if kind == "sd" else "lora_te1_"
    return {"unet": "lora_unet_", "text_encoder": text, "text_encoder_2": "lora_te2_"}


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_kohyas_files_are_fused_as_by_diffusers(store: Store, tmp_path: Path, kind: str) -> None:
    """Every layer of UNet and text encoders that kohya trains, convolutions too."""
    rng = np.random.default_rng(1)
    pipe = pipeline(kind)
    pipe.save_pretrained(tmp_path / "pipe")
    before = weights(pipe)
    parts: dict[str, Array] = {}
    models = ["text_encoder", *(["text_encoder_2"] if kind == "sdxl" else [])]
    named = [*unet_layers(before), *(one for model in models for one in text_layers(before, model))]
    for name in named:
        model, _, path = name.partition(":")
        layer: Layer = lora(before[f"{name}.weight"].shape, rng)
        parts |= layer.named(kohya(path, begins(kind)[model]))
    assert len(named) > 60
    save_file(parts, tmp_path / "lora.safetensors")
    pipe.load_lora_weights(tmp_path / "lora.safetensors")
    pipe.fuse_lora(components=["unet", *models])
    pipe.unload_lora_weights()
    after = weights(pipe)
    found = ours(store, tmp_path / "pipe", tmp_path / "lora.safetensors")
    changed = 0
    for name, values in after.items():
        if name not in found:
            continue
        assert np.allclose(found[name], values, rtol=1e-4, atol=1e-4), name
        changed += int((values != before[name]).any())
    assert changed == len(named)


def test_kohyas_files_for_flux(store: Store, tmp_path: Path) -> None:
    """Matrices of the authors that are several of diffusers'."""
    rng = np.random.default_rng(2)
    pipe = pipeline("flux")
    pipe.save_pretrained(tmp_path / "pipe")
    h = 32
    shapes = {
        "double_blocks.0.img_attn.qkv": (3 * h, h),
        "double_blocks.0.txt_attn.qkv": (3 * h, h),
        "double_blocks.0.img_attn.proj": (h, h),
        "double_blocks.0.txt_attn.proj": (h, h),
        "double_blocks.0.img_mlp.0": (4 * h, h),
        "double_blocks.0.img_mlp.2": (h, 4 * h),
        "double_blocks.0.img_mod.lin": (6 * h, h),
        "single_blocks.0.linear2": (h, 5 * h),
        "single_blocks.0.modulation.lin": (3 * h, h),
    }
    parts: dict[str, Array] = {}
    for path, shape in shapes.items():
        parts |= lora(shape, rng).named(kohya(path))
    save_file(parts, tmp_path / "lora.safetensors")
    pipe.load_lora_weights(tmp_path / "lora.safetensors")
    pipe.fuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    found = ours(store, tmp_path / "pipe", tmp_path / "lora.safetensors")
    for name, values in weights(pipe).items():
        if name in found:
            assert np.allclose(found[name], values, rtol=1e-4, atol=1e-4), name


def test_diffusers_own_files(store: Store, tmp_path: Path) -> None:
    """As `save_lora_weights` writes an adapter that PEFT trained."""
    import torch
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = pipeline("sdxl")
    pipe.save_pretrained(tmp_path / "pipe")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in"]
    pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets))
    pipe.text_encoder.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "fc1"]))
    torch.manual_seed(3)
    with torch.no_grad():
        for model in (pipe.unet, pipe.text_encoder):
            for name, values in model.named_parameters():
                if "lora_B" in name:
                    values.normal_()
    pipe.save_lora_weights(
        tmp_path / "lora",
        unet_lora_layers=get_peft_model_state_dict(pipe.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(pipe.text_encoder),
    )
    fresh = pipeline("sdxl")
    [file] = (tmp_path / "lora").glob("*.safetensors")
    fresh.load_lora_weights(file)
    fresh.fuse_lora(components=["unet", "text_encoder"])
    fresh.unload_lora_weights()
    found = ours(store, tmp_path / "pipe", file)
    for name, values in weights(fresh).items():
        if name in found:
            assert np.allclose(found[name], values, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("form", ["loha", "lokr"])
def test_forms_of_lycoris(form: str) -> None:
    """The formulas of these tests are those of LyCORIS as PEFT has them."""
    import torch
    from peft.tuners.loha.layer import HadaWeight
    from peft.tuners.lokr.layer import make_kron

    rng = np.random.default_rng(4)
    made = loha if form == "loha" else lokr(small=False, thin=True)
    layer = made((16, 12), rng)
    parts = {name: torch.from_numpy(values) for name, values in layer.parts.items()}
    if form == "loha":
        order = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        values = HadaWeight.apply(*(parts[one] for one in order), torch.tensor(1.5 / 3))
    else:
        w2 = parts["lokr_w2_a"] @ parts["lokr_w2_b"]
        values = make_kron(parts["lokr_w1"], w2, 3.0 / 2)
    assert np.allclose(values.numpy(), layer.delta, atol=1e-5)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr"])
@pytest.mark.parametrize("small", [False, True])
def test_peft_of_lycoris(store: Store, tmp_path: Path, kind: str, small: bool) -> None:
    """LoHa and LoKr of PEFT, of matrices and convolutions, are merged as by PEFT; small: with
    Tucker's form and with both of Kronecker's factors as products.
    """
    import peft
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 16, 3)
            self.fc = torch.nn.Linear(16, 24)

    torch.manual_seed(6)
    net = Net()
    save_file({k: v.numpy() for k, v in net.state_dict().items()}, tmp_path / "net.safetensors")
    more: dict[str, Any] = {"use_effective_conv2d": small, "init_weights": False}
    if kind == "LoKr":
        more |= {"decompose_both": small, "decompose_factor": 4}
    config = getattr(peft, f"{kind}Config")(r=2, alpha=3, target_modules=["conv", "fc"], **more)
    model: Any = peft.get_peft_model(net, config)
    model.save_pretrained(tmp_path / "lora")
    expected = model.merge_and_unload().state_dict()
    store.add(tmp_path / "net.safetensors", name="base")
    store.add(tmp_path / "lora", name="lora", base="base")
    request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", tmp_path / "baked")
    [file] = (tmp_path / "baked").glob("*.safetensors")
    for name, values in load_file(file).items():
        assert np.allclose(values, expected[name].numpy(), atol=1e-5), name
    before = load_file(tmp_path / "net.safetensors")["fc.weight"]
    assert not np.allclose(load_file(file)["fc.weight"], before)


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_diffusers_loads_what_is_extracted(store: Store, tmp_path: Path, kind: str) -> None:
    """A LoRA of a fine-tune in diffusers' format, and one converted from kohya's with its alphas,
    are files that diffusers takes, and fuses to the same.
    """
    rng = np.random.default_rng(6)
    pipe = pipeline(kind)
    pipe.save_pretrained(tmp_path / "pipe")
    before = weights(pipe)
    parts: dict[str, Array] = {}
    for name in unet_layers(before)[:6]:
        layer: Layer = lora(before[f"{name}.weight"].shape, rng)
        key = kohya(name.partition(":")[2])
        parts |= layer.named(key) | {f"{key}.alpha": np.asarray(2.0, np.float32)}
    save_file(parts, tmp_path / "lora.safetensors")
    wanted = ours(store, tmp_path / "pipe", tmp_path / "lora.safetensors")
    store.convert_adapter("lora", "base", name="converted", format="diffusers")
    store.extract_lora(
        "baked:unet", "base:unet", name="extracted", rank=8, dtype="float32", format="diffusers"
    )
    for made in ("converted", "extracted"):
        store.checkout(made, tmp_path / f"{made}.safetensors")
        fresh = pipeline(kind)
        fresh.load_lora_weights(tmp_path / f"{made}.safetensors")
        fresh.fuse_lora(components=["unet"])
        fresh.unload_lora_weights()
        for name, values in weights(fresh).items():
            if name in wanted:
                assert np.allclose(wanted[name], values, rtol=1e-3, atol=1e-3), (made, name)
