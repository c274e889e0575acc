"""Methods whose factors follow from inner products of whole tensors: what is read, and edges.

That they are those of the definitions, and have bounds, `test_every_method.py` shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
import reference
from checkpoints import write_safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.merge.methods.combinations import Mixed
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import METHODS, operation
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest

Double = npt.NDArray[np.float64]
Single = npt.NDArray[np.float32]
BLOCK = 1 << 16
N = 100_000


@dataclasses.dataclass
class Family:
    """A store with a base and three experts of two tensors, and what is in them."""

    root: Path
    store: Store
    members: dict[str, dict[str, Single]]

    def add(self, name: str, tensors: dict[str, Single]) -> None:
        """Store one more member."""
        self.members[name] = tensors
        write_safetensors(
            self.root / f"{name}.safetensors",
            [(one, "F32", (value.size,), value.tobytes()) for one, value in tensors.items()],
        )
        self.store.add(self.root / f"{name}.safetensors", name=name)

    def error(self, found: str, wanted: str) -> float:
        """The distance of two snapshots over the norm of the base."""
        gaps = [
            np.linalg.norm(
                self.store[found].tensor(one).astype(np.float64)
                - self.store[wanted].tensor(one).astype(np.float64)
            )
            for one in self.members["base"]
        ]
        norms = [
            np.linalg.norm(value.astype(np.float64)) for value in self.members["base"].values()
        ]
        return math.hypot(*gaps) / math.hypot(*norms)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Deltas of different sizes that have something in common, a hundredth of the base."""
    root = tmp_path_factory.mktemp("mixtures")
    rng = np.random.default_rng(5)
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        made = Family(root, store, {})
        base = {name: rng.standard_normal(N).astype(np.float32) for name in "ab"}
        common = {name: rng.standard_normal(N) for name in "ab"}
        made.add("base", base)
        for k in range(3):
            size = 0.01 * (1 + k)
            made.add(
                f"e{k}",
                {
                    name: (b + size * (0.5 * common[name] + rng.standard_normal(N))).astype("f4")
                    for name, b in base.items()
                },
            )
        yield made


@pytest.mark.rest
@pytest.mark.parametrize("method", ["model_stock", "multislerp", "karcher"])
def test_distances_are_read_together(method: str, tmp_path: Path) -> None:
    """The plan is that of a store where each pair was measured alone, with several types, too; and
    four experts are read four times for their six pairs, not six times."""
    three = families.layered(3, expert_dtypes=("BF16", "F32", "BF16"), rows=90)
    rng = np.random.default_rng(3)
    experts = [{**three.base, "more": rng.standard_normal(50_000).astype("f4")} for _ in range(4)]
    four = families.Family({**three.base, "more": np.zeros(50_000, "f4")}, tuple(experts))
    for number, made in enumerate((three, four)):
        root = made.write(tmp_path / f"{number}")
        asked = MergeRequest(base="base", experts=made.names, method=method)
        plans = []
        for known in (False, True):
            with Store.init(root / f"{known}", block_size=BLOCK, codec="raw") as store:
                for name in ("base", *made.names):
                    store.add(root / name, name=name, base=None if name == "base" else "base")
                if known:
                    for one, other in itertools.combinations(made.names, 2):
                        store.analyze(one, other)
                plans.append(store.plan(asked))
                assert store.plan(asked).analyze_bytes_read == 0
        assert plans[0].plan == plans[1].plan
    if method != "karcher":
        # Only one tensor differs.  (karcher also reads each for its own squares.)
        assert plans[0].analyze_bytes_read == len(experts) * experts[0]["more"].nbytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["model_stock", "nuslerp", "multislerp"])
