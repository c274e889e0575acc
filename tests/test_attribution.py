"""Attribution and blame: contributions add up to what a merge changed, for every method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.api.reports import BlameReport, ExpertBlame
from mstore.merge.analysis import blame as blame_module
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import READ, SHARED, Plan
from mstore.store.objects.shapes import layers_of
from mstore.terms.errors import BadRequest, NotFound
from mstore.terms.report import Progress

Array = np.ndarray[Any, np.dtype[Any]]
Double = np.ndarray[Any, np.dtype[np.float64]]

WEIGHTS = (1.0, 0.5, -0.25)
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("linear", {}, {}),
    "sums": ("linear", {"normalize": False}, {"budget": 0.5}),
    "task": ("task_arithmetic", {"lambda": 0.7, "normalize": True}, {}),
    "deep": ("lines", {"alpha": 0.4, "beta": 0.8}, {"budget": 0.6}),
    "ties": ("ties", {"density": 0.3}, {}),
    "trims": ("ties", {"density": 0.1, "lambda": 1.5, "normalize": False}, {"budget": 0.4}),
    "dare": ("dare_linear", {"density": 0.4, "seed": 3}, {"budget": 0.6}),
    "elects": ("dare_ties", {"density": 0.5, "normalize": True}, {"dtype": "F32"}),
    "crumbs": ("breadcrumbs", {"density": 0.3, "gamma": 0.2}, {}),
    "band": (
        "breadcrumbs",
        {"density": 0.6, "gamma": 0.1, "lambda": 1.5, "normalize": True},
        {"budget": 0.5},
    ),
    "agrees": ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.1, "lambda": 0.7}, {"budget": 0.6}),
    "passes": ("passthrough", {}, {"budget": 0.5}),
    "scales": ("passthrough", {"scale": -1.25}, {"dtype": "F32"}),
    "near": ("nearswap", {"t": 0.02}, {}),
    "swaps": ("nearswap", {"t": 0.3}, {"budget": 0.5, "dtype": "F32"}),
    "mean": ("ram", {"epsilon": 0.05}, {"budget": 0.6}),
    "lone": ("ramplus_tl", {"epsilon": 0.1, "r": 0.5, "alpha": 0.3}, {}),
    "fused": ("sce", {}, {"budget": 0.6}),
    "selects": ("sce", {"select_topk": 0.3}, {}),
    "competed": ("pcb", {"ratio": 0.3}, {"budget": 0.6}),
    "needed": ("consensus", {"tall_mask_lambda": 0.3, "lambda": 0.8}, {"budget": 0.6}),
    "informed": ("fisher", {}, {"budget": 0.6}),
    "floors": ("fisher", {"floor": 0.1}, {"dtype": "F32"}),
    "important": ("arcee_fusion", {}, {}),
    "safe": ("safe_merge", {"threshold": 0.7, "alpha": 0.25}, {}),
    "furthest": ("emr", {}, {"budget": 0.6}),
    "masked": ("masked", {}, {"budget": 0.6, "dtype": "F32"}),
    "half masked": ("masked", {"scale": 0.5}, {}),
    "guarded": ("guarded", {"threshold": 0.02, "alpha": 0.3}, {}),
    "stock": ("model_stock", {}, {}),
    "deltas": ("multislerp", {}, {"budget": 0.6}),
    "wholes": ("multislerp", {"around_base": False}, {}),
    "sphere": ("karcher", {}, {"budget": 0.5}),
    "slerp": ("slerp", {"t": 0.3}, {}),
    "turns": ("slerp", {"t": 0.8}, {"budget": 0.5, "dtype": "F32"}),
    "half of a mean": ("linear", {"scale": 0.5}, {"budget": 0.6}),
    "beyond a sum": ("linear", {"normalize": False, "scale": -2.0}, {}),
    "counts": ("ties", {"density": 0.5, "by_count": True}, {"budget": 0.6}),
    "trained": ("train_difference", {"alpha": 0.8}, {"budget": 0.6}),
    "rows": ("tensor_sum", {"width": 0.5, "offset": 0.7}, {"budget": 0.6}),
    "half of rows": ("tensor_sum", {"scale": 0.5}, {"dtype": "F32"}),
    "by columns": ("add_cosine_a", {"alpha": 0.4}, {"budget": 0.6}),
    "clamped": ("clamp", {"stiffness": 0.4}, {}),
    "half clamped": ("clamp", {"scale": 0.5}, {"dtype": "F32"}),
    "median": ("geometric_median", {}, {"budget": 0.6}),
    "half of ties": ("ties", {"density": 0.3, "scale": 0.5}, {}),
    "beyond near": ("nearswap", {"t": 0.3, "scale": 2.0}, {}),
    "half informed": ("fisher", {"scale": 0.5}, {"budget": 0.6}),
    "half of stock": ("model_stock", {"scale": 0.5}, {}),
}


def weights_of(way: str) -> dict[str, float]:
    """The experts that are merged, with their weights."""
    if WAYS[way][0] in (
        "slerp",
        "passthrough",
        "nearswap",
        "arcee_fusion",
        "tensor_sum",
        "add_cosine_a",
    ):
        return {"e1": 1.0}
    if WAYS[way][0] in ("guarded", "safe_merge", "train_difference", "add_perpendicular"):
        return {"e0": 1.0, "e2": 1.0}
    if not METHODS[WAYS[way][0]].weighted:
        return {f"e{k}": 1.0 for k in range(len(WEIGHTS))}
    if WAYS[way][0] == "fisher":
        return {f"e{k}": abs(weight) for k, weight in enumerate(WEIGHTS)}
    return {f"e{k}": weight for k, weight in enumerate(WEIGHTS)}


def fishers_of(way: str) -> list[str]:
    """Their Fishers, for a method that takes some."""
    return [name.replace("e", "f") for name in weights_of(way)] * (WAYS[way][0] in families.READ)


# -- the same in numpy, float64, whole tensors -----------------------------------------------------


def contributions(
    method: str,
    given: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    absent: Sequence[Array],
    thresholds: Sequence[tuple[float, int]],
    tensor: str,
    shape: Sequence[int],
    factor: float = 0.0,
) -> tuple[Double, list[Double]]:
    """The base's own contribution and each expert's, from the definitions.

    factor: of the base, for methods that mix whole tensors; `weights` are then those of experts, or
    of deltas.
    """
    w = [np.float32(weight) for weight in weights]
    b = reference.single(base).astype(np.float64)
    if method == "passthrough":
        w = [np.float32(given.get("scale", 1.0))]
    if method == "tensor_sum":
        own = reference.DEFAULTS[method] | given
        keep = reference.in_rows(own["width"], own["offset"], shape) & ~absent[0]
        gap = reference.single(experts[0]).astype(np.float64) - b
        return np.zeros(b.size), [np.where(keep, gap, 0.0)]
    if method == "nearswap":
        side = reference.single(experts[0])
        moved = reference.swapped(reference.single(base), side, given["t"]).astype(np.float64)
        still = absent[0] | (reference.delta(base, experts[0]) == 0)
        return np.zeros(b.size), [np.where(still, 0.0, moved - b)]
    if method == "fisher":
        half = len(experts) // 2
        parts, total = [], np.zeros(b.size)
        for k in range(half):
            fisher = np.maximum(reference.single(experts[half + k]), given.get("floor", 0.0))
            factor = np.where(absent[half + k], 0.0, fisher.astype(np.float32)) * float(w[k])
            gap = reference.single(experts[k]).astype(np.float64) - b
            parts.append(np.where(absent[k], 0.0, factor.astype(np.float64) * gap))
            total += factor
        return np.zeros(b.size), [part / np.where(total > 0, total, 1.0) for part in parts]
    if method == "masked":
        half = len(experts) // 2
        return np.zeros(b.size), [
            np.where(
                absent[k] | absent[half + k] | (reference.single(experts[half + k]) == 0),
                0.0,
                reference.delta(base, experts[k]).astype(np.float64) * float(w[k]),
            )
            for k in range(half)
        ]
    if method == "emr":
        deltas = [
            np.where(gone, np.float32(0), reference.delta(base, expert))
            for expert, gone in zip(experts, absent, strict=True)
        ]
        made, _ = reference.unified(base, experts, absent)
        free, parts = np.ones(b.size, dtype=bool), []
        for d, expert in zip(deltas, experts, strict=True):
            own = free & (d != 0) & (reference.single(expert) == made)
            free &= ~own
            parts.append(np.where(own, d.astype(np.float64), 0.0))
        return np.zeros(b.size), parts
    if method in ("consensus", "arcee_fusion"):
        deltas = [
            np.where(gone, np.float32(0), reference.delta(base, expert))
            for expert, gone in zip(experts, absent, strict=True)
        ]
        if method == "consensus":
            own = reference.DEFAULTS[method] | given
            keep = reference.needs(own, weights, deltas)
        else:
            row = reference.row_length(shape)
            keep = reference.importance(base, experts[0], row) >= thresholds[0][0]
        scale = float(np.float32(given.get("lambda", 1.0)))
        return np.zeros(b.size), [
            np.where(keep, d.astype(np.float64), 0.0) * float(weight) * scale
            for d, weight in zip(deltas, w, strict=True)
        ]
    if method == "pcb":
        deltas = [
            np.where(gone, np.float32(0), reference.delta(base, expert))
            for expert, gone in zip(experts, absent, strict=True)
        ]
        limits = np.array([value for value, _ in thresholds]).reshape(3, -1)
        factors = reference.won(weights, deltas, *limits)
        return np.zeros(b.size), [
            d.astype(np.float64) * one for d, one in zip(deltas, factors, strict=True)
        ]
    if method == "add_cosine_a":
        factor = reference.by_columns(method, given["alpha"], base, experts[0], shape)
        gap = reference.delta(base, experts[0]).astype(np.float64)
        return np.zeros(b.size), [np.where(absent[0], 0.0, gap * factor)]
    if method in ("train_difference", "clamp"):
        own = reference.DEFAULTS[method] | given
        factors = reference.element_factors(method, own, base, experts, absent)
        return np.zeros(b.size), [
            np.where(gone, 0.0, reference.delta(base, expert).astype(np.float64) * factor)
            for factor, expert, gone in zip(factors, experts, absent, strict=True)
        ]
    if method == "sce":
        deltas = [
            np.where(gone, np.float32(0), reference.delta(base, expert))
            for expert, gone in zip(experts, absent, strict=True)
        ]
        for value, before in thresholds[:1]:
            spread = reference.spread(deltas)
            ties = (spread == value) & ((np.arange(b.size) < before) | (before < 0))
            deltas = [np.where((spread > value) | ties, d, np.float32(0)) for d in deltas]
        total = np.zeros(b.size, dtype=np.float32)
        for d in deltas:
            total = total + d
        agrees = [np.where(total < 0, d < 0, d > 0) for d in deltas]
        divisors = np.zeros(b.size, dtype=np.float32)
        for yes, weight in zip(agrees, w, strict=True):
            divisors = divisors + np.where(yes, weight, np.float32(0))
        floor = np.maximum(divisors, np.float32(1e-6)).astype(np.float64)
        return np.zeros(b.size), [
            np.where(yes, d.astype(np.float64) * float(weight), 0.0) / floor
            for yes, d, weight in zip(agrees, deltas, w, strict=True)
        ]
    if method in ("ram", "ramplus_tl"):
        deltas = [reference.delta(base, expert) for expert in experts]
        kept = [
            (np.abs(d) > np.float32(given["epsilon"])) & ~gone
            for d, gone in zip(deltas, absent, strict=True)
        ]
        many = np.maximum(np.sum(kept, axis=0), 1)
        return np.zeros(b.size), [
            np.where(own, d.astype(np.float64) * np.where(many == 1, float(weight), 1 / many), 0.0)
            for d, own, weight in zip(deltas, kept, w, strict=True)
        ]
    if (
        method in ("slerp", "karcher", "passthrough", "guarded", "safe_merge")
        or "around_base" in given
    ):
        gaps = [reference.single(expert).astype(np.float64) - b for expert in experts]
        return (math.fsum([factor, *map(float, w)]) - 1) * b, [
            np.where(gone, 0.0, gap) * float(weight)
            for gap, weight, gone in zip(gaps, w, absent, strict=True)
        ]
    if method in ("model_stock", "multislerp", "lines", "geometric_median"):
        sparse = [reference.delta(base, expert) for expert in experts]
        return np.zeros(b.size), [
            np.where(gone, 0.0, d.astype(np.float64)) * float(weight)
            for d, weight, gone in zip(sparse, w, absent, strict=True)
        ]
    parameters = reference.DEFAULTS[method] | given
    if method == "linear":
        divisor = float(reference.sequential_sum(weights)) if parameters["normalize"] else 1.0
        surplus = 0.0 if parameters["normalize"] else math.fsum(map(float, w)) - 1
        gaps = [reference.single(expert).astype(np.float64) - b for expert in experts]
        return surplus * b, [
            np.where(gone, 0.0, gap) * float(weight) / divisor
            for gap, weight, gone in zip(gaps, w, absent, strict=True)
        ]
    sparse = []
    for k, (expert, gone) in enumerate(zip(experts, absent, strict=True)):
        d, density = reference.delta(base, expert), reference.each(parameters, "density", k)
        if method in ("ties", *reference.BANDS) and thresholds:
            kept = []
            for value, quota in thresholds[k :: len(experts)]:
                # What the budget left out takes no tie from others: quotas are of what is read.
                keep = np.abs(d) > value
                ties = np.flatnonzero((np.abs(d) == value) & ~gone)
                keep[ties if quota < 0 else ties[:quota]] = True
                kept.append(keep)
            d = np.where(kept[0], d, np.float32(0))
            if method in reference.BANDS:
                d = np.where(kept[1], np.float32(0), d)
        if method in reference.RANDOM and density < 1:
            drawn = reference.draws(parameters["seed"], k, tensor, d.size).astype(np.uint64)
            d = np.where(drawn < round(density * 2**32), d, np.float32(0))
            d = d * np.float32(1.0 / density)
        sparse.append(np.where(gone, np.float32(0), d))
    parts = [d.astype(np.float64) * float(weight) for d, weight in zip(sparse, w, strict=True)]
    lam = float(np.float32(parameters["lambda"]))
    divisors: Any = 1.0
    if method in reference.CONSENSUS:
        mixed = [d * weight for d, weight in zip(sparse, w, strict=True)]
        total = np.zeros(b.size, dtype=np.float32)
        for one in mixed:
            total = total + one
        sign = np.where(total >= 0, 1.0, -1.0)
        if parameters.get("by_count"):
            sign = np.sign(np.sum([np.sign(one) for one in mixed], axis=0))
        agrees = [(one != 0) & (np.sign(one) == sign) for one in mixed]
        parts = [np.where(yes, part, 0.0) for yes, part in zip(agrees, parts, strict=True)]
        if parameters["normalize"]:
            divisors = np.zeros(b.size, dtype=np.float32)
            for yes, weight in zip(agrees, w, strict=True):
                divisors = divisors + np.where(yes, weight, np.float32(0))
            divisors = np.where(divisors == 0, np.float32(1), divisors).astype(np.float64)
    elif parameters["normalize"]:
        divisors = float(reference.sequential_sum(weights))
    return np.zeros(b.size), [lam * part / divisors for part in parts]


@pytest.fixture(scope="module", params=["alike", "mixed"])
def family(request: pytest.FixtureRequest) -> families.Family:
    if request.param == "alike":
        return families.layered(rows=100).informed()
    return families.layered(5, expert_dtypes=("F32", "BF16", "F16"), rows=100).informed()


@pytest.fixture(scope="module")
def store(family: families.Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = family.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in family.fisher_names:
            store.add(root / name, name=name)
        yield store


def merge(store: Store, way: str) -> Plan:
    method, parameters, options = WAYS[way]
    experts = list(weights_of(way).items())
    companions = families.companions_for([one.role for one in METHODS[method].companions], experts)
    models = {"base": "base", "experts": experts, "companions": companions}
    plan = store.plan(MergeRequest(**models, method=method, parameters=parameters, **options))
    store.merge(plan, name="merged")
    return store._catalog.record(Plan, plan.plan)


def _absent(states: bytes, chunk: int, elements: int) -> Array:
    present = np.isin(np.frombuffer(states, dtype=np.uint8), (READ, SHARED))
    return ~np.repeat(present, chunk)[:elements]


# -- blame ---------------------------------------------------------------------------------------


@pytest.mark.sampled(74)
@pytest.mark.parametrize("way", WAYS)
def test_shares_are_those_of_the_definition(
    way: str, store: Store, family: families.Family
) -> None:
    """Norms, shares and counts of every tensor are those of numpy in float64, and what is split up
    is what the merge changed.
    """
    plan = merge(store, way)
    method, parameters, _ = WAYS[way]
    report = store.blame("merged", threads=2)
    assert (report.plan, report.method) == (plan.id(), method)
    assert [one.name for one in report.tensors] == [planned.name for planned in plan.tensors]
    merged = store.view("merged")
    experts = [family.experts[int(name[1:])] for name in weights_of(way)]
    experts += [family.fishers[int(name[1:])] for name in fishers_of(way)]
    for planned, one in zip(plan.tensors, report.tensors, strict=True):
        base = family.base[planned.name].ravel()
        mixture = planned.mixture
        own, parts = contributions(
            method,
            parameters,
            tuple(weights_of(way).values()) if mixture is None else mixture.experts,
            base,
            [expert[planned.name].ravel() for expert in experts],
            [_absent(states, planned.chunk_elements, base.size) for states in planned.states][
                : len(experts)
            ],
            [(limit.value, limit.quota) for limit in planned.thresholds],
            planned.name,
            family.base[planned.name].shape,
            0.0 if mixture is None else mixture.base,
        )
        if method != "passthrough":
            own, *parts = (parameters.get("scale", 1.0) * one for one in (own, *parts))
        m = own + sum(parts)
        square = float(m @ m)
        assert one.elements == base.size
        assert one.not_finite == 0
        assert one.norm == pytest.approx(math.sqrt(square), rel=1e-9)
        if square > 0:
            assert one.base_share == pytest.approx(float(own @ m) / square, abs=1e-9)
        for expert, part in zip(one.experts, parts, strict=True):
            assert expert.norm == pytest.approx(math.sqrt(float(part @ part)), rel=1e-9)
            assert expert.moved == np.count_nonzero(part)
            if square > 0:
                assert expert.share == pytest.approx(float(part @ m) / square, abs=1e-9)
        found = merged.tensor(planned.name).astype(np.float64).ravel()
        moved = found - base.astype(np.float64)
        # Rounding to the output's type is all that lies between.
        ulp = 2.0**-8 if found.size and plan.dtype is None else 2.0**-20
        np.testing.assert_allclose(moved, m, rtol=0, atol=float(ulp * np.abs(found).max(initial=1)))


@pytest.mark.sampled(74)
@pytest.mark.parametrize("way", WAYS)
def test_shares_add_up_to_one(way: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each tensor, each layer and over all; and sums over tensors are those of layers."""
    merge(store, way)
    monkeypatch.setattr(
        blame_module, "layers_of", lambda names: {n: "ab"[len(n) % 2] for n in names}
    )
    report = store.blame("merged")
    for one in (*report.tensors, *report.layers, report):
        if one.norm > 0:
            shares = [expert.share for expert in one.experts]
            assert math.fsum(s for s in (*shares, one.base_share) if s is not None) == (
                pytest.approx(1, abs=1e-12)
            )
        else:
            assert {one.base_share, *(expert.share for expert in one.experts)} == {None}
    assert len(report.layers) == 2
    for layer in report.layers:
        inside = [one for one in report.tensors if one.layer == layer.name]
        assert layer.tensors == len(inside)
        assert layer.norm == pytest.approx(math.hypot(*(one.norm for one in inside)), rel=1e-12)
        assert layer.elements == sum(one.elements for one in inside)
    assert report.norm == pytest.approx(math.hypot(*(one.norm for one in report.layers)), rel=1e-12)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", ["ties", "trims", "elects", "band", "turns"])
