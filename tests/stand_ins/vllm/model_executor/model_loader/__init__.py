"""The loaders by their formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_LOADERS: dict[str, type[BaseModelLoader]] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    """Return a decorator of loaders.  Raises ValueError for a class that is none."""

    def registered(loader: type) -> type:
        assert load_format not in _LOADERS, "vLLM warns: the format is registered already"
        if not issubclass(loader, BaseModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        _LOADERS[load_format] = loader
        return loader

    return registered


def get_model_loader(load_config: Any) -> BaseModelLoader:
    """Return the loader of a format.  Raises ValueError."""
    if load_config.load_format not in _LOADERS:
        raise ValueError(f"Load format `{load_config.load_format}` is not supported")
    return _LOADERS[load_config.load_format](load_config)
