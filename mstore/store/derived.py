"""Derived snapshots: contents that were made of other snapshots without a plan."""

from __future__ import annotations

from mstore.errors import BadName
from mstore.ids import SnapshotId
from mstore.objects.manifest import Manifest
from mstore.objects.snapshot import ADD, Parent, SnapshotRecord
from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.transaction import RefMove, Transaction, tip_of
from mstore.version import TOOL


def derived(
    catalog: Catalog,
    transaction: Transaction,
    branch: str,
    current: refs.Ref | None,
    manifest: Manifest,
    parents: tuple[Parent, ...],
    *,
    message: str,
    action: str,
) -> tuple[SnapshotId, SnapshotRecord | None, RefMove | None]:
    """Return the snapshot of a content on a branch, and what publishes it, if it is not there yet.

    current: what the branch is now.  parents: what it was made of, its base first.  action: for the
    reflog.
    """
    tip, previous = tip_of(catalog, current)
    is_there = tip is not None and tip.manifest == manifest.id() and parents[0] in tip.parents
    if current is not None and is_there:
        return current.snapshot_id(), None, None
    transaction.rely_on_manifest(manifest)
    record = SnapshotRecord(
        manifest=transaction.put_record(manifest),
        parents=(*previous, *parents),
        origin=ADD,
        plan=None,
        coverage=None,
        message=message,
        time_ns=now_ns(),
        tool=TOOL,
    )
    new = refs.Ref(refs.BRANCH, record.id())
    return record.id(), record, RefMove(branch, current, new, action)


def branch_below(prefix: str, name: str) -> str:
    """Return the branch below `prefix` for what is made of a model, which the user calls `name`."""
    own = "".join(c if c.isascii() and (c.isalnum() or c in "._-/") else "-" for c in name)
    ref = f"{prefix}/{own.strip('-./')}"
    try:
        refs.check_name(ref)
    except BadName:
        return f"{prefix}/model"
    return ref
