"""The parameter scale of every method with a base: how far the result goes from the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
import reference
from families import Arrays, Family

from mstore import MergeRequest, Store
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.methods.registry import METHODS, find, operation
from mstore.terms.errors import BadRequest

Single = npt.NDArray[np.float32]
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "add_cosine_a": ({"alpha": 0.5}, 1),
    "add_cosine_b": ({"alpha": 0.5}, 1),
    "add_perpendicular": ({"alpha": 0.7}, 2),
    "arcee_fusion": ({}, 1),
    "breadcrumbs": ({"density": 0.5, "lambda": 0.7}, 3),
    "breadcrumbs_ties": ({"density": 0.5}, 3),
    "consensus": ({"tall_mask_lambda": 0.3, "lambda": -0.7}, 3),
    "dare_linear": ({"density": 0.5}, 3),
    "dare_ties": ({"density": 0.5, "rescale": "l1"}, 3),
    "della": ({"density": 0.5}, 3),
    "della_linear": ({"density": 0.5}, 3),
    "emr": ({}, 3),
    "fisher": ({}, 3),
    "aim": ({}, 3),
    "regmean": ({"shrink": 0.5}, 3),
    "masked": ({}, 3),
    "safe_merge": ({"threshold": 0.6}, 2),
    "clamp": ({"stiffness": 0.3}, 3),
    "geometric_median": ({}, 3),
    "guarded": ({"threshold": 0.1, "alpha": 0.3}, 2),
    "karcher": ({}, 3),
    "linear": ({}, 3),
    "lines": ({"alpha": 0.4, "beta": 0.8}, 3),
    "model_stock": ({"filter_wise": True}, 3),
    "multislerp": ({}, 3),
    "nearswap": ({"t": 0.01}, 1),
    "nuslerp": ({}, 2),
    "pcb": ({"ratio": 0.3}, 3),
    "ram": ({}, 3),
    "ramplus_tl": ({}, 3),
    "sce": ({"select_topk": 0.5}, 3),
    "slerp": ({"t": 0.3}, 1),
    "task_arithmetic": ({"normalize": True}, 3),
    "tensor_sum": ({"width": 0.6, "offset": 0.7}, 1),
    "ties": ({"density": 0.5}, 3),
    "train_difference": ({"alpha": 0.7}, 2),
}
SCALED = sorted(name for name in METHODS if name != "passthrough")


@dataclass
class Place:
    """A family and the store that it is in."""

    family: Family
    store: Store

    def asked(self, method: str, **options: Any) -> MergeRequest:
        parameters, count = CASES[method]
        weights = [0.5, 0.75, 0.25] if find(method).weighted else [1.0] * 3
        return MergeRequest(
            base="base",
            experts=list(zip(self.family.names, weights, strict=False))[:count],
            method=method,
            parameters=parameters | options.pop("parameters", {}),
            companions=families.companions_for(
                [one.role for one in find(method).companions], self.family.names
            ),
            dtype="float32",
            **options,
        )

    def merged(self, request: MergeRequest, name: str = "merged") -> Arrays:
        self.store.merge(self.store.plan(request, allow_noop=True), name=name, allow_noop=True)
        found = self.store[name]
        return {one: found.tensor(one) for one in self.family.base}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("scale")
    family = families.layered(3, rows=70).informed()
    family.write(root)
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", *family.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in (*family.fisher_names, *family.facts):
            store.add(root / name, name=name)
        yield Place(family, store)


def test_every_method_has_a_case() -> None:
    """Each method is here, and has the parameter, but for the one with its own of that name."""
    assert sorted(CASES) == SCALED
    assert [name for name in METHODS if not find(name).is_scaled] == ["passthrough"]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("method", SCALED)
def test_it_goes_on_from_the_base(method: str, place: Place) -> None:
    """The result is base + scale * (result - base), within the rounding of float32, element by
    element; what no expert moves has the base's bits."""
    whole = place.merged(place.asked(method))
    for scale in (0.7, -1.5, 40.0):
        found = place.merged(place.asked(method, parameters={"scale": scale}))
        for name, one in whole.items():
            base = np.asarray(place.family.base[name]).astype(np.float64)
            gap = one.astype(np.float64) - base
            wanted = base + scale * gap
            sides = [one[name].astype(np.float64) for one in place.family.experts]
            sides = sides[: CASES[method][1]]
            terms = np.abs(base) + abs(scale) * sum(np.abs(one) for one in (base, gap, *sides))
            room = 2.0**-21 * terms
            assert (np.abs(found[name] - wanted) <= room + 1e-44).all(), (name, scale)
            still = np.all([one == base for one in sides], axis=0)
            if method not in ("slerp", "karcher"):
                assert np.array_equal(found[name][still], whole[name][still]), (name, scale)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", SCALED)