def test_what_nobody_moves_stays_around_the_base(method: str, family: Family) -> None:
    """Around the base an element that no expert moves keeps its bits, -0 among them, and a share of
    the blocks can be left as it is; a sum of whole experts leaves none."""
    names = []
    for number, name in enumerate(("base", "e0", "e1", "e2")):
        tensors = {one: value.copy() for one, value in family.members[name].items()}
        tensors["a"][: N // 2] = family.members["base"]["a"][: N // 2]
        tensors["a"][:8] = -0.0
        names.append(f"half{number}")
        if names[-1] not in family.members:
            family.add(names[-1], tensors)
    experts = names[1 : 1 + (METHODS[method].experts or 3)]
    asked = MergeRequest(base="half0", experts=experts, method=method)
    family.store.merge(family.store.plan(asked), name="full")
    found, base = family.store["full"].tensor("a"), family.members["half0"]["a"]
    still = N // 2
    assert np.array_equal(found[:still].view(np.uint32), base[:still].view(np.uint32))
    assert not np.array_equal(found[still:], base[still:])
    plan = family.store.plan(dataclasses.replace(asked, top_p=0.3))
    family.store.merge(plan, name="sparse")
    assert plan.error_bound is not None
    assert family.error("sparse", "full") > 0
    if method != "model_stock":
        whole = dataclasses.replace(asked, parameters={"around_base": False}, top_p=0.3)
        with pytest.raises(BadRequest, match="changes every block"):
            family.store.plan(whole)


def test_passthrough_is_the_expert(family: Family) -> None:
    """With scale 1 the result has the expert's own blocks; with another it is the float32 product;
    nothing needs to be measured but what a budget needs."""
    asked = MergeRequest(base="base", experts=["e1"], method="passthrough")
    family.store.merge(family.store.plan(asked), name="same")
    tensors = [
        tensors_of(
            family.store._catalog, family.store._catalog.manifest(family.store[name].manifest)
        )
        for name in ("same", "e1")
    ]
    assert tensors[0] == tensors[1]
    scaled = dataclasses.replace(asked, parameters={"scale": "-0.3"})
    family.store.merge(family.store.plan(scaled), name="scaled")
    for name, value in family.members["e1"].items():
        assert np.array_equal(family.store["scaled"].tensor(name), value * np.float32(-0.3))
    plan = family.store.plan(dataclasses.replace(scaled, budget="50%"))
    family.store.merge(plan, name="part")
    assert plan.error_bound is not None
    assert 0 < family.error("part", "scaled") <= plan.error_bound
    # The base itself is scaled, too.
    base = dataclasses.replace(scaled, experts=["base"])
    family.store.merge(family.store.plan(base), name="based")
    assert np.array_equal(
        family.store["based"].tensor("a"), family.members["base"]["a"] * np.float32(-0.3)
    )
    sparse = family.store.plan(dataclasses.replace(asked, top_p=0.3))
    assert 0 < sparse.planned_expert_bytes < sparse.full_expert_bytes


# -- no-ops and refusals ---------------------------------------------------------------------

NEW = ("karcher", "model_stock", "multislerp", "nuslerp", "passthrough", "breadcrumbs_ties")


@pytest.mark.parametrize("method", NEW)
def test_a_merge_of_the_base_is_the_base(method: str, family: Family) -> None:
    """If all experts are the base there is nothing to merge, and converted it is the base's values,
    whatever rounding would make of a mean."""
    count = METHODS[method].experts or 3
    asked = MergeRequest(base="base", experts=["base"] * count, method=method)
    with pytest.raises(BadRequest, match="no expert differs"):
        family.store.plan(asked)
    other = dataclasses.replace(asked, dtype="bfloat16")
    family.store.merge(family.store.plan(other), name="narrow")
    base = family.members["base"]["a"]
    found = family.store["narrow"].tensor("a")
    assert np.array_equal(found, reference.rounded(base, "BF16").astype(found.dtype))


@pytest.mark.parametrize("method", ["karcher", "model_stock", "multislerp", "nuslerp"])
def test_equal_experts_are_that_expert(method: str, family: Family) -> None:
    """Equal experts give that expert but for rounding, and are read once."""
    count = METHODS[method].experts or 3
    asked = MergeRequest(base="base", experts=["e1"] * count, method=method)
    plan = family.store.plan(asked)
    done = family.store.merge(plan, name="equal", memo=False)
    assert done.expert_bytes_read == sum(one.nbytes for one in family.members["e1"].values())
    for name, value in family.members["e1"].items():
        base = family.members["base"][name]
        gap = np.abs(family.store["equal"].tensor(name) - value)
        assert float((gap / (np.abs(base) + np.abs(value - base))).max()) <= 2.0**-22


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("nuslerp", {}), ("multislerp", {"normalize_weights": False}), ("breadcrumbs_ties", {})],
)
def test_weights_of_zero_leave_the_base(
    method: str, parameters: dict[str, Any], family: Family
) -> None:
    """Experts without weight are not read, and a merge of them is refused as the base itself."""
    experts = [("e0", 0.0), ("e1", 0.0)]
    asked = MergeRequest(base="base", experts=experts, method=method, parameters=parameters)
    with pytest.raises(BadRequest, match="no expert has a weight"):
        family.store.plan(asked)
    meant = family.store.plan(asked, allow_noop=True)
    assert (meant.planned_expert_bytes, meant.analyze_bytes_read) == (0, 0)


