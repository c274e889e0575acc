"""vLLM and SGLang as they load a model, each in processes of its own; by stand-ins of the two.

`python -m engine_processes ENGINE CONFIG EXTRA` loads once, as one rank does, and prints how many
tensors it has and the BLAKE3 of all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blake3 import blake3

STAND_INS = Path(__file__).parent / "stand_ins"


def digest(state: dict[str, Any]) -> str:
    """The BLAKE3 of names, types and bytes of tensors, in order of the names."""
    import torch

    hasher = blake3()
    for name in sorted(state):
        hasher.update(f"{name} {state[name].dtype} {tuple(state[name].shape)}\n".encode())
        hasher.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


@dataclass
class LoadConfig:
    """What both engines call their settings of loading."""

    model_loader_extra_config: dict[str, Any]
    load_format: str = "mstore"


@dataclass
class ModelConfig:
    """A model that an engine makes: of the config in a directory."""

    model: str
    quantization: str | None = None
    order: list[str] = field(default_factory=list)

    def made(self) -> Any:
        """An empty model, which takes weights as those of engines do; `order` gets their names."""
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model))
        model.load_weights = lambda weights: self._loaded(model, weights)
        return model

    def _loaded(self, model: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        own = dict(model.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            self.order.append(name)
        return {*self.order}


def by_vllm(model: ModelConfig, extra: dict[str, Any]) -> Any:
    """The model as vLLM loads it; it may run its plugins several times in a process."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    load_general_plugins.cache_clear()
    load_general_plugins()
    loader = get_model_loader(LoadConfig(extra))
    loader.download_model(model)
    return loader.load_model(SimpleNamespace(), model)


def by_sglang(model: ModelConfig, extra: dict[str, Any]) -> Any:
    """The model as SGLang loads it."""
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.plugins import load_plugins

    load_plugins()
    load_plugins.cache_clear()
    load_plugins()
    config = LoadConfig(extra, load_format="auto")
    loader = loaders.get_model_loader(load_config=config, model_config=model)
    loader.download_model(model)
    return loader.load_model(model_config=model, device_config=None)


ENGINES = {"vllm": by_vllm, "sglang": by_sglang}


if __name__ == "__main__":
    engine, directory, told = sys.argv[1:]
    found = ENGINES[engine](ModelConfig(directory), json.loads(told)).state_dict()
    print(len(found), digest(found))
