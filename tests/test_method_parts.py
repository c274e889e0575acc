"""What is peculiar to one merge method, beside the rows of `test_every_method.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import method_rows
import numpy as np
import numpy.typing as npt
import pytest
import reference
from families import Arrays, Family
from hypothesis import given as drawn
from hypothesis import strategies as st
from method_rows import FILTERS, ROWS, TURNED, Place, Row, made, terms
from msgspec import structs
from reference import DTYPES, WORDS
from test_kernels import KINDS, _family

from mstore import MergeRequest, Store
from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.arguments import Chunk
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.arithmetic.masks import mask_key
from mstore.merge.arithmetic.row_factors import arc_cosine, sine
from mstore.merge.measures.estimates import averaged
from mstore.merge.methods import arcee_fusion, cosine, pcb
from mstore.merge.methods.arcee_fusion import Rows, lower
from mstore.merge.methods.consensus import agreed
from mstore.merge.methods.method import Operation
from mstore.merge.methods.ram import Averaged, shared_counts
from mstore.merge.methods.registry import operation
from mstore.merge.methods.sce import Fused
from mstore.merge.planning import warnings
from mstore.models.stats.chunks import whole_rows
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest

Double = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The family of the rows, in float32."""
    found = made(tmp_path_factory.mktemp("family"), method_rows.family("F32"))
    yield found
    found.close()


def merged(root: Path, method: str, given: dict[str, Any], base: Arrays, *moved: Arrays) -> Store:
    """A store with a family of these tensors and its merge, `merged`."""
    own = Family(base, moved)
    own.write(root)
    store = Store.init(root / "store", block_size=families.BLOCK)
    for name in ("base", *own.names):
        store.add(root / name, name=name)
    asked = MergeRequest(base="base", experts=own.names, method=method, parameters=given)
    store.merge(store.plan(asked, allow_noop=True), name="merged", allow_nonfinite=True)
    return store


# -- kernels ---------------------------------------------------------------------------------------


def counted(given: dict[str, float], counts: list[tuple[int, int]]) -> Operation:
    """ramplus_tl of a tensor with these counts of each expert's elements."""
    own = operation("ramplus_tl", given, [1.0] * len(counts))
    combine = own.method.combine
    assert isinstance(combine, Averaged)
    return combine.counted(own, counts)


