"""Evaluations: a command sees a snapshot, its numbers become a note, and nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from cli_runs import Program
from mount_drivers import why_not
from small_models import BLOCK, files_of, small_model

from mstore import BadRequest, CommandFailed, MergeRequest, NotFound, Store, Unavailable
from mstore.blocks.schema import JUDGED
from mstore.judging import process
from mstore.judging.evaluation import Show
from mstore.judging.scores import ResultFile, number_at, parse_score, parse_scores
from mstore_fuse.mounts import Mounted, mounts, shown

PYTHON = sys.executable
MOUNTED = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SAY = "import json, sys; json.dump(json.loads(sys.argv[1]), open('results.json', 'w'))"
"""Writes its first argument to a file of results."""


def build(root: Path) -> None:
    """A base and a fine-tune, in a store."""
    small_model(root / "base", "1")
    small_model(root / "tuned", "1", changed="2")
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        store.add(root / "tuned", name="tuned", base="base")


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def saying(document: object) -> list[str]:
    """A command that says this."""
    return [PYTHON, "-c", SAY, json.dumps(document)]


def running(word: str) -> bool:
    """Whether a process has this word among its arguments."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word.encode() in words and state != "Z":
            return True
    return False


def a_word() -> str:
    """Seconds of a sleep that nothing else on this machine sleeps."""
    return f"{100_000 + os.getpid() % 10_000}.{time.monotonic_ns() % 10**9:09}"


# -- the command ---------------------------------------------------------------------------------


def mounted(store: Store) -> Show:
    """Shows snapshots of a store by mounts."""
    return lambda id, scratch: shown(store.path, str(id), scratch / "model")


@pytest.fixture(params=["checkout", pytest.param("mount", marks=MOUNTED)])
def judge(request: pytest.FixtureRequest, store: Store) -> Callable[..., object]:
    """`store.evaluate`, with either way to show a snapshot."""
    if request.param == "checkout":
        return store.evaluate
    return partial(store.evaluate, show=mounted(store))


@pytest.mark.sampled(2)
def test_a_command_sees_the_files(judge: Callable[..., object], store: Store, copied: Path) -> None:
    """The directory in the words and in the variable is the snapshot, byte for byte."""
    copy = copied / "seen"
    judge("tuned", ["sh", "-c", f'cp -r {{}} "{copy}" && cp -r "$MSTORE_DIR" "{copy}-2"'])
    assert files_of(copy) == files_of(Path(f"{copy}-2")) == files_of(copied / "tuned")
    assert not [one for one in mounts() if one.store == store.path]


def test_no_shell_reads_it(store: Store) -> None:
    """A word is one argument, whatever is in it."""
    report = store.evaluate("base", ["test", "a b; false $(false) {}", "!=", "a"])
    assert report.exit_status == 0


@pytest.mark.sampled(2)
def test_scores_become_a_note(judge: Callable[..., object], store: Store) -> None:
    """Scores, command, status, time and digest are in a note of kind evaluation."""
    command = saying({"acc": 0.5, "deep": {"b.c": {"acc,none": 0.75}}})
    scores = ["results.json:acc", "best=results.json:deep.b.c.acc,none"]
    judge("base", command, scores=scores, name="mine")
    (note,) = store.notes_of("base")
    assert (note.kind, note.key) == ("evaluation", "mine")
    assert note.value["scores"] == {"acc": 0.5, "best": 0.75}
    assert note.value["command"] == command
    assert note.value["score"] == [f"acc={scores[0]}", scores[1]]
    assert note.value["exit_status"] == 0
    assert set(note.value["results"]) == {"results.json"}
    assert note.value["seconds"] > 0


