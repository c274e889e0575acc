"""A checkpoint in a repository as one that `add` reads, without a second copy on disk.

What decides how a checkpoint is read must be known before its first tensor: all names and sizes,
headers, indexes, configs.  So a scratch directory gets every file in its size, as a hole without
bytes, and in it only what `scan` reads.  `scan` then is the one of any directory.  Tensor data
comes when a file is opened (`RepositoryFile`), piece by piece while it is stored.

A file is not downloaded
- if the user's cache has it: it is read there;
- if the store has a file of this path and size, from this repository, whose bytes have the digest
  that the repository lists (`StoredFile`).  So an add that was interrupted goes on where it was,
  and a new revision costs what changed in it.  The bytes decide: what another store calls an
  origin proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from mstore import fs
from mstore.checkpoint.directory import (
    Checkpoint,
    CheckpointLimits,
    Replacement,
    SourceFile,
    scan,
)
from mstore.checkpoint.exclusion import IGNORE_FILE, Exclusion
from mstore.checkpoint.models import is_index
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.paths import (
    check_case_twins,
    check_relative,
    is_safetensors,
    quoted,
)
from mstore.checkpoint.reading import OpenSource, changed
from mstore.checkpoint.tree import walk
from mstore.origins.arriving import ArrivingFile
from mstore.origins.repository import RemoteFile, Repository
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import File
from mstore.store.refs import CANDIDATE
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadCheckpoint, Corrupt, MstoreError, NotFound
from mstore.terms.ids import SnapshotId
from mstore.terms.report import ProgressCallback, ProgressCounter

_WHOLE: Final = 1 << 20
"""Files of up to this many bytes are there before the scan, which may read them."""
_FIRST: Final = 1 << 16
"""Bytes of the first request for a header: enough for most."""
_AT_ONCE: Final = 8
_TRIED: Final = 4
"""How many stored files of one path are compared with the digest."""


class RepositoryFile(SourceFile, frozen=True, kw_only=True):
    """A file that comes from its repository when it is read.  `absolute` is its hole."""

    remote: RemoteFile
    repository: Repository
    tick: Callable[[int], None]

    @property
    def is_remote(self) -> bool:
        """True."""
        return True

    def open(self) -> OpenSource:
        """Open the file; what is read ahead of the reader is on its way at once."""
        return ArrivingFile(self.repository, self.remote, self.tick)

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, without the rest of the file."""
        return self.repository.read(self.remote, offset, length)


class _StoredBytes:
    """A file of a snapshot, as an open one.  The blocks' ids prove that nothing changed."""

    def __init__(self, view: SnapshotView, path: str) -> None:
        self._view = view
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def read(self, offset: int, length: int) -> bytes:
        data = self._view.read(self._path, offset, length)
        if len(data) != length:
            raise changed(self._path)
        return data

    def read_into(self, offset: int, target: memoryview) -> None:
        if self._view.read_into(self._path, offset, target) != len(target):
            raise changed(self._path)

    def require_start(self, start: bytes) -> None:
        if self.read(0, len(start)) != start:
            raise changed(self._path)

    def require_unchanged(self) -> None:
        pass


