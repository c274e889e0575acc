"""Mixtures of experts: with mergekit's own routers, mstore's logits are equal to mergekit-moe's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import CONFIGS, logits, with_words, write
from safetensors.torch import load_file, save_file

from mstore import Store

# transformers reads the words of a Qwen2 with a tokenizer that knows none of them.
CASES = [
    (kind, mode) for kind in ("llama", "mistral", "qwen3") for mode in ("hidden", "cheap_embed")
]
CASES += [(kind, "random") for kind in CONFIGS]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_the_same_mixture(kind: str, mode: str, tmp_path: Path) -> None:
    """The same experts and routers give bit-equal logits, whatever the layout of the files."""
    assert_same(tmp_path, kind, mode, "float32", "float32", is_shared=kind == "qwen2")


@pytest.mark.parametrize(
    ("own", "asked", "residual"),
    [("float32", "bfloat16", 1), ("bfloat16", "float32", 0.1), ("float32", "float16", 0.1)],
)
def test_the_same_cast(own: str, asked: str, residual: float, tmp_path: Path) -> None:
    """Models of another type than the recipe's are cast, after a residual_scale."""
    assert_same(tmp_path, "llama", "random", own, asked, residual=residual)


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("mistral", "float32")])
def test_the_same_shared_expert(kind: str, dtype: str, tmp_path: Path) -> None:
    """A Qwen2-MoE of models without biases, with a scaled shared expert, is the same."""
    more = {"architecture": "qwen"}
    assert_same(tmp_path, kind, "random", dtype, dtype, is_shared=True, residual=0.3, **more)


def assert_same(
    tmp_path: Path,
    kind: str,
    mode: str,
    own: str,
    asked: str,
    *,
    is_shared: bool = False,
    residual: float = 1,
    **more: str,
) -> None:
    """Both programs make one model.  own, asked: element types of the models and of the recipe."""
    for seed, name in enumerate(("base", "code", "math")):
        with_words(write(tmp_path / name, kind, seed, dtype=own))
    said = {"code": ["w1 w2 w3"], "math": ["w40 w41", "w50"], "base": ["w9 w8 w7 w6"]}
    experts = [
        {"source_model": str(tmp_path / name), "positive_prompts": prompts}
        for name, prompts in said.items()
    ]
    experts[-1]["residual_scale"] = residual
    config: dict[str, Any] = {
        "base_model": str(tmp_path / "base"),
        "gate_mode": mode,
        "dtype": asked,
        "experts": experts[:2],
        **more,
    }
    config["shared_experts" if is_shared else "experts"] = experts[2:] if is_shared else experts
    recipe = tmp_path / "moe.yml"
    recipe.write_text(json.dumps(config))
    program = Path(sys.executable).parent / "mergekit-moe"
    theirs = tmp_path / "theirs"
    words = [str(program), str(recipe), str(theirs), "--random-seed", "0", "--device", "cpu"]
    subprocess.run(words, check=True, capture_output=True)
    weights = tensors(theirs)
    found = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp"
        found[f"layers.{layer}.router"] = weights[f"{at}.gate.weight"]
        if is_shared:
            found[f"layers.{layer}.shared_router"] = weights[f"{at}.shared_expert_gate.weight"]
    (tmp_path / "routers").mkdir()
    save_file(found, tmp_path / "routers" / "model.safetensors")
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("base", "code", "math", "routers"):
            store.add(tmp_path / name, name=name)
        # Where mergekit draws, its numbers are taken.
        text = json.dumps(config | ({"gate_mode": "hidden"} if mode == "random" else {}))
        names = {str(tmp_path / name): name for name in ("base", "code", "math")}
        store.prepare_moe(text, models=names)
        plan = store.plan_moe(text, models=names, routers="routers")
        store.merge(plan, name="moe")
        store.checkout("moe", tmp_path / "ours")
    assert (logits(tmp_path / "ours") == logits(theirs)).all()
    assert {one.dtype for one in tensors(tmp_path / "ours").values()} == {getattr(torch, asked)}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found
