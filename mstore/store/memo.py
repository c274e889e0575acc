"""The memo table at rest: what was computed once, for reuse.

    outputs      memo key     -> what a chunk's output is (`mstore.merge.running.memo_keys`)
    requests     request key  -> the plan that was made for it
    outcomes     plan         -> what its merge made
    digests      content id   -> SHA-256 of a file (`SnapshotView.content_id`)
    repositories place key    -> a repository of a registry that has a blob

Has its own LMDB environment, because all of it can be discarded: a row that is missing, or does not
match its check (`mstore.blocks.tables`), costs a computation and changes no result.
`mstore.merge` owns what goes into a key and what a row's value means; callers check whether the
named blocks and plans still exist.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

from mstore.blocks.disposable import DisposableTables, Tell, silent
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.tables import Table, form, id_of, raw
from mstore.terms.ids import ID_BYTES, CoverageId, ManifestId, PlanId, split_ids

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
OUTCOMES: Final = Table(
    "outcomes",
    form(id_of(PlanId)),
    form(id_of(ManifestId), id_of(CoverageId)),
    "what its merge made: a manifest, and what contributed to it",
)
DIGESTS: Final = Table(
    "digests",
    form(raw("content id", ID_BYTES)),
    form(raw("SHA-256", ID_BYTES)),
    "the SHA-256 of a file",
)
REPOSITORIES: Final = Table(
    "repositories",
    form(raw("place key", ID_BYTES)),
    form(raw("name of the repository, UTF-8")),
    "a repository of a registry that has a blob",
)
TABLES: Final[tuple[Table[Any, Any], ...]] = (
    OUTPUTS,
    REQUESTS,
    OUTCOMES,
    DIGESTS,
    REPOSITORIES,
)
DATABASES: Final = tuple(table.name for table in TABLES)
_BATCH = 4096
_END = struct.Struct("<IIH")


class Memo(DisposableTables):
    """The open memo table of one store; the first flush creates it."""

    def __init__(self, path: Path, tell: Tell = silent) -> None:
        super().__init__(path, DATABASES, "memo table", tell)

    def outputs(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of these memo keys, None for a missing one; one read transaction."""
        return self._found(OUTPUTS, keys)

    def has_outputs(self) -> bool:
        """Return whether any merge outputs are stored, and not only requests."""
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
        return self._found(REQUESTS, [key])[0]

    def put_plan(self, key: bytes, plan: PlanId) -> None:
        """Remember the plan of a request."""
        self._put(REQUESTS, [(key, REQUESTS.value.encode(plan))])

    def outcome(self, plan: PlanId) -> tuple[ManifestId, CoverageId] | None:
        """Return what the merge of a plan made, or None.  It may no longer be stored."""
        return self._found(OUTCOMES, [bytes(plan)])[0]

    def put_outcome(self, plan: PlanId, manifest: ManifestId, coverage: CoverageId) -> None:
        """Remember what the merge of a plan made, if no element of it is newly not finite."""
        value = OUTCOMES.value.encode((manifest, coverage))
        self._put(OUTCOMES, [(bytes(plan), value)])

    def digest(self, content: bytes) -> bytes | None:
        """Return the SHA-256 of the files with this content id, if it was put."""
        return self._found(DIGESTS, [content])[0]

    def put_digest(self, content: bytes, digest: bytes) -> None:
        """Remember the SHA-256 of the files with this content id."""
        self._put(DIGESTS, [(content, digest)])

    def repository(self, host: str, digest: str) -> str | None:
        """Return a repository of a registry that had a blob when it was put."""
        found = self._found(REPOSITORIES, [_place_key(host, digest)])[0]
        return None if found is None else found.decode(errors="replace")

    def put_repository(self, host: str, digest: str, repository: str) -> None:
        """Remember a repository that has a blob, in place of another of the same registry."""
        self._put(REPOSITORIES, [(_place_key(host, digest), repository.encode())])

    def tidy(
        self, stored: Callable[[Sequence[bytes]], list[bool]], planned: Callable[[PlanId], bool]
    ) -> None:
        """Drop rows whose blocks or plans are not stored; all requests if one plan of them is not.

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
            with transaction.cursor(db=env.databases[OUTCOMES.name]) as cursor:
                without = [key for key, _ in cursor if not planned(PlanId(key))]
        if not gone and not stale and not without:
            return
        with env.write() as transaction:
            for key in gone:
                transaction.delete(key, db=env.databases[OUTPUTS.name])
            for key in without:
                transaction.delete(key, db=env.databases[OUTCOMES.name])
            if stale:
                transaction.drop(env.databases[REQUESTS.name], delete=False)


def _place_key(host: str, digest: str) -> bytes:
    return sha256(f"{host}\n{digest}".encode()).digest()


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
    return split_ids(value[:end])
