"""Budgets: what a merge may read is what it reads, and the error that it costs is bounded.

Errors are measured in float64 on fp32 outputs, against the merge that reads everything.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from checkpoints import write_safetensors
from families import BLOCK, Arrays, Family

from mstore import Budget, MergeRequest, Store
from mstore.api.reports import MergeReport, PlanReport
from mstore.merge.methods.registry import find
from mstore.merge.planning.costs import Wanted
from mstore.store.objects.plan import DROPPED, OMITTED, READ, Plan
from mstore.terms.errors import BadRequest, BudgetExceeded, NotFound

# Not model_stock: deltas that have nothing in common are the base to it (tests/test_mixtures.py).
ADDITIVE = {
    "linear": ({}, (0.5, 0.3, 0.2)),
    "task_arithmetic": ({"lambda": 0.9}, (1.0, 0.5, -0.75)),
    "lines": ({"alpha": 0.4, "beta": 0.8}, (1.0, 0.5, -0.75)),
    "dare_linear": ({"density": 0.4, "seed": 3}, (1.0, 0.5, 0.75)),
    "breadcrumbs": ({"density": 0.6, "gamma": 0.02}, (1.0, 0.5, 0.75)),
    "multislerp": ({}, (1.0, 0.5, 0.75)),
    "nuslerp": ({"around_base": False}, (1.0, 0.5)),
    "karcher": ({}, (1.0, 1.0, 1.0)),
    "passthrough": ({"scale": 1.25}, (1.0,)),
    "nearswap": ({"t": 0.02}, (1.0,)),
    "arcee_fusion": ({}, (1.0,)),
    "guarded": ({"threshold": 0.0, "alpha": 0.25}, (1.0, 1.0)),
    "geometric_median": ({}, (1.0, 1.0, 1.0)),
    "masked": ({}, (1.0, 0.5, -0.75)),
    "safe_merge": ({"threshold": 0.5, "alpha": 0.25}, (1.0, 1.0)),
    "add_cosine_a": ({"alpha": 0.8}, (1.0,)),
    "tensor_sum": ({"width": 0.6, "offset": 0.7}, (1.0,)),
    "add_perpendicular": ({"alpha": 0.7}, (1.0, 1.0)),
}
CONSENSUS = {
    "sce": ({"select_topk": 0.4}, (1.0, 1.0, 1.0)),
    "consensus": ({"tall_mask_lambda": 0.2}, (1.0, 0.5, 0.75)),
    "fisher": ({}, (1.0, 0.5, 0.75)),
    "emr": ({}, (1.0, 1.0, 1.0)),
    "clamp": ({"stiffness": 0.3}, (1.0, 1.0, 1.0)),
    "train_difference": ({"alpha": 0.7}, (1.0, 1.0)),
    "pcb": ({"ratio": 0.3}, (1.0, 0.5, 0.75)),
    "ram": ({"epsilon": 0.01}, (1.0, 1.0, 1.0)),
    "ramplus_tl": ({"epsilon": 0.01, "r": 0.5, "alpha": 1.0}, (1.0, 1.0, 1.0)),
    "ties": ({"density": 0.3}, (1.0, 0.5, 0.75)),
    "dare_ties": ({"density": 0.4, "seed": 3}, (1.0, 0.5, 0.75)),
    "breadcrumbs_ties": ({"density": 0.5, "gamma": 0.02}, (1.0, 0.5, 0.75)),
}
LISTS = ("mirror", "packs")
"""Texts that a commit reads whole."""
METHODS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {**ADDITIVE, **CONSENSUS}
ROUGH = {
    "clamp": "beyond the range mostly",
    "consensus": "that enough experts need",
    "emr": "others take its elements",
    "pcb": "win different elements",
}
"""What is said of estimates that know too little."""


def roles_of(method: str) -> list[str]:
    """The roles of companions that a method asks for."""
    return [one.role for one in find(method).companions]


@dataclass
class Place:
    """A family and a store that holds it, experts added with their base."""

    root: Path
    family: Family
    store: Store

    def plan(self, method: str, store: Store | None = None, **options: Any) -> PlanReport:
        parameters, weights = METHODS[method]
        for key in ("budget", "expert_budget"):
            if options.get(key) == 1:
                options[key] = Budget(options[key])
        return (store or self.store).plan(
            MergeRequest(
                base="base",
                experts=list(zip(self.family.names, weights, strict=False)),
                method=method,
                parameters=parameters,
                companions=families.companions_for(roles_of(method), self.family.names),
                **options,
            ),
            allow_noop=True,
        )

    def merge(self, plan: PlanReport) -> tuple[MergeReport, Arrays]:
        """Run it, remembering nothing; also the merged tensors."""
        report = self.store.merge(plan, name="merged", memo=False)
        snapshot = self.store["merged"]
        return report, {name: snapshot.tensor(name) for name in self.mergeable}

    @property
    def mergeable(self) -> list[str]:
        dtypes = set(reference.DTYPES.values())
        return [name for name, array in self.family.base.items() if array.dtype in dtypes]

    def relative_error(self, merged: Arrays, full: Arrays) -> float:
        zero = {name: np.zeros(()) for name in merged}
        norm = families.distance(self.family.base, zero, self.mergeable)
        return families.distance(merged, full, self.mergeable) / norm


def make(root: Path, family: Family, *, with_base: bool = True) -> Place:
    store = Store.init(root / "store", block_size=BLOCK, codec="raw")
    if not (root / "base").exists():
        family.write(root)
    store.add(root / "base", name="base")
    for name in family.names:
        store.add(root / name, name=name, base="base" if with_base else None)
    for name in family.fisher_names:
        store.add(root / name, name=name)
    return Place(root, family, store)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    family = families.layered(rows=200).informed(dtypes=("BF16",))
    made = make(tmp_path_factory.mktemp("family"), family)
    with made.store:
        yield made


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    family = families.layered(8, expert_dtypes=("F32", "BF16", "F16"), rows=100).informed()
    made = make(tmp_path_factory.mktemp("mixed"), family)
    with made.store:
        yield made


# -- bytes and errors ----------------------------------------------------------------------------


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, "place") for method in METHODS),
        *((method, "mixed") for method in ("linear", "dare_ties")),
        *(
            pytest.param(method, "mixed", marks=pytest.mark.slow)
            for method in METHODS
            if method not in ("linear", "dare_ties")
        ),
    ],
)
@pytest.mark.parametrize(
    "percents", [(10, 60, 100), pytest.param(range(10, 101, 10), marks=pytest.mark.slow)]
)
def test_every_budget_is_kept(
    method: str, kind: str, percents: Sequence[int], request: pytest.FixtureRequest
) -> None:
    """From 10 to 100 %: bytes read are those planned, within the budget; error within the bound.

    A larger budget never has a larger bound.  Methods that elect signs have none.  The whole
    budget, as a share or in bytes, is the merge without one, bit for bit.
    """
    place: Place = request.getfixturevalue(kind)
    whole, full = place.merge(place.plan(method, dtype="F32"))
    assert whole.expert_bytes_read == whole.full_expert_bytes > 0
    previous = math.inf
    for percent in percents:
        plan = place.plan(method, dtype="F32", budget=percent / 100)
        report, merged = place.merge(plan)
        assert report.budget_bytes == int(percent / 100 * whole.full_expert_bytes)
        assert report.expert_bytes_read == report.planned_expert_bytes <= report.budget_bytes
        # Nothing is wasted: what is left would not pay for another block.
        assert report.budget_bytes - report.expert_bytes_read < 4 * BLOCK
        assert report.full_expert_bytes == whole.full_expert_bytes
        assert report.manifest == whole.manifest or percent < 100
        if method in CONSENSUS:
            assert report.error_bound is None
            assert report.error_estimate is not None
            continue
        assert report.error_bound is not None
        measured = place.relative_error(merged, full)
        assert measured <= report.error_bound <= previous
        if kind == "place":
            # The bound is worth having, and zero only where nothing is left out.
            assert report.error_bound <= 10 * measured
            assert (measured > 0) == (percent < 100)
        previous = report.error_bound
    exactly = place.plan(method, dtype="F32", budget=whole.full_expert_bytes)
    assert place.merge(exactly)[0].manifest == whole.manifest
    assert exactly.error_bound == (None if method in CONSENSUS else 0.0)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("method", ADDITIVE)
def test_max_error_is_kept(method: str, place: Place) -> None:
    """--max-error reads less the more error is allowed, and keeps what it was asked for."""
    _, full = place.merge(place.plan(method, dtype="F32"))
    nothing = place.plan(method, budget=1).error_bound
    assert nothing is not None
    previous = -1
    for share in (1.0, 0.6, 0.2, 0.0):
        plan = place.plan(method, dtype="F32", max_error=nothing * share)
        report, merged = place.merge(plan)
        assert report.error_bound is not None
        assert place.relative_error(merged, full) <= report.error_bound <= nothing * share
        assert previous < report.expert_bytes_read <= report.full_expert_bytes
        previous = report.expert_bytes_read
    assert previous == report.full_expert_bytes


def test_budget_and_error_that_cannot_both_be_kept(place: Place) -> None:
    """A budget too small for the error asked for is refused, with the error that it would keep."""
    with pytest.raises(BadRequest, match="keeps the error only to") as refused:
        place.plan("linear", budget=0.1, max_error=1e-9)
    assert refused.value.hint == "raise budget or max_error"


def test_kernel_counts_the_same_bytes(place: Place, tmp_path: Path) -> None:
    """What the kernel counts as read (/proc/self/io) is what the meters say, within one block and
    the lists of refs and packs, which a commit reads."""
    if not Path("/proc/self/io").exists():
        pytest.skip("this kernel counts no reads")
    plans = [place.plan("ties").plan]
    plans += [place.plan("ties", budget=share).plan for share in (0.1, 0.5, 1.0)]
    program = """
