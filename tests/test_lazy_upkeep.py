"""What keeps a lazy store in order: nothing that leans on a remote is dropped, or called damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exchanges import REMOTE, Place, files, merged, place, placed, sound
from proof_models import model_files

from mstore.api import Store
from mstore.terms.errors import Corrupt, RemoteAway

__all__ = ["place"]
NAMES = {"base": 0, "e1": 1, "e2": 2}


@pytest.fixture(scope="module")
def family() -> Iterator[Place]:
    """A remote with a base and two experts."""
    with placed() as made:
        made.author(experts=2).push(REMOTE, every=True)
        yield made


@pytest.fixture
def lazy(family: Place, tmp_path: Path) -> Store:
    """A lazy clone of the family, with a merge of its own."""
    store = family.lazy(tmp_path / "lazy")
    merged(store, "m", "base", "e1", "e2")
    return store


def all_files(store: Store) -> dict[str, dict[str, bytes]]:
    """The files of all snapshots with a name."""
    return {name: files(store, name) for name in (*NAMES, "m")}


def whole(store: Store, before: dict[str, dict[str, bytes]]) -> None:
    """Everything is as it was, and what was pushed as it was pushed."""
    assert all_files(store) == before
    for name, number in NAMES.items():
        assert before[name] == model_files(1, number)
    sound(store)


def flip(store: Store, name: str) -> int:
    """Damage what is stored here of a snapshot's blocks that the remote has; return how many."""
    catalog = store._catalog
    blocks = {
        block
        for file in catalog.manifest_of(store.show(name).snapshot).files
        for part in file.parts
        for block in catalog.tensor(part.tensor_id()).block_ids()
    }
    count = 0
    with catalog.index.env.read() as transaction:
        places = [catalog.index.block(transaction, block) for block in blocks]
    for at in places:
        if at is not None and at.stored_length > 1000:
            path = Path(catalog.packs.where(at.pack))
            path.chmod(0o644)
            with path.open("r+b") as file:
                file.seek(at.offset + at.stored_length // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            count += 1
    return count


@pytest.mark.rest
def test_gc_dry_run_counts_nothing_that_leans(lazy: Store) -> None:
    """A dry run of gc says no more than gc drops, and changes nothing."""
    before = all_files(lazy)
    would = lazy.gc(dry_run=True, reflog_days=0)
    whole(lazy, before)
    did = lazy.gc(reflog_days=0)
    assert did.dead_bytes <= would.dead_bytes
    whole(lazy, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("away", [False, True])
def test_upkeep_needs_no_remote(family: Place, lazy: Store, *, away: bool) -> None:
    """gc, fsck, repair, prune, rm and a new index do their work while the remote is away."""
    before, path = all_files(lazy), lazy.path
    moved = family.path / "away"
    if away:
        family.remote.rename(moved)
    try:
        lazy.gc(reflog_days=0)
        assert not lazy.fsck(read_data=True, threads=1).problems
        report = lazy.repair(threads=1)
        assert not report.after.problems
        lazy.prune(keep_last=1)
        lazy.gc(reflog_days=0)
        lazy.close()
        Store.reindex(path)
        Store.migrate(path)
        with Store.open(path) as again:
            assert not again.fsck(read_data=True, threads=1).problems
            [leans] = again.show("e1").leans_on
            assert leans.remote == REMOTE
    finally:
        if away:
            moved.rename(family.remote)
    with Store.open(path) as again:
        whole(again, before)


def test_rm_and_gc_of_a_merge(lazy: Store) -> None:
    """What a removed merge had of its own goes; what the others lean on is still read."""
    lazy.prefetch(["e1"])
    lazy.remove("m")
    lazy.remove("e2")
    lazy.gc(reflog_days=0)
    for name in ("base", "e1"):
        assert files(lazy, name) == model_files(1, NAMES[name])
    lazy.pull(REMOTE)
    assert files(lazy, "e2") == model_files(1, 2)
    sound(lazy)


def test_prune_keeps_what_is_newest(family: Place, lazy: Store) -> None:
    """A prune drops contents of old snapshots, and what stays is read."""
    old = lazy.show("e1").snapshot
    lazy.add(family.model(1, 3), name="e1", base="base", threads=1)
    lazy.prune(keep_last=1)
    lazy.gc(reflog_days=0)
    assert files(lazy, "e1") == model_files(1, 3)
    assert lazy.show("e1").snapshot != old
    sound(lazy)


@pytest.mark.rest
def test_a_backup_after_a_prefetch(lazy: Store, tmp_path: Path) -> None:
    """A backup of a store that has everything is whole without the remote's tables."""
    lazy.prefetch(every=True)
    before = all_files(lazy)
    lazy.backup(tmp_path / "backup")
    shutil.rmtree(tmp_path / "backup" / "remotes", ignore_errors=True)
    with Store.open(tmp_path / "backup") as copy:
        assert all_files(copy) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["base", "e1"])
def test_repair_brings_what_the_remote_has(lazy: Store, name: str) -> None:
    """A repair heals damaged blocks with those of the remote, and drops nothing: not even a merge
    that is stored here only, as a difference to a block that was damaged."""
    lazy.prefetch([name])
    before = all_files(lazy)
    assert flip(lazy, name)
    path = lazy.path
    lazy.close()
    with Store.open(path) as again:
        problems = again.fsck(read_data=True, threads=1).problems
        assert problems
        report = again.repair(read_data=True, threads=1)
        assert len(report.healed) == len(problems)
        assert not report.dropped
        whole(again, before)


def test_a_damaged_block_says_what_to_do(lazy: Store) -> None:
    """A read of a damaged block of this store names the block and the check to run."""
    lazy.prefetch(["e1"])
    assert flip(lazy, "e1")
    path = lazy.path
    lazy.close()
    with Store.open(path) as again, pytest.raises(Corrupt, match="block") as refused:
        files(again, "e1")
    assert "fsck" in str(refused.value.hint)


def test_repair_without_the_remote_changes_nothing(family: Place, lazy: Store) -> None:
    """A repair of what only a remote can heal ends with its name while that is away, and drops
    nothing; when it is back, the same call heals."""
    lazy.prefetch(["base"])
    before = all_files(lazy)
    assert flip(lazy, "base")
    path, moved = lazy.path, family.path / "away"
    lazy.close()
    # Nor has the cache it.
    shutil.rmtree(path / "cache", ignore_errors=True)
    family.remote.rename(moved)
    try:
        with Store.open(path) as again, pytest.raises(RemoteAway, match="origin"):
            again.repair(read_data=True, threads=1)
    finally:
        moved.rename(family.remote)
    with Store.open(path) as again:
        assert not again.repair(read_data=True, threads=1).dropped
        whole(again, before)


READER = """
import os, sys
from pathlib import Path
from exchanges import files
from proof_models import model_files
from mstore.api import Store
warm, path = sys.argv[1:]
with Store.open(warm) as store:
    # All that is imported late comes now: somebody else may not reach it.
    assert files(store, "e1") == model_files(1, 1)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with Store.open(path) as store:
    for _ in range(2):
        assert files(store, "e1") == model_files(1, 1)
    assert store.show("e1").leans_on
assert not (Path(path) / "cache").exists()
"""


@pytest.mark.rest
def test_a_store_that_is_only_read_has_no_cache(place: Place) -> None:
    """Who may not write a lazy store reads it, through the network each time."""
    origin = place.store("origin")
    place.add(origin, "e1", 1, 1)
    origin.push(REMOTE, every=True)
    for name in ("warm", "lazy"):
        Store.clone(place.url, place.path / name, lazy=True)
    place.path.chmod(0o755)
    for one in (place.path / "lazy", place.remote):
        for path in (one, *one.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", READER, str(place.path / "warm"), str(place.path / "lazy")],
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    for path in (place.path, *place.path.rglob("*")):
        if path.is_dir():
            # It can be removed again.
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
