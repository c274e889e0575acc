"""Root at work in another user's store: what it makes is that user's.

The owner's part runs in a process of its own, which loads all that it needs and then drops root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import BLOCK, small_model

from mstore import MergeRequest, Store, fs
from mstore.terms.errors import StorageFailed
from mstore.upkeep.check.reindex import reindex

TESTS = Path(__file__).parent.parent
OWNER, GROUP = 54321, 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can work for another user")


# -- the owner's process -----------------------------------------------------------------------


def work(root: Path, models: Path, prefix: str) -> None:
    """Add a base and two experts, merge, remove, collect; in a store that is made if need be."""
    is_new = not (root / "format").exists()
    with Store.init(root, block_size=BLOCK) if is_new else Store.open(root) as store:
        store.add(models / "0", name=f"{prefix}/base", threads=1)
        for number in ("1", "2"):
            name = f"{prefix}/expert{number}"
            store.add(models / number, name=name, base=f"{prefix}/base", threads=1)
        experts = [f"{prefix}/expert{number}" for number in ("1", "2")]
        plan = store.plan(
            MergeRequest(base=f"{prefix}/base", experts=experts, method="ties"), threads=1
        )
        store.merge(plan, name=f"{prefix}/merged", threads=1)
        store.merge(plan, name=f"{prefix}/virtual", virtual=True)
        store.configure("codec", "dense")
        store.remove(experts[0])
        store.prune(keep_last=1)
        store.gc(reflog_days=0)
        assert store.fsck(read_data=True).problems == ()


def as_owner(root: str, models: str, prefix: str) -> None:
    """Load and compile all that the work takes, drop root, and do it."""
    with tempfile.TemporaryDirectory() as scratch:
        work(Path(scratch) / "warm", Path(models), "warm")
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(OWNER)
    work(Path(root), Path(models), prefix)


# -- root's ------------------------------------------------------------------------------------


def owner_works(root: Path, models: Path, prefix: str) -> None:
    done = subprocess.run(
        [sys.executable, __file__, root, models, prefix],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def strangers(root: Path) -> list[str]:
    """What in a store is not its owner's."""
    found = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return sorted(
        str(path.relative_to(root))
        for path, status in found.items()
        if (status.st_uid, status.st_gid) != (OWNER, GROUP)
    )


def contents(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_ino, path.lstat().st_size)
        for path in root.rglob("*")
        # A reader's place in a table that is there already.
        if path.name != "lock.mdb"
    }


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of the owner's that the owner can reach, with three checkpoints in it."""
    home = Path(tempfile.mkdtemp(prefix="mstore-owner-", dir="/tmp"))
    try:
        for number in range(3):
            path = home / "models" / str(number)
            path.mkdir(parents=True)
            small_model(path, "same", changed=str(number))
        os.chown(home, OWNER, GROUP)
        yield home
    finally:
        shutil.rmtree(home)


@pytest.fixture
def root(home: Path) -> Path:
    """A new store, the owner's, without a memo table and with statistics of nothing."""
    root = home / "store"
    Store.init(root, block_size=BLOCK).close()
    for path in (root, *root.rglob("*")):
        os.chown(path, OWNER, GROUP)
    return root


@pytest.mark.rest
@needs_root
def test_the_owner_goes_on_after_root(home: Path, root: Path) -> None:
    """Packs, statistics, memo table, mirror, settings and locks that root makes are the owner's,
    who adds, merges, prunes and collects after that."""
    held: set[str] = set()

    def look(operation: fs.Operation) -> None:
        # What is there only for a moment is left lying by a kill.
        if operation.kind in ("write", "fsync", "commit"):
            held.update(strangers(root))

    before = os.umask(0o077)
    try:
        with fs.observed(look):
            work(root, home / "models", "root")
    finally:
        os.umask(before)
    assert held == set()
    assert strangers(root) == []
    assert {path.name for path in root.iterdir()} >= {"memo", "stats", "config", "packs"}
    owner_works(root, home / "models", "owner")
    assert strangers(root) == []
    work(root, home / "models", "again")
    assert strangers(root) == []


@pytest.mark.rest
@needs_root
def test_what_root_makes_anew_is_the_owners(home: Path, root: Path) -> None:
    """A lost index, lock file or directory that a command of root's brings back is the owner's."""
    work(root, home / "models", "root")
    shutil.rmtree(root / "index")
    shutil.rmtree(root / "stats")
    shutil.rmtree(root / "memo")
    shutil.rmtree(root / "tmp")
    reindex(root)
    assert strangers(root) == []
    (root / "index" / "lock.mdb").unlink()
    (root / "lock").unlink()
    work(root, home / "models", "root")
    (root / "stats" / "lock.mdb").unlink()
    (root / "memo" / "lock.mdb").unlink()
    (home / "link").symlink_to(root)
    work(home / "link", home / "models", "other")
    assert strangers(root) == []
    owner_works(root, home / "models", "owner")


@pytest.mark.rest
@needs_root
def test_a_pin_and_a_kill_leave_nothing_of_roots(home: Path, root: Path) -> None:
    """What root's killed command leaves in tmp/, the owner's next one removes."""
    program = (
        "import os, sys; from mstore import Store; from mstore.store.leases import Hold;"
        "store = Store.open(sys.argv[1]);"
        "store.add(sys.argv[2], name='a', progress=lambda tick: os._exit(9))"
    )
    command = [sys.executable, "-c", program, root, home / "models" / "0"]
    assert subprocess.run(command, check=False).returncode == 9
    assert list((root / "tmp").iterdir()) != []
    assert strangers(root) == []
    owner_works(root, home / "models", "owner")
    assert list((root / "tmp").iterdir()) == []


@needs_root
def test_root_that_cannot_give_away_writes_nothing(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system refuses root that, writers refuse before anything is written, and say what
    to type; reading goes on."""
    with Store.open(root) as store:
        store.add(home / "models" / "0", name="base")

    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = contents(root)
    monkeypatch.setattr(os, "fchown", refuse)
    with Store.open(root) as store:
        for write in (
            lambda: store.add(home / "models" / "1", name="other"),
            lambda: store.tag("v1", "base"),
            lambda: store.configure("codec", "raw"),
            store.gc,
        ):
            with pytest.raises(StorageFailed, match="cannot give it to user 54321") as refused:
                write()
            assert refused.value.hint is not None
            assert refused.value.hint.startswith("sudo -u '#54321' ...")
            assert contents(root) == before
        assert [ref.name for ref in store.refs()] == ["base"]
        store.checkout("base", home / "out", shared=True)


@needs_root
def test_outside_the_store_root_is_root(home: Path, root: Path) -> None:
    """What root checks out is root's, and so is what others' links in a store lead to."""
    with Store.open(root) as store:
        store.add(home / "models" / "0", name="base")
        store.checkout("base", home / "out", shared=True)
    assert {path.lstat().st_uid for path in (home / "out").rglob("*")} == {0}
    precious = home / "precious"
    precious.write_bytes(b"root's own")
    (root / "lock").unlink()
    os.link(precious, root / "lock")
    with Store.open(root) as store:
        store.configure("codec", "raw")
    assert precious.lstat().st_uid == 0


@needs_root
def test_a_store_of_roots_own(tmp_path: Path, home: Path) -> None:
    """Nothing is given to anybody in a store that is root's."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(home / "models" / "0", name="base")
    assert {path.lstat().st_uid for path in (tmp_path / "store").rglob("*")} == {0}


if __name__ == "__main__":
    as_owner(*sys.argv[1:])
