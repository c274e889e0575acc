"""Checkout: a byte-exact copy of a snapshot in a new directory.

The copy is written beside its final name and then renamed, so a directory of that name is always
complete. Paths come from a manifest, which may come from a stranger. So they are checked, and then
opened directory by directory without following links (`fs.NewTree`).

Files are cut into pieces of a few blocks. The threads of a pool each read, decode, check and write
one piece at a time, of one large file as well as of many small ones. Only a few pieces wait at any
time, so memory is bounded by the number of threads. A file of a virtual snapshot is one piece: its
blocks are computed a few ahead of the thread that writes them.

Where a block lies raw, and its offset in the pack is congruent to its offset in the file modulo
the filesystem's block size, ioctl_ficlonerange(2) can make both one extent of the disk, on XFS and
btrfs (`Reflinks`). A later write to the file gets pages of its own. Shared blocks are read back
from the new file, and checked there. How blocks come to lie so: `mstore.upkeep.pins`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from mstore import fs
from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE, PackGone
from mstore.blocks.reader import FSCK, ThreadBuffer
from mstore.checkpoint.exclusion import PICKLE_SUFFIXES
from mstore.checkpoint.models import is_weights
from mstore.checkpoint.paths import (
    SAFETENSORS_SUFFIX,
    check_case_twins,
    check_relative,
    is_safetensors,
)
from mstore.store import contents
from mstore.store.ahead import in_order, read_ahead
from mstore.store.block_cache import BlockCache, Computing, Extent
from mstore.store.catalog import Catalog
from mstore.store.models import Input, snapshot_of
from mstore.store.objects.shapes import matching, unmatched
from mstore.store.view import SnapshotView, will_read
from mstore.terms.errors import BadRequest, Conflict, Corrupt, Incompatible, NotFound, StorageFailed
from mstore.terms.ids import BlockId, SnapshotId
from mstore.terms.phrases import Option, Text, call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

PIECE_BYTES = 2 << 20
"""Large enough to be worth handing to a thread, small enough to give every thread one."""


class Reflink(StrEnum):
    """Whether a checkout shares extents, in the words of cp(1).

    auto: where the filesystem can and pieces are worth it; always: or fail; never: copy.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def parse_reflink(word: str) -> Reflink:
    """Return the choice of this name.  Raises BadRequest."""
    try:
        return Reflink(word)
    except ValueError:
        words = ", ".join(Reflink)
        raise BadRequest(f"reflink is one of {words}, not {word!r}") from None


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
    weights: bool = True,
    reflink: Reflink = Reflink.AUTO,
    made: Callable[[SnapshotView], Mapping[str, bytes]] = lambda view: {},
    header: Callable[[SnapshotView, str], MakeHeader] | None = None,
    progress: ProgressCallback | None = None,
    computing: Callable[[], Computing] | None = None,
) -> CheckoutReport:
    """Write every file of a snapshot or model below `directory`, which must be missing or empty.

    A path that ends in .safetensors is a file instead: a single-file model, or any model that has
    one file of weights, under this name. header: returns what makes such a file's header.

    Holds the snapshot meanwhile. `computing` returns what computes blocks of a virtual snapshot.
    shared: allow a parent directory in which others can rename. only: write the files whose paths
    match one of these patterns (`*` also matches `/`); empty means all files. weights: also write
    safetensors files and their indexes. reflink: whether to share extents with packs. made: gives
    files in place of the snapshot's, or beside them, by their paths. Raises NotFound for a pattern
    that matches no file, BadRequest, BadCheckpoint, Conflict, Corrupt, Incompatible (sharing is
    required, and the filesystem cannot), StorageFailed; an error leaves nothing behind.
    """
    began = time.monotonic()
    cache = BlockCache(catalog, computing=computing)
    view = SnapshotView(catalog, asked.snapshot, cache, model=asked.model)
    _check_paths(view)
    directory = directory.absolute()
    is_directory = directory.is_dir()
    if directory.suffix in PICKLE_SUFFIXES and not is_directory:
        raise BadRequest(
            "a model is written as safetensors, and not pickled",
            where=str(directory),
            hint=call("checkout", asked.name, str(directory.with_suffix(SAFETENSORS_SUFFIX))),
        )
    if is_safetensors(directory.name) and not is_directory:
        chosen = bool(only) or not weights
        target = _one_file(catalog, view, asked, directory, header, chosen=chosen)
    else:
        target = _whole_tree(catalog, view, directory, made, only, weights=weights)
    total = sum(target.files.values())
    stored = {path: size for path, size in target.files.items() if path not in target.made}
    reflinks = Reflinks(catalog, reflink, directory)
    reflinks.require_any(view, list(stored), view.id.short)
    tree = fs.NewTree(directory, shared=shared)
    try:
        with contents.held(catalog, [view.id]):
            work = _Checkout(catalog, view, stored, tree, reflinks, target.headers)
            work.run(threads, total, progress)
        for path, data in target.made.items():
            _write(tree, path, data)
        target.publish(tree)
    except BaseException:
        tree.abandon()
        raise
    return CheckoutReport(
        snapshot=view.id,
        directory=str(directory),
        files=len(target.files),
        bytes_written=total,
        bytes_shared=reflinks.shared_bytes,
        seconds=time.monotonic() - began,
    )


