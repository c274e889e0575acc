"""Replay: run a recorded plan again and report whether the same bytes come out."""

from __future__ import annotations

import time

from mstore.merge.running.commit import inputs_held
from mstore.merge.running.engine import Outcome, Resources, run_plan
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.plans import plan_of
from mstore.terms.ids import ManifestId, PlanId, SnapshotId
from mstore.terms.report import ProgressCallback, Report


class ReplayReport(Report, frozen=True):
    """A recorded plan run again."""

    snapshot: SnapshotId
    """the snapshot's id"""
    plan: PlanId
    """the plan's id"""
    manifest: ManifestId
    """the recorded content"""
    replayed: ManifestId
    """the content of this run"""
    same: bool
    """whether the two are equal"""
    first_difference: str | None
    """where they first differ; None if they do not"""
    seconds: float
    """how long it took"""


def replay(
    catalog: Catalog,
    snapshot: SnapshotId,
    *,
    threads: int,
    progress: ProgressCallback | None = None,
) -> ReplayReport:
    """Compute everything again, without the memo table, and compare ManifestIds.

    Raises BadRequest for a snapshot that no plan made, or that is virtual, NotFound if an input was
    pruned.
    """
    record = catalog.snapshot(snapshot)
    plan_id = plan_of(snapshot, record, so="there is no plan to replay")
    catalog.require_real(snapshot, snapshot.short)
    began = time.monotonic()
    plan = catalog.record(Plan, plan_id)
    with inputs_held(catalog, snapshot, record):
        outcome = run_plan(
            catalog,
            plan,
            None,
            resources=Resources(threads),
            progress=progress,
        )
    manifest = outcome.manifest
    same = manifest.id() == record.manifest_id()
    return ReplayReport(
        snapshot=snapshot,
        plan=plan_id,
        manifest=record.manifest_id(),
        replayed=manifest.id(),
        same=same,
        first_difference=None
        if same
        else _first_difference(catalog, catalog.manifest(record.manifest_id()), outcome),
        seconds=time.monotonic() - began,
    )


def _first_difference(catalog: Catalog, recorded: Manifest, outcome: Outcome) -> str:
    """Return the first file that differs, with tensor and block as far as known."""
    fresh = {tensor.id(): tensor for tensor in outcome.tensors.values()}
    for ours, theirs in zip(recorded.files, outcome.manifest.files, strict=False):
        for part, other in zip(ours.parts, theirs.parts, strict=False):
            if part == other:
                continue
            if part.name is None or part.name != other.name:
                return ours.path
            where = f"{ours.path}: {part.name}"
            mine = catalog.tensor(part.tensor_id())
            replayed = fresh.get(other.tensor_id()) or catalog.tensor(other.tensor_id())
            for number, (a, b) in enumerate(
                zip(mine.block_ids(), replayed.block_ids(), strict=False)
            ):
                if a != b:
                    return f"{where}, block {number}"
            return where
        if ours != theirs:
            return ours.path
    return "the lists of files"
