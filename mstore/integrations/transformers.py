"""Models of transformers from a store: no files, no mount, no second copy on disk."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import msgspec

from mstore.api import Store
from mstore.errors import BadRequest, Unavailable
from mstore.ids import Revision
from mstore.phrases import call, phrase

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"


def from_pretrained(
    kind: Any,
    store: Store,
    revision: Revision,
    *,
    threads: int | None = None,
    **options: Any,
) -> Any:
    """Return a model of a snapshot, as `kind.from_pretrained` makes one of its directory.

    kind: a class of transformers: `AutoModelForCausalLM`, `LlamaForCausalLM`.
    threads: that read and decode; None means one per processor.
    options: of `from_pretrained` of transformers: dtype, device_map.

    Reads config.json, generation_config.json and all tensors.  A model whose code is in its own
    directory cannot be loaded so, and neither can a tokenizer: mount it, or check out these files.

    Raises Unavailable (transformers or torch is not installed), NotFound, BadRequest (no config, or
    a type of model that transformers does not know), Corrupt, and whatever transformers raises.
    """
    try:
        # Imported by name: the library needs no framework, and a test checks that.
        transformers = import_module("transformers")
    except ImportError as error:
        raise Unavailable(
            "transformers is not installed", hint="pip install transformers"
        ) from error
    if not isinstance(store, Store):
        raise BadRequest(
            f"the store is an open Store, not {type(store).__name__}",
            hint="Store.open(PATH)",
        )
    snapshot = store[revision]
    files = {file.path for file in snapshot.files()}
    if _CONFIG not in files:
        raise BadRequest("the snapshot has no config.json", where=str(revision))
    fields = msgspec.json.decode(snapshot.read(_CONFIG))
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if model_type not in transformers.CONFIG_MAPPING:
        raise BadRequest(
            f"transformers {transformers.__version__} has no models of type {model_type!r}",
            where=f"{revision}, {_CONFIG}",
            hint=phrase("{mount} shows it as files", mount=call("mount", "REF", "DIR")),
        )
    config = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    mapping = getattr(kind, "_model_mapping", None)
    if mapping is not None:
        if type(config) not in mapping:
            raise BadRequest(
                f"{kind.__name__} has no model of type {model_type!r}", where=str(revision)
            )
        kind = mapping[type(config)]
    tensors = snapshot.load_torch(threads=threads)
    model = kind.from_pretrained(None, config=config, state_dict=tensors, **options)
    if _GENERATION in files and model.can_generate():
        own = msgspec.json.decode(snapshot.read(_GENERATION))
        model.generation_config = transformers.GenerationConfig.from_dict(own)
    return model