def test_the_exit_status_is_a_score(store: Store) -> None:
    """Without a score, the status says whether it passed; the same command replaces its note."""
    assert store.evaluate("base", ["true"]).scores == {"passed": 1.0}
    report = store.evaluate("base", ["sh", "-c", "exit 7"], name="true")
    assert (report.scores, report.exit_status) == ({"passed": 0.0}, 7)
    assert [one.value["exit_status"] for one in store.notes_of("base")] == [7]
    assert len(store.notes_of("base", every=True)) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("command", "scores", "why"),
    [
        (["/nowhere/x"], [], "no such file"),
        ([PYTHON, "-c", SAY, "[]"], ["other.json:acc"], "wrote no such file"),
        (["true"], ["results.json:acc"], "wrote no such file"),
        (["sh", "-c", "echo '{\"acc\": 1}' > results.json; exit 4"], ["*.json:acc"], "status 4"),
        (["sh", "-c", "kill -SEGV $$"], [], "signal 11"),
        (saying({"acc": "high"}), ["results.json:acc"], "no number at"),
        (["sh", "-c", "echo '{\"acc\": NaN}' > results.json"], ["*:acc"], "no finite number"),
        (["sh", "-c", "echo '{' > results.json"], ["*.json:acc"], "not JSON"),
        (saying({"acc": 1}), ["results.json:loss"], "nothing at"),
        (["ln", "-s", "/etc/os-release", "x"], ["x:acc"], "wrote no such file"),
    ],
)
def test_what_is_no_evaluation(
    command: list[str], scores: list[str], why: str, store: Store
) -> None:
    """A command that fails, or that leaves no score, is an error, and nothing is noted."""
    with pytest.raises(CommandFailed, match=why):
        store.evaluate("base", command, scores=scores)
    assert store.notes_of("base") == ()


