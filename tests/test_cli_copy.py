"""`mstore copy`, `bundle create`, and tokens: what people type and read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_runs import Program, run_once
from http_server import served
from small_models import files_of, small_model

from mstore_cli import tree, user_config
from mstore_cli.errors import UsageError

TOKEN = "0123456789-abcdefgh"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a base and a model on it, beside their files."""
    root = tmp_path_factory.mktemp("copy")
    for name, changed in (("base", ""), ("new", "new")):
        small_model(root / name, "base", changed=changed)
    mstore = Program(root / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", root / "base", "--name", "base")
    mstore.succeed("add", root / "new", "--name", "new", "--base", "base")
    return root


@pytest.fixture
def mstore(made: Path, tmp_path: Path) -> Program:
    """The same store, free to be changed."""
    return Program(Path(shutil.copytree(made / "store", tmp_path / "store")))


@pytest.fixture
def other(tmp_path: Path) -> Program:
    """An empty store."""
    other = Program(tmp_path / "other")
    other.succeed("init", "--block-size", "64KiB")
    return other


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("MSTORE_TOKEN", raising=False)


def test_copy_says_what_it_left_out(mstore: Program, other: Program) -> None:
    """It names what moved and what of ancestors was left out; again, there is nothing to do."""
    done = mstore.succeed("copy", "new", other.store)
    assert done.lines[0] == f"copied to {other.store}"
    assert "left out   the contents of 1 ancestor" in done.lines
    assert mstore.succeed("copy", "new", other.store).out == f"{other.store} has it all\n"
    assert mstore.succeed("copy", "n*", "base", other.store, "-q").out == "base\n"
    assert other.succeed("refs", "-q").lines == ["base", "new"]


def test_copy_of_a_branch_that_has_other_commits(
    made: Path, mstore: Program, other: Program
) -> None:
    """The branch stays, the others move, the status is 1; with -q it is a warning."""
    other.succeed("add", made / "base", "--name", "new", "-m", "mine")
    done = mstore("copy", "new", "base", other.store)
    assert done.status == 1
    assert "new has other commits there, and stays" in done.lines
    assert other.succeed("refs", "-q").lines == ["base", "new"]
    quiet = mstore("copy", "new", "base", other.store, "-q")
    assert (quiet.status, quiet.out) == (1, "")
    assert "new has other commits there, and stays" in quiet.err


def test_a_bundle_becomes_a_store(made: Path, mstore: Program, tmp_path: Path) -> None:
    """What the command says to type makes a store with the model in it."""
    file = tmp_path / "x.mbundle"
    done = mstore.succeed("bundle", "create", file, "new")
    assert done.lines[0] == f"{file} has new"
    assert "left out   the contents of 1 ancestor" in done.lines
    assert done.lines[-1] == f"to make a store of it: mstore clone bundle:{file} DIR"
    clone = Program(tmp_path / "clone")
    assert run_once(["clone", f"bundle:{file}", str(clone.store)]).status == 0
    clone.succeed("checkout", "new", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(made / "new")
    again = mstore("bundle", "create", file, "new")
    assert again.status == 1
    assert "there is a file of this name" in again.err
    added = clone.succeed("remote", "add", "b", f"bundle:{file}")
    assert "mstore push" not in added.out


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("bundle", "mstore bundle create --help"),
        ("bundle --help", "mstore bundle create --help"),
        ("bundle creat x.mbundle new", "did you mean create?"),
        ("help bundle", "mstore bundle create --help"),
        ("bundl create x new", "did you mean bundle?"),
    ],
)
def test_the_first_word_alone(line: str, hint: str) -> None:
    """`bundle` is no command of its own, and the error says what is."""
    with pytest.raises(UsageError) as caught:
        tree.parse(line.split())
    assert str(caught.value.hint).startswith(hint)


def test_serve_needs_the_token_that_it_is_to_want(
    mstore: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--token without MSTORE_TOKEN, or with one that anybody guesses, is refused without it."""
    done = mstore("serve", "--token", "--port", "0")
    assert done.status == 2
    assert "MSTORE_TOKEN is not set" in done.err
    monkeypatch.setenv("MSTORE_TOKEN", "hunter2")
    done = mstore("serve", "--token", "--port", "0")
    assert done.status == 2
    assert "hunter2" not in done.err


def test_a_served_store_by_the_wrong_address(mstore: Program, tmp_path: Path) -> None:
    """Where /remote is missing in the address of a served store, the hint has it, and that works;
    nothing says that a push would help."""
    pytest.importorskip("obstore")
    with served(mstore.store) as server:
        here = f"http://127.0.0.1:{server.info.port}"
        failed = run_once(["clone", here, str(tmp_path / "clone")])
        assert failed.status == 1
        assert failed.err.endswith(f"hint: a served store is a remote at {here}/remote\n")
        assert run_once(["clone", f"{here}/remote", str(tmp_path / "clone")]).status == 0
        clone = Program(tmp_path / "clone")
        clone.succeed("remote", "add", "short", here)
        assert f"{here}/remote" in clone("fetch", "short", "--limit-rate", "1GiB").err


def test_the_token_goes_where_the_user_typed(
    made: Path, mstore: Program, other: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`clone URL` and `remote add` send the token of the environment, and list the server in the
    user's settings; what only a store names gets none, and the hint says how to trust it."""
    pytest.importorskip("obstore")
    with served(mstore.store, token=TOKEN) as server:
        here = f"http://127.0.0.1:{server.info.port}"
        clone = Program(tmp_path / "clone")
        line = ["clone", f"{here}/remote", str(clone.store)]
        assert "access is denied" in run_once(line).err
        assert user_config.read()["endpoints"] == []
        monkeypatch.setenv("MSTORE_TOKEN", TOKEN)
        assert run_once(line).status == 0
        assert user_config.read()["endpoints"] == [here]
        clone.succeed("fetch", "origin")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
        refused = clone("fetch", "origin")
        assert refused.status == 1
        assert f"hint: mstore --store {clone.store} config --user endpoints {here}" in refused.err
        assert TOKEN not in refused.err
        added = other.succeed("remote", "add", "lan", f"{here}/remote")
        assert f"your credentials may go to {here}" in added.lines
        other.succeed("pull", "lan", "new")
    other.succeed("checkout", "new", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(made / "new")
