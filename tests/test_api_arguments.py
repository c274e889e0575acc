"""Arguments of public calls: what is of no type that a call takes is refused, by its name."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Tensor, write_safetensors
from later import Later

from mstore import Budget, MergeRequest, SnapshotId, Store, TensorRule
from mstore.store import leases
from mstore.terms.errors import BadName, BadRequest, NotFound


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    write_safetensors(path / "model.safetensors", [("t", "U8", (9,), bytes(9))])
    return path


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store") as store:
        store.add(model, name="tiny")
        yield store


def test_values_of_wrong_types(store: Store, tmp_path: Path) -> None:
    """What a call cannot use is refused in mstore's own words, and nothing is done."""
    before = store.refs(), store.config, store.snapshot_ids()
    made: Any = store
    for path in (None, 5, [tmp_path]):
        for call in (made.open, made.init, made.backup, made.reindex):
            with pytest.raises(BadRequest, match="a path is text"):
                call(path)
        with pytest.raises(BadRequest, match="a path is text"):
            made.add(path, name="x")
        with pytest.raises(BadRequest, match="a path is text"):
            made.checkout("tiny", path)
    for threads in ("2", None, 1.5):
        if threads is not None:
            with pytest.raises(BadRequest, match="threads must be between"):
                made.checkout("tiny", tmp_path / "out", threads=threads)
    for name in (None, 5, ["x"]):
        with pytest.raises(BadName, match="it is no text"):
            made.add(tmp_path / "m", name=name)
        with pytest.raises(BadName, match="it is no text"):
            made.tag(name, "tiny")
        with pytest.raises(BadName, match="a list of texts"):
            made.remove("tiny", name)
    for message in (None, 5, b"words"):
        with pytest.raises(BadRequest, match="a message is text"):
            made.add(tmp_path / "m", name="x", message=message)
    for only in ("t", [5], [None]):
        with pytest.raises(BadRequest, match="list of texts"):
            made.add(tmp_path / "m", name="x", only=only)
        with pytest.raises(BadRequest, match="list of texts"):
            made.checkout("tiny", tmp_path / "out", only=only)
    for author in (None, 5):
        with pytest.raises(BadRequest, match="an author is text"):
            made.open(store.path, author=author)
    for limit in ("1", 1.5):
        with pytest.raises(BadRequest, match="limit is at least 0"):
            made.log(limit=limit)
    with pytest.raises(BadRequest, match="reflog_days cannot be"):
        made.gc(reflog_days="3")
    with pytest.raises(BadRequest, match="no such setting"):
        made.configure(5, 5)
    with pytest.raises(BadRequest, match="what `load_key` gives"):
        made.sign("tiny", "key.pem")
    with pytest.raises(BadRequest, match="what `read_signers` gives"):
        made.verify("tiny", "signers")
    assert (store.refs(), store.config, store.snapshot_ids()) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("method", one) for one in (5, None, ["linear"])),
        *(("dtype", one) for one in (5, np.float32)),
        *(("experts", one) for one in (None, 5, "tiny", [None], [("tiny", "1")], {"tiny": None})),
        *(("budget", one) for one in ([], True, {}, object())),
        *(("expert_budget", one) for one in ([], True)),
        *(("parameters", one) for one in ([("density", 1)], {5: 1}, "density=1")),
        *(("max_error", one) for one in ("5%", [])),
        *(("top_p", one) for one in ("20%", [])),
        *(("only", one) for one in ("lm*", None, [None])),
    ],
)
def test_a_plan_of_wrong_types(name: str, value: object, store: Store) -> None:
    """Whatever is wrong in what a plan is asked for, the error is mstore's own."""
    asked: dict[str, Any] = {"base": "tiny", "experts": ["tiny"], "method": "linear", name: value}
    with pytest.raises(BadRequest):
        store.plan(MergeRequest(**asked))


@pytest.mark.parametrize("value", [5, None, bytes(64)])
def test_ids_of_wrong_types(value: Any) -> None:
    """What is no text is no id, and BadName says so."""
    with pytest.raises(BadName):
        SnapshotId.parse(value)


@pytest.mark.parametrize("value", ["x", None, [], True])
def test_budgets_of_wrong_types(value: Any) -> None:
    """A Budget of no number is refused where it is made."""
    for make in (Budget.bytes, Budget.share, Budget):
        with pytest.raises(BadRequest, match="not"):
            make(value)
    with pytest.raises(BadRequest, match="a number of bytes"):
        Budget.bytes(0.5)  # type: ignore[arg-type]


def test_what_is_taken(store: Store, model: Path) -> None:
    """Numbers of numpy, tuples, sets and paths as text are what the calls take, as ever."""
    store.add(str(model), name="other", exclude={"x"}, threads=np.int64(1))  # type: ignore[arg-type]
    found = store.usage(("tiny", "other"))
    assert len(found.refs) == 2
    assert store.log("tiny", np.int32(1))[0].snapshot == store["tiny"].id  # type: ignore[arg-type]
    assert isinstance(store["tiny"].id, SnapshotId)
    assert store["tiny"].read(Path("model.safetensors"))
    numbers: dict[str, Any] = {"max_error": np.float32(0.5), "budget": np.int64(9)}
    asked = MergeRequest(base="tiny", experts=["tiny"], method="linear", **numbers)
    asked = dataclasses.replace(asked, rules=[TensorRule(tensors="t", weights=np.ones(1))])  # type: ignore[arg-type]
    assert store.plan(asked, allow_noop=True).max_error == 0.5
    assert not store.gc(reflog_days=np.int64(3)).dry_run  # type: ignore[arg-type]
    assert Budget.of(np.int64(9), option="budget") == Budget(9)
    assert Budget.of(np.float32(0.5), option="budget") == Budget(0.5)