@pytest.mark.parametrize("experts", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("ramplus_tl", 1.0),
        ("ramplus_tl", 1.3),
        ("sce", 1.0),
        *(("nearswap", t) for t in (1e-8, 0.1, 0.7, 3e38)),
    ],
)
def test_a_kernel_equals_the_reference(
    method: str, value: float, kind: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any types, NaN and infinities, few experts and many, weights down to zero, some unread: the
    same bits."""
    n, given = 3000, {"ramplus_tl": {"epsilon": 0.3}, "nearswap": {"t": value}}.get(method, {})
    experts = 1 if method == "nearswap" else experts
    energies = [np.float32(one) for one in (0.5, 0.0, 3e-7, 0.25, 1e-3, 0.2)[:experts]]
    monkeypatch.setattr(reference, "energies", lambda *_: energies)
    monkeypatch.setattr(reference, "lone_factors", lambda *_: [np.float32(value)] * experts)
    own = operation(method, given, [1.0] * experts)
    least = 0.0
    if method == "sce":
        # What has no sign takes part in no election.
        real = reference.delta
        monkeypatch.setattr(
            reference,
            "delta",
            lambda b, e: np.nan_to_num(real(b, e), nan=0.0, posinf=np.inf, neginf=-np.inf),
        )
        assert isinstance(own.method.combine, Fused)
        own = own.method.combine.weighed(own, [1.0] * experts, 1)
        mix = structs.replace(own.mix(), weights=np.array(energies))
    elif method == "ramplus_tl":
        own = counted(given, [(0, 0)] * experts)
        mix = structs.replace(own.mix(), weights=np.full(experts, value, dtype=np.float32))
        least = own.selection.least
    else:
        mix = own.mix()
    for seed, (base_type, out) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        rng = np.random.default_rng(seed)
        types = [list(DTYPES)[(seed + k) % 3] for k in range(experts)]
        base, sides = _family(rng, kind, [base_type, *types], n)
        there = [k for k in range(experts) if k != seed % 4]
        rows = np.zeros((len(there), 4 * n), dtype=np.uint8)
        for row, k in zip(rows, there, strict=True):
            row[: sides[k].nbytes] = sides[k].view(np.uint8)
        found = np.zeros(n, dtype=DTYPES[out])
        mix_chunk(
            *(mix, base.view(np.uint8), base_type, rows, [types[k] for k in there]),
            [there.index(k) if k in there else -1 for k in range(experts)],
            *(n, 0, np.full(experts, least, dtype=np.float32), [UNLIMITED] * experts),
            np.zeros((experts, 2), dtype=np.uint32),
            *(found.view(np.uint8), out),
        )
        exact = reference.merge(
            *(method, given, [1.0] * experts, base, sides),
            out_dtype=out,
            absent=[np.full(n, k not in there) for k in range(experts)],
        )
        assert np.array_equal(found.view(WORDS[out]), exact.view(WORDS[out]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "given", "experts"),
    [
        ("train_difference", {"alpha": 0.7}, 2),
        ("clamp", {}, 2),
        ("clamp", {}, 5),
        *(("clamp", {"stiffness": share}, count) for share in (0.3, 1.0) for count in (2, 5)),
    ],
)
def test_factors_of_elements_equal_the_reference(
    method: str, given: dict[str, float], experts: int, kind: str
) -> None:
    """Any types, NaN and infinities, some unread, in pieces of any length: the same bits."""
    n = 3000 if kind == "edges" else (1 << 16) + 1100
    own = operation(method, given, [1.0] * experts)
    assert own.chunk_factors is not None
    for seed, (base_type, out) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        rng = np.random.default_rng(seed)
        types = [list(DTYPES)[(seed + k) % 3] for k in range(experts)]
        base, sides = _family(rng, kind, [base_type, *types], n)
        there = [k for k in range(experts) if k != seed % 4]
        rows = np.zeros((len(there), 4 * n), dtype=np.uint8)
        for row, k in zip(rows, there, strict=True):
            row[: sides[k].nbytes] = sides[k].view(np.uint8)
        row_of = [there.index(k) if k in there else -1 for k in range(experts)]
        nothing = np.zeros(experts, dtype=np.float32), [UNLIMITED] * experts
        chunk = Chunk(
            *(base.view(np.uint8), base_type, rows, [types[k] for k in there], row_of, n, 0),
            *(*nothing, np.zeros((experts, 2), dtype=np.uint32)),
        )
        weights = own.mix().weights.tolist()
        factors = own.chunk_factors.weights(chunk, (n,), weights, whole=False)
        found = np.zeros(n, dtype=DTYPES[out])
        own.method.combine.kernel(own.mix(), chunk, found.view(np.uint8), out, None, factors)
        exact = reference.merge(
            *(method, given, [1.0] * experts, base, sides),
            out_dtype=out,
            absent=[np.full(n, k not in there) for k in range(experts)],
        )
        assert np.array_equal(found.view(WORDS[out]), exact.view(WORDS[out]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_taken_a_few_at_a_time(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many columns are taken together, factors are the same bits."""
    rng = np.random.default_rng(3)
    wide, step = rng.standard_normal((2, 70, 33))
    base, moved = wide.astype(DTYPES[dtype]), (wide + step / 2).astype(DTYPES[dtype])
    rows = moved.view(np.uint8).reshape(1, -1)
    keys = np.zeros((1, 2), dtype=np.uint32)
    numbers = np.zeros(1, dtype=np.float32), [UNLIMITED], keys
    chunk = Chunk(
        base.reshape(-1).view(np.uint8), dtype, rows, [dtype], [0], base.size, 0, *numbers
    )
    own = operation("add_cosine_b", {"alpha": 0.1}, [1.0]).chunk_factors
    assert own is not None
    found = []
    for together in (1 << 18, 500, 1):
        monkeypatch.setattr(cosine, "_TOGETHER", together)
        found.append(own.weights(chunk, base.shape, [1.0], whole=False).view(np.uint32))
    assert len(np.unique(found[0])) > 20
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


# -- nearswap --------------------------------------------------------------------------------------


def test_near_elements_are_the_experts(place: Place) -> None:
    """Up to t the result is the expert's element, and beyond it t away from the base; with t = 0
    nothing is read, and an expert that is the base is named."""
    row = Row("nearswap", {"t": 0.01}, (1.0,))
    place.store.merge(place.store.plan(row.request()), name="near")
    base, expert = (one["parts"] for one in (place.family.base, place.family.experts[0]))
    found, gap = place.store["near"].tensor("parts"), np.abs(expert.astype(np.float64) - base)
    assert np.array_equal(found[gap < 0.0099], expert[gap < 0.0099])
    assert np.allclose(np.abs(found.astype(np.float64) - base)[gap > 0.0101], 0.01, atol=1e-6)
    nothing = row.request(parameters={"t": 0})
    with pytest.raises(BadRequest, match="leave nothing of the experts"):
        place.store.plan(nothing)
    assert place.store.plan(nothing, allow_noop=True).full_expert_bytes == 0
    [warning] = place.store.plan(row.request(experts=[("base", 1.0)]), allow_noop=True).warnings
    assert warning.kind == warnings.IS_BASE
    share = place.store.plan(row.request(top_p=0.3))
    assert 0 < share.planned_expert_bytes < share.full_expert_bytes


# -- consensus -------------------------------------------------------------------------------------


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
    more = agreed(sides, ones, [ratio] * len(sides), least + 1)
    assert found is not None
    assert more is not None
    for element, taken in enumerate(found):
        own = [one[element] for one in moves]
        votes = [abs(x) > ratio * abs(sum(own) - x) for x in own]
        assert taken == (sum(votes) >= least)
        assert not any(vote and not x for vote, x in zip(votes, own, strict=True))
    assert not (more & ~found).any()
    assert agreed([None, None], [1.0, 1.0], [1.0, 1.0], 1) is None


# -- arcee_fusion ----------------------------------------------------------------------------------


def rows_of(base: npt.NDArray[np.float32], expert: npt.NDArray[np.float32]) -> Rows:
    """Rows of float32 arrays of two dimensions."""
    sides = [(one.reshape(-1).view(np.uint8), "F32") for one in (base, expert)]
    return Rows(sides[0], sides[1], base.shape[-1], base.size)


@pytest.mark.parametrize(
    ("scale", "step"),
    [(1.0, 0.1), (0.02, 1e-4), (0.02, 0.2), (40.0, 5.0), (60.0, 1e-4), (300.0, 1e-5), (1e-30, 1.0)],
)
@pytest.mark.parametrize("row", [1, 2, 7, 64, 4097])
def test_divergences_are_exact(scale: float, step: float, row: int) -> None:
    """The divergence of rows is that of 80-bit numbers to half a unit in the last place and 2^-52,
    never below zero, and zero for equal rows."""
    rng = np.random.default_rng(row)
    base = (scale * rng.standard_normal((40, row))).astype(np.float32)
    expert = (base + scale * step * rng.standard_normal(base.shape)).astype(np.float32)
    expert[3] = base[3]
    rows = rows_of(base, expert)
    found = rows.divergences()
    exact = reference.divergence(base.ravel(), expert.ravel(), row)
    assert np.all(np.abs(found - exact) <= 2.0**-24 * (1 + 2.0**-20) * exact + 2.0**-52)
    assert found.min() >= 0
    assert found[3] == 0
    importance = np.abs(expert - base).ravel() * np.repeat(found, row)
    for least in (0.0, float(np.median(importance)), float(importance.max())):
        assert np.array_equal(rows.important(found, least), importance >= np.float32(least))
    upper = importance.view(np.uint32) >> 16
    written = np.empty(base.size, dtype=np.float32)
    again, places, counts, squares = rows.upper(written)
    assert np.array_equal(again, found)
    assert np.array_equal(written, importance)
    assert np.array_equal(rows.importances(found), importance)
    there, many = np.unique(upper, return_counts=True)
    assert np.array_equal(places, there)
    assert np.array_equal(counts, many)
    weights = (expert - base).ravel().astype(np.float64) ** 2
    assert np.array_equal(squares, np.bincount(upper, weights=weights)[there])
    for halves in ([int(there[-1])], [int(one) for one in {there[0], there[there.size // 2]}]):
        halves.sort()
        bits = importance.view(np.uint32)[np.isin(upper, halves)]
        keys = np.searchsorted(halves, bits >> 16) * 2**16 + (bits & 0xFFFF)
        for got, wanted in zip(
            lower(importance, halves), np.unique(keys, return_counts=True), strict=True
        ):
            assert np.array_equal(got, wanted)


@pytest.mark.parametrize(("value", "finite"), [(np.nan, False), (np.inf, False), (-np.inf, True)])
def test_rows_that_are_not_finite(value: float, finite: bool) -> None:
    """A NaN and infinity leave a row without a divergence, in either model; a share of 0 does not;
    other rows keep theirs."""
    for side in range(2):
        rows = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
        sides = [rows, rows + np.float32(0.5) * rows**2]
        clean = rows_of(*sides).divergences()
        sides[side] = sides[side].copy()
        sides[side][1, 2] = value
        found = rows_of(*sides).divergences()
        assert np.isfinite(found[1]) == finite
        assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_divergences_that_planning_remembers(tmp_path: Path) -> None:
    """A merge takes the divergences of rows that planning has just computed; a store that is opened
    again computes the same ones."""
    rng = np.random.default_rng(3)
    shapes = {"rows": (900, 64), "long": (3, 30000), "flat": (5000,)}
    base = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    moved = {
        name: one + rng.normal(0, 1e-3, one.shape).astype(np.float32) for name, one in base.items()
    }
    asked = MergeRequest(base="base", experts=["e0"], method="arcee_fusion")
    with merged(tmp_path, "arcee_fusion", {}, base, moved) as store:
        found, catalog = store["merged"].manifest, store._catalog
        manifests = [catalog.manifest(store[name].manifest) for name in ("base", "e0")]
        sides = [tensors_of(catalog, one) for one in manifests]
        for name, one in base.items():
            known = catalog.row_numbers.get(sides[0][name], sides[1][name])
            assert known is not None
            rows = rows_of(np.atleast_2d(one), np.atleast_2d(moved[name]))
            assert np.array_equal(known, rows.divergences())
            known[:] = 0
        store.merge(store.plan(asked), name="none", memo=False)
        for name, one in base.items():
            assert np.array_equal(store["none"].tensor(name), one)
    with Store.open(tmp_path / "store") as store:
        store.merge(store.plan(asked), name="again", memo=False)
        assert store["again"].manifest == found


@pytest.mark.parametrize("most", [0, 17000])
def test_importances_that_are_not_kept(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where importances of a tensor take too much memory, its chunks are read again, or some are:
    the merge is the same, and the report says what was read."""
    rng = np.random.default_rng(4)
    base = {"w": rng.normal(0, 0.02, (300, 64)).astype(np.float32)}
    moved = {"w": base["w"] + rng.normal(0, 1e-3, base["w"].shape).astype(np.float32)}
    asked = MergeRequest(base="base", experts=["e0"], method="arcee_fusion")
    Family(base, [moved]).write(tmp_path)
    found, read = [], []
    for kept in (1 << 25, most):
        monkeypatch.setattr(arcee_fusion, "_MOST_KEPT", kept)
        with Store.init(tmp_path / str(kept), block_size=families.BLOCK) as store:
            for name in ("base", "e0"):
                store.add(tmp_path / name, name=name)
            plan = store.plan(asked)
            read.append(plan.analyze_bytes_read)
            store.merge(plan, name="merged")
            found.append(store["merged"].manifest)
    assert found[0] == found[1]
    assert read[1] > read[0]


def test_quartiles_of_zero(tmp_path: Path) -> None:
    """Where more than three quarters of the elements stay, all that moves is taken; so is a tensor
    of which no row has a divergence.  Where steps are of one size none stands out: nothing is read,
    and a merge of nothing else is refused."""
    base = {"w": np.zeros((8, 512), np.float32), "x": np.zeros((300, 1), np.float32)}
    moved = {"w": base["w"].copy(), "x": base["x"] + np.float32(2)}
    moved["w"][:, :64] = np.linspace(0, 1, 64, dtype=np.float32)
    with merged(tmp_path / "few", "arcee_fusion", {}, base, moved) as store:
        for name, value in moved.items():
            assert np.array_equal(store["merged"].tensor(name), value)
    flat = {"w": np.zeros((8, 513), np.float32)}
    alike = {"w": np.tile(np.array([0.5, -0.5, 0], np.float32), (8, 171))}
    with merged(tmp_path / "alike", "arcee_fusion", {}, flat, alike) as store:
        assert np.array_equal(store["merged"].tensor("w"), flat["w"])
        asked = MergeRequest(base="base", experts=["e0"], method="arcee_fusion")
        with pytest.raises(BadRequest, match="no element of the expert is important enough"):
            store.plan(asked)
        assert store.plan(asked, allow_noop=True).full_expert_bytes == 0


# -- pcb -------------------------------------------------------------------------------------------


def published(deltas: Double, ratio: float) -> Double:
    """The authors' `PCB_merge`, without clipping; deltas: of each expert, each with a zero."""
    count, size = deltas.shape

    def normalized(x: Double) -> Double:
        low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        found: Double = (x - low) / (high - low)
        return found

    intra = np.exp(count * normalized(np.abs(deltas)) ** 2)
    balanced = intra * np.tanh(deltas * deltas.sum(axis=0))
    least = np.sort(balanced, axis=1)[:, int(size * (1 - ratio))][:, None]
    scale = normalized(np.maximum(balanced, least))
    found: Double = (deltas * scale).sum(axis=0) / np.maximum(scale.sum(axis=0), 1e-12)
    return found


def test_the_reference_is_what_was_published() -> None:
    """Where each expert leaves some element, and as long as only winners count, the definition is
    the authors' code without clipping, within float32."""
    rng = np.random.default_rng(2)
    base = np.zeros(4000, dtype=np.float32)
    experts = [rng.standard_normal(4000).astype(np.float32) for _ in range(3)]
    for k, one in enumerate(experts):
        one[k] = 0
    wanted = published(np.array(experts, dtype=np.float64), 0.1)
    found = reference.merge("pcb", {}, [1.0, 1.0, 1.0], base, experts)
    assert np.count_nonzero(wanted) > 400
    assert np.abs(found - wanted).max() <= 2.0**-20 * np.abs(wanted).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_scores_are_rounded_once(count: int) -> None:
    """exp and tanh are so exact that a score is within half a unit of float32, and 2^-44; numbers
    that stand for scores order as these do."""
    rng = np.random.default_rng(count)
    sizes = np.exp2(rng.uniform(-40, 6, (count, 20_000))) * rng.choice([-1, 1], (count, 20_000))
    sizes[:, :64], sizes[0, 64:128] = 0.0, -0.0
    sizes[0, 128] = 64.0
    deltas = [one.astype(np.float32) for one in sizes]
    largest = [float(np.abs(one).max()) for one in deltas]
    ordered = pcb.scores(deltas, largest)
    found = pcb.singles_of(ordered)
    total = np.sum([one.astype(np.float64) for one in deltas], axis=0).astype(np.longdouble)
    for numbers, own, d, most in zip(ordered, found, deltas, largest, strict=True):
        wide = d.astype(np.longdouble)
        wanted = np.exp(count * ((wide / most) ** 2 - 1)) * np.tanh(wide * total)
        gap = np.abs(own - wanted)
        assert (gap <= 2.0**-24 * (1 + 2.0**-20) * np.abs(wanted) + 2.0**-150).all()
        assert (np.diff(own[np.argsort(numbers)]) >= 0).all()
        assert len(set(own.tolist())) == len(set(numbers.tolist()))
    assert not np.signbit(found[found == 0]).any()


def test_a_merge_of_fewer_does_not_answer_for_more(tmp_path: Path) -> None:
    """An expert that moves nothing competes, too, though only the others are read and have the same
    limits as without it: results are not mixed up."""
    rng = np.random.default_rng(3)
    base = {"w": np.zeros((64, 512), dtype=np.float32)}
    moved = [{"w": np.abs(rng.standard_normal((64, 512))).astype(np.float32)} for _ in range(2)]
    for one in moved:
        # The least score is 0, and the largest that of the largest delta.
        one["w"][0, :2] = 0.0, 20.0
    given = {"ratio": 1.0}
    with merged(tmp_path, "pcb", given, base, *moved, base) as store:
        for experts in (["e0", "e1"], ["e0", "e1", "e2"]):
            asked = MergeRequest(base="base", experts=experts, method="pcb", parameters=given)
            store.merge(store.plan(asked), name="merged")
            own = Family(base, (*moved, base)[: len(experts)])
            wanted = families.expected(own, "pcb", given, (1.0,) * len(experts))
            assert families.differences({"w": store["merged"].tensor("w")}, wanted) == []


# -- della -----------------------------------------------------------------------------------------


def test_norms_are_restored(place: Place) -> None:
    """The kept part of a delta gets the whole delta's L1 norm."""
    row = Row("della_linear", {"density": 0.5, "seed": 77}, (1.0,))
    place.store.merge(place.store.plan(row.request()), name="restored")
    for name in ("blocks", "flat"):
        base = place.family.base[name]
        whole = np.abs(place.family.experts[0][name] - base).sum(dtype=np.float64)
        moved = np.abs(place.store["restored"].tensor(name) - base).sum(dtype=np.float64)
        assert moved == pytest.approx(whole, rel=1e-5)


def test_larger_elements_are_kept_more_often() -> None:
    """Over many draws, the share of kept elements rises from density - epsilon to + epsilon."""
    sizes = np.tile(np.linspace(0, 1, 50, dtype=np.float32), 4000)
    kept = masks.Ranks(50, 0.5, 0.3).keep(sizes, mask_key(1, 0, "t"), 0).reshape(-1, 50)
    assert np.allclose(kept.mean(axis=0), np.linspace(0.2, 0.8, 50), atol=0.04)


def require_ranks(sizes: Any, length: int, density: float, epsilon: float, first: int) -> None:
    """Raise AssertionError unless rows from this element on have the masks of the reference."""
    wanted = reference.by_rank(sizes, length, density, epsilon)
    draws = reference.draws(4, 0, "t", first + sizes.size)[first:].astype(np.uint64)
    kept = masks.Ranks(length, density, epsilon).keep(sizes, mask_key(4, 0, "t"), first)
    assert np.array_equal(kept, draws < np.rint(wanted * 2.0**32))


@drawn(st.integers(1, 40), st.integers(1, 60), st.floats(0.05, 0.9), st.integers(0, 20))
def test_ranks_are_those_of_the_reference(
    rows: int, length: int, density: float, skipped: int
) -> None:
    """Any rows, from any row on: the masks of the reference, ties too."""
    rng = np.random.default_rng(rows * length)
    sizes = np.abs(rng.integers(-3, 4, rows * length)).astype(np.float32)
    require_ranks(sizes, length, density, min(density, 1 - density) / 2, skipped * length)


def test_rows_that_are_ranked_in_turns() -> None:
    """More rows than are ranked at a time: each element has the draw of its place."""
    sizes = np.abs(np.random.default_rng(2).normal(0, 1, 1500 * 100)).astype(np.float32)
    require_ranks(sizes, 100, 0.5, 0.2, 300)


@pytest.mark.parametrize(
    ("chunk", "shape", "wanted"),
    [(2048, (96, 128), 2048), (2048, (60, 100), 6144), (2048, (5, 5000), 26624), (64, (640,), 640)],
)
def test_chunks_of_whole_rows(chunk: int, shape: tuple[int, ...], wanted: int) -> None:
    """A chunk is whole blocks and whole rows, or the whole tensor where that is less."""
    assert whole_rows(chunk, shape[-1], math.prod(shape)) == wanted


# -- sce -------------------------------------------------------------------------------------------


def test_of_one_expert_nothing_varies(place: Place) -> None:
    """One expert alone has no variance: all of it is taken, or with a share nothing."""
    row = Row("sce", {}, (1.0,))
    place.store.merge(place.store.plan(row.request()), name="one")
    assert np.allclose(
        place.store["one"].tensor("blocks"), place.family.experts[0]["blocks"], atol=1e-6
    )
    share = row.request(parameters={"select_topk": 0.5})
    with pytest.raises(BadRequest, match="there is one"):
        place.store.plan(share)
    place.store.merge(place.store.plan(share, allow_noop=True), name="none")
    assert np.array_equal(place.store["none"].tensor("blocks"), place.family.base["blocks"])


# -- ram -------------------------------------------------------------------------------------------


def test_counts_of_many_experts() -> None:
    """Of 257 experts, as of three: who shares an element, and who moves it alone; factors of counts
    are at least 1 and finite."""
    for others in (2, 256):
        own = np.array([True, True, False])
        kept = [own, *(np.array([False, True, True]) for _ in range(others))]
        assert shared_counts(kept) == [(1, 1), *[(2, 0)] * others]
    with pytest.raises(BadRequest, match="finite"):
        counted({"r": 3e38, "alpha": 3e38}, [(10, 1), (10, 1)])
    assert counted({"epsilon": 0}, [(0, 0)]).weights[0] >= 1


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
    assert np.sqrt(found) == pytest.approx(error, rel=0.15)


# -- guarded ---------------------------------------------------------------------------------------


def asked_guarded(threshold: float, **options: Any) -> MergeRequest:
    return Row("guarded", {"threshold": threshold}, (1.0, 1.0)).request(**options)


@pytest.mark.parametrize("name", ["parts", "flat", "long"])
def test_the_threshold_is_the_cosine(name: str, place: Place) -> None:
    """The choice changes where the threshold passes the cosine of the float32 deltas; a tensor has
    the blocks of the one that it is, and the other's are not read."""
    base, *sides = (one[name] for one in (place.family.base, *place.family.experts[:2]))
    one, other = ((side - base).ravel().astype(np.float64) for side in sides)
    cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    for gap, chosen in ((-1e-4, 0), (1e-4, 1)):
        plan = place.store.plan(asked_guarded(cosine + gap, only=[name]))
        [tensor] = place.record(plan).tensors
        assert tensor.mixture is not None
        assert tensor.mixture.experts == ((0.0, 1.0) if chosen else (1.0, 0.0))
        place.store.merge(plan, name="chosen")
        catalog = place.store._catalog
        ids = [
            tensors_of(catalog, catalog.manifest(place.store[ref].manifest))[name]
            for ref in ("chosen", f"e{chosen}")
        ]
        assert ids[0] == ids[1]


def test_a_plan_tells_who_has_a_part(place: Place) -> None:
    """A plan names the tensors that the other model has, warns if the reference is the base, and
    says under a budget that what is left out is not the reference's."""
    remarks = [str(one) for one in place.store.plan(asked_guarded(0.6)).remarks]
    assert any(one.startswith("e0 has no part in ") for one in remarks)
    assert any(one.startswith("e1 has no part in ") for one in remarks)
    assert not any("left out" in one for one in remarks)
    part = place.store.plan(asked_guarded(0.6, budget="50%"))
    assert any("the base's, which is not the reference's" in str(one) for one in part.remarks)
    for other, says in (("base", "base is the base itself"), ("e0", "e0 is given more than once")):
        plan = place.store.plan(asked_guarded(0.6, experts=[("e0", 1.0), (other, 1.0)]))
        assert any(one.text.startswith(says) for one in plan.warnings)


# -- factors of rows -------------------------------------------------------------------------------

BY_ROWS = {
    row.method: row for row in ROWS if row.rows and len(row.weights) == 2 and all(row.weights)
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", BY_ROWS.values(), ids=str)
def test_what_is_not_finite_stays_in_its_row(row: Row, tmp_path: Path) -> None:
    """A NaN or an infinity of an expert makes what that row's experts move NaN, in no other row;
    elements that nobody moves keep their bits."""
    rng = np.random.default_rng(2)
    base = {"a": rng.standard_normal((40, 600)).astype(np.float32)}
    clean = [{"a": (base["a"] + rng.standard_normal((40, 600))).astype(np.float32)} for _ in "ab"]
    for one in clean:
        one["a"][:, :10] = base["a"][:, :10]
    wild = [{"a": one["a"].copy()} for one in clean]
    wild[0]["a"][7, 50], wild[1]["a"][9, 60] = np.nan, np.inf
    given = {name: one for name, one in row.given.items() if name != "around_base"}
    found = []
    for name, moved in (("clean", clean), ("wild", wild)):
        with merged(tmp_path / name, row.method, given, base, *moved) as store:
            found.append(store["merged"].tensor("a"))
    rest = np.ones(40, dtype=bool)
    rest[[7, 9]] = False
    assert np.array_equal(found[0][rest], found[1][rest])
    assert np.isnan(found[1][[7, 9], 10:]).all()
    assert np.array_equal(found[1][:, :10], base["a"][:, :10])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", [row for row in ROWS if row.rows and row.weights[0] > 0], ids=str)
def test_contributions_of_rows_add_up(row: Row, place: Place) -> None:
    """`blame` divides the change of each row by that row's factors."""
    place.store.merge(place.store.plan(row.request()), name="merged")
    (found,) = place.store.blame("merged", tensor="parts").tensors
    base, *sides = (one["parts"] for one in (place.family.base, *place.family.experts))
    sides = sides[: len(row.weights)]
    parts = terms(row, base, sides, sides)
    if row.is_whole:
        # Of a sum of wholes each gives what moves, and the rest of the base is nobody's.
        assert row.definition is not None
        factors = row.definition(
            [side.astype(np.float64) for side in sides], row.weights, row.given
        )
        moved = [f * (side - base) for f, side in zip(factors, sides, strict=True)]
        total = np.sum(parts, axis=0) - base
    else:
        moved = parts[1:]
        total = np.sum(moved, axis=0)
    assert found.norm == pytest.approx(np.linalg.norm(total), rel=1e-5)
    for one, term in zip(found.experts, moved, strict=True):
        assert one.norm == pytest.approx(np.linalg.norm(term), rel=1e-5)
        share = float((term * total).sum() / (total * total).sum())
        assert one.share == pytest.approx(share, rel=1e-4, abs=1e-6)


def test_options_without_effect_change_no_plan(place: Place) -> None:
    """The defaults, and nuslerp_row_wise of whole tensors, which has no effect in mergekit either,
    give the plan that there is without them; a recipe of rows gives its plan again."""
    slerp, stock = Row("nuslerp", {}, (0.25, 0.5)), Row("model_stock", {}, (1.0, 1.0))
    for row, given, shown in (
        (slerp, {"nuslerp_flatten": True}, {"around_base": True}),
        (slerp, {"nuslerp_row_wise": True}, {"around_base": True}),
        (slerp, {"nuslerp_flatten": "true", "nuslerp_row_wise": "false"}, {"around_base": True}),
        (stock, {"filter_wise": False}, {}),
    ):
        plan = place.store.plan(row.request(parameters=given))
        assert plan.plan == place.store.plan(row.request()).plan
        assert dict(plan.parameters) == shown
    rows = place.store.plan(slerp.request(parameters=TURNED))
    assert dict(rows.parameters) == {"around_base": True, "nuslerp_flatten": False}
    for row, given in ((slerp, TURNED), (stock, FILTERS)):
        plan = place.store.plan(row.request(parameters=given))
        place.store.merge(plan, name="merged")
        text = place.store.recipe("merged")
        assert next(iter(given)) in text
        assert place.store.plan(place.store.read_recipe(text).request).plan == plan.plan


def test_angles_are_near_those_of_the_c_library() -> None:
    """Arc cosines and sines are within 2^-49 of the C library's."""
    rng = np.random.default_rng(4)
    near = 1 - 10.0 ** rng.uniform(-15, 0, 20_000)
    cosine = np.concatenate([rng.uniform(-1, 1, 20_000), near, -near, [0.0, 1.0, -1.0]])
    assert np.abs(arc_cosine(cosine) - np.arccos(cosine)).max() <= 2.0**-49
    angle = np.concatenate([rng.uniform(-10, 10, 20_000), rng.uniform(-1e5, 1e5, 20_000), [0.0]])
    assert np.abs(sine(angle) - np.sin(angle)).max() <= 2.0**-49
    assert arc_cosine(np.array([1.0])) == 0


def test_factors_do_not_depend_on_the_processor() -> None:
    """The factors of fixed rows are these bits on any machine."""
    rng = np.random.Generator(np.random.PCG64(9))
    parts = np.stack([(rng.integers(-999, 1000, (5, 333)) / 512).astype(np.float32) for _ in "abc"])
    parts[1] += parts[0]
    slerp = operation("nuslerp", TURNED, [1.0, 1.0]).chunk_factors
    stock = operation("model_stock", FILTERS, [1.0, 1.0]).chunk_factors
    assert slerp is not None
    assert stock is not None
    assert slerp.of_rows(parts[:2], [0.3, 0.4]).view(np.uint32).tolist() == [
        [1055714271, 1058790990],
        [1055932359, 1058909922],
        [1055818219, 1058847697],
        [1055897828, 1058891102],
        [1055814838, 1058845853],
    ]
    shares = stock.of_rows(parts, [1.0] * 3).view(np.uint32)
    assert shares[:, 0].tolist() == [1043016302, 1042841867, 1041069401, 1043010947, 1044639461]
    assert (shares == shares[:, :1]).all()
