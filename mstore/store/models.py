"""The models of a snapshot, and its tensors by what they are called.

`checkpoint.models` owns which files make a model; this reads the indexes that it needs.  Where two
shards of a model have one tensor, the index says which counts; if it names neither, the last does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from msgspec import structs

from mstore.checkpoint.models import Model, WeightMap, files_of, full_name, models_of, place_of
from mstore.store import contents
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import File, Manifest, Part
from mstore.terms.errors import BadCheckpoint, BadRequest, Incompatible, NotFound, did_you_mean
from mstore.terms.ids import Revision, SnapshotId, TensorId
from mstore.terms.phrases import Option, call, few

_MAX_INDEX: Final = 32 << 20
_MAX_CONFIG: Final = 1 << 20
_MAX_CONTAINERS: Final = 65_536
_NAMED: Final = 12
"""Models that an error lists: a pipeline has some five, each with a variant."""


class Models:
    """What the models of one manifest hold.

    named: the models by name. indexes: what each shard index says. tensors: the tensors of all
    models by what they are called, model by model, in file and data order. twice: paths of two
    files of one model, by the tensor that both have.
    """

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        self.indexes: dict[str, WeightMap] = {}

        def weight_map(path: str) -> WeightMap:
            self.indexes[path] = found = _weight_map(catalog, manifest.file(path))
            return found

        self.manifest = manifest
        found = models_of((file.path for file in manifest.files), weight_map)
        self.named: Mapping[str, Model] = {one.name: one for one in found}
        self._models = {path: one for one in found for path in one.files}

    @property
    def tensors(self) -> Mapping[str, TensorId]:
        return self._taken[0]

    @property
    def _homes(self) -> Mapping[str, str]:
        return self._taken[1]

    @property
    def twice(self) -> Mapping[str, tuple[str, str]]:
        return self._taken[2]

    # `log` asks for models alone.
    @cached_property
    def _taken(
        self,
    ) -> tuple[
        dict[str, TensorId],
        dict[str, str],
        dict[str, tuple[str, str]],
        dict[str, dict[str, TensorId]],
    ]:
        tensors: dict[str, TensorId] = {}
        homes: dict[str, str] = {}
        twice: dict[str, tuple[str, str]] = {}
        inside: dict[str, dict[str, TensorId]] = {}
        for model in self.named.values():
            own = inside[model.name] = {}
            weight_map = self.indexes.get(model.index or "", {})
            for path in model.files:
                file = self.manifest.file(path)
                assert file is not None
                for part in file.tensors():
                    name = str(part.name)
                    full = full_name(model.name, name)
                    other = homes.get(full)
                    if other is not None:
                        twice.setdefault(full, (other, path))
                        if model.path(weight_map.get(name, "")) == other:
                            continue
                        # Its place is that in the file which has it.
                        own.pop(name, None)
                    tensors[full] = own[name] = part.tensor_id()
                    homes[full] = path
        return tensors, homes, twice, inside

    def model(self, name: str, where: str) -> Model:
        """Return the model of this name.  Raises NotFound, which lists them."""
        found = self.named.get(name)
        if found is None:
            hint = did_you_mean(name, self.named, call("files", where))
            known = (
                few([one or "that of its top directory" for one in self.named], _NAMED) or "none"
            )
            raise NotFound(f"no such model; it has {known}", where=f"{where}:{name}", hint=hint)
        return found

    def meant(self, revision: str) -> str:
        """Return the model that REF:MODEL names; of REF the only one, or that of the top.

        Raises NotFound, and Incompatible if REF has several others.
        """
        where, model = snapshot_of(revision), model_of(revision)
        if model is not None:
            return self.model(model, where).name
        if len(self.named) == 1:
            return next(iter(self.named))
        if "" in self.named:
            return ""
        first = next(iter(self.named), "MODEL")
        raise Incompatible(
            f"holds {len(self.named)} models: {few([*self.named])}",
            where=where,
            hint=f"name one of them: {where}:{first}",
        )

    def of_file(self, path: str) -> Model | None:
        """Return the model that a file is of."""
        return self._models.get(path)

    def name(self, path: str, part: Part) -> str | None:
        """Return what a named part of a file is called; None if no loader reads it."""
        model = self._models.get(path)
        if model is None:
            return None
        full = full_name(model.name, str(part.name))
        return full if self._homes[full] == path else None

    def parts(self, file: File) -> Iterator[tuple[Part, str]]:
        """Yield the tensors of a file that loaders read, and what they are called."""
        for part in file.tensors():
            full = self.name(file.path, part)
            if full is not None:
                yield part, full

    def home(self, full: str) -> str:
        """Return the path of the file that has a tensor."""
        return self._homes[full]

    def weights(self, model: str) -> Sequence[File]:
        """Return the weight files of a model."""
        found = (self.manifest.file(path) for path in self.named[model].files)
        return [file for file in found if file is not None]

    def files(self, *models: str) -> Sequence[File]:
        """Return what loaders of some models of one directory find there (`files_of`)."""
        chosen = [self.named[model] for model in models]
        paths = [one.path for one in self.manifest.files]
        found = files_of(chosen, chosen[0].directory, self.named.values(), paths)
        return [one for one in self.manifest.files if one.path in found]

    def alone(self, *models: str) -> Manifest:
        """Return models of one directory as a checkpoint, whose paths begin in the directory."""
        begin = len(self.named[models[0]].path(""))
        files = self.files(*models)
        return Manifest(tuple(structs.replace(one, path=one.path[begin:]) for one in files))

    def in_model(self, model: str) -> Mapping[str, TensorId]:
        """Return the tensors of a model by their names in its files."""
        return self._taken[3][model]

    def config(self, model: str) -> str:
        """Return the path of a model's config."""
        from mstore.checkpoint.declared import CONFIG  # late: what lists tensors needs no config

        return self.named[model].path(CONFIG)

    def require_one_each(self, called: str) -> None:
        """Raise Incompatible if two files of one model have a tensor.

        What computes new weights goes file by file, and would leave one of the two as it was.
        """
        if self.twice:
            name, (first, second) = next(iter(self.twice.items()))
            raise Incompatible(
                f"tensor {name} is in {first} and in {second}, of which loaders read one",
                where=called,
                hint="load the model and save it again, and add that",
            )


