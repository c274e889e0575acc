"""Beside the index: rows of the memo table and of statistics go with what they are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_gc import BLOCK, sound, write

from mstore import MergeRequest
from mstore.api import Store
from mstore.store import leases


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A base, an expert with statistics, and a merge of them that is remembered."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        store.add(write(tmp_path / "in", 1), name="base")
        store.add(write(tmp_path / "in", 1, 4), name="expert", base="base")
        store.merge(plan(store), name="merged", threads=1)
        yield store


def plan(store: Store) -> str:
    return str(
        store.plan(
            MergeRequest(base="base", experts=["expert"], method="task_arithmetic"), threads=1
        ).plan
    )


def rows(store: Store) -> dict[str, int]:
    """How many rows each database beside the index has."""
    store._memo.flush()
    store._statistics.flush()
    memo = store._memo._open(create=False)
    assert memo is not None
    found = {}
    for env in (memo, store._statistics._env):
        with env.read() as transaction:
            for name, db in env.databases.items():
                found[name] = int(transaction.stat(db)["entries"])
    return found


def test_rows_of_what_is_stored_stay(store: Store) -> None:
    """With everything reached, nothing of it goes, and a merge is still answered from memory."""
    before = rows(store)
    assert before["pairs"] == before["tables"] == 1
    assert before["outputs"] > 0
    assert before["requests"] == before["outcomes"] == 1
    store.gc()
    assert rows(store) == before
    again = store.merge(plan(store), name="again", threads=1)
    assert again.expert_bytes_read == 0


def test_rows_of_what_was_collected_go(store: Store) -> None:
    """Without expert and merge, no row speaks of them; the base's own stay."""
    store.remove("merged", "expert")
    store.gc()
    after = rows(store)
    gone = ("pairs", "tables", "outputs", "requests", "outcomes")
    assert [after[name] for name in gone] == [0] * len(gone)
    assert after["squares"] == len(store.view("base").tensors)
    sound(store)


def test_a_plan_goes_with_its_inputs(store: Store) -> None:
    """A plan of collected inputs is dropped, one whose inputs are there stays."""
    assert len(store.plans()) == 1
    store.remove("merged")
    report = store.gc()
    assert report.plans_dropped == 0
    assert [one.experts for one in store.plans()] == [(("expert", 1.0),)]
    store.remove("expert")
    assert store.gc().plans_dropped == 1
    assert store.plans() == []


def test_nothing_is_tidied_while_others_work(store: Store) -> None:
    """Statistics may be of tensors that a running add has yet to publish."""
    store.remove("merged", "expert")
    before = rows(store)
    lease = leases.Lease(store._catalog.layout, store._catalog.index, "add")
    report = store.gc()
    assert any("others are at work" in remark for remark in report.left)
    assert rows(store) == before
    lease.release()
    store.gc()
    assert rows(store)["pairs"] == 0