import json, sys
from mstore import Store

def read_by_kernel():
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))

with Store.open(sys.argv[1]) as store:
    for plan in sys.argv[2:]:  # code and kernels of each are loaded, records are in the cache
        store.merge(plan, name="warm", memo=False)
    for plan in sys.argv[3:]:
        before = read_by_kernel()
        report = store.merge(plan, name="counted", memo=False)
        after = read_by_kernel()
        print(json.dumps([after - before, report.expert_bytes_read, report.base_bytes_read]))
"""
    arguments = [str(place.store.path), *map(str, plans)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(counted) == 3
    refs = place.store.path / "refs"
    lists = sum(max(path.stat().st_size for path in refs.glob(f"{one}*")) for one in LISTS)
    for by_kernel, expert, base in counted:
        assert expert + base <= by_kernel < expert + base + BLOCK + 2 * lists
    assert counted[0][1] < counted[1][1] < counted[2][1]


def test_memory_is_a_few_blocks(tmp_path: Path) -> None:
    """Planning and merging tensors of 24 MiB takes less memory than one of them."""
    elements = 12 << 20
    rng = np.random.default_rng(0)
    with Store.init(tmp_path / "store", codec="raw") as store:
        for name in ("base", "e0", "e1"):
            # An exponent of 1 and below: sums stay finite, and nothing is constant.
            words = rng.integers(0, 1 << 16, elements, dtype=np.uint16) & np.uint16(0xBFFF)
            tensor = ("w", "BF16", (elements,), words.tobytes())
            write_safetensors(tmp_path / name / "m.safetensors", [tensor])
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        for name, data in (("tiny", b"123456"), ("moved", b"123465")):
            write_safetensors(tmp_path / name / "m.safetensors", [("w", "BF16", (3,), data)])
            store.add(tmp_path / name, name=name)
    program = """
