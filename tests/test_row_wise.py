"""Factors of rows: each row of a tensor is mixed by its own angles, however the tensor is cut.

The wanted results are mergekit's formulas in float64, written here with the functions of numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
from families import Family
from test_budget import Place, make

from mstore import MergeRequest, Store, TensorRule
from mstore.merge.arithmetic.row_factors import RowFactors, arc_cosine, sine
from mstore.merge.methods.registry import operation
from mstore.store.objects.plan import OMITTED, Plan
from mstore.terms.errors import BadRequest

Double = npt.NDArray[np.float64]

# Rows of whole blocks, of parts of blocks, and longer than pieces; one row; a number.
SHAPES = {
    "a": (70, 1024),
    "b": (50, 1000),
    "c": (2, 70_000),
    "d": (5000,),
    "e": (4, 3, 90),
    "f": (),
}
SLERP, STOCK = ({"nuslerp_flatten": False}, {"filter_wise": True})


def rows_of(array: Any) -> Double:
    """float64[R, N]: a tensor with fewer than two dimensions is one row."""
    found: Double = np.asarray(array, dtype=np.float64)
    return found.reshape(-1, found.shape[-1] if found.ndim > 1 else found.size)


def nuslerp(parts: Sequence[Double], weights: Sequence[float]) -> Sequence[Double]:
    """The factor of each row of each part: float64[R, 1]."""
    if not all(weights):
        return [np.full((len(parts[0]), 1), float(weight != 0)) for weight in weights]
    t = weights[1] / math.fsum(weights) if abs(math.fsum(weights)) >= 1e-6 else 0.5
    units = [part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-7) for part in parts]
    cosine = np.clip((units[0] * units[1]).sum(axis=1, keepdims=True), -1, 1)
    straight = 1 - np.abs(cosine) <= 2.0**-25
    angle = np.arccos(np.where(straight, 0, cosine))
    turned = (np.sin((1 - t) * angle), np.sin(t * angle))
    return [
        np.where(straight, linear, one / np.sin(angle))
        for linear, one in zip((1 - t, t), turned, strict=True)
    ]


def model_stock(parts: Sequence[Double], _: Sequence[float]) -> Sequence[Double]:
    """The factor of each row of each part: float64[R, 1]."""
    norms = [np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
    cosines = [
        np.clip((a * b).sum(axis=1, keepdims=True) / np.maximum(m * n, 1e-6), -1, 1)
        for (a, m), (b, n) in itertools.combinations(zip(parts, norms, strict=True), 2)
    ]
    cosine, count = np.mean(cosines, axis=0), len(parts)
    divisor = 1 + (count - 1) * cosine
    singular = np.abs(divisor) < 1e-6
    return [np.where(singular, 0.0, cosine / np.where(singular, 1, divisor))] * count


Definition = Callable[[Sequence[Double], Sequence[float]], Sequence[Double]]
CASES: dict[str, tuple[str, dict[str, Any], tuple[float, ...], Definition]] = {
    "nuslerp": ("nuslerp", SLERP, (0.25, 0.5), nuslerp),
    "nuslerp of opposites": ("nuslerp", SLERP, (1.0, -1.0), nuslerp),
    "nuslerp beyond": ("nuslerp", SLERP, (-0.5, 1.0), nuslerp),
    "nuslerp of one": ("nuslerp", SLERP, (0.0, 1.0), nuslerp),
    "nuslerp of wholes": ("nuslerp", {**SLERP, "around_base": False}, (0.25, 0.5), nuslerp),
    "model_stock": ("model_stock", STOCK, (1.0, 1.0, 1.0), model_stock),
    "model_stock of two": ("model_stock", STOCK, (1.0, 1.0), model_stock),
}


def request(case: str, **options: Any) -> MergeRequest:
    method, parameters, weights, _ = CASES[case]
    experts = [(f"e{k}", weight) for k, weight in enumerate(weights)]
    return MergeRequest(
        base="base", experts=experts, method=method, parameters=parameters, **options
    )


@pytest.fixture(scope="module", params=["BF16", "F32"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Experts with something in common in one row more, in another less; some rows are equal in
    all, some in two, some opposite, and some move in one expert only."""
    rng = np.random.default_rng(8)
    base: dict[str, Any] = {}
    moved: list[dict[str, Any]] = [{}, {}, {}]
    for name, shape in SHAPES.items():
        own = families.cast(np.asarray(rng.standard_normal(shape)), request.param)
        base[name] = own
        common = rng.standard_normal(shape)
        share = rng.random((*shape[:-1], 1)) if len(shape) > 1 else np.float64(0.5)
        for k in range(3):
            step = 0.1 * (k + 1) * (share * common + (1 - share) * rng.standard_normal(shape))
            if len(shape) > 1:
                step[1::7] = 0
                step[2::7] = step[2::7] if k == 0 else 0
            side = np.asarray(own.astype(np.float32) + step)
            if len(shape) > 1 and k == 1:
                side[3::7] = np.asarray(moved[0][name], dtype=np.float32)[3::7]
                side[4::7] = (
                    2 * own.astype(np.float32)[4::7]
                    - np.asarray(moved[0][name], dtype=np.float32)[4::7]
                )
            moved[k][name] = families.cast(side, request.param)
    made = make(tmp_path_factory.mktemp("family"), Family(base, tuple(moved)))
    with made.store:
        yield made


