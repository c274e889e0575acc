"""Cast: store a model again with its floating-point tensors in another element type.

Merging knows BF16, F16 and F32.  A model in fp64 or fp8 is cast to one of these first, as a new
snapshot; tensors that have the type already are the model's own.  Weights of 8 bits with scales
(`scales`) become what they stand for, and the scales are dropped.

Blocks are read, scaled, rounded, hashed and encoded on threads: memory is a few groups of blocks
per thread, whatever the tensor's size.  Scales are mapped files without a name.  The calling thread
puts finished blocks into the transaction, in the order of the file.
"""

from __future__ import annotations

import itertools
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.blocks.codecs import Encoded, elements_of, encode
from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.checkpoint.models import Model, full_name, split_name
from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.adapters.targets import is_adapter
from mstore.models.made import (
    Publication,
    Slot,
    assembled,
    branch_below,
    metadata_of,
    texts_of,
    with_dtype,
)
from mstore.models.scales import (
    HEADER_KEY,
    QUANTIZATIONS,
    Marks,
    Scale,
    Scales,
    apply,
    marks_of,
    quantization_of,
    scales_of,
)
from mstore.numeric.casts import SIZES, Values, narrowed, widened
from mstore.numeric.codes import CASTABLE, CASTS, CODES, EIGHT_BITS
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, models_in, tensors_of
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.shapes import chosen, require_matches
from mstore.store.objects.snapshot import BASE, CAST, EXPERT, Parent
from mstore.store.objects.tensor import Tensor, partition
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import BlockId, Buffer, SnapshotId, TensorId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

BRANCHES: Final = "cast"
"""Models are cast to branches below this name, if no other is given."""

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
    dtype: str
    """the type of its floating-point tensors, as torch calls it"""
    cast: int
    """tensors that were cast"""
    scaled: int
    """those of them that had scales"""
    shared: int
    """tensors that stay as they are"""
    scales_dropped: int
    """scales and what goes with them, which the model has no more"""
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
    dtype: str,
    name: str | None,
    only: Sequence[str],
    skip: Sequence[str],
    message: str,
    allow_nonfinite: bool,
    threads: int,
    progress: ProgressCallback | None = None,
) -> CastReport:
    """Store the model with another element type under a ref.

    of: the one of its models to cast; None: all. dtype: of `CASTS`. name: None for one below
    `cast/`. allow_nonfinite: also publish a model in which elements became infinite.

    Raises BadRequest (patterns), Incompatible (scales that are missing or of another form, types
    that cannot be cast, elements that became infinite), BadName, Conflict, Corrupt, StorageFailed;
    then nothing is published.
    """
    began = time.monotonic()
    told = CASTS[dtype]
    branch = branch_below(BRANCHES, f"{model[0]}-{told}") if name is None else name
    manifest = catalog.manifest_of(model[1])
    plan = _CastPlan(catalog, manifest, of, dtype, only, skip, model[0])
    with Transaction(catalog, f"cast {branch}") as transaction:
        current = branch_to_move(catalog, branch)
        with ThreadPoolExecutor(threads, "cast") as pool:
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
            _parents(catalog, model[1], manifest),
            message=message or f"{model[0]} in {told}",
            action=f"cast: {model[0]} to {told}",
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
        overflowed=sum(run.overflowed.values()) + sum(run.products.values()),
        warnings=warnings,
        remarks=(*_idle(plan, told), *run.remarks),
        plain_bytes=made.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _idle(plan: _CastPlan, told: str) -> Iterator[str]:
    if not plan.cast:
        yield f"every tensor that could be cast is of {told} already"


def _parents(catalog: Catalog, id: SnapshotId, manifest: Manifest) -> tuple[Parent, ...]:
    """Return the source as the base; if it is an adapter, its base stays the adapter's."""
    if not is_adapter(tensors_of(catalog, manifest)):
        return (Parent(BASE, id),)
    bases = [one for one in catalog.snapshot(id).parents if one.role == BASE]
    return (*bases[:1], Parent(EXPERT, id))


