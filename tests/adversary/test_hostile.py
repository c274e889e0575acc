"""What an adversary who may write a store can make others' commands do: nothing outside of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

PROGRAM = Path(__file__).with_name("hostile.py")
PARTS = 400
"""Each part is some 40 trials; `make adversary` runs others."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("part", range(1, PARTS + 1, PARTS // 8))
def test_nothing_outside_of_a_store_changes_and_nothing_hangs(part: int) -> None:
    """Whatever stands in place of an entry of the store, or is put there while a command runs, no
    command changes anything outside of the store, hangs, or ends by a signal or a traceback."""
    command = [sys.executable, str(PROGRAM), "--part", f"{part}/{PARTS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
