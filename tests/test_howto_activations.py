"""docs/howto/activations.md: its commands work, in the page's order, on a trained family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_fixture import family
from test_howto_search import ROOT, stored, succeed
from transcripts import shell_lines

PAGE = (ROOT / "docs" / "howto" / "activations.md").read_text()
pytest_plugins = ["family_fixture"]


@pytest.mark.rest
def test_the_page(quick_family: family.Family, tmp_path: Path) -> None:
    """Statistics are gathered, stored and merged with; the result knows its companions."""
    place = stored(quick_family.root, tmp_path, ["code", "prose"])
    held_out = json.loads((quick_family.root / "heldout.json").read_text())
    for name, domain in (("math", "prose"), ("code", "code"), ("general", "arithmetic")):
        (place / f"{name}.txt").write_text("\n".join(held_out[domain]))
    succeed("mstore tag math prose", place)
    for name, ref in (("math", "prose"), ("code", "code"), ("base", "base")):
        (place / f"{name}-files").symlink_to(quick_family.root / ref)
    lines = shell_lines(PAGE)
    assert len(lines) == 9
    for line in lines:
        # The texts are short.
        few = f"{line} --tokens 128 --windows 4" if line.startswith("python") else line
        succeed(few.replace("python ", "PYTHONPATH= python ", 1), place)
    told = json.loads(succeed("mstore log merged-aim --json", place))
    assert "companion" in json.dumps(told)
