"""What fresh readers stumbled over: results that say what happened, hints for common slips."""

from __future__ import annotations

import errno
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program

from mstore import Store
from mstore.terms.errors import StorageFailed
from mstore_cli.errors import report

MERGE = ["merge", "--base", "base", "--expert", "expert", "--method", "linear"]


def write(path: Path, seed: int) -> Path:
    """A checkpoint of two layers and a norm."""
    random = np.random.default_rng(seed)
    tensors = []
    for name in ("layers.0.up", "layers.1.up", "norm"):
        values = random.standard_normal(1 << 12).astype("<f4")
        tensors.append((name, "F32", (64, 64), values.tobytes()))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def build(root: Path) -> None:
    """A store with a base and an expert, and both beside it."""
    mstore = Program(root / "a store")
    mstore.succeed("init")
    for seed, name in enumerate(("base", "expert")):
        mstore.succeed("add", write(root / name, seed), "--name", name, "--base", "none")


@pytest.fixture
def shared(template: Path) -> Program:
    """The store itself, for tests that change nothing in it."""
    return Program(template / "a store")


@pytest.fixture
def mstore(copied: Path) -> Program:
    """The same, for a test that changes it."""
    return Program(copied / "a store")


def typed(mstore: Program, command: str) -> str:
    """A command of a hint, as the user of this store types it."""
    return f"mstore --store {shlex.quote(str(mstore.store))} {command}"


def kinds(mstore: Program) -> dict[str, str]:
    """What each ref is: a branch or a tag."""
    refs = mstore.succeed("refs", "--json").document["refs"]
    return {ref["name"]: ref["kind"] for ref in refs}


# -- results say what happened -----------------------------------------------------------------


def test_a_reset_to_where_it_is(mstore: Program) -> None:
    """A reset that moves nothing says so, and points at no reflog."""
    out = mstore.succeed("reset", "base", "base").out
    assert out.startswith("nothing changed: base was at ")
    assert "where it was" not in out
    assert "is now" in mstore.succeed("reset", "base", "expert").out


def test_a_removed_tag_is_a_tag_again(mstore: Program) -> None:
    """`reset` restores what `rm` removed as what it was: a tag that is reset to what it named."""
    mstore.succeed("tag", "v1", "expert")
    mstore.succeed("rm", "v1")
    refused = mstore("show", "v1")
    assert "it was removed" in refused.err
    back = typed(mstore, "reset v1 'v1@{1}'")
    assert f"hint: {back}\n" in refused.err
    mstore.succeed("reset", "v1", "v1@{1}")
    assert kinds(mstore)["v1"] == "tag"
    mstore.succeed("rm", "v1")
    mstore.succeed("reset", "v1", "base")
    assert kinds(mstore)["v1"] == "branch"


def test_reset_says_that_a_branch_is_new(mstore: Program) -> None:
    """A name that never was a ref is called a new branch, so that a misspelt one is noticed."""
    assert mstore.succeed("reset", "bsae", "base").out.startswith("new branch bsae: ")


def test_what_no_statistics_know(mstore: Program, tmp_path: Path) -> None:
    """Where `check-merge` cannot tell how far an expert moved, it says why, and what shows it."""
    check = ("check-merge", "--base", "base", "--expert", "expert", "--expert", "tuned")
    mstore.succeed("add", write(tmp_path / "tuned", 7), "--name", "tuned", "--base", "base")
    out = mstore.succeed(*check).out
    line = typed(mstore, "compare expert --base base")
    assert f"unknown: no statistics of these pairs; to read them: {line}\n" in out
    mstore.succeed(*shlex.split(line.partition(f"{mstore.store}' ")[2]))
    assert "unknown" not in mstore.succeed(*check).out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", [[], ["--virtual"]], ids=["stored", "virtual"])
@pytest.mark.parametrize("name", ["base", "expert"])
def test_a_merge_that_moves_what_it_merged(name: str, how: list[str], mstore: Program) -> None:
    """A merge named as its base or its expert warns that this branch moved, and where from."""
    was = mstore.succeed("show", name, "-q").out
    told = f"warning: {name}, which was merged, is now this merge; {name}@{{1}} is what it was\n"
    assert told not in mstore.succeed(*MERGE, "--name", "other").out
    assert told in mstore.succeed(*MERGE, "--name", name, *how).out
    assert mstore.succeed("show", f"{name}@{{1}}", "-q").out == was


