"""Searches: trials, what is kept of them, the winner, and going on after an interruption."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import run_once
from msgspec.structs import replace

from mstore import SnapshotId, Store
from mstore.api.reports import SearchReport, TrialReport
from mstore.judging.evaluation import Command
from mstore.search.genome import read_template
from mstore.search.search import Search
from mstore.search.template import Template
from mstore.search.trials import Trial
from mstore.terms.errors import BadRequest, CommandFailed, Conflict, Corrupt, NotFound
from mstore_cli.commands.search import line_of
from mstore_pages import gather
from mstore_pages import report as report_page

EXPERTS = 3
PARTS = ("mlp", "attn")
BEST = (0.3, 0.6, 0.1)
SHAPE = (64, 512)
COPY = ["cp", "{}/loss.json", "."]
SCORED = "loss.json:loss"
REPORT = {
    "report_command": ["cp", "{}/loss.json", "other.json"],
    "report_score": "other.json:loss",
    "same_set": False,
}
RECIPE = "merge_method: task_arithmetic\nbase_model: base\nmodels:\n" + "".join(
    f"  - model: e{k}\n    parameters: {{weight: {{min: 0, max: 1, step: 0.05}}}}\n"
    for k in range(EXPERTS)
)
BY_PART = RECIPE.replace(
    "{min: 0, max: 1, step: 0.05}",
    "[{filter: mlp, value: {min: 0, max: 1, step: 0.5}}, {value: {min: 0, max: 1, step: 0.5}}]",
    1,
).replace("{min: 0, max: 1, step: 0.05}", "0.5")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a base and experts, and the model that the best merge comes near to.

    The command that decides has seen the experts.
    """
    root = tmp_path_factory.mktemp("search")
    rng = np.random.default_rng(0)
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in PARTS]
    base = {name: rng.standard_normal(SHAPE).astype(np.float32) for name in names}
    experts = [
        {
            name: one + rng.standard_normal(SHAPE).astype(np.float32) / 10
            for name, one in base.items()
        }
        for _ in range(EXPERTS)
    ]
    goal = {
        name: one + sum(w * (e[name] - one) for w, e in zip(BEST, experts, strict=True))
        for name, one in base.items()
    }
    families.write_checkpoint(root / "base", base)
    np.savez(root / "goal.npz", **goal)
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        store.add(root / "base", name="base")
        for number, expert in enumerate(experts):
            families.write_checkpoint(root / f"e{number}", expert)
            store.add(root / f"e{number}", name=f"e{number}", base="base")
            store.evaluate(f"e{number}", COPY, scores=[SCORED], show=Eyes(root, store))
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A store of one's own."""
    shutil.copytree(made / "store", tmp_path / "store")
    shutil.copy(made / "goal.npz", tmp_path)
    return tmp_path


class Eyes:
    """Shows snapshots as a directory with their loss, which commands copy.

    interrupted: of which show Ctrl-C is pressed.
    """

    def __init__(self, place: Path, store: Store, interrupted: int | None = None) -> None:
        self._goal = dict(np.load(place / "goal.npz"))
        self._store = store
        self.shown: list[SnapshotId] = []
        self._interrupted = interrupted

    def loss(self, snapshot: SnapshotId) -> float:
        model = self._store[snapshot].load()
        return float(sum(np.square(model[name] - one).sum() for name, one in self._goal.items()))

    @contextmanager
    def __call__(self, snapshot: SnapshotId, scratch: Path) -> Iterator[Path]:
        if len(self.shown) == self._interrupted:
            raise KeyboardInterrupt
        self.shown.append(snapshot)
        directory = scratch / "model"
        directory.mkdir()
        (directory / "loss.json").write_text(json.dumps({"loss": self.loss(snapshot)}))
        yield directory


def search(store: Store, show: Any, name: str = "best", **more: Any) -> SearchReport:
    """A short search, for which nothing but its trials is evaluated.

    With this seed of tpe, the best trial is the fourth.
    """
    wanted: dict[str, Any] = {
        "recipe": RECIPE,
        "command": COPY,
        "score": SCORED,
        "minimize": True,
        "same_set": True,
        "trials": 5,
        "seed": 2,
    }
    return store.search(**(wanted | more), name=name, show=show)


