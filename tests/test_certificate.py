"""The certified bound against exact arithmetic, on numbers made to break it.

One chunk of a few elements, base and experts of float32 from subnormal to nearly infinite, weights
that cancel; the library's statistics, planner and kernel.  What is measured is computed in
fractions.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstore import MergeRequest
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.methods.combinations import Mixed
from mstore.merge.methods.lines import Layered
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import find, operation
from mstore.merge.methods.selection import ChunkFacts
from mstore.merge.planning.planner import Planner
from mstore.merge.planning.request import resolve
from mstore.merge.planning.statistics import without_nan
from mstore.merge.planning.survey import KEEPS_NONE, ExpertTensor, Survey, SurveyedTensor
from mstore.models.stats import deltas
from mstore.models.stats.histogram import Histogram, select
from mstore.store.models import Input
from mstore.store.objects.plan import OMITTED, READ
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest
from mstore.terms.ids import ManifestId, SnapshotId, TensorId

Single = npt.NDArray[np.float32]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linear", {"normalize": False}),
    ("task_arithmetic", {}),
    ("task_arithmetic", {"normalize": True, "lambda": 0.3}),
    ("task_arithmetic", {"lambda": -3e38}),
    ("lines", {"alpha": 0.3, "beta": -1.1}),
    ("dare_linear", {"density": 0.5, "seed": 1}),
    ("dare_linear", {"density": 0.01, "seed": 1, "normalize": True, "lambda": 1e-3}),
    ("breadcrumbs", {"density": 0.5, "gamma": 0.3}),
    ("breadcrumbs", {"density": 0.7, "gamma": 0.1, "normalize": True, "lambda": -2.0}),
    ("slerp", {"t": 0.3}),
    ("slerp", {"t": 0.999}),
    ("passthrough", {"scale": -1.25}),
    ("nearswap", {"t": 1e-3}),
    ("nearswap", {"t": 3.0}),
    ("nearswap", {"t": 1e38}),
    ("model_stock", {}),
    ("nuslerp", {}),
    ("nuslerp", {"around_base": False}),
    ("multislerp", {}),
    ("multislerp", {"around_base": False, "normalize_weights": False}),
    ("karcher", {}),
    ("guarded", {"threshold": 0.1, "alpha": 0.3}),
    ("geometric_median", {"max_iter": 7}),
    ("add_perpendicular", {"alpha": -1.3}),
    ("tensor_sum", {"width": 0.6, "offset": 0.7}),
    ("add_cosine_a", {"alpha": 0.4}),
    ("add_cosine_b", {"alpha": -0.2}),
    ("linear", {"scale": 0.3}),
    ("linear", {"scale": -1e6}),
    ("linear", {"scale": 2.5, "normalize": False}),
    ("task_arithmetic", {"scale": -1.7, "lambda": 0.3, "normalize": True}),
    ("dare_linear", {"scale": 1e-38, "density": 0.5, "seed": 1}),
    ("breadcrumbs", {"scale": 3.0, "density": 0.5, "gamma": 0.3}),
    ("slerp", {"scale": 0.37, "t": 0.3}),
    ("slerp", {"scale": -40.0, "t": 0.999}),
    ("nearswap", {"scale": 3.0, "t": 1e-3}),
    ("nearswap", {"scale": -0.37, "t": 3.0}),
    ("nearswap", {"scale": 1e-40, "t": 1e38}),
    ("model_stock", {"scale": 1e3}),
    ("nuslerp", {"scale": -0.1}),
    ("multislerp", {"scale": 7.0}),
    ("karcher", {"scale": 0.7}),
    ("guarded", {"scale": 1.5, "threshold": 0.1, "alpha": 0.3}),
    ("tensor_sum", {"scale": -2.5}),
    ("add_cosine_a", {"scale": 1e-38}),
]
TINY = float(np.float32(2.0**-149))


def chosen(
    method: str,
    parameters: dict[str, Any],
    weights: list[float],
    base: Single,
    experts: list[Single],
) -> Operation:
    """The operation of this one tensor, settled."""
    made = operation(method, parameters, weights)
    if made.needs_facts:
        sides = [side.astype(np.float64) for side in (base, *experts)]
        if not made.selection.is_whole:
            sides = [side - sides[0] for side in sides]
        combine = made.method.combine
        if isinstance(combine, Layered):
            return combine.placed(made, (1, 4))
        assert isinstance(combine, Mixed)
        made = combine.mixed(made, [[float(one @ other) for other in sides] for one in sides])
    return made


def merged(own: Operation, base: Single, experts: list[Any], whole: list[Single]) -> Single:
    """The kernel's float32; an expert that is None is left out, `whole` has it all the same."""
    cuts: list[tuple[Any, int]] = [(0.0, UNLIMITED)] * len(experts)
    if own.selection.cuts == 2:
        parameters = dict(own.parameters)
        found = [
            reference.thresholds(
                reference.delta(base, expert),
                reference.each(parameters, "density", k),
                reference.each(parameters, "gamma", k),
            )
            for k, expert in enumerate(whole)
        ]
        cuts = [cut for place in zip(*found, strict=True) for cut in place]
    there = [expert for expert in experts if expert is not None]
    rows = np.stack(there) if there else np.zeros((1, base.size), dtype=np.float32)
    numbers = iter(range(len(there)))
    out = np.zeros(base.size, dtype=np.float32)
    drawn, mix, n = own.selection.keys("t"), own.mix(), base.size
    chunk = Chunk(
        base.view(np.uint8),
        "F32",
        rows.view(np.uint8),
        ["F32"] * len(there),
        np.array([-1 if expert is None else next(numbers) for expert in experts]),
        n,
        0,
        np.array([value for value, _ in cuts], dtype=np.float32),
        np.array([quota for _, quota in cuts]),
        drawn if drawn is not None else np.zeros((len(experts), 2), dtype=np.uint32),
    )
    weights, factors = mix.weights.tolist(), own.chunk_factors
    facts = ChunkFacts(n, weights, own.selection.cut((), (n,)), None)
    made = None if factors is None else factors.weights(chunk, (n,), weights, whole=False)
    masks = own.selection.masks(chunk, facts)
    own.method.combine.kernel(mix, chunk, out.view(np.uint8), "F32", masks, made)
    return out


