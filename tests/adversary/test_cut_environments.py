"""An LMDB file that was cut short, or damaged otherwise, ends no command with a signal."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pytest
from apart import commands, damaged, program
from lmdb_page import PAGE
from small_models import BLOCK, small_model

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.blocks import lmdb_check
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_pages import LmdbFile
from mstore.models.stats.store import StatsStore
from mstore.terms.errors import Corrupt
from mstore.terms.ids import TensorId

MERGE = ("merge", "--base", "base", "--expert", "one", "--expert", "two", "--method", "ties")
MERGE = (*MERGE, "--param", "density=0.4", "--name")


def make(root: Path) -> Path:
    """A store with a merge, statistics and a memo table."""
    for name in ("base", "one", "two", "three"):
        small_model(root / name, "family", changed=name)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base", threads=1)
        for name in ("one", "two"):
            store.add(root / name, name=name, base="base", threads=1)
        plan = store.plan(
            MergeRequest(
                base="base", experts=["one", "two"], method="ties", parameters={"density": 0.4}
            )
        )
        store.merge(plan, name="merged", threads=1)
    return root / "store"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("cut"))


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound.parent, tmp_path / "family")
    return tmp_path / "family" / "store"


def cut(store: Path, area: str, pages: int) -> None:
    """Take pages from the end of an environment's file, as far as some of it is left."""
    path = store / area / "data.mdb"
    os.truncate(path, max(3 * PAGE, path.stat().st_size - pages * PAGE))


