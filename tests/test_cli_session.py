"""Which store a command works on, and where the global options may stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mstore import Store
from mstore.terms.errors import NotFound
from mstore_cli.errors import UsageError
from mstore_cli.main import run
from mstore_cli.output import Mode
from mstore_cli.session import Choices, Session


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory and a home of this test's own, and no store named from outside."""
    monkeypatch.delenv("MSTORE_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "work" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "deep")
    return tmp_path


def test_order_of_places(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--store, then MSTORE_STORE, then the nearest .mstore upward, then the user's own."""
    users = elsewhere / "data" / "mstore" / "store"
    users.mkdir(parents=True)
    assert Session(Choices()).store_path() == users
    (elsewhere / "work" / ".mstore").mkdir()
    assert Session(Choices()).store_path() == elsewhere / "work" / ".mstore"
    (elsewhere / "work" / "deep" / ".mstore").mkdir()
    assert Session(Choices()).store_path() == elsewhere / "work" / "deep" / ".mstore"
    monkeypatch.setenv("MSTORE_STORE", "/from/variable")
    assert Session(Choices()).store_path() == Path("/from/variable")
    assert Session(Choices(store=Path("given"))).store_path() == Path("given")


def test_empty_variable_names_no_store(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MSTORE_STORE set to nothing is as good as not set."""
    monkeypatch.setenv("MSTORE_STORE", "")
    (elsewhere / "work" / ".mstore").mkdir()
    assert Session(Choices()).store_path() == elsewhere / "work" / ".mstore"


def test_a_store_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where MSTORE_STORE names what is no store, the error says so: the line does not show it."""
    monkeypatch.setenv("MSTORE_STORE", "/nowhere")
    assert run(["refs"]) == 1
    err = capsys.readouterr().err
    assert "/nowhere: no store here: there is no such directory: $MSTORE_STORE names it\n" in err
    assert run(["--store", "/nowhere", "refs"]) == 1
    assert "MSTORE_STORE" not in capsys.readouterr().err


def test_the_directory_of_a_store_is_not_the_store(elsewhere: Path) -> None:
    """Where --store names the directory that a store lies in, the error names the store."""
    inside = elsewhere / "a model" / ".mstore"
    Store.init(inside).close()
    with pytest.raises(NotFound) as caught:
        Session(Choices(store=inside.parent)).store_path()
    assert caught.value.hint == f"name the store: --store '{inside}'"
    Store.open(Session(Choices(store=inside)).store_path()).close()


def test_no_store_is_never_made(elsewhere: Path) -> None:
    """Where there is no store, the error says how to make one, and nothing is created."""
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(NotFound) as caught:
        Session(Choices()).store_path()
    assert caught.value.hint == "mstore init"
    assert sorted(elsewhere.rglob("*")) == before


def test_choices_after_the_verb_win() -> None:
    """What stands after the verb wins over what stands before; switches add up."""
    outer = Choices(store=Path("a"), json=True)
    assert Choices(store=Path("b")).over(outer).store == Path("b")
    assert Choices(no_progress=True).over(outer) == Choices(
        store=Path("a"), json=True, no_progress=True
    )


def test_modes() -> None:
    """--json and -q choose the output, and exclude each other."""
    assert Session(Choices()).output.mode is Mode.HUMAN
    assert Session(Choices(quiet=True)).output.mode is Mode.QUIET
    with pytest.raises(UsageError):
        Session(Choices(json=True, quiet=True))


@pytest.mark.parametrize("line", [["--json", "mounts"], ["mounts", "--json"]])
def test_global_options_on_both_sides(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A global option means the same before and after the verb."""
    assert run(line) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["mounts"]


@pytest.mark.parametrize("line", [["--json", "mounts", "-q"], ["-q", "mounts", "--json"]])
def test_contradiction_across_the_verb(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--json and -q exclude each other wherever they stand: usage, exit 2, no result."""
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert "--json" not in line or list(json.loads(out)) == ["error"]
    assert err.startswith("error: --json and --quiet exclude each other\n")


@pytest.mark.parametrize(
    ("line", "words", "hint"),
    [
        (["frobnicate"], "no such command: 'frobnicate'", "mstore --help"),
        (["log", "--nothing"], "--nothing", "mstore log --help"),
        (["log", "-n", "0"], "'--limit' / '-n': at least 1, not 0", "mstore log --help"),
        (["log", "-n", "many"], "a whole number, not 'many'", "mstore log --help"),
        (["log", "-n", "1.5"], "a whole number, not '1.5'", "mstore log --help"),
        (["add", "", "--name", "m"], "'PATH': a path cannot be empty", "mstore add --help"),
        (["add", "a", "", "--name", "m"], "'PATH': a path cannot be empty", "mstore add --help"),
        (["checkout", "m", ""], "'DIR': a path cannot be empty", "mstore checkout --help"),
        (["mount", "m", ""], "it is empty", "mstore mount --help"),
        (
            ["mount", "m", "d", "--driver", "x"],
            "'--driver': 'x' is not one of 'fuse', 'erofs', 'auto'",
            "mount --help",
        ),
        (["merge", "--expert", "b", "--method", "ties", "--name", "m"], "--base", "mstore merge"),
        (["config", "reflog_days", "-1"], "-1", "mstore config -- reflog_days -1"),
        (["show"], "REF", "mstore show --help"),
        (["add", "x"], "--name", "mstore add x --name x"),
        (["show", "a", "b"], "b", "mstore show --help"),
        (["plan", "--method", "ties", "--base", "a"], "--expert", "mstore plan --help"),
        (["plan", "--base", "a", "--expert", "b"], "--method", "mstore methods"),
        (["merge", "--name", "m"], "--plan", "mstore merge --help"),
        (["merge", "--name", "m", "--plan", "p", "--base", "b"], "--plan", "mstore merge --help"),
        (["merge", "--name", "m", "--plan", "p", "--max-error", "0"], "--plan", "--help"),
        (["cat", "ref"], "REF:PATH", "mstore ls ref"),
        (["cat", "ref:f", "--json"], "JSON", "mstore ls ref --json"),
        (["mount", "dir"], "--all", "mstore mount --help"),
        (["mount", "--all", "ref", "dir"], "--all", "mstore mount --help"),
    ],
)
def test_wrong_usage(
    line: list[str], words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage exits with 2, names what is wrong and the help to read, and prints no result."""
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert list(json.loads(out)) == ["error"] if "--json" in line else out == ""
    error, hinted = err.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hinted.startswith("hint: ")
    assert hint in hinted


def test_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, the program shows its help on standard error and exits with 2."""
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: mstore [OPTIONS] COMMAND")
