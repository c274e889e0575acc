"""The merged checkpoint's files: those of the base, with another dtype if that was requested.

Determines the output's manifest before any element is computed: which tensors are merged, converted
or the base's own, and the bytes of headers and of the two small files that state dtypes and sizes.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mstore.adapters.inputs import files_merged_into
from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.dtypes import nbytes
from mstore.checkpoint.models import is_index, name_in_model
from mstore.checkpoint.small_files import header_bytes, json_bytes, json_object
from mstore.merge.planning.tied import left_to_base, own_head_of
from mstore.merge.running.stacking import Stack
from mstore.merge.running.task import Tasks
from mstore.numeric.codes import CASTS, CODES
from mstore.objects.manifest import SAFETENSORS, File, Manifest, Part
from mstore.objects.plan import PlanTensor
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.rebuilt import with_dtype
from mstore.store.tied import untied


class NewTensor(msgspec.Struct, frozen=True):
    """A tensor of the output that the base does not have; name: what it is called."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Plain bytes."""
        return nbytes(self.dtype, self.shape)


class Layout:
    """The output's files, derived from a plan and the base's manifest.

    Reads headers and the two small files if an output dtype was requested, and nothing else.
    """

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._dtype = tasks.plan.dtype
        self._own_dtypes = {one.name: one.dtype for one in tasks.plan.tensors if one.dtype}
        whole = catalog.manifest(tasks.plan.base_id())
        self._models = models_in(catalog, whole)
        self.base: Manifest = files_merged_into(catalog, tasks.plan)
        self._stack = (
            Stack(catalog, tasks.plan, tasks.inputs, self.base) if tasks.plan.layers else None
        )
        own_head = own_head_of(catalog, tasks.plan, tasks.inputs, tasks.first)
        self._has_own_head = own_head is not None
        self._left_out = left_to_base(tasks.inputs.base, tasks.plan.criteria)
        self._added = self._placed(tasks.new_tensors())
        self._retypes = any(
            self._is_retyped(file, part)
            for file in self.base.files
            if is_safetensors(file)
            for part in file.tensors()
        )

    def _placed(self, new: Mapping[str, Sequence[PlanTensor]]) -> dict[str, list[NewTensor]]:
        """Return the new tensors of each file: the first one that has their source in the base."""
        placed: dict[str, list[NewTensor]] = {}
        left = dict(new)
        for file in self.base.files:
            if not is_safetensors(file):
                continue
            for part, name in self._models.parts(file):
                for planned in left.pop(name, ()):
                    record = self._catalog.tensor(part.tensor_id())
                    dtype = planned.dtype or self._dtype or record.dtype
                    placed.setdefault(file.path, []).append(
                        NewTensor(planned.name, dtype, record.shape)
                    )
        return placed

    def file(self, file: File) -> File:
        """Return a file of the base with the output's tensors, before they are merged."""
        return file if self._stack is None else self._stack.file(file)

    def added(self, file: File) -> Sequence[NewTensor]:
        """Return the tensors that follow those of the base in a file, in order."""
        return self._added.get(file.path, ())

    def planned_name(self, file: File, part: Part) -> str | None:
        """Return the name under which a part's tensor is merged; None if it is the base's own."""
        if self._stack is not None:
            return None
        name = self._models.name(file.path, part)
        return None if name is None else self._tasks.planned_name(name)

    def out_dtype(self, file: File, part: Part) -> str:
        """Return the dtype of a named part in the output."""
        tensor = self._catalog.tensor(part.tensor_id())
        name = self.planned_name(file, part)
        if name is not None:
            return self._own_dtypes.get(name) or self._dtype or tensor.dtype
        return self._dtype if self._dtype and self._is_empty(file, part) else tensor.dtype

    def retyped_empty(self, file: File, part: Part) -> Tensor | None:
        """Return the record of a tensor without elements that gets another dtype; else None."""
        if not self._is_empty(file, part) or not self._is_retyped(file, part):
            return None
        assert self._dtype is not None
        return Tensor(self._dtype, self._catalog.tensor(part.tensor_id()).shape, 0, b"")

    def _is_empty(self, file: File, part: Part) -> bool:
        """Return whether a tensor has no elements: it is in no plan, but counts as merged."""
        if part.nbytes:
            return False
        name = self._models.name(file.path, part)
        if name is None or name in self._left_out or name not in self._tasks.inputs.base:
            return False
        tensor = self._catalog.tensor(part.tensor_id())
        return 0 in tensor.shape and tensor.dtype in CODES

    def new_bytes(self, file: File) -> bytes | None:
        """Return a new header of a safetensors file, or new contents of another file; else None."""
        changed = self._changed(file)
        if file.path == CONFIG and self._has_own_head:
            before = self._catalog.read_parts(file.parts) if changed is None else changed
            return json_bytes(untied(json_object(before)))
        return changed

    def _changed(self, file: File) -> bytes | None:
        if self._stack is not None:
            return self._stack.new_bytes(file)
        if not (self._retypes or self._added):
            return None
        first = file.parts[0]
        if not is_safetensors(file):
            return self._new_text(file, lambda: self._catalog.read_parts([first]))
        retyped = {
            part.name: self.out_dtype(file, part)
            for part in file.tensors()
            if part.name is not None and self._is_retyped(file, part)
        }
        added = self.added(file)
        if not (retyped or added):
            return None
        return rewritten_header(self._catalog.read_parts([first]), retyped, added, file.path)

    def _new_text(self, file: File, read: Callable[[], bytes]) -> bytes | None:
        if file.path == CONFIG and self._dtype is not None and self._retypes:
            fields = json_object(read())
            changed = with_dtype(fields, CASTS[self._dtype], known=[CASTS[one] for one in CODES])
            return None if changed == fields else json_bytes(changed)
        if is_index(file.path):
            return rewritten_index(file.path, read(), self._out_bytes, self._added)
        return None

    def _is_retyped(self, file: File, part: Part) -> bool:
        return (self._dtype is not None or bool(self._own_dtypes)) and (
            self.out_dtype(file, part) != self._catalog.tensor(part.tensor_id()).dtype
        )

    def _out_bytes(self, path: str) -> int:
        """Return how many bytes the tensors of a file take in the output."""
        file = self.base.file(path)
        if file is None:
            return 0
        return sum(
            nbytes(self.out_dtype(file, part), self._catalog.tensor(part.tensor_id()).shape)
            if self._is_retyped(file, part)
            else part.nbytes
            for part in file.tensors()
        ) + sum(one.nbytes for one in self.added(file))


