"""emr: one model of many experts, a mask for each, and the virtual models that these make."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from adapters import Adapter
from families import BLOCK, Arrays, Family

from mstore import MergeRequest, Store
from mstore.terms.errors import BadName, BadRequest, Conflict, Incompatible, NotFound

FAMILY = families.layered(5, rows=90)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family on disk, and a store with it."""
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *FAMILY.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
    return root


@pytest.fixture
def store(place: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(place / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as found:
        yield found


def asked(*experts: str, **options: Any) -> MergeRequest:
    return MergeRequest(base="base", experts=experts, method="emr", **options)


def merged_names(family: Family) -> list[str]:
    """Those that a merge computes: not whole numbers, nothing without elements."""
    kinds = {array.dtype.name for array in family.base.values()} & {"bfloat16", "float32"}
    return [n for n, one in family.base.items() if one.dtype.name in kinds and one.size]


def read(store: Store, ref: str) -> Arrays:
    return {name: np.asarray(store[ref].tensor(name)) for name in merged_names(FAMILY)}


def same(found: Arrays, wanted: Arrays) -> None:
    for name, array in found.items():
        assert array.tobytes() == wanted[name].tobytes(), name


def wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.float32)


def sums(family: Family, shared: Arrays, k: int) -> tuple[float, float]:
    """The sizes of all deltas of an expert, and of what its mask leaves of the model of all."""
    moved = left = 0.0
    for name, one in shared.items():
        delta = wide(family.experts[k][name]) - wide(family.base[name])
        unified = wide(one) - wide(family.base[name])
        moved += float(np.abs(delta.astype(np.float64)).sum() * bool(unified.any()))
        left += float(np.abs(np.where(delta * unified > 0, unified, 0).astype(np.float64)).sum())
    return moved, left


def test_each_model_is_what_the_paper_says(store: Store) -> None:
    """Where the expert's delta has the sign of the model of all, its model is the base plus that
    model's delta times the number, else the base; the number is that of the sums of sizes."""
    report = store.emr(asked(*FAMILY.names), name="family")
    shared = read(store, "family/shared")
    assert [one.expert for one in report.models] == FAMILY.names
    for k, one in enumerate(report.models):
        moved, left = sums(FAMILY, shared, k)
        assert one.rescale == pytest.approx(moved / left, rel=1e-6)
        for name, found in read(store, one.name).items():
            base = wide(FAMILY.base[name])
            delta, unified = wide(FAMILY.experts[k][name]) - base, wide(shared[name]) - base
            agrees = delta * unified > 0
            wanted = np.where(agrees, base + unified * np.float32(one.rescale), base)
            kept = families.cast(wanted, "BF16") if found.dtype.itemsize == 2 else wanted
            assert found.tobytes() == kept.tobytes(), name


def test_one_expert_comes_back(store: Store) -> None:
    """Of one expert, and of experts that are equal, each model is that expert, bit for bit."""
    for name, experts in (("one", ["e1"]), ("two", ["e1", "again"])):
        if "again" in experts:
            store.reset("again", "e1")
        report = store.emr(asked(*experts), name=name)
        for one in report.models:
            assert one.rescale == one.share == 1.0
            same(read(store, one.name), FAMILY.experts[1])


def test_the_models_outlive_the_experts(store: Store, tmp_path: Path) -> None:
    """The virtual models have the bytes of stored ones, after the experts were removed, pruned and
    collected, too, and their replays say the same."""
    report = store.emr(asked(*FAMILY.names), name="family")
    before = {one.name: read(store, one.name) for one in report.models}
    experts = [store[name].id for name in FAMILY.names]
    assert store.replay("family/shared").same
    store.remove(*FAMILY.names)
    store.prune(keep_last=1, unnamed_inputs=True)
    store.gc(reflog_days=0)
    for id in experts:
        with pytest.raises(NotFound):
            store[id].tensor("model.embed.weight")
    for one in report.models:
        same(read(store, one.name), before[one.name])
        store.materialize(one.name)
        same(read(store, one.name), before[one.name])
        assert store.replay(one.name).same


def test_no_expert_is_multiplied(store: Store, tmp_path: Path) -> None:
    """An expert that is as far from the base as that is from zero has no weight out of scale: each
    element of the model of all is one's own."""
    far = {name: array * array.dtype.type(1.9) for name, array in FAMILY.base.items()}
    families.write_checkpoint(
        tmp_path / "far", FAMILY.base | {n: far[n] for n in merged_names(FAMILY)}
    )
    store.add(tmp_path / "far", name="far")
    report = store.emr(asked("far"), name="family")
    kinds = [one.kind for one in report.warnings]
    assert "expert far from the base" in kinds
    assert "weight out of scale" not in kinds


def test_masks_are_small(tmp_path: Path) -> None:
    """A mask takes a bit an element at most, and hardly more than its entropy."""
    rng, elements = np.random.default_rng(3), 1 << 20
    base = rng.standard_normal(elements)
    models = {"base": families.cast(base, "BF16")}
    for k in range(3):
        models[f"x{k}"] = families.cast(base + 0.01 * rng.standard_normal(elements), "BF16")
    with Store.init(tmp_path / "store") as store:
        for name, array in models.items():
            families.write_checkpoint(tmp_path / name, {"w": array})
            store.add(tmp_path / name, name=name)
        for one in store.emr(asked("x0", "x1", "x2"), name="all").models:
            mask = np.asarray(store[one.mask].tensor("w")) != 0
            entropy = -sum(p * np.log2(p) for p in (mask.mean(), 1 - mask.mean()))
            assert 8 * one.bytes_written / elements < entropy + 0.08
            moves = models[one.expert] != models["base"]
            assert one.share == pytest.approx(mask.sum() / moves.sum())


def test_an_expert_may_be_an_adapter(tmp_path: Path) -> None:
    """The masks are those of what an adapter makes of the base."""
    rng = np.random.default_rng(2)
    base = {"layer.weight": families.cast(rng.standard_normal((60, 40)), "F32")}
    families.write_checkpoint(tmp_path / "base", base)
    up, down = (families.cast(rng.standard_normal(s), "F32") for s in ((60, 3), (3, 40)))
    Adapter({"layer": (up, down)}).write(tmp_path / "lora")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "lora"):
            store.add(tmp_path / name, name=name)
        plain = MergeRequest(base="base", experts=["lora"], method="linear")
        store.merge(store.plan(plain), name="applied")
        report = store.emr(asked("lora"), name="all")
        assert any("lora is an adapter: adapters are" in one for one in report.remarks)
        assert report.models[0].rescale == pytest.approx(1.0)
        found, wanted = (store[ref].tensor("layer.weight") for ref in ("all/lora", "applied"))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_number_has_no_order(store: Store) -> None:
    """Masks, numbers and models are the same for any number of threads."""
    found = [store.emr(asked(*FAMILY.names), name=f"t{n}", threads=n) for n in (1, 4)]
    for one, other in zip(*(report.models for report in found), strict=True):
        assert (one.rescale, one.share) == (other.rescale, other.share)
        assert store[one.mask].manifest == store[other.mask].manifest


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """Another method, names that would be one branch, a branch that is in the way, and an expert
    with a NaN: then no expert has a model."""
    with pytest.raises(BadRequest, match="of the method emr"):
        store.emr(MergeRequest(base="base", experts=["e0"], method="ties"), name="x")
    for name, told in (("shared", "shared cannot be"), ("masks/a", "masks/a cannot be")):
        store.reset(name, "e0")
        with pytest.raises(BadRequest, match=told):
            store.emr(asked("e1", name), name="x")
    with pytest.raises(BadRequest, match="e1 is given more than once"):
        store.emr(asked("e1", "e1"), name="x")
    with pytest.raises(BadName, match="my family/shared"):
        store.emr(asked("e1", "e2"), name="my family")
    assert not [ref for ref in store.ref_ids() if ref.startswith(("x/", "my"))]
    store.reset("y", "e0")
    with pytest.raises(Conflict):
        store.emr(asked("e1"), name="y")
    sick = {name: array.copy() for name, array in FAMILY.experts[0].items()}
    sick["model.embed.weight"][0, 0] = np.nan
    families.write_checkpoint(tmp_path / "sick", sick)
    store.add(tmp_path / "sick", name="sick")
    with pytest.raises(Incompatible, match="so no number rescales its mask") as refused:
        store.emr(asked("sick", "e1"), name="z")
    assert refused.value.where == "sick"
    assert "z/sick" not in store.ref_ids()


