"""Merging as a commit: run a plan and publish its result, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mstore.ids import ManifestId, PlanId, SnapshotId
from mstore.merge.engine import Engine, Outcome
from mstore.objects.plan import Plan
from mstore.objects.snapshot import BASE, EXPERT, PREVIOUS, Parent, SnapshotRecord
from mstore.reports import Progress
from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.plans import Sources, put_sources
from mstore.store.transaction import RefMove, Transaction, branch_to_move
from mstore.version import TOOL


@dataclass(frozen=True, slots=True)
class Merged:
    """A published merge.  `is_new` is False where the ref already was exactly that."""

    snapshot: SnapshotId
    manifest: ManifestId
    is_new: bool
    outcome: Outcome
    bytes_written: int


def store_plan(catalog: Catalog, plan: Plan, sources: Sources) -> PlanId:
    """Keep a plan and the names of its inputs."""
    with Transaction(catalog, "plan") as transaction:
        id = PlanId(transaction.put_record(plan))
        transaction.commit(also=lambda rows: put_sources(catalog, rows, id, sources))
    return id


def run_merge(
    catalog: Catalog,
    plan: Plan,
    sources: Sources,
    *,
    name: str,
    message: str,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> Merged:
    """Run a stored plan and publish the result under a ref.

    Raises Conflict (the name is a tag, or moved meanwhile), BadName, BudgetExceeded, Corrupt,
    StorageFailed; then nothing is published.
    """
    current = branch_to_move(catalog, name)
    with Transaction(catalog, f"merge {name}") as transaction:
        outcome = Engine(catalog, plan, transaction, threads=threads, progress=progress).run()
        transaction.rely_on_manifest(outcome.manifest)
        transaction.put_record(outcome.manifest)
        record, is_new = _snapshot(catalog, current, outcome, plan, sources, message, transaction)
        if is_new:
            action = f"merge: {plan.method}" + (f": {message}" if message else "")
            new = refs.Ref(refs.BRANCH, record.id())
            transaction.commit(snapshots=[record], moves=[RefMove(name, current, new, action)])
    return Merged(record.id(), record.manifest_id(), is_new, outcome, transaction.bytes_written)


def _snapshot(
    catalog: Catalog,
    current: refs.Ref | None,
    outcome: Outcome,
    plan: Plan,
    sources: Sources,
    message: str,
    transaction: Transaction,
) -> tuple[SnapshotRecord, bool]:
    made_from = [Parent(BASE, sources.base.snapshot)]
    made_from += [Parent(EXPERT, expert.snapshot) for expert in sources.experts]
    parents = []
    if current is not None:
        tip = catalog.snapshot(current.snapshot_id())
        same = tip.manifest == outcome.manifest.id() and tip.plan == plan.id()
        if same and [p for p in tip.parents if p.role != PREVIOUS] == made_from:
            return tip, False
        parents.append(Parent(PREVIOUS, current.snapshot))
    record = SnapshotRecord(
        manifest=outcome.manifest.id(),
        parents=(*parents, *made_from),
        origin="merge",
        plan=transaction.put_record(plan),
        coverage=transaction.put_record(outcome.coverage),
        message=message,
        time_ns=now_ns(),
        tool=TOOL,
    )
    return record, True