def test_any_number_of_threads_gives_the_same_bits(
    way: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports are equal to the last bit for one thread and for many, whatever the batches."""
    merge(store, way)
    first = store.blame("merged", threads=1)
    monkeypatch.setattr(blame_module, "_BATCH", 2)
    assert _bare(store.blame("merged", threads=5)) == _bare(first)


def _bare(report: BlameReport) -> tuple[object, ...]:
    return report.tensors, report.layers, report.experts, report.norm, report.expert_bytes_read


@pytest.mark.sampled(74)
@pytest.mark.parametrize("way", WAYS)
def test_it_reads_what_the_plan_reads(way: str, store: Store) -> None:
    """Bytes read from experts are exactly the plan's, tensor by tensor too, and it says how far."""
    plan = merge(store, way)
    ticks: list[Progress] = []
    report = store.blame("merged", progress=ticks.append)
    told = store.explain("merged").plan
    assert told is not None
    assert report.expert_bytes_read == told.planned_expert_bytes
    assert ticks[-1].done == ticks[-1].total
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)
    parts = [store.blame("merged", planned.name) for planned in plan.tensors]
    assert sum(part.expert_bytes_read for part in parts) == told.planned_expert_bytes
    assert tuple(part.tensors[0] for part in parts) == report.tensors


