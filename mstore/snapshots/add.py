"""Add: store a checkpoint on disk as a snapshot.

A checkpoint of differences (`differences`) is stored as its sums with the base.  `add_files` stores
the files; this says what fits a base, and publishes.  Nothing is visible before the transaction
commits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from mstore.blocks.codecs import Policy
from mstore.checkpoint.declared import CONFIG as MODEL_CONFIG
from mstore.checkpoint.directory import Checkpoint, SourceFile
from mstore.checkpoint.models import name_in_model, renamed, split_name
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.strict_json import json_object
from mstore.models.adapters.config import CONFIG, MAX_CONFIG
from mstore.models.adapters.targets import check_adapter, has_keys, is_adapter, is_any_adapter
from mstore.models.made import Publication, assembled, texts_of
from mstore.models.optional import optional_differences
from mstore.models.stats.store import StatsStore
from mstore.snapshots import digests
from mstore.snapshots.add_files import FileAdder, readable_tensors
from mstore.snapshots.lineage import ParentReport
from mstore.store.catalog import Catalog
from mstore.store.models import models_in, paired, tensors_of
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.shapes import chosen, require_same_shapes
from mstore.store.objects.snapshot import ADD, BASE, Parent, SnapshotRecord
from mstore.store.refs import CANDIDATE, DOWNLOAD, below
from mstore.store.tied import KEY, Tied, own_head, ties
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, ManifestId, SnapshotId, TensorId
from mstore.terms.phrases import Call, Option, call, few, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

if TYPE_CHECKING:
    from mstore.models.differences import Differences

Kind = Literal["full", "delta"]
"""What the tensors of a checkpoint are: weights, or differences to those of the base."""


class AddReport(Report, frozen=True):
    """What `add` stored."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    manifest: ManifestId
    """id of the content: same bytes, same id"""
    new_snapshot: bool
    """false if the ref already held these bytes"""
    previous: SnapshotId | None
    """what the branch pointed at before; None: it is new"""
    files: int
    """number of files"""
    tensors: int
    """number of tensors"""
    plain_bytes: int
    """size of the files as checked out"""
    bytes_written: int
    """bytes added to the store"""
    blocks_total: int
    """blocks in all"""
    blocks_new: int
    """blocks that the store did not have"""
    blocks_equal_base: int | None
    """blocks equal to the base's; None without a base"""
    base: ParentReport | None
    """the base that the snapshot records; None: none"""
    base_reason: str | None
    """why this base or none; None: it was named, or no search took place"""
    excluded: tuple[str, ...]
    """files and directories (ending with a slash) that are not part of the model"""
    excluded_files: int
    """number of excluded files"""
    excluded_bytes: int
    """size of the excluded files"""
    remarks: tuple[str, ...]
    """what was not done, as text"""
    warnings: tuple[str, ...]
    """what is probably a mistake, as text"""
    seconds: float
    """how long it took"""


class Base(msgspec.Struct, frozen=True):
    """The base to compare a checkpoint with, if any, and why this one.

    given: the user named it, and `model`, the one of its models to
    compare with. A base that was only found never causes a second snapshot of bytes
    that the branch holds already, nor becomes the base of its own copy. only, skip: patterns of the
    tensors to compare; the others may differ in name and shape, and are stored on their own.
    """

    snapshot: SnapshotId | None
    reason: str | None
    given: bool
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    model: str | None = None


NO_BASE = Base(None, None, given=True)


def _small(file: SourceFile) -> bytes | None:
    """Read a file of a usual config's size, None for a larger one."""
    if file.size > MAX_CONFIG:
        return None
    return file.read(0, file.size)


