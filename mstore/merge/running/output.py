"""The merged checkpoint's files: those of the base, with another dtype if that was requested.

Determines the output's files before any element is computed: which tensors are merged, converted or
the base's own, and the bytes of headers, shard indexes and the config.  Of an assembly, a tensor of
a name that the base has stands where the base's stood; a new one follows the tensors of the file
that has its source's name in the base, else of the last file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mstore.blocks import codecs
from mstore.blocks.codecs import Policy
from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.models import name_in_model
from mstore.checkpoint.strict_json import json_bytes, json_object, with_entries
from mstore.merge.planning.tensors import left_to_base, own_head_of
from mstore.merge.planning.validate import is_base
from mstore.merge.running.model_card import ModelCard
from mstore.merge.running.task import Tasks
from mstore.models.adapters.inputs import Inputs, files_merged_into
from mstore.models.made import Slot, assembled, slots_of, texts_of, with_dtype
from mstore.numeric.codes import CASTS, CODES
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.canonical import Record
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.store.objects.plan import Plan, PlanTensor
from mstore.store.objects.tensor import BYTES, Tensor, VirtualTensor, partition
from mstore.store.tied import untied
from mstore.store.transaction import Transaction
from mstore.terms.ids import BlockId, Id


class OutputFiles:
    """The output's files, derived from a plan and the base's manifest.

    Reads headers, indexes and the config, and nothing else.
    """

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._card = ModelCard(catalog, tasks.plan)
        self._dtype = tasks.plan.dtype
        self._own_dtypes = {one.name: one.dtype for one in tasks.plan.tensors if one.dtype}
        whole = catalog.manifest(tasks.plan.base_id())
        self._models = models_in(catalog, whole)
        self.base: Manifest = files_merged_into(catalog, tasks.plan)
        self._assembly = (
            Assembly(catalog, tasks.plan, tasks.inputs, self.base)
            if tasks.plan.is_assembly
            else None
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
        self.texts = self._texts()
        """Headers, shard indexes and configs that are others than the base's, by path."""

    def _placed(self, new: Mapping[str, Sequence[PlanTensor]]) -> dict[str, list[Slot]]:
        """Return the new tensors of each file: the first one that has their source in the base."""
        placed: dict[str, list[Slot]] = {}
        left = dict(new)
        for file in self.base.files:
            if not is_safetensors(file):
                continue
            for part, name in self._models.parts(file):
                for planned in left.pop(name, ()):
                    record = self._catalog.tensor(part.tensor_id())
                    dtype = planned.dtype or self._dtype or record.dtype
                    placed.setdefault(file.path, []).append(Slot(planned.name, dtype, record.shape))
        return placed

    def file(self, file: File) -> File:
        """Return a file of the base with the output's tensors, before they are merged."""
        return file if self._assembly is None else self._assembly.file(file)

    def added(self, file: File) -> Sequence[Slot]:
        """Return the tensors that follow those of the base in a file, as they are called."""
        return self._added.get(file.path, ())

    def planned_name(self, file: File, part: Part) -> str | None:
        """Return the name under which a part's tensor is merged; None if it is the base's own."""
        if self._assembly is not None:
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

    def manifest(
        self,
        not_finite: int,
        *,
        record_of: Callable[[str, File, Part | Slot], Tensor | VirtualTensor],
        put_records: Callable[[Sequence[Record]], Sequence[Id]],
        put_bytes: Callable[[bytes, str], Part],
    ) -> Manifest:
        """Store the output's files and records; return what it consists of.

        not_finite: for the card. record_of: returns the record of a merged tensor by its planned
        name, and its file and part in the base, or its entry if the base lacks it.
        """
        weights: dict[str, Sequence[Part]] = {}
        for file in filter(is_safetensors, self.base.files):
            ours: list[Part | Slot] = [*self.file(file).tensors(), *self.added(file)]
            records = [self._record(file, one, record_of) for one in ours]
            new = [record for record in records if record is not None]
            ids = iter(put_records(new))
            weights[file.path] = [
                one
                if record is None and isinstance(one, Part)
                else Part(
                    _own_name(one), next(ids), one.nbytes if record is None else record.nbytes
                )
                for one, record in zip(ours, records, strict=True)
            ]
        before, texts = self._card.files(not_finite)
        return assembled(before, texts | self.texts, weights, weights.__getitem__, put_bytes)

    def _record(
        self,
        file: File,
        one: Part | Slot,
        record_of: Callable[[str, File, Part | Slot], Tensor | VirtualTensor],
    ) -> Tensor | VirtualTensor | None:
        if isinstance(one, Slot):
            return record_of(one.name, file, one)
        name = self.planned_name(file, one)
        return self.retyped_empty(file, one) if name is None else record_of(name, file, one)

    def _texts(self) -> dict[str, bytes]:
        """Return headers, shard indexes and configs that change, by path."""
        if is_base(self._catalog, self._tasks.plan):
            return {}
        weights = {
            file.path: self._slots(file)
            for file in filter(is_safetensors, self.base.files)
            if self._changes(file)
        }
        lineage = self._card.header_lineage
        texts = texts_of(self._catalog, self.base, weights, lineage=lineage)
        config = self.base.file(CONFIG)
        changed = None if config is None or config.form != OPAQUE else self._config(config)
        return texts if changed is None else texts | {CONFIG: changed}

    def _changes(self, file: File) -> bool:
        """Return whether a file of weights has tensors that are not the base's."""
        if self._assembly is not None:
            return self._assembly.file(file).parts != file.parts
        return bool(self.added(file)) or any(
            self.planned_name(file, part) is not None or self._is_retyped(file, part)
            for part in file.tensors()
        )

    def _slots(self, file: File) -> Sequence[Slot] | None:
        """Return the tensors of a file in the output; None if their entries stay."""
        if self._assembly is not None:
            return slots_of(self._catalog, self._assembly.file(file).tensors())
        added = self.added(file)
        if not added and not any(self._is_retyped(file, part) for part in file.tensors()):
            return None
        slots = slots_of(self._catalog, file.tensors())
        types = [self.out_dtype(file, part) for part in file.tensors()]
        return [
            *(slot._replace(dtype=dtype) for slot, dtype in zip(slots, types, strict=True)),
            *(slot._replace(name=_own_name(slot)) for slot in added),
        ]

    def _config(self, file: File) -> bytes | None:
        changed: bytes | None = None
        if self._tasks.plan.config:
            fields = json_object(self._catalog.read_parts(file.parts))
            changed = json_bytes(with_entries(fields, self._tasks.plan.config))
        elif self._dtype is not None and self._retypes:
            fields = json_object(self._catalog.read_parts(file.parts))
            new = with_dtype(fields, CASTS[self._dtype], known=[CASTS[one] for one in CODES])
            changed = None if new == fields else json_bytes(new)
        if not self._has_own_head:
            return changed
        before = self._catalog.read_parts(file.parts) if changed is None else changed
        return json_bytes(untied(json_object(before)))

    def _is_retyped(self, file: File, part: Part) -> bool:
        return (self._dtype is not None or bool(self._own_dtypes)) and (
            self.out_dtype(file, part) != self._catalog.tensor(part.tensor_id()).dtype
        )


