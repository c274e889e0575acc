"""Copies what refs need from one store to another on this machine: a fetch, there, from here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from mstore.remotes.fetch import Fetch
from mstore.remotes.push import refs_to_send
from mstore.remotes.state import Remote
from mstore.remotes.store_remote import StoreRemote
from mstore.remotes.tracking import MovedRef
from mstore.store.catalog import Catalog
from mstore.store.leaning import leaning_of, require_here
from mstore.store.leases import Lease
from mstore.terms.errors import BadRequest, Corrupt
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, Report


class CopyReport(Report, frozen=True):
    """What was copied to another store."""

    destination: str
    """the other store"""
    moved: tuple[MovedRef, ...]
    """branches and tags that moved there"""
    diverged: tuple[str, ...]
    """branches that stayed, because they have other commits there; and tags that are others"""
    snapshots: int
    """snapshots that are new there"""
    without_contents: tuple[SnapshotId, ...]
    """those of which only records were copied: ancestors, whose contents were left out"""
    blocks: int
    """blocks that are new there"""
    bytes_copied: int
    """bytes of packs and parts of packs that were copied"""
    seconds: float
    """how long it took"""


def copy_refs(
    catalog: Catalog,
    destination: Path,
    names: Sequence[str],
    *,
    signers: Mapping[bytes, str] | None,
    jobs: int,
    progress: ProgressCallback | None,
) -> CopyReport:
    """Copy what these refs need to another store; see `Store.copy_to`."""
    began = time.monotonic()
    if not names:
        raise BadRequest("no ref was named", hint=call("refs"))
    source = catalog.layout.root
    sent = refs_to_send(catalog, names)
    chosen = list(sent)
    for name, ref in sent.items():
        manifest = catalog.manifest_of(ref.snapshot_id())
        require_here(leaning_of(catalog, manifest), "copy what is not here", name)
    with closing(Catalog.open(destination)) as other:
        if os.path.samefile(other.layout.root, source):
            raise BadRequest("this is the same store", where=str(destination))
        # For what comes in parts, on the disk of the other store.
        lease = Lease(other.layout, other.index, f"copy from {source}")
        try:
            with closing(StoreRemote(catalog, f"copy to {destination}")) as objects:
                remote = Remote("source", objects, lease.directory)
                done = Fetch(
                    other,
                    remote,
                    chosen,
                    pulls=True,
                    tracks=False,
                    signers=signers,
                    jobs=jobs,
                    progress=progress,
                ).run()
        except Corrupt as error:
            error.advise(call("fsck", read_data=True))
            raise
        finally:
            lease.release()
    return CopyReport(
        destination=str(destination),
        moved=done.moved,
        diverged=done.diverged,
        snapshots=done.snapshots,
        without_contents=done.without_contents,
        blocks=done.blocks,
        bytes_copied=done.bytes_received,
        seconds=time.monotonic() - began,
    )
