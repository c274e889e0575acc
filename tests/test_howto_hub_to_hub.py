"""docs/howto/hub-to-hub.md: its commands work against a small Hub, in the page's order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import readme_family
from hub import environment
from transcripts import shell_lines

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "hub-to-hub.md").read_text()


@pytest.mark.rest
def test_the_page(tmp_path: Path) -> None:
    """From the Hub and back: each command succeeds, and the Hub has the merge and its card."""
    hub = readme_family.on_hub(tmp_path / "hub")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "examples").symlink_to(ROOT / "examples")
    own = environment(hub.url, tmp_path / "home") | {
        "HF_TOKEN": "hf_good",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    own.pop("MSTORE_STORE", None)
    told: dict[str, str] = {}
    with hub.running():
        for line in shell_lines(PAGE):
            if line.startswith("mstore outdated"):
                model = hub.models["Qwen/Qwen2.5-Coder-0.5B"]
                newest = dict(model.commits[model.refs["main"]])
                # The last element of the last tensor.
                newest["model.safetensors"] = newest["model.safetensors"][:-2] + b"\x00\x3f"
                model.commit({**newest, "new.md": b"new"})
            done = subprocess.run(
                ["bash", "-c", line.replace("mstore ", f"{sys.executable} -m mstore_cli ", 1)],
                check=False,
                capture_output=True,
                text=True,
                env=own,
                cwd=tmp_path / "work",
                timeout=600,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            told[line] = done.stdout
    made = hub.models["you/qwen-coder-instruct"]
    assert made.private
    assert len(made.commits) >= 2
    card = made.commits[made.refs["main"]]["README.md"].decode()
    for model in readme_family.MODELS.values():
        assert model in card
    assert 'license: "apache-2.0"' in card or "license: apache-2.0" in card
    (line,) = [one for one in told if one.startswith("mstore outdated")]
    assert "Qwen2.5-Coder-0.5B" in told[line]