def scores_of(report: SearchReport) -> list[tuple[tuple[float, ...], float | None]]:
    return [(one.values, one.score) for one in report.trials]


def candidates(store: Store) -> list[str]:
    return [name for name in store.ref_ids() if name.startswith("candidates/")]


def test_the_winner(place: Path) -> None:
    """The best trial becomes an ordinary merge with notes; trials leave no ref and no note."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        told: list[TrialReport] = []
        report = search(store, show, tell=lambda one, best: told.append(one), **REPORT)
        assert [one.number for one in told] == [*range(5)]
        assert report.trials == tuple(told)
        assert report.first == report.trials[0].score
        assert report.trials[0].values == (0.35,) * 3
        assert report.best == min(one.score or 0.0 for one in report.trials)
        best = next(one for one in report.trials if one.score == report.best)
        assert best.number == 3
        assert report.values == {f"e{k}.weight": best.values[k] for k in range(EXPERTS)}
        # Of what was evaluated, virtually, the merge has the bytes.
        assert show.loss(report.snapshot) == report.best
        request = store.read_recipe(store.recipe("best")).request
        assert store.plan(request).plan == report.plan
        assert not store.show("best").virtual
        roles = [(one.role, one.name, one.score) for one in report.reported]
        assert roles == [
            ("winner", "best", report.best),
            ("start", "all 3 experts, weights 1/3", report.first),
            *(("expert", f"e{k}", show.loss(store[f"e{k}"].id)) for k in range(EXPERTS)),
        ]
        notes = {note.key: note for note in store.show("best").notes}
        assert notes[report.decided_by].value["scores"] == {"loss": report.best}
        assert notes[report.reported_by].value["scores"] == {"loss": report.best}
        told_trials = notes["search"].value["trials"]
        by_number = sorted(told_trials, key=lambda one: one[0])
        assert [(tuple(one[2]), one[1]) for one in by_number] == scores_of(report)
        assert told_trials[0][1] == report.best
        assert candidates(store) == []
        shown = set(show.shown) - {report.snapshot} - {store[f"e{k}"].id for k in range(EXPERTS)}
        assert not any(store.show(one).notes for one in shown)
        assert not store.fsck(read_data=True).problems
        # What was tried first is kept nowhere, so the reporting command sees it again.
        again = Eyes(place, store)
        assert not search(store, again, **REPORT).new_snapshot
        assert len(again.shown) == 1


@pytest.mark.rest
@pytest.mark.parametrize(("jobs", "trials"), [(1, 3), (3, 6)])
def test_the_same_seed_gives_the_same(jobs: int, trials: int, place: Path) -> None:
    """Whichever of several trials is done first, equal seeds and jobs give equal trials; those that
    run side by side have different numbers."""
    command = ["sh", "-c", f'echo "$MSTORE_JOB" >> {place}/numbers; cp {{}}/loss.json .']
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        first = search(store, show, "one", jobs=jobs, trials=trials, command=command)
        numbers = (place / "numbers").read_text().split()
        assert [sorted(numbers[at : at + jobs]) for at in range(0, trials, jobs)] == [
            [str(job) for job in range(jobs)]
        ] * (trials // jobs)
        again = search(store, show, "two", jobs=jobs, trials=trials, command=command)
        assert scores_of(first) == scores_of(again)
        assert first.plan == again.plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sampler", "jobs", "seed"), [("tpe", 1, 0), ("cmaes", 2, 1), ("greedy-soup", 2, 2)]
)
def test_interrupted_and_typed_again(sampler: str, jobs: int, seed: int, place: Path) -> None:
    """Wherever it is interrupted, a search goes on, evaluates nothing twice, and ends the same."""
    with Store.open(place / "store") as store:
        whole = Eyes(place, store)
        wanted = search(store, whole, "whole", sampler=sampler, jobs=jobs)
        evaluations = len(whole.shown)
        stop_at = random.Random(seed).randrange(1, wanted.evaluated)
        eyes = Eyes(place, store, interrupted=stop_at)
        with pytest.raises(KeyboardInterrupt):
            search(store, eyes, "cut", sampler=sampler, jobs=jobs)
        assert "cut" not in store.ref_ids()
        assert len(candidates(store)) <= 1
        rest = Eyes(place, store)
        found = search(store, rest, "cut", sampler=sampler, jobs=jobs)
        assert scores_of(found) == scores_of(wanted)
        assert found.plan == wanted.plan
        # What was under way may be tried again, with its round.
        assert len(eyes.shown) + len(rest.shown) <= evaluations + jobs
        assert 0 < found.resumed < len(found.trials)
        assert candidates(store) == []


@pytest.mark.rest
def test_more_trials_of_the_same_search(place: Path) -> None:
    """With more trials a search goes on; without, it only reports again."""
    with Store.open(place / "store") as store:
        search(store, Eyes(place, store), trials=2)
        again = Eyes(place, store)
        assert not search(store, again, trials=2).new_snapshot
        assert again.shown == []
        more = search(store, Eyes(place, store))
        assert (more.resumed, len(more.trials)) == (2, 5)
        assert scores_of(more) == scores_of(search(store, Eyes(place, store), "new"))


@pytest.mark.rest
def test_another_search_under_the_name(place: Path) -> None:
    """Another recipe, sampler, seed or command under a name is refused; restart forgets."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        search(store, show, trials=1)
        for what, more in (
            ("another recipe", {"recipe": RECIPE.replace("max: 1", "max: 2", 1)}),
            ("the sampler tpe", {"sampler": "grid"}),
            ("the seed 2", {"seed": 1}),
            ("1 jobs", {"jobs": 2}),
            ("another command", {"command": ["cp", "-f", "{}/loss.json", "."]}),
            ("the other direction", {"minimize": False}),
        ):
            with pytest.raises(Conflict, match=f"goes on with {what}") as caught:
                search(store, show, **({"trials": 1} | more))
            assert "restart" in str(caught.value.hint)
        again = search(store, show, trials=1, seed=1, restart=True)
        assert again.resumed == 0


