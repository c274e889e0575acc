"""`combine_adapters` makes what PEFT's `add_weighted_adapter` makes of the same adapters.

Both compute in float32 what combines elements: with factors in float32 the results are equal bit
for bit.  With 16 bits, PEFT rounds some steps on the way (`cat` rounds after the weight and after
the scale, `dare_*` after the division by the density); mstore rounds once.  The factors of a
decomposition are not unique, so products are compared.  Draws differ: PEFT gets mstore's.
"""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from test_adapters import (
    ATTENTION,
    BASES,
    MLP,
    ROUNDED_ONCE,
    Bases,
    Case,
    load,
    ordered,
    trained,
)
from torch import Tensor

from mstore import MergeRequest
from mstore.api.reports import CombineReport
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key

SEED = 11
EXACT = 3
"""So many adapters PEFT adds in order."""
NEAR = 2e-6
"""How far products may be apart, relative to their norm."""
CLAMPED = 0.1
"""How far the largest elements may be apart, relatively, where they are clamped."""


@dataclass(frozen=True)
class Combination:
    """Adapters, by their PEFT options, with weights, and how PEFT is asked to combine them."""

    name: str
    method: str
    options: tuple[dict[str, Any], ...] = ({}, {})
    weights: tuple[float, ...] = (0.7, 0.45)
    parameters: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    base: str = "llama fp32"
    dtype: torch.dtype = torch.float32

    @property
    def draws(self) -> bool:
        return self.method.startswith("dare")

    @property
    def truncates(self) -> bool:
        return self.method.endswith("svd")


def several(
    name: str, *methods: str, dtype: str = "float32", density: float = 0.4, **more: Any
) -> list[Combination]:
    """The same adapters by several methods, with a density where it takes one."""
    found = []
    for method in methods:
        parameters = {} if method in ("linear", "cat", "svd") else {"density": density}
        parameters |= more.get("parameters", {})
        rest = {**more, "parameters": parameters, "dtype": getattr(torch, dtype)}
        found.append(Combination(f"{name}, {method}", method, **rest))
    return found


FACTORS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
PRODUCTS = ("svd", "ties_svd", "dare_linear_svd", "dare_ties_svd", "magnitude_prune_svd")
EVERY = (*FACTORS, "cat", *PRODUCTS)

