#!/usr/bin/env python3
"""Compiles every pass of the library, into mstore/numeric/kernels.

    scripts/kernels.py              for the best level of processor that this machine is
    scripts/kernels.py LEVEL...     for these levels (mstore/numeric/levels.py)

What is there already, made from the same sources in the same way, stays.  scripts/setup and the
build of a wheel (hatch_build.py) run this program.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from blake3 import blake3  # noqa: E402

from mstore.numeric.levels import LEVELS, Level, named, runnable  # noqa: E402
from mstore.numeric.passes import ENDING, KERNELS, Pass, Trailer, sealed, trailer  # noqa: E402

MAKER = Path(__file__).with_name("machine_code.py")
# These compile longest, so they begin first.
LONGEST = ("arithmetic.passes", "attribution_passes", "stats.passes", "blocks.rans")


class Wanted(NamedTuple):
    """What a worker compiles: one pass, and its file for each level.

    source: where the pass is in C; None for numba's.
    """

    module: str
    name: str
    source: Path | None
    files: tuple[tuple[Level, Path, Trailer], ...]


def say(words: str) -> None:
    """Tell who builds."""
    sys.stderr.write(f"kernels: {words}\n")
    sys.stderr.flush()


def passes() -> Iterator[Pass]:
    """Every pass of the library: modules that declare some say ` Pass(`."""
    for path in sorted((ROOT / "mstore").rglob("*.py")):
        if " Pass(" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                found = value.values() if isinstance(value, dict) else (value,)
                yield from (one for one in found if isinstance(one, Pass))


def jobs(every: Iterable[Pass], levels: Sequence[Level]) -> list[list[Wanted]]:
    """What is missing: numba's passes of one module, or one pass in C, at all levels."""
    maker = blake3(MAKER.read_bytes()).digest()
    found: dict[tuple[str, ...], list[Wanted]] = defaultdict(list)
    for one in every:
        made = Trailer(one.stamp(), maker)
        places = [(level, one.path(level), made) for level in levels]
        files = tuple(place for place in places if not _is_there(*place[1:]))
        if files:
            in_c = one.sources[0] if one.sources[0].suffix == ".c" else None
            job = (one.module, one.name) if in_c else (one.module,)
            found[job].append(Wanted(one.module, one.name, in_c, files))
    return sorted(found.values(), key=lambda job: not job[0].module.endswith(LONGEST))


def _is_there(path: Path, made: Trailer) -> bool:
    try:
        return trailer(path.read_bytes()) == made
    except FileNotFoundError:
        return False


def _prepare(level: Level) -> None:
    """Make numba, in a new process, leave to `machine_code` what depends on the level."""
    # An empty list would be this processor's.
    features = level.features or {"aarch64": "+neon"}.get(level.machine, "+sse2")
    os.environ |= {
        "NUMBA_CPU_NAME": level.cpu,
        "NUMBA_CPU_FEATURES": features,
        # `machine_code` optimises, for each level.
        "NUMBA_OPT": "0",
        "NUMBA_DISABLE_JIT": "0",
    }


def _make(job: Sequence[Wanted]) -> int:
    """Compile passes of one module, which share steps; return how many."""
    warnings.simplefilter("ignore")
    # numba makes millions of objects, and needs almost all of them until it ends.
    gc.disable()
    import machine_code

    for one in job:
        if one.source:
            make = partial(machine_code.made_of_c, one.source, one.name)
        else:
            # numba works once for all levels.
            entry = getattr(importlib.import_module(one.module), one.name)
            make = partial(machine_code.made, entry.assembly())
        for level, path, made in one.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f".{path.name}.{os.getpid()}")
            own.write_bytes(sealed(make(level), made))
            own.replace(path)
    return len(job)


def compile_all(wanted: Sequence[Sequence[Wanted]]) -> None:
    """Compile all jobs in new processes, on all processors, and tell how far that is."""
    began = time.monotonic()
    total = sum(len(job) for job in wanted)
    say(f"compiling {total} passes")
    with ProcessPoolExecutor(
        min(len(wanted), len(os.sched_getaffinity(0))),
        mp_context=get_context("spawn"),
        initializer=_prepare,
        initargs=(wanted[0][0].files[0][0],),
    ) as pool:
        running = [pool.submit(_make, job) for job in wanted]
        done = 0
        for future in as_completed(running):
            done += future.result()
            say(f"{done} of {total}, after {time.monotonic() - began:.0f} s")


def main(names: Sequence[str]) -> None:
    """Compile what is missing, and remove what belongs to no pass any more."""
    levels = [named(name) for name in names] or list(runnable()[:1])
    if not levels:
        sys.exit(f"kernels: they run on x86-64 and aarch64, not on {os.uname().machine}")
    KERNELS.mkdir(exist_ok=True)
    with KERNELS.joinpath(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        every = list(passes())
        wanted = jobs(every, levels)
        if wanted:
            compile_all(wanted)
        known = {one.path(level) for one in every for level in LEVELS}
        for path in KERNELS.rglob(f"*{ENDING}"):
            if path not in known:
                path.unlink()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ImportError, OSError, BrokenExecutor) as error:
        sys.exit(f"kernels: they cannot be compiled: {error}")