@pytest.mark.rest
def test_a_plan_is_tried_once(place: Path) -> None:
    """A choice whose plan was tried gets that score, and nothing runs."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        coarse = RECIPE.replace("step: 0.05", "step: 0.5")
        coarse = coarse.replace("{min: 0, max: 1, step: 0.5}", "0.5", 1)
        report = search(store, show, recipe=coarse, sampler="grid", trials=40, jobs=4)
        # The start is a point of the grid; so is each combination once.
        assert len(report.trials) == 1 + 3**2
        assert report.evaluated == 3**2
        assert len(show.shown) == report.evaluated
        again = [one for one in report.trials if one.plan == report.trials[0].plan]
        assert [one.seconds > 0 for one in again] == [True, False]
        assert again[1].score == again[0].score


def kept_bytes(store: Store) -> int:
    """Bytes of computed blocks that are on the disk, each with its id."""
    files = (store.path / "cache" / "blocks").rglob("*")
    return sum(one.stat().st_size for one in files if one.is_file())


@pytest.mark.rest
def test_trials_share_what_they_compute(place: Path) -> None:
    """What several trials have in common is computed twice at most, and then read; what one alone
    has is written nowhere."""
    with Store.open(place / "store") as store:
        read: list[int] = []

        class Counting(Eyes):
            def loss(self, snapshot: SnapshotId) -> float:
                # No view keeps blocks in memory, as where each trial is another process.
                store._views.clear()
                store._cache = None
                before = store._computing().first_expert_bytes
                loss = super().loss(snapshot)
                read.append(store._computing().first_expert_bytes - before)
                return loss

        report = search(store, Counting(place, store), recipe=BY_PART, sampler="grid", trials=20)
        assert report.evaluated == 9
        whole = read[0]
        # Three values for each half of the model, each computed twice, in place of nine models.
        assert sum(read) <= 2 * 3 * whole
        assert read[8] == 0
        cached = sum(
            one.stat().st_size for one in (store.path / "cache/blocks").rglob("*") if one.is_file()
        )
        assert cached < 4 * 4 * 64 * 512 * 4
    shutil.rmtree(place / "store" / "cache")
    with Store.open(place / "store") as store:
        search(store, Eyes(place, store), "tpe")
        assert kept_bytes(store) == 0


@pytest.mark.rest
def test_the_best_so_far_can_be_seen(place: Path) -> None:
    """While a search goes on, a candidate names the best merge so far, and no other trial's."""
    with Store.open(place / "store") as store:
        seen: list[tuple[list[str], int]] = []

        def tell(one: TrialReport, best: TrialReport | None) -> None:
            assert best is not None
            seen.append((candidates(store), best.number))
            assert {one.part_of for one in store.candidates()} == {"a search"}

        search(store, Eyes(place, store), tell=tell)
        for (names, _), (_, before) in zip(seen[1:], seen, strict=False):
            assert f"candidates/trial-{before}/best" in names
            assert len(names) <= 2
        told = {one.message for one in store.log(every=True)}
        assert {f"trial {number} of a search for best" for number, _ in enumerate(seen)} <= told
        assert not store.show("best").message


