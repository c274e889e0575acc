"""A file of a repository that arrives while it is read: nothing of it lies on disk.

`add` reads each file once, from its begin to its end.  So pieces of it are asked for ahead of the
reader, several at once, and forgotten when they were read and hashed.  The digest of the file is
known when all of it was hashed, and `require_unchanged` waits for that: before it returned, no
byte of the file may count.

Memory: `_AHEAD` pieces.  Bytes that are read again are asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Self

from mstore.checkpoint.reading import changed
from mstore.origins.repository import RemoteFile, Repository

_PIECE: Final = 8 << 20
"""Bytes of one request."""
_AT_ONCE: Final = 8
"""Requests at once."""
_AHEAD: Final = 16
"""Pieces in memory."""


class _Stopped(Exception):
    """The file was closed while a piece of it arrived."""


class ArrivingFile:
    """An open file of a repository, as `OpenSource`; `close` ends all its requests.

    tick: called with the bytes that arrived, from one thread at a time.
    """

    def __init__(
        self, repository: Repository, file: RemoteFile, tick: Callable[[int], None]
    ) -> None:
        self._repository = repository
        self._file = file
        self._tick = tick
        self._ticking = threading.Lock()
        self._count = -(-file.size // _PIECE)
        self._pieces: dict[int, Future[bytes]] = {}
        self._unread: dict[int, int] = {}
        """Bytes of each piece that nobody read yet."""
        self._asked = 0
        self._hashed = 0
        self._wanted = 0
        """The last piece that anybody wanted to read."""
        self._hashing = True
        self._read_all = False
        self._stopped = False
        self._changes = threading.Condition()
        """Holds the lock for all above."""
        self._pool = ThreadPoolExecutor(min(_AT_ONCE, max(1, self._count)), "arriving")
        self._hasher = ThreadPoolExecutor(1, "digest")
        with self._changes:
            self._go_on()
        self._matches = self._hasher.submit(self._hash)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way."""
        with self._changes:
            self._stopped = True
            for piece in self._pieces.values():
                piece.cancel()
            self._changes.notify_all()
        self._pool.shutdown()
        self._hasher.shutdown()
        self._pieces.clear()

    def read(self, offset: int, length: int) -> bytes:
        """Return all of these bytes."""
        room = bytearray(length)
        self.read_into(offset, memoryview(room))
        return bytes(room)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on, when they are there."""
        if offset + len(target) > self._file.size:
            raise changed(self._file.path)
        at = 0
        while at < len(target):
            number, begin = divmod(offset + at, _PIECE)
            length = min(_PIECE - begin, len(target) - at)
            target[at : at + length] = self._part(number, begin, length)
            at += length

    def require_start(self, start: bytes) -> None:
        """Require that the file begins so."""
        if self.read(0, len(start)) != start:
            raise changed(self._file.path)

    def require_unchanged(self) -> None:
        """Require the digest that the repository lists."""
        with self._changes:
            self._read_all = True
            self._go_on()
        if not self._matches.result():
            raise self._repository.other_bytes(self._file)

    def _part(self, number: int, begin: int, length: int) -> bytes | memoryview:
        with self._changes:
            self._wanted = max(self._wanted, number)
            self._go_on()
            while self._asked <= number and self._hashing:
                self._changes.wait()
            piece = self._pieces.get(number)
        if self._stopped:
            raise _Stopped
        if piece is None:
            return self._repository.read(self._file, number * _PIECE + begin, length)
        part = memoryview(piece.result())[begin : begin + length]
        with self._changes:
            if number in self._unread:
                self._unread[number] -= length
            self._go_on()
        return part

    def _hash(self) -> bool:
        """Return whether the digest of all pieces is the one that the repository lists."""
        digest = self._file.new_digest()
        try:
            for number in range(self._count):
                with self._changes:
                    while self._asked <= number and not self._stopped:
                        self._changes.wait()
                    if self._stopped:
                        return False
                    piece = self._pieces[number]
                digest.update(piece.result())
                with self._changes:
                    self._hashed = number + 1
                    self._go_on()
            return digest.hexdigest() == self._file.digest
        finally:
            with self._changes:
                self._hashing = False
                self._changes.notify_all()

    def _go_on(self) -> None:
        """Forget pieces that are done with, and ask for the next ones; under the lock."""
        # Who reads far ahead, or is done, does not come back for what was hashed meanwhile.
        left = self._read_all or self._wanted >= self._asked
        for number in [one for one in self._pieces if one < self._hashed]:
            if left or self._unread[number] <= 0:
                del self._pieces[number], self._unread[number]
        while len(self._pieces) < _AHEAD and self._asked < self._count and not self._stopped:
            number = self._asked
            self._asked += 1
            length = min(_PIECE, self._file.size - number * _PIECE)
            self._unread[number] = length
            self._pieces[number] = self._pool.submit(self._fetch, number * _PIECE, length)
            self._changes.notify_all()

    def _fetch(self, offset: int, length: int) -> bytes:
        return self._repository.read(self._file, offset, length, self._arrived)

    def _arrived(self, more: int) -> None:
        if self._stopped:
            raise _Stopped
        with self._ticking:
            self._tick(more)
