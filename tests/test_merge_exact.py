"""Full-budget merges through the public face equal the reference bit for bit, however they are run.

The reference (tests/reference.py) works on whole tensors in numpy and shares no code with the
library.  Checkpoints come back through `checkout` and are read by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import Family

from mstore import ManifestId, MergeRequest, PlanId, Store
from mstore.api.reports import MergeReport, PlanReport
from mstore.store.objects.plan import Plan

SMALL, LARGE = 1 << 16, 1 << 20


@dataclass(frozen=True)
class Case:
    """A method with parameters and weights."""

    method: str
    parameters: dict[str, Any]
    weights: tuple[float, ...]

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{name}={v}" for name, v in self.parameters.items())])


CASES = [
    Case("linear", {}, (0.5, 0.3, 0.2)),
    Case("linear", {"normalize": False}, (0.5, 0.75, -0.1)),
    Case("task_arithmetic", {}, (1.0, 0.4, -0.25)),
    Case("task_arithmetic", {"lambda": 0.7, "normalize": True}, (1.0, 0.4, 0.3)),
    Case("ties", {"density": 0.2}, (1.0, 0.5, 0.7)),
    Case("ties", {"density": 0.55, "lambda": 1.3, "normalize": False}, (1.0, -0.5, 0.7)),
    Case("ties", {}, (0.3, 0.3, 0.3)),
    Case("dare_linear", {"density": 0.3, "seed": 7}, (1.0, 0.5, 0.7)),
    Case("dare_ties", {"density": 0.5, "seed": 2**64 - 1, "rescale": False}, (1.0, 0.5, 0.7)),
    Case("dare_ties", {"density": 0.4, "normalize": True, "lambda": 0.5}, (1.0, 0.5, 0.7)),
    Case("breadcrumbs", {"density": 0.3, "gamma": 0.2}, (1.0, 0.5, 0.7)),
    Case("breadcrumbs", {"density": 0.9, "gamma": 0.5, "normalize": True}, (1.0, -0.5, 0.7)),
    Case("breadcrumbs_ties", {"density": 0.4, "gamma": 0.1, "lambda": 0.7}, (1.0, -0.5, 0.7)),
]
ONE_A_METHOD = [CASES[0], CASES[3], CASES[4], CASES[7], CASES[9], CASES[10]]

FAMILIES: dict[str, Callable[[], Family]] = {
    # The embedding is larger than a block of either size.
    "bf16": lambda: families.layered(rows=520),
    "f16": lambda: families.layered(3, base_dtype="F16", expert_dtypes=("F16",) * 3, rows=80),
    # Deltas of float32 fill the bins of the histogram: thresholds take a second look.
    "f32": lambda: families.layered(1, base_dtype="F32", expert_dtypes=("F32",) * 3, rows=300),
    "mixed": lambda: families.layered(2, expert_dtypes=("F32", "F16", "BF16"), rows=300),
    "odd BF16": lambda: families.specials("BF16"),
    "odd F16": lambda: families.specials("F16"),
    "odd F32": lambda: families.specials("F32"),
    "wide base": lambda: families.layered(
        4, base_dtype="F32", expert_dtypes=("BF16", "F32", "F16"), rows=80
    ),
}


@dataclass
class Workplace:
    """A family on disk, and stores that hold it, made when they are asked for."""

    root: Path
    family: Family
    stores: dict[tuple[int, str], Store] = field(default_factory=dict)

    def store(self, block_size: int, kind: str = "first") -> Store:
        """A store with base and experts.

        `again`: another one, where no statistics were kept.  `common`: an empty one.
        """
        if (block_size, kind) not in self.stores:
            store = Store.init(
                self.root / f"{kind}-{block_size}", block_size=block_size, codec="raw"
            )
            members = ["base", *self.family.names] if kind != "common" else []
            for name in members if kind == "first" else reversed(members):
                base = "base" if kind == "first" and name != "base" else None
                store.add(self.root / name, name=name, base=base)
            self.stores[block_size, kind] = store
        return self.stores[block_size, kind]

    def plan(
        self, case: Case, store: Store, threads: int = 2, dtype: str | None = None
    ) -> PlanReport:
        return store.plan(
            MergeRequest(
                base="base",
                experts=list(zip(self.family.names, case.weights, strict=True)),
                method=case.method,
                parameters=case.parameters,
                dtype=dtype,
            ),
            threads=threads,
        )

    def merge(
        self, case: Case, store: Store, threads: int = 2, dtype: str | None = None
    ) -> MergeReport:
        plan = self.plan(case, store, threads, dtype)
        return store.merge(plan, name="merged", allow_nonfinite=True, threads=threads)

    def merged(self, store: Store) -> families.Arrays:
        """The merge as arrays, straight from the store."""
        snapshot = store["merged"]
        return {name: snapshot.tensor(name) for name in snapshot.tensor_names()}

    def expected(self, case: Case, dtype: str | None = None) -> families.Arrays:
        return families.expected(
            self.family, case.method, case.parameters, case.weights, dtype=dtype
        )


@pytest.fixture(scope="module")
def workplaces(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Workplace]]:
    """Each family on disk, written when it is first asked for."""
    made: dict[str, Workplace] = {}

    def workplace(kind: str) -> Workplace:
        if kind not in made:
            family = FAMILIES[kind]()
            made[kind] = Workplace(family.write(tmp_path_factory.mktemp(kind)), family)
        return made[kind]

    yield workplace
    for one in made.values():
        for store in one.stores.values():
            store.close()


@pytest.mark.sampled(13)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_to_run_it_gives_the_reference(
    case: Case, workplaces: Callable[[str], Workplace], tmp_path: Path
) -> None:
    """Block sizes, threads and stores do not show: the bytes are the reference's.

    For a block size, PlanIds and ManifestIds are equal over 1 and 2 threads and over stores that
    took their statistics at `add` or at `plan`.  Checkouts of runs with two block sizes, added to
    one store, have one ManifestId.
    """
    work = workplaces("bf16")
    wanted = work.expected(case)
    contents: set[ManifestId] = set()
    for block_size, runs in (
        (SMALL, (("first", 1), ("first", 2), ("again", 2))),
        (LARGE, (("first", 2), ("first", 1))),
    ):
        plans: set[PlanId] = set()
        manifests: set[ManifestId] = set()
        for kind, threads in runs:
            store = work.store(block_size, kind)
            report = work.merge(case, store, threads)
            plans.add(report.plan)
            manifests.add(report.manifest)
            assert families.differences(work.merged(store), wanted) == []
        assert len(plans) == len(manifests) == 1
        store.checkout("merged", tmp_path / str(block_size))
        found = families.read_checkpoint(tmp_path / str(block_size))
        assert families.differences(found, wanted) == []
        # They name the parents by ids, which depend on the block size.
        for path in ("README.md", "mergekit_config.yml"):
            (tmp_path / str(block_size) / path).unlink()
        contents.add(
            work.store(LARGE, "common").add(tmp_path / str(block_size), name="run").manifest
        )
    assert len(contents) == 1


@pytest.mark.sampled(48)
@pytest.mark.parametrize(
    ("kind", "block_size"),
    [*((kind, SMALL) for kind in FAMILIES if kind != "bf16"), ("mixed", LARGE)],
)
@pytest.mark.parametrize("case", ONE_A_METHOD, ids=str)
def test_other_elements(
    case: Case, kind: str, block_size: int, workplaces: Callable[[str], Workplace]
) -> None:
    """fp16, fp32, families of several types, and odd numbers (NaN, infinities, minus zero,
    subnormals) on any side merge to the reference, in the base's type.
    """
    work = workplaces(kind)
    store = work.store(block_size)
    report = work.merge(case, store)
    with np.errstate(all="ignore"):
        wanted = work.expected(case)
    assert families.differences(work.merged(store), wanted) == []
    assert report.expert_bytes_read == report.planned_expert_bytes


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("case", ONE_A_METHOD, ids=str)
def test_output_dtype(case: Case, dtype: str, workplaces: Callable[[str], Workplace]) -> None:
    """With an output type every merged tensor has it, rounded once, unchanged ones included."""
    work = workplaces("mixed")
    store = work.store(SMALL)
    work.merge(case, store, dtype=dtype)
    assert families.differences(work.merged(store), work.expected(case, dtype)) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "mixed", "wide base"])
def test_slerp_is_its_mixture(kind: str, workplaces: Callable[[str], Workplace]) -> None:
    """Every tensor is the reference's fused sum with the plan's factors, which are those of float64
    arithmetic over whole tensors; threads, stores and block sizes do not show."""
    work = workplaces(kind)
    given = {"base": "base", "experts": ["e0"], "method": "slerp", "parameters": {"t": 0.3}}
    found = []
    for block_size, store_kind, threads in (
        (SMALL, "first", 1),
        (SMALL, "again", 2),
        (LARGE, "first", 2),
    ):
        store = work.store(block_size, store_kind)
        report = store.plan(MergeRequest(**given), threads=threads)
        store.merge(report, name="merged", allow_nonfinite=True, threads=threads)
        merged = work.merged(store)
        found.append({name: families.bits(array).tobytes() for name, array in merged.items()})
        for planned in store._catalog.record(Plan, report.plan).tensors:
            name, mixture = planned.name, planned.mixture
            assert mixture is not None
            base, expert = work.family.base[name], work.family.experts[0][name]
            a, b = (side.astype(np.float64).ravel() for side in (base, expert))
            cosine = float(a @ b) / float(np.sqrt(a @ a) * np.sqrt(b @ b))
            wanted = [0.7, 0.3]
            if abs(cosine) <= 0.9995:
                angle = np.arccos(cosine)
                wanted = [np.sin(share * angle) / np.sin(angle) for share in wanted]
            np.testing.assert_allclose([mixture.base, *mixture.experts], wanted, rtol=1e-6)
            exact = reference.mixture(
                [mixture.base, *mixture.experts],
                base,
                [expert],
                keeps_base=mixture.keeps_base,
            )
            assert np.array_equal(families.bits(merged[name]), families.bits(exact)), name
    assert found[0] == found[1] == found[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inexact", [False, True])
def test_ties_keeps_exactly_k(inexact: bool, tmp_path: Path) -> None:
    """k = max(1, int(density * n)) elements stay, at equal magnitude those of lowest flat index.

    The base is zero and there is one expert of weight 1, so what stays can be seen.  Magnitudes
    are few, and the quota of the tied ones ends in the middle of a later chunk.  Where they are
    `inexact` they all lie in one bin of the histogram, off its edge: a second look decides, once.
    """
    n = 70_000
    rng = np.random.default_rng(5)
    step = 2.0**-12 if inexact else 0.25
    values = (1 + step * rng.integers(1, 4, n)).astype(np.float32)
    values *= rng.choice(np.array([-1, 1], dtype=np.float32), n)
    family = Family({"w": np.zeros(n, dtype=np.float32)}, ({"w": values},))
    work = Workplace(family.write(tmp_path), family)
    store = work.store(SMALL)
    ends = []
    for density in (1e-9, 0.1, 0.3, 0.5, 0.9):
        case = Case("ties", {"density": density}, (1.0,))
        assert (work.plan(case, store).analyze_bytes_read > 0) == inexact
        assert work.plan(case, store).analyze_bytes_read == 0
        work.merge(case, store)
        found = work.merged(store)["w"]
        kept = reference.largest(values, density)
        assert np.count_nonzero(found) == max(1, int(density * n))
        assert np.array_equal(found, np.where(kept, values, np.float32(0)))
        tied = np.abs(values) == np.abs(values[kept]).min()
        ends.append((np.flatnonzero(tied & kept)[-1], np.flatnonzero(tied)[-1]))
    assert any(SMALL // 4 < last < end for last, end in ends)
    store.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inexact", [False, True])
def test_breadcrumbs_keeps_exactly_the_band(inexact: bool, tmp_path: Path) -> None:
    """int(density * n) elements stay after the int(gamma * n) largest, or after as many as leave
    that many; of equal magnitudes those of lowest index are the larger ones.  As above, but both
    quotas end within later chunks.
    """
    n = 70_000
    rng = np.random.default_rng(5)
    step = 2.0**-12 if inexact else 0.25
    values = (1 + step * rng.integers(1, 6, n)).astype(np.float32)
    values *= rng.choice(np.array([-1, 1], dtype=np.float32), n)
    family = Family({"w": np.zeros(n, dtype=np.float32)}, ({"w": values},))
    work = Workplace(family.write(tmp_path), family)
    store = work.store(SMALL)
    ends = []
    for density, gamma in ((1e-9, 0.5), (0.3, 0.1), (0.01, 0.5), (0.5, 0.3), (0.8, 0.15)):
        case = Case("breadcrumbs", {"density": density, "gamma": gamma}, (1.0,))
        kept = reference.band(values, density, gamma)
        plan = work.plan(case, store)
        assert (plan.analyze_bytes_read > 0) == inexact
        assert work.plan(case, store).plan == plan.plan
        work.merge(case, store)
        found = work.merged(store)["w"]
        assert np.count_nonzero(found) == int(density * n)
        assert np.array_equal(found, np.where(kept, values, np.float32(0)))
        if kept.any():
            magnitudes = np.abs(values)
            for edge in (magnitudes[kept].min(), magnitudes[kept].max()):
                tied = magnitudes == edge
                ends.append(np.flatnonzero(tied & kept)[[0, -1]])
    inside = [first > SMALL // 4 or last < n - SMALL // 4 for first, last in ends]
    assert sum(inside) > 3
    store.close()


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_a_nan_takes_no_place(method: str, tmp_path: Path) -> None:
    """A NaN in an expert is never kept by trimming, and as many others are kept as without it."""
    n = 40_000
    values = np.arange(1, n + 1, dtype=np.float32)
    values[::4] = np.nan
    family = Family({"w": np.zeros(n, dtype=np.float32)}, ({"w": values},))
    work = Workplace(family.write(tmp_path), family)
    store = work.store(SMALL)
    case = Case(method, {"density": 0.25}, (1.0,))
    work.merge(case, store)
    found = work.merged(store)["w"]
    assert np.count_nonzero(found) == n // 4
    assert not np.isnan(found).any()
    assert np.array_equal(found, work.expected(case)["w"])
    store.close()


ODD = np.float32([np.nan, np.inf, -np.inf])


def _with_odd(base: np.ndarray[Any, Any]) -> Family:
    """Three experts of a base of zeros: first nine elements where one is a NaN or infinite and the
    others are up, down and neither; then all nine pairs of them; then numbers.
    """
    n = base.size
    ups = np.float32([1, -2, 0])
    experts = np.ones((3, n), dtype=np.float32) * np.float32([[1.0], [2.0], [-0.5]])
    first, second = np.meshgrid(ODD, ups)
    experts[0, :9], experts[1, :9] = first.ravel(), second.ravel()
    first, second = np.meshgrid(ODD, ODD)
    experts[0, 9:18], experts[1, 9:18] = first.ravel(), second.ravel()
    return Family({"w": base}, tuple({"w": expert} for expert in experts))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("weight", [1.0, 0.0, -0.7])
def test_what_has_no_sign_elects_none(count: int, weight: float, tmp_path: Path) -> None:
    """At every density a NaN takes no part in ties and dare_ties, and infinity less infinity counts
    as positive, as zero does: where everything else is kept, densities 1 and just below agree.
    """
    n = 20_000
    few = _with_odd(np.zeros(n, dtype=np.float32))
    family = Family(few.base, few.experts * (count // 3))
    work = Workplace(family.write(tmp_path), family)
    store = work.store(SMALL)
    weights = (weight, *(1.0 for _ in range(count - 1)))
    # What trimming drops at .9999 is of the smallest and last: no element that is looked at.
    looked = slice(0, n // 2)
    found = {}
    for method, density in (("ties", 1.0), ("ties", 0.9999), ("dare_ties", 1.0)):
        case = Case(method, {"density": density, "normalize": True}, weights)
        work.merge(case, store)
        found[method, density] = work.merged(store)["w"]
        wanted = work.expected(case)["w"]
        assert np.array_equal(found[method, density], wanted, equal_nan=True), (method, density)
    whole, trimmed = found["ties", 1.0][looked], found["ties", 0.9999][looked]
    assert np.array_equal(whole, trimmed, equal_nan=True)
    assert np.array_equal(whole, found["dare_ties", 1.0][looked], equal_nan=True)
    if weight == 1.0 and count == 3:
        # A NaN beside +1 (and -0.5): the positive delta stays, and no NaN comes out.
        assert whole[0] == 1
        assert not np.isnan(whole).any()
    assert np.isinf(whole[9:18]).any()
    store.close()


def test_dare_draws_by_position_and_name(tmp_path: Path) -> None:
    """Masks of two experts, two tensors and two seeds differ; density is what is kept."""
    n = 40_000
    zeros, ones = np.zeros(n, dtype=np.float32), np.ones(n, dtype=np.float32)
    base = {"a": zeros, "b": zeros + np.float32(0.5)}
    expert = {"a": ones, "b": ones + np.float32(0.5)}
    family = Family(base, (expert, {name: array * 2 for name, array in expert.items()}))
    work = Workplace(family.write(tmp_path), family)
    store = work.store(SMALL)
    masks = []
    for seed in (0, 1):
        for only in ((1.0, 0.0), (0.0, 1.0)):
            parameters = {"density": 0.3, "seed": seed, "rescale": False}
            work.merge(Case("dare_linear", parameters, only), store)
            masks += [array != family.base[name] for name, array in work.merged(store).items()]
    for number, mask in enumerate(masks):
        assert abs(float(mask.mean()) - 0.3) < 0.01
        assert all(abs(float((mask & other).mean()) - 0.09) < 0.01 for other in masks[:number])
    store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["dare_linear", "ties", "breadcrumbs"])
def test_tied_tensors_stay_tied(method: str, workplaces: Callable[[str], Workplace]) -> None:
    """Two names of one tensor, in base and experts alike, are one tensor in the merge, read once.

    Also where a method draws by name, and where a budget reaches only a part.
    """
    work = workplaces("bf16")
    store = work.store(SMALL)
    for budget in (None, 0.97, 0.5, 0.02):
        plan = store.plan(
            MergeRequest(
                base="base",
                experts=work.family.names,
                method=method,
                parameters={"density": 0.5},
                budget=budget,
            )
        )
        store.merge(plan, name="merged")
        tensors = store.view("merged").tensors
        assert tensors["model.tied.embed_in"] == tensors["model.tied.embed_out"]
    assert tensors["model.tied.embed_in"] == store.view("base").tensors["model.tied.embed_in"]
    full = store.merge(
        store.plan(MergeRequest(base="base", experts=work.family.names, method=method)), name="m"
    )
    assert store.view("m").tensors["model.tied.embed_in"] != tensors["model.tied.embed_in"]
    shares = store.explain("m", "model.tied.embed_out").tensors[0]
    assert shares.treatment == "merged"
    assert [share.chunks_read for share in shares.experts] == [1, 1, 1]
    # With density 1 breadcrumbs is task_arithmetic, whose outputs other tests may have left here.
    assert full.expert_bytes_read + full.memo_expert_bytes == full.full_expert_bytes
