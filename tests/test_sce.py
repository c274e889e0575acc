"""sce: elements that experts move differently, fused by energy where they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from families import Family
from msgspec import structs
from reference import DTYPES, WORDS
from test_budget import Place, make
from test_kernels import KINDS, _family

from mstore import MergeRequest, Store
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.measures import deltas
from mstore.merge.methods.registry import operation
from mstore.merge.methods.sce import Fused
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest

N = 3000
SHAPES = {"a": (70, 1024), "b": (50, 1000), "steps": (60, 1024), "tiny": (7,), "small": (33, 64)}
SHARES = (1.0, 0.7, 0.2, 0.003)


def asked(share: float, **options: Any) -> MergeRequest:
    experts = ["e0", "e1", "e2"]
    return MergeRequest(
        base="base", experts=experts, method="sce", parameters={"select_topk": share}, **options
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three experts, one of another type; `steps` ties nearly everywhere; `tiny` and `small` move
    too little to have weights of their own."""
    rng = np.random.default_rng(3)
    base = {name: families.cast(rng.standard_normal(one), "BF16") for name, one in SHAPES.items()}
    base["steps"] = families.cast(1 + rng.random(SHAPES["steps"]), "BF16")
    experts = []
    for k, own in enumerate(("BF16", "F32", "BF16")):
        moved = {}
        for name, shape in SHAPES.items():
            step = 0.05 * (k + 1) * rng.standard_normal(shape) * (rng.random(shape) < 0.6)
            if name == "steps":
                step = rng.integers(-1, 2, shape) * 2.0**-6
            if name in ("tiny", "small"):
                step = step * 1e-3
            dtype = "F32" if name in ("tiny", "small") else own
            moved[name] = families.cast(base[name].astype(np.float32) + step, dtype)
        experts.append(moved)
    made = make(tmp_path_factory.mktemp("family"), Family(base, tuple(experts)))
    with made.store:
        yield made


def wanted(place: Place, share: float, name: str, **options: Any) -> Any:
    sides = [expert[name] for expert in place.family.experts]
    given = {"select_topk": share}
    return reference.merge("sce", given, [1.0] * 3, place.family.base[name], sides, **options)


