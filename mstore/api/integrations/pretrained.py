"""What `from_pretrained` makes of a snapshot: no mount, no second copy on disk.

A model of transformers gets its tensors one by one, and no files.  Other classes take directories
only, and get one in memory (`directory`); why: docs/design/053-loading-by-others.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from mstore import fs
from mstore.api import Snapshot
from mstore.api.integrations.directory import as_directory
from mstore.api.integrations.urls import snapshot_at
from mstore.api.load import TensorSlice
from mstore.checkpoint.dtypes import DTYPES
from mstore.terms.errors import BadRequest, MstoreError
from mstore.terms.phrases import call, phrase

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_OF_THE_MODEL: Final = ("dtype", "torch_dtype", "quantization_config", "trust_remote_code")
"""Options that are for the model, whether or not its config takes them too."""


def from_pretrained(kind: Any, source: Snapshot | str, **options: Any) -> Any:
    """Return what `kind.from_pretrained` makes of a snapshot's directory.

    kind: a class with `from_pretrained`: `AutoModelForCausalLM`, `LlamaForCausalLM`,
    `AutoTokenizer`, `DiffusionPipeline`.
    source: a snapshot, or its URL, mstore://REF?store=DIRECTORY.
    options: of `kind.from_pretrained`: dtype, device_map, num_labels, subfolder, variant.

    Of a model of transformers it reads config.json, generation_config.json, and the tensors that
    the model needs; its code must be that of transformers.  All else gets a directory in memory
    (`as_directory`).

    Raises NotFound, BadRequest (no snapshot; no config, no weights, or a type of model that
    transformers does not know), Corrupt, and whatever `kind` raises.
    """
    with snapshot_at(source) as snapshot:
        transformers = sys.modules.get("transformers")
        is_model = transformers is not None and _is_model(kind, transformers)
        if is_model:
            return _model(transformers, kind, snapshot, options)
        # What else transformers makes of a directory needs no weights.
        is_of_transformers = str(kind.__module__).partition(".")[0] == "transformers"
        with as_directory(
            snapshot, variant=options.get("variant"), weights=not is_of_transformers
        ) as directory:
            return kind.from_pretrained(str(directory), **options)


def _is_model(kind: Any, transformers: Any) -> bool:
    if getattr(kind, "_model_mapping", None) is not None:
        return True
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)


def _model(transformers: Any, kind: Any, snapshot: Snapshot, options: dict[str, Any]) -> Any:
    """Return a model of transformers, whose tensors come without files."""
    is_auto = getattr(kind, "_model_mapping", None) is not None
    revision = snapshot.id.short
    files = _Files(snapshot, options.pop("subfolder", ""))
    given, wants_info = options.pop("config", None), options.pop("output_loading_info", False)
    is_ready = isinstance(given, transformers.PreTrainedConfig)
    # For all tensors at once: a hold is a file.
    with (
        snapshot._store.hold(snapshot),
        files.open(None if is_ready else _CONFIG) as place,
    ):
        if is_auto and not is_ready:
            _require_type(transformers, files.fields(_CONFIG), revision)
            given, options = _config(transformers, place, options)
        elif given is None:
            given = place
        if is_auto:
            kind, given = _class(kind, given, revision)
        weights = _weights(files, options.pop("variant", None), given)
        failed: list[MstoreError] = []
        state = {name: _Late(part, failed) for name, part in weights.items()}
        try:
            model, info = kind.from_pretrained(
                None, config=given, state_dict=state, output_loading_info=True, **options
            )
        except Exception:
            # transformers may raise something else where a tensor could not be read.
            if failed:
                raise failed[0] from None
            raise
        if failed:
            raise failed[0]
    if model.can_generate() and options.get("generation_config") is None:
        model.generation_config = _generation(transformers, files, options)
    return (model, info) if wants_info else model


class _Files:
    """The files of a snapshot in one of its directories."""

    def __init__(self, snapshot: Snapshot, folder: str) -> None:
        self.snapshot = snapshot
        self.folder = f"{folder.strip('/')}/".lstrip("/")
        self.names = {
            file.path.removeprefix(self.folder)
            for file in snapshot.files()
            if file.path.startswith(self.folder)
        }

    def fields(self, name: str) -> Mapping[str, Any]:
        """Return what a JSON file holds.  Raises BadRequest."""
        if name not in self.names:
            raise BadRequest(f"the snapshot has no {self.folder}{name}", where=str(self.snapshot))
        try:
            found = json.loads(self.snapshot.read(self.folder + name))
        except ValueError as error:
            raise BadRequest(f"not JSON: {error}", where=self.folder + name) from error
        if not isinstance(found, dict):
            raise BadRequest("not a JSON object", where=self.folder + name)
        return found

    @contextmanager
    def open(self, name: str | None) -> Iterator[str | None]:
        """Give a path at which transformers reads this file, which is in memory only."""
        if name is None:
            yield None
            return
        self.fields(name)
        data = self.snapshot.read(self.folder + name)
        descriptor = fs.in_memory(data, -1, len(data))
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)


class _Late:
    """A tensor that transformers reads if the model needs it."""

    def __init__(self, part: TensorSlice, failed: list[MstoreError]) -> None:
        self._part = part
        self._failed = failed

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._part[index]
        except MstoreError as error:
            self._failed.append(error)
            raise

    def get_shape(self) -> list[int]:
        return self._part.get_shape()

    def get_dtype(self) -> str:
        return self._part.get_dtype()

    def is_floating_point(self) -> bool:
        return DTYPES[self._part.get_dtype()].floating

    @property
    def dtype(self) -> Any:
        return self[:0].dtype if self.get_shape() else self[...].dtype


def _require_type(transformers: Any, fields: Mapping[str, Any], revision: str) -> None:
    """Raise BadRequest unless transformers has models of the type that a config names."""
    model_type = fields.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise BadRequest(
            f"transformers {transformers.__version__} has no models of type {model_type!r}",
            where=f"{revision}, {_CONFIG}",
            hint=phrase("{mount} shows it as files", mount=call("mount", revision, "DIR")),
        )


def _class(auto: Any, config: Any, revision: str) -> tuple[Any, Any]:
    """Return the class that an Auto class stands for, and the part of the config that it takes."""
    if type(config) not in auto._model_mapping:
        raise BadRequest(
            f"{auto.__name__} has no model of type {config.model_type!r}", where=revision
        )
    known = auto._model_mapping[type(config)]
    if isinstance(known, list | tuple):
        by_name = {one.__name__: one for one in known}
        named = [by_name[name] for name in config.architectures or () if name in by_name]
        known = [*named, *known][0]
    is_of_text = known.config_class == config.sub_configs.get("text_config")
    return known, config.get_text_config() if is_of_text else config


def _config(transformers: Any, place: str | None, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config, and the options that it did not take, as the Auto classes do."""
    asked = {
        name: value
        for name, value in options.items()
        if name != "quantization_config" and not (name in _OF_THE_MODEL and value == "auto")
    }
    config, left = transformers.AutoConfig.from_pretrained(
        place, return_unused_kwargs=True, **asked
    )
    again = {name: options[name] for name in _OF_THE_MODEL if options.get(name) is not None}
    return config, left | again


