"""The simulated stores of the benchmarks are stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstore.api import Store

BENCH = Path(__file__).resolve().parent.parent / "bench"


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
    # Blocks are holes, and those of the headers are read: nothing else is wrong.
    assert {problem.kind for problem in report.problems} <= {"block"}, report.problems