def test_a_family_has_one_shared_model(store: Store) -> None:
    """A second run with other experts is refused while models of the first are there, with the refs
    to remove; with all of them it makes the family anew."""
    store.emr(asked("e0", "e1"), name="family")
    before = store.ref_ids()
    with pytest.raises(Conflict, match=r"not given: e0; they are made of the family/shared") as no:
        store.emr(asked("e1", "e2"), name="family")
    assert "remove('family/e0', 'family/masks/e0')" in str(no.value.hint)
    assert store.ref_ids() == before
    store.emr(asked("e0", "e1", "e2"), name="family")
    store.remove("family/e0", "family/masks/e0")
    store.emr(asked("e1", "e2"), name="family")
    shared = str(store["family/shared"].id)
    for name in ("family/e1", "family/e2"):
        assert shared in [str(one.snapshot) for one in store.show(name).parents]


def test_a_mask_of_numbers(store: Store, tmp_path: Path) -> None:
    """`masked` takes any mask, whatever its numbers; what one lacks its expert does not move, if
    that is allowed."""
    rng = np.random.default_rng(8)
    masks = {
        name: families.cast(rng.integers(-1, 2, FAMILY.base[name].shape), "BF16")
        for name in merged_names(FAMILY)
    }
    del masks["model.embed.weight"]
    families.write_checkpoint(tmp_path / "mask", masks)
    store.add(tmp_path / "mask", name="own")
    request = MergeRequest(
        base="base", experts={"e0": 0.5}, method="masked", companions={"mask:e0": "own"}
    )
    with pytest.raises(Incompatible, match=r"lacks model\.embed\.weight: a Mask has"):
        store.plan(request)
    lenient = MergeRequest(
        **{field: getattr(request, field) for field in ("base", "experts", "method", "companions")},
        allow_missing=True,
        dtype="F32",
    )
    store.merge(store.plan(lenient), name="half")
    for name, found in read(store, "half").items():
        if name == "model.tied.embed_out":
            # One tensor with the first of its names, which has its mask.
            continue
        base = wide(FAMILY.base[name])
        taken = wide(masks[name]) != 0 if name in masks else np.zeros(base.shape, dtype=bool)
        delta = wide(FAMILY.experts[0][name]) - base
        wanted = np.where(taken & (delta != 0), base + delta * np.float32(0.5), base)
        assert wide(found).tobytes() == wanted.tobytes(), name
