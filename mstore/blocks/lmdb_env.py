"""LMDB environments: one per path and process, guarded against fork, closed by the last user.

Owns opening, map size and transactions; what the rows mean is for `index` and `stats`.
Always full sync, never `writemap`: a full disk is then an error and not a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import lmdb

from mstore import fs
from mstore.errors import Corrupt, StorageFailed, Unavailable

MAP_SIZE = 1 << 38
_environments: dict[str, Environment] = {}
_environments_lock = Lock()


class Environment:
    """A shared LMDB environment with named databases.

    Readers see the state at which they began and never wait for a writer; LMDB itself lets one
    writer in at a time, over all processes.
    """

    def __init__(self, path: Path, databases: tuple[str, ...]) -> None:
        self.path = path
        self._pid = os.getpid()
        self._users = 0
        try:
            self._env = lmdb.open(
                str(path),
                map_size=MAP_SIZE,
                max_dbs=len(databases) + 8,
                max_readers=1024,
                metasync=True,
                sync=True,
                writemap=False,
                readahead=False,
                create=True,
                mode=0o644,
            )
            self.databases = {name: self._env.open_db(name.encode()) for name in databases}
        except lmdb.InvalidError as error:
            raise Corrupt("not an LMDB index", where=str(path), hint="mstore fsck") from error
        except lmdb.Error as error:
            raise _translated(error, path) from error

    @classmethod
    def acquire(cls, path: Path, databases: tuple[str, ...]) -> Environment:
        """The environment of this path, opened at most once in this process."""
        key = os.path.realpath(path)
        with _environments_lock:
            found = _environments.get(key)
            if found is None or found._pid != os.getpid():
                found = _environments[key] = cls(path, databases)
            found._users += 1
            return found

    def release(self) -> None:
        """Give up one use; the last one closes the environment."""
        with _environments_lock:
            self._users -= 1
            if self._users == 0 and self._pid == os.getpid():
                self._env.close()
                _environments.pop(os.path.realpath(self.path), None)

    def _guard(self) -> None:
        if self._pid != os.getpid():
            raise Unavailable(
                "this store was opened before a fork and cannot be used in the child",
                where=str(self.path),
                hint="open the store again in the child: mstore.Store.open(path)",
            )

    def _begin(self, *, write: bool) -> Any:
        self._guard()
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:
            # Another process enlarged the map; adopt its size.
            self._env.set_mapsize(0)
            return self._env.begin(write=write)

    @contextmanager
    def read(self) -> Iterator[Any]:
        """A short read transaction: copy what is needed, leave, then do I/O."""
        try:
            transaction = self._begin(write=False)
        except lmdb.Error as error:
            raise _translated(error, self.path) from error
        try:
            yield transaction
        except lmdb.Error as error:
            raise _translated(error, self.path) from error
        finally:
            transaction.abort()

    @contextmanager
    def write(self) -> Iterator[Any]:
        """The one write transaction; committed and synced on leaving, dropped on an exception."""
        try:
            transaction = self._begin(write=True)
            try:
                yield transaction
            except BaseException:
                transaction.abort()
                raise
            with fs.index_commit(self.path):
                transaction.commit()
        except lmdb.Error as error:
            raise _translated(error, self.path) from error

    def file_bytes(self) -> int:
        """Size of the data file on disk."""
        return (self.path / "data.mdb").stat().st_size


def _translated(error: Any, path: Path) -> StorageFailed | Corrupt:
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError):
        return Corrupt(f"damaged index: {error}", where=str(path), hint="mstore fsck")
    return StorageFailed(f"the index could not be used: {error}", where=str(path))
