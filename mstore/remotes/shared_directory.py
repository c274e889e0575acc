"""Objects in a directory that several machines may share: `file:///srv/models`.

    roots/<16 hex digits>   one file for each root that was; the highest number is the root
    the rest                as at any remote

A filesystem cannot replace a file only if it is still the one that was read. But link(2) creates a
name only if there is none, also over NFS. So each root gets the next number, and who comes second
finds the number taken. No number is ever free again: old roots are cut to no bytes, not removed.
Files are written and synced as those of a store are.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from mstore import fs
from mstore.remotes.objects import MOST_ROOT_BYTES, Absent, Listed, Objects, Overtaken, RootStamp
from mstore.remotes.objects import short as too_short
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.ids import Buffer

_ROOTS: Final = "roots"
_NUMBER: Final = re.compile(r"[0-9a-f]{16}")
_KEPT: Final = 16
"""Roots that keep their bytes, for who has listed the directory and not read yet."""
_NEW: Final = ".new-"


class SharedDirectory(Objects):
    """Objects as files below a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.where = path.as_uri()

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        while True:
            number = max(self._numbers(), default=None)
            if number is None:
                raise Absent("there is no remote", where=self.where)
            data = self._root(number)
            if data:
                stamp = _stamp(number, data)
                return None if stamp == known else (data, stamp)
            if number == max(self._numbers()):
                raise Corrupt("the root is empty", where=f"{self.where}/{_ROOTS}/{number}")

    def _root(self, number: str) -> bytes:
        path = self._path / _ROOTS / number
        data = fs.read_file(path, MOST_ROOT_BYTES + 1)
        if len(data) > MOST_ROOT_BYTES:
            raise Corrupt("the root is too long", where=str(path))
        return data

    def _numbers(self) -> list[str]:
        with fs.translated(self._path), suppress(FileNotFoundError):
            return [one for one in fs.listed(self._path / _ROOTS) if _NUMBER.fullmatch(one)]
        return []

    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        number = 0 if before is None else int(before.e_tag or "", 16) + 1
        roots = self._path / _ROOTS
        fs.make_directories(roots)
        name = f"{number:016x}"
        # NFS may have lost the answer to a link that stands.
        if not fs.create_whole(roots / name, data) and self._root(name) != data:
            raise Overtaken("the remote changed meanwhile", where=self.where)
        for old in sorted(self._numbers())[:-_KEPT]:
            with suppress(StorageFailed):
                if self._root(old):
                    fs.replace_file(roots / old, b"")
        return _stamp(name, data)

    def probe(self, name: str) -> None:
        fs.make_directories(self._path)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        descriptor = self._opened(name)
        try:
            size = os.fstat(descriptor).st_size
            for offset, length in spans:
                # Before memory is taken for it.
                if offset + length > size:
                    raise too_short(self.where, name)
                data = os.pread(descriptor, length, offset)
                while len(data) < length:
                    more = os.pread(descriptor, length - len(data), offset + len(data))
                    if not more:
                        raise too_short(self.where, name)
                    data += more
                found.append(data)
        except OSError as error:
            raise fs.unread(error, self._path / name) from error
        finally:
            os.close(descriptor)
        return found

    def _opened(self, name: str) -> int:
        path = self._path / name
        try:
            return fs.open_file(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Absent("there is no such object", where=f"{self.where}/{name}") from error
        except OSError as error:
            raise fs.unread(error, path) from error

    def _status(self, name: str) -> os.stat_result:
        descriptor = self._opened(name)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        return self._status(name).st_size

    def time_ns(self, name: str) -> int:
        return self._status(name).st_mtime_ns

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        path = self._path / name
        fs.make_directories(path.parent)
        new = self._written(path.parent, pieces)
        try:
            fs.rename(new, path)
        except BaseException:
            fs.unlink(new, missing_ok=True)
            raise
        fs.sync_directory(path.parent)

    def _written(self, directory: Path, pieces: Iterable[Buffer]) -> Path:
        """Write and sync a file under a temporary name."""
        path = directory / f"{_NEW}{secrets.token_hex(8)}"
        file = fs.NewFile(path, private=False)
        try:
            for piece in pieces:
                start = file.append(piece)
                file.begin_writing_back(start, len(piece))
            file.sync()
            file.close()
        except BaseException:
            file.abandon()
            raise
        return path

    def names(self, below: str) -> Iterator[Listed]:
        start = self._path / below
        for directory, _, files in os.walk(start, onerror=_raised):
            for one in sorted(files):
                path = Path(directory, one)
                if one.startswith(_NEW):
                    continue
                with suppress(FileNotFoundError):
                    status = path.stat()
                    name = path.relative_to(self._path).as_posix()
                    yield Listed(name, status.st_size, status.st_mtime_ns)

    def remove(self, name: str) -> None:
        fs.unlink(self._path / name, missing_ok=True)


def _stamp(number: str, data: bytes) -> RootStamp:
    # Another remote at this address, or an older state of it, may have the same number.
    return RootStamp(number, blake3(data).hexdigest())


def _raised(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise fs.unread(error, Path(error.filename))
