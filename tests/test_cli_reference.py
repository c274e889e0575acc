"""docs/cli.md says what the program says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstore_cli import keys, page, reference
from mstore_cli.verbs import VERBS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def test_page_is_current() -> None:
    """The page is what the program makes of it: python -m mstore_cli.reference docs/cli.md."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page.renewed(text, reference.MARKER, reference.reference())


def test_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is the same whatever the width of the terminal it is made on."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    wide = reference.reference()
    monkeypatch.setenv("COLUMNS", "50")
    assert reference.reference() == wide


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_is_complete(verb: str) -> None:
    """Each command's help states an example of itself and its exit statuses."""
    section = reference.reference().split(f"## mstore {verb}\n")[1].split("\n## ")[0]
    example = section.split("Example:\n")[1].splitlines()[0].strip()
    assert example.startswith(f"mstore {verb}")
    assert "Exit status:\n    0  success\n    1  " in section
    assert "    2  wrong usage" in section


def test_every_key_has_a_meaning() -> None:
    """Each field of each report has a meaning, and no meaning is left from a field that went."""
    assert keys.unused_meanings() == []
    for report in keys.OBJECTS.values():
        assert all(key.meaning for key in keys.keys_of(report))


def test_every_command_but_cat_has_keys() -> None:
    """Each command's JSON keys are listed; `cat` alone has no JSON form."""
    assert {line.split()[0] for line in keys.DOCUMENTS} == {*VERBS} - {"cat"}


def test_page_without_marker() -> None:
    """A page without the marker is refused rather than overwritten."""
    with pytest.raises(ValueError, match="no line"):
        page.renewed("# hand-written only\n", reference.MARKER, "made\n")
