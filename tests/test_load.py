"""Tensors in memory: whole models, and parts of tensors, as safetensors gives them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BITS, Tensor, write_safetensors
from families import Arrays, cast, layered, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from later import Later

from mstore import MergeRequest, Store
from mstore.store import leases
from mstore.store.layout import Layout
from mstore.terms.errors import BadRequest, Corrupt, Incompatible, NotFound
from mstore.terms.ids import SnapshotId

safetensors = Later("safetensors")
torch = Later("torch")

BLOCK = 1 << 16


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a family, in two stores: raw and dense."""
    root = tmp_path_factory.mktemp("load")
    family = layered()
    write_checkpoint(root / "base", family.base)
    write_checkpoint(root / "tuned", family.experts[0])
    for codec in ("raw", "dense"):
        with Store.init(root / codec, block_size=BLOCK, codec=codec) as store:
            store.add(root / "base", name="base")
            store.add(root / "tuned", name="tuned", base="base")
    return root


@pytest.fixture(scope="module", params=["raw", "dense"])
def store(root: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    with Store.open(root / request.param) as store:
        yield store


def is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Whether the array's memory is a mapped file."""
    owner: Any = array
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner is not None


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_whole_model(store: Store, threads: int) -> None:
    """Every tensor is what was added, whatever the codec and the number of threads; read-only."""
    family = layered()
    for name, wanted in (("base", family.base), ("tuned", family.experts[0])):
        found = store[name].load(threads=threads)
        same(found, dict(wanted))
        assert not any(array.flags.writeable for array in found.values())


def test_what_is_asked_for(store: Store) -> None:
    """Only these tensors, in this order, are read; an unknown one is named."""
    names = ["model.scale", "model.embed.weight", "model.empty"]
    assert list(store["tuned"].load(names)) == names
    with pytest.raises(NotFound, match=r"model\.none"):
        store["tuned"].load(["model.scale", "model.none"])


def test_raw_tensors_are_not_copied(root: Path) -> None:
    """What lies raw and in one piece is a map of the pack, and outlives the store."""
    with Store.open(root / "raw") as store:
        found = store["base"].load()
        assert is_mapped(found["model.embed.weight"])
        assert not is_mapped(found["model.norm.weight"])
        assert not is_mapped(store["tuned"].tensor("model.embed.weight"))
    same(found, dict(layered().base))
    with Store.open(root / "dense") as store:
        assert not is_mapped(store["tuned"].load()["model.embed.weight"])


def test_one_thread_is_that_of_the_caller(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever allows one thread gets no other; nor does a tensor that one thread reads at once."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(thread.name))
    monkeypatch.setattr("mstore.api.load._LEAST_LOADED", 0)
    family = layered()
    same(store["tuned"].load(threads=1), dict(family.experts[0]))
    wanted = family.experts[0]["model.embed.weight"]
    assert store["tuned"].safe_open().get_tensor("model.embed.weight").tobytes() == wanted.tobytes()


def test_one_tensor_is_read_without_a_hold(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one tensor makes no file in the store, as a hold would; a whole model is held."""
    monkeypatch.setattr("mstore.api.load._LEAST_LOADED", 0)
    made = []
    hold = leases.Hold

    def holding(layout: Layout, id: SnapshotId) -> leases.Hold:
        made.append(id)
        return hold(layout, id)

    monkeypatch.setattr(leases, "Hold", holding)
    snapshot = store["tuned"]
    snapshot.safe_open().get_tensor("model.embed.weight")
    assert not made
    snapshot.load()
    assert made == [snapshot.id]


def test_progress_is_told(store: Store) -> None:
    """Progress ends at the bytes of all tensors."""
    told: list[Any] = []
    store["base"].load(progress=told.append)
    total = sum(array.nbytes for array in layered().base.values())
    assert told[-1].done <= told[-1].total == total


def test_torch_tensors_are_their_own(store: Store) -> None:
    """Changing one changes no other, tied or of shared blocks, and nothing of the store."""
    wanted = dict(layered().experts[0])
    found = store["tuned"].load_torch()
    for name, array in wanted.items():
        assert str(found[name].dtype) == f"torch.{array.dtype.name}"
        raw = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw == array.tobytes(), name
    while found:
        name, tensor = found.popitem()
        if tensor.numel():
            tensor.fill_(3)
        for other, left in found.items():
            raw = left.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == wanted[other].tobytes(), (name, other)
    same(store["tuned"].load(), wanted)


def test_overlapping_runs_are_copied(tmp_path: Path) -> None:
    """Two tensors that share blocks of one run do not share memory that may be changed."""
    rng = np.random.default_rng(3)
    parts = [cast(rng.standard_normal(BLOCK // 2, dtype=np.float32), "BF16") for _ in range(3)]
    wanted = {"a": np.concatenate(parts[:2]), "b": np.concatenate(parts[1:])}
    wanted["c"] = wanted["a"]
    write_checkpoint(tmp_path / "model", wanted)
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(tmp_path / "model", name="m")
        found = store["m"].load_torch()
        found["a"].zero_()
        for name in "bc":
            raw = found[name].view(torch.uint8).numpy().tobytes()
            assert raw == wanted[name].tobytes()
        same(store["m"].load(), wanted)


def test_virtual_merges_are_computed(root: Path, tmp_path: Path) -> None:
    """A virtual merge loads as the stored one does."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        store.add(root / "tuned", name="tuned", base="base")
        plan = store.plan(
            MergeRequest(base="base", experts=[("tuned", 0.5)], method="task_arithmetic")
        )
        store.merge(plan, name="virtual", virtual=True)
        store.merge(plan, name="real")
        same(store["virtual"].load(), store["real"].load())


@pytest.mark.parametrize("codec", ["raw", "dense"])
def test_damage_is_found(root: Path, tmp_path: Path, codec: str) -> None:
    """A flipped byte is an error that names the block, also where nothing is copied."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec=codec) as store:
        store.add(root / "base", name="base")
    (pack,) = (tmp_path / "store").rglob("*.pack")
    with Store.open(tmp_path / "store") as store:
        place = store.view("base").physical_extents("model.safetensors")[2].location
    assert place is not None
    raw = bytearray(pack.read_bytes())
    raw[place.offset + place.stored_length // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(raw)
    with Store.open(tmp_path / "store") as store:
        for call in (store["base"].load, store["base"].load_torch):
            with pytest.raises(Corrupt) as found:
                call()
            assert found.value.block is not None


# -- the interface of safetensors ----------------------------------------------------------------


def test_the_interface_of_safetensors(root: Path, store: Store) -> None:
    """Names, metadata, tensors, shapes and types are those that safetensors gives of the file."""
    path = root / "tuned" / "model.safetensors"
    with (
        safetensors.safe_open(str(path), "pt") as theirs,
        store["tuned"].safe_open("pt", file="model.safetensors") as ours,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118 -- safe_open is no mapping
            mine, other = ours.get_tensor(name), theirs.get_tensor(name)
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
            assert torch.equal(mine, other)
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
    every = store["tuned"].safe_open()
    assert every.metadata() == ours.metadata() is not None
    assert every.keys() == store["tuned"].tensor_names()


def test_what_cannot_be_opened(store: Store) -> None:
    """A file without tensors, a missing one, and a framework that is none are refused."""
    for file in ("none.safetensors", "config.json"):
        with pytest.raises(NotFound):
            store["base"].safe_open(file=file)
    with pytest.raises(BadRequest, match="np or pt"):
        store["base"].safe_open("jax")
    slice = store["base"].safe_open().get_slice("model.embed.weight")
    with pytest.raises(IndexError, match="row 650 of 650"):
        slice[650]


_BOUND = st.none() | st.integers(-700, 700)
_INDEX = st.one_of(
    st.integers(-650, 649), st.builds(slice, _BOUND, _BOUND, st.sampled_from([None, 1, 2, -1, -3]))
)


_COLUMNS = st.integers(-1024, 1023) | st.slices(1024)


@pytest.fixture(scope="module")
def embedding() -> np.ndarray[Any, Any]:
    return layered().experts[0]["model.embed.weight"]


@pytest.mark.sampled(2)
@given(index=_INDEX | st.tuples(_INDEX, _COLUMNS))
def test_slices(store: Store, embedding: np.ndarray[Any, Any], index: Any) -> None:
    """A slice is what numpy makes of the whole tensor, for any rows, steps and columns."""
    wanted = embedding[index]
    found = store["tuned"].safe_open().get_slice("model.embed.weight")[index]
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def test_slices_of_any_shape(store: Store) -> None:
    """Scalars, `...`, empty tensors and negative steps."""
    opened = store["tuned"].safe_open()
    wanted = layered().experts[0]
    for name, index in (
        ("model.scale", ()),
        ("model.scale", ...),
        ("model.empty", slice(None)),
        ("model.norm.weight", slice(None, None, -2)),
        ("model.grid.weight", (slice(5, 9), ..., slice(None, None, 3))),
        ("model.grid.weight", (..., 7)),
        ("model.grid.weight", slice(9, 3)),
    ):
        found = opened.get_slice(name)[index]
        assert np.asarray(found).tobytes() == np.asarray(wanted[name][index]).tobytes()


def test_a_slice_reads_its_rows_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 650 rows in 21 blocks, ten rows of one block read this block."""
    with Store.open(root / "raw") as store:
        read: list[object] = []
        catalog = store._catalog
        rows = store["tuned"].safe_open().get_slice("model.embed.weight")
        inner = catalog.read_block_at
        monkeypatch.setattr(
            catalog, "read_block_at", lambda id, *more: read.append(id) or inner(id, *more)
        )
        rows[33:43]
        # Now the block is known to be right, and only these rows are read.
        assert rows[33:43].any()
        assert len(read) == 1


# -- types that numpy or torch lacks --------------------------------------------------------------

NARROW = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A model with a large and a small tensor of each narrow type beside one in F32."""
    root = tmp_path_factory.mktemp("narrow")
    draw = np.random.default_rng(0)
    tensors: list[Tensor] = [("plain", "F32", (4, 4), draw.bytes(64))]
    for dtype in NARROW:
        for name, shape in (("small", (8, 8)), ("large", (4096, 1024))):
            size = BITS[dtype] * shape[0] * shape[1] // 8
            tensors.append((f"{dtype}.{name}", dtype, shape, draw.bytes(size)))
    write_safetensors(root / "m" / "model.safetensors", [*tensors, ("odd", "F4", (2, 1), b"x")])
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        store.add(root / "m", name="m")
        yield store


def test_types_that_numpy_lacks(narrow: Store) -> None:
    """A tensor whose type numpy lacks is refused by its name, alone or among others; without it,
    the others are loaded."""
    snapshot = narrow["m"]
    fit = [name for name in snapshot if name.split(".")[0] in ("plain", "F8_E8M0")]
    assert list(snapshot.load(fit)) == fit
    for name in set(snapshot) - set(fit):
        lacking: list[Callable[[], object]] = [
            lambda name=name: snapshot.load([*fit, name]),
            lambda name=name: snapshot.tensor(name),
            lambda name=name: snapshot.safe_open().get_tensor(name),
            lambda name=name: snapshot.safe_open().get_slice(name)[:1],
        ]
        for act in lacking:
            with pytest.raises(Incompatible, match=f"tensor {name}: numpy has no dtype for"):
                act()
    assert snapshot.safe_open().get_tensor("plain").shape == (4, 4)


def test_types_that_torch_has(narrow: Store, tmp_path: Path) -> None:
    """Torch gets what safetensors gives it, pairs of F4 too, whole or in slices of rows; a tensor
    that has no type there is refused by its name."""
    snapshot = narrow["m"]
    narrow.checkout("m", tmp_path / "out")
    fit = [name for name in snapshot if name.split(".")[0] in ("plain", "F4", "F8_E8M0")]
    loaded, ours = snapshot.load_torch(fit), snapshot.safe_open("pt")
    with safetensors.safe_open(str(tmp_path / "out" / "model.safetensors"), "pt") as theirs:
        for name in fit:
            wanted = theirs.get_tensor(name)
            rows = ours.get_slice(name)[1:3]
            for found, want in (
                (loaded[name], wanted),
                (ours.get_tensor(name), wanted),
                (rows, wanted.view(torch.uint8)[1:3].view(wanted.dtype)),
            ):
                assert (found.dtype, found.shape) == (want.dtype, want.shape)
                assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
    for name in set(snapshot) - set(fit):
        for act in (
            lambda name=name: snapshot.load_torch([name]),
            lambda name=name: ours.get_tensor(name),
        ):
            with pytest.raises(Incompatible, match=f"tensor {name}: torch has no type for"):
                act()
