"""Bundles: a remote in one file, for one person: `bundle:/path/model.mbundle`.

A bundle is a zip whose members are the objects of a remote, stored as they are: nothing is
compressed. So any part of an object is a part of the file, and nothing is ever extracted. It is
written once, by a push, and gets its name when it is whole.

A file that comes from elsewhere may be anything. Its directory is read within a limit, only names
that objects have are taken, and a member must lie in the file. What the bytes say is proved by
whoever reads a remote.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import struct
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from mstore import fs
from mstore.remotes.objects import (
    MOST_ROOT_BYTES,
    ROOT,
    Absent,
    Listed,
    Objects,
    Overtaken,
    ReadOnly,
    RootStamp,
    short,
)
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import Buffer

SCHEME: Final = "bundle:"
MOST_DIRECTORY_BYTES: Final = 4 << 20
"""Of a zip's directory: enough for 25,000 packs."""
_NAME: Final = re.compile(r"[a-z][a-z-]*(/[0-9a-f-]+)*(\.pack)?")
_HEADER: Final = struct.Struct("<4s22xHH")
"""Of a member: its magic; at the end the lengths of its name and of what follows that."""
_MAGIC: Final = b"PK\x03\x04"
_ENCRYPTED: Final = 1
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


class _Member(msgspec.Struct, frozen=True):
    """Where a member lies: its header, and its bytes."""

    header: int
    size: int


