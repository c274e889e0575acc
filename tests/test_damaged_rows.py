"""Rows of names that cannot be read: an error that says which and what to do, and a way back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from small_models import BLOCK, small_model

from mstore import MergeRequest
from mstore.api import Store
from mstore.store import leases
from mstore.store.leases import Lease
from mstore.terms.errors import Corrupt

ROWS = {
    "not msgpack": b"\xc1",
    "cut short": b"\x92\xa6branch",
    "another shape": msgspec.msgpack.encode({"a": 1}),
    "a short id": msgspec.msgpack.encode(["branch", b"1234"]),
    "empty": b"",
}


def build(root: Path) -> None:
    """A store with a merge whose inputs' names are kept."""
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", "expert"):
            base = None if name == "base" else "base"
            store.add(small_model(root / name, "s", changed=name), name=name, base=base, threads=1)
        plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear"), threads=1)
        store.merge(plan, name="merged", threads=1)


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(template, tmp_path / "root")
    return tmp_path / "root"


def damage(store: Store, database: str, row: bytes) -> bytes:
    """Put this in the place of the first row of a database; the row's key."""
    index = store._catalog.index
    with index.env.write() as transaction, transaction.cursor(db=index.db(database)) as cursor:
        assert cursor.first()
        key = bytes(cursor.key())
        transaction.put(key, row, db=index.db(database))
    return key


CALLS: dict[str, Callable[[Store, Path], object]] = {
    "refs": lambda store, _: store.refs(),
    "show": lambda store, _: store.show("base"),
    "log": lambda store, _: store.log(),
    "reflog": lambda store, _: store.reflog("base"),
    "back": lambda store, _: store.show("base@{0}"),
    "plans": lambda store, _: store.plans(),
    "explain": lambda store, _: store.explain("merged"),
    "blame": lambda store, _: store.blame("merged"),
    "add": lambda store, root: store.add(root / "expert", name="another", threads=1),
    "tag": lambda store, _: store.tag("t", "expert"),
    "reset": lambda store, _: store.reset("base", "expert"),
    "remove": lambda store, _: store.remove("base"),
    "du": lambda store, _: store.usage(),
    "prune": lambda store, _: store.prune(keep_last=1),
    "gc": lambda store, _: store.gc(),
    "fsck": lambda store, _: store.fsck(),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("database", "where", "met"),
    [
        ("refs", "base", {"refs", "show", "gc"}),
        ("reflog", "base", {"reflog", "back", "gc"}),
        ("plans", "plan ", {"explain", "plans"}),
    ],
)
def test_a_damaged_row_is_named(
    root: Path, row: str, database: str, where: str, met: set[str]
) -> None:
    """No call fails with anything but an error that names the ref or plan and says what to type;
    fsck tells of the row, and reindex brings back what it said."""
    with Store.open(root / "store") as store:
        base = store.show("base").snapshot
        explained = store.explain("merged")
        damage(store, database, ROWS[row])
        problems = store.fsck().problems
        assert [problem.kind for problem in problems] == [database.rstrip("s")]
        assert str(store.fsck().hint) == "mstore.Store.reindex(PATH)"
        refused = {}
        for name, call in CALLS.items():
            try:
                call(store, root)
            except Corrupt as error:
                refused[name] = error
    assert refused.keys() >= met
    for name, error in refused.items():
        assert (error.where or "").startswith(where), name
        assert error.hint == "mstore.Store.reindex(PATH)"
    Store.reindex(root / "store")
    with Store.open(root / "store") as store:
        assert store.fsck(read_data=True).problems == ()
        if database == "refs":
            assert store.show("base").snapshot == base
        again = store.explain("merged")
        assert again.tensors == explained.tensors
        # What inputs were called is lost with the row; which they were is not.
        assert again.plan is not None
        assert explained.plan is not None
        assert again.plan.plan == explained.plan.plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", ROWS)
def test_a_damaged_row_of_a_lease_stops_nobody(root: Path, row: str) -> None:
    """What a lease is for is told to people; where it cannot be read, its name is."""
    with Store.open(root / "store") as store:
        store.configure("reflog_days", 0)
        lease = Lease(store._catalog.layout, store._catalog.index, "test")
        assert damage(store, "leases", ROWS[row]) == lease.name.encode()
        with closing(store):
            store.remove("base", "expert", "merged")
            assert store.gc().waiting_for == (lease.name,)
            lease.release()
            store.gc()
            assert leases.live(store._catalog.layout) == set()
            assert store.fsck().problems == ()
