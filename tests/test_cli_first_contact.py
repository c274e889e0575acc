"""What a newcomer types, and what the program makes of it: near names, strange files, the shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program

Tensor = tuple[str, str, tuple[int, ...], bytes]


def build(root: Path) -> None:
    """A store with `tiny/base` and a tag `v1`, and the model beside it."""
    write_safetensors(root / "m" / "model.safetensors", [("t", "F32", (4,), bytes(16))])
    mstore = Program(root / "store")
    mstore.succeed("init")
    mstore.succeed("add", root / "m", "--name", "tiny/base")
    mstore.succeed("tag", "v1", "tiny/base")


@pytest.fixture
def shared(template: Path) -> Program:
    """The store itself, for tests that change nothing in it."""
    return Program(template / "store")


@pytest.fixture
def mstore(copied: Path) -> Program:
    """The same, for a test that changes it."""
    return Program(copied / "store")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["show", "tiny/bas"], "tiny/base"),
        (["show", "base"], "tiny/base"),
        (["show", "tinybase@{1}"], "tiny/base"),
        (["rm", "tiny/bsae"], "tiny/base"),
        (["plan", *["--base", "v1", "--expert", "v1", "--method", "tie"]], "ties"),
        (
            [
                "plan",
                *["--base", "v1", "--expert", "v1", "--method", "ties", "--param", "densty=1"],
            ],
            "density",
        ),
    ],
)
def test_near_names(line: list[str], meant: str, shared: Program) -> None:
    """A ref, method or parameter that is nearly right is named in the hint."""
    done = shared(*line)
    assert done.status != 0
    assert f"hint: did you mean {meant}?" in done.err


def test_far_names(shared: Program) -> None:
    """Nothing is suggested where nothing is near; a name with another number is another name."""
    assert "did you mean" not in shared("show", "zzzzz").err
    assert "did you mean" not in shared("show", "v2").err
    assert "did you mean" not in shared("log", "--nonsense").err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        *((["lgo"], "log"), (["vrsion"], "version"), (["log", "--graf"], "--graph")),
        *((["merge", "--bse", "x"], "--base"), (["refs", "--jsn"], "--json")),
    ],
    ids=str,
)
def test_near_words_of_the_command_line(line: list[str], meant: str, shared: Program) -> None:
    """For a slip in a command or an option, the one nearest is suggested, and no other."""
    done = shared(*line)
    assert done.status == 2
    assert f"hint: did you mean {meant}?\n  mstore " in done.err


PAIR = ["--base", "v1", "--expert", "v1"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (["--density", "0.3"], "--param density=0.3"),
        (["--density"], "--param density=VALUE"),
        (["--density=0.3"], "--param density=0.3"),
        (["--weight", "2"], "--expert v1=2"),
        (["--lambda", "2"], "--param lambda=2"),
        (["--normalize"], "--param normalize=true"),
        (["--rescale"], "--param rescale=false"),
        (["--seed", "1"], "--param seed=1"),
        (["--max-error", "5%"], "write a number such as 0.05"),
        (["--method", "TIES"], "did you mean ties?"),
        (["--method", "Arcee_Fusion"], "did you mean arcee_fusion?"),
        (
            ["--method", "ties", "--param", "density=0.3", "--param", "density=0.5"],
            "one density serves all experts: --param density=0.5",
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_habits_from_mergekit(line: list[str], hint: str, shared: Program) -> None:
    """An option, number or method as other programs have it is answered with what to type here."""
    method = [] if "--method" in line else ["--method", "ties"]
    for verb in (["plan"], ["merge", "--name", "m"]):
        done = shared(*verb, *PAIR, *method, *line)
        assert done.status != 0
        assert f"hint: {hint}\n" in done.err


@pytest.mark.parametrize(("directory", "name"), [("newx", "newx"), ("new x", "REF")])
def test_a_directory_is_no_expert(
    directory: str, name: str, mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is not in the store, given as a model: the hint is the line that adds it."""
    (tmp_path / directory).mkdir()
    monkeypatch.chdir(tmp_path)
    asked = ["--base", "v1", "--method", "ties", "--expert"]
    for verb in (["plan"], ["plan", "--sweep"], ["merge", "--name", "m"]):
        done = mstore(*verb, *asked, f"./{directory}=0.5")
        assert done.status == 1
        what = "no such ref or snapshot; it is a directory"
        assert done.err.startswith(f"error: ./{directory}: {what}\n")
        assert done.err.endswith(f" add {shlex.quote(f'./{directory}')} --name {name}\n")
    assert "a directory" not in mstore("plan", *asked, "./newer").err


