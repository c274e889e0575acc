"""Cast: store a model again with its floating-point tensors in another element type.

Merging knows BF16, F16 and F32.  A model in fp64 or fp8 is cast to one of these first, as a new
snapshot; tensors that have the type already are the model's own.  Weights of 8 bits with scales
(`scales`) become what they stand for, and the scales are dropped.  Without a type, or before it,
tensors are left out, taken from elsewhere and renamed (`reshape`).

Owns what becomes of each tensor and file.  `casting` computes the new tensors.
"""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.checkpoint.models import Model, full_name
from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.adapters.targets import is_adapter
from mstore.models.casting import Caster, CastJob, CastTensor, Change, largest
from mstore.models.made import (
    Publication,
    Slot,
    assembled,
    branch_below,
    metadata_of,
    texts_of,
    with_dtype,
)
from mstore.models.reshape import NO_RESHAPE, Placed, Reshape, Reshaped, with_channels
from mstore.models.scales import (
    HEADER_KEY,
    NO_SCALES,
    QUANTIZATIONS,
    Marks,
    Scale,
    Scales,
    marks_of,
    quantization_of,
    scale_name,
    scaled_weights,
    scales_of,
)
from mstore.numeric.casts import LARGEST_E4M3, SIZES
from mstore.numeric.codes import CASTABLE, CASTS, CODES, EIGHT_BITS
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, models_in, tensors_of
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.shapes import chosen, require_matches
from mstore.store.objects.snapshot import BASE, CAST, EXPERT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId, TensorId
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

BRANCHES: Final = "cast"
"""Models are cast to branches below this name, if no other is given."""

RESHAPED: Final = "reshaped"

SCALABLE: Final = "F8_E4M3"
"""The type in which weights get scales."""

STATED_ELSEWHERE: Final = "hf_quant_config.json"
"""A file in which ModelOpt states a quantization."""

SATURATING: Final = frozenset({"F8_E4M3"})
"""Types without infinities: what is too large becomes the largest element."""

_NAMED: Final = 3
_MAX_MARK: Final = 1 << 16


class CastReport(Report, frozen=True):
    """A model that was cast."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    new_snapshot: bool
    """false if the ref already held this model"""
    dtype: str | None
    """the type of its floating-point tensors, as torch calls it; None: they keep theirs"""
    cast: int
    """tensors that were cast"""
    scaled: int
    """those of them that had scales, or got some"""
    shared: int
    """tensors that stay as they are"""
    scales_dropped: int
    """scales and what goes with them, which the model has no more"""
    left_out: int
    """tensors that patterns left out"""
    taken: int
    """tensors that are another model's"""
    renamed: int
    """tensors that have other names"""
    resized: int
    """tensors that got another number of input channels"""
    overflowed: int
    """elements that were too large for the type, or for float32 when multiplied by their scales"""
    warnings: tuple[str, ...]
    """what the type could not hold, as text"""
    remarks: tuple[str, ...]
    """what changed beside tensors, as text"""
    plain_bytes: int
    """size of the model"""
    bytes_written: int
    """bytes added to the store"""
    seconds: float
    """how long it took"""


