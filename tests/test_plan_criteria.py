"""Criteria besides the budget, plans that are listed and plans that are found again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK, Family
from test_budget import Place, make

from mstore import MergeRequest
from mstore.merge.planning.warnings import NOT_FINITE
from mstore.store.models import tensors_of
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED, Plan
from mstore.terms.errors import BadRequest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = make(tmp_path_factory.mktemp("family"), families.layered(rows=120))
    with made.store:
        yield made


def record(place: Place, report: Any) -> Plan:
    return place.store._catalog.record(Plan, report.plan)


# -- patterns ------------------------------------------------------------------------------------


def test_only_and_skip(place: Place) -> None:
    """What patterns leave out is the base's own, is said to be, and is not read; the rest is merged
    as ever.
    """
    whole, full = place.merge(place.plan("ties"))
    names = [tensor.name for tensor in record(place, place.plan("ties")).tensors]
    chosen, skipped = names[0], names[1]
    plan = place.plan("ties", only=[chosen, skipped, skipped], skip=[skipped])
    assert (plan.only, plan.skip) == (tuple(sorted({chosen, skipped})), (skipped,))
    kept = record(place, plan)
    assert [tensor.name for tensor in kept.tensors] == [chosen]
    assert {name: why for name, why in kept.copied if name in names} == {
        skipped: f"--skip {skipped}",
        **dict.fromkeys(names[2:], "not among --only"),
    }
    assert plan.full_expert_bytes < whole.full_expert_bytes
    _, merged = place.merge(plan)
    assert np.array_equal(merged[chosen], full[chosen])
    for name in names[1:]:
        assert merged[name].tobytes() == place.family.base[name].tobytes()
    assert len(plan.remarks) <= 8


def test_all_of_it_skipped(place: Place) -> None:
    """A merge of nothing is the base, and the plan says so."""
    plan = place.plan("linear", skip=["*"])
    assert plan.full_expert_bytes == 0
    assert any("the merge is the base" in remark for remark in plan.remarks)
    report, _ = place.merge(plan)
    assert report.manifest == place.store["base"].manifest


def test_tied_names_stay_together(place: Place) -> None:
    """A tensor of several names is skipped if one is, and merged if only one is asked for."""
    names = {tensor.name for tensor in record(place, place.plan("linear")).tensors}
    tied = next(name for name in names if "tied" in name)
    assert "model.tied.embed_out" not in names
    for options in ({"skip": ["model.tied.embed_out"]}, {"skip": [tied]}):
        found = record(place, place.plan("linear", **options)).tensors
        assert tied not in {tensor.name for tensor in found}
    found = record(place, place.plan("linear", only=["*.tied.embed_out"])).tensors
    assert {tensor.name for tensor in found} == {tied}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": ["model.*", "lm_haed.*"]}, "'lm_haed.*'"),
        ({"skip": ["MODEL.*"]}, "'MODEL.*'"),
        ({"only": [""]}, "not empty"),
        ({"only": "model.*"}, "a list"),
        ({"score": "taste"}, "norm, trimmed, conflict, random"),
        ({"score": "trimmed"}, "trims nothing"),
        ({"score": "conflict"}, "elects no signs"),
        ({"expert_budget": 0}, "budget of 0"),
        ({"expert_budget": 1.5}, "at most 100 %"),
        ({"top_p": 0.0}, "share of the output's blocks"),
        ({"top_p": 1.01}, "share of the output's blocks"),
        ({"top_p": float("nan")}, "share of the output's blocks"),
    ],
    ids=str,
)
def test_senseless_criteria(options: dict[str, Any], says: str, place: Place) -> None:
    """A pattern without a match, a score that a method lacks, a share of 0: refused by name."""
    with pytest.raises(BadRequest, match=says.replace("*", r"\*")):
        place.plan("linear", **options)


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear"])
def test_no_expert_is_read_beyond_its_cap(method: str, place: Place) -> None:
    """The blocks that each expert leads cost no more than the cap, and just those are read."""
    whole = place.plan(method)
    cap = whole.full_expert_bytes // 8
    plan = place.plan(method, expert_budget=cap)
    assert plan.expert_budget_bytes == cap
    report, _ = place.merge(plan)
    assert report.expert_bytes_read + report.memo_expert_bytes == plan.planned_expert_bytes
    kept = record(place, plan)
    catalog = place.store._catalog
    for k, expert in enumerate(kept.experts):
        tensors = tensors_of(catalog, catalog.manifest(expert.manifest_id()))
        spent = sum(
            catalog.locate([catalog.tensor(tensors[tensor.name]).block(number)])[0].stored_length
            for tensor in kept.tensors
            for number, state in enumerate(tensor.states[k])
            if state == READ
        )
        assert 0 < spent <= cap
        assert cap - spent < BLOCK


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_top_p_writes_the_share(method: str, place: Place) -> None:
    """Of the blocks that would change only the share does; all others are the base's own blocks."""
    whole, _ = place.merge(place.plan(method))
    plan = place.plan(method, top_p=0.25)
    assert plan.full_expert_bytes == whole.full_expert_bytes
    assert plan.chunks_outside_top_p > 0
    place.merge(plan)
    kept = record(place, plan)
    changed = {
        tensor.name: [
            any(state[number] in (READ, SHARED) for state in tensor.states)
            for number in range(len(tensor.states[0]))
        ]
        for tensor in kept.tensors
    }
    would = sum(
        any(state[number] in (READ, SHARED, DROPPED) for state in tensor.states)
        for tensor in kept.tensors
        for number in range(len(tensor.states[0]))
    )
    assert sum(map(sum, changed.values())) == int(0.25 * would) > 0
    base_view, view = place.store.view("base"), place.store.view("merged")
    for name, flags in changed.items():
        for number, flag in enumerate(flags):
            same = view.record(name).block(number) == base_view.record(name).block(number)
            assert same or flag
    if plan.error_bound is not None:
        _, exact = place.merge(place.plan(method, dtype="F32"))
        _, sparse = place.merge(place.plan(method, top_p=0.25, dtype="F32"))
        assert 0 < place.relative_error(sparse, exact) <= plan.error_bound


