"""Merges of virtual merges: one merge of the models that these were made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from adapters import Adapter
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store, TensorRule
from mstore.terms.errors import BadRequest, MstoreError

Array = npt.NDArray[np.float32]
NAMES = ("base", "a", "b", "c")


@pytest.fixture(scope="module")
def models() -> Mapping[str, Mapping[str, Array]]:
    draw = np.random.default_rng(7)
    base = {f"model.layers.{n}.w.weight": draw.normal(size=(40, 40)) for n in range(4)}
    return {
        name: {
            key: (value + draw.normal(size=value.shape)).astype("f4") for key, value in base.items()
        }
        for name in NAMES
    }


@pytest.fixture
def store(models: Mapping[str, Mapping[str, Array]], tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        for name, tensors in models.items():
            save_file(dict(tensors), tmp_path / f"{name}.safetensors")
            made.add(tmp_path / f"{name}.safetensors", name=name)
        yield made


def virtual(store: Store, name: str, base: str, **experts: float) -> None:
    """A virtual merge by task arithmetic."""
    request = MergeRequest(base=base, experts=experts, method="task_arithmetic")
    store.merge(store.plan(request), name=name, virtual=True)


def made(store: Store, request: MergeRequest, out: Path) -> dict[str, Array]:
    """The tensors of a merge."""
    store.merge(store.plan(request), name="made")
    out.unlink(missing_ok=True)
    store.checkout("made", out)
    found: dict[str, Array] = load_file(out)
    return found


def test_a_merge_of_merges_is_one_merge(store: Store, tmp_path: Path) -> None:
    """Its plan is that of the models below with the products of the weights, bit for bit."""
    virtual(store, "v", "base", a=0.5, b=0.25)
    nested = MergeRequest(base="base", experts={"v": 0.5, "c": 0.5}, method="task_arithmetic")
    direct = MergeRequest(
        base="base", experts={"a": 0.25, "b": 0.125, "c": 0.5}, method="task_arithmetic"
    )
    assert store.plan(nested).plan == store.plan(direct).plan
    store.merge(store.plan(nested), name="m")
    assert [one.refs for one in store.show("m").parents] == [("base",), ("a",), ("b",), ("c",)]


def test_a_chain_of_ten_is_not_rounded_between(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """Ten mixes in a row, each of the one before, are as the sum in float64, rounded once."""
    held = {key: value.astype("f8") for key, value in models["base"].items()}
    before = "base"
    stored = store.stats().stored_bytes
    for step in range(10):
        other, weight = NAMES[1 + step % 3], 0.1 + 0.05 * step
        virtual(store, f"v{step}", before, **{other: weight})
        held = {key: own + weight * (models[other][key] - own) for key, own in held.items()}
        before = f"v{step}"
    assert store.stats().stored_bytes < stored + 200_000
    store.materialize(before)
    store.checkout(before, tmp_path / "last.safetensors")
    for key, value in load_file(tmp_path / "last.safetensors").items():
        np.testing.assert_allclose(value, held[key], rtol=3e-6, atol=3e-6)


def test_the_weight_of_the_rest_is_the_base_s(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """A virtual merge of another base brings that base in as an expert."""
    virtual(store, "v", "a", b=0.25)
    request = MergeRequest(base="base", experts={"v": 0.5}, method="task_arithmetic")
    for key, value in made(store, request, tmp_path / "m.safetensors").items():
        base, a, b = (models[name][key].astype("f8") for name in ("base", "a", "b"))
        wanted = base + 0.5 * (a + 0.25 * (b - a) - base)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)


def test_rules_and_patterns_are_kept_apart(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """Tensors with weights of their own, and those that are left out, are so on either level."""
    first, second, third, last = models["base"]
    inner = MergeRequest(
        base="base",
        experts={"a": 0.5},
        method="linear",
        parameters={"normalize": False},
        rules=[TensorRule(tensors="*", method="task_arithmetic"), TensorRule(tensors=last)],
        skip=[second],
    )
    store.merge(store.plan(inner), name="v", virtual=True)
    outer = MergeRequest(
        base="v",
        experts={"c": 0.5},
        method="task_arithmetic",
        parameters={"lambda": 0.5},
        rules=[TensorRule(tensors=third, weights=[1.0], parameters={"lambda": 1.0})],
        skip=[first],
    )
    found = made(store, outer, tmp_path / "m.safetensors")

    def mean(key: str, **weights: float) -> npt.NDArray[np.float64]:
        return sum(
            (w * models[name][key].astype("f8") for name, w in weights.items()),
            start=np.zeros(1),
        )

    wanted = {
        first: mean(first, base=0.5, a=0.5),
        second: mean(second, base=0.75, c=0.25),
        third: models["c"][third],
        last: mean(last, base=0.375, a=0.375, c=0.25),
    }
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6, atol=1e-6, err_msg=key)


def test_the_type_is_that_of_the_virtual_base(store: Store, tmp_path: Path) -> None:
    """A virtual base with a declared type gives the result that type, unless another is asked."""
    request = MergeRequest(
        base="base", experts={"a": 0.5}, method="task_arithmetic", dtype="float16"
    )
    store.merge(store.plan(request), name="v", virtual=True)
    outer = MergeRequest(base="v", experts={"b": 0.5}, method="task_arithmetic")
    assert {one.dtype for one in made(store, outer, tmp_path / "m.safetensors").values()} == {
        np.dtype("f2")
    }
    wide = MergeRequest(base="v", experts={"b": 0.5}, method="task_arithmetic", dtype="float32")
    assert {one.dtype for one in made(store, wide, tmp_path / "m.safetensors").values()} == {
        np.dtype("f4")
    }


def test_a_merge_of_merges_is_virtual_too(store: Store, tmp_path: Path) -> None:
    """It is computed as it is read, from stored models, also when the merges below are gone."""
    virtual(store, "v", "base", a=0.5)
    virtual(store, "w", "v", b=0.5)
    request = MergeRequest(base="base", experts={"w": 0.5}, method="task_arithmetic")
    wanted = made(store, request, tmp_path / "m.safetensors")
    virtual(store, "u", "base", w=0.5)
    store.remove("v", "w")
    store.gc()
    store.checkout("u", tmp_path / "u.safetensors")
    found = load_file(tmp_path / "u.safetensors")
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_a_budget_holds_for_the_models_below(store: Store) -> None:
    """The plan of a merge of merges keeps a budget as any other does."""
    virtual(store, "v", "base", a=0.5, b=0.25)
    request = MergeRequest(
        base="base", experts={"v": 0.5, "c": 0.5}, method="task_arithmetic", budget="50%"
    )
    told = store.plan(request)
    assert 0 < told.planned_expert_bytes <= told.full_expert_bytes / 2


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ("ties", "task_arithmetic", "ties makes no weighted sum"),
        ("task_arithmetic", "ties", "ties needs the values"),
        ("slerp", "linear", "slerp makes no weighted sum"),
    ],
)
def test_other_methods_are_refused(store: Store, inner: str, outer: str, message: str) -> None:
    """What is no weighted sum says so, and how it can be merged again."""
    parameters = {"t": 0.5} if inner == "slerp" else {}
    request = MergeRequest(base="base", experts=["a"], method=inner, parameters=parameters)
    store.merge(store.plan(request), name="v", virtual=True)
    with pytest.raises(BadRequest, match=message) as refused:
        store.plan(MergeRequest(base="base", experts=["v"], method=outer))
    assert "materialize" in str(refused.value.texts)
    store.materialize("v")
    store.plan(MergeRequest(base="base", experts=["v"], method=outer))


def test_a_plan_that_leaves_chunks_out_is_no_sum(store: Store) -> None:
    """A virtual merge with a budget is not what its weights say."""
    request = MergeRequest(
        base="base", experts={"a": 0.5, "b": 0.5}, method="task_arithmetic", budget="40%"
    )
    store.merge(store.plan(request), name="v", virtual=True)
    with pytest.raises(BadRequest, match="leaves chunks out"):
        store.plan(MergeRequest(base="base", experts=["v"], method="task_arithmetic"))


def test_adapters_stay_with_their_base(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """A virtual merge with an adapter goes into a merge with the same base, and no other."""
    draw = np.random.default_rng(1)
    module = "model.layers.1.w"
    up, down = (draw.normal(size=shape).astype("f4") for shape in ((40, 2), (2, 40)))
    adapter = Adapter({module: (up, down)}, settings={"lora_alpha": 2})
    adapter.write(tmp_path / "lora")
    store.add(tmp_path / "lora", name="lora", base="base")
    virtual(store, "v", "base", lora=1.0)
    request = MergeRequest(base="v", experts={"a": 0.5}, method="task_arithmetic")
    found = made(store, request, tmp_path / "m.safetensors")[f"{module}.weight"]
    base, a = (models[name][f"{module}.weight"].astype("f8") for name in ("base", "a"))
    np.testing.assert_allclose(
        found, 0.5 * (base + up.astype("f8") @ down) + 0.5 * a, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(BadRequest, match="another base"):
        store.plan(MergeRequest(base="a", experts=["v"], method="task_arithmetic"))


def test_a_name_that_moved_is_not_followed(store: Store, tmp_path: Path) -> None:
    """What a virtual merge was made of counts, and not what its models are called by now."""
    virtual(store, "v", "base", a=0.5)
    request = MergeRequest(base="base", experts={"v": 0.5}, method="task_arithmetic")
    before = store.plan(request).plan
    store.reset("a", "c")
    assert store.plan(request).plan == before
    with pytest.raises(MstoreError):
        store.plan(MergeRequest(base="base", experts=["v:x"], method="task_arithmetic"))
