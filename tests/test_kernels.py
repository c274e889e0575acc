"""The fused kernels, against numpy on whole tensors: every result equal bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from reference import DTYPES, WORDS, Array, Mask, name_of

from mstore.merge.arithmetic.arguments import Chunk, pack
from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED, count_ties, mix_chunk
from mstore.merge.arithmetic.masks import mask_keys
from mstore.merge.methods.registry import find, operation
from mstore.store.objects.plan import Mixture
from mstore.terms.errors import BadRequest

WEIGHTS = (0.5, 0.3, -0.7, 1.0, 0.0, 2.25)
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linear", {"normalize": False}),
    ("task_arithmetic", {}),
    ("task_arithmetic", {"lambda": 0.6, "normalize": True}),
    ("ties", {}),
    ("ties", {"density": 0.3}),
    ("ties", {"density": 0.3, "lambda": 1.7, "normalize": False}),
    ("ties", {"density": 0.5, "by_count": True}),
    ("ties", {"by_count": True, "lambda": -0.5, "normalize": False}),
    ("dare_linear", {"density": 0.4, "seed": 7}),
    ("dare_linear", {"density": 0.4, "rescale": False, "normalize": True, "lambda": -0.5}),
    ("dare_ties", {"density": 0.6, "seed": 2**64 - 1}),
    ("dare_ties", {"density": 0.6, "normalize": True}),
    ("breadcrumbs", {"density": 0.3, "gamma": 0.2}),
    ("breadcrumbs", {"density": 0.5, "gamma": 0.01, "lambda": 1.7, "normalize": True}),
    ("breadcrumbs", {"density": 0.7, "gamma": 0.9, "lambda": -0.5}),
    ("breadcrumbs_ties", {"density": 0.3, "gamma": 0.2}),
    ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.01, "lambda": 1.7, "normalize": True}),
]
BANDS = ("breadcrumbs", "breadcrumbs_ties")
# Zeros, subnormals, the smallest normal, one and its neighbour, the largest finite, infinity,
# quiet and signalling NaN; the sign bit is added to each.
EDGES = {
    "BF16": (0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF),
    "F16": (0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7FFF),
    "F32": (
        *(0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001),
        *(0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF),
    ),
}
KINDS = ("noise", "grid", "edges", "patterns")


def _values(rng: np.random.Generator, kind: str, dtype: str, n: int, scale: float) -> Array:
    """n elements: small noise, a coarse grid (ties everywhere), edge cases, any bit pattern."""
    bits = WORDS[dtype].itemsize * 8
    if kind == "edges":
        edges = np.array(EDGES[dtype], dtype=WORDS[dtype])
        signs = rng.integers(0, 2, n).astype(WORDS[dtype]) << (bits - 1)
        return (rng.choice(edges, n) | signs.astype(WORDS[dtype])).view(DTYPES[dtype])
    if kind == "patterns":
        return rng.integers(0, 2**bits, n, dtype=WORDS[dtype]).view(DTYPES[dtype])
    values = rng.standard_normal(n).astype(np.float32) * np.float32(scale)
    if kind == "grid":
        values = np.round(values * 4) / 4
    return values.astype(DTYPES[dtype])


def _family(
    rng: np.random.Generator, kind: str, dtypes: Sequence[str], n: int
) -> tuple[Array, list[Array]]:
    """A base and experts of these element types, each expert equal to the base in a stretch."""
    base = _values(rng, kind, dtypes[0], n, 1.0)
    experts = []
    for dtype in dtypes[1:]:
        if kind in ("edges", "patterns"):
            expert = _values(rng, kind, dtype, n, 1.0)
        else:
            near = reference.single(base) + reference.single(_values(rng, kind, "F32", n, 0.5))
            expert = near.astype(DTYPES[dtype])
        start, stop = sorted(rng.integers(0, n + 1, 2))
        with np.errstate(all="ignore"):
            expert[start:stop] = base[start:stop].astype(DTYPES[dtype])
        experts.append(expert)
    return base, experts


def _merge(
    method: str,
    given_parameters: dict[str, Any],
    weights: Sequence[float],
    base: Array,
    experts: Sequence[Array],
    *,
    out_dtype: str,
    cuts: Sequence[int],
    absent: Sequence[Mask],
    tensor: str = "t",
) -> Array:
    """Merge with the kernel, chunk by chunk, as an engine would.

    An expert is absent from a chunk if its mask says so at the chunk's first element.
    """
    op = operation(method, given_parameters, weights)
    mix, parameters = op.mix(), op.parameters
    count = len(experts)
    slots = 2 * count if op.selection.cuts == 2 else count
    thresholds = np.zeros(slots, dtype=np.float32)
    left = np.full(slots, UNLIMITED, dtype=np.int64)
    if op.selection.trims:
        for k, expert in enumerate(experts):
            deltas = reference.delta(base, expert)
            density = reference.each(dict(parameters), "density", k)
            if op.selection.cuts == 2:
                gamma = reference.each(dict(parameters), "gamma", k)
                found = reference.thresholds(deltas, density, gamma)
            else:
                found = [reference.threshold(deltas, density)]
            for slot, cut in zip(range(k, slots, count), found, strict=True):
                thresholds[slot], left[slot] = cut
    drawn = op.selection.keys(tensor)
    keys = np.zeros((count, 2), dtype=np.uint32) if drawn is None else drawn
    out = np.zeros(base.size, dtype=DTYPES[out_dtype])
    for start, stop in itertools.pairwise([0, *cuts, base.size]):
        n = stop - start
        own = base[start:stop].view(np.uint8)
        present = [k for k in range(count) if n and not absent[k][start]]
        row_of = np.full(count, -1, dtype=np.int64)
        row_of[present] = np.arange(len(present))
        rows = np.full((len(present), 4 * n + 64), 0xA5, dtype=np.uint8)
        for row, k in zip(rows, present, strict=True):
            data = experts[k][start:stop].view(np.uint8)
            row[: data.size] = data
        quotas = left.copy()
        for slot in range(slots):
            if left[slot] != UNLIMITED:
                expert = experts[slot % count]
                data = expert[start:stop].view(np.uint8)
                ties = count_ties(
                    own, name_of(base), data, name_of(expert), n, float(thresholds[slot])
                )
                quotas[slot] = min(left[slot], ties)
                left[slot] -= quotas[slot]
        mix_chunk(
            mix,
            own,
            name_of(base),
            rows,
            [name_of(experts[k]) for k in present],
            row_of,
            n,
            start,
            thresholds,
            quotas,
            keys,
            out[start:stop].view(np.uint8),
            out_dtype,
        )
    return out


def _assert_same_bits(found: Array, wanted: Array) -> None:
    assert found.dtype == wanted.dtype
    words = WORDS[name_of(found)]
    np.testing.assert_array_equal(found.view(words), wanted.view(words))


def _compare(
    method: str,
    parameters: dict[str, Any],
    kind: str,
    dtypes: Sequence[str],
    out_dtype: str,
    *,
    n: int,
    cuts: Sequence[int],
    seed: int,
    share_absent: float = 0.3,
) -> None:
    rng = np.random.default_rng(seed)
    base, experts = _family(rng, kind, dtypes, n)
    weights = list(itertools.islice(itertools.cycle(WEIGHTS), len(experts)))
    absent = [np.zeros(n, dtype=bool) for _ in experts]
    for start, stop in itertools.pairwise([0, *cuts, n]):
        for mask in absent:
            mask[start:stop] = rng.random() < share_absent
    found = _merge(
        method, parameters, weights, base, experts, out_dtype=out_dtype, cuts=cuts, absent=absent
    )
    wanted = reference.merge(
        method, parameters, weights, base, experts, out_dtype=out_dtype, absent=absent
    )
    _assert_same_bits(found, wanted)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=lambda p: p if isinstance(p, str) else str(len(p))
)
def test_every_type_in_and_out(method: str, parameters: dict[str, Any], kind: str) -> None:
    """All 27 element types of base, experts and output give the reference's bits."""
    for seed, (base, expert, out) in enumerate(itertools.product(DTYPES, repeat=3)):
        _compare(
            method,
            parameters,
            kind,
            [base, expert, expert, base],
            out,
            n=2500,
            cuts=[1024, 2049],
            seed=seed,
        )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=lambda p: p if isinstance(p, str) else str(len(p))
)
def test_bfloat_throughout(method: str, parameters: dict[str, Any], kind: str) -> None:
    """Where all is bf16, one to five experts, present or absent, give the reference's bits."""
    for experts, share in itertools.product(range(1, 6), (0.0, 0.4)):
        # Longer than a straight step, and not a multiple of one.
        cuts = [5000, 5001] if share else []
        _compare(
            *(method, parameters, kind, ["BF16"] * (1 + experts), "BF16"),
            n=9300,
            cuts=cuts,
            seed=experts,
            share_absent=share,
        )


