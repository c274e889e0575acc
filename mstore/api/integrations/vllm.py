"""vLLM: the load format `mstore`, by the entry point group `vllm.general_plugins`.

    vllm serve CONFIG_DIRECTORY --load-format mstore \\
        --model-loader-extra-config '{"store": "/srv/models/.mstore", "ref": "llama/merged"}'

Written against the source of vLLM 0.33 (docs.vllm.ai, `register_model_loader`); vLLM promises
nothing about this interface.  vLLM itself is imported only when it calls.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

from mstore.api.integrations.engines import StoredWeights
from mstore.terms.errors import BadRequest

_SETTING: Final = "model_loader_extra_config"
_FORMAT: Final = "mstore"


# vLLM calls it in every of its processes, and warns where a format is registered twice.
@cache
def register() -> None:
    """Teach vLLM the load format `mstore`, once in this process."""
    loaders: Any = import_module("vllm.model_executor.model_loader")
    base: Any = import_module("vllm.model_executor.model_loader.base_loader")

    @loaders.register_model_loader(_FORMAT)
    class MstoreModelLoader(base.BaseModelLoader):  # type: ignore[misc]
        """Loads the weights of a snapshot; config and tokenizer are those of vLLM's directory."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._weights = StoredWeights.of(load_config.model_loader_extra_config or {}, _SETTING)
            # What is wrong is told before vLLM makes a model.
            self._weights.check()

        def download_model(self, model_config: Any) -> None:
            """Do nothing: tensors are read from the store when they are needed."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Give the model its weights.  Raises BadRequest if it needs others, too."""
            needed = {name for name, _ in model.named_parameters()}
            loaded = model.load_weights(self._weights.tensors())
            # As vLLM's own loader: quantized models make parameters of their own.
            if model_config.quantization is None and loaded is not None and needed - loaded:
                raise BadRequest(
                    f"the snapshot lacks weights that the model needs: {sorted(needed - loaded)}",
                    where=self._weights.ref,
                    hint=f"is {model_config.model} the directory with this snapshot's config.json?",
                )