def wanted(place: Place, case: str, name: str) -> tuple[Double, Double]:
    """The exact result, and the sizes of what makes it."""
    _, parameters, weights, definition = CASES[case]
    base = place.family.base[name].astype(np.float32)
    sides = [one[name].astype(np.float32) for one in place.family.experts[: len(weights)]]
    whole = parameters.get("around_base") is False
    parts = [rows_of(side if whole else side - base) for side in sides]
    own = np.zeros_like(parts[0]) if whole else rows_of(base)
    terms = [f * part for f, part in zip(definition(parts, weights), parts, strict=True)]
    return own + np.sum(terms, axis=0), np.abs(own) + np.sum(np.abs(terms), axis=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_each_row_has_its_own_angles(place: Place, case: str) -> None:
    """A merge is the formula of each row, within float32's arithmetic, and not that of whole
    tensors; it is replayed, virtual, and the same on one thread as on three."""
    asked = request(case, dtype="F32")
    plan = place.store.plan(asked)
    place.store.merge(plan, name="merged", threads=1, memo=False)
    place.store.merge(plan, name="again", threads=3, memo=False)
    place.store.merge(plan, name="virtual", virtual=True)
    assert place.store["again"].manifest == place.store["merged"].manifest
    assert place.store.replay("merged").same
    assert place.store.import_plan(place.store.export_plan(str(plan.plan))).plan == plan.plan
    for name in SHAPES:
        exact, sizes = wanted(place, case, name)
        found = np.asarray(place.store["merged"].tensor(name))
        assert (
            float((np.abs(rows_of(found) - exact) / np.maximum(sizes, 1e-30)).max()) <= 2.0**-21
        ), name
        virtual = np.asarray(place.store["virtual"].tensor(name))
        assert np.array_equal(virtual.view(np.uint32), found.view(np.uint32)), name
    if case != "nuslerp of one":
        whole = {} if "around_base" not in asked.parameters else {"around_base": False}
        other = dataclasses.replace(asked, parameters=whole)
        place.store.merge(place.store.plan(other), name="whole")
        gap = place.store["whole"].tensor("a") - place.store["merged"].tensor("a")
        assert np.abs(gap).max() > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_another_size_change_nothing(place: Place, case: str, tmp_path: Path) -> None:
    """The same bits whatever the size of blocks, and of the runs of rows that are computed
    together."""
    results = []
    for size in (1 << 16, 1 << 18, 1 << 20):
        with Store.init(tmp_path / f"{size}", block_size=size) as store:
            for name in ("base", *place.family.names):
                store.add(place.root / name, name=name, base=None if name == "base" else "base")
            store.merge(store.plan(request(case)), name="merged")
            results.append([np.asarray(store["merged"].tensor(name)) for name in SHAPES])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert one.tobytes() == other.tobytes()


def _all(place: Place) -> list[dict[str, Any]]:
    return [place.family.base, *place.family.experts]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["nuslerp", "nuslerp of wholes", "model_stock"])
