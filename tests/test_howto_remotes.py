"""docs/howto/remotes.md: its commands work against a real server, in the page's order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import run_once
from servers import Server
from small_models import small_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "remotes.md").read_text()
URL = "s3://team-models/llama"


def commands() -> list[str]:
    """The lines of the page's blocks, but for the installation and what serves for ever."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith(("pip ", "mstore serve", "mstore copy"))]


def test_the_page(moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team lead moves a family to a bucket, a colleague clones it, adds a model and pushes it."""
    lead, colleague = tmp_path / "lead", tmp_path / "colleague"
    for one in (lead, colleague):
        one.mkdir()
    small_model(lead / "base", "1")
    small_model(lead / "tuned", "1", changed="2")
    small_model(colleague / "out" / "checkpoint-900", "1", changed="3")
    moto.use(monkeypatch)
    monkeypatch.setenv("MSTORE_STORE", "")
    url = moto.below()

    def run(line: str, who: Path) -> str:
        monkeypatch.chdir(who)
        program, *words = shlex.split(line.replace(URL, url), comments=True)
        assert program == "mstore"
        done = run_once(words)
        assert done.status == 0, f"{line}\n{done.out}{done.err}"
        return done.out

    run("mstore init --block-size 64KiB", lead)
    for name, base in (("llama", "base"), ("chat", "tuned"), ("old-experiment", "base")):
        run(f"mstore add {base} --name {name}", lead)
    told = {}
    for line in commands():
        who = lead if "remote add" in line or "push origin --all" in line else colleague
        told[line] = run(line, who)
    assert "chat" in told["mstore refs"]
    assert "no problems" in told["mstore remote fsck origin"]
    run("mstore pull origin", lead)
    assert "refs" not in run("mstore log chat", lead)


def test_the_page_has_every_step() -> None:
    """The page goes from a first push to the upkeep of the remote."""
    lines = "\n".join(commands())
    for words in ("remote add", "push", "clone", "pull", "remote gc", "remote fsck", "bundle"):
        assert f"mstore {words} " in lines


@pytest.mark.rest
def test_the_demo(tmp_path: Path) -> None:
    """`make demo-remote` runs to its end."""
    demo = ROOT / "examples" / "demo_remote.py"
    done = subprocess.run(
        [sys.executable, str(demo), str(tmp_path / "demo")],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems" in done.stdout
