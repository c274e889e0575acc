"""The lock table as LMDB has mapped it: asked before each write, and left alone if that fails.

Here the kernel is not asked, but answered for; `test_lmdb_full_disk.py` fills real disks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from mstore import fs
from mstore.blocks import lmdb_files, lmdb_table
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_table import LockTable
from mstore.fs import disks
from mstore.terms.errors import StorageFailed


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Environment]:
    """An open environment with one row."""
    (tmp_path / "env").mkdir()
    env = Environment.acquire(tmp_path / "env", ("rows",))
    put(env, b"1")
    yield env
    env.release()
    assert not lmdb_files.abandoned


def put(env: Environment, value: bytes) -> None:
    with env.write() as transaction:
        transaction.put(b"key", value, db=env.databases["rows"])


def get(env: Environment) -> bytes | None:
    with env.read() as transaction:
        return transaction.get(b"key", db=env.databases["rows"])


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A function that fills and empties the disk, as far as the table can tell."""
    monkeypatch.setattr(lmdb_files, "_FULL_PATIENCE", 0.0)
    real = fs.is_mappable

    def fill(is_full: bool) -> None:
        monkeypatch.setattr(fs, "is_mappable", (lambda *_, **__: False) if is_full else real)

    return fill


def test_it_finds_the_map_of_lmdb(env: Environment, tmp_path: Path) -> None:
    """The advice is given to the pages that LMDB has mapped, whatever the path is called."""
    assert env._files.table is not None
    assert env._files.table._advice is not None
    odd = tmp_path / "two\nlines and ü"
    (odd / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(odd)
    other = Environment.acquire(tmp_path / "link" / "x", ())
    assert other._files.table is not None
    assert other._files.table._advice is not None
    assert other._files.table._advice[0].value != env._files.table._advice[0].value
    begin, size = (part.value for part in other._files.table._advice[:2])
    maps = Path("/proc/self/maps").read_text()
    assert f"{begin:x}-{begin + size:x} rw-s" in maps
    other.release()


def test_readers_go_on_and_writers_are_told(env: Environment, full: Callable[[bool], None]) -> None:
    """While the table cannot be written, nothing begins in LMDB: a copy is read, also beneath a
    transaction that began before; then all is as before."""
    with env.read() as outer:
        full(True)
        assert get(env) == b"1"
        assert env._files.copy is None
        assert outer.get(b"key", db=env.databases["rows"]) == b"1"
    with pytest.raises(StorageFailed) as refused:
        put(env, b"2")
    assert refused.value.errno == errno.ENOSPC
    assert get(env) == b"1"
    assert env._files.copy is not None
    with env.read(), env.read() as inner:
        assert inner.get(b"key", db=env.databases["rows"]) == b"1"
    assert len(lmdb_files.abandoned) == 1
    full(False)
    assert get(env) == b"1"
    assert env._files.copy is None
    put(env, b"2")
    assert get(env) == b"2"


def test_other_threads_read_while_one_switches(
    env: Environment, full: Callable[[bool], None]
) -> None:
    """Threads that read when the disk fills, and when it has room again, see the row each time."""
    found: list[bytes | None] = []
    is_over = False

    def read() -> None:
        while not is_over:
            found.append(get(env))

    threads = [Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        for is_full in (True, False):
            full(is_full)
            get(env)
    is_over = True
    for thread in threads:
        thread.join()
    assert set(found) == {b"1"}
    put(env, b"2")


def test_what_cannot_end_ends_later(env: Environment, full: Callable[[bool], None]) -> None:
    """A write transaction that can neither be committed nor ended is ended by its thread when there
    is room; until then nobody waits for its lock."""

    def overtaken() -> None:
        with env.write() as transaction:
            transaction.put(b"key", b"2", db=env.databases["rows"])
            full(True)

    with pytest.raises(StorageFailed):
        overtaken()
    with pytest.raises(StorageFailed):
        put(env, b"3")
    assert get(env) == b"1"
    full(False)
    put(env, b"4")
    assert get(env) == b"4"


def test_a_closed_store_can_be_opened_again(tmp_path: Path, full: Callable[[bool], None]) -> None:
    """What was left open in LMDB is closed before the same files are opened again."""
    path = tmp_path / "env"
    path.mkdir()
    env = Environment.acquire(path, ("rows",))
    put(env, b"1")
    full(True)
    env.release()
    again = Environment.acquire(path, ("rows",))
    assert get(again) == b"1"
    again.release()
    full(False)
    again = Environment.acquire(path, ("rows",))
    put(again, b"2")
    assert again._files.copy is None
    again.release()


@pytest.mark.parametrize("size", [None, 0, 1000])
def test_a_lock_file_is_made_whole_first(tmp_path: Path, size: int | None) -> None:
    """LMDB finds a file of full length and without holes, whatever became of it."""
    path = tmp_path / "env"
    path.mkdir()
    Environment.acquire(path, ("rows",)).release()
    (path / "lock.mdb").unlink()
    if size is not None:
        (path / "lock.mdb").write_bytes(bytes(size))
    env = Environment.acquire(path, ("rows",))
    put(env, b"1")
    status = (path / "lock.mdb").stat()
    assert status.st_size >= 64 * lmdb_table.MAX_READERS
    assert status.st_blocks * 512 >= 64 * lmdb_table.MAX_READERS
    env.release()


def test_an_older_kernel_is_not_asked(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where madvise does not know the advice, and where no map was found, free space decides."""
    for module in (fs, disks):
        monkeypatch.setattr(module, "POPULATE_WRITE", 4711)
    table = LockTable(env.path, copies=False)
    assert table._populate() == errno.EINVAL
    lost = LockTable(env.path / "nowhere", copies=False)
    assert lost._populate() == errno.EINVAL
    for free, answer in ((fs.SPARE_BYTES - 1, False), (fs.SPARE_BYTES, True)):
        monkeypatch.setattr(disks, "free_bytes", lambda path, free=free: free)
        assert table.is_writable() == lost.is_writable() == answer
        (env.path / "other").write_bytes(b"")
        if answer:
            fs.require_mappable(env.path / "other", 4096, copies=False)
        else:
            with pytest.raises(StorageFailed):
                fs.require_mappable(env.path / "other", 4096, copies=False)


def test_where_writing_copies_little_room_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem that copies on write is full before it is, and then is not even asked."""
    asked: list[bool] = []
    for copies, free, answer in ((True, -1, False), (True, 0, True), (False, -(1 << 22), True)):

        def populate(copies: bool = copies) -> int:
            asked.append(copies)
            return 0

        monkeypatch.setattr(disks, "free_bytes", lambda path, free=free: fs.SPARE_BYTES + free)
        assert fs.is_mappable(tmp_path, populate, copies=copies) == answer
    assert asked == [True, False]


def test_only_a_signal_counts(tmp_path: Path) -> None:
    """Any other failure of the advice is none of a write."""
    assert not fs.is_mappable(tmp_path, lambda: errno.EFAULT, copies=False)
    assert fs.is_mappable(tmp_path, lambda: errno.EAGAIN, copies=False)
