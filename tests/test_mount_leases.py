"""What a mount shows stays: whatever is removed, moved, pruned and collected meanwhile.

A mount of a revision holds it as long as it is there; one of the whole store holds the snapshots of
which files are open.  A hold ends with its process, however that ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mount_drivers import (
    ODD,
    SHARDS,
    Driver,
    Family,
    Served,
    copy_family,
    drop_pages,
    served,
    survey,
    write_family,
)

from mstore import MergeRequest, Store

pytest_plugins = ["mount_drivers"]


@pytest.fixture(scope="module")
def whole(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A family, which tests copy."""
    return write_family(tmp_path_factory.mktemp("leases"), driver)


@pytest.fixture
def family(whole: Family, tmp_path: Path) -> Family:
    """A copy in which things are removed."""
    return copy_family(whole, tmp_path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends mounts."""
    with ExitStack() as made:
        yield made


def remove(store: Store, family: Family) -> None:
    store.remove("tuned")
    store.remove("base")


def move(store: Store, family: Family) -> None:
    store.reset("tuned", "other")
    store.reset("base", "other")


def prune(store: Store, family: Family) -> None:
    for name in ("tuned", "base"):
        store.add(family.sources["other"], name=name)
    assert store.prune(keep_last=1, unnamed_inputs=True).snapshots


@pytest.mark.parametrize("forget", [remove, move, prune])
def test_what_is_shown_is_kept(
    driver: Driver,
    family: Family,
    stack: ExitStack,
    tmp_path: Path,
    forget: Callable[[Store, Family], None],
) -> None:
    """Removed, moved away or pruned, then collected with all packs rewritten: a mount
    of the snapshot shows all of it, cold, and so do files that are open in one of the whole store;
    unmounted, it goes."""
    tuned = stack.enter_context(served(driver, family.store, "tuned", tmp_path / "mnt"))
    everything = stack.enter_context(served(driver, family.store, None, tmp_path / "all"))
    below = everything.point / "refs" / "tuned"
    with Store.open(family.store) as store:
        snapshots = {store.view(name).id for name in ("tuned", "base")}
        files = {
            name: stack.enter_context((below / name).open("rb", buffering=0))
            for name in (*SHARDS, ODD)
        }
        started = {name: file.read(70_001) for name, file in files.items()}
        forget(store, family)
        collect(store)
        for name in files:
            drop_pages(below / name)
            drop_pages(tuned.point / name)
        assert survey(tuned.point, family.sources["tuned"]) == {}
        for name, file in files.items():
            rest = b"".join(iter(lambda file=file: file.read(1 << 20), b""))
            assert started[name] + rest == (family.sources["tuned"] / name).read_bytes(), name
        assert survey(below, family.sources["tuned"]) == {}
        assert store.fsck(read_data=True).problems == ()
        size = stored(store)
        stack.close()
        collect(store)
        assert stored(store) < size - 500_000
        if forget is not prune:
            assert not snapshots & set(store.snapshot_ids())


def collect(store: Store) -> None:
    """Everything that can go goes."""
    store.gc(dead_share=0, empty_lost_found=True)


def stored(store: Store) -> int:
    """Bytes of all packs."""
    return sum(path.stat().st_size for path in store.path.rglob("*.pack"))


def test_a_hold_ends_with_its_process(
    driver: Driver, family: Family, stack: ExitStack, tmp_path: Path
) -> None:
    """A process that stands still holds what it shows; once it is killed, gc takes it, and nothing
    is left of the hold."""
    tuned = stack.enter_context(served(driver, family.store, "tuned", tmp_path / "mnt"))
    with Store.open(family.store) as store:
        snapshot = store.view("tuned").id
        store.remove("tuned")
        tuned.process.send_signal(signal.SIGSTOP)
        store.gc()
        assert snapshot in store.snapshot_ids()
        tuned.process.kill()
        tuned.process.wait()
        store.gc()
        assert snapshot not in store.snapshot_ids()
        assert list((family.store / "tmp").iterdir()) == []


def test_a_virtual_merge_that_is_shown_keeps_its_inputs(
    driver: Driver, family: Family, stack: ExitStack, tmp_path: Path
) -> None:
    """All refs of a virtual merge and of what it is computed from go: the mount of it, and a file
    that is open in one of the whole store, are computed to the end."""
    with Store.open(family.store) as store:
        plan = store.plan(MergeRequest(base="base", experts=["tuned"], method="linear"))
        store.merge(plan, name="real")
        store.checkout("real", tmp_path / "real")
        store.remove("real")
        store.merge(plan, name="later", virtual=True)
        store.gc()
        alone = stack.enter_context(served(driver, family.store, "later", tmp_path / "mnt"))
        everything = stack.enter_context(served(driver, family.store, None, tmp_path / "all"))
        path = everything.point / "refs" / "later" / SHARDS[1]
        with path.open("rb", buffering=0) as file:
            start = file.read(70_001)
            for name in ("later", "tuned", "base"):
                store.remove(name)
            collect(store)
            rest = b"".join(iter(lambda: file.read(1 << 20), b""))
            assert start + rest == (tmp_path / "real" / SHARDS[1]).read_bytes()
        assert survey(alone.point, tmp_path / "real") == {}
        stack.close()
        collect(store)
        assert [ref.name for ref in store.refs()] == ["other"]
        assert len(store.snapshot_ids()) == 1


def test_a_merge_that_becomes_real_goes_on_under_its_mount(
    driver: Driver, family: Family, stack: ExitStack, tmp_path: Path
) -> None:
    """`materialize` and gc while a virtual merge is mounted: the mount shows the same bytes."""
    with Store.open(family.store) as store:
        plan = store.plan(MergeRequest(base="base", experts=["tuned"], method="linear"))
        store.merge(plan, name="later", virtual=True)
        shown: Served = stack.enter_context(served(driver, family.store, "later", tmp_path / "mnt"))
        with (shown.point / SHARDS[0]).open("rb", buffering=0) as file:
            start = file.read(70_001)
            store.materialize("later")
            collect(store)
            store.checkout("later", tmp_path / "real")
            whole = (tmp_path / "real" / SHARDS[0]).read_bytes()
            assert start + os.pread(file.fileno(), len(whole), len(start)) == whole
        assert survey(shown.point, tmp_path / "real") == {}
