"""Power loss while a store is at work: whatever the disk kept, the store keeps its promises.

Each story (`crash_stories`) is lived once while its file operations are recorded (`crash_disk`).
Then every disk that a power loss may leave is built, opened and checked (`crash_inspector`).
Damaged versions of the library (`crash_mutants`) must be caught by the same check, or it proves
nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from crash_inspector import Inspector
from crash_mutants import MUTANTS, Mutant
from crash_stories import STORIES
from small_models import small_model

from mstore.errors import MstoreError

SHARES = {
    "first_steps": 1.0,
    "moving_add": 1.0,
    "plan_and_merge": 1.0,
    "signing": 1.0,
    "pruning": 1.0,
    "reindexing": 1.0,
    "repairing": 0.3,
}
"""Of a story's disks, how many the short lane looks at; of other stories less."""
SHARE = 0.08


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints for the stories."""
    root = tmp_path_factory.mktemp("sources")
    small_model(root / "base", "base")
    small_model(root / "old", "old")
    small_model(root / "one", "base", changed="one")
    small_model(root / "two", "two")
    write_safetensors(root / "extra" / "model.safetensors", [("x", "U8", (3,), b"xyz")])
    return root


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of syncs on a disk take their time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def inspector(story: str, sources: Path, scratch: Path) -> Inspector:
    """Live a story on a disk in `scratch`, and get ready to look at its crashes."""
    disk = scratch / "disk"
    disk.mkdir()
    return Inspector(STORIES[story](sources, disk), sources / "extra", scratch)


@pytest.mark.parametrize("story", STORIES)
def test_no_power_loss_breaks_a_promise(story: str, sources: Path, scratch: Path) -> None:
    """Whatever a power loss leaves: what was acknowledged is whole, refs are true, work goes on."""
    looking = inspector(story, sources, scratch)
    assert list(looking.violations(SHARES.get(story, SHARE))) == []
    assert looking.states >= 15


@pytest.mark.slow
@pytest.mark.parametrize("story", [story for story in STORIES if SHARES.get(story, 0) < 1])
def test_no_power_loss_at_all_breaks_a_promise(story: str, sources: Path, scratch: Path) -> None:
    """The same for each of the disks of the longer stories."""
    looking = inspector(story, sources, scratch)
    assert list(looking.violations()) == []
    assert looking.states >= 100


@pytest.mark.parametrize(("story", "mutant"), MUTANTS)
def test_a_damaged_library_is_caught(
    story: str,
    mutant: Mutant,
    sources: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sync and each step's place in an order is needed: without it promises break."""
    mutant(monkeypatch)
    try:
        caught = next(inspector(story, sources, scratch).violations(), None)
    except (AssertionError, MstoreError) as error:
        # So damaged that not even the story could be lived.
        caught = str(error)
    assert caught is not None
