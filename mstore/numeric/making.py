"""Asking the compiler: passes in, files of machine code out.

The compiler runs in a child process (`maker`).  It imports numba, which takes long and hundreds of
megabytes, and makes code for other processors than this one: numba decides that once a process.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mstore.errors import Unavailable
from mstore.numeric.levels import Level

_PROGRAM: Final = Path(__file__).with_name("maker.py")


class Wanted(NamedTuple):
    """A pass to be compiled: its module, its name there, and the digest of its sources."""

    module: str
    name: str
    stamp: bytes


def files(
    wanted: Sequence[Wanted], levels: Sequence[Level]
) -> Iterator[tuple[Wanted, Level, bytes]]:
    """Yield the file of each pass at each level.

    Passes that use `expansion` come with levels that are all wide, or none of them is.
    Raises Unavailable if the compiler cannot run, or fails.
    """
    request = {
        "path": sys.path,
        "levels": [level.name for level in levels],
        "passes": [(one.module, one.name, one.stamp.hex()) for one in wanted],
    }
    # numba does not optimise: `compiling` does, for each level.
    asked = ["NUMBA_OPT=0", "NUMBA_DISABLE_JIT=0", *_processor(levels[0])]
    flags = ["-P", *(["-B"] if sys.dont_write_bytecode else []), "-W", "ignore"]
    command = ["env", *asked, sys.executable, *flags, str(_PROGRAM)]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode() + b"\n", capture_output=True, check=False
        )
    except OSError as error:
        raise _unavailable(str(error)) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unavailable(said[-1] if said else f"the compiler ended with {done.returncode}")
    at = 0
    for one in wanted:
        for level in levels:
            (size,) = struct.unpack_from("<I", done.stdout, at)
            yield one, level, done.stdout[at + 4 : at + 4 + size]
            at += 4 + size


def require_compiler() -> None:
    """Raise Unavailable if the compiler is not installed."""
    if importlib.util.find_spec("numba") is None:
        raise _unavailable("ModuleNotFoundError: No module named 'numba'")


def _processor(level: Level) -> tuple[str, str]:
    """Return what makes numba accept what `expansion` uses, or do without."""
    # An empty list would be this processor's.
    features = level.features or {"aarch64": "+neon"}.get(level.machine, "+sse2")
    return f"NUMBA_CPU_NAME={level.cpu}", f"NUMBA_CPU_FEATURES={features}"


def _unavailable(why: str) -> Unavailable:
    """Return the error; the compiler is no part of a plain installation."""
    is_missing = why.startswith("ModuleNotFoundError")
    return Unavailable(
        f"no kernels for this processor came with mstore, and they cannot be compiled: {why}",
        hint="pip install 'mstore[compile]'" if is_missing else None,
    )