@pytest.mark.parametrize("weight", [0.0, -0.0, 3e38, -0.5])
@pytest.mark.parametrize("method", ["ties", "linear", "task_arithmetic"])
def test_any_weight_of_bfloat_experts(method: str, weight: float) -> None:
    """A weight of zero, a huge one or a negative one gives what it gives with float32 inputs."""
    rng = np.random.default_rng(5)
    n = 9300
    base, experts = _family(rng, "edges", ["BF16"] * 4, n)
    parameters = {"normalize": False} if method == "linear" else {}
    weights = (0.5, weight, 1.0)
    absent = [np.zeros(n, dtype=bool)] * 3
    given = (method, parameters, weights)
    found = _merge(*given, base, experts, out_dtype="BF16", cuts=(), absent=absent)
    wide = _merge(
        *given,
        reference.single(base),
        [reference.single(expert) for expert in experts],
        out_dtype="BF16",
        cuts=(),
        absent=absent,
    )
    number = ~np.isnan(reference.single(found))
    _assert_same_bits(found[number], wide[number])
    assert (number == ~np.isnan(reference.single(wide))).all()


@settings(max_examples=60)
@given(
    data=st.data(),
    method=st.sampled_from(METHODS),
    kind=st.sampled_from(KINDS),
    dtypes=st.lists(st.sampled_from(list(DTYPES)), min_size=2, max_size=7),
    out_dtype=st.sampled_from(list(DTYPES)),
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**32),
)
def test_any_mix_of_types_cuts_and_absences(
    data: st.DataObject,
    method: tuple[str, dict[str, Any]],
    kind: str,
    dtypes: list[str],
    out_dtype: str,
    n: int,
    seed: int,
) -> None:
    """One to six experts of any types, cut anywhere, some unread in some chunks: same bits."""
    cuts = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)))
    _compare(*method, kind, dtypes, out_dtype, n=n, cuts=cuts, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share_absent", [0.5, 0.85, 1.0])
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_many_experts_mostly_absent(method: str, share_absent: float, kind: str) -> None:
    """Runs of present and of absent experts of any length: same bits as the reference."""
    dtypes = ["BF16", *["BF16", "F32", "F16"] * 6]
    cuts = [512, 1024, 1100, 2048, 2500]
    _compare(
        *(method, {}, kind, dtypes, "F32"), n=3000, cuts=cuts, seed=5, share_absent=share_absent
    )


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties", "breadcrumbs"])
@pytest.mark.parametrize("experts", [3, 6])
def test_each_expert_has_its_own_density(method: str, experts: int) -> None:
    """One density, and one gamma, for each expert: same bits as the reference; one keeps all."""
    parameters: dict[str, Any] = {"density": (0.2, 1.0, 0.7, 0.05, 0.5, 0.9)[:experts]}
    if method == "breadcrumbs":
        parameters["gamma"] = (0.01, 0.3, 0.1, 0.0, 0.2, 0.05)[:experts]
    if method.startswith("dare"):
        parameters["seed"] = 7
    dtypes = ["BF16", *(["BF16", "F32", "F16"] * 2)[:experts]]
    for seed, cuts in enumerate(([], [1000, 2048, 3001])):
        _compare(method, parameters, "noise", dtypes, "F32", n=4000, cuts=cuts, seed=seed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 3, 64, 1000, 1024, 4096])
