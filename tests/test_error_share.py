"""Errors as a share of what the full merge changes: what people can judge."""

from __future__ import annotations

from collections.abc import Iterator

import families
import pytest
from test_budget import METHODS, Place, make
from test_sweep import asked

from mstore import MergeRequest, Store
from mstore.merge.methods import registry

TOLD = [
    name
    for name in METHODS
    if registry.METHODS[name].combine.by_norms
    and not registry.METHODS[name].combine.stacks
    # How many experts need an element is not known before they are read.
    and registry.METHODS[name].select.sized_by_norms
]
"""Methods of which a plan says how much the whole merge changes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = make(tmp_path_factory.mktemp("family"), families.layered(rows=100).informed())
    with made.store:
        yield made


@pytest.mark.sampled(13)
@pytest.mark.parametrize("method", TOLD)
def test_all_and_nothing(method: str, place: Place) -> None:
    """Merging nothing loses all of the change, merging all loses none, however small the change is
    beside the base; merges, stored plans and a plan that was made before tell the same.
    """
    nothing = place.plan(method, budget=1)
    assert nothing.error_share_estimate == pytest.approx(1.0)
    assert (nothing.error_estimate or 0) < 0.5
    half = place.plan(method, budget=0.5)
    assert 0 < (half.error_share_estimate or 0) < 1
    assert place.plan(method).error_share_estimate == 0.0
    assert place.plan(method, budget=0.5).error_share_estimate == half.error_share_estimate
    assert place.merge(half)[0].error_share_estimate == half.error_share_estimate
    listed = {plan.plan: plan.error_share_estimate for plan in place.store.plans()}
    assert listed[half.plan] == half.error_share_estimate
    shown = place.store.explain("merged").plan
    assert shown is not None
    assert shown.error_share_estimate == half.error_share_estimate


@pytest.mark.sampled(13)
@pytest.mark.parametrize("method", TOLD)
def test_measured(method: str, place: Place) -> None:
    """The measured share is ||merged - full|| / ||full - base||, of the merges themselves."""
    points = place.store.sweep(
        MergeRequest(**asked(place, method)), shares=(0.35, 1.0), measure=True
    ).points
    _, full = place.merge(place.plan(method, dtype="F32"))
    base = {name: place.family.base[name] for name in place.mergeable}
    for point in points:
        _, merged = place.merge(place.plan(method, budget=point.share, dtype="F32"))
        gap = families.distance(merged, full, place.mergeable)
        change = families.distance(full, base, place.mergeable)
        assert point.measured_error_share == pytest.approx(gap / change, rel=1e-6)
        plan = place.plan(method, budget=point.share)
        assert point.error_share_estimate == plan.error_share_estimate
    assert points[-1].measured_error_share == points[-1].error_share_estimate == 0.0


def test_where_it_is_not_known(place: Place) -> None:
    """No share where the base is scaled, where nothing changes, or where a plan came from
    elsewhere; and no division by zero.
    """
    given = {"base": "base", "experts": place.family.names, "method": "linear", "budget": 0.5}
    scaled = place.store.plan(MergeRequest(**given, parameters={"normalize": False}))
    assert scaled.error_share_estimate is None
    same = {"base": "base", "experts": ["base"], "method": "linear"}
    assert place.store.plan(MergeRequest(**same), allow_noop=True).error_share_estimate == 0.0
    [point] = place.store.sweep(MergeRequest(**same), shares=[0.5], measure=True).points
    assert point.measured_error_share == 0.0
    half = place.store.plan(MergeRequest(**given))
    with Store.init(place.root / "other", block_size=1 << 16, codec="raw") as other:
        for name in ("base", *place.family.names):
            other.add(place.root / name, name=name)
        assert other.import_plan(place.store.export_plan(str(half.plan))).plan == half.plan
        [told] = other.plans()
    assert (told.error_bound, told.error_share_estimate) == (half.error_bound, None)
