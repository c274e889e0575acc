"""Passes as machine code at rest: found again without the compiler, and never trusted blindly."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import kernels_once
import numpy as np
import pytest

from mstore.errors import Unavailable
from mstore.numeric import code_cache, images, levels
from mstore.numeric.code_cache import Pass

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


STEPS = """
from mstore.numeric.compiling import compiled

@compiled
def step(x):
    return x + NUMBER
"""
WITH_STEPS = """
import numpy as np
import passes_steps
from numba import carray
from mstore.numeric.compiling import entry

@entry("ip", passes_steps)
def add(n, address):
    values = carray(address, (n,), np.int64)
    for i in range(n):
        values[i] = passes_steps.step(values[i])
"""
ROOT = Path(__file__).resolve().parent.parent
# Together they use every pass, on edge cases, any bit patterns and odd lengths.
COMPARING = (
    *("tests/test_kernels.py", "tests/test_masks.py", "tests/test_stats_deltas.py"),
    *("tests/test_stats_many.py", "tests/test_halves.py"),
    "tests/test_adapters.py::test_numbers_that_are_not_finite",
    "tests/test_adapters.py::test_dora_gives_rows_their_norms",
    "tests/test_arcee_fusion.py::test_divergences_are_exact",
    "tests/test_attribution.py::test_elements_that_are_not_finite_are_counted_apart[ties]",
    "tests/test_attribution.py::test_shares_are_those_of_the_definition[alike-ties]",
    "tests/test_codecs.py::test_every_codec_holds_every_block",
    "tests/test_codecs.py::test_every_codec_holds_every_width",
    "tests/test_codecs.py::test_the_classes_of_a_base_are_counted_again_unless_it_is_the_last",
    "tests/test_codecs.py::test_planes_are_what_the_page_says",
    "tests/test_codecs.py::test_code_by_class_is_what_the_page_says",
    "tests/test_codecs.py::test_a_sample_tells_what_a_block_will_take",
    "tests/test_fisher.py::test_a_merge_equals_the_reference",
    "tests/test_product_rows.py::test_no_row_is_less_than_what_is_measured",
    "tests/test_row_wise.py::test_each_row_has_its_own_angles[BF16-nuslerp]",
)


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
    code_cache._digest.cache_clear()
    for damaged in (b"", good[:40], good[:-1], good[:200] + b"\xff" + good[201:], b"x" + good[1:]):
        path.write_bytes(damaged)
        assert _pass(modules, "passes_changed")._stored() is None
    path.write_bytes(good)
    assert _pass(modules, "passes_changed")._stored() is not None
    changed = _pass(modules, "passes_changed", factor=5)
    code_cache._digest.cache_clear()
    assert changed._stored() is None


def test_code_that_others_could_have_made_is_not_run(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask, others may not write a file of code; one that they may is not run."""
    before = os.umask(0)
    try:
        _run(_pass(modules, "passes_shared"))
    finally:
        os.umask(before)
    path = code_cache.code_path(modules / "passes_shared.py", "add")
    assert path.stat().st_mode & 0o777 == 0o644
    assert _pass(modules, "passes_shared")._stored() is not None
    for mode in (0o664, 0o646):
        path.chmod(mode)
        assert _pass(modules, "passes_shared")._stored() is None
    path.chmod(0o600)
    assert _pass(modules, "passes_shared")._stored() is not None
    own, fstat = os.geteuid(), os.fstat

    def strangers(fd: int) -> os.stat_result:
        return os.stat_result((*fstat(fd)[:4], own + 1, *fstat(fd)[5:]))

    monkeypatch.setattr(os, "fstat", strangers)
    assert _pass(modules, "passes_shared")._stored() is None


