"""Paths that become other files under programs that have them open: overlayfs, and `mv`.

On overlayfs the first writer copies a file of a lower layer. Whoever had mapped it keeps the old
one, and nothing tells.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError

import pytest
from long_programs import mstore, program, server, whole_mount
from loop_disks import overlay
from small_models import BLOCK, small_model

from mstore import Store
from mstore.blocks.lmdb_env import Environment
from mstore.fs import rights


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the branches a and b, alone in a directory."""
    lower = tmp_path / "lower"
    lower.mkdir()
    with Store.init(lower / "s", block_size=BLOCK) as store:
        store.add(small_model(tmp_path / "models" / "a", "a"), name="a", threads=1)
        store.add(small_model(tmp_path / "models" / "b", "b"), name="b", threads=1)
    return lower / "s"


def succeed(store: Path, words: str, models: Path) -> None:
    done = mstore(store, words, models)
    assert done.returncode == 0, done


def sound(store: Path) -> None:
    with Store.open(store) as opened:
        assert opened.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_programs_on_a_store_in_a_lower_layer(store: Path, tmp_path: Path) -> None:
    """A program, a server and a mount that began before the first commit see it and later ones."""
    models = tmp_path / "models"
    with overlay(tmp_path, store.parent) as merged:
        layered = merged / "s"
        point = tmp_path / "mount"
        with (
            program(layered) as ask,
            server(layered) as served,
            whole_mount(layered, point) as seen,
        ):
            assert ask("refs").split() == served() == seen() == ["a", "b"]
            succeed(layered, "add MODEL --name c", models)
            assert ask("refs").split() == served() == seen() == ["a", "b", "c"]
            assert ask("tag t") == "done"
            assert ask("refs").split() == served() == seen() == ["a", "b", "c", "t"]
        sound(layered)
    with Store.open(store) as untouched:
        assert [ref.name for ref in untouched.refs()] == ["a", "b"]