def test_a_merge_is_remembered_for_its_own_weights(place: Place, case: str) -> None:
    """The memo table serves the same merge, and neither other weights, another order, more experts,
    other rows, nor factors of whole tensors."""
    asked = request(case)
    experts = list(asked.experts)
    others = [dataclasses.replace(asked, experts=experts[::-1])]
    if asked.method == "nuslerp":
        others.append(dataclasses.replace(asked, experts=[("e0", 0.5), ("e1", 0.5)]))
    else:
        others.append(dataclasses.replace(asked, experts=experts[:2]))
        # One that moves nothing counts, too.
        others.append(dataclasses.replace(asked, experts=[*experts[:2], ("base", 1.0)]))
    whole = {name: value for name, value in asked.parameters.items() if name == "around_base"}
    others.append(dataclasses.replace(asked, parameters=whole))
    # The same bytes in rows of another length.
    for name, arrays in zip(("base", "e0", "e1", "e2"), _all(place), strict=True):
        if f"turned-{name}" not in [one.name for one in place.store.refs()]:
            families.write_checkpoint(
                place.root / f"turned-{name}", {"a": arrays["a"].reshape(140, 512)}, shards=1
            )
            place.store.add(place.root / f"turned-{name}", name=f"turned-{name}")
    turned = [(f"turned-{name}", weight) for name, weight in experts]
    others.append(dataclasses.replace(asked, base="turned-base", experts=turned))
    place.store.merge(place.store.plan(asked), name="first")
    for other in (asked, *others):
        plan = place.store.plan(other)
        place.store.merge(plan, name="known")
        place.store.merge(plan, name="new", memo=False)
        assert place.store["known"].manifest == place.store["new"].manifest


@pytest.mark.parametrize("case", ["nuslerp", "nuslerp of wholes", "model_stock"])
def test_a_budget_is_kept(place: Place, case: str) -> None:
    """Under a budget a row is turned by what is read of it, and what is not counts as the base;
    there is an estimate of the error, and no bound; nothing is measured for it beforehand."""
    asked = request(case, dtype="F32")
    full = place.store.plan(asked)
    place.store.merge(full, name="full")
    _, parameters, weights, definition = CASES[case]
    plan = place.store.plan(dataclasses.replace(asked, budget="50%", analyze=False))
    assert plan.error_bound is None
    assert plan.error_estimate is not None
    done = place.store.merge(plan, name="part", memo=False)
    assert 0 < done.expert_bytes_read == plan.planned_expert_bytes < full.planned_expert_bytes
    record = place.store._catalog.record(Plan, plan.plan)
    whole = parameters.get("around_base") is False
    seen = set()
    for tensor in record.tensors:
        base = place.family.base[tensor.name].astype(np.float32)
        parts = []
        for one, states in zip(place.family.experts, tensor.states, strict=False):
            seen |= set(states)
            absent = np.repeat(np.frombuffer(states, np.uint8) > 1, tensor.chunk_elements)
            side = np.where(absent[: base.size], base.ravel(), one[tensor.name].ravel())
            side = side.astype(np.float32).reshape(base.shape)
            parts.append(rows_of(side if whole else side - base))
        own = np.zeros_like(parts[0]) if whole else rows_of(base)
        terms = [f * part for f, part in zip(definition(parts, weights), parts, strict=True)]
        sizes = np.abs(own) + np.sum(np.abs(terms), axis=0)
        found = rows_of(place.store["part"].tensor(tensor.name))
        gap = np.abs(found - own - np.sum(terms, axis=0))
        assert float((gap / np.maximum(sizes, 1e-30)).max()) <= 2.0**-21, tensor.name
    assert OMITTED in seen
    names = list(SHAPES)
    error = place.relative_error(
        *({name: place.store[ref].tensor(name) for name in names} for ref in ("part", "full"))
    )
    assert 0.1 * error < plan.error_estimate < 10 * error


