"""Power loss while a store is at work: whatever the disk kept, the store keeps its promises.

Each story (`crash_stories`) is lived once while its file operations are recorded (`crash_disk`).
Then every disk that a power loss may leave is built, opened and checked (`crash_inspector`).
Damaged versions of the library (`crash_mutants`) must be caught by the same check, or it proves
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_safetensors
from crash_inspector import Inspector
from crash_mutants import MUTANTS, Mutant, packs_not_synced
from crash_stories import STORIES
from small_models import small_model

from mstore.terms.errors import MstoreError

EACH = {"repairing": 2}
"""Of each kind of crash of a story (what was done last, and where) the short lane looks at so many
disks, at one where nothing is said: enough to catch every mutant."""


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


def inspector(story: str, sources: Path, tmp_path: Path) -> Inspector:
    """Live a story on a disk in `tmp_path`, and get ready to look at its crashes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    return Inspector(STORIES[story](sources, disk), sources / "extra", tmp_path)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("story", STORIES)
def test_no_power_loss_breaks_a_promise(story: str, sources: Path, tmp_path: Path) -> None:
    """Whatever a power loss leaves: what was acknowledged is whole, refs are true, work goes on."""
    looking = inspector(story, sources, tmp_path)
    assert list(looking.violations(EACH.get(story, 1))) == []
    assert looking.states >= 9


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_no_power_loss_at_all_breaks_a_promise(story: str, sources: Path, tmp_path: Path) -> None:
    """The same for each of the disks."""
    looking = inspector(story, sources, tmp_path)
    assert list(looking.violations()) == []
    assert looking.states >= 60


def is_long(story: str, mutant: Mutant) -> bool:
    """Whether there are a thousand disks before the first that shows it."""
    return (story, mutant) == ("repairing", packs_not_synced)


@pytest.mark.sampled(35)
@pytest.mark.parametrize(
    ("story", "mutant"),
    [pytest.param(*one, marks=[pytest.mark.slow] if is_long(*one) else []) for one in MUTANTS],
)
def test_a_damaged_library_is_caught(
    story: str,
    mutant: Mutant,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sync and each step's place in an order is needed: without it promises break, on the
    disks that the short lane looks at."""
    mutant(monkeypatch)
    # A pack's name is a hash that times go into, and says which directory it is in.  One story in
    # fifty puts all of its packs where others are, and then needs no sync of a new directory.
    for life in range(3):
        own = tmp_path / str(life)
        own.mkdir()
        try:
            caught = next(inspector(story, sources, own).violations(EACH.get(story, 1)), None)
        except (AssertionError, MstoreError) as error:
            # So damaged that not even the story could be lived.
            caught = str(error)
        if caught is not None:
            return
    pytest.fail("no disk shows the damage, in three lives")
