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
from mstore.api.reports import PlanReport
from mstore.merge.measures import deltas
from mstore.merge.methods import pcb
from mstore.store.objects.plan import READ, SHARED, Plan
from mstore.terms.errors import BadRequest

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


@pytest.mark.parametrize(
    ("ratio", "dtype", "kept"), [(0.1, None, 1 << 25), (0.4, "F32", 0), (1.0, "F32", 1 << 25)]
)
def test_it_is_the_definition(
    ratio: float, dtype: str | None, kept: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the reference, stored, on read, and run again, whether scores are kept or not;
    facts are measured once."""
    monkeypatch.setattr(deltas, "_MOST_KEPT", kept)
    plan = place.plan(parameters={"ratio": ratio}, dtype=dtype)
    wanted = families.expected(place.family, "pcb", {"ratio": ratio}, WEIGHTS, dtype=dtype)
    place.store.merge(plan, name="merged")
    assert families.differences(place.tensors("merged"), wanted) == []
    place.store.merge(plan, name="virtual", virtual=True)
    assert families.differences(place.tensors("virtual"), wanted) == []
    assert place.store.replay("merged").same
    assert place.plan(parameters={"ratio": ratio}, dtype=dtype).analyze_bytes_read == 0


def test_weight_0_does_not_compete(place: Place) -> None:
    """The merge is that of the others, stored, on read and in the shares of blame."""
    names = place.family.names
    weighed = [(names[0], 1.0), (names[1], 0.0), (names[2], -0.75)]
    others = dataclasses.replace(place.family, experts=place.family.experts[::2])
    wanted = families.expected(others, "pcb", {}, (1.0, -0.75))
    plan = place.plan(experts=weighed)
    place.store.merge(plan, name="merged")
    assert families.differences(place.tensors("merged"), wanted) == []
    place.store.merge(plan, name="virtual", virtual=True)
    assert families.differences(place.tensors("virtual"), wanted) == []
    shares = {one.expert: one.share for one in place.store.blame("merged").experts}
    assert shares[names[1]] == 0.0
    assert shares[names[0]] > 0.0


def test_a_merge_of_fewer_does_not_answer_for_more(tmp_path: Path) -> None:
    """An expert that moves nothing competes, too, though only the others are read and have the same
    limits as without it: results are not mixed up."""
    rng = np.random.default_rng(3)
    base = {"w": np.zeros((64, 512), dtype=np.float32)}
    moved = []
    for _ in range(2):
        one = np.abs(rng.standard_normal((64, 512))).astype(np.float32)
        # The least score is 0, and the largest that of the largest delta.
        one[0, 0], one[0, 1] = 0.0, 20.0
        moved.append({"w": one})
    family = Family(base, (*moved, base))
    family.write(tmp_path)
    asked: dict[str, Any] = {"base": "base", "method": "pcb", "parameters": {"ratio": 1.0}}
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", *family.names):
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        plans = [
            store.plan(MergeRequest(**asked, experts=family.names[:count])) for count in (2, 3)
        ]
        records = [store._catalog.record(Plan, plan.plan).tensors[0] for plan in plans]
        few, many = (np.array([one.value for one in record.thresholds]) for record in records)
        assert few.reshape(3, 2).tolist() == many.reshape(3, 3)[:, :2].tolist()
        for plan, count in zip(plans, (2, 3), strict=True):
            store.merge(plan, name="merged")
            own = dataclasses.replace(family, experts=family.experts[:count])
            wanted = families.expected(own, "pcb", {"ratio": 1.0}, (1.0,) * count)
            found = {"w": store["merged"].tensor("w")}
            assert families.differences(found, wanted) == []


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


@pytest.mark.parametrize("count", [1, 3, 40])
def test_scores_are_rounded_once(count: int) -> None:
    """exp and tanh are so exact that a score is within half a unit of float32, and 2^-44."""
    rng = np.random.default_rng(count)
    sizes = np.exp2(rng.uniform(-40, 6, (count, 20_000))) * rng.choice([-1, 1], (count, 20_000))
    sizes[:, :64], sizes[0, 64:128] = 0.0, -0.0
    sizes[0, 128] = 64.0
    deltas = [one.astype(np.float32) for one in sizes]
    largest = [float(np.abs(one).max()) for one in deltas]
    found = pcb.singles_of(pcb.scores(deltas, largest))
    wide = [one.astype(np.longdouble) for one in deltas]
    total = np.sum([one.astype(np.float64) for one in deltas], axis=0).astype(np.longdouble)
    for own, d, most in zip(found, wide, largest, strict=True):
        wanted = np.exp(count * ((d / most) ** 2 - 1)) * np.tanh(d * total)
        gap = np.abs(own - wanted)
        assert (gap <= 2.0**-24 * (1 + 2.0**-20) * np.abs(wanted) + 2.0**-150).all()
    assert not np.signbit(found[found == 0]).any()


def test_scores_order_as_their_numbers() -> None:
    """Numbers that stand for scores order as these do."""
    rng = np.random.default_rng(4)
    deltas = list(rng.standard_normal((3, 3000)).astype(np.float32))
    ordered = pcb.scores(deltas, [float(np.abs(one).max()) for one in deltas])
    for numbers, own in zip(ordered, pcb.singles_of(ordered), strict=True):
        assert (np.diff(own[np.argsort(numbers)]) >= 0).all()
        assert len(set(own.tolist())) == len(set(numbers.tolist()))


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
