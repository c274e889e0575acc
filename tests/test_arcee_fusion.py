"""arcee_fusion: elements of unusual importance, by exact quartiles of the whole tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import Family
from test_budget import Place, make

from mstore import MergeRequest, Store
from mstore.merge.methods.arcee_fusion import divergences, importances
from mstore.merge.methods.registry import operation
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest

# Rows of whole blocks, of parts of blocks, and of several; one row; a number.
SHAPES = {"a": (70, 1024), "b": (50, 1000), "c": (3, 20000), "d": (5000,), "e": (4, 3, 90), "f": ()}
ASKED = MergeRequest(base="base", experts=["e0"], method="arcee_fusion", dtype="F32")


@pytest.fixture(scope="module", params=["BF16", "F16", "F32"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """One expert that moves half of the elements of most tensors, in float32."""
    rng = np.random.default_rng(8)
    base, moved = {}, {}
    for name, shape in SHAPES.items():
        base[name] = families.cast(np.asarray(rng.standard_normal(shape)), request.param)
        step = 0.1 * rng.standard_normal(shape) * (rng.random(shape) < 0.5)
        moved[name] = families.cast(np.asarray(base[name].astype(np.float32) + step), "F32")
    made = make(tmp_path_factory.mktemp("family"), Family(base, (moved,)))
    with made.store:
        yield made


def wanted(place: Place, name: str, **options: Any) -> Any:
    sides = [place.family.experts[0][name]]
    base = place.family.base[name]
    return reference.merge("arcee_fusion", {}, [1.0], base, sides, out_dtype="F32", **options)


def test_a_merge_equals_the_reference(place: Place) -> None:
    """Importances, quartiles, and what is taken are the definition's; virtual, replayed, exported,
    and in blocks of another size."""
    store = place.store
    plan = store.plan(ASKED)
    store.merge(plan, name="merged")
    assert store.replay("merged").same
    store.merge(plan, name="virtual", virtual=True)
    assert store.import_plan(store.export_plan(str(plan.plan))).plan == plan.plan
    with Store.init(
        place.root / f"other{place.family.base['a'].dtype}", block_size=1 << 16
    ) as other:
        for name in ("base", "e0"):
            other.add(place.root / name, name=name)
        other.merge(other.plan(ASKED), name="merged")
        for name in SHAPES:
            exact = wanted(place, name)
            for found in (store["merged"], store["virtual"], other["merged"]):
                bits = np.asarray(found.tensor(name)).view(np.uint32)
                assert np.array_equal(bits, exact.view(np.uint32)), name
    taken = np.mean(wanted(place, "a") != place.family.base["a"].astype(np.float32))
    assert 0.02 < taken < 0.3


def test_the_threshold_is_an_order_statistic(place: Place) -> None:
    """The plan records the median and one and a half interquartile ranges of each tensor."""
    record = place.store._catalog.record(Plan, place.store.plan(ASKED).plan)
    for tensor in record.tensors:
        base, expert = (one[tensor.name] for one in (place.family.base, place.family.experts[0]))
        row = reference.row_length(base.shape)
        least = reference.least_importance(base.ravel(), expert.ravel(), row)
        [cut] = tensor.thresholds
        assert cut.value == pytest.approx(float(least), rel=1e-6)
        assert cut.quota == -1


@pytest.mark.parametrize(("scale", "step"), [(1.0, 0.1), (0.02, 1e-4), (40.0, 5.0), (1e-30, 1.0)])
@pytest.mark.parametrize("row", [1, 2, 7, 64, 4097])
def test_divergences_are_exact(scale: float, step: float, row: int) -> None:
    """The divergence of rows is that of 80-bit numbers to half a unit in the last place and 2^-52,
    never below zero, and zero for equal rows."""
    rng = np.random.default_rng(row)
    base = (scale * rng.standard_normal((40, row))).astype(np.float32)
    expert = (base + scale * step * rng.standard_normal(base.shape)).astype(np.float32)
    expert[3] = base[3]
    found = divergences(base.ravel(), expert.ravel(), row)
    exact = reference.divergence(base.ravel(), expert.ravel(), row)
    assert np.all(np.abs(found - exact) <= 2.0**-24 * (1 + 2.0**-20) * exact + 2.0**-52)
    assert found.min() >= 0
    assert found[3] == 0
    assert np.array_equal(
        importances(base.ravel(), expert.ravel(), found),
        np.abs(expert - base).ravel() * np.repeat(found, row),
    )


@pytest.mark.parametrize(("value", "finite"), [(np.nan, False), (np.inf, False), (-np.inf, True)])
def test_rows_that_are_not_finite(value: float, finite: bool) -> None:
    """A NaN and infinity leave a row without a divergence, in either model; a share of 0 does not;
    other rows keep theirs."""
    for side in range(2):
        rows = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
        sides = [rows, rows + np.float32(0.5) * rows**2]
        clean = divergences(sides[0].ravel(), sides[1].ravel(), 4)
        sides[side] = sides[side].copy()
        sides[side][1, 2] = value
        found = divergences(sides[0].ravel(), sides[1].ravel(), 4)
        assert np.isfinite(found[1]) == finite
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_a_budget_keeps_the_threshold_and_its_bound(place: Place, tmp_path: Path) -> None:
    """Under a budget the threshold is that of the whole expert, measured once, and the bound holds;
    without analysis it is refused."""
    store = place.store
    store.merge(store.plan(ASKED), name="full")
    full = store._catalog.record(Plan, store.plan(ASKED).plan)
    plan = store.plan(dataclasses.replace(ASKED, budget="50%", analyze=False))
    assert plan.analyze_bytes_read == 0
    part = store._catalog.record(Plan, plan.plan)
    assert [one.thresholds for one in part.tensors] == [one.thresholds for one in full.tensors]
    done = store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes
    for tensor in part.tensors:
        n = place.family.base[tensor.name].size
        absent = [
            np.repeat(np.frombuffer(states, np.uint8) > 1, tensor.chunk_elements)[:n]
            for states in tensor.states
        ]
        exact = wanted(place, tensor.name, absent=absent)
        found = np.asarray(store["part"].tensor(tensor.name))
        assert np.array_equal(found.view(np.uint32), exact.view(np.uint32)), tensor.name
    parts = ({name: store[ref].tensor(name) for name in SHAPES} for ref in ("part", "full"))
    error = place.relative_error(*parts)
    assert plan.error_bound is not None
    assert plan.error_estimate is not None
    assert 0 < error <= plan.error_bound
    assert 0.5 * error < plan.error_estimate < 2 * error
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as other:
        for name in ("base", "e0"):
            other.add(place.root / name, name=name, base=None if name == "base" else "base")
        with pytest.raises(BadRequest, match="not all are known"):
            other.plan(dataclasses.replace(ASKED, analyze=False))


def test_an_expert_that_moves_little_is_taken_whole(place: Place, tmp_path: Path) -> None:
    """Where more than three quarters of the elements stay, all quartiles are 0, and what moves is
    taken; so is a tensor of which no row has a divergence."""
    base = {"w": np.zeros((8, 512), np.float32), "x": np.zeros((300, 1), np.float32)}
    moved = {name: value.copy() for name, value in base.items()}
    moved["w"][:, :64] = np.linspace(0, 1, 64, dtype=np.float32)
    moved["x"] += np.float32(2)
    for name, tensors in (("base", base), ("moved", moved)):
        families.write_checkpoint(tmp_path / name, tensors)
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "moved"):
            store.add(tmp_path / name, name=name)
        store.merge(store.plan(dataclasses.replace(ASKED, experts=["moved"])), name="merged")
        for name, value in moved.items():
            assert np.array_equal(store["merged"].tensor(name), value)


def test_steps_of_one_size_are_unimportant(tmp_path: Path) -> None:
    """Where a third stays and the others move alike none stands out: nothing is taken or read, and
    the merge is refused as the base itself."""
    base = {"w": np.zeros((8, 513), np.float32)}
    moved = {"w": np.tile(np.array([0.5, -0.5, 0], np.float32), (8, 171))}
    for name, tensors in (("base", base), ("moved", moved)):
        families.write_checkpoint(tmp_path / name, tensors)
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "moved"):
            store.add(tmp_path / name, name=name)
        asked = dataclasses.replace(ASKED, experts=["moved"])
        with pytest.raises(BadRequest, match="no element of the expert is important enough"):
            store.plan(asked)
        plan = store.plan(asked, allow_noop=True)
        assert plan.full_expert_bytes == 0
        store.merge(plan, name="merged")
        assert np.array_equal(store["merged"].tensor("w"), base["w"])


def test_what_it_does_not_take(place: Place) -> None:
    """It takes one expert, without a weight and without parameters, and finite tensors."""
    for given, weights, says in (
        ({}, [1.0, 1.0], "one expert"),
        ({}, [0.5], "no weight"),
        ({"density": 0.5}, [1.0], "no parameter"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation("arcee_fusion", given, weights)
    sick = {name: value.copy() for name, value in place.family.experts[0].items()}
    sick["b"][3, 3] = np.inf
    families.write_checkpoint(place.root / "sick", sick)
    place.store.add(place.root / "sick", name="sick", base="base")
    with pytest.raises(BadRequest, match="infinite or NaN") as refused:
        place.store.plan(dataclasses.replace(ASKED, experts=["sick"]))
    assert refused.value.where == "b"


def test_a_recipe_of_mergekit(place: Place) -> None:
    """mergekit's recipe gives the same plan."""
    text = "merge_method: arcee_fusion\nbase_model: base\nmodels:\n- model: base\n- model: e0\n"
    found = place.store.read_recipe(text)
    plain = dataclasses.replace(ASKED, dtype=None)
    assert place.store.plan(found.request).plan == place.store.plan(plain).plan
    assert not found.remarks
