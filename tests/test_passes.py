"""Compiled passes: found beside the library, checked, and run wherever extension modules run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kernels as build
import pytest
from method_rows import ROWS
from proof_models import model_files, write_files

from mstore import Store
from mstore.numeric import halves, levels, passes
from mstore.numeric.passes import KERNELS, Pass, sealed, trailer
from mstore.terms.errors import Unavailable

ROOT = Path(__file__).resolve().parent.parent
MERGE = ("merge", "--base", "base", "--expert", "tuned", "--method", "ties")
BEST = levels.runnable()[0]
NOT_INSTALLED = "import sys; sys.modules |= dict.fromkeys(('numba', 'llvmlite', 'ziglang'))\n"
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
STRICT = f"""import ctypes, sys
if ctypes.CDLL(None).prctl({PR_SET_MDWE}, {REFUSE_EXEC_GAIN}, 0, 0, 0):
    sys.exit(77)
"""
# Together they use every pass, on edge cases, any bit patterns and odd lengths.
COMPARING = (
    *("tests/test_kernels.py", "tests/test_masks.py", "tests/test_stats_deltas.py"),
    *("tests/test_stats_many.py", "tests/test_halves.py", "tests/test_matmul.py"),
    "tests/test_adapters.py::test_numbers_that_are_not_finite",
    "tests/test_adapters.py::test_dora_gives_rows_their_norms",
    "tests/test_adapters.py::test_a_sum_of_products_is_that_of_rows_in_memory",
    *(
        f"tests/test_every_method.py::test_a_merge_is_its_definition[{row}-BF16]"
        for row in ROWS
        if row.rows
        or row.method in ("arcee_fusion", "fisher", "pcb", "regmean", "sce", "tensor_sum")
    ),
    "tests/test_attribution.py::test_elements_that_are_not_finite_are_counted_apart[ties]",
    "tests/test_attribution.py::test_shares_are_those_of_the_definition[alike-ties]",
    "tests/test_rans.py::test_every_block_comes_back",
    "tests/test_rans.py::test_payloads_are_the_same_everywhere",
    "tests/test_method_parts.py",
    "tests/test_product_rows.py::test_no_row_is_less_than_what_is_measured",
    "tests/test_reach.py::test_find",
    "tests/test_lmdb_columns.py::test_ids_that_are_no_hashes_are_found",
    "tests/test_lmdb_columns.py::test_pages_have_the_rows_that_a_cursor_reads",
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of the installed kernels, with the file of `upper` alone."""
    place = tmp_path / "mstore" / "numeric" / "kernels"
    monkeypatch.setattr(passes, "KERNELS", place)
    file = place / BEST.name / "numeric.halves_passes.upper.pass"
    file.parent.mkdir(parents=True)
    shutil.copyfile(KERNELS / BEST.name / file.name, file)
    return file


def _upper() -> Pass:
    """The pass of the library, not loaded yet."""
    return Pass(halves._MODULE, "upper", "pip", halves._SOURCES)


LINES = """
import json, sys
from mstore_cli.__main__ import main
for line in json.loads(sys.argv[1]):
    sys.argv = ["mstore", *line]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            print("at", line, file=sys.stderr)
            sys.exit(ended.code)
"""