def failing(numbers: set[int]) -> list[str]:
    """A command that fails where a loss is one of these, in whole numbers."""
    program = (
        "import json, sys; loss = json.load(open(sys.argv[1] + '/loss.json'))['loss'];"
        f"json.dump({{'loss': loss}}, open('loss.json', 'w')); sys.exit(int(loss) in {numbers})"
    )
    return [sys.executable, "-c", program, "{}"]


@pytest.mark.rest
def test_trials_that_fail(place: Path) -> None:
    """A trial that fails has no score, and the search goes on; if nothing has one, it stops."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        losses = [int(score or 0) for _, score in scores_of(search(store, show, "all", trials=3))]
        worst = max(losses)
        report = search(store, show, "some", trials=3, command=failing({worst}))
        assert [one.score is None for one in report.trials].count(True) >= 1
        assert any("ended with status 1" in str(one.error) for one in report.trials)
        assert any("have no score" in one for one in report.remarks)
        with pytest.raises(CommandFailed, match="ended with status 1"):
            search(store, show, "none", command=failing({losses[0]}))
        assert "none" not in store.ref_ids()


def test_another_set_reports(place: Path) -> None:
    """Without a command that reports, or with the one that decides, a search is refused."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        for more in (
            {"report_command": None, "report_score": None},
            {"report_command": COPY, "report_score": SCORED},
        ):
            with pytest.raises(BadRequest, match="too much good of the winner"):
                search(store, show, same_set=False, **more)
        assert show.shown == []
        report = search(store, show, trials=2)
        assert report.decided_by == report.reported_by
        # It has seen all of them.
        assert len(show.shown) == report.evaluated


def test_a_model_with_an_adapter_is_no_snapshot(place: Path) -> None:
    """It is an expert of trials and of the winner; by itself it has no score, and a reason."""
    with Store.open(place / "store") as store:
        store.extract_lora("e1", "base", rank=4, name="lora")
        recipe = RECIPE.replace("model: e1", "model: base+lora")
        report = search(store, Eyes(place, store), recipe=recipe, trials=2)
        told = {one.name: (one.score is None, one.error) for one in report.reported}
        assert told["base+lora"][0]
        assert "an adapter on a model" in str(told["base+lora"][1])
        assert not told["e0"][0]
        assert report.snapshot == store["best"].id


def test_what_cannot_be_searched(place: Path) -> None:
    """Wrong numbers, models that are missing, and guarded branches are refused before a trial."""
    with Store.open(place / "store") as store:
        show = Eyes(place, store)
        for more, told in (
            ({"trials": 0}, "at least 1"),
            ({"jobs": 0}, "at least 1"),
            ({"seed": -1}, "a whole number from 0"),
            ({"recipe": RECIPE.replace("{min", "{least")}, "range|value"),
            ({"sampler": "random"}, "no sampler is called"),
        ):
            with pytest.raises(BadRequest, match=told):
                search(store, show, **more)
        with pytest.raises(NotFound, match="no model other"):
            search(store, show, recipe=RECIPE.replace("e1", "other"))
        store.require_gates("prod/*", ["quality"])
        with pytest.raises(BadRequest, match="guarded by quality") as caught:
            search(store, show, "prod/chat")
        assert "search for another name" in str(caught.value.hint)
        assert show.shown == []


