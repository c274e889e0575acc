"""Checkout: a byte-exact copy of a snapshot in a new directory.

The copy is made beside its final name and renamed into place, so a directory of that name is
always whole.  Blocks are checked against their ids on the way; those of a virtual snapshot are
computed, a few ahead of the thread that writes their file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mstore import fs
from mstore.checkpoint.paths import check_case_twins, check_relative
from mstore.errors import BadRequest
from mstore.ids import SnapshotId
from mstore.reports import CheckoutReport, Progress
from mstore.store.catalog import Catalog
from mstore.view import BlockCache, Computing, SnapshotView


def checkout(
    catalog: Catalog,
    snapshot: SnapshotId,
    directory: Path,
    *,
    threads: int,
    progress: Callable[[Progress], None] | None = None,
    computing: Callable[[], Computing] | None = None,
) -> CheckoutReport:
    """Write every file of a snapshot below `directory`, which must be missing or empty.

    `computing` gives what computes the blocks of a virtual snapshot.

    Raises Conflict, Corrupt, StorageFailed; then nothing is left behind.
    """
    began = time.monotonic()
    view = SnapshotView(catalog, snapshot, BlockCache(catalog, computing=computing))
    # A manifest may come from a stranger: its paths are checked again before they touch a disk.
    for path in view.files:
        check_relative(path, f"snapshot {snapshot.short}")
    check_case_twins(list(view.files))
    directory = directory.absolute()
    fs.require_empty(directory)
    if not directory.parent.is_dir():
        raise BadRequest(
            "the directory above it does not exist",
            where=str(directory),
            hint=f"mkdir -p {directory.parent}",
        )
    staging = directory.parent / f".{directory.name}.{secrets.token_hex(4)}"
    total = sum(view.files.values())
    try:
        fs.make_directory(staging)
        done = 0
        with ThreadPoolExecutor(threads, "checkout") as pool:
            try:
                for path, size in zip(
                    view.files,
                    pool.map(lambda p: _write(view, p, staging), view.files),
                    strict=True,
                ):
                    del path
                    done += size
                    if progress is not None:
                        progress(Progress("checkout", done, total))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for folder in sorted({p for p in staging.rglob("*") if p.is_dir()}, reverse=True):
            fs.sync_directory(folder)
        fs.sync_directory(staging)
        fs.rename(staging, directory)
        fs.sync_directory(directory.parent)
    except BaseException:
        fs.remove_tree(staging)
        raise
    return CheckoutReport(
        snapshot, str(directory), len(view.files), total, time.monotonic() - began
    )


def _write(view: SnapshotView, path: str, root: Path) -> int:
    target = root / path
    fs.make_directories(target.parent)
    file = fs.NewFile(target, mode=0o644)
    try:
        for piece in view.stream(path):
            file.append(piece)
        file.sync()
        return file.size
    finally:
        file.close()
