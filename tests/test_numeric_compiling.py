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
import steps
from mstore.numeric.compiling import cached

@cached(steps)
def kernel(x):
    return steps.step(x)

if __name__ == "__main__":
    print(kernel(1), sum(kernel.stats.cache_hits.values()))
"""


def _run(folder: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", "import runpy; runpy.run_module('kernels', run_name='__main__')"],
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
    assert _run(tmp_path, **cache) == ["11", "0"]
    assert _run(tmp_path, **cache) == ["11", "1"]
    (tmp_path / "steps.py").write_text(STEP.format(number=20))
    assert _run(tmp_path, **cache) == ["21", "0"]


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
        assert _run(tmp_path, NUMBA_CACHE_DIR=str(cache)) == ["11", "0"]
        assert _run(tmp_path, NUMBA_CACHE_DIR=str(cache)) == ["11", "1"]
