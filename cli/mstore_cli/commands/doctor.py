"""`mstore doctor`: what a bug report needs: versions, kernels, FUSE and the store."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mstore.terms.errors import MstoreError, NotFound
from mstore_cli import errors
from mstore_cli.command import command
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_size
from mstore_cli.spelling import Typed

if TYPE_CHECKING:
    from mstore import Store

PACKAGES = (
    *("blake3", "lmdb", "ml_dtypes", "msgspec", "numpy", "safetensors", "zstandard"),
    *("starlette", "torch", "transformers"),
)
"""Packages whose versions are told where they are installed: what mstore needs, and its extras."""


class StoreState(msgspec.Struct, frozen=True):
    """Quick facts of a store."""

    path: str
    """the store"""
    filesystem: str
    """the type of its filesystem; empty if unknown"""
    free_bytes: int
    """free space of its disk"""
    block_size: int
    """bytes"""
    refs: int
    """branches and tags"""
    snapshots: int
    """snapshots"""


class DoctorReport(msgspec.Struct, frozen=True):
    """What a bug report needs."""

    mstore: str
    """the version"""
    python: str
    """the version of Python"""
    system: str
    """the system and the architecture"""
    processors: int
    """how many processors this process may use"""
    packages: dict[str, str]
    """versions of the packages that are installed, by their names"""
    kernels: str | None
    """for which level of processors the compiled kernels are that run here; None: none do"""
    fuse: str
    """works, or why this user cannot mount by FUSE"""
    store: StoreState | None
    """the store that commands use here; None: there is none, or it cannot be opened"""
    problems: tuple[str, ...]
    """what does not work, in words"""


@command(example="mstore doctor", failure="something does not work; the output says what")
def doctor(session: Session) -> None:
    """Print versions and the state of kernels, FUSE and store.

    Paste the output into a bug report. The command opens the store and reads its names; it
    checks no blocks (`mstore fsck` does). It shows paths, and no names of models.
    """
    problems: list[str] = []
    report = DoctorReport(
        mstore=metadata.version("mstore"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=len(os.sched_getaffinity(0)),
        packages=_packages(),
        kernels=_kernels(problems),
        fuse=_fuse(),
        store=_store(session, problems),
        problems=tuple(problems),
    )
    session.output.emit(report, ids=problems, human=lambda screen: _draw(screen, report))
    if problems:
        raise errors.Ended(errors.FAILURE)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        # Importing torch takes seconds.
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _kernels(problems: list[str]) -> str | None:
    from mstore.numeric import halves

    try:
        return halves.level()
    except MstoreError as error:
        problems.append(_told(error))
        return None


def _fuse() -> str:
    from mstore_fuse.fuse_driver import require_fuse

    # No problem: it is an extra, and Python and checkouts need none.
    try:
        require_fuse()
    except MstoreError as error:
        return _told(error)
    return "works"


def _store(session: Session, problems: list[str]) -> StoreState | None:
    try:
        with session.open_to_look() as store:
            if (doubt := store.doubt()) is not None:
                problems.append(f"{store.path}: {doubt}")
            return _state(store)
    except MstoreError as error:
        if session.named_store is not None or not isinstance(error, NotFound):
            problems.append(_told(error))
        return None


def _state(store: Store) -> StoreState:
    from mstore.fs import disks

    path = Path(store.path)
    return StoreState(
        path=str(path),
        filesystem=disks.filesystem_type(path),
        free_bytes=disks.free_bytes(path),
        block_size=store.block_size,
        refs=len(store.refs()),
        snapshots=len(store.snapshot_ids()),
    )


def _told(error: MstoreError) -> str:
    what, where, _ = error.told(Typed())
    return f"{where}: {what}" if where else what


def _draw(screen: Screen, report: DoctorReport) -> None:
    store = report.store
    fields: list[tuple[str, object]] = [
        ("mstore", report.mstore),
        ("python", report.python),
        ("system", report.system),
        ("processors", report.processors),
        ("packages", ", ".join(f"{name} {one}" for name, one in report.packages.items())),
        ("kernels", report.kernels or "none that run here"),
        ("fuse", report.fuse),
        ("store", store.path if store is not None else "none that can be opened here"),
    ]
    if store is not None:
        fields += [
            ("filesystem", store.filesystem or "unknown"),
            ("free", format_size(store.free_bytes)),
            ("block size", format_size(store.block_size)),
            ("refs", store.refs),
            ("snapshots", store.snapshots),
        ]
    screen.fields(fields)
    for problem in report.problems:
        screen.line(f"problem: {problem}", style="yellow")
