"""The memo table at rest: outputs of earlier merges, for reuse.

    outputs      memo key     -> what a chunk's output is (`mstore.merge.running.memo_keys`)
    requests     request key  -> the plan that was made for it

Has its own LMDB environment, because all of it can be discarded: a row that is missing, or does not
match its check (`mstore.blocks.tables`), costs a computation and changes no result.
`mstore.merge` owns what goes into a key and what a row's value means; callers check whether the
named blocks and plans still exist.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

from mstore.blocks import disposable
from mstore.blocks.disposable import Tell, silent
from mstore.blocks.lmdb_env import Environment, closed
from mstore.blocks.tables import Table, form, id_of, raw
from mstore.ids import ID_BYTES, PlanId

OUTPUTS: Final = Table(
    "outputs",
    form(raw("memo key", ID_BYTES)),
    form(
        raw("BlockIds, u32 ties each, u32 not finite, u32 of these in experts, u16 counts of ties")
    ),
    "what a chunk's output is",
)
REQUESTS: Final = Table(
    "requests",
    form(raw("request key", ID_BYTES)),
    form(id_of(PlanId)),
    "the plan that was made for it",
)
TABLES: Final[tuple[Table[Any, Any], ...]] = OUTPUTS, REQUESTS
DATABASES: Final = tuple(table.name for table in TABLES)
_BATCH = 4096
_END = struct.Struct("<IIH")
_V = TypeVar("_V")


class Memo:
    """The open memo table of one store; safe for any number of threads.

    New rows are visible at once, and on disk after `flush`, in one transaction.  The first flush
    creates the environment: a store that never merges has none, and reading creates nothing.  For a
    user without write permission, new rows stay in this object.
    """

    def __init__(self, path: Path, tell: Tell = silent) -> None:
        self._path = path
        self._tell = tell
        self._lock = Lock()
        self._env: Environment | None = None
        self._is_out_of_reach = False
        self._is_closed = False
        self._pending: dict[tuple[Table[Any, Any], bytes], Any] = {}

    def close(self) -> None:
        """Release the environment once running reads have ended; idempotent.

        Unflushed rows are lost.  Raises Unavailable inside a call of this thread's own.
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
        """Return the rows of these memo keys, None for a missing one; one read transaction."""
        return self._get(OUTPUTS, keys)

    def has_outputs(self) -> bool:
        """Return whether any merge outputs are stored.

        A store that was only used for planning has requests and no outputs.
        """
        with self._lock:
            if any(table is OUTPUTS for table, _ in self._pending):
                return True
        env = self._open(create=False)
        if env is None:
            return False
        with env.read() as transaction:
            return bool(transaction.stat(env.databases[OUTPUTS.name])["entries"])

    def put_outputs(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add (memo key, value) rows."""
        self._put(OUTPUTS, rows)

    def plan(self, key: bytes) -> PlanId | None:
        """Return the plan made for a request, or None.  The plan may no longer be stored."""
        return self._get(REQUESTS, [key])[0]

    def put_plan(self, key: bytes, plan: PlanId) -> None:
        """Remember the plan of a request."""
        self._put(REQUESTS, [(key, plan)])

    def flush(self) -> None:
        """Write pending rows in one transaction.  Raises StorageFailed, Corrupt."""
        if not self._pending:
            return
        env = self._open(create=True)
        if env is None or not env.may_write():
            return
        with self._lock:
            waiting, self._pending = self._pending, {}
        if not waiting:
            return
        # Nothing in it depends on the files that were there before.
        env.follow()
        with env.write() as transaction:
            for (table, key), value in sorted(
                waiting.items(), key=lambda one: (one[0][0].name, one[0][1])
            ):
                transaction.put(*table.row(key, value), db=env.databases[table.name])

    def tidy(
        self, stored: Callable[[Sequence[bytes]], list[bool]], planned: Callable[[PlanId], bool]
    ) -> None:
        """Drop rows whose blocks are not stored; drop all requests if any of their plans is not.

        What a plan costs may have changed with the stored blocks, so requests are kept all or none.
        """
        env = self._open(create=False)
        if env is None:
            return
        with env.read() as transaction:
            with transaction.cursor(db=env.databases[OUTPUTS.name]) as cursor:
                gone = list(_dead_outputs(cursor, stored))
            with transaction.cursor(db=env.databases[REQUESTS.name]) as cursor:
                plans = [REQUESTS.found(key, row) for key, row in cursor]
            stale = any(plan is None or not planned(plan) for plan in plans)
        if not gone and not stale:
            return
        with env.write() as transaction:
            for key in gone:
                transaction.delete(key, db=env.databases[OUTPUTS.name])
            if stale:
                transaction.drop(env.databases[REQUESTS.name], delete=False)

    def file_bytes(self) -> int:
        """Return the size on disk; 0 if there is no table yet."""
        env = self._open(create=False)
        return 0 if env is None else env.file_bytes()

    def _get(self, table: Table[bytes, _V], keys: Sequence[bytes]) -> list[_V | None]:
        env = self._open(create=False)
        found: dict[bytes, _V | None] = {}
        if env is not None:
            with (
                env.read() as transaction,
                transaction.cursor(db=env.databases[table.name]) as cursor,
            ):
                rows = cursor.getmulti(keys)
                found.update((key, table.found(key, row)) for key, row in rows)
        with self._lock:
            waiting = self._pending
            return [waiting.get((table, key), found.get(key)) for key in keys]

    def _put(self, table: Table[bytes, _V], rows: Iterable[tuple[bytes, _V]]) -> None:
        with self._lock:
            self._pending.update({(table, key): value for key, value in rows})

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


def forget_requests(path: Path) -> None:
    """Drop all requests of the table at `path`.  Raises StorageFailed, Corrupt."""
    env = Environment.acquire(path, DATABASES)
    try:
        with env.write() as transaction:
            transaction.drop(env.databases[REQUESTS.name], delete=False)
    finally:
        env.release()


def _dead_outputs(
    rows: Iterable[tuple[bytes, bytes]], stored: Callable[[Sequence[bytes]], list[bool]]
) -> Iterator[bytes]:
    """Yield the keys of rows that are damaged or name a block that is not stored."""
    every: Iterator[Any] = iter(rows)
    while batch := list(islice(every, _BATCH)):
        named = [_blocks(OUTPUTS.found(key, row)) for key, row in batch]
        wanted = sorted({block for blocks in named for block in blocks})
        there = dict(zip(wanted, stored(wanted), strict=True))
        for (key, _), blocks in zip(batch, named, strict=True):
            if not blocks or not all(there[block] for block in blocks):
                yield key


def _blocks(value: bytes | None) -> list[bytes]:
    """Return the blocks that a row of `outputs` names; none for an invalid row."""
    if value is None or len(value) < _END.size:
        return []
    end = len(value) - _END.size - 4 * _END.unpack_from(value, len(value) - _END.size)[-1]
    if end <= 0 or end % ID_BYTES:
        return []
    return [value[at : at + ID_BYTES] for at in range(0, end, ID_BYTES)]
