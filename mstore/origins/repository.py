"""A repository: what `add` needs of a place that has the files of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from mstore.checkpoint.origin import Origin
from mstore.terms.errors import BadCheckpoint
from mstore.terms.ids import Buffer


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of the repository, by its path in the directory that the address names.

    digest: SHA-256 of the bytes, or that of git's blob of them (`is_git`).
    """

    path: str
    size: int
    digest: str
    is_git: bool

    def new_digest(self) -> hashlib._Hash:
        """Return what is to be updated with all bytes of the file."""
        if not self.is_git:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)

    def matches(self, pieces: Iterable[Buffer]) -> bool:
        """Return whether these bytes have the digest."""
        found = self.new_digest()
        for piece in pieces:
            found.update(piece)
        return found.hexdigest() == self.digest


class Repository(Protocol):
    """The files of a checkpoint at a place, at one moment.

    Every call raises NotFound, Unavailable (the place does not answer, or lets nobody in), and
    BadCheckpoint for a file that is not what the list says.
    """

    @property
    def shown(self) -> str:
        """Its address, as errors name it."""

    @property
    def origin(self) -> Origin:
        """What a snapshot of it records."""

    @property
    def bases(self) -> tuple[str, ...]:
        """The models of the Hub that its card calls its base, as ORG/NAME."""

    def files(self) -> Iterator[RemoteFile]:
        """Yield the files, as the place names them: unchecked, in any order."""

    def cached(self, file: RemoteFile) -> Path | None:
        """Return where the user has a file on this machine; None if nowhere."""

    def read(
        self,
        file: RemoteFile,
        offset: int,
        length: int,
        tick: Callable[[int], None] | None = None,
    ) -> bytes:
        """Return these bytes of a file, fewer at its end; in any thread.

        tick: called with the bytes that arrived, now and then; what it raises ends the request.
        If the place is asked again, it is told less than nothing.
        """

    def other_bytes(self, file: RemoteFile) -> BadCheckpoint:
        """Return the error for a file that has not the digest that the place lists."""
