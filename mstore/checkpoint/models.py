"""Models: which weight files a loader loads together, and how a tensor is called.

A model is a set of safetensors files.  It is called by its directory, empty at the top:

    model.safetensors.index.json        the shards that it names, if all are there
    model.safetensors                   else: this file
    model-00001-of-00002.safetensors    else: these, if the set is whole

The stems STEMS are those of a directory's model; where a directory has several, the first counts.
`model.fp16.safetensors`, its shards and its index are the variant `fp16`: DIRECTORY@fp16.  Files
of another stem are a model of their own, called by their path without `.safetensors`, or with it
where another model has that name; a lone one is called by its directory.  A single file of a stem
whose index names others is a model of its own, too, and so is the second of two that differ in
their suffix: `.sft` is `.safetensors` under another name.  Numbered shards that no index names,
beside an index or a single file of their stem, belong to no model.

A tensor is called MODEL:NAME, and in the model without a name NAME, or :NAME if it has a colon.
`:`, `@` and `%` of a model's path are written `%3A`, `%40` and `%25`.

So read transformers (`model`), diffusers (`diffusion_pytorch_model`), PEFT (`adapter_model`) and
mistral (`consolidated`).  All of it follows from paths and indexes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

import msgspec

from mstore.checkpoint.paths import SAFETENSORS_SUFFIX, is_safetensors, without_suffix

STEMS: Final = ("model", "diffusion_pytorch_model", "adapter_model", "consolidated")
"""Names of the files of a directory's model, the first that it has counting."""

# diffusers wrote the variant before `index`, once.
_INDEX = re.compile(
    r"(?P<stem>.+)\.safetensors(?:\.(?P<old>[\w-]+))?\.index(?:\.(?P<variant>[\w-]+))?\.json",
    re.ASCII,
)
_NUMBERED = re.compile(r"(?P<rest>.+)-(?P<number>[0-9]{1,6})-of-(?P<of>[0-9]{1,6})")
_VARIANT = re.compile(rf"(?P<stem>{'|'.join(STEMS[:3])})\.(?P<variant>[\w-]+)", re.ASCII)
_CONSOLIDATED = re.compile(r"consolidated\.[0-9]{1,6}")

_Value = TypeVar("_Value")
WeightMap = Mapping[str, str]
"""Of an index: tensor -> shard, a path relative to the index's directory."""


class Model(msgspec.Struct, frozen=True):
    """One model: its name, its directory, the paths of its files, sorted, and its index if any."""

    name: str
    directory: str
    files: tuple[str, ...]
    index: str | None = None

    @property
    def is_single_file(self) -> bool:
        """Whether it is a file with a name of its own, which people keep and hand on alone."""
        stem = _parsed(_stem_of(self.files[0]))[0]
        return self.index is None and len(self.files) == 1 and _rank(stem) == len(STEMS)

    def path(self, file: str) -> str:
        """Return the path of a file of this name beside its weights."""
        return posixpath.join(self.directory, file)


def own_name(directory: str) -> str:
    """Return what the model of a directory is called."""
    return directory.replace("%", "%25").replace(":", "%3A").replace("@", "%40")


def place_of(model: str) -> str:
    """Return what a model is called without its variant."""
    place, at, _ = model.rpartition("@")
    return place if at else model


def full_name(model: str, name: str) -> str:
    """Return what a tensor of a model is called."""
    return f"{model}:{name}" if model or ":" in name else name


def split_name(full: str) -> tuple[str, str]:
    """Return the model and the name of a tensor from what it is called."""
    model, colon, name = full.partition(":")
    return (model, name) if colon else ("", full)


def name_in_model(full: str) -> str:
    """Return the name that a tensor has in its model's files."""
    return split_name(full)[1]


def renamed(tensors: Mapping[str, _Value], models: Mapping[str, str]) -> dict[str, _Value]:
    """Return the tensors of some models, called as if the models had other names.

    models: the other names, by those that they have.
    """
    found = {}
    for full, value in tensors.items():
        model, name = split_name(full)
        if model in models:
            found[full_name(models[model], name)] = value
    return found


def is_index(path: str) -> bool:
    """Return whether a path is that of a shard index, of a variant or not."""
    return _INDEX.fullmatch(posixpath.basename(path)) is not None


def is_weights(path: str) -> bool:
    """Return whether a file may be one of a model: weights, or a shard index."""
    return is_safetensors(path) or is_index(path)


def files_of(
    models: Iterable[Model], directory: str, every: Iterable[Model], paths: Iterable[str]
) -> set[str]:
    """Return the paths that loaders of some models of a directory find, of all these paths.

    Their weights and indexes, and other files below the directory; no other weights, and nothing
    below the directory of another model. every: all models that the paths make.
    """
    own = {path for one in models for path in (*one.files, one.index)}
    directories = {one.directory for one in every}

    def is_beside(path: str) -> bool:
        home = posixpath.dirname(path)
        while home and home not in directories:
            home = posixpath.dirname(home)
        return home == directory and not is_weights(path)

    return {path for path in paths if path in own or is_beside(path)}