def test_a_relative_file_is_explained(
    store: Store, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names a script in the working directory is told that the command runs elsewhere."""
    monkeypatch.chdir(copied)
    Path("score.py").write_text("")
    with pytest.raises(CommandFailed) as failed:
        store.evaluate("base", [PYTHON, "score.py"])
    assert '"$PWD/score.py"' in str(failed.value.hint)
    assert store.notes_of("base") == ()


def test_a_file_of_an_absolute_name_is_of_this_run(store: Store, copied: Path) -> None:
    """A result elsewhere counts if this run wrote it, and an old one does not."""
    file = copied / "out.json"
    file.write_text('{"acc": 0.9}')
    score = f"{file}:acc"
    with pytest.raises(CommandFailed, match="wrote no such file"):
        store.evaluate("base", ["true"], scores=[score])
    write = ["sh", "-c", f"echo '{{\"acc\": 0.25}}' > '{file}'"]
    assert store.evaluate("base", write, scores=[score]).scores == {"acc": 0.25}


def test_the_newest_file_counts(store: Store) -> None:
    """Of several files that match, also in directories, the newest is read."""
    write = (
        "import os, sys\nfor n, (name, at) in enumerate([('b/r_2.json', 5), ('a/r_1.json', 9)]):\n"
    )
    write += "    os.makedirs(name[0]); open(name, 'w').write('{\"acc\": %d}' % n)\n"
    write += "    os.utime(name, (at, at))"
    report = store.evaluate("base", [PYTHON, "-c", write], scores=["**/r_*.json:acc"], name="x")
    assert report.scores == {"acc": 1.0}
    assert set(report.results) == {"a/r_1.json"}


# -- its processes -------------------------------------------------------------------------------


@pytest.mark.rest
def test_a_command_that_hangs_is_ended(store: Store) -> None:
    """After its time it is killed, with children that have left for other sessions, or ignore
    signals, or hold its output open."""
    word = a_word()
    script = f"trap '' TERM HUP INT; setsid sleep {word} & (setsid nohup sleep {word} &); "
    began = time.monotonic()
    with pytest.raises(CommandFailed, match="took longer than 1 second,"):
        store.evaluate("base", ["sh", "-c", script + f"sleep {word}"], timeout=1)
    assert time.monotonic() - began < 60
    assert not running(word)


def test_what_a_command_leaves_is_ended(store: Store) -> None:
    """A process that outlives the command is ended when the command has, and nobody waits for
    it."""
    word = a_word()
    daemon = "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    daemon += f"os.execvp('sleep', ['sleep', '{word}'])"
    assert store.evaluate("base", [PYTHON, "-c", daemon], name="x").exit_status == 0
    assert not running(word)


def test_other_children_are_left_alone(store: Store) -> None:
    """A child of this process that has nothing to do with the command lives on, and is its own."""
    other = subprocess.Popen(["sleep", "1000"])
    try:
        store.evaluate("base", ["true"])
        assert other.poll() is None
    finally:
        other.kill()
        assert other.wait() == -signal.SIGKILL


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["checkout", pytest.param("mount", marks=MOUNTED)])
def test_kill_9_leaves_nothing_behind(how: str, copied: Path) -> None:
    """If mstore is killed, the command ends, the mount ends, the scratch directory goes with the
    checkout, and nothing is noted."""
    word, scratch = a_word(), copied / "scratch"
    scratch.mkdir()
    command = [PYTHON, "-m", "mstore_cli", "--store", str(copied / "store"), "eval", "base"]
    command += ["--checkout"] * (how == "checkout") + ["--", "sh", "-c", f"sleep {word}; true"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    wait_until(lambda: running(word))
    here = [one for one in mounts() if one.store == copied / "store"]
    assert len(here) == (how == "mount")
    assert list(scratch.glob("*/model/config.json"))
    child.kill()
    child.wait()
    wait_until(lambda: not running(word))
    wait_until(lambda: not [one for one in mounts() if one.store == copied / "store"])
    wait_until(lambda: not list(scratch.iterdir()))
    with Store.open(copied / "store") as store:
        assert store.notes_of("base") == ()
        assert not store.fsck().problems


@pytest.mark.rest
def test_ctrl_c_ends_the_command(copied: Path) -> None:
    """Ctrl-C ends it with all that it started, and nothing is noted."""
    word = a_word()
    command = [PYTHON, "-m", "mstore_cli", "--store", str(copied / "store")]
    command += ["eval", "base", "--", "sh", "-c", f"trap '' INT; sleep {word}; true"]
    (copied / "scratch").mkdir()
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(copied / "scratch")},
    )
    wait_until(lambda: running(word))
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, b"interrupted" in said) == (130, True)
    assert not running(word)
    assert list((copied / "scratch").iterdir()) == []


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_watches_may_be_killed(store: Store) -> None:
    """If the process between is killed, the command dies with it, and that is an error."""
    word = a_word()
    script = f"kill -9 $PPID; exec sleep {word}"
    with pytest.raises(CommandFailed, match="what watched it was killed"):
        store.evaluate("base", ["sh", "-c", script])
    wait_until(lambda: not running(word))


# -- the files -----------------------------------------------------------------------------------


@pytest.mark.rest
@MOUNTED
def test_mounts_that_stay(store: Store, copied: Path) -> None:
    """Snapshots that are shown one after the other have one mount, and those that are shown at the
    same time one each; at the end none is left."""

    def count() -> int:
        return sum(one.store == store.path for one in mounts())

    base, tuned = store["base"].id, store["tuned"].id
    with Mounted(store.path) as mounted:
        for id, name in ((base, "base"), (tuned, "tuned")):
            # What fails meanwhile keeps nobody from the mount.
            with suppress(CommandFailed), mounted.show(id, copied) as shown_at:
                assert files_of(shown_at) == files_of(copied / name)
                raise CommandFailed("it failed")
            assert count() == 1
        with mounted.show(base, copied) as one, mounted.show(base, copied) as other:
            assert (one.name, files_of(one)) == (other.name, files_of(other))
            assert one != other
            assert count() == 2
    assert count() == 0
    late = ExitStack()
    with Mounted(store.path) as mounted:
        late.enter_context(mounted.show(base, copied))
    # Of the threads of a search that was interrupted, nobody waits for one.
    assert count() == 0
    with pytest.raises(Unavailable, match="does not answer"):
        late.close()


@pytest.mark.rest
@MOUNTED
def test_a_mount_that_stays_and_ends(store: Store, copied: Path) -> None:
    """If its process is killed, what shows says so, and the next snapshot has another mount."""

    def kill() -> None:
        (own,) = (one for one in mounts() if one.store == store.path)
        assert own.pid is not None
        os.kill(own.pid, signal.SIGKILL)
        while (Path("/proc") / str(own.pid)).exists():
            time.sleep(0.01)

    with Mounted(store.path) as mounted:
        with pytest.raises(Unavailable, match="ended"), mounted.show(store["base"].id, copied):
            kill()
        assert not [one for one in mounts() if one.store == store.path]
        with mounted.show(store["base"].id, copied) as shown_at:
            assert files_of(shown_at) == files_of(copied / "base")


@MOUNTED
def test_a_mount_cannot_be_written(store: Store) -> None:
    """A write into the mount fails, and the command's own failure is no success."""
    script = "echo x > $MSTORE_DIR/config.json || exit 5"
    assert store.evaluate("base", ["sh", "-c", script], show=mounted(store)).exit_status == 5
    assert not store.fsck(read_data=True).problems


def test_a_checkout_that_was_changed_is_refused(store: Store) -> None:
    """If the command changes a file of the checkout, its score is of another model: an error."""
    for script in ("echo x > {}/config.json", "touch {}/new", "rm {}/config.json"):
        with pytest.raises(CommandFailed, match="changed the files"):
            store.evaluate("base", ["sh", "-c", script])
    assert store.notes_of("base") == ()


# -- pointers ------------------------------------------------------------------------------------

DOCUMENT = {
    "results": {"mmlu": {"acc,none": 0.5}, "mmlu.pro": {"acc": 0.25}, "two words": {"f1": 1}},
    "results.mmlu": {"other": 2},
    "list": [{"x": 3}, True],
    "a/b": {"~": 4},
}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("results.mmlu.acc,none", 0.5),
        ("results.mmlu.pro.acc", 0.25),
        ("results.mmlu.other", 2.0),
        ("results.two words.f1", 1.0),
        ("list.0.x", 3.0),
        ("list.1", 1.0),
        ("/results/mmlu/acc,none", 0.5),
        ("/results/mmlu.pro/acc", 0.25),
        ("/a~1b/~0", 4.0),
        ("/list/0/x", 3.0),
    ],
)
def test_pointers(pointer: str, value: float) -> None:
    """Keys with dots, commas, spaces and slashes are found."""
    score = parse_score(f"n=results.json:{pointer}")
    assert number_at(ResultFile("results.json", "", DOCUMENT), score) == value


