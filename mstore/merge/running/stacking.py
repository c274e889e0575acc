"""The files of a stack: the base's, with the tensors that its plan takes from inputs.

A tensor of a name that the base has stands where the base's stood; a new one follows the tensors of
the file that has its source's name in the base, else of the last file.  Makes new headers, the
shard index and the config's number of layers.  Reads headers and these two files, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mstore.adapters.inputs import Inputs
from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.paths import INDEX_SUFFIX
from mstore.checkpoint.small_files import json_bytes, json_object
from mstore.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.objects.plan import Plan
from mstore.objects.tensor import Tensor
from mstore.recipes.layout import COUNTS, TEXT_CONFIGS
from mstore.store.catalog import Catalog
from mstore.store.rebuilt import header_of, index_of, shards_of


class Lists(msgspec.Struct, frozen=True):
    """What configs say of single layers.

    per_layer: lists with an entry for each layer. numbers: lists of the layers of one kind.  parts:
    where a config has that of its text model.  EARLIER: as in stacks of earlier versions, where
    they are made again.
    """

    per_layer: tuple[str, ...]
    numbers: tuple[str, ...]
    parts: tuple[str, ...]


LISTS: Final = Lists(
    ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "block_configs"),
    ("moe_layers", "mlp_only_layers", "attn_layer_indices", "full_attn_idxs"),
    TEXT_CONFIGS,
)
EARLIER: Final = Lists(("layer_types",), (), ("text_config", "llm_config"))


class Stack:
    """The files of one plan with layers."""

    def __init__(
        self, catalog: Catalog, plan: Plan, inputs: Inputs, base: Manifest, lists: Lists = LISTS
    ) -> None:
        self._catalog = catalog
        self._lists = lists
        self._plan = plan
        ids = [inputs.members[one.member][one.source] for one in plan.taken]
        records = inputs.records(ids)
        taken = {
            one.name: Part(one.name, id, record.nbytes)
            for one, id, record in zip(plan.taken, ids, records, strict=True)
        }
        dropped = set(plan.dropped)
        self._files: dict[str, File] = {}
        files = [file for file in base.files if file.form == SAFETENSORS]
        places = {part.name: file.path for file in reversed(files) for part in file.tensors()}
        added: dict[str, list[str]] = {}
        for one in plan.taken:
            if one.name not in inputs.base:
                path = places.get(one.source, files[-1].path)
                added.setdefault(path, []).append(one.name)
        for file in files:
            parts = [file.parts[0]]
            for part in file.tensors():
                assert part.name is not None
                if part.name not in dropped:
                    parts.append(taken.get(part.name, part))
            parts += [taken[name] for name in added.get(file.path, [])]
            self._files[file.path] = File(
                file.path, file.form, sum(part.nbytes for part in parts), tuple(parts)
            )

    def file(self, file: File) -> File:
        """Return a file of the base as the stack has it; `new_bytes` is its header."""
        return self._files.get(file.path, file)

    def new_bytes(self, file: File) -> bytes | None:
        """Return the header of a safetensors file, or new contents of another; None if it stays."""
        if file.form == SAFETENSORS:
            return self._header(self._files[file.path])
        if file.form != OPAQUE:
            return None
        if file.path == CONFIG:
            fields = json_object(self._catalog.read_parts(file.parts))
            changed = _stacked_config(fields, self._plan, self._lists)
            return None if changed == fields else json_bytes(changed)
        if file.path.endswith(INDEX_SUFFIX):
            return self._index(file.path, json_object(self._catalog.read_parts(file.parts)))
        return None

    def _header(self, file: File) -> bytes:
        before = self._catalog.read_parts(file.parts[:1])
        names = [str(part.name) for part in file.tensors()]
        return header_of(before, names, self._records([file]))

    def _index(self, path: str, fields: dict[str, Any]) -> bytes | None:
        shards = shards_of(path, fields, self._files.values())
        return index_of(fields, shards, self._records(shards)) if shards else None

    def _records(self, files: Sequence[File]) -> list[Tensor]:
        return self._catalog.tensors(
            [part.tensor_id() for file in files for part in file.tensors()]
        )


def has_earlier_config(catalog: Catalog, plan: Plan, made: Manifest) -> bool | None:
    """Return whether a stack has the config that earlier versions gave it.

    None if it is no stack, or if they gave it the same.
    """
    file = catalog.manifest(plan.base_id()).file(CONFIG)
    own = made.file(CONFIG)
    if not plan.layers or file is None or own is None or file.form != OPAQUE:
        return None
    fields = json_object(catalog.read_parts(file.parts))
    new, earlier = (_stacked_config(fields, plan, lists) for lists in (LISTS, EARLIER))
    if new == earlier:
        return None
    return json_object(catalog.read_parts(own.parts)) == earlier


def _stacked_config(fields: Mapping[str, Any], plan: Plan, lists: Lists) -> dict[str, Any]:
    """Return a config with the number of layers, also in parts of the model."""
    changed = _counted(fields, plan, lists)
    for key in lists.parts:
        part = fields.get(key)
        if isinstance(part, dict):
            changed[key] = _counted(part, plan, lists)
    return changed


def _counted(fields: Mapping[str, Any], plan: Plan, lists: Lists) -> dict[str, Any]:
    layers = plan.layers
    changed = dict(fields)
    for key in COUNTS:
        count = fields.get(key)
        if type(count) is int and count > 0:
            changed[key] = len(layers)
            for name in lists.per_layer:
                own = fields.get(name)
                if isinstance(own, list) and len(own) == count:
                    changed[name] = [own[min(layer, count - 1)] for _, layer in layers]
            for name in lists.numbers:
                own = fields.get(name)
                if isinstance(own, list):
                    changed[name] = [n for n, (_, layer) in enumerate(layers) if layer in own]
    return changed
