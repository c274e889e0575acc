"""Levels of processors: for which kinds machine code is made, and which of them this machine is.

A level is a set of instructions that compilers know by name (the x86-64 psABI's levels) or that a
kind of processor has at least.  Does not own how code is made or found.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_V3: Final = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Level(NamedTuple):
    """One level: its name in paths, and what the compiler calls it.

    machine: as the kernel names the architecture. needs: words of a processor's flags in
    /proc/cpuinfo.
    """

    name: str
    machine: str
    triple: str
    cpu: str
    features: str
    needs: frozenset[str]


_X86: Final = ("x86_64", "x86_64-unknown-linux-gnu")

LEVELS: Final = (
    Level(
        # Processors that have it run vectors of 64 bytes at full speed; earlier ones did not.
        *("x86-64-v4-vbmi2", *_X86, "x86-64-v4", "+avx512vbmi2,-prefer-256-bit"),
        _V4 | {"avx512_vbmi2"},
    ),
    Level("x86-64-v4", *_X86, "x86-64-v4", "", _V4),
    Level("x86-64-v3", *_X86, "x86-64-v3", "", _V3),
    Level("x86-64", *_X86, "x86-64", "", frozenset()),
    Level("aarch64", "aarch64", "aarch64-unknown-linux-gnu", "generic", "", frozenset()),
)
"""Every level, the best of an architecture first."""


@cache
def runnable() -> tuple[Level, ...]:
    """Return the levels whose code this machine runs, the best first.

    The kernel lists what a processor has and the system lets programs use.
    """
    try:
        with Path("/proc/cpuinfo").open() as file:
            # The first processor's part is shorter; all of them are alike.
            told = file.read(8192)
    except OSError:
        told = ""
    line = next((line for line in told.splitlines() if line.startswith("flags")), "")
    return run_by(os.uname().machine, frozenset(line.partition(":")[2].split()))


def run_by(machine: str, flags: frozenset[str]) -> tuple[Level, ...]:
    """Return the levels whose code a processor with these flags runs, the best first."""
    return tuple(one for one in LEVELS if one.machine == machine and one.needs <= flags)


def named(name: str) -> Level:
    """Return the level of this name; raises KeyError if there is none."""
    return {level.name: level for level in LEVELS}[name]