MakeHeader = Callable[[str], bytes]
"""Makes the header of a file from the SHA-256 of its tensors, in hexadecimal digits; it has one
length for all of them."""


class _Target(NamedTuple):
    """What a checkout writes, and how it appears.

    files: sizes by path. made: contents of files that are not the snapshot's. headers: of files
    whose header is another than the stored one.
    """

    files: Mapping[str, int]
    made: Mapping[str, bytes]
    headers: Mapping[str, MakeHeader]
    publish: Callable[[fs.NewTree], None]


def _whole_tree(
    catalog: Catalog,
    view: SnapshotView,
    directory: Path,
    made: Callable[[SnapshotView], Mapping[str, bytes]],
    only: Sequence[str],
    *,
    weights: bool,
) -> _Target:
    fs.require_empty(directory)
    _require_parent(directory)
    with contents.held(catalog, [view.id]):
        new = made(view)
    files = _chosen({**view.files, **{path: len(data) for path, data in new.items()}}, view, only)
    if not weights:
        files = {path: size for path, size in files.items() if not is_weights(path)}
    new = {path: data for path, data in new.items() if path in files}
    return _Target(files, new, {}, fs.NewTree.publish)


def _one_file(
    catalog: Catalog,
    view: SnapshotView,
    asked: Input,
    target: Path,
    header: Callable[[SnapshotView, str], MakeHeader] | None,
    *,
    chosen: bool,
) -> _Target:
    path = _only_file(view, asked, chosen=chosen)
    if os.path.lexists(target):
        raise Conflict("exists", where=str(target), hint="choose another name")
    _require_parent(target)
    size, headers = view.files[path], {}
    if header is not None:
        with contents.held(catalog, [view.id]):
            headers[path] = header(view, path)
        size += len(headers[path](EMPTY_DIGEST)) - header_size(view, path)
    return _Target({path: size}, {}, headers, lambda tree: tree.publish_file(path))


def _require_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise BadRequest(
            "the directory above it does not exist",
            where=str(path),
            hint=f"mkdir -p {path.parent}",
        )


EMPTY_DIGEST: Final = hashlib.sha256().hexdigest()


def header_size(view: SnapshotView, path: str) -> int:
    """Return the bytes before the tensors of a file of weights."""
    file = view.manifest.file(path)
    assert file is not None
    return file.parts[0].nbytes


def _only_file(view: SnapshotView, asked: Input, *, chosen: bool) -> str:
    """Return the only file of weights.  Raises BadRequest if files are chosen, Incompatible."""
    if chosen:
        raise BadRequest("one file of weights has no other files to choose", where=asked.name)
    models = view.models.named
    paths = [path for one in models.values() for path in one.files]
    if len(paths) == 1:
        return paths[0]
    several = len(models) > 1
    what = f"{len(models)} models" if several else f"{len(paths)} files of weights"
    raise Incompatible(
        f"has {what}, and .safetensors is one file",
        where=asked.name,
        hint=call("checkout", f"{snapshot_of(asked.name)}:{next(iter(models))}", "FILE.safetensors")
        if several
        else call("checkout", asked.name, "DIR"),
    )


def _chosen(files: Mapping[str, int], view: SnapshotView, only: Sequence[str]) -> dict[str, int]:
    """Return the sizes of matching files by path, in their order."""
    _require_texts(only)
    if not only:
        return dict(files)
    if (pattern := unmatched(files, only)) is not None:
        raise NotFound(
            "no file of the snapshot matches", where=pattern, hint=call("files", view.id.short)
        )
    matched = matching(files, only)
    return {path: size for path, size in files.items() if path in matched}


def _write(tree: fs.NewTree, path: str, data: bytes) -> None:
    file = tree.create(path)
    try:
        file.append(data)
        file.sync()
    finally:
        file.close()


def _require_texts(only: Sequence[object]) -> None:
    if isinstance(only, str) or not all(isinstance(one, str) for one in only):
        raise BadRequest(f"patterns of paths are a list of texts, not {only!r}")


def _check_paths(view: SnapshotView) -> None:
    """Raise BadCheckpoint for paths that leave the directory, or differ only in case."""
    where = f"snapshot {view.id.short}"
    for path in view.files:
        check_relative(path, where)
    check_case_twins(view.files, where)