def test_top_p_needs_blocks_of_the_base(place: Place) -> None:
    """Where every block is scaled none can be the base's; a converted one is, and that is said."""
    given: dict[str, Any] = {"base": "base", "experts": ["e0"], "method": "linear", "top_p": 0.5}
    with pytest.raises(BadRequest, match="no block of linear"):
        place.store.plan(MergeRequest(**given, parameters={"normalize": False}))
    remarks = place.store.plan(MergeRequest(**given, dtype="F32")).remarks
    assert any("every block is written" in remark for remark in remarks)


def test_a_shared_block_is_paid_by_who_reads_it(tmp_path: Any) -> None:
    """Where the first of two experts with a block trims all of it, the second reads and pays."""
    n = BLOCK // 4
    rng = np.random.default_rng(0)
    base = {"w": rng.standard_normal(2 * n).astype(np.float32)}
    both, first = ((scale * (1 + rng.random(n))).astype(np.float32) for scale in (1.0, 100.0))
    experts = ({"w": base["w"].copy()}, {"w": base["w"].copy()})
    experts[0]["w"][:n] += both
    experts[1]["w"][:n] += both
    experts[0]["w"][n:] += first
    place = make(tmp_path, Family(base, experts))
    plan = place.store.plan(
        MergeRequest(base="base", experts=["e0", "e1"], method="ties", parameters={"density": 0.25})
    )
    states = [list(states) for states in record(place, plan).tensors[0].states]
    assert states == [[BELOW, READ], [READ, EQUAL]]
    assert plan.planned_expert_bytes == plan.full_expert_bytes == 2 * BLOCK
    report = place.store.merge(plan, name="merged")
    assert report.expert_bytes_read == 2 * BLOCK
    place.store.close()


