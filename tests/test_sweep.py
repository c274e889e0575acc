"""The sweep: what it says of a budget is what that plan says, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
from test_budget import METHODS, Place, make, roles_of

from mstore import MergeRequest
from mstore.terms.errors import BadRequest

SHARES = (0.1, 0.5, 1.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = make(tmp_path_factory.mktemp("family"), families.layered(rows=120).informed())
    with made.store:
        yield made


def asked(place: Place, method: str) -> dict[str, Any]:
    parameters, weights = METHODS[method]
    experts = list(zip(place.family.names, weights, strict=False))
    companions = families.companions_for(roles_of(method), experts)
    models: dict[str, Any] = {"base": "base", "experts": experts, "companions": companions}
    return models | {"method": method, "parameters": parameters}


@pytest.mark.sampled(21)
@pytest.mark.parametrize("method", METHODS)
def test_points_are_plans(method: str, place: Place) -> None:
    """Each point costs and promises to the byte what the plan with that budget does, and the merge
    reads it; the measured error is that of the merge, and within the bound.
    """
    request = asked(place, method)
    stored = place.store.plans()
    swept = place.store.sweep(MergeRequest(**request), shares=SHARES, measure=True)
    assert place.store.plans() == stored
    assert [point.share for point in swept.points] == list(SHARES)
    _, full = place.merge(place.plan(method, dtype="F32"))
    for point in swept.points:
        plan = place.plan(method, budget=point.share)
        assert point.budget_bytes == plan.budget_bytes
        assert point.planned_expert_bytes == plan.planned_expert_bytes
        assert (point.error_bound, point.error_estimate) == (plan.error_bound, plan.error_estimate)
        report, merged = place.merge(place.plan(method, budget=point.share, dtype="F32"))
        assert report.planned_expert_bytes == point.planned_expert_bytes
        saved = report.memo_expert_bytes
        assert report.expert_bytes_read == point.planned_expert_bytes - saved
        assert point.measured_error == pytest.approx(place.relative_error(merged, full), rel=1e-6)
        if point.error_bound is not None:
            assert point.measured_error <= point.error_bound
    assert swept.measure_bytes_read == swept.full_expert_bytes
    assert swept.points[-1].measured_error == 0.0
    assert swept.points[0].measured_error > 0.0


@pytest.mark.parametrize("threads", [1, 3])
def test_measuring_does_not_depend_on_threads(threads: int, place: Place) -> None:
    """Measured errors are the same bits for any number of threads."""
    request, points = MergeRequest(**asked(place, "ties")), {"shares": (0.3, 0.7), "measure": True}
    found = place.store.sweep(request, **points, threads=threads).points
    assert found == place.store.sweep(request, **points, threads=2).points


def test_what_is_to_read_now(place: Place) -> None:
    """After a merge, what it made is not to be read again; the plan's own cost stays as it is."""
    request = asked(place, "task_arithmetic")
    plan = place.plan("task_arithmetic", budget=0.5)
    place.store.merge(plan, name="half")
    (point,) = place.store.sweep(MergeRequest(**request), shares=[0.5]).points
    assert point.planned_expert_bytes == plan.planned_expert_bytes > 0
    assert point.unread_expert_bytes == 0
    again = place.plan("task_arithmetic", budget=0.5)
    assert again.memo_expert_bytes == again.planned_expert_bytes


def test_a_sweep_keeps_to_its_criteria(place: Place) -> None:
    """Scores, patterns, caps and top-p hold for every point; what top-p drops is an error too."""
    criteria = {
        "skip": ["model.shared.weight"],
        "expert_budget": 0.4,
        "top_p": 0.5,
        "score": "random",
    }
    swept = place.store.sweep(
        MergeRequest(**asked(place, "linear"), **criteria), shares=SHARES, measure=True
    )
    for point in swept.points:
        plan = place.plan("linear", budget=point.share, **criteria)
        assert point.planned_expert_bytes == plan.planned_expert_bytes
        assert point.error_bound == plan.error_bound
        assert 0 < (point.measured_error or 0) <= (point.error_bound or 0)
    assert swept.score == "random"


@pytest.mark.parametrize("shares", [[], [0.0], [1.5], [float("nan")]])
def test_senseless_shares(shares: list[float], place: Place) -> None:
    """Shares are above 0 and at most 1."""
    with pytest.raises(BadRequest, match="shares"):
        place.store.sweep(MergeRequest(**asked(place, "linear")), shares=shares)