def planner(
    method: str, parameters: dict[str, Any], weights: list[float], base: Single, experts: list[Any]
) -> Planner:
    """What plans a merge of this one tensor."""
    n = base.size
    own = chosen(method, parameters, weights, base, experts)
    record = Tensor("F32", (n,), 4 * n, b"")
    sides = []
    for k, expert in enumerate(experts):
        counts = np.zeros((0x8000, 2), dtype=np.int64)
        row = deltas.measure(base.view(np.uint8), "F32", expert.view(np.uint8), "F32", n, 0, counts)
        ids = (TensorId.of(b"base"), TensorId.of(bytes([k])))
        cost, twin = np.array([4 * n]), np.array([k])
        ranks = own.selection.ranks(n, k)
        histogram = without_nan(Histogram.from_dense(counts))
        cuts = tuple([select(histogram, rank, n) if rank else KEEPS_NONE for rank in ranks])
        sides.append(ExpertTensor(ids, record, np.zeros(1, dtype=bool), twin, cost, row, cuts))
    squares = deltas.base_squares(base.view(np.uint8), "F32", n)
    tensor = SurveyedTensor("t", record, n, 1 << 14, tuple(sides), 1, own)
    manifest, snapshot = ManifestId.of(b"m"), SnapshotId.of(b"s")
    survey = Survey(manifest, (manifest,) * len(sides), 1 << 16, (tensor,), squares, (), (), ())
    named = [(f"e{k}", weight) for k, weight in enumerate(weights)]
    asked = resolve(
        MergeRequest(base="base", experts=named, method=method, parameters=parameters),
        base=Input(snapshot, "base"),
        experts=[Input(snapshot, name) for name, _ in named],
    )
    return Planner(survey, asked)


def check(
    method: str, given: dict[str, Any], weights: list[float], base: Single, experts: list[Single]
) -> int:
    """Every way of leaving experts out keeps its bound; returns how many had one."""
    count = find(method).experts or len(experts)
    weights, experts = weights[:count], experts[:count]
    if not find(method).weighted:
        weights = [1.0] * len(experts)
    try:
        own = chosen(method, given, weights, base, experts)
        plans = planner(method, given, weights, base, experts)
    except BadRequest:
        return 0
    full = merged(own, base, list(experts), experts)
    norm = sum(Fraction(float(x)) ** 2 for x in base)
    certified = 0
    free = plans._free_states[:, 0]
    for gone in itertools.product([False, True], repeat=len(experts)):
        out = np.array(gone) & (free == READ)
        if not out.any():
            continue
        bound, _ = plans._errors(np.where(out, OMITTED, free).astype(np.uint8)[:, None])
        if bound is None or not math.isfinite(bound):
            continue
        certified += 1
        left = [None if away else expert for away, expert in zip(out, experts, strict=True)]
        part = merged(own, base, left, experts)
        assert np.isfinite(full).all()
        assert np.isfinite(part).all()
        square = sum(
            (Fraction(float(x)) - Fraction(float(y))) ** 2 for x, y in zip(full, part, strict=True)
        )
        assert square <= Fraction(bound) ** 2 * norm, (gone, bound)
    return certified