def test_tied_names_and_tensors_left_alone(store: Store) -> None:
    """A tied tensor is measured once and found under each of its names; what nobody changed has a
    norm of zero and shares that mean nothing.
    """
    merge(store, "linear")
    whole = {one.name: one for one in store.blame("merged").tensors}
    assert whole["model.tied.embed_in"].tied == ("model.tied.embed_out",)
    assert "model.tied.embed_out" not in whole
    [out] = store.blame("merged", "model.tied.embed_out").tensors
    assert (out.name, out.tied) == ("model.tied.embed_out", ("model.tied.embed_in",))
    assert out.experts == whole["model.tied.embed_in"].experts
    for name in ("model.frozen.weight", "model.steps"):
        [one] = store.blame("merged", name).tensors
        assert (one.norm, one.changed, one.base_share) == (0.0, 0, None)
        assert one.experts == tuple(
            ExpertBlame(f"e{k}", weight, None, 0.0, 0) for k, weight in enumerate(WEIGHTS)
        )


def test_only_merges_have_shares(store: Store) -> None:
    """An added snapshot was made by no expert; an unknown tensor is named."""
    merge(store, "linear")
    with pytest.raises(BadRequest, match="not made by a merge"):
        store.blame("base")
    with pytest.raises(NotFound) as refused:
        store.blame("merged", "model.nothing")
    assert refused.value.where == "model.nothing"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "breadcrumbs"])
