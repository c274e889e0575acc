"""Writes bundles: a push into a new file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from mstore.remotes.bundle import NewBundle
from mstore.remotes.push import Push
from mstore.remotes.state import Remote
from mstore.remotes.statistics import OutgoingStatistics
from mstore.store.catalog import Catalog
from mstore.store.leases import Lease
from mstore.terms.errors import BadRequest
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, Report

_NAME = "bundle"


class BundleReport(Report, frozen=True):
    """A bundle that was written."""

    path: str
    """the file"""
    refs: tuple[str, ...]
    """the branches and tags in it"""
    snapshots: int
    """snapshots in it"""
    without_contents: tuple[SnapshotId, ...]
    """those of which it has only records: ancestors, whose contents were left out"""
    blocks: int
    """blocks in it"""
    bytes: int
    """size of the file"""
    seconds: float
    """how long it took"""


def write_bundle(
    catalog: Catalog,
    path: Path,
    names: Sequence[str],
    *,
    statistics: OutgoingStatistics,
    progress: ProgressCallback | None,
) -> BundleReport:
    """Write what these refs need into a new file; see `Store.bundle`."""
    began = time.monotonic()
    if not names:
        raise BadRequest("no ref was named", hint=call("refs"))
    # For what a push keeps until it has ended.
    lease = Lease(catalog.layout, catalog.index, "bundle")
    try:
        target = NewBundle(path)
        try:
            done = Push(
                catalog,
                Remote(_NAME, target, lease.directory),
                names,
                tracks=False,
                outgoing=statistics,
                jobs=1,
                progress=progress,
            ).run(dry_run=False)
            target.finish()
        except BaseException:
            target.abandon()
            raise
    finally:
        lease.release()
    return BundleReport(
        path=str(path),
        refs=tuple(one.name for one in done.moved),
        snapshots=done.snapshots,
        without_contents=done.without_contents,
        blocks=done.blocks,
        bytes=target.file_size,
        seconds=time.monotonic() - began,
    )
