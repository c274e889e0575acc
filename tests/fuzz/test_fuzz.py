"""Whatever a stranger hands over, mstore takes it or says what is wrong with it, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run import HERE, TARGETS, complaint, ended_after, inputs, module

SECONDS = 2


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    """Every seed, and every input that ever failed: taken or refused with an error of mstore's."""
    found = inputs(name)
    assert found
    for data in found:
        assert complaint(module(name).target, data, longest=30.0) is None


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_sound(name: str) -> None:
    """Seeds get through a target to its end; what is refused at once would teach nothing."""
    for data in module(name).seeds():
        module(name).target(data)


def test_a_short_run(tmp_path: Path) -> None:
    """Changed inputs of every target, in a process with little memory."""
    command = [sys.executable, str(HERE / "run.py"), str(SECONDS), "--seed", "1", "--plain"]
    done = subprocess.run(
        [*command, "--found", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_runner_bites() -> None:
    """An exception that is not mstore's, and an input that takes long, are complaints."""

    def wrong(data: bytes) -> None:
        raise ValueError(data)

    assert "ValueError: b'input'" in (complaint(wrong, b"input") or "")
    assert "took" in (complaint(lambda data: sum(range(10**6)), b"", longest=0.001) or "")
    assert complaint(lambda data: None, b"") is None


def test_no_watchdog_ends_the_tests() -> None:
    """The watchdog that ends its process is refused where that process is the tests'."""
    with pytest.raises(AssertionError, match="child process"), ended_after(600.0):
        pass


def test_what_only_waits_is_ended() -> None:
    """A process whose target waits for ever ends, and says where it waited."""
    program = f"import sys, time; sys.path[:0] = [{str(HERE)!r}]; import run\n"
    program += "with run.ended_after(0.1):\n    time.sleep(3600)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("bytearray(run.MEMORY * 2)", "MemoryError"),
        ("data[9]", "IndexError"),
        ("busy(0.3)", "took"),
    ],
)
def test_a_planted_fault_is_found(body: str, said: str, tmp_path: Path) -> None:
    """A target that takes too much memory, or too long, or raises on some inputs, fails the run."""
    program = f"""
import sys, time, types
from functools import partial
sys.path[:0] = [{str(HERE)!r}]
import run
from mutation import Form
def busy(seconds):
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass
def target(data):
    if len(data) == 3:
        {body}
planted = types.SimpleNamespace(FORM=Form.BYTES, target=target, seeds=lambda: [b"four"])
run.module = lambda name: planted
run.complaint = partial(run.complaint, longest=0.2)
sys.exit(run.fuzz(["planted"], 5, 1, run.Path({str(tmp_path / "found")!r})))
"""
    # What a failed run leaves there is for people to look at.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert said in done.stdout
    assert len(list((tmp_path / "found").iterdir())) == 1