def test_elements_that_are_not_finite_are_counted_apart(method: str, tmp_path: Any) -> None:
    """NaN and infinities leave the sums of all other elements as they are."""
    rng = np.random.default_rng(3)
    base = rng.standard_normal(5000).astype(np.float32)
    moved = base + rng.standard_normal(5000).astype(np.float32)
    sick = moved.copy()
    sick[[7, 2048, 4999]] = np.nan, np.inf, -np.inf
    clean_base, clean_moved = np.delete(base, [7, 2048, 4999]), np.delete(moved, [7, 2048, 4999])
    reports = []
    for name, one, other in (("sick", base, sick), ("clean", clean_base, clean_moved)):
        families.write_checkpoint(tmp_path / name / "base", {"w": one})
        families.write_checkpoint(tmp_path / name / "e", {"w": other})
        with Store.init(tmp_path / name / "store", block_size=BLOCK) as place:
            place.add(tmp_path / name / "base", name="base")
            place.add(tmp_path / name / "e", name="e", base="base")
            plan = place.plan(MergeRequest(base="base", experts=["e"], method=method))
            place.merge(plan, name="m", allow_nonfinite=True)
            reports.append(place.blame("m").tensors[0])
    found, wanted = reports
    # A NaN never agrees with an elected sign: there the merge keeps the base, which is finite.
    assert found.not_finite == (2 if method == "ties" else 3)
    assert (found.changed, found.experts[0].moved) == (wanted.changed, wanted.experts[0].moved)
    assert found.norm == pytest.approx(wanted.norm, rel=1e-12)
    assert found.experts[0].share == pytest.approx(1, abs=1e-12)