def test_one_is_as_none(method: str, place: Place) -> None:
    """With scale 1 a plan is the plan without it, by its id, and so is the result."""
    plans = [
        place.store.plan(place.asked(method, parameters=own))
        for own in ({}, {"scale": 1}, {"scale": "1.0"})
    ]
    assert len({one.plan for one in plans}) == 1
    assert "scale" not in dict(plans[0].parameters)
    assert operation(method, *_given(method)) == operation(
        method, _given(method)[0] | {"scale": 1}, _given(method)[1]
    )


def _given(method: str) -> tuple[dict[str, Any], list[float]]:
    parameters, count = CASES[method]
    return parameters, [1.0] * count


@pytest.mark.sampled(8)
@pytest.mark.parametrize("method", SCALED)
def test_zero_is_the_base(method: str, place: Place) -> None:
    """With scale 0 no expert is read for the result, which is the base; a plan says why, unless it
    was asked for."""
    request = dataclasses.replace(place.asked(method, parameters={"scale": 0}), dtype=None)
    with pytest.raises(BadRequest, match="scale is 0: this merge would be the base itself"):
        place.store.plan(request)
    plan = place.store.plan(request, allow_noop=True)
    assert plan.planned_expert_bytes == plan.full_expert_bytes == 0
    done = place.store.merge(plan, name="zero", allow_noop=True)
    assert done.expert_bytes_read == 0
    for name, own in place.family.base.items():
        found = place.store["zero"].tensor(name)
        assert np.array_equal(families.bits(np.asarray(found)), families.bits(own)), name


@pytest.mark.rest
@pytest.mark.parametrize("method", SCALED)
def test_the_error_is_scaled(method: str, place: Place) -> None:
    """What a plan says of its error is that without a scale, times the magnitude of the scale; the
    error is no larger than its bound."""
    request = place.asked(method, budget="40%")
    plan = place.store.plan(request)
    if not plan.error_estimate:
        pytest.skip("this budget leaves nothing out")
    for scale in (-3.0, 0.25):
        own = place.asked(method, budget="40%", parameters={"scale": scale})
        other = place.store.plan(own)
        assert other.error_estimate == pytest.approx(abs(scale) * plan.error_estimate, rel=1e-6)
        assert (other.error_bound is None) == (plan.error_bound is None)
        if plan.error_bound is None or other.error_bound is None:
            continue
        assert other.error_bound == pytest.approx(abs(scale) * plan.error_bound, rel=1e-3)
        part = place.merged(own, "part")
        full = place.merged(dataclasses.replace(own, budget=None), "full")
        names = list(full)
        zeros = {name: np.zeros(()) for name in names}
        norm = families.distance(place.family.base, zeros, names)
        assert families.distance(part, full, names) / norm <= other.error_bound


# -- the arithmetic, bit by bit --------------------------------------------------------------------


