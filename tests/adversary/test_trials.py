"""Damaged stores, worked with in any order, give back all that was acknowledged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIALS = Path(__file__).with_name("trials.py")


def tried(*options: str) -> subprocess.CompletedProcess[str]:
    """Run trials in a process that has no environment open."""
    command = [sys.executable, str(TRIALS), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.rest
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_lost(seed: int) -> None:
    """A few trials; `make adversary` runs as many as there is time for."""
    done = tried("3600", "--trials", "8", "--seed", str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("8 trials: ")


@pytest.mark.rest
@pytest.mark.parametrize(("mutant", "seed"), [("generations ignored", 3871601465)])
def test_trials_notice(mutant: str, seed: int) -> None:
    """A trial fails where generations do not count and gc deletes what the index does not know."""
    assert tried("3600", "--only", str(seed)).returncode == 0
    done = tried("3600", "--only", str(seed), "--mutant", mutant)
    assert done.returncode == 1, done.stdout
    assert "no such ref or snapshot" in done.stdout
