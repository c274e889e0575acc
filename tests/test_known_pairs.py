"""Digests of statistics: a survey that finds them plans exactly what one without them plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK, write_checkpoint

from mstore import MergeRequest
from mstore.api import Store
from mstore.merge.planning import costs
from mstore.merge.planning.costs import costs_of
from mstore.merge.planning.session import Planning
from mstore.models.stats.store import StatsStore
from mstore.store.models import tensors_of
from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import Plan
from mstore.store.transaction import Transaction

REQUESTS: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear", "budget": 0.4},
    "task_arithmetic": {"method": "task_arithmetic", "max_error": 0.01},
    "ties": {"method": "ties", "parameters": {"density": 0.3}},
    "ties, part": {"method": "ties", "parameters": {"density": 0.3}, "budget": 0.5},
    "ties, all": {"method": "ties", "parameters": {"density": 1.0}, "budget": 0.5},
    "dare_ties": {"method": "dare_ties", "parameters": {"density": 0.5}, "budget": 0.5},
    "by sketch": {"method": "ties", "budget": 0.5, "score": "conflict"},
    "a band": {"method": "breadcrumbs_ties", "parameters": {"density": 0.8}, "budget": 0.5},
    "coarse": {"method": "ties", "parameters": {"density": 0.3}, "dtype": "F32", "budget": 0.5},
}


def digest_rows(store: Store, change: Callable[[bytes], bytes | None]) -> int:
    """Change all digests at rest, None to delete one; their number."""
    statistics = store._statistics
    statistics.flush()
    env = statistics._env
    assert env is not None
    count = 0
    with env.write() as transaction:
        for database in (env.databases["digests"], env.databases["cuts"]):
            with transaction.cursor(db=database) as cursor:
                rows = [(bytes(key), bytes(row)) for key, row in cursor]
            for key, row in rows:
                count += 1
                new = change(row)
                if new is None:
                    transaction.delete(key, db=database)
                else:
                    transaction.put(key, new, db=database)
    return count


def planned(store: Store, what: str, experts: list[str]) -> bytes:
    """The plan of a request, surveyed now; digests are left at rest."""
    return planning(store, what, experts).plan().plan.encode()


def planning(store: Store, what: str, experts: list[str]) -> Planning:
    """A request, surveyed now."""
    request = store._resolved(MergeRequest(base="base", experts=experts, **REQUESTS[what]))
    return Planning(store._catalog, store._statistics, request, threads=1)


def both(store: Store, experts: list[str]) -> None:
    """Check every request: without digests, then with those that this left, and damaged ones."""
    for what in REQUESTS:
        digest_rows(store, lambda row: None)
        fresh = planned(store, what, experts)
        assert planned(store, what, experts) == fresh, what
        digest_rows(store, lambda row: row[:20] + bytes([row[20] ^ 1]) + row[21:])
        assert planned(store, what, experts) == fresh, what


def add_all(root: Path, seed: int) -> Store:
    family = families.layered(seed, rows=40, expert_dtypes=("BF16", ("F32", "BF16")[seed % 2]))
    family.write(root)
    store = Store.init(root / "store", block_size=BLOCK, codec="raw")
    store.add(root / "base", name="base", threads=1)
    for name in ("e0", "e1"):
        store.add(root / name, name=name, base="base", threads=1)
    return store


@pytest.mark.rest
@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_is_the_same_with_digests_without_and_with_damaged_ones(
    tmp_path: Path, seed: int
) -> None:
    """Every kind of request gives the same bytes of a plan, whatever digests there are."""
    with add_all(tmp_path, seed) as store:
        # They are there from the start: measuring an expert leaves them.
        assert digest_rows(store, lambda row: row) >= 4
        start = {what: planned(store, what, ["e0", "e1"]) for what in REQUESTS}
        both(store, ["e0", "e1"])
        assert start == {what: planned(store, what, ["e0", "e1"]) for what in REQUESTS}


@pytest.mark.rest
def test_digests_follow_changed_removed_and_returned_models(tmp_path: Path) -> None:
    """An expert that changes, goes, and comes back, and another base: plans are those of a fresh
    survey each time, and a collection takes the digests of what it takes."""
    with add_all(tmp_path, 1) as store:
        store.configure("reflog_days", 0)
        both(store, ["e0", "e1"])
        changed = families.read_checkpoint(tmp_path / "e0")
        changed["model.parts.weight"] = np.flip(changed["model.parts.weight"], axis=0).copy()
        write_checkpoint(tmp_path / "changed", changed)
        store.add(tmp_path / "changed", name="e0", base="base", threads=1)
        both(store, ["e0", "e1"])
        before = planned(store, "ties", ["e0", "e1"])
        rows = digest_rows(store, lambda row: row)
        store.remove("e1")
        store.prune(keep_last=1)
        store.gc()
        assert 0 < digest_rows(store, lambda row: row) < rows
        both(store, ["e0"])
        store.add(tmp_path / "e1", name="e1", base="base", threads=1)
        assert planned(store, "ties", ["e0", "e1"]) == before
        both(store, ["e0", "e1"])
        base = families.read_checkpoint(tmp_path / "base")
        base["model.embed.weight"] = np.flip(base["model.embed.weight"], axis=0).copy()
        write_checkpoint(tmp_path / "other", base)
        store.add(tmp_path / "other", name="base", threads=1)
        both(store, ["e0", "e1"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_rows_that_are_not_finite_are_told_of_with_digests(tmp_path: Path, odd: float) -> None:
    """A chunk of an expert that is infinite or NaN is a risk of the plan, of this expert alone."""
    with add_all(tmp_path, 1) as store:
        sick = families.read_checkpoint(tmp_path / "e0")
        weight = sick["model.parts.weight"].copy()
        weight.reshape(-1)[-1] = families.cast(np.array([odd], dtype=np.float32), "BF16")[0]
        sick["model.parts.weight"] = weight
        write_checkpoint(tmp_path / "sick", sick)
        store.add(tmp_path / "sick", name="sick", base="base", threads=1)
        for experts in (["e0", "sick", "e1"], ["sick"]):
            digest_rows(store, lambda row: None)
            fresh = planning(store, "task_arithmetic", experts)
            again = planning(store, "task_arithmetic", experts)
            assert again.plan() == fresh.plan()
            (risk,) = again.risks
            assert again.risks == fresh.risks
            assert risk.tensor == "model.parts.weight"
            assert [experts[k] for k in risk.experts] == ["sick"]
        digest_rows(store, lambda row: row)
        assert planning(store, "task_arithmetic", ["e0", "e1"]).risks == ()


def test_digests_spare_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second plan with one expert more opens the tables of that one alone."""
    asked: list[int] = []
    pairs = StatsStore.pairs

    def counted(self: StatsStore, keys: Any) -> Any:
        asked.append(len(keys))
        return pairs(self, keys)

    with add_all(tmp_path, 1) as store:
        planned(store, "ties, part", ["e0"])
        monkeypatch.setattr(StatsStore, "pairs", counted)
        planned(store, "ties, part", ["e0"])
        assert sum(asked) == 0
        planned(store, "ties, part", ["e0", "e1"])
        assert 0 < sum(asked) <= 6
        asked.clear()
        planned(store, "ties, part", ["e0", "e1"])
        assert sum(asked) == 0


