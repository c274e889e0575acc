"""Adapters of image models, in the forms that their users have: what they make of a base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adapters import Adapter
from cli_runs import Program
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest, Incompatible

Array = npt.NDArray[np.float32]
H = 16
"""The hidden size of the small models."""
CROSS = 12
ATTENTION = "input_blocks.1.1.transformer_blocks.0.attn2"
RESNET = "input_blocks.1.0"
UNET: Mapping[str, tuple[int, ...]] = {
    f"{ATTENTION}.to_q": (H, H),
    f"{ATTENTION}.to_k": (H, CROSS),
    f"{ATTENTION}.to_out.0": (H, H),
    "input_blocks.1.1.proj_in": (H, H, 1, 1),
    f"{RESNET}.in_layers.2": (H, 8, 3, 3),
    f"{RESNET}.emb_layers.1": (H, 32),
    "input_blocks.3.0.op": (H, H, 3, 3),
    "output_blocks.2.1.conv": (H, H, 3, 3),
    "output_blocks.5.2.conv": (H, H, 3, 3),
    "middle_block.1.proj_out": (H, H, 1, 1),
    "time_embed.0": (32, H),
    "out.2": (4, H, 3, 3),
}
DIFFUSERS = {
    f"{ATTENTION}.to_q": "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q",
    f"{ATTENTION}.to_k": "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
    f"{ATTENTION}.to_out.0": "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0",
    "input_blocks.1.1.proj_in": "down_blocks.0.attentions.0.proj_in",
    f"{RESNET}.in_layers.2": "down_blocks.0.resnets.0.conv1",
    f"{RESNET}.emb_layers.1": "down_blocks.0.resnets.0.time_emb_proj",
    "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
    "output_blocks.2.1.conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks.5.2.conv": "up_blocks.1.upsamplers.0.conv",
    "middle_block.1.proj_out": "mid_block.attentions.0.proj_out",
    "time_embed.0": "time_embedding.linear_1",
    "out.2": "conv_out",
}
CLIP = "text_model.encoder.layers.0"
TEXTS = {f"{CLIP}.self_attn.q_proj": (H, H), f"{CLIP}.mlp.fc1": (32, H)}
BLOCK_2 = "transformer.resblocks.0"
FLUX: Mapping[str, tuple[int, ...]] = {
    "double_blocks.0.img_attn.qkv": (3 * H, H),
    "double_blocks.0.img_attn.proj": (H, H),
    "double_blocks.0.txt_attn.qkv": (3 * H, H),
    "double_blocks.0.img_mod.lin": (6 * H, H),
    "single_blocks.0.linear1": (7 * H, H),
    "single_blocks.0.linear2": (H, 5 * H),
    "final_layer.linear": (4, H),
}


def drawn(shapes: Mapping[str, tuple[int, ...]], begin: str, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        f"{begin}{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def sd_1() -> dict[str, Array]:
    """A file as those of Stable Diffusion 1.5 are, with a few of its layers."""
    return (
        drawn(UNET, "model.diffusion_model.", 1)
        | drawn(TEXTS, "cond_stage_model.transformer.", 2)
        | {"first_stage_model.decoder.conv_in.weight": np.ones((4, 4, 3, 3), np.float32)}
    )


def sdxl() -> dict[str, Array]:
    """One as those of SDXL: the second text encoder is an OpenCLIP."""
    rng = np.random.default_rng(3)
    second = f"conditioner.embedders.1.model.{BLOCK_2}"
    return (
        drawn(UNET, "model.diffusion_model.", 1)
        | drawn(TEXTS, "conditioner.embedders.0.transformer.", 2)
        | {
            f"{second}.attn.in_proj_weight": rng.standard_normal((3 * H, H)).astype(np.float32),
            f"{second}.attn.out_proj.weight": rng.standard_normal((H, H)).astype(np.float32),
            f"{second}.mlp.c_fc.weight": rng.standard_normal((32, H)).astype(np.float32),
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


class Layer:
    """An adapter's tensors of one layer, and what they add to the layer's weight."""

    def __init__(self, parts: Mapping[str, Array], delta: Array) -> None:
        self.parts = parts
        self.delta = delta

    def named(self, key: str) -> dict[str, Array]:
        return {f"{key}.{part}": values for part, values in self.parts.items()}


def lora(shape: tuple[int, ...], rng: Any, *, alpha: float | None = 2.0, rank: int = 4) -> Layer:
    """kohya's: down and up, of convolutions too, and alpha."""
    down = rng.standard_normal((rank, *shape[1:])).astype(np.float32)
    up = rng.standard_normal((shape[0], rank, *([1] * (len(shape) - 2)))).astype(np.float32)
    delta = np.einsum("or,r...->o...", up.reshape(shape[0], rank), down)
    parts = {"lora_down.weight": down, "lora_up.weight": up}
    if alpha is None:
        return Layer(parts, delta)
    return Layer({**parts, "alpha": np.asarray(alpha, np.float32)}, delta * (alpha / rank))


def tucker(shape: tuple[int, ...], rng: Any) -> Layer:
    """LoCon's of a convolution, with a small one in the middle."""
    down = rng.standard_normal((3, shape[1], 1, 1)).astype(np.float32)
    mid = rng.standard_normal((4, 3, *shape[2:])).astype(np.float32)
    up = rng.standard_normal((shape[0], 4, 1, 1)).astype(np.float32)
    delta = np.einsum("oi,ijkl,jc->ockl", up[:, :, 0, 0], mid, down[:, :, 0, 0])
    names = ("lora_down.weight", "lora_mid.weight", "lora_up.weight", "alpha")
    parts = dict(zip(names, (down, mid, up, np.asarray(6, np.float32)), strict=True))
    return Layer(parts, delta * (6 / 3))


