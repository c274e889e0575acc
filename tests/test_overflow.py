"""Overflow: what an output type cannot hold is counted, and told wherever the merge is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.ids import PlanId
from mstore.merge.planning.warnings import OVERFLOW
from mstore.merge.running.overflow import infinite
from mstore.numeric.codes import LARGEST, can_overflow
from mstore.reports import TensorOverflow
from mstore.store.plans import sources_of

ROWS = 300
SHAPE = (ROWS, 256)


def values(scale: float, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(SHAPE) * scale


def models() -> tuple[dict[str, Any], dict[str, Any]]:
    """A base and an expert: `some` and `most` reach above what float16 holds, in the base or by the
    expert's part; `own`, which no expert changed, does in one element; `odd` is infinite itself.
    """
    base = {
        "calm": families.cast(values(1.0, 1), "BF16"),
        "some": families.cast(values(20_000.0, 2), "BF16"),
        "most": families.cast(values(1.0, 3), "BF16"),
        "own": families.cast(values(1.0, 4), "BF16"),
        "odd": families.cast(values(1.0, 5), "BF16"),
    }
    wide = {name: tensor.astype(np.float32) for name, tensor in base.items()}
    wide["own"][0, 0] = 1e6
    wide["odd"][0, :3] = np.inf, -np.inf, np.inf
    base = {name: families.cast(tensor, "BF16") for name, tensor in wide.items()}
    wide["calm"] += 0.5
    wide["most"] += 1e9
    wide["odd"][1:] += 0.5
    expert = {name: families.cast(tensor, "BF16") for name, tensor in wide.items()}
    return base, expert


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overflow")
    for name, tensors in zip(("base", "expert"), models(), strict=True):
        families.write_checkpoint(root / name, tensors)
    return root


@pytest.fixture
def store(root: Path, tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        store.add(root / "expert", name="expert", base="base")
        yield store


def wanted(store: Store, merged: str) -> tuple[TensorOverflow, ...]:
    """Counted by numpy over whole tensors: infinite in the merge, finite in the base."""
    found = []
    for one in store.tensors(merged):
        now = np.isinf(store[merged].tensor(one.name).astype(np.float32))
        before = np.isinf(store["base"].tensor(one.name).astype(np.float32))
        count = int((now & ~before).sum())
        if count:
            found.append(TensorOverflow(one.name, count, now.size))
    return tuple(sorted(found, key=lambda one: -(one.elements or 0)))


ASKED: dict[str, Any] = {"base": "base", "experts": ["expert"], "method": "task_arithmetic"}


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_overflow_is_counted(method: str, store: Store) -> None:
    """Under --dtype F16 the report has the elements that became infinite, by tensor, worst first,
    and a warning with the sums; what is infinite in the base already is no overflow.
    """
    plan = store.plan(MergeRequest(**ASKED | {"method": method}, dtype="F16"))
    report = store.merge(plan, name="m")
    assert report.overflow == wanted(store, "m")
    assert [one.tensor for one in report.overflow] == ["most", "some", "own"]
    assert report.overflow[0].elements == report.overflow[0].elements_total == ROWS * 256
    [warning] = [one for one in report.warnings if one.kind == OVERFLOW]
    total = sum(one.elements or 0 for one in report.overflow)
    assert f"{total} of {3 * ROWS * 256} elements became infinite in F16" in warning.text
    assert f"most {ROWS * 256} of {ROWS * 256}, some " in warning.text
    assert store.show("m").overflow == report.overflow


def test_the_plan_says_what_may_overflow(store: Store) -> None:
    """A plan names the tensors that may, and no calm one; once it was run it has the counts, also
    when it is asked for again, listed or explained. A virtual merge tells what its plan does.
    """
    plan = store.plan(MergeRequest(**ASKED, dtype="F16"))
    names = {one.tensor for one in plan.overflow}
    assert names == {"most", "some", "own", "odd"}
    assert all(one.elements is None for one in plan.overflow)
    [warning] = [one for one in plan.warnings if one.kind == OVERFLOW]
    assert "may become infinite in F16, which holds 65504 at most" in warning.text
    virtual = store.merge(plan, name="v", virtual=True)
    assert virtual.overflow == plan.overflow
    assert store.materialize("v").new_snapshot
    counts = wanted(store, "v")
    assert store.show("v").overflow == counts
    again = store.plan(MergeRequest(**ASKED, dtype="F16"))
    assert again.plan == plan.plan
    assert again.overflow == counts
    assert store.plan(MergeRequest(**ASKED, dtype="F16", analyze=False)).overflow == counts
    assert store.explain("v").plan.overflow == counts
    assert [one.overflow for one in store.plans()] == [counts]


@pytest.mark.parametrize("how", ["again", "memo", "no memo", "executor"])
def test_counts_do_not_depend_on_who_computes(how: str, store: Store) -> None:
    """Counted are also chunks that an earlier merge made, and those computed elsewhere."""
    report = store.merge(store.plan(MergeRequest(**ASKED, dtype="F16")), name="m")
    counts = report.overflow
    given: dict[str, Any] = {"name": "m" if how == "again" else "other"}
    if how == "no memo":
        given["memo"] = False
    asked = ASKED if how != "memo" else ASKED | {"top_p": 0.99, "experts": ["expert", "base"]}
    with ThreadPoolExecutor(2) as pool:
        if how == "executor":
            given |= {"executor": pool, "memo": False}
        plan = store.plan(MergeRequest(**asked, dtype="F16"))
        second = store.merge(plan, **given)
    assert second.overflow == wanted(store, given["name"])
    assert second.overflow == counts or how == "memo"
    assert (second.memo_expert_bytes > 0) == (how in {"again", "memo"})


def test_where_nothing_overflows_nothing_is_said(store: Store) -> None:
    """In bf16, and in float16 where all fits, there is no warning, and nothing is written of it."""
    calm = {"only": ["calm"]}
    for given in ({}, {"dtype": "F32"}, {"dtype": "F16", **calm}):
        report = store.merge(store.plan(MergeRequest(**ASKED, **given)), name="m")
        assert report.overflow == store.show("m").overflow == ()
        assert not [one for one in report.warnings if one.kind == OVERFLOW]
        plan = store.plan(MergeRequest(**ASKED, **given))
        assert sources_of(store._catalog, PlanId(plan.plan), None).overflow is None  # type: ignore[arg-type]


def test_on_the_command_line(store: Store) -> None:
    """`plan`, `merge` and `show` tell people, and JSON has the counts."""
    mstore = Program(Path(store.path))
    line = ("--base", "base", "--expert", "expert", "--method", "linear", "--dtype", "F16")
    said = mstore.succeed("plan", *line).out
    assert "warning: elements may become infinite in F16" in said
    merged = mstore.succeed("merge", *line, "--name", "m")
    [warning] = [text for text in merged.lines if "became infinite" in text]
    assert warning.startswith("warning: ")
    shown = mstore.succeed("show", "m")
    assert f"became infinite: most {ROWS * 256} of {ROWS * 256}, some " in shown.out
    told = mstore.succeed("show", "m", "--json").document["overflow"]
    assert told[0] == {"tensor": "most", "elements": ROWS * 256, "elements_total": ROWS * 256}
    assert mstore.succeed("merge", *line, "--name", "m", "--json").document["overflow"] == told


@pytest.mark.parametrize("dtype", LARGEST)
def test_which_elements_are_infinite(dtype: str) -> None:
    """Infinities of both signs are, the largest numbers and NaN are not."""
    largest = LARGEST[dtype]
    numbers = np.array([0, 1, largest, -largest, np.inf, -np.inf, np.nan], dtype=np.float32)
    data = np.frombuffer(families.cast(numbers, dtype).tobytes(), dtype=np.uint8)
    assert infinite(data, dtype).tolist() == [False] * 4 + [True, True, False]
    assert [can_overflow(dtype, out) for out in ("F16", "BF16", "F32")] == [
        True,
        dtype == "F32",
        False,
    ]