def _own_name(one: Part | Slot) -> str:
    """Return the name of a tensor in its file; what is added has that by which it is called."""
    return name_in_model(one.name) if isinstance(one, Slot) else str(one.name)


def tensor_bytes(file: File) -> int:
    """Return the bytes of a file's tensors, without its header."""
    return sum(part.nbytes for part in file.parts if part.name is not None)


def is_safetensors(file: File) -> bool:
    """Return whether a file has a header and tensors."""
    return file.form == SAFETENSORS


class Assembly:
    """The files of one plan that takes tensors as they are.  Reads no weights."""

    def __init__(self, catalog: Catalog, plan: Plan, inputs: Inputs, base: Manifest) -> None:
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
        """Return a file of the base with its tensors in the output, below its header."""
        return self._files.get(file.path, file)


class Records:
    """Stores the records of one output: headers, small files and the manifest.

    sink: None to make them without storing. policy: how new files are coded.
    """

    def __init__(self, block_size: int, sink: Transaction | None, policy: Policy) -> None:
        self._block_size = block_size
        self._sink = sink
        self._policy = policy

    def put_bytes(self, data: bytes, path: str) -> Part:
        """Store a file of plain bytes."""
        ids = []
        for start, length in partition(len(data), self._block_size):
            block = data[start : start + length]
            ids.append(BlockId.of(block))
            if self._sink is not None and not self._sink.has_blocks(ids[-1:])[0]:
                encoded = codecs.encode(block, codecs.PLAIN_BYTES, self._policy)
                self._sink.put_block(ids[-1], encoded, path, start)
        tensor = Tensor(BYTES, (len(data),), len(data), b"".join(ids))
        return Part(None, self.put_records([tensor])[0], len(data))

    def put_records(self, records: Sequence[Record]) -> Sequence[Id]:
        """Store records; return their ids."""
        if self._sink is None:
            return [record.id() for record in records]
        return self._sink.put_records(records)