class _WrittenFile:
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
        heads: Mapping[str, MakeHeader],
    ) -> None:
        self._heads = heads
        self._catalog = catalog
        self._view = view
        self._files = files
        self._tree = tree
        self._reflinks = reflinks
        self._open: set[_WrittenFile] = set()
        self._lock = Lock()
        self._room = ThreadBuffer(catalog.block_size)

    def run(self, threads: int, total: int, progress: ProgressCallback | None) -> None:
        """Write all files and sync each. Closes every file, also after an error."""
        tick = ProgressCounter("checkout", total, progress)
        pool = ThreadPoolExecutor(threads, "checkout")
        try:
            for _, written in in_order(pool.submit, self._jobs(), ahead=2 * threads - 1):
                tick(written)
        finally:
            pool.shutdown(cancel_futures=True)
            for file in self._open:
                file.file.close()

    def _jobs(self) -> Iterator[Callable[[], int]]:
        for path, size in self._files.items():
            if path in self._heads or self._view.is_virtual:
                yield partial(self._stream, path)
                continue
            file = _WrittenFile(self._tree.create(path))
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

    def _jobs_of(self, file: _WrittenFile, path: str, size: int) -> Iterator[Callable[[], int]]:
        yield from self._writes(file, 0, self._view.extents(path, 0, size))

    def _writes(
        self, file: _WrittenFile, offset: int, extents: Iterator[Extent]
    ) -> Iterator[Callable[[], int]]:
        def length(piece: tuple[int, list[Extent]]) -> int:
            return sum(extent.length for extent in piece[1])

        def prefetch(news: Sequence[tuple[int, list[Extent]]]) -> None:
            will_read(self._catalog, [extent for _, piece in news for extent in piece])

        for at, piece in read_ahead(self._pieces(offset, extents), length, prefetch):
            yield partial(self._write, file, at, piece)

    def _sharing(self, file: _WrittenFile, path: str) -> Iterator[Callable[[], int]]:
        """Share what can be shared; yield what checks it, and what writes the rest."""
        for one in self._reflinks.pieces(self._view, path):
            if not self._reflinks.share(file.file, one):
                yield from self._writes(file, one.offset, iter(one.extents))
                continue
            for offset, piece in self._pieces(one.offset, iter(one.extents)):
                yield partial(self._check, file, offset, piece)

    def _pieces(self, offset: int, extents: Iterator[Extent]) -> Iterator[tuple[int, list[Extent]]]:
        """Yield (offset in the file, extents) of each piece."""
        blocks = max(1, PIECE_BYTES // self._catalog.block_size)
        while piece := list(islice(extents, blocks)):
            yield offset, piece
            offset += sum(extent.length for extent in piece)

    def _write(self, file: _WrittenFile, offset: int, piece: Sequence[Extent]) -> int:
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

    def _check(self, file: _WrittenFile, offset: int, piece: Sequence[Extent]) -> int:
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

    def _release(self, file: _WrittenFile) -> int:
        if file.release():
            with self._lock:
                self._open.discard(file)
        return 0

    def _stream(self, path: str) -> int:
        file = self._tree.create(path)
        head = self._heads.get(path)
        try:
            digest, start = hashlib.sha256(), 0
            if head is not None:
                start = header_size(self._view, path)
                file.append(head(EMPTY_DIGEST))
            for block in self._view.stream(path, start):
                file.append(block)
                if head is not None:
                    digest.update(block)
            if head is not None:
                file.write_at(0, head(digest.hexdigest()))
            file.sync()
            return file.size
        finally:
            file.close()


LEAST_BYTES: Final = 64 << 10
"""What is shared unless everything is to be: smaller pieces would make a file of many extents."""

_BATCH: Final = 1024
_NEVER_HERE: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EACCES}
    | {errno.EINVAL}
)
"""Refusals that a second attempt in the same tree gets, too."""


class ClonedPiece(msgspec.Struct, frozen=True):
    """Neighbouring blocks of a file from `offset` on, one location for each.

    shared: the bytes of the file that can be an extent of the pack; empty if there are none.
    """

    offset: int
    extents: Sequence[Extent]
    places: Sequence[Location]
    shared: range

    @property
    def length(self) -> int:
        return sum(extent.length for extent in self.extents)

    def in_pack(self, offset: int) -> int:
        """Return the offset in the pack of an offset in the file, of a piece that lies raw."""
        return self.places[0].offset + offset - self.offset