def mixed(
    method: str, given: dict[str, Any], weights: list[float], sides: list[Any], out: str
) -> Any:
    """The kernel's result for whole chunks of all experts."""
    base, *experts = sides
    own = operation(method, given, weights)
    result = np.zeros(base.size, dtype=reference.DTYPES[out])
    cuts = own.selection.thresholds(())
    thresholds = np.zeros(len(experts), dtype=np.float32) if cuts is None else cuts[0]
    mix_chunk(
        own.mix(),
        base.view(np.uint8),
        reference.name_of(base),
        np.stack([one.view(np.uint8) for one in experts]),
        [reference.name_of(one) for one in experts],
        list(range(len(experts))),
        base.size,
        0,
        thresholds,
        [UNLIMITED] * len(experts),
        np.zeros((len(experts), 2), dtype=np.uint32),
        result.view(np.uint8),
        out,
    )
    return result


def sides_of(count: int, dtype: str) -> list[Any]:
    """A base and experts; elements of some are the base's."""
    rng = np.random.default_rng(3)
    base = rng.standard_normal(5000).astype(np.float32)
    moved = [base + 0.1 * rng.standard_normal(5000).astype(np.float32) for _ in range(count)]
    sides = [one.astype(reference.DTYPES[dtype]) for one in (base, *moved)]
    for k, one in enumerate(sides[1:]):
        one[k::3] = sides[0][k::3]
        one[:100] = sides[0][:100]
    return sides


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("scale", [0.7, -1.5, 1e-3])
def test_the_last_factor_has_it(scale: float, dtype: str) -> None:
    """Where deltas are added, the result has the bits of lambda times scale in place of lambda, and
    is rounded to its type once."""
    sides = sides_of(3, dtype)
    weights = [0.5, 0.75, -0.25]
    for method, given in (
        ("task_arithmetic", {"lambda": 0.3}),
        ("ties", {"lambda": 2.0, "normalize": True}),
    ):
        product = float(np.float32(np.float64(np.float32(given["lambda"])) * np.float32(scale)))
        wanted = reference.merge(
            method, given | {"lambda": product}, weights, sides[0], sides[1:], out_dtype=dtype
        )
        found = mixed(method, given | {"scale": scale}, weights, sides, dtype)
        assert np.array_equal(families.bits(found), families.bits(wanted)), method


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("scale", [0.7, -1.5, 1e-3])
def test_a_sum_of_experts_has_the_base_in_it(scale: float, dtype: str) -> None:
    """Where whole experts are added, the base comes first with the factor 1 - scale, times the
    divisor, and each weight is times scale; the sum is divided and rounded to its type once."""
    base, *experts = sides_of(3, dtype)
    s = np.float64(np.float32(scale))
    for weights, normalize in (([0.5, 0.75, -0.25], False), ([0.3, 0.3, 0.2], True)):
        divisor = reference.sequential_sum(weights) if normalize else np.float32(1)
        factors = [np.float32((1 - s) * np.float64(divisor))]
        factors += [np.float32(np.float64(np.float32(one)) * s) for one in weights]
        total = np.zeros(base.size, dtype=np.float32)
        for side, factor in zip((base, *experts), factors, strict=True):
            total = reference.fused(reference.single(side), factor, total)
        wanted = reference.rounded(total / divisor, dtype)
        if normalize:
            still = np.all([families.bits(one) == families.bits(base) for one in experts], axis=0)
            wanted = np.where(still, families.bits(base), families.bits(wanted)).view(base.dtype)
        given = {"normalize": normalize, "scale": scale}
        found = mixed("linear", given, weights, [base, *experts], dtype)
        assert np.array_equal(families.bits(found), families.bits(wanted)), normalize


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_swap_has_the_base_in_it(dtype: str) -> None:
    """What nearswap makes, times scale, is added to the base times 1 - scale."""
    base, expert = sides_of(1, dtype)
    for scale in (0.7, -1.5):
        one = reference.single(base)
        moved = reference.swapped(one, reference.single(expert), 0.01)
        moved = np.where(families.bits(expert) == families.bits(base), one, moved)
        factors = np.float32(1 - np.float64(np.float32(scale))), np.float32(scale)
        total = reference.fused(one, factors[0], np.zeros_like(one))
        wanted = reference.rounded(reference.fused(moved, factors[1], total), dtype)
        still = moved == one
        wanted = np.where(still, families.bits(base), families.bits(wanted)).view(base.dtype)
        found = mixed("nearswap", {"t": 0.01, "scale": scale}, [1.0], [base, expert], dtype)
        assert np.array_equal(families.bits(found), families.bits(wanted))


