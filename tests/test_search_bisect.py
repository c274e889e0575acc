"""Bisection of a branch's positions, and of a merge's experts and layers."""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import families
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.api.reports import BisectReport
from mstore.search.bisect import CANDIDATE, BisectStopped, next_of, suspects_of
from mstore.search.culprits import Answer
from mstore.terms.errors import BadRequest, Conflict, Corrupt, NotFound
from mstore_cli.spelling import Typed
from mstore_pages import gather
from mstore_pages import report as report_page

EXPERTS = 8
PYTHON = [sys.executable, "-I", "-S"]
"""Starts fast: without site-packages."""
COUNTER = """
import sys
tried, directory, *statuses = sys.argv[1:]
with open(tried, "a+") as file:
    file.write("x")
    file.seek(0)
    count = len(file.read())
sys.exit(int(statuses[min(count, len(statuses)) - 1]))
"""
WORKS = """
import array, glob, struct, sys
with open(sys.argv[1], "a") as file:
    file.write("x")
for path in glob.glob(sys.argv[2] + "/*.safetensors"):
    with open(path, "rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + header)
        if max(array.array("f", file.read())) > 50:
            sys.exit(1)
"""
"""Is bad if an element of F32 is above 50."""


# Over time


@given(
    count=st.integers(2, 200),
    data=st.data(),
)
def test_the_first_bad_position_is_found(count: int, data: st.DataObject) -> None:
    """Whatever is skipped: the first bad position is found, or is among those that are left."""
    first = data.draw(st.integers(1, count - 1))
    skips = data.draw(st.sets(st.integers(1, count - 2), max_size=5)) if count > 2 else set()
    answers = {0: Answer.GOOD, count - 1: Answer.BAD}
    while True:
        suspects = suspects_of(count, answers)
        tried = next_of(suspects, answers)
        if tried is None:
            break
        assert tried not in answers
        told = Answer.BAD if tried >= first else Answer.GOOD
        answers[tried] = Answer.SKIPPED if tried in skips else told
    assert first in suspects
    assert len(suspects) == 1 or set(suspects[:-1]) <= skips
    if not skips:
        assert len(answers) - 2 <= math.ceil(math.log2(count))


