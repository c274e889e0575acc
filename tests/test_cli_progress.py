"""The progress bar's rate: of the last seconds, and nothing where nothing comes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program, Terminal
from test_cli_process import command, on_terminal

from mstore.terms.report import Progress
from mstore_cli.progress import WINDOW_SECONDS, Rate, bar

MIB = 1 << 20


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def steady(rate: Rate, clock: Clock, seconds: int, start: int = 0) -> int:
    """1 MiB each tenth of a second; returns how much that came to."""
    for number in range(10 * seconds):
        clock.now += 0.1
        rate.tick(start + (number + 1) * MIB)
    return start + 10 * seconds * MIB


def test_a_steady_rate(clock: Clock) -> None:
    """What comes evenly has its rate, from the beginning on."""
    rate = Rate(clock)
    assert rate.now() == 0
    rate.tick(0)
    assert rate.now() == 0
    done = 0
    for _ in range(20):
        done = steady(rate, clock, 1, done)
        assert rate.now() == pytest.approx(10 * MIB, rel=0.01)


def test_a_rate_falls_where_nothing_comes(clock: Clock) -> None:
    """A read that hangs shows: the rate falls with every second, and is 0 after the window."""
    rate = Rate(clock)
    rate.tick(0)
    steady(rate, clock, 20)
    seen = []
    for _ in range(8):
        seen.append(rate.now())
        clock.now += 1
    assert seen == sorted(seen, reverse=True)
    assert seen[1] < seen[0]
    assert rate.now() == 0
    assert WINDOW_SECONDS < 8


def test_a_new_count_begins_at_nothing(clock: Clock) -> None:
    """The next checkpoint of several counts from 0 again: no rate is below 0."""
    rate = Rate(clock)
    done = steady(rate, clock, 3)
    clock.now += 0.1
    rate.tick(0)
    assert rate.now() == 0
    clock.now += 1
    rate.tick(done)
    assert rate.now() == done


def test_no_rate_before_anything_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar has no rate until bytes moved."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar(wanted=True) as tick:
        assert tick is not None
        tick(Progress("add", 0, 4 * MIB))
        tick(Progress("add", 0, 4 * MIB))
    terminal.flush()
    assert isinstance(terminal.buffer, io.BytesIO)
    seen = terminal.buffer.getvalue().decode()
    assert "0 B / 4.0 MiB" in seen
    assert "B/s" not in seen


def test_the_bar_shows_the_rate(tmp_path: Path) -> None:
    """`mstore add` shows bytes a second once something moved."""
    shard = tmp_path / "m" / "model.safetensors"
    write_safetensors(shard, [("t", "U8", (MIB,), bytes(MIB))])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    line = command("--store", mstore.store, "add", shard.parent, "--name", "x")
    _, seen = on_terminal(line, {"TERM": "xterm", "COLUMNS": "100"})
    assert re.search(r"\d B/s", seen) or re.search(r"iB/s", seen)


def test_nothing_is_shown_before_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bar stands at a hundred bytes, or at none, before a tick says how many there are."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", terminal)

    def seen() -> str:
        terminal.flush()
        assert isinstance(terminal.buffer, io.BytesIO)
        return terminal.buffer.getvalue().decode()

    with bar(wanted=True) as tick:
        assert tick is not None
        tick(Progress("add", 0, 0))
        assert "add" not in seen()
        tick(Progress("add", 1, 4 * MIB))
    assert "1 B / 4.0 MiB" in seen()
    assert "100 B" not in seen()
