"""The interface of a loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BaseModelLoader(ABC):
    """Loads the weights of a model that vLLM makes."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Make a model and load it."""
        model = model_config.made()
        self.load_weights(model, model_config)
        return model.eval()