# -- what it does not go with ----------------------------------------------------------------------


def test_without_a_base_it_is_refused() -> None:
    """A merge without a base has nothing to go on from, and says so; passthrough's own scale keeps
    its meaning, and no sum of factors may overflow."""
    for method in ("nuslerp", "multislerp"):
        with pytest.raises(BadRequest, match="around_base=false merges without one"):
            operation(method, {"around_base": False, "scale": 0.5}, [1.0, 1.0])
        operation(method, {"around_base": False, "scale": 1}, [1.0, 1.0])
    assert operation("passthrough", {"scale": 0.5}, [1.0]).weights == (0.5,)
    with pytest.raises(BadRequest, match="lambda times scale must be a finite float32"):
        operation("task_arithmetic", {"lambda": 1e30, "scale": 1e30}, [1.0]).mix()
    with pytest.raises(BadRequest, match="a weight times scale must be a finite float32"):
        operation("linear", {"scale": 1e30}, [1e30])
    with pytest.raises(BadRequest, match="scale is the same for all experts"):
        operation("ties", {"scale": "0.5,0.3"}, [1.0, 1.0])


RECIPE = """merge_method: {method}
base_model: base
models: [{{model: e0, parameters: {{weight: 1}}}}, {{model: e1, parameters: {{weight: 1}}}}]
parameters:
  scale: {scale}
"""


def test_a_recipe_has_it(place: Place) -> None:
    """A recipe states it like any other parameter, for all tensors or some; a remark says that
    mergekit has it not.  Written from the plan, the recipe gives the plan again."""
    text = RECIPE.format(method="ties", scale="[{filter: norm, value: 0.5}, {value: 0.7}]")
    found = place.store.read_recipe(text)
    assert found.request.parameters["scale"] == 0.7
    assert [rule.parameters["scale"] for rule in found.request.rules] == [0.5]
    assert any("mergekit ignores it" in str(remark) for remark in found.remarks)
    for method, more in (("consensus", ""), ("pcb", ""), ("lines", "  alpha: 1\n  beta: 1\n")):
        own = place.store.read_recipe(text.replace("ties", method) + more)
        assert not any("mergekit" in str(remark) for remark in own.remarks), method
    plan = place.store.plan(found.request)
    place.store.merge(plan, name="of-a-recipe")
    again = place.store.read_recipe(place.store.recipe("of-a-recipe"))
    assert place.store.plan(again.request).plan == plan.plan


def test_a_recipe_without_a_base_has_none(place: Place) -> None:
    """A recipe of an average without base_model is refused by its line if it has a scale other than
    1; and no recipe is written that would be."""
    text = RECIPE.replace("base_model: base\n", "").format(method="linear", scale=0.5)
    with pytest.raises(BadRequest, match="the recipe has no base_model") as refused:
        place.store.read_recipe(text)
    assert str(refused.value.where).endswith("line 4")
    place.store.read_recipe(text.replace("0.5", "1"))
    place.merged(place.asked("linear", parameters={"scale": 0.5}), "average")
    with pytest.raises(BadRequest, match="scale needs a base model"):
        place.store.recipe("average")


@pytest.mark.rest
def test_what_was_made_without_it_is_not_taken(place: Place) -> None:
    """Memo rows of a merge without a scale are not those of one with it, nor of another scale."""
    found = [
        place.merged(place.asked(method, parameters={"scale": scale}, only=["model.parts.weight"]))
        for method in ("ties", "linear", "nearswap", "fisher", "slerp")
        for scale in (1, 0.5, 2)
    ]
    for one in range(0, len(found), 3):
        for a, b in ((0, 1), (1, 2), (0, 2)):
            sides = found[one + a], found[one + b]
            assert any(not np.array_equal(sides[0][name], sides[1][name]) for name in sides[0])
