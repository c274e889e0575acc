"""Compiled code on disk: found again by the next process, never stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEP = """
from mstore.numeric.compiling import compiled

@compiled
def step(x):
    return x + {number}
"""
KERNEL = """
import numpy as np
import steps
from numba import carray
from mstore.numeric.compiling import entry

@entry("ip", steps)
def kernel(x, out_at):
    carray(out_at, (1,), np.uint8)[0] = steps.step(x)
"""
PROGRAM = """
import ctypes
from pathlib import Path
import kernels
from mstore.numeric import compiling

compilations = 0
honest = compiling._StampedCache.save_overload

def save(self, signature, data):
    global compilations
    compilations += 1
    honest(self, signature, data)

compiling._StampedCache.save_overload = save
address, kept = kernels.kernel.compiled(Path("elsewhere"), b"")
run = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p)
out = ctypes.c_uint8()
run(address)(ctypes.byref(ctypes.c_void_p()), ctypes.byref(ctypes.c_void_p()), 1, ctypes.byref(out))
print(out.value, "compiled" if compilations else "loaded")
"""


def _run(folder: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_changed_step_is_compiled_anew(tmp_path: Path) -> None:
    """A process loads what another compiled, unless a module whose code is in it has changed."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "steps.py").write_text(STEP.format(number=10))
    assert _run(tmp_path, **cache) == ["11", "compiled"]
    assert _run(tmp_path, **cache) == ["11", "loaded"]
    (tmp_path / "steps.py").write_text(STEP.format(number=20))
    assert _run(tmp_path, **cache) == ["21", "compiled"]


def test_a_damaged_cache_is_compiled_over(tmp_path: Path) -> None:
    """Files that a power cut left empty or garbled cost a compilation, not the merge."""
    cache = tmp_path / "cache"
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "steps.py").write_text(STEP.format(number=10))
    _run(tmp_path, NUMBA_CACHE_DIR=str(cache))
    for suffix, damage in ((".nbi", b""), (".nbc", b""), (".nbc", b"garbled")):
        damaged = list(cache.rglob(f"*{suffix}"))
        assert damaged
        for path in damaged:
            path.write_bytes(damage)
        assert _run(tmp_path, NUMBA_CACHE_DIR=str(cache)) == ["11", "compiled"]
        assert _run(tmp_path, NUMBA_CACHE_DIR=str(cache)) == ["11", "loaded"]
