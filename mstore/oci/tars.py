"""Tar layers: their members, one after the other, as they arrive.

Members are regular files and directories, with plain relative names.  A link, a device or another
kind is an error: nothing of a model needs one, and each may lead out of it.  What a layer unpacks
to is limited by its own size, so that a small layer cannot fill a disk.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final, Protocol

import zstandard

from mstore.checkpoint.paths import check_relative, quoted
from mstore.terms.errors import BadCheckpoint

_PIECE: Final = 1 << 20
_MOST_TIMES: Final = 200
"""How many times its own size a layer may unpack to; floats shrink to half, and zeros to this."""
_FREE: Final = 64 << 20
"""Bytes that any layer may unpack to."""
_MOST_READ: Final = 1 << 22
"""Bytes that a header of a member may have; tarfile reads those at once."""
_WINDOW: Final = 1 << 27
"""Memory that a frame of zstd may ask for: what its tool allows without being told."""


class _Arriving(io.RawIOBase):
    """Pieces as a file that is read once."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: object) -> int:
        room = memoryview(target).cast("B")  # type: ignore[arg-type]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = piece
        length = min(len(room), len(self._left))
        room[:length] = self._left[:length]
        self._left = self._left[length:]
        return length


class _Readable(Protocol):
    def read(self, length: int, /) -> bytes: ...


class _Forward:
    """What tarfile reads: forward only, no large piece at once, no more than `most` bytes."""

    def __init__(self, source: _Readable, most: int) -> None:
        self._source = source
        self._most = most
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        while self._at < offset:
            if not self.read(min(_PIECE, offset - self._at)):
                return

    def read(self, length: int) -> bytes:
        if length > _MOST_READ or length < 0:
            raise tarfile.ReadError("a header of a member is too long")
        data = self._source.read(length)
        self._at += len(data)
        if self._at > self._most:
            raise tarfile.ReadError(f"it unpacks to more than {self._most} bytes")
        return data


class TarMember:
    """A file of a tar; its bytes can be read until the next member is asked for."""

    def __init__(self, path: str, size: int, data: IO[bytes], where: str) -> None:
        self.path = path
        self.size = size
        self._data = data
        self._where = where

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes in order.  Raises BadCheckpoint."""
        with _sound(self._where):
            while piece := self._data.read(_PIECE):
                yield piece


def members(
    pieces: Iterator[bytes], *, compression: str, size: int, most_files: int, where: str
) -> Iterator[TarMember]:
    """Yield the files of a tar layer.

    pieces: of the layer, in order; they are read to their end. size: of the layer, in bytes.
    most_files: members that it may have.  Raises BadCheckpoint, and what the pieces raise.
    """
    source = _unpacked(io.BufferedReader(_Arriving(pieces), _PIECE), compression)
    forward = _Forward(source, max(_FREE, _MOST_TIMES * size))
    count = 0
    with _sound(where), tarfile.open(fileobj=forward, mode="r:") as archive:  # type: ignore[call-overload]
        while (one := archive.next()) is not None:
            count += 1
            if count > most_files:
                raise BadCheckpoint(f"a layer has more than {most_files} members", where=where)
            if one.isdir():
                continue
            if not one.isreg() or one.issparse():
                raise BadCheckpoint(
                    f"{quoted(one.name)} in a layer is a link or no regular file", where=where
                )
            path = one.name.removeprefix("./")
            check_relative(path, where)
            data = archive.extractfile(one)
            assert data is not None, "regular files have data"
            yield TarMember(path, one.size, data, where)
        # So that all of the layer is compared with its digest.
        while forward.read(_PIECE):
            pass
        for _ in pieces:
            pass


@contextmanager
def _sound(where: str) -> Iterator[None]:
    """Raise what libraries say of a tar, or of its compression, as BadCheckpoint."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise BadCheckpoint(f"a layer is no sound tar: {error}", where=where) from error
    except (ValueError, OverflowError) as error:
        raise BadCheckpoint("a layer is no sound tar", where=where) from error


def _unpacked(source: io.BufferedReader, compression: str) -> _Readable:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=source)
    if compression == "zstd":
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        return reader.stream_reader(source, read_across_frames=True)
    return source
