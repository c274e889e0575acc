"""A repository: what `add` needs of a place that has the files of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from mstore.checkpoint.tree import HubOrigin
from mstore.terms.ids import Buffer


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of the repository, by its path in the directory that the address names.

    digest: SHA-256 of the bytes, or that of git's blob of them (`is_git`).
    """

    path: str
    size: int
    digest: str
    is_git: bool

    def matches(self, pieces: Iterable[Buffer]) -> bool:
        """Return whether these bytes have the digest."""
        found = hashlib.sha1(usedforsecurity=False) if self.is_git else hashlib.sha256()
        if self.is_git:
            found.update(f"blob {self.size}\0".encode())
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
    def origin(self) -> HubOrigin:
        """What a snapshot of it records."""

    def files(self) -> Iterator[RemoteFile]:
        """Yield the files, as the place names them: unchecked, in any order."""

    def cached(self, file: RemoteFile) -> Path | None:
        """Return where the user has a file on this machine; None if nowhere."""

    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Return these bytes of a file, fewer at its end."""

    def download(self, file: RemoteFile, directory: Path, tick: Callable[[int], None]) -> Path:
        """Download a whole file to its place below a directory; return the file.

        tick: called with the bytes that arrived, now and then, from any thread.
        """

    def require_digest(self, file: RemoteFile, data: bytes) -> None:
        """Require that all bytes of a file are those that the place lists."""
