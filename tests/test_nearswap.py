"""nearswap: elements of one expert, or of the base, moved towards it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest
import reference
from families import Family
from reference import DTYPES, WORDS
from test_budget import Place, make
from test_kernels import KINDS, _family, _merge

from mstore import MergeRequest
from mstore.merge.methods.registry import operation
from mstore.merge.planning import warnings
from mstore.terms.errors import BadRequest

N = 3000
ASKED = MergeRequest(base="base", experts=["e0"], method="nearswap", parameters={"t": 0.01})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An expert that moves every second element by a tenth, and the first by far less."""
    rng = np.random.default_rng(3)
    base = {name: rng.standard_normal((80, 1024)).astype(np.float32) for name in "ab"}
    moved = {name: value + 0.1 * rng.standard_normal((80, 1024)) for name, value in base.items()}
    for name in "ab":
        moved[name][:, ::2] = base[name][:, ::2] + 1e-3 * rng.standard_normal((80, 512))
        moved[name][:8] = base[name][:8]
    experts = ({name: value.astype(np.float32) for name, value in moved.items()}, base)
    made = make(tmp_path_factory.mktemp("family"), Family(base, experts))
    with made.store:
        yield made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1e-8, 0.1, 0.7, 3e38])
def test_it_equals_the_reference(kind: str, t: float) -> None:
    """All types of base, expert and output, NaN and infinities too, read or not: the same bits."""
    for seed, (base_type, out) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        rng = np.random.default_rng(seed)
        base, experts = _family(rng, kind, [base_type, list(DTYPES)[seed % 3]], N)
        absent = [np.arange(N) // 1000 == seed % 4]
        case = ("nearswap", {"t": t}, [1.0], base, experts)
        found = _merge(*case, out_dtype=out, cuts=[1000, 2000], absent=absent)
        wanted = reference.merge(*case, out_dtype=out, absent=absent)
        assert np.array_equal(found.view(WORDS[out]), wanted.view(WORDS[out]))


def test_near_elements_are_the_experts(place: Place) -> None:
    """Up to t the result is the expert's element, and beyond it t away from the base; it is
    replayed, and the same as a virtual merge."""
    store = place.store
    plan = store.plan(ASKED)
    store.merge(plan, name="near")
    assert store.replay("near").same
    store.merge(plan, name="virtual", virtual=True)
    for name, base in place.family.base.items():
        expert, found = place.family.experts[0][name], store["near"].tensor(name)
        assert np.array_equal(store["virtual"].tensor(name), found)
        gap = np.abs(expert.astype(np.float64) - base)
        near = gap < 0.0099
        assert np.array_equal(found[near], expert[near])
        moved = np.abs(found.astype(np.float64) - base)
        assert np.allclose(moved[gap > 0.0101], 0.01, atol=1e-6)


def test_a_bound_knows_how_far_elements_move(place: Place) -> None:
    """What is left out costs no more than is certified, which is near what it costs: t for each
    element, not its delta."""
    store = place.store
    store.merge(store.plan(ASKED), name="full")
    plan = store.plan(dataclasses.replace(ASKED, budget="50%"))
    done = store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes <= plan.full_expert_bytes / 2
    parts = ({name: store[ref].tensor(name) for name in "ab"} for ref in ("part", "full"))
    error = place.relative_error(*parts)
    assert plan.error_bound is not None
    assert 0 < error <= plan.error_bound < 1.5 * error
    norm = families.distance(place.family.experts[0], place.family.base, ["a", "b"])
    whole = families.distance(place.family.base, {n: np.zeros(()) for n in "ab"}, ["a", "b"])
    assert plan.error_bound < norm / whole / 5


def test_what_changes_nothing_is_said(place: Place) -> None:
    """With t = 0 nothing is read; an expert that is the base is named."""
    nothing = dataclasses.replace(ASKED, parameters={"t": 0})
    with pytest.raises(BadRequest, match="leave nothing of the experts"):
        place.store.plan(nothing)
    assert place.store.plan(nothing, allow_noop=True).full_expert_bytes == 0
    same = dataclasses.replace(ASKED, experts=["base"])
    with pytest.raises(BadRequest, match="no expert differs"):
        place.store.plan(same)
    [warning] = place.store.plan(same, allow_noop=True).warnings
    assert warning.kind == warnings.IS_BASE


def test_a_share_of_the_blocks_can_stay(place: Place) -> None:
    """Blocks outside the top-p share are the base's own."""
    plan = place.store.plan(dataclasses.replace(ASKED, top_p=0.3))
    assert 0 < plan.planned_expert_bytes < plan.full_expert_bytes


def test_what_it_does_not_take() -> None:
    """It takes one expert without a weight, and t, which has no default."""
    for given, weights, says in (
        ({}, [1.0], "needs a value for t"),
        ({"t": -1.0}, [1.0], "t must be in"),
        ({"t": 0.1}, [1.0, 1.0], "one expert"),
        ({"t": 0.1}, [0.5], "has no weight; its parameters: t"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation("nearswap", given, weights)


def test_a_recipe_of_mergekit(place: Place, tmp_path: Path) -> None:
    """mergekit's recipe gives the same plan, with the base among its models or not."""
    wanted = place.store.plan(ASKED).plan
    for models in ("- model: base\n- model: e0\n", "- model: e0\n"):
        text = f"merge_method: nearswap\nbase_model: base\nmodels:\n{models}parameters: {{t: 0.01}}"
        asked = place.store.read_recipe(text).request
        assert place.store.plan(asked).plan == wanted
