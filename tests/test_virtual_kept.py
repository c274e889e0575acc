"""Computed blocks of virtual merges on disk: later processes read them, and believe none."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from families import BLOCK
from test_virtual import FAMILY, METHODS, both, files_of, forget, fresh, merged

from mstore import Store
from mstore.fs import Operation, observed
from mstore.merge.virtual import kept
from mstore.store.memo import Memo

REF = "m/virtual"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a base and three experts."""
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in FAMILY.names:
            store.add(root / name, name=name, base="base")
    return root / "store"


@pytest.fixture
def path(family: Path, tmp_path: Path) -> Path:
    """A store of one's own, that nobody has open."""
    shutil.copytree(family, tmp_path / "store")
    return tmp_path / "store"


def made(path: Path, kind: str = "ties") -> dict[str, bytes]:
    """Make a virtual merge, and return its files as the real one has them; nothing is cached."""
    with Store.open(path) as store:
        both(store, "m", **METHODS[kind])
        forget(store)
        return files_of(store, "m/real")


def read(path: Path, limit: int | None = None) -> tuple[dict[str, bytes], int]:
    """Every file as a new process reads it, and what that read of experts."""
    with Store.open(path) as store:
        store.cache_bytes_on_disk = limit
        return files_of(store, REF), store._computing().first_expert_bytes


def blocks_in(path: Path) -> list[Path]:
    """The files of computed blocks."""
    return sorted(one for one in (path / "cache" / "blocks").rglob("*") if one.is_file())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["ties", "linear", "wider", "narrower", "dare_ties"])
def test_a_later_process_computes_nothing(path: Path, kind: str) -> None:
    """What one process computed, the next one reads: the same bytes, and nothing of experts."""
    wanted = made(path, kind)
    found, cost = read(path)
    assert found == wanted
    assert cost > 0
    assert read(path) == (wanted, 0)


@pytest.mark.rest
def test_another_merge_reads_what_is_the_same(path: Path) -> None:
    """A chunk that two virtual merges have in common is computed once for both."""
    made(path)
    read(path)
    with Store.open(path) as store:
        merged(store, "again", virtual=True, **METHODS["ties"])
        store.reset("again", REF)
        found = files_of(store, "again")
        assert found == files_of(store, "m/real")
        assert store._computing().first_expert_bytes == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "empty", "another"])
def test_what_is_not_the_block_is_computed_again(path: Path, how: str) -> None:
    """A file that was flipped, cut or replaced is no block: no reader gets a byte of it, it is
    computed, and kept."""
    wanted = made(path)
    _, whole = read(path)
    files = blocks_in(path)
    contents = [one.read_bytes() for one in files]
    for number, (file, data) in enumerate(zip(files, contents, strict=True)):
        at = random.Random(number).randrange(len(data))
        match how:
            case "flipped":
                file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            case "cut":
                file.write_bytes(data[:at])
            case "longer":
                file.write_bytes(data + b"\0")
            case "empty":
                file.write_bytes(b"")
            case "another":
                file.write_bytes(contents[number - 1])
    assert read(path) == (wanted, whole)
    assert [one.read_bytes() for one in blocks_in(path)] == contents
    assert read(path) == (wanted, 0)


@pytest.mark.rest
def test_without_a_row_nothing_is_believed(path: Path) -> None:
    """A block that the memo table does not name is computed, whatever is in the cache."""
    wanted = made(path)
    _, whole = read(path)
    with Store.open(path) as store:
        forget(store)
    assert read(path) == (wanted, whole)
    assert read(path) == (wanted, 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["ties", "breadcrumbs", "wider"])