def loha(shape: tuple[int, ...], rng: Any) -> Layer:
    """The product, element by element, of two of rank 3."""
    columns = int(np.prod(shape[1:]))
    a, c = rng.standard_normal((2, shape[0], 3)).astype(np.float32)
    b, d = rng.standard_normal((2, 3, columns)).astype(np.float32)
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha")
    parts = dict(zip(names, (a, b, c, d, np.asarray(1.5, np.float32)), strict=True))
    return Layer(parts, ((a @ b) * (c @ d)).reshape(shape) * (1.5 / 3))


def loha_tucker(shape: tuple[int, ...], rng: Any) -> Layer:
    def half() -> tuple[tuple[Array, Array, Array], Array]:
        core = rng.standard_normal((2, 2, *shape[2:])).astype(np.float32)
        a = rng.standard_normal((2, shape[0])).astype(np.float32)
        b = rng.standard_normal((2, shape[1])).astype(np.float32)
        return (core, a, b), np.einsum("ijkl,jr,ip->prkl", core, b, a)

    (first, one), (second, other) = half(), half()
    names = ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b")
    return Layer(dict(zip(names, (*first, *second), strict=True)), one * other)


def lokr(*, small: bool, thin: bool, core: bool = False) -> Callable[[tuple[int, ...], Any], Layer]:
    """Kronecker's product; small, thin: whether its first and its second are products."""

    def made(shape: tuple[int, ...], rng: Any) -> Layer:
        parts: dict[str, Array] = {}
        rows, columns = shape[0] // 4, shape[1] // 4
        scale = 1.0
        if small:
            parts["lokr_w1_a"] = rng.standard_normal((4, 2)).astype(np.float32)
            parts["lokr_w1_b"] = rng.standard_normal((2, 4)).astype(np.float32)
            w1 = parts["lokr_w1_a"] @ parts["lokr_w1_b"]
            scale = 3.0 / 2
        else:
            w1 = parts["lokr_w1"] = rng.standard_normal((4, 4)).astype(np.float32)
        if core:
            parts["lokr_t2"] = rng.standard_normal((2, 2, *shape[2:])).astype(np.float32)
            parts["lokr_w2_a"] = rng.standard_normal((2, rows)).astype(np.float32)
            parts["lokr_w2_b"] = rng.standard_normal((2, columns)).astype(np.float32)
            w2 = np.einsum(
                "ijkl,jr,ip->prkl", parts["lokr_t2"], parts["lokr_w2_b"], parts["lokr_w2_a"]
            )
            scale = 3.0 / 2
        elif thin:
            parts["lokr_w2_a"] = rng.standard_normal((rows, 2)).astype(np.float32)
            parts["lokr_w2_b"] = rng.standard_normal((2, columns * int(np.prod(shape[2:])))).astype(
                np.float32
            )
            w2 = (parts["lokr_w2_a"] @ parts["lokr_w2_b"]).reshape(rows, columns, *shape[2:])
            scale = 3.0 / 2
        else:
            w2 = parts["lokr_w2"] = rng.standard_normal((rows, columns, *shape[2:])).astype("f4")
        parts["alpha"] = np.asarray(3, np.float32)
        delta = np.kron(w1.reshape(*w1.shape, *([1] * (len(shape) - 2))), w2)
        return Layer(parts, delta.astype(np.float32) * scale)

    return made


def difference(shape: tuple[int, ...], rng: Any) -> Layer:
    values = rng.standard_normal(shape).astype(np.float32)
    return Layer({"diff": values}, values)


