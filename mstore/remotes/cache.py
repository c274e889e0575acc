"""A cache on disk of parts of packs that lie elsewhere, for all processes of a store.

    cache/ab/<PackId>/<offset>-<length>   bytes of that part, then a check of 32 bytes
    cache/size                            bytes of all parts, in digits: these or fewer
    cache/lock                            held while that changes, and while parts are removed

A part is what one payload takes, as it lies in the pack, so a reader proves it by its id in any
case; the check tells it from a file that was flipped or cut, which is then a part that is missing.
Nothing is synced and all may be removed at any time: a part that is gone is brought again.

The limit is hard: a file has its full size before its bytes, and what was used longest ago goes to
make room for it. A process that was killed leaves a number that is too large, until parts are
removed the next time and all are counted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Final

from blake3 import blake3

from mstore import fs
from mstore.terms.errors import Conflict, MstoreError
from mstore.terms.ids import Buffer, PackId

_CHECK: Final = 32
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


class PartCache:
    """The cached parts of packs of one store; for any number of threads.

    limit: asked once, for the bytes of all files; 0 for no cache, None for a tenth of the disk.  No
    call raises for what is wrong with the disk: then parts are missing, or are not kept.
    """

    def __init__(self, directory: Path, limit: Callable[[], int | None]) -> None:
        self._directory = directory
        self._asked = limit
        self._lock = Lock()
        self._known: dict[PackId, set[_Part]] = {}

    @cached_property
    def _limit(self) -> int:
        asked = self._asked()
        return _usual_limit(self._directory.parent) if asked is None else asked

    def get(self, pack: PackId, offset: int, length: int) -> Buffer | None:
        """Return a part; None if it is not here, or not what was put."""
        path = self._path(pack, (offset, length))
        try:
            data = fs.read_file(path, length + _CHECK + 1)
        except MstoreError:
            self._forget(pack, (offset, length))
            return None
        view = memoryview(data)
        if len(data) != length + _CHECK or data[length:] != _check(pack, offset, view[:length]):
            self.remove(pack, offset, length)
            return None
        with suppress(MstoreError):
            fs.mark_used(path)
        return view[:length]

    def put(self, pack: PackId, offset: int, data: Buffer) -> None:
        """Keep a part, if there is room for it."""
        size = len(data) + _CHECK
        if size > self._limit // 4:
            return
        part = offset, len(data)
        path = self._path(pack, part)
        with suppress(MstoreError):
            fs.make_directories(path.parent)
            file = self._begun(path.parent, len(data), _check(pack, offset, data))
            if file is None:
                return
            try:
                file.write_at(0, data)
                file.close()
                fs.rename(file.path, path)
            except BaseException:
                file.abandon()
                raise
            with self._lock:
                if pack in self._known:
                    self._known[pack].add(part)

    def remove(self, pack: PackId, offset: int, length: int) -> bool:
        """Remove a part; return whether it was there."""
        path = self._path(pack, (offset, length))
        self._forget(pack, (offset, length))
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
                self._known[pack] = set(_listed(self._path(pack, (0, 0)).parent))
            return set(self._known[pack])

    def _forget(self, pack: PackId, part: _Part) -> None:
        with self._lock:
            self._known.get(pack, set()).discard(part)

    def _path(self, pack: PackId, part: _Part) -> Path:
        return self._directory / pack.hex()[:2] / pack.hex() / f"{part[0]:x}-{part[1]:x}"

    # -- room --------------------------------------------------------------------------------

    def _begun(self, directory: Path, length: int, check: bytes) -> fs.NewFile | None:
        """Begin the file of a part, at its full size; None if there is no room for it."""
        size = length + len(check)
        with fs.locked(self._directory / "lock"):
            path = self._directory / "size"
            used = _number(path)
            if used is None or used + size > self._limit:
                used = self._make_room(int(self._limit * _LEFT) - size)
            if used + size > self._limit:
                return None
            fs.overwrite(path, f"{used + size:020}".encode())
            file = fs.NewFile(directory / f".{secrets.token_hex(8)}", private=False)
            try:
                # Whoever makes room counts this file before its bytes are there.
                file.write_at(length, check)
            except BaseException:
                file.abandon()
                raise
            return file

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


def _check(pack: PackId, offset: int, data: Buffer) -> bytes:
    hasher = blake3(derive_key_context="mstore 1 part of a pack")
    hasher.update(pack + offset.to_bytes(8, "big"))
    hasher.update(data)
    return hasher.digest()


def _number(path: Path) -> int | None:
    with suppress(MstoreError, ValueError):
        return int(fs.read_file(path, 21))
    return None


def _listed(directory: Path) -> Iterator[_Part]:
    with suppress(OSError, Conflict):
        for name in fs.listed(directory):
            with suppress(ValueError):
                offset, length = name.split("-")
                yield int(offset, 16), int(length, 16)


def _tree(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directories of packs, and the names in them."""
    with suppress(OSError, Conflict):
        for above, packs in fs.listed_below(directory):
            for pack in packs:
                with suppress(OSError, Conflict):
                    yield directory / above / pack, fs.listed(directory / above / pack)