def cast(
    catalog: Catalog,
    model: tuple[str, SnapshotId],
    *,
    of: str | None = None,
    dtype: str | None,
    scaled: bool = False,
    reshape: Reshape = NO_RESHAPE,
    name: str | None,
    only: Sequence[str],
    skip: Sequence[str],
    message: str,
    allow_nonfinite: bool,
    threads: int,
    progress: ProgressCallback | None = None,
) -> CastReport:
    """Store the model with another element type under a ref.

    of: the one of its models to cast; None: all. dtype: of `CASTS`; None: each tensor keeps its
    own. scaled: give the weights of layers scales, as ComfyUI reads them; dtype is `SCALABLE`, and
    all other tensors keep their type. reshape: what else becomes of tensors. name: None for one
    below `cast/`. allow_nonfinite: also publish a model in which elements became infinite.

    Raises BadRequest (patterns, prefixes, nothing to do), Incompatible (scales that are missing or
    of another form, types that cannot be cast, tensors that do not fit, elements that became
    infinite), BadName, Conflict, Corrupt, StorageFailed; then nothing is published.
    """
    began = time.monotonic()
    if dtype is None and reshape == NO_RESHAPE:
        raise BadRequest("says nothing to do", hint=Option("dtype", CASTS["BF16"]))
    if dtype is None and (only or skip):
        raise BadRequest(
            "says what is cast, and nothing is",
            where=Option("only" if only else "skip"),
            hint=Option("without", tuple(skip)) if skip else None,
        )
    if scaled and dtype != SCALABLE:
        raise BadRequest(
            f"weights get scales in {CASTS[SCALABLE]} alone",
            where=Option("scaled"),
            hint=Option("dtype", CASTS[SCALABLE]),
        )
    told = None if dtype is None else CASTS[dtype]
    branch = branch_below(BRANCHES, f"{model[0]}-{told or RESHAPED}") if name is None else name
    done = RESHAPED if told is None else f"in {told}"
    manifest = catalog.manifest_of(model[1])
    plan = _CastPlan(catalog, manifest, of, dtype, reshape, only, skip, model[0], scaled=scaled)
    with Transaction(catalog, f"cast {branch}") as transaction:
        current = branch_to_move(catalog, branch)
        with ThreadPoolExecutor(threads, "cast") as pool:
            if scaled:
                plan.give_scales(transaction, pool, 2 * threads, progress)
            caster = Caster(catalog, transaction, pool)
            run = _Caster(catalog, transaction, caster, plan, 2 * threads, progress)
            made = run.manifest()
        warnings = tuple(_overflow(run.overflowed, run.products, dtype))
        if warnings and dtype not in SATURATING and not allow_nonfinite:
            raise Incompatible(
                "; ".join(warnings),
                where=model[0],
                hint=phrase("{allow} publishes it as it is", allow=Option("allow_nonfinite", True)),
            )
        publication = Publication(catalog, transaction)
        record, is_new = publication.put(
            branch,
            current,
            made,
            CAST,
            _parents(catalog, model[1], manifest, reshape),
            message=message or f"{model[0]} {done}",
            action=f"cast: {model[0]} {done}",
        )
        publication.commit()
        written = transaction.bytes_written
    return CastReport(
        name=branch,
        snapshot=record.id(),
        new_snapshot=is_new,
        dtype=told,
        cast=len(plan.cast),
        scaled=len(plan.scaled),
        shared=plan.shared,
        scales_dropped=plan.dropped,
        left_out=plan.reshaped.left_out,
        taken=plan.reshaped.taken,
        renamed=plan.reshaped.renamed,
        resized=plan.resized,
        overflowed=sum(run.overflowed.values()) + sum(run.products.values()),
        warnings=warnings,
        remarks=(*_idle(plan, told), *run.remarks),
        plain_bytes=made.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _idle(plan: _CastPlan, told: str | None) -> Iterator[str]:
    if told is not None and not plan.cast:
        yield f"every tensor that could be cast is of {told} already"


def _parents(
    catalog: Catalog, id: SnapshotId, manifest: Manifest, reshape: Reshape
) -> tuple[Parent, ...]:
    """Return the source as the base; if it is an adapter, its base stays the adapter's."""
    if not is_adapter(tensors_of(catalog, manifest)):
        others = dict.fromkeys(one.snapshot for one in reshape.others)
        return (Parent(BASE, id), *(Parent(EXPERT, one) for one in others))
    bases = [one for one in catalog.snapshot(id).parents if one.role == BASE]
    return (*bases[:1], Parent(EXPERT, id))


def _overflow(
    overflowed: Mapping[str, int], products: Mapping[str, int], dtype: str | None
) -> Iterator[str]:
    """Yield what became of elements that were too large, and of products with scales."""
    became = "448 or -448, the largest there is" if dtype in SATURATING else "infinite"
    if overflowed:
        told = "its type" if dtype is None else CASTS[dtype]
        yield _too_large("element", f"{told} and became {became}", overflowed)
    if products:
        yield _too_large("product", f"float32 and became {became}", products)


def _too_large(what: str, told: str, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    where = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:_NAMED])
    more = f" and {len(counts) - _NAMED} more tensors" if len(counts) > _NAMED else ""
    many = f"1 {what} is" if total == 1 else f"{total} {what}s are"
    return f"{many} too large for {told}: {where}{more}"


_Key = tuple[TensorId, Scale | None, Tensor | None, float | None]


class _Slot(msgspec.Struct, frozen=True):
    """A tensor of the output: its name, its part, and if it is cast, from and to what.

    channels: the tensor of whose channels it gets as many. divisor: the scale that it gets.
    """

    full: str
    part: Part
    source: Tensor
    scale: Scale | None
    target: Tensor | None
    channels: Tensor | None = None
    divisor: float | None = None

    @property
    def name(self) -> str:
        return str(self.part.name)

    @property
    def key(self) -> _Key:
        """What the new tensor follows from."""
        return self.part.tensor_id(), self.scale, self.channels, self.divisor

    @property
    def entry(self) -> Slot:
        """The tensor's entry in the output's header."""
        record = self.source if self.target is None else self.target
        return Slot(self.name, record.dtype, record.shape)