@pytest.mark.parametrize(("name", "status"), [("", 2), ("a b", 2), ("v1", 1)])
def test_a_name_is_checked_before_the_merge_is_planned(
    mstore: Program, name: str, status: int
) -> None:
    """A merge whose name cannot be a branch stores no plan."""
    mstore.succeed("tag", "v1", "expert")
    words = ("--base", "base", "--expert", "expert", "--method", "linear", "--name", name)
    assert mstore("merge", *words).status == status
    assert mstore.succeed("plans", "-q").lines == []


def test_refs_after_all_were_removed(mstore: Program) -> None:
    """An emptied store says which command restores the last ref; the command works."""
    assert "all were removed" not in mstore.succeed("refs").out
    mstore.succeed("rm", "*")
    out = mstore.succeed("refs").out
    assert "no refs yet" not in out
    assert f"to list all that were removed: {typed(mstore, 'reflog')}" in out
    line = next(line for line in out.splitlines() if line.startswith("to restore it: "))
    mstore.succeed(*shlex.split(line.partition(f"{mstore.store}' ")[2]))
    assert len(mstore.succeed("refs", "-q").lines) == 1


def test_refs_of_a_new_store(tmp_path: Path) -> None:
    """A store that never had a ref says how to add a model."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    assert "no refs yet" in mstore.succeed("refs").out


def test_rm_dry_run(mstore: Program) -> None:
    """rm --dry-run says what would be removed, and removes nothing."""
    mstore.succeed("tag", "v1", "base")
    done = mstore.succeed("rm", "--dry-run", "*")
    assert "would remove branch base" in done.out
    assert "would remove tag v1" in done.out
    assert "2 snapshots would have no ref" in done.out
    document = mstore.succeed("rm", "-n", "base", "--json").document
    assert (document["removed"], document["dry_run"]) == (["base"], True)
    assert mstore.succeed("refs", "-q").lines == ["base", "expert", "v1"]
    assert mstore.succeed("rm", "v1", "--json").document["dry_run"] is False


def test_quiet_keeps_warnings(mstore: Program) -> None:
    """-q prints only the id; warnings go to standard error."""
    line = [*MERGE[:-2], "--expert", "base", "--method", "task_arithmetic"]
    loud = mstore.succeed(*line, "--name", "loud")
    assert "warning: base is the base itself" in loud.out
    for quiet in (
        mstore.succeed(*line, "--name", "quiet", "-q"),
        mstore.succeed("plan", *line[1:], "-q"),
    ):
        assert len(quiet.lines) == 1
        assert "warning: base is the base itself" in quiet.err


def test_a_lost_block_is_stored_again(mstore: Program, tmp_path: Path) -> None:
    """`add` of bytes that a repair dropped says that it restored them."""
    with Store.open(mstore.store) as store:
        tensor = store._catalog.tensor(store.view("base").tensors["norm"])
        at = store._catalog.locate([tensor.block(0)])[0]
        pack = Path(store._catalog.packs.where(at.pack))
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(at.offset + at.stored_length // 2)
        file.write(b"damaged")
    mstore("fsck", "--repair", "--read-data")
    add = ("add", tmp_path / "base", "--name", "base", "--base", "none")
    done = mstore.succeed(*add)
    assert done.out.startswith("restored base: the store had lost some of its bytes (1 block)\n")
    assert "nothing new" not in done.out
    assert mstore.succeed("fsck", "--read-data", "-q").out == ""
    assert mstore.succeed(*add).out.startswith("nothing new: base holds these bytes already\n")


# -- hints for common slips --------------------------------------------------------------------


PLAN = ["plan", "--base", "base", "--expert", "expert"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (["plan", "--config", "r.yml"], "--recipe r.yml"),
        (["plan", "--config"], "--recipe FILE"),
        (["plan", "r.yaml"], "mstore plan --recipe r.yaml"),
        (["merge", "--plan", "r.yml", "--name", "m"], "mstore merge --recipe r.yml --name m"),
        ([*PLAN[:-1], "expert=much", "--method", "ties"], "--expert expert=0.5"),
        ([*PLAN[:-1], "=0.3", "--method", "ties"], "--expert REF=0.3"),
        ([*PLAN[:-1], "expert@{3..1}", "--method", "ties"], "--expert 'expert@{0..9}'"),
        ([*PLAN, "--method", "ties", "--only", "zzz*"], "mstore ls --tensors base"),
        (["cast", "expert", "--dtype", "F16", "--skip", "zzz*"], "mstore ls --tensors expert"),
        (["compare", "expert", "--base", "base", "--only", "zzz*"], "mstore ls --tensors base"),
        (["help", "merge", "plan"], "mstore help merge"),
        (["prune"], "mstore prune --keep-last 3 --dry-run"),
        (["show", "abc"], "the beginning of an id has at least 4 digits"),
        (["fsck", "--sample", "5"], "did you mean --sample 5%?"),
        ([*PLAN, "--method", "ties", "--top-p", "5"], "did you mean --top-p 5%?"),
        ([*PLAN[:-1], "expert:0.5", "--method", "ties"], "--expert expert=0.5"),
        ([*PLAN[:-1], "expert@-1", "--method", "ties"], "--expert expert=-1"),
        (["commit"], "mstore add PATH --name REF"),
        (["commit", "-m", "words"], "mstore add PATH --name REF"),
        (["branch"], "mstore refs lists branches"),
        (["push"], "mstore remote add NAME URL"),
        (["remote", "remove", "origin"], "mstore remote rm NAME"),
        (["status"], "mstore diff REF DIR"),
        (["log", "-3"], "mstore log -n 3"),
        (["log", "--graph", "-12"], "mstore log --graph -n 12"),
        (["cat", "base", "config.json"], "mstore cat base:config.json"),
        (
            ["merge", "base", "expert"],
            "give the base as --base base and experts as --expert expert",
        ),
        (["plan", "expert", "--base", "base"], "give experts as --expert expert"),
        (
            ["merge", "--recipe", "no.yml", "--name", "m"],
            "check the path; mstore recipe REF > FILE",
        ),
        (
            ["add", "https://huggingface.co/a/b/tree/v1", "--name", "m"],
            "mstore add hf://a/b@v1 --name REF",
        ),
        (["merge", "--abort"], "nothing to abort: a merge publishes all or nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_slips(line: list[str], hint: str, shared: Program) -> None:
    """A common slip is answered with what to type instead, and changes nothing."""
    done = shared(*line)
    assert done.status != 0
    assert done.out == ""
    told = done.err.partition("hint: ")[2]
    assert hint in told.replace(f"--store {shlex.quote(str(shared.store))} ", "")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        (["rename"], "OLD, NEW"),
        (["rename", "a"], "NEW"),
        (["extract-lora"], "REF, --base, --name"),
        (["merge"], "--name, what to merge (--plan, --recipe, or --base, --expert and --method)"),
        (["merge", "--base", "base"], "--name, --expert, --method"),
        (["merge", "--plan", "1234"], "--name"),
        (["merge", "--recipe", "r.yml"], "--name"),
        (
            ["merge", "--name", "m"],
            "what to merge (--plan, --recipe, or --base, --expert and --method)",
        ),
        (["plan"], "what to merge (--recipe, or --base, --expert and --method)"),
        (["plan", "--param", "density=1"], "--base, --expert, --method"),
    ],
    ids=" ".join,
)
def test_all_that_is_missing(line: list[str], missing: str, shared: Program) -> None:
    """A line that lacks several required words is told all of them at once."""
    done = shared(*line)
    assert done.status == 2
    assert done.err.startswith(f"error: missing: {missing}\nhint: ")


@pytest.mark.parametrize(
    "line",
    [
        *(["refs", ""], ["show", ""], ["rm", "base", ""], ["tag", "", "base"], ["tag", "v1", ""]),
        *(["reset", "", "base"], ["rename", "base", ""], ["diff", "", "base"], ["reflog", ""]),
        *(["mount", "", "DIR"], ["explain", "base", ""], ["cat", ""], ["note", "base", ""]),
    ],
    ids=str,
)
def test_empty_words(line: list[str], shared: Program) -> None:
    """An empty word, as of an unset variable, is refused by its place in the line."""
    done = shared(*line)
    assert (done.status, done.out) == (2, "")
    assert re.match(r"error: invalid value for '.+': it is empty\n", done.err)


def test_help_of_one_command(shared: Program) -> None:
    """`help` refuses a second command, and takes options."""
    refused = shared("help", "merge", "plan")
    assert refused.status == 2
    assert "error: help describes one command, not 2: merge plan\n" in refused.err
    assert shared.succeed("help", "merge", "--json").out.startswith("Usage: mstore merge ")


def test_options_that_are_not_near(shared: Program) -> None:
    """Dashes make no two options alike."""
    assert shared("add", "code", "--budget", "3").err.endswith(" add --help\n")
    assert "did you mean" not in shared("add", "code", "--budget", "3").err


def test_a_message_that_is_no_text(mstore: Program, tmp_path: Path) -> None:
    """Text that is not UTF-8 is refused in the words of the command line."""
    done = mstore("add", tmp_path / "base", "--name", "m", "-m", "\udcff")
    assert done.status == 2
    told = "error: invalid value for '--message' / '-m': text, not bytes that are not UTF-8: "
    assert done.err.startswith(told)


def test_a_model_of_another_shape(mstore: Program, tmp_path: Path) -> None:
    """The hint for a model that is no fine-tune of the base adds it as it is."""
    tensors = [("norm", "F32", (2, 2), bytes(16))]
    write_safetensors(tmp_path / "small" / "model.safetensors", tensors)
    done = mstore("add", tmp_path / "small", "--name", "small", "--base", "base")
    line = typed(mstore, f"add {tmp_path / 'small'} --name small --base none")
    assert f"hint: {line}; or --skip PATTERN " in done.err
    mstore.succeed(*shlex.split(line.partition(f"{mstore.store}' ")[2]))


def test_a_share_as_a_parameter(mstore: Program) -> None:
    """A parameter takes 30% as 0.3."""
    line = [*PLAN, "--method", "ties", "--json", "--param"]
    assert mstore.succeed(*line, "density=30%").document["parameters"]["density"] == 0.3
    assert "density" in mstore(*line, "density=x%").err
    assert mstore.succeed(*line, "normalize=1").document["parameters"]["normalize"] is True
    assert mstore.succeed(*line, "normalize=0").document["parameters"]["normalize"] is False


@pytest.mark.parametrize("verb", ["explain", "blame"])
def test_a_pattern_where_a_tensor_is_asked_for(verb: str, mstore: Program) -> None:
    """A pattern is refused with the names of tensors that it matches."""
    mstore.succeed(*MERGE, "--name", "merged")
    done = mstore(verb, "merged", "layers.*")
    assert done.status == 1
    assert "error: layers.*: takes one tensor, not a pattern" in done.err
    assert "did you mean layers.0.up?" in done.err
    assert "did you mean layers.1.up?" in done.err


def test_a_file_that_may_not_be_read() -> None:
    """Where the system refuses to read a file, the hint says how to find out who may."""
    told = io.StringIO()
    refused = StorageFailed("Permission denied", where="/a b/x", errno=errno.EACCES)
    assert report(refused, told) == 1
    assert "hint: ls -ld '/a b/x' says who may read it" in told.getvalue()


def test_merge_help_names_recipes(shared: Program) -> None:
    """People who come with a recipe learn from the help how to run it."""
    told = shared.succeed("merge", "--help").out
    assert "recipe of mergekit (YAML) or sd-mecha" in " ".join(told.split())


# -- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("refs", "[REF]..."),
        ("rm", "REF..."),
        ("add", "PATH..."),
        ("checkout", "REF[:MODEL] DIR [PATTERN]..."),
        ("tag", "[NAME] [REF]"),
        ("mount", "[REF[:MODEL]] DIR"),
        ("explain", "REF [TENSOR]"),
    ],
)
def test_usage_lines(verb: str, usage: str, shared: Program) -> None:
    """Usage lines write REF for one, [REF] for at most one, and dots for several."""
    out = shared.succeed(verb, "--help").out
    assert f"Usage: mstore {verb} [OPTIONS] {usage}\n" in out
    assert "<list[str]>" not in out


# -- merges that are the base ------------------------------------------------------------------


def test_weights_that_cancel(mstore: Program) -> None:
    """A sum of a model and its negative is refused as the base itself, unless that is meant."""
    line = [*MERGE[:-2], "--expert", "expert=-1", "--name", "m", "--method"]
    done = mstore(*line, "task_arithmetic")
    assert done.status == 2
    assert "their weights cancel: this merge would be the base itself" in done.err
    assert "--allow-noop" in done.err
    told = mstore.succeed(*line, "task_arithmetic", "--allow-noop").out
    assert "remark: every tensor of the result equals the base's" in told
    assert "cancel" not in mstore(*line, "ties").err
    assert "cancel" not in mstore(*line, "dare_linear", "--param", "density=50%").err


def test_a_merge_that_turned_out_to_be_the_base(mstore: Program) -> None:
    """A merge whose random mask kept nothing says that its result is the base."""
    line = [*MERGE[:-2], "--name", "m", "--method", "dare_linear", "--param"]
    assert "equals the base's" in mstore.succeed(*line, "density=1e-9").out
    assert "equals the base's" not in mstore.succeed(*line, "density=50%").out


@pytest.mark.parametrize(
    "line",
    [
        *(
            ["log", "--graph", "--svg", "x.png"],
            ["du", "--html", "x.PDF"],
            ["explain", "base", "--svg", "x.json"],
        ),
        *(["blame", "base", "--svg", "x.jpg"], ["du", "--html", "x.yml"]),
        ["plan", *MERGE[1:], "--sweep", "--svg", "x.html"],
        ["plan", *MERGE[1:], "-o", "x.yml"],
        ["plan", *MERGE[1:], "-o", "x.svg"],
    ],
    ids=" ".join,
)
def test_a_file_is_what_its_name_says(
    shared: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: list[str]
) -> None:
    """A picture or a plan is not written to a file whose name promises another format: the hint
    names one that fits."""
    monkeypatch.chdir(tmp_path)
    done = shared(*line)
    assert done.status == 2
    assert f"error: {line[-1]} would hold " in done.err
    form = "json" if "-o" in line else "html" if "--html" in line else "svg"
    assert f"hint: name it x.{form}\n" in done.err
    assert not list(tmp_path.glob("x.*"))


def test_other_names_of_files(
    mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose name promises no format may be called anything."""
    monkeypatch.chdir(tmp_path)
    for name in ("plan", "plan.1", "plan.JSON"):
        mstore.succeed("plan", *MERGE[1:], "-o", name)


