"""Masks of experts: which elements of one model of all an expert shares, and by how much they are
rescaled (`methods.emr`).

A mask is a checkpoint with the base's files and names: of each tensor that the model of all moves
one of the same shape, 2 where the expert's delta has the sign of that model's, else 0.  Of these
two float32 only a bit of the first byte differs, and the other bytes are left out where elements
are coded: a mask takes about its entropy, a bit an element at most.  The expert's number is the sum
of the sizes of all its deltas over that of the elements that its mask leaves, over all tensors.

Memory is a few groups of blocks for each thread.  The sums do not depend on threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from mstore.checkpoint.models import is_index
from mstore.merge.arithmetic.masks import Singles
from mstore.merge.planning.warnings import MergeWarning
from mstore.merge.running.commit import MergeReport
from mstore.models.adapters.inputs import Inputs, ModelChoice
from mstore.models.adapters.targets import is_adapter
from mstore.models.casting import Caster, CastJob
from mstore.models.made import Publication, Slot, assembled, branch_below, texts_of
from mstore.models.stats.chunks import ReadChunk, chunk_reader, tensor_chunk
from mstore.numeric.casts import Values, singles
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.sums import halved
from mstore.store.catalog import Catalog
from mstore.store.models import Input, models_in, tensors_of
from mstore.store.objects.manifest import Part
from mstore.store.objects.snapshot import ADD, BASE, EXPERT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadRequest, Conflict, Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, call, few, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

ELECTS: Final = "emr"
"""The method of a model of all experts."""
MASKED: Final = "masked"
"""That of the model of one."""
_SHARED: Final = "shared"
_MASKS: Final = "masks"
_TYPE: Final = "F32"
_TAKEN: Final = np.float32(2)


class EmrModel(Report, frozen=True):
    """The model that a mask makes of the model of all experts."""

    expert: str
    """the expert, as it was named"""
    name: str
    """the ref of its virtual model"""
    snapshot: SnapshotId
    """that snapshot's id"""
    mask: str
    """the ref of its mask"""
    rescale: float
    """what the elements that the mask leaves are multiplied by"""
    share: float
    """the share of the elements that the expert moves which its mask leaves"""
    bytes_written: int
    """bytes added to the store for the mask"""


class EmrReport(Report, frozen=True):
    """One model of all experts, and a virtual model of each."""

    name: str
    """the ref of the model of all"""
    snapshot: SnapshotId
    """that snapshot's id"""
    models: tuple[EmrModel, ...]
    """the model of each expert"""
    bytes_written: int
    """bytes added to the store in all"""
    remarks: tuple[str, ...]
    """what to know about the model of all, as text"""
    warnings: tuple[MergeWarning, ...]
    """what may be wrong with it"""
    seconds: float
    """how long it took"""

    @classmethod
    def of(
        cls,
        merged: MergeReport,
        models: Sequence[EmrModel],
        remarks: Sequence[str],
        *,
        seconds: float,
    ) -> EmrReport:
        """Return it, for the merge that made the model of all.  remarks: more than its own."""
        written = merged.bytes_written + sum(one.bytes_written for one in models)
        told = (*merged.remarks, *remarks), merged.warnings
        return EmrReport(merged.name, merged.snapshot, tuple(models), written, *told, seconds)


class Branches(NamedTuple):
    """The branches of a family: of the model of all, and of each expert its model and its mask."""

    shared: str
    own: dict[str, str]
    masks: dict[str, str]


