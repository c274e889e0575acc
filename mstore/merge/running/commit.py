"""Merging as a commit: run a plan and publish its result, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress

import msgspec

from mstore.blocks.codecs import Policy
from mstore.blocks.schema import Sources
from mstore.errors import Incompatible, StorageFailed
from mstore.ids import ManifestId, SnapshotId
from mstore.merge.planning.warnings import told_counts
from mstore.merge.running.engine import Engine, Outcome, Resources
from mstore.merge.running.memory import MEMORY
from mstore.merge.running.papers import Form
from mstore.merge.running.ready import Ready
from mstore.merge.running.slices import SLICE_BYTES
from mstore.objects.plan import READ, SHARED, Plan
from mstore.objects.snapshot import BASE, EXPERT, PREVIOUS, Parent, SnapshotRecord
from mstore.phrases import Option, phrase
from mstore.progress import ProgressCallback
from mstore.store import contents, refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.memo import Memo
from mstore.store.not_finite import NotFiniteTensor, counted
from mstore.store.transaction import Target, Transaction, target_of, tip_of
from mstore.version import TOOL


class Merged(msgspec.Struct, frozen=True):
    """A published merge. `is_new` is False if the ref already was exactly that.

    was: where the branch pointed.
    not_finite: tensors with elements that are infinite or NaN, and are finite in the base.
    """

    snapshot: SnapshotId
    manifest: ManifestId
    is_new: bool
    outcome: Outcome
    bytes_written: int
    not_finite: tuple[NotFiniteTensor, ...]
    was: SnapshotId | None


def run_merge(
    catalog: Catalog,
    plan: Plan,
    sources: Sources,
    *,
    name: str,
    message: str,
    threads: int,
    candidate: str | None = None,
    allow_nonfinite: bool = False,
    progress: ProgressCallback | None = None,
    memo: Memo | None = None,
    memory: int | None = None,
    executor: Executor | None = None,
    slice_bytes: int = SLICE_BYTES,
    policy: Policy | None = None,
    materialized: refs.Ref | None = None,
    papers: Form = Form.CURRENT,
    ready: Ready | None = None,
) -> Merged:
    """Run a stored plan and publish the result under a ref.

    candidate: a run whose candidate for the branch `name` will point at the result, in its place.
    allow_nonfinite: also publish a result with elements that are infinite or NaN, and are finite in
    every input.
    memo: the memo table to use and extend, None for none. memory, executor, slice_bytes: as in
    engine.Resources. policy: how to encode the output, None for the store's own. materialized: the
    current value of a ref that holds the virtual merge of this plan, to be made real; if it has
    moved, nothing is published. papers, ready: as in engine.Engine.

    Raises Conflict (the name is a tag, or moved meanwhile), BadName, BadRequest (too little
    memory), NotFound (an input was pruned), Incompatible (elements that are not finite),
    BudgetExceeded, Corrupt, StorageFailed; then nothing is published.
    """
    resources = Resources(threads, MEMORY if memory is None else memory, executor, slice_bytes)
    inputs = (sources.base, *sources.experts)
    with (
        contents.held(catalog, (source.snapshot_id() for source in inputs)),
        Transaction(catalog, f"merge {name}", resumes=True) as transaction,
    ):
        if materialized is None:
            target = target_of(catalog, name, candidate)
        else:
            target = Target(name, refs.BRANCH, materialized, materialized)
        for source in inputs:
            contents.require(catalog, source.snapshot_id(), source.name)
        outcome = Engine(
            catalog,
            plan,
            transaction,
            resources=resources,
            policy=policy,
            memo=memo,
            papers=papers,
            progress=progress,
            ready=ready,
        ).run()
        if outcome.made and not allow_nonfinite:
            raise _not_finite(counted(outcome.made, outcome.tensors), plan, sources)
        found = counted(dict(outcome.coverage.not_finite), outcome.tensors)
        transaction.rely_on_manifest(outcome.manifest)
        transaction.put_record(outcome.manifest)
        record, is_new = _snapshot(catalog, target, outcome, plan, sources, message, transaction)
        word = "merge" if materialized is None else "materialize"
        action = f"{word}: {plan.method}" + (f": {message}" if message else "")
        moves = target.moves(record.id(), action)
        if moves or transaction.has_news:
            # If it is not new, a repair may have dropped some of it, which is stored again.
            transaction.commit(snapshots=[record] if is_new else (), moves=moves)
    if memo is not None:
        # Only now are the blocks published. Outputs that cannot be remembered are computed again.
        with suppress(StorageFailed):
            memo.put_outputs(outcome.memo_rows)
            memo.flush()
    written = transaction.bytes_written
    return Merged(record.id(), record.manifest_id(), is_new, outcome, written, found, target.was)


def _not_finite(found: Sequence[NotFiniteTensor], plan: Plan, sources: Sources) -> Incompatible:
    """Return the error of a merge that makes such elements: which tensors, and of which experts."""
    names = {one.tensor for one in found}
    takes = {
        k
        for tensor in plan.tensors
        if tensor.name in names
        for k, states in enumerate(tensor.states)
        if READ in states or SHARED in states
    }
    experts = [sources.experts[k].name for k in sorted(takes)]
    return Incompatible(
        told_counts(found, "all models"),
        where=", ".join(experts) or sources.base.name,
        hint=phrase(
            "smaller weights or a wider dtype avoid them; {allow} publishes it as it is",
            allow=Option("allow_nonfinite", True),
        ),
    )


def parents_of(sources: Sources) -> tuple[Parent, ...]:
    """Return the parents of a merge: its base and experts."""
    experts = (Parent(EXPERT, expert.snapshot) for expert in sources.experts)
    return (Parent(BASE, sources.base.snapshot), *experts)


def made_from(record: SnapshotRecord) -> tuple[Parent, ...]:
    """Return the parents of a merge that are its inputs: all but the branch's previous snapshot."""
    return tuple(parent for parent in record.parents if parent.role != PREVIOUS)


