"""guarded: tensors of an expert, and those of a reference where the expert left its direction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_mixtures import BLOCK, Family, N

from mstore import MergeRequest, Store
from mstore.merge.methods.registry import operation
from mstore.store.models import tensors_of
from mstore.store.objects.plan import OMITTED, READ, Plan
from mstore.terms.errors import BadRequest

COSINES = {"along": 0.95, "across": 0.3, "against": -0.6}
"""Of the expert's delta and the reference's, by tensor; roughly."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """An expert that moves along the reference's direction, across it and against it; one tensor
    that only the expert moves, and one that only the reference moves."""
    root = tmp_path_factory.mktemp("guarded")
    rng = np.random.default_rng(9)
    names = (*COSINES, "lone", "left")
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        made = Family(root, store, {})
        base = {name: rng.standard_normal(N).astype("f4") for name in names}
        reference, tuned = dict(base), dict(base)
        for name, cosine in COSINES.items():
            direction, other = 0.02 * rng.standard_normal((2, N))
            reference[name] = (base[name] + direction).astype("f4")
            moved = cosine * direction + math.sqrt(1 - cosine**2) * other
            tuned[name] = (base[name] + moved).astype("f4")
        tuned["lone"] = (base["lone"] + 0.01 * rng.standard_normal(N)).astype("f4")
        reference["left"] = (base["left"] + 0.01 * rng.standard_normal(N)).astype("f4")
        for name, tensors in (("base", base), ("reference", reference), ("tuned", tuned)):
            made.add(name, tensors)
        yield made


def asked(threshold: float, alpha: float = 0.0, **options: Any) -> MergeRequest:
    given = {"threshold": threshold, "alpha": alpha}
    experts = ["tuned", "reference"]
    return MergeRequest(base="base", experts=experts, method="guarded", parameters=given, **options)


def cosine(family: Family, name: str) -> float:
    """The cosine of both deltas, from the vectors themselves."""
    one, other = family.vectors(["tuned", "reference"], name, whole=False)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("threshold", [-1.0, -0.3, 0.5, 0.99])
def test_each_tensor_is_one_of_two(family: Family, threshold: float) -> None:
    """A tensor is the expert's own, bit for bit, if its delta points along the reference's, else
    the reference's; without a direction it is the expert's, and one that the expert left
    alone is the reference's.  Virtual and replayed, too."""
    plan = family.store.plan(asked(threshold))
    family.store.merge(plan, name="merged")
    assert family.store.replay("merged").same
    family.store.merge(plan, name="virtual", virtual=True)
    for name, base in family.members["base"].items():
        stays = name == "lone" or (
            threshold <= 0.0 if name == "left" else cosine(family, name) >= threshold
        )
        wanted = family.members["tuned" if stays else "reference"][name]
        for ref in ("merged", "virtual"):
            found = family.store[ref].tensor(name)
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), name
        assert not np.array_equal(base, wanted) or name == "left"
        ids = [
            tensors_of(
                family.store._catalog, family.store._catalog.manifest(family.store[ref].manifest)
            )[name]
            for ref in ("merged", "tuned" if stays else "reference")
        ]
        assert ids[0] == ids[1], name
    # The other one is not read.
    size = family.members["base"]["left"].nbytes
    assert plan.full_expert_bytes == (5 if threshold > 0 else 4) * size


@pytest.mark.parametrize("gap", [-1e-4, 1e-4])
@pytest.mark.parametrize("name", COSINES)
def test_the_threshold_is_the_cosine(family: Family, name: str, gap: float) -> None:
    """The choice changes where the threshold passes the cosine of the float32 deltas."""
    plan = family.store.plan(asked(cosine(family, name) + gap))
    [mixture] = [
        one.mixture
        for one in family.store._catalog.record(Plan, plan.plan).tensors
        if one.name == name
    ]
    assert mixture is not None
    assert mixture.experts == ((1.0, 0.0) if gap < 0 else (0.0, 1.0))


def test_alpha_mixes_what_left_the_direction(family: Family) -> None:
    """With alpha, what is below the threshold is that share of the expert and the rest of the
    reference."""
    family.store.merge(family.store.plan(asked(0.5, 0.25)), name="mixed")
    for name in COSINES:
        tuned, reference = (
            family.members[one][name].astype(np.float64) for one in ("tuned", "reference")
        )
        wanted = tuned if name == "along" else 0.25 * tuned + 0.75 * reference
        found = family.store["mixed"].tensor(name)
        assert (
            float((np.abs(found - wanted) / (np.abs(tuned) + np.abs(reference))).max()) <= 2.0**-22
        )


def test_a_budget_keeps_the_choice_and_its_bound(family: Family) -> None:
    """Under a budget each tensor has the choice of the whole models, what is left out is the
    base's, and the bound holds; the direction is measured once."""
    full = family.store.plan(asked(0.5))
    family.store.merge(full, name="full")
    chosen = [one.mixture for one in family.store._catalog.record(Plan, full.plan).tensors]
    for budget in ("80%", "30%"):
        plan = family.store.plan(asked(0.5, budget=budget, analyze=False))
        record = family.store._catalog.record(Plan, plan.plan)
        assert [one.mixture for one in record.tensors] == chosen
        assert any({OMITTED, READ} <= set(b"".join(one.states)) for one in record.tensors)
        done = family.store.merge(plan, name="part", memo=False)
        assert done.expert_bytes_read == plan.planned_expert_bytes
        assert plan.error_bound is not None
        assert 0 < family.error("part", "full") <= plan.error_bound


def test_a_plan_tells_who_has_a_part(family: Family) -> None:
    """A plan names the tensors that the other model has, warns if the reference is the base, and
    says under a budget that what is left out is not the reference's."""
    remarks = [str(one) for one in family.store.plan(asked(0.5)).remarks]
    assert "tuned has no part in 3 of 5 tensors: across, against, left" in remarks
    assert "reference has no part in 2 of 5 tensors: along, lone" in remarks
    assert not any("left out" in one for one in remarks)
    part = family.store.plan(asked(0.5, budget="50%"))
    assert any("the base's, which is not the reference's" in str(one) for one in part.remarks)
    based = dataclasses.replace(asked(0.5), experts=["tuned", "base"])
    texts = [one.text for one in family.store.plan(based).warnings]
    assert any(text.startswith("base is the base itself") for text in texts)
    twice = dataclasses.replace(asked(0.5), experts=["tuned", "tuned"])
    assert "tuned is given more than once" in [
        one.text for one in family.store.plan(twice).warnings
    ]


def test_what_it_does_not_take(family: Family) -> None:
    """A threshold is needed, the expert and the reference are two, without weights, and a tensor
    that is not finite has no direction."""
    for given, weights, says in (
        ({}, [1.0, 1.0], "needs a value for threshold"),
        ({"threshold": 1.5}, [1.0, 1.0], "threshold must be in"),
        ({"threshold": 0.5, "alpha": -1}, [1.0, 1.0], "alpha must be in"),
        ({"threshold": 0.5}, [1.0], "2 experts"),
        ({"threshold": 0.5}, [1.0, 0.5], "no weight"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation("guarded", given, weights)
    sick = {name: value.copy() for name, value in family.members["tuned"].items()}
    sick["across"][3] = np.nan
    family.add("sick", sick)
    with pytest.raises(BadRequest, match="infinite or NaN") as refused:
        family.store.plan(dataclasses.replace(asked(0.5), experts=["sick", "reference"]))
    assert refused.value.where == "across"