def test_without_executable_memory(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no program may make code executable, the error is Unavailable and says so."""

    def refused(image: images.Image) -> None:
        raise PermissionError(errno.EACCES, "memory cannot be made executable")

    made = _pass(modules, "passes_refused")
    monkeypatch.setattr(images, "mapped", refused)
    monkeypatch.setattr(Pass, "_stored", lambda self: images.Image(b"", 0, (), (), ""))
    with pytest.raises(Unavailable, match="memory cannot be made executable") as raised:
        _run(made)
    assert "execmem" in str(raised.value.texts[2])


def test_a_changed_step_is_compiled_anew(modules: Path) -> None:
    """A module whose code is in a pass is one of its sources."""
    (modules / "passes_steps.py").write_text(STEPS.replace("NUMBER", "10"))
    (modules / "passes_with_steps.py").write_text(WITH_STEPS)
    sources = (modules / "passes_steps.py", modules / "passes_with_steps.py")
    made = Pass("passes_with_steps", "add", "ip", sources)
    assert _run(made) == [20, 20, 20, 20]
    assert made._stored() is not None
    (modules / "passes_steps.py").write_text(STEPS.replace("NUMBER", "300"))
    code_cache._digest.cache_clear()
    changed = Pass("passes_with_steps", "add", "ip", sources)
    assert changed._stored() is None
    assert _run(changed) == [310, 310, 310, 310]


def test_code_where_nothing_can_be_kept(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file cannot be written, the pass runs all the same."""
    (modules / "__pycache__").touch()
    assert _run(_pass(modules, "passes_unkept")) == [10, 13, 16, 19]
    assert _pass(modules, "passes_unkept")._stored() is None


def test_without_the_compiler(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is neither code nor numba, the error says what to install."""
    (modules / "numba.py").write_text("raise ModuleNotFoundError(\"No module named 'numba'\")\n")
    with pytest.raises(Unavailable, match="No module named 'numba'") as raised:
        _run(_pass(modules, "passes_without"))
    assert "mstore[compile]" in str(raised.value.texts[2])


def test_without_the_compiler_nobody_is_told_to_wait(
    modules: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where numba is not installed, the error comes at once, and not after a note about waiting."""
    caplog.set_level("INFO", logger=code_cache.LOGGER)
    monkeypatch.setattr(code_cache, "_told", Event())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="No module named 'numba'"):
        _run(_pass(modules, "passes_nowhere"))
    assert caplog.records == []


def test_a_pass_that_cannot_be_compiled(modules: Path) -> None:
    """What the compiler says of a pass that it refuses is in the error."""
    (modules / "passes_wrong.py").write_text(MODULE.replace("FACTOR * i", "nowhere(i)"))
    with pytest.raises(Unavailable, match="cannot be compiled"):
        _run(Pass("passes_wrong", "add", "ip", (modules / "passes_wrong.py",)))


# -- compiled ahead ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> None:
    """What scripts/setup makes: nothing is compiled where all is there."""
    program = [sys.executable, str(ROOT / "scripts" / "kernels.py")]
    subprocess.run(program, check=True, capture_output=True)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("level", [level.name for level in levels.runnable()])
def test_code_needs_no_compiler(level: str) -> None:
    """At each level, every pass of the library loads in a process without numba or llvmlite."""
    script = (
        "import sys\n"
        "sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
        "from mstore.numeric import code_cache, levels\n"
        f"code_cache.runnable = lambda: (levels.named({level!r}),)\n"
        "import kernels_once\n"
        "for one in kernels_once.passes().values():\n"
        "    assert code_cache.shipped(one.module, one.name, *code_cache.runnable()).exists()\n"
        "    one.load()\n"
        "print(len(kernels_once.passes()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert (found.stdout, found.stderr) == (f"{len(kernels_once.passes())}\n", "")


# The best level is what all other tests run.
@pytest.mark.rest
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("level", [level.name for level in levels.runnable()[1:]])
def test_bits_depend_on_no_level(level: str, tmp_path: Path) -> None:
    """Tests that compare with a reference, bit for bit, pass at each level, and use every pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "LEVEL": level,
        "RAN": str(tmp_path / "ran"),
    }
    done = subprocess.run(
        [*command, "-p", "one_level", "--basetemp", str(tmp_path / "inner"), *COMPARING],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    every = {f"{one.module}.{one.name}" for one in kernels_once.passes().values()}
    assert set((tmp_path / "ran").read_text().split()) == every


def test_the_best_level_counts() -> None:
    """A processor gets the best level of its architecture that it has all instructions of."""
    best = {level.name: level.needs for level in levels.LEVELS}
    for name, flags in best.items():
        if name == "aarch64":
            continue
        assert levels.run_by("x86_64", flags | {"more"})[0].name == name
    lacking = best["x86-64-v4"] - {"avx512vl"}
    assert levels.run_by("x86_64", lacking)[0].name == "x86-64-v3"
    assert [level.name for level in levels.run_by("aarch64", frozenset())] == ["aarch64"]
    assert levels.run_by("riscv64", frozenset()) == ()


def test_the_build_makes_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code of the same sources and compiler stays; that of others, and damaged code, is remade."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import kernels as build

    level = levels.runnable()[0]
    one = next(one for one in kernels_once.passes().values() if one.name == "upper")
    monkeypatch.setattr(build, "shipped", lambda *_: tmp_path / "code")
    monkeypatch.setattr(build, "passes", lambda: iter([one]))
    [job] = build.work([level], "by hand")
    assert build.make(job) == 1
    found = images.decoded((tmp_path / "code").read_bytes(), one.stamp())
    assert found is not None
    assert build.work([level], found.made_by) == []
    assert len(build.work([level], "another compiler")) == 1
    (tmp_path / "code").write_bytes(b"damaged")
    assert len(build.work([level], found.made_by)) == 1


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
