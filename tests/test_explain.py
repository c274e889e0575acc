"""Explain and replay: a merge tells block by block where it came from, and can be done again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import msgspec
import numpy as np
import pytest
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.api.reports import ExpertShare, MergeReport, PlanReport
from mstore.merge.arithmetic import kernels
from mstore.merge.methods.combination import Combination
from mstore.store.objects.plan import Coverage, bit, bitmap
from mstore.terms.errors import BadRequest, NotFound

FAMILY = families.layered(rows=100)
MIXED = families.layered(5, expert_dtypes=("F32", "BF16", "F16"), rows=40)


@pytest.fixture(scope="module", params=["bf16", "mixed"])
def family(request: pytest.FixtureRequest) -> families.Family:
    return FAMILY if request.param == "bf16" else MIXED


@pytest.fixture(scope="module")
def store(family: families.Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = family.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        yield store


def merge(store: Store, method: str, **options: Any) -> tuple[PlanReport, MergeReport]:
    plan = store.plan(
        MergeRequest(base="base", experts=["e0", ("e1", 0.5), "e2"], method=method, **options)
    )
    return plan, store.merge(plan, name="merged")


WAYS: dict[str, dict[str, Any]] = {
    "full": {"method": "linear"},
    "half": {"method": "task_arithmetic", "budget": 0.5},
    "ties": {"method": "ties", "parameters": {"density": 0.1}, "budget": 0.7},
    "fp32": {"method": "dare_ties", "dtype": "F32", "budget": 0.3},
    "top": {"method": "task_arithmetic", "top_p": 0.3},
}


# -- explain -------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", WAYS)
def test_counts_are_those_of_the_plan(way: str, store: Store) -> None:
    """Over all tensors, and over the blocks of each, counts add up to what the plan reported."""
    plan, report = merge(store, **WAYS[way])
    explained = store.explain("merged")
    assert explained.snapshot == report.snapshot
    assert explained.plan is not None
    assert explained.plan.plan == plan.plan
    assert explained.plan.experts == (("e0", 1.0), ("e1", 0.5), ("e2", 1.0))
    assert [item.name for item in explained.tensors] == list(store.view("merged").tensors)
    total: Counter[str] = Counter()
    for item in explained.tensors:
        detail = store.explain("merged", item.name)
        assert len(detail.tensors) == 1
        named = detail.tensors[0]
        assert (named.treatment, named.blocks_total) == (item.treatment, item.blocks_total)
        assert [share.expert for share in named.experts] == [s.expert for s in item.experts]
        for share, coarse in zip(named.experts, item.experts, strict=True):
            assert coarse.chunks is None
            counted = Counter(share.chunks)
            assert counted == +Counter(
                {
                    "read": coarse.chunks_read,
                    "shared": coarse.chunks_shared,
                    "equal to base": coarse.chunks_equal_base,
                    "not needed": coarse.chunks_not_needed,
                    "over budget": coarse.chunks_over_budget,
                    "outside the top-p share": coarse.chunks_outside_top_p,
                }
            )
            if item.name != "model.tied.embed_out":
                total += counted
    assert total == +Counter(
        {
            "read": plan.chunks_selected - plan.chunks_shared,
            "shared": plan.chunks_shared,
            "equal to base": plan.chunks_equal_base,
            "not needed": plan.chunks_not_needed,
            "over budget": plan.chunks_omitted,
            "outside the top-p share": plan.chunks_outside_top_p,
        }
    )
    assert (plan.chunks_omitted > 0) == ("budget" in WAYS[way])
    assert (plan.chunks_outside_top_p > 0) == ("top_p" in WAYS[way])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_coverage_is_what_happened(way: str, store: Store) -> None:
    """Reused blocks are exactly the base's own, and nobody contributed to a block left alone."""
    merge(store, **WAYS[way])
    merged, base = store.view("merged"), store.view("base")
    record = store._catalog.snapshot(merged.id)
    coverage_id = record.coverage_id()
    assert coverage_id is not None
    coverage = store._catalog.record(Coverage, coverage_id)
    assert coverage.plan == record.plan
    explained = {item.name: item for item in store.explain("merged").tensors}
    for item in coverage.tensors:
        ours, theirs = merged.record(item.name), base.record(item.name)
        same = [
            ours.dtype == theirs.dtype and ours.block(number) == theirs.block(number)
            for number in range(ours.block_count())
        ]
        assert item.blocks == ours.block_count()
        assert item.reused == bitmap(same)
        assert explained[item.name].blocks_reused == sum(same)
        for number, alike in enumerate(same):
            touched = any(bit(bits, number) for bits in item.contributed)
            assert alike or touched or ours.dtype != theirs.dtype
    assert sum(any(any(bits) for bits in item.contributed) for item in coverage.tensors) > 1


