"""`mstore add` at the command line: several at once, names, bases, conversion, the Hub's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Done, Program
from families import layered, read_checkpoint, write_checkpoint
from small_models import files_of, small_model
from test_checkpoint_tree import REVISION, cached_model

from mstore_cli.keys import DOCUMENTS

BLOCK = "64KiB"


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    program = Program(tmp_path / "store")
    program.succeed("init", "--block-size", BLOCK)
    return program


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered().write(tmp_path_factory.mktemp("written") / "family")


@pytest.fixture
def family(written: Path, tmp_path: Path) -> Path:
    """Directories base, e0, e1 and e2."""
    shutil.copytree(written, tmp_path / "family")
    return tmp_path / "family"


def refs(mstore: Program) -> list[str]:
    return [ref["name"] for ref in mstore.succeed("refs", "--json").document["refs"]]


# One


def test_the_base_and_why_are_shown(mstore: Program, family: Path) -> None:
    """The screen names the base that was found and the reason; so does JSON."""
    first = mstore.succeed("add", family / "base", "--name", "llama/base")
    assert "base        none: the store holds no other model" in first.lines
    done = mstore.succeed("add", family / "e0", "--name", "llama/e0")
    assert "base           llama/base: it has the same tensors; " in done.out
    assert "equal to base" in done.out
    again = mstore.succeed("add", family / "e0", "--name", "llama/e0")
    assert again.lines[0] == "nothing new: llama/e0 holds these bytes already"
    assert again.lines[1].endswith(f"mstore --store {mstore.store} fsck --read-data")
    assert "base           llama/base: it was added with this base" in again.out
    document = mstore.succeed("add", family / "e1", "--name", "llama/e1", "--json").document
    assert document["base"]["refs"] == ["llama/base"]
    assert document["base_reason"].startswith("it has the same tensors; ")


def test_a_branch_that_moves_says_what_it_was(mstore: Program, family: Path) -> None:
    """`add` onto a name that is taken tells what the branch pointed at, on the screen and in JSON;
    a new branch was nothing."""
    first = mstore.succeed("add", family / "base", "--name", "m", "--json").document
    assert first["previous"] is None
    moved = mstore.succeed("add", family / "e0", "--name", "m", "--base", "none")
    assert f"was         {first['snapshot'][:12]}" in moved.lines
    again = mstore.succeed("add", family / "base", "--name", "m", "--base", "none", "--json")
    assert again.document["previous"] not in (None, first["snapshot"])


def test_no_base_is_looked_for_with_none(mstore: Program, family: Path) -> None:
    """--base none records no base and tells no reason; --base REF takes that one."""
    mstore.succeed("add", family / "base", "--name", "base")
    alone = mstore.succeed("add", family / "e0", "--name", "alone", "--base", "none", "--json")
    assert alone.document["base"] is None
    assert alone.document["base_reason"] is None
    assert alone.document["blocks_equal_base"] is None
    named = mstore.succeed("add", family / "e1", "--name", "e1", "--base", "alone", "--json")
    assert named.document["base"]["refs"] == ["alone"]
    assert mstore("add", family / "e1", "--name", "x", "--base", "nothing").status == 1
    again = mstore.succeed("add", family / "e1", "--name", "e1", "--base", "none")
    assert "remark: the snapshot is kept as it is, with its base; another name" in again.out
    assert mstore.succeed("show", "e1", "--json").document["snapshot"] == named.document["snapshot"]


def test_a_message_that_is_not_kept_is_told(mstore: Program, family: Path) -> None:
    """Where nothing is new, a remark says that the message went nowhere."""
    line = ("add", family / "base", "--name", "base")
    assert "remark:" not in mstore.succeed(*line, "-m", "first").out
    assert "remark: the message was not kept" in mstore.succeed(*line, "-m", "second").out
    assert "remark:" not in mstore.succeed(*line).out
    assert mstore.succeed("show", "base", "--json").document["message"] == "first"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", ["auto", "raw", "dense"])
def test_codecs(mstore: Program, family: Path, tmp_path: Path, codec: str) -> None:
    """With each --codec the bytes come back as they were."""
    mstore.succeed("add", family / "base", "--name", "base", "--codec", codec)
    mstore.succeed("add", family / "e0", "--name", "e0", "--codec", codec)
    mstore.succeed("checkout", "e0", tmp_path / "copy")
    assert files_of(tmp_path / "copy") == files_of(family / "e0")


def test_raw_leaves_what_is_stored(mstore: Program, family: Path) -> None:
    """`--codec raw` of bytes that are stored coded says that they stay so, and what recodes them;
    raw blocks need no word."""
    line = ("add", family / "base", "--name", "base")
    mstore.succeed(*line, "--codec", "dense")
    told = mstore.succeed(*line, "--codec", "raw").out
    assert "blocks were stored before and stay coded; to store all raw: mstore" in told
    assert "pin base --raw" in told
    mstore.succeed("pin", "base", "--raw")
    assert "stay coded" not in mstore.succeed(*line, "--codec", "raw").out


def test_an_unknown_codec_stores_nothing(mstore: Program, family: Path) -> None:
    """Another codec is refused."""
    done = mstore("add", family / "base", "--name", "base", "--codec", "zip")
    assert done.status in (1, 2)
    assert refs(mstore) == []


# Several


def test_several_by_prefix(mstore: Program, family: Path) -> None:
    """With --name-prefix each branch is called by that and the name of its directory."""
    done = mstore.succeed("add", family / "base", family / "e0", "--name-prefix", "team/v1-")
    assert refs(mstore) == ["team/v1-base", "team/v1-e0"]
    assert done.out.count("\n\n") == 1
    assert "base           team/v1-base: " in done.out
    alone = mstore.succeed("add", family / "e1", "--name-prefix", "team/", "--json").document
    assert alone["name"] == "team/e1"


def test_several_by_name(mstore: Program, family: Path) -> None:
    """With a --name for each PATH they are taken in order; JSON and -q list them as stored."""
    line = ["add", family / "base", family / "e0", "--name", "a", "--name", "b"]
    document = mstore.succeed(*line, "--json").document
    assert list(document) == [key.name for key in DOCUMENTS["add PATH PATH"]]
    assert [each["name"] for each in document["added"]] == ["a", "b"]
    for each in document["added"]:
        assert list(each) == [key.name for key in DOCUMENTS["add"]]
    assert mstore.succeed(*line, "-q").lines == [e["snapshot"] for e in document["added"]]


def test_a_base_goes_before_its_fine_tune(mstore: Program, family: Path) -> None:
    """Given the wrong way round, what is declared as a base is stored first, and becomes it."""
    config = json.loads((family / "e0" / "config.json").read_text())
    (family / "e0" / "config.json").write_text(json.dumps(config | {"base_model": "org/base"}))
    done = mstore.succeed(
        "add", family / "e0", family / "base", "--name-prefix", "llama/", "--json"
    )
    first, second = done.document["added"]
    assert [first["name"], second["name"]] == ["llama/base", "llama/e0"]
    assert second["base"]["refs"] == ["llama/base"]
    assert second["base_reason"].startswith("config.json names 'org/base'; ")


def test_a_failure_stops_there(mstore: Program, family: Path) -> None:
    """What was stored before the bad one stays and is named, the rest is not begun."""
    (family / "e0" / "config.json").unlink()
    (family / "e0" / "config.json").symlink_to("/etc/hostname")
    paths = [family / name for name in ("base", "e0", "e1")]
    done = mstore("add", *paths, "--name-prefix", "x/", "--json")
    assert done.status == 1
    assert done.document["error"]["where"] == str(family / "e0" / "config.json")
    assert str(family / "e0" / "config.json") in done.err
    assert f"stored before {family / 'e0'}: x/base" in done.err
    assert refs(mstore) == ["x/base"]
    first = mstore("add", family / "e0", family / "e1", "--name-prefix", "y/")
    assert f"nothing was stored before {family / 'e0'}" in first.err
    assert refs(mstore) == ["x/base"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "no --name was given"),
        (["--name", "a"], "2 paths and 1 name"),
        (["--name", "a", "--name", "b", "--name", "c"], "2 paths and 3 names"),
        (["--name", "a", "--name", "a"], "two checkpoints would be called a"),
        (["--name", "a", "--name-prefix", "b"], "exclude each other"),
    ],
)
def test_names_that_do_not_fit(
    mstore: Program, family: Path, names: list[str], problem: str
) -> None:
    """Too few, too many or equal names are wrong usage, found before anything is stored."""
    done = mstore("add", family / "base", family / "e0", *names)
    assert done.status == 2
    assert problem in done.err
    assert "hint:" in done.err
    assert refs(mstore) == []


def test_every_name_is_checked_first(mstore: Program, family: Path) -> None:
    """A name that cannot be a ref is refused before the first checkpoint is stored."""
    done = mstore("add", family / "base", family / "e0", "--name", "fine", "--name", "not fine")
    assert done.status == 2
    assert refs(mstore) == []


def test_one_without_a_name_is_wrong_usage(mstore: Program, family: Path) -> None:
    """One PATH without a name is told how to give one."""
    done = mstore("add", family / "base")
    assert done.status == 2
    assert f"add {family / 'base'} --name base" in done.err
    (family / "base").rename(family / "not a name")
    assert "--name REF" in mstore("add", family / "not a name").err


# From elsewhere


def test_a_model_of_the_hub_s_cache(mstore: Program, tmp_path: Path) -> None:
    """models--ORG--NAME is added like a directory, and comes back as plain files."""
    model = cached_model(tmp_path / "hub")
    mstore.succeed("add", model, "--name-prefix", "hub/")
    assert refs(mstore) == ["hub/tiny-model"]
    mstore.succeed("checkout", "hub/tiny-model", tmp_path / "copy")
    assert files_of(tmp_path / "copy").keys() == {
        "config.json",
        "model.safetensors",
        "sub/vocab.txt",
    }


def test_pickles_are_converted_only_when_asked(mstore: Program, tmp_path: Path) -> None:
    """Pickled weights are refused with the line that converts them, which then does."""
    torch = pytest.importorskip("torch")
    model = tmp_path / "model"
    model.mkdir()
    torch.save({"a": torch.arange(3.0)}, model / "pytorch_model.bin")
    line = ["add", model, "--name", "m"]
    refused = mstore(*line)
    assert refused.status == 1
    assert f"add {model} --name {model.name} --convert" in refused.err
    done = mstore.succeed(*line, "--convert")
    assert "remark: converted pytorch_model.bin to model.safetensors: 1 tensor" in done.out


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[], Done]:
    """A store whose only model cannot be read."""
    program = Program(tmp_path / "broken")
    program.succeed("init", "--block-size", BLOCK)
    program.succeed("add", small_model(tmp_path / "one", "seed"), "--name", "one")
    for pack in (tmp_path / "broken" / "packs").rglob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(bytes(pack.stat().st_size))
    other = small_model(tmp_path / "two", "other")
    return lambda: program("add", other, "--name", "two")


def test_a_base_nobody_asked_for_fails_nothing(broken: Callable[[], Done]) -> None:
    """Where the stored models cannot be read, the new one is added without a base."""
    done = broken()
    assert done.status == 0, done.err
    assert any(line.startswith("base        none: ") for line in done.lines)


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """Training states are left out and named; --exclude and --no-default-excludes say otherwise."""
    model = small_model(tmp_path / "model", "x")
    for name in ("optimizer.pt", "notes.txt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (model / name).write_text("1234")
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    done = mstore.succeed("add", model, "--name", "x", "--exclude", "*.txt", "--exclude", "a b")
    assert "remark: --exclude 'a b' left nothing out" in done.lines
    assert "5 files, 20 B: notes.txt, optimizer.pt" in done.out
    assert "and 1 more" in done.out
    assert mstore.succeed("ls", "x", "-q").lines == ["config.json", "model.safetensors"]
    whole = mstore.succeed("add", model, "--name", "y", "--no-default-excludes", "--json").document
    assert (whole["files"], whole["excluded"]) == (7, [])
    none = mstore("add", model, "--name", "z", "--exclude", "*.safetensors")
    assert none.status == 1
    assert "all its weights are left out" in none.err
    assert "(without --exclude '*.safetensors')" in none.err
    assert mstore("add", model, "--name", "z", "--exclude", "/").status == 2


def test_differences_are_added_to_their_base(mstore: Program, tmp_path: Path) -> None:
    """`--kind delta` stores base + difference; without --base it is refused, and the hint is what
    to type."""
    base = {"model.a.weight": np.ones((200, 300), np.float32)}
    write_checkpoint(tmp_path / "base", base)
    write_checkpoint(tmp_path / "steps", {"model.a.weight": np.full((200, 300), 0.25, np.float32)})
    mstore.succeed("add", tmp_path / "base", "--name", "base")
    line = ["add", tmp_path / "steps", "--name", "tuned", "--kind", "delta"]
    for more in ([], ["--base", "none"]):
        refused = mstore(*line, *more)
        assert refused.status == 2
        assert "error: differences are added to a base, and none is named" in refused.err
        assert "--base REF" in refused.err
    done = mstore.succeed(*line, "--base", "base")
    assert "base           base" in done.out
    mstore.succeed("checkout", "tuned", tmp_path / "out")
    assert np.all(read_checkpoint(tmp_path / "out")["model.a.weight"] == 1.25)
    assert mstore.succeed(*line, "--base", "base").lines[0].startswith("nothing new: tuned")


# Ids of the Hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with org/tiny-model; the current directory is empty."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached_model(tmp_path / "hub")
    return tmp_path / "hub"


def test_a_model_by_its_id(mstore: Program, cache: Path) -> None:
    """ORG/NAME is the model of the Hub's cache; the snapshot tells address, revision and commit."""
    mstore.succeed("add", "org/tiny-model", "--name-prefix", "hub/")
    assert refs(mstore) == ["hub/tiny-model"]
    address = "https://huggingface.co/org/tiny-model"
    shown = mstore.succeed("show", "hub/tiny-model", "--json").document
    assert shown["origin"] == {"url": address, "revision": "main", "commit": REVISION}
    assert shown["message"] == ""
    assert f"{address} {REVISION} (main)" in mstore.succeed("show", "hub/tiny-model").out
    assert address in mstore.succeed("log", "hub/tiny-model").out
    assert f"add: org/tiny-model@{REVISION}" in mstore.succeed("reflog", "hub/tiny-model").out
    again = mstore.succeed("add", cache / "models--org--tiny-model", "--name", "hub/tiny-model")
    assert "nothing new" in again.out
    assert "note" not in again.out
    mstore.succeed("add", "org/tiny-model", "--name", "said", "-m", "why")
    assert mstore.succeed("show", "said", "--json").document["message"] == "why"


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", REVISION])
def test_a_revision_of_a_model(mstore: Program, cache: Path, revision: str) -> None:
    """@REVISION is a branch, a tag or a commit of the cached model."""
    pointer = cache / "models--org--tiny-model" / "refs" / revision
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text(REVISION)
    (cache / "models--org--tiny-model" / "refs" / "main").unlink()
    mstore.succeed("add", f"org/tiny-model@{revision}", "--name", "m")
    assert mstore("add", "org/tiny-model", "--name", "m").status == 1