@pytest.mark.parametrize("gone", ["--base", "--expert", "--method"])
def test_what_a_merge_misses(gone: str, shared: Program) -> None:
    """`merge` names the option that is missing, and no other."""
    options = {"--base": "v1", "--expert": "v1", "--method": "ties"}
    given = [word for pair in options.items() if pair[0] != gone for word in pair]
    done = shared("merge", "--name", "m", *given)
    assert done.status == 2
    assert done.err.startswith(f"error: missing: {gone}\n")


def test_a_plan_is_no_snapshot(mstore: Program) -> None:
    """A plan's id where a snapshot is asked for is called one, with the line that runs it."""
    planned = mstore.succeed("plan", *PAIR, "--method", "linear", "--allow-noop", "-q")
    plan = planned.out.strip()
    for verb, id in (("show", plan), ("explain", plan[:12])):
        done = mstore(verb, id)
        assert done.status == 1
        assert "hint: this is a plan\n" in done.err
        assert f"merge --plan {id} --name REF" in done.err
    assert "this is a plan" not in mstore("show", plan[:11] + "0123456").err


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ("0", "64KiB"),
        ("16KiB", "64KiB"),
        ("90KiB", "64KiB"),
        ("100KiB", "128KiB"),
        ("600000", "512KiB"),
        ("3MB", "2MiB"),
        ("15MiB", "16MiB"),
        ("1GiB", "16MiB"),
    ],
)
def test_the_nearest_block_size(size: str, nearest: str, tmp_path: Path) -> None:
    """A block size that cannot be is answered with the nearest that can."""
    done = Program(tmp_path / "new")("init", "--block-size", size)
    assert done.status == 2
    assert done.err.endswith(f" init --block-size {nearest}\n")


@pytest.mark.parametrize(
    ("line", "code", "where"),
    [
        (["show", "nothing"], "not-found", "nothing"),
        (["add", "/nowhere", "--name", "x"], "not-found", "/nowhere"),
        (["tag", "v1", "tiny/base"], "conflict", "v1"),
        (["tag", "a b", "tiny/base"], "bad-name", None),
        (["show"], "usage", None),
        (["shwo"], "usage", None),
    ],
)
def test_errors_as_json(line: list[str], code: str, where: str | None, shared: Program) -> None:
    """Under --json an error is one JSON object on standard output, and words on standard error."""
    done = shared("--json", *line)
    error = done.document["error"]
    assert (error["code"], error["exit_status"]) == (code, done.status)
    assert where is None or error["where"] == where
    assert error["what"] in done.err
    assert error["hint"]
    assert done.err.startswith("error: ")


def test_a_success_is_no_error(shared: Program) -> None:
    """Under --json a command that works prints its own object and no other."""
    assert "error" not in shared("--json", "show", "v1").document


def test_help_of_a_command(mstore: Program) -> None:
    """`mstore help CMD` prints what `mstore CMD --help` does, and `mstore help` the whole."""
    from mstore_cli.main import run

    assert run(["help", "show"]) == run(["show", "--help"]) == run(["help"]) == 0