def test_a_log_that_is_none(place: Path) -> None:
    """A damaged log is an error that names the file."""
    with Store.open(place / "store") as store:
        search(store, Eyes(place, store), "a/b", trials=2)
        (place / "store" / "searches" / "search-a:b").write_bytes(b"{}\n{")
        with pytest.raises(Corrupt, match="no log of a search"):
            search(store, Eyes(place, store), "a/b", trials=2)


def many_trials(count: int, numbers: int = 3) -> dict[str, Any]:
    """The note of so many trials, whose scores are drawn."""
    models = "".join(
        f"  - {{model: e{k}, parameters: {{weight: {{min: 0, max: 1}}}}}}\n" for k in range(numbers)
    )
    template = read_template(f"merge_method: linear\nmodels:\n{models}", "r", lambda model: None)
    wanted = Search.of(
        *(template, "best", {}, Command.of(COPY, ["loss.json:loss"]), None),
        sampler="tpe",
        seed=0,
        jobs=1,
        most=count,
        minimize=True,
        same_set=True,
    )
    draw = random.Random(0)
    return wanted._told(
        [
            Trial(number, "00", tuple(draw.random() for _ in range(numbers)), None, draw.random())
            for number in range(count)
        ]
    )


@pytest.mark.rest
def test_the_note_of_many_trials() -> None:
    """The note of a search has room for the best of any number of trials."""
    told = many_trials(10_000)
    assert told["tried"] == 10_000
    scores = [one[1] for one in told["trials"]]
    assert len(scores) > 500
    assert scores == sorted(scores)
    # The best of ten thousand draws are all of these.
    assert scores[-1] < 1.1 * len(scores) / 10_000


# The page


def page_of(store: Store, name: str) -> str:
    return report_page.snapshot_page(gather.snapshot_summary(store, name))


@pytest.mark.rest
def test_the_page_of_a_winner(place: Path) -> None:
    """The page shows the trials: the best so far, each number, and the table, the best first."""
    with Store.open(place / "store") as store:
        found = search(store, Eyes(place, store))
        page = page_of(store, "best")
        # In the section of the search, and in the table of notes in place of JSON.
        assert page.count("tpe tried 5 merges") == 2
        assert re.search(r"tpe tried 5 merges; loss [0-9.]+ is best", page)
        assert "&quot;sampler&quot;" not in page
        for told in ("loss of each trial", "Numbers of each trial", "What each number did"):
            assert told in page
        assert "e2.weight" in page
        shown = run_once(["--store", str(store.path), "log", "best", "--notes"]).out
        assert re.search(r"search = tpe tried 5 merges; loss [0-9.]+ is best", shown)
        soup = search(store, Eyes(place, store), "soup", sampler="greedy-soup")
        page = page_of(store, "soup")
        # In the order of their own scores; all of them together were never tried.
        told_of = soup.ingredients
        assert [one.expert for one in told_of] == ["e1", "e0", "e2"]
        assert [one.alone for one in told_of] == sorted(
            one.score or 0.0 for one in soup.trials[:EXPERTS]
        )
        assert [one.expert for one in told_of if one.kept] == sorted(
            soup.experts or (), key=[one.expert for one in told_of].index
        )
        assert [one.tried for one in told_of[1:]] == [one.score for one in soup.trials[EXPERTS:]]
        roles = [(one.role, one.name) for one in soup.reported]
        wanted = "all" if any(one.kept is False for one in told_of) else "start"
        assert roles[1] == (wanted, "all 3 experts, weights 1/3")
        assert soup.first is None
        assert found.ingredients == ()
        assert "What each expert did" in page
        assert "What each number did" not in page
        summary = gather.snapshot_summary(store, "soup").search
        assert summary is not None
        assert summary.trials[0].experts == soup.experts
        # The note goes where the snapshot goes.
        store.add_remote("there", (place / "remote").as_uri())
        store.push("there", ["best"])
        Store.clone((place / "remote").as_uri(), place / "clone")
        with Store.open(place / "clone") as clone:
            told = gather.snapshot_summary(clone, "best").search
            assert told is not None
            assert {one.score for one in told.trials} == {one.score for one in found.trials}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        {"trials": [[0, 1.0, [0.5], None]]},
        {"trials": [[0, 1.0, [0.5, 0.5, 0.5], [7]]]},
        {"trials": 3},
        {"numbers": [["a", 1, 0, False], ["b", 0, 1, False], ["c", 0, 1, False]]},
        {"numbers": [["a", 0, 1, True], ["b", 0, 1, False], ["c", 0, 1, False]]},
        {"score": 7},
    ],
)
def test_a_note_that_is_none(change: dict[str, Any], place: Path) -> None:
    """A note of that key that tells no sound search is a note like others."""
    with Store.open(place / "store") as store:
        good = many_trials(5)
        store.note("e0", {"search": good})
        assert gather.snapshot_summary(store, "e0", measure=False).search is not None
        store.note("e0", {"search": good | change})
        assert gather.snapshot_summary(store, "e0", measure=False).search is None


