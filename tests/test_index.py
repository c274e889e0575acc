"""The index and its LMDB environment: rows, readers that never wait, forks, damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.blocks import lmdb_table
from mstore.blocks.codecs import Codec
from mstore.blocks.index import Index
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, SealedPack
from mstore.blocks.schema import DATABASES
from mstore.terms.errors import Conflict, Corrupt, Unavailable
from mstore.terms.ids import BlockId, PackId, TensorId


def pack(id: int, *entries: PackEntry) -> SealedPack:
    """A sealed pack as far as the index is concerned."""
    return SealedPack(PackId(bytes([id]) * 32), Path("nowhere"), 4096 * id, entries)


def block(id: int, *, offset: int = 4096, base: bytes = NO_BASE) -> PackEntry:
    """A block's footer entry."""
    return PackEntry(bytes([id]) * 32, Kind.BLOCK, Codec.RAW, 2, offset, 10, 20, base)


# -- rows --------------------------------------------------------------------------------------


def test_what_a_pack_holds_is_found(index: Index) -> None:
    """Blocks and records are found by kind and id, with every field of their footer entry."""
    record = PackEntry(b"r" * 32, Kind.PLAN, Codec.RAW, 1, 5000, 77, 77)
    delta = block(2, offset=(1 << 40) + 3, base=b"b" * 32)
    with index.env.write() as rows:
        index.insert_pack(rows, pack(7, block(1), delta, record))
    with index.env.read() as rows:
        for entry in (block(1), delta):
            found = index.block(rows, BlockId(entry.id))
            assert found is not None
            assert found.pack == PackId(bytes([7]) * 32)
            assert (found.offset, found.stored_length, found.raw_length, found.codec) == (
                entry.offset, 10, 20, Codec.RAW,
            )  # fmt: skip
            assert (found.width, found.base) == (2, entry.base)
        assert index.record(rows, Kind.PLAN, TensorId(b"r" * 32)) is not None
        assert index.record(rows, Kind.TENSOR, TensorId(b"r" * 32)) is None
        assert index.block(rows, BlockId(b"r" * 32)) is None
        assert index.has_blocks(rows, [BlockId(b"r" * 32)]) == [False]
        assert [id for id, _ in index.blocks(rows)] == [block(1).id, delta.id]
        assert [(kind, id) for kind, id, _ in index.records(rows)] == [(Kind.PLAN, b"r" * 32)]
        assert list(index.packs(rows)) == [(PackId(bytes([7]) * 32), 7 * 4096)]
        assert (index.count(rows, "blocks"), index.count(rows, "records")) == (2, 1)


def test_records_of_one_kind_are_found_alone(index: Index) -> None:
    """The ids of one kind come in order, without those of the kinds before and after it."""
    kinds = (Kind.TENSOR, Kind.PLAN, Kind.PLAN, Kind.COVERAGE)
    entries = [
        PackEntry(bytes([9 - n]) * 32, kind, Codec.RAW, 1, 4096, 7, 7)
        for n, kind in enumerate(kinds)
    ]
    with index.env.write() as rows:
        index.insert_pack(rows, pack(7, *entries))
    with index.env.read() as rows:
        assert list(index.record_ids(rows, Kind.PLAN)) == [b"\7" * 32, b"\10" * 32]
        assert list(index.record_ids(rows, Kind.VIRTUAL)) == []


def test_the_first_copy_of_a_block_stays(index: Index) -> None:
    """A block that comes again in another pack keeps its row; the second pack is listed."""
    with index.env.write() as rows:
        index.insert_pack(rows, pack(1, block(5, offset=4096)))
        index.insert_pack(rows, pack(2, block(5, offset=8192), block(6)))
    with index.env.read() as rows:
        first, second = (index.block(rows, BlockId(bytes([n]) * 32)) for n in (5, 6))
        assert first is not None
        assert second is not None
        assert (first.pack[0], first.offset, second.pack[0]) == (1, 4096, 2)
        assert [id[0] for id, _ in index.packs(rows)] == [1, 2]


@settings(max_examples=30)
@given(packs=st.lists(st.sets(st.integers(0, 30), max_size=6), max_size=8))
def test_the_index_is_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, packs: list[set[int]]
) -> None:
    """After any packs, each block is where it first appeared, and nothing else is there."""
    path = tmp_path_factory.mktemp("index")
    index = Index(path, create=True)
    told: dict[int, int] = {}
    for number, ids in enumerate(packs):
        with index.env.write() as rows:
            index.insert_pack(rows, pack(number, *(block(id) for id in sorted(ids))))
        told = dict.fromkeys(ids, number) | told
    with index.env.read() as rows:
        assert {id[0]: where.pack[0] for id, where in index.blocks(rows)} == told
    index.close()


