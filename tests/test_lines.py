"""lines: task arithmetic with factors that grow with the depth of layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import Arrays, Family

from mstore import MergeRequest, Store
from mstore.api.reports import PlanReport
from mstore.store.objects.plan import READ, Plan
from mstore.terms.errors import BadRequest

GIVEN = {"alpha": 0.3, "beta": 0.9}
WEIGHTS = (1.0, 0.5, -0.75)
SHAPE = (60, 1024)
ENCODER, DECODER = 3, 5


def layered(rng: np.random.Generator, stacks: dict[str, int], dtypes: tuple[str, ...]) -> Family:
    """A base and experts with so many layers in each stack, and tensors outside of them."""
    names = ["embed.weight", "norm.weight", "lm_head.weight"]
    names += [f"{stack}.{n}.w.weight" for stack, count in stacks.items() for n in range(count)]
    base = {name: rng.standard_normal(SHAPE).astype(np.float32) for name in names}
    experts = [
        {
            name: families.cast(one + rng.standard_normal(SHAPE) / 16, dtype)
            for name, one in base.items()
        }
        for dtype in dtypes
    ]
    return Family({name: families.cast(one, "BF16") for name, one in base.items()}, tuple(experts))


@dataclass
class Place:
    """A family of two stacks, and of one with a single layer, and its store."""

    family: Family
    store: Store

    def plan(self, **options: Any) -> PlanReport:
        asked = {"experts": list(zip(self.family.names, WEIGHTS, strict=True))} | options
        parameters = asked.pop("parameters", GIVEN)
        return self.store.plan(
            MergeRequest(base="base", method="lines", parameters=parameters, **asked)
        )

    def record(self, plan: PlanReport) -> Plan:
        return self.store._catalog.record(Plan, plan.plan)

    def tensors(self, ref: str) -> Arrays:
        found = self.store[ref]
        return {name: found.tensor(name) for name in self.family.base}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("lines")
    stacks = {"encoder.layers": ENCODER, "decoder.layers": DECODER, "adapter.layers": 1}
    family = layered(np.random.default_rng(3), stacks, ("BF16", "F32", "F16"))
    family.write(root)
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        yield Place(family, store)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [None, "F32"])
def test_layers_are_scaled_by_depth(dtype: str | None, place: Place) -> None:
    """Each stack of layers is scaled over as many as it has, an only layer as the last one, and
    what is in no layer by alpha: bit for bit the reference, stored, on read, and run again."""
    plan = place.plan(dtype=dtype)
    wanted = families.expected(place.family, "lines", GIVEN, WEIGHTS, dtype=dtype)
    place.store.merge(plan, name="merged")
    assert families.differences(place.tensors("merged"), wanted) == []
    place.store.merge(plan, name="virtual", virtual=True)
    assert families.differences(place.tensors("virtual"), wanted) == []
    assert place.store.replay("merged").same


def test_without_a_slope_it_is_task_arithmetic(place: Place) -> None:
    """With beta 0 each tensor is what task_arithmetic makes with lambda in place of alpha."""
    place.store.merge(place.plan(parameters={"alpha": 1.0, "beta": 0.0}), name="flat")
    experts = list(zip(place.family.names, WEIGHTS, strict=True))
    asked = MergeRequest(base="base", experts=experts, method="task_arithmetic")
    place.store.merge(place.store.plan(asked), name="sum")
    assert families.differences(place.tensors("flat"), place.tensors("sum")) == []


def test_a_factor_of_zero_reads_nothing(place: Place) -> None:
    """With alpha 0, first layers and what is in no layer are the base's, and no expert is read for
    them; blame names nobody there."""
    plan = place.plan(parameters={"alpha": 0.0, "beta": 1.0})
    still = {
        name for name in place.family.base if ".layers." not in name or ".layers.0." in name
    } - {"adapter.layers.0.w.weight"}
    found = place.record(plan)
    read = {one.name for one in found.tensors if any(READ in states for states in one.states)}
    assert read == place.family.base.keys() - still
    place.store.merge(plan, name="deep")
    merged = place.tensors("deep")
    assert (
        families.differences(
            {name: merged[name] for name in still},
            {name: place.family.base[name] for name in still},
        )
        == []
    )


@pytest.mark.parametrize("budget", ["30%", "70%"])
def test_a_budget_has_a_bound_that_holds(budget: str, place: Place) -> None:
    """The error of leaving blocks out is below a bound that counts each layer's own factor, and
    what is left out is what matters least: deltas of equal size are left out of first layers."""
    full, some = place.plan(dtype="F32"), place.plan(dtype="F32", budget=budget)
    place.store.merge(full, name="full")
    place.store.merge(some, name="some")
    names = list(place.family.base)
    gap = families.distance(place.tensors("full"), place.tensors("some"), names)
    zeros = {name: np.zeros(()) for name in names}
    norm = families.distance(place.family.base, zeros, names)
    assert some.error_bound is not None
    assert 0 < gap / norm <= some.error_bound
    found = place.record(some)
    share = {
        one.name: sum(states.count(READ) for states in one.states) / sum(map(len, one.states))
        for one in found.tensors
    }
    assert share["decoder.layers.4.w.weight"] > share["decoder.layers.0.w.weight"]


def test_models_and_configs_are_told_apart(tmp_path: Path) -> None:
    """Each model of a pipeline has its own depth, and layers beyond those that its config counts
    are in none."""
    rng = np.random.default_rng(4)
    stacks = {"transformer": 3, "transformer_2": 5}
    parts = {model: layered(rng, {"blocks": n}, ("BF16",)) for model, n in stacks.items()}
    index = {"_class_name": "Pipe"} | {model: ["diffusers", "Any"] for model in stacks}
    for side in ("base", "expert"):
        for model, family in parts.items():
            arrays = family.base if side == "base" else family.experts[0]
            tensors = families.tensors_of(arrays)
            families.write_safetensors(
                tmp_path / side / model / "diffusion_pytorch_model.safetensors", tensors
            )
            config = {"num_layers": 4} if model == "transformer_2" else {}
            (tmp_path / side / model / "config.json").write_text(json.dumps(config))
        (tmp_path / side / "model_index.json").write_text(json.dumps(index))
    counted = parts["transformer_2"]
    last = "blocks.4.w.weight"
    inside = replace(counted, base={n: one for n, one in counted.base.items() if n != last})
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for side in ("base", "expert"):
            store.add(tmp_path / side, name=side)
        asked = MergeRequest(base="base", experts=["expert"], method="lines", parameters=GIVEN)
        store.merge(store.plan(asked), name="merged")
        found = store["merged"]
        wanted = families.expected(parts["transformer"], "lines", GIVEN, (1.0,))
        own = {name: found.tensor(f"transformer:{name}") for name in wanted}
        assert families.differences(own, wanted) == []
        wanted = families.expected(inside, "lines", GIVEN, (1.0,))
        own = {name: found.tensor(f"transformer_2:{name}") for name in wanted}
        assert families.differences(own, wanted) == []
        loose = replace(counted, base={last: counted.base[last]})
        given = {"alpha": GIVEN["alpha"], "beta": 0.0}
        wanted = families.expected(loose, "lines", given, (1.0,))
        assert families.differences({last: found.tensor(f"transformer_2:{last}")}, wanted) == []


def test_factors_beyond_float32_are_refused(place: Place) -> None:
    """A layer whose factor is no finite float32 is refused, and alpha and beta must be given."""
    with pytest.raises(BadRequest, match="finite float32"):
        place.plan(parameters={"alpha": 3e38, "beta": 3e38})
    with pytest.raises(BadRequest, match="needs a value for beta"):
        place.plan(parameters={"alpha": 1.0})