def test_what_the_cache_lacks_says_how_to_get_it(mstore: Program, cache: Path) -> None:
    """A model or a revision that is not in the cache names the command that downloads it."""
    done = mstore("add", "org/other", "--name", "m")
    assert done.status == 1
    assert "org/other: no such file or directory, and the Hub's cache at" in done.err
    assert str(cache) in done.err
    assert "mstore --store" in done.err
    assert "add hf://org/other --name REF\n" in done.err
    done = mstore("add", "org/tiny-model@v2", "--name", "m")
    assert "not its revision v2" in done.err
    assert "add hf://org/tiny-model@v2 --name REF\n" in done.err
    assert refs(mstore) == []


def test_a_directory_before_the_cache(mstore: Program, cache: Path, family: Path) -> None:
    """A path of the same name is added, and a remark names the other."""
    (cache.parent / "here" / "org").mkdir()
    (cache.parent / "here" / "org" / "tiny-model").symlink_to(family / "base")
    done = mstore("add", "org/tiny-model", "--name", "m")
    assert done.status == 0
    assert f"remark: org/tiny-model is a path here, and a model of the Hub's cache: {cache}" in (
        done.err
    )
    mstore.succeed("checkout", "m", "out")
    assert (Path("out") / "config.json").read_bytes() == (
        family / "base" / "config.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HUGGINGFACE_HUB_CACHE", "$ROOT/hub"),
        ("HF_HOME", "$ROOT"),
        ("XDG_CACHE_HOME", "$ROOT/above"),
        ("HOME", "$ROOT/home"),
    ],
)
def test_where_the_cache_is(
    mstore: Program, cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The cache is where huggingface_hub has it: a variable, else the user's own cache."""
    root = cache.parent
    for link in (root / "above" / "huggingface", root / "home" / ".cache" / "huggingface"):
        link.parent.mkdir(parents=True)
        link.symlink_to(root)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("ROOT", str(root))
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv(variable, value if variable != "HOME" else str(root / "home"))
    mstore.succeed("add", "org/tiny-model", "--name", "m")


# A base of the same command


@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", ["llama/base", "base"])
def test_the_base_is_added_by_the_same_command(mstore: Program, family: Path, base: str) -> None:
    """--base may be one of the models added: it is stored first, and is the others' base."""
    line = ("add", family / "e0", family / "base", family / "e1", "--name-prefix", "llama/")
    for _ in range(2):
        added = mstore.succeed(*line, "--base", base, "--json").document["added"]
        assert [one["name"] for one in added] == ["llama/base", "llama/e0", "llama/e1"]
        assert added[0]["base"] is None
        for one in added[1:]:
            assert one["base"]["refs"] == ["llama/base"]


def test_a_stored_base_before_a_path_of_its_name(mstore: Program, family: Path) -> None:
    """A ref of the store is the base, even if a path is called so."""
    mstore.succeed("add", family / "e2", "--name", "base")
    added = mstore.succeed(
        *("add", family / "e0", family / "base", "--name-prefix", "x/"), "--base", "base", "--json"
    ).document["added"]
    assert [one["base"]["refs"] for one in added] == [["base"], ["base"]]


def test_many_models_take_a_line_each(mstore: Program, family: Path) -> None:
    """More than three models are listed, one line for each, with what was written."""
    paths = [family / one for one in ("base", "e0", "e1", "e2")]
    done = mstore.succeed("add", *paths, "--name-prefix", "m/", "--base", "m/base")
    assert len(done.lines) == len(paths) + 1
    assert done.lines[0].split() == ["NAME", "SNAPSHOT", "SIZE", "WRITTEN", "BASE"]
    assert done.lines[2].startswith("added  m/e0")
    assert done.lines[2].endswith("m/base")
    again = mstore.succeed("add", *paths, "--name-prefix", "m/", "--base", "m/base")
    assert again.lines[4].startswith("nothing new  m/e2")
