"""Checkout: a byte-exact copy of a snapshot in a new directory.

The copy is written beside its final name and then renamed, so a directory of that name is always
complete. Paths come from a manifest, which may come from a stranger. So they are checked, and then
opened directory by directory without following links (`fs.NewTree`).

Files are cut into pieces of a few blocks. The threads of a pool each read, decode, check and write
one piece at a time, of one large file as well as of many small ones. Only a few pieces wait at any
time, so memory is bounded by the number of threads. A file of a virtual snapshot is one piece: its
blocks are computed a few ahead of the thread that writes them.

What lies raw in packs may be shared with them instead of written (`reflinks`). Its blocks are then
read back from the new file, and checked there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock

from mstore import fs
from mstore.blocks.reader import FSCK, ThreadBuffer
from mstore.checkpoint.paths import check_case_twins, check_relative
from mstore.snapshots.reflinks import Reflink, Reflinks
from mstore.store import contents
from mstore.store.ahead import in_order
from mstore.store.block_cache import BlockCache, Computing, Extent
from mstore.store.catalog import Catalog
from mstore.store.models import Input
from mstore.store.objects.shapes import matching, unmatched
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest, Corrupt, NotFound
from mstore.terms.ids import BlockId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import Progress, ProgressCallback, Report

PIECE_BYTES = 2 << 20
"""Large enough to be worth handing to a thread, small enough to give every thread one."""


class CheckoutReport(Report, frozen=True):
    """What `checkout` wrote."""

    snapshot: SnapshotId
    """the snapshot's id"""
    directory: str
    """where the files were written"""
    files: int
    """number of files"""
    bytes_written: int
    """size of the files"""
    bytes_shared: int
    """the part of them that shares its space on the disk with the store"""
    seconds: float
    """how long it took"""


def checkout(
    catalog: Catalog,
    asked: Input,
    directory: Path,
    *,
    threads: int,
    shared: bool = False,
    only: Sequence[str] = (),
    reflink: Reflink = Reflink.AUTO,
    progress: ProgressCallback | None = None,
    computing: Callable[[], Computing] | None = None,
) -> CheckoutReport:
    """Write every file of a snapshot or model below `directory`, which must be missing or empty.

    Holds the snapshot meanwhile. `computing` returns what computes blocks of a virtual snapshot.
    shared: allow a parent directory in which others can rename. only: write the files whose paths
    match one of these patterns (`*` also matches `/`); empty means all files. reflink: whether to
    share extents with packs. Raises NotFound for a pattern that matches no file, BadRequest,
    BadCheckpoint, Conflict, Corrupt, Incompatible (sharing is required, and the filesystem cannot),
    StorageFailed; an error leaves nothing behind.
    """
    began = time.monotonic()
    cache = BlockCache(catalog, computing=computing)
    view = SnapshotView(catalog, asked.snapshot, cache, model=asked.model)
    _check_paths(view)
    directory = directory.absolute()
    fs.require_empty(directory)
    if not directory.parent.is_dir():
        raise BadRequest(
            "the directory above it does not exist",
            where=str(directory),
            hint=f"mkdir -p {directory.parent}",
        )
    files = _chosen(view, only)
    total = sum(files.values())
    reflinks = Reflinks(catalog, reflink, directory)
    reflinks.require_any(view, list(files), view.id.short)
    tree = fs.NewTree(directory, shared=shared)
    try:
        with contents.held(catalog, [view.id]):
            _Checkout(catalog, view, files, tree, reflinks).run(threads, total, progress)
        tree.publish()
    except BaseException:
        tree.abandon()
        raise
    return CheckoutReport(
        snapshot=view.id,
        directory=str(directory),
        files=len(files),
        bytes_written=total,
        bytes_shared=reflinks.shared_bytes,
        seconds=time.monotonic() - began,
    )


def _chosen(view: SnapshotView, only: Sequence[str]) -> dict[str, int]:
    """Return the sizes of matching files by path, in the snapshot's order."""
    _require_texts(only)
    if not only:
        return dict(view.files)
    if (pattern := unmatched(view.files, only)) is not None:
        raise NotFound(
            "no file of the snapshot matches", where=pattern, hint=call("files", view.id.short)
        )
    matched = matching(view.files, only)
    return {path: size for path, size in view.files.items() if path in matched}


def _require_texts(only: Sequence[object]) -> None:
    if isinstance(only, str) or not all(isinstance(one, str) for one in only):
        raise BadRequest(f"patterns of paths are a list of texts, not {only!r}")


