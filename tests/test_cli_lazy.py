"""Lazy stores from the command line: what is said, and what is not here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import Done, Program, run_once
from proof_models import BLOCK, MODEL, model_files, write_files

from mstore import Store
from mstore_cli.keys import DOCUMENTS


def build(root: Path) -> None:
    """A remote with a base and an expert, a lazy store of it, and one that has all."""
    author = Program(root / "author")
    author.succeed("init", "--block-size", BLOCK)
    for number, name in enumerate(("base", "e1")):
        author.succeed("add", write_files(root / name, model_files(1, number)), "--name", name)
    author.succeed("remote", "add", "origin", (root / "remote").as_uri())
    author.succeed("push", "origin", "--all")


@pytest.fixture
def lazy(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A lazy store, made by the command line."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(copied / "config"))
    monkeypatch.setenv("MSTORE_STORE", "")
    url = (copied / "remote").as_uri()
    done = run_once(["clone", "--lazy", url, str(copied / "lazy")])
    assert done.status == 0, done.err
    return Program(copied / "lazy")


def document(done: Done) -> dict[str, object]:
    """The JSON of a command that went well."""
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return found


def test_clone_show_and_remote(lazy: Program) -> None:
    """A lazy clone brings refs and no weights; `remote` and `show` say so."""
    assert "base" in lazy.succeed("refs").out
    shown = lazy.succeed("show", "base").out
    assert "not here" in shown
    assert "at origin" in shown
    told = document(lazy("--json", "show", "base"))["leans_on"]
    assert isinstance(told, list)
    [one] = told
    assert set(one) == {"remote", "blocks", "bytes"}
    assert one["remote"] == "origin"
    assert one["bytes"] > 0
    table = lazy.succeed("remote").lines
    assert "LAZY" in table[0]
    assert table[1].split()[-1] == "yes"
    assert not list((lazy.store / "cache").rglob("*-*"))


def test_a_full_clone_says_nothing_of_it(copied: Path) -> None:
    """A store that has all of its blocks has no such lines."""
    Store.clone((copied / "remote").as_uri(), copied / "full")
    full = Program(copied / "full")
    assert "not here" not in full.succeed("show", "base").out
    assert "LAZY" not in full.succeed("remote").out
    assert document(full("--json", "show", "base"))["leans_on"] == []


def test_cat_and_checkout_read(lazy: Program, tmp_path: Path) -> None:
    """Commands that read bring what they need."""
    done = lazy.succeed("cat", f"e1:{MODEL}")
    assert done.raw == model_files(1, 1)[MODEL]
    lazy.succeed("checkout", "base", tmp_path / "out")
    assert (tmp_path / "out" / MODEL).read_bytes() == model_files(1)[MODEL]


def test_prefetch_and_drop(lazy: Program) -> None:
    """`prefetch` says what came, and that it is here; `drop` what goes and what frees it."""
    done = lazy.succeed("prefetch", "e1")
    assert "brought" in done.out
    assert "all of it is here already" in lazy.succeed("prefetch", "e1").out
    assert "not here" not in lazy.succeed("show", "e1").out
    would = lazy.succeed("drop", "--dry-run", "e1").out
    assert "would drop" in would
    assert "not here" not in lazy.succeed("show", "e1").out
    dropped = lazy.succeed("drop", "e1").out
    assert dropped.startswith("dropped")
    assert dropped.rstrip().endswith(" gc")
    assert "not here" in lazy.succeed("show", "e1").out
    lazy.succeed("gc")
    assert lazy.succeed("cat", f"e1:{MODEL}").raw == model_files(1, 1)[MODEL]


def test_json_has_the_declared_keys(lazy: Program) -> None:
    """--json of `prefetch` and `drop` has the keys that are declared."""
    for words in (("prefetch", "e1"), ("drop", "--dry-run", "e1"), ("drop", "e1")):
        assert set(document(lazy("--json", *words))) >= {one.name for one in DOCUMENTS[words[0]]}


def test_prefetch_of_some(lazy: Program) -> None:
    """--only brings tensors that match, --all all refs; a pattern that matches nothing is told."""
    lazy.succeed("prefetch", "e1", "--only", "b")
    assert "not here" in lazy.succeed("show", "e1").out
    done = lazy("prefetch", "e1", "--only", "nothing.*")
    assert done.status != 0
    assert "nothing.*" in done.err
    lazy.succeed("prefetch", "--all")
    for name in ("base", "e1"):
        assert "not here" not in lazy.succeed("show", name).out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "said", "next_one"),
    [
        (("prefetch",), "", "prefetch"),
        (("prefetch", "nothing"), "nothing", "mstore refs"),
        (("drop", "mine"), "only one", "mstore push"),
        (("pin", "base", "--raw"), "only at origin", "mstore prefetch "),
        (("remote", "rm", "origin"), "only at origin", "mstore prefetch --all"),
        (("backup", "out"), "only at origin", "mstore prefetch --all"),
    ],
)
def test_refusals_say_what_to_type(
    lazy: Program,
    words: tuple[str, ...],
    said: str,
    next_one: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a lazy store refuses is said with the command that helps."""
    monkeypatch.chdir(tmp_path)
    mine = write_files(tmp_path / "mine", model_files(7))
    lazy.succeed("add", mine, "--name", "mine")
    done = lazy(*words)
    assert done.status != 0
    assert said in done.err
    assert next_one in done.err.replace(f"--store {lazy.store} ", ""), done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["backup", "clone"])
