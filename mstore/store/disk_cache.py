"""A cache on disk for all processes of a store: of what comes from elsewhere or was computed.

    cache/ab/<PackId>/<offset>-<length>   that part of a pack, then a check of 32 bytes
    cache/blocks/a/<BlockId>              a block that lies in no pack, then its id
    cache/size                            bytes of all these files, in digits: these or fewer
    cache/lock                            held while that changes, a file gets its name, or files go

A part of a pack is what one payload takes, as it lies in the pack, so a reader proves it by its id
in any case; the check tells it from a file that was flipped or cut, which is then a part that is
missing. A block is compared with its id whenever it is read. Nothing is synced and all may be
removed at any time: what is gone is brought or computed again.

The limit is hard: a file has its full size before its bytes, and what was used longest ago goes to
make room for it. A process that was killed leaves a number that is too large, until files are
removed the next time and all are counted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from blake3 import blake3

from mstore import fs
from mstore.terms.errors import Conflict, MstoreError
from mstore.terms.ids import BlockId, Buffer, PackId

_CHECK: Final = 32
_SIZE: Final = "size"
_LEFT: Final = 0.9
"""What is removed leaves this share of the limit."""
SHARE: Final = 0.1
"""Share of a disk that the cache takes unless the user says otherwise."""
_Part = tuple[int, int]
"""Offset and length."""


def _usual_limit(directory: Path) -> int:
    """Return a tenth of the disk of a directory, in bytes."""
    status = os.statvfs(directory)
    return int(status.f_blocks * status.f_frsize * SHARE)


class PackPart(NamedTuple):
    """What one payload takes of a pack."""

    pack: PackId
    offset: int
    length: int

    @property
    def path(self) -> str:
        return f"{_directory_of(self.pack)}/{self.offset:x}-{self.length:x}"

    def seal(self, data: Buffer) -> bytes:
        """Return what follows these bytes in the file."""
        hasher = blake3(derive_key_context="mstore 1 part of a pack")
        hasher.update(self.pack + self.offset.to_bytes(8, "big"))
        hasher.update(data)
        return hasher.digest()

    def is_proved(self, data: Buffer, seal: Buffer) -> bool:
        """Return whether these are the bytes that were put."""
        return seal == self.seal(data)


class ComputedBlock(NamedTuple):
    """A block that lies in no pack."""

    id: BlockId
    length: int

    @property
    def path(self) -> str:
        name = self.id.hex()
        return f"blocks/{name[:1]}/{name}"

    def seal(self, data: Buffer) -> bytes:
        """Return what follows the block in the file; whoever puts it has compared the id."""
        return bytes(self.id)

    def is_proved(self, data: Buffer, seal: Buffer) -> bool:
        """Return whether these are the bytes of the id."""
        return seal == self.id and BlockId.of(data) == self.id


Key = PackPart | ComputedBlock


class DiskCache:
    """Parts of packs and computed blocks of one store on its disk; for any number of threads.

    limit: asked once, for the bytes of all files; 0 for no cache, None for a tenth of the disk.  No
    call raises for what is wrong with the disk: then something is missing, or is not kept.
    """

    def __init__(self, directory: Path, limit: Callable[[], int | None]) -> None:
        self._directory = directory
        self._asked = limit
        self._lock = Lock()
        self._known: dict[PackId, set[_Part]] = {}

    @cached_property
    def _limit(self) -> int:
        """The most bytes; what is beyond it, since it was lowered, goes when it is asked for."""
        asked = self._asked()
        limit = _usual_limit(self._directory.parent) if asked is None else asked
        if used_bytes(self._directory) > limit:
            with suppress(MstoreError), self._locked():
                self._set_used(self._make_room(limit))
        return limit

    def get(self, key: Key) -> Buffer | None:
        """Return what was put; None if it is not here, or is not that any more."""
        path = self._path(key)
        if not self._limit:
            return None
        try:
            data = fs.read_file(path, key.length + _CHECK + 1)
        except MstoreError:
            self._note(key, is_here=False)
            return None
        view = memoryview(data)
        is_whole = len(data) == key.length + _CHECK
        if not is_whole or not key.is_proved(view[: key.length], data[key.length :]):
            self.remove(key)
            return None
        with suppress(MstoreError):
            fs.mark_used(path)
        return view[: key.length]

    def has(self, key: Key) -> bool:
        """Return whether there is a file for it; only `get` proves what is in it."""
        with suppress(MstoreError, OSError):
            return fs.is_there(self._path(key))
        return False

    def put(self, key: Key, data: Buffer) -> None:
        """Keep these bytes, if there is room for them."""
        if key.length + _CHECK > self._limit // 4:
            return
        path = self._path(key)
        with suppress(MstoreError):
            self._make_directories(path.parent)
            file = self._begun(path.parent, key.length, key.seal(data))
            if file is None:
                return
            try:
                file.write_at(0, data)
                file.close()
                # Whoever makes room meanwhile would find it under neither name.
                with self._locked():
                    fs.rename(file.path, path)
            except BaseException:
                file.abandon()
                raise
            self._note(key, is_here=True)

    def remove(self, key: Key) -> bool:
        """Remove what was put; return whether it was there."""
        path = self._path(key)
        self._note(key, is_here=False)
        with suppress(MstoreError, OSError):
            if fs.is_there(path):
                fs.unlink(path, missing_ok=True)
                return True
        return False

    def missing(self, pack: PackId, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of what is not here of a range of a pack, as far as is known."""
        parts = ((offset, offset + length) for offset, length in self._parts(pack))
        return gaps(parts, start, end)

    def _parts(self, pack: PackId) -> set[_Part]:
        with self._lock:
            if pack not in self._known:
                self._known[pack] = set(_listed(self._directory / _directory_of(pack)))
            return set(self._known[pack])

    def _note(self, key: Key, *, is_here: bool) -> None:
        """Know of a part of a pack whether it is here, for `missing`."""
        if isinstance(key, PackPart):
            with self._lock:
                known = self._known.get(key.pack, set())
                (known.add if is_here else known.discard)((key.offset, key.length))

    def _make_directories(self, path: Path) -> None:
        """Create a directory of the cache and those above it; nothing of them need be durable."""
        if not path.is_dir():
            if path != self._directory:
                self._make_directories(path.parent)
            fs.make_directory(path, exist_ok=True)

    def _path(self, key: Key) -> Path:
        return self._directory / key.path

    # -- room --------------------------------------------------------------------------------

    def _begun(self, directory: Path, length: int, check: bytes) -> fs.NewFile | None:
        """Begin a file, at its full size; None if there is no room for it."""
        size = length + len(check)
        with self._locked():
            used = _used(self._directory)
            if used is None or used + size > self._limit:
                used = self._make_room(int(self._limit * _LEFT) - size)
            if used + size > self._limit:
                return None
            self._set_used(used + size)
            file = fs.NewFile(directory / f".{secrets.token_hex(8)}", private=False)
            try:
                # Whoever makes room counts this file before its bytes are there.
                file.write_at(length, check)
            except BaseException:
                file.abandon()
                raise
            return file

    def _locked(self) -> AbstractContextManager[object]:
        return fs.locked(self._directory / "lock")

    def _set_used(self, used: int) -> None:
        fs.overwrite(self._directory / _SIZE, f"{used:020}".encode())

    def _make_room(self, most: int) -> int:
        """Remove what was used longest ago, until no more than this is left; return what is."""
        found: list[tuple[int, int, Path]] = []
        for below, names in _tree(self._directory):
            for name in names:
                with suppress(OSError):
                    status = os.lstat(below / name)
                    found.append((status.st_mtime_ns, status.st_size, below / name))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= most:
                break
            # What cannot be removed stays, and counts.
            with suppress(MstoreError):
                fs.unlink(path, missing_ok=True)
                total -= size
        with self._lock:
            self._known.clear()
        return total


def used_bytes(directory: Path) -> int:
    """Return the bytes of the cache in a directory, or a little more; 0 if there is none."""
    return _used(directory) or 0


def gaps(parts: Iterable[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of what no part has of a range.  parts: (start, end) of each."""
    for begin, stop in sorted(parts):
        if stop <= start or begin >= end:
            continue
        if begin > start:
            yield start, begin
        start = max(start, stop)
    if start < end:
        yield start, end


def _directory_of(pack: PackId) -> str:
    name = pack.hex()
    return f"{name[:2]}/{name}"


def _used(directory: Path) -> int | None:
    with suppress(MstoreError, ValueError):
        return int(fs.read_file(directory / _SIZE, 21))
    return None


def _listed(directory: Path) -> Iterator[_Part]:
    with suppress(OSError, Conflict):
        for name in fs.listed(directory):
            with suppress(ValueError):
                offset, length = name.split("-")
                yield int(offset, 16), int(length, 16)


def _tree(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directories of parts and of blocks, and the names in them."""
    with suppress(OSError, Conflict):
        for above, packs in fs.listed_below(directory):
            for pack in packs:
                with suppress(OSError, Conflict):
                    yield directory / above / pack, fs.listed(directory / above / pack)
