"""docs/howto/cluster*.md: their commands merge, in the pages' order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_runs import run_once
from cluster_scenes import dask_cluster, ray_cluster
from servers import Server
from small_models import small_model

ROOT = Path(__file__).parent.parent
URL = "s3://team-models/llama"


def commands(page: str) -> list[str]:
    """The lines of a page's blocks."""
    text = (ROOT / "docs" / "howto" / page).read_text()
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def team(moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family in a bucket, and its address; the directory is somebody's who has nothing yet."""
    moto.use(monkeypatch)
    monkeypatch.setenv("MSTORE_STORE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lead, reader = tmp_path / "lead", tmp_path / "reader"
    for one in (lead, reader):
        one.mkdir()
    small_model(lead / "base", "1")
    for name in ("chat", "code"):
        small_model(lead / name, "1", changed=name)
    monkeypatch.chdir(lead)
    url = moto.below()
    run("mstore init --block-size 64KiB")
    for name, source in (("llama", "base"), ("chat", "chat"), ("code", "code")):
        run(f"mstore add {source} --name {name}")
    run(f"mstore remote add origin {url}")
    run("mstore push origin --all")
    monkeypatch.chdir(reader)
    return url


def run(line: str) -> str:
    """Run a line of a page."""
    program, *words = shlex.split(line, comments=True)
    assert program == "mstore"
    done = run_once(words)
    assert done.status == 0, f"{line}\n{done.out}{done.err}"
    return done.out


@pytest.mark.rest
def test_the_page(team: str) -> None:
    """Somebody clones a family and merges on two processes, and the branch is here and there."""
    told = [run(line.replace(URL, team)) for line in commands("cluster.md")]
    assert "workers" in told[-1]
    assert "origin has it as mixed" in told[-1]
    assert "mixed" in run("mstore refs")
    assert "mixed" in run("mstore remote show origin")


@pytest.mark.rest
def test_dask(team: str, tmp_path: Path) -> None:
    """The page of Dask: a scheduler and workers, then the merge by the scheduler's file."""
    install, scheduler, worker, merge = commands("cluster-dask.md")
    assert install.startswith("pip install ")
    assert scheduler.startswith("dask scheduler --scheduler-file ")
    assert worker.startswith("dask worker --scheduler-file ")
    run(f"mstore clone --lazy {team} .mstore")
    with dask_cluster(tmp_path) as cluster:
        told = run(merge.replace("dask:scheduler.json", cluster.address))
    assert "origin has it as mixed" in told


@pytest.mark.slow
def test_ray(team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of Ray: a head, then the merge on the cluster of this machine."""
    install, head, merge = commands("cluster-ray.md")
    assert install.startswith("pip install ")
    assert head.startswith("ray start --head ")
    run(f"mstore clone --lazy {team} .mstore")
    with ray_cluster(monkeypatch):
        told = run(merge)
    assert "origin has it as mixed" in told