def _counts(share: ExpertShare) -> dict[str, int]:
    own = msgspec.structs.asdict(share)
    return {name: count for name, count in own.items() if name.startswith("chunks_")}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_those_of_the_tensors(way: str, store: Store) -> None:
    """By layer and by expert: every count, and the norm left out; a tied tensor counts once."""
    merge(store, **WAYS[way])
    explained = store.explain("merged")
    own = [item for item in explained.tensors if item.tied_to is None]
    assert {item.name: item.tied_to for item in explained.tensors if item.tied_to} == {
        "model.tied.embed_out": "model.tied.embed_in"
    }
    assert [layer.name for layer in explained.layers] == list(
        dict.fromkeys(item.layer for item in explained.tensors)
    )
    for layer in explained.layers:
        inside = [item for item in own if item.layer == layer.name]
        assert layer.blocks_total == sum(item.blocks_total for item in inside)
        assert layer.blocks_reused == sum(item.blocks_reused for item in inside)
        assert layer.tensors == sum(item.layer == layer.name for item in explained.tensors)
    for k, total in enumerate(explained.experts):
        for parts in (
            [item.experts[k] for item in own if item.experts],
            [layer.experts[k] for layer in explained.layers],
        ):
            summed: Counter[str] = Counter()
            for part in parts:
                summed.update(_counts(part))
            assert _counts(total) == summed
            norms = [part.omitted_norm for part in parts]
            assert total.omitted_norm == pytest.approx(math.hypot(*(n or 0.0 for n in norms)))
    [alone] = store.explain("merged", "model.tied.embed_out").layers
    assert sum(_counts(alone.experts[0]).values()) > 0


