"""A bounded address space (`ulimit -v`, RLIMIT_AS): every command runs in a few GiB."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart import commands, program
from small_models import BLOCK, small_model

from mstore.api import Store
from mstore.blocks import lmdb_files

GIB = 1 << 30
BOUND = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0}))\n"
MERGE = ("merge", "--base", "base", "--expert", "one", "--expert", "two", "--method", "ties")
MERGE = (*MERGE, "--param", "density=0.4", "--name", "merged")


@pytest.mark.rest
@pytest.mark.parametrize("bound", [3 * GIB, 8 * GIB])
def test_every_command_runs_in_a_few_gib(bound: int, tmp_path: Path) -> None:
    """A store is made, filled, merged, collected, checked and indexed anew under `ulimit -v`."""
    for name in ("base", "one", "two"):
        small_model(tmp_path / name, "family", changed=name)
    ran = commands(
        tmp_path / "store",
        ["init", "--block-size", "64KiB"],
        ["add", tmp_path / "base", "--name", "base"],
        *(["add", tmp_path / name, "--name", name, "--base", "base"] for name in ("one", "two")),
        MERGE,
        ["refs"],
        ["cat", "merged:config.json"],
        ["checkout", "merged", tmp_path / "copy"],
        ["gc"],
        ["fsck", "--read-data"],
        ["reindex"],
        ["fsck"],
        code=BOUND.format(bound),
    )
    assert [done.status for done in ran] == [0] * len(ran), ran


GROWING = """
import sys
from pathlib import Path
from mstore.blocks.lmdb_env import Environment
env = Environment.acquire(Path(sys.argv[1]), ("rows",))
sizes = [env._files.mapped_bytes]
for round_ in range(int(sys.argv[2])):
    with env.write() as rows:
        for number in range(100):
            rows.put(b"%d %d" % (round_, number), bytes(100_000), db=env.databases["rows"])
    sizes.append(env._files.mapped_bytes)
    with env.read() as rows:
        assert rows.get(b"0 0", db=env.databases["rows"]) == bytes(100_000)
print(len(set(sizes)), sizes[-1] > env.file_bytes())
env.release()
"""


@pytest.mark.rest
def test_a_map_grows_with_its_file(tmp_path: Path) -> None:
    """What is mapped at first is a share of the bound; a file that outgrows it is mapped anew."""
    steps, fits = program(BOUND.format(2 * GIB) + GROWING, str(tmp_path), "30").split()
    assert int(steps) > 2
    assert fits == "True"


@pytest.mark.rest
def test_a_file_that_another_process_let_grow_is_mapped_anew(tmp_path: Path) -> None:
    """A reader with a small map follows a writer that is not bounded."""
    reading = """
import subprocess, sys
from pathlib import Path
from mstore.blocks.lmdb_env import Environment
env = Environment.acquire(Path(sys.argv[1]), ("rows",))
mapped = env._files.mapped_bytes
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1], "40"], check=True, preexec_fn=
    lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2))
assert env.file_bytes() > mapped
with env.read() as rows:
    assert rows.stat(env.databases["rows"])["entries"] == 4000
with env.write() as rows:
    rows.put(b"k", b"v", db=env.databases["rows"])
env.release()
print("right")
"""
    soft = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2 * GIB}, hard))\n"
    )
    assert program(soft + reading, str(tmp_path), GROWING).endswith("right\n")


def test_a_transaction_that_does_not_fit_says_why(tmp_path: Path) -> None:
    """A transaction larger than the room is an error that names `ulimit -v`, and loses nothing."""
    full = """
import sys
from pathlib import Path
from mstore.blocks.lmdb_env import Environment
from mstore.terms.errors import StorageFailed
env = Environment.acquire(Path(sys.argv[1]), ("rows",))
def fill(count):
    with env.write() as rows:
        for number in range(count):
            rows.put(b"%d" % number, bytes(1 << 20), db=env.databases["rows"])
fill(3)
try:
    fill(2000)
except StorageFailed as error:
    print(error.what, error.hint)
with env.read() as rows:
    print(rows.stat(env.databases["rows"])["entries"])
fill(5)
"""
    told, entries = program(BOUND.format(GIB) + full, str(tmp_path)).splitlines()
    assert "ulimit -v" in told
    assert "address space" in told
    assert entries == "3"


def test_without_a_bound_all_is_mapped_at_once() -> None:
    """Where nothing is bounded the map is as large as it ever was, and never narrow."""
    assert lmdb_files.address_limit() is None
    assert lmdb_files.map_sizes(1 << 20) == [lmdb_files.MAP_SIZE]
    assert lmdb_files._room(1 << 37) is None


@pytest.mark.rest
def test_an_old_store_opens_under_a_bound(tmp_path: Path) -> None:
    """A store whose files name a map of 256 GiB is read and written in 2 GiB."""
    small_model(tmp_path / "model", "bound")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "model", name="base", threads=1)
    ran = commands(
        tmp_path / "store",
        ["refs"],
        ["tag", "v1", "base"],
        ["cat", "v1:config.json"],
        code=BOUND.format(2 * GIB),
    )
    assert [done.status for done in ran] == [0, 0, 0], ran