@pytest.mark.parametrize("pointer", ["results", "results.mmlu", "list.2", "list.-1", "/a/b", "x"])
def test_pointers_to_nothing(pointer: str) -> None:
    """What leads to no number is an error."""
    with pytest.raises(CommandFailed):
        number_at(ResultFile("results.json", "", DOCUMENT), parse_score(f"results.json:{pointer}"))


@pytest.mark.parametrize(
    ("text", "name", "file"),
    [
        ("r.json:results.mmlu.acc,none", "acc", "r.json"),
        ("mmlu=r.json:results.mmlu.acc,none", "mmlu", "r.json"),
        ("./a=b.json:acc", "acc", "./a=b.json"),
        ("**/r_*.json:/x/y z", "y z", "**/r_*.json"),
    ],
)
def test_names_of_scores(text: str, name: str, file: str) -> None:
    """A score has a name before `=`, else the last key without what follows a comma."""
    found = parse_score(text)
    assert (found.name, found.file) == (name, file)
    assert parse_score(str(found)) == found


@pytest.mark.parametrize("text", ["", "r.json", "r.json:", ":acc", "n=r.json", "../r.json:acc"])
def test_what_is_no_score(text: str) -> None:
    """What names no file, or no number, or a file of an earlier run, is refused at once."""
    with pytest.raises(BadRequest):
        parse_score(text)


