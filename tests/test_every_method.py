"""What holds for every merge method, made from its declaration: whoever adds one, adds these.

Parameters are drawn from the ranges that a method states, experts and weights as it takes them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import families
import numpy as np
import pytest
from families import Arrays, Family

from mstore import MergeRequest, Store
from mstore.api.reports import PlanReport
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import EQUAL, Plan
from mstore.terms.errors import BadRequest

LARGE = 4 * families.BLOCK
EXPERTS = 3
ALIKE = families.layered(6, rows=90).informed()
DRAWS = 2
"""Draws of parameters that every run tries; the long lane tries more."""
CASES = [
    pytest.param(name, seed, marks=[pytest.mark.slow] if seed >= DRAWS else [])
    for name in METHODS
    for seed in range(8)
]


@dataclass
class Place:
    """A family in two stores of different block sizes."""

    family: Family
    store: Store
    other: Store

    def tensors(self, ref: str, store: Store | None = None) -> Arrays:
        found = (store or self.store)[ref]
        return {name: found.tensor(name) for name in self.family.base}

    def error(self, one: Arrays, other: Arrays) -> float:
        """The distance of two merges over the norm of the base."""
        names = list(one)
        zeros = {name: np.zeros(()) for name in names}
        norm = families.distance(self.family.base, zeros, names)
        return families.distance(one, other, names) / norm


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Experts that change all, parts or nothing of a tensor, that share blocks, and are of other
    types."""
    root = tmp_path_factory.mktemp("family")
    family = families.layered(5, expert_dtypes=("BF16", "F32", "BF16"), rows=90).informed()
    family.write(root)
    stores = []
    for size in (families.BLOCK, LARGE):
        store = Store.init(root / f"store{size}", block_size=size)
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in family.fisher_names:
            store.add(root / name, name=name)
        stores.append(store)
    yield Place(family, *stores)
    for store in stores:
        store.close()


def value(parameter: Parameter, draw: random.Random, experts: int) -> Any:
    """One of the values that a parameter takes, near those that people use."""
    if parameter.words and draw.random() < 0.3:
        return draw.choice(parameter.words)[0]
    if parameter.kind == "bool":
        return draw.random() < 0.5
    if isinstance(parameter.default, float) and 0 < parameter.default < 1e-3:
        # A tolerance.
        return parameter.default * 10 ** draw.uniform(-1, 1)
    low, high = (-2.0, 2.0)
    if parameter.range is not None:
        low, high = max(low, parameter.range.low), min(high, parameter.range.high)
    if parameter.kind == "int":
        return draw.randint(int(low), max(int(low), int(high)) + 3)
    if parameter.each and draw.random() < 0.5:
        return tuple(draw.uniform(low, high) for _ in range(experts))
    return draw.uniform(low, high)


def asked(method: Method, draw: random.Random) -> MergeRequest:
    """A merge that the method takes."""
    count = method.experts or draw.randint(max(method.least, 2), EXPERTS)
    experts = draw.sample([f"e{k}" for k in range(EXPERTS)], count)
    # Directions that balance out have no mean.
    balanced = method.combine.by_norms and not method.companions
    choices = [1.0, 0.5, -0.25, 0.7] if balanced else [1.0, 0.5, 0.7]
    weights = [draw.choice(choices) if method.weighted else 1.0 for _ in experts]
    for _ in range(100):
        given = {one.name: value(one, draw, count) for one in method.accepted}
        try:
            method.apply(given, weights)
        except BadRequest:
            continue
        return MergeRequest(
            base="base",
            experts=list(zip(experts, weights, strict=True)),
            method=method.name,
            parameters=given,
            companions=families.fishers_for(experts, [one.replace("e", "f") for one in experts])
            if method.companions
            else {},
            dtype="F32",
        )
    raise AssertionError(f"no parameters fit {method.name}")


def operation(request: MergeRequest) -> Operation:
    experts = dict(request.experts)
    return METHODS[request.method].apply(dict(request.parameters or {}), list(experts.values()))


