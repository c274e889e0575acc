"""Migrations: upgrade a store of an older format to this version's.

A table of steps, each from one format version to the next. A step changes the store's directory
under the writer lock, while no operation runs. It is *idempotent*: a step that stops half way and
runs again ends in the same state, so a crash only costs another migration. After each step,
once its result is durable, one rename raises the version in the `format` file. Until then the store
has the older version, and programs of that version still read it.

The table is empty until a released version has a format before this one. A step that a release had
is never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mstore import fs
from mstore.store.config import Config
from mstore.store.layout import (
    FORMAT_LIMIT,
    FORMAT_VERSION,
    read,
    require_local,
    too_new,
    version_of,
)
from mstore.terms.errors import Conflict, Incompatible
from mstore.terms.phrases import call, phrase
from mstore.terms.report import Report


class MigrateReport(Report, frozen=True):
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


class Step(msgspec.Struct, frozen=True):
    """A migration from format version `source` to the next; what `apply` makes is durable then."""

    source: int
    what: str
    apply: Callable[[Path], None]


STEPS: tuple[Step, ...] = ()


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