@pytest.mark.rest
@pytest.mark.parametrize("pages", [2, pytest.param(5, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize("area", ["stats", "memo"])
def test_what_can_be_thrown_away_is_set_aside(area: str, pages: int, store: Path) -> None:
    """Statistics or a memo table cut short: fsck says so, and every command goes on without."""
    cut(store, area, pages)
    sources = store.parent
    checked, *ran = commands(
        store,
        ["fsck"],
        ["add", sources / "three", "--name", "three", "--base", "base"],
        [*MERGE, "again"],
        ["gc"],
        ["stats"],
        ["fsck", "--read-data"],
        ["reindex"],
        ["fsck", "--read-data"],
    )
    assert checked.status == 1
    assert "mstore fsck --repair" in " ".join(checked.out.split()).replace(f"--store {store} ", "")
    assert [done.status for done in ran] == [0] * len(ran), ran
    told = [line for done in ran for line in done.err.splitlines() if line.startswith("remark: ")]
    aside = [path for path in store.iterdir() if path.name.startswith(f"{area}.damaged-")]
    assert len(told) == len(aside) == 1
    assert str(aside[0]) in told[0]


@pytest.mark.rest
@pytest.mark.parametrize("area", ["stats", "memo"])
def test_repair_sets_aside(area: str, store: Path) -> None:
    """`fsck --repair` is enough: afterwards fsck finds nothing."""
    cut(store, area, 2)
    ran = commands(store, ["fsck", "--repair"], ["fsck"])
    assert [done.status for done in ran] == [0, 0], ran


@pytest.mark.rest
def test_a_cut_index_names_reindex(store: Path) -> None:
    """Wherever an index is cut: each command says so and names `mstore reindex`, which mends it."""
    whole = (store / "index" / "data.mdb").read_bytes()
    lines = (["refs"], ["log"], ["cat", "base:config.json"], [*MERGE, "again"], ["gc"])
    cuts = [max(3 * PAGE, len(whole) - pages * PAGE) for pages in (1, 2, 3, 7, 1000)]
    told = damaged(store, [("index/data.mdb", whole[:end]) for end in cuts], *lines)
    assert len(told) == len(cuts)
    for done in (done for ran in told for done in ran):
        assert done.status == 1
        assert "damaged index" in done.err
        assert "reindex" in done.err
    cut(store, "index", 1000)
    ran = commands(store, ["reindex"], *lines)
    assert [done.status for done in ran] == [0] * len(ran), ran


def flips(store: Path, area: str, count: int, draw: random.Random) -> list[tuple[str, bytes]]:
    """An environment's file with one bit of a byte in use turned, so many times."""
    whole = (store / area / "data.mdb").read_bytes()
    used = [at for at, byte in enumerate(whole) if byte]
    found = []
    for _ in range(count):
        data = bytearray(whole)
        data[draw.choice(used)] ^= 1 << draw.randrange(8)
        found.append((f"{area}/data.mdb", bytes(data)))
    return found


@pytest.mark.rest
def test_flips_end_no_command_with_a_signal(store: Path) -> None:
    """Any byte of any environment's file may be another: commands end, with or without an error."""
    draw = random.Random(11)
    turned = [flip for area in ("index", "stats", "memo") for flip in flips(store, area, 4, draw)]
    lines = (["refs"], ["log"], [*MERGE, "again"], ["cat", "base:config.json"])
    assert len(damaged(store, turned, *lines)) == len(turned)


@pytest.mark.rest
@pytest.mark.parametrize("area", ["stats", "memo"])
@pytest.mark.parametrize("contents", [b"", bytes(8192)])
def test_what_was_never_born_is_not_damaged(store: Path, area: str, contents: bytes) -> None:
    """A process killed as LMDB makes a file leaves no byte, or zeros: fsck finds no fault."""
    (store / area / "data.mdb").write_bytes(contents)
    assert lmdb_check.faults(store / area) == []
    (done,) = commands(store, ["fsck"])
    assert done.status == 0, done


@pytest.mark.rest
def test_two_processes_set_aside_once(store: Path) -> None:
    """Of several processes that find the same damage one sets it aside, and all use what is new."""
    cut(store, "stats", 2)
    both = """
import os, sys
from pathlib import Path
from mstore.models.stats.store import StatsStore
path = Path(sys.argv[1])
children = []
for number in range(4):
    pid = os.fork()
    if pid == 0:
        remarks = []
        stats = StatsStore(path, remarks.append)
        stats.put_squares(bytes([number]) * 32, 1.0)
        stats.flush()
        stats.close()
        os._exit(10 + len(remarks))
    children.append(pid)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
stats = StatsStore(path)
print([stats.squares(bytes([number]) * 32) for number in range(4)])
"""
    assert program(both, str(store / "stats")).splitlines() == [
        "[10, 10, 10, 11]",
        "[1.0, 1.0, 1.0, 1.0]",
    ]
    assert len(list(store.glob("stats.damaged-*"))) == 1


def test_what_is_moved_away_before_it_is_opened_is_made_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose directory another one moves away between two steps makes a new one."""
    make, made = fs.make_directory, []

    def moved(path: Path, **options: Any) -> bool:
        found = make(path, **options)
        if not made:
            made.append(path.rename(path.with_name("aside")))
        return found

    monkeypatch.setattr(fs, "make_directory", moved)
    remarks: list[str] = []
    stats = StatsStore(store / "stats", remarks.append)
    stats.put_squares(TensorId(bytes(32)), 2.0)
    stats.flush()
    stats.close()
    assert made
    assert not remarks
    with contextlib.closing(StatsStore(store / "stats")) as stats:
        assert stats.squares(TensorId(bytes(32))) == 2.0


# -- the stamp of large files ------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that counts as a large one, committed once."""
    monkeypatch.setattr(lmdb_check, "SMALL_BYTES", PAGE)
    (tmp_path / "env").mkdir()
    put(tmp_path / "env", 0)
    return tmp_path / "env"


def put(path: Path, first: int, count: int = 400) -> None:
    env = Environment.acquire(path, ("rows",))
    try:
        with env.write() as rows:
            for number in range(first, first + count):
                rows.put(b"%08d" % number, bytes(40), db=env.databases["rows"])
    finally:
        env.release()


def walks(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the pages are walked when the environment is opened."""
    seen: list[Path] = []
    real = LmdbFile.check
    with monkeypatch.context() as patch:
        patch.setattr(
            LmdbFile, "check", lambda file, tell: (seen.append(file.path), real(file, tell))[1]
        )
        Environment.acquire(path, ("rows",)).release()
    return len(seen)


def test_a_large_file_is_walked_once(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is walked when it is first opened, and not again: also not after commits."""
    assert walks(large, monkeypatch) == 1
    assert walks(large, monkeypatch) == 0
    put(large, 400)
    assert walks(large, monkeypatch) == 0


def test_a_stamp_that_is_not_right_means_a_walk(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, torn, of a copy, or of before somebody else's change: the file is walked."""
    walks(large, monkeypatch)
    stamp, data = large / lmdb_check.STAMP, large / "data.mdb"
    stamp.unlink()
    assert walks(large, monkeypatch) == 1
    stamp.write_bytes(stamp.read_bytes()[:20])
    assert walks(large, monkeypatch) == 1
    data.write_bytes(data.read_bytes())
    assert walks(large, monkeypatch) == 1
    copy = large.parent / "copy"
    shutil.copytree(large, copy)
    assert walks(copy, monkeypatch) == 1
    with (
        lmdb.open(str(large), max_dbs=4) as env,
        env.begin(write=True) as rows,
    ):
        rows.put(b"x", b"y", db=env.open_db(b"rows", rows))
    assert walks(large, monkeypatch) == 1
    assert walks(large, monkeypatch) == 0


def test_a_commit_vouches_for_nothing_it_did_not_see(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody changed while it was open is walked by the next who opens it."""
    walks(large, monkeypatch)
    env = Environment.acquire(large, ("rows",))
    with (large / "data.mdb").open("r+b") as file:
        file.write(file.read(1))
        file.seek(0)
    with env.write() as rows:
        rows.put(b"k", b"v", db=env.databases["rows"])
    env.release()
    assert walks(large, monkeypatch) == 1


def test_a_large_file_that_was_cut_is_refused(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp of a whole file does not speak for what is left of it."""
    walks(large, monkeypatch)
    os.truncate(large / "data.mdb", (large / "data.mdb").stat().st_size - 2 * PAGE)
    with pytest.raises(Corrupt, match="damaged index"):
        Environment.acquire(large, ("rows",))


def test_nobody_minds_a_stamp_that_cannot_be_written(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the stamp's name is taken by something else, everything works, with walks."""
    (large / lmdb_check.STAMP).mkdir()
    assert walks(large, monkeypatch) == 1
    put(large, 400)
    assert walks(large, monkeypatch) == 1


def test_a_file_may_end_before_its_free_pages(tmp_path: Path) -> None:
    """LMDB never wrote some of the free pages at the end, and never reads them: that is sound."""
    with lmdb.open(str(tmp_path), max_dbs=4, map_size=1 << 26) as env:
        for round_ in range(12):
            with env.begin(write=True) as rows:
                database = env.open_db(b"rows", rows)
                rows.put(b"kept %d" % round_, bytes(100), db=database)
                # Pages that are free again when the transaction ends are not written.
                for number in range(5 if round_ > 5 else 0):
                    rows.put(b"big %d" % number, bytes(round_ * PAGE), db=database)
                for number in range(5 if round_ > 5 else 0):
                    rows.delete(b"big %d" % number, db=database)
        last = env.info()["last_pgno"]
    assert (tmp_path / "data.mdb").stat().st_size < (last + 1) * PAGE
    assert lmdb_check.faults(tmp_path) == []
