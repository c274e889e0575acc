"""Mixtures of experts: with mergekit's own routers, mstore's logits are equal to mergekit-moe's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from mstore import Store

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_theta=20000.0),
    "mistral": lambda: MistralConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
}
PROMPT = torch.tensor([[1, 5, 9, 20, 33, 7]])
WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(61))]


def write(directory: Path, kind: str, seed: int) -> None:
    """A small model with a tokenizer of words."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    model.save_pretrained(directory)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def logits(directory: Path) -> torch.Tensor:
    """What transformers computes."""
    model, told = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT).logits
    return found


# transformers reads the words of a Qwen2 with a tokenizer that knows none of them.
CASES = [
    (kind, mode) for kind in ("llama", "mistral", "qwen3") for mode in ("hidden", "cheap_embed")
]
CASES += [(kind, "random") for kind in CONFIGS]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_the_same_mixture(kind: str, mode: str, tmp_path: Path) -> None:
    """The same experts and routers give bit-equal logits, whatever the layout of the files."""
    for seed, name in enumerate(("base", "code", "math")):
        write(tmp_path / name, kind, seed)
    said = {"code": ["w1 w2 w3"], "math": ["w40 w41", "w50"], "base": ["w9 w8 w7 w6"]}
    config: dict[str, Any] = {
        "base_model": str(tmp_path / "base"),
        "gate_mode": mode,
        "dtype": "float32",
        "experts": [
            {"source_model": str(tmp_path / name), "positive_prompts": said[name]}
            for name in ("code", "math")
        ],
    }
    if kind == "qwen2":
        config["shared_experts"] = [
            {"source_model": str(tmp_path / "base"), "positive_prompts": said["base"]}
        ]
    recipe = tmp_path / "moe.yml"
    recipe.write_text(json.dumps(config))
    program = Path(sys.executable).parent / "mergekit-moe"
    theirs = tmp_path / "theirs"
    words = [str(program), str(recipe), str(theirs), "--random-seed", "0", "--device", "cpu"]
    subprocess.run(words, check=True, capture_output=True)
    weights: dict[str, torch.Tensor] = {}
    for file in theirs.glob("*.safetensors"):
        weights |= load_file(file)
    found = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp"
        found[f"layers.{layer}.router"] = weights[f"{at}.gate.weight"]
        if kind == "qwen2":
            found[f"layers.{layer}.shared_router"] = weights[f"{at}.shared_expert_gate.weight"]
    (tmp_path / "routers").mkdir()
    save_file(found, tmp_path / "routers" / "model.safetensors")
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("base", "code", "math", "routers"):
            store.add(tmp_path / name, name=name)
        # Where mergekit draws, its numbers are taken.
        text = json.dumps(config | ({"gate_mode": "hidden"} if mode == "random" else {}))
        names = {str(tmp_path / name): name for name in ("base", "code", "math")}
        plan = store.plan_moe(text, models=names, routers="routers")
        store.merge(plan, name="moe")
        store.checkout("moe", tmp_path / "ours")
    assert torch.equal(logits(tmp_path / "ours"), logits(theirs))