@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties", "linear", *BANDS])
def test_chunk_size_does_not_show(method: str, size: int) -> None:
    """However a tensor is cut, the merge is the same, elements tied at the threshold included."""
    n = 5000 if size > 3 else 300
    parameters = {"density": 0.37} if method != "linear" else {}
    if method in BANDS:
        parameters["gamma"] = 0.2
    dtypes = ["BF16"] * 5
    cuts = list(range(size, n, size))
    _compare(method, parameters, "grid", dtypes, "BF16", n=n, cuts=cuts, seed=3, share_absent=0)


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 0.77, 0.999])
def test_exactly_k_are_kept(density: float) -> None:
    """TIES keeps max(1, int(density * n)) elements, of equal magnitudes those that come first."""
    rng = np.random.default_rng(5)
    n = 4321
    base = np.zeros(n, dtype=np.float32)
    # No zeros, so that what is kept is what is not the base afterwards.
    expert = rng.choice(np.array([-0.5, -0.25, 0.25, 0.5, 0.75], dtype=np.float32), n)
    order = sorted(range(n), key=lambda i: (-abs(expert[i]), i))
    kept = sorted(order[: max(1, int(density * n))])
    found = _merge(
        *("ties", {"density": density}, [1.0], base, [expert]),
        out_dtype="F32",
        cuts=[1000, 1001, 3000],
        absent=[np.zeros(n, dtype=bool)],
    )
    assert np.flatnonzero(found).tolist() == kept
    np.testing.assert_array_equal(found[kept], expert[kept])


@pytest.mark.parametrize(
    ("density", "gamma"),
    [(0.001, 0.5), (0.2, 0.01), (0.5, 0.3), (0.77, 0.77), (0.999, 1.0), (0.0001, 0.0001)],
)
def test_exactly_the_band_is_kept(density: float, gamma: float) -> None:
    """breadcrumbs keeps int(density * n) elements after the int(gamma * n) largest, or after as
    many as leave that many; equal magnitudes are ordered by index at both ends."""
    rng = np.random.default_rng(5)
    n = 4321
    base = np.zeros(n, dtype=np.float32)
    expert = rng.choice(np.array([-0.5, -0.25, 0.25, 0.5, 0.75], dtype=np.float32), n)
    order = sorted(range(n), key=lambda i: (-abs(expert[i]), i))
    dropped = min(int(gamma * n), n - int(density * n))
    kept = sorted(order[dropped : dropped + int(density * n)])
    found = _merge(
        *("breadcrumbs", {"density": density, "gamma": gamma}, [1.0], base, [expert]),
        out_dtype="F32",
        cuts=[1000, 1001, 3000],
        absent=[np.zeros(n, dtype=bool)],
    )
    assert np.flatnonzero(found).tolist() == kept
    np.testing.assert_array_equal(found[kept], expert[kept])


@pytest.mark.parametrize("method", ["task_arithmetic", "breadcrumbs"])
def test_zero_times_infinity_is_nan_in_a_sum(method: str) -> None:
    """Where no signs are elected, weight 0 times infinity is NaN, with a band and without one."""
    base = np.zeros(10, dtype=np.float32)
    expert = np.arange(10, dtype=np.float32)
    expert[3] = np.inf
    parameters = {"density": 0.9, "gamma": 0.0} if method == "breadcrumbs" else {}
    absent = [np.zeros(10, dtype=bool)]
    given_merge = (method, parameters, [0.0], base, [expert])
    found = _merge(*given_merge, out_dtype="F32", cuts=[], absent=absent)
    assert np.isnan(found).tolist() == [number == 3 for number in range(10)]
    _assert_same_bits(found, reference.merge(*given_merge))