@pytest.mark.parametrize("experts", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_equals_the_reference(
    kind: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any types, few experts and many, weights down to zero, some unread: the same bits."""
    weights = [np.float32(one) for one in (0.5, 0.0, 3e-7, 0.25, 1e-3, 0.2)[:experts]]
    monkeypatch.setattr(reference, "energies", lambda *_: weights)
    # What has no sign takes part in no election.
    real = reference.delta
    monkeypatch.setattr(
        reference,
        "delta",
        lambda b, e: np.nan_to_num(real(b, e), nan=0.0, posinf=np.inf, neginf=-np.inf),
    )
    for seed, (base_type, out) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        rng = np.random.default_rng(seed)
        types = [list(DTYPES)[(seed + k) % 3] for k in range(experts)]
        base, sides = _family(rng, kind, [base_type, *types], N)
        own = operation("sce", {}, [1.0] * experts)
        combine = own.method.combine
        assert isinstance(combine, Fused)
        own = combine.weighed(own, [1.0] * experts, 1)
        mix = structs.replace(own.mix(), weights=np.array(weights))
        there = [k for k in range(experts) if k != seed % 4]
        rows = np.zeros((len(there), 4 * N), dtype=np.uint8)
        for row, k in zip(rows, there, strict=True):
            data = sides[k].view(np.uint8)
            row[: data.size] = data
        found = np.zeros(N, dtype=DTYPES[out])
        mix_chunk(
            *(mix, base.view(np.uint8), base_type, rows, [types[k] for k in there]),
            [there.index(k) if k in there else -1 for k in range(experts)],
            *(N, 0, np.zeros(experts, dtype=np.float32), [UNLIMITED] * experts),
            np.zeros((experts, 2), dtype=np.uint32),
            *(found.view(np.uint8), out),
        )
        exact = reference.merge(
            *("sce", {}, [1.0] * experts, base, sides),
            out_dtype=out,
            absent=[np.full(N, k not in there) for k in range(experts)],
        )
        assert np.array_equal(found.view(WORDS[out]), exact.view(WORDS[out]))


@pytest.mark.parametrize("share", SHARES)
def test_a_merge_equals_the_reference(place: Place, share: float) -> None:
    """Selection, ties by index, weights and elections are the definition's; virtual, replayed and
    exported."""
    store = place.store
    plan = store.plan(asked(share, dtype="F32"))
    store.merge(plan, name="merged")
    assert store.replay("merged").same
    store.merge(plan, name="virtual", virtual=True)
    for name in SHAPES:
        exact = wanted(place, share, name, out_dtype="F32")
        for ref in ("merged", "virtual"):
            found = store[ref].tensor(name)
            assert np.array_equal(found.view(np.uint32), exact.view(np.uint32)), name
    assert store.import_plan(store.export_plan(str(plan.plan))).plan == plan.plan
    for tensor in store._catalog.record(Plan, plan.plan).tensors:
        base = place.family.base[tensor.name].ravel()
        sides = [expert[tensor.name].ravel() for expert in place.family.experts]
        energies = reference.energies(share, base, sides)
        assert tensor.mixture is not None
        assert tensor.mixture.experts == tuple(map(float, energies))
        alike = ("steps", "tiny", "small") if share < 0.7 else ("tiny", "small")
        assert (len(set(energies)) == 1) == (tensor.name in alike)
        assert len(set(tensor.thresholds)) == (share < 1)


def test_as_many_are_selected_as_asked(place: Place) -> None:
    """Exactly int(select_topk * n) of the n elements that experts move differently, in float32."""
    for share in SHARES[1:]:
        record = place.store._catalog.record(Plan, place.store.plan(asked(share)).plan)
        for tensor in record.tensors:
            base = place.family.base[tensor.name].ravel()
            sides = [expert[tensor.name].ravel() for expert in place.family.experts]
            spread = reference.spread([reference.delta(base, side) for side in sides])
            cut = tensor.thresholds[0]
            equal = np.flatnonzero(spread == np.float32(cut.value))
            kept = equal if cut.quota < 0 else equal[equal < cut.quota]
            count = int(np.float32(np.count_nonzero(spread)) * np.float32(share))
            assert np.count_nonzero(spread > np.float32(cut.value)) + len(kept) == count


def test_facts_are_measured_once(place: Place, tmp_path: Path) -> None:
    """Where a selection ends is read once, apart from the budget; without analysis: refused."""
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "e0", "e1", "e2"):
            store.add(place.root / name, name=name, base=None if name == "base" else "base")
        # Squares of whole deltas are statistics.
        store.plan(dataclasses.replace(asked(1.0), method="task_arithmetic", parameters={}))
        assert store.plan(asked(1.0, analyze=False)).analyze_bytes_read == 0
        with pytest.raises(BadRequest, match="not all are known"):
            store.plan(asked(0.2, analyze=False))
        assert store.plan(asked(0.2)).analyze_bytes_read > 0
        again = store.plan(asked(0.2, analyze=False, budget="50%"))
        assert 0 < again.planned_expert_bytes <= again.full_expert_bytes / 2
        assert store.plan(asked(0.3)).analyze_bytes_read > 0


def test_a_large_tensor_is_read_once_more(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the spreads of a tensor are kept or not, the plan is the same; keeping saves a read
    of the experts."""
    found = []
    for most in (1 << 25, 0):
        monkeypatch.setattr(deltas, "_MOST_KEPT", most)
        with Store.init(tmp_path / str(most), block_size=families.BLOCK) as store:
            for name in ("base", "e0", "e1", "e2"):
                store.add(place.root / name, name=name, base=None if name == "base" else "base")
            found.append(store.plan(asked(0.2)))
    kept, again = found
    assert kept.plan == again.plan
    reads = again.analyze_bytes_read - kept.analyze_bytes_read
    assert 0.9 < reads / kept.full_expert_bytes <= 1


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_budget_keeps_threshold_and_weights(place: Place, share: float) -> None:
    """Under a budget threshold and weights are those of the whole experts, and what is not read
    counts as not moved; there is no bound, but an estimate."""
    store = place.store
    full = store.plan(asked(share, dtype="F32"))
    store.merge(full, name="full")
    plan = store.plan(asked(share, dtype="F32", budget="60%"))
    done = store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes
    whole, part = (store._catalog.record(Plan, one.plan).tensors for one in (full, plan))
    assert [(one.thresholds, one.mixture) for one in whole] == [
        (one.thresholds, one.mixture) for one in part
    ]
    for tensor in part:
        n = place.family.base[tensor.name].size
        absent = [
            np.repeat(np.frombuffer(states, np.uint8) > 1, tensor.chunk_elements)[:n]
            for states in tensor.states
        ]
        exact = wanted(place, share, tensor.name, out_dtype="F32", absent=absent)
        found = store["part"].tensor(tensor.name)
        assert np.array_equal(found.view(np.uint32), exact.view(np.uint32)), tensor.name
    names = list(SHAPES)
    parts = ({name: store[ref].tensor(name) for name in names} for ref in ("part", "full"))
    error = place.relative_error(*parts)
    assert plan.error_bound is None
    assert plan.error_estimate is not None
    assert 0.5 * error < plan.error_estimate < 2 * error


def test_what_is_remembered_knows_the_selection(place: Place) -> None:
    """With another share, or one more expert that moves other chunks, a merge with the memo table
    is that without."""
    near = {name: value.copy() for name, value in place.family.base.items()}
    near["a"][-4:] = families.cast(near["a"][-4:].astype(np.float32) + 0.1, "BF16")
    families.write_checkpoint(place.root / "near", near)
    place.store.add(place.root / "near", name="near", base="base")
    for experts in (["e0", "e2"], ["e0", "e2", "near"]):
        for share in (0.2, 0.3):
            plan = place.store.plan(dataclasses.replace(asked(share), experts=experts))
            done = place.store.merge(plan, name="remembered")
            assert place.store.merge(plan, name="anew", memo=False).manifest == done.manifest


def test_of_one_expert_nothing_varies(place: Place) -> None:
    """One expert alone has no variance: all of it is taken, or with a share nothing."""
    one = dataclasses.replace(asked(1.0), experts=["e1"], dtype="F32")
    place.store.merge(place.store.plan(one), name="one")
    assert np.allclose(place.store["one"].tensor("a"), place.family.experts[1]["a"], atol=1e-6)
    share = dataclasses.replace(one, parameters={"select_topk": 0.5})
    with pytest.raises(BadRequest, match="there is one"):
        place.store.plan(share)
    place.store.merge(place.store.plan(share, allow_noop=True), name="none")
    assert np.array_equal(
        place.store["none"].tensor("a"), place.family.base["a"].astype(np.float32)
    )


def test_what_it_does_not_take(place: Place) -> None:
    """Experts have no weights, a share is above 0 and up to 1, and tensors are finite."""
    for given, weights, says in (
        ({"select_topk": 0}, [1.0, 1.0], "select_topk must be in"),
        ({"select_topk": 1.5}, [1.0, 1.0], "select_topk must be in"),
        ({}, [1.0, 0.5], "has no weight"),
    ):
        with pytest.raises(BadRequest, match=says):
            operation("sce", given, weights)
    sick = {name: value.copy() for name, value in place.family.experts[0].items()}
    sick["b"][3, 3] = np.inf
    families.write_checkpoint(place.root / "sick", sick)
    place.store.add(place.root / "sick", name="sick", base="base")
    for share in (1.0, 0.5):
        with pytest.raises(BadRequest, match="infinite or NaN") as refused:
            place.store.plan(dataclasses.replace(asked(share), experts=["e1", "sick"]))
        assert refused.value.where == "b"


def test_a_recipe_of_mergekit(place: Place) -> None:
    """mergekit's recipe gives the same plan; its int8_mask says nothing."""
    models = "".join(f"- model: {name}\n" for name in ("base", "e0", "e1", "e2"))
    text = f"merge_method: sce\nbase_model: base\nmodels:\n{models}parameters:\n"
    found = place.store.read_recipe(f"{text}  select_topk: 0.2\n  int8_mask: true\n")
    assert place.store.plan(found.request).plan == place.store.plan(asked(0.2)).plan
    assert not found.remarks
