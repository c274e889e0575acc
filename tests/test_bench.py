"""The simulated stores of the benchmarks are stores, and pages say what was measured."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mstore.api import Store
from mstore.merge.methods.registry import METHODS
from mstore.merge.planning import report as plan_report

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.mark.rest
def test_simulated_store_opens_and_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `growth.py` and `refs.py` write by hand has rows, packs and records as commits have."""
    monkeypatch.syspath_prepend(str(BENCH))
    import refs as simulation

    simulation.simulate(tmp_path / "store", 4)
    with Store.open(tmp_path / "store") as store:
        assert len(store.refs()) == 4
        assert len(store.log()) == 4
        store.tag("kept", "family1/base")
        report = store.fsck()
    assert report.blocks > 3_000
    # Blocks are holes, and those of the headers are read; packs have no list. All else is right.
    kinds = {problem.kind for problem in report.problems}
    assert kinds <= {"block", "pack list"}, report.problems


def test_estimates_are_told_as_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of docs/merge-methods.md, and the remark of plans, are those of the results."""
    monkeypatch.syspath_prepend(str(BENCH))
    import page_estimates

    told = json.loads((BENCH / "results" / "estimates.json").read_text())
    page = (BENCH.parent / "docs" / "merge-methods.md").read_text()
    assert page_estimates.placed(page, told) == page
    low, high = page_estimates.extremes(told)
    remark = inspect.getsource(plan_report)
    assert f"{low:.1f} to {high:.1f} times" in remark
    methods = {method for (method, _, _), _ in page_estimates.ratios_of(told, lambda _: True)}
    assert methods == {f"`{method}`" for method in METHODS}


def test_the_page_of_benchmarks_is_what_was_measured(tmp_path: Path) -> None:
    """The pages of benchmarks are what `report.py` writes of the results and notes there."""
    docs = BENCH.parent / "docs"
    (tmp_path / "merge-methods.md").write_text((docs / "merge-methods.md").read_text())
    words = ["--pages", str(tmp_path)]
    subprocess.run([sys.executable, str(BENCH / "report.py"), *words], check=True)
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (docs / page.name).read_text()
    assert len([*tmp_path.glob("benchmarks*.md")]) == 3
