"""Tensors that two files of one model have: reading gives what loaders give, computing refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import write_checkpoint
from small_models import files_of

from mstore import MergeRequest, Store
from mstore.terms.errors import Incompatible
from mstore.terms.requests import TokenRow, Vocabulary

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LAST = "model.layers.1.w.weight"
SHAPE = (64, 64)


def tensors(value: float) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(3)
    rest = {
        f"model.layers.{n}.w.weight": draw.standard_normal(SHAPE).astype("f4") for n in range(2)
    }
    return {"k": np.full(SHAPE, value, "f4"), **rest}


def save(path: Path, held: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write one file of a model."""
    write_checkpoint(path.parent / "made", held)
    (path.parent / "made" / "model.safetensors").rename(path)
    shutil.rmtree(path.parent / "made")


def overlaid(folder: Path, chosen: str) -> Path:
    """A model whose tensor k is 1 in the first shard and 2 in the second; the index names one."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    last = tensors(1.0)
    save(folder / ONE, {name: array for name, array in last.items() if name != LAST})
    save(folder / TWO, {"k": tensors(2.0)["k"], LAST: last[LAST]})
    index = dict.fromkeys(last, ONE) | {"k": chosen, LAST: TWO}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Models whose index chooses the first or the second; one with a stale index; a plain one."""
    root = tmp_path_factory.mktemp("indexed")
    overlaid(root / "first", ONE)
    overlaid(root / "second", TWO)
    save(overlaid(root / "stale", ONE) / "model.safetensors", tensors(3.0))
    write_checkpoint(root / "plain", tensors(0.0))
    with Store.init(root / "store", block_size=1 << 16) as store:
        for name in ("plain", "first", "second", "stale"):
            store.add(root / name, name=name)
        yield store


VALUES = {"first": 1.0, "second": 2.0, "stale": 1.0}


@pytest.mark.parametrize("name", VALUES)
def test_a_name_is_what_the_index_says(store: Store, name: str) -> None:
    """Every way to read a tensor by its name gives that of the shard that the index names; a file
    that is named gives its own."""
    snapshot, value = store[name], VALUES[name]
    assert snapshot.tensor("k")[0, 0] == snapshot.load()["k"][0, 0] == value
    assert snapshot.safe_open().get_tensor("k")[0, 0] == value
    assert snapshot.safe_open().get_slice("k")[:1][0, 0] == value
    assert snapshot.safe_open(file=ONE).get_tensor("k")[0, 0] == 1.0
    assert snapshot.safe_open(file=TWO).get_slice("k")[3:][0, 0] == 2.0
    alone = [f"model:{one}" for one in tensors(0.0)] if name == "stale" else []
    assert sorted(snapshot) == sorted([*tensors(0.0), *alone])
    changed = {one.name: one.status for one in store.diff("second", name).tensors}
    assert changed.get("k", "equal") == ("equal" if name == "second" else "changed")


@pytest.mark.parametrize("name", VALUES)
def test_every_byte_is_kept(store: Store, name: str, tmp_path: Path) -> None:
    """Files, diff with the directory and checkout are those of any other model."""
    files = files_of(store.path.parent / name)
    assert {path: store[name].read(path) for path in files} == files
    store.checkout(name, tmp_path / "out")
    assert files_of(tmp_path / "out") == files
    report = store.diff_directory(name, tmp_path / "out")
    assert not report.tensors
    assert not report.files


@pytest.mark.parametrize("name", VALUES)
def test_what_computes_refuses_it(store: Store, name: str, tmp_path: Path) -> None:
    """Merges (as base, expert or vocabulary), casts, adapters and sums refuse it, and name the
    tensor: they would change one of the two and leave the other."""
    other = MergeRequest(base="plain", experts=["plain"], method="linear")
    acts: list[Callable[[], object]] = [
        lambda: store.plan(MergeRequest(base=name, experts=["plain"], method="linear")),
        lambda: store.plan(MergeRequest(base="plain", experts=[name], method="linear")),
        lambda: store.align(other, Vocabulary(tokens={"x": TokenRow(model=name)})),
        lambda: store.cast(name, dtype="BF16", name="x"),
        lambda: store.extract_lora(name, "plain", name="x", rank=2),
        lambda: store.extract_lora("plain", name, name="x", rank=2),
        lambda: store.add(store.path.parent / "plain", name="x", base=name, kind="delta"),
    ]
    for act in acts:
        with pytest.raises(Incompatible, match="tensor k is in model-00001-of-00002"):
            act()
    assert "x" not in store


def test_a_file_that_the_index_does_not_name_is_a_model_of_its_own(store: Store) -> None:
    """A single file of the index's stem is called by its name."""
    assert store["stale"].models() == ["", "model"]
    assert store["stale"].tensor("model:k")[0, 0] == 3.0
    assert store["stale"].load(model="model")["k"][0, 0] == 3.0


def test_the_note_of_an_add(store: Store) -> None:
    """`add` tells which of two counts."""
    report = store.add(store.path.parent / "second", name="second")
    assert any("tensor 'k' is in" in remark for remark in report.remarks)
