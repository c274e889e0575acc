"""What mergekit's test files import from `tests.common`, which its source distribution lacks.

Tiny models with random weights, and the check of a merged checkpoint.  Not one line of it is
mergekit's: names, sizes and what is checked follow from how its tests use them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit import merge
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def make_picollama(path: Path, vocab_size: int = 64) -> str:
    """Write a Llama of two layers."""
    return _written(LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **_SIZES)), path)


def make_picogranite(path: Path, vocab_size: int = 64) -> str:
    """Write a Granite of two layers."""
    return _written(GraniteForCausalLM(GraniteConfig(vocab_size=vocab_size, **_SIZES)), path)


def make_gpt2size(path: Path, vocab_size: int = 64) -> str:
    """Write a GPT-2 with its twelve layers."""
    config = GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=32, n_head=4, n_layer=12)
    return _written(GPT2LMHeadModel(config), path)


def make_picoLlaVa(path: Path) -> str:  # noqa: N802
    """Write a Llava: a Llama and a CLIP of two layers each."""
    vision = CLIPVisionConfig(image_size=32, patch_size=16, projection_dim=32, **_SIZES)
    text = LlamaConfig(vocab_size=64, **_SIZES)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    return _written(LlavaForConditionalGeneration(config), path)


def _written(model: transformers.PreTrainedModel, path: Path) -> str:
    model.save_pretrained(path, safe_serialization=True)
    return str(path)


def run_and_check_merge(
    config: MergeConfiguration,
    validate: Callable[[str], object] | None = None,
    auto_arch: bool = False,
) -> None:
    """Merge, load the result with transformers, and hand its directory to `validate`.

    Every tensor of the model is there, none is left over, and none has a NaN.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "merged")
        # As mergekit's tests find it at the time of the call.
        merge.run_merge(config, str(out), MergeOptions(quiet=True))
        for file in out.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                assert not torch.isnan(tensor).any(), name
        loaded = transformers.AutoConfig.from_pretrained(out).architectures[0]
        _, told = getattr(transformers, loaded).from_pretrained(out, output_loading_info=True)
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys")), told
        if validate is not None:
            validate(str(out))