def test_a_row_of_an_unknown_pack_is_corrupt(index: Index) -> None:
    """A location whose pack number nobody knows is an error, not a guess."""
    with index.env.write() as rows:
        index.insert_pack(rows, pack(1, block(5)))
        rows.delete(bytes(4), db=index.db("packs"))
    with index.env.read() as rows, pytest.raises(Corrupt, match=r"pack number 0: .*unknown pack"):
        index.block(rows, BlockId(bytes([5]) * 32))


# -- transactions ------------------------------------------------------------------------------


def put(env: Environment, key: bytes, value: bytes = b"v") -> None:
    """Commit one row."""
    with env.write() as rows:
        rows.put(key, value, db=env.databases["refs"])


def get(env: Environment, key: bytes) -> bytes | None:
    """Read one row."""
    with env.read() as rows:
        value = rows.get(key, db=env.databases["refs"])
        return None if value is None else bytes(value)


def test_a_reader_sees_the_state_at_which_it_began(index: Index) -> None:
    """Commits of other threads do not change what an open read transaction sees."""
    env = index.env
    put(env, b"a", b"old")
    with env.read() as rows:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(put, env, b"a", b"new").result(10)
            pool.submit(put, env, b"b").result(10)
            assert pool.submit(get, env, b"a").result(10) == b"new"
        assert rows.get(b"a", db=env.databases["refs"]) == b"old"
        assert rows.get(b"b", db=env.databases["refs"]) is None
    assert get(env, b"a") == b"new"


