"""What each worker says of itself before any work, and whether it can do the work.

A worker with another mstore computes other bytes, or none: that shows here, with its name, and not
after an hour. The level of its kernels may differ: every level gives the same bytes
(docs/design/032-kernels-ahead.md).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.clusters.engine import Engine, require_alike, sources
from mstore.merge.running.runners import worker_name
from mstore.merge.running.workplace import Workplace
from mstore.numeric import halves
from mstore.terms import __version__
from mstore.terms.errors import MstoreError, Unavailable
from mstore.terms.phrases import Option, phrase
from mstore.terms.sizes import format_size

_PACKS: Final = 2
"""Packs of a slice that scratch must have room for."""
_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker says of itself.

    code: digest of mstore's sources. level: of its kernels. problem: why it cannot work in the
    workplace; None if it can. scratch_bytes: free where it writes packs. memory_bytes: that it may
    have.
    """

    worker: str
    version: str
    code: str
    level: str
    problem: str | None
    scratch_bytes: int
    memory_bytes: int


def facts(workplace: Workplace) -> WorkerFacts:
    """Return what this process says of itself. Raises nothing of mstore's."""
    problem, level = None, ""
    try:
        level = halves.level()
        workplace.check()
    except MstoreError as error:
        problem = str(error)
    return WorkerFacts(
        worker=worker_name(),
        version=__version__,
        code=sources(),
        level=level,
        problem=problem,
        scratch_bytes=workplace.free_bytes(),
        memory_bytes=_memory(),
    )


def require_able(engine: Engine, workplace: Workplace, *, memory: int, slice_bytes: int) -> None:
    """Ask each worker of an engine. Raises Incompatible, Unavailable, with the worker's name.

    memory: bytes that a slice may take. slice_bytes: of its output.
    """
    own = __version__, sources()
    for name, told in engine.each(facts, workplace).items():
        where = f"worker {name}" if name == told.worker else f"worker {name} ({told.worker})"
        require_alike((told.version, told.code), own, where)
        if told.problem is not None:
            raise Unavailable(
                f"it cannot work here: {told.problem}", where=where, hint=workplace.hint()
            )
        if told.scratch_bytes < _PACKS * slice_bytes:
            raise Unavailable(
                f"it has {format_size(told.scratch_bytes)} of scratch space; "
                f"{format_size(_PACKS * slice_bytes)} are needed for packs",
                where=where,
                hint="let TMPDIR name a larger disk where the worker is started",
            )
        count, limit = engine.share(name)
        most = told.memory_bytes if limit is None else min(limit, told.memory_bytes)
        if most < count * memory:
            raise Unavailable(
                f"it may have {format_size(most)} of memory; a slice may take "
                f"{format_size(memory)}, and it computes {count} at a time",
                where=where,
                hint=phrase("{less}", less=Option("memory", most // (2 * count))),
            )


def _memory() -> int:
    """Return the bytes of memory that this process may have."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with suppress(OSError, ValueError):
            most = min(most, int(Path(limit).read_text()))
    return most


def scratch_bytes() -> int:
    """Return the bytes that are free where temporary files go."""
    with fs.scratch() as path:
        return fs.free_bytes(path)
