"""Reading an environment without a place among its readers: whole states, never a mixture."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmdb_rows import ROWS, put, value
from small_models import BLOCK, small_model

from mstore import Store, fs
from mstore.blocks import lmdb_files
from mstore.blocks.lmdb_copy import PrivateCopy
from mstore.blocks.lmdb_env import Environment
from mstore.fs import rights
from mstore.terms.errors import Corrupt, StorageFailed, Unavailable

TESTS = Path(__file__).parent
PYTHONPATH = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"


def seen(env: Environment, pause: float = 0.0) -> set[int]:
    """The states that the rows of one read transaction tell of; checks every byte."""
    found = set()
    with env.read() as transaction:
        for row in range(ROWS):
            data = transaction.get(b"%d" % row, db=env.databases["rows"])
            state = int.from_bytes(data[:8], "big")
            assert data == value(state, row)
            found.add(state)
            time.sleep(pause / ROWS)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An environment in state 1, closed."""
    path = tmp_path / "index"
    path.mkdir()
    env = Environment.acquire(path, ("rows",))
    put(env, 0)
    put(env, 1)
    env.release()
    return path


def keep_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be told that it may write nothing; root's may everything."""
    monkeypatch.setattr(rights, "_unwritable", lambda paths: (paths[0], errno.EACCES))


def reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """The environment as somebody has it who may not write its lock file."""
    keep_out(monkeypatch)
    return Environment(path, ("rows",), create=False)


@pytest.fixture
def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    """A reader without a place, beside a process of its own for whoever writes."""
    env = reader(path, monkeypatch)
    env._users = 1
    yield env
    env.release()


def commit(path: Path, *states: int) -> None:
    """Commits of another process."""
    command = [sys.executable, TESTS / "lmdb_rows.py", path, *map(str, states)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})