class Reflinks:
    """Shares extents for one checkout.  Used by one thread.

    shared_bytes: what was shared until now.
    """

    def __init__(self, catalog: Catalog, reflink: Reflink, target: Path) -> None:
        self._catalog = catalog
        self._target = target
        self._is_always = reflink is Reflink.ALWAYS
        self._align = max(PAGE, fs.block_bytes(target.parent))
        self._least = self._align if self._is_always else LEAST_BYTES
        self.goes_on = reflink is not Reflink.NEVER
        self.shared_bytes = 0

    def require_any(self, view: SnapshotView, files: Sequence[str], called: str) -> None:
        """Raise BadRequest if sharing is required, and no file has anything to share."""
        if not self._is_always or not files:
            return
        if view.is_virtual:
            raise BadRequest(
                "is a virtual merge: its bytes are computed, and no pack has them",
                where=called,
                hint=call("materialize", "REF"),
            )
        if not any(piece.shared for path in files for piece in self.pieces(view, path)):
            raise BadRequest(
                "no block of it lies raw and page by page, as sharing needs it",
                where=called,
                hint=phrase(
                    "{pin} rewrites it so; or {auto} copies what cannot be shared",
                    pin=call("pin", called, raw=True),
                    auto=Option("reflink", str(Reflink.AUTO)),
                ),
            )

    def pieces(self, view: SnapshotView, path: str) -> Iterator[ClonedPiece]:
        """Yield the blocks of a stored file in order, each run of shareable ones as one piece."""
        extents = view.extents(path, 0, view.files[path])
        offset = begin = 0
        run: list[Extent] = []
        places: list[Location] = []
        while batch := list(islice(extents, _BATCH)):
            blocks = [extent.block for extent in batch if isinstance(extent.block, BlockId)]
            for extent, place in zip(batch, self._catalog.locate(blocks), strict=True):
                if run and not self._goes_on(begin, places, place, offset):
                    yield self._piece(begin, run, places)
                    begin, run, places = offset, [], []
                run.append(extent)
                places.append(place)
                offset += extent.length
        if run:
            yield self._piece(begin, run, places)

    def _is_raw(self, place: Location, offset: int) -> bool:
        return place.codec == Codec.RAW and (place.offset - offset) % self._align == 0

    def _goes_on(
        self, begin: int, places: Sequence[Location], place: Location, offset: int
    ) -> bool:
        if not self._is_raw(places[0], begin):
            return not self._is_raw(place, offset)
        return place.codec == Codec.RAW and place.follows(places[-1])

    def _piece(self, begin: int, run: Sequence[Extent], places: Sequence[Location]) -> ClonedPiece:
        shared = range(0)
        if self._is_raw(places[0], begin):
            end = begin + sum(extent.length for extent in run)
            first = -(-begin // self._align) * self._align
            shared = range(first, end // self._align * self._align)
        return ClonedPiece(begin, run, places, shared if len(shared) >= self._least else range(0))

    def share(self, file: fs.NewFile, piece: ClonedPiece) -> bool:
        """Make a piece of a file extents of its pack, and copy what of it is less than a page.

        Nothing is checked yet.  Returns False where that cannot be, and the piece is to be written.
        Raises Incompatible or StorageFailed instead if sharing is required.
        """
        if not piece.shared or not self.goes_on:
            return False
        shared, packs, pack = piece.shared, self._catalog.packs, piece.places[0].pack
        end = piece.offset + piece.length
        try:
            start = piece.in_pack(shared.start)
            if not packs.clone(pack, start, len(shared), file, shared.start):
                raise StorageFailed("packs are no files here", errno=errno.EOPNOTSUPP)
            for start, stop in ((piece.offset, shared.start), (shared.stop, end)):
                if start < stop:
                    file.write_at(start, packs.read(pack, piece.in_pack(start), stop - start))
        except PackGone:
            # It was collected meanwhile: what is written is looked up again.
            return False
        except StorageFailed as error:
            if self._is_always:
                raise self._refused(error) from error
            if error.errno == errno.EIO:
                raise
            # XFS may lack room for the records of a share where it has room for a copy.
            self.goes_on = error.errno not in _NEVER_HERE
            return False
        self.shared_bytes += len(shared)
        return True

    def _refused(self, error: StorageFailed) -> StorageFailed | Incompatible:
        auto = Option("reflink", str(Reflink.AUTO))
        root = self._catalog.layout.root
        copies: Text = phrase("{auto} copies what cannot be shared", auto=auto)
        if error.errno == errno.EXDEV:
            what = f"files share extents within one filesystem, and the store is on another: {root}"
            hint: Text = phrase(
                "name a directory on the filesystem of the store; or {copies}", copies=copies
            )
        elif error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL):
            kind = fs.filesystem_type(self._target.parent) or "unknown"
            what = f"this filesystem ({kind}) cannot share extents between files"
            hint = phrase(
                "XFS (made with reflink=1) and btrfs can, with blocks of 4 KiB; {copies}",
                copies=copies,
            )
        else:
            return error
        return Incompatible(what, where=str(self._target), hint=hint)