@pytest.mark.rest
def test_the_page_of_many_trials(place: Path) -> None:
    """However many trials a note tells, the page stays small."""
    with Store.open(place / "store") as store:
        before = len(page_of(store, "e0"))
        store.note("e0", {"search": many_trials(10_000, numbers=16)})
        assert len(page_of(store, "e0")) - before < 150_000


# The command


SCORE = """
import json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file
shown, goal, part, tries = Path(sys.argv[1]), np.load(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
with tries.open("a") as file:
    file.write("x")
model = load_file(shown / "model.safetensors")
loss = sum(float(np.square(model[k] - goal[k]).sum()) for k in goal.files if part in k)
Path("loss.json").write_text(json.dumps({"loss": loss}))
"""


def succeed(*words: str) -> str:
    done = run_once([*words])
    assert done.status == 0, done.err
    return done.out


def fail(*words: str, status: int = 1) -> str:
    done = run_once([*words])
    assert done.status == status, done.err
    return done.err


def options(place: Path, *more: str) -> list[str]:
    """A search by the halves of a model: one decides, one reports."""
    (place / "score.py").write_text(SCORE)
    (place / "r.yml").write_text(RECIPE)
    score = f"{sys.executable} {place}/score.py {{}} {place}/goal.npz"
    words = ["--store", str(place / "store"), "search", "--recipe", str(place / "r.yml")]
    words += [
        "--eval",
        f"{score} mlp {place}/tries",
        "--report-eval",
        f"{score} attn {place}/other",
    ]
    return [*words, "--score", "loss.json:loss", "--minimize", "--name", "best", *more]


def test_the_command(place: Path) -> None:
    """It tells each trial, the winner, where the branch was, and what the reporting command says;
    with --json all."""
    with Store.open(place / "store") as store:
        before = store.move("best", None, "e0").snapshot
    done = succeed(*options(place, "--trials", "2", "--checkout"))
    assert "merged best" in done
    assert re.search(rf"^was +{before.short}$", done, re.MULTILINE)
    assert "all 3 experts, weights 1/3" in done
    first = "e0.weight=0.35   e1.weight=0.35   e2.weight=0.35"
    assert re.search(rf"^trial 0 +([0-9.]+)  best +\1 \(0\)  {first}$", done, re.MULTILINE)
    assert re.search(r"^trial +loss +e0.weight +e1.weight +e2.weight$", done, re.MULTILINE)
    assert "mstore --store" in done
    found = json.loads(succeed(*options(place, "--trials", "2", "--checkout", "--json")))
    assert (len(found["trials"]), found["resumed"]) == (2, 2)
    assert (found["new_snapshot"], found["was"]) == (False, found["snapshot"])
    assert [one["role"] for one in found["reported"]] == ["winner", "start", *["expert"] * 3]


def recipe_of(names: str) -> Template:
    """A recipe with a free weight for each of these models."""
    models = "".join(
        f"  - {{model: {name}, parameters: {{weight: {{min: 0, max: 1}}}}}}\n" for name in names
    )
    return read_template(f"merge_method: linear\nmodels:\n{models}", "r", lambda model: None)


def trial(
    number: int, values: tuple[float, ...], score: float | None, experts: str | None = None
) -> TrialReport:
    chosen = None if experts is None else tuple(experts)
    error = "ended with status 1" if score is None else None
    return TrialReport(number, values, chosen, score, None, 1.5, error)


