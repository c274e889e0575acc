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

import kernels_once
import pytest

from mstore.numeric.code_cache import SHIPPED, shipped
from mstore.numeric.levels import LEVELS
from mstore.version import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mstore", "mstore_fuse", "mstore_serve", "mstore_cli"}


def built(out: Path, **environment: str) -> list[str]:
    """The names inside a wheel built from this tree, without an index."""
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
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names inside a wheel for which no kernels were compiled: that takes minutes."""
    return built(tmp_path_factory.mktemp("wheel"), HATCH_BUILD_NO_HOOKS="true")


def test_top_level_is_the_four_packages(wheel: list[str]) -> None:
    """The wheel's top level is exactly mstore, its mount, its server and its command line."""
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1


def test_every_source_file_is_in(wheel: list[str]) -> None:
    """The wheel holds every Python file of the four packages, and no compiled one."""
    below = ("fuse/mstore_fuse", "serve/mstore_serve", "cli/mstore_cli")
    roots = [ROOT / "mstore", *(ROOT / path for path in below)]
    sources = {str(f.relative_to(root.parent)) for root in roots for f in root.rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} == sources
    assert not [name for name in wheel if "__pycache__" in name or name.endswith((".pyc", ".nbi"))]


@pytest.mark.rest
def test_kernels_travel(tmp_path: Path) -> None:
    """The wheel holds the code of every pass at every level that can be made here, and no lock."""
    if os.uname().machine != "x86_64":
        pytest.skip("a wheel for all processors is built on x86-64")
    inside = "mstore/numeric/"
    wanted = {
        inside + str(shipped(one.module, one.name, level).relative_to(SHIPPED.parent))
        for one in kernels_once.passes().values()
        for level in LEVELS
    }
    found = {name for name in built(tmp_path) if name.startswith(f"{inside}kernels/")}
    assert found == wanted


def test_types_and_licence_travel(wheel: list[str]) -> None:
    """The library says that it is typed; version and licence are in the metadata."""
    assert "mstore/py.typed" in wheel
    assert f"mstore-{__version__}.dist-info/licenses/LICENSE" in wheel


def test_command_is_declared(wheel: list[str]) -> None:
    """Installing the wheel gives the command `mstore`."""
    assert [name for name in wheel if name.endswith(".dist-info/entry_points.txt")]
    assert "mstore_cli/main.py" in wheel


def test_no_wheel_without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel whose kernels could not be compiled is not built unless that is asked for."""
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    told: list[str] = []
    nothing: Any = (None, None)
    app: Any = SimpleNamespace(display_warning=told.append)
    hook = hatch_build.KernelsHook(str(ROOT), {}, *nothing, str(tmp_path), "wheel", app)
    refusing = SimpleNamespace(returncode=1)
    monkeypatch.setattr("hatch_build.subprocess.run", lambda *_, **__: refusing)
    monkeypatch.delenv(hatch_build.ALLOWED, raising=False)
    with pytest.raises(SystemExit, match=hatch_build.ALLOWED):
        hook.initialize("standard", {})
    hook.initialize("editable", {})
    monkeypatch.setenv(hatch_build.ALLOWED, "1")
    hook.initialize("standard", {})
    assert len(told) == 2


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
    assert {"tests/golden/format-1/refs/mirror", "constraints.txt", "LICENSE"} <= found
    assert {"hatch_build.py", "scripts/kernels.py"} <= found
    assert not [name for name in found if name.startswith("mstore/numeric/kernels")]
