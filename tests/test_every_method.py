"""What holds for every merge method, made from its declaration: whoever adds one, adds these.

Parameters are drawn from the ranges that a method states, experts and weights as it takes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import Arrays, Family
from method_rows import KINDS, LONE, ROWS, SAME, TURNED, TWO, Place, Row, family, made, require

from mstore import MergeRequest, Store
from mstore.api.reports import PlanReport
from mstore.merge.measures import deltas
from mstore.merge.methods import registry
from mstore.merge.methods.method import Method, Operation
from mstore.merge.methods.parameters import Parameter
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import EQUAL, Plan
from mstore.terms.errors import BadRequest

EXPERTS = 3
DRAWS = 2
"""Draws of parameters that every run tries; the long lane tries more."""
CASES = [
    pytest.param(name, seed, marks=[pytest.mark.slow] if seed >= DRAWS else [])
    for name in METHODS
    for seed in range(8)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Experts that change all, parts or nothing of a tensor, that share blocks, and are of other
    types."""
    own = families.layered(5, expert_dtypes=("BF16", "F32", "BF16"), rows=90).informed()
    found = made(tmp_path_factory.mktemp("family"), own)
    yield found
    found.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """The family of the rows, of each kind, made when it is asked for."""
    found: dict[str, Place] = {}

    def place_of(kind: str) -> Place:
        if kind not in found:
            found[kind] = made(tmp_path_factory.mktemp(kind), family(kind))
        return found[kind]

    yield place_of
    for one in found.values():
        one.close()


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
        if "block" in given:
            # What its companions have.
            given["block"] = families.WIDTHS["g"]
        try:
            method.apply(given, weights)
        except BadRequest:
            continue
        return MergeRequest(
            base="base",
            experts=list(zip(experts, weights, strict=True)),
            method=method.name,
            parameters=given,
            companions=families.companions_for([one.role for one in method.companions], experts),
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


@pytest.mark.sampled(25)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_merge_is_a_function_of_its_inputs(name: str, seed: int, place: Place) -> None:
    """Any number of threads, any block size, with a memo table and without, stored or computed on
    read, run again from its plan: the same bits; and all of the budget is the merge without one."""
    request = asked(METHODS[name], random.Random(f"{name} {seed}"))
    plan = place.store.plan(request, allow_noop=True, threads=1)
    alone, tensors = merged(place, plan, memo=False, threads=1)
    assert place.store.replay("merged").same
    assert place.store.import_plan(place.store.export_plan(str(plan.plan))).plan == plan.plan
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


@pytest.mark.sampled(50)
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
def family_alike() -> Family:
    """Experts of the base's type, so that what they leave alone has the base's blocks."""
    return families.layered(6, rows=90).informed()


@pytest.fixture(scope="module")
def alike(family_alike: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store of them."""
    root = family_alike.write(tmp_path_factory.mktemp("alike"))
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", *family_alike.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in (*family_alike.fisher_names, *family_alike.facts):
            store.add(root / name, name=name)
        yield store


@pytest.mark.sampled(25)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_blocks_of_the_base_are_free(
    name: str, seed: int, alike: Store, family_alike: Family
) -> None:
    """A block that equals the base's is never read; where no expert has another one, and the
    operation keeps the base, the result has the base's own blocks."""
    request = replace(asked(METHODS[name], random.Random(f"{name} {seed}")), dtype=None)
    report = alike.plan(request, allow_noop=True)
    done = alike.merge(report, name="merged", memo=False)
    plan = alike._catalog.record(Plan, report.plan)
    chunk = families.BLOCK // 2
    experts = [family_alike.experts[int(name[1:])] for name, _ in request.experts]
    for tensor in plan.tensors:
        base = family_alike.base[tensor.name].ravel()
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


# -- rows ------------------------------------------------------------------------------------------


def test_every_method_has_a_row() -> None:
    """A method without a row would be compared with nothing."""
    assert {row.method for row in ROWS} == METHODS.keys()


FIRST = list({(row.method, row.rows): row for row in reversed(ROWS)}.values())
"""A row of each method, and of each that has a way by rows."""


def kinds(usual: str, rows: Sequence[Row]) -> list[Any]:
    """Some rows of the usual kind; the rest has the other rows, and the other kinds."""
    return [
        pytest.param(
            row,
            kind,
            marks=[] if kind == usual and row in rows else [pytest.mark.rest],
            id=f"{row}-{kind}",
        )
        for row in ROWS
        for kind in KINDS
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("row", "kind"), kinds("BF16", FIRST))
def test_a_merge_is_its_definition(row: Row, kind: str, places: Callable[[str], Place]) -> None:
    """Tensors of every shape are what the definition says, and of the first row of a method also
    those computed on read and in blocks of another size (of other kinds those of each row); experts
    move and leave some of it."""
    place, dtype = places(kind), None if row.definition is None else "F32"
    plan = place.store.plan(row.request(dtype=dtype))
    place.store.merge(plan, name="merged", memo=False)
    found = place.tensors("merged")
    require(place, row, found, place.record(plan), dtype=dtype)
    base = place.family.base["parts"].astype(np.float32)
    moved = np.mean(base != found["parts"].astype(np.float32))
    assert 0.001 < moved < 0.99 or operation(row.request()).selection.is_whole
    if kind != "BF16" or row in FIRST:
        place.store.merge(plan, name="virtual", virtual=True)
        same(place.tensors("virtual"), found)
        place.other.merge(place.other.plan(row.request(dtype=dtype)), name="merged")
        same(place.tensors("merged", place.other), found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("row", "kind"), kinds("F32", [*FIRST[::2], Row("sce", {"select_topk": 0.2}, SAME)])
)
def test_what_is_not_read_is_the_bases(row: Row, kind: str, places: Callable[[str], Place]) -> None:
    """Under a budget thresholds and factors are those of whole models, which are measured once, and
    what is not read counts as not moved; an error has a bound that holds and is near it, or an
    estimate that is near it in float32.  Where types differ, thresholds may need a second look."""
    place = places(kind)
    # Where a row is one element, leaving one out may turn it around.
    asked = row.request(dtype="F32", skip=["column"] if row.rows else [])
    place.store.merge(place.store.plan(asked), name="full")
    plan = place.store.plan(replace(asked, budget="50%", analyze=kind != "F32"))
    assert plan.analyze_bytes_read == 0 or kind != "F32"
    done = place.store.merge(plan, name="part", memo=False)
    assert 0 < done.expert_bytes_read == plan.planned_expert_bytes <= plan.full_expert_bytes / 2
    found = place.tensors("part")
    require(place, row, found, place.record(plan), dtype="F32")
    error = place.error(found, place.tensors("full"))
    assert plan.error_estimate is not None
    assert (plan.error_bound is not None) == operation(asked).has_bound
    if plan.error_bound is not None:
        # The bound of a matrix is that of its largest singular value.
        assert 0 < error <= plan.error_bound < (20 if row.method == "regmean" else 2) * error
    least = 0.1 if row.rows else 0.3
    assert least < plan.error_estimate / error < 1 / least or kind != "F32"


FACTS = [
    Row("arcee_fusion", {}, LONE),
    Row("sce", {"select_topk": 0.2}, SAME),
    Row("ramplus_tl", {"epsilon": 0.02}, SAME),
    Row("della_linear", {"density": 0.5}),
    Row("pcb"),
    Row("model_stock", {}, SAME),
    Row("multislerp"),
    Row("karcher", {}, SAME),
    Row("geometric_median", {}, SAME),
    Row("add_perpendicular", {"alpha": 0.7}, SAME[:2]),
    Row("guarded", {"threshold": 0.5}, SAME[:2]),
    Row("safe_merge", {}, SAME[:2]),
    Row("slerp", {"t": 0.3}, LONE),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", FACTS, ids=str)
def test_facts_are_measured_once(row: Row, places: Callable[[str], Place], tmp_path: Path) -> None:
    """What must be known of whole tensors is read once, apart from the budget, and known afterwards
    in any order of experts; without analysis the merge is refused, with the way on."""
    with places("BF16").bare(tmp_path / "store") as store:
        asked = row.request()
        with pytest.raises(BadRequest, match="not all are known") as refused:
            store.plan(replace(asked, analyze=False))
        assert "analyze" in str(refused.value.hint)
        known = store.plan(asked)
        assert known.analyze_bytes_read > 0
        assert store.plan(replace(asked, analyze=False)).plan == known.plan
        assert store.plan(replace(asked, analyze=False, budget="50%")).planned_expert_bytes > 0
        if row.method in ("ramplus_tl", "model_stock", "multislerp", "karcher", "geometric_median"):
            turned = replace(asked, experts=list(asked.experts)[::-1])
            assert store.plan(turned).analyze_bytes_read == 0
        if row.method == "ramplus_tl":
            fewer = replace(asked, experts=["e0", "e2"])
            assert store.plan(fewer).analyze_bytes_read > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", [FACTS[1], FACTS[4]], ids=str)
def test_large_tensors_are_read_once_more(
    row: Row, places: Callable[[str], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether what is measured of a tensor is kept meanwhile or not, the plan is the same; keeping
    saves a read of the experts."""
    plans = []
    for most in (1 << 25, 0):
        monkeypatch.setattr(deltas, "_MOST_KEPT", most)
        with places("BF16").bare(tmp_path / str(most)) as store:
            plans.append(store.plan(row.request()))
    kept, again = plans
    assert kept.plan == again.plan
    reads = again.analyze_bytes_read - kept.analyze_bytes_read
    assert 0.9 < reads / kept.full_expert_bytes <= 2


REMEMBERED = {
    (row.method, row.rows): row
    for row in reversed(ROWS)
    if METHODS[row.method].facts
    or METHODS[row.method].companions
    or METHODS[row.method].is_ours
    or row.definition
    or row.method in ("della", "della_linear", "nearswap", "ram")
}


def variants(row: Row) -> Iterator[MergeRequest]:
    """Requests that differ from a row's, each in something that its result depends on."""
    method, names, weights = METHODS[row.method], row.experts, row.weights
    many = list(zip(names, weights, strict=True))
    for other in ROWS:
        if other.method == row.method and len(other.weights) == len(weights):
            yield other.request()
    yield row.request(base="turned-base", experts=[(f"turned-{n}", w) for n, w in many])
    if method.weighted:
        yield row.request(experts=[*many[:-1], (names[-1], 0.3)])
    if len(row.request().companions) > 1:
        first, second, *others = row.request().companions.items()
        yield row.request(companions=dict([(first[0], second[1]), (second[0], first[1]), *others]))
    if method.experts != 1:
        yield row.request(experts=list(zip(names[::-1], weights, strict=True)))
    if method.experts is None:
        given = {n: v for n, v in row.given.items() if not isinstance(v, tuple)}
        given |= {"k": 1} if row.method == "consensus" else {}
        for experts in (many[:2], [*many, ("near", 1.0)], [*many, ("base", 1.0)]):
            yield row.request(experts=experts, parameters=given)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("row", REMEMBERED.values(), ids=str)
def test_what_is_remembered_is_of_the_same_merge(row: Row, places: Callable[[str], Place]) -> None:
    """With other weights, parameters, rows, an expert more, less, or one that moves nothing or
    little, a merge with the memo table is that without."""
    place = places("BF16")
    own = place.family
    near = {"blocks": own.base["blocks"].copy()}
    near["blocks"][-4:] += near["blocks"][-4:]
    place.add("near", own.base | near)
    members = dict(zip((*own.names, *own.fisher_names), (*own.experts, *own.fishers), strict=True))
    for name, arrays in {"base": own.base, **members}.items():
        place.add(f"turned-{name}", {"blocks": arrays["blocks"].reshape(132, 512)})
    for name, arrays in own.facts.items():
        # Half of the inputs.
        of_half = 3 if name[0] == "h" else len(arrays["blocks"]) // 2
        place.add(f"turned-{name}", {"blocks": arrays["blocks"][:of_half]})
    for asked in variants(row):
        plan = place.store.plan(replace(asked, only=["blocks"]), allow_noop=True)
        done = place.store.merge(plan, name="remembered")
        assert place.store.merge(plan, name="anew", memo=False).manifest == done.manifest


# -- what costs nothing ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Statistics are not there; the second expert has a NaN and an infinity."""
    rng = np.random.default_rng(5)
    root = tmp_path_factory.mktemp("sick")
    base = {"w": families.cast(rng.standard_normal((70, 1024)), "BF16")}
    moved = [base["w"].astype(np.float32) + rng.standard_normal((70, 1024)) for _ in range(3)]
    moved[1][0, :2] = np.nan, np.inf
    experts = tuple({"w": families.cast(one, "BF16")} for one in moved)
    Family(base, experts).informed().write(root)
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for name in ("base", "e0", "e1", "e2", "f0", "f1", "g0", "g1", families.INPUTS):
            store.add(root / name, name=name)
        yield store


WEIGHTED = {
    row.method: row
    for row in reversed(ROWS)
    if METHODS[row.method].weighted and not METHODS[row.method].experts
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", WEIGHTED)
def test_weight_0_is_free(method: str, sick: Store) -> None:
    """Nothing of such an expert is read, for statistics neither; the merge is that of the others,
    stored and in the shares of blame, but for what the method divides by."""
    given = {n: v for n, v in WEIGHTED[method].given.items() if not isinstance(v, tuple)}
    if method == "consensus":
        # Who has no weight needs nothing.
        given["k"] = 1
    row = replace(WEIGHTED[method], given=given)
    alone = sick.plan(row.request(experts=[("e0", 1.0)]))
    both = sick.plan(row.request(experts=[("e0", 1.0), ("e1", 0.0)]))
    assert both.analyze_bytes_read == 0
    assert both.full_expert_bytes == both.planned_expert_bytes == alone.full_expert_bytes
    assert both.error_share_estimate == 0.0
    for plan, name in ((alone, "alone"), (both, "both")):
        sick.merge(plan, name=name, memo=False)
    same({"w": sick["both"].tensor("w")}, {"w": sick["alone"].tensor("w")})
    shares = {one.expert: one.share for one in sick.blame("both").experts}
    assert (shares["e0"] or 0) > 0.0
    assert shares["e1"] == 0.0


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_lambda_0_is_free(method: str, sick: Store) -> None:
    """Nothing is read, and in another dtype the result is the base's, converted."""
    row = replace(WEIGHTED[method], given={"lambda": 0.0})
    plan = sick.plan(row.request(experts=[("e0", 1.0), ("e1", 1.0)], dtype="F32"))
    assert (plan.full_expert_bytes, plan.analyze_bytes_read) == (0, 0)
    sick.merge(plan, name="none")
    assert np.array_equal(sick["none"].tensor("w"), sick["base"].tensor("w").astype(np.float32))


# -- what is refused -------------------------------------------------------------------------------

REFUSED: tuple[tuple[str, dict[str, Any], Sequence[float], str], ...] = (
    ("nearswap", {}, LONE, "needs a value for t"),
    ("nearswap", {"t": -1.0}, LONE, "t must be in"),
    ("nearswap", {"t": 0.1}, SAME, "one expert"),
    ("nearswap", {"t": 0.1}, [0.5], "has no weight; its parameters: t"),
    ("arcee_fusion", {}, SAME, "one expert"),
    ("arcee_fusion", {}, [0.5], "no weight"),
    ("arcee_fusion", {"density": 0.5}, LONE, "no parameter"),
    ("consensus", {"k": 0}, [1.0, 1.0], "k must be in"),
    ("consensus", {"k": 3}, [1.0, 1.0], "k is 3: no element"),
    ("consensus", {"k": 3}, [1.0, 1.0, 0.0], "of 2 experts that have a weight"),
    ("consensus", {}, [1.0, 1.0], "below 1"),
    ("consensus", {"tall_mask_lambda": (0.5, 2.0)}, [1.0, 1.0], "below 1"),
    ("consensus", {"tall_mask_lambda": -1}, SAME, "tall_mask_lambda must be in"),
    ("consensus", {"tall_mask_lambda": (1.0, 2.0)}, SAME, "2 values"),
    ("ram", {"epsilon": -1e-5}, SAME, "epsilon must be in"),
    ("ram", {"epsilon": (0.1, 0.2)}, [1.0, 1.0], "same for all experts"),
    ("ram", {"r": 0.1}, SAME, "no parameter 'r'"),
    ("ram", {}, TWO, "has no weight"),
    ("ramplus_tl", {"r": -0.1}, SAME, "r must be in"),
    ("ramplus_tl", {"alpha": -0.1}, SAME, "alpha must be in"),
    ("sce", {"select_topk": 0}, SAME, "select_topk must be in"),
    ("sce", {"select_topk": 1.5}, SAME, "select_topk must be in"),
    ("sce", {}, TWO, "has no weight"),
    ("della", {"density": 0.1}, SAME, "between 0 and 1"),
    ("della", {"density": 0.9, "epsilon": 0.2}, SAME, "between 0 and 1"),
    ("della_linear", {"density": (0.5, 0.05)}, TWO, "between 0 and 1"),
    ("dare_ties", {"rescale": "l2"}, SAME, "or l1"),
    ("dare_ties", {"rescale": 0.5}, SAME, "true or false"),
    ("fisher", {}, [-1.0], "must not be negative"),
    ("fisher", {"floor": -1}, LONE, "floor must be in"),
    ("train_difference", {}, LONE, "2 experts"),
    ("train_difference", {}, TWO, "has no weight; its parameters: alpha"),
    ("clamp", {}, LONE, "at least 2 experts"),
    ("clamp", {"stiffness": 1.5}, SAME, "stiffness must be in"),
    ("tensor_sum", {"width": 1.5}, LONE, "width must be in"),
    ("tensor_sum", {}, SAME, "one expert"),
    ("geometric_median", {"eps": 0}, SAME, "eps must be in"),
    ("geometric_median", {}, TWO, "has no weight; its parameters: max_iter"),
    ("add_perpendicular", {}, LONE, "2 experts"),
    ("guarded", {}, [1.0, 1.0], "needs a value for threshold"),
    ("guarded", {"threshold": 1.5}, [1.0, 1.0], "threshold must be in"),
    ("guarded", {"threshold": 0.5, "alpha": -1}, [1.0, 1.0], "alpha must be in"),
    ("guarded", {"threshold": 0.5}, LONE, "2 experts"),
    ("guarded", {"threshold": 0.5}, TWO, "no weight"),
    ("safe_merge", {"threshold": -0.1}, [1.0, 1.0], "threshold must be in"),
    ("safe_merge", {"alpha": 1.1}, [1.0, 1.0], "alpha must be in"),
    ("safe_merge", {}, LONE, "2 experts"),
    ("safe_merge", {}, TWO, "no weight"),
    ("emr", {}, TWO, "no weight"),
    ("emr", {"lambda": 0.5}, SAME, "no parameter"),
    ("masked", {"density": 0.5}, LONE, "no parameter"),
    ("model_stock", {}, LONE, "at least 2 experts"),
    ("model_stock", {}, TWO, "has no weight; its parameters: filter_wise"),
    ("nuslerp", {}, LONE, "2 experts, not 1"),
    ("nuslerp", TURNED | {"nuslerp_row_wise": True}, TWO, "turns columns"),
    ("nuslerp", TURNED | {"around_base": False}, [0.0, 0.0], "of weight 0 is nothing"),
    ("karcher", {}, TWO, "has no weight"),
    ("karcher", {"max_iter": -1}, SAME, "max_iter"),
    ("karcher", {"max_iter": 2**63}, SAME, "max_iter"),
    ("lines", {"alpha": 1.0}, SAME, "needs a value for beta"),
    ("passthrough", {}, SAME, "one expert"),
    ("passthrough", {}, [0.5], "has no weight; its parameters: scale"),
    ("passthrough", {"scale": 1e39}, LONE, "scale"),
)


@pytest.mark.parametrize(("method", "given", "weights", "says"), REFUSED)
def test_what_a_method_does_not_take(
    method: str, given: dict[str, Any], weights: Sequence[float], says: str
) -> None:
    """Values out of range or that agree with no merge, other numbers of experts, and weights where
    there are none, are refused by name."""
    with pytest.raises(BadRequest, match=says):
        registry.operation(method, given, weights)


@pytest.mark.parametrize(
    "row", [*(one for one in FACTS if one.method != "ramplus_tl"), Row("sce", {}, SAME)], ids=str
)
def test_what_is_not_finite_has_no_facts(row: Row, sick: Store) -> None:
    """An expert with a NaN has no scores, quartiles, norms or directions: the tensor is named;
    counts of who moves an element it has."""
    experts = [("e1", row.weights[0]), *zip(["e0"] * 2, row.weights[1:], strict=False)]
    if row.method == "ramplus_tl":
        sick.plan(row.request(experts=experts))
        return
    with pytest.raises(BadRequest, match="infinite or NaN") as refused:
        sick.plan(row.request(experts=experts))
    assert refused.value.where == "w"


# -- recipes ---------------------------------------------------------------------------------------

WRITTEN = {
    row.method: row
    for row in ROWS
    if not METHODS[row.method].is_ours
    and not row.method.startswith("dare")
    and not METHODS[row.method].lists_base
    and not row.rows
    and not any(isinstance(one, tuple) for one in row.given.values())
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("row", WRITTEN.values(), ids=str)
def test_a_recipe_of_mergekit(row: Row, listed: bool, places: Callable[[str], Place]) -> None:
    """mergekit's recipe gives the same plan, with the base among its models or not, and without a
    remark; its int8_mask says nothing."""
    store = places("BF16").store
    document: dict[str, Any] = {
        "merge_method": row.method,
        "base_model": "base",
        "models": [{"model": "base"}] * listed
        + [
            {"model": name}
            | ({"parameters": {"weight": weight}} if METHODS[row.method].weighted else {})
            for name, weight in zip(row.experts, row.weights, strict=True)
        ],
        "parameters": {**row.given, "int8_mask": True},
    }
    read = store.read_recipe(json.dumps(document))
    assert store.plan(read.request).plan == store.plan(row.request()).plan
    assert not read.remarks
