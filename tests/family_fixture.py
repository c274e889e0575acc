"""The small trained family that tests share.

Owns: `quick_family`, trained once in a run, whatever the number of its workers. A test module that
wants it says

    pytest_plugins = ["family_fixture"]

and takes `quick_family` as an argument; the code of the example is then `family_fixture.family`,
imported where it is used (`later`).
The checkpoints are shared: read them, copy what you want to change.

PYTEST_DONT_REWRITE: nothing is asserted here, and those who use it import it before pytest does.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import sys
from pathlib import Path

import pytest
from later import Later

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

demo = Later("demo")
family = Later("family")

__all__ = ["demo", "family", "quick_family"]


@pytest.fixture(scope="session")
def quick_family(tmp_path_factory: pytest.TempPathFactory) -> family.Family:
    """A base and three experts of 1 M parameters each, in a directory of this run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _trained(tmp_path_factory)
    # What all workers have in common.
    made = tmp_path_factory.getbasetemp().parent / "quick_family"
    with made.with_suffix(".lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(_trained(tmp_path_factory)))
        found: family.Family = pickle.loads(made.read_bytes())
        return found


def _trained(tmp_path_factory: pytest.TempPathFactory) -> family.Family:
    return family.train_family(tmp_path_factory.mktemp("family") / "quick", size=family.QUICK)