def rewritten_header(
    raw: bytes, dtypes: dict[str, str], added: Sequence[NewTensor], where: str
) -> bytes:
    """Rewrite a safetensors header for other dtypes and more tensors; keep order and metadata."""
    from mstore.checkpoint.header import parse_header  # late: few merges change a header

    header = parse_header(raw, file_size=len(raw) + _data_bytes(raw), where=where)
    fields: dict[str, Any] = json.loads(raw[8:])
    offset = 0
    for slot in header.tensors:
        dtype = dtypes.get(slot.name, slot.dtype)
        length = nbytes(dtype, slot.shape)
        fields[slot.name] |= {"dtype": dtype, "data_offsets": [offset, offset + length]}
        offset += length
    for one in added:
        ends = [offset, offset + one.nbytes]
        fields[name_in_model(one.name)] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": ends,
        }
        offset += one.nbytes
    return header_bytes(fields)


def _data_bytes(raw: bytes) -> int:
    fields = json.loads(raw[8:])
    return max(
        (entry["data_offsets"][1] for name, entry in fields.items() if name != "__metadata__"),
        default=0,
    )


def rewritten_index(
    path: str,
    raw: bytes,
    out_bytes: Callable[[str], int],
    added: Mapping[str, Sequence[NewTensor]],
) -> bytes | None:
    """Return a shard index with the sizes and the new tensors of its files, None if it stays.

    "metadata": {"total_size"} is the sum of `out_bytes` over the files that it names; other files
    (a consolidated copy) do not count. "total_parameters" grows by the new tensors. added: new
    tensors by the path of their file.
    """
    fields = json_object(raw)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict):
        return None
    directory = posixpath.dirname(path)
    shards = sorted({str(shard) for shard in weight_map.values()})
    new = [
        (one, shard) for shard in shards for one in added.get(posixpath.join(directory, shard), ())
    ]
    names = {name_in_model(one.name): shard for one, shard in new}
    changed = fields | {"weight_map": weight_map | names} if new else dict(fields)
    metadata = fields.get("metadata")
    told = dict(metadata) if isinstance(metadata, dict) else {}
    if "total_size" in told:
        told["total_size"] = sum(out_bytes(posixpath.join(directory, shard)) for shard in shards)
    elif not new:
        return None
    if isinstance(told.get("total_parameters"), int):
        told["total_parameters"] += sum(math.prod(one.shape) for one, _ in new)
    return json_bytes(changed | {"metadata": told} if told else changed)


def tensor_bytes(file: File) -> int:
    """Return the bytes of a file's tensors, without its header."""
    return sum(part.nbytes for part in file.parts if part.name is not None)


def is_safetensors(file: File) -> bool:
    """Return whether a file has a header and tensors."""
    return file.form == SAFETENSORS