@pytest.mark.parametrize(
    "line",
    [
        [*MERGE, "--name", "x", "--budget", "300%"],
        [*MERGE, "--name", "x", "--budget", "lots"],
        [*MERGE, "--name", "x", "--param", "nothing=1"],
        [*MERGE, "--name", "x", "--threads", "1000"],
        [*MERGE[:-1], "lineal", "--name", "x"],
        ["merge", "--base", "base", "--expert", "expert=x", "--method", "linear", "--name", "x"],
        [*MERGE, "--name", "a b"],
        ["tag", "a b", "base"],
        ["config", "codec", "zip"],
        ["config", "nothing", "1"],
        ["mount", "base", ".", "--cache", "much"],
        ["cast", "base", "--dtype", "float12", "--name", "x"],
        ["checkout", "base", "out", "--reflink=maybe"],
        ["fsck", "--sample", "300%"],
        ["init", "--block-size", "3MiB"],
        ["serve", "--port", "99999"],
        ["log", "-n", "0"],
        ["methods", "nothing"],
        ["extract-lora", "expert", "--base", "base", "--rank", "x", "--name", "x"],
        ["prune", "--keep-last", "-1"],
        ["diff", "base", "expert", "--tensor", ""],
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_wrong_usage(shared: Program, line: list[str]) -> None:
    """A value that no store takes ends with the status of wrong usage, whoever refuses it."""
    assert shared(*line).status == 2