# -- layers ----------------------------------------------------------------------------------------


def test_layers_by_number_and_by_first_component() -> None:
    """The path to the first number is the layer, in the order of numbers; other names go by the
    component behind what layers have in front.
    """
    names = (
        *("lm_head.weight", "model.embed_tokens.weight", "model.layers.10.mlp.w"),
        *("model.layers.2.mlp.experts.5.w", "model.layers.2.a", "model.norm.weight"),
    )
    assert list(layers_of(names).items()) == [
        ("lm_head.weight", "lm_head"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.2.mlp.experts.5.w", "model.layers.2"),
        ("model.layers.2.a", "model.layers.2"),
        ("model.layers.10.mlp.w", "model.layers.10"),
        ("model.norm.weight", "model.norm"),
    ]


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["wte.weight", "h.0.w", "ln_f.w"], ["wte", "h.0", "ln_f"]),
        (["t.h.0.w", "t.wte.w", "head"], ["t.h.0", "t.wte", "head"]),
        (["a.blocks.0.w", "b.blocks.0.w"], ["a.blocks.0", "b.blocks.0"]),
        (["model.a.w", "model.b"], ["model.a", "model.b"]),
        (["w"], ["w"]),
        (["x.0"], ["x.0"]),
        (["0.w", "1.w"], ["0", "1"]),
        ([f"h.{9 * '9' * 600}.w", "h.1.w"], ["h.1", f"h.{9 * '9' * 600}"]),
        (["", ".", "..a"], ["", "", ""]),
        ([], []),
    ],
)
def test_any_name_has_a_layer(names: list[str], layers: list[str]) -> None:
    """Other architectures, names without dots, numbers of any size, and none at all."""
    assert list(layers_of(names).values()) == layers
