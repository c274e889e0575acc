"""Cast: store a model again with its floating-point tensors in another element type.

Merging knows BF16, F16 and F32.  A model in fp64 or fp8 is cast to one of these first, as a new
snapshot; tensors that have the type already are the model's own.  Weights of 8 bits with scales
(`scales`) become what they stand for, and the scales are dropped.  Without a type, or before it,
tensors are left out, taken from elsewhere and renamed (`reshape`).

`cast_plan` owns what becomes of each tensor and file, `casting` computes the new tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mstore.models.adapters.targets import is_adapter
from mstore.models.cast_plan import SCALABLE, CastKey, CastPlan, CastSlot
from mstore.models.casting import Caster, CastJob, CastTensor
from mstore.models.made import Publication, assembled, branch_below, texts_of
from mstore.models.reshape import NO_RESHAPE, Reshape, with_channels
from mstore.models.scales import HEADER_KEY
from mstore.numeric.codes import CASTS
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.manifest import Manifest, Part
from mstore.store.objects.snapshot import BASE, CAST, EXPERT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

BRANCHES: Final = "cast"
"""Models are cast to branches below this name, if no other is given."""

RESHAPED: Final = "reshaped"
"""What is done to a model whose tensors keep their types."""

SATURATING: Final = frozenset({"F8_E4M3"})
"""Types without infinities: what is too large becomes the largest element."""

_NAMED: Final = 3


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
    plan = CastPlan(catalog, manifest, of, dtype, reshape, only, skip, model[0], scaled=scaled)
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


def _idle(plan: CastPlan, told: str | None) -> Iterator[str]:
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


class _Caster:
    """Casts the tensors of a plan, and makes the output's files.

    overflowed, products: how many elements, and products with scales, were too large, by tensor.
    """

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        caster: Caster,
        plan: CastPlan,
        ahead: int,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._caster = caster
        self._plan = plan
        self._ahead = ahead
        self._known: dict[CastKey, tuple[Part, CastTensor]] = {}
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
        told = texts_of(self._catalog, plan.before, weights, without, plan.header_lineage)
        texts = told | plan.configs
        self._tick(0)
        for path in sorted(plan.removed):
            self.remarks.append(f"{path} is left out: it states the quantization")

        def tensors(path: str) -> Sequence[Part]:
            return self._tensors(path, plan.files[path], begin=len(texts[path]))

        return assembled(before, texts, weights, tensors, self._transaction.put_bytes)

    def _tensors(self, path: str, slots: Sequence[CastSlot], *, begin: int) -> list[Part]:
        """Store the tensors of a file, in their order. begin: the first one's offset."""
        jobs: dict[CastKey, CastJob] = {}
        names: dict[CastKey, str] = {}
        for slot in slots:
            key = slot.key
            if slot.target is not None and slot.channels is not None:
                self._resize(slot, slot.channels, slot.target.dtype, path)
            elif slot.target is not None and key not in self._known:
                job = CastJob(slot.source, slot.scale, slot.target, begin, slot.change)
                jobs.setdefault(key, job)
                names.setdefault(key, slot.name)
            begin += slot.entry.nbytes
        found = self._caster.cast(list(jobs.values()), path, ahead=self._ahead, tick=self._tick)
        ids = self._transaction.put_records([one.record for one in found])
        for key, one, id in zip(jobs, found, ids, strict=True):
            self._known[key] = Part(names[key], id, one.record.nbytes), one
        return [self._part(slot) for slot in slots]

    def _resize(self, slot: CastSlot, like: Tensor, dtype: str, path: str) -> None:
        """Store a tensor with as many channels as another."""
        made, lost = with_channels(self._catalog, self._transaction, slot.source, like, dtype, path)
        [id] = self._transaction.put_records([made])
        self._known[slot.key] = Part(slot.name, id, made.nbytes), CastTensor(made, lost, 0)
        self._tick(slot.source.nbytes)

    def _part(self, slot: CastSlot) -> Part:
        if slot.target is None:
            return slot.part
        part, found = self._known[slot.key]
        if found.overflowed:
            self.overflowed[slot.full] = found.overflowed
        if found.products:
            self.products[slot.full] = found.products
        return Part(slot.name, part.tensor, part.nbytes)
