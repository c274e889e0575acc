"""Gates: a branch moves to what has passed, and to nothing else, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import families
import pytest
from cli_runs import Program
from families import BLOCK
from test_evaluations import MOUNTED, a_word, running, wait_until

from mstore import (
    BadRequest,
    Conflict,
    Gate,
    GateFailed,
    MergeRequest,
    NotFound,
    Store,
    WrongCommand,
)
from mstore.judging.gate import Minimum, parse_minimum
from mstore.judging.pairing import p_value
from mstore.judging.scores import Samples
from mstore.snapshots.signing import SigningKey
from mstore.terms.ids import SnapshotId

FAMILY = families.layered(rows=40)
PYTHON = sys.executable
SAY = "import json, sys; json.dump({'acc': float(sys.argv[1])}, open('r.json', 'w'))"
MERGE = ("--base", "base", "--expert", "e0", "--expert", "e1=0.5", "--method", "linear")


def build(root: Path) -> None:
    """The family's checkpoints, and a store that has them, with a branch that a merge may move."""
    FAMILY.write(root)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in FAMILY.names:
            store.add(root / name, name=name, base="base")
        store.reset("m", "base")


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


@pytest.fixture
def mstore(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program, with settings of the user in a directory of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(copied / "config"))
    return Program(copied / "store")


def saying(acc: float | str, *minimums: str, name: str = "g") -> Gate:
    """A gate whose command gives each snapshot this score."""
    return Gate.of([PYTHON, "-c", SAY, str(acc)], name=name, minimums=minimums)


def merge(store: Store, run: str = "run", weight: float = 0.5) -> tuple[str, SnapshotId]:
    """A candidate for the branch `m`, and its snapshot."""
    plan = store.plan(MergeRequest(base="base", experts=["e0", ("e1", weight)], method="linear"))
    made = store.merge(plan, name="m", candidate=run)
    return made.name, made.snapshot


def settings(copied: Path, command: str, **more: object) -> None:
    """Settings of the user with the gate `quality`."""
    file = copied / "config" / "mstore" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in more.items()]
    file.write_text(f"[gates.quality]\ncommand = {json.dumps(command)}\n" + "".join(lines))


# -- a guarded move ------------------------------------------------------------------------------


def test_a_candidate_that_passes_moves_the_branch(store: Store) -> None:
    """The branch is at the candidate's snapshot, the candidate is gone, the verdict is a note."""
    was = store["m"].id
    name, snapshot = merge(store)
    report = store.move_if_passed(name, was, [saying(0.7, "acc=0.61")])
    assert (report.moved, report.kept, report.name) == (True, False, "m")
    assert store.reflog("m")[0].action == "merge: linear, passed g"
    assert store["m"].id == snapshot
    assert store.refs("m")[0].kind == "branch"
    assert store.candidates() == []
    kinds = {one.kind: one.value for one in store.notes_of(snapshot)}
    assert kinds["evaluation"]["scores"] == {"acc": 0.7}
    assert kinds["verdict"]["passed"] is True
    assert kinds["verdict"]["minimums"] == ["acc>=0.61"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keeps", [False, True])
def test_one_that_does_not_pass_moves_nothing(store: Store, keeps: bool) -> None:
    """The branch is where it was; the candidate is dropped, or kept until somebody drops it."""
    was = store["m"].id
    name, _ = merge(store)
    report = store.move_if_passed(name, was, [saying(0.6, "acc=0.61")], keep_failed=keeps)
    assert (report.moved, report.kept, store["m"].id) == (False, keeps, was)
    (comparison,) = report.verdicts[0].comparisons
    assert (comparison.value, comparison.limit, comparison.held) == (0.6, 0.61, False)
    found = store.candidates()
    assert [(one.candidate, one.name, one.failed) for one in found] == [(name, "m", ("g",))] * keeps
    assert len(store.reflog("m")) == 1
    assert not store.fsck().problems


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sleep {word}", "took longer than 1 second,"),
        ("setsid sleep {word} & exec sleep {word}", "took longer than 1 second,"),
        ("exit 9", "ended with status 9"),
        ("kill -9 $$", "ended with signal 9"),
        ("echo x > $MSTORE_DIR/config.json; echo '{{\"acc\": 1}}' > r.json", "changed the files"),
    ],
)
def test_commands_that_judge_nothing(store: Store, script: str, why: str) -> None:
    """A command that hangs, forks, changes the files, or fails does not pass."""
    word, was = a_word(), store["m"].id
    name, snapshot = merge(store)
    words = ["sh", "-c", script.format(word=word)]
    gate = Gate.of(words, name="g", minimums=["acc=0.5"], timeout=1 if "sleep" in script else 60)
    report = store.move_if_passed(name, was, [gate])
    assert not report.moved
    assert why in str(report.verdicts[0].reason)
    assert store["m"].id == was
    assert not running(word)
    (verdict,) = (one for one in store.notes_of(snapshot) if one.kind == "verdict")
    assert verdict.value["passed"] is False