def _run(program: str, *lines: tuple[str | Path, ...]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, then these lines of the command line, if any, there,
    until one fails."""
    words = [json.dumps([[str(word) for word in line] for line in lines])] if lines else []
    return subprocess.run(
        [sys.executable, "-c", program + (LINES if lines else ""), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a fine-tune, whose blocks have to be coded."""
    base, tuned = (
        write_files(tmp_path / name, model_files(7, number)) for number, name in enumerate("bt")
    )
    return base, tuned


# -- what is loaded ---------------------------------------------------------------------------


def test_code_of_the_same_sources_is_loaded(installed: Path) -> None:
    """A file that is whole and made from the sources as they are is used."""
    assert _upper()._found() == installed
    assert _upper().load()


@pytest.mark.parametrize("mode", [0o664, 0o666, 0o777, 0o400])
def test_mode_and_owner_of_a_file_do_not_matter(mode: int, installed: Path) -> None:
    """Code is as trusted as the Python files beside it, whoever may write either."""
    installed.chmod(mode)
    if os.geteuid() == 0:
        os.chown(installed, 54321, 54321)
    assert _upper().load()


def test_code_of_other_sources_is_refused(installed: Path, tmp_path: Path) -> None:
    """After any of its sources changed, code is not used, and the error says what to do."""
    own = _upper().sources[0]
    sources = (tmp_path / "step.py", tmp_path / "own.py")
    for source in sources:
        shutil.copyfile(own, source)
    stamps = set()
    for changed in (None, *sources):
        if changed is not None:
            changed.write_text(changed.read_text() + "# changed\n")
        passes._digest.cache_clear()
        one = Pass(halves._MODULE, "upper", "pip", sources)
        stamps.add(one.stamp())
        with pytest.raises(Unavailable, match="upper was compiled from other sources"):
            one.load()
    assert len(stamps) == 3
    assert _upper().stamp() not in stamps


def test_every_damaged_byte_is_found(installed: Path) -> None:
    """A file with any byte changed, cut off or added says nothing of its code."""
    good = installed.read_bytes()
    assert trailer(good) is not None
    for at in range(len(good)):
        assert trailer(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :]) is None
    for length in range(0, len(good), 13):
        assert trailer(good[:length]) is None
    assert trailer(good + b"\0") is None


def test_damaged_code_is_refused(installed: Path) -> None:
    """A damaged file is not loaded, and the error says that it is damaged."""
    good = installed.read_bytes()
    installed.write_bytes(good[:1000] + b"\xff\xff" + good[1002:])
    with pytest.raises(Unavailable, match="upper is damaged"):
        _upper().load()


def test_a_file_that_cannot_be_read_is_named(installed: Path) -> None:
    """What the system says of the file is in the error."""
    installed.unlink()
    installed.mkdir()
    with pytest.raises(Unavailable, match="upper cannot be read: Is a directory"):
        _upper().load()


@pytest.mark.parametrize("is_checkout", [True, False])
def test_missing_code_says_what_to_do(is_checkout: bool, installed: Path, tmp_path: Path) -> None:
    """Without code, the error names the program that makes it, or the installation."""
    installed.unlink()
    if is_checkout:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "kernels.py").touch()
    with pytest.raises(Unavailable, match="upper was not compiled for this processor") as raised:
        _upper().load()
    wanted = "scripts/kernels.py" if is_checkout else "install mstore again"
    assert wanted in (raised.value.hint or "")


