"""Deferred merges: a merge committed as its plan, and made real later.

Owns both ends of a virtual merge's life. `commit_virtual` publishes a snapshot whose merged tensors
are virtual; it reads only records and model cards (and headers, for another dtype). `materialize`
runs the plan and moves the branch to the real merge. `mstore.merge.virtual.blocks` owns what
happens in between. Each publishes in one transaction, or publishes nothing.
"""

from __future__ import annotations

import time

from mstore.blocks.schema import NamedSnapshot, PlanInputs
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.commit import Merged, Published, is_merge_of, parents_of, run_merge
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.output import OutputFiles
from mstore.merge.running.runners import WorkerReport, Workers
from mstore.merge.running.task import Tasks
from mstore.models.made import Publication, Slot, blocks_of, made_of
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.not_finite import NotFiniteTensor
from mstore.store.objects.manifest import File, Manifest, Part
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import MERGE, SnapshotRecord
from mstore.store.objects.tensor import VirtualTensor, block_count
from mstore.store.plans import sources_of
from mstore.store.transaction import Transaction, branch_to_move, tip_of
from mstore.terms.errors import BadRequest, Conflict
from mstore.terms.ids import ManifestId, PlanId, SnapshotId
from mstore.terms.phrases import Phrase, call, phrase
from mstore.terms.report import ProgressCallback, Report


class MaterializeReport(Report, frozen=True):
    """What computing a virtual merge in full read and wrote."""

    name: str
    """the ref"""
    plan: PlanId | None
    """the plan that was run; None if there was none"""
    snapshot: SnapshotId
    """the snapshot's id"""
    manifest: ManifestId
    """id of the content: same bytes, same id"""
    new_snapshot: bool
    """false if the branch already held stored bytes: nothing was done"""
    pushed_to: str | None
    """the remote whose branch now is the result, and which has its packs; None: they are here"""
    expert_bytes_read: int
    """bytes read from experts, counted at pread"""
    base_bytes_read: int
    """bytes read from the base"""
    bytes_written: int
    """bytes added to the store"""
    blocks_total: int
    """blocks in all"""
    blocks_reused: int
    """output blocks that the store already had"""
    not_finite: tuple[NotFiniteTensor, ...]
    """tensors with elements that are infinite or NaN, and are finite in the base, worst first"""
    workers: tuple[WorkerReport, ...]
    """what each worker of a cluster did"""
    seconds: float
    """how long it took"""


def commit_virtual(
    catalog: Catalog,
    plan: Plan,
    sources: PlanInputs,
    *,
    name: str,
    message: str,
    candidate: str | None = None,
) -> Published:
    """Publish a plan as a snapshot whose blocks are computed when they are read.

    candidate: as in `run_merge`.

    Raises Conflict (the name is a tag, or moved meanwhile), BadName, BadRequest (a plan that does
    not fit), StorageFailed; then nothing is published.
    """
    check_fits(catalog, plan)
    with Transaction(catalog, f"merge {name}") as transaction:
        current = branch_to_move(catalog, name, candidate)
        output = _Output(catalog, plan, transaction)
        manifest = output.manifest()
        parents = parents_of(plan, sources)
        record, _ = tip_of(catalog, current)
        is_new = False
        # The branch may be the requested merge already, and real.
        is_there = record is not None and is_merge_of(record, plan, parents)
        if candidate is not None or record is None or record.is_virtual or not is_there:
            publication = Publication(catalog, transaction)
            record, is_new = publication.put(
                name,
                current,
                manifest,
                MERGE,
                parents,
                message=message,
                action=f"merge: {plan.method}, virtual" + (f": {message}" if message else ""),
                plan=plan,
                candidate=candidate,
            )
            publication.commit()
    return Published(
        snapshot=record.id(),
        manifest=record.manifest_id(),
        is_new=is_new,
        is_virtual=record.is_virtual,
        bytes_written=transaction.bytes_written if is_new else 0,
        blocks_total=output.blocks_total,
        blocks_reused=output.blocks_reused,
        was=None if current is None else current.snapshot_id(),
    )