class StoredFile(SourceFile, frozen=True, kw_only=True):
    """A file that the store has already, of the snapshot of `view`.  `absolute` is its hole."""

    view: SnapshotView

    def open(self) -> OpenSource:
        """Open the stored file."""
        return _StoredBytes(self.view, self.path)

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes."""
        return self.view.read(self.path, offset, length)


class Scanned(msgspec.Struct, frozen=True):
    """A checkpoint of a repository, and the snapshots that its stored files are read from."""

    checkpoint: Checkpoint
    relied: frozenset[SnapshotId]


def scanned(
    repository: Repository,
    catalog: Catalog,
    scratch: Path,
    *,
    limits: CheckpointLimits,
    exclusion: Exclusion,
    progress: ProgressCallback | None = None,
) -> Scanned:
    """Return the checkpoint of a repository, whose files come when they are opened.

    scratch: an empty directory on the store's disk, which must stay until the checkpoint was read.

    Raises BadCheckpoint as `scan`, and for names that are no portable paths, NotFound,
    Unavailable, StorageFailed.
    """
    shown = Path(repository.shown)
    listed = {file.path: file for file in _checked(repository.files(), shown, limits)}
    holes = scratch / "files"
    fs.make_directories(holes)
    for one in listed.values():
        fs.make_directories((holes / one.path).parent)
        fs.make_hole(holes / one.path, one.size)
    if IGNORE_FILE in listed:
        _fill(repository, listed[IGNORE_FILE], holes)
    # What patterns leave out is neither downloaded nor asked for.
    tree = walk(holes, max_files=limits.max_files, exclusion=exclusion, shown=shown)
    wanted = [listed[found.path] for found in tree.files]
    cached = {one.path: at for one in wanted if (at := repository.cached(one)) is not None}
    with ThreadPoolExecutor(_AT_ONCE, "headers") as pool:
        asked = [
            pool.submit(_fill, repository, one, holes, limits)
            for one in wanted
            if one.path not in cached
        ]
        for filled in asked:
            filled.result()
    found = scan(
        holes,
        # Holes are what it is made of.
        limits=replace(limits, max_sparse_bytes=None),
        replacement=Replacement(frozenset(cached), cached),
        exclusion=exclusion,
        shown=shown,
    )
    stored = _stored(catalog, repository.origin, wanted)
    coming = [
        listed[file.path].size
        for file in found.files
        if file.path not in cached and file.path not in stored and not _is_filled(file)
    ]
    tick = ProgressCounter("download", sum(coming), progress)
    files: list[SourceFile] = []
    for file in found.files:
        own = (file.path, file.absolute, file.stamp, file.header)
        if file.path in cached or _is_filled(file):
            files.append(file)
        elif file.path in stored:
            files.append(StoredFile(*own, view=stored[file.path]))
        else:
            files.append(
                RepositoryFile(*own, remote=listed[file.path], repository=repository, tick=tick)
            )
    checkpoint = replace(found, files=tuple(files), origin=repository.origin)
    return Scanned(checkpoint, frozenset(view.id for view in stored.values()))


def _is_filled(file: SourceFile) -> bool:
    """Return whether all bytes of a file are there before the scan."""
    return file.header is None and (file.size <= _WHOLE or is_index(file.path))


def _checked(
    files: Iterable[RemoteFile], shown: Path, limits: CheckpointLimits
) -> list[RemoteFile]:
    """Return files whose names are portable paths.  Raises BadCheckpoint."""
    checked: list[RemoteFile] = []
    for file in files:
        check_relative(file.path, str(shown))
        if "\\" in file.path or file.size < 0:
            raise BadCheckpoint(
                f"the file name {quoted(file.path)} has a backslash"
                if file.size >= 0
                else f"the size of {quoted(file.path)} is {file.size}",
                where=str(shown),
            )
        checked.append(file)
        if len(checked) > limits.max_files:
            raise BadCheckpoint(
                f"holds more files than the limit of {limits.max_files}", where=str(shown)
            )
    check_case_twins((file.path for file in checked), str(shown))
    paths = {file.path for file in checked}
    if len(paths) < len(checked):
        raise BadCheckpoint("the same file is listed twice", where=str(shown))
    above = {str(one) for path in paths for one in PurePosixPath(path).parents}
    if both := sorted(paths & above):
        raise BadCheckpoint(f"{quoted(both[0])} is a file and a directory", where=str(shown))
    return checked


def _fill(
    repository: Repository,
    file: RemoteFile,
    holes: Path,
    limits: CheckpointLimits | None = None,
) -> None:
    """Bring what the scan reads of a file: all of a small one, the header of a large one."""
    if is_safetensors(file.path) and limits is not None:
        data = repository.read(file, 0, _FIRST)
        length = 8 + int.from_bytes(data[:8], "little")
        if len(data) < length <= 8 + limits.max_header_bytes:
            data += repository.read(file, len(data), length - len(data))
        data = data[:length]
    elif file.size <= _WHOLE or (
        is_index(file.path) and limits is not None and file.size <= limits.max_index_bytes
    ):
        data = repository.read(file, 0, file.size)
        if not file.matches([data]):
            raise repository.other_bytes(file)
    else:
        return
    fs.overwrite(holes / file.path, data)


def _stored(
    catalog: Catalog, origin: Origin, wanted: Iterable[RemoteFile]
) -> Mapping[str, SnapshotView]:
    """Return the files that the store has, each with a snapshot that has it."""
    snapshots = _of_repository(catalog, origin)
    views: dict[SnapshotId, SnapshotView] = {}
    found: dict[str, SnapshotView] = {}
    for file in wanted:
        tried: set[File] = set()
        for id in snapshots if file.size > _WHOLE or _is_weights(file) else ():
            try:
                view = views.setdefault(id, SnapshotView(catalog, id))
                own = view.manifest.file(file.path)
                if own is None or own.size != file.size or own in tried:
                    continue
                tried.add(own)
                if _has_digest(view, file):
                    found[file.path] = view
                    break
            except (NotFound, Corrupt):
                # Pruned, or damaged: adding it again is what heals it.
                continue
            if len(tried) == _TRIED:
                break
    return found


def _is_weights(file: RemoteFile) -> bool:
    return is_safetensors(file.path)


def _of_repository(catalog: Catalog, origin: Origin) -> list[SnapshotId]:
    """Return snapshots that refs name and that are from this repository, of its commit first."""
    found: dict[SnapshotId, Origin] = {}
    for ref in catalog.refs().values():
        try:
            record = catalog.snapshot(ref.snapshot_id())
        except MstoreError:
            continue
        if record.origin is not None and record.origin.url == origin.url:
            found[ref.snapshot_id()] = record.origin
    return sorted(found, key=lambda id: found[id].commit != origin.commit)


def has_model(catalog: Catalog, model: str) -> bool:
    """Return whether a ref names a snapshot from this model, ORG/NAME, at any revision."""
    for ref in catalog.refs().values():
        with suppress(MstoreError):
            origin = catalog.snapshot(ref.snapshot_id()).origin
            if ref.kind != CANDIDATE and origin is not None and origin.model == model:
                return True
    return False


def _has_digest(view: SnapshotView, file: RemoteFile) -> bool:
    """Return whether the stored bytes are those of the Hub.  Raises Corrupt."""
    return file.matches(view.stream(file.path))