import sys
from mstore import MergeRequest, Store

def peak():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) << 10

def merge(base, *experts):
    ask = {"method": "ties", "parameters": {"density": 0.2}}
    plan = store.plan(MergeRequest(base=base, experts=experts, **ask), threads=2)
    return store.merge(plan, name="merged", threads=2)

with Store.open(sys.argv[1]) as store:
    merge("tiny", "moved")  # kernels are loaded
    before = peak()
    report = merge("base", "e0", "e1")
    print(peak() - before, report.expert_bytes_read)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, read = map(int, done.stdout.split())
    assert read == 2 * 2 * elements
    assert grown < 2 * elements


# -- thresholds under a budget --------------------------------------------------------------------


def absent(place: Place, plan: PlanReport) -> dict[str, list[np.ndarray[Any, Any]]]:
    """By tensor and expert, flat: the elements that a plan leaves out."""
    found = {}
    for tensor in place.store._catalog.record(Plan, plan.plan).tensors:
        size = place.family.base[tensor.name].size
        found[tensor.name] = [
            np.repeat(np.isin(list(states), (OMITTED, DROPPED)), tensor.chunk_elements)[:size]
            for states in tensor.states
        ]
    return found


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Steps of one size, so that nearly everything ties, and float32 that ties off a bin's edge."""
    rng = np.random.default_rng(11)
    size = 8 * BLOCK // 2

    def steps(dtype: str, step: float, odd: float) -> np.ndarray[Any, Any]:
        return families.cast(step * rng.integers(-3, 4, size) * odd, dtype)

    base = {"a": families.cast(np.zeros(size), "BF16"), "b": np.zeros(size, dtype=np.float32)}
    base["c"] = np.ones(size, dtype=np.float32)
    experts = [
        base | {"a": steps("BF16", 2.0**-9, 1), "b": steps("F32", 2.0**-9, 1.00003)}
        for _ in range(3)
    ]
    made = make(tmp_path_factory.mktemp("tied"), Family(base, tuple(experts)))
    with made.store:
        yield made


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("kind", "method", "parameters"),
    [
        *(("tied", "ties", {"density": density}) for density in (0.1, 0.5, 0.8)),
        *((kind, "ties", {"density": 0.5}) for kind in ("place", "mixed")),
        # Both ranks lie within elements that tie, of one magnitude or of two.
        *(
            ("tied", "breadcrumbs", {"density": density, "gamma": gamma})
            for density, gamma in ((0.1, 0.05), (0.5, 0.1), (0.6, 0.3), (0.3, 0.9))
        ),
        *((kind, "breadcrumbs", {"density": 0.5, "gamma": 0.05}) for kind in ("place", "mixed")),
        *(
            pytest.param(kind, "ties", {"density": density}, marks=pytest.mark.slow)
            for kind in ("place", "mixed")
            for density in (0.1, 0.8)
        ),
    ],
    ids=str,
)
def test_a_budget_changes_only_what_is_left_out(
    kind: str, method: str, parameters: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Trimmed, what stays of a block that is read is the same under every budget: the merge is the
    one of whole experts with exactly k elements kept, less the blocks that are left out.
    """
    place: Place = request.getfixturevalue(kind)
    weights = (1.0, 0.5, 0.75)
    experts = list(zip(place.family.names, weights, strict=True))
    ask: dict[str, Any] = {"base": "base", "experts": experts, "method": method}
    for budget in (0.3, 0.97, 0.999):
        plan = place.store.plan(MergeRequest(**ask, parameters=parameters, budget=budget))
        assert not any("bin edges" in remark for remark in plan.remarks)
        _, merged = place.merge(plan)
        gone = absent(place, plan)
        assert any(mask.any() for masks in gone.values() for mask in masks)
        wanted = families.expected(place.family, method, parameters, weights, absent=gone)
        wanted = {name: wanted[name] for name in merged}
        assert families.differences(merged, wanted) == []
        place.store.merge(plan, name="virtual", virtual=True)
        view = place.store["virtual"]
        found = {name: view.tensor(name) for name in merged}
        assert families.differences(found, wanted) == []


@pytest.mark.rest
@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_ties_are_counted_once(method: str, tied: Place) -> None:
    """What it takes to know the ties that are left out is read at most once a threshold, is no
    merging but analysis, and nothing of it is read for a plan without a budget.
    """
    # Not the same k for both: what one method found the other would not look for.
    density = 0.61 if method == "ties" else 0.53
    ask: dict[str, Any] = {"parameters": {"density": density}, "base": "base", "experts": ["e0"]}
    ask |= {"method": method}
    look = tied.store.plan(MergeRequest(**ask))
    scores = ("trimmed", "random") if method == "ties" else ("norm", "random")
    read = 0
    for score in scores:
        for budget in (0.2, 0.5, 0.9):
            plan = tied.store.plan(MergeRequest(**ask, budget=budget, score=score))
            report, _ = tied.merge(plan)
            assert report.expert_bytes_read == plan.planned_expert_bytes
            assert report.expert_bytes_read <= (plan.budget_bytes or 0)
            read += plan.analyze_bytes_read
            again = tied.store.plan(MergeRequest(**ask, budget=budget, score=score))
            assert again.analyze_bytes_read == 0
    assert 0 < read <= look.full_expert_bytes * (1 if method == "ties" else 2)
    assert tied.store.plan(MergeRequest(**ask, score="random")).analyze_bytes_read == 0


def test_one_magnitude_is_not_all_outliers(tmp_path: Path) -> None:
    """Where all deltas of a tensor are equal, breadcrumbs keeps most of them, and the estimate
    knows that leaving the other tensor out loses little.
    """
    rng = np.random.default_rng(0)
    size = 3 * BLOCK // 2
    base = {"w": rng.standard_normal(size), "c": np.full(size, 0.25)}
    moved = {"w": base["w"] + rng.standard_normal(size) / 64, "c": np.full(size, 0.5)}
    cast = [{n: families.cast(x, "BF16") for n, x in one.items()} for one in (base, moved)]
    made = make(tmp_path, Family(cast[0], (cast[1],)))
    ask: dict[str, Any] = {"base": "base", "experts": ["e0"], "method": "breadcrumbs"}
    ask |= {"parameters": {"density": 0.6, "gamma": 0.02}, "dtype": "F32"}
    with made.store as store:
        _, full = made.merge(store.plan(MergeRequest(**ask)))
        plan = store.plan(MergeRequest(**ask, budget=0.5))
        _, merged = made.merge(plan)
        change = families.distance(full, cast[0], made.mergeable)
        share = families.distance(merged, full, made.mergeable) / change
    assert plan.error_share_estimate is not None
    assert share / 2 < plan.error_share_estimate < share * 2 < 0.2


def test_two_thresholds_must_be_exact(tied: Place) -> None:
    """With --no-analyze, breadcrumbs is refused where a bin or the ties of what is left out would
    have to be looked at, with the tensor's name; once that is known, it is planned.
    """
    ask: dict[str, Any] = {"parameters": {"density": 0.43, "gamma": 0.21}, "base": "base"}
    ask |= {"method": "breadcrumbs", "experts": ["e1", "e2"]}
    # In b no magnitude is on a bin's edge; in a all are, so that only a budget needs a look.
    for only, budget in (("b", None), ("b", 0.5), ("a", 0.5)):
        request = MergeRequest(**ask, budget=budget, only=[only])
        forbidden = dataclasses.replace(request, analyze=False)
        with pytest.raises(BadRequest, match="exact thresholds") as refused:
            tied.store.plan(forbidden)
        assert refused.value.where == only
        assert "analyze=False" in (refused.value.hint or "")
        plan = tied.store.plan(request)
        assert plan.analyze_bytes_read > 0
        again = tied.store.plan(forbidden)
        assert (again.plan, again.analyze_bytes_read) == (plan.plan, 0)
        assert not any("bin edges" in remark for remark in again.remarks)
    alone = tied.store.plan(MergeRequest(**ask, only=["a"], analyze=False))
    assert alone.analyze_bytes_read == 0


@pytest.mark.rest
def test_the_estimate_knows_the_edges(tied: Place) -> None:
    """Where --no-analyze makes a bin's edge serve, the estimate says how far that is from the merge
    that keeps exactly k, with a budget and without one.
    """
    ask: dict[str, Any] = {"parameters": {"density": 0.37}, "base": "base", "experts": ["e1"]}
    ask |= {"method": "ties", "dtype": "F32"}
    # Before anything is looked at, and so found, by the others.
    edges = [
        tied.store.plan(MergeRequest(**ask, budget=share, analyze=False)) for share in (None, 0.97)
    ]
    exact = [tied.store.plan(MergeRequest(**ask, budget=share)) for share in (None, 0.97)]
    _, full = tied.merge(exact[0])
    for plan, better in zip(edges, exact, strict=True):
        assert plan.analyze_bytes_read == 0
        assert any("bin edges" in remark and "analyze=False" in remark for remark in plan.remarks)
        _, merged = tied.merge(plan)
        measured = tied.relative_error(merged, full)
        assert plan.error_estimate == pytest.approx(measured, rel=0.2)
        _, merged = tied.merge(better)
        assert better.error_estimate == pytest.approx(tied.relative_error(merged, full), rel=0.2)
        assert tied.relative_error(merged, full) < measured / 2


@pytest.mark.rest
@pytest.mark.parametrize("method", CONSENSUS)
def test_what_is_known_of_an_estimate_is_told(method: str, place: Place) -> None:
    """A plan that elects signs and leaves something out says that its estimate is no bound, and by
    which factors it was off elsewhere; on this family, too, it is off by no more.  Where norms do
    not tell what is selected it says why it is rough.
    """
    _, full = place.merge(place.plan(method, dtype="F32"))
    assert not any("no bound" in remark for remark in place.plan(method).remarks)
    for budget in (0.3, 0.9):
        plan = place.plan(method, dtype="F32", budget=budget)
        told = ROUGH.get(method, "0.1 to 4.3 times")
        assert any(told in remark for remark in plan.remarks)
        _, merged = place.merge(plan)
        measured = place.relative_error(merged, full)
        assert 0.1 <= measured / (plan.error_estimate or 0) <= 1.7


@pytest.mark.rest
@pytest.mark.parametrize("weights", [(1.0, 0.1), (1.0, 0.3, 0.3), (0.5, 5.0)], ids=str)
def test_a_light_expert_counts_in_full_where_it_moves_alone(
    weights: tuple[float, ...], tmp_path: Path
) -> None:
    """With `normalize`, estimates of sparse experts of unequal weights are near the real error."""
    draw = np.random.default_rng(5)
    base = {f"w{n}": draw.normal(0, 0.05, 1 << 14).astype(np.float32) for n in range(4)}
    members = {"base": base}
    for k in range(len(weights)):
        members[f"e{k}"] = {
            name: (own + draw.normal(0, 0.005, own.shape)).astype(np.float32)
            for name, own in base.items()
        }
    for name, model in members.items():
        tensors = [(key, "F32", own.shape, own.tobytes()) for key, own in model.items()]
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
    ask: dict[str, Any] = {
        "base": "base",
        "experts": [(f"e{k}", weight) for k, weight in enumerate(weights)],
        "method": "ties",
        "parameters": {"density": 0.3},
    }
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in members:
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        store.merge(store.plan(MergeRequest(**ask)), name="full")
        full = {key: store["full"].tensor(key) for key in base}
        for budget in ("30%", "70%"):
            plan = store.plan(MergeRequest(**ask, budget=budget))
            store.merge(plan, name="part")
            part = {key: store["part"].tensor(key) for key in base}
            lost = families.distance(part, full, list(base))
            real = lost / families.distance(full, base, list(base))
            assert 0.8 < real / (plan.error_share_estimate or 0) < 1.25


UNEVEN = {
    # What is left out dilutes what is kept and moved far more.
    "ties": ({}, (1.0, 0.1, 0.05), (1.0, 0.2, 0.05)),
    "dare_ties": ({"density": 0.9, "normalize": True}, (1.0, 0.1, 0.05), (1.0, 0.2, 0.05)),
    # A mask drops nine tenths.
    "dare_linear": ({"density": 0.1}, (1.0, 0.5, 0.25), (1.0, 1.0, 1.0)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("method", UNEVEN)
def test_estimates_of_uneven_experts(method: str, rescale: bool, tmp_path: Path) -> None:
    """Estimates are within a third of the real error where a light expert that is left out dilutes
    a heavy one that moved far more, and where masks drop most of what a bound has to count.
    """
    parameters, weights, sizes = UNEVEN[method]
    if method.startswith("dare"):
        parameters = parameters | {"rescale": rescale}
    draw = np.random.default_rng(7)
    base = {f"w{n}": draw.normal(0, 0.05, 1 << 14).astype(np.float32) for n in range(3)}
    members = {"base": base}
    for k, size in enumerate(sizes):
        members[f"e{k}"] = {
            name: (own + draw.normal(0, 0.01 * size, own.shape)).astype(np.float32)
            for name, own in base.items()
        }
    ask: dict[str, Any] = {
        "base": "base",
        "experts": [(f"e{k}", weight) for k, weight in enumerate(weights)],
        "method": method,
        "parameters": parameters,
    }
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name, model in members.items():
            tensors = [(key, "F32", own.shape, own.tobytes()) for key, own in model.items()]
            write_safetensors(tmp_path / name / "model.safetensors", tensors)
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        shares = [0.1, 0.4, 0.7, 0.9]
        for point in store.sweep(MergeRequest(**ask), shares=shares, measure=True).points:
            measured = point.measured_error or 0.0
            assert 0.75 < measured / (point.error_estimate or 0.0) < 1.33
            if method == "dare_linear":
                # The bound holds whatever is drawn, so it counts every element.
                assert (point.error_bound or 0.0) > 2 * measured


# -- the engine's own guard ----------------------------------------------------------------------


def test_without_a_budget_no_read_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that gc stores in another way during a merge may take more than when it began."""
    report = place.plan("ties")
    monkeypatch.setattr(Wanted, "read_bytes", lambda *_: report.planned_expert_bytes - 1)
    merged = place.store.merge(report, name="larger", memo=False)
    assert merged.expert_bytes_read == report.planned_expert_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_read_beyond_the_plan_is_refused(
    threads: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of more than the plan's blocks take raises BudgetExceeded and publishes nothing."""
    report = place.plan("ties", budget=0.5)
    before = place.store.refs()
    lower = report.planned_expert_bytes - 1
    monkeypatch.setattr(Wanted, "read_bytes", lambda *_: lower)
    with pytest.raises(BudgetExceeded, match="the plan allows"):
        place.store.merge(report, name="never", threads=threads, memo=False)
    assert place.store.refs() == before
    assert list((place.store.path / "tmp").iterdir()) == []
    assert place.store.fsck(read_data=True).problems == ()


# -- what costs nothing --------------------------------------------------------------------------


def _stored(block: bytes, width: int) -> int:
    """Bytes that a block takes at rest: one element if it is that element over and over."""
    constant = len(block) >= 2 * width and block == block[:width] * (len(block) // width)
    return width if constant else len(block)


def test_what_costs_nothing_is_counted_exactly(place: Place) -> None:
    """Blocks equal to the base are free, blocks shared by experts are read once, blocks that nobody
    touches are neither read nor written; all of it counted from the arrays.
    """
    counts: Counter[str] = Counter()
    expert_bytes = base_bytes = untouched = 0
    outputs = set()
    for name in place.mergeable:
        sides = [place.family.base[name], *(e[name] for e in place.family.experts)]
        raw = [side.tobytes() for side in sides]
        blocks = [[one[at : at + BLOCK] for at in range(0, len(one), BLOCK)] for one in raw]
        if all(one == raw[0] for one in raw) or name == "model.tied.embed_out":
            continue
        for base, *experts in zip(*blocks, strict=True):
            moved = [block for block in experts if block != base]
            counts["equal"] += 3 - len(moved)
            counts["shared"] += len(moved) - len(set(moved))
            counts["selected"] += len(moved)
            expert_bytes += sum(_stored(block, 2) for block in set(moved))
            base_bytes += _stored(base, 2) if moved else 0
            untouched += not moved
            outputs.add(name) if moved else None
    plan = place.plan("task_arithmetic")
    assert plan.full_expert_bytes == plan.planned_expert_bytes == expert_bytes
    assert plan.chunks_equal_base == counts["equal"] > 0
    assert plan.chunks_shared == counts["shared"] == 4 + 2  # model.shared.weight, model.scale
    assert plan.chunks_selected == counts["selected"]
    assert (plan.chunks_omitted, plan.chunks_not_needed) == (0, 0)
    assert plan.chunks_total == counts["equal"] + counts["selected"]
    report, _ = place.merge(plan)
    assert (report.expert_bytes_read, report.base_bytes_read) == (expert_bytes, base_bytes)
    merged, base_view = place.store.view("merged"), place.store.view("base")
    reused = sum(
        block == base_view.record(name).block(number)
        for name in merged.tensors
        for number, block in enumerate(merged.record(name).block_ids())
        if name in outputs
    )
    assert reused == untouched == 1  # the last of model.parts.weight


def test_equal_bytes_of_two_types_are_two_reads(tmp_path: Path) -> None:
    """Blocks of one id under two dtypes are planned, counted and read as two."""
    words = np.random.default_rng(0).integers(0x3000, 0x3800, BLOCK, dtype=np.uint16)
    sides = [words.view(reference.DTYPES[dtype]) for dtype in ("BF16", "F16")]
    family = Family({"w": families.cast(np.ones(BLOCK), "BF16")}, tuple({"w": x} for x in sides))
    place = make(tmp_path, family)
    plan = place.store.plan(
        MergeRequest(base="base", experts=["e0", "e1"], method="task_arithmetic")
    )
    assert plan.chunks_shared == 0
    report, merged = place.merge(plan)
    assert report.expert_bytes_read == report.planned_expert_bytes == 4 * BLOCK
    wanted = families.expected(family, "task_arithmetic", {}, (1, 1))
    assert families.differences(merged, wanted) == []
    place.store.close()


def test_untouched_blocks_are_not_written(tmp_path: Path) -> None:
    """A merge of a family that differs in one block writes that block, card, recipe and records."""
    base = {"w": np.arange(40 * BLOCK // 4, dtype=np.float32)}
    expert = {"w": base["w"].copy()}
    expert["w"][BLOCK:][:100] += 1
    place = make(tmp_path, Family(base, (expert, expert, base)))
    report, merged = place.merge(place.plan("linear"))
    assert (report.expert_bytes_read, report.base_bytes_read) == (BLOCK, BLOCK)
    assert report.blocks_total - report.blocks_reused == 1 + 2
    assert report.bytes_written < BLOCK + 20480
    assert np.flatnonzero(merged["w"] != base["w"]).tolist() == list(range(BLOCK, BLOCK + 100))
    place.store.close()


def test_below_the_threshold_costs_nothing(tmp_path: Path) -> None:
    """With ties, blocks in which nothing reaches the threshold are not read; nothing is lost."""
    rng = np.random.default_rng(2)
    size = BLOCK // 4
    base = {"w": rng.standard_normal(4 * size).astype(np.float32)}
    expert = {"w": base["w"] + rng.standard_normal(4 * size).astype(np.float32) / 4096}
    expert["w"][:size] += rng.standard_normal(size).astype(np.float32)
    family = Family(base, (expert,))
    place = make(tmp_path, family)
    # The largest fifth lies in the first of four blocks.
    parameters = {"density": 0.2}
    report, merged = place.merge(
        place.store.plan(
            MergeRequest(base="base", experts=["e0"], method="ties", parameters=parameters)
        )
    )
    assert report.expert_bytes_read == report.full_expert_bytes == BLOCK
    wanted = families.expected(family, "ties", parameters, [1.0])
    assert families.differences(merged, wanted) == []
    shares = place.store.explain("merged", "w").tensors[0].experts
    assert (shares[0].chunks_read, shares[0].chunks_not_needed) == (1, 3)
    place.store.close()


# -- statistics ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed_bare(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same family in a store that took no statistics, closed."""
    root = tmp_path_factory.mktemp("bare")
    for name in ("base", *place.family.names, *place.family.fisher_names):
        (root / name).symlink_to(place.root / name)
    make(root, place.family, with_base=False).store.close()
    return root / "store"


@pytest.fixture
def bare(place: Place, closed_bare: Path, tmp_path: Path) -> Iterator[Place]:
    """A copy of it, open."""
    shutil.copytree(closed_bare, tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield Place(place.root, place.family, store)


@pytest.mark.rest
def test_missing_statistics_are_taken_once(place: Place, bare: Place) -> None:
    """The first plan reads what differs and keeps the statistics; later plans read nothing, and
    all of them are the plans of the store that took them at `add`.
    """
    # The thresholds of a density are read by the first plan that asks for them.
    place.plan("ties", budget=0.4)
    known = place.plan("ties", budget=0.4)
    assert known.analyze_bytes_read == 0
    first, second = bare.plan("ties", budget=0.4), bare.plan("ties", budget=0.4)
    # Shared blocks belong to two experts and are looked at for each.
    assert first.analyze_bytes_read >= place.plan("linear").full_expert_bytes
    assert second.analyze_bytes_read == bare.plan("linear", budget=0.1).analyze_bytes_read == 0
    assert first.plan == second.plan == known.plan


def test_without_analysis_whole_tensors_are_chosen(bare: Place, place: Place) -> None:
    """--no-analyze reads nothing for statistics, takes whole tensors or none, and says so."""
    plan = bare.plan("linear", budget=0.5, analyze=False)
    assert plan.analyze_bytes_read == 0
    assert any("no statistics, chosen by whole tensors: e0: model." in n for n in plan.remarks)
    assert (plan.error_bound, plan.error_estimate) == (None, None)
    report, _ = bare.merge(plan)
    assert report.expert_bytes_read == plan.planned_expert_bytes <= (plan.budget_bytes or 0)
    assert report.remarks == plan.remarks
    for tensor in bare.store._catalog.record(Plan, plan.plan).tensors:
        for states in tensor.states:
            assert not {OMITTED, READ} <= set(states)
    full = bare.plan("linear", analyze=False)
    assert bare.merge(full)[0].manifest == place.merge(place.plan("linear"))[0].manifest
    assert full.error_bound == 0.0


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_trimming_needs_statistics(method: str, bare: Place) -> None:
    """Trimming with neither analysis nor statistics is refused, with expert, tensor and a hint."""
    with pytest.raises(BadRequest, match="statistics") as refused:
        bare.plan(method, analyze=False)
    assert (refused.value.where or "").startswith("e0: model.")
    assert "analyze=False" in (refused.value.hint or "")
    assert bare.plan("dare_ties", analyze=False).analyze_bytes_read == 0


@pytest.mark.rest
def test_trimming_without_a_second_look(mixed: Place) -> None:
    """With statistics, --no-analyze keeps the bin's edge where the exact threshold takes a look,
    and the threshold itself where somebody has looked before.
    """
    experts = mixed.family.names
    mixed.store.plan(MergeRequest(base="base", experts=experts, method="linear"))
    ask: dict[str, Any] = {"parameters": {"density": 0.123}, "method": "ties", "base": "base"}
    plan = mixed.store.plan(MergeRequest(**ask, experts=experts, analyze=False))
    assert plan.analyze_bytes_read == 0
    assert any("bin edges" in remark and "analyze=False" in remark for remark in plan.remarks)
    assert (plan.error_estimate or 0) > 0
    exact = mixed.store.plan(MergeRequest(**ask, experts=experts))
    again = mixed.store.plan(MergeRequest(**ask, experts=experts, analyze=False))
    assert again.plan == exact.plan != plan.plan
    assert again.error_estimate == 0


# -- requests that make no sense -----------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "budget of 0"),
        ({"budget": 0.0}, "budget as a share"),
        ({"budget": -5}, "budget"),
        ({"budget": 1.5}, "at most 100 %"),
        ({"budget": math.nan}, "budget as a share"),
        ({"max_error": -1.0}, "error limit"),
        ({"max_error": math.nan}, "error limit"),
        ({"dtype": "I8"}, "cannot write dtype 'I8'"),
        ({"method": "tie"}, "unknown method 'tie'"),
        ({"parameters": {"densty": 0.5}}, "no parameter 'densty'"),
        ({"parameters": {"density": 2}}, "density"),
        ({"experts": []}, "at least one expert"),
        ({"experts": [("e0", math.inf)]}, "weight"),
        ({"method": "linear", "parameters": {}, "experts": [("e0", 1), ("e1", -1)]}, "zero"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_senseless_requests(options: dict[str, Any], says: str, place: Place) -> None:
    """A budget of 0 or nonsense, an unknown method, parameter or type: refused by name."""
    given: dict[str, Any] = {"base": "base", "experts": ["e0"], "method": "ties"}
    before = place.store.stats()
    with pytest.raises(BadRequest, match=says):
        place.store.plan(MergeRequest(**given | options))
    assert place.store.stats() == before


def test_a_merge_needs_a_thread(place: Place) -> None:
    """No threads at all: refused by name."""
    with pytest.raises(BadRequest, match="threads"):
        place.store.plan(MergeRequest(base="base", experts=["e0"], method="ties"), threads=0)


@pytest.mark.parametrize("options", [{"base": "nobody"}, {"experts": ["e0", "nobody"]}])
def test_unknown_refs(options: dict[str, Any], place: Place) -> None:
    """A ref that is not there is NotFound by name, whichever input it was to be."""
    given: dict[str, Any] = {"base": "base", "experts": ["e0"], "method": "linear"}
    with pytest.raises(NotFound) as refused:
        place.store.plan(MergeRequest(**given | options))
    assert refused.value.where == "nobody"