def test_two_scores_of_one_name(store: Store) -> None:
    """Two scores of one name are refused before anything runs."""
    with pytest.raises(BadRequest, match="two scores are called 'acc'"):
        parse_scores(["r.json:a.acc", "r.json:b.acc"])
    for words in ([], [""], "true"):
        with pytest.raises(BadRequest):
            store.evaluate("base", words)
    with pytest.raises(BadRequest):
        store.evaluate("base", ["true"], timeout=0)
    with pytest.raises(NotFound):
        store.evaluate("nothing", ["true"])


# -- lm-evaluation-harness -----------------------------------------------------------------------


def test_files_of_the_harness(store: Store) -> None:
    """Dated files are found, and hashes of tasks and scores of samples are noted with the score."""
    result = {
        "results": {"arith": {"alias": "arith", "acc,none": 0.75, "acc_stderr,none": 0.1}},
        "task_hashes": {"arith": "abc"},
        "versions": {"arith": 1.0},
        "n-samples": {"arith": {"original": 4, "effective": 4}},
        "higher_is_better": {"arith": {"acc": True}},
        "config": {"model": "hf"},
    }
    samples = [
        {"doc_id": n, "doc_hash": f"h{n}", "filter": "none", "acc": float(n != 2)} for n in range(4)
    ]
    write = (
        "import json, os\nos.mkdir('model'); os.chdir('model')\n"
        f"json.dump({result!r}, open('results_2026-01-01T00-00-00.1.json', 'w'))\n"
        "with open('samples_arith_2026-01-01T00-00-00.1.jsonl', 'w') as file:\n"
        f"    for one in {samples!r}: file.write(json.dumps(one) + '\\n')\n"
    )
    score = "**/results_*.json:results.arith.acc,none"
    report = store.evaluate("base", [PYTHON, "-c", write], scores=[score], name="arith")
    assert report.scores == {"acc": 0.75}
    assert report.tasks == {
        key: result[key] for key in ("task_hashes", "versions", "n-samples", "higher_is_better")
    }
    assert report.sampled == ("acc",)
    (note,) = store.notes_of("base")
    assert note.value["samples"]["acc"]["bits"] == f"{0b11101:x}"


# -- what this store found out itself --------------------------------------------------------------


def rows(store: Store) -> list[object]:
    """What this store judged."""
    index = store._catalog.index
    with index.env.read() as transaction:
        return [key for key, _ in index.walk(transaction, JUDGED)]


