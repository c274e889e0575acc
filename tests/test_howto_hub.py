"""docs/howto/hub.md: its commands work against a small Hub, in the page's order."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hub import Hub, directory_files, environment
from small_models import small_model
from test_hub import PIPELINE, sharded
from transcripts import shell_lines

pytestmark = pytest.mark.rest

PAGE = (Path(__file__).parent.parent / "docs" / "howto" / "hub.md").read_text()


def commands() -> list[str]:
    """The lines of the page's blocks, but for the installation."""
    return [line for line in shell_lines(PAGE) if not line.startswith("pip ")]


def test_the_page(tmp_path: Path) -> None:
    """Each command of the page succeeds, and the base that a card names is added first."""
    hub = Hub()
    tiny = hub.model("org/tiny", sharded(2))
    tiny.commit(sharded(2, "pr"), "refs/pr/1")
    hub.model("org/several", {f"small/{path}": data for path, data in sharded(1).items()})
    hub.model("org/pipeline", PIPELINE)
    for name, changed in (("base", ""), ("tuned", "x")):
        (tmp_path / name).mkdir()
        files = directory_files(small_model(tmp_path / name, "one", changed=changed))
        card = {"base_model": "org/base"} if changed else {}
        matter = "".join(f"{key}: {value}\n" for key, value in card.items())
        hub.model(f"org/{name}", {**files, "README.md": f"---\n{matter}---\n".encode()}, card=card)
    own = {**environment(hub.url, tmp_path / "hf"), "MSTORE_STORE": str(tmp_path / "store")}
    own["HF_TOKEN"] = "hf_good"
    hub.xet = tmp_path / "cas"
    hub.xet.mkdir()

    def run(line: str) -> str:
        program, *words = shlex.split(line)
        assert program == "mstore"
        done = subprocess.run(
            [sys.executable, "-m", "mstore_cli", *words],
            check=False,
            capture_output=True,
            text=True,
            env=own,
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    with hub.running():
        run("mstore init --block-size 64KiB")
        told = {line: run(line) for line in commands()}
    assert f"{hub.url}/org/tiny {tiny.refs['main']} (main)" in told["mstore show tiny"]
    there = hub.models["org/tuned-2"]
    assert there.private
    # The second version has what the first had: there was nothing to commit.
    assert len(there.commits) == 2
    assert there.refs["experiment"] == there.refs["main"]
    assert "refs/pr/2" in tiny.refs
    assert (tmp_path / "out" / "README.md").read_bytes() == there.tip()["README.md"]
    last = told["mstore add hf://org/tuned --name tuned --with-base"]
    assert last.index("added base") < last.index("added tuned")
    assert "README.md names 'org/base'" in last
    assert run("mstore refs").count("candidates") == 0
