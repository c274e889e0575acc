"""docs/tutorial.md says what the program says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import transcripts
from family_fixture import family

pytest_plugins = ["family_fixture"]

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
STEPS = ("init", "add", "log", "diff", "plan", "merge", "explain", "mount", "checkout", "fsck")


@pytest.mark.rest
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="the tutorial mounts")
def test_tutorial(quick_family: family.Family, tmp_path: Path) -> None:
    """Each command of the tutorial prints the page's words, and numbers near the page's."""
    shutil.copytree(quick_family.root, tmp_path / "family")
    try:
        for command, told in transcripts.pairs(PAGE.read_text()):
            printed = _without_shared(transcripts.run(command, tmp_path))
            difference = transcripts.unlike(told, printed)
            assert difference is None, f"{command}: {difference}"
    finally:
        if os.path.ismount(tmp_path / "mnt"):
            transcripts.run("mstore unmount mnt", tmp_path)


def _without_shared(printed: str) -> str:
    """Output without a column that is there only if two experts happen to have a chunk alike, as
    it may be where they are trained on another machine."""
    lines = printed.splitlines()
    for number, line in enumerate(lines):
        if " READ  SHARED " in line:
            start, end = line.index("READ") + len("READ"), line.index("SHARED") + len("SHARED")
            lines[number:] = [one[:start] + one[end:] for one in lines[number:]]
    return "\n".join(lines)


def test_every_step_is_there() -> None:
    """The tutorial goes from an empty directory to a checked store."""
    commands = [command for command, _ in transcripts.pairs(PAGE.read_text())]
    for step in STEPS:
        assert any(f"mstore {step} " in command for command in commands), step


@pytest.mark.parametrize(
    ("told", "printed"),
    [
        ("blocks  73: 67 new", "blocks  73: 67 old"),
        ("read 1.2 MiB of experts", "read 1.2 GiB of experts"),
        ("moved 437586", "moved 21"),
        ("same content", "other content"),
        ("one\ntwo", "one"),
        ("two words", "two"),
    ],
)
def test_other_output_is_seen(told: str, printed: str) -> None:
    """Another word, line or order of magnitude is a difference."""
    assert transcripts.unlike(told, printed) is not None


@pytest.mark.parametrize(
    ("told", "printed"),
    [
        ("written 940.0 KiB (45.5 %)", "written 1.1 MiB (52.8 %)"),
        ("added base c5e0f05b60de\ntime 0.28 s", "added base 11348ea601a4\ntime 31.25 s"),
        ("  code=1  36  0.844", "  code=1    29  0.9"),
    ],
)
def test_numbers_of_another_machine_are_not(told: str, printed: str) -> None:
    """Ids, durations and numbers that are near each other are none."""
    assert transcripts.unlike(told, printed) is None