def _overflow(
    overflowed: Mapping[str, int], products: Mapping[str, int], dtype: str
) -> Iterator[str]:
    """Yield what became of elements that were too large, and of products with scales."""
    became = "448 or -448, the largest there is" if dtype in SATURATING else "infinite"
    if overflowed:
        yield _too_large("element", f"{CASTS[dtype]} and became {became}", overflowed)
    if products:
        yield _too_large("product", f"float32 and became {became}", products)


def _too_large(what: str, told: str, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    where = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:_NAMED])
    more = f" and {len(counts) - _NAMED} more tensors" if len(counts) > _NAMED else ""
    many = f"1 {what} is" if total == 1 else f"{total} {what}s are"
    return f"{many} too large for {told}: {where}{more}"


class _Slot(msgspec.Struct, frozen=True):
    """A tensor of the output: its name, its part, and if it is cast, from and to what."""

    full: str
    part: Part
    source: Tensor
    scale: Scale | None
    target: Tensor | None

    @property
    def name(self) -> str:
        return str(self.part.name)

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
        dtype: str,
        only: Sequence[str],
        skip: Sequence[str],
        where: str,
    ) -> None:
        self.before = manifest
        self._dtype = dtype
        self._where = where
        models = models_in(catalog, manifest)
        weights = [file for model in models.named for file in models.weights(model)]
        parts = [part for file in weights for part in file.tensors()]
        ids = [part.tensor_id() for part in parts]
        self._records = dict(zip(ids, catalog.tensors(ids), strict=True))
        names = [name for name in models.tensors if of is None or split_name(name)[0] == of]
        require_matches(names, only, skip, where)
        self._only = bool(only)
        self._wanted = chosen(dict.fromkeys(names, ()), only, skip).keys()
        self.files: dict[str, list[_Slot]] = {}
        self.configs: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.cast: set[str] = set()
        self.scaled: set[str] = set()
        self.shared = 0
        self.dropped = 0
        for model in models.named.values():
            own = model.path(CONFIG)
            path = own if manifest.file(own) is not None else CONFIG
            config = config_of(catalog, manifest, path)
            files = models.weights(model.name)
            self._take(catalog, model, files, config, inherited=path != own)
        for file in manifest.files:
            if file.form == OPAQUE and posixpath.basename(file.path) == CONFIG:
                self._take_config(catalog, file)

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
        tensors: dict[str, Tensor] = {}
        for file in files:
            for part in file.tensors():
                tensors.setdefault(str(part.name), self._records[part.tensor_id()])
        stated = quantization_of(config)
        kinds = {record.dtype for record in tensors.values()}
        if inherited and kinds <= CODES.keys():
            # An adapter or a part in a directory of its own, which is not quantized.
            stated = None
        skipped = {one for one in tensors if full_name(model.name, one) not in self._wanted}
        scales = scales_of(tensors, stated, self._where, self._marks(catalog, files), skipped)
        left = [name for name in scales.of if name in skipped]
        if left:
            raise BadRequest(
                f"{left[0]} has scales, and a weight with scales cannot be left out",
                where=Option("only") if self._only else Option("skip"),
            )
        if scales.of and self.before.file(path := model.path(STATED_ELSEWHERE)):
            self.removed.add(path)
        for file in files:
            slots = [self._slot(model.name, part, scales) for part in file.tensors()]
            kept = [slot for slot in slots if slot is not None]
            self.dropped += len(slots) - len(kept)
            self.shared += sum(slot.target is None for slot in kept)
            if len(kept) < len(slots) or any(slot.target is not None for slot in kept):
                self.files[file.path] = kept

    def _marks(self, catalog: Catalog, files: Sequence[File]) -> Marks:
        """Return what the files say of their scales."""
        parts = {str(part.name): part for file in files for part in file.tensors()}

        def read(name: str) -> bytes:
            part = parts[name]
            return catalog.read_parts((part,)) if part.nbytes <= _MAX_MARK else b""

        headers = []
        for file in files:
            metadata = metadata_of(catalog.read_parts(file.parts[:1])) or {}
            headers += [text for key, text in metadata.items() if key == HEADER_KEY]
        return marks_of(parts, read, headers, self._where)

    def _slot(self, model: str, part: Part, scales: Scales) -> _Slot | None:
        """Return what becomes of a tensor of a model, None if it is dropped."""
        own, source = str(part.name), self._records[part.tensor_id()]
        if own in scales.dropped:
            return None
        name = full_name(model, own)
        # Another shard may have a tensor of the same name, without scales.
        scale = scales.of.get(own) if source.dtype in EIGHT_BITS else None
        is_float = DTYPES[source.dtype].floating and name in self._wanted
        if not is_float or (source.dtype == self._dtype and scale is None):
            return _Slot(name, part, source, None, None)
        if source.dtype not in CASTABLE:
            raise Incompatible(
                f"elements of {source.dtype} cannot be cast: {name}", where=self._where
            )
        self.cast.add(name)
        if scale is not None:
            self.scaled.add(name)
        length = nbytes(self._dtype, source.shape)
        return _Slot(name, part, source, scale, Tensor(self._dtype, source.shape, length, b""))

    def _take_config(self, catalog: Catalog, file: File) -> None:
        # Parsed by strict rules first: what is no usual config stays.
        if not config_of(catalog, self.before, file.path):
            return
        fields = json_object(catalog.read_parts(file.parts))
        changed = fields
        if self._dtype not in EIGHT_BITS:
            changed = with_dtype(changed, CASTS[self._dtype], known=CASTS.values())
        if self.scaled:
            changed = _without_quantization(changed)
        if changed != fields:
            self.configs[file.path] = json_bytes(changed)


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
        self._known: dict[tuple[TensorId, Scale | None], tuple[Part, CastTensor]] = {}
        slots = (slot for own in plan.files.values() for slot in own)
        cast = {(slot.part.tensor, slot.scale): slot for slot in slots if slot.target is not None}
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
        texts = texts_of(self._catalog, plan.before, weights, without=[HEADER_KEY]) | plan.configs
        self._tick(0)
        for path in sorted(plan.removed):
            self.remarks.append(f"{path} is left out: it states the quantization")

        def tensors(path: str) -> Sequence[Part]:
            return self._tensors(path, plan.files[path], begin=len(texts[path]))

        return assembled(before, texts, weights, tensors, self._transaction.put_bytes)

    def _tensors(self, path: str, slots: Sequence[_Slot], *, begin: int) -> list[Part]:
        """Store the tensors of a file, in their order. begin: the first one's offset."""
        jobs: dict[tuple[TensorId, Scale | None], CastJob] = {}
        names: dict[tuple[TensorId, Scale | None], str] = {}
        for slot in slots:
            key = slot.part.tensor_id(), slot.scale
            if slot.target is not None and key not in self._known:
                jobs.setdefault(key, CastJob(slot.source, slot.scale, slot.target, begin))
                names.setdefault(key, slot.name)
            begin += slot.entry.nbytes
        found = self._caster.cast(list(jobs.values()), path, ahead=self._ahead, tick=self._tick)
        ids = self._transaction.put_records([one.record for one in found])
        for key, one, id in zip(jobs, found, ids, strict=True):
            self._known[key] = Part(names[key], id, one.record.nbytes), one
        return [self._part(slot) for slot in slots]

    def _part(self, slot: _Slot) -> Part:
        if slot.target is None:
            return slot.part
        part, found = self._known[slot.part.tensor_id(), slot.scale]
        if found.overflowed:
            self.overflowed[slot.full] = found.overflowed
        if found.products:
            self.products[slot.full] = found.products
        return Part(slot.name, part.tensor, part.nbytes)


