"""scripts/kernels.py: compiles what is missing, tells how far it is, and fails where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernels as build
import msgspec
import pytest
from blake3 import blake3

from mstore.blocks import rans
from mstore.numeric import halves, levels, passes
from mstore.numeric.passes import Pass, Trailer, sealed, trailer

ROOT = Path(__file__).resolve().parent.parent
BEST = levels.runnable()[0]
# The build with passes of its own, into a directory of its own.
PROGRAM = """
import sys
sys.path[:0] = [{scripts!r}, {here!r}]
from pathlib import Path
import kernels
from mstore.numeric import halves, passes
kernels.KERNELS = passes.KERNELS = Path({here!r}) / "kernels"
kernels.passes = lambda: iter([{given}])
kernels.main({levels!r})
"""
UPPER = "halves._upper"
OWN = "passes.Pass('passes_own', 'add', 'ip', (Path({!r}) / 'passes_own.py',))"
MODULE = """
import numpy as np
from numba import carray
from mstore.numeric.compiling import entry

@entry("ip")
def add(n, address):
    values = carray(address, (n,), np.int64)
    for i in range(n):
        values[i] += FACTOR * i
"""


def _build(here: Path, given: str, *names: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(
        scripts=str(ROOT / "scripts"), here=str(here), given=given, levels=list(names)
    )
    return subprocess.run(
        [sys.executable, "-B", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_every_pass_is_found() -> None:
    """The build knows each pass of the library once, and the file of each is another."""
    found = list(build.passes())
    assert len({one.path(BEST) for one in found}) == len(found) >= 29
    assert all(path.is_file() for one in found for path in one.sources)


@pytest.mark.rest
def test_what_is_missing_is_compiled(tmp_path: Path) -> None:
    """A level's code is made, with progress on standard error; what belongs to no pass is removed;
    the second time nothing is left to do."""
    stray = tmp_path / "kernels" / BEST.name / "stray.pass"
    stray.parent.mkdir(parents=True)
    stray.touch()
    done = _build(tmp_path, UPPER)
    assert done.returncode == 0, done.stderr
    assert "kernels: compiling 1 passes" in done.stderr
    assert "kernels: 1 of 1, after " in done.stderr
    [file] = stray.parent.iterdir()
    found = trailer(file.read_bytes())
    assert found is not None
    assert found.stamp == halves._upper.stamp()
    assert _build(tmp_path, UPPER).stderr == ""


@pytest.mark.rest
def test_a_pass_that_cannot_be_compiled(tmp_path: Path) -> None:
    """What the compiler says of a pass that it refuses is told, and the build fails."""
    for code, why in (
        (MODULE.replace("FACTOR * i", "nowhere(i)"), "nowhere"),
        # A list takes memory of Python's, which code outside it cannot have.
        (MODULE.replace("FACTOR * i", "len([i for i in range(n)])"), "undefined symbol: NRT_"),
    ):
        (tmp_path / "passes_own.py").write_text(code)
        done = _build(tmp_path, OWN.format(str(tmp_path)))
        assert done.returncode != 0
        assert why in done.stderr
        assert not list((tmp_path / "kernels").rglob("*.pass"))


@pytest.mark.rest
def test_without_the_compiler_the_build_fails(tmp_path: Path) -> None:
    """Where numba or the linker is not installed, the build names it and fails."""
    for name in ("numba", "ziglang"):
        missing = tmp_path / f"{name}.py"
        missing.write_text(f"raise ModuleNotFoundError('No module named {name}')\n")
        done = _build(tmp_path, UPPER)
        assert done.returncode != 0
        assert f"No module named {name}" in done.stderr.splitlines()[-1]
        missing.unlink()


def test_only_what_changed_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole code of the same sources, made in the same way, stays; any other is made again."""
    one = halves._upper
    made = Trailer(one.stamp(), blake3(build.MAKER.read_bytes()).digest())
    good = sealed(b"code", made)
    monkeypatch.setattr(passes, "KERNELS", tmp_path)
    path = one.path(BEST)
    path.parent.mkdir()

    def left() -> int:
        return len(build.jobs([one], [BEST]))

    assert left() == 1
    path.write_bytes(good)
    assert left() == 0
    for other in (
        b"",
        good[:-1],
        sealed(b"code", msgspec.structs.replace(made, stamp=bytes(32))),
        sealed(b"code", msgspec.structs.replace(made, maker=bytes(32))),
    ):
        path.write_bytes(other)
        assert left() == 1


def test_numba_works_once_for_all_levels() -> None:
    """One job has all levels of a module's passes in numba, or of one pass in C."""
    every = list(levels.LEVELS)
    in_numba = [Pass("mstore.nowhere", name, "i", (halves._SOURCES[0],)) for name in "ab"]
    in_c = [Pass("mstore.nowhere.c", name, "i", rans._SOURCES) for name in "ab"]
    found = build.jobs([*in_numba, *in_c], every)
    assert [[one.name for one in job] for job in found] == [["a", "b"], ["a"], ["b"]]
    for job in found:
        assert all([level for level, _, _ in one.files] == every for one in job)
        assert {one.source for one in job} <= {None, in_c[0].sources[0]}