def _require_fine_tune(
    base: Manifest,
    tensors: Mapping[str, TensorId],
    checkpoint: Checkpoint,
    catalog: Catalog,
    name: str,
    asked: Base,
) -> None:
    """Raise Incompatible unless a checkpoint is a fine-tune or an adapter of its base.

    tensors: those of the base by what the checkpoint calls those that are compared with them.
    """
    files = checkpoint.files
    slots = {name: slot for name, (_, slot) in checkpoint.tensors().items()}
    shapes = {name: slot.shape for name, slot in slots.items()}
    of_base = {}
    compared = {split_name(tensor)[0] for tensor in tensors}
    shapes = {one: shape for one, shape in shapes.items() if split_name(one)[0] in compared}
    records = readable_tensors(catalog, set(tensors.values()))
    config = next((file for file in files if file.path == CONFIG), None)
    if not is_adapter(tensors) and is_any_adapter(shapes, tensors, config is not None):
        models = models_in(catalog, base)
        if has_keys(slots):
            every = readable_tensors(catalog, set(models.tensors.values()))
            named = {one: record for one, id in models.tensors.items() if (record := every[id])}
            check_adapter(None, slots, named, name)
            return
        own_model = models.meant(name) if asked.model is None else asked.model
        own_slots = {name_in_model(own): slot for own, slot in slots.items()}
        tied = Tied.of(catalog, base, own_model, own_slots)
        ours = {
            own: record
            for own, id in models.in_model(own_model).items()
            if (record := records[id]) is not None
        }
        check_adapter(None if config is None else _small(config), own_slots, tied.both(ours), name)
        return
    for tensor, id in tensors.items():
        record = records[id]
        of_base[tensor] = shapes.get(tensor, ()) if record is None else record.shape
    types = {one: record.dtype for one, id in tensors.items() if (record := records[id])}
    odd = optional_differences(types, {one: slots[one].dtype for one in shapes})
    needed = (
        {one: shape for one, shape in side.items() if one not in odd} for side in (of_base, shapes)
    )
    require_same_shapes(
        *(chosen(side, asked.only, asked.skip) for side in needed),
        what="not a fine-tune of this base",
        where=name,
        hint=phrase(
            "{add}; or {skip} leaves tensors out of the comparison",
            add=Call("add", (str(checkpoint.shown),), (("name", name), ("base", None))),
            skip=Option("skip", ("PATTERN",)),
        ),
    )


