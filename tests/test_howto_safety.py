"""docs/howto/safety.md and many-models.md: their commands work, in order, on a trained family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from family_fixture import family
from test_howto_search import ROOT, stored, succeed
from transcripts import shell_lines

HOWTO = ROOT / "docs" / "howto"
pytest_plugins = ["family_fixture"]
MODELS = {"llama-base": "base", "llama-chat": "prose", "math-full": "code"}
"""What stands for the page's directories, and so for adapters of the chat model."""
ADAPTERS = {"math-lora": "code", "safe-lora": "arithmetic"}


@pytest.mark.rest
def test_safety(quick_family: family.Family, tmp_path: Path) -> None:
    """Adapters and whole models are merged by both methods, and explanations tell the cosines."""
    place = stored(quick_family.root, tmp_path, ["code", "prose", "arithmetic"])
    for name, ref in MODELS.items():
        (place / name).symlink_to(quick_family.root / ref)
    for name, ref in ADAPTERS.items():
        succeed(f"mstore extract-lora {ref} --base prose --rank 4 --name {name}", place)
        succeed(f"mstore checkout {name} ./{name}", place)
    succeed("mstore rm math-lora safe-lora", place)
    lines = shell_lines((HOWTO / "safety.md").read_text())
    assert len(lines) == 10
    told = {line: succeed(line, place) for line in lines}
    [explained] = [text for line, text in told.items() if line.startswith("mstore explain")]
    assert re.search(r"cosine 0\.\d+ (<|>=) 0\.35, mixed (0\.8 : 0\.2|1 : 0)$", explained, re.M)
    assert "aligned" not in explained.partition("TENSOR")[2]
    for name in ("math-guarded", "lora-guarded"):
        tensors = json.loads(succeed(f"mstore explain {name} --json", place))["tensors"]
        mixtures = {tuple(one["mixture"]) for one in tensors if one["mixture"] is not None}
        assert mixtures <= {(1.0, 0.0), (0.0, 1.0)}
        assert all(-1 <= one["cosine"] <= 1 for one in tensors if one["cosine"] is not None)


@pytest.mark.rest
def test_many_models(quick_family: family.Family, tmp_path: Path) -> None:
    """A family is made, compared and kept, while its experts' bytes go and other history stays."""
    place = stored(quick_family.root, tmp_path, ["code", "arithmetic"])
    succeed("mstore add family/prose --name dates --base base", place)
    for ref in ("base", "code"):
        # A branch with a history, which is no business of the page.
        succeed(f"mstore reset other {ref}", place)
    lines = shell_lines((HOWTO / "many-models.md").read_text())
    assert len(lines) == 8
    sizes = []
    for line in lines:
        told = succeed(line, place)
        if line.startswith("mstore prune"):
            assert "3 snapshots" in told
        if line.startswith("mstore rm"):
            succeed("mstore rm other", place)
            sizes.append(stored_bytes(place))
    assert stored_bytes(place) < sizes[0]
    succeed("mstore checkout family/code ./made", place)
    succeed("mstore rm family/code family/masks/code", place)
    succeed("mstore checkout family/dates ./more", place)


def stored_bytes(place: Path) -> int:
    """What the store's packs take."""
    return sum(one.stat().st_size for one in (place / ".mstore" / "packs").rglob("*"))
