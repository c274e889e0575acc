"""consensus: elements that several experts need, by their TALL masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import Family
from hypothesis import given as drawn
from hypothesis import strategies as st
from test_budget import Place, make

from mstore import MergeRequest
from mstore.merge.methods.consensus import agreed
from mstore.merge.methods.registry import operation
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest

SHAPES = {"a": (70, 1024), "b": (50, 1000), "tiny": (7,)}
WEIGHTS = (1.0, 0.5, -0.75)
GIVEN: tuple[dict[str, Any], ...] = (
    {},
    {"k": 1, "tall_mask_lambda": 2.0},
    {"tall_mask_lambda": (0.5, 0.0, 1.5), "lambda": 0.7},
    {"k": 3, "tall_mask_lambda": 0.1},
)


def asked(given: dict[str, Any], **options: Any) -> MergeRequest:
    experts = list(zip(("e0", "e1", "e2"), WEIGHTS, strict=True))
    return MergeRequest(
        base="base", experts=experts, method="consensus", parameters=given, **options
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three experts that share some of what they move; one of another type."""
    rng = np.random.default_rng(4)
    base = {name: families.cast(rng.standard_normal(one), "BF16") for name, one in SHAPES.items()}
    common = {name: 0.05 * rng.standard_normal(one) for name, one in SHAPES.items()}
    experts = []
    for own in ("BF16", "F32", "BF16"):
        moved = {}
        for name, shape in SHAPES.items():
            step = common[name] * (rng.random(shape) < 0.5) + 0.04 * rng.standard_normal(shape)
            moved[name] = families.cast(base[name].astype(np.float32) + step, own)
        experts.append(moved)
    made = make(tmp_path_factory.mktemp("family"), Family(base, tuple(experts)))
    with made.store:
        yield made


def wanted(place: Place, given: dict[str, Any], name: str, **options: Any) -> Any:
    sides = [expert[name] for expert in place.family.experts]
    return reference.merge(
        "consensus", given, WEIGHTS, place.family.base[name], sides, out_dtype="F32", **options
    )


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_merge_equals_the_reference(place: Place, given: dict[str, Any]) -> None:
    """Bit for bit the definition, whole, virtual and replayed; nothing is measured first."""
    plan = place.store.plan(asked(given, dtype="F32"))
    place.store.merge(plan, name="merged")
    assert place.store.replay("merged").same
    place.store.merge(plan, name="virtual", virtual=True)
    shares = []
    for name in SHAPES:
        exact = wanted(place, given, name)
        for ref in ("merged", "virtual"):
            found = place.store[ref].tensor(name)
            assert np.array_equal(found.view(np.uint32), exact.view(np.uint32)), name
        shares.append(float(np.mean(exact != place.family.base[name].astype(np.float32))))
    # Some elements are needed, and some are not.
    assert 0.01 < shares[0] < 0.99


@pytest.mark.parametrize("given", GIVEN[:3], ids=str)
def test_what_is_not_read_needs_nothing(place: Place, given: dict[str, Any]) -> None:
    """Under a budget an expert that is left out counts as one that moves nothing; there is an
    estimate, and no bound, since others' elements may drop with it."""
    place.store.merge(place.store.plan(asked(given, dtype="F32")), name="full")
    plan = place.store.plan(asked(given, dtype="F32", budget="60%", analyze=False))
    done = place.store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes
    for tensor in place.store._catalog.record(Plan, plan.plan).tensors:
        n = place.family.base[tensor.name].size
        absent = [
            np.repeat(np.frombuffer(states, np.uint8) > 1, tensor.chunk_elements)[:n]
            for states in tensor.states
        ]
        exact = wanted(place, given, tensor.name, absent=absent)
        found = place.store["part"].tensor(tensor.name)
        assert np.array_equal(found.view(np.uint32), exact.view(np.uint32)), tensor.name
    parts = ({name: place.store[ref].tensor(name) for name in SHAPES} for ref in ("part", "full"))
    error = place.relative_error(*parts)
    assert plan.error_bound is None
    assert plan.error_estimate is not None
    assert plan.error_share_estimate is None
    assert 0.4 * error < plan.error_estimate < 2.5 * error


def test_what_is_remembered_knows_the_needs(place: Place) -> None:
    """With another ratio, another k or one more expert, a merge with the memo table is that
    without."""
    near = {name: value.copy() for name, value in place.family.base.items()}
    near["a"][-4:] = families.cast(near["a"][-4:].astype(np.float32) + 0.1, "BF16")
    families.write_checkpoint(place.root / "near", near)
    place.store.add(place.root / "near", name="near", base="base")
    for experts in (["e0", "e2"], ["e0", "e2", "near"]):
        for given in ({"k": 1}, {"tall_mask_lambda": 0.7}, {"k": 1, "tall_mask_lambda": 0.5}):
            plan = place.store.plan(dataclasses.replace(asked(given), experts=experts))
            done = place.store.merge(plan, name="remembered")
            assert place.store.merge(plan, name="anew", memo=False).manifest == done.manifest


@drawn(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(1, 3),
)
def test_votes_are_those_of_the_paper(
    moves: Sequence[Sequence[float]], ratio: float, least: int
) -> None:
    """An element is taken where enough experts move it further than the others' sum does; who moves
    nothing needs nothing, and more experts needed never means more elements."""
    sides = [np.array(one, dtype=np.float32) for one in moves]
    ones = [1.0] * len(sides)
    found = agreed(sides, ones, [ratio] * len(sides), least)
    assert found is not None
    for element, taken in enumerate(found):
        own = [one[element] for one in moves]
        votes = [abs(x) > ratio * abs(sum(own) - x) for x in own]
        assert taken == (sum(votes) >= least)
        assert not any(vote and not x for vote, x in zip(votes, own, strict=True))
    more = agreed(sides, ones, [ratio] * len(sides), least + 1)
    assert more is not None
    assert not (more & ~found).any()
    assert agreed([None, None], [1.0, 1.0], [1.0, 1.0], 1) is None


def test_what_it_does_not_take() -> None:
    """k is at least one and at most the number of experts that have a weight, ratios are not
    negative, and of two experts both can need something."""
    for given, says in (
        ({"k": 0}, "k must be in"),
        ({"k": 3}, "k is 3: no element"),
        ({}, "below 1"),
        ({"tall_mask_lambda": (0.5, 2.0)}, "below 1"),
        ({"tall_mask_lambda": -1}, "tall_mask_lambda must be in"),
        ({"tall_mask_lambda": (1.0, 2.0, 3.0)}, "3 values"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation("consensus", given, [1.0, 1.0])
    operation("consensus", {"tall_mask_lambda": (0.5, 1.9)}, [1.0, 1.0])
    operation("consensus", {"k": 1}, [1.0, 1.0])
    with pytest.raises(BadRequest, match="of 2 experts that have a weight"):
        operation("consensus", {"k": 3}, [1.0, 1.0, 0.0])