def branches_of(catalog: Catalog, name: str, experts: Sequence[str]) -> Branches:
    """Return the branches of the family `name`, all of which can be moved.

    Raises BadRequest for experts whose branches would have one name, BadName, Conflict.
    """
    where, shared = Option("experts"), f"{name}/{_SHARED}"
    branch_to_move(catalog, shared)
    twice = next((one for one, count in Counter(experts).items() if count > 1), None)
    if twice is not None:
        raise BadRequest(f"{twice} is given more than once", where=where)
    own = {one: branch_below(name, one) for one in experts}
    for expert, branch in own.items():
        if branch.removeprefix(f"{name}/").split("/")[0] in (_SHARED, _MASKS):
            raise BadRequest(
                f"{expert} cannot be the name of an expert: {shared} is the model of all, "
                f"and masks are below {name}/{_MASKS}",
                where=where,
                hint=call("reset", "NAME", expert),
            )
    if len({*own.values()}) < len(own):
        told = ", ".join(experts)
        raise BadRequest(f"two branches of these would have one name: {told}", where=where)
    masks = {one: branch_below(f"{name}/{_MASKS}", one) for one in experts}
    for branch in (*own.values(), *masks.values()):
        branch_to_move(catalog, branch)
    refs, above = catalog.refs(), f"{name}/{_MASKS}/"
    others = [
        ref.removeprefix(above)
        for ref in refs
        if ref.startswith(above) and ref not in masks.values()
    ]
    if others:
        theirs = [f"{way}{one}" for one in others for way in (f"{name}/", above)]
        raise Conflict(
            f"has models of experts that are not given: {few(others)}; they are made of the "
            f"{shared} that is there now",
            where=name,
            hint=phrase(
                "give them, too, choose another {name}, or {remove} first",
                name=Option("name"),
                remove=call("remove", *(one for one in theirs if one in refs)),
            ),
        )
    return Branches(shared, own, masks)


def adapters_told(catalog: Catalog, experts: Iterable[Input]) -> Iterator[str]:
    """Yield a remark about experts that are adapters."""
    names = [
        one.name
        for one in experts
        if is_adapter(tensors_of(catalog, catalog.manifest_of(one.snapshot)))
    ]
    if names:
        verb = "is an adapter" if len(names) == 1 else "are adapters"
        yield f"{few(names)} {verb}: adapters are mostly smaller than masks, and exact"


Sides = tuple[Tensor, Tensor, Tensor]
"""A tensor of base, model of all, and expert."""


class _Sums:
    """Sums of the sizes of an expert's deltas, and of what its mask leaves; of any threads."""

    def __init__(self) -> None:
        self._moved: list[float] = []
        self._left: list[float] = []
        self._counts = [(0, 0)]

    def add(self, moved: Singles, left: Singles) -> None:
        """Count a run of elements."""
        self._moved.append(halved(np.abs(moved.astype(np.float64))))
        self._left.append(halved(np.abs(left.astype(np.float64))))
        self._counts.append((int(np.count_nonzero(left)), int(np.count_nonzero(moved))))

    def rescale(self) -> float:
        """Return their quotient, 0 if nothing is left.  `fsum` knows no order."""
        left = math.fsum(self._left)
        return math.fsum(self._moved) / left if left else 0.0

    def share(self) -> float:
        """Return which part of the elements that move is left."""
        left, moved = (sum(counts) for counts in zip(*self._counts, strict=True))
        return left / moved if moved else 0.0


class StoredMask(NamedTuple):
    """A mask, stored on a branch; its numbers as in `EmrModel`."""

    branch: str
    rescale: float
    share: float
    bytes_written: int

    def model(self, expert: str, name: str, snapshot: SnapshotId) -> EmrModel:
        """Return what is told of the virtual model that it makes."""
        return EmrModel(expert, name, snapshot, *self)


