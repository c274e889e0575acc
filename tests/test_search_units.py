"""`search.units`: the merge of some experts, or of some of their layers, alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import families
import pytest

from mstore import MergeRequest, Store
from mstore.search.units import Unit, plan_of_units, units_of
from mstore.store.objects.plan import Plan
from mstore.store.objects.shapes import layers_of
from mstore.store.plans import sources_of, store_plan
from mstore.terms.errors import BadRequest

METHODS: dict[str, dict[str, object]] = {
    "linear": {},
    "task_arithmetic": {"scale": 0.5},
    "ties": {"density": 0.4},
    "dare_ties": {"density": 0.5, "seed": 3},
    "della": {"density": 0.5, "epsilon": 0.1, "seed": 3},
}


@pytest.fixture(scope="module")
def family() -> families.Family:
    return families.layered(rows=100)


@pytest.fixture
def store(family: families.Family, tmp_path: Path) -> Iterator[Store]:
    family.write(tmp_path)
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as made:
        made.add(tmp_path / "base", name="base")
        for name in family.names:
            made.add(tmp_path / name, name=name, base="base")
        yield made


def planned(store: Store, family: families.Family, method: str, names: list[str]) -> Plan:
    request = MergeRequest(
        base="base",
        experts=[(name, 0.3 + 0.2 * number) for number, name in enumerate(names)],
        method=method,
        parameters=METHODS[method],
    )
    id = store.plan(request, allow_noop=True).plan
    return store._catalog.record(Plan, id)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_out_is_the_base(
    method: str, seed: int, store: Store, family: families.Family, tmp_path: Path
) -> None:
    """A merge of some units is the merge of experts that are the base everywhere else."""
    plan = planned(store, family, method, family.names)
    units = units_of(plan, experts=True, layers=True)
    chosen = random.Random(seed).sample(units, len(units) // 2)
    layer_of = layers_of(family.base)
    masked = replace(
        family,
        experts=tuple(
            {
                name: array if Unit(k, layer_of[name]) in chosen else family.base[name]
                for name, array in own.items()
            }
            for k, own in enumerate(family.experts)
        ),
    )
    masked.write(tmp_path / "masked")
    for name in family.names:
        store.add(tmp_path / "masked" / name, name=f"masked-{name}", base="base")
    whole = planned(store, family, method, [f"masked-{name}" for name in family.names])
    store.merge(whole.id(), name="wanted", allow_noop=True)
    part = plan_of_units(store._catalog, plan, chosen)
    id = store_plan(store._catalog, part, sources_of(store._catalog, plan.id(), plan))
    report = store.merge(id, name="found", allow_noop=True, memo=False)
    wanted, found = store["wanted"].load(), store["found"].load()
    assert families.differences(found, wanted) == []
    assert report.expert_bytes_read == part.planned_expert_bytes
    assert part.planned_expert_bytes < plan.planned_expert_bytes


def test_all_units_are_the_merge_and_none_the_base(store: Store, family: families.Family) -> None:
    """With all units, the plan has the states of the whole; with none, nothing is read."""
    plan = planned(store, family, "ties", family.names)
    for experts, layers in ((True, False), (False, True), (True, True)):
        units = units_of(plan, experts=experts, layers=layers)
        every = plan_of_units(store._catalog, plan, units)
        assert [one.states for one in every.tensors] == [one.states for one in plan.tensors]
    assert plan_of_units(store._catalog, plan, []).planned_expert_bytes == 0


def test_units_are_those_that_change_something(tmp_path: Path) -> None:
    """An expert that is the base in a layer has no unit there, and layers are in their order."""
    family = families.layered(expert_dtypes=("BF16", "BF16"), rows=100)
    layer_of = layers_of(family.base)
    layers = list(dict.fromkeys(layer_of.values()))
    still = {
        name: family.base[name] if layer_of[name] == layers[1] else array
        for name, array in family.experts[1].items()
    }
    replace(family, experts=(family.experts[0], still)).write(tmp_path)
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        store.add(tmp_path / "base", name="base")
        for name in family.names:
            store.add(tmp_path / name, name=name, base="base")
        plan = planned(store, family, "linear", family.names)
        units = units_of(plan, experts=True, layers=True)
        assert Unit(1, layers[1]) not in units
        order = list(dict.fromkeys(layers_of(one.name for one in plan.tensors).values()))
        mine = [one.layer for one in units if one.expert == 0]
        assert mine == [one for one in order if one in mine]
        assert units_of(plan, experts=True, layers=False) == [Unit(0, None), Unit(1, None)]
        same = planned(store, family, "linear", ["base"])
        with pytest.raises(BadRequest, match="takes nothing"):
            units_of(same, experts=True, layers=False)
