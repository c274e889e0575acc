"""Processes with one number, in several PID namespaces: containers that share a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from apart import commands
from small_models import BLOCK, small_model

from mstore.api import Store

# In a namespace of its own the first program is number 1, and so are all others.
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

HOLDER = """
import os, sys, time
from mstore.api import Store
assert os.getpid() == 1
store = Store.open(sys.argv[1])
store.refs()
print("open", flush=True)
time.sleep(float(sys.argv[2]))
store.close()
"""


def _can_unshare() -> bool:
    try:
        done = subprocess.run([*ALONE, "true"], capture_output=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(
    not _can_unshare(), reason="no PID namespace of its own is allowed to this user"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_model(tmp_path / "model", "pids")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "model", name="base", threads=1)
    return tmp_path / "store"


@contextmanager
def holder(store: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process numbered 1 that has the store open for so long."""
    process = subprocess.Popen(
        [*ALONE, sys.executable, "-c", HOLDER, str(store), str(seconds)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.mark.rest
def test_a_second_process_of_that_number_is_told(store: Path) -> None:
    """Who cannot be told apart from a process that has the store open hears why, and what to do;
    a process of another number works as ever."""
    with holder(store, 600):
        began = time.monotonic()
        refused, again = commands(
            store,
            ["refs"],
            ["add", store.parent / "model", "--name", "again"],
            before=ALONE,
            code="from mstore.blocks import lmdb_files; lmdb_files.PID_PATIENCE = 0.2\n",
        )
        for done in (refused, again):
            assert done.status == 1
            assert "another process numbered 1 has this store open" in done.err
            assert "--pid=host" in done.err
        assert time.monotonic() - began < 300
        # `sh` is number 1 there.
        (fine,) = commands(store, ["refs"], before=(*ALONE, "sh", "-c", '"$@"; exit $?', "sh"))
        assert fine.status == 0, fine.err


@pytest.mark.rest
def test_one_that_ends_soon_is_waited_for(store: Path) -> None:
    """A holder that ends within the patience delays, and nothing else."""
    with holder(store, 3.0):
        ran = commands(
            store,
            ["refs", "--json"],
            ["add", store.parent / "model", "--name", "again"],
            before=ALONE,
            code="from mstore.blocks import lmdb_files; lmdb_files.PID_PATIENCE = 60\n",
        )
    assert [done.status for done in ran] == [0, 0], ran
    assert json.loads(ran[0].out)


@pytest.mark.rest
def test_a_killed_one_stands_in_nobodys_way(store: Path) -> None:
    """The number is free again as soon as its holder is dead, however it ended."""
    with holder(store, 120) as process:
        process.kill()
        process.wait()
        (done,) = commands(store, ["refs"], before=ALONE)
    assert done.status == 0, done.err