def add(
    catalog: Catalog,
    statistics: StatsStore,
    checkpoint: Checkpoint,
    *,
    name: str,
    base: Base = NO_BASE,
    kind: Kind = "full",
    policy: Policy,
    message: str,
    threads: int,
    candidate: str | None = None,
    progress: ProgressCallback | None = None,
) -> AddReport:
    """Store a scanned checkpoint under a ref, encoding new blocks by `policy`.

    candidate: a run whose candidate for the branch `name` will point at it, in its place.
    kind: what its tensors are; if they are differences to the base, their sums are stored.
    message: the reason. A snapshot of a Hub cache also tells the model and its commit.

    Files that are downloaded are published one by one as a candidate for the branch,
    `candidates/download/NAME`, which goes when all are there.

    Raises BadCheckpoint, BadName, Conflict (the name is a tag), Incompatible (the base has other
    tensors), StorageFailed. On any error the branch stays.
    """
    began = time.monotonic()
    origin = checkpoint.origin
    reason = message or ("" if origin is None else str(origin))
    base_manifest, of_base = None, None
    if base.snapshot is not None:
        base_manifest = catalog.manifest_of(base.snapshot)
        models = models_in(catalog, base_manifest)
        pairs = paired(models.named, checkpoint.named, (base.model, None))
        of_base = renamed(models.tensors, pairs)
    differences, told_size = None, None
    if kind == "delta":
        from mstore.models.differences import Differences

        assert base_manifest is not None, "differences have a base"
        differences = Differences(
            catalog, checkpoint, base_manifest, only=base.only, skip=base.skip, where=name
        )
        told_size = differences.require_differences()
    elif base_manifest is not None and base.given:
        _require_fine_tune(base_manifest, of_base or {}, checkpoint, catalog, name, base)
    tick = ProgressCounter("add", _to_read(checkpoint, differences), progress)
    adder = FileAdder(catalog, statistics, of_base, policy, only=base.only, skip=base.skip)
    models_by_file = checkpoint.models_by_file()
    digested = {path for one in checkpoint.models if one.is_single_file for path in one.files}
    ahead = 2 * threads + 1

    def put(sources: Iterable[SourceFile], transaction: Transaction) -> list[File]:
        adder.write_to(transaction)
        # Report progress before the first read, which may block for ever.
        tick(0)
        with ThreadPoolExecutor(threads, "add") as pool:
            return [
                adder.add_file(
                    file,
                    models_by_file.get(file.path),
                    pool,
                    ahead,
                    tick,
                    digested=file.path in digested,
                )
                for file in sources
            ]

    *earlier, last = _batches(checkpoint.files if differences is None else differences.own_files())
    files: list[File] = []
    for batch in earlier:
        with Transaction(catalog, f"add {name}") as transaction:
            files += put(batch, transaction)
            _publish_arrived(catalog, transaction, name, files, origin)
            statistics.flush()
    with Transaction(catalog, f"add {name}") as transaction:
        current = branch_to_move(catalog, name, candidate)
        files += put(last, transaction)
        texts: dict[str, bytes] = {}
        if differences is not None and base_manifest is not None:
            theirs = differences.base_files()
            with ThreadPoolExecutor(threads, "add") as pool:
                sums = [adder.add_sums(file, differences, pool, ahead, tick) for file in theirs]
            files += sums
            # Headers of the base say what the base is, and not what the sums are.
            changed = [one.path for one, own in zip(sums, theirs, strict=True) if one != own]
            texts = texts_of(catalog, base_manifest, dict.fromkeys(changed))
        _require_in_place(catalog, transaction.relied_blocks, checkpoint.root)
        manifest = assembled(files, texts, (), lambda _: (), transaction.put_bytes)
        manifest_id = manifest.id()
        publication = Publication(catalog, transaction)
        snapshot, is_new = publication.put(
            name,
            current,
            manifest,
            ADD,
            _parents(catalog, manifest, base),
            message=message,
            action=f"add: {reason}" if reason else "add",
            origin=origin,
            keeps=partial(_records_base, base),
            # Of sums, much is the base's own; and some files were stored by earlier transactions.
            relies=differences is not None or bool(earlier),
            candidate=candidate,
        )
        if checkpoint.origin is not None:
            publication.drop_candidate(below(CANDIDATE, DOWNLOAD, name), "add")
        # Before the commit: an error after it would report a failure of something that was done.
        recorded = _recorded_base(catalog, snapshot)
        warnings = _warnings(checkpoint, files)
        statistics.flush()
        told = digests.news(catalog, snapshot.id(), adder.digests, is_new=is_new)
        transaction.put_records(told)
        publication.commit(also=partial(digests.insert, catalog, told))
    remarks = (*checkpoint.remarks, *_remarks(adder, base, recorded, message, is_new=is_new))
    if differences is not None:
        remarks = (*remarks, *_difference_hints(catalog, differences, manifest, told_size))
    is_recorded = recorded is not None and recorded.snapshot == base.snapshot
    called = name if candidate is None else below(CANDIDATE, candidate, name)
    return AddReport(
        name=called,
        snapshot=snapshot.id(),
        manifest=manifest_id,
        new_snapshot=is_new,
        previous=None if current is None else current.snapshot_id(),
        files=len(files),
        tensors=sum(1 for file in files for _ in file.tensors()),
        plain_bytes=manifest.plain_bytes(),
        bytes_written=adder.bytes_written,
        blocks_total=adder.blocks_total,
        blocks_new=adder.blocks_new,
        blocks_equal_base=adder.blocks_equal_base if is_recorded else None,
        base=recorded,
        base_reason=_reason(base, recorded, is_new=is_new),
        excluded=tuple(one.path for one in checkpoint.excluded),
        excluded_files=sum(one.files for one in checkpoint.excluded),
        excluded_bytes=sum(one.size for one in checkpoint.excluded),
        remarks=remarks,
        warnings=warnings,
        seconds=time.monotonic() - began,
    )


