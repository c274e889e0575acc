"""Models whose neurons were moved: transformers computes the same with them.

Each kind has norms and biases that differ from place to place, so that a wrong move shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from mstore import Store
from mstore.models.neurons.permutation import Ordering
from mstore.models.neurons.symmetries import Symmetry, symmetries_of
from mstore.store.models import config_of, tensors_of

_SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_GPT2 = {"vocab_size": 80, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 40}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SIZES),
    "llama with biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_SIZES, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SIZES),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SIZES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2 without a head": ("GPT2Config", "GPT2Model", _GPT2),
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT),
    "vit without a head": ("ViTConfig", "ViTModel", _VIT),
}
CLOSE = 1e-5
"""Sums in another order, in float32."""


def made(kind: str) -> Any:
    """A model with generic norms and biases."""
    config, name, sizes = KINDS[kind]
    torch.manual_seed(1)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim == 1:
                one.add_(0.3 * torch.randn_like(one))
    return model.eval()


def answers(model: Any, channels: Any = slice(None)) -> torch.Tensor:
    """What a model computes: logits; without a head its last hidden states, by channel."""
    torch.manual_seed(2)
    if model.config.model_type == "vit":
        inputs = {"pixel_values": torch.randn(3, 3, 16, 16)}
    else:
        inputs = {"input_ids": torch.randint(0, 80, (3, 32))}
    with torch.inference_mode():
        out = model(**inputs)
    found: torch.Tensor = out.logits if "logits" in out else out.last_hidden_state[..., channels]
    return found


def drawn(symmetry: Symmetry, rng: np.random.Generator) -> Ordering:
    """Any ordering that leaves groups of heads together."""
    each = symmetry.size // (symmetry.keys or symmetry.size)
    groups = rng.permutation(symmetry.size // each)
    order = np.concatenate([one * each + rng.permutation(each) for one in groups])
    signs = rng.choice([-1, 1], symmetry.size) if symmetry.is_signed else np.ones(len(order))
    return Ordering(order, signs.astype(np.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_permuted_model_computes_the_same(tmp_path: Path, kind: str) -> None:
    """Any permutation leaves what the model computes; matching finds the model again."""
    model = made(kind)
    model.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(3)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(tmp_path / "model", name="model")
        catalog = store._catalog
        manifest = catalog.manifest_of(store["model"].id)
        names = tensors_of(catalog, manifest)
        tensors = dict(zip(names, catalog.tensors(list(names.values())), strict=True))
        symmetries = symmetries_of(config_of(catalog, manifest), tensors, "model")
        arrays: dict[str, Any] = {}
        for name, symmetry in symmetries.named.items():
            one = drawn(symmetry, rng)
            arrays[f"{name}.order"] = one.order.astype(np.int32)
            if symmetry.is_signed:
                arrays[f"{name}.signs"] = one.signs.astype(np.int8)
        (tmp_path / "orders").mkdir()
        save_file(arrays, tmp_path / "orders" / "model.safetensors")
        store.add(tmp_path / "orders", name="orders")
        report = store.permute("model", permutation="orders", name="moved")
        assert all(one.moved for one in report.kinds)
        store.checkout("moved", tmp_path / "moved")
        permuted = type(model).from_pretrained(tmp_path / "moved").eval()
        before, after = answers(model, arrays["residual.order"]), answers(permuted)
        assert (before - after).abs().max() <= CLOSE * max(1.0, before.abs().max().item())
        # Its own lineage says that it is this model, so it comes from elsewhere.
        store.add(tmp_path / "moved", name="elsewhere")
        back = store.permute("elsewhere", to="model", name="back")
        assert store["back"].manifest == store["model"].manifest
        assert back.cosine == pytest.approx(1)