COMBINATIONS = [
    *several("two", *EVERY),
    *several("three", *EVERY, options=({}, {}, {}), weights=(1.0, -0.5, 0.25)),
    *several("nine", "linear", "ties", "cat", options=({"r": 2},) * 9, weights=(0.1,) * 9),
    *several("ranks", "cat", "svd", "ties_svd", options=({"r": 3}, {"r": 8, "lora_alpha": 5})),
    *several("scales", *FACTORS, "cat", options=({"lora_alpha": 3}, {"lora_alpha": 20})),
    *several("negative alpha", "linear", "cat", "svd", options=({"lora_alpha": -4}, {})),
    *several("rank-stabilized", *EVERY, options=({}, {"use_rslora": True})),
    *several("both rank-stabilized", "linear", "svd", options=({"use_rslora": True},) * 2),
    *several(
        "patterns",
        *EVERY,
        options=({"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"k_proj": 40}},) * 2,
    ),
    *several(
        "modules of some",
        *EVERY,
        options=({"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["v_proj", *MLP]}),
    ),
    *several(
        "ranks of some",
        "cat",
        "svd",
        options=({"target_modules": ["q_proj", "v_proj"], "r": 4}, {"r": 6}),
    ),
    *several("embeddings", *EVERY, options=({"target_modules": ["embed_tokens", "lm_head"]},) * 2),
    *several(
        "tied",
        *("linear", "cat", "svd"),
        options=({"target_modules": ["embed_tokens"]},) * 2,
        base="tied fp32",
    ),
    *several(
        "transposed",
        *EVERY,
        options=({"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},) * 2,
        base="gpt2 fp32",
    ),
    *several(
        "frequency",
        *("ties", "dare_ties", "ties_svd", "dare_ties_svd"),
        options=({},) * 3,
        weights=(0.5, 0.8, 1.0),
        parameters={"majority_sign_method": "frequency"},
    ),
    *several("smaller rank", *PRODUCTS, rank=3),
    *several("larger rank", *PRODUCTS, rank=20),
    *several("clamp", "svd", "ties_svd", parameters={"clamp": 0.99}),
    *several("little density", "ties", "magnitude_prune", density=0.001),
    *several("all of it", "ties", "dare_linear", "magnitude_prune_svd", density=1.0),
    *several("bf16", *EVERY, base="llama bf16", dtype="bfloat16"),
    *several("fp16", *EVERY, base="llama fp16", dtype="float16"),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    torch.set_num_threads(1)
    made = Bases(tmp_path_factory.mktemp("combinations"))
    yield made
    made.store.close()


def adapters_of(bases: Bases, one: Combination) -> list[Path]:
    """The adapters, each made and stored when it is asked for."""
    found = []
    for number, options in enumerate(one.options):
        given = {"target_modules": list(ATTENTION), "r": 8, "lora_alpha": 16, **options}
        name = f"{one.base} {one.dtype} {number} {given}"
        path = bases.root / f"a{zlib.crc32(name.encode()):08x}"
        if not path.exists():
            trained(bases, Case(name, one.base, one.dtype, given), path)
            bases.store.add(path, name=path.name)
        found.append(path)
    return found


def with_peft(
    bases: Bases, one: Combination, paths: list[Path], dtype: torch.dtype | None = None
) -> Any:
    """PEFT's model with the combination as its adapter "mixed"; dtype: to compute in."""
    names = [f"a{number}" for number in range(len(paths))]
    # PEFT gives adapters the type of the weights that they change.
    base = load(bases.path(one.base), dtype or BASES[one.base][1])
    model = PeftModel.from_pretrained(
        base, paths[0], adapter_name=names[0], autocast_adapter_dtype=False
    )
    for name, path in zip(names[1:], paths[1:], strict=True):
        model.load_adapter(path, name, autocast_adapter_dtype=False)
    given = {key: one.parameters[key] for key in one.parameters if key != "clamp"}
    if one.truncates:
        given |= {"svd_rank": one.rank, "svd_clamp": one.parameters.get("clamp")}
    with pytest.MonkeyPatch.context() as patch:
        if one.draws:
            drawn = draws(model, names, one)
            patch.setattr(
                merge_utils,
                "random_pruning",
                lambda tensor, density, rescale: tensor * next(drawn).to(tensor) / density,
            )
        model.add_weighted_adapter(
            names, list(one.weights), "mixed", combination_type=one.method, **given
        )
    return model


def factors_of(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """lora_A and lora_B by module."""
    found = {}
    for name, down in tensors.items():
        for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            module, end, rest = name.partition(f".{one}")
            if end and rest in ("", ".weight"):
                found[module] = (down, tensors[f"{module}.{other}{rest}"])
    return found


def by_peft(*given: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors that PEFT makes."""
    model = with_peft(*given)
    found = get_peft_model_state_dict(model, adapter_name="mixed", save_embedding_layers=False)
    return factors_of(found)


def draws(model: Any, names: list[str], one: Combination) -> Iterator[Tensor]:
    """mstore's masks, in the order in which PEFT asks for its own."""
    limit = round(one.parameters["density"] * 2.0**32)

    def mask(name: str, position: int, shape: tuple[int, ...]) -> Tensor:
        key = mask_key(SEED, position, name)
        return torch.from_numpy(masks.even(key, 0, math.prod(shape), limit)).reshape(shape)

    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        module = path.removeprefix("base_model.model.")
        linear = [(k, name) for k, name in enumerate(names) if name in layer.lora_A]
        others = [(k, name) for k, name in enumerate(names) if name in layer.lora_embedding_A]
        sides = [
            {k: layer.lora_A[name].weight for k, name in linear}
            | {k: layer.lora_embedding_A[name] for k, name in others},
            {k: layer.lora_B[name].weight for k, name in linear}
            | {k: layer.lora_embedding_B[name] for k, name in others},
        ]
        if one.truncates:
            for k, down in sides[0].items():
                shape = (sides[1][k].shape[0], down.shape[1])
                found = mask(f"{module}.weight", k, shape)
                yield found.T if others or layer.fan_in_fan_out else found
            continue
        ends = ("lora_A.weight", "lora_B.weight")
        if others:
            ends = ("lora_embedding_A", "lora_embedding_B")
        for end, side in zip(ends, sides, strict=True):
            for k, factor in side.items():
                yield mask(f"base_model.model.{module}.{end}", k, tuple(factor.shape))


def combined(
    bases: Bases, one: Combination, paths: list[Path], dtype: str | None = None
) -> tuple[Path, CombineReport]:
    """What mstore makes, checked out."""
    parameters = dict(one.parameters)
    if one.draws:
        parameters["seed"] = SEED
    experts = [(path.name, weight) for path, weight in zip(paths, one.weights, strict=True)]
    report = bases.store.combine_adapters(
        experts, one.method, name="mixed", parameters=parameters, rank=one.rank, dtype=dtype
    )
    out = bases.root / "mixed"
    shutil.rmtree(out, ignore_errors=True)
    bases.store.checkout("mixed", out)
    return out, report


def ours_of(*given: Any) -> dict[str, tuple[Tensor, Tensor]]:
    out, _ = combined(*given)
    return factors_of(load_file(out / "adapter_model.safetensors"))


def sides(
    ours: dict[str, tuple[Tensor, Tensor]], theirs: dict[str, tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each factor of both.  Of the larger one, what is more is zero."""
    assert ours.keys() == theirs.keys()
    for module, (down, up) in ours.items():
        other_down, other_up = theirs[module]
        for side, one, other in (("A", down, other_down), ("B", up.T, other_up.T)):
            n = min(len(one), len(other))
            assert not one[n:].any(), module
            assert not other[n:].any(), module
            yield f"{module} {side}", one[:n], other[:n]


def on_thresholds(one: Combination, paths: list[Path]) -> dict[str, Tensor]:
    """Which elements of factors equal the smallest that is kept: of equal ones PEFT takes any."""
    found: dict[str, Tensor] = {}
    for path in paths:
        own = factors_of(load_file(path / "adapter_model.safetensors"))
        for name, factor, _ in sides(own, own):
            sizes = factor.abs()
            count = int(one.parameters["density"] * sizes.numel())
            least = sizes.reshape(-1).sort(descending=True).values[count - 1]
            found[name] = found.get(name, torch.zeros(1, dtype=torch.bool)) | (sizes == least)
    return found


def of(*methods: str) -> list[Combination]:
    return [one for one in COMBINATIONS if one.method in methods]


@pytest.mark.parametrize("one", of(*FACTORS, "cat"), ids=lambda one: one.name)
def test_factors_are_those_of_peft(bases: Bases, one: Combination) -> None:
    """Equal bits in float32, for up to three adapters; of more, PEFT adds some elements in another
    order.  In 16 bits, the exact factors rounded once, or very rarely their neighbours."""
    paths = adapters_of(bases, one)
    ours = ours_of(bases, one, paths)
    is_narrow = one.dtype != torch.float32
    if not is_narrow and len(paths) <= EXACT:
        for name, own, other in sides(ours, by_peft(bases, one, paths)):
            assert torch.equal(own, other), name
        return
    exact = by_peft(bases, one, paths, torch.float64)
    trims = one.method in ("ties", "magnitude_prune")
    aside = on_thresholds(one, paths) if trims and is_narrow else {}
    neighbours, count = 0, 0
    for name, own, truth in sides(ours, exact):
        assert own.dtype == one.dtype
        if not is_narrow:
            # Units in the last place of the terms, the largest of which is as large as this.
            assert float((own - truth).abs().max()) <= 2e-7 * float(truth.abs().max()), name
            continue
        apart = (ordered(own) - ordered(truth.to(own.dtype))).abs()
        if name in aside:
            apart = apart[~aside[name].reshape(-1)]
        assert int(apart.max()) <= 1, name
        neighbours += int((apart > 0).sum())
        count += apart.numel()
    assert neighbours <= ROUNDED_ONCE * count


@pytest.mark.parametrize("one", of(*PRODUCTS), ids=lambda one: one.name)
def test_products_are_those_of_peft(bases: Bases, one: Combination) -> None:
    """A truncated product is PEFT's in float64, but for rounding to float32; PEFT's own in float32
    is further from it.  In 16 bits too, asked for float32 as PEFT gives it.

    What is clamped depends on the signs of singular vectors, which are arbitrary: those that are
    clamped have the same largest element, nearly.
    """
    paths = adapters_of(bases, one)
    ours = ours_of(bases, one, paths, "float32")
    exact = by_peft(bases, one, paths, torch.float64)
    assert ours.keys() == exact.keys()
    for module, (down, up) in ours.items():
        other_down, other_up = exact[module]
        if "clamp" in one.parameters:
            largest, wanted = (
                max(float(side.abs().max()) for side in pair)
                for pair in ((down, up), (other_down, other_up))
            )
            assert abs(largest - wanted) <= CLAMPED * wanted, module
            continue
        truth = other_up @ other_down
        off = (up.double() @ down.double() - truth).norm() / truth.norm()
        assert float(off) <= NEAR, module


USED = [
    one
    for one in of("linear", "cat", "svd", "dare_ties", "ties_svd")
    if one.name.partition(",")[0]
    in ("two", "rank-stabilized", "patterns", "modules of some", "tied", "transposed", "bf16")
]


@pytest.mark.parametrize("one", USED, ids=lambda one: one.name)
def test_peft_and_mstore_use_the_result_alike(bases: Bases, one: Combination) -> None:
    """PEFT loads the result with all its tensors; its merged model is mstore's, and that of the
    adapter that PEFT combines itself."""
    paths = adapters_of(bases, one)
    out, _ = combined(bases, one, paths, "float32")
    base = bases.path(one.base)
    model = PeftModel.from_pretrained(load(base, torch.float64), out, autocast_adapter_dtype=False)
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    ours = load_file(out / "adapter_model.safetensors")
    assert loaded.keys() == {name for name in ours if "base_layer" not in name}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, ours[name].double()), name
    by_theirs = with_peft(bases, one, paths, torch.float64)
    by_theirs.base_model.set_adapter("mixed")
    merges = [one.merge_and_unload().state_dict() for one in (model, by_theirs)]
    plan = bases.store.plan(
        MergeRequest(base=base.name, experts=["mixed"], method="task_arithmetic", dtype="float32")
    )
    bases.store.merge(plan, name="applied")
    before = load_file(base / "model.safetensors")
    changed = 0
    for name, tensor in before.items():
        change = merges[0][name] - tensor.double()
        for other in (merges[1][name], torch.from_numpy(bases.store["applied"].tensor(name))):
            off = (other.double() - merges[0][name]).norm()
            assert float(off) <= 2e-7 * float(tensor.double().norm() + change.norm()), name
        changed += bool(change.any())
    assert changed


def test_a_result_is_not_scaled_twice(bases: Bases) -> None:
    """If the first adapter is rank-stabilized, PEFT's result says so too, and so its product is
    used times the root of the rank.  mstore's is used as it was combined."""
    (one,) = [one for one in of("linear") if one.name.startswith("both rank-stabilized")]
    paths = adapters_of(bases, one)
    for layer in with_peft(bases, one, paths).modules():
        if isinstance(layer, LoraLayer) and "mixed" in layer.scaling:
            assert layer.scaling["mixed"] == pytest.approx(math.sqrt(8))
    out, _ = combined(bases, one, paths)
    model = PeftModel.from_pretrained(load(bases.path(one.base), torch.float32), out)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {1.0}


@pytest.mark.parametrize("method", ["cat", "tsv", "svc", "iso_cts", "wudi_ridge", "ties_core"])
@pytest.mark.parametrize("name", ["llama fp32", "qwen fp32"])
def test_peft_loads_combined_fine_tunes(bases: Bases, name: str, method: str) -> None:
    """Three fine-tunes of all weights, norms and biases too, extracted and combined: PEFT loads
    every tensor, and its merged model is mstore's."""
    base = bases.path(name)
    before = load_file(base / "model.safetensors")
    experts = [f"lora-{base.name}-{number}" for number in range(3)]
    if experts[0] not in bases.store:
        for number, expert in enumerate(experts):
            generator = torch.Generator().manual_seed(number)
            path = bases.root / f"{base.name}-tuned-{number}"
            shutil.copytree(base, path)
            tuned = {
                key: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
                for key, tensor in before.items()
            }
            save_file(tuned, path / "model.safetensors", metadata={"format": "pt"})
            bases.store.add(path, name=path.name)
            bases.store.extract_lora(path.name, base.name, name=expert, rank=4, dtype="float32")
    parameters = {"density": 0.5} if method == "ties_core" else {}
    report = bases.store.combine_adapters(experts, method, name="tunes", parameters=parameters)
    assert report.whole
    out = bases.root / "tunes"
    shutil.rmtree(out, ignore_errors=True)
    bases.store.checkout("tunes", out)
    model = PeftModel.from_pretrained(load(base, torch.float64), out, autocast_adapter_dtype=False)
    merged = model.merge_and_unload().state_dict()
    plan = bases.store.plan(
        MergeRequest(base=base.name, experts=["tunes"], method="task_arithmetic", dtype="float32")
    )
    bases.store.merge(plan, name="applied")
    for key, tensor in before.items():
        ours = torch.from_numpy(bases.store["applied"].tensor(key)).double()
        assert not torch.equal(ours, tensor.double()), key
        assert float((ours - merged[key]).norm()) <= 4e-7 * float(merged[key].norm()), key


def test_what_peft_drops(bases: Bases) -> None:
    """PEFT's result lacks the modules that the first adapter's layers leave out, and has the base's
    weights for a module that one adapter trained whole; mstore keeps the first, and combines the
    differences of the second to the base."""
    layers = Combination("layers", "linear", ({"layers_to_transform": [0]}, {}), (1.0, 1.0))
    paths = adapters_of(bases, layers)
    theirs, ours = by_peft(bases, layers, paths), ours_of(bases, layers, paths)
    assert {name for name in ours if ".layers.0." in name} == theirs.keys()
    assert any(".layers.1." in name for name in ours)
    saved = Combination("saved", "linear", ({"modules_to_save": ["lm_head"]}, {}), (1.0, 1.0))
    paths = adapters_of(bases, saved)
    found = get_peft_model_state_dict(with_peft(bases, saved, paths), adapter_name="mixed")
    base = load_file(bases.path(saved.base) / "model.safetensors")["lm_head.weight"]
    trained_head = load_file(paths[0] / "adapter_model.safetensors")
    name = "base_model.model.lm_head.weight"
    assert torch.equal(found[name], base)
    assert not torch.equal(trained_head[name], base)
    experts = [(path.name, 0.5) for path in paths]
    bases.store.combine_adapters(experts, "linear", name="mixed", base=bases.path(saved.base).name)
    ours_head = torch.from_numpy(bases.store["mixed"].tensor(name))
    assert torch.allclose(ours_head, (base + trained_head[name]) / 2, atol=1e-6)
