"""`export REF hf://ORG/NAME`: a snapshot goes to the Hub, from its view.

The Hub is `tests/hub.py`; huggingface_hub is the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub
from huggingface_hub import constants
from small_models import BLOCK
from test_hub import SORTS, hub

from mstore import Store

__all__ = ["hub"]


@pytest.fixture(autouse=True)
def may_write(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's token may write; contents go as LFS objects unless a test says otherwise."""
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        yield made


@pytest.mark.parametrize("sort", SORTS)
def test_round_trip(sort: str, hub: Hub, store: Store) -> None:
    """An exported snapshot has byte for byte the files that it was added with, in one commit."""
    hub.model("org/tiny", SORTS[sort])
    store.add("hf://org/tiny", name="x")
    report = store.export("x", "hf://org/copy", card=False)
    copy = hub.models["org/copy"]
    assert copy.tip() == SORTS[sort]
    assert report.is_new
    assert report.commit == copy.refs["main"]
    assert len(copy.commits) == 2
    assert not hub.leaked
