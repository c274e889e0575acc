"""ram and ramplus_tl: means of the deltas of those experts that move an element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import Family
from msgspec import structs
from reference import DTYPES, WORDS
from test_budget import Place, make
from test_kernels import KINDS, _family

from mstore import MergeRequest, Store, TensorRule
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.measures.estimates import averaged
from mstore.merge.methods.method import Operation
from mstore.merge.methods.ram import Averaged, shared_counts
from mstore.merge.methods.registry import operation
from mstore.store.objects.plan import BELOW, Plan
from mstore.terms.errors import BadRequest

N = 3000
SHAPES = {"a": (70, 1024), "b": (50, 1000), "c": (7,)}
EPSILON = 0.01
RAM = MergeRequest(
    base="base", experts=["e0", "e1", "e2"], method="ram", parameters={"epsilon": EPSILON}
)
PLUS = dataclasses.replace(
    RAM, method="ramplus_tl", parameters={"epsilon": EPSILON, "r": 0.5, "alpha": 3.0}
)


def counted(given: dict[str, float], counts: list[tuple[int, int]]) -> Operation:
    """ramplus_tl of a tensor with these counts of each expert's elements."""
    own = operation("ramplus_tl", given, [1.0] * len(counts))
    combine = own.method.combine
    assert isinstance(combine, Averaged)
    return combine.counted(own, counts)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three experts, one of another type, of which each moves a part; little, in some chunks."""
    rng = np.random.default_rng(3)
    base = {
        name: families.cast(rng.standard_normal(shape), "BF16") for name, shape in SHAPES.items()
    }
    experts = []
    for k, dtype in enumerate(("BF16", "F32", "BF16")):
        moved = {}
        for name, shape in SHAPES.items():
            own = base[name].astype(np.float32)
            step = 0.1 * rng.standard_normal(shape) * (rng.random(shape) < 0.3 + 0.2 * k)
            # What moves by less than epsilon is not worth a read.
            step[: shape[0] // 2] *= 1e-2 if k == 1 else 1.0
            moved[name] = families.cast(own + step, dtype)
        experts.append(moved)
    made = make(tmp_path_factory.mktemp("family"), Family(base, tuple(experts)))
    with made.store:
        yield made


def wanted(place: Place, asked: MergeRequest, name: str) -> Any:
    sides = [expert[name] for expert in place.family.experts]
    method, given = str(asked.method), dict(asked.parameters)
    return reference.merge(method, given, [1.0] * 3, place.family.base[name], sides)


@pytest.mark.parametrize("experts", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_kernel_equals_the_reference(
    kind: str, experts: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any types, NaN and infinities, few experts and many, some unread: the same bits."""
    monkeypatch.setattr(reference, "lone_factors", lambda *_: [np.float32(factor)] * experts)
    for seed, (base_type, out) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        rng = np.random.default_rng(seed)
        types = [list(DTYPES)[(seed + k) % 3] for k in range(experts)]
        base, sides = _family(rng, kind, [base_type, *types], N)
        own = counted({"epsilon": 0.3}, [(0, 0)] * experts)
        mix = structs.replace(own.mix(), weights=np.full(experts, factor, dtype=np.float32))
        there = [k for k in range(experts) if k != seed % 4]
        rows = np.zeros((len(there), 4 * N), dtype=np.uint8)
        for row, k in zip(rows, there, strict=True):
            data = sides[k].view(np.uint8)
            row[: data.size] = data
        found = np.zeros(N, dtype=DTYPES[out])
        mix_chunk(
            *(mix, base.view(np.uint8), base_type, rows, [types[k] for k in there]),
            [there.index(k) if k in there else -1 for k in range(experts)],
            *(N, 0, np.full(experts, own.selection.least, dtype=np.float32), [UNLIMITED] * experts),
            np.zeros((experts, 2), dtype=np.uint32),
            *(found.view(np.uint8), out),
        )
        exact = reference.merge(
            *("ramplus_tl", {"epsilon": 0.3}, [1.0] * experts, base, sides),
            out_dtype=out,
            absent=[np.full(N, k not in there) for k in range(experts)],
        )
        assert np.array_equal(found.view(WORDS[out]), exact.view(WORDS[out]))


@pytest.mark.parametrize("asked", [RAM, PLUS], ids=["ram", "ramplus_tl"])
def test_a_merge_equals_the_reference(place: Place, asked: MergeRequest) -> None:
    """Means, and factors of lone elements, are the definition's; virtual, replayed and exported."""
    store = place.store
    plan = store.plan(asked)
    store.merge(plan, name="merged")
    assert store.replay("merged").same
    store.merge(plan, name="virtual", virtual=True)
    for name in SHAPES:
        exact = wanted(place, asked, name)
        for ref in ("merged", "virtual"):
            found = store[ref].tensor(name)
            assert np.array_equal(found.view(np.uint16), exact.view(np.uint16)), name
    assert store.import_plan(store.export_plan(str(plan.plan))).plan == plan.plan
    record = store._catalog.record(Plan, plan.plan)
    # A chunk in which nothing is above epsilon is not read.
    assert any(BELOW in states for tensor in record.tensors for states in tensor.states)
    for tensor in record.tensors:
        assert (tensor.mixture is None) == (asked is RAM)
        if tensor.mixture is not None:
            sides = [expert[tensor.name] for expert in place.family.experts]
            exact = reference.lone_factors(
                dict(asked.parameters), place.family.base[tensor.name], sides
            )
            assert tensor.mixture.experts == tuple(map(float, exact))
            assert min(exact) < 2.4