def single_of(index: str) -> str:
    """Return the path of the single file that holds, alone, what an index at this path shards."""
    found = _INDEX.fullmatch(posixpath.basename(index))
    assert found is not None
    stem, variant = _index_of(found)
    named = ".".join(filter(None, (stem, variant)))
    return posixpath.join(posixpath.dirname(index), f"{named}{SAFETENSORS_SUFFIX}")


def models_of(paths: Iterable[str], weight_map: Callable[[str], WeightMap]) -> tuple[Model, ...]:
    """Return the models that files make, by their names.

    paths: of all files. weight_map: returns what an index says, empty if it says nothing of use.
    """
    directories: dict[str, set[str]] = {}
    for path in paths:
        if is_weights(path):
            directories.setdefault(posixpath.dirname(path), set()).add(path)
    every = {path for found in directories.values() for path in found}
    groups = {
        directory: [*_groups(found, every, weight_map)] for directory, found in directories.items()
    }
    mains = {
        directory: min((_rank(stem) for stem, *_ in found), default=len(STEMS))
        for directory, found in groups.items()
    }
    named: dict[str, Model] = {}
    own: list[tuple[str, str, Model]] = []
    for directory, found in groups.items():
        for stem, variant, files, index in found:
            model = Model("", directory, files, index)
            is_main = _rank(stem) == mains[directory] < len(STEMS) or len(found) == 1
            if is_main and stem is not None:
                name = own_name(directory) + (f"@{variant}" if variant else "")
                named[name] = msgspec.structs.replace(model, name=name)
            else:
                path = posixpath.join(directory, stem or _stem_of(files[0]))
                own.append((own_name(path), variant if stem else "", model))
    for path, variant, model in own:
        name = path + (f"@{variant}" if variant else "")
        if name in named:
            suffix = posixpath.splitext(model.files[0])[1]
            name = f"{path}{suffix}" + (f"@{variant}" if variant else "")
        named[name] = msgspec.structs.replace(model, name=name)
    return tuple(named[name] for name in sorted(named))


_Group = tuple[str | None, str, tuple[str, ...], str | None]
"""Stem (None: a single file beside an index that does not name it), variant, files, index."""


def _groups(
    here: AbstractSet[str], every: AbstractSet[str], weight_map: Callable[[str], WeightMap]
) -> Iterator[_Group]:
    """Yield what belongs together of the files of one directory."""
    ruled: dict[tuple[str, str], set[str]] = {}
    taken: set[str] = set()
    for index in sorted(here):
        found = _INDEX.fullmatch(posixpath.basename(index))
        if found is None:
            continue
        key = _index_of(found)
        directory = posixpath.dirname(index)
        shards = {posixpath.join(directory, shard) for shard in {*weight_map(index).values()}}
        shards -= taken
        if key not in ruled and shards and shards <= every:
            ruled[key] = shards
            taken |= shards
            yield (*key, tuple(sorted(shards)), index)
    singles: dict[tuple[str, str], str] = {}
    twins: list[str] = []
    numbered: dict[tuple[str, str], dict[int, dict[int, str]]] = {}
    for path in sorted(here - taken):
        if not is_safetensors(path):
            continue
        stem, variant, number, of = _parsed(_stem_of(path))
        if of is None and (stem, variant) in singles:
            twins.append(path)
        elif of is None:
            singles[stem, variant] = path
        else:
            numbered.setdefault((stem, variant), {}).setdefault(of, {})[number] = path
    for key, path in singles.items():
        yield (None if key in ruled else key[0]), key[1], (path,), None
    for path in twins:
        yield None, "", (path,), None
    for key, sets in numbered.items():
        whole = [tuple(found.values()) for of, found in sorted(sets.items()) if len(found) >= of]
        if whole and key not in ruled and key not in singles:
            yield (*key, whole[0], None)


def _parsed(text: str) -> tuple[str, str, int, int | None]:
    """Return stem, variant, and of a shard its number and how many there are, of a file's name."""
    number, of = 0, None
    if _CONSOLIDATED.fullmatch(text):
        return "consolidated", "", int(text.rpartition(".")[2]), 0
    variant = ""
    # Both `model.fp16-00001-of-00002` and `model-00001-of-00002.fp16` are written.
    before, dot, last = text.rpartition(".")
    shard = _NUMBERED.fullmatch(text) or (dot and last and _NUMBERED.fullmatch(before)) or None
    if shard and shard["rest"] in STEMS and shard.string == before:
        text, variant, number, of = shard["rest"], last, int(shard["number"]), int(shard["of"])
    elif shard and shard.string == text:
        text, number, of = shard["rest"], int(shard["number"]), int(shard["of"])
    found = _VARIANT.fullmatch(text)
    return (found["stem"], found["variant"], number, of) if found else (text, variant, number, of)


def _index_of(found: re.Match[str]) -> tuple[str, str]:
    """Return the stem and the variant of an index."""
    stem, variant = _parsed(found["stem"])[:2]
    return stem, found["variant"] or found["old"] or variant


def _rank(stem: str | None) -> int:
    return STEMS.index(stem) if stem in STEMS else len(STEMS)


def _stem_of(path: str) -> str:
    return without_suffix(posixpath.basename(path))