class Input(msgspec.Struct, frozen=True):
    """A snapshot to compute with, the name that the caller used, and the model that it chose."""

    snapshot: SnapshotId
    name: str
    model: str | None = None


def resolved(catalog: Catalog, revision: Revision) -> Input:
    """Return the snapshot of REF or REF:MODEL, and the model that is named.

    Raises NotFound, also for a model that the snapshot does not have, Pruned, BadName, BadRequest,
    Corrupt (an index that tells the models).
    """
    called, where, model = str(revision), revision, None
    if isinstance(revision, str):
        where, model = snapshot_of(revision), model_of(revision)
    id = catalog.resolve(where)
    contents.require(catalog, id, called)
    if model is not None:
        models_in(catalog, catalog.manifest_of(id)).model(model, str(where))
    return Input(id, called, model)


def with_model(catalog: Catalog, base: Input, experts: Sequence[Input]) -> Input:
    """Return the base with the model that experts were named with, if it was named without."""
    named = {one.model for one in experts if one.model is not None}
    if base.model is not None or not named:
        return base
    models = models_in(catalog, catalog.manifest_of(base.snapshot)).named
    if len(models) == 1:
        (model,) = models
    elif len(named) == 1 and named <= models.keys():
        (model,) = named
    else:
        raise BadRequest(
            f"which of the base's models is meant? It has {few([*models])}",
            where=Option("base"),
            hint=Option("base", f"{base.name}:MODEL"),
        )
    return Input(base.snapshot, base.name, model)


def snapshot_of(revision: str) -> str:
    """Return the snapshot of REF:MODEL."""
    return revision.partition(":")[0]


def model_of(revision: str) -> str | None:
    """Return the model of REF:MODEL, None if it names none."""
    _, colon, model = revision.partition(":")
    return model if colon else None


