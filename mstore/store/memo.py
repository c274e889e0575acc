"""The memo table at rest: what merges made before, so that it need not be made again.

    outputs      memo key (32 bytes)     -> BlockIds of a chunk's output, the ties it took, check
    requests     request key (32 bytes)  -> PlanId, check

An LMDB environment of its own, because all of it can be thrown away: a row that is missing, or
does not match its check (`mstore.blocks.checked_rows`), costs a computation and changes no
result.  What goes into a key and what a row's value means is for
`mstore.merge` to say; whether the named blocks and plans still exist is for whoever asks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from mstore.blocks import disposable
from mstore.blocks.checked_rows import opened, sealed
from mstore.blocks.disposable import Tell, silent
from mstore.blocks.lmdb_env import Environment, closed
from mstore.ids import ID_BYTES, PlanId

DATABASES = ("outputs", "requests")
_BATCH = 4096
_TIES = struct.Struct("<H")
OUTPUTS, REQUESTS = DATABASES


class Memo:
    """The open memo table of one store; safe for any number of threads.

    What is put is found at once, and on disk after `flush`, in one transaction.  The environment
    is made by the first flush: a store that never merges has none, and reading makes nothing.
    Whoever may not write it keeps what he puts to himself, and to this object.
    """

    def __init__(self, path: Path, tell: Tell = silent) -> None:
        self._path = path
        self._tell = tell
        self._lock = Lock()
        self._env: Environment | None = None
        self._is_out_of_reach = False
        self._is_closed = False
        self._pending: dict[tuple[str, bytes], bytes] = {}

    def close(self) -> None:
        """Release the environment when the reads that run have ended; idempotent.

        What was not flushed is forgotten.  Raises Unavailable inside a call of this thread's own.
        """
        self.require_outside()
        with self._lock:
            env, self._env = self._env, None
            self._is_closed = True
        if env is not None:
            env.release()

    def require_outside(self) -> None:
        """Raise Unavailable inside a transaction of this thread's own."""
        env = self._env
        if env is not None:
            env.require_outside()

    def outputs(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The rows of these memo keys, None where there is none; one read transaction."""
        return self._get(OUTPUTS, keys)

    def has_outputs(self) -> bool:
        """Whether anything is remembered of what merges made: the memo table of a store that was
        only planned in has requests, and nothing else.
        """
        with self._lock:
            if any(database == OUTPUTS for database, _ in self._pending):
                return True
        env = self._open(create=False)
        if env is None:
            return False
        with env.read() as transaction:
            return bool(transaction.stat(env.databases[OUTPUTS])["entries"])

    def put_outputs(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep (memo key, value) rows."""
        self._put(OUTPUTS, rows)

    def plan(self, key: bytes) -> PlanId | None:
        """The plan that a request led to, or None.  It may not be stored any more."""
        value = self._get(REQUESTS, [key])[0]
        return None if value is None or len(value) != ID_BYTES else PlanId(value)

    def put_plan(self, key: bytes, plan: PlanId) -> None:
        """Remember the plan of a request."""
        self._put(REQUESTS, [(key, bytes(plan))])

    def flush(self) -> None:
        """Write what is pending in one transaction.  Raises StorageFailed, Corrupt."""
        if not self._pending:
            return
        env = self._open(create=True)
        if env is None or not env.may_write():
            return
        with self._lock:
            waiting, self._pending = self._pending, {}
        if not waiting:
            return
        with env.write() as transaction:
            for (database, key), value in sorted(waiting.items()):
                row = sealed(database, key, value)
                transaction.put(key, row, db=env.databases[database])

    def tidy(
        self, stored: Callable[[Sequence[bytes]], list[bool]], planned: Callable[[PlanId], bool]
    ) -> None:
        """Drop rows whose blocks are not stored; all requests, if a plan of theirs is not.

        What a plan costs may have changed with what is stored, so none is kept half-heartedly.
        """
        env = self._open(create=False)
        if env is None:
            return
        with env.read() as transaction:
            with transaction.cursor(db=env.databases[OUTPUTS]) as cursor:
                gone = list(_dead_outputs(cursor, stored))
            with transaction.cursor(db=env.databases[REQUESTS]) as cursor:
                plans = [opened(REQUESTS, key, row) for key, row in cursor]
            stale = any(p is None or len(p) != ID_BYTES or not planned(PlanId(p)) for p in plans)
        if not gone and not stale:
            return
        with env.write() as transaction:
            for key in gone:
                transaction.delete(key, db=env.databases[OUTPUTS])
            if stale:
                transaction.drop(env.databases[REQUESTS], delete=False)

    def file_bytes(self) -> int:
        """Size on disk; 0 where there is no table yet."""
        env = self._open(create=False)
        return 0 if env is None else env.file_bytes()

    def _get(self, database: str, keys: Sequence[bytes]) -> list[bytes | None]:
        env = self._open(create=False)
        found: dict[bytes, bytes | None] = {}
        if env is not None:
            with (
                env.read() as transaction,
                transaction.cursor(db=env.databases[database]) as cursor,
            ):
                rows = cursor.getmulti(keys)
                found.update((key, opened(database, key, row)) for key, row in rows)
        with self._lock:
            waiting = self._pending
            return [waiting.get((database, key), found.get(key)) for key in keys]

    def _put(self, database: str, rows: Iterable[tuple[bytes, bytes]]) -> None:
        with self._lock:
            self._pending.update({(database, key): value for key, value in rows})

    def _open(self, *, create: bool) -> Environment | None:
        with self._lock:
            if self._is_closed:
                raise closed(self._path)
            if self._env is None and not self._is_out_of_reach:
                if not create and not (self._path / "data.mdb").exists():
                    return None
                self._env = disposable.acquire(self._path, DATABASES, "memo table", self._tell)
                self._is_out_of_reach = self._env is None
            return self._env


def _dead_outputs(
    rows: Iterable[tuple[bytes, bytes]], stored: Callable[[Sequence[bytes]], list[bool]]
) -> Iterator[bytes]:
    """The keys of rows that are damaged or name a block which is not stored."""
    every: Iterator[Any] = iter(rows)
    while batch := list(islice(every, _BATCH)):
        named = [_blocks(opened(OUTPUTS, key, row)) for key, row in batch]
        wanted = sorted({block for blocks in named for block in blocks})
        there = dict(zip(wanted, stored(wanted), strict=True))
        for (key, _), blocks in zip(batch, named, strict=True):
            if not blocks or not all(there[block] for block in blocks):
                yield key


def _blocks(value: bytes | None) -> list[bytes]:
    """The blocks that a row of `outputs` names; none where it is no such row."""
    if value is None or len(value) < _TIES.size:
        return []
    end = len(value) - _TIES.size - 4 * _TIES.unpack_from(value, len(value) - _TIES.size)[0]
    if end <= 0 or end % ID_BYTES:
        return []
    return [value[at : at + ID_BYTES] for at in range(0, end, ID_BYTES)]