@pytest.mark.sampled(8)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["/no/such/program", "{}"], "cannot be started"),
        (["true", "{}"], "wrote no such file"),
        (["sh", "-c", 'echo "{\\"f1\\": {\\"mean\\": 1}}" > r.json'], "; it has f1.mean"),
        ([PYTHON, "score.py", "{}"], "ended with status 2"),
    ],
)
def test_a_wrong_command_is_no_verdict(
    store: Store, words: list[str], why: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that does not start, or leaves no such score, is an error: nothing is noted, and
    the candidate goes unless it is to be kept."""
    monkeypatch.chdir(store.path.parent)
    Path("score.py").touch()
    was = store["m"].id
    name, snapshot = merge(store)
    gate = Gate.of(words, name="g", minimums=["acc=0.5"])
    with pytest.raises(WrongCommand, match=why) as refused:
        store.move_if_passed(name, was, [gate], keep_failed=keeps)
    assert ('write "$PWD/score.py"' in str(refused.value.hint)) == ("score.py" in words)
    assert store["m"].id == was
    assert [one.candidate for one in store.candidates()] == [name] * keeps
    assert store.judged(snapshot) == []


@pytest.mark.rest
def test_gates_run_in_order_until_one_says_no(store: Store) -> None:
    """All must pass, and those after one that does not are not run."""
    name, _ = merge(store)
    gates = [saying(1, name="a"), saying(0, "acc=1", name="b"), saying(1, name="c")]
    report = store.move_if_passed(name, store["m"].id, gates)
    assert [(one.gate, one.passed) for one in report.verdicts] == [("a", True), ("b", False)]


def test_two_gates_at_once_on_one_branch(copied: Path) -> None:
    """Both candidates pass; the first moves the branch, the other is an error and is dropped."""
    with Store.open(copied / "store") as store:
        was = store["m"].id
        found = [merge(store, run, weight) for run, weight in (("one", 0.5), ("two", 0.25))]
    outcomes: list[object] = []

    def judge(name: str) -> None:
        # Both wait for each other, so that both have begun when one of them moves the branch.
        script = f"touch {copied}/{name.split('/')[1]}; while ! [ -e {copied}/one -a -e "
        script += f"{copied}/two ]; do sleep 0.05; done"
        with Store.open(copied / "store") as mine:
            try:
                gate = Gate.of(["sh", "-c", script], name=name, timeout=100)
                outcomes.append(mine.move_if_passed(name, was, [gate]))
            except Conflict as error:
                outcomes.append(error)

    threads = [threading.Thread(target=judge, args=(name,)) for name, _ in found]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    refused = [one for one in outcomes if isinstance(one, Conflict)]
    moved = [one for one in outcomes if not isinstance(one, Conflict)]
    assert (len(refused), len(moved)) == (1, 1)
    with Store.open(copied / "store") as store:
        assert store["m"].id == moved[0].snapshot  # type: ignore[attr-defined]
        assert store["m"].id in {snapshot for _, snapshot in found}
        assert store.candidates() == []


STEPS = {
    # What runs when the program is killed: a script that waits for ever, at each step of a gate.
    "before": "sleep {word}",
    "in the middle": "echo '{{\"acc\": 1}}' > r.json; sleep {word}",
}


@pytest.mark.rest
@MOUNTED
@pytest.mark.parametrize("step", STEPS)
def test_kill_9_while_it_is_judged(step: str, copied: Path) -> None:
    """The branch is where it was, the store is sound, no process and no mount is left, and the
    candidate can be dropped."""
    word = a_word()
    script = STEPS[step].format(word=word)
    with Store.open(copied / "store") as store:
        was = store["m"].id
    line = [PYTHON, "-m", "mstore_cli", "--store", str(copied / "store"), "merge", *MERGE]
    line += ["--name", "m", "--check", f"sh -c {json.dumps(script)}", "--min", "acc=0.5"]
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: running(word))
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_until(lambda: not running(word))
    with Store.open(copied / "store") as store:
        assert store["m"].id == was
        assert not store.fsck(read_data=True).problems
        (left,) = store.candidates()
        assert (left.passed, left.failed) == ((), ())
        store.remove(left.candidate)
        store.gc(reflog_days=0)
        assert store["m"].id == was


@pytest.mark.rest
def test_kill_9_at_each_commit(copied: Path) -> None:
    """Killed before or after any commit of a gate, the branch is where it was or at a snapshot
    that passed, and the store is sound."""
    program = """
import os, signal, sys
from mstore import Gate, MergeRequest, Store, fs
seen = 0
def die(operation):
    global seen
    if operation.kind in ("commit", "committed"):
        seen += 1
        if seen == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
with Store.open(sys.argv[1]) as store:
    plan = store.plan(MergeRequest(base="base", experts=["e0", ("e1", 0.5)], method="linear"))
    with fs.observed(die):
        made = store.merge(plan, name="m", candidate="run")
        gate = Gate.of(["true"], name="g")
        store.move_if_passed(made.name, made.was, [gate])
print(seen)
"""
    with Store.open(copied / "store") as store:
        was = store["m"].id
    ends = set()
    for number in range(1, 20):
        root = copied / f"try-{number}"
        shutil.copytree(copied / "store", root)
        words = [PYTHON, "-c", program, str(root), str(number)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        with Store.open(root) as store:
            at = store["m"].id
            if at != was:
                assert [one.passed for one in store.judged(at)] == [True]
            assert not store.fsck().problems
            ends.add(at == was)
        shutil.rmtree(root)
        if done.returncode == 0:
            break
    assert number > 3
    assert ends == {False, True}


# -- least scores --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("acc=0.61", Minimum("acc", ">=", "", 0.61)),
        ("acc >= 0.61", Minimum("acc", ">=", "", 0.61)),
        ("loss<=2.5e-1", Minimum("loss", "<=", "", 0.25)),
        ("acc>=base-0.01", Minimum("acc", ">=", "base", -0.01)),
        ("acc>=base", Minimum("acc", ">=", "base", 0)),
        ("a.b,none>=llama/v1@{2} + 1", Minimum("a.b,none", ">=", "llama/v1@{2}", 1)),
        ("acc>=v-0.01+0", Minimum("acc", ">=", "v-0.01", 0)),
    ],
)  # fmt: skip
def test_texts_of_least_scores(text: str, expected: Minimum) -> None:
    """A limit is a number, or a revision with an offset; a text of one is read again the same."""
    assert parse_minimum(text) == expected
    assert parse_minimum(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "acc", "=0.5", "acc=", "acc>0.5", "acc==0.5", "acc>>=0.5", "acc=>1", "acc>=base*0.9"],
)
def test_what_is_no_least_score(text: str) -> None:
    """What has no score, no limit, or another sign is refused."""
    with pytest.raises(BadRequest, match="not a limit"):
        parse_minimum(text)


def test_the_first_snapshot_of_a_branch(store: Store) -> None:
    """A limit by the previous snapshot asks nothing where there is none, and the verdict says so;
    a limit by a base that the snapshot does not have is an error."""
    (verdict,) = store.judge("base", [saying(0.1, "acc>=previous")])
    (one,) = verdict.comparisons
    assert (verdict.passed, one.limit, one.reference_value) == (True, None, None)
    from mstore_cli.judging import described

    assert described(one) == "acc 0.1: there is no previous snapshot yet, so it has no limit"
    with Store.init(store.path.parent / "other", block_size=BLOCK) as other:
        other.add(store.path.parent / "base", name="x")
        with pytest.raises(NotFound):
            other.judge("x", [saying(0.1, "acc>=base")])


@pytest.mark.rest
def test_a_limit_by_another_snapshot(store: Store, tmp_path: Path) -> None:
    """The reference is evaluated by the same command, once; `previous` and `base` are parents."""
    counting = f'echo x >> {tmp_path}/runs; {PYTHON} -c "{SAY}" $(wc -c < $MSTORE_DIR/n || echo 1)'
    store.evaluate("base", ["true"])
    gate = Gate.of(["sh", "-c", counting], name="g", minimums=["acc>=base-0.5"])
    name, _ = merge(store)
    (verdict,) = store.judge(name, [gate])
    (one,) = verdict.comparisons
    assert (one.reference, one.reference_value, one.limit, verdict.passed) == ("base", 1, 0.5, True)
    assert (tmp_path / "runs").read_text() == "x\nx\n"
    store.judge(name, [gate])
    assert (tmp_path / "runs").read_text() == "x\nx\nx\n"
    other = Gate.of(gate.command.words, name="g", minimums=["acc>=previous"])
    assert store.judge(name, [other])[0].passed
    with pytest.raises(NotFound):
        store.judge(name, [Gate.of(["true"], minimums=["acc>=nothing"])])


def test_an_evaluation_from_elsewhere_is_no_reference(store: Store) -> None:
    """A note that somebody wrote, or that was fetched, does not lower the limit."""
    command = [PYTHON, "-c", SAY, "0.5"]
    scores = ["acc=**/*.json:acc"]
    forged = {
        "command": command, "score": scores, "scores": {"acc": 0.1}, "exit_status": 0,
        "seconds": 1, "results": {},
    }  # fmt: skip
    gate = Gate.of(command, name="g", minimums=["acc>=base"])
    store.note("base", {"g": forged}, kind="evaluation")
    (verdict,) = store.judge("e0", [gate])
    assert verdict.comparisons[0].reference_value == 0.5


# -- single samples ------------------------------------------------------------------------------


def samples(*values: float) -> Samples:
    return Samples("same", tuple(float(value) for value in values))


def test_mcnemar() -> None:
    """The exact probability of McNemar's test, as tables and R's binom.test give it."""
    assert p_value(samples(*[1] * 10), samples(*[1] * 10)) == 1.0
    # 1 against 9 of 10 discordant pairs.
    mine, its = [1] + [0] * 9 + [1] * 30, [0] + [1] * 9 + [1] * 30
    assert p_value(samples(*mine), samples(*its)) == pytest.approx(0.021484375)
    assert p_value(samples(1, 0, 1), samples(0, 1, 1)) == 1.0
    many = p_value(samples(*[1] * 1200, *[0] * 1000), samples(*[0] * 1200, *[1] * 1000))
    assert many == pytest.approx(2.2e-5, rel=0.1)


@pytest.mark.rest
def test_bootstrap() -> None:
    """Other scores are compared by a bootstrap: the same samples always give the same answer."""
    mine, its = samples(*(n % 7 for n in range(50))), samples(*(n % 7 - 1 for n in range(50)))
    assert p_value(mine, its) == p_value(mine, its) == pytest.approx(2 / 10_001)
    near = samples(*(n % 7 + (0.1 if n % 2 else -0.1) for n in range(50)))
    assert float(p_value(mine, near) or 0) > 0.5
    assert p_value(mine, mine) == 1.0


def test_other_questions_are_not_compared() -> None:
    """Samples of other questions, or of other numbers of them, have no probability."""
    assert p_value(samples(1), samples(1, 0)) is None
    assert p_value(samples(1), Samples("other", (1.0,))) is None


@pytest.mark.parametrize("values", [(1, 0, 0, 1), (0, 0), (0.5, 2.25, -1)])
def test_samples_are_kept_in_a_note(values: tuple[float, ...]) -> None:
    """Scores of samples survive a note, as bits or as numbers."""
    assert Samples.of_note(samples(*values).to_note()) == samples(*values)
    assert Samples.of_note({"questions": "x", "bits": "no"}) is None


@pytest.mark.rest
def test_a_small_difference_is_not_distinguishable(store: Store, mstore: Program) -> None:
    """A verdict says so in these words, and says by how many questions; it decides nothing."""
    write = (
        "import json, os, sys\n"
        "right = 6 if os.path.exists(os.environ['MSTORE_DIR'] + '/mergekit_config.yml') else 7\n"
        "json.dump({'acc': right / 12}, open('results.json', 'w'))\n"
        "with open('samples_t_1.jsonl', 'w') as file:\n"
        "    for n in range(12):\n"
        "        file.write(json.dumps({'doc_id': n, 'acc': int(n < right)}) + '\\n')\n"
    )
    gate = Gate.of([PYTHON, "-c", write], name="g", minimums=["acc>=base-0.1"])
    name, _ = merge(store)
    (verdict,) = store.judge(name, [gate])
    (one,) = verdict.comparisons
    assert (verdict.passed, one.samples, one.p_value, one.distinguishable) == (True, 12, 1.0, False)
    told = mstore.succeed("gate", "run", name, "--check", f"{PYTHON} -c '{WRITE}'", "--min=acc=0")
    assert "acc 1 is >= 0" in told.out
    from mstore_cli.judging import described

    assert "base has 0.583333, not distinguishable (p = 1, 12 samples)" in described(one)


WRITE = 'open("r.json", "w").write("{\\"acc\\": 1}")'


# -- required gates ------------------------------------------------------------------------------


@pytest.fixture
def guarded(store: Store) -> Store:
    """A store whose refs below prod/ need the gate `quality`, and a merge on the branch `new`."""
    store.require_gates("prod/*", ["quality"])
    merge(store)
    store.reset("new", "candidates/run/m")
    return store


MOVES: dict[str, Callable[[Store, Path], object]] = {
    "reset": lambda store, root: store.reset("prod/m", "new"),
    "move": lambda store, root: store.move("prod/m", None, "new"),
    "tag": lambda store, root: store.tag("prod/v1", "new"),
    "rename": lambda store, root: store.rename("new", "prod/m"),
    "add": lambda store, root: store.add(root / "e0", name="prod/e0", base="base"),
    "merge": lambda store, root: store.merge(
        store.plan(MergeRequest(base="base", experts=["e0"], method="linear")), name="prod/m"
    ),
    "promote": lambda store, root: store.move_if_passed(
        store.merge(
            store.plan(MergeRequest(base="base", experts=["e0"], method="linear")),
            name="prod/m",
            candidate="run",
        ).name,
        None,
        [saying(1, name="another")],
    ),
}


@pytest.mark.parametrize("how", MOVES)
def test_no_ref_moves_unjudged(how: str, guarded: Store, copied: Path) -> None:
    """Whatever moves such a ref is refused, and nothing is published; other refs move freely."""
    before = guarded.ref_ids()
    with pytest.raises(GateFailed, match="the gate quality guards this ref"):
        MOVES[how](guarded, copied)
    assert guarded.ref_ids() == before
    guarded.reset("free", "new")


def test_a_store_that_was_open_before(store: Store) -> None:
    """Who opened the store before a gate was required is refused, too."""
    with Store.open(store.path) as other:
        other.require_gates("prod/*", ["quality"])
    with pytest.raises(GateFailed):
        store.reset("prod/m", "base")


def test_a_passing_verdict_lets_it_move(guarded: Store) -> None:
    """Once this store has seen the snapshot pass, each command moves the ref; a later failure, or
    the removal of the verdict, stops that again."""
    guarded.judge("new", [saying(1, "acc=1", name="quality")])
    guarded.reset("prod/m", "new")
    guarded.tag("prod/v1", "new")
    guarded.judge("new", [saying(0, "acc=1", name="quality")])
    with pytest.raises(GateFailed, match="did not pass it"):
        guarded.reset("prod/n", "new")
    (verdict,) = guarded.judge("new", [saying(1, name="quality")])
    guarded.reset("prod/n", "new")
    guarded.remove_notes("new", [verdict.note])
    with pytest.raises(GateFailed):
        guarded.reset("prod/o", "new")


def test_a_note_by_hand_is_no_verdict(guarded: Store) -> None:
    """What anybody can write counts for nothing."""
    guarded.note("new", {"gate: quality": {"passed": True}}, kind="verdict")
    with pytest.raises(GateFailed):
        guarded.reset("prod/m", "new")


def test_a_trusted_signer_vouches(guarded: Store) -> None:
    """A verdict that a trusted key signed counts; of another key, or of a failure, it does not."""
    cryptography = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key, other = (SigningKey(cryptography.Ed25519PrivateKey.generate()) for _ in range(2))
    guarded.trust_verdicts({key.public_key: "ada"})
    for maker, passed, moves in ((other, True, False), (key, False, False), (key, True, True)):
        guarded.note("new", {"gate: quality": {"passed": passed}}, kind="verdict")
        (note,) = (one for one in guarded.notes_of("new") if one.kind == "verdict")
        guarded.sign("new", maker, note=note.note)
        if moves:
            guarded.reset("prod/m", "new")
        else:
            with pytest.raises(GateFailed):
                guarded.reset("prod/m", "new")


@pytest.mark.rest
def test_copies_need_no_gate(guarded: Store, tmp_path: Path) -> None:
    """A clone has the notes, neither the setting nor the rows; a backup has the setting."""
    guarded.judge("new", [saying(1, name="quality")])
    Store.clone(guarded.path, tmp_path / "clone")
    guarded.backup(tmp_path / "backup")
    with Store.open(tmp_path / "clone") as clone:
        assert clone.required_gates_by_pattern() == {}
        clone.reset("prod/m", "base")
        clone.require_gates("prod/*", ["quality"])
        with pytest.raises(GateFailed):
            clone.reset("prod/m", "new")
    with Store.open(tmp_path / "backup") as copy:
        assert copy.required_gates_by_pattern() == {"prod/*": ("quality",)}


@pytest.mark.rest
def test_pull_and_push(guarded: Store, tmp_path: Path) -> None:
    """A pull moves no such ref, fetched verdicts or not, and a push sends none."""
    remote = f"file://{tmp_path}/remote"
    Store.clone(guarded.path, tmp_path / "other")
    with Store.open(tmp_path / "other") as other:
        other.add_remote("origin", remote)
        other.judge("new", [saying(1, name="quality")])
        other.reset("prod/m", "new")
        other.push("origin", ["prod/m"])
    guarded.add_remote("origin", remote)
    guarded.fetch("origin")
    assert [one.key for one in guarded.notes_of("new") if one.kind == "verdict"]
    with pytest.raises(GateFailed) as refused:
        guarded.pull("origin")
    # The pull kept nothing, so it takes a fetch before a gate can be run.
    fetch, judge, pull = str(refused.value.hint).split(", then ")
    assert fetch == "store.fetch('origin')"
    assert judge == "store.judge('origin/prod/m', gates=['quality'])"
    assert pull == "store.pull('origin', refs=['prod/m'])"
    assert guarded["origin/prod/m"].id == guarded["new"].id
    assert "prod/m" not in guarded.ref_ids()
    guarded.judge("new", [saying(1, name="quality")])
    guarded.pull("origin")
    assert guarded["prod/m"].id == guarded["new"].id
    guarded.judge("new", [saying(0, "acc=1", name="quality")])
    with pytest.raises(GateFailed):
        guarded.push("origin", ["prod/*"])
    guarded.push("origin", ["base"])


def test_settings_of_gates(store: Store) -> None:
    """Patterns and names survive other settings; without gates a pattern is gone."""
    store.require_gates("prod/*", ["a", "b"])
    assert store.require_gates('x"y', ["c"]) == {"prod/*": ("a", "b"), 'x"y': ("c",)}
    store.configure("codec", "dense")
    assert store.required_gates("prod/x") == ("a", "b")
    assert store.required_gates("candidates/run/prod/x") == ()
    assert store.require_gates("prod/*", []) == {'x"y': ("c",)}
    with pytest.raises(NotFound):
        store.require_gates("prod/*", [])
    with pytest.raises(BadRequest):
        store.require_gates("x", [""])


# -- the command line ----------------------------------------------------------------------------


def test_merge_with_a_check(mstore: Program, copied: Path) -> None:
    """A merge that is worse is refused with status 3, one that is better moves the branch."""
    command = f"{PYTHON} -c '{WRITE}'"
    quiet = mstore("merge", *MERGE, "--name", "m", "--check", "false {}", "-q")
    assert (quiet.status, quiet.out) == (3, "")
    shown = mstore("merge", *MERGE, "--name", "new", "--check", "test 1 = 2")
    assert "new was not made" in shown.out
    assert "nothing in test 1 = 2 names the snapshot" in shown.err
    worse = mstore("merge", *MERGE, "--name", "m", "--check", command, "--min", "acc=2", "--json")
    assert worse.status == 3
    assert (worse.document["moved"], worse.document["kept"]) == (False, False)
    assert worse.document["verdicts"][0]["comparisons"][0]["held"] is False
    with Store.open(copied / "store") as store:
        assert store["m"].id == store["base"].id
    done = mstore.succeed("merge", *MERGE, "--name", "m", "--check", command, "--min", "acc>=0.5")
    assert "passed" in done.out
    with Store.open(copied / "store") as store:
        assert store["m"].id != store["base"].id
        assert store.refs("m")[0].kind == "branch"
    assert "verdict" in mstore.succeed("log", "m", "--notes").out


@pytest.mark.rest
def test_candidates_are_listed_and_dropped(mstore: Program) -> None:
    """`--keep-failed` keeps a candidate, `gate` lists it with its gate, `gate drop` drops it."""
    assert "no candidates" in mstore.succeed("gate").out
    done = mstore("merge", *MERGE, "--name", "m", "--check", "false {}", "--keep-failed")
    assert (done.status, "to drop the candidate: mstore" in done.out) == (3, True)
    (found,) = mstore.succeed("gate", "--json").document["candidates"]
    assert (found["name"], found["failed"]) == ("m", ["false {}"])
    assert found["candidate"] in mstore.succeed("gate").out
    # What a search tries is no model of the user's.
    mstore.succeed("merge", *MERGE, "--name", "m", "--candidate", "trial")
    mstore.succeed("merge", *MERGE, "--name", "m", "--candidate", "trial-3")
    listed = mstore.succeed("gate").lines
    (own,) = (line for line in listed if line.startswith("candidates/trial/m "))
    (tried,) = (line for line in listed if line.startswith("candidates/trial-3/m "))
    assert ("  a search  " in own, "  a search  " in tried) == (False, True)
    mstore.succeed("gate", "drop", "candidates/trial*")
    assert mstore("gate", "drop", "m").status == 2
    mstore.succeed("gate", "drop", found["candidate"])
    assert mstore.succeed("gate", "--quiet").out == ""
    gone = mstore("gate", "drop", found["candidate"])
    assert (gone.status, gone.err.rstrip().endswith(" gate")) == (1, True)
    told = mstore.succeed("gate", "run", "base", "--check", "true {}").out
    assert told.splitlines()[0] == "passed true {}"
    assert "verdict true {} = passed;" in mstore.succeed("log", "base", "--notes").out


@pytest.mark.rest
def test_add_and_push_with_a_check(mstore: Program, copied: Path) -> None:
    """`add` makes a branch only of what passes, and `push` sends nothing that does not."""
    new = copied / "e0"
    refused = mstore("add", new, "--name", "x", "--check", "false {}")
    assert (refused.status, ", which is dropped" in refused.out) == (3, True)
    assert "x" not in mstore.succeed("refs", "-q").lines
    mstore.succeed("add", new, "--name", "x", "--check", "test -f {}/config.json")
    mstore.succeed("remote", "add", "origin", f"file://{copied}/remote")
    refused = mstore("push", "origin", "x", "--check", "false {}", "--json")
    assert (refused.status, refused.document["moved"]) == (3, [])
    assert "x did not pass false {}" in mstore("push", "origin", "x", "--check", "false {}").out
    done = mstore.succeed("push", "origin", "x", "--check", "true {}", "--json")
    assert [one["name"] for one in done.document["moved"]] == ["x"]


@pytest.mark.rest
def test_gates_of_the_settings(mstore: Program, copied: Path) -> None:
    """A name stands for the command, scores, limits and time of the user's settings, which other
    settings leave as they are."""
    unknown = mstore("gate", "run", "base", "--check", "quality")
    assert (unknown.status, "[gates.quality]" in unknown.err) == (2, True)
    settings(copied, f"{PYTHON} -c '{WRITE}'", score="acc=r.json:acc", min=["acc<=1"], timeout="9m")
    mstore.succeed("config", "--user", "author", "ada")
    done = mstore.succeed("gate", "run", "base", "--check", "quality", "--json")
    assert done.document["passed"] is True
    assert done.document["verdicts"][0]["gate"] == "quality"
    for wrong in ("min = 3", "typo = 'x'", "timeout = 'soon'", "command = ''"):
        file = copied / "config" / "mstore" / "config.toml"
        rest = "" if "command" in wrong else 'command = "true"'
        file.write_text(f"[gates.quality]\n{rest}\n{wrong}\n")
        assert mstore("gate", "run", "base", "--check", "quality").status == 2, wrong


@pytest.mark.rest
def test_materialize(mstore: Program, copied: Path) -> None:
    """A virtual merge on a guarded branch is materialized by a merge of its plan, which the gate
    judges; `materialize` refuses before it computes anything, and says so."""
    settings(copied, "test -f {}/config.json")
    mstore.succeed("gate", "require", "prod/*", "quality")
    mstore.succeed("merge", *MERGE, "--name", "prod/m", "--virtual")
    refused = mstore("materialize", "prod/m")
    assert (refused.status, "merge --plan prod/m --name prod/m" in refused.err) == (3, True)
    mstore.succeed("merge", "--plan", "prod/m", "--name", "prod/m")
    assert mstore.succeed("show", "prod/m", "--json").document["virtual"] is False


@pytest.mark.rest
def test_a_required_gate_runs_by_itself(mstore: Program, copied: Path) -> None:
    """`merge` and `add` run what the ref needs; without a command of the user they refuse."""
    mstore.succeed("gate", "require", "prod/*", "quality")
    assert "prod/*" in mstore.succeed("gate", "require").out
    refused = mstore("merge", *MERGE, "--name", "prod/m")
    assert (refused.status, "[gates.quality]" in refused.err) == (2, True)
    settings(copied, "false {}")
    assert mstore("merge", *MERGE, "--name", "prod/m").status == 3
    assert mstore("reset", "prod/m", "base").status == 3
    settings(copied, "test -f {}/config.json")
    mstore.succeed("merge", *MERGE, "--name", "prod/m")
    mstore.succeed("add", copied / "e0", "--name", "prod/e0", "--base", "base")
    mstore.succeed("gate", "run", "base", "--check", "quality")
    mstore.succeed("reset", "prod/m", "base")
    mstore.succeed("gate", "require", "prod/*", "--remove")
    mstore.succeed("reset", "prod/m", "e1")


@pytest.mark.rest
def test_rules_of_gates(mstore: Program, copied: Path) -> None:
    """A new rule names the refs that lack a verdict, a rule loses one gate or all, and one that is
    not there cannot be removed; `gate` shows rules and the gates of the settings."""
    settings(copied, "true {}")
    made = mstore.succeed("gate", "require", "e[01]", "quality", "--json").document
    assert made["unjudged"] == {"e0": ["quality"], "e1": ["quality"]}
    mstore.succeed("gate", "run", "e0", "--check", "quality")
    shown = mstore.succeed("gate", "require", "e[01]", "quality", "other").out
    assert "e0 was not judged by other" in shown
    assert "e1 was not judged by quality, other" in shown
    overview = mstore.succeed("gate").out
    assert "true {}" in overview
    assert "quality, other" in overview
    assert mstore("gate", "require", "e[01]", "third", "--remove").status == 1
    left = mstore.succeed("gate", "require", "e[01]", "other", "--remove", "--json").document
    assert left["required_gates"] == {"e[01]": ["quality"]}
    mstore.succeed("gate", "require", "e[01]", "quality", "--remove")
    assert mstore.succeed("gate", "require", "-q").out == ""
    assert mstore("gate", "require", "e[01]", "--remove").status == 1
    key = mstore("config", "--user", "gates.quality.command", "x")
    assert (key.status, "config.toml" in key.err) == (2, True)


@pytest.mark.rest
def test_a_changed_gate_counts_no_old_verdict(mstore: Program, copied: Path) -> None:
    """Who changes the command or the limits of a gate has snapshots judged again; who has no
    command for it takes any verdict of this store."""
    mstore.succeed("gate", "require", "prod/*", "quality")
    settings(copied, f"{PYTHON} -c '{WRITE}'", min=["acc>=0.5"])
    mstore.succeed("gate", "run", "base", "--check", "quality")
    mstore.succeed("reset", "prod/m", "base")
    settings(copied, f"{PYTHON} -c '{WRITE}'", min=["acc>=0.5"], timeout="9m")
    mstore.succeed("reset", "prod/n", "base")
    for command, limit in ((WRITE, "acc>=0.6"), (f"{WRITE};0", "acc>=0.5")):
        settings(copied, f"{PYTHON} -c '{command}'", min=[limit])
        refused = mstore("reset", "prod/o", "base")
        assert (refused.status, "another command or other limits" in refused.err) == (3, True)
    mstore.succeed("gate", "run", "base", "--check", "quality")
    mstore.succeed("reset", "prod/o", "base")
    settings(copied, "true {}")
    assert mstore("reset", "prod/p", "base").status == 3
    (copied / "config" / "mstore" / "config.toml").unlink()
    mstore.succeed("reset", "prod/p", "base")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_nothing_for_another_user(mstore: Program, copied: Path) -> None:
    """Where the store belongs to somebody else, root does not run what it asks for."""
    mstore.succeed("gate", "require", "prod/*", "quality")
    settings(copied, f"touch {copied}/ran")
    os.chown(copied / "store", 12345, 12345)
    refused = mstore("merge", *MERGE, "--name", "prod/m")
    assert refused.status == 1
    assert "root runs no command that the store of another user asks for" in refused.err
    assert not (copied / "ran").exists()


@pytest.mark.rest
def test_a_key_signs_verdicts(mstore: Program, copied: Path) -> None:
    """With `signing_key` in the user's settings, each verdict is signed."""
    pytest.importorskip("cryptography")
    key = copied / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    mstore.succeed("config", "--user", "signing_key", key)
    done = mstore.succeed("gate", "run", "base", "--check", "true {}", "--json")
    assert done.document["verdicts"][0]["signed"] is True
    (note,) = (
        one
        for one in mstore.succeed("note", "base", "--json").document["notes"]
        if one["signatures"]
    )
    assert note["kind"] == "verdict"


def test_what_goes_not_together(mstore: Program, copied: Path) -> None:
    """Options that contradict each other are refused before anything is made."""
    for line in (
        ("merge", *MERGE, "--name", "m", "--check", "true {}", "--candidate", "run"),
        ("merge", *MERGE, "--name", "m", "--min", "acc=1"),
        ("merge", *MERGE, "--name", "m", "--check", "true {}", "--check", "false {}", "--min=a=1"),
        ("add", copied / "e0", copied / "e1", "--name-prefix", "x/", "--check", "true {}"),
        ("merge", *MERGE, "--name", "m", "--check", "true '{}"),
        ("gate", "run", "base"),
        ("gate", "require", "prod/*"),
    ):
        assert mstore(*line).status == 2, line
    settings(copied, "true {}")
    named = mstore("merge", *MERGE, "--name", "m", "--check", "quality", "--min", "acc=1")
    assert (named.status, "write the limits into [gates.quality]" in named.err) == (2, True)
    unknown = ("merge", *MERGE, "--name", "m", "--check", "true {}", "--min", "acc>=nothing")
    done = mstore(*unknown)
    assert (done.status, "nothing: no such ref" in done.err) == (1, True)
    assert mstore.succeed("gate", "-q").out == ""