def test_what_is_not_finite_stays_in_its_row(tmp_path: Path) -> None:
    """A NaN or an infinity of an expert makes what that row's experts move NaN, in no other row;
    elements that nobody moves keep their bits."""
    rng = np.random.default_rng(2)
    base = {"a": rng.standard_normal((40, 600)).astype(np.float32)}
    moved = []
    for _ in range(2):
        one = base["a"] + rng.standard_normal(base["a"].shape).astype(np.float32)
        one[:, :10] = base["a"][:, :10]
        moved.append({"a": one.astype(np.float32)})
    clean = make(tmp_path / "clean", Family(base, tuple({"a": one["a"].copy()} for one in moved)))
    moved[0]["a"][7, 50], moved[1]["a"][9, 60] = np.nan, np.inf
    made = make(tmp_path / "wild", Family(base, tuple(moved)))
    with clean.store, made.store:
        for case in ("nuslerp", "model_stock of two"):
            found = []
            for one in (clean, made):
                plan = one.store.plan(request(case))
                one.store.merge(plan, name="merged", allow_nonfinite=True)
                found.append(one.store["merged"].tensor("a"))
            rest = np.ones(40, dtype=bool)
            rest[[7, 9]] = False
            assert np.array_equal(found[0][rest], found[1][rest])
            assert np.isnan(found[1][[7, 9], 10:]).all()
            assert np.array_equal(found[1][:, :10], base["a"][:, :10])


def test_contributions_add_up(place: Place) -> None:
    """`blame` divides the change of each row by that row's factors."""
    for case in ("nuslerp", "nuslerp of wholes", "model_stock"):
        place.store.merge(place.store.plan(request(case, dtype="F32")), name="merged")
        report = place.store.blame("merged", tensor="a")
        _, parameters, weights, definition = CASES[case]
        base = place.family.base["a"].astype(np.float32)
        sides = [one["a"].astype(np.float32) for one in place.family.experts[: len(weights)]]
        whole = parameters.get("around_base") is False
        parts = [rows_of(side if whole else side - base) for side in sides]
        factor = definition(parts, weights)
        terms = [f * rows_of(side - base) for f, side in zip(factor, sides, strict=True)]
        total = np.sum(terms, axis=0)
        if whole:
            total = total + (np.sum(factor, axis=0) - 1) * rows_of(base)
        (found,) = report.tensors
        assert found.norm == pytest.approx(np.linalg.norm(total), rel=1e-5)
        for one, term in zip(found.experts, terms, strict=True):
            assert one.norm == pytest.approx(np.linalg.norm(term), rel=1e-5)
            share = float((term * total).sum() / (total * total).sum())
            assert one.share == pytest.approx(share, rel=1e-4, abs=1e-6)


# -- what a plan says ----------------------------------------------------------------------------


def test_options_without_effect_change_no_plan(place: Place) -> None:
    """The defaults, and nuslerp_row_wise of whole tensors, which has no effect in mergekit either,
    give the plan that there is without them; the plans of rows say so."""
    plain = place.store.plan(dataclasses.replace(request("nuslerp"), parameters={}))
    for given in (
        {"nuslerp_flatten": True},
        {"nuslerp_row_wise": True},
        {"nuslerp_flatten": "true", "nuslerp_row_wise": "false"},
    ):
        same = place.store.plan(dataclasses.replace(request("nuslerp"), parameters=given))
        assert same.plan == plain.plan
    assert dict(plain.parameters) == {"around_base": True}
    rows = place.store.plan(request("nuslerp"))
    assert dict(rows.parameters) == {"around_base": True, "nuslerp_flatten": False}
    stock = place.store.plan(dataclasses.replace(request("model_stock"), parameters={}))
    off = dataclasses.replace(request("model_stock"), parameters={"filter_wise": False})
    assert place.store.plan(off).plan == stock.plan
    assert dict(stock.parameters) == {}