@pytest.mark.parametrize(("verb", "has_json"), [("cat", False), ("show", True)])
def test_help_of_json(verb: str, has_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists --json for the commands that have it: all but `cat`."""
    from mstore_cli.main import run

    assert run([verb, "--help"]) == 0
    assert ("--json" in capsys.readouterr().out) == has_json


def test_one_of_something(mstore: Program) -> None:
    """One tensor is no plural."""
    out = mstore.succeed("cast", "tiny/base", "--dtype", "bfloat16", "--name", "cast").out
    assert " 1 tensor\n" in out
    assert "1 tensors" not in out


def completed(line: str, store: Path) -> list[str]:
    """What Tab offers behind a line, as bash asks for it."""
    words = line.split(" ")
    asked = {
        "_MSTORE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "MSTORE_STORE": str(store),
    }
    command = [sys.executable, "-m", "mstore_cli"]
    done = subprocess.run(
        command, env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split("\n") if line]


@pytest.mark.rest
def test_completion(mstore: Program, tmp_path: Path) -> None:
    """Refs, methods, settings and commands are completed, in the store that the line names; the
    shell completes files; else nothing."""
    assert completed("mstore show ti", mstore.store) == ["tiny/base"]
    assert completed("mstore rm v", mstore.store) == ["v1"]
    assert completed("mstore merge --base ", mstore.store) == ["tiny/base", "v1"]
    assert completed(f"mstore --store {mstore.store} log t", tmp_path) == ["tiny/base"]
    assert completed("mstore plan --method dare_t", mstore.store) == ["dare_ties"]
    assert completed("mstore repl", mstore.store) == ["replay"]
    assert completed("mstore init --codec d", tmp_path) == ["dense"]
    assert completed("mstore config ref", mstore.store) == ["reflog_days"]
    assert completed("mstore config shared ", mstore.store) == ["umask", "group", "all"]
    assert completed("mstore config reflog_days ", mstore.store) == []
    assert completed("mstore reset v", mstore.store) == ["v1"]
    assert completed("mstore mount ti", mstore.store) == ["tiny/base"]
    assert completed("mstore mount v1 ti", mstore.store) == ["ti"]
    assert "merge" in completed("mstore help me", mstore.store)
    for line in ("add x", "checkout v1 x", "--store x", "merge --recipe x"):
        assert completed(f"mstore {line}", mstore.store) == ["x"]
    assert completed("mstore add x --base v", mstore.store) == ["v1"]
    assert completed("mstore methods dare_t", mstore.store) == ["dare_ties"]
    assert completed("mstore merge --score c", mstore.store) == ["conflict"]
    assert completed("mstore reflog ti", mstore.store) == ["tiny/base"]
    assert completed("mstore show x", tmp_path / "nowhere") == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_script(shell: str) -> None:
    """The script that a shell needs is printed."""
    command = [sys.executable, "-m", "mstore_cli"]
    asked = {**os.environ, "_MSTORE_COMPLETE": f"{shell}_source"}
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert "_MSTORE_COMPLETE" in done.stdout
    assert f"{shell}_complete" in done.stdout


def test_the_script_of_this_shell() -> None:
    """Without a word for which shell, it is the one that asks."""
    # A second command keeps bash from giving its place to the first.
    command = ["bash", "-c", f"{sys.executable} -m mstore_cli --show-completion; true"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bash_complete" in done.stdout


@pytest.mark.parametrize(
    ("name", "data", "what", "hint"),
    [
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "Git LFS pointer",
            "git lfs pull",
        ),
        ("model.safetensors", b"<!DOCTYPE html><html></html>", "web page", "hf download"),
        ("model.safetensors", b"PK\x03\x04" + bytes(90), "zip archive", "--convert"),
        ("model.safetensors", b"GGUF" + bytes(90), "GGUF", "safetensors checkpoint"),
        ("model.gguf", b"GGUF" + bytes(90), "GGUF", "safetensors checkpoint"),
        ("merge.yaml", b"merge_method: ties\n", "YAML", "mstore merge --help"),
    ],
)
@pytest.mark.parametrize("alone", [True, False], ids=["file", "directory"])
def test_strange_files(
    name: str, data: bytes, what: str, hint: str, alone: bool, shared: Program, tmp_path: Path
) -> None:
    """A file that is no checkpoint is called what it is, with what to do."""
    directory = tmp_path / "strange"
    directory.mkdir()
    (directory / name).write_bytes(data)
    done = shared("add", directory / name if alone else directory, "--name", "x")
    assert done.status == 1
    assert f"{directory / name}: " in done.err
    assert what in done.err
    assert hint in done.err
    assert shared("refs", "-q").out.split() == ["tiny/base", "v1"]


def test_a_recipe_where_a_merge_is_asked_for(shared: Program) -> None:
    """A mergekit recipe in the place of options is called that."""
    for verb in ("merge", "plan"):
        done = shared(verb, "recipe.yml")
        assert done.status == 2
        assert "a recipe follows" in done.err


def test_an_adapter_where_a_model_is_needed(mstore: Program, tmp_path: Path) -> None:
    """A LoRA adapter of a form that is not known is called that, and can be stored as it is."""
    tensors: list[Tensor] = [
        (f"t.lora_{side}.mine.weight", "F32", (2, 2), bytes(16)) for side in ("A", "B")
    ]
    write_safetensors(tmp_path / "lora" / "adapter_model.safetensors", tensors)
    mstore.succeed("add", tmp_path / "lora", "--name", "lora", "--base", "none")
    done = mstore(*["plan", "--base", "v1", "--expert", "lora", "--method", "linear"])
    assert "is a LoRA adapter" in done.err
    assert "merge_and_unload" in done.err
    assert (
        "is a LoRA adapter" in mstore("add", tmp_path / "lora", "--name", "y", "--base", "v1").err
    )


def test_a_tag_of_a_taken_name(shared: Program) -> None:
    """Nobody is told to remove a branch for the sake of a tag."""
    done = shared("tag", "tiny/base", "v1")
    assert "taken by a branch" in done.err
    assert " rm " not in done.err
    first, second = shared("tag", "v1", "tiny/base").err.splitlines()[-2:]
    assert first.endswith(" rm v1")
    assert second.endswith(" tag v1 tiny/base")


def test_two_stores(mstore: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is typed counts, and it is said that the variable names another store."""
    from mstore_cli.main import run

    monkeypatch.setenv("MSTORE_STORE", str(mstore.store))
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "mstore_cli", "init", "other"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "$MSTORE_STORE names another store" in done.stdout
    assert (tmp_path / "other").is_dir()
    assert run(["--store", str(mstore.store), "init", "third"]) == 2