def test_marks_that_contradict() -> None:
    """Good after bad is refused."""
    with pytest.raises(BadRequest, match="good comes after"):
        suspects_of(5, {0: Answer.GOOD, 1: Answer.BAD, 3: Answer.GOOD})


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose branch `m` has 20 positions; from the 13th on, a norm is negative."""
    root = tmp_path_factory.mktemp("grown")
    base = {"model.norm.weight": np.ones(64, np.float32)}
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for number in range(20):
            sign = -1 if number >= 12 else 1
            arrays = {"model.norm.weight": sign * base["model.norm.weight"] * (1 + number)}
            families.write_checkpoint(root / f"c{number}", arrays)
            store.add(root / f"c{number}", name="m")
    return root


def is_negative(store: Store) -> Callable[[str], bool]:
    return lambda shown: bool(store[shown].load()["model.norm.weight"][0] < 0)


@pytest.mark.rest
def test_over_time_by_hand(grown: Path) -> None:
    """Marks lead to the first bad position in five steps, from any process."""
    with Store.open(grown / "store") as store:
        begun = store.bisect_start("m")
        assert (begun.lacks, begun.next) == ("good", None)
        with pytest.raises(BadRequest, match="nothing is tried"):
            store.bisect_mark("good")
        report = store.bisect_mark("good", "m~19")
        assert report.left == 18
    steps = 0
    while report.next is not None:
        with Store.open(grown / "store") as store:
            bad = is_negative(store)(report.next)
            report = store.bisect_mark("bad" if bad else "good")
        steps += 1
    with Store.open(grown / "store") as store:
        assert report.first_bad == store["m~7"].id
        assert report.is_done
        assert steps <= 5
        assert store.bisect_status() == report
        with pytest.raises(BadRequest, match="good comes after"):
            store.bisect_mark("good", "m~3")
        assert store.bisect_status() == report
        # One that has ended makes room for the next.
        store.bisect_start("m")
        with pytest.raises(Conflict, match="goes on already"):
            store.bisect_start("m")
        assert store.bisect_reset()
        assert not store.bisect_reset()
        with pytest.raises(NotFound, match="no bisection"):
            store.bisect_status()


def test_only_skipped_positions_are_left(grown: Path) -> None:
    """If the neighbours of the first bad position are skipped, all that it may be are told."""
    with Store.open(grown / "store") as store:
        report = store.bisect_start("m", good=["m~19"])
        skipped = {store[f"m~{number}"].id.hex() for number in (6, 7, 8)}
        while report.next is not None:
            bad = is_negative(store)(report.next)
            told = "skip" if report.next in skipped else "bad" if bad else "good"
            report = store.bisect_mark(told)
        assert report.first_bad is None
        assert [one.hex() for one in report.suspects] == [
            store[f"m~{number}"].id.hex() for number in (8, 7, 6, 5)
        ]
        store.bisect_reset()


def command(tmp_path: Path, *statuses: int) -> list[str]:
    """A command whose nth run ends with the nth status, the last for all after it."""
    (tmp_path / "counter.py").write_text(COUNTER)
    tried = str(tmp_path / "tried")
    return [*PYTHON, str(tmp_path / "counter.py"), tried, "{}", *map(str, statuses)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("statuses", "runs"),
    [((128,), 1), ((255,), 1), ((0, 130), 2), ((126, 126), 2), ((127, 127), 2)],
)
def test_statuses_that_stop(
    statuses: tuple[int, ...], runs: int, grown: Path, tmp_path: Path
) -> None:
    """128 and more stop, and so do 126 and 127 if what is good gives the same; marks stay."""
    with Store.open(grown / "store") as store:
        with pytest.raises(BisectStopped):
            store.bisect_run("m", command(tmp_path, *statuses), good=["m~19"])
        assert (tmp_path / "tried").read_text() == "x" * runs
        assert store.bisect_status().probes == 1 + (statuses[0] == 0)
        store.bisect_reset()


@pytest.mark.rest
def test_statuses_that_answer(grown: Path, tmp_path: Path) -> None:
    """A first 127 counts as bad if what is good gives another; 1 is bad, 125 skips, 0 is good."""
    with Store.open(grown / "store") as store:
        told: list[int] = []
        report = store.bisect_run(
            "m",
            command(tmp_path, 127, 0, 1, 125, 0),
            good=["m~19"],
            tell=lambda _, status: told.append(status),
        )
        assert told[:4] == [127, 1, 125, 0]
        assert report.is_done
        assert [mark.answer for mark in store.bisect_log().marks][:5] == [
            *("good", "bad", "bad", "skip", "good")
        ]
        store.bisect_reset()


@pytest.mark.rest
def test_the_same_call_goes_on(grown: Path, tmp_path: Path) -> None:
    """`bisect_run` goes on where it stopped, with no mark twice; another bisection is refused, and
    without what is good the hint says which option names it, and what lists the positions."""
    with Store.open(grown / "store") as store:
        with pytest.raises(BadRequest, match="no earlier position is known to be good") as refused:
            store.bisect_run("m", ["true", "{}"])
        hint = refused.value.told(Typed()).hint
        assert hint == "--good REF names one; mstore log m lists those there are"
        with pytest.raises(BisectStopped):
            store.bisect_run("m", command(tmp_path, 1, 0, 255), good=["m~19"])
        marks = store.bisect_log().marks
        assert [one.answer for one in marks] == ["good", "bad", "good"]
        with pytest.raises(Conflict, match="another bisection goes on, of m"):
            store.bisect_run("m~1", ["true", "{}"], good=["m~19"])
        with pytest.raises(Conflict, match="another bisection goes on, of m"):
            store.bisect_run("m", ["true", "{}"], experts=True)
        report = store.bisect_run("m", ["false", "{}"], good=["m~19"])
        assert report.is_done
        assert store.bisect_log().marks[:3] == marks
        assert [one.answer for one in store.bisect_log().marks].count("good") == 2
        store.bisect_reset()


# Over the units of a merge


EXPERT = 5
"""The one that is poisoned."""


@functools.cache
def template(poisoned: tuple[int, ...], layers: int, experts: int) -> Path:
    """A store with `m`: the merge of experts, of which one has 1000 in some layers."""
    root = Path(tempfile.mkdtemp(prefix="bisected-"))
    atexit.register(shutil.rmtree, root)
    rng = np.random.default_rng(0)
    shape = (8, 8)
    names = [f"model.layers.{number}.w" for number in range(layers)]
    base = {name: rng.standard_normal(shape).astype(np.float32) for name in names}
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        families.write_checkpoint(root / "base", base)
        store.add(root / "base", name="base")
        for k in range(experts):
            own = {name: array + np.float32(k + 1) / 100 for name, array in base.items()}
            for layer in poisoned if k == EXPERT else ():
                own[names[layer]] = np.full(shape, 1000, np.float32)
            families.write_checkpoint(root / f"e{k}", own)
            store.add(root / f"e{k}", name=f"e{k}", base="base")
        request = MergeRequest(
            base="base",
            experts=[(f"e{k}", 0.1) for k in range(experts)],
            method="task_arithmetic",
        )
        store.merge(store.plan(request).plan, name="m")
    return root / "store"


def merged(root: Path, *poisoned: int, layers: int = 4, experts: int = EXPERTS) -> Store:
    """Return a copy of the store `template`, in `root`."""
    shutil.copytree(template(poisoned, layers, experts), root / "store")
    return Store.open(root / "store")


def searched(
    store: Store, is_bad: Callable[[dict[str, np.ndarray]], bool], skipped: int | None = None
) -> BisectReport:
    """Mark what is tried until the end; the probe of number `skipped` is skipped."""
    report, probes = store.bisect_status(), 0
    while report.next is not None:
        assert report.next == CANDIDATE
        assert store.show(CANDIDATE).message == f"a probe of a bisection: {report.probe}"
        told = "bad" if is_bad(store[report.next].load()) else "good"
        report = store.bisect_mark("skip" if probes == skipped else told)
        probes += 1
    assert report.probes == probes
    return report


def is_large(*layers: int) -> Callable[[dict[str, np.ndarray]], bool]:
    return lambda model: all(bool((model[f"model.layers.{one}.w"] > 50).any()) for one in layers)


def test_a_noise_expert_of_eight(tmp_path: Path) -> None:
    """The expert is found by nine probes, one of which cannot be judged; no ref is left."""
    with merged(tmp_path, 3) as store:
        for skipped in (None, 2, 5):
            store.bisect_start("m", experts=True)
            report = searched(store, is_large(3), skipped)
            assert [one.units for one in report.culprits] == [(("e5", None),)]
            assert report.probes <= 9
            assert report.skipped == (skipped is not None)
            assert CANDIDATE not in store.ref_ids()
            store.bisect_reset()
        assert not store.fsck(read_data=True).problems


@pytest.mark.rest
def test_a_noise_layer_of_256(tmp_path: Path) -> None:
    """A layer of one expert among 256 is found by 14 probes; alone it is bad, the rest is good."""
    with merged(tmp_path, 17, layers=32) as store:
        store.bisect_start("m", experts=True, layers=True)
        begun = store.bisect_status()
        assert begun.probe == "e0, e1, e2, e3"
        report = searched(store, is_large(17))
        assert abs(begun.steps - report.probes) <= 1
        (culprit,) = report.culprits
        assert culprit.units == (("e5", "model.layers.17"),)
        assert (culprit.alone, report.rest) == ("bad", "good")
        assert report.probes <= 14
        store.bisect_reset()
        store.bisect_start("m", layers=True)
        report = searched(store, is_large(17))
        assert [one.units for one in report.culprits] == [((None, "model.layers.17"),)]
        assert report.probes <= 9


@pytest.mark.rest
def test_layers_that_are_bad_only_together(tmp_path: Path) -> None:
    """Two layers that are bad only together are found together."""
    with merged(tmp_path, 0, 3) as store:
        store.bisect_start("m", experts=True, layers=True)
        report = searched(store, is_large(0, 3))
        (culprit,) = report.culprits
        assert culprit.units == (("e5", "model.layers.0"), ("e5", "model.layers.3"))
        assert report.rest == "good"


@pytest.mark.rest
def test_a_base_that_is_bad_itself(tmp_path: Path) -> None:
    """If nothing makes it good, the base is tried, too, and the error names it."""
    with merged(tmp_path, experts=3) as store:
        store.bisect_start("m", experts=True, layers=True)
        with pytest.raises(BadRequest, match="the base alone is bad by this test") as bad:
            searched(store, lambda _: True)
        assert "find a test that the base passes" in str(bad.value.hint)
        # What each mark is of is told, for who wants to take one back.
        probes = [mark.probe for mark in store.bisect_log().marks]
        assert probes[-2:] == ["e0 in layer 0", "all but e0 in layer 0"]
        assert len(probes) < 12


@pytest.mark.rest
def test_nothing_is_to_blame(tmp_path: Path) -> None:
    """A merge that is good blames nobody, and so does a command that never judges; no note."""
    with merged(tmp_path, experts=3) as store:
        for layers in (False, True):
            store.bisect_start("m", experts=True, layers=layers)
            report = searched(store, lambda _: False)
            assert (report.culprits, report.rest, report.is_done) == ((), "good", True)
            assert report.text() == "m is good itself: nothing is to blame"
        store.bisect_start("m", experts=True)
        report = store.bisect_status()
        while report.next is not None:
            report = store.bisect_mark("skip")
        assert (report.culprits, report.rest, report.is_done) == ((), "skip", True)
        assert store.blame("m").culprit is None
        # Over time, too: REF counts as bad, and is tried in the end.
        request = MergeRequest(base="base", experts=[("e0", 0.5)], method="task_arithmetic")
        store.merge(store.plan(request).plan, name="m")
        store.bisect_reset()
        with pytest.raises(BadRequest, match="no position is bad"):
            store.bisect_run("m", ["true", "{}"], good=["m~1"])


@pytest.mark.rest
def test_the_finest_finding_counts(tmp_path: Path) -> None:
    """What a coarser search finds later does not hide the layer of an expert; the report page
    begins with it, and its notes are words."""
    with merged(tmp_path, 3) as store:
        for experts, layers in ((True, True), (True, False), (False, True)):
            store.bisect_start("m", experts=experts, layers=layers)
            searched(store, is_large(3))
        told = "e5 in model.layers.3; all else is good"
        assert store.blame("m").culprit == told
        assert [row.culprit for row in store.metrics("m")] == [told]
        page = report_page.snapshot_page(gather.snapshot_summary(store, "m", measure=False))
        first = f'<p class="verdict"><span class="flag">A bisection found to blame: {told}.</span>'
        assert first in page
        assert "<td>e5; all else is good</td>" in page.replace(' class="wide"', "")
        assert page.count(f"to blame: {told}") == 1


def test_what_cannot_be_bisected(tmp_path: Path) -> None:
    """What is no merge has no experts; a mark of something else is refused."""
    with merged(tmp_path, 3) as store:
        with pytest.raises(BadRequest, match="no experts and layers to tell apart"):
            store.bisect_start("e0", experts=True)
        with pytest.raises(BadRequest, match="the base is what is good"):
            store.bisect_start("m", experts=True, good=["base"])
        with pytest.raises(BadRequest, match="no earlier position"):
            store.bisect_start("m", good=["e0"])
        store.bisect_start("m", experts=True)
        with pytest.raises(BadRequest, match="a mark is of what is tried now"):
            store.bisect_mark("good", "e1")
        with pytest.raises(BadRequest, match="not good, bad or skip"):
            store.bisect_mark("fine")


def test_a_log_that_is_none(tmp_path: Path) -> None:
    """A damaged log is an error that names the file."""
    with merged(tmp_path, 3) as store:
        store.bisect_start("m", experts=True)
        (tmp_path / "store" / "searches" / "bisect").write_bytes(b"{")
        with pytest.raises(Corrupt, match="no log of a search"):
            store.bisect_status()


@pytest.mark.rest
@pytest.mark.parametrize("stop_at", [1, 5])
def test_killed_and_typed_again(stop_at: int, tmp_path: Path) -> None:
    """After kill -9 the same line goes on with the marks, and finds the same."""
    merged(tmp_path, 3).close()
    (tmp_path / "works.py").write_text(WORKS)
    words = ["bisect", "run", "--experts", "--checkout", "m", "--", *PYTHON]
    line = [sys.executable, "-m", "mstore_cli", "--store", str(tmp_path / "store"), *words]
    line += [str(tmp_path / "works.py"), str(tmp_path / "tries"), "{}"]
    tries = tmp_path / "tries"
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tries.exists() and len(tries.read_text()) >= stop_at):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert "to blame: e5" in done.stdout
    # What was under way is tried again; what was said is not asked again.
    assert len(tries.read_text()) <= 10
    with Store.open(tmp_path / "store") as store:
        assert not [name for name in store.ref_ids() if name.startswith("candidates/")]
        assert not store.fsck().problems
