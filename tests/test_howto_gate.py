"""docs/howto/gate.md: its commands work, in the page's order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import small_model
from transcripts import shell_lines

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "gate.md").read_text()


def settings() -> str:
    """The page's settings of a user."""
    (block,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return block.replace("python /srv/checks", f"{sys.executable} {ROOT}/examples/evaluation")


def run(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """What a command does in a directory with the store `.mstore` and the examples."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(directory / "config"),
    }
    environment.pop("MSTORE_STORE", None)
    line = line.replace("mstore ", f"{sys.executable} -m mstore_cli ", 1)
    return subprocess.run(
        ["bash", "-c", line.replace("file:///srv/models", f"file://{directory}")],
        cwd=directory,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )


def succeed(line: str, directory: Path) -> str:
    done = run(line, directory)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a store of three models, a remote with them, and the user's settings."""
    for name, changed in (("llama", ""), ("chat", "2"), ("code", "3")):
        small_model(tmp_path / name, "1", changed=changed)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    succeed("mstore init --block-size 64KiB", tmp_path)
    for name in ("llama", "chat", "code"):
        base = "" if name == "llama" else "--base llama"
        succeed(f"mstore add {name} --name {name} {base}", tmp_path)
    succeed("mstore remote add origin file:///srv/models/family", tmp_path)
    succeed("mstore push origin --all", tmp_path)
    file = tmp_path / "config" / "mstore" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(settings())
    return tmp_path


@pytest.mark.rest
def test_the_page(place: Path) -> None:
    """A merge passes, a gate gets a name, branches are guarded, and a job of CI pushes."""
    told = {line: succeed(line, place) for line in shell_lines(PAGE)}
    merged = next(one for line, one in told.items() if "--check " in line)
    assert re.search(r"finite 1 is >= 1\n", merged)
    assert re.search(r"rms \S+ is <= \S+; llama has \S+\n", merged)
    assert "verdict python" in told["mstore log merged --notes"]
    (job,) = (json.loads(one) for line, one in told.items() if "--json" in line)
    assert (job["moved"], job["verdicts"][0]["gate"]) == (True, "quality")


@pytest.mark.rest
def test_a_job_fails(place: Path) -> None:
    """Where the gate says no, the job's merge ends with 3, and nothing was made or pushed."""
    lines = [line for line in shell_lines(PAGE) if "work" in line]
    file = place / "config" / "mstore" / "config.toml"
    file.write_text(settings().replace("finite=1", "finite=2"))
    succeed(lines[0], place)
    assert run(lines[1], place).returncode == 3
    assert run(lines[2], place).returncode == 1
    assert "nightly" not in succeed("mstore remote show origin", place)


def test_the_page_has_every_step() -> None:
    """The page goes from one check to guarded branches."""
    lines = "\n".join(shell_lines(PAGE))
    for words in ("merge", "gate run", "gate require", "gate\n", "reset", "clone", "push"):
        assert words in lines