class Bundle(ReadOnly):
    """The objects in a bundle."""

    def __init__(self, path: Path) -> None:
        self.where = f"{SCHEME}{path}"
        self._path = path
        try:
            self._descriptor = fs.open_file(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Absent(
                "there is no such bundle", where=str(path), hint="check the path"
            ) from error
        except OSError as error:
            raise fs.unread(error, path) from error
        try:
            self._end = os.fstat(self._descriptor).st_size
            self._members = self._listed()
        except BaseException:
            self.close()
            raise

    # -- members -----------------------------------------------------------------------------

    def _listed(self) -> dict[str, _Member]:
        found: dict[str, _Member] = {}
        try:
            with (
                os.fdopen(os.dup(self._descriptor), "rb", buffering=0) as file,
                zipfile.ZipFile(_Limited(file, str(self._path))) as opened,
            ):
                for one in opened.infolist():
                    self._require_plain(one, found)
                    found[one.orig_filename] = _Member(one.header_offset, one.file_size)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise self._bad(f"not a bundle: {error}") from error
        except OSError as error:
            raise fs.unread(error, self._path) from error
        if ROOT not in found:
            raise self._bad("not a bundle: it has no root")
        return found

    def _require_plain(self, one: zipfile.ZipInfo, others: dict[str, _Member]) -> None:
        name = one.orig_filename
        if not _NAME.fullmatch(name):
            raise self._bad(f"not a bundle: a member is called {name[:100]!r}")
        if name in others:
            raise self._bad(f"two members are called {name}")
        if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & _ENCRYPTED:
            raise self._bad(f"{name} is compressed or encrypted")
        # What stands before the zip in the file may move its members.
        least = one.header_offset + _HEADER.size + len(name)
        if (
            one.compress_size != one.file_size
            or one.header_offset < 0
            or least + one.file_size > self._end
        ):
            raise self._bad(f"{name} lies outside the file")

    def _bad(self, what: str) -> Corrupt:
        return Corrupt(what, where=str(self._path))

    def _member(self, name: str) -> _Member:
        found = self._members.get(name)
        if found is None:
            raise Absent("there is no such object", where=f"{self.where}/{name}")
        return found

    def _start(self, name: str, member: _Member) -> int:
        """Return where the bytes of a member begin."""
        head = self._read(member.header, _HEADER.size + len(name), name)
        magic, named, extra = _HEADER.unpack_from(head)
        if magic != _MAGIC or named != len(name) or head[_HEADER.size :] != name.encode():
            raise self._bad(f"{name} is not where the directory says")
        return member.header + _HEADER.size + int(named) + int(extra)

    def _read(self, offset: int, length: int, name: str) -> bytes:
        data = bytearray()
        with fs.reading(self._path):
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    raise short(self.where, name)
                # One read is the usual case: no copy then.
                if len(more) == length:
                    return more
                data += more
        return bytes(data)

    # -- as Objects says ---------------------------------------------------------------------

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        size = self._member(ROOT).size
        if size > MOST_ROOT_BYTES:
            raise self._bad("the root is too long")
        [data] = self.read_each(ROOT, [(0, size)])
        # Another bundle may have this name by now, so only its bytes tell.
        return bytes(data), RootStamp(None)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        member = self._member(name)
        for offset, length in spans:
            if offset < 0 or length < 0 or offset + length > member.size:
                raise short(self.where, name)
        start = self._start(name, member)
        return [self._read(start + offset, length, name) for offset, length in spans]

    def size(self, name: str) -> int:
        return self._member(name).size

    def time_ns(self, name: str) -> int:
        self._member(name)
        return os.fstat(self._descriptor).st_mtime_ns

    def names(self, below: str) -> Iterator[Listed]:
        for name, one in self._members.items():
            if name.startswith(below):
                yield Listed(name, one.size, self.time_ns(name))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Limited(io.RawIOBase):
    """A file that is read in small parts, so that a zip's directory cannot fill the memory."""

    def __init__(self, file: io.FileIO, where: str) -> None:
        self._file = file
        self._where = where

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        most = MOST_DIRECTORY_BYTES
        data = self._file.read(min(size, most + 1) if size >= 0 else most + 1) or b""
        if len(data) > most:
            raise Corrupt("the directory of this zip is too long", where=self._where)
        return data


class NewBundle(Objects):
    """A bundle being written. `finish` gives it its name; `abandon` removes what there is.

    For one push: each object is put once, and the root is kept here until the end.
    """

    def __init__(self, path: Path) -> None:
        self.where = f"{SCHEME}{path}"
        self._path = path
        self._root: bytes | None = None
        self._names: set[str] = set()
        if fs.is_there(path):
            raise self._exists()
        self._file = fs.NewFile(path.with_name(f".{path.name}.{secrets.token_hex(8)}"))
        self._end = _Appending(self._file)
        self._zip = zipfile.ZipFile(self._end, "w", zipfile.ZIP_STORED)

    @property
    def file_size(self) -> int:
        """Bytes of the file so far."""
        return self._file.size

    def _exists(self) -> Conflict:
        return Conflict("there is a file of this name", where=str(self._path))

    def finish(self) -> None:
        """Write the root, and give the bundle its name. Raises Conflict if that exists by now."""
        assert self._root is not None
        self._append(ROOT, len(self._root), [self._root])
        self._zip.close()
        self._file.sync()
        self._file.close()
        if not fs.rename_new(self._file.path, self._path):
            raise self._exists()
        fs.sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Remove the file, unless it has its name."""
        self._end.is_lost = True
        with suppress(ValueError):
            self._zip.close()
        self._file.abandon()

    def _append(self, name: str, size: int, pieces: Iterable[Buffer]) -> None:
        info = zipfile.ZipInfo(name, _LONG_AGO)
        info.file_size = size
        with self._zip.open(info, "w") as member:
            for piece in pieces:
                start = self._file.size
                member.write(piece)
                self._file.begin_writing_back(start, len(piece))
        self._names.add(name)

    # -- as Objects says ---------------------------------------------------------------------

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        if self._root is None:
            raise Absent("there is no remote", where=self.where)
        return self._root, RootStamp(None)

    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        if (before is None) != (self._root is None):
            raise Overtaken("the remote changed meanwhile", where=self.where)
        self._root = data
        return RootStamp(None)

    def probe(self, name: str) -> None:
        """Nobody else writes here."""

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        if name not in self._names:
            self._append(name, size, pieces)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> NoReturn:
        raise Absent("this bundle is being written", where=f"{self.where}/{name}")

    def size(self, name: str) -> NoReturn:
        self.read_each(name, ())

    def time_ns(self, name: str) -> int:
        return time.time_ns()

    def names(self, below: str) -> Iterator[Listed]:
        return iter(())

    def remove(self, name: str) -> NoReturn:
        self.read_each(name, ())


class _Appending(io.RawIOBase):
    """A new file as zipfile writes it: at the end, and once more over a member's header.

    is_lost: write no more, for zipfile writes when it closes.
    """

    is_lost = False

    def __init__(self, file: fs.NewFile) -> None:
        self._new = file
        self._at = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset if whence == os.SEEK_SET else offset + self._new.size
        return self._at

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        if not self.is_lost:
            self._new.write_at(self._at, data)
        self._at += len(data)
        self._new.size = max(self._new.size, self._at)
        return len(data)
