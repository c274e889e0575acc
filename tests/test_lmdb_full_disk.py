"""Full disks where a write through a map finds no room: words and no signal, and reading goes on.

LMDB's lock file is such a map. On btrfs each write of it may need room, on XFS the first after a
reflink, elsewhere one in a hole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from long_programs import mstore, program, server, whole_mount
from loop_disks import MIB, fill, loop_disk, make_room, room, sync
from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest, Store

SIZES = {
    "btrfs": 130 * MIB,
    "btrfs-mixed": 130 * MIB,
    "xfs": 310 * MIB,
    "ext4": 64 * MIB,
    "tmpfs": 16 * MIB,
}
READS = ("refs", "log", "ls b", "cat a:config.json", "fsck --read-data", "stats", "checkout b OUT")
WRITES = (
    *("tag t a", "add MODEL --name c", "gc", "config codec raw"),
    "merge --base a --expert b --method linear --name m2",
    "plan --base a --expert b --method ties",
)
ROUNDS = 5


def filled(disk: Path, models: Path) -> Path:
    """A store with a base, an expert, statistics of both, and a merge."""
    base = small_model(models / "a", "a")
    expert = small_model(models / "b", "a", changed="a little")
    with Store.init(disk / "s", block_size=BLOCK) as store:
        store.add(base, name="a", threads=1)
        store.add(expert, name="b", base="a", threads=1)
        request = MergeRequest(base="a", experts=["b"], method="linear")
        store.merge(store.plan(request), name="m", threads=1)
    return disk / "s"


def copied(store: Path) -> None:
    """What `cp` leaves of a store: its files share their space, or are not written in place."""
    old = store.with_name("old")
    store.rename(old)
    subprocess.run(["cp", "-a", "--reflink=auto", str(old), str(store)], check=True)


def sparse(store: Path) -> None:
    """What a tool leaves that makes holes of zeros, or does not copy lock files' bytes."""
    for lock in store.glob("*/lock.mdb"):
        punch = ["fallocate", "--punch-hole", "--offset", "0", "--length", str(MIB), str(lock)]
        subprocess.run(punch, check=True)


def without(store: Path) -> None:
    """No lock files at all: LMDB would make them, of holes."""
    for lock in store.glob("*/lock.mdb"):
        lock.unlink()


def as_made(store: Path) -> None:
    """The store as mstore made it."""