def numbers(draw: Any, size: int) -> Single:
    """float32 of a few magnitudes that are far apart, or close to each other."""
    scale = draw(
        st.sampled_from([-149, -140, -126, -100, -60, -12, 0, 0, 0, 20, 63, 100, 126, 127])
    )
    spread = draw(st.sampled_from([0, 3, 24, 120]))
    found = []
    for _ in range(size):
        mantissa = draw(st.integers(-(2**24) + 1, 2**24 - 1))
        exponent = scale - draw(st.integers(0, spread)) - 24
        found.append(np.clip(math.ldexp(mantissa, exponent + 1), -3.4e38, 3.4e38))
    return np.array(found, dtype=np.float32)


@st.composite
def cases(draw: Any) -> tuple[list[float], Single, list[Single]]:
    """Weights, base and experts: unrelated, or a few steps of the last place apart."""
    count, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    base = numbers(draw, size)
    experts = []
    for _ in range(count):
        if draw(st.booleans()):
            experts.append(numbers(draw, size))
        else:
            steps = np.array([draw(st.integers(-3, 3)) for _ in range(size)], dtype=np.int64)
            near = np.clip(base.view(np.int32).astype(np.int64) + steps, -(2**31), 2**31 - 1)
            near = near.astype(np.int32).view(np.float32)
            experts.append(np.where(np.isfinite(near), near, base))
    weights = [float(one) for one in numbers(draw, count)]
    if count > 1 and draw(st.booleans()):
        # They nearly cancel: the last place of the first is all that is left.
        rest = np.float32(math.fsum(weights[1:]))
        weights[0] = float(-np.nextafter(rest, np.float32(draw(st.sampled_from([-1e38, 1e38])))))
    return weights, base, experts


ONES = np.ones(4, dtype=np.float32)


SHORT = settings(max_examples=25, deadline=None)


@pytest.mark.sampled(39)
@pytest.mark.parametrize(("method", "parameters"), METHODS)
@SHORT
@example(([1.0, -1.0000001], ONES, [ONES * np.float32(3.3), ONES * np.float32(3.3000002)]))
@example(([3e4, 3e4, -5.99999e4], ONES * np.float32(1 / 3), [ONES, ONES * 2, ONES / 3]))
@example(([TINY * 3, TINY], ONES * np.float32(1e-30), [ONES * np.float32(0.7), ONES / 3]))
@example(([1.0, 1.0], ONES * np.float32(1e38), [ONES * np.float32(3e38), ONES * np.float32(3e38)]))
@given(cases())
def test_a_certificate_is_never_wrong(
    method: str, parameters: dict[str, Any], case: tuple[list[float], Single, list[Single]]
) -> None:
    """Whatever is left out of whatever numbers, ||merged - full|| <= error_bound * ||base||, both
    before the output is rounded; where a merge overflows there is no bound.
    """
    check(method, parameters, *case)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "parameters"), METHODS)
@settings(SHORT, max_examples=1500)
@given(cases())
def test_a_certificate_is_never_wrong_for_long(
    method: str, parameters: dict[str, Any], case: tuple[list[float], Single, list[Single]]
) -> None:
    """The same, with many more numbers."""
    check(method, parameters, *case)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("method", "parameters"), [*METHODS[:3], *(one for one in METHODS if one[0] == "breadcrumbs")]
)
def test_certificates_are_there(method: str, parameters: dict[str, Any]) -> None:
    """Ordinary numbers have a certificate, also with weights that cancel and with tiny ones."""
    rng = np.random.default_rng(0)
    base, *experts = rng.standard_normal((4, 1000)).astype(np.float32)
    for weights in ([0.5, 0.3, 0.2], [1000.0, -1000.25, 0.75], [TINY, 3 * TINY, TINY]):
        assert check(method, parameters, weights, base, list(experts)) == 7


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_a_turn_has_a_certificate(t: float) -> None:
    """Leaving the expert of a spherical interpolation out has a bound, at any angle and scale."""
    rng = np.random.default_rng(0)
    base, other = rng.standard_normal((2, 1000)).astype(np.float32)
    for expert in (other, -base + other / 4, base + other / 1000, base * np.float32(1e-6)):
        assert check("slerp", {"t": t}, [1.0], base, [expert]) == (t > 0)


def test_what_overflows_has_no_certificate() -> None:
    """A full merge that is infinite is no finite distance from anything."""
    base = np.full(4, 1e38, dtype=np.float32)
    experts = [np.full(4, 3e38, dtype=np.float32), np.full(4, 2.5e38, dtype=np.float32)]
    plans = planner("task_arithmetic", {}, [1.0, 1.0], base, experts)
    bound, estimate = plans._errors(np.array([[OMITTED], [READ]], dtype=np.uint8))
    assert bound is None
    assert estimate is not None
    with np.errstate(over="ignore"):
        full = merged(operation("task_arithmetic", {}, [1, 1]), base, list(experts), experts)
    assert np.isinf(full).all()