@pytest.mark.parametrize("method", ["nuslerp", "multislerp"])
@pytest.mark.parametrize("around_base", [True, False])
def test_an_expert_without_weight_is_not_looked_at(
    method: str, around_base: bool, family: Family
) -> None:
    """Weight 0 leaves the other expert, though the one without weight is full of NaN."""
    if "nan" not in family.members:
        family.add("nan", {one: np.full(N, np.nan, dtype=np.float32) for one in "ab"})
    asked = MergeRequest(
        base="base",
        experts=[("nan", 0.0), ("e1", 0.5)],
        method=method,
        parameters={"around_base": around_base},
    )
    family.store.merge(family.store.plan(asked), name="one")
    for name, value in family.members["e1"].items():
        assert np.allclose(family.store["one"].tensor(name), value, rtol=1e-6, atol=1e-6)
    with pytest.raises(BadRequest, match="infinite or NaN") as refused:
        family.store.plan(dataclasses.replace(asked, experts=[("nan", 0.5), ("e1", 0.5)]))
    assert refused.value.where == "a"


def test_singular_model_stock_is_the_base(family: Family) -> None:
    """Opposite deltas have no stock: each such tensor stays the base's, and a merge of nothing else
    is refused."""
    base, own = family.members["base"], family.members["e0"]
    rounded = {one: np.round(own[one] - base[one], 3).astype(np.float32) for one in "ab"}
    grid = {one: np.round(base[one] * 4) / np.float32(4) for one in "ab"}
    steps = {one: np.sign(rounded[one]) / np.float32(8) for one in "ab"}
    for name, sign in (("grid", 0), ("up", 1), ("down", -1)):
        if name not in family.members:
            family.add(name, {one: grid[one] + np.float32(sign) * steps[one] for one in "ab"})
    asked = MergeRequest(base="grid", experts=["up", "down"], method="model_stock")
    with pytest.raises(BadRequest, match="leave nothing of the experts"):
        family.store.plan(asked)
    # Two vectors without a mean direction are interpolated linearly; three are refused.
    slerped = dataclasses.replace(asked, method="multislerp")
    family.store.merge(family.store.plan(slerped), name="balanced")
    assert np.array_equal(family.store["balanced"].tensor("a"), grid["a"])
    opposed = dataclasses.replace(slerped, experts=[("up", 0.5), ("down", 1.0), ("up", 0.5)])
    with pytest.raises(BadRequest, match="balance out") as refused:
        family.store.plan(opposed)
    assert refused.value.where == "a"
    linear = dataclasses.replace(asked, method="nuslerp", experts=[("up", 0.75), ("down", 0.25)])
    family.store.merge(family.store.plan(linear), name="opposed")
    wanted = grid["a"] + (np.float32(0.75) - np.float32(0.25)) * steps["a"]
    assert np.array_equal(family.store["opposed"].tensor("a"), wanted)


def test_weights_that_add_up_to_nothing(family: Family) -> None:
    """Multislerp refuses to divide by weights that add up to zero, and nuslerp of wholes to make
    nothing; both name the tensor."""
    two = MergeRequest(base="base", experts=[("e0", 1.0), ("e1", -1.0)], method="multislerp")
    with pytest.raises(BadRequest, match="add up to zero") as refused:
        family.store.plan(two)
    assert refused.value.where == "a"
    nothing = dataclasses.replace(
        two,
        method="nuslerp",
        experts=[("e0", 0.0), ("e1", 0.0)],
        parameters={"around_base": False},
    )
    with pytest.raises(BadRequest, match="of weight 0 is nothing"):
        family.store.plan(nothing)


def settled(method: str, weights: Sequence[float], vectors: Sequence[Double]) -> Operation:
    """The operation of vectors around a base of zeros."""
    zero = np.zeros_like(vectors[0])
    sides = [zero, *vectors]
    gram = [[float(one @ other) for other in sides] for one in sides]
    return mixed(operation(method, {}, weights), gram)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["karcher", "model_stock", "multislerp", "nuslerp"])
@settings(max_examples=100, deadline=None)
@example(([1.0, 1.0], [[1.0, 0.0], [-1.0, 0.0]]))
@example(([1.0, 2.0], [[0.0, 0.0], [0.0, 0.0]]))
@example(([1.0, 2.0], [[1e-30, 0.0], [3e4, 3e-4]]))
@example(([1.0, 1.0], [[1.0, 1e-7], [-1.0, 0.0]]))
@given(
    st.integers(2, 4).flatmap(
        lambda count: st.tuples(
            st.lists(st.floats(0.125, 8, width=32), min_size=count, max_size=count),
            st.lists(
                st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
                min_size=count,
                max_size=count,
            ),
        )
    )
)
def test_any_vectors_have_finite_factors_or_are_refused(
    method: str, case: tuple[list[float], list[list[float]]]
) -> None:
    """Zeros, parallel, opposite and tiny vectors give finite factors or are refused; a model stock
    keeps the direction of the mean, and multislerp the mean of the norms."""
    weights, rows = case
    vectors = [np.array(row, dtype=np.float64) for row in rows]
    if method == "nuslerp":
        weights, vectors = weights[:2], vectors[:2]
    if not METHODS[method].weighted:
        weights = [1.0] * len(weights)
    try:
        made = settled(method, weights, vectors)
    except BadRequest:
        assert method == "multislerp"
        return
    assert all(map(math.isfinite, made.weights))
    if method == "model_stock":
        assert len(set(made.weights)) == 1
    norms = [float(np.linalg.norm(one)) for one in vectors]
    if method == "multislerp" and min(norms) > 1:
        total = math.fsum(weights)
        units = [w * one / norm for w, one, norm in zip(weights, vectors, norms, strict=True)]
        if np.linalg.norm(np.sum(units, axis=0)) > 0.01 * total:
            found = np.sum([c * one for c, one in zip(made.weights, vectors, strict=True)], axis=0)
            wanted = math.fsum(w * norm for w, norm in zip(weights, norms, strict=True)) / total
            assert np.linalg.norm(found) == pytest.approx(wanted, rel=1e-4)


