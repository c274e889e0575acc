"""docs/howto/lazy.md: its commands work against a real server, in the page's order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_runs import run_once
from mount_drivers import end, why_not
from servers import Server
from small_models import files_of, small_model

from mstore_fuse.mounts import mounts

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "lazy.md").read_text()
URL = "s3://team-models/llama"
PATTERN = "*.embed_tokens.*"


def commands() -> list[str]:
    """The lines of the page's blocks."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.rest
def test_the_page(moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody with a small disk shows, mounts, merges and pushes, prefetches and drops."""
    lead, reader = tmp_path / "lead", tmp_path / "reader"
    for one in (lead, reader):
        one.mkdir()
    small_model(lead / "base", "1")
    for name in ("chat", "code"):
        small_model(lead / name, "1", changed=name)
    moto.use(monkeypatch)
    monkeypatch.setenv("MSTORE_STORE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    url, mount = moto.below(), tmp_path / "mnt"
    mount.mkdir()

    def run(line: str, who: Path) -> str:
        monkeypatch.chdir(who)
        # The small models have few blocks, and other names of tensors.
        line = line.replace(URL, url).replace("/mnt/chat", str(mount)).replace(PATTERN, "b")
        line = line.replace("--budget 10%", "--budget 100%").replace("/backup", str(tmp_path))
        program, *words = shlex.split(line, comments=True)
        assert program == "mstore"
        done = run_once(words)
        assert done.status == 0, f"{line}\n{done.out}{done.err}"
        return done.out

    run("mstore init --block-size 64KiB", lead)
    for name, source in (("llama", "base"), ("chat", "chat"), ("code", "code")):
        run(f"mstore add {source} --name {name}", lead)
    run(f"mstore remote add origin {url}", lead)
    run("mstore push origin --all", lead)
    told = {}
    for line in commands():
        if line.startswith("mstore mount"):
            if why_not() is not None:
                continue
            told[line] = run(line, reader)
            try:
                assert files_of(mount) == files_of(lead / "chat")
            finally:
                end(mount)
            assert not [one for one in mounts() if one.mountpoint == mount]
            continue
        told[line] = run(line, reader)
    assert "not here" in told["mstore show chat"]
    assert "brought" in told["mstore prefetch llama"]
    assert "dropped" in told["mstore drop llama"]
    assert "not copied" in told["mstore backup --lazy /backup/models"]
    run("mstore pull origin", lead)
    assert "mixed" in run("mstore refs", lead)


def test_the_page_has_every_step() -> None:
    """The page goes from the clone to the upkeep of what is here."""
    lines = "\n".join(commands())
    for words in ("clone --lazy", "show", "cat", "mount", "merge", "push", "config", "prefetch"):
        assert f"mstore {words} " in lines
    assert "mstore drop llama" in lines