def paired(
    base: Collection[str],
    own: Collection[str],
    given: tuple[str | None, str | None] = (None, None),
) -> dict[str, str]:
    """Return which model of a fine-tune stands for which model of its base, by the latter.

    base, own: the models that each has. given: those that were named.  Without, each model of the
    base has its namesake, or, where each side has one form of a model (a variant or none), these;
    where both sides have one model, these.
    """
    ours, theirs = given
    if ours is None and theirs is not None:
        ours = _meant(theirs, base)
    if ours is None and len(base) == len(own) == 1:
        ours = next(iter(base))
    if ours is None:
        forms, lone = _lone_forms(own), _lone_forms(base).values()
        pairs = {name: name if name in own else forms.get(place_of(name)) for name in base}
        return {
            name: other
            for name, other in pairs.items()
            if other is not None and (name == other or name in lone)
        }
    if theirs is None:
        theirs = _meant(ours, own)
    return {ours: theirs} if ours in base and theirs in own else {}


def require_pairs(
    base: Models, own: Models, found: Mapping[str, str], called: str, where: str
) -> None:
    """Raise Incompatible for a fine-tune that has no model of its base.

    found: which of its models stand for which. called, where: the base and the fine-tune, as they
    were given.
    """
    if not found and base.named:
        hint = f"name the model that it is a fine-tune of: {called}:MODEL"
        if model_of(called) is not None:
            hint = f"name the model that is a fine-tune of it: {snapshot_of(where)}:MODEL"
        raise Incompatible(
            f"has no model of {called}: it holds {_told(own)}, and {snapshot_of(called)} "
            f"{_told(base)}",
            where=where,
            hint=hint,
        )


def _told(models: Models) -> str:
    if list(models.named) == [""]:
        return "one model without components"
    return few([name or "that of the top directory (REF:)" for name in models.named]) or "none"


def _meant(name: str, models: Collection[str]) -> str:
    """Return the model of this name; else what a lone model has in this form, or its only form,
    or the only one; else the name.
    """
    if name in models:
        return name
    places = {place_of(model) for model in models}
    if len(places) == 1 and (form := places.pop() + name[len(place_of(name)) :]) in models:
        return form
    only = next(iter(models)) if len(models) == 1 else name
    return _lone_forms(models).get(place_of(name), only)


def _lone_forms(models: Collection[str]) -> dict[str, str]:
    """Return the models of which there is one form, by what they are called without a variant."""
    places = Counter(map(place_of, models))
    return {place: name for name in models if places[place := place_of(name)] == 1}


def models_in(catalog: Catalog, manifest: Manifest) -> Models:
    """Return the models of a manifest.  Raises NotFound (a pruned index), Corrupt."""
    # They are a function of the manifest, so they are kept beside what it computes itself.
    kept = manifest.__dict__
    found = kept.get("models")
    if not isinstance(found, Models):
        found = kept["models"] = Models(catalog, manifest)
    return found


def tensors_of(catalog: Catalog, manifest: Manifest) -> Mapping[str, TensorId]:
    """Return the tensors of all models by what they are called.  Raises as `models_in`."""
    return models_in(catalog, manifest).tensors


def _weight_map(catalog: Catalog, index: File | None) -> WeightMap:
    if index is None:
        return {}
    # Late: most models have no index.
    from mstore.checkpoint.strict_json import json_object

    # Whatever is wrong with it, a loader stops there; the files are then what their names say.
    entries = json_object(catalog.read_small(index, _MAX_INDEX) or b"").get("weight_map")
    found = entries if isinstance(entries, dict) else {}
    return {name: file for name, file in found.items() if isinstance(file, str)}


def whole_config_of(catalog: Catalog, model: Manifest) -> dict[str, Any]:
    """Return the config of a model with all its numbers, as another one is written of it."""
    # Late: what lists tensors needs no config.
    from mstore.checkpoint.declared import CONFIG
    from mstore.checkpoint.strict_json import json_object

    return json_object(catalog.read_small(model.file(CONFIG), _MAX_CONFIG) or b"")


def config_of(catalog: Catalog, model: Manifest, path: str | None = None) -> dict[str, object]:
    """Return the config of a model, or the one at `path`; empty if there is none of use.

    Every number with a fraction is NaN in it.
    """
    # Late: what lists tensors needs no config.
    from mstore.checkpoint.declared import CONFIG
    from mstore.checkpoint.strict_json import parse_object

    raw = catalog.read_small(model.file(path or CONFIG), _MAX_CONFIG)
    if raw is None:
        return {}
    try:
        return parse_object(raw, what=CONFIG, where=CONFIG, max_containers=_MAX_CONTAINERS)
    except BadCheckpoint:
        return {}