def _weights(files: _Files, variant: str | None, config: Any) -> dict[str, TensorSlice]:
    """Return the tensors of the files that transformers loads; the last of one name counts."""
    mark = f".{variant}" if variant else ""
    single, index = f"model{mark}.safetensors", f"model.safetensors.index{mark}.json"
    named = getattr(config, "transformers_weights", None) or single
    if named in files.names and not named.endswith(".json"):
        chosen = [named]
    else:
        index = named if named.endswith(".json") else index
        if index not in files.names:
            raise BadRequest(
                f"the snapshot has neither {files.folder}{named} nor {files.folder}{index}",
                where=str(files.snapshot),
            )
        shards = files.fields(index).get("weight_map")
        chosen = sorted(set(shards.values())) if isinstance(shards, dict) else []
    found: dict[str, TensorSlice] = {}
    for name in chosen:
        opened = files.snapshot.safe_open("pt", file=files.folder + name)
        # In the order of safetensors, which decides where no config says the type of elements.
        found |= {tensor: opened.get_slice(tensor) for tensor in sorted(opened.keys())}
    return found


def _generation(transformers: Any, files: _Files, options: Mapping[str, Any]) -> Any:
    """Return the settings for generating, as transformers finds them in a directory."""
    is_own = _GENERATION in files.names
    with files.open(_GENERATION if is_own else _CONFIG) as place:
        directory, file = os.path.split(str(place))
        asked = dict(options) if is_own else {**options, "_from_model_config": True}
        return transformers.GenerationConfig.from_pretrained(
            directory, config_file_name=file, **asked
        )