def test_omitted_norm_is_what_was_left_out(store: Store, family: families.Family) -> None:
    """omitted_norm is the L2 norm of the expert's delta over the chunks left out for the budget."""
    merge(store, "task_arithmetic", budget=0.4)
    checked = 0
    for name in ("model.embed.weight", "model.parts.weight", "model.shared.weight"):
        base = family.base[name].astype(np.float64).ravel()
        for k, share in enumerate(store.explain("merged", name).tensors[0].experts):
            delta = family.experts[k][name].astype(np.float64).ravel() - base
            assert share.chunks is not None
            chunks = np.array_split(delta, range(BLOCK // 2, delta.size, BLOCK // 2))
            left = [c for c, why in zip(chunks, share.chunks, strict=True) if why == "over budget"]
            norm = float(np.sqrt(sum(float(c @ c) for c in left)))
            assert share.omitted_norm == pytest.approx(norm, rel=1e-5)
            checked += bool(left)
    assert checked > 1


def test_who_asks_again_renames_nothing(tmp_path: Path) -> None:
    """A merge's inputs keep their names, whatever later requests call the same contents."""
    FAMILY.write(tmp_path)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "e0"):
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        # Other words for the same snapshots; other snapshots of the same contents; ids.
        store.add(tmp_path / "base", name="again/base", message="again")
        store.add(tmp_path / "e0", name="again/e0", base="again/base", message="again")
        store.merge(
            store.plan(MergeRequest(base="base", experts=["e0"], method="ties")), name="merged"
        )
        for base, expert in (
            ("base@{0}", "e0@{0}"),
            ("again/base", "again/e0"),
            (str(store["base"].id), str(store["e0"].id)),
        ):
            store.plan(MergeRequest(base=base, experts=[expert], method="ties"))
            told = store.explain("merged")
            assert (told.plan.base, told.plan.experts) == ("base", (("e0", 1.0),))
            assert [one.expert for one in told.experts] == ["e0"]
            assert [one.expert for one in store.blame("merged").experts] == ["e0"]
        store.rename("base", "llama")
        assert store.explain("merged").plan.base == "llama"


def test_added_snapshots_and_unknown_tensors(store: Store) -> None:
    """An added snapshot has no plan to explain; a tensor that is not there is named."""
    with pytest.raises(BadRequest, match="not made by a merge"):
        store.explain("base")
    with pytest.raises(NotFound) as refused:
        store.explain("merged", "model.nothing")
    assert refused.value.where == "model.nothing"


# -- replay --------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_replay_gives_the_same(way: str, store: Store) -> None:
    """A recorded plan, run again with any number of threads, gives the ManifestId it gave before,
    and nothing is written.
    """
    _, report = merge(store, **WAYS[way])
    before = store.stats()
    for threads in (1, 2):
        again = store.replay("merged", threads=threads)
        assert again.same
        assert (again.snapshot, again.plan) == (report.snapshot, report.plan)
        assert again.replayed == again.manifest == report.manifest
        assert again.first_difference is None
    assert store.stats() == before


def test_replay_needs_no_refs(store: Store) -> None:
    """What was merged is named by content: replay works after the experts' refs have gone."""
    merge(store, "linear")
    ids = {name: str(store[name].id) for name in ("e0", "e1")}
    try:
        for name in ids:
            store.remove(name)
        assert store.replay("merged").same
    finally:
        for name, id in ids.items():
            store.reset(name, id)


@pytest.mark.sampled(2)
def test_replay_names_the_first_difference(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other bytes come out, replay says so and names the first tensor and block."""
    merge(store, "dare_linear", parameters={"density": 0.5})
    honest = kernels.run
    found = []
    for wrong in ((37, 0), (BLOCK // 2, BLOCK)):  # model.norm.weight; the third chunk of any

        def broken(
            mix: Any, chunk: Any, out: Any, *more: Any, where: tuple[int, int] = wrong
        ) -> Any:
            found = honest(mix, chunk, out, *more)
            if (chunk.n, chunk.first_index) == where:
                out[0] ^= 1
            return found

        monkeypatch.setattr(Combination, "kernel", staticmethod(broken))
        again = store.replay("merged")
        assert not again.same
        assert again.replayed != again.manifest
        assert again.first_difference is not None
        found.append(again.first_difference.partition(": ")[2])
    assert found[0] == "model.norm.weight, block 0"
    assert found[1].endswith(", block 2")


def test_only_merges_can_be_replayed(store: Store) -> None:
    """An added snapshot was made by no plan: a BadRequest says so."""
    with pytest.raises(BadRequest, match="not made by a merge"):
        store.replay("base")


# -- virtual merges ------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["full", "half", "ties", "top"])
def test_a_virtual_merge_is_explained_by_its_plan(way: str, store: Store) -> None:
    """What a plan says is the same before and after it is run; only a block that comes out as the
    base's by chance is not known before.
    """
    plan, _ = merge(store, **WAYS[way])
    real = store.explain("merged")
    store.merge(plan, name="virtual", virtual=True)
    planned = store.explain("virtual")
    assert (planned.plan, planned.experts) == (real.plan, real.experts)
    for before, after in zip(planned.tensors, real.tensors, strict=True):
        assert before.blocks_reused <= after.blocks_reused
        assert before == msgspec.structs.replace(after, blocks_reused=before.blocks_reused)
    assert sum(item.blocks_reused for item in planned.tensors) > 0
    ours, theirs = store.blame("virtual"), store.blame("merged")
    assert (ours.tensors, ours.layers) == (theirs.tensors, theirs.layers)
