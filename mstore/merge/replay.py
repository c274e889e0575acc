"""Replay: run a recorded plan again and say whether the same bytes come out."""

from __future__ import annotations

import time
from collections.abc import Callable

from mstore.errors import BadRequest
from mstore.ids import SnapshotId
from mstore.merge.engine import Discard, Engine
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.reports import Progress, ReplayReport
from mstore.store.catalog import Catalog


def replay(
    catalog: Catalog,
    snapshot: SnapshotId,
    *,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> ReplayReport:
    """Compare ManifestIds.  Raises BadRequest for a snapshot that no plan made."""
    record = catalog.snapshot(snapshot)
    plan_id = record.plan_id()
    if plan_id is None:
        raise BadRequest(
            "was not made by a merge, so there is no plan to replay",
            where=snapshot.short,
            hint=f"mstore log {snapshot.short}",
        )
    began = time.monotonic()
    plan = catalog.record(Plan, plan_id)
    manifest = Engine(catalog, plan, Discard(), threads=threads, progress=progress).run().manifest
    same = manifest.id() == record.manifest_id()
    return ReplayReport(
        snapshot=snapshot,
        plan=plan_id,
        manifest=record.manifest_id(),
        replayed=manifest.id(),
        same=same,
        first_difference=None
        if same
        else _first_difference(catalog.manifest(record.manifest_id()), manifest),
        seconds=time.monotonic() - began,
    )


def _first_difference(recorded: Manifest, replayed: Manifest) -> str:
    for ours, theirs in zip(recorded.files, replayed.files, strict=False):
        for part, other in zip(ours.parts, theirs.parts, strict=False):
            if part != other:
                return f"{ours.path}: {part.name}" if part.name is not None else ours.path
        if ours != theirs:
            return ours.path
    return "the lists of files"