def merged(place: Place, plan: PlanReport, **options: Any) -> tuple[Any, Arrays]:
    """The manifest of a merge, and its tensors."""
    done = place.store.merge(plan, name="merged", **options)
    return done.manifest, place.tensors("merged")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_merge_is_a_function_of_its_inputs(name: str, seed: int, place: Place) -> None:
    """Any number of threads, any block size, with a memo table and without, stored or computed on
    read, run again from its plan: the same bits; and all of the budget is the merge without one."""
    request = asked(METHODS[name], random.Random(f"{name} {seed}"))
    plan = place.store.plan(request, allow_noop=True, threads=1)
    alone, tensors = merged(place, plan, memo=False, threads=1)
    assert place.store.replay("merged").same
    for options in ({"memo": False, "threads": 3}, {"threads": 2}, {"threads": 2}):
        assert merged(place, plan, **options)[0] == alone, options
    full = place.store.plan(replace(request, budget="100%"), allow_noop=True)
    assert merged(place, full, memo=False)[0] == alone
    if not plan.warnings or plan.full_expert_bytes:
        place.store.merge(plan, name="virtual", virtual=True)
        same(place.tensors("virtual"), tensors)
    place.other.merge(place.other.plan(request, allow_noop=True), name="merged")
    same(place.tensors("merged", place.other), tensors)


def same(found: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        assert np.array_equal(
            families.bits(np.asarray(found[name])), families.bits(np.asarray(value))
        ), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_budget_is_kept_and_its_bound(name: str, seed: int, place: Place) -> None:
    """A merge reads what was planned and no more than its budget; a method that declares a bound
    has one, and it holds; one that does not has an estimate."""
    method = METHODS[name]
    request = asked(method, random.Random(f"{name} {seed}"))
    whole = place.store.plan(request, allow_noop=True)
    _, full = merged(place, whole, memo=False)
    for share in (0.7, 0.3, 0.05):
        plan = place.store.plan(replace(request, budget=share), allow_noop=True)
        assert plan.planned_expert_bytes <= share * whole.full_expert_bytes
        done = place.store.merge(plan, name="part", memo=False)
        assert done.expert_bytes_read == plan.planned_expert_bytes
        if plan.planned_expert_bytes == whole.full_expert_bytes:
            continue
        assert (plan.error_bound is not None) == operation(request).has_bound
        assert plan.error_estimate is not None
        if plan.error_bound is not None:
            assert place.error(place.tensors("part"), full) <= plan.error_bound


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Experts of the base's type, so that what they leave alone has the base's blocks."""
    root = ALIKE.write(tmp_path_factory.mktemp("alike"))
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", *ALIKE.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in ALIKE.fisher_names:
            store.add(root / name, name=name)
        yield store


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_blocks_of_the_base_are_free(name: str, seed: int, alike: Store) -> None:
    """A block that equals the base's is never read; where no expert has another one, and the
    operation keeps the base, the result has the base's own blocks."""
    request = replace(asked(METHODS[name], random.Random(f"{name} {seed}")), dtype=None)
    report = alike.plan(request, allow_noop=True)
    done = alike.merge(report, name="merged", memo=False)
    plan = alike._catalog.record(Plan, report.plan)
    chunk = families.BLOCK // 2
    experts = [ALIKE.experts[int(name[1:])] for name, _ in request.experts]
    for tensor in plan.tensors:
        base = ALIKE.base[tensor.name].ravel()
        for own, states in zip(experts, tensor.states[: len(experts)], strict=True):
            side, wide = own[tensor.name].ravel(), max(1, tensor.chunk_elements)
            for number, state in enumerate(states):
                at = slice(number * wide, (number + 1) * wide)
                is_equal = np.array_equal(families.bits(side[at]), families.bits(base[at]))
                assert (state == EQUAL) == is_equal, (tensor.name, number)
        assert tensor.chunk_elements % chunk == 0
    assert done.expert_bytes_read <= report.full_expert_bytes
    if operation(request).keeps_base:
        ids = [alike.view(ref).tensors["model.frozen.weight"] for ref in ("base", "merged")]
        assert ids[0] == ids[1]
