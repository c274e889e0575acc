"""The files of a stack: the base's, with the tensors that its plan takes from inputs.

A tensor of a name that the base has stands where the base's stood; a new one follows the tensors of
the file that has its source's name in the base, else of the last file.  Makes new headers, the
shard index and the config.  Reads headers, the index and configs, no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstore.adapters.inputs import Inputs
from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.models import is_index, name_in_model
from mstore.checkpoint.small_files import json_bytes, json_object
from mstore.merge.planning.stacked_config import stacked_config
from mstore.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.objects.plan import Plan
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of
from mstore.store.models import models_in
from mstore.store.rebuilt import header_of, index_of, shards_of


class Stack:
    """The files of one plan with layers."""

    def __init__(self, catalog: Catalog, plan: Plan, inputs: Inputs, base: Manifest) -> None:
        self._catalog = catalog
        self._plan = plan
        ids = [inputs.members[one.member][one.source] for one in plan.taken]
        records = inputs.records(ids)
        taken = {
            one.name: Part(name_in_model(one.name), id, record.nbytes)
            for one, id, record in zip(plan.taken, ids, records, strict=True)
        }
        dropped = set(plan.dropped)
        self._files: dict[str, File] = {}
        files = [file for file in base.files if file.form == SAFETENSORS]
        models = models_in(catalog, base)
        places = {name: file.path for file in reversed(files) for _, name in models.parts(file)}
        added: dict[str, list[str]] = {}
        for one in plan.taken:
            if one.name not in inputs.base:
                path = places.get(one.source, files[-1].path)
                added.setdefault(path, []).append(one.name)
        for file in files:
            parts = [file.parts[0]]
            for part in file.tensors():
                name = models.name(file.path, part)
                if name is None:
                    parts.append(part)
                elif name not in dropped:
                    parts.append(taken.get(name, part))
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
            experts = [one.manifest_id() for one in self._plan.experts]
            others = [config_of(self._catalog, self._catalog.manifest(one)) for one in experts]
            changed = stacked_config([fields, *others], self._plan.layers).fields
            return None if changed == fields else json_bytes(changed)
        if is_index(file.path):
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
