"""Clocks that are wrong by centuries: nothing fails for them, and nothing is let go for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.store import refs
from mstore.store.catalog import now_ns
from mstore.store.refs import refs_in
from mstore_cli.output import when

YEAR = 31_556_952 * 10**9
NOW = 1_790_000_000 * 10**9
"""A day of the year 2026."""
STRANGE = {
    "1938": -32 * YEAR,
    "just before 1970": -1,
    "1970": 0,
    "unset": 3600 * 10**9,
    "2326": NOW + 300 * YEAR,
    "beyond any date": 1 << 80,
}
MERGE = ("merge", "--base", "base", "--expert", "expert", "--method", "linear", "--name")
SetClock = Callable[[int], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the time of this process, in ns since 1970."""

    def be(time_ns: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: time_ns)
        monkeypatch.setattr(time, "time", lambda: time_ns / 1e9)

    return be


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"model{number}" for number in range(3)]
    for path in found:
        path.mkdir()
        small_model(path, "same", changed=path.name)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


@pytest.mark.rest
@pytest.mark.parametrize("year", ["1938", "unset", "beyond any date"])
def test_every_command_works_by_a_strange_clock(
    year: str, clock: SetClock, models: list[Path], tmp_path: Path
) -> None:
    """Commands that store a time, and those that print one, succeed whatever the clock says."""
    clock(STRANGE[year])
    every_command_works(models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("year", ["just before 1970", "1970", "2326"])
def test_every_command_works_by_others(
    year: str, clock: SetClock, models: list[Path], tmp_path: Path
) -> None:
    """The same by the clocks between."""
    clock(STRANGE[year])
    every_command_works(models, tmp_path)


def every_command_works(models: list[Path], tmp_path: Path) -> None:
    """Run a life's commands; the clock is set."""
    mstore = Program(tmp_path / "store")
    base, expert, other = models
    for arguments in (
        ("init", "--block-size", "64KiB"),
        ("add", base, "--name", "base"),
        ("add", expert, "--name", "expert", "--base", "base", "--message", "one"),
        ("add", other, "--name", "expert", "--base", "base"),
        (*MERGE, "m"),
        (*MERGE, "v", "--virtual"),
        ("materialize", "v"),
        ("tag", "v1", "expert~1"),
        ("reset", "base", "expert"),
        ("rm", "v1"),
        ("refs",),
        ("log",),
        ("log", "--graph"),
        ("log", "--json"),
        ("reflog",),
        ("reflog", "expert"),
        ("reflog", "--json"),
        ("show", "m"),
        ("du",),
        ("stats",),
        ("plans",),
        ("prune", "--keep-last", "2", "--dry-run"),
        ("prune", "--keep-last", "2"),
        ("gc", "--dry-run"),
        ("gc", "--reflog-days", "1"),
        ("gc",),
        ("fsck", "--read-data"),
        ("fsck", "--repair"),
        ("checkout", "m", tmp_path / "out"),
        ("reindex",),
        ("log",),
        ("refs",),
        ("gc", "--reflog-days", "0"),
        ("refs",),
    ):
        done = mstore(*arguments)
        assert done.status == 0, (arguments, done.err)
    assert files_of(tmp_path / "out").keys() == {
        "README.md",
        "config.json",
        "mergekit_config.yml",
        "model.safetensors",
    }


@pytest.mark.parametrize("year", STRANGE)
def test_what_is_stored_is_a_time(year: str, clock: SetClock) -> None:
    """The library stores times from 1970 to 2262, the nearest to what a clock says."""
    clock(STRANGE[year])
    assert now_ns() == min(max(STRANGE[year], 0), (1 << 63) - 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("time_ns", [*STRANGE.values(), -(1 << 62), (1 << 63) - 1, 1 << 64])
def test_every_stored_time_is_printed(time_ns: int, store: Store, models: list[Path]) -> None:
    """A row may hold any whole number: refs, reflog and log print it, as a date if it is one."""
    id = store.add(models[0], name="base").snapshot
    index = store._catalog.index
    if time_ns < 1 << 64:
        with index.env.write() as rows:
            new = refs.Ref(refs.BRANCH, id)
            refs_in(index, rows).move("odd", expect=None, new=new, action="test", time_ns=time_ns)
        mstore = Program(store.path)
        for command in ("refs", "reflog", "log"):
            for form in ((), ("--json",)):
                assert mstore(command, *form).status == 0
    assert when(time_ns)
    assert when(NOW).startswith("2026-")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("year", STRANGE)
def test_gc_keeps_what_a_strange_clock_wrote(
    year: str, clock: SetClock, store: Store, models: list[Path]
) -> None:
    """What a ref was by a strange clock is kept within the reflog's days: nobody knows its age."""
    clock(STRANGE[year])
    old = store.add(models[0], name="base").snapshot
    store.remove("base")
    clock(NOW)
    kept = store.usage()
    assert kept.live_bytes > 0 == kept.unreachable_bytes
    assert store.gc().snapshots_dropped == ()
    assert store.reset("base", "base@{1}").snapshot == old
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.parametrize("year", STRANGE)
def test_gc_by_a_strange_clock_keeps_what_is_recent(
    year: str, clock: SetClock, store: Store, models: list[Path]
) -> None:
    """A gc that runs by a strange clock takes nothing that the right one would keep."""
    clock(NOW)
    old = store.add(models[0], name="base").snapshot
    store.remove("base")
    clock(STRANGE[year])
    assert store.usage().unreachable_bytes == 0
    assert store.gc().snapshots_dropped == ()
    assert store.gc(reflog_days=36_500).snapshots_dropped == ()
    assert store.reset("base", "base@{1}").snapshot == old


@pytest.mark.sampled(2)
@pytest.mark.parametrize("year", STRANGE)
def test_no_days_keep_nothing(year: str, clock: SetClock, store: Store, models: list[Path]) -> None:
    """`gc --reflog-days 0` takes what no ref names, whatever the clock says or said."""
    clock(STRANGE[year])
    id = store.add(models[0], name="base").snapshot
    store.remove("base")
    assert store.gc(reflog_days=0, dry_run=True).snapshots_dropped == (id,)
    clock(NOW)
    assert store.gc(reflog_days=0).snapshots_dropped == (id,)


def test_the_right_clock_still_lets_go(clock: SetClock, store: Store, models: list[Path]) -> None:
    """A move that is older than the reflog's days keeps nothing; a younger one does."""
    clock(NOW)
    id = store.add(models[0], name="base").snapshot
    store.remove("base")
    clock(NOW + 29 * 86_400 * 10**9)
    assert store.gc().snapshots_dropped == ()
    clock(NOW + 31 * 86_400 * 10**9)
    assert store.usage().live_bytes == 0
    assert store.gc().snapshots_dropped == (id,)
