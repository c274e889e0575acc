"""pcb: experts compete for each element, and the best scores share it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
import reference
from families import Arrays, Family

from mstore import MergeRequest, Store
from mstore.errors import BadRequest
from mstore.merge.arithmetic import competition
from mstore.objects.plan import READ, SHARED, Plan
from mstore.reports import PlanReport

Double = npt.NDArray[np.float64]
WEIGHTS = (1.0, 0.5, -0.75)


def published(deltas: Double, ratio: float) -> Double:
    """The authors' `PCB_merge`, without clipping; deltas: of each expert, each with a zero."""
    count, size = deltas.shape

    def normalized(x: Double) -> Double:
        low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        found: Double = (x - low) / (high - low)
        return found

    intra = np.exp(count * normalized(np.abs(deltas)) ** 2)
    balanced = intra * np.tanh(deltas * deltas.sum(axis=0))
    least = np.sort(balanced, axis=1)[:, int(size * (1 - ratio))][:, None]
    scale = normalized(np.maximum(balanced, least))
    found: Double = (deltas * scale).sum(axis=0) / np.maximum(scale.sum(axis=0), 1e-12)
    return found


@dataclass
class Place:
    """A family and its store."""

    family: Family
    store: Store

    def plan(self, **options: Any) -> PlanReport:
        asked = {"experts": list(zip(self.family.names, WEIGHTS, strict=True))} | options
        return self.store.plan(MergeRequest(base="base", method="pcb", **asked))

    def tensors(self, ref: str) -> Arrays:
        found = self.store[ref]
        return {name: found.tensor(name) for name in self.family.base}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("pcb")
    family = families.layered(11, expert_dtypes=("BF16", "F32", "F16"), rows=70)
    family.write(root)
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        yield Place(family, store)


@pytest.mark.parametrize(("ratio", "dtype"), [(0.1, None), (0.4, "F32"), (1.0, "F32")])
def test_it_is_the_definition(ratio: float, dtype: str | None, place: Place) -> None:
    """Bit for bit the reference, stored, on read, and run again; facts are measured once."""
    plan = place.plan(parameters={"ratio": ratio}, dtype=dtype)
    wanted = families.expected(place.family, "pcb", {"ratio": ratio}, WEIGHTS, dtype=dtype)
    place.store.merge(plan, name="merged")
    assert families.differences(place.tensors("merged"), wanted) == []
    place.store.merge(plan, name="virtual", virtual=True)
    assert families.differences(place.tensors("virtual"), wanted) == []
    assert place.store.replay("merged").same
    assert place.plan(parameters={"ratio": ratio}, dtype=dtype).analyze_bytes_read == 0


def test_a_budget_keeps_the_limits_of_whole_experts(place: Place) -> None:
    """What is read competes by the scores of the whole experts, and the error is estimated."""
    plan = place.plan(budget="50%", dtype="F32")
    assert plan.error_bound is None
    assert plan.error_estimate
    record = place.store._catalog.record(Plan, plan.plan)
    absent = {
        one.name: [
            ~np.repeat(
                np.isin(np.frombuffer(states, dtype=np.uint8), (READ, SHARED)), one.chunk_elements
            )[: place.family.base[one.name].size]
            for states in one.states
        ]
        for one in record.tensors
    }
    wanted = families.expected(place.family, "pcb", {}, WEIGHTS, dtype="F32", absent=absent)
    place.store.merge(plan, name="some")
    assert families.differences(place.tensors("some"), wanted) == []


def test_the_reference_is_what_was_published() -> None:
    """Where each expert leaves some element, and as long as only winners count, the definition is
    the authors' code without clipping, within float32."""
    rng = np.random.default_rng(2)
    base = np.zeros(4000, dtype=np.float32)
    experts = [rng.standard_normal(4000).astype(np.float32) for _ in range(3)]
    for k, one in enumerate(experts):
        one[k] = 0
    wanted = published(np.array(experts, dtype=np.float64), 0.1)
    found = reference.merge("pcb", {}, [1.0, 1.0, 1.0], base, experts)
    assert np.count_nonzero(wanted) > 400
    assert np.abs(found - wanted).max() <= 2.0**-20 * np.abs(wanted).max()


def test_functions_are_within_float64() -> None:
    """exp and tanh are those of the C library but for the last places."""
    x = np.concatenate([[0.0, -0.0], np.logspace(-300, 2.5, 4001), np.linspace(0.05, 0.08, 501)])
    x = np.concatenate([x, -x])
    wanted = np.tanh(x.astype(np.longdouble))
    assert (np.abs(competition._tanh(x) - wanted) <= 2.0**-48 * np.abs(wanted)).all()
    wanted = np.exp(-np.abs(x.astype(np.longdouble)))
    gap = np.abs(competition._exp(-np.abs(x)) - wanted)
    assert (gap <= 2.0**-50 * wanted).all()


def test_what_is_not_finite_is_refused(place: Place, tmp_path: Path) -> None:
    """An infinite element has no score: the tensor is named."""
    sick = {name: one.copy() for name, one in place.family.experts[0].items()}
    sick["model.embed.weight"][0, 0] = np.inf
    families.write_checkpoint(tmp_path / "sick", sick)
    place.store.add(tmp_path / "sick", name="sick")
    asked = MergeRequest(base="base", experts=["sick", "e1"], method="pcb")
    with pytest.raises(BadRequest, match="infinite or NaN elements in sick"):
        place.store.plan(asked)
    place.store.plan(dataclasses.replace(asked, skip=["model.embed.weight"]))