def test_counts_are_measured_once(place: Place, tmp_path: Path) -> None:
    """Who shares what is read once, apart from the budget, and known afterwards in any order of
    experts; without analysis it is refused."""
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "e0", "e1", "e2"):
            store.add(place.root / name, name=name, base=None if name == "base" else "base")
        with pytest.raises(BadRequest, match="not all are known"):
            store.plan(dataclasses.replace(PLUS, analyze=False))
        first = store.plan(PLUS)
        assert first.analyze_bytes_read > 0
        again = store.plan(dataclasses.replace(PLUS, analyze=False, budget="50%"))
        assert 0 < again.planned_expert_bytes <= again.full_expert_bytes / 2
        turned = dataclasses.replace(PLUS, experts=["e2", "e0", "e1"])
        assert store.plan(turned).analyze_bytes_read == 0
        fewer = dataclasses.replace(PLUS, experts=["e0", "e2"])
        assert store.plan(fewer).analyze_bytes_read > 0


def test_counts_of_many_experts() -> None:
    """Of 257 experts, as of three: who shares an element, and who moves it alone."""
    for others in (2, 256):
        own = np.array([True, True, False])
        kept = [own, *(np.array([False, True, True]) for _ in range(others))]
        assert shared_counts(kept) == [(1, 1), *[(2, 0)] * others]


def test_a_budget_keeps_the_factors(place: Place) -> None:
    """What is not read counts as not moved; factors are those of whole tensors; there is no bound,
    but an estimate."""
    store = place.store
    store.merge(store.plan(dataclasses.replace(PLUS, dtype="F32")), name="full")
    plan = store.plan(dataclasses.replace(PLUS, dtype="F32", budget="60%"))
    done = store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes
    names = list(SHAPES)
    parts = ({name: store[ref].tensor(name) for name in names} for ref in ("part", "full"))
    error = place.relative_error(*parts)
    assert plan.error_bound is None
    assert plan.error_estimate is not None
    assert 0.7 * error < plan.error_estimate < 1.4 * error
    assert any("the estimate is no bound" in str(remark) for remark in plan.remarks)


@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (1.0, 0.2, 3.0)])
@pytest.mark.parametrize("moved", [(1.0, 1.0, 1.0), (0.3, 0.6, 0.1)])
@pytest.mark.parametrize("left", [(True, False, False), (False, True, True), (True, True, True)])
def test_estimates_of_means(
    sizes: tuple[float, ...], moved: tuple[float, ...], left: tuple[bool, ...]
) -> None:
    """Of independent deltas the estimate is the error that an omission makes."""
    draw, n, factors = np.random.default_rng(1), 100_000, np.array([1.5, 1.0, 1.2])
    there = draw.random((3, n)) < np.array(moved)[:, None]
    d = draw.standard_normal((3, n)) * np.array(sizes)[:, None] * there

    def mean(kept: Any) -> Any:
        many = kept.sum(axis=0)
        whole = np.where(many == 1, factors[:, None], 1 / np.maximum(many, 1))
        return (d * kept * whole).sum(axis=0)

    out = np.array(left)[:, None]
    error = float(np.linalg.norm(mean(there) - mean(there & ~out)))
    [found] = averaged(
        (d * d).sum(axis=1, keepdims=True), there.mean(axis=1, keepdims=True), factors.tolist(), out
    )
    assert math.sqrt(found) == pytest.approx(error, rel=0.15)


def test_rules_may_name_them(place: Place) -> None:
    """One tensor may be a mean where another is an election."""
    rule = TensorRule(tensors="b", method="ramplus_tl", parameters=dict(PLUS.parameters))
    plain = dataclasses.replace(RAM, method="ties", parameters={}, rules=[rule])
    place.store.merge(place.store.plan(plain), name="ruled")
    exact = wanted(place, PLUS, "b")
    assert np.array_equal(place.store["ruled"].tensor("b").view("u2"), exact.view("u2"))


def test_what_they_do_not_take() -> None:
    """Experts have no weights; epsilon, r and alpha are not negative; factors are finite."""
    for method, given, says in (
        ("ram", {"epsilon": -1e-5}, "epsilon must be in"),
        ("ram", {"epsilon": (0.1, 0.2)}, "same for all experts"),
        ("ram", {"r": 0.1}, "no parameter 'r'"),
        ("ramplus_tl", {"r": -0.1}, "r must be in"),
        ("ramplus_tl", {"alpha": -0.1}, "alpha must be in"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation(method, given, [1.0, 1.0])
    with pytest.raises(BadRequest, match="has no weight"):
        operation("ram", {}, [1.0, 0.5])
    with pytest.raises(BadRequest, match="finite"):
        counted({"r": 3e38, "alpha": 3e38}, [(10, 1), (10, 1)])
    assert counted({"epsilon": 0}, [(0, 0)]).weights[0] >= 1


def test_a_recipe_of_mergekit(place: Place) -> None:
    """mergekit's recipes give the same plans; what a model says of epsilon has no effect there."""
    for asked in (RAM, PLUS):
        told = "\n".join(f"  {name}: {value}" for name, value in asked.parameters.items())
        models = "".join(f"- model: {name}\n" for name in ("base", "e0", "e1", "e2"))
        head = f"merge_method: {asked.method}\nbase_model: base\nmodels:\n{models}"
        found = place.store.read_recipe(f"{head}parameters:\n{told}")
        assert place.store.plan(found.request).plan == place.store.plan(asked).plan
    own = "merge_method: ram\nbase_model: base\nmodels:\n- model: e0\n  parameters: {epsilon: 3}\n"
    assert "epsilon has no effect" in str(place.store.read_recipe(own).remarks)