def test_only_a_run_marks_its_note(store: Store, tmp_path: Path) -> None:
    """A note by hand has no row, and a clone, a backup or a removal has none of it either."""
    store.note("base", {"acc": 0.99}, kind="evaluation")
    assert rows(store) == []
    report = store.evaluate("base", ["true"])
    assert rows(store) == [(report.snapshot, "true")]
    Store.clone(store.path, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as clone:
        assert [one.key for one in clone.notes_of("base")] == ["acc", "true"]
        assert rows(clone) == []
    store.backup(tmp_path / "backup")
    with Store.open(tmp_path / "backup") as copy:
        assert rows(copy) == []
    assert not store.fsck().problems
    store.remove_notes("base", [report.note])
    assert rows(store) == []


def test_rows_go_with_their_snapshot(store: Store) -> None:
    """gc of a snapshot takes its row along."""
    store.evaluate("tuned", ["true"])
    store.remove("tuned")
    store.gc(reflog_days=0)
    assert rows(store) == []
    assert not store.fsck().problems


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def mstore(copied: Path) -> Program:
    return Program(copied / "store")


def test_the_command_line(mstore: Program) -> None:
    """`mstore eval` notes the score and exits with 0, and `log --notes` shows it in a few words."""
    done = mstore.succeed(
        *("eval", "base", "--score", "results.json:acc", "--as", "mine", "--json", "--"),
        *saying({"acc": 0.5}),
    )
    assert done.document["scores"] == {"acc": 0.5}
    assert "evaluation mine = acc 0.5" in mstore.succeed("log", "--notes").out


def test_exit_statuses(mstore: Program) -> None:
    """3: the command said no, which was noted; 1: it said nothing; 2: there is no command."""
    assert mstore("eval", "base", "--", "false").status == 3
    assert mstore("eval", "base", "--score", "r.json:x", "--", "true").status == 1
    assert mstore("eval", "base").status == 2
    assert mstore("eval", "base", "--timeout", "soon", "--", "true").status == 2
    done = mstore("eval", "base", "--timeout", "1s", "--json", "--", "sleep", "1000")
    assert (done.status, done.document["error"]["code"]) == (1, "command-failed")


def test_without_fuse(mstore: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be mounted, the snapshot is checked out, and a remark says so."""
    monkeypatch.setattr("mstore_fuse.fuse_driver.DEVICE", Path("/dev/nothing"))
    done = mstore.succeed("eval", "base", "--", "test", "-f", "{}/config.json")
    assert "checked out, as nothing can be mounted: this machine has no FUSE" in done.err


def test_metrics(mstore: Program, store: Store) -> None:
    """A row for each ref with a score: method, parameters, budget, scores; sorted, also as CSV."""
    plan = store.plan(MergeRequest(base="base", experts=[("tuned", 0.5)], method="linear"))
    store.merge(plan, name="merged")
    assert "no evaluations yet" in mstore.succeed("metrics").out
    for name, acc in (("base", 0.25), ("merged", 0.75)):
        store.evaluate(name, saying({"acc": acc}), scores=["results.json:acc"], name="mine")
    store.note("merged", {"judge": 8}, kind="evaluation")
    shown = mstore.succeed("metrics", "--sort", "acc").lines
    assert [line.split()[0] for line in shown] == ["REF", "merged", "base"]
    assert "linear" in shown[1]
    assert "0.75" in shown[1]
    assert [line.split()[0] for line in mstore.succeed("metrics", "--sort=-acc").lines][1] == "base"
    table = mstore.succeed("metrics", "--csv").lines
    assert table[0] == "ref,snapshot,method,parameters,budget_bytes,acc,judge"
    assert table[2].endswith(",0.75,8.0")
    found = mstore.succeed("metrics", "tuned", "--json").document["metrics"]
    assert [(one["name"], one["scores"]) for one in found] == [("tuned", {})]
    store.evaluate("base", saying({"acc": 1}), scores=["results.json:acc"], name="other")
    named = {key for row in store.metrics() for key in row.scores}
    assert named == {"mine:acc", "other:acc", "judge"}
    assert mstore("metrics", "--sort", "nothing").status == 2
    unclear = mstore("metrics", "--sort", "acc")
    assert (unclear.status, "mine:acc, other:acc" in unclear.err) == (2, True)


def test_one_column_for_several_keys(mstore: Program, store: Store) -> None:
    """A score is one column, whatever the keys, where no snapshot has two values of it."""
    for name, acc, key in (("base", 0.25, "mine"), ("tuned", 0.5, "gate"), ("tuned", 0.5, "mine")):
        store.evaluate(name, saying({"acc": acc}), scores=["results.json:acc"], name=key)
    lines = mstore.succeed("metrics", "--sort", "acc").lines
    assert [line.split()[0] for line in lines] == ["REF", "tuned", "base"]
    assert store.metrics("tuned")[0].scores == {"acc": 0.5}


def test_a_python_of_this_program_watches(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Where the program names no Python, nothing runs."""
    monkeypatch.setattr(process.sys, "executable", "")
    with pytest.raises(Exception, match="needs a Python"):
        store.evaluate("base", ["true"])


def test_scratch_directories_go(store: Store, tmp_path: Path) -> None:
    """After a run, and after one that failed, nothing is left in the directory for scratch."""
    import tempfile

    above = tmp_path / "scratch"
    above.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(above)
    try:
        store.evaluate("base", ["touch", "x"])
        with pytest.raises(CommandFailed):
            store.evaluate("base", ["touch", "x"], scores=["y:z"])
        assert list(above.iterdir()) == []
    finally:
        tempfile.tempdir = before
    shutil.rmtree(above)