def mixed(own: Operation, gram: Any) -> Operation:
    """The operation of a tensor with these inner products."""
    combine = own.method.combine
    assert isinstance(combine, Mixed)
    return combine.mixed(own, gram)


def gram_of(vectors: Sequence[Double]) -> list[list[float]]:
    """The inner products that a method gets of experts: the base is zero, or has no part."""
    sides = [np.zeros_like(vectors[0]), *vectors]
    return [[float(a @ b) for b in sides] for a in sides]


ENDS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        ("karcher", {"tol": tol, "max_iter": n})
        for tol in (0, 5e-324, 1)
        for n in (0, 1, 2**63 - 1)
    ),
    *(("slerp", {"t": t}) for t in (0, 5e-324, 1)),
    *(("nuslerp", {"around_base": around}) for around in (False, True)),
    *(
        ("multislerp", {"eps": eps, "normalize_weights": normalize})
        for eps in (0, 5e-324, 1)
        for normalize in (False, True)
    ),
    ("model_stock", {}),
)
WEIGHTED = ("nuslerp", "multislerp")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("method", "parameters"), ENDS)
def test_parameters_at_the_ends_of_their_ranges(method: str, parameters: dict[str, Any]) -> None:
    """At the ends of the ranges of their parameters, methods mix vectors that are equal, parallel,
    opposite, tiny, huge or zero by finite factors, or refuse in their own words; and soon."""
    rng = np.random.default_rng(4)
    one, other = rng.standard_normal((2, 64))
    scales = (1.0, 0.5, -1.0, 1e-44, 1e38, -1e38, 0.0, 3.0000001)
    vectors = [np.zeros(64), other, one + 1e-9 * other, *(scale * one for scale in scales)]
    sides: tuple[tuple[float, ...], ...] = ((1.0, 1.0),)
    if method in WEIGHTED:
        sides += ((1e-45, 3e38), (1.0, -0.99999), (1e38, -1e38), (0.0, 2.0))
    count = 1 if method == "slerp" else 2
    for first, second in itertools.product(vectors, repeat=2):
        for weights in sides:
            asked = operation(method, parameters, weights[:count])
            gram = gram_of([first, second])
            if method == "slerp":
                gram = [row[1:] for row in gram[1:]]
            with contextlib.suppress(BadRequest):
                assert np.isfinite(mixed(asked, gram).weights).all()


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_the_mean_of_parallel_vectors_without_a_tolerance(factor: float) -> None:
    """Without a tolerance, the Karcher mean of parallel vectors has their direction and the mean of
    their norms; of opposite ones it has the first's."""
    one = np.random.default_rng(5).standard_normal(256)
    for sign in (1, -1):
        asked = operation("karcher", {"tol": 0, "max_iter": 2**63 - 1}, (1.0, 1.0))
        a, b = mixed(asked, gram_of([one, sign * factor * one])).weights
        assert np.allclose(a * one + b * sign * factor * one, (1 + factor) / 2 * one, rtol=1e-6)


def test_steps_of_karcher_end() -> None:
    """However many steps are allowed, and without a tolerance, Karcher's steps end; a thousand are
    always taken if asked for."""
    rng = np.random.default_rng(6)
    far = [*np.eye(64)[:3], *(-np.eye(64)[:3] + 1e-3 * rng.standard_normal((3, 64)))]
    for vectors in (far, list(rng.standard_normal((5, 64)))):
        gram = gram_of(vectors)
        found = {}
        for count in (999, 1000, 2**63 - 1):
            asked = operation("karcher", {"tol": 0, "max_iter": count}, (1.0,) * len(vectors))
            found[count] = mixed(asked, gram).weights
            assert np.isfinite(found[count]).all()
        # The first are near their mean after ten steps; no further step changes more than rounding.
        if vectors is not far:
            assert np.allclose(found[999], found[2**63 - 1], rtol=1e-6)
