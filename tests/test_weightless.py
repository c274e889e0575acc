"""Experts without weight cost nothing, and give nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import numpy as np
import pytest
from families import Family
from test_budget import METHODS, Place, make

from mstore import MergeRequest
from mstore.merge.methods import registry

METHOD_NAMES = [
    name
    for name in METHODS
    if registry.METHODS[name].weighted and registry.METHODS[name].experts is None
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Statistics are not there; the second expert has a NaN and an infinity."""
    rng = np.random.default_rng(5)
    base = {"w": families.cast(rng.standard_normal((160, 1024)), "BF16")}
    moved = [base["w"].astype(np.float32) + rng.standard_normal((160, 1024)) for _ in range(2)]
    moved[1][0, :2] = np.nan, np.inf
    experts = tuple({"w": families.cast(one, "BF16")} for one in moved)
    made = make(
        tmp_path_factory.mktemp("family"), Family(base, experts).informed(), with_base=False
    )
    with made.store:
        yield made


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_weight_0_is_free(method: str, place: Place) -> None:
    """Nothing of such an expert is read, for statistics neither; the merge is that of the others,
    but for what the method divides by.
    """
    parameters: dict[str, Any] = dict(METHODS[method][0])
    if method == "consensus":
        # Who has no weight needs nothing.
        parameters["k"] = 1
    asked = {"base": "base", "method": method, "parameters": parameters}
    fishers = ["f0", "f1"] if method == "fisher" else []
    one, two = (families.fishers_for(names, fishers) for names in (["e0"], ["e0", "e1"]))
    alone = place.store.plan(MergeRequest(**asked, experts=["e0"], companions=one))
    both = place.store.plan(MergeRequest(**asked, experts=["e0", ("e1", 0.0)], companions=two))
    assert both.analyze_bytes_read == 0
    assert both.full_expert_bytes == both.planned_expert_bytes == alone.full_expert_bytes
    assert both.error_share_estimate == 0.0
    one, merged = (place.merge(plan)[1]["w"] for plan in (alone, both))
    assert np.array_equal(families.bits(one), families.bits(merged))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_lambda_0_is_free(method: str, place: Place) -> None:
    """Nothing is read, and in another dtype the result is the base's, converted."""
    parameters = dict(METHODS[method][0]) | {"lambda": 0.0}
    asked = {"base": "base", "method": method, "parameters": parameters}
    plan = place.store.plan(MergeRequest(**asked, experts=["e0", "e1"], dtype="F32"))
    assert (plan.full_expert_bytes, plan.analyze_bytes_read) == (0, 0)
    merged = place.merge(plan)[1]["w"]
    assert np.array_equal(merged, place.family.base["w"].astype(np.float32))
