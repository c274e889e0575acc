"""The merged checkpoint's files: those of the base, with another dtype if that was requested.

Determines the output's manifest before any element is computed: which tensors are merged, converted
or the base's own, and the bytes of headers and of the two small files that state dtypes and sizes.
"""

from __future__ import annotations

import json
import posixpath
import struct
from collections.abc import Callable
from typing import Any

from mstore.checkpoint.dtypes import nbytes
from mstore.checkpoint.header import parse_header
from mstore.merge.planning.tied import left_to_base
from mstore.merge.running.task import Tasks
from mstore.numeric.codes import CODES
from mstore.objects.manifest import SAFETENSORS, File, Manifest, Part
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ALIGNMENT = 8


class Layout:
    """The output's files, derived from a plan and the base's manifest.

    Reads headers and the two small files if an output dtype was requested, and nothing else.
    """

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._dtype = tasks.plan.dtype
        self.base: Manifest = catalog.manifest(tasks.plan.base_id())
        self._left_out = left_to_base(self.base.tensors(), tasks.plan.criteria)
        self._retypes = any(
            self._is_retyped(part)
            for file in self.base.files
            if is_safetensors(file)
            for part in file.tensors()
        )

    def planned_name(self, part: Part) -> str | None:
        """Return the name under which a part's tensor is merged; None if it is the base's own."""
        assert part.name is not None
        if not self._tasks.is_planned(part.name, part.tensor_id()):
            return None
        return self._tasks.first[part.name]

    def out_dtype(self, part: Part) -> str:
        """Return the dtype of a named part in the output."""
        tensor = self._catalog.tensor(part.tensor_id())
        if self._dtype is None or (self.planned_name(part) is None and not self._is_empty(part)):
            return tensor.dtype
        return self._dtype

    def retyped_empty(self, part: Part) -> Tensor | None:
        """Return the record of a tensor without elements that gets another dtype; else None."""
        if not self._is_empty(part) or not self._is_retyped(part):
            return None
        assert self._dtype is not None
        return Tensor(self._dtype, self._catalog.tensor(part.tensor_id()).shape, 0, b"")

    def _is_empty(self, part: Part) -> bool:
        """Return whether a tensor has no elements: it is in no plan, but counts as merged."""
        if part.nbytes or part.name in self._left_out:
            return False
        tensor = self._catalog.tensor(part.tensor_id())
        return 0 in tensor.shape and tensor.dtype in CODES

    def new_bytes(self, file: File) -> bytes | None:
        """Return a new header of a safetensors file, or new contents of another file; else None."""
        dtype = self._dtype
        if dtype is None or not self._retypes:
            return None
        first = file.parts[0]
        if not is_safetensors(file):
            return retyped_file(file.path, lambda: self._plain(first), dtype, self._out_bytes)
        retyped = {
            part.name: dtype
            for part in file.tensors()
            if part.name is not None and self._is_retyped(part)
        }
        return retyped_header(self._plain(first), retyped, file.path) if retyped else None

    def _is_retyped(self, part: Part) -> bool:
        return self._dtype is not None and (
            self.out_dtype(part) != self._catalog.tensor(part.tensor_id()).dtype
        )

    def _out_bytes(self, path: str) -> int:
        """Return how many bytes the tensors of a file take in the output."""
        file = self.base.file(path)
        if file is None:
            return 0
        return sum(
            nbytes(self.out_dtype(part), self._catalog.tensor(part.tensor_id()).shape)
            if self._is_retyped(part)
            else part.nbytes
            for part in file.tensors()
        )

    def _plain(self, part: Part) -> bytes:
        tensor = self._catalog.tensor(part.tensor_id())
        return b"".join(self._catalog.read_block(block) for block in tensor.block_ids())


def retyped_header(raw: bytes, dtypes: dict[str, str], where: str) -> bytes:
    """Rewrite a safetensors header for other dtypes and offsets; keep order and metadata."""
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
    """Return new contents of a small file that names the dtype or the total size, or None.

    config.json: "dtype" / "torch_dtype", also of parts of the model ("text_config"). A shard index:
    "metadata": {"total_size"}, the sum of `out_bytes` over the files that it names; other files (a
    consolidated copy) do not count.
    """
    if path == CONFIG:
        fields = _object(read())
        changed = _retyped_config(fields, _CONFIG_NAMES[dtype])
        return None if changed == fields else _dump(changed)
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


def _retyped_config(fields: dict[str, Any], name: str, *, nested: bool = False) -> dict[str, Any]:
    """Return a config with another dtype, including the configs of parts in it."""
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        is_dtype = key in ("dtype", "torch_dtype") and isinstance(value, str)
        if is_dtype and (not nested or value.removeprefix("torch.") in _CONFIG_NAMES.values()):
            changed[key] = name
        # Keep dtypes of quantization and compression: they are not those of the model's tensors.
        elif isinstance(value, dict) and (key == "config" or key.endswith("_config")):
            is_other = key.startswith(("quantization", "compression"))
            changed[key] = value if is_other else _retyped_config(value, name, nested=True)
        else:
            changed[key] = value
    return changed


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _dump(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def tensor_bytes(file: File) -> int:
    """Return the bytes of a file's tensors, without its header."""
    return sum(part.nbytes for part in file.parts if part.name is not None)


def is_safetensors(file: File) -> bool:
    """Return whether a file has a header and tensors."""
    return file.form == SAFETENSORS
