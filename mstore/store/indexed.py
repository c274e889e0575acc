"""Which tensor a name stands for, where several files of one model have it.

    model.safetensors                  counts, whatever lies beside it
    model.safetensors.index.json       else: of its shards the one that it names for the tensor; if
                                       it names none of those that have it, the last

So do loaders read a directory.  Elsewhere a name stands for its first occurrence in the manifest.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from mstore.checkpoint.paths import INDEX_SUFFIX, SAFETENSORS_SUFFIX
from mstore.errors import Incompatible
from mstore.ids import TensorId
from mstore.objects.manifest import File, Manifest
from mstore.store.catalog import Catalog

_MAX_INDEX: Final = 32 << 20


def tensors(catalog: Catalog, manifest: Manifest) -> Mapping[str, TensorId]:
    """Return every tensor by name, in file and data order.  Raises Corrupt, StorageFailed."""
    return _chosen(catalog, manifest)[0]


def require_one_each(catalog: Catalog, manifest: Manifest, called: str) -> None:
    """Raise Incompatible, with its name, if two files of one model have a tensor.

    What computes new weights goes file by file, and would leave one of the two as it was.
    """
    twice = _chosen(catalog, manifest)[1]
    if twice:
        name, (first, second) = next(iter(twice.items()))
        raise Incompatible(
            f"tensor {name} is in {first} and in {second}, of which loaders read one",
            where=called,
            hint="load the model and save it again, and add that",
        )


def _chosen(
    catalog: Catalog, manifest: Manifest
) -> tuple[Mapping[str, TensorId], dict[str, tuple[str, str]]]:
    """Return the tensors by name, and the paths of two files by the names that both have."""
    first = manifest.tensors()
    if sum(len(file.parts) - 1 for file in manifest.files) == len(first):
        return first, {}
    found = dict(first)
    twice: dict[str, tuple[str, str]] = {}
    homes: dict[str, str] = {}
    for file in manifest.files:
        for part in file.tensors():
            homes.setdefault(str(part.name), posixpath.dirname(file.path))
    for index in manifest.files:
        if not index.path.endswith(INDEX_SUFFIX):
            continue
        here = posixpath.dirname(index.path)
        single = f"{index.path.removesuffix(INDEX_SUFFIX)}{SAFETENSORS_SUFFIX}"
        named = {
            name: posixpath.join(here, str(shard))
            for name, shard in _weight_map(catalog, index).items()
        }
        shards = set(named.values())
        holders: dict[str, dict[str, TensorId]] = {}
        for file in manifest.files:
            if file.path == single or file.path in shards:
                for part in file.tensors():
                    holders.setdefault(str(part.name), {})[file.path] = part.tensor_id()
        for name, held in holders.items():
            paths = [*held]
            if len(paths) > 1:
                twice.setdefault(name, (paths[0], paths[1]))
            if homes[name] == here:
                wanted = single if single in held else named.get(name)
                found[name] = held.get(wanted or "", held[paths[-1]])
    return found, twice


def _weight_map(catalog: Catalog, index: File) -> Mapping[str, object]:
    raw = catalog.read_small(index, _MAX_INDEX)
    with suppress(ValueError):
        found = json.loads(raw or b"")
        if isinstance(found, dict) and isinstance(found.get("weight_map"), dict):
            return dict(found["weight_map"])
    return {}