def test_columns_are_refused() -> None:
    """nuslerp_row_wise without nuslerp_flatten turns columns, which are not in memory whole."""
    both = {"nuslerp_flatten": False, "nuslerp_row_wise": True}
    with pytest.raises(BadRequest, match="turns columns") as refused:
        operation("nuslerp", both, [1.0, 1.0])
    assert refused.value.hint == "leave out nuslerp_row_wise to turn rows"


def test_two_wholes_of_no_weight_are_nothing() -> None:
    """As with whole tensors."""
    with pytest.raises(BadRequest, match="of weight 0 is nothing"):
        operation("nuslerp", {**SLERP, "around_base": False}, [0.0, 0.0])


@pytest.mark.parametrize("case", ["nuslerp", "model_stock"])
def test_a_recipe_of_rows(place: Place, case: str) -> None:
    """A recipe says that rows are turned, of all tensors or of some; a merge's recipe gives its
    plan again."""
    asked = request(case)
    for rules in ((), (TensorRule(tensors="a", parameters=asked.parameters),)):
        given = dataclasses.replace(
            asked, rules=rules, parameters={} if rules else asked.parameters
        )
        plan = place.store.plan(given)
        place.store.merge(plan, name="merged")
        text = place.store.recipe("merged")
        assert next(iter(asked.parameters)) in text
        again = place.store.plan(place.store.read_recipe(text).request)
        assert again.plan == plan.plan


# -- factors -------------------------------------------------------------------------------------


def test_angles_are_near_those_of_the_c_library() -> None:
    """Arc cosines and sines are within 2^-49 of the C library's."""
    rng = np.random.default_rng(4)
    near = 1 - 10.0 ** rng.uniform(-15, 0, 20_000)
    cosine = np.concatenate([rng.uniform(-1, 1, 20_000), near, -near, [0.0, 1.0, -1.0]])
    found = arc_cosine(cosine)
    assert np.abs(found - np.arccos(cosine)).max() <= 2.0**-49
    angle = np.concatenate([rng.uniform(-10, 10, 20_000), rng.uniform(-1e5, 1e5, 20_000), [0.0]])
    assert np.abs(sine(angle) - np.sin(angle)).max() <= 2.0**-49
    assert arc_cosine(np.array([1.0])) == 0


def row_factors(method: str, parameters: dict[str, Any]) -> RowFactors:
    """How a method's factors of rows follow from them."""
    found = operation(method, parameters, [1.0, 1.0]).row_factors
    assert found is not None
    return found


def test_factors_do_not_depend_on_the_processor() -> None:
    """The factors of fixed rows are these bits on any machine."""
    rng = np.random.Generator(np.random.PCG64(9))
    parts = np.stack([(rng.integers(-999, 1000, (5, 333)) / 512).astype(np.float32) for _ in "abc"])
    parts[1] += parts[0]
    slerp = row_factors("nuslerp", {"nuslerp_flatten": False})
    turned = slerp.of_rows(parts[:2], [0.3, 0.4]).view(np.uint32)
    assert turned.tolist() == [
        [1055714271, 1058790990],
        [1055932359, 1058909922],
        [1055818219, 1058847697],
        [1055897828, 1058891102],
        [1055814838, 1058845853],
    ]
    stock = row_factors("model_stock", {"filter_wise": True})
    shares = stock.of_rows(parts, [1.0] * 3).view(np.uint32)
    assert shares[:, 0].tolist() == [1043016302, 1042841867, 1041069401, 1043010947, 1044639461]
    assert (shares == shares[:, :1]).all()