@pytest.mark.rest
def test_a_reader_beside_a_busy_writer_sees_whole_states(path: Path, foreign: Environment) -> None:
    """Whatever is committed beside it, each read transaction sees one state, all of it, none that
    is older than what was acknowledged before, and none is taken back."""
    command = [sys.executable, "-c", f"from lmdb_rows import write_on; write_on({str(path)!r}, 2)"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        try:
            assert writer.stdout is not None
            last = 1
            for turn in range(60):
                acknowledged = int(writer.stdout.readline())
                found = seen(foreign, pause=0.02 if turn % 10 == 0 else 0.0)
                assert len(found) == 1
                assert min(found) >= max(last, acknowledged)
                last = min(found)
        finally:
            writer.kill()
    assert last > 30


@pytest.mark.parametrize(("commits", "is_whole"), [(0, True), (1, True), (2, False), (3, False)])
def test_two_commits_end_an_attempt(
    path: Path, monkeypatch: pytest.MonkeyPatch, commits: int, is_whole: bool
) -> None:
    """A copy beside which one commit was made is whole; beside two it is thrown away: a third
    writer may be at its pages."""
    env = Environment.acquire(path, ("rows",))
    take = fs.in_memory

    def slowly(head: bytes, descriptor: int, size: int) -> int:
        for number in range(commits):
            put(env, 2 + number)
        return take(head, descriptor, size)

    monkeypatch.setattr(fs, "in_memory", slowly)
    try:
        if not is_whole:
            with pytest.raises(Unavailable, match="faster than it can be copied") as refused:
                PrivateCopy(path / "data.mdb", patience=0)
            assert refused.value.hint is not None
            return
        copy = PrivateCopy(path / "data.mdb", patience=0)
    finally:
        env.release()
    keep_out(monkeypatch)
    monkeypatch.setattr(lmdb_files, "PrivateCopy", lambda data: copy)
    old = Environment(path, ("rows",), create=False)
    monkeypatch.setattr(copy, "is_old", lambda: False)
    old._users = 1
    assert seen(old) == {1}
    old.release()


def test_what_is_committed_is_seen_by_the_next_transaction(
    path: Path, foreign: Environment
) -> None:
    """A commit that was acknowledged is there for every read transaction that begins later, and
    for none that began before."""
    assert seen(foreign) == {1}
    with foreign.read() as transaction:
        commit(path, 2, 3, 4, 5)
        assert transaction.get(b"3", db=foreign.databases["rows"]) == value(1, 3)
        # One within another sees what the outer one does.
        assert seen(foreign) == {1}
    assert seen(foreign) == {5}


def test_a_reader_that_falls_behind_reads_what_it_had(
    path: Path, foreign: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no newer copy can be had in a moment, the state that was read before is read again."""
    commit(path, 2)
    monkeypatch.setattr(PrivateCopy, "_attempt", lambda self: None)
    monkeypatch.setattr(lmdb_files, "RENEWAL_PATIENCE", 0.0)
    assert seen(foreign) == {1}
    monkeypatch.undo()
    keep_out(monkeypatch)
    assert seen(foreign) == {2}


@pytest.mark.rest
def test_a_large_copy_is_not_taken_all_the_time(
    path: Path, foreign: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking copies takes at most about a tenth of a reader's time: a dear one is kept a while."""
    copy = foreign._files.copy
    assert copy is not None
    copy.seconds = 1000.0
    commit(path, 2)
    assert seen(foreign) == {1}
    # But for whoever misses something.
    assert foreign.follow()
    assert seen(foreign) == {2}
    assert not foreign.follow()
    copy = foreign._files.copy
    assert copy is not None
    copy.seconds = 1000.0
    commit(path, 3)
    copy.taken -= lmdb_files._COPY_SHARE * copy.seconds
    assert seen(foreign) == {3}


def test_nothing_is_written(path: Path, foreign: Environment) -> None:
    """Such a reader leaves no byte behind, and is told so when it wants to write."""
    before = {one.name: (one.read_bytes(), one.stat().st_mtime_ns) for one in path.iterdir()}
    assert seen(foreign) == {1}
    with pytest.raises(StorageFailed), foreign.write():
        pass
    after = {one.name: (one.read_bytes(), one.stat().st_mtime_ns) for one in path.iterdir()}
    assert after == before


def test_a_damaged_file_is_refused_before_lmdb_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a damaged file is looked at as the file itself would be."""
    data = bytearray((path / "data.mdb").read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 + 12] ^= 0xFF
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(Corrupt, match="damaged index"):
        reader(path, monkeypatch)
    (path / "data.mdb").write_bytes(data[:5000])
    with pytest.raises(Corrupt):
        reader(path, monkeypatch)


@pytest.mark.rest
def test_the_memory_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a copy is taken anew, no more are held than one, and none after closing."""

    def held() -> int:
        links = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return sum("memfd:mstore" in link for link in links)

    before = held()
    env = reader(path, monkeypatch)
    env._users = 1
    # Ours and LMDB's.
    assert held() == before + 2
    for state in range(2, 6):
        commit(path, state)
        assert seen(env) == {state}
        assert held() == before + 2
    env.release()
    assert held() == before


@pytest.mark.rest
def test_a_reader_that_lags_doubts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the index that is kept because it was dear is no index that is older than its
    store: whoever compares it with mirror and packs, or misses a pack, takes a new one first."""
    model = small_model(tmp_path / "model", "seed")
    other = small_model(tmp_path / "other", "other")
    Store.init(tmp_path / "store", block_size=BLOCK).close()
    keep_out(monkeypatch)
    with Store.open(tmp_path / "store") as store:
        env = store._catalog.index.env
        assert env._files.copy is not None
        env._files.copy.seconds = 1000.0
        program = (
            "import sys; from mstore import Store\n"
            "with Store.open(sys.argv[1]) as store:\n"
            "    for number, path in enumerate(sys.argv[2:]):\n"
            "        store.add(path, name=f'm{number}', threads=1)\n"
        )
        command = [sys.executable, "-c", program, tmp_path / "store", model, other]
        subprocess.run(command, check=True)
        assert store.refs() == []
        assert store.doubt() is None
        assert [ref.name for ref in store.refs()] == ["m0", "m1"]
        env._files.copy.seconds = 1000.0
        commands = "store.remove('m0'); store.tag('t', 'm1'); store.gc(reflog_days=0, dead_share=0)"
        program = (
            f"import sys; from mstore import Store\nstore = Store.open(sys.argv[1]); {commands}"
        )
        subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=True)
        store.checkout("m1", tmp_path / "out")
        assert store.fsck(read_data=True).problems == ()