def store_mask(
    catalog: Catalog,
    base: Input,
    shared: Input,
    expert: Input,
    branch: str,
    *,
    threads: int,
    progress: ProgressCallback | None,
) -> StoredMask:
    """Store the mask of an expert on a branch.  shared: the model of all.

    Raises Incompatible (an expert that does not fit, or whose elements are not finite), BadName,
    Conflict, Corrupt, StorageFailed; then nothing is published.
    """
    manifest, made = catalog.manifest_of(base.snapshot), _Masks(catalog, base, (shared, expert))
    named = models_in(catalog, manifest)
    files = {
        file.path: [
            (str(part.name), sides)
            for part in file.tensors()
            if (name := named.name(file.path, part)) is not None
            and (sides := made.sides(name)) is not None
        ]
        for file in manifest.files
        if any(file.tensors())
    }
    slots = {
        path: [Slot(name, _TYPE, sides[0].shape) for name, sides in own]
        for path, own in files.items()
    }
    total = sum(sides[1].nbytes for own in files.values() for _, sides in own)
    tick = ProgressCounter("mask", total or 1, progress)
    with Transaction(catalog, f"mask {branch}") as transaction:
        current = branch_to_move(catalog, branch)
        texts = texts_of(catalog, manifest, slots)
        with ThreadPoolExecutor(threads, "mask") as pool:
            caster = Caster(catalog, transaction, pool)

            def masks(path: str) -> list[Part]:
                jobs = list(made.jobs([sides for _, sides in files[path]], len(texts[path])))
                found = caster.cast(jobs, path, ahead=2 * threads, tick=tick)
                records = [one.record for one in found]
                ids = transaction.put_records(records)
                return [
                    Part(slot.name, id, record.nbytes)
                    for slot, id, record in zip(slots[path], ids, records, strict=True)
                ]

            kept = [one for one in manifest.files if one.path in files or is_index(one.path)]
            content = assembled(kept, texts, slots, masks, transaction.put_bytes)
        rescale, share = made.sums.rescale(), made.sums.share()
        if not math.isfinite(rescale):
            raise Incompatible(
                "has infinite or NaN elements, so no number rescales its mask", where=expert.name
            )
        publication = Publication(catalog, transaction)
        publication.put(
            branch,
            current,
            content,
            ADD,
            (
                Parent(BASE, base.snapshot),
                *(Parent(EXPERT, one.snapshot) for one in (shared, expert)),
            ),
            message=f"mask of {expert.name}",
            action=f"emr: mask of {expert.name}",
        )
        publication.commit()
        return StoredMask(branch, rescale, share, transaction.bytes_written)


class _Masks:
    """The masks of an expert's tensors, and the sums that its number follows from."""

    def __init__(self, catalog: Catalog, base: Input, models: tuple[Input, Input]) -> None:
        self._catalog = catalog
        self.sums = _Sums()
        self._inputs = Inputs(
            catalog,
            catalog.snapshot(base.snapshot).manifest_id(),
            [catalog.snapshot(one.snapshot).manifest_id() for one in models],
            [one.name for one in (base, *models)],
            choice=ModelChoice(base.model, tuple([one.model for one in models])),
            fill=True,
        )

    def sides(self, name: str) -> Sides | None:
        """Return a tensor of base, model of all, and expert; None if nobody moves it."""
        inputs = self._inputs
        ids = [one.get(name) for one in inputs.members]
        if ids[0] is None or ids[0] == ids[1]:
            return None
        base, shared, expert = inputs.records([one for one in ids if one is not None])
        return (base, shared, expert) if base.dtype in CODES else None

    def jobs(self, tensors: Sequence[Sides], begin: int) -> Iterator[CastJob]:
        """Yield what makes the masks of a file's tensors, from `begin` in the file on."""
        size = ITEMSIZES[_TYPE]
        for base, shared, expert in tensors:
            chunk = tensor_chunk(self._catalog.block_size, base, [expert])
            read = tuple(chunk_reader(self._catalog, one, chunk, None) for one in (base, expert))
            change = partial(self._mask, (base, expert), read, chunk)
            nbytes = math.prod(base.shape) * size
            yield CastJob(shared, None, Tensor(_TYPE, base.shape, nbytes, b""), begin, change)
            begin += nbytes

    def _mask(
        self,
        records: tuple[Tensor, Tensor],
        read: tuple[ReadChunk, ...],
        chunk: int,
        values: Values,
        first: int,
    ) -> Values:
        """Return the mask of a run of elements of the model of all; count what it leaves."""
        end = first + values.size
        sides = []
        for record, own in zip(records, read, strict=True):
            numbers = range(first // chunk, -(-end // chunk))
            data = np.concatenate([own(number) for number in numbers])
            wide = singles(data, record.dtype, data.size // ITEMSIZES[record.dtype])
            sides.append(wide[first - numbers[0] * chunk :][: values.size])
        base, expert = sides
        with np.errstate(all="ignore"):
            moved, unified = expert - base, values.astype(np.float32) - base
        taken = np.sign(moved) * np.sign(unified) > 0
        self.sums.add(moved, np.where(taken, unified, np.float32(0)))
        return np.where(taken, _TAKEN, np.float32(0))
