"""What a mount shows stays: whatever is removed, moved, pruned and collected meanwhile.

A mount of a revision holds it as long as it is there; one of the whole store holds the snapshots of
which files are open.  A hold ends with its process, however that ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from mount_drivers import (
    SHARDS,
    Driver,
    Family,
    Served,
    drop_pages,
    on_disk,
    served,
    survey,
)

from mstore import MergeRequest, Store
from mstore.store import leases
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.terms.errors import Conflict
from mstore.terms.ids import SnapshotId

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("forget", [remove, move, prune])
def test_what_is_mounted_is_kept(
    driver: Driver,
    family: Family,
    stack: ExitStack,
    tmp_path: Path,
    forget: Callable[[Store, Family], None],
) -> None:
    """Removed, moved away or pruned, then collected with all packs rewritten: a mount of the
    snapshot shows all of it, which nobody had read; unmounted, it goes."""
    tuned = stack.enter_context(served(driver, family.store, "tuned", tmp_path / "mnt"))
    with Store.open(family.store) as store, going(store, forget is not prune):
        forget(store, family)
        collect(store)
        assert survey(tuned.point, family.sources["tuned"]) == {}
        assert store.fsck(read_data=True).problems == ()
        stack.close()


def test_a_hold_that_came_too_late_is_told(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is collected before its hold is seen: a mount would fail in each read, so
    taking a sure hold raises, and leaves none behind."""
    really = leases.Hold

    def late(layout: Layout, snapshot: SnapshotId) -> leases.Hold:
        with Store.open(family.store) as other:
            remove(other, family)
            collect(other)
        return really(layout, snapshot)

    with Store.open(family.store) as store:
        tuned = store.view("tuned").id
        monkeypatch.setattr(leases, "Hold", late)
        with pytest.raises(Conflict, match="was collected"):
            store.hold(tuned, sure=True)
    assert not list((family.store / "tmp").glob(f"*{leases.HOLD}"))


@pytest.mark.sampled(3)
def test_a_hold_waits_for_who_may_not_have_seen_it(family: Family) -> None:
    """A snapshot without a ref may be in the course of being collected: a sure hold waits until
    that is published. One with a ref waits for nobody."""
    done = []
    with Store.open(family.store) as store, closing(Catalog.open(family.store)) as catalog:
        tuned, base = store.view("tuned").id, store.view("base").id
        store.remove("tuned")

        def hold() -> None:
            store.hold(tuned, sure=True).release()
            done.append("held")

        thread = threading.Thread(target=hold)
        with catalog.publishing():
            store.hold(base, sure=True).release()
            thread.start()
            thread.join(0.2)
            done.append("published")
        thread.join()
    assert done == ["published", "held"]


def test_a_sure_hold_needs_no_other_ref(family: Family) -> None:
    """A row of another ref that cannot be read does not keep a sound snapshot from being held."""
    with Store.open(family.store) as store, closing(Catalog.open(family.store)) as catalog:
        tuned = store.view("tuned").id
        with catalog.index.env.write() as transaction:
            transaction.put(b"damaged", b"\xff", db=catalog.index.db("refs"))
        store.hold(tuned, sure=True).release()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("forget", [remove, move, prune])
def test_what_is_open_is_kept(
    driver: Driver,
    family: Family,
    stack: ExitStack,
    tmp_path: Path,
    forget: Callable[[Store, Family], None],
) -> None:
    """The same in a mount of the whole store, for a snapshot of which one file is open: that file
    is read to its end, and the others as well; closed, it goes."""
    everything = stack.enter_context(served(driver, family.store, None, tmp_path / "all"))
    below = everything.point / "refs" / "tuned"
    with Store.open(family.store) as store, going(store, forget is not prune):
        with (below / SHARDS[0]).open("rb", buffering=0) as file:
            start = file.read(70_001)
            forget(store, family)
            collect(store)
            drop_pages(below / SHARDS[0])
            rest = b"".join(iter(lambda: file.read(1 << 20), b""))
            assert start + rest == (family.sources["tuned"] / SHARDS[0]).read_bytes()
            assert survey(below, family.sources["tuned"]) == {}
        # A close is told to the process when the closer has gone on.
        until(lambda: not list((family.store / "tmp").iterdir()))


@contextmanager
def going(store: Store, as_a_whole: bool) -> Iterator[None]:
    """What is shown in the block is there until its end, and goes with the next collection; its
    records too, if `as_a_whole`."""
    snapshots = {store.view(name).id for name in ("tuned", "base")}
    yield
    assert snapshots <= set(store.snapshot_ids())
    size = stored(store)
    collect(store)
    assert stored(store) < size - 500_000
    assert bool(snapshots & set(store.snapshot_ids())) != as_a_whole


def until(true: Callable[[], bool]) -> None:
    """Wait for something that will happen."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def collect(store: Store) -> None:
    """Everything that can go goes."""
    store.gc(dead_share=0, empty_lost_found=True)


def stored(store: Store) -> int:
    """Bytes of all packs."""
    return sum(path.stat().st_size for path in store.path.rglob("*.pack"))


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_virtual_merge_that_is_shown_keeps_its_inputs(
    driver: Driver, family: Family, stack: ExitStack, tmp_path: Path, *, is_alone: bool
) -> None:
    """All refs of a virtual merge and of what it is computed from go: a mount of it, and a file
    that is open in one of the whole store, are computed to the end."""
    with Store.open(family.store) as store:
        plan = store.plan(MergeRequest(base="base", experts=["tuned"], method="linear"))
        store.merge(plan, name="real")
        store.checkout("real", tmp_path / "real")
        store.remove("real")
        store.merge(plan, name="later", virtual=True)
        store.gc()
        ref = "later" if is_alone else None
        shown = stack.enter_context(served(driver, family.store, ref, tmp_path / "mnt")).point
        below = shown if is_alone else shown / "refs" / "later"
        if not is_alone:
            stack.enter_context((below / SHARDS[1]).open("rb"))
        for name in ("later", "tuned", "base"):
            store.remove(name)
        collect(store)
        assert survey(below, tmp_path / "real") == {}
        stack.close()
        collect(store)
        assert [ref.name for ref in store.refs()] == ["other"]
        assert len(store.snapshot_ids()) == 1


@pytest.mark.rest
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
