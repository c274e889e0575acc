"""Migrations: upgrade a store of an older format to this version's.

A table of steps, each from one format version to the next. A step changes the store's directory
under the writer lock, while no operation runs. It is *idempotent*: a step that stops half way and
runs again ends in the same state, so a crash only costs another migration. After each step,
once its result is durable, one rename raises the version in the `format` file. Until then the store
has the older version, and programs of that version still read it.

A step in the table is never removed.

    1 -> 2    rows of the index end with a check, the index has a generation, and so has the mirror;
              packs stay as they are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mstore import fs
from mstore.blocks.index import DATABASES, UNCHECKED, Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import Conflict, Incompatible
from mstore.frozen import frozen
from mstore.phrases import call, phrase
from mstore.store import mirror
from mstore.store.config import Config
from mstore.store.layout import (
    FORMAT_LIMIT,
    FORMAT_VERSION,
    read,
    require_local,
    too_new,
    version_of,
)


@frozen
class MigrateReport:
    """The result of `migrate`: the steps between format versions, done or still to do."""

    path: str
    """the store"""
    found: int
    """format version found"""
    target: int
    """format version that this program writes"""
    steps: tuple[str, ...]
    """steps done, or to do, in order"""
    done: bool
    """false for a dry run"""


@frozen
class Step:
    """A migration from format version `source` to `source + 1`.

    apply: changes the directory through `mstore.fs`; every name and byte that it makes is durable
    when it returns.
    """

    source: int
    what: str
    apply: Callable[[Path], None]


def _check_rows(root: Path) -> None:
    """Add a check to each row, and set the generation in the same transaction to mark it done.

    If there is no index, `reindex` makes one with checks.
    """
    layout = read(root)
    fs.share(root, Config.load(layout).shared)
    fs.make_directory(layout.tmp, private=True, exist_ok=True)
    if not (layout.index / "data.mdb").exists():
        return
    index = Index(layout.index)
    try:
        with index.env.write() as transaction:
            if not index.has_generation(transaction):
                for database in DATABASES:
                    if database not in UNCHECKED:
                        _seal(index, transaction, database)
                index.set_generation(transaction, 1)
        mirror.write(layout, index)
    finally:
        index.close()


def _seal(index: Index, transaction: IndexTransaction, database: str) -> None:
    with transaction.cursor(db=index.db(database)) as cursor:
        rows = [(bytes(key), bytes(value)) for key, value in cursor]
    for key, value in rows:
        index.put(transaction, database, key, value)


STEPS: tuple[Step, ...] = (
    Step(1, "checks for the rows of the index, generations for index and mirror", _check_rows),
)


def migrate(
    root: Path,
    *,
    dry_run: bool = False,
    steps: Sequence[Step] = STEPS,
    target: int = FORMAT_VERSION,
) -> MigrateReport:
    """Upgrade the store at `root` to format version `target`; report what was, or would be, done.

    Raises NotFound, Corrupt (no format file), Incompatible (a newer format, or one that no step
    upgrades), Conflict while anyone uses the store, StorageFailed.
    """
    found = version_of(root)
    way = _way(root, found, steps, target)
    if way and not dry_run:
        require_local(root, Config.load(read(root)).filesystem)
        fs.require_writable(root, [root / "tmp", root / "lock", root / "index", root / "format"])
        lock = fs.LockFile(root / "lock")
        try:
            if not lock.acquire(blocking=False):
                raise Conflict(
                    "another command is publishing",
                    where=str(root),
                    hint="run the command again when it has ended",
                )
            # The previous holder of the lock may have migrated the store.
            way = _way(root, version_of(root), steps, target)
            _require_idle(root)
            for step in way:
                step.apply(root)
                _set_version(root, step.source + 1)
        finally:
            lock.release()
    return MigrateReport(
        path=str(root),
        found=found,
        target=target,
        steps=tuple(step.what for step in way),
        done=not dry_run,
    )


def _way(root: Path, found: int, steps: Sequence[Step], target: int) -> list[Step]:
    if found > target:
        raise too_new(root, found)
    by_source = {step.source: step for step in steps}
    missing = [version for version in range(found, target) if version not in by_source]
    if missing:
        raise Incompatible(
            f"store format {found}; no step leads from format {missing[0]} to {missing[0] + 1}",
            where=str(root),
            hint="pip install -U mstore",
        )
    return [by_source[version] for version in range(found, target)]


def _require_idle(root: Path) -> None:
    """Raise Conflict while any operation or reader holds a lock file in tmp/, in any layout."""
    with fs.translated(root / "tmp"):
        found = fs.listed(root / "tmp") if (root / "tmp").is_dir() else []
        locks = [root / "tmp" / name for name in found if name.endswith((".lock", ".pin"))]
    for path in locks:
        lock = fs.LockFile(path, create=False)
        try:
            if not lock.acquire(blocking=False):
                raise Conflict(
                    "somebody is at work in this store",
                    where=str(path),
                    hint=phrase(
                        "unmount it and let commands end, then: {migrate}",
                        migrate=call("migrate"),
                    ),
                )
        finally:
            lock.release()


def _set_version(root: Path, version: int) -> None:
    """Set the version in the format file, and keep the rest of its line."""
    line = fs.read_file(root / "format", FORMAT_LIMIT).decode("ascii")
    name, _, rest = line.split(" ", 2)
    staging = root / "tmp"
    fs.replace_file(
        root / "format",
        f"{name} {version} {rest}",
        staging=staging if staging.is_dir() else None,
    )