def test_a_lazy_copy(lazy: Program, copied: Path, verb: str) -> None:
    """The hint of a refused backup or clone makes a copy that reads what the store reads; a backup
    says what it did not copy."""
    target = copied / "copy"
    if verb == "backup":
        refused = lazy("backup", target)
    else:
        refused = run_once(["clone", str(lazy.store), str(target)])
    hint = next(line for line in refused.err.splitlines() if "--lazy" in line)
    line = hint[hint.rindex("mstore ") :].split()[1:]
    done = run_once(line)
    assert done.status == 0, done.err
    assert ("not copied" in done.out) == (verb == "backup")
    copy = Program(target)
    assert "not here" in copy.succeed("show", "e1").out
    assert copy.succeed("cat", f"e1:{MODEL}").raw == model_files(1, 1)[MODEL]


def test_a_lazy_clone_of_a_full_store(copied: Path) -> None:
    """It is refused, and the hint is the same line without --lazy."""
    done = run_once(["clone", "--lazy", str(copied / "author"), str(copied / "copy")])
    assert done.status != 0
    assert "no lazy remote" in done.err
    assert f"mstore clone {copied / 'author'} {copied / 'copy'}" in done.err


def test_without_the_remote(lazy: Program, copied: Path) -> None:
    """Without the remote a command says which one is away, and no traceback; `fsck` is content."""
    (copied / "remote").rename(copied / "away")
    done = lazy("cat", f"e1:{MODEL}")
    assert done.status != 0
    assert "origin" in done.err
    assert "Traceback" not in done.err
    assert "not here" in lazy.succeed("fsck").out
    (copied / "away").rename(copied / "remote")
    assert lazy.succeed("cat", f"e1:{MODEL}").raw == model_files(1, 1)[MODEL]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["fetch", "pull"])
def test_a_store_becomes_lazy(copied: Path, verb: str) -> None:
    """`fetch --lazy` and `pull --lazy` keep what is here and bring no weights any more."""
    Store.clone((copied / "remote").as_uri(), copied / "mine")
    mine, author = Program(copied / "mine"), Program(copied / "author")
    assert not document(mine("--json", "show", "base"))["leans_on"]
    mine.succeed(verb, "origin", "--lazy")
    assert "LAZY" in mine.succeed("remote").out
    assert "not here" not in mine.succeed("show", "base").out
    # The copy of the remote.
    author.succeed("remote", "rm", "origin")
    author.succeed("remote", "add", "origin", (copied / "remote").as_uri())
    author.succeed("add", write_files(copied / "new", model_files(9)), "--name", "new")
    author.succeed("push", "origin", "new")
    mine.succeed(verb, "origin")
    name = "new" if verb == "pull" else "origin/new"
    assert "not here" in mine.succeed("show", name).out
    assert mine.succeed("cat", f"{name}:{MODEL}").raw == model_files(9)[MODEL]


def test_the_size_of_the_cache(lazy: Program) -> None:
    """`config --user cache_size` limits the cache; 0 is none; a wrong size is told, and so is what
    holds where none is set."""
    assert "a tenth of the store's disk" in run_once(["config", "--user"]).out
    limit = 150_000
    assert run_once(["config", "--user", "cache_size", "150KB"]).status == 0
    for name in ("e1", "base"):
        lazy.succeed("cat", f"{name}:{MODEL}")
    used = sum(one.stat().st_size for one in (lazy.store / "cache").rglob("*-*"))
    assert 0 < used <= limit
    shutil.rmtree(lazy.store / "cache")
    assert run_once(["config", "--user", "cache_size", "0"]).status == 0
    lazy.succeed("cat", f"e1:{MODEL}")
    assert not (lazy.store / "cache").exists()
    done = run_once(["config", "--user", "cache_size", "many"])
    assert done.status != 0
    assert "many" in done.err


def test_fsck_of_a_lazy_store(lazy: Program) -> None:
    """`fsck` counts what is not here, and calls nothing damaged."""
    done = lazy.succeed("fsck", "--read-data")
    assert "not here" in done.out
    found = document(lazy("--json", "fsck"))
    assert found["problems"] == []
    told = found["leans_on"]
    assert isinstance(told, list)
    assert [one["remote"] for one in told] == ["origin"]