def _check_paths(view: SnapshotView) -> None:
    """Raise BadCheckpoint for paths that leave the directory or differ only in case.

    Decoding checks a manifest's paths except for such twins, which can still be read and mounted.
    """
    where = f"snapshot {view.id.short}"
    for path in view.files:
        check_relative(path, where)
    check_case_twins(view.files, where)


class _File:
    """A file that several threads write; the last one to finish syncs and closes it."""

    def __init__(self, file: fs.NewFile) -> None:
        self.file = file
        self._lock = Lock()
        self._users = 1

    def use(self) -> None:
        """Count one more piece in progress."""
        with self._lock:
            self._users += 1

    def release(self) -> bool:
        """Count a piece as written, or the last as handed out; sync and return True at zero."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.file.sync()
            self.file.close()
        return is_last


class _Checkout:
    """The work of one checkout, cut into jobs that return how many bytes they wrote."""

    def __init__(
        self,
        catalog: Catalog,
        view: SnapshotView,
        files: Mapping[str, int],
        tree: fs.NewTree,
        reflinks: Reflinks,
    ) -> None:
        self._catalog = catalog
        self._view = view
        self._files = files
        self._tree = tree
        self._reflinks = reflinks
        self._open: set[_File] = set()
        self._lock = Lock()
        self._room = ThreadBuffer(catalog.block_size)

    def run(self, threads: int, total: int, progress: ProgressCallback | None) -> None:
        """Write all files and sync each. Closes every file, also after an error."""
        done = 0
        pool = ThreadPoolExecutor(threads, "checkout")
        try:
            for _, written in in_order(pool.submit, self._jobs(), ahead=2 * threads - 1):
                done += written
                if progress is not None:
                    progress(Progress("checkout", done, total))
        finally:
            pool.shutdown(cancel_futures=True)
            for file in self._open:
                file.file.close()

    def _jobs(self) -> Iterator[Callable[[], int]]:
        for path, size in self._files.items():
            if self._view.is_virtual:
                yield partial(self._stream, path)
                continue
            file = _File(self._tree.create(path))
            with self._lock:
                self._open.add(file)
            jobs = (
                self._sharing(file, path)
                if self._reflinks.goes_on
                else self._jobs_of(file, path, size)
            )
            for job in jobs:
                file.use()
                yield job
            yield partial(self._release, file)

    def _jobs_of(self, file: _File, path: str, size: int) -> Iterator[Callable[[], int]]:
        for offset, piece in self._pieces(0, self._view.extents(path, 0, size)):
            yield partial(self._write, file, offset, piece)

    def _sharing(self, file: _File, path: str) -> Iterator[Callable[[], int]]:
        """Share what can be shared; yield what checks it, and what writes the rest."""
        for one in self._reflinks.pieces(self._view, path):
            job = self._check if self._reflinks.share(file.file, one) else self._write
            for offset, piece in self._pieces(one.offset, iter(one.extents)):
                yield partial(job, file, offset, piece)

    def _pieces(self, offset: int, extents: Iterator[Extent]) -> Iterator[tuple[int, list[Extent]]]:
        """Yield (offset in the file, extents) of each piece."""
        blocks = max(1, PIECE_BYTES // self._catalog.block_size)
        while piece := list(islice(extents, blocks)):
            yield offset, piece
            offset += sum(extent.length for extent in piece)

    def _write(self, file: _File, offset: int, piece: Sequence[Extent]) -> int:
        blocks = [extent.block for extent in piece if isinstance(extent.block, BlockId)]
        begin = offset
        for extent, block, location in zip(
            piece, blocks, self._catalog.locate(blocks), strict=True
        ):
            target = self._room(extent.length)
            self._catalog.read_block_into(block, location, target)
            file.file.write_at(offset, target)
            offset += extent.length
        file.file.begin_writing_back(begin, offset - begin)
        self._release(file)
        return offset - begin

    def _check(self, file: _File, offset: int, piece: Sequence[Extent]) -> int:
        """Check blocks that the file shares with a pack, as they are in the file."""
        begin = offset
        for extent in piece:
            target = self._room(extent.length)
            file.file.read_into(offset, target)
            if BlockId.of(target) != extent.block:
                raise Corrupt(
                    "the stored bytes do not match the id",
                    where=f"block {extent.block}",
                    hint=FSCK,
                    block=extent.block if isinstance(extent.block, BlockId) else None,
                )
            offset += extent.length
        self._release(file)
        return offset - begin

    def _release(self, file: _File) -> int:
        if file.release():
            with self._lock:
                self._open.discard(file)
        return 0

    def _stream(self, path: str) -> int:
        file = self._tree.create(path)
        try:
            for block in self._view.stream(path):
                file.append(block)
            file.sync()
            return file.size
        finally:
            file.close()