class _CastPlan:
    """What becomes of each tensor, known before any is read.

    files: the tensors of each file of weights that changes. configs: contents of each config.json
    that changes. removed: files that the output lacks.
    """

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        of: str | None,
        dtype: str | None,
        reshape: Reshape,
        only: Sequence[str],
        skip: Sequence[str],
        where: str,
        *,
        scaled: bool,
    ) -> None:
        self._catalog = catalog
        self._marks_made: dict[str, str] = {}
        self._scales_made = scaled
        self._reshape = reshape
        self.before = manifest
        self.dtype = dtype
        self._where = where
        models = models_in(catalog, manifest)
        self.reshaped = Reshaped(catalog, models, of, reshape, where)
        ids = [one.part.tensor_id() for placed in self.reshaped.files.values() for one in placed]
        self._records = dict(zip(ids, catalog.tensors(ids), strict=True))
        names = [
            full_name(model.name, one.own)
            for model in models.named.values()
            if of in (None, model.name)
            for path in model.files
            for one in self.reshaped.files[path]
        ]
        require_matches(names, only, skip, where)
        self._only = bool(only)
        self._wanted: AbstractSet[str] = chosen(dict.fromkeys(names, ()), only, skip).keys()
        self.files: dict[str, list[_Slot]] = {}
        self.configs: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.cast: set[str] = set()
        self.scaled: set[str] = set()
        self.shared = 0
        self.dropped = 0
        self.resized = 0
        for model in models.named.values():
            own = model.path(CONFIG)
            path = own if manifest.file(own) is not None else CONFIG
            config = config_of(catalog, manifest, path)
            files = models.weights(model.name)
            self._take(catalog, model, files, config, inherited=path != own)
        for file in manifest.files:
            if file.form == OPAQUE and posixpath.basename(file.path) == CONFIG and dtype:
                self._take_config(catalog, file, dtype)

    def _take(
        self,
        catalog: Catalog,
        model: Model,
        files: Sequence[File],
        config: Mapping[str, object],
        *,
        inherited: bool,
    ) -> None:
        """Decide on the tensors of a model.  inherited: the config is not its own."""
        placed = [one for file in files for one in self.reshaped.files[file.path]]
        tensors: dict[str, Tensor] = {}
        for one in placed:
            tensors.setdefault(one.own, self._records[one.part.tensor_id()])
        stated = quantization_of(config)
        kinds = {record.dtype for record in tensors.values()}
        if inherited and kinds <= CODES.keys():
            # An adapter or a part in a directory of its own, which is not quantized.
            stated = None
        skipped = {one for one in tensors if full_name(model.name, one) not in self._wanted}
        told = self._headers(catalog, files)
        scales = NO_SCALES
        if self.dtype is not None:
            marks = self._marks(catalog, placed, told)
            scales = scales_of(tensors, stated, self._where, marks, skipped)
        elif told and any(one.own != one.part.name for one in placed):
            raise Incompatible(
                f"{HEADER_KEY} of its header names layers, which would have other names",
                where=self._where,
                hint=phrase("{dtype} does without", dtype=Option("dtype", CASTS["BF16"])),
            )
        if self._scales_made:
            self._choose_weights(model.name, tensors, scales)
        left = [name for name in scales.of if name in skipped]
        if left:
            raise BadRequest(
                f"{left[0]} has scales, and a weight with scales cannot be left out",
                where=Option("only") if self._only else Option("skip"),
            )
        if scales.of and self.before.file(path := model.path(STATED_ELSEWHERE)):
            self.removed.add(path)
        for file in files:
            placed = self.reshaped.files[file.path]
            slots = [self._slot(model.name, one, scales) for one in placed]
            kept = [slot for slot in slots if slot is not None]
            self.dropped += len(slots) - len(kept)
            self.shared += sum(slot.target is None for slot in kept)
            parts = [slot.part for slot in kept]
            if parts != [*file.tensors()] or any(slot.target is not None for slot in kept):
                self.files[file.path] = kept

    def _choose_weights(self, model: str, tensors: Mapping[str, Tensor], scales: Scales) -> None:
        """Cast the weights of layers alone, and note which mark says that they have scales."""
        if any(one.dtype in EIGHT_BITS for one in tensors.values()) or scales.dropped:
            raise Incompatible(
                "has elements of 8 bits already",
                where=self._where,
                hint=call("cast", self._where, dtype=CASTS["BF16"]),
            )
        names, mark = scaled_weights(tensors)
        chosen_names = {full_name(model, name) for name in names} & self._wanted
        own = {full_name(model, name) for name in tensors}
        self._wanted = (self._wanted - own) | chosen_names
        self._marks_made |= dict.fromkeys(chosen_names, mark)

    def give_scales(
        self,
        transaction: Transaction,
        pool: ThreadPoolExecutor,
        ahead: int,
        progress: ProgressCallback | None,
    ) -> None:
        """Give each weight that is cast a scale: its largest element becomes the type's largest.

        Tensors of wide elements come first in a file, so that all lie where readers map them.
        """
        if not self._marks_made:
            raise Incompatible("has no matrix of a layer to give a scale", where=self._where)
        every = (slot for own in self.files.values() for slot in own)
        slots = [slot for slot in every if slot.full in self._marks_made]
        sources = {slot.part.tensor_id(): slot.source for slot in slots}
        total = sum(one.nbytes for one in sources.values())
        tick = ProgressCounter("scale", total or 1, progress)
        found = largest(self._catalog, [*sources.values()], pool, ahead=ahead, tick=tick)
        divisors = dict(zip(sources, map(_divisor, found), strict=True))
        for path, own in self.files.items():
            made: list[_Slot] = []
            marks: dict[str, None] = {}
            for slot in own:
                mark = self._marks_made.get(slot.full)
                if mark is None:
                    made.append(slot)
                    continue
                divisor = divisors[slot.part.tensor_id()]
                if divisor is None:
                    raise Incompatible("has elements that are not finite", where=slot.full)
                value = np.float32(divisor).tobytes()
                made.append(msgspec.structs.replace(slot, divisor=divisor))
                made.append(self._new(transaction, scale_name(slot.name), "F32", (), value, path))
                marks[self._reshape.renamed(mark)] = None
            made += [self._new(transaction, one, SCALABLE, (0,), b"", path) for one in marks]
            self.files[path] = sorted(made, key=lambda slot: -SIZES.get(slot.entry.dtype, 1))
        self.scaled |= self._marks_made.keys() & self.cast

    def _new(
        self,
        transaction: Transaction,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        data: bytes,
        path: str,
    ) -> _Slot:
        """Store a tensor that the model did not have."""
        record = transaction.put_tensor(dtype, shape, [data] if data else [], path)
        [id] = transaction.put_records([record])
        return _Slot(name, Part(name, id, record.nbytes), record, None, None)

    @staticmethod
    def _headers(catalog: Catalog, files: Sequence[File]) -> list[str]:
        """Return what headers say of scales."""
        headers = []
        for file in files:
            metadata = metadata_of(catalog.read_parts(file.parts[:1])) or {}
            headers += [text for key, text in metadata.items() if key == HEADER_KEY]
        return headers

    def _marks(self, catalog: Catalog, placed: Sequence[Placed], headers: Sequence[str]) -> Marks:
        """Return what files say of their scales."""
        parts = {one.own: one.part for one in placed}

        def read(name: str) -> bytes:
            part = parts[name]
            return catalog.read_parts((part,)) if part.nbytes <= _MAX_MARK else b""

        return marks_of(parts, read, headers, self._where)

    def _slot(self, model: str, placed: Placed, scales: Scales) -> _Slot | None:
        """Return what becomes of a tensor of a model, None if it is dropped."""
        own, part, like = placed.own, placed.part, placed.channels
        source = self._records[part.tensor_id()]
        if own in scales.dropped:
            return None
        name = full_name(model, own)
        # Another shard may have a tensor of the same name, without scales.
        scale = scales.of.get(own) if source.dtype in EIGHT_BITS else None
        is_float = DTYPES[source.dtype].floating and name in self._wanted
        dtype = self.dtype if is_float and self.dtype is not None else source.dtype
        if like is not None:
            return self._resized(name, part, scale, like, dtype)
        if dtype == source.dtype and scale is None:
            return _Slot(name, part, source, None, None)
        if source.dtype not in CASTABLE:
            raise Incompatible(
                f"elements of {source.dtype} cannot be cast: {name}", where=self._where
            )
        self.cast.add(name)
        if scale is not None:
            self.scaled.add(name)
        target = Tensor(dtype, source.shape, nbytes(dtype, source.shape), b"")
        return _Slot(name, part, source, scale, target)

    def _resized(
        self, name: str, part: Part, scale: Scale | None, like: Tensor, dtype: str
    ) -> _Slot:
        """Return what becomes of a tensor that gets as many channels as another."""
        if scale is not None:
            raise Incompatible(
                f"{name} has scales, and gets other channels without alone", where=self._where
            )
        self.resized += 1
        target = Tensor(dtype, like.shape, nbytes(dtype, like.shape), b"")
        return _Slot(name, part, self._records[part.tensor_id()], None, target, like)

    def _take_config(self, catalog: Catalog, file: File, dtype: str) -> None:
        # Parsed by strict rules first: what is no usual config stays.
        if not config_of(catalog, self.before, file.path):
            return
        fields = json_object(catalog.read_parts(file.parts))
        changed = fields
        if dtype not in EIGHT_BITS:
            changed = with_dtype(changed, CASTS[dtype], known=CASTS.values())
        if self.scaled:
            changed = _without_quantization(changed)
        if changed != fields:
            self.configs[file.path] = json_bytes(changed)