def test_dtypes_by_object(store: Store, tmp_path: Path) -> None:
    """A cast and the LoRA calls take a dtype object where they take its name."""
    for name, value in (("a", 0), ("b", 60)):
        weight: Tensor = ("w.weight", "F16", (2, 2), bytes([0, value]) * 4)
        write_safetensors(tmp_path / name / "model.safetensors", [weight])
        store.add(tmp_path / name, name=name)
    cast = store.cast("a", dtype=np.float32, name="c")
    assert cast.dtype == store.cast("a", dtype="float32", name="d").dtype
    store.extract_lora("b", "a", name="lora", rank=1, dtype=np.dtype("float16"))
    store.combine_adapters(["lora"], name="sum", method="linear", dtype=np.float32)
    with pytest.raises(BadRequest, match="cannot cast to dtype"):
        store.cast("a", dtype=[], name="e")


def test_a_plan_by_its_id(store: Store) -> None:
    """A plan is exported by what planned it, by its id, and by that as text."""
    asked = MergeRequest(base="tiny", experts=["tiny"], method="linear")
    plan = store.plan(asked, allow_noop=True)
    wanted = store.export_plan(str(plan.plan))
    assert store.export_plan(plan.plan) == store.export_plan(plan) == wanted


def test_values_out_of_range(store: Store) -> None:
    """Counts and offsets below 0, shares of no list, and experts that are read once are refused."""
    with pytest.raises(BadRequest, match="limit is at least 0"):
        store.log(limit=-1)
    view = store.view("tiny")
    for offset, size in ((-1, 5), (0, -1)):
        with pytest.raises(BadRequest, match="at least 0"):
            view.read("model.safetensors", offset, size)
    once = MergeRequest(base="tiny", experts=(one for one in ["tiny"]), method="linear")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="experts are a list of revisions, not generator"):
        store.plan(once)
    asked = MergeRequest(base="tiny", experts=["tiny"], method="linear")
    assert len(store.sweep(asked, shares=np.linspace(0.5, 1, 2)).points) == 2  # type: ignore[arg-type]


def test_misspelt_names(store: Store) -> None:
    """A misspelt tensor or file has the name that was probably meant in its hint."""
    with pytest.raises(NotFound, match="no such file") as file:
        store["tiny"].read("model.safetensor")
    assert str(file.value.hint).startswith("did you mean model.safetensors?\nstore.files('")
    with pytest.raises(NotFound, match="no such tensor") as tensor:
        store["tiny"].tensor("T")
    assert str(tensor.value.hint).startswith("store.tensors('")
    opened = store["tiny"].safe_open()
    assert list(opened) == ["t"]
    assert "t" in opened
    assert "u" not in opened


def test_a_hold(store: Store) -> None:
    """A hold takes a snapshot or its id, ends with its block, and stays in its process."""
    for given in (store["tiny"], store["tiny"].id):
        with store.hold(given, sure=True) as hold:
            assert leases.holds(store._catalog.layout) == {store["tiny"].id}
            with pytest.raises(TypeError, match="belongs to its process"):
                pickle.dumps(hold)
        assert not leases.holds(store._catalog.layout)


# -- what Python users see ---------------------------------------------------------------------


@pytest.mark.parametrize("budget", [-1, -0.5])
def test_a_negative_budget(budget: float) -> None:
    """A budget below 0 is refused as such."""
    with pytest.raises(BadRequest, match="a budget is a number above 0") as refused:
        Budget.of(budget, option="budget")
    assert refused.value.hint == 'budget="2GiB" or budget="30%"'


def test_in_and_repr(tmp_path: Path) -> None:
    """`in` says whether a revision is there; repr shows the path."""
    write_safetensors(tmp_path / "m" / "model.safetensors", [("t", "U8", (9,), bytes(9))])
    with Store.init(tmp_path / "store") as store:
        id = store.add(tmp_path / "m", name="a").snapshot
        assert "a" in store
        assert id in store
        assert "a~0" in store
        assert "b" not in store
        assert "not a name" not in store
        assert 1 not in store
        assert 1 not in store["a"]
        assert repr(store) == f"Store({str(tmp_path / 'store')!r})"
    assert repr(store) == f"Store({str(tmp_path / 'store')!r})"


def test_dtypes_of_numpy_and_torch() -> None:
    """A dtype object stands for its name; no other object does."""
    torch = Later("torch")

    def dtype_of(given: Any) -> Any:
        return MergeRequest(base="a", experts=["b"], method="linear", dtype=given).dtype

    assert dtype_of(torch.bfloat16) == "bfloat16"
    assert dtype_of(torch.float16) == dtype_of(np.float16) == dtype_of(np.dtype("<f2")) == "float16"
    assert dtype_of("BF16") == "BF16"
    assert dtype_of(None) is None
    assert dtype_of(Path("float16")) == Path("float16")


def test_bytes_that_are_no_text(store: Store, model: Path) -> None:
    """Text of another encoding, as a program gets it from its arguments, is refused; a path may
    have any bytes."""
    with pytest.raises(BadRequest, match=r"a message is text that UTF-8 can spell, not 'f"):
        store.add(model, name="new", message="f\udcfcr")
    asked = MergeRequest(base="tiny", experts=["tiny"], method="linear", only=["\udcfc*"])
    with pytest.raises(BadRequest, match="only must be a list of texts"):
        store.plan(asked)
    odd = model.parent / os.fsdecode(b"\xe9")
    store.backup(odd)
    shutil.copytree(model, odd / "m")
    store.add(odd / "m", name="tiny")