def test_lines_on_trials() -> None:
    """A line has the trial's score and its numbers by name, and lines stand below each other."""
    found = recipe_of("ab")
    best = trial(3, (0.3333, 1.0), 0.25)
    assert [
        line_of(found, best, best, most=20),
        line_of(found, trial(11, (1.0, 0.05), 1234.5678), best, most=20),
        line_of(found, replace(trial(12, (1.0, 0.05), 1234.5678), seconds=0.0), best, most=20),
        line_of(found, trial(14, (0.5, 0.5), 7.0, "a"), best, most=20),
    ] == [
        "trial  3        0.25  best       0.25 ( 3)  a.weight=0.3333 b.weight=1",
        "trial 11     1234.57  best       0.25 ( 3)  a.weight=1      b.weight=0.05",
        "trial 12     1234.57  best       0.25 ( 3)  a.weight=1      b.weight=0.05    tried before",
        "trial 14           7  best       0.25 ( 3)  a",
    ]
    failed = line_of(found, trial(13, (0.5, 0.5), None), best, most=20)
    assert failed.startswith("trial 13           -  best       0.25 ( 3)  a.weight=0.5 ")
    assert failed.endswith("  no score: ended with status 1")


def test_lines_on_trials_of_many_numbers() -> None:
    """Of more than six numbers a line has the six that are farthest from the start; of more than
    six experts it has those that are left out."""
    found = recipe_of("abcdefgh")
    start = found.start()
    assert line_of(found, trial(0, start, 2.0), None, most=1).endswith(
        " 2  best          -  the start"
    )
    moved = line_of(found, trial(1, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 2.0), None, most=50)
    told = [word for word in moved.split() if "=" in word]
    # From 1/8, a and b moved least.
    assert told == [f"{name}.weight=0.{at}" for at, name in enumerate("cdefgh", start=3)]
    one = line_of(found, trial(2, (*start[:7], 0.9), 2.0), None, most=50)
    assert [word for word in one.split() if "=" in word] == ["h.weight=0.9"]
    assert line_of(found, trial(3, start, 2.0, "abdefgh"), None, most=50).endswith("  all but c")
    assert line_of(found, trial(3, start, 2.0, "abcdefgh"), None, most=50).endswith("  all")
    assert line_of(found, trial(3, start, 2.0, "ac"), None, most=50).endswith("  a + c")


def test_mistakes_of_the_command(place: Path) -> None:
    """Errors say what to type: a command that decides, one that reports, --restart."""
    words = options(place, "--trials", "2", "--checkout")
    without = [one for one in words if "attn" not in one and one != "--report-eval"]
    told = fail(*without, status=2)
    assert "--report-eval 'COMMAND {}'" in told
    assert "--same-set" in told
    at = words.index("--eval")
    assert "add --eval" in fail(*words[:at], *words[at + 2 :], status=2)
    (place / "e.yml").write_text(
        "genome: {models: [e0, e1], merge_method: linear}\ntasks: [{name: sums}]\nlimit: 10\n"
    )
    told = fail(
        *("--store", str(place / "store"), "search", "--recipe", str(place / "e.yml")),
        *("--name", "x"),
        status=2,
    )
    assert "lm_eval run" in told
    assert "--tasks sums --limit 10 --output_path ." in told


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.rest) for n in range(3)])
def test_killed_and_typed_again(seed: int, place: Path) -> None:
    """After kill -9 the same line goes on, and ends with the merge of a search that was not."""
    line = [sys.executable, "-m", "mstore_cli", *options(place, "--trials", "6", "--seed", "7")]
    stop_at = random.Random(seed).randint(1, 6)
    tries = place / "tries"
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tries.exists() and len(tries.read_text()) >= stop_at):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run([*line, "--json"], check=True, capture_output=True, text=True)
    assert len(tries.read_text()) <= 7
    whole = [*line, "--json"]
    whole[whole.index("best")] = "whole"
    wanted = subprocess.run(whole, check=True, capture_output=True, text=True)
    first, second = json.loads(done.stdout), json.loads(wanted.stdout)
    assert [one["values"] for one in first["trials"]] == [one["values"] for one in second["trials"]]
    assert first["plan"] == second["plan"]
    with Store.open(place / "store") as store:
        assert candidates(store) == []
        assert not store.fsck().problems