class _Output:
    """Builds the manifest of a virtual merge and puts its parts into a transaction."""

    def __init__(self, catalog: Catalog, plan: Plan, transaction: Transaction) -> None:
        self._catalog = catalog
        self._plan = plan
        self._id = plan.id()
        self._transaction = transaction
        self._layout = OutputFiles(catalog, Tasks(catalog, plan))
        self.blocks_total = 0
        self.blocks_reused = 0

    def manifest(self) -> Manifest:
        """Return the manifest: the base's tensors and files, virtual tensors for merged ones."""
        made = self._layout.manifest(
            0,
            record_of=self._record,
            put_records=self._transaction.put_records,
            put_bytes=self._transaction.put_bytes,
        )
        size = self._catalog.block_size
        own = {part for file in self._layout.base.files for part in file.parts}
        parts = [part for file in made.files for part in file.parts]
        self.blocks_total = blocks_of(made, size)
        self.blocks_reused = sum(block_count(one.nbytes, size) for one in parts if one in own)
        return made

    def _record(self, name: str, file: File, part: Part | Slot) -> VirtualTensor:
        if isinstance(part, Part):
            shape = self._catalog.tensor(part.tensor_id()).shape
            part = Slot(name, self._layout.out_dtype(file, part), shape)
        return VirtualTensor(part.dtype, part.shape, part.nbytes, self._id, name)


def materialize(
    catalog: Catalog,
    memo: Memo,
    name: str,
    *,
    message: str,
    allow_nonfinite: bool,
    threads: int,
    memory: int | None = None,
    workers: Workers | None = None,
    delivery: Delivery | None = None,
    progress: ProgressCallback | None = None,
) -> MaterializeReport:
    """Run the plan of the virtual merge at a branch, and move the branch to the real one.

    memory, workers, delivery: as for `run_merge`.  The virtual snapshot becomes the previous
    parent, and its message is reused unless another is given.

    Raises BadRequest (no branch), Conflict (a tag, or moved meanwhile), and what a merge raises;
    then the branch stays where it is.
    """
    began = time.monotonic()
    with catalog.publishing():
        current = _branch(catalog, name)
    record = catalog.snapshot(current.snapshot_id())
    plan_id = record.plan_id()
    if not record.is_virtual or plan_id is None:
        here = current.snapshot_id(), record.manifest_id()
        return _materialized(name, *here, plan_id, None, began)
    plan = catalog.record(Plan, plan_id)
    merged = run_merge(
        catalog,
        plan,
        _sources(catalog, record, plan_id, plan),
        name=name,
        message=message or record.message,
        allow_nonfinite=allow_nonfinite,
        threads=threads,
        progress=progress,
        memo=memo,
        memory=memory,
        workers=workers,
        delivery=delivery,
        materialized=current,
    )
    return _materialized(name, merged.snapshot, merged.manifest, plan_id, merged, began)


def _materialized(
    name: str,
    snapshot: SnapshotId,
    manifest: ManifestId,
    plan: PlanId | None,
    merged: Merged | None,
    began: float,
) -> MaterializeReport:
    """Report a branch that holds stored bytes; merged: None if it did so before."""
    outcome = None if merged is None else merged.outcome
    return MaterializeReport(
        name=name,
        plan=plan,
        snapshot=snapshot,
        manifest=manifest,
        new_snapshot=merged is not None,
        pushed_to=None,
        expert_bytes_read=0 if outcome is None else outcome.expert_bytes_read,
        base_bytes_read=0 if outcome is None else outcome.base_bytes_read,
        bytes_written=0 if merged is None else merged.bytes_written,
        blocks_total=0 if outcome is None else outcome.blocks_total,
        blocks_reused=0 if outcome is None else outcome.blocks_reused,
        not_finite=() if merged is None else merged.not_finite,
        workers=() if outcome is None else outcome.workers,
        seconds=time.monotonic() - began,
    )


def _sources(catalog: Catalog, record: SnapshotRecord, id: PlanId, plan: Plan) -> PlanInputs:
    """Return the inputs under their planned names, as the snapshots that the merge records."""
    named = sources_of(catalog, id, plan)
    inputs = made_of(record)
    if [one.role for one in inputs] != [one.role for one in parents_of(plan, named)]:
        return named
    base, *experts = inputs
    return PlanInputs(
        NamedSnapshot(base.snapshot, named.base.name),
        tuple(
            NamedSnapshot(parent.snapshot, source.name)
            for parent, source in zip(experts, named.experts, strict=True)
        ),
        named.change,
        named.risks,
    )


def _branch(catalog: Catalog, name: str) -> refs.Ref:
    current = catalog.ref(name)
    if current is None:
        # Resolve first, for NotFound: a snapshot named other than by a branch has no branch to
        # move.
        catalog.resolve(name)
        raise BadRequest(
            "is not a branch: the result needs a branch to be found by",
            where=name,
            hint=_on_a_branch(name),
        )
    if current.kind != refs.BRANCH:
        raise Conflict(
            f"is a {current.kind}, and only branches move",
            where=name,
            hint=_on_a_branch(name),
        )
    return current


def _on_a_branch(name: str) -> Phrase:
    return phrase(
        "{reset}, then {materialize}",
        reset=call("reset", "NAME", name),
        materialize=call("materialize", "NAME"),
    )