def test_some_are_kept(path: Path, kind: str) -> None:
    """Where some blocks were removed, in any order of reading: the real bytes, and of experts no
    more than what those cost."""
    wanted = made(path, kind)
    _, whole = read(path)
    draw = random.Random(kind)
    for file in blocks_in(path):
        if draw.random() < 0.5:
            file.unlink()
    with Store.open(path) as store:
        view = fresh(store, REF, limit=BLOCK)
        places = [
            (name, start)
            for name, data in wanted.items()
            for start in range(0, len(data), BLOCK // 2)
        ]
        draw.shuffle(places)
        for name, start in places:
            assert view.read(name, start, BLOCK) == wanted[name][start : start + BLOCK]
        assert 0 < store._computing().first_expert_bytes < whole
    assert read(path) == (wanted, 0)


@pytest.mark.rest
def test_a_gap_that_is_remembered_is_not_read(path: Path) -> None:
    """Where one block is missing, experts are read for it alone: the ties of the chunks before it
    are those of the memo table."""
    wanted = made(path)
    read(path)
    for file in blocks_in(path)[::5]:
        file.unlink()
        found, cost = read(path)
        assert found == wanted
        assert 0 < cost <= 3 * BLOCK


def test_the_reader_has_its_bytes_first(path: Path) -> None:
    """Nobody waits for the disk: the reader has a block before its file is begun."""
    wanted = made(path)
    has_read, late = threading.Event(), []

    def wait(operation: Operation) -> None:
        if "/cache/" in operation.path and not has_read.wait(20):
            late.append(operation)
            has_read.set()

    with Store.open(path) as store, observed(wait):
        view = fresh(store, REF)
        name = max(wanted, key=lambda one: len(wanted[one]))
        assert view.read(name, BLOCK, 10) == wanted[name][BLOCK : BLOCK + 10]
        has_read.set()
    assert not late
    assert blocks_in(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails(path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """On a full or failing disk blocks are not kept, and reads go on in silence."""
    wanted = made(path)
    _, whole = read(path, limit=0)

    def fail(operation: Operation) -> None:
        if "/cache" in operation.path:
            raise OSError(code, os.strerror(code), operation.path)

    with observed(fail):
        assert read(path) == (wanted, whole)
    assert not caplog.records
    assert not blocks_in(path)
    read(path)
    assert read(path) == (wanted, 0)


@pytest.mark.rest
def test_the_limit_holds(path: Path) -> None:
    """The cache never has more than its limit; 0 is no cache."""
    wanted = made(path)
    assert read(path, limit=0)[0] == wanted
    assert not (path / "cache").exists()
    limit = 6 * BLOCK
    for _ in range(2):
        assert read(path, limit=limit)[0] == wanted
        assert 0 < sum(one.stat().st_size for one in blocks_in(path)) <= limit


def test_a_process_that_is_killed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of what is kept are written while a store is open: it need not be closed."""
    made(path)
    monkeypatch.setattr(kept, "_FLUSH_SECONDS", 0.0)
    with Store.open(path) as store:
        files_of(store, REF)
        store._computing()._pool.shutdown()
        copied = path.parent / "copied"
        shutil.copytree(path / "memo", copied)
    assert Memo(copied).has_outputs()


@pytest.mark.rest
def test_the_cache_is_nobodys_business(path: Path) -> None:
    """`fsck`, `reindex`, `gc` and a backup do not look at the cache; it may be deleted."""
    wanted = made(path)
    read(path)
    file = blocks_in(path)[0]
    file.write_bytes(b"damaged")
    before = {one: one.read_bytes() for one in blocks_in(path)}
    with Store.open(path) as store:
        assert store.fsck(read_data=True).problems == ()
        store.backup(path.parent / "backup")
        store.gc(reflog_days=0)
    Store.reindex(path)
    assert {one: one.read_bytes() for one in blocks_in(path)} == before
    assert not (path.parent / "backup" / "cache").exists()
    assert read(path)[0] == wanted
    shutil.rmtree(path / "cache")
    assert read(path)[0] == wanted


READER = """
import os, sys
from pathlib import Path
from mstore import Store
from test_virtual import files_of
with Store.open(sys.argv[1]) as warm:
    # Others may not read what Python would import.
    files_of(warm, "m/virtual")
if not os.getuid():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path, is_free in ((sys.argv[2], False), (sys.argv[1], True)):
    with Store.open(path) as store:
        assert files_of(store, "m/virtual") == files_of(store, "m/real")
        assert (store._computing().first_expert_bytes == 0) == is_free
assert not (Path(sys.argv[2]) / "cache").exists()
"""


@pytest.mark.rest
def test_who_may_only_read(path: Path) -> None:
    """Who may not write a store makes no cache there and reads on, and reads the owner's cache."""
    made(path)
    # Others may not enter the directories of a test.
    with tempfile.TemporaryDirectory(prefix="mstore-test-") as directory:
        Path(directory).chmod(0o755)
        warm, cold = Path(directory, "warm"), Path(directory, "cold")
        for one in (warm, cold):
            shutil.copytree(path, one)
        read(warm)
        for one in (warm, cold):
            for below in (one, *one.rglob("*")):
                below.chmod(0o555 if below.is_dir() else 0o444)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", READER, str(warm), str(cold)],
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )
        for below in (warm, cold, *warm.rglob("*"), *cold.rglob("*")):
            if below.is_dir():
                below.chmod(0o755)
    assert done.returncode == 0, done.stderr
