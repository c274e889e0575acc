"""The merged checkpoint's files: those of the base, with other dtypes where that was asked for.

Works out what the output's manifest will look like before any element is known: which tensors
are merged, converted or the base's own, and the bytes of headers and of the two small files that
tell of dtypes and sizes.
"""

from __future__ import annotations

import json
import posixpath
import struct
from collections.abc import Callable
from typing import Any

from mstore.checkpoint.dtypes import nbytes
from mstore.checkpoint.header import parse_header
from mstore.objects.manifest import SAFETENSORS, File

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ALIGNMENT = 8


def retyped_header(raw: bytes, dtypes: dict[str, str], where: str) -> bytes:
    """A safetensors header with other dtypes, and so other offsets; order and metadata stay."""
    header = parse_header(raw, file_size=len(raw) + _data_bytes(raw), where=where)
    fields: dict[str, Any] = json.loads(raw[8:])
    offset = 0
    for slot in header.tensors:
        dtype = dtypes.get(slot.name, slot.dtype)
        length = nbytes(dtype, slot.shape)
        fields[slot.name] |= {"dtype": dtype, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _data_bytes(raw: bytes) -> int:
    fields = json.loads(raw[8:])
    return max(
        (entry["data_offsets"][1] for name, entry in fields.items() if name != "__metadata__"),
        default=0,
    )


def retyped_file(
    path: str, read: Callable[[], bytes], dtype: str, out_bytes: Callable[[str], int]
) -> bytes | None:
    """New contents of a small file that names the dtype or the total size, or None.

    config.json: "dtype" / "torch_dtype".  A shard index: "metadata": {"total_size"}, the sum of
    `out_bytes` over the files that it names: others (a consolidated copy) are not its own.
    """
    if path == CONFIG:
        fields = _object(read())
        found = [key for key in ("dtype", "torch_dtype") if isinstance(fields.get(key), str)]
        if not found:
            return None
        return _dump(fields | dict.fromkeys(found, _CONFIG_NAMES[dtype]))
    if path.endswith(INDEX_SUFFIX):
        fields = _object(read())
        metadata, weight_map = fields.get("metadata"), fields.get("weight_map")
        if not (isinstance(metadata, dict) and "total_size" in metadata):
            return None
        if not isinstance(weight_map, dict):
            return None
        shards = sorted({str(shard) for shard in weight_map.values()})
        total = sum(out_bytes(posixpath.join(posixpath.dirname(path), s)) for s in shards)
        return _dump(fields | {"metadata": metadata | {"total_size": total}})
    return None


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _dump(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def tensor_bytes(file: File) -> int:
    """Bytes of a file's tensors, without its header."""
    return sum(part.nbytes for part in file.parts if part.name is not None)


def is_safetensors(file: File) -> bool:
    """Whether a file has a header and tensors."""
    return file.form == SAFETENSORS
