"""The types of LMDB's transactions and cursors, as this library uses them (lmdb ships none)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Cursor(Protocol):
    """A position in a database of a transaction."""

    def key(self) -> bytes:
        """Return the key at this position; empty if there is none."""

    def value(self) -> bytes:
        """Return the value at this position; empty if there is none."""

    def first(self) -> bool:
        """Go to the first row; False if the database is empty."""

    def last(self) -> bool:
        """Go to the last row; False if the database is empty."""

    def next(self) -> bool:
        """Go to the next row; False at the end."""

    def prev(self) -> bool:
        """Go to the row before; False at the beginning."""

    def set_range(self, key: bytes) -> bool:
        """Go to the first row whose key is not less; False if there is none."""

    def getmulti(self, keys: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the rows of these keys that exist, in the order of `keys`."""

    def putmulti(
        self, items: Iterable[tuple[bytes, bytes]], *, overwrite: bool = True, append: bool = False
    ) -> tuple[int, int]:
        """Write rows; return how many were given and how many were written."""

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        """Yield keys, values or both, from this place to the end."""

    def delete(self) -> bool:
        """Remove the row at this place and go to the next one."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from this place to the end."""


class IndexTransaction(Protocol):
    """A read or write transaction of an environment; only its own thread may use it.

    db: a handle from `Index.db`.  Raises lmdb's errors, which the environment translates.
    """

    def get(self, key: bytes, default: Any = None, *, db: Any = None) -> bytes | None:
        """Return the value of a key, or the default."""

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        overwrite: bool = True,
        db: Any = None,
    ) -> bool:
        """Write a row; False where it exists and must not be overwritten."""

    def delete(self, key: bytes, *, db: Any = None) -> bool:
        """Remove a row; False where there was none."""

    def cursor(self, db: Any = None) -> AbstractContextManager[Cursor]:
        """Open a cursor."""

    def drop(self, db: Any, delete: bool = True) -> None:
        """Remove all rows of a database, and with `delete` the database itself."""

    def stat(self, db: Any) -> dict[str, int]:
        """Return LMDB's statistics of a database."""

    def id(self) -> int:
        """Return the number of the commit that this transaction reads or will make."""

    def commit(self) -> None:
        """Commit."""

    def abort(self) -> None:
        """Discard all changes."""