def _divisor(most: float) -> float | None:
    """Return the scale of a weight by its largest magnitude; None if that is not finite."""
    if not math.isfinite(most):
        return None
    return float(np.float32(most / LARGEST_E4M3)) or 1.0


def _divided(divisor: float) -> Change:
    return lambda values, _: values / np.float32(divisor)


def _without_quantization(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that states no quantization, neither of a part of the model."""
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in QUANTIZATIONS
    }


class _Caster:
    """Casts the tensors of a plan, and makes the output's files.

    overflowed, products: how many elements, and products with scales, were too large, by tensor.
    """

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        caster: Caster,
        plan: _CastPlan,
        ahead: int,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._caster = caster
        self._plan = plan
        self._ahead = ahead
        self._known: dict[_Key, tuple[Part, CastTensor]] = {}
        slots = (slot for own in plan.files.values() for slot in own)
        cast = {slot.key: slot for slot in slots if slot.target is not None}
        total = sum(slot.source.nbytes for slot in cast.values()) or 1
        self._tick = ProgressCounter("cast", total, progress)
        self.overflowed: dict[str, int] = {}
        self.products: dict[str, int] = {}
        self.remarks: list[str] = []

    def manifest(self) -> Manifest:
        """Store the output's files and return what it consists of; the manifest is not stored."""
        plan = self._plan
        before = [file for file in plan.before.files if file.path not in plan.removed]
        weights = {path: [slot.entry for slot in slots] for path, slots in plan.files.items()}
        without = [HEADER_KEY] if plan.dtype is not None else []
        texts = texts_of(self._catalog, plan.before, weights, without) | plan.configs
        self._tick(0)
        for path in sorted(plan.removed):
            self.remarks.append(f"{path} is left out: it states the quantization")

        def tensors(path: str) -> Sequence[Part]:
            return self._tensors(path, plan.files[path], begin=len(texts[path]))

        return assembled(before, texts, weights, tensors, self._transaction.put_bytes)

    def _tensors(self, path: str, slots: Sequence[_Slot], *, begin: int) -> list[Part]:
        """Store the tensors of a file, in their order. begin: the first one's offset."""
        jobs: dict[_Key, CastJob] = {}
        names: dict[_Key, str] = {}
        for slot in slots:
            key = slot.key
            if slot.target is not None and slot.channels is not None:
                self._resize(slot, slot.channels, slot.target.dtype, path)
            elif slot.target is not None and key not in self._known:
                change = None if slot.divisor is None else _divided(slot.divisor)
                jobs.setdefault(key, CastJob(slot.source, slot.scale, slot.target, begin, change))
                names.setdefault(key, slot.name)
            begin += slot.entry.nbytes
        found = self._caster.cast(list(jobs.values()), path, ahead=self._ahead, tick=self._tick)
        ids = self._transaction.put_records([one.record for one in found])
        for key, one, id in zip(jobs, found, ids, strict=True):
            self._known[key] = Part(names[key], id, one.record.nbytes), one
        return [self._part(slot) for slot in slots]

    def _resize(self, slot: _Slot, like: Tensor, dtype: str, path: str) -> None:
        """Store a tensor with as many channels as another."""
        made, lost = with_channels(self._catalog, self._transaction, slot.source, like, dtype, path)
        [id] = self._transaction.put_records([made])
        self._known[slot.key] = Part(slot.name, id, made.nbytes), CastTensor(made, lost, 0)
        self._tick(slot.source.nbytes)

    def _part(self, slot: _Slot) -> Part:
        if slot.target is None:
            return slot.part
        part, found = self._known[slot.key]
        if found.overflowed:
            self.overflowed[slot.full] = found.overflowed
        if found.products:
            self.products[slot.full] = found.products
        return Part(slot.name, part.tensor, part.nbytes)
