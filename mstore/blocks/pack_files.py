"""Packs in a directory: DIRECTORY/ab/<PackId>.pack, where ab are the first digits of the id.

Keeps a bounded number of descriptors open, and reads at positions, from any thread.  Crash promise:
a file gets its name only after its bytes are synced, so every name is a whole pack.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition

from mstore import fs
from mstore.blocks import packs
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import (
    Footer,
    Outdated,
    PackGone,
    SealedPack,
    open_pack,
    read_footer,
)
from mstore.terms.errors import Corrupt, MstoreError, StorageFailed, Unavailable
from mstore.terms.ids import ID_BYTES, PackId
from mstore.terms.phrases import call

IOV_MAX = 1024
"""The most buffers that Linux takes in one call (readv(2))."""
MOST_OPEN = 128
"""The most packs that one `PackFiles` keeps open."""
_SHARE = 8

_NAME = re.compile(r"[0-9a-f]{64}\.pack")


class PackFiles(Packs):
    """The packs of a directory.

    staged: packs that have no name there yet, and their files. max_open: how many stay open;
    None: an eighth of what this process may open, because a command may read several stores, and at
    most MOST_OPEN.  Those that are read at this moment come on top.
    """

    def __init__(
        self,
        directory: Path,
        *,
        staged: Mapping[PackId, Path] | None = None,
        max_open: int | None = None,
    ) -> None:
        self._directory = directory
        self._staged = staged or {}
        self._max_open = _share_of_descriptors() if max_open is None else max_open
        self._lock = Condition()
        self._pid = os.getpid()
        self._is_closed = False
        self._open: OrderedDict[PackId, _OpenPack] = OrderedDict()
        self._seen: dict[PackId, tuple[_Identity, int]] = {}

    def _acquire(self, pack: PackId) -> _OpenPack:
        with self._lock:
            if self._is_closed:
                raise Unavailable(
                    "this store was closed", where=str(self._directory.parent), hint="open it again"
                )
            opened = self._open.get(pack)
            if opened is not None and os.fstat(opened.fd).st_nlink == 0:
                # gc deleted the file meanwhile: an open descriptor would keep its space occupied.
                self._drop_unlinked()
                opened = None
            if opened is None:
                path = self._place(pack)
                try:
                    fd = open_pack(path)
                except PackGone as error:
                    raise PackGone(
                        "a pack that the index names is missing",
                        where=path,
                        hint=call("fsck"),
                    ) from error
                opened = self._open[pack] = _OpenPack(fd, self._version(pack, fd))
                # Count the user before eviction: if all others are in use, this one would be
                # evicted.
                opened.users += 1
                self._evict()
            else:
                self._open.move_to_end(pack)
                opened.users += 1
            return opened

    def _version(self, pack: PackId, fd: int) -> int:
        """Return which file of this name it is: one more when it is not the one seen before."""
        identity = _identity(fd)
        seen = self._seen.get(pack)
        version = 0 if seen is None else seen[1] + (seen[0] != identity)
        self._seen[pack] = (identity, version)
        return version

    def version(self, pack: PackId) -> int:
        opened = self._acquire(pack)
        self._release(opened)
        return opened.version

    def _evict(self) -> None:
        while len(self._open) > self._max_open:
            unused = (pack for pack, opened in self._open.items() if opened.users == 0)
            oldest = next(unused, None)
            if oldest is None:
                return
            os.close(self._open.pop(oldest).fd)

    def forget_removed(self) -> None:
        with self._lock:
            self._drop_unlinked()

    def _drop_unlinked(self) -> None:
        for pack, opened in list(self._open.items()):
            if os.fstat(opened.fd).st_nlink == 0:
                del self._open[pack]
                opened.dropped = True
                if opened.users == 0:
                    os.close(opened.fd)

    def _release(self, opened: _OpenPack) -> None:
        with self._lock:
            opened.users -= 1
            if opened.dropped and opened.users == 0:
                os.close(opened.fd)
            if self._is_closed:
                self._lock.notify_all()

    @contextmanager
    def _reading(self, pack: PackId, version: int | None = None) -> Iterator[int]:
        """Yield a descriptor of the pack; an OSError becomes an error that names the file.

        Raises Corrupt for an impossible offset, Outdated if the file is not of this version,
        Unreadable if the disk has lost the bytes, else StorageFailed.
        """
        opened = self._acquire(pack)
        try:
            if version not in (None, opened.version):
                raise Outdated("the pack is another file now", where=self._place(pack))
            yield opened.fd
        except OSError as error:
            raise fs.unread(error, self._place(pack), call("fsck", read_data=True)) from error
        except OverflowError as error:
            # A damaged row may name an offset that no file can have.
            raise self._too_short(pack) from error
        finally:
            self._release(opened)

    def read_scattered(
        self,
        pack: PackId,
        offset: int,
        targets: Sequence[memoryview],
        version: int | None = None,
    ) -> None:
        """In one system call if possible."""
        with self._reading(pack, version) as fd:
            for first in range(0, len(targets), IOV_MAX):
                waiting = deque(filter(len, targets[first : first + IOV_MAX]))
                while waiting:
                    got = os.preadv(fd, waiting, offset)
                    if got == 0:
                        raise self._too_short(pack)
                    offset += got
                    while waiting and got >= len(waiting[0]):
                        got -= len(waiting.popleft())
                    if waiting:
                        waiting[0] = waiting[0][got:]

    def read(self, pack: PackId, offset: int, length: int) -> bytes:
        with self._reading(pack) as fd:
            data = os.pread(fd, length, offset)
        if len(data) != length:
            raise self._too_short(pack)
        return data

    def read_each(self, pack: PackId, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Opens the pack once."""
        with self._reading(pack) as fd:
            for offset, length in places:
                yield os.pread(fd, length, offset)

    def mapped(self, pack: PackId, is_private: bool) -> mmap.mmap:
        access = mmap.ACCESS_COPY if is_private else mmap.ACCESS_READ
        opened = self._acquire(pack)
        try:
            return mmap.mmap(opened.fd, 0, access=access)
        finally:
            self._release(opened)

    def clone(self, pack: PackId, offset: int, length: int, file: fs.NewFile, at: int) -> bool:
        opened = self._acquire(pack)
        try:
            file.clone(opened.fd, offset, length, at)
        finally:
            self._release(opened)
        return True

    def descriptor(self, pack: PackId) -> int:
        return open_pack(self._place(pack))

    def _too_short(self, pack: PackId) -> Corrupt:
        return Corrupt("the pack ends too early", where=self._place(pack), hint=call("fsck"))

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        with suppress(MstoreError), self._reading(pack) as fd:
            # The advice scans every page, which costs as much as copying some of them.
            if not _is_cached(fd, offset + length - 1):
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)

    def is_there(self, pack: PackId) -> bool:
        return fs.is_there(self._place(pack))

    def size(self, pack: PackId) -> int:
        try:
            return fs.status_of(Path(self._place(pack))).st_size
        except FileNotFoundError as error:
            raise PackGone("the file is missing", where=self._place(pack)) from error

    def where(self, pack: PackId) -> str:
        return self._place(pack)

    def _place(self, pack: PackId) -> str:
        # Some ask for thousands, and a Path takes ten times as long.
        staged = self._staged.get(pack)
        return _place(self._directory, pack) if staged is None else str(staged)

    def table(self, pack: PackId) -> Footer:
        found = read_footer(Path(self._place(pack)))
        if found.id != pack:
            what = f"header and footer are those of {found.id.short}"
            raise Corrupt(what, where=self._place(pack))
        return found

    def dead_bytes(self, pack: PackId, rows: int, stored: int) -> int:
        """Reads the table only if it has more entries."""
        with packs.opened(Path(self._place(pack))) as file:
            return packs.dead_bytes(file, self._place(pack), rows, stored)

    def put(self, packs: Sequence[SealedPack]) -> None:
        """Renames the files."""
        # Sync even if no directory is new: another writer may have made it and not synced it yet.
        touched = {self._directory} if packs else set()
        for pack in packs:
            target = Path(_place(self._directory, pack.id))
            fs.make_directory(target.parent, exist_ok=True)
            touched.add(target.parent)
            fs.rename(pack.path, target)
        for directory in sorted(touched, reverse=True):
            fs.sync_directory(directory)

    def listed(self) -> Iterator[PackId]:
        for _, name in self._names():
            if _NAME.fullmatch(name):
                yield PackId(bytes.fromhex(name[: 2 * ID_BYTES]))

    def strays(self) -> Iterator[str]:
        for below, name in self._names():
            if not _NAME.fullmatch(name):
                yield f"{self._directory}/{below}/{name}"

    def _names(self) -> Iterator[tuple[str, str]]:
        # Every `add` and merge looks at all packs: a Path for each would take longer than the rest.
        with fs.translated(self._directory):
            for below, names in fs.listed_below(self._directory):
                yield from ((below, name) for name in names)

    def remove(self, pack: PackId) -> None:
        path = Path(_place(self._directory, pack))
        fs.unlink(path, missing_ok=True)
        if fs.is_there(path.parent):
            fs.sync_directory(path.parent)

    def move_out(self, packs: Sequence[PackId], directory: Path) -> list[PackId]:
        """Move packs into another directory, durably; return those that could be moved."""
        moved = []
        for pack in packs:
            with suppress(StorageFailed):
                fs.rename(Path(_place(self._directory, pack)), directory / f"{pack.hex()}.pack")
                moved.append(pack)
        # Sync the new name first: a crash may leave two names, never none.
        fs.sync_directory(directory)
        fs.sync_directory(directory.parent)
        for above in {Path(_place(self._directory, pack)).parent for pack in moved}:
            fs.sync_directory(above)
        return moved

    def free_bytes(self) -> int:
        return fs.free_bytes(self._directory)

    def close(self) -> None:
        if self._pid != os.getpid():
            # In a forked child, a thread that does not exist there may hold the lock.
            self._close_all()
            return
        with self._lock:
            self._is_closed = True
            while any(opened.users for opened in self._open.values()):
                self._lock.wait()
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            _, opened = self._open.popitem()
            os.close(opened.fd)


def _place(directory: Path, pack: PackId) -> str:
    name = pack.hex()
    return f"{directory}/{name[:2]}/{name}.pack"


def _share_of_descriptors() -> int:
    """Return how many packs to keep open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_OPEN
    return max(1, min(MOST_OPEN, soft // _SHARE))


def _is_cached(fd: int, offset: int) -> bool:
    """Return whether reading the byte at `offset` would not block; False if unknown."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


_Identity = tuple[int, int, int, int]


def _identity(fd: int) -> _Identity:
    """Return what tells a file from another one of the same name, and from itself if rewritten."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _OpenPack:
    __slots__ = ("dropped", "fd", "users", "version")

    def __init__(self, fd: int, version: int) -> None:
        self.fd = fd
        self.version = version
        self.users = 0
        # No longer in the table of open packs: the last reader closes it.
        self.dropped = False


class ScatteredPacks(PackFiles):
    """Packs in whatever directories below one: those of lost+found, as they are now."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if fs.is_there(directory):
            self._staged = {
                PackId(bytes.fromhex(name[: 2 * ID_BYTES])): directory / below / name
                for below, name in self._names()
                if _NAME.fullmatch(name)
            }

    def listed(self) -> Iterator[PackId]:
        return iter(sorted(self._staged))