def _batches(sources: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Return files in order, so that each batch but the last one ends with a file from elsewhere.

    Local files are one batch.
    """
    batches: list[list[SourceFile]] = [[]]
    left = sum(file.is_remote for file in sources)
    for file in sources:
        batches[-1].append(file)
        left -= file.is_remote
        if file.is_remote and left:
            batches.append([])
    return batches


def _publish_arrived(
    catalog: Catalog,
    transaction: Transaction,
    name: str,
    files: Sequence[File],
    origin: Origin | None,
) -> None:
    """Publish the files that are there so far as a candidate: who adds again finds them there."""
    manifest = assembled(files, {}, (), lambda _: (), transaction.put_bytes)
    publication = Publication(catalog, transaction)
    publication.put(
        name,
        branch_to_move(catalog, name, DOWNLOAD),
        manifest,
        ADD,
        (),
        message="",
        action="add: not all files yet",
        origin=origin,
        candidate=DOWNLOAD,
    )
    publication.commit()


def _to_read(checkpoint: Checkpoint, differences: Differences | None) -> int:
    """Return the bytes that an add works on."""
    if differences is None:
        return sum(file.size for file in checkpoint.files)
    own = sum(file.size for file in differences.own_files())
    return own + sum(
        part.nbytes
        for file in differences.base_files()
        for part in file.parts
        if differences.changes(file, part) is not None
    )


def _difference_hints(
    catalog: Catalog, differences: Differences, manifest: Manifest, told_size: str | None
) -> Iterator[str]:
    """Yield what became of a checkpoint of differences."""
    count, all_of = len(differences.slots), len(tensors_of(catalog, manifest))
    if count < all_of:
        yield f"{all_of - count} of {all_of} tensors are the base's: there is no difference of them"
    if told_size is not None:
        yield told_size


def _records_base(base: Base, tip: SnapshotRecord) -> bool:
    """Return whether a snapshot of the same content states this base already."""
    recorded = {parent.snapshot for parent in tip.parents if parent.role == BASE}
    return not base.given or base.snapshot is None or base.snapshot in recorded


def _parents(catalog: Catalog, manifest: Manifest, base: Base) -> tuple[Parent, ...]:
    """Return the base as the parent; nothing if it was only found and is the same content."""
    if base.snapshot is None:
        return ()
    is_copy = catalog.snapshot(base.snapshot).manifest == manifest.id()
    return () if is_copy and not base.given else (Parent(BASE, base.snapshot),)


def _require_in_place(catalog: Catalog, blocks: Collection[BlockId], path: Path) -> None:
    """Raise Corrupt if blocks that count as stored lie in packs that are gone; reads no bytes."""
    lost = catalog.out_of_place(blocks)
    if lost:
        raise Corrupt(
            f"{len(lost)} of its blocks were stored before, in packs that are missing now",
            where=str(path),
            hint=call("repair", sources=(str(path),)),
        )


def _remarks(
    adder: FileAdder, base: Base, recorded: ParentReport | None, message: str, *, is_new: bool
) -> tuple[str, ...]:
    remarks: list[str] = []
    if message and not is_new:
        remarks.append("the message was not kept: a snapshot is not made again for its words")
    if recorded is not None and not is_new and base.given and base.snapshot is None:
        remarks.append(
            "the snapshot is kept as it is, with its base; another name makes one without"
        )
    if adder.not_finite:
        remarks.append(
            f"infinite or NaN elements, or differences from the base, in {few(adder.not_finite)}"
        )
    if adder.lost or adder.lost_tensors:
        blocks, tensors = len(adder.lost), adder.lost_tensors
        remarks.append(
            phrase(
                "the base is damaged ({blocks} blocks and {tensors} tensor records cannot be "
                "read): no differences to them were taken; {fsck} tells more",
                blocks=blocks,
                tensors=tensors,
                fsck=call("fsck"),
            )
        )
    return tuple(remarks)


def _warnings(checkpoint: Checkpoint, stored: Sequence[File]) -> tuple[str, ...]:
    """Return a warning for each model that has a head of its own, and a config that ties it."""
    configs = {file.path: file for file in checkpoint.files}
    parts = {(file.path, part.name): part for file in stored for part in file.parts}
    found = []
    for model in checkpoint.models:
        config = configs.get(model.path(MODEL_CONFIG))
        if config is None or not ties(json_object(_small(config) or b"")):
            continue
        own = {
            str(name): part for (path, name), part in parts.items() if name and path in model.files
        }
        head = own_head(
            {name: part.nbytes for name, part in own.items()},
            {name: part.tensor for name, part in own.items()},
        )
        if head is not None:
            found.append(
                f"its {config.path} ties {head[0]} to {head[1]} ({KEY}), and they differ: what "
                f"follows the config loses {head[0]}. If it was trained, set {KEY} to false there "
                "and add it again"
            )
    return tuple(found)


def _recorded_base(catalog: Catalog, snapshot: SnapshotRecord) -> ParentReport | None:
    """Return the base that a snapshot records, with the refs that point at it."""
    for parent in snapshot.parents:
        if parent.role == BASE:
            id = parent.snapshot_id()
            names = (name for name, ref in catalog.refs().items() if ref.snapshot == id)
            return ParentReport(BASE, id, tuple(names))
    return None


def _reason(base: Base, recorded: ParentReport | None, *, is_new: bool) -> str | None:
    if not is_new:
        return None if recorded is None else "it was added with this base"
    if base.snapshot is not None and recorded is None:
        return "the store holds these very bytes already"
    return base.reason
