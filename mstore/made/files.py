"""Files of a model whose tensors are others than before: headers, the shard index, its config.

Owns these forms.  Does not own which tensors a file has.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mstore.checkpoint.small_files import header_bytes, json_bytes
from mstore.objects.manifest import File
from mstore.objects.tensor import Tensor


def header_of(
    before: bytes, names: Sequence[str], records: Sequence[Tensor], without: Collection[str] = ()
) -> bytes:
    """Return the header of a safetensors file with these tensors in data order.

    before: the header that it had; its metadata stay, but for those `without` names.
    """
    known: dict[str, Any] = json.loads(before[8:])
    metadata = known.get("__metadata__")
    if metadata is not None:
        metadata = {key: text for key, text in metadata.items() if key not in without}
    return new_header(metadata, names, records)


def new_header(metadata: object, names: Sequence[str], records: Sequence[Tensor]) -> bytes:
    """Return the header of a safetensors file with these tensors in data order.

    metadata: texts by name, None for none.
    """
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, record in zip(names, records, strict=True):
        ends = [offset, offset + record.nbytes]
        fields[name] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "data_offsets": ends,
        }
        offset += record.nbytes
    return header_bytes(fields)


def shards_of(path: str, fields: Mapping[str, Any], files: Collection[File]) -> tuple[File, ...]:
    """Return the files, of `files`, that the shard index at `path` names."""
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict):
        return ()
    directory = posixpath.dirname(path)
    shards = {str(shard) for shard in weight_map.values()}
    return tuple(
        file
        for file in files
        if posixpath.dirname(file.path) == directory and posixpath.basename(file.path) in shards
    )


def index_of(fields: Mapping[str, Any], shards: Sequence[File], records: Sequence[Tensor]) -> bytes:
    """Return a shard index of these shards.

    fields: the index before; sizes that it stated are stated again. records: of all tensors.
    """
    places = {
        str(part.name): posixpath.basename(file.path) for file in shards for part in file.tensors()
    }
    changed = {**fields, "weight_map": dict(sorted(places.items()))}
    metadata = fields.get("metadata")
    told = dict(metadata) if isinstance(metadata, dict) else {}
    if "total_size" in told:
        told["total_size"] = sum(record.nbytes for record in records)
    if isinstance(told.get("total_parameters"), int):
        told["total_parameters"] = sum(math.prod(record.shape) for record in records)
    return json_bytes(changed | {"metadata": told} if told else changed)


def with_dtype(
    fields: Mapping[str, Any], name: str, *, known: Collection[str], nested: bool = False
) -> dict[str, Any]:
    """Return a config with another "dtype" / "torch_dtype" where it states one.

    Also in configs of the model's parts ("text_config"), if what stands there is one of the `known`
    types.
    """
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        is_dtype = key in ("dtype", "torch_dtype") and isinstance(value, str)
        if is_dtype and (not nested or value.removeprefix("torch.") in known):
            changed[key] = name
        # Keep dtypes of quantization and compression: they are not those of the model's tensors.
        elif isinstance(value, dict) and (key == "config" or key.endswith("_config")):
            is_other = key.startswith(("quantization", "compression"))
            changed[key] = value if is_other else with_dtype(value, name, known=known, nested=True)
        else:
            changed[key] = value
    return changed
