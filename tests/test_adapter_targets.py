"""Names of an adapter's tensors and those of its base: `mstore.models.adapters.targets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
from later import Later

from mstore.models.adapters.config import parse_config
from mstore.models.adapters.targets import factor_names, targets_of
from mstore.terms.errors import Incompatible

torch = Later("torch")
transformers = Later("transformers")

CONFIG = parse_config(b'{"peft_type": "LORA"}', "here")


def found(modules: list[str], base: list[str]) -> list[str]:
    """The base's tensors of an adapter's products, in their order."""
    names = [one for module in modules for one in factor_names(module, embedding=False)]
    return [one.tensor for one in targets_of(names, base, "here", CONFIG).products]


TEXT = "layers.0.self_attn.q_proj"
TOWER = "encoder.layers.0.mlp.fc1"


@pytest.mark.parametrize("trained", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize("stored", ["model.language_model.", "language_model.model.", "model."])
def test_text_of_models_of_images(trained: str, stored: str) -> None:
    """The text part of a model is found, whichever names transformers gave it in memory and in
    files."""
    base = [f"{stored}{TEXT}.weight", f"vision_tower.{TOWER}.weight", "lm_head.weight"]
    assert found([trained + TEXT], base) == base[:1]


@pytest.mark.parametrize("trained", ["model.vision_tower.", "vision_tower.vision_model."])
@pytest.mark.parametrize(
    "stored", ["model.vision_tower.", "vision_tower.vision_model.", "vision_tower."]
)
def test_towers_of_models_of_images(trained: str, stored: str) -> None:
    """A tower is found at the level where files have it."""
    base = [f"language_model.model.{TEXT}.weight", f"{stored}{TOWER}.weight"]
    assert found([trained + TOWER], base) == base[1:]


def test_a_name_that_may_be_several() -> None:
    """Where two tensors could be meant, the adapter is refused, and the error names both."""
    base = [f"language_model.model.{TEXT}.weight", f"model.{TEXT}.weight"]
    with pytest.raises(Incompatible) as caught:
        found([f"model.language_model.{TEXT}"], base)
    assert f"could be {base[0]} or {base[1]} in the base" in caught.value.what
    with pytest.raises(Incompatible, match="weight is not in the base"):
        found(["model.language_model.layers.7.q_proj"], base)


def _model(kind: str) -> Any:
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {**size, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    image = {**size, "image_size": 8, "patch_size": 4}
    if kind == "Llava":
        vision = {"model_type": "clip_vision_model", **image}
        given: dict[str, Any] = {"text_config": {"model_type": "llama", **text}}
    elif kind == "Gemma3":
        vision = {"model_type": "siglip_vision_model", **image}
        given = {"text_config": {**text, "head_dim": 8}, "mm_tokens_per_image": 4}
    else:
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
        rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
        given = {"text_config": {**text, "rope_scaling": rope}}
    config = getattr(transformers, f"{kind}Config")(vision_config=vision, **given)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["Llava", "Gemma3", "Qwen2VL"])
def test_names_in_memory_and_in_files(tmp_path: Path, kind: str) -> None:
    """Each matrix of a model in memory is found among the files that transformers writes of it."""
    model = _model(kind)
    own = {}
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter)
        is_linear = parameter.ndim == 2 and name.endswith(".weight")
        if is_linear and "embed" not in name and "lm_head" not in name:
            own[name.removesuffix(".weight")] = parameter.detach().numpy()
    model.save_pretrained(tmp_path)
    stored = families.read_safetensors(tmp_path / "model.safetensors")
    assert own
    for module, tensor in zip(own, found(list(own), list(stored)), strict=True):
        assert (stored[tensor] == own[module]).all(), module
