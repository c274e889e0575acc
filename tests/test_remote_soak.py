"""The soak of a remote (`remote_soak.py`, `make remote-soak`) in its short forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import remote_soak


@pytest.mark.rest
def test_some_clients_of_one_remote_lose_nothing(tmp_path: Path) -> None:
    """Three processes, some calls each: moves at the remote are those that were acknowledged."""
    told = remote_soak.soak(tmp_path, 1, seed=1, workers=3)
    assert told["pushes"]


@pytest.mark.slow
def test_eight_clients_of_one_remote_lose_nothing(tmp_path: Path) -> None:
    """Eight processes for ten seconds, which must have met each other."""
    told = remote_soak.soak(tmp_path, 10, seed=2)
    calls: dict[str, int] = told["calls"]  # type: ignore[assignment]
    assert calls["conflicts"]