def test_infinite_differences_are_named(tmp_path: Any) -> None:
    """A block whose difference is infinite is read first, and a warning says whose it is."""
    base = {"w": np.zeros(3 * BLOCK // 4, dtype=np.float32)}
    expert = {"w": base["w"] + 1}
    expert["w"][BLOCK // 4] = np.inf
    place = make(tmp_path, Family(base, (expert,)))
    plan = place.store.plan(
        MergeRequest(base="base", experts=["e0"], method="task_arithmetic", budget=BLOCK)
    )
    assert [list(states) for states in record(place, plan).tensors[0].states] == [
        [OMITTED, READ, OMITTED]
    ]
    assert plan.error_bound is None
    (warning,) = [one for one in plan.warnings if one.kind == NOT_FINITE]
    assert (warning.expert, "in w; " in warning.text) == ("e0", True)
    place.store.close()


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_inputs_that_are_not_finite_are_named(odd: float, method: str, tmp_path: Any) -> None:
    """A NaN or an infinity in the base, or in an expert alone, is named with its tensor at any
    density and without a budget, also where no expert differs there.
    """
    base = {name: np.ones(3 * BLOCK // 4, dtype=np.float32) for name in ("a", "b", "c")}
    base["b"][5] = odd
    expert = {name: values + np.float32(0.5) * (name != "b") for name, values in base.items()}
    expert["c"][7] = odd
    place = make(tmp_path, Family(base, (expert,)))
    plan = place.store.plan(MergeRequest(base="base", experts=["e0"], method=method))
    (remark,) = [remark for remark in plan.remarks if "infinite or NaN" in remark]
    assert remark.endswith(": b")
    (warning,) = [one for one in plan.warnings if one.kind == NOT_FINITE]
    assert (warning.expert, "in c; " in warning.text) == ("e0", True)
    place.store.close()


# -- plans at rest -------------------------------------------------------------------------------


def test_plans_are_listed(place: Place) -> None:
    """Every stored plan is there once, with what it was asked and what it costs."""
    plan = place.plan("dare_ties", budget=0.3, score="conflict", skip=["model.scale"])
    listed = {one.plan: one for one in place.store.plans()}
    found = listed[plan.plan]
    assert len(listed) == len(place.store.plans())
    for field in plan.__slots__:
        # What compares models is said where a merge is planned or run.
        if field not in (
            "seconds",
            "memo_expert_bytes",
            "bytes_not_here",
            "analyze_bytes_read",
            "warnings",
        ):
            assert getattr(found, field) == getattr(plan, field)


def test_a_plan_is_found_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request is answered from the memo table with the plan that planning would make."""
    asked: dict[str, Any] = {"budget": 0.37, "skip": ["model.scale"]}
    first = place.plan("task_arithmetic", **asked)
    fresh = record(place, first).encode()

    from mstore.merge.planning import session

    def never(*_given: object, **_options: object) -> None:
        raise AssertionError("planned again")

    with monkeypatch.context() as patched:
        patched.setattr(session, "Planning", never)
        again = place.plan("task_arithmetic", **asked)
        assert again.plan == first.plan
        for other in ({"budget": 0.38}, {"skip": []}, {"score": "random"}, {"analyze": False}):
            with pytest.raises(AssertionError, match="planned again"):
                place.plan("task_arithmetic", **(asked | other))
    monkeypatch.setattr(session, "request_key", lambda *_given: bytes(32))
    assert record(place, place.plan("task_arithmetic", **asked)).encode() == fresh


def test_names_follow_the_request(place: Place) -> None:
    """A plan that is found again is named as it was asked for this time."""
    place.store.tag("v1", "e0")
    given: dict[str, Any] = {"base": "base", "method": "linear", "budget": 0.5}
    assert place.store.plan(MergeRequest(**given, experts=["e0"])).experts == (("e0", 1.0),)
    again = place.store.plan(MergeRequest(**given, experts=["v1"]))
    assert again.experts == (("v1", 1.0),)
    assert place.store.merge(again, name="named").plan == again.plan
