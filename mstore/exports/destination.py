"""A destination: what `export` needs of a place that keeps models, and what it gives to one.

Files go from the view of a snapshot: no checkout, and no second copy on disk.  A kind of place is a
class that has the `ExportDestination` protocol and a row in `mstore.exports.export`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, Lock
from typing import Final, Protocol, TypeVar

import msgspec

from mstore.checkpoint.declared import CARD
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.view import SnapshotView
from mstore.terms.errors import Interrupted
from mstore.terms.ids import Buffer, SnapshotId

F = TypeVar("F")
R = TypeVar("R")

_AT_ONCE: Final = 4
"""Files that are sent at once."""
_BUFFER: Final = 4 << 20
"""Bytes that are read ahead of who sends a file."""


class OutgoingFile(Protocol):
    """A file to export, by its path below the top."""

    path: str
    size: int
    content_id: bytes | None
    """What the store names its content by; None for a file that is made for the export."""

    def stream(self) -> Iterator[Buffer]:
        """Yield its bytes in order.  Raises Corrupt, Conflict (collected meanwhile)."""

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, fewer at its end.  Raises as `stream`."""

    @property
    def known_sha256(self) -> str | None:
        """What `sha256` returned, if it was called."""

    def sha256(self) -> str:
        """Return the digest of all its bytes, in hexadecimal; it is computed once."""


class _Digests:
    """Computes digests of a stream, each once."""

    size: int

    def __init__(self) -> None:
        self.known_sha256: str | None = None

    def stream(self) -> Iterator[Buffer]:
        raise NotImplementedError

    def sha256(self) -> str:
        if self.known_sha256 is None:
            found = hashlib.sha256()
            for piece in self.stream():
                found.update(piece)
            self.known_sha256 = found.hexdigest()
        return self.known_sha256


class ViewFile(_Digests):
    """A file of a snapshot.  memo: has the digests of files that were sent before."""

    def __init__(self, view: SnapshotView, path: str, memo: Memo) -> None:
        super().__init__()
        self._view = view
        self._memo = memo
        self.path = path
        self.size = view.files[path]
        self.content_id: bytes | None = view.content_id(path)

    def sha256(self) -> str:
        content = self._view.content_id(self.path)
        remembered = self._memo.digest(content)
        if remembered is None:
            self._memo.put_digest(content, bytes.fromhex(super().sha256()))
        else:
            self.known_sha256 = remembered.hex()
        return super().sha256()

    def stream(self) -> Iterator[Buffer]:
        return self._view.stream(self.path)

    def read(self, offset: int, length: int) -> bytes:
        return self._view.read(self.path, offset, length)


class TextFile(_Digests):
    """A file that is made for the export: the card."""

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__()
        self._data = data
        self.path = path
        self.content_id: bytes | None = None
        self.size = len(data)

    def stream(self) -> Iterator[Buffer]:
        yield self._data

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


class _Raw(io.RawIOBase):
    def __init__(self, file: OutgoingFile, tick: Callable[[int], None]) -> None:
        self._file = file
        self._tick = tick
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, self._file.size)[whence]
        self._at = start + offset
        return self._at

    def readinto(self, target: Buffer) -> int:  # type: ignore[override]
        room = memoryview(target).cast("B")
        data = self._file.read(self._at, len(room))
        room[: len(data)] = data
        self._at += len(data)
        self._tick(len(data))
        return len(data)


def opened(file: OutgoingFile, tick: Callable[[int], None]) -> io.BufferedReader:
    """Return a file object of an outgoing file, for libraries that send one.

    tick: called with the bytes that were read, as they are read.
    """
    return io.BufferedReader(_Raw(file, tick), _BUFFER)


def sent_together(
    files: Iterable[F], send: Callable[[F, Callable[[int], None]], R], tick: Callable[[int], None]
) -> list[R]:
    """Send files, several at once, and return what `send` does, in their order.

    The first that fails, or Ctrl-C, ends all: no other is begun, and what is under way ends at its
    next call of the function that `send` gets, which passes bytes on to `tick`, from one thread at
    a time.  Raises the error that came first.
    """
    errors: list[BaseException] = []
    is_ended, lock = Event(), Lock()

    def require_going_on() -> None:
        if is_ended.is_set():
            raise Interrupted("the export was ended")

    def ticked(count: int) -> None:
        require_going_on()
        with lock:
            tick(count)

    def sent(file: F) -> R:
        require_going_on()
        try:
            return send(file, ticked)
        except BaseException as error:
            errors.append(error)
            is_ended.set()
            raise

    with ThreadPoolExecutor(_AT_ONCE, "export") as pool:
        sending = [pool.submit(sent, file) for file in files]
        try:
            wait(sending)
        finally:
            is_ended.set()
    if errors:
        raise errors[0]
    return [one.result() for one in sending]


class Export(msgspec.Struct, frozen=True):
    """What is exported: a snapshot, its files with the card, a message for the place's history.

    catalog, memo: of the store, where a place needs to know more of the snapshot, or of earlier
    exports.
    """

    snapshot: SnapshotId
    files: tuple[OutgoingFile, ...]
    message: str
    catalog: Catalog
    memo: Memo

    @property
    def card(self) -> str:
        """The text of the card; empty if there is none."""
        found = [one for one in self.files if one.path == CARD]
        return found[0].read(0, found[0].size).decode(errors="replace") if found else ""


class ChangesThere(msgspec.Struct, frozen=True):
    """How a place differs from what is exported.

    is_new: the place, or the branch there, is to be made. added, changed: files to send. there:
    files that the place has already. removed: paths of files that it has, and the snapshot lacks.
    """

    is_new: bool
    added: tuple[OutgoingFile, ...]
    changed: tuple[OutgoingFile, ...]
    there: tuple[OutgoingFile, ...]
    removed: tuple[str, ...]

    @property
    def to_send(self) -> Sequence[OutgoingFile]:
        """The files to send."""
        return (*self.added, *self.changed)


class Sent(msgspec.Struct, frozen=True):
    """What became of an export.

    commit: what the place calls the state that has the files. url: where people see it.
    bytes_sent: what went to the place of the contents of files, as far as that is known.
    """

    commit: str
    url: str
    bytes_sent: int


class ExportDestination(Protocol):
    """A place that an address names, for one export.

    All calls raise NotFound, Unavailable (the place does not answer, or does not let this user
    write), and Conflict (it changed meanwhile).  `compare` is called once, and before `send`.
    """

    @property
    def shown(self) -> str:
        """Its address, as errors and reports name it."""

    def compare(self, outgoing: Export) -> ChangesThere:
        """Return what would change there; changes nothing."""

    def send(self, outgoing: Export, changes: ChangesThere, tick: Callable[[int], None]) -> Sent:
        """Make the place have exactly these files, all in one step.

        Before that step nobody sees a part of them; a call that was interrupted goes on with what
        arrived.  tick: called with bytes of files that are done, from any thread.
        """


class Wishes(msgspec.Struct, frozen=True):
    """What a user asks of a place beside the files; a kind of place refuses what it cannot do.

    private: if the place is made, only those who are let in see it. branch: the branch to write.
    pull_request: propose the change, and leave the branch.
    """

    private: bool = False
    branch: str | None = None
    pull_request: bool = False