def test_the_best_level_that_fits_counts(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where code of the best level is damaged or missing, that of another level runs."""
    other = BEST._replace(name="other")
    monkeypatch.setattr(passes, "runnable", lambda: (BEST, other))
    place = _upper().path(other)
    place.parent.mkdir()
    shutil.copyfile(installed, place)
    assert _upper()._found() == installed
    installed.write_bytes(b"damaged")
    assert _upper()._found() == place
    installed.unlink()
    assert _upper()._found() == place


def test_processors_without_levels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of another architecture is told which ones kernels run on."""
    monkeypatch.setattr(passes, "runnable", lambda: ())
    with pytest.raises(Unavailable, match="kernels run on x86-64 and aarch64, not on"):
        _upper().load()


def test_the_best_level_is_that_of_the_processor() -> None:
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


# -- where code runs --------------------------------------------------------------------------


def test_code_needs_no_compiler() -> None:
    """Every pass of the library loads in a process without numba, llvmlite and ziglang."""
    script = (
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import kernels\n"
        "for one in kernels.passes():\n"
        "    one.load()\n"
        "    print(one.name)\n"
    )
    found = _run(NOT_INSTALLED + script)
    assert found.stderr == ""
    assert len(found.stdout.split()) >= 29


@pytest.mark.rest
def test_no_written_memory_has_to_become_executable(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """add, merge, checkout and fsck work where the system refuses to make memory executable."""
    base, tuned = models
    store = ("--store", tmp_path / "store")
    lines: list[tuple[str | Path, ...]] = [
        ("init",),
        ("add", base, "--name", "base"),
        ("add", tuned, "--name", "tuned", "--base", "base"),
        (*MERGE, "--skip", "i", "--name", "merged"),
        ("checkout", "merged", tmp_path / "merged"),
        ("checkout", "tuned", tmp_path / "out"),
        ("fsck", "--read-data"),
    ]
    done = _run(STRICT, *((*store, *words) for words in lines))
    if done.returncode == 77:
        pytest.skip("this kernel lets every process make memory executable")
    assert done.returncode == 0, done.stderr
    for path in tuned.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.rest
def test_where_no_code_can_be_loaded(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A loader that refuses is one sentence at the first use; what needs no kernel works."""
    for name, codec in (("raw", "raw"), ("coded", "dense")):
        with Store.init(tmp_path / name, codec=codec) as store:
            store.add(models[0], name="base", base=None)
            store.add(models[1], name="tuned", base="base")
    refused = tmp_path / "kernels" / BEST.name
    refused.mkdir(parents=True)
    for path in (KERNELS / BEST.name).glob("*.pass"):
        made = trailer(path.read_bytes())
        assert made is not None
        (refused / path.name).write_bytes(sealed(b"no library", made))
    program = (
        f"from mstore.numeric import passes\npasses.KERNELS = passes.Path('{refused.parent}')\n"
    )
    lines: list[tuple[str | Path, ...]] = [
        ("coded", "refs"),
        ("coded", "log", "base"),
        ("coded", "show", "tuned"),
        ("raw", "backup", tmp_path / "backup"),
        ("raw", "fsck", "--read-data"),
        ("raw", "checkout", "tuned", tmp_path / "out"),
    ]
    given = [("--store", tmp_path / store, *words) for store, *words in lines]
    done = _run(program, *given)
    assert done.returncode == 0, (done.stdout, done.stderr)
    for path in models[1].iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    done = _run(program, ("--store", tmp_path / "coded", "checkout", "tuned", tmp_path / "tuned"))
    assert done.returncode == 1
    [told] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "compiled kernels cannot run here: " in told


@pytest.mark.rest
def test_a_group_may_write_the_installation(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Installed under umask 002, mstore adds and checks out."""
    for package in ("mstore", "cli/mstore_cli"):
        place = tmp_path / "site" / Path(package).name
        shutil.copytree(ROOT / package, place, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "site").rglob("*"):
        path.chmod(0o775 if path.is_dir() else 0o664)
    first = f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    store = ("--store", tmp_path / "store")
    lines: list[tuple[str | Path, ...]] = [
        ("init",),
        ("add", models[0], "--name", "base"),
        ("add", models[1], "--name", "tuned", "--base", "base"),
        ("checkout", "tuned", tmp_path / "out"),
    ]
    done = _run(NOT_INSTALLED + first, *((*store, *words) for words in lines))
    assert done.returncode == 0, done.stderr


# -- levels -----------------------------------------------------------------------------------


# The best level is what all other tests run.
@pytest.mark.rest
@pytest.mark.parametrize("level", [level.name for level in levels.runnable()[1:]])
def test_bits_depend_on_no_level(level: str, tmp_path: Path) -> None:
    """Tests that compare with a reference, bit for bit, pass at each level, and use every pass."""
    program = [sys.executable, str(ROOT / "scripts" / "kernels.py"), level]
    subprocess.run(program, check=True, capture_output=True)
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
    ran = set((tmp_path / "ran").read_text().split())
    assert ran == {f"{one.module}.{one.name}" for one in build.passes()}