def baked(
    store: Store, tmp_path: Path, base: Mapping[str, Array], adapter: Mapping[str, Array]
) -> dict[str, Array]:
    """The base with the adapter applied, by a merge."""
    for name, tensors in (("base", base), ("lora", adapter)):
        save_file(dict(tensors), tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
    request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", tmp_path / "baked")
    [file] = (tmp_path / "baked").glob("*.safetensors")
    return load_file(file)


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Assert that tensors are these, but for the rounding of float32."""
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=1e-5, atol=1e-4), name


def kohya(path: str, begin: str = "lora_unet_") -> str:
    return begin + path.replace(".", "_")


FORMS: Mapping[str, Callable[[tuple[int, ...], Any], Layer]] = {
    "lora": lora,
    "loha": loha,
    "lokr": lokr(small=False, thin=False),
    "lokr of w2": lokr(small=False, thin=True),
    "lokr of w1": lokr(small=True, thin=False),
    "lokr of both": lokr(small=True, thin=True),
    "difference": difference,
}
OF_CONVOLUTIONS: Mapping[str, Callable[[tuple[int, ...], Any], Layer]] = {
    "tucker": tucker,
    "loha tucker": loha_tucker,
    "lokr tucker": lokr(small=False, thin=True, core=True),
    "lokr of both tucker": lokr(small=True, thin=True, core=True),
}
LINEAR = (f"{ATTENTION}.to_q", f"{RESNET}.emb_layers.1")
CONVOLUTIONS = (f"{RESNET}.in_layers.2", "input_blocks.3.0.op", "input_blocks.1.1.proj_in")


@pytest.mark.parametrize("form", [*FORMS, *OF_CONVOLUTIONS])
def test_every_form_is_what_its_formula_says(store: Store, tmp_path: Path, form: str) -> None:
    """A layer is the base's and what the formula adds, for matrices and convolutions."""
    rng = np.random.default_rng(7)
    base = sd_1()
    layers = CONVOLUTIONS if form in OF_CONVOLUTIONS else (*LINEAR, *CONVOLUTIONS)
    made = {**FORMS, **OF_CONVOLUTIONS}[form]
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for path in layers:
        if form in OF_CONVOLUTIONS and UNET[path][2:] == (1, 1):
            continue
        layer = made(UNET[path], rng)
        parts |= layer.named(kohya(DIFFUSERS[path]))
        expected[f"model.diffusion_model.{path}.weight"] += layer.delta
    found = baked(store, tmp_path, base, parts)
    assert found.keys() == expected.keys()
    same(found, expected)


@pytest.mark.parametrize("names", ["authors", "diffusers"])
@pytest.mark.parametrize("base_names", ["authors", "diffusers"])
def test_both_sets_of_names_are_the_same_layers(
    store: Store, tmp_path: Path, names: str, base_names: str
) -> None:
    """kohya's names of SDXL are the authors', those of SD 1.5 diffusers': either fits either."""
    rng = np.random.default_rng(8)
    own = {path: path if base_names == "authors" else DIFFUSERS[path] for path in UNET}
    base = drawn({own[path]: shape for path, shape in UNET.items()}, "", 1)
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for path, shape in UNET.items():
        layer = lora(shape, rng)
        parts |= layer.named(kohya(path if names == "authors" else DIFFUSERS[path]))
        expected[f"{own[path]}.weight"] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


ENDS = {
    "kohya": ("lora_down.weight", "lora_up.weight"),
    "peft": ("lora_A.weight", "lora_B.weight"),
    "diffusers": ("lora.down.weight", "lora.up.weight"),
}


@pytest.mark.parametrize(
    "spelled",
    [
        ("unet.{}", "text_encoder.{}", "peft"),
        ("unet.{}", "text_encoder.{}", "diffusers"),
        ("lora_unet_{}", "lora_te_{}", "kohya"),
        ("lora_unet_{}", "lora_te1_{}", "kohya"),
        ("diffusion_model.{}", "text_encoders.clip_l.transformer.{}", "kohya"),
        ("model.diffusion_model.{}", "text_encoder.{}", "peft"),
    ],
)
def test_keys_of_all_programs_are_known(
    store: Store, tmp_path: Path, spelled: tuple[str, str, str]
) -> None:
    """Prefixes and ends of kohya, diffusers, PEFT and ComfyUI; without alpha nothing is scaled."""
    denoiser, text, ends = spelled
    down, up = ENDS[ends]
    rng = np.random.default_rng(9)
    base = sd_1()
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    path = f"{ATTENTION}.to_out.0"
    inner = DIFFUSERS[path] if "unet" in denoiser else path
    for key, tensor, shape in (
        (denoiser, f"model.diffusion_model.{path}.weight", UNET[path]),
        (text, f"cond_stage_model.transformer.{CLIP}.mlp.fc1.weight", (32, H)),
    ):
        own = inner if key == denoiser else f"{CLIP}.mlp.fc1"
        layer = lora(shape, rng, alpha=None)
        written = key.format(own.replace(".", "_") if key.endswith("_{}") else own)
        parts[f"{written}.{down}"] = layer.parts["lora_down.weight"]
        parts[f"{written}.{up}"] = layer.parts["lora_up.weight"]
        expected[tensor] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


def test_names_of_attention_processors(store: Store, tmp_path: Path) -> None:
    """As diffusers wrote them before it used PEFT: `attn2.processor.to_out_lora.down.weight`."""
    rng = np.random.default_rng(9)
    base = sd_1()
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    block = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor"
    for short, path in (("to_q", "to_q"), ("to_out", "to_out.0")):
        layer = lora((H, H), rng, alpha=None)
        parts[f"{block}.{short}_lora.down.weight"] = layer.parts["lora_down.weight"]
        parts[f"{block}.{short}_lora.up.weight"] = layer.parts["lora_up.weight"]
        expected[f"model.diffusion_model.{ATTENTION}.{path}.weight"] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


def test_the_second_text_encoder_has_one_matrix_for_three(store: Store, tmp_path: Path) -> None:
    """kohya names q, k and v of SDXL's OpenCLIP; in the file they are rows of one tensor."""
    rng = np.random.default_rng(10)
    base = sdxl()
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    second = f"conditioner.embedders.1.model.{BLOCK_2}"
    for number, one in enumerate("qkv"):
        if one == "k":
            continue
        layer = lora((H, H), rng, rank=2 + number)
        parts |= layer.named(kohya(f"{CLIP}.self_attn.{one}_proj", "lora_te2_"))
        rows = slice(number * H, (number + 1) * H)
        expected[f"{second}.attn.in_proj_weight"][rows] += layer.delta
    for ours, theirs, shape in (
        ("attn.out_proj", "self_attn.out_proj", (H, H)),
        ("mlp.c_fc", "mlp.fc1", (32, H)),
    ):
        layer = lora(shape, rng)
        parts |= layer.named(kohya(f"{CLIP}.{theirs}", "lora_te2_"))
        expected[f"{second}.{ours}.weight"] += layer.delta
    layer = lora((H, H), rng)
    parts |= layer.named(kohya(f"{CLIP}.self_attn.q_proj", "lora_te1_"))
    name = f"conditioner.embedders.0.transformer.{CLIP}.self_attn.q_proj.weight"
    expected[name] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


FLUX_PARTS = {
    "double_blocks.0.img_attn.qkv": [(f"transformer_blocks.0.attn.to_{one}", H) for one in "qkv"],
    "double_blocks.0.txt_attn.qkv": [
        (f"transformer_blocks.0.attn.add_{one}_proj", H) for one in "qkv"
    ],
    "single_blocks.0.linear1": [
        *((f"single_transformer_blocks.0.attn.to_{one}", H) for one in "qkv"),
        ("single_transformer_blocks.0.proj_mlp", 4 * H),
    ],
}
FLUX_WHOLE = {
    "double_blocks.0.img_attn.proj": "transformer_blocks.0.attn.to_out.0",
    "double_blocks.0.img_mod.lin": "transformer_blocks.0.norm1.linear",
    "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    "final_layer.linear": "proj_out",
}


def biased(base: Mapping[str, Array], rng: Any) -> dict[str, Array]:
    """The same model with biases, and norms in a resnet."""
    found = dict(base)
    for name, values in base.items():
        end = "in_proj_weight" if name.endswith("in_proj_weight") else "weight"
        found[name.removesuffix(end) + end.replace("weight", "bias")] = normal(len(values), rng)
    for part in ("weight", "bias"):
        for place in (f"model.diffusion_model.{RESNET}.in_layers.0", "cond_stage_model.ln"):
            found[f"{place}.{part}"] = normal(8, rng)
    return found


def normal(shape: int | tuple[int, ...], rng: Any) -> Array:
    values: Array = rng.standard_normal(shape).astype(np.float32)
    return values


def test_norms_and_biases_are_differences(store: Store, tmp_path: Path) -> None:
    """LyCORIS trains norms (`w_norm`, `b_norm`) and biases (`diff_b`), ComfyUI's files have both as
    `diff`: each is added to the module's tensor, of OpenCLIP's biases to the rows that are its."""
    rng = np.random.default_rng(12)
    base = biased(sdxl(), rng)
    unet, norm = f"model.diffusion_model.{ATTENTION}.to_q", DIFFUSERS[f"{RESNET}.in_layers.2"]
    norm = norm.replace("conv1", "norm1")
    layer = lora((H, H), rng)
    parts = layer.named(kohya(f"{ATTENTION}.to_q"))
    expected = {name: values.copy() for name, values in base.items()}
    expected[f"{unet}.weight"] += layer.delta
    second = f"conditioner.embedders.1.model.{BLOCK_2}.attn"
    out = f"model.diffusion_model.{ATTENTION}.to_out.0"
    for key, tensor, rows in (
        (f"{kohya(norm)}.w_norm", f"model.diffusion_model.{RESNET}.in_layers.0.weight", 8),
        (f"{kohya(norm)}.b_norm", f"model.diffusion_model.{RESNET}.in_layers.0.bias", 8),
        (f"{kohya(f'{ATTENTION}.to_q')}.diff_b", f"{unet}.bias", H),
        (f"diffusion_model.{ATTENTION}.to_out.0.diff_b", f"{out}.bias", H),
        (f"{kohya(f'{CLIP}.self_attn.k_proj', 'lora_te2_')}.diff_b", f"{second}.in_proj_bias", H),
    ):
        parts[key] = normal(rows, rng)
        at = H if "in_proj" in tensor else 0
        expected[tensor][at : at + rows] += parts[key]
    same(baked(store, tmp_path, base, parts), expected)
    with pytest.raises(Incompatible, match=r"are not products: .*in_layers\.0\.bias"):
        store.convert_adapter("lora", "base", name="x", format="kohya")


def test_a_bias_of_a_lora_scales_with_it(store: Store, tmp_path: Path) -> None:
    """PEFT's `lora_bias` is a bias of the second factor: it counts as often as the product, so a
    header's config scales both; with an alpha nobody says how."""
    rng = np.random.default_rng(13)
    base = biased(sd_1(), rng)
    path = f"{ATTENTION}.to_q"
    layer = lora((H, H), rng, alpha=None)
    key = f"unet.{DIFFUSERS[path]}"
    down, up = ENDS["peft"]
    parts = {
        f"{key}.{down}": layer.parts["lora_down.weight"],
        f"{key}.{up}": layer.parts["lora_up.weight"],
        f"{key}.lora_B.bias": normal(H, rng),
    }
    config = {"unet.r": 4, "unet.lora_alpha": 2, "unet.lora_bias": True}
    save_file(base, tmp_path / "base.safetensors")
    store.add(tmp_path / "base.safetensors", name="base")
    told = {"lora_adapter_metadata": json.dumps(config)}
    save_file(parts, tmp_path / "lora.safetensors", metadata=told)
    store.add(tmp_path / "lora.safetensors", name="lora")
    found = applied(store, "base", "lora", tmp_path / "out")
    name = f"model.diffusion_model.{path}"
    expected = {name: values.copy() for name, values in base.items()}
    expected[f"{name}.weight"] += layer.delta / 2
    expected[f"{name}.bias"] += parts[f"{key}.lora_B.bias"] / 2
    same(found, expected)
    save_file({**parts, f"{key}.alpha": np.ones((), np.float32)}, tmp_path / "odd.safetensors")
    with pytest.raises(Incompatible, match="beside another bias or an alpha"):
        store.add(tmp_path / "odd.safetensors", name="odd", base="base")


def test_a_bias_that_the_base_lacks_is_named(store: Store, tmp_path: Path) -> None:
    """No bias is made: a module without one is refused."""
    save_file(sd_1(), tmp_path / "base.safetensors")
    store.add(tmp_path / "base.safetensors", name="base")
    key = kohya(f"{ATTENTION}.to_q")
    parts = {f"{key}.diff": np.ones((H, H), np.float32), f"{key}.diff_b": np.ones(H, np.float32)}
    save_file(parts, tmp_path / "lora.safetensors")
    with pytest.raises(Incompatible, match=r"to_q\.bias is not in the base"):
        store.add(tmp_path / "lora.safetensors", name="lora", base="base")


def test_a_flux_of_its_authors_with_an_adapter_of_diffusers(store: Store, tmp_path: Path) -> None:
    """Layers of diffusers are rows of the authors' matrices; those that are missing stay."""
    rng = np.random.default_rng(11)
    base = drawn(FLUX, "", 4)
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for name, own in FLUX_PARTS.items():
        begin = 0
        for path, rows in own:
            layer = lora((rows, H), rng)
            parts |= layer.named(f"transformer.{path}")
            expected[f"{name}.weight"][begin : begin + rows] += layer.delta
            begin += rows
    for name, path in FLUX_WHOLE.items():
        layer = lora(FLUX[name], rng)
        parts |= layer.named(f"transformer.{path}")
        expected[f"{name}.weight"] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


@pytest.mark.parametrize("form", ["lora", "loha", "lokr of w2"])
def test_a_flux_of_diffusers_with_an_adapter_of_kohya(
    store: Store, tmp_path: Path, form: str
) -> None:
    """One product of the authors' matrix changes all the layers that it is in diffusers."""
    rng = np.random.default_rng(12)
    base: dict[str, Array] = {}
    for own in FLUX_PARTS.values():
        base |= drawn({path: (rows, H) for path, rows in own}, "", len(base))
    base |= drawn({path: FLUX[name] for name, path in FLUX_WHOLE.items()}, "", 5)
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for name, own in FLUX_PARTS.items():
        layer = FORMS[form](FLUX[name], rng)
        parts |= layer.named(kohya(name))
        begin = 0
        for path, rows in own:
            expected[f"{path}.weight"] += layer.delta[begin : begin + rows]
            begin += rows
    for name, path in FLUX_WHOLE.items():
        layer = FORMS[form](FLUX[name], rng)
        parts |= layer.named(kohya(name))
        expected[f"{path}.weight"] += layer.delta
    found = baked(store, tmp_path, base, parts)
    same(found, expected)


def test_dora_of_a_convolution(store: Store, tmp_path: Path) -> None:
    """dora_scale gives each row of the changed weight its norm."""
    rng = np.random.default_rng(13)
    base = sd_1()
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for path in (f"{ATTENTION}.to_q", f"{RESNET}.in_layers.2"):
        layer = lora(UNET[path], rng)
        name = f"model.diffusion_model.{path}.weight"
        norms = rng.uniform(0.5, 2, (UNET[path][0], *([1] * (len(UNET[path]) - 1))))
        parts |= layer.named(kohya(DIFFUSERS[path]))
        parts[kohya(DIFFUSERS[path]) + ".dora_scale"] = norms.astype(np.float32)
        changed = base[name].astype(np.float64) + layer.delta
        axes = tuple(range(1, changed.ndim))
        own = np.sqrt((changed**2).sum(axis=axes, keepdims=True))
        expected[name] = (norms * changed / own).astype(np.float32)
    found = baked(store, tmp_path, base, parts)
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=1e-4, atol=1e-5), name


