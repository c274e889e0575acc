"""The weights of a stack: the base's files, with the tensors that its plan takes from inputs.

A tensor of a name that the base has stands where the base's stood; a new one follows the tensors of
the file that has its source's name in the base, else of the last file.  Also makes the config.
Reads configs, no weights.
"""

from __future__ import annotations

from mstore.adapters.inputs import Inputs
from mstore.checkpoint.models import name_in_model
from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.merge.planning.stacked_config import stacked_config
from mstore.objects.manifest import SAFETENSORS, File, Manifest, Part
from mstore.objects.plan import Plan
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, models_in


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
        """Return a file of the base with the tensors that it has in the stack, below its header."""
        return self._files.get(file.path, file)

    def config(self, file: File) -> bytes | None:
        """Return the config for these layers, in place of the base's; None if it stays."""
        fields = json_object(self._catalog.read_parts(file.parts))
        experts = [one.manifest_id() for one in self._plan.experts]
        others = [config_of(self._catalog, self._catalog.manifest(one)) for one in experts]
        changed = stacked_config([fields, *others], self._plan.layers).fields
        return None if changed == fields else json_bytes(changed)