@settings(max_examples=25)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    dtypes=st.lists(st.sampled_from(list(DTYPES)), min_size=2, max_size=7),
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**32),
)
def test_any_quotas_at_both_cuts(
    data: st.DataObject, kind: str, dtypes: list[str], n: int, seed: int
) -> None:
    """For any two thresholds and quotas of each expert, numbers, all, or all and counted, an
    element is kept if the first would keep it and the second would not; ties are told as asked."""
    rng = np.random.default_rng(seed)
    base, experts = _family(rng, kind, dtypes, n)
    count, weights = len(experts), WEIGHTS[: len(experts)]
    deltas = [reference.delta(base, expert) for expert in experts]
    cuts, quotas = np.zeros((2, count), np.float32), np.zeros((2, count), np.int64)
    row_of, moved, told = [], [], np.zeros((2, count), np.int64)
    rows = []
    for k, d in enumerate(deltas):
        values = np.abs(d)[~np.isnan(d)]
        some = [np.float32(0), np.float32(0.25), np.float32(np.inf), *values[:3]]
        cuts[:, k] = sorted(data.draw(st.sampled_from(some)) for _ in range(2))
        kept = []
        for place in range(2):
            ties = np.flatnonzero(np.abs(d) == cuts[place, k])
            some_quotas = st.sampled_from([UNLIMITED, COUNTED, 0]) | st.integers(0, ties.size + 1)
            quota = quotas[place, k] = data.draw(some_quotas)
            mask = np.abs(d) > cuts[place, k]
            mask[ties[: ties.size if quota < 0 else quota]] = True
            kept.append(mask)
            told[place, k] = {UNLIMITED: 0, COUNTED: ties.size}.get(quota, min(quota, ties.size))
        is_there = data.draw(st.booleans())
        row_of.append(len(rows) if is_there else -1)
        moved.append(np.where(kept[0] & ~kept[1] & is_there, d, np.float32(0)))
        if is_there:
            rows.append(experts[k])
        else:
            told[:, k] = 0
    data_rows = np.full((len(rows), 4 * n + 64), 0xA5, dtype=np.uint8)
    for row, expert in zip(data_rows, rows, strict=True):
        row[: expert.nbytes] = expert.view(np.uint8)
    parameters: dict[str, Any] = {"density": 0.5, "lambda": 0.75}
    out = np.zeros(n, dtype=np.float32)
    found = mix_chunk(
        operation("breadcrumbs", parameters, weights).mix(),
        base.view(np.uint8),
        dtypes[0],
        data_rows,
        [name_of(expert) for expert in rows],
        row_of,
        n,
        0,
        cuts.reshape(-1),
        quotas.reshape(-1),
        np.zeros((0, 2), dtype=np.uint32),
        out.view(np.uint8),
        "F32",
    )
    # What is kept, as experts of a base of zeros, is mixed by the reference without a cut.
    mixed = reference.merge(
        "task_arithmetic", {"lambda": 0.75}, weights, np.zeros(n, np.float32), moved
    )
    with np.errstate(all="ignore"):
        total = reference.rounded(reference.single(base) + mixed, "F32")
        own = base if dtypes[0] == "F32" else reference.rounded(reference.single(base), "F32")
    wanted = np.where(mixed == 0, own.view(np.uint32), total.view(np.uint32)).view(np.float32)
    _assert_same_bits(out, wanted)
    assert list(found) == told.reshape(-1).tolist()