def test_a_pipeline_of_diffusers(store: Store, tmp_path: Path) -> None:
    """One file changes the UNet and the text encoder of a pipeline, each in its directory."""
    rng = np.random.default_rng(15)
    models = {
        "unet/diffusion_pytorch_model": drawn(
            {DIFFUSERS[path]: shape for path, shape in UNET.items()}, "", 1
        ),
        "text_encoder/model": drawn(TEXTS, "", 2),
        "vae/diffusion_pytorch_model": {"decoder.conv_in.weight": np.ones((4, 4, 3, 3), "f4")},
    }
    place = tmp_path / "pipeline"
    for name, tensors in models.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / f"{name}.safetensors")
        (place / name).with_name("config.json").write_text("{}")
    (place / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    path, text = f"{RESNET}.in_layers.2", f"{CLIP}.mlp.fc1"
    layer, of_text = lora(UNET[path], rng), lora(TEXTS[text], rng)
    parts = layer.named(kohya(DIFFUSERS[path])) | of_text.named(kohya(text, "lora_te_"))
    save_file(parts, tmp_path / "lora.safetensors")
    store.add(place, name="base")
    store.add(tmp_path / "lora.safetensors", name="lora", base="base")
    request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", tmp_path / "baked")
    for name, tensors in models.items():
        found = load_file(tmp_path / "baked" / f"{name}.safetensors")
        for tensor, values in tensors.items():
            more = {
                f"{DIFFUSERS[path]}.weight": layer.delta,
                f"{text}.weight": of_text.delta,
            }.get(tensor, 0)
            assert np.allclose(found[tensor], values + more, rtol=1e-5, atol=1e-4), tensor
    with pytest.raises(Incompatible, match="not in the base"):
        store.merge(
            store.plan(MergeRequest(base="base:vae", experts=["lora"], method="task_arithmetic")),
            name="wrong",
        )


def test_text_encoders_that_the_base_lacks_are_left_out(store: Store, tmp_path: Path) -> None:
    """A file of the denoiser alone takes what is of the denoiser."""
    rng = np.random.default_rng(14)
    base = drawn(UNET, "model.diffusion_model.", 1)
    layer, text = lora((H, H), rng), lora((H, H), rng)
    path = f"{ATTENTION}.to_q"
    parts = layer.named(kohya(path)) | text.named(kohya(f"{CLIP}.self_attn.q_proj", "lora_te_"))
    expected = base[f"model.diffusion_model.{path}.weight"] + layer.delta
    found = baked(store, tmp_path, base, parts)
    assert np.allclose(found[f"model.diffusion_model.{path}.weight"], expected, atol=1e-4)
    request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
    [told] = [one for one in store.plan(request).warnings if one.kind == "no text encoder"]
    assert told.text == "lora: 3 of its tensors are of text encoders, which base does not have"


def test_a_header_of_diffusers_scales(store: Store, tmp_path: Path) -> None:
    """What has no alpha of its own is scaled as the config in the header says, by module."""
    rng = np.random.default_rng(16)
    base = sd_1()
    paths = (f"{ATTENTION}.to_q", f"{ATTENTION}.to_k")
    parts: dict[str, Array] = {}
    expected = {name: values.copy() for name, values in base.items()}
    for path, scale in zip(paths, (8 / 4, 2 / 4), strict=True):
        layer = lora(UNET[path], rng, alpha=None)
        for one, other in (("down", "A"), ("up", "B")):
            key = f"unet.{DIFFUSERS[path]}.lora_{other}.weight"
            parts[key] = layer.parts[f"lora_{one}.weight"]
        expected[f"model.diffusion_model.{path}.weight"] += layer.delta * np.float32(scale)
    told = {"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"attn2.to_k": 2}}
    save_file(
        parts,
        tmp_path / "told.safetensors",
        metadata={"format": "pt", "lora_adapter_metadata": json.dumps(told)},
    )
    store.add(tmp_path / "told.safetensors", name="told")
    save_file(base, tmp_path / "plain.safetensors")
    store.add(tmp_path / "plain.safetensors", name="plain")
    request = MergeRequest(base="plain", experts=["told"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", tmp_path / "out")
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    same(found, expected)


WRONG: Mapping[str, tuple[Callable[[dict[str, Array]], None], str]] = {
    "an unknown layer": (
        lambda parts: parts.update(
            lora((2, 2), np.random.default_rng(2)).named("lora_unet_nowhere")
        ),
        "nowhere is not in the base",
    ),
    "no up": (lambda parts: _pop(parts, "lora_up.weight"), "has down"),
    "an unknown key": (
        lambda parts: parts.update({"lora_unet_x.scale": np.ones(1, "f4")}),
        "no form of adapters",
    ),
    "OFT of a form that is not known": (
        lambda parts: parts.update({"lora_unet_x.oft_diag": np.ones((2, 2), "f4")}),
        "cannot apply OFT",
    ),
    "BOFT": (
        lambda parts: parts.update({"lora_unet_x.boft_R": np.ones((2, 2), "f4")}),
        "cannot apply BOFT",
    ),
    "IA3 without its vector": (
        lambda parts: parts.update({"lora_unet_x.on_input": np.ones(2, "f4")}),
        "x has on_input, which make no product",
    ),
    "blocks of other rows": (
        lambda parts: parts.update(
            {f"{kohya('out.2')}.oft_blocks": np.ones((3, 2, 2), "f4")},
        ),
        "which it cannot multiply",
    ),
    "another width": (
        lambda parts: parts.update(
            {f"{kohya(ATTENTION)}_to_q.lora_down.weight": np.ones((4, 5), "f4")}
        ),
        r"has shape \[16, 5\]",
    ),
    "an alpha that is none": (
        lambda parts: parts.update({f"{kohya(ATTENTION)}_to_q.alpha": np.ones(2, "f4")}),
        "is no number",
    ),
    "a layer twice": (
        lambda parts: parts.update(
            lora((H, H), np.random.default_rng(1)).named(kohya(DIFFUSERS[f"{ATTENTION}.to_q"]))
        ),
        "several products",
    ),
}


def _pop(parts: dict[str, Array], end: str) -> None:
    del parts[next(name for name in parts if name.endswith(end))]


@pytest.mark.parametrize("case", WRONG)
def test_what_is_unknown_is_named(store: Store, tmp_path: Path, case: str) -> None:
    """Keys that are none, layers that the base lacks, tensors that do not fit: an error."""
    change, text = WRONG[case]
    parts = dict(lora((H, H), np.random.default_rng(1)).named(kohya(f"{ATTENTION}.to_q")))
    change(parts)
    with pytest.raises(Incompatible, match=text):
        baked(store, tmp_path, sd_1(), parts)


@pytest.mark.parametrize("method", ["cat", "svd"])
def test_files_of_kohya_are_combined(store: Store, tmp_path: Path, method: str) -> None:
    """Adapters of different ranks and scales, with convolutions, become one with the same keys."""
    rng = np.random.default_rng(17)
    base = sd_1()
    layers = (f"{ATTENTION}.to_q", f"{RESNET}.in_layers.2")
    deltas = {path: np.zeros(UNET[path], "f4") for path in layers}
    for name, rank, weight in (("one", 2, 0.5), ("two", 3, 2.0)):
        parts: dict[str, Array] = {}
        for path in layers:
            layer = lora(UNET[path], rng, rank=rank)
            parts |= layer.named(kohya(DIFFUSERS[path]))
            deltas[path] += np.float32(weight) * layer.delta
        save_file(parts, tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
    rank = None if method == "cat" else 5
    store.combine_adapters(
        {"one": 0.5, "two": 2.0}, name="both", method=method, rank=rank, dtype="float32"
    )
    store.checkout("both", tmp_path / "both")
    found = load_file(tmp_path / "both" / "one.safetensors")
    key = kohya(DIFFUSERS[f"{RESNET}.in_layers.2"])
    assert found[f"{key}.lora_down.weight"].shape == (5, 8, 3, 3)
    assert found[f"{key}.lora_up.weight"].shape == (H, 5, 1, 1)
    save_file(base, tmp_path / "base.safetensors")
    store.add(tmp_path / "base.safetensors", name="base")
    request = MergeRequest(base="base", experts=["both"], method="task_arithmetic")
    store.merge(store.plan(request), name="baked")
    store.checkout("baked", tmp_path / "baked")
    after = load_file(next((tmp_path / "baked").glob("*.safetensors")))
    for path in layers:
        name = f"model.diffusion_model.{path}.weight"
        assert np.allclose(after[name], base[name] + deltas[path], rtol=1e-4, atol=1e-3)


def test_what_cannot_be_combined_is_named(store: Store, tmp_path: Path) -> None:
    """LoHa, DoRA, layers named in two ways, and an adapter of PEFT beside one without a config."""
    rng = np.random.default_rng(18)
    path = f"{ATTENTION}.to_q"
    plain = lora(UNET[path], rng)
    files = {
        "plain": plain.named(kohya(DIFFUSERS[path])),
        "theirs": plain.named(kohya(path)),
        "loha": loha(UNET[path], rng).named(kohya(DIFFUSERS[path])),
        "dora": plain.named(kohya(DIFFUSERS[path]))
        | {kohya(DIFFUSERS[path]) + ".dora_scale": np.ones((H, 1), "f4")},
    }
    for name, parts in files.items():
        save_file(parts, tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
    up, down = rng.standard_normal((2, H, H)).astype("f4")
    store.add(
        Adapter({"to_q": (up, down)}, settings={"r": H}).write(tmp_path / "peft"), name="peft"
    )
    for other, text in (
        ("theirs", "names layers as"),
        ("loha", "is loha"),
        ("dora", "is DoRA"),
        ("peft", "is PEFT's"),
    ):
        with pytest.raises(Incompatible, match=text):
            store.combine_adapters({"plain": 1.0, other: 1.0}, name="both", method="cat")


def applied(store: Store, base: str, adapter: str, place: Path) -> dict[str, Array]:
    """A base with an adapter, merged and read."""
    request = MergeRequest(base=base, experts=[adapter], method="task_arithmetic")
    store.merge(store.plan(request), name="applied")
    store.checkout("applied", place)
    return load_file(next(place.glob("*.safetensors")))


FILES: Mapping[str, Callable[[], dict[str, Array]]] = {
    "sd 1": sd_1,
    "sdxl": lambda: sdxl() | drawn({"label_emb.0.0": (8, H)}, "model.diffusion_model.", 6),
    "sd 1 of diffusers": lambda: drawn(
        {DIFFUSERS[path]: shape for path, shape in UNET.items()}, "", 1
    ),
    "flux": lambda: drawn(FLUX, "", 4),
    "flux of diffusers": lambda: (
        drawn({path: (rows, H) for own in FLUX_PARTS.values() for path, rows in own}, "", 4)
        | drawn({path: FLUX[name] for name, path in FLUX_WHOLE.items()}, "", 5)
    ),
}
CHANGED = {
    "sd 1": (f"model.diffusion_model.{RESNET}.in_layers.2", "model.diffusion_model.out.2"),
    "sdxl": ("model.diffusion_model.output_blocks.5.2.conv", "model.diffusion_model.label_emb.0.0"),
    "sd 1 of diffusers": ("up_blocks.0.upsamplers.0.conv", "down_blocks.0.resnets.0.conv1"),
    "flux": ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear2"),
    "flux of diffusers": (
        *("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v"),
        "single_transformer_blocks.0.proj_mlp",
    ),
}
SPELLED = {
    ("sd 1", "kohya"): "lora_unet_down_blocks_0_resnets_0_conv1.alpha",
    ("sd 1", "diffusers"): "unet.down_blocks.0.resnets.0.conv1.lora_A.weight",
    ("sdxl", "kohya"): "lora_unet_output_blocks_5_2_conv.lora_up.weight",
    ("sdxl", "diffusers"): "unet.up_blocks.1.upsamplers.0.conv.lora_B.weight",
    ("sd 1 of diffusers", "kohya"): "lora_unet_up_blocks_0_upsamplers_0_conv.lora_down.weight",
    ("sd 1 of diffusers", "diffusers"): "unet.up_blocks.0.upsamplers.0.conv.lora_A.weight",
    ("flux", "kohya"): "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",
    ("flux", "diffusers"): "transformer.transformer_blocks.0.attn.to_k.lora_A.weight",
    ("flux of diffusers", "kohya"): "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",
    ("flux of diffusers", "diffusers"): "transformer.transformer_blocks.0.attn.to_v.lora_A.weight",
}


@pytest.mark.parametrize("format", ["peft", "kohya", "diffusers"])
@pytest.mark.parametrize("kind", FILES)
def test_a_difference_in_every_format(store: Store, tmp_path: Path, kind: str, format: str) -> None:
    """What is extracted of a fine-tune gives the fine-tune again, in each format; converted into
    another format, too.
    """
    rng = np.random.default_rng(19)
    base = FILES[kind]()
    tuned = {name: values.copy() for name, values in base.items()}
    names = [f"{path}.weight" for path in CHANGED[kind]]
    if kind == "sdxl" and format != "peft":
        names.append(f"conditioner.embedders.1.model.{BLOCK_2}.attn.in_proj_weight")
    for name in names:
        tuned[name] += lora(base[name].shape, rng).delta
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
    report = store.extract_lora(
        "tuned", "base", name="loras/made", rank=4, dtype="float32", format=format
    )
    assert report.products == len(names)
    assert report.relative_error < 1e-5
    found = applied(store, "base", "loras/made", tmp_path / "out")
    for name, values in tuned.items():
        assert np.allclose(found[name], values, atol=2e-4), name
    store.checkout("loras/made", tmp_path / "lora")
    [file] = (tmp_path / "lora").glob("*.safetensors")
    assert file.name == ("adapter_model.safetensors" if format == "peft" else "made.safetensors")
    assert SPELLED.get((kind, format), "") in {*load_file(file), ""}
    for other in ("peft", "kohya", "diffusers"):
        if other == "peft" and "attn.in_proj_weight" in names[-1]:
            continue
        converted = store.convert_adapter("loras/made", "base", name=f"loras/{other}", format=other)
        assert converted.dtype == "F32"
        found = applied(store, "base", f"loras/{other}", tmp_path / f"out-{other}")
        for name, values in tuned.items():
            assert np.allclose(found[name], values, atol=2e-4), name


def test_factors_are_converted_block_for_block(store: Store, tmp_path: Path) -> None:
    """kohya's factors in the names of diffusers are the same tensors; LoHa becomes a product."""
    rng = np.random.default_rng(20)
    path = f"{ATTENTION}.to_q"
    save_file(sd_1(), tmp_path / "base.safetensors")
    store.add(tmp_path / "base.safetensors", name="base")
    for name, layer in (("lora", lora(UNET[path], rng)), ("loha", loha(UNET[path], rng))):
        save_file(layer.named(kohya(DIFFUSERS[path])), tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
        before = applied(store, "base", name, tmp_path / f"before-{name}")
        report = store.convert_adapter(name, "base", name=f"as/{name}", format="diffusers")
        after = applied(store, "base", f"as/{name}", tmp_path / f"after-{name}")
        assert report.rank == (4 if name == "lora" else 9)
        key = f"model.diffusion_model.{path}.weight"
        assert (before[key] == after[key]).all()
    catalog = store._catalog
    own, other = (
        tensors_of(catalog, catalog.manifest_of(store[name].id)) for name in ("lora", "as/lora")
    )
    assert (
        own[f"{kohya(DIFFUSERS[path])}.lora_down.weight"]
        == (other[f"unet.{DIFFUSERS[path]}.lora_A.weight"])
    )


def test_what_no_format_has_a_name_for_is_named(store: Store, tmp_path: Path) -> None:
    """A format that is none, a base without an adapter, a layer of the VAE."""
    base = sd_1()
    tuned = {name: values.copy() for name, values in base.items()}
    tuned["first_stage_model.decoder.conv_in.weight"] += 1
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        store.add(tmp_path / f"{name}.safetensors", name=name)
    with pytest.raises(BadRequest, match="none of peft"):
        store.extract_lora("tuned", "base", name="x", rank=4, format="a1111")
    with pytest.raises(BadRequest, match=r"can state: only in first_stage_model"):
        store.extract_lora("tuned", "base", name="x", rank=4, format="kohya")
    tuned[f"model.diffusion_model.{ATTENTION}.to_q.weight"] += 1
    save_file(tuned, tmp_path / "both.safetensors")
    store.add(tmp_path / "both.safetensors", name="both")
    made = store.extract_lora("both", "base", name="x", rank=4, format="kohya")
    assert made.left_out == ("first_stage_model.decoder.conv_in.weight",)
    assert made.products == 1
    with pytest.raises(Incompatible, match="is no LoRA adapter"):
        store.convert_adapter("tuned", "base", name="x", format="kohya")


def test_from_the_command_line(tmp_path: Path) -> None:
    """`convert-adapter` says what it made, and where the file is."""
    program = Program(tmp_path / "store")
    program.succeed("init")
    rng = np.random.default_rng(21)
    path = f"{ATTENTION}.to_q"
    save_file(sd_1(), tmp_path / "base.safetensors")
    save_file(lora(UNET[path], rng).named(kohya(path)), tmp_path / "lora.safetensors")
    program.succeed("add", tmp_path / "base.safetensors", "--name", "base")
    program.succeed("add", tmp_path / "lora.safetensors", "--name", "lora", "--base", "base")
    given = ("convert-adapter", "lora", "--base", "base", "--name", "loras/d", "--format")
    told = program.succeed(*given, "diffusers")
    assert "1, the largest rank 4" in told.out
    assert "checkout loras/d" in told.out
    assert "nothing new" in program.succeed(*given, "diffusers").out
    done = program(*given, "a1111")
    assert done.status != 0
    assert "none of peft, kohya, diffusers" in done.err
    fine = ("extract-lora", "base", "--base", "base", "--name", "x", "--format", "kohya")
    assert "does not differ" in program(*fine).err