def commit(path: Path, value: bytes) -> None:
    """A commit of another process."""
    code = (
        "import sys; from pathlib import Path; from mstore.blocks.lmdb_env import Environment\n"
        "env = Environment.acquire(Path(sys.argv[1]), ('rows',))\n"
        "with env.write() as t: t.put(b'key', sys.argv[2].encode(), db=env.databases['rows'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(path), value.decode()]
    subprocess.run(command, check=True, env=environment)


def get(env: Environment) -> bytes | None:
    with env.read() as transaction:
        return transaction.get(b"key", db=env.databases["rows"])


def test_a_reader_that_may_not_write_sees_what_is_copied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a reader copies nothing up, and sees what others commit to the upper layer."""
    lower = tmp_path / "lower"
    (lower / "env").mkdir(parents=True)
    commit(lower / "env", b"1")
    with overlay(tmp_path, lower) as merged:
        monkeypatch.setattr(rights, "_unwritable", lambda paths: (paths[0], errno.EROFS))
        env = Environment.acquire(merged / "env", ("rows",), create=False)
        assert get(env) == b"1"
        assert list((tmp_path / "disk" / "upper").iterdir()) == []
        for value in (b"2", b"3"):
            commit(merged / "env", value)
            assert get(env) == value
        env.release()


@pytest.mark.rest
def test_an_upper_layer_without_room_for_the_index(store: Path, tmp_path: Path) -> None:
    """Where the index cannot be copied up, readers read the lower one, and writers say why not."""
    models = tmp_path / "models"
    with overlay(tmp_path, store.parent, 64 << 10) as merged:
        for words in ("refs", "fsck --read-data", "checkout b OUT"):
            done = mstore(merged / "s", words, models)
            assert (done.returncode, done.stderr) == (0, ""), done
        done = mstore(merged / "s", "tag t a", models)
        assert done.returncode == 1
        assert "no space left on device" in done.stderr


def put_back(store: Path, other: Path) -> None:
    """What a user does who restores a store: the old one aside, the other one in its place."""
    store.rename(store.with_name("aside"))
    other.rename(store)


@pytest.mark.rest
def test_programs_go_on_with_a_store_that_was_put_back(store: Path, tmp_path: Path) -> None:
    """A server, mounts, and a program that asks for the generation read the files that are now at
    the store's path, and what is committed to them; and that program can write."""
    models = tmp_path / "models"
    shutil.copytree(store, tmp_path / "backup")
    with Store.open(store) as opened:
        opened.add(small_model(models / "c", "c"), name="c", threads=1)
    with (
        program(store) as ask,
        server(store) as served,
        whole_mount(store, tmp_path / "mount") as seen,
        whole_mount(store, tmp_path / "followed", "c", "--follow"),
    ):
        before = int(ask("generation"))
        assert ask("refs").split() == served() == seen() == ["a", "b", "c"]
        assert os.listdir(tmp_path / "followed")
        put_back(store, tmp_path / "backup")
        assert served() == seen() == ["a", "b"]
        assert int(ask("generation")) == before - 1
        assert ask("refs").split() == ["a", "b"]
        assert os.listdir(tmp_path / "followed") == []
        succeed(store, "tag other a", models)
        assert ask("refs").split() == served() == seen() == ["a", "b", "other"]
        assert ask("tag mine") == "done"
        succeed(store, "add MODEL --name c", models)
        assert served() == seen() == ["a", "b", "c", "mine", "other"]
        assert os.listdir(tmp_path / "followed")
    sound(store)


@pytest.mark.rest
def test_another_store_is_not_mixed_in(store: Path, tmp_path: Path) -> None:
    """Where another store takes the place, programs say so, and show nothing of it."""
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        other.add(small_model(tmp_path / "models" / "x", "x"), name="x", threads=1)
    with (
        program(store) as ask,
        server(store) as served,
        whole_mount(store, tmp_path / "mount") as seen,
    ):
        assert served() == seen() == ["a", "b"]
        put_back(store, tmp_path / "other")
        with pytest.raises(HTTPError, match="503"):
            served()
        with pytest.raises(OSError, match="mount") as failed:
            seen()
        assert failed.value.errno == errno.EBUSY
        told = "Unavailable this store was replaced by another one"
        assert ask("generation").startswith(told)
        assert ask("tag t").startswith("Unavailable this store was removed or replaced")
        assert ask("refs").startswith(told)


def test_nothing_is_opened_while_nothing_is_there(store: Path) -> None:
    """Between the two moves of a restore, what was open is read."""
    with Store.open(store) as opened:
        before = opened.generation()
        store.rename(store.with_name("aside"))
        assert opened.generation() == before
        assert len(opened.refs()) == 2
        store.with_name("aside").rename(store)
        assert opened.generation() == before


DAMAGED = """
import os, shutil, sys
from pathlib import Path
from mstore.blocks.lmdb_env import Environment
from mstore.fs import rights
from mstore.terms.errors import MstoreError
path = Path(sys.argv[1])
env = Environment.acquire(path, ("rows",))

def get():
    with env.read() as transaction:
        return transaction.get(b"key", db=env.databases["rows"])

def told(call):
    try:
        call()
    except MstoreError as error:
        print(type(error).__name__, error.what)

def write():
    with env.write():
        pass

assert get() == b"1"
shutil.copytree(path, path.with_name("copy"))
os.truncate(path.with_name("copy") / "data.mdb", 3 * 4096 + 5)
path.rename(path.with_name("aside"))
path.with_name("copy").rename(path)
told(env.follow)
told(write)
assert get() == b"1"
"""


@pytest.mark.rest
def test_a_damaged_file_is_refused_where_a_sound_one_was(tmp_path: Path) -> None:
    """What has taken the place of an environment is checked before LMDB maps it, and no transaction
    of the old one goes on with it."""
    (tmp_path / "env").mkdir()
    commit(tmp_path / "env", b"1")
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, tmp_path / "env"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    first, second = done.stdout.splitlines()
    assert first.startswith("Corrupt damaged index")
    assert second.startswith("Unavailable this store was removed or replaced")
