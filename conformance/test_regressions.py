"""mergekit's own regression cases, from its source distribution, driven against mstore.

mergekit's test files run as they are, in a process of their own, in which `seams` has put mstore in
the place of mergekit's merge functions.  None of them is part of this repository: they lie beside
the packages of the virtual environment, where scripts/conformance unpacks them.  `reasons` names
every case that does not pass, and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from reasons import REASONS, passes

TESTS = Path(sys.prefix, "mergekit-0.1.5", "tests")
PAGE = Path(__file__).parents[1] / "docs" / "merge-methods.md"
_MEMORY = Path("/dev/shm")
"""Stores here are small and many: in memory they cost no waiting for a disk."""

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What became of each case."""
    assert TESTS.is_dir(), f"no {TESTS}: scripts/conformance unpacks it"
    folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        told = Path(scratch, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "seams"]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(TESTS.parent)]
        command += ["--basetemp", str(Path(scratch, "cases")), "--outcomes", str(told), str(TESTS)]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.getenv("PYTHONPATH"))))
        # No GPU: the same cases run on every machine.
        own = {"PYTHONPATH": path, "TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": ""}
        run = subprocess.run(
            command, cwd=scratch, env=os.environ | own, capture_output=True, text=True, check=False
        )
        assert told.exists(), run.stdout[-5000:] + run.stderr[-5000:]
        found: Outcomes = json.loads(told.read_text())
    return found


def test_every_case_passes_or_has_its_reason(outcomes: Outcomes) -> None:
    """A case that is not listed passes; one that is listed does not, for the one reason given."""
    complaints = []
    for case, outcome in outcomes.items():
        listed = [reason.why for reason in REASONS if reason.names(case)]
        why = [reason.why for reason in REASONS if reason.explains(case, outcome)]
        if passes(case, outcome):
            complaints += [f"{case} passes, and is listed: {one}" for one in listed]
        elif len(why) != 1:
            said = outcome["said"].partition("\n")[0]
            complaints.append(f"{case}: {outcome['outcome']} ({said}), and has the reasons {why}")
    assert not complaints, "\n".join(complaints)


def test_every_reason_is_needed(outcomes: Outcomes) -> None:
    """Each pattern of the list names a case that it explains."""
    unused = [pattern for reason in REASONS for pattern in reason.unused(outcomes)]
    assert not unused, "\n".join(unused)


def test_the_page_has_the_numbers(outcomes: Outcomes) -> None:
    """docs/merge-methods.md says how many cases pass, and how many do not for each reason."""
    page = " ".join(PAGE.read_text().split())
    passed = sum(passes(case, outcome) for case, outcome in outcomes.items())
    counts = Counter(
        reason.why
        for case, outcome in outcomes.items()
        for reason in REASONS
        if reason.explains(case, outcome)
    )
    wanted = [f"Of {len(outcomes)} cases {passed} pass"]
    wanted += [f"| {counts[reason.why]} | {reason.why} |" for reason in REASONS]
    missing = [one for one in wanted if one not in page]
    assert not missing, "\n".join(missing)
