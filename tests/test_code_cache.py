"""Passes as machine code at rest: found again without the compiler, and never trusted blindly."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import kernels_once
import numpy as np
import pytest

from mstore.errors import Unavailable
from mstore.numeric import code_cache
from mstore.numeric.code_cache import Pass
from mstore.stats import deltas

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


def _pass(folder: Path, name: str, factor: int = 3) -> Pass:
    source = folder / f"{name}.py"
    source.write_text(MODULE.replace("FACTOR", str(factor)))
    return Pass(name, "add", "ip", (source,))


def _run(made: Pass) -> list[int]:
    values = np.full(4, 10, dtype=np.int64)
    made(values.size, values.ctypes.data)
    return list(values)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_code_is_found_again(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process compiled, the next runs without asking the compiler."""
    made = _pass(modules, "passes_found")
    assert _run(made) == [10, 13, 16, 19]

    def never(self: Pass) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(Pass, "_compiled", never)
    assert _run(_pass(modules, "passes_found")) == [10, 13, 16, 19]


def test_code_of_another_source_is_not_run(modules: Path) -> None:
    """After the source changed, or the file was damaged, the compiler is asked again."""
    made = _pass(modules, "passes_changed")
    _run(made)
    path = code_cache.code_path(modules / "passes_changed.py", "add")
    good = path.read_bytes()
    for damaged in (b"", good[:40], good[:-1], good[:200] + b"\xff" + good[201:], b"x" + good[1:]):
        path.write_bytes(damaged)
        assert _pass(modules, "passes_changed")._stored() is None
    path.write_bytes(good)
    assert _pass(modules, "passes_changed")._stored() is not None
    assert _pass(modules, "passes_changed", factor=5)._stored() is None


def test_statistics_need_no_compiler() -> None:
    """Once its code lies beside the source, a process that measures does not import numba."""
    bytes_ = np.zeros(2048, dtype=np.uint8)
    hist = np.zeros((0x8000, 2), dtype=np.int64)
    deltas.measure(bytes_, "BF16", bytes_, "BF16", 1024, 0, hist)
    if not code_cache.code_path(Path(deltas.__file__).with_name("passes.py"), "measure").exists():
        pytest.skip("nothing can be written beside the source here")
    script = (
        "import sys, numpy as np\n"
        "from mstore.stats import deltas\n"
        "b = np.zeros(2048, dtype=np.uint8); h = np.zeros((0x8000, 2), dtype=np.int64)\n"
        "deltas.measure(b, 'BF16', b, 'BF16', 1024, 0, h)\n"
        "print('numba' in sys.modules)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_code_in_a_directory_of_the_users(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `use_cache`, code is kept there and nowhere else; the next process finds it."""
    monkeypatch.setattr(code_cache, "_caches", [])
    cache = modules / "cache"
    cache.mkdir(mode=0o700)
    code_cache.use_cache(cache)
    made = _pass(modules, "passes_mine")
    assert _run(made) == [10, 13, 16, 19]
    assert code_cache.code_path(modules / "passes_mine.py", "add").parent == cache
    assert len(list(cache.iterdir())) == 1
    assert not (modules / "__pycache__").exists()
    assert _pass(modules, "passes_mine")._stored() is not None


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_of_everybodys(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in which others may write keeps no code: it would run as whoever calls."""
    monkeypatch.setattr(code_cache, "_caches", [])
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(Unavailable, match="others may write"):
        code_cache.use_cache(tmp_path / "cache")
    assert code_cache.cache_directory() is None
    with pytest.raises(Unavailable):
        code_cache.use_cache(tmp_path / "nowhere")


def test_what_is_no_directory_keeps_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the place of the directory is refused: every process would compile again."""
    monkeypatch.setattr(code_cache, "_caches", [])
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="not a directory"):
        code_cache.use_cache(tmp_path / "file")
    assert code_cache.cache_directory() is None


def test_compiling_is_told_once(
    modules: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that compiles says so once, in the log; one that finds its code says nothing."""
    monkeypatch.setattr(code_cache, "_told", Event())
    caplog.set_level("INFO", logger=code_cache.LOGGER)
    _run(_pass(modules, "passes_told"))
    _run(_pass(modules, "passes_told_too"))
    assert [record.getMessage() for record in caplog.records] == [code_cache.COMPILING]
    caplog.clear()
    monkeypatch.setattr(code_cache, "_told", Event())
    _run(_pass(modules, "passes_told"))
    assert caplog.records == []


# -- compiled once by the workers of the tests ------------------------------------------------


def test_workers_know_every_pass() -> None:
    """What the workers compile together is every pass that a module of the library makes."""
    library = Path(code_cache.__file__).parent.parent
    making = {path.stem for path in library.rglob("*.py") if " Pass(" in path.read_text()}
    assert making == {module.__name__.rpartition(".")[2] for module in kernels_once.MODULES}
    assert len(kernels_once.passes()) >= 14


def test_workers_share_passes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another worker compiles is left to it, and waited for when all else is done."""
    loaded: list[str] = []
    done = Event()

    def one(name: str) -> SimpleNamespace:
        def load() -> None:
            loaded.append(name)
            if name == "last":
                done.set()

        return SimpleNamespace(load=load)

    named = {name: one(name) for name in ("taken", "free", "last")}
    monkeypatch.setattr(kernels_once, "passes", lambda: named)
    with (tmp_path / "taken.lock").open("w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        worker = Thread(target=kernels_once.compile_all, args=(tmp_path,))
        worker.start()
        assert done.wait(600)
        assert loaded == ["free", "last"]
    worker.join()
    assert loaded == ["free", "last", "taken"]