def test_stored_lengths_follow_the_index(tmp_path: Path) -> None:
    """Lengths that were looked up count until something is committed, and no longer."""
    with add_all(tmp_path, 1) as store:
        lengths = store._catalog.lengths
        manifest = store._catalog.manifest(store["e0"].manifest)
        (record,) = store._catalog.tensors(
            [tensors_of(store._catalog, manifest)["model.embed.weight"]]
        )
        blocks = record.blocks
        (first,) = lengths.of([blocks])
        assert lengths.of([blocks, blocks])[1] is first
        store.tag("t", "e0")
        (again,) = lengths.of([blocks])
        assert again is not first
        assert again.tolist() == first.tolist()


def test_lengths_are_looked_up_again_after_a_commit_that_failed(tmp_path: Path) -> None:
    """A transaction that was dropped gives its number to the next one, which may change lengths."""
    with add_all(tmp_path, 1) as store:
        lengths = store._catalog.lengths
        manifest = store._catalog.manifest(store["e0"].manifest)
        (record,) = store._catalog.tensors(
            [tensors_of(store._catalog, manifest)["model.embed.weight"]]
        )
        (first,) = lengths.of([record.blocks])

        def refuse(rows: object) -> None:
            raise OSError("no")

        with Transaction(store._catalog, "test") as transaction:
            with pytest.raises(OSError, match="no"):
                transaction.commit(also=refuse)
            before = lengths.state()
        assert lengths.of([record.blocks])[0] is first
        store.tag("t", "e0")
        assert lengths.state() == (before[0], before[1] + 1)
        assert lengths.of([record.blocks])[0] is not first


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_tensors_compared_together_are_as_those_compared_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Plans and costs do not depend on how many tensors are compared at once."""

    def everything() -> dict[str, tuple[bytes, object]]:
        found = {}
        for what in REQUESTS:
            plan = planned(store, what, ["e0", "e1", "again"])
            found[what] = plan, costs_of(store._catalog, decode(Plan, plan, ""))
        return found

    with add_all(tmp_path, seed) as store:
        store.add(tmp_path / "e1", name="again", base="base", threads=1)
        together = everything()
        monkeypatch.setattr(costs, "TOGETHER", 3)
        assert everything() == together
        monkeypatch.setattr(costs.Comparer, "compare", lambda self, candidates: None)
        assert everything() == together