def look(store: Path, models: Path, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
    """On a full disk: commands that read work, those that write say why they do not."""
    for words in reads:
        done = mstore(store, words, models)
        assert (done.returncode, done.stderr) == (0, ""), words
        if "OUT" in words:
            assert files_of(models / "out") == files_of(models / "b")
    for words in writes:
        done = mstore(store, words, models)
        assert done.returncode == 1, (words, done)
        assert "no space left on device" in done.stderr, words
        assert "hint: " in done.stderr
        assert "computed again when needed" in done.stderr or "free some space" in done.stderr


WAYS = [
    *(("btrfs", copied), ("btrfs", as_made), ("btrfs", without), ("btrfs-mixed", as_made)),
    *(("xfs", copied), ("xfs", sparse), ("ext4", sparse), ("ext4", without)),
    *(("tmpfs", sparse), ("tmpfs", without)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change"), WAYS)
def test_every_command_on_a_full_disk(kind: str, change: Any, tmp_path: Path) -> None:
    """No command ends by a signal, readers read, writers say that the disk is full, and all works
    when there is room again."""
    with loop_disk(kind, tmp_path, SIZES[kind]) as disk:
        store = filled(disk, tmp_path / "models")
        change(store)
        fill(disk)
        look(store, tmp_path / "models", READS, WRITES)
        make_room(disk)
        for words in (*WRITES, *READS):
            done = mstore(store, words, tmp_path / "models")
            assert done.returncode == 0, (words, done)


@pytest.mark.rest
@pytest.mark.parametrize(("kind", "change"), [WAYS[0], WAYS[3], WAYS[-1]])
def test_commands_on_a_full_disk(kind: str, change: Any, tmp_path: Path) -> None:
    """The same, of a few commands."""
    with loop_disk(kind, tmp_path, SIZES[kind]) as disk:
        store = filled(disk, tmp_path / "models")
        change(store)
        fill(disk)
        look(store, tmp_path / "models", ("refs", "checkout b OUT"), ("tag t a",))
        make_room(disk)
        assert mstore(store, "tag t a", tmp_path / "models").returncode == 0
        assert mstore(store, "fsck --read-data", tmp_path / "models").returncode == 0


NO_ROOM = "StorageFailed no space left on device"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kind", "change", "again"),
    [
        ("btrfs", copied, None),
        pytest.param("btrfs", as_made, None, marks=pytest.mark.slow),
        # A copy shares the lock file's blocks anew, beneath the programs that have mapped it.
        pytest.param("xfs", as_made, copied, marks=pytest.mark.slow),
        pytest.param("tmpfs", sparse, None, marks=pytest.mark.slow),
    ],
)
def test_programs_that_run_when_the_disk_fills(
    kind: str, change: Any, again: Any, tmp_path: Path
) -> None:
    """A program with an open store, a server and a mount live on: they read while the disk is full,
    and read and write as before when there is room, without a restart."""
    names = ["a", "b", "m"]
    models = tmp_path / "models"
    with loop_disk(kind, tmp_path, SIZES[kind]) as disk:
        store = filled(disk, models)
        change(store)
        point = tmp_path / "mount"
        with program(store) as ask, server(store) as served, whole_mount(store, point) as listed:
            assert ask("refs").split() == served() == listed() == names
            assert ask("stats")
            if again is not None:
                subprocess.run(["cp", "-a", "--reflink", store, disk / "copy"], check=True)
            fill(disk)
            for round_ in range(ROUNDS):
                assert ask("refs").split() == served() == listed() == names
                assert int(ask("cat b")) > 0
                assert ask("tag t") == NO_ROOM
                assert (point / "refs" / "a" / "config.json").read_bytes()
                if round_ == 2:
                    look(store, models, ("refs",), ("tag t a",))
                sync(disk)
            make_room(disk)
            assert mstore(store, "tag other a", models).returncode == 0
            until = time.monotonic() + 60
            while not ask("refs").split() == served() == listed() == sorted([*names, "other"]):
                assert time.monotonic() < until
                time.sleep(0.2)
            assert ask("tag mine") == "done"
            assert served() == sorted([*names, "mine", "other"])
            fill(disk)
            assert "mine" in ask("refs")
        make_room(disk)
        assert mstore(store, "fsck --read-data", models).returncode == 0


INSIDE = """
import os, sys
from pathlib import Path
from loop_disks import fill, make_room, sync
from mstore.blocks import lmdb_files
from mstore.blocks.lmdb_env import Environment
from mstore.terms.errors import StorageFailed
disk = Path(sys.argv[1])
env = Environment.acquire(disk / "env", ("rows",))

def put(number):
    with env.write() as transaction:
        transaction.put(b"key", b"%d" % number, db=env.databases["rows"])

def get():
    with env.read() as transaction:
        return int(transaction.get(b"key", db=env.databases["rows"]))

put(1)
lmdb_files._FULL_PATIENCE = 0.0
"""


def inside(disk: Path, code: str) -> str:
    """Run code with an environment on that disk in a process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", INSIDE + code, str(disk)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A btrfs with an environment of which the lock file is not written in place."""
    with loop_disk("btrfs", tmp_path, SIZES["btrfs"]) as disk:
        (disk / "env").mkdir()
        (disk / "env" / "lock.mdb").write_bytes(bytes(4096 + 64 * 1024))
        yield disk


@pytest.mark.rest
def test_the_disk_fills_inside_a_transaction(full_disk: Path) -> None:
    """A read transaction goes on and ends; a write transaction is refused before its commit. When
    there is room, the same process and others write again: nothing stays locked."""
    code = """
with env.read() as outer:
    fill(disk); sync(disk)
    assert get() == 1
    assert outer.get(b"key", db=env.databases["rows"]) == b"1"
assert get() == 1
make_room(disk)
put(2)
assert get() == 2 and env._files.copy is None and not lmdb_files.abandoned
try:
    with env.write() as transaction:
        transaction.put(b"key", b"3", db=env.databases["rows"])
        fill(disk); sync(disk)
except StorageFailed as error:
    print(error.what)
assert get() == 2
make_room(disk)
put(4)
assert get() == 4
"""
    assert inside(full_disk, code) == "no space left on device\n"
    assert inside(full_disk, "print(get())") == "1\n"


@pytest.mark.rest
def test_a_commit_that_could_fill_the_disk_is_refused_before(full_disk: Path) -> None:
    """LMDB ends a commit for which the disk has no room, and unlocks, in one call; where writing
    copies, the unlocking has no room then either. So such a commit is not begun."""
    code = """
fill(disk, leave=8 << 20)
try:
    with env.write() as transaction:
        for _ in range(60_000):
            transaction.put(os.urandom(32), os.urandom(60), db=env.databases["rows"])
except StorageFailed as error:
    print(error.what)
assert get() == 1
put(2)
assert get() == 2
"""
    assert inside(full_disk, code) == "no space left on device\n"
    assert room(full_disk) > MIB
