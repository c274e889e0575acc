"""The loader of files, and who chooses a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class DefaultModelLoader:
    """Loads a model; the stand-in has no files."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config
        unknown = load_config.model_loader_extra_config.keys() - {"num_threads"}
        if unknown:
            raise ValueError(f"Unexpected extra config keys: {unknown}")

    def download_model(self, model_config: Any) -> None:
        raise AssertionError("there are no files")

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        raise AssertionError("there are no files")

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Make a model and load it."""
        model = model_config.made()
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), None)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
        """Give a model its weights."""
        model.load_weights(weights)


def get_model_loader(load_config: Any, model_config: Any = None) -> DefaultModelLoader:
    """Return the loader of a format."""
    return DefaultModelLoader(load_config)
