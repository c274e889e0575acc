"""docs/howto/registry.md: its commands work against docker-registry, in the page's order."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from registries import registry
from small_models import BLOCK, small_model
from transcripts import shell_lines

from mstore import MergeRequest, Store

pytestmark = pytest.mark.rest

PAGE = (Path(__file__).parent.parent / "docs" / "howto" / "registry.md").read_text()
HOST = "registry.example.org"


def commands() -> list[str]:
    """The lines of the page's blocks, but for the installation."""
    return [line for line in shell_lines(PAGE) if not line.startswith("pip ")]


def test_the_page(tmp_path: Path) -> None:
    """Each command of the page succeeds; what is added from a registry is what was exported."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name, changed in (("base", ""), ("chat", "x"), ("code", "y")):
            (tmp_path / name).mkdir()
            small_model(tmp_path / name, "one", changed=changed)
            base = None if name == "base" else "llama/base"
            store.add(tmp_path / name, name=f"llama/{name}", base=base)
        request = MergeRequest(
            base="llama/base", experts=["llama/chat", "llama/code"], method="linear"
        )
        store.merge(store.plan(request), name="llama/merged")
    own = {"MSTORE_STORE": str(tmp_path / "store"), "DOCKER_CONFIG": str(tmp_path)}

    def run(line: str, host: str) -> str:
        program, *words = shlex.split(line.replace(HOST, host))
        assert program == "mstore"
        done = subprocess.run(
            [sys.executable, "-m", "mstore_cli", *words],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, **own},
            cwd=tmp_path,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    with registry(tmp_path) as server:
        told = {line: run(line, server.host) for line in commands()}
        tag = server.manifest("models/merged:v1")
        id = tag["annotations"]["org.mstore.snapshot"]
        assert id[:12] in run("mstore log llama/merged", server.host)
    assert f"oci://{server.host}/models/merged" in told["mstore show merged"]
    assert "up to date" in told["mstore outdated"]
    assert len(told) == 7
