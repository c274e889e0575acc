"""New elements that are not finite: they are counted, refused unless they are allowed, and told."""

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
from mstore.api.reports import NotFiniteTensor
from mstore.merge.planning.warnings import NOT_FINITE, OVERFLOW
from mstore.merge.running.compute import _is_finite, not_finite
from mstore.numeric.codes import LARGEST, can_overflow
from mstore.terms.errors import Incompatible, NotFound

ROWS = 300
SHAPE = (ROWS, 256)
SIZE = ROWS * 256
ALLOWED: dict[str, Any] = {"allow_nonfinite": True}


def values(scale: float, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(SHAPE) * scale


def models() -> dict[str, dict[str, Any]]:
    """A base and its experts.

    wide: `some` and `most` reach above what float16 holds, in the base or by the expert's part;
    `own`, which it did not change, does in one element; `odd` is infinite in the base. sick: `calm`
    has three elements that are not finite, in two of its blocks, `odd` one. sound: all is finite
    but what the base has.
    """
    wide = {
        "calm": values(1.0, 1),
        "some": values(20_000.0, 2),
        "most": values(1.0, 3),
        "own": values(1.0, 4),
        "odd": values(1.0, 5),
    }
    wide["own"][0, 0] = 1e6
    wide["odd"][0, :3] = np.inf, -np.inf, np.inf
    base = {name: families.cast(tensor, "BF16") for name, tensor in wide.items()}
    large = {name: tensor.astype(np.float32) for name, tensor in base.items()}
    sick, sound = ({n: t.copy() for n, t in large.items()} for _ in range(2))
    large["calm"] += 0.5
    large["most"] += 1e9
    large["odd"][1:] += 0.5
    sick["calm"][0, :2] = np.nan, -np.inf
    sick["calm"][ROWS - 1, 7] = -np.nan
    sick["odd"][ROWS - 1, 7] = np.nan
    for name in ("calm", "odd"):
        sound[name][1:] += 0.25
    tensors = {"base": wide, "wide": large, "sick": sick, "sound": sound}
    return {
        name: {key: families.cast(tensor, "BF16") for key, tensor in one.items()}
        for name, one in tensors.items()
    }


def build(root: Path) -> None:
    """Models, and a store of all of them."""
    for name, tensors in models().items():
        families.write_checkpoint(root / name, tensors)
        # Not one that tells of tokens.
        (root / name / "tokenizer.json").unlink()
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in ("wide", "sick", "sound"):
            store.add(root / name, name=name, base="base")


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def wanted(store: Store, merged: str) -> tuple[NotFiniteTensor, ...]:
    """Counted by numpy over whole tensors: not finite in the merge, finite in the base."""
    found = []
    for one in store.tensors(merged):
        now = np.isfinite(store[merged].tensor(one.name).astype(np.float32))
        before = np.isfinite(store["base"].tensor(one.name).astype(np.float32))
        count = int((~now & before).sum())
        if count:
            found.append(NotFiniteTensor(one.name, count, now.size))
    return tuple(sorted(found, key=lambda one: (-(one.elements or 0), one.tensor)))


def asked(*experts: str, method: str = "task_arithmetic", **more: Any) -> MergeRequest:
    return MergeRequest(base="base", experts=experts, method=method, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_what_overflows_is_counted(method: str, store: Store) -> None:
    """Under --dtype F16 the report has the elements that became infinite, by tensor, worst first,
    and a warning with the sums; what is infinite in the base already is not new.
    """
    plan = store.plan(asked("wide", method=method, dtype="F16"))
    report = store.merge(plan, name="m", **ALLOWED)
    assert report.not_finite == wanted(store, "m")
    assert [one.tensor for one in report.not_finite] == ["most", "some", "own"]
    assert report.not_finite[0].elements == report.not_finite[0].elements_total == SIZE
    [warning] = [one for one in report.warnings if one.kind == NOT_FINITE and not one.expert]
    total = sum(one.elements or 0 for one in report.not_finite)
    assert f"{total} of {3 * SIZE} elements are infinite or NaN, and finite" in warning.text
    assert f"most {SIZE} of {SIZE}, some " in warning.text
    assert store.show("m").not_finite == report.not_finite


@pytest.mark.sampled(3)
@pytest.mark.parametrize("experts", [("wide",), ("sound", "wide"), ("sick", "wide")])
def test_a_merge_that_makes_them_is_refused_unless_allowed(
    experts: tuple[str, ...], store: Store
) -> None:
    """Where all models have finite elements, the refusal names tensors, counts and experts, and the
    way on; nothing is published. Allowed, the same plan makes the merge, with the same elements.
    """
    plan = store.plan(asked(*experts, dtype="F16"))
    with pytest.raises(Incompatible, match="infinite or NaN, and finite in all models") as refused:
        store.merge(plan, name="m")
    assert "wide" in str(refused.value.where)
    assert f"most {SIZE} of {SIZE}" in refused.value.what
    assert "calm" not in refused.value.what
    assert "allow_nonfinite=True publishes it as it is" in str(refused.value.hint)
    with pytest.raises(NotFound):
        store.show("m")
    assert store.fsck().problems == store.fsck().garbage == ()
    report = store.merge(plan, name="m", **ALLOWED)
    assert report.plan == plan.plan
    assert report.not_finite == wanted(store, "m")
    assert store.replay("m").same
    # That it is there already changes nothing.
    with pytest.raises(Incompatible):
        store.merge(plan, name="m")


@pytest.mark.parametrize("experts", [("sick",), ("sound", "sick")])
def test_those_of_an_expert_are_told(experts: tuple[str, ...], store: Store) -> None:
    """What an expert has is published, with a warning that counts it by tensor."""
    report = store.merge(store.plan(asked(*experts)), name="m")
    assert report.not_finite == wanted(store, "m")
    assert [one.elements for one in report.not_finite] == [3, 1]
    [warning] = [one for one in report.warnings if one.kind == NOT_FINITE and not one.expert]
    assert f"4 of {2 * SIZE} elements are infinite or NaN" in warning.text
    assert f"calm 3 of {SIZE}, odd 1 of {SIZE}" in warning.text
    assert store.replay("m").same


def test_no_certificate_stands_beside_a_nan(store: Store) -> None:
    """A plan whose statistics know of a NaN warns of the expert by name and tells no error; one
    that could not know has its error withdrawn by the merge, also where it is explained.
    """
    known = store.plan(asked("sound", "sick"))
    [warning] = [one for one in known.warnings if one.kind == NOT_FINITE]
    assert (warning.expert, warning.text[:5]) == ("sick", "sick:")
    assert "in calm; the result may have them" in warning.text
    assert not [remark for remark in known.remarks if "calm" in remark]
    assert known.not_finite == (NotFiniteTensor("calm", None, SIZE),)
    errors = ("error_bound", "error_estimate", "error_share_estimate")
    assert [getattr(known, one) for one in errors] == [None, None, None]
    assert store.plan(asked("sound", "sick", budget=0.5)).error_bound is None
    # Nothing is known of it here, or of the base's infinities.
    dark = store.plan(asked("wide", dtype="F16", only=["some"]))
    assert dark.error_bound is None
    for plan in (known, dark):
        report = store.merge(plan, name="m", **ALLOWED)
        told = store.explain("m").plan
        for one in (report, told):
            assert [getattr(one, name) for name in errors] == [None, None, None]
            assert one.not_finite == wanted(store, "m")


def test_a_plan_that_could_not_know_is_corrected(template: Path, tmp_path: Path) -> None:
    """Without statistics a plan certifies; its merge, and what explains it, do not."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "sick"):
            store.add(template / name, name=name)
        plan = store.plan(asked("sick", only=["calm"], analyze=False))
        report = store.merge(plan, name="m", **ALLOWED)
        assert report.not_finite == (NotFiniteTensor("calm", 3, SIZE),)
        assert store.explain("m").plan.not_finite == report.not_finite
        for one in (report, store.explain("m").plan):
            assert (one.error_bound, one.error_estimate) == (None, None)


def test_a_nan_that_takes_no_part_is_no_obstacle(store: Store) -> None:
    """Where signs are elected a NaN has none: the plan says so, and the result is finite there; the
    merge still warns of the expert."""
    plan = store.plan(asked("sick", "sound", method="ties", parameters={"density": 1.0}))
    [warning] = [one for one in plan.warnings if one.kind == NOT_FINITE]
    assert "a NaN has no sign and takes no part" in warning.text
    report = store.merge(plan, name="m", **ALLOWED)
    [warning] = [one for one in report.warnings if one.kind == NOT_FINITE and one.expert]
    assert warning.expert == "sick"
    assert "in calm; the result has " in warning.text
    assert report.not_finite == wanted(store, "m")
    assert sum(one.elements or 0 for one in report.not_finite) <= 1


def test_what_the_base_has_is_not_new(store: Store) -> None:
    """Infinities of the base, a mask, in blocks that change and in those that do not, are merged
    as ever; a plan tells no error beside them.
    """
    plan = store.plan(asked("sound"))
    assert plan.not_finite == ()
    assert not [one for one in plan.warnings if one.kind in (NOT_FINITE, OVERFLOW)]
    assert (plan.error_bound, plan.error_estimate) == (None, None)
    report = store.merge(plan, name="m")
    assert report.not_finite == store.show("m").not_finite == ()
    merged = store["m"].tensor("odd").astype(np.float32)
    assert np.isinf(merged[0, :3]).all() or np.isnan(merged[0, :3]).all()
    assert store.plan(asked("sound", only=["calm"], max_error=0.1)).max_error == 0.1


def test_a_plan_says_what_may_overflow(store: Store) -> None:
    """A plan names the tensors that may, and no calm one, before and after it is run. A virtual
    merge tells what its plan does; to materialise it is refused, and allowed, as a merge is.
    """
    plan = store.plan(asked("wide", dtype="F16"))
    assert {one.tensor for one in plan.not_finite} == {"most", "some", "own", "odd"}
    assert all(one.elements is None for one in plan.not_finite)
    [warning] = [one for one in plan.warnings if one.kind == OVERFLOW]
    assert "may become infinite in F16, which holds 65504 at most" in warning.text
    virtual = store.merge(plan, name="v", virtual=True)
    assert virtual.not_finite == store.show("v").not_finite == plan.not_finite
    with pytest.raises(Incompatible):
        store.materialize("v")
    assert store.show("v").virtual
    counts = store.materialize("v", **ALLOWED).not_finite
    assert counts == wanted(store, "v") == store.show("v").not_finite
    assert store.explain("v").plan.not_finite == counts
    assert store.plan(asked("wide", dtype="F16")).not_finite == plan.not_finite


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["again", "memo", "read", "no memo", "executor"])
@pytest.mark.parametrize("expert", ["wide", "sick"])
def test_counts_do_not_depend_on_who_computes(how: str, expert: str, store: Store) -> None:
    """Counted are also chunks that an earlier merge made, or a reader of a virtual one, and those
    computed elsewhere; and those that the merge made are refused alike.
    """
    dtype = "F16" if expert == "wide" else None
    plan = store.plan(asked(expert, dtype=dtype))
    if how == "read":
        store.merge(plan, name="v", virtual=True)
        for one in store.tensors("v"):
            store["v"].tensor(one.name)
    else:
        counts = store.merge(plan, name="m", **ALLOWED).not_finite
    given: dict[str, Any] = {"name": "m" if how == "again" else "other"}
    if how == "no memo":
        given["memo"] = False
    with ThreadPoolExecutor(2) as pool:
        if how == "executor":
            given |= {"cluster": pool, "memo": False}
        if how == "memo":
            plan = store.plan(asked(expert, "base", dtype=dtype, top_p=0.99))
        if expert == "wide":
            with pytest.raises(Incompatible):
                store.merge(plan, **given)
            given |= ALLOWED
        second = store.merge(plan, **given)
    assert second.not_finite == wanted(store, given["name"])
    assert how in {"memo", "read"} or second.not_finite == counts
    # Of what a reader computed, rows are kept and no blocks.
    assert how == "read" or (second.memo_expert_bytes > 0) == (how in {"again", "memo"})


def test_where_all_is_finite_nothing_is_said(store: Store) -> None:
    """In bf16, and in float16 where all fits, there is no warning, nor a line in the card."""
    for given in ({}, {"dtype": "F32"}, {"dtype": "F16", "only": ["calm"]}):
        report = store.merge(store.plan(asked("wide", **given)), name="m")
        assert report.not_finite == store.show("m").not_finite == ()
        assert not [one for one in report.warnings if one.kind in (NOT_FINITE, OVERFLOW)]
        assert b"NaN" not in store["m"].read("README.md")


def test_whoever_looks_at_the_merge_is_told(store: Store) -> None:
    """`show`, `log`, the card, `explain` and `blame`, its total too, have the counts."""
    store.merge(store.plan(asked("sick")), name="m", **ALLOWED)
    assert store.log("m")[0].not_finite == store.show("m").not_finite == wanted(store, "m")
    assert b"**4 elements are infinite or NaN**" in store["m"].read("README.md")
    explained = {one.name: one.not_finite for one in store.explain("m").tensors}
    assert {name: count for name, count in explained.items() if count} == {"calm": 3, "odd": 1}
    found = store.blame("m")
    each = {one.name: one.not_finite for one in found.tensors}
    assert each["calm"] == 3
    assert (found.not_finite, found.elements) == (sum(each.values()), 2 * SIZE)


def test_on_the_command_line(store: Store) -> None:
    """`plan` and `merge` warn of an expert's, all commands tell, in JSON too; what the merge would
    make is refused, with the way on.
    """
    mstore = Program(Path(store.path))
    line = ("--base", "base", "--expert", "sick", "--method", "task_arithmetic")
    assert "warning: sick: infinite or NaN" in mstore.succeed("plan", *line).out
    merged = mstore.succeed("merge", *line, "--name", "m")
    [warning] = [text for text in merged.lines if f"4 of {2 * SIZE} elements are" in text]
    assert warning.startswith("warning: ")
    assert "certified" not in merged.out
    shown = mstore.succeed("show", "m")
    assert f"4 elements, infinite or NaN: calm 3 of {SIZE}, odd 1 of {SIZE}" in shown.out
    told = mstore.succeed("show", "m", "--json").document["not_finite"]
    assert told[0] == {"tensor": "calm", "elements": 3, "elements_total": SIZE}
    explained = mstore.succeed("explain", "m", "--by", "tensor")
    assert "3 elements infinite or NaN" in explained.out
    assert "certified" not in explained.out
    for by in ("expert", "layer"):
        [total] = [text for text in mstore.succeed("blame", "m", "--by", by).lines if "all" in text]
        assert "not finite" in total
    assert mstore.succeed("blame", "m", "--json").document["not_finite"] >= 4
    large = ("--base", "base", "--expert", "wide", "--method", "linear", "--dtype", "F16")
    refused = mstore("merge", *large, "--name", "v")
    assert refused.status == 1
    assert "--allow-nonfinite publishes it as it is" in refused.err
    mstore.succeed("merge", *large, "--name", "v", "--virtual")
    assert mstore("materialize", "v").status == 1
    made = mstore.succeed("materialize", "v", "--allow-nonfinite")
    assert "elements are infinite or NaN, and finite in the base" in made.out


def test_who_looks_at_an_expert_is_told(store: Store, template: Path) -> None:
    """`check-merge` warns of the expert whose statistics have such elements, and of no other; `add`
    and `diff` name the tensors.
    """
    report = store.check_merge(asked("sound", "sick", "wide"))
    (found,) = [one for one in report.findings if one.aspect == "values"]
    assert (found.expert, found.severity) == ("sick", "warning")
    assert "in calm; the result may have them" in found.text
    assert not [
        one
        for one in store.check_merge(asked("sick", skip=["calm"])).findings
        if one.aspect == "values"
    ]
    (remark,) = store.add(template / "sick", name="again", base="base").remarks
    assert remark == "infinite or NaN elements, or differences from the base, in calm"
    assert store.add(template / "sound", name="other", base="base").remarks == ()


def test_a_difference_that_is_not_finite_is_named(store: Store) -> None:
    """`diff` says of which tensors there is no distance because elements are infinite or NaN."""
    found = {one.name: one for one in store.diff("base", "sick").tensors}
    assert {name for name, one in found.items() if one.not_finite} == {"calm", "odd"}
    assert found["calm"].relative_l2 is None
    mstore = Program(Path(store.path))
    assert (
        "remark: infinite or NaN elements in calm, odd"
        in mstore.succeed("diff", "base", "sick").out
    )
    assert "NaN" not in mstore.succeed("diff", "base", "wide", "--json").out


@pytest.mark.parametrize("dtype", LARGEST)
def test_which_elements_are_not_finite(dtype: str) -> None:
    """Infinities and NaN of both signs are not, the largest numbers are; one is enough to see."""
    largest = LARGEST[dtype]
    odd = [np.inf, -np.inf, np.nan, -np.nan]
    numbers = np.array([0, -0.0, 1, largest, -largest, *odd], dtype=np.float32)
    data = np.frombuffer(families.cast(numbers, dtype).tobytes(), dtype=np.uint8)
    assert not_finite(data, dtype).tolist() == [False] * 5 + [True] * 4
    elements = data.reshape(len(numbers), -1)
    assert _is_finite(elements[:5].reshape(-1), dtype)
    for at in range(5, len(numbers)):
        assert not _is_finite(elements[[0, 3, 4, at]].reshape(-1), dtype)
    assert [can_overflow(dtype, out) for out in ("F16", "BF16", "F32")] == [
        True,
        dtype == "F32",
        False,
    ]