def test_a_failed_write_writes_nothing(index: Index) -> None:
    """An exception inside a write transaction drops it, and the next one can begin."""

    def fail() -> None:
        with index.env.write() as rows:
            rows.put(b"a", b"v", db=index.db("refs"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert get(index.env, b"a") is None
    put(index.env, b"b")
    assert get(index.env, b"b") == b"v"


def test_a_write_inside_a_read_is_refused(tmp_path: Path, index: Index) -> None:
    """Where it would wait for itself, the first write of an opened index raises instead."""
    index.close()
    again = Environment.acquire(tmp_path / "index", DATABASES, create=False)
    with again.read(), pytest.raises(RuntimeError, match="inside a read"), again.write():
        pass
    put(again, b"a")
    again.release()
    index.env = Environment.acquire(tmp_path / "index", DATABASES, create=False)


def test_many_readers_and_the_first_writes(tmp_path: Path, index: Index) -> None:
    """Threads that read while an opened index is first written to see every commit or none."""
    put(index.env, b"n", b"0")
    index.close()
    env = Environment.acquire(tmp_path / "index", DATABASES, create=False)
    stop = threading.Event()

    def read() -> int:
        seen = 0
        while not stop.is_set():
            value = int(get(env, b"n") or b"-1")
            assert value >= seen
            seen = value
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for number in range(1, 50):
            put(env, b"n", b"%d" % number)
        stop.set()
        assert all(0 <= reader.result(10) < 50 for reader in readers)
    env.release()
    index.env = Environment.acquire(tmp_path / "index", DATABASES, create=False)


# -- processes ---------------------------------------------------------------------------------


def test_one_environment_a_process(tmp_path: Path, index: Index) -> None:
    """Opening the same path again, however it is spelled, shares it; the last user closes it."""
    (tmp_path / "link").symlink_to(tmp_path / "index")
    second = Environment.acquire(tmp_path / "index", DATABASES)
    third = Environment.acquire(tmp_path / "link" / ".." / "index", DATABASES)
    assert second is third is index.env
    second.release()
    third.release()
    put(index.env, b"a")
    index.close()
    with pytest.raises(Conflict, match="symbolic link"):
        Environment.acquire(tmp_path / "link", DATABASES)
    again = Environment.acquire(tmp_path / "link" / ".." / "index", DATABASES)
    assert again is not second
    assert get(again, b"a") == b"v"
    again.release()
    index.env = Environment.acquire(tmp_path / "index", DATABASES)


@contextmanager
def program(code: str, *arguments: Path, patience: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another Python process; `env` is the environment at its first argument.

    One that waits for longer than `patience` (seconds) is killed, and then says nothing.
    """
    head = (
        "import os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from mstore.blocks.schema import DATABASES\n"
        "from mstore.blocks.lmdb_env import Environment\n"
        "from mstore.terms.errors import MstoreError, Unavailable\n"
        "from test_index import get, put\n"
        "path = Path(sys.argv[1])\n"
        "env = Environment.acquire(path, DATABASES, create=False)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(patience, process.kill)
    killer.start()
    with process:
        try:
            yield process
        finally:
            killer.cancel()
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], line: str) -> None:
    """A line for it to read."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def test_no_reader_waits_for_a_writer(tmp_path: Path, index: Index) -> None:
    """While a process is inside a write transaction and stopped there, others open the index and
    read what was committed before; when it is killed, they can write."""
    put(index.env, b"a", b"old")
    index.close()
    writing = (
        "with env.write() as rows:\n"
        "    rows.put(b'a', b'new', db=env.databases['refs'])\n"
        "    print('inside', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with program(writing, tmp_path / "index") as writer:
        assert answer(writer) == "inside"
        writer.send_signal(signal.SIGSTOP)
        reading = "print(get(env, b'a'), flush=True)"
        with program(reading, tmp_path / "index", patience=20) as reader:
            assert answer(reader) == "b'old'"
        writer.send_signal(signal.SIGKILL)
    index.env = Environment.acquire(tmp_path / "index", DATABASES, create=False)
    assert get(index.env, b"a") == b"old"
    put(index.env, b"a", b"newer")
    assert get(index.env, b"a") == b"newer"


def test_a_killed_reader_is_forgotten(tmp_path: Path, index: Index) -> None:
    """The slot of a reader that was killed inside its transaction does not pin old pages."""
    reading = "with env.read():\n    print('inside', flush=True)\n    time.sleep(600)\n"
    with program(reading, tmp_path / "index") as reader:
        assert answer(reader) == "inside"
        assert str(reader.pid) in index.env._files.env.readers()
        reader.send_signal(signal.SIGKILL)
    put(index.env, b"a")
    assert str(reader.pid) not in index.env._files.env.readers()


def test_a_forked_child_opens_its_own(tmp_path: Path, index: Index) -> None:
    """In a forked child the inherited index is refused, and the error says what to do; one that the
    child opens reads and writes, also if another thread of the parent was opening one; and the
    parent reads on, with its place among the readers."""
    put(index.env, b"a", b"old")
    forking = (
        "import threading; from mstore.blocks import lmdb_env\n"
        "lmdb_env._environments_lock.acquire()\n"
        "threading.Timer(0.2, lmdb_env._environments_lock.release).start()\n"
        "with env.read() as rows:\n"
        "    if os.fork() == 0:\n"
        "        for call in (lambda: get(env, b'a'), lambda: put(env, b'a')):\n"
        "            try:\n"
        "                call()\n"
        "                print('it worked', flush=True)\n"
        "            except Unavailable as error:\n"
        "                print(error.hint is not None, flush=True)\n"
        "        own = Environment.acquire(path, DATABASES)\n"
        "        put(own, b'a', b'new')\n"
        "        print(get(own, b'a'), flush=True)\n"
        "        own.release()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    print(str(os.getpid()) in env._files.env.readers(), flush=True)\n"
        "    print(rows.get(b'a', db=env.databases['refs']), flush=True)\n"
        "print(get(env, b'a'), flush=True)\n"
    )
    index.close()
    with program(forking, tmp_path / "index") as parent:
        said = [answer(parent) for _ in range(6)]
        assert said == ["True", "True", "b'new'", "True", "b'old'", "b'new'"]
    index.env = Environment.acquire(tmp_path / "index", DATABASES)


@pytest.mark.rest
def test_a_forked_child_takes_nothing_along(tmp_path: Path, index: Index) -> None:
    """A child that leaves the parent's read transaction and lets go of everything it inherited
    leaves the parent's place among the readers, which is shared memory, as it is."""
    for key in range(100):
        put(index.env, b"%d" % key, b"old")
    forking = (
        "import gc; from mstore.blocks import lmdb_env\n"
        "reading = env.read(); rows = reading.__enter__()\n"
        "if os.fork() == 0:\n"
        "    reading.__exit__(None, None, None)\n"
        "    env.release(); env.databases.clear(); lmdb_env._environments.clear()\n"
        "    del env, rows, reading; gc.collect()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('forked', flush=True); sys.stdin.readline()\n"
        "print([bytes(v) for k, v in rows.cursor(db=env.databases['refs'])] == [b'old'] * 100)\n"
        "reading.__exit__(None, None, None)\n"
        "print(get(env, b'7'), flush=True)\n"
    )
    with program(forking, tmp_path / "index") as parent:
        assert answer(parent) == "forked"
        for key in range(100):
            put(index.env, b"%d" % key, b"new")
        say(parent, "go on")
        assert [answer(parent), answer(parent)] == ["True", "b'new'"]


@pytest.mark.rest
def test_processes_may_make_an_index_together(tmp_path: Path) -> None:
    """Several processes that find no environment each make it, and none loses a row."""
    making = (
        "print('ready', flush=True); sys.stdin.readline()\n"
        "other = Environment.acquire(Path(sys.argv[2]), DATABASES)\n"
        "for n in range(5): put(other, b'%d-%d' % (os.getpid(), n))\n"
        "print('done', flush=True)\n"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "new").mkdir()
    Environment.acquire(tmp_path / "mine", DATABASES).release()
    arguments = (tmp_path / "mine", tmp_path / "new")
    with program(making, *arguments) as one, program(making, *arguments) as two:
        for process in (one, two):
            assert answer(process) == "ready"
        for process in (one, two):
            say(process, "go on")
        for process in (one, two):
            assert answer(process) == "done"
    env = Environment.acquire(tmp_path / "new", DATABASES)
    with env.read() as rows:
        assert rows.stat(env.databases["refs"])["entries"] == 10
    env.release()


# -- damage ------------------------------------------------------------------------------------


def test_a_lost_index_is_not_an_empty_one(tmp_path: Path) -> None:
    """An index that is missing, empty or not LMDB's is an error where it must be there."""
    directory = tmp_path / "index"
    directory.mkdir()
    with pytest.raises(Corrupt, match="missing"):
        Index(directory)
    assert list(directory.iterdir()) == []
    for contents in (b"", bytes(4096), bytes(100_000), b"no index" * 1000):
        (directory / "data.mdb").write_bytes(contents)
        with pytest.raises(Corrupt) as refusal:
            Index(directory)
        assert refusal.value.where == str(directory)


def test_an_environment_that_was_never_written_is_made_anew(tmp_path: Path) -> None:
    """Where it may be made, a data file of zeros (a crash while it was made) is replaced; one that
    holds anything else is not."""
    for contents in (b"", bytes(4096), bytes(100_000)):
        (tmp_path / "data.mdb").write_bytes(contents)
        env = Environment.acquire(tmp_path, DATABASES)
        put(env, b"a")
        env.release()
    (tmp_path / "data.mdb").write_bytes(b"precious" * 1000)
    with pytest.raises(Corrupt):
        Environment.acquire(tmp_path, DATABASES)
    assert (tmp_path / "data.mdb").read_bytes() == b"precious" * 1000


def test_a_new_database_joins_an_old_environment(tmp_path: Path) -> None:
    """A database that an older version did not know is added; the rows of the others stay."""
    old = Environment.acquire(tmp_path, ("refs",))
    put(old, b"a")
    old.release()
    with pytest.raises(Corrupt, match="database"):
        Environment.acquire(tmp_path, DATABASES, create=False)
    new = Environment.acquire(tmp_path, DATABASES)
    assert get(new, b"a") == b"v"
    new.release()


def test_an_index_that_was_replaced_is_noticed(tmp_path: Path, index: Index) -> None:
    """Opening a path whose index was removed while this process has it open is an error."""
    (tmp_path / "index" / "data.mdb").rename(tmp_path / "away")
    with pytest.raises(Unavailable, match="removed or replaced"):
        Environment.acquire(tmp_path / "index", DATABASES)
    (tmp_path / "index" / "data.mdb").touch()
    with pytest.raises(Unavailable, match="removed or replaced"):
        Environment.acquire(tmp_path / "index", DATABASES)
    (tmp_path / "away").replace(tmp_path / "index" / "data.mdb")
    Environment.acquire(tmp_path / "index", DATABASES).release()


def test_the_lock_file_has_no_holes(tmp_path: Path, index: Index) -> None:
    """LMDB maps its lock file; every page of it is really there, so a full disk cannot bite."""
    status = (tmp_path / "index" / "lock.mdb").stat()
    assert status.st_size >= lmdb_table.MAX_READERS * 64
    assert status.st_blocks * 512 >= status.st_size