_GROUP_BYTES: Final = 4 << 20


Change = Callable[[Values, int], Values]
"""Returns other elements in place of these, from a flat index on; called on threads."""


class CastJob(msgspec.Struct, frozen=True):
    """A tensor to cast: the stored one, its scale if it has one, and the new one, without blocks.

    begin: where the new tensor begins in its file. change: of elements, before they are rounded.
    """

    source: Tensor
    scale: Scale | None
    target: Tensor
    begin: int
    change: Change | None = None


class CastTensor(msgspec.Struct, frozen=True):
    """A new tensor, and how much was too large.

    overflowed: elements, for its type. products: of weights and scales, for float32.
    """

    record: Tensor
    overflowed: int
    products: int


class _CastBlocks(msgspec.Struct, frozen=True):
    """Some whole blocks of a job: its number, its first element and how many it has."""

    job: int
    first: int
    count: int


class _Done(msgspec.Struct, frozen=True):
    """The new blocks of a group; None for the bytes of one that is stored."""

    ids: list[BlockId]
    encoded: list[Encoded | None]
    overflowed: int
    products: int


class Caster:
    """Casts tensors, on a pool of threads."""

    def __init__(
        self, catalog: Catalog, transaction: Transaction, pool: ThreadPoolExecutor
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._pool = pool

    def cast(
        self, jobs: Sequence[CastJob], path: str, *, ahead: int, tick: Callable[[int], None]
    ) -> list[CastTensor]:
        """Store the new blocks of tensors of one file; return the tensors, which are not stored.

        tick: called with the bytes that were read.
        """
        ids: list[list[BlockId]] = [[] for _ in jobs]
        overflowed, products = [0] * len(jobs), [0] * len(jobs)
        scales: dict[int, Buffer] = {}

        def submitted(group: _CastBlocks) -> Future[_Done]:
            job = jobs[group.job]
            if job.scale is not None and group.job not in scales:
                scales.clear()
                scales[group.job] = self._mapped(job.scale.record)
            return self._pool.submit(self._group, job, group, scales.get(group.job))

        groups = (group for number, job in enumerate(jobs) for group in self._groups(number, job))
        with closing(in_order(submitted, groups, ahead=ahead)) as done:
            for group, found in done:
                job = jobs[group.job]
                begin = job.begin + group.first * SIZES[job.target.dtype]
                offsets = itertools.count(begin, self._catalog.block_size)
                blocks = list(zip(found.ids, found.encoded, offsets, strict=False))
                self._transaction.put_blocks(blocks, path)
                ids[group.job] += found.ids
                overflowed[group.job] += found.overflowed
                products[group.job] += found.products
                tick(group.count * SIZES[job.source.dtype])
        return [
            CastTensor(
                Tensor(job.target.dtype, job.target.shape, job.target.nbytes, b"".join(own)),
                *lost,
            )
            for job, own, *lost in zip(jobs, ids, overflowed, products, strict=True)
        ]

    def _mapped(self, record: Tensor) -> Buffer:
        blocks = (self._catalog.read_block(block) for block in record.block_ids())
        return fs.unnamed(self._transaction.directory, blocks)

    def _groups(self, number: int, job: CastJob) -> Iterator[_CastBlocks]:
        sizes = SIZES[job.source.dtype], SIZES[job.target.dtype]
        # Powers of two: whole blocks of either type.
        each = max(_GROUP_BYTES // max(sizes), self._catalog.block_size // min(sizes))
        for first, count in partition(job.source.nbytes // sizes[0], each):
            yield _CastBlocks(number, first, count)

    def _group(self, job: CastJob, group: _CastBlocks, scale: Buffer | None) -> _Done:
        """Return the new blocks of a group.  Runs on the pool."""
        dtype = job.target.dtype
        values = widened(self._read(job.source, group), job.source.dtype)
        lost = 0
        if job.scale is not None and scale is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                before = np.isinf(values)
                # A weight with a scale has 8 bits.
                apply(values.view(np.float32), group.first, job.scale, scale)
                lost = int(np.count_nonzero(np.isinf(values) & ~before))
        if job.change is not None:
            values = job.change(values, group.first)
        data, overflowed = narrowed(values, dtype)
        if dtype == "F8_E4M3":
            # There infinite elements count, and these became so here.
            overflowed -= lost
        plain = data.data
        spans = partition(len(plain), self._catalog.block_size)
        blocks = [plain[at : at + length] for at, length in spans]
        ids = [BlockId.of(block) for block in blocks]
        known = self._transaction.has_blocks(ids)
        elements, policy = elements_of(dtype), self._catalog.config.codec
        encoded = [
            None if is_known else encode(block, elements, policy)
            for block, is_known in zip(blocks, known, strict=True)
        ]
        return _Done(ids, encoded, overflowed, lost)

    def _read(self, record: Tensor, group: _CastBlocks) -> npt.NDArray[np.uint8]:
        each = self._catalog.block_size // SIZES[record.dtype]
        numbers = range(group.first // each, -(-(group.first + group.count) // each))
        return self._catalog.read_blocks([record.block(number) for number in numbers])
