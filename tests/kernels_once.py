"""Kernels compiled once in a run: its workers share them out.

Where no code is kept yet (a fresh clone), every worker, and every program that a test starts, would
compile each kernel that it needs first: minutes of processor time for the same bytes.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from mstore.adapters import low_rank
from mstore.blocks import classes, planes
from mstore.merge.analysis import attribution
from mstore.merge.arithmetic import importance, informed, kernels, masks, spread, turns
from mstore.numeric import halves
from mstore.numeric.code_cache import Pass
from mstore.stats import deltas, many

# What takes longest to compile comes first.
MODULES = (
    *(kernels, attribution, deltas, many, planes, classes),
    *(importance, informed, masks, spread, turns, halves, low_rank),
)


def passes() -> dict[str, Pass]:
    """Every pass of the library, by a name that a file may have."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            for key, one in (value if isinstance(value, dict) else {"": value}).items():
                if isinstance(one, Pass):
                    found[f"{module.__name__}.{name}{key}"] = one
    return found


def compile_all(directory: Path) -> None:
    """Make every pass ready to run; who shares the directory compiles others meanwhile.

    A worker that dies gives back what it had taken.
    """
    left = passes()
    # At first whatever nobody is at work on; then all are waited for.
    for how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
        for name, one in list(left.items()):
            with (directory / f"{name}.lock").open("w") as taken:
                try:
                    fcntl.flock(taken, how)
                except BlockingIOError:
                    continue
                one.load()
                del left[name]
