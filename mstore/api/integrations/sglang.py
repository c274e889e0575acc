"""SGLang: weights from a store, by the entry point group `sglang.srt.plugins`.

    python -m sglang.launch_server --model-path CONFIG_DIRECTORY \\
        --model-loader-extra-config '{"store": "/srv/models/.mstore", "ref": "llama/merged"}'

SGLang's load formats are a closed list, so the extra config alone tells that weights are in a
store: a hook around `get_model_loader` gives another loader then.  Written against the source of
SGLang 0.5.23 (`sglang.srt.plugins`); SGLang itself is imported only when it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any, Final

from mstore.api.integrations.engines import StoredWeights

_SETTING: Final = "model_loader_extra_config"
_LOADERS: Final = "sglang.srt.model_loader.loader"


# Registered twice, the hook would stand around itself.
@cache
def register() -> None:
    """Teach SGLang to load from a store, once in this process."""
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        f"{_LOADERS}.get_model_loader", _get_model_loader, hooks.HookType.AROUND
    )


def _get_model_loader(original: Callable[..., Any], load_config: Any, *args: Any, **kw: Any) -> Any:
    told = load_config.model_loader_extra_config or {}
    if "store" not in told:
        return original(load_config, *args, **kw)
    weights = StoredWeights.of(told, _SETTING)
    # What is wrong is told before SGLang makes a model.
    weights.check()

    class MstoreModelLoader(import_module(_LOADERS).DefaultModelLoader):  # type: ignore[misc]
        """SGLang's loader, but for where tensors come from."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing: tensors are read from the store when they are needed."""

        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            return weights.tensors()

    # It refuses keys that it does not know.
    plain = copy(load_config)
    plain.model_loader_extra_config = {}
    return MstoreModelLoader(plain)
