#!/usr/bin/env python3
"""Compiles every pass of the library ahead, into mstore/numeric/kernels.

    scripts/kernels.py          for the levels of processors that this machine runs
    scripts/kernels.py --all    for every level that can be made here: what a wheel ships

What is there already, from the same sources, stays; with --all, only what the same version of the
compiler made.  The build of a wheel (hatch_build.py) and scripts/setup run this program.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mstore.errors import Unavailable  # noqa: E402
from mstore.numeric import images, making  # noqa: E402
from mstore.numeric.code_cache import SHIPPED, Pass, shipped  # noqa: E402
from mstore.numeric.levels import LEVELS, Level, runnable  # noqa: E402

Job = tuple[list[making.Wanted], list[Level]]
# These compile longest, so they begin first.
LONGEST = ("arithmetic.passes", "attribution_passes", "stats.passes", "plane_passes")


def say(words: str) -> None:
    """Tell who builds."""
    sys.stderr.write(f"kernels: {words}\n")


def passes() -> Iterator[Pass]:
    """Every pass of the library: modules that declare some say ` Pass(`."""
    for path in sorted((ROOT / "mstore").rglob("*.py")):
        if " Pass(" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                found = value.values() if isinstance(value, dict) else (value,)
                yield from (one for one in found if isinstance(one, Pass))


def levels(*, every: bool) -> tuple[Level, ...]:
    """The levels to make: an x86-64 machine makes all, another one its own."""
    if every and os.uname().machine == "x86_64":
        return LEVELS
    return runnable()


def is_current(one: Pass, level: Level, compiler: str | None) -> bool:
    """Whether the code of a pass is there, from the same sources and by this compiler, or any."""
    try:
        found = images.decoded(shipped(one.module, one.name, level).read_bytes(), one.stamp())
    except OSError:
        return False
    return found is not None and compiler in (None, found.made_by)


def work(wanted: Iterable[Level], compiler: str | None) -> list[Job]:
    """What to compile, for each child process: passes of one module, at levels of one kind."""
    missing: dict[tuple[str, bool, tuple[Level, ...]], list[making.Wanted]] = defaultdict(list)
    for one in passes():
        left = [level for level in wanted if not is_current(one, level, compiler)]
        # Only with `expansion` does it matter for the front of the compiler what a level has.
        apart = any(source.stem == "expansion" for source in one.sources)
        for group in (
            [[level for level in left if level.is_wide == wide] for wide in (True, False)]
            if apart
            else [left]
        ):
            if group:
                key = (one.module, apart, tuple(group))
                missing[key].append(making.Wanted(one.module, one.name, one.stamp()))
    found = [(names, list(group)) for (_, _, group), names in missing.items()]
    return sorted(found, key=lambda job: not job[0][0].module.endswith(LONGEST))


def make(job: Job) -> int:
    """Compile one job, and write its files; returns how many."""
    count = 0
    for one, level, data in making.files(*job):
        path = shipped(one.module, one.name, level)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f".{path.name}.{os.getpid()}")
        own.write_bytes(data)
        own.replace(path)
        count += 1
    return count


def _compiler() -> str:
    from mstore.numeric.compiling import made_by

    return made_by()


def main() -> None:
    """Compile what is missing, and remove what belongs to no pass any more."""
    every = "--all" in sys.argv[1:]
    SHIPPED.mkdir(exist_ok=True)
    with (SHIPPED / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = work(levels(every=every), _compiler() if every else None)
        if jobs:
            say("compiling them ahead")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = sum(pool.map(make, jobs))
        known = {shipped(one.module, one.name, level) for one in passes() for level in LEVELS}
        for path in SHIPPED.rglob("*.pass"):
            if path not in known:
                path.unlink()
    if made:
        say(f"{made} files in {SHIPPED.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, Unavailable) as error:
        sys.exit(f"kernels: not compiled ahead: {error}")
