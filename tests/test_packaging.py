"""What the wheel and the source archive hold."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernels as build
import pytest
from proof_models import model_files, write_files

from mstore.numeric.levels import LEVELS, Level, runnable
from mstore.numeric.passes import KERNELS
from mstore.terms import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mstore", "mstore_fuse", "mstore_pages", "mstore_serve", "mstore_cli"}


def built(out: Path, **environment: str) -> Path:
    """A wheel built from this tree, without an index."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return path


def names(wheel: Path) -> list[str]:
    """The names inside a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names inside a wheel for which no kernels were compiled: that takes minutes."""
    return names(built(tmp_path_factory.mktemp("wheel"), HATCH_BUILD_NO_HOOKS="true"))


@pytest.mark.rest
def test_top_level_is_the_five_packages(wheel: list[str]) -> None:
    """The wheel's top level is mstore and its mount, pages, server and command line."""
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1


def test_every_source_file_is_in(wheel: list[str]) -> None:
    """The wheel holds every Python file of the five packages, and no compiled one."""
    below = ("fuse/mstore_fuse", "pages/mstore_pages", "serve/mstore_serve", "cli/mstore_cli")
    roots = [ROOT / "mstore", *(ROOT / path for path in below)]
    sources = {str(f.relative_to(root.parent)) for root in roots for f in root.rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} == sources
    assert not [name for name in wheel if "__pycache__" in name or name.endswith((".pyc", ".nbi"))]


def kernels_in(wheel: Path) -> set[str]:
    """The names below the directory of kernels."""
    inside = "mstore/numeric/kernels/"
    return {name.removeprefix(inside) for name in names(wheel) if name.startswith(inside)}


def files(*levels: Level) -> set[str]:
    """The names of all kernels at these levels."""
    return {str(one.path(level).relative_to(KERNELS)) for one in build.passes() for level in levels}


@pytest.mark.rest
def test_a_wheel_of_this_machine(tmp_path: Path) -> None:
    """A wheel holds each pass at the best level of this machine and at the one that every machine
    has, and no lock. It is tagged for the architecture, and works where pip installs it under
    umask 002."""
    wheel = built(tmp_path)
    own = runnable()
    assert kernels_in(wheel) == files(own[0], own[-1])
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    site = tmp_path / "site"
    install = ["pip", "install", "--no-deps", "--no-index", "--target", site, wheel]
    before = os.umask(0o002)
    try:
        subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    finally:
        os.umask(before)
    kernels = site / "mstore" / "numeric" / "kernels"
    assert {path.stat().st_mode & 0o777 for path in kernels.rglob("*.pass")} == {0o664}
    model = write_files(tmp_path / "model", model_files(7, 0))
    main = "import sys; sys.modules['numba'] = None; from mstore_cli.__main__ import main; main()"
    for words in (("init",), ("add", model, "--name", "m"), ("checkout", "m", tmp_path / "out")):
        subprocess.run(
            [sys.executable, "-c", main, "--store", tmp_path / "store", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )


@pytest.mark.rest
def test_a_wheel_of_a_release(tmp_path: Path) -> None:
    """With MSTORE_BUILD_ALL_LEVELS=1, a wheel built on x86-64 has all levels, for any platform."""
    if os.uname().machine != "x86_64":
        pytest.skip("a wheel for all processors is built on x86-64")
    wheel = built(tmp_path, MSTORE_BUILD_ALL_LEVELS="1")
    assert kernels_in(wheel) == files(*LEVELS)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_types_and_licence_travel(wheel: list[str]) -> None:
    """The library says that it is typed; version and licence are in the metadata."""
    assert "mstore/py.typed" in wheel
    assert f"mstore-{__version__}.dist-info/licenses/LICENSE" in wheel


def test_command_is_declared(wheel: list[str]) -> None:
    """Installing the wheel gives the command `mstore`."""
    assert [name for name in wheel if name.endswith(".dist-info/entry_points.txt")]
    assert "mstore_cli/main.py" in wheel


@pytest.mark.parametrize(
    ("version", "every", "levels"),
    [
        ("editable", "", runnable()[:1]),
        ("standard", "", (runnable()[0], runnable()[-1])),
        ("standard", "1", LEVELS),
    ],
)
def test_the_levels_of_a_build(
    version: str,
    every: str,
    levels: tuple[Level, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """An editable install has one level, a wheel two, a release all; if the kernels cannot be
    compiled, there is none of them."""
    if every and os.uname().machine != "x86_64":
        pytest.skip("a wheel for all processors is built on x86-64")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("MSTORE_BUILD_ALL_LEVELS", every)
    import hatch_build

    nothing: Any = (None, None)
    app: Any = None
    hook = hatch_build.KernelsHook(str(ROOT), {}, *nothing, str(tmp_path), "wheel", app)
    asked: list[set[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(set(command[2:]))
        return SimpleNamespace(returncode=len(asked) - 1)

    monkeypatch.setattr("hatch_build.subprocess.run", run)
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize(version, data)
    assert asked == [{level.name for level in levels}]
    assert len(data["artifacts"]) == len(levels)
    assert ("tag" in data) != bool(every)
    with pytest.raises(SystemExit, match="kernels could not be compiled"):
        hook.initialize(version, data)


@pytest.mark.rest
def test_the_tests_travel(tmp_path: Path) -> None:
    """The source archive holds every file of the tests, the golden store's and the corpus too."""
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", tmp_path, ROOT],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    tests = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*")
        if path.is_file() and not {"__pycache__", ".hypothesis"} & set(path.parts)
    }
    assert tests - found == set()
    assert {"tests/golden/format-3/refs/mirror", "constraints.txt", "LICENSE"} <= found
    assert {"hatch_build.py", "scripts/kernels.py", "scripts/machine_code.py"} <= found
    assert not [name for name in found if name.startswith("mstore/numeric/kernels")]
