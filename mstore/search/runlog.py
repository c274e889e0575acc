"""Logs of searches: what was tried and what it gave, so that a search that was interrupted goes on.

    STORE/searches/NAME     a line of JSON that says what is searched, then one for each answer

A line is written when its answer is known, and the file is replaced whole: whatever happens, it has
the lines before or the lines after.  A log holds ids and numbers, never a command.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec

from mstore import fs
from mstore.store.layout import Layout
from mstore.terms.errors import Conflict, Corrupt

Head = TypeVar("Head", bound=msgspec.Struct)
Line = TypeVar("Line", bound=msgspec.Struct)
_LOCK = ".lock"
_MOST_BYTES = 64 << 20


class RunLog(Generic[Head, Line]):
    """The log of one search."""

    def __init__(self, layout: Layout, name: str, head: type[Head], line: type[Line]) -> None:
        self.path = layout.searches / name
        self._staging = layout.tmp
        self._head = head
        self._line = line

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from going on with this search.  Raises Conflict."""
        fs.make_directory(self.path.parent, exist_ok=True)
        lock = fs.LockFile(self.path.with_name(f"{self.path.name}{_LOCK}"))
        try:
            if not lock.acquire(blocking=False) or not lock.is_current():
                raise Conflict("another process goes on with this search", where=self.path.name)
            yield
            lock.remove()
        finally:
            lock.release()

    def read(self) -> tuple[Head, list[Line]] | None:
        """Return what is searched, and the answers; None if there is no such search.

        Raises Corrupt, StorageFailed; Conflict if something else than a file is there.
        """
        if not fs.is_there(self.path):
            return None
        data = fs.read_file(self.path, _MOST_BYTES + 1)
        try:
            head, *lines = data.splitlines()
            if len(data) > _MOST_BYTES:
                raise ValueError("too long")
            return (
                msgspec.json.decode(head, type=self._head),
                [msgspec.json.decode(line, type=self._line) for line in lines],
            )
        except (msgspec.DecodeError, ValueError) as error:
            raise Corrupt(
                f"is no log of a search: {error}",
                where=str(self.path),
                hint=f"remove it: rm {self.path}",
            ) from error

    def write(self, head: Head, lines: list[Line]) -> None:
        """Replace the log.  Raises StorageFailed."""
        fs.make_directory(self.path.parent, exist_ok=True)
        encoded = [msgspec.json.encode(one) for one in (head, *lines)]
        fs.replace_file(self.path, b"\n".join(encoded) + b"\n", staging=self._staging)

    def remove(self) -> bool:
        """Remove the log; return whether there was one."""
        is_there = fs.is_there(self.path)
        fs.unlink(self.path, missing_ok=True)
        return is_there