@settings(max_examples=50)
@given(
    kind=st.sampled_from(KINDS),
    dtypes=st.lists(st.sampled_from(list(DTYPES)), min_size=2, max_size=6),
    out_dtype=st.sampled_from(list(DTYPES)),
    n=st.integers(1, 3000),
    keeps=st.booleans(),
    absent=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_a_mixture_of_whole_tensors(
    kind: str,
    dtypes: list[str],
    out_dtype: str,
    n: int,
    keeps: bool,
    absent: list[bool],
    seed: int,
) -> None:
    """Factors for the base and one to five experts give the reference's sum of fused products, base
    first; an absent expert is the base, and what nobody changes stays if the method says so."""
    rng = np.random.default_rng(seed)
    base, experts = _family(rng, kind, dtypes, n)
    factors = [0.625, *WEIGHTS][: len(dtypes)]
    gone = absent[: len(experts)]
    rows = [expert for expert, missing in zip(experts, gone, strict=True) if not missing]
    data_rows = np.full((len(rows), 4 * n + 64), 0xA5, dtype=np.uint8)
    for row, expert in zip(data_rows, rows, strict=True):
        row[: expert.nbytes] = expert.view(np.uint8)
    row_of = [
        -1 if missing else int(np.sum(np.logical_not(gone[:k]))) for k, missing in enumerate(gone)
    ]
    made = structs.replace(find("slerp"), experts=None).apply({"t": 0.5}, [1.0] * len(experts))
    mix = made.settled(Mixture(factors[0], tuple(factors[1:]), keeps)).mix()
    out = np.zeros(n, dtype=DTYPES[out_dtype])
    mix_chunk(
        mix,
        base.view(np.uint8),
        dtypes[0],
        data_rows,
        [name_of(expert) for expert in rows],
        row_of,
        n,
        0,
        np.zeros(0, dtype=np.float32),
        np.zeros(0, dtype=np.int64),
        np.zeros((0, 2), dtype=np.uint32),
        out.view(np.uint8),
        out_dtype,
    )
    wanted = reference.mixture(
        factors,
        base,
        experts,
        keeps_base=keeps,
        out_dtype=out_dtype,
        absent=[np.full(n, missing) for missing in gone],
    )
    _assert_same_bits(out, wanted)


def test_without_a_quota_all_ties_stay() -> None:
    """With an unlimited quota every element whose magnitude equals the threshold is kept."""
    base = np.zeros(3000, dtype=np.float32)
    expert = np.tile(np.array([0.25, -0.5, 1.0], dtype=np.float32), 1000)
    out = np.zeros(3000, dtype=np.float32)
    _mix_one(base, expert, out, threshold=0.5, quota=UNLIMITED)
    np.testing.assert_array_equal(out, np.where(np.abs(expert) >= 0.5, expert, 0))
    _mix_one(base, expert, out, threshold=0.5, quota=0)
    np.testing.assert_array_equal(out, np.where(np.abs(expert) > 0.5, expert, 0))


def _mix_one(base: Array, expert: Array, out: Array, *, threshold: float, quota: int) -> None:
    mix_chunk(
        operation("ties", {"density": 0.5}, [1.0]).mix(),
        base.view(np.uint8),
        "F32",
        expert.view(np.uint8)[None],
        ["F32"],
        row_of=np.zeros(1, dtype=np.int64),
        n=base.size,
        first_index=0,
        thresholds=np.array([threshold], dtype=np.float32),
        quotas=np.array([quota]),
        keys=np.zeros((1, 2), dtype=np.uint32),
        out=out.view(np.uint8),
        out_dtype="F32",
    )


def _without_experts(base: Array, out_dtype: str, method: str = "ties") -> Array:
    """The chunk of a merge in which every expert is absent."""
    return _merge(
        *(method, {}, [1.0], base, [base]),
        out_dtype=out_dtype,
        cuts=[],
        absent=[np.ones(base.size, dtype=bool)],
    )


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "dare_linear"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_no_expert_leaves_the_bytes(dtype: str, method: str) -> None:
    """With no expert present each of the 65536 patterns of an element comes out as it was."""
    base = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    _assert_same_bits(_without_experts(base, dtype, method), base)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_widening_is_exact(dtype: str) -> None:
    """Every 16-bit element becomes the float32 of its value, every NaN the quiet one."""
    base = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    wanted = base.astype(np.float32).view(np.uint32)
    wanted[wanted << 1 > 0xFF000000] = 0x7FC00000
    _assert_same_bits(_without_experts(base, "F32"), wanted.view(np.float32))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_narrowing_rounds_to_nearest_even(dtype: str) -> None:
    """At, just below and just above each midpoint of two neighbours, and anywhere, as IEEE says."""
    rng = np.random.default_rng(0)
    exact = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    middle = np.arange(65536, dtype=np.uint32) << 16 | 0x8000
    if dtype == "F16":
        with np.errstate(all="ignore"):
            middle = ((exact[:-1] + exact[1:]) / np.float32(2)).view(np.uint32)
    anything = rng.integers(0, 2**32, 300_000, dtype=np.uint32)
    bits = np.concatenate([exact.view(np.uint32), middle - 1, middle, middle + 1, anything])
    values = bits.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = values.astype(DTYPES[dtype]).view(np.uint16)
    wanted[np.isnan(values)] = reference.QUIET_NAN[dtype]
    _assert_same_bits(_without_experts(values, dtype), wanted.view(DTYPES[dtype]))


@pytest.mark.parametrize(("base", "row"), list(itertools.product(DTYPES, repeat=2)))
def test_ties_are_counted(base: str, row: str) -> None:
    """count_ties counts the deltas of exactly that magnitude, for any types and length."""
    rng = np.random.default_rng(2)
    for kind, n in itertools.product(KINDS, (1, 1024, 2500)):
        own, (expert,) = _family(rng, kind, [base, row], n)
        magnitudes = np.abs(reference.delta(own, expert))
        for threshold in (0.0, 0.25, np.inf, float(magnitudes[n // 2])):
            found = count_ties(
                *(own.view(np.uint8), base, expert.view(np.uint8), row, n, threshold)
            )
            assert found == np.count_nonzero(magnitudes == np.float32(threshold))


def test_threads_do_not_meet() -> None:
    """Eight calls at once give what one call after the other gives."""
    rng = np.random.default_rng(4)
    base, experts = _family(rng, "grid", ["BF16"] * 5, 200_000)
    absent = [np.zeros(base.size, dtype=bool)] * 4

    def run(seed: int) -> Array:
        return _merge(
            *("dare_ties", {"density": 0.5, "seed": seed}, WEIGHTS[:4], base, experts),
            out_dtype="F16",
            cuts=[100_000],
            absent=absent,
        )

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    for seed, found in enumerate(together):
        _assert_same_bits(found, run(seed))


@pytest.mark.parametrize("scale", [1.0, -0.37, 3e38])
@pytest.mark.parametrize("dtypes", [("BF16", "BF16"), ("F16", "F32"), ("F32", "F32")])
def test_one_expert_alone(dtypes: tuple[str, str], scale: float) -> None:
    """passthrough is the expert's own elements, -0 among them, times the scale, rounded once; where
    the expert is not read, the base's."""
    rng = np.random.default_rng(9)
    for kind in KINDS:
        base, experts = _family(rng, kind, dtypes, 3000)
        given_merge = ("passthrough", {"scale": scale}, [1.0], base, experts)
        for gone in (False, True):
            absent = [np.full(base.size, gone)]
            found = _merge(*given_merge, out_dtype="F32", cuts=[1100], absent=absent)
            wanted = reference.merge(*given_merge, out_dtype="F32", absent=absent)
            _assert_same_bits(found, wanted)
    zeros = np.array([0.0, -0.0, 0.0, -0.0], dtype=np.float32)
    bases = np.array([0.0, 0.0, -0.0, -0.0], dtype=np.float32)
    found = _merge(
        *("passthrough", {}, [1.0], bases, [zeros]),
        out_dtype="F32",
        cuts=[],
        absent=[np.zeros(4, dtype=bool)],
    )
    _assert_same_bits(found, zeros)


def test_many_experts() -> None:
    """Sixty-four experts are summed in order like a few."""
    rng = np.random.default_rng(6)
    base, experts = _family(rng, "noise", ["BF16"] * 65, 1500)
    weights = [float(w) for w in rng.standard_normal(64)]
    absent = [np.full(base.size, k % 5 == 0) for k in range(64)]
    for method in ("linear", "ties", "dare_linear", *BANDS):
        given_parameters = {"density": 0.5} if method != "linear" else {}
        found = _merge(
            *(method, given_parameters, weights, base, experts),
            out_dtype="BF16",
            cuts=[],
            absent=absent,
        )
        wanted = reference.merge(method, given_parameters, weights, base, experts, absent=absent)
        _assert_same_bits(found, wanted)


@pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=lambda p: p if isinstance(p, str) else str(len(p))
)
def test_experts_may_share_a_row(method: str, parameters: dict[str, Any]) -> None:
    """Experts that name one row give the bits of as many rows with the same elements."""
    rng = np.random.default_rng(8)
    n = 2500
    base, (one, two) = _family(rng, "grid", ["BF16", "F16", "BF16"], n)
    mix = operation(method, parameters, WEIGHTS[:5]).mix()
    keys = mask_keys(3, 5, "t")
    # Of breadcrumbs the second five drop.
    thresholds = np.repeat(np.array([0.5, 1.0], dtype=np.float32), 5)
    quotas = np.array([7, 9, UNLIMITED, UNLIMITED, 0, 3, UNLIMITED, 4, 0, 1], dtype=np.int64)
    slots = 10 if method in BANDS else 5
    outs = []
    for experts, row_of in (
        ([two, one], [1, 0, -1, 0, 1]),
        ([one, two, two, one, one], [0, 1, -1, 2, 4]),
    ):
        rows = np.stack([expert.view(np.uint8) for expert in experts])
        outs.append(np.zeros(n, dtype=DTYPES["F32"]))
        mix_chunk(
            mix,
            base.view(np.uint8),
            "BF16",
            rows,
            [name_of(expert) for expert in experts],
            np.array(row_of, dtype=np.int64),
            n,
            0,
            thresholds[:slots],
            quotas[:slots],
            keys,
            outs[-1].view(np.uint8),
            "F32",
        )
    _assert_same_bits(*outs)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_given_masks_and_factors(dtype: str, method: str, normalize: bool) -> None:
    """Masks and factors from elsewhere stand in for the draws and the one rescale factor."""
    rng = np.random.default_rng(9)
    n, weights = 2500, WEIGHTS[:3]
    base, experts = _family(rng, "noise", [dtype] * 4, n)
    masks = rng.integers(0, 2, (3, n)).astype(np.uint8)
    rescales = np.array([1.0, 2.5, 1.0 / 3.0], dtype=np.float32)
    # The deltas, masked and scaled by numpy, are experts of a base of zeros that drops nothing.
    moved = [
        np.where(mask == 1, reference.delta(base, expert), np.float32(0)) * factor
        for expert, mask, factor in zip(experts, masks, rescales, strict=True)
    ]
    given_parameters = {"density": 0.5, "normalize": normalize, "lambda": 0.75}
    mixed = reference.merge(
        method, given_parameters | {"density": 1.0}, weights, np.zeros(n, np.float32), moved
    )
    with np.errstate(all="ignore"):
        total = reference.single(base) + mixed
    out = np.zeros(n, dtype=np.float32)
    for start, stop in ((0, 1000), (1000, n)):
        mix_chunk(
            operation(method, given_parameters, weights).mix(),
            base[start:stop].view(np.uint8),
            dtype,
            np.stack([expert[start:stop].view(np.uint8) for expert in experts]),
            [dtype] * 3,
            np.arange(3),
            stop - start,
            start,
            np.zeros(0, dtype=np.float32),
            np.zeros(0, dtype=np.int64),
            np.zeros((0, 0), dtype=np.uint32),
            out[start:stop].view(np.uint8),
            "F32",
            masks=np.ascontiguousarray(masks[:, start:stop]),
            rescales=rescales,
        )
    _assert_same_bits(out, np.where(mixed == 0, reference.single(base), total))


def test_signatures_tell_methods_and_parameters_apart() -> None:
    """Every method and parameter that changes the arithmetic changes the signature; weights do
    only through the sum that they divide by, and equal meanings have equal signatures."""
    signatures = {}
    for method, given_parameters in [*METHODS, ("dare_ties", {"density": 0.4})]:
        signature = operation(method, given_parameters, [0.25, 0.75]).mix().signature()
        assert len(signature) == 52
        assert signature == operation(method, given_parameters, [0.75, 0.25]).mix().signature()
        assert signatures.setdefault(signature, (method, given_parameters)) == (
            method,
            given_parameters,
        )
    assert (
        operation("linear", {}, [1.0]).mix().signature()
        != operation("linear", {}, [2.0]).mix().signature()
    )
    # Known bytes: they are part of keys on disk.
    assert operation("ties", {"density": 0.5}, [1.0]).mix().signature() == (
        bytes([1, *[0] * 7, 1, *[0] * 7, 1, *[0] * 7, *[0] * 8])
        + np.array([1, 1, 1], dtype="<f4").tobytes()
        + bytes([0, 0, 0, 0, 1, 0, 0, 0])
    )


def _call(**changes: Any) -> npt.NDArray[np.uint8]:
    """mix_chunk on four zero bytes of base and two experts, but for `changes`."""
    arguments: dict[str, Any] = {
        "mix": operation("ties", {"density": 0.5}, [1.0, 1.0]).mix(),
        "base": np.zeros(4, dtype=np.uint8),
        "base_dtype": "BF16",
        "rows": np.zeros((2, 64), dtype=np.uint8),
        "row_dtypes": ["BF16", "BF16"],
        "row_of": np.array([0, 1]),
        "n": 2,
        "first_index": 0,
        "thresholds": np.zeros(2, dtype=np.float32),
        "quotas": np.zeros(2, dtype=np.int64),
        "keys": np.zeros((2, 2), dtype=np.uint32),
        "out": np.full(6, 0xFF, dtype=np.uint8),
        "out_dtype": "BF16",
    } | changes
    mix_chunk(**arguments)
    out: npt.NDArray[np.uint8] = arguments["out"]
    return out


DARE_TIES = operation("dare_ties", {"density": 0.5}, [1.0, 1.0]).mix()
BAND = operation("breadcrumbs", {"density": 0.5}, [1.0, 1.0]).mix()
SLERP = operation("slerp", {"t": 0.5}, [1.0]).settled(Mixture(0.5, (0.5,), keeps_base=False)).mix()
"""Of one expert: rows of two do not fit."""


def test_bytes_after_the_chunk_are_left_alone() -> None:
    """Only n elements of the output are written; sources may be read-only."""
    base, rows = np.zeros(4, dtype=np.uint8), np.zeros((2, 64), dtype=np.uint8)
    base.flags.writeable = rows.flags.writeable = False
    assert _call(base=base, rows=rows).tolist() == [0, 0, 0, 0, 0xFF, 0xFF]


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 3},
        {"out": np.zeros(3, dtype=np.uint8)},
        {"rows": np.zeros((2, 3), dtype=np.uint8)},
        {"rows": np.zeros((1, 64), dtype=np.uint8)},
        {"row_of": np.array([0])},
        {"row_of": np.array([0, 1, 1])},
        {"row_of": np.array([0, 2])},
        {"row_of": np.array([-2, 0])},
        {"masks": np.ones((2, 2), dtype=np.uint8)},
        {"rescales": np.ones(2, dtype=np.float32)},
        {"mix": DARE_TIES, "masks": np.ones((1, 2), dtype=np.uint8)},
        {"mix": DARE_TIES, "masks": np.ones((2, 3), dtype=np.uint8)},
        {"mix": DARE_TIES, "rescales": np.ones(3, dtype=np.float32)},
        {"thresholds": np.zeros(1, dtype=np.float32)},
        {"thresholds": np.zeros(4, dtype=np.float32), "quotas": np.zeros(4, dtype=np.int64)},
        {"mix": BAND},
        {"mix": BAND, "thresholds": np.zeros(4, dtype=np.float32)},
        {"mix": BAND, "quotas": np.zeros(4, dtype=np.int64)},
        {"mix": SLERP},
        {"quotas": np.zeros(3, dtype=np.int64)},
        {"mix": DARE_TIES, "keys": np.zeros((1, 2), dtype=np.uint32)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    """Nothing is read or written out of bounds: arrays that do not fit together are refused."""
    with pytest.raises(ValueError, match=r"fit|expert"):
        _call(**changes)
    with pytest.raises(ValueError, match="shorter"):
        count_ties(np.zeros(3, np.uint8), "BF16", np.zeros(4, np.uint8), "BF16", 2, 0.0)


@pytest.mark.parametrize(
    ("method", "shape", "wrong", "told"),
    [
        ("aim", (2,), np.float32, "sums are float64, not float32"),
        ("clamp", (2, 2), np.float64, "factors are float32, not float64"),
        ("linear", (1, 2), np.float64, "factors are float32, not float64"),
    ],
)
def test_row_weights_of_another_type_are_refused(
    method: str, shape: tuple[int, ...], wrong: type[np.generic], told: str
) -> None:
    """Sums are float64 and factors float32: another type, which would be read beyond its end or as
    other numbers, is refused with both names."""
    mixed = operation(method, {}, [1.0, 1.0])
    mix = mixed.settled(Mixture(1.0, (1.0, 1.0), keeps_base=True)).mix()
    fits = np.float64 if wrong is np.float32 else np.float32
    rows = np.zeros((2, 64), dtype=np.uint8)
    chunk = Chunk(
        *(np.zeros(4, dtype=np.uint8), "BF16", rows, ["BF16"] * 2, [0, 1], 2, 0),
        *(np.zeros(2, dtype=np.float32), [0, 0], np.zeros((2, 2), dtype=np.uint32)),
    )
    if mix.has_base:
        shape = *shape[:-1], shape[-1] + 1
    out = np.zeros(4, dtype=np.uint8)
    pack(mix, chunk, out, "BF16", row_weights=np.zeros(shape, dtype=fits))
    with pytest.raises(ValueError, match=told):
        pack(mix, chunk, out, "BF16", row_weights=np.zeros(shape, dtype=wrong))


@pytest.mark.parametrize("name", ["base_dtype", "out_dtype"])
def test_other_element_types_are_refused(name: str) -> None:
    """An element type that cannot be merged is refused by name."""
    with pytest.raises(BadRequest, match="F8_E4M3"):
        _call(**{name: "F8_E4M3"})
    with pytest.raises(BadRequest, match="I64"):
        count_ties(np.zeros(8, np.uint8), "I64", np.zeros(8, np.uint8), "I64", 1, 0.0)


@pytest.mark.parametrize("kind", ["noise", "grid", "edges"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_counting_keeps_all_ties(dtype: str, kind: str) -> None:
    """COUNTED gives the bits of UNLIMITED, and the number that count_ties gives."""
    rng = np.random.default_rng(11)
    n, weights = 2500, WEIGHTS[:3]
    base, experts = _family(rng, kind, [dtype] * 4, n)
    with np.errstate(all="ignore"):
        deltas = [np.abs(reference.delta(base, expert)) for expert in experts]
    finite = [delta[np.isfinite(delta) & (delta > 0)] for delta in deltas]
    cuts = np.array([delta[len(delta) // 2] if len(delta) else 1 for delta in finite], np.float32)
    mix = operation("ties", {"density": 0.5}, weights).mix()
    outs, counts = [], []
    for quota in (COUNTED, UNLIMITED):
        outs.append(np.zeros(n, dtype=np.float32))
        counted = mix_chunk(
            mix,
            base.view(np.uint8),
            dtype,
            np.stack([expert.view(np.uint8) for expert in experts]),
            [dtype] * 3,
            np.arange(3),
            n,
            0,
            cuts,
            np.full(3, quota, dtype=np.int64),
            np.zeros((0, 2), dtype=np.uint32),
            outs[-1].view(np.uint8),
            "F32",
        )
        counts.append(list(counted))
    _assert_same_bits(*outs)
    expected = [
        count_ties(base.view(np.uint8), dtype, expert.view(np.uint8), dtype, n, float(cut))
        for expert, cut in zip(experts, cuts, strict=True)
    ]
    assert counts == [expected, [0, 0, 0]]
    assert all(count > 0 for count in expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_quota_keeps_is_told(dtype: str) -> None:
    """A quota that ends in a chunk keeps the ties of lowest index, over the ends of tiles too, and
    the chunk says how many those are: all of the quota, or all ties where they are fewer."""
    n = 2500
    base = np.zeros(n, dtype=DTYPES[dtype])
    # Ties in each tile, 834 of them.
    expert = np.tile(np.array([1.0, -2.0, 0.5], np.float32), n)[:n]
    stored = expert.astype(DTYPES[dtype])
    places = np.flatnonzero(expert == 1.0)
    for quota in (1, 300, 342, 343, 700, 834, 835, 4000):
        out = np.zeros(n, dtype=np.float32)
        kept = mix_chunk(
            operation("ties", {"density": 0.5}, [1.0]).mix(),
            base.view(np.uint8),
            dtype,
            stored.view(np.uint8)[None],
            [dtype],
            [0],
            n,
            0,
            np.ones(1, np.float32),
            [quota],
            np.zeros((0, 2), np.uint32),
            out.view(np.uint8),
            "F32",
        )
        wanted = np.where(np.abs(expert) > 1, expert, 0)
        wanted[places[:quota]] = 1.0
        np.testing.assert_array_equal(out, wanted)
        assert list(kept) == [min(quota, places.size)]