@contextmanager
def inputs_held(catalog: Catalog, snapshot: SnapshotId, record: SnapshotRecord) -> Iterator[None]:
    """Protect a merge and its inputs from garbage collection while its plan is run again.

    Raises NotFound if the contents of an input were pruned.
    """
    inputs = made_from(record)
    with contents.held(catalog, (snapshot, *(one.snapshot_id() for one in inputs))):
        for one in inputs:
            contents.require(catalog, one.snapshot_id(), f"{one.role} {one.snapshot_id().short}")
        yield


def is_merge_of(tip: SnapshotRecord, plan: Plan, parents: tuple[Parent, ...]) -> bool:
    """Return whether a snapshot is the merge, real or virtual, of these parents by this plan."""
    return tip.plan == plan.id() and made_from(tip) == parents


def made_before(
    catalog: Catalog, target: Target, plan: Plan, parents: tuple[Parent, ...]
) -> SnapshotRecord | None:
    """Return the merge by this plan that a branch, or the candidate for it, is already.

    parents: of the snapshot that would be made.
    """
    inputs = tuple(parent for parent in parents if parent.role != PREVIOUS)
    tip, _ = tip_of(catalog, target.branch)
    if tip is not None and is_merge_of(tip, plan, inputs):
        return tip
    # A candidate that follows another state of the branch is not the one that was asked for.
    tip, _ = tip_of(catalog, target.now)
    is_it = tip is not None and tip.plan == plan.id() and tip.parents == parents
    return tip if is_it else None


def _snapshot(
    catalog: Catalog,
    target: Target,
    outcome: Outcome,
    plan: Plan,
    sources: Sources,
    message: str,
    transaction: Transaction,
) -> tuple[SnapshotRecord, bool]:
    parents = parents_of(sources)
    _, previous = tip_of(catalog, target.branch)
    tip = made_before(catalog, target, plan, (*previous, *parents))
    if tip is not None and tip.manifest == outcome.manifest.id() and not tip.is_virtual:
        return tip, False
    record = SnapshotRecord(
        manifest=outcome.manifest.id(),
        parents=(*previous, *parents),
        origin="merge",
        plan=transaction.put_record(plan),
        coverage=transaction.put_record(outcome.coverage),
        message=message,
        time_ns=now_ns(),
        tool=TOOL,
    )
    return record, True
