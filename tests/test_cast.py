"""cast: a model with elements of another type; scaled fp8 becomes what it stands for."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import families
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from later import Later
from safetensors import safe_open
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.merge.planning.warnings import FAR
from mstore.models import casting
from mstore.models.scales import Scale, apply
from mstore.numeric.casts import narrowed, widened
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest, Conflict, Incompatible, NotFound

torch = Later("torch")
transformers = Later("transformers")

Array = npt.NDArray[Any]
KINDS: Mapping[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def save(
    path: Path, tensors: Mapping[str, Array], config: Mapping[str, object] | None = None
) -> Path:
    """A checkpoint of one file, tensors in the order given."""
    path.mkdir(parents=True, exist_ok=True)
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config or {"torch_dtype": "bfloat16"}))
    return path


def write(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    known = {np.dtype(kind): name for name, kind in KINDS.items()}
    rows = [(name, known[one.dtype], one.shape, one.tobytes()) for name, one in tensors.items()]
    write_safetensors(path, rows, metadata=dict(metadata or {"format": "pt"}))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def records(store: Store, ref: str) -> dict[str, Tensor]:
    view = store.view(ref)
    found = {name: view.record(name) for name in view.tensors}
    assert all(isinstance(one, Tensor) for one in found.values())
    return found  # type: ignore[return-value]


def stored(store: Store, ref: str) -> dict[str, Array]:
    view = store[ref]
    return {name: view.tensor(name) for name in view.tensor_names()}


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same(one: Array, other: Array) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


# -- elements ----------------------------------------------------------------------------------


def numbers_of(dtype: str) -> list[float]:
    """All finite numbers of a narrow type, ascending, without -0."""
    width = np.dtype(KINDS[dtype]).itemsize
    bits = np.arange(1 << (8 * width), dtype=f"<u{width}")
    with np.errstate(invalid="ignore"):
        values = bits.view(KINDS[dtype]).astype(np.float64)
    return sorted(set(values[np.isfinite(values)].tolist()))


def rounded(value: float, dtype: str, numbers: Sequence[float]) -> float:
    """The nearest number of a type, by exact arithmetic; of two, the one with the even pattern."""
    step = numbers[-1] - numbers[-2]
    ends = [-numbers[-1] - step, *numbers, numbers[-1] + step]
    at = min(max(bisect_left(ends, value), 1), len(ends) - 1)
    low, high = ends[at - 1], ends[at]
    value = min(max(value, ends[0]), ends[-1])
    below, above = Fraction(value) - Fraction(low), Fraction(high) - Fraction(value)
    if below == above:
        # The number beyond the largest has an even pattern, but for that of float8_e4m3fn.
        inside = high if abs(high) <= numbers[-1] else low
        bits = int(
            np.array([inside]).astype(KINDS[dtype]).view(f"u{np.dtype(KINDS[dtype]).itemsize}")[0]
        )
        found = inside if bits % 2 == 0 else low + high - inside
    else:
        found = low if below < above else high
    if abs(found) <= numbers[-1]:
        return found
    return math.copysign(numbers[-1] if dtype == "F8_E4M3" else math.inf, found)


NUMBERS = {dtype: numbers_of(dtype) for dtype in ("BF16", "F16", "F8_E4M3", "F8_E5M2")}


@st.composite
def hard(draw: st.DrawFn) -> tuple[str, list[float]]:
    """A narrow type, and numbers that are near its ties, or anything."""
    dtype = draw(st.sampled_from(list(NUMBERS)))
    numbers = NUMBERS[dtype]
    found = []
    for _ in range(draw(st.integers(1, 20))):
        at = draw(st.integers(0, len(numbers) - 2))
        tie = numbers[at] / 2 + numbers[at + 1] / 2
        near = draw(
            st.sampled_from([tie, math.nextafter(tie, math.inf), math.nextafter(tie, -1e9)])
        )
        found.append(draw(st.sampled_from([near, numbers[at], draw(st.floats(allow_nan=False))])))
    return dtype, found


@settings(max_examples=40, deadline=None)
@given(asked=hard(), single=st.booleans())
def test_every_element_is_rounded_once(asked: tuple[str, list[float]], single: bool) -> None:
    """An element becomes the number nearest to its exact value, ties to even, with its sign."""
    dtype, given_values = asked
    with np.errstate(over="ignore"):
        values = np.array(given_values, dtype=np.float32 if single else np.float64)
    data, overflowed = narrowed(values, dtype)
    found = data.view(KINDS[dtype]).astype(np.float64)
    finite = np.isfinite(values)
    wanted = np.array(
        [
            rounded(one, dtype, NUMBERS[dtype]) if np.isfinite(one) else one
            for one in values.tolist()
        ]
    )
    if dtype == "F8_E4M3":
        wanted[~finite] = np.copysign(448.0, values[~finite])
    assert found.tolist() == wanted.tolist()
    assert (np.signbit(found) == np.signbit(values)).all()
    too_large = np.isinf(wanted) & finite
    if dtype == "F8_E4M3":
        too_large = (np.abs(values) > 464) | ~finite
    assert overflowed == too_large.sum()


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_a_nan_stays_one(source: str, target: str) -> None:
    """A NaN of any sign becomes the quiet NaN without a sign, and its neighbours stay."""
    values = np.array([1.0, np.nan, -np.nan, -2.0]).astype(KINDS[source])
    data, overflowed = narrowed(widened(values.view(np.uint8), source), target)
    found = data.view(KINDS[target])
    assert np.isnan(found.astype(np.float64)).tolist() == [False, True, True, False]
    assert not np.signbit(found.astype(np.float64)[1:3]).any()
    assert found.astype(np.float64)[[0, 3]].tolist() == [1.0, -2.0]
    assert overflowed == 0


# -- scales ------------------------------------------------------------------------------------


@st.composite
def scaled(draw: st.DrawFn) -> tuple[Scale, npt.NDArray[np.float32], Array]:
    """A scale of some form, a weight, and the scale of each of its elements."""
    matrices, rows, columns = (draw(st.integers(1, most)) for most in (3, 9, 11))
    block = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    block = tuple(
        draw(st.sampled_from([1, each, side]))
        for each, side in zip(block, (rows, columns), strict=True)
    )
    shared = draw(st.booleans())
    grid = (1 if shared else matrices, -(-rows // block[0]), -(-columns // block[1]))
    dtype = draw(st.sampled_from(["F32", "BF16", "F16", "F8_E8M0"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    own = (2.0 ** rng.integers(-9, 9, grid) * (1 + rng.random(grid))).astype(KINDS[dtype])
    each = np.repeat(np.repeat(own, block[0], 1), block[1], 2)[:, :rows, :columns]
    wide = np.broadcast_to(each.astype(np.float32), (matrices, rows, columns))
    record = Tensor(dtype, grid, own.nbytes, b"")
    scale = Scale("s", record, (matrices, rows, columns), grid, (block[0], block[1]))
    weight = rng.standard_normal((matrices, rows, columns), dtype=np.float32)
    return scale, np.ascontiguousarray(weight), (wide, own)  # type: ignore[return-value]


@settings(max_examples=100, deadline=None)
@given(asked=scaled(), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_a_piece_gets_the_scales_of_its_elements(asked: Any, cuts: list[int]) -> None:
    """Whatever the form of a scale, and wherever a weight is cut: each element gets its own."""
    scale, weight, (wide, own) = asked
    flat = weight.reshape(-1).copy()
    ends = sorted({0, flat.size, *(cut for cut in cuts if cut < flat.size)})
    for start, end in itertools.pairwise(ends):
        apply(flat[start:end], start, scale, own.tobytes())
    assert same(flat.reshape(weight.shape), weight * wide)


FORMS = {
    "blocks": ("_scale_inv", (300, 200), (3, 2), FP8),
    "blocks of a group": (
        "_scale",
        (300, 200),
        (3, 2),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"block_structure": [128, 128]}}},
        },
    ),
    "rows": ("_scale", (300, 200), (300, 1), {"quant_method": "compressed-tensors"}),
    "columns of experts": ("_scale", (3, 40, 30), (3, 1, 30), {"quant_method": "fbgemm_fp8"}),
    "one": ("_scale", (300, 200), (1,), {"quant_method": "compressed-tensors"}),
    "one without a shape": ("_scale_inv", (300, 200), (), {"quant_method": "fp8"}),
    "one for a vector": ("_scale", (300,), (1,), {"quant_method": "modelopt"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["BF16", "F64"])
def test_a_scaled_weight_becomes_what_it_stands_for(
    store: Store, tmp_path: Path, form: str, kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element is its product with its scale in float32, rounded; scales are gone."""
    monkeypatch.setattr(casting, "_GROUP_BYTES", BLOCK)
    suffix, shape, grid, stated = FORMS[form]
    weight = normal(*shape).astype(KINDS[kind])
    scale = np.abs(normal(*grid, seed=1)).astype(np.float32)
    wide = scale
    if grid == (3, 2):
        wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:300, :200]
    tensors = {
        "a.weight": weight,
        f"a.weight{suffix}": scale,
        "a.input_scale": np.ones((), np.float32),
        "a.k_scale": np.ones(1, np.float32),
        "norm.weight": normal(7).astype(ml_dtypes.bfloat16),
    }
    config = {"dtype": "float16", "quantization_config": stated}
    store.add(save(tmp_path / "m", tensors, config), name="m")
    report = store.cast("m", dtype=NAMES[target], name="out", threads=2)
    found = stored(store, "out")
    assert found.keys() == {"a.weight", "norm.weight"}
    assert same(found["a.weight"], (weight.astype(np.float32) * wide).astype(KINDS[target]))
    assert json.loads(store["out"].read("config.json")) == {"dtype": NAMES[target]}
    cast = 1 if target == "BF16" else 2
    assert (report.cast, report.scaled, report.shared) == (cast, 1, 2 - cast)
    assert report.scales_dropped == 3
    assert report.remarks == ()


def test_a_long_weight_is_cast_in_pieces(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of blocks end within rows and within blocks of scales, and never hold the tensor."""
    monkeypatch.setattr(casting, "_GROUP_BYTES", BLOCK)
    weight = normal(1000, 333).astype(KINDS["F8_E4M3"])
    scale = np.abs(normal(8, 3, seed=1))
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "b": normal(900, 300)}
    store.add(save(tmp_path / "m", tensors, {"quantization_config": FP8}), name="m")
    sizes = []
    read = Catalog.read_blocks

    def watched(self: Catalog, *given: Any, **more: Any) -> Any:
        found = read(self, *given, **more)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(Catalog, "read_blocks", watched)
    ticks: list[Any] = []
    store.cast("m", dtype="float64", name="out", threads=2, progress=ticks.append)
    monkeypatch.undo()
    found = stored(store, "out")
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:1000, :333]
    assert same(found["a.weight"], (weight.astype(np.float32) * wide).astype(np.float64))
    assert same(found["b"], tensors["b"].astype(np.float64))
    # A group has whole blocks of either type: of fp8 the elements of one block.
    assert max(sizes) <= 4 * BLOCK < weight.nbytes
    assert (ticks[0].done, ticks[-1].done) == (0, ticks[-1].total)
    assert ticks[-1].total == weight.nbytes + tensors["b"].nbytes


# -- files -------------------------------------------------------------------------------------


def every(seed: int = 0) -> dict[str, Array]:
    """Tensors of every kind, some of several blocks, some empty or without a shape."""
    own = normal(90, 500, seed=seed)
    return {
        "steps": np.arange(5),
        "double": own.astype(np.float64),
        "single": own * 2,
        "half": own.astype(np.float16),
        "brain": own.astype(ml_dtypes.bfloat16),
        "small": own.astype(ml_dtypes.float8_e5m2)[:7, :3],
        "scalar": np.array(0.1, np.float64),
        "empty": np.zeros((0, 4), np.float32),
        "mask": own[:3] > 0,
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", NAMES)
def test_every_tensor_gets_the_type(store: Store, tmp_path: Path, target: str) -> None:
    """Floating-point tensors have the type, others stay, and safetensors reads the file."""
    path = save(
        tmp_path / "m", every(), {"torch_dtype": "float32", "text_config": {"dtype": "float64"}}
    )
    store.add(path, name="m")
    report = store.cast("m", dtype=NAMES[target])
    assert report.name == f"cast/m-{NAMES[target]}"
    store.checkout(report.name, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == every().keys()
    for name, one in every().items():
        found = store[report.name].tensor(name)
        wanted = one
        if one.dtype not in (np.int64, np.bool_):
            wide = one.astype(np.float64 if one.dtype == np.float64 else np.float32)
            data, _ = narrowed(wide.reshape(-1), target)
            wanted = data.view(KINDS[target]).reshape(one.shape)
        assert same(found, wanted), name
    config = json.loads(store[report.name].read("config.json"))
    # torch cannot compute in 8 bits: the type that a model is loaded in stays.
    told = None if target.startswith("F8") else NAMES[target]
    assert config == {
        "torch_dtype": told or "float32",
        "text_config": {"dtype": told or "float64"},
    }
    has = sum(np.dtype(KINDS[target]) == one.dtype for one in every().values())
    assert (report.cast, report.shared) == (7 - has, 2 + has)
    assert store.fsck(read_data=True).problems == ()


def test_tensors_of_the_type_are_shared_and_not_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has the type already is the model's own, by reference; no byte of it is read."""
    store.add(save(tmp_path / "m", every()), name="m")
    read: list[Any] = []
    blocks = Catalog.read_blocks

    def watched(self: Catalog, wanted: Any, *more: Any) -> Any:
        read.extend(wanted)
        return blocks(self, wanted, *more)

    monkeypatch.setattr(Catalog, "read_blocks", watched)
    store.cast("m", dtype="bfloat16", name="out")
    before, after = (records(store, ref) for ref in ("m", "out"))
    kept = {"steps", "mask", "brain"}
    assert {name for name in before if before[name] == after[name]} == kept
    assert not set(read) & {id for name in kept for id in before[name].block_ids()}


def test_new_tensors_lie_as_in_their_file(tmp_path: Path) -> None:
    """In a raw store the new file is one run of a pack, pages on pages, as an added one is."""
    tensors = {"a": normal(150, 300), "b": normal(7), "c": normal(200, 200, seed=1)}
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(save(tmp_path / "m", tensors), name="m")
        store.cast("m", dtype="bfloat16", name="out")
        header, *found = store.view("out").physical_extents("model.safetensors")
        assert header.offset == 0
        places = [(one.offset, one.location) for one in found]
        (first, begin), *_ = places
        assert begin is not None
        assert begin.offset % 4096 == first % 4096
        for offset, place in places:
            assert place is not None
            assert place.offset - begin.offset == offset - first


def test_the_index_of_shards_is_written_again(store: Store, tmp_path: Path) -> None:
    """Sizes are the new ones, scales are in no shard, and their weights may be in another one."""
    path = tmp_path / "m"
    path.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": {
            "a.weight": normal(130, 130).astype(KINDS["F8_E4M3"]),
            "b.weight_scale_inv": np.full((2, 1), 3.0, np.float32),
        },
        "model-00002-of-00002.safetensors": {
            "a.weight_scale_inv": np.full((2, 2), 0.5, np.float32),
            "b.weight": normal(129, 5).astype(KINDS["F8_E4M3"]),
        },
    }
    for name, tensors in shards.items():
        write(path / name, tensors)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"quantization_config": FP8, "vocab_size": 3}))
    store.add(path, name="m")
    store.cast("m", dtype="bfloat16", name="out")
    found = json.loads(store["out"].read("model.safetensors.index.json"))
    assert found["weight_map"] == {
        "a.weight": "model-00001-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
    }
    assert found["metadata"] == {"total_size": 2 * (130 * 130 + 129 * 5), "note": "kept"}
    assert json.loads(store["out"].read("config.json")) == {"vocab_size": 3}
    tensors = stored(store, "out")
    wanted = shards["model-00002-of-00002.safetensors"]["b.weight"].astype(np.float32) * 3
    assert same(tensors["b.weight"], wanted.astype(ml_dtypes.bfloat16))


def test_a_model_in_a_directory_has_its_own_config(store: Store, tmp_path: Path) -> None:
    """Each directory's config says how its weights are scaled."""
    weight, scale = normal(64, 64).astype(KINDS["F8_E4M3"]), np.abs(normal(2, 2))
    for name, side in (("one", 32), ("two", 60)):
        stated = {"quantization_config": {**FP8, "weight_block_size": [side, side]}}
        save(
            tmp_path / "m" / name, {f"{name}.weight": weight, f"{name}.weight_scale": scale}, stated
        )
    store.add(tmp_path / "m", name="m")
    store.cast("m", dtype="float32", name="out")
    for name, side in (("one", 32), ("two", 60)):
        wide = np.repeat(np.repeat(scale, side, 0), side, 1)[:64, :64]
        assert same(store["out"].tensor(f"{name}:{name}.weight"), weight.astype(np.float32) * wide)
        assert json.loads(store["out"].read(f"{name}/config.json")) == {}


def test_what_modelopt_says_beside_the_config_goes(store: Store, tmp_path: Path) -> None:
    """A file that states the quantization of weights that have none any more is left out."""
    tensors = {
        "a.weight": normal(4, 4).astype(KINDS["F8_E4M3"]),
        "a.weight_scale": np.ones(1, "f4"),
    }
    path = save(tmp_path / "m", tensors)
    (path / "hf_quant_config.json").write_text("{}")
    store.add(path, name="m")
    (remark,) = store.cast("m", dtype="bfloat16", name="out").remarks
    assert remark == "hf_quant_config.json is left out: it states the quantization"
    assert "hf_quant_config.json" not in store.view("out").files


# -- there and back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "wider"),
    [
        ("BF16", "F32"),
        ("BF16", "F64"),
        ("F16", "F32"),
        ("F32", "F64"),
        ("F8_E4M3", "BF16"),
        ("F8_E4M3", "F16"),
        ("F8_E5M2", "F16"),
        ("F8_E5M2", "F64"),
    ],
)
def test_there_and_back_is_the_same_tensor(
    store: Store, tmp_path: Path, first: str, wider: str
) -> None:
    """A type that holds all numbers of another gives them back, bit for bit."""
    tensors = {"a": (normal(300, 200) * 8).astype(KINDS[first]), "b": np.arange(9)}
    store.add(save(tmp_path / "m", tensors), name="m")
    store.cast("m", dtype=NAMES[wider], name="wide")
    report = store.cast("wide", dtype=NAMES[first], name="back")
    assert report.overflowed == 0
    assert records(store, "back") == records(store, "m")


def test_lineage_and_a_second_time(store: Store, tmp_path: Path) -> None:
    """The source is the parent, any threads give the same content, and again changes nothing."""
    source = store.add(save(tmp_path / "m", every()), name="m").snapshot
    report = store.cast("m", dtype="float16", name="out", message="why", threads=1)
    shown = store.log("out")[0]
    assert (shown.made, shown.message) == ("cast", "why")
    assert [(one.role, one.snapshot) for one in shown.parents] == [("base", source)]
    again = store.cast("m", dtype="F16", name="out", threads=3)
    assert not again.new_snapshot
    assert (again.snapshot, again.bytes_written) == (report.snapshot, 0)
    own = store.cast("m", dtype="float16", name="m")
    assert own.new_snapshot
    assert store.log("m")[0].manifest == shown.manifest


def test_a_model_of_the_type_gets_the_name(store: Store, tmp_path: Path) -> None:
    """A cast that changes nothing says so, writes no tensor, and the name exists."""
    store.add(save(tmp_path / "m", {"a": normal(300, 300)}, {"torch_dtype": "float32"}), name="m")
    report = store.cast("m", dtype="float32")
    assert report.remarks == ("every tensor that could be cast is of float32 already",)
    assert store.log(report.name)[0].manifest == store.log("m")[0].manifest


def test_patterns_leave_tensors(store: Store, tmp_path: Path) -> None:
    """Tensors that patterns leave out stay as they are."""
    tensors = {"a.bias": normal(9).astype(np.float64), "a.gate": normal(9), "b": normal(9)}
    store.add(save(tmp_path / "m", tensors), name="m")
    store.cast("m", dtype="bfloat16", name="out", only=["a.*"], skip=["*gate*"])
    assert {one.name: one.dtype for one in store.tensors("out")} == {
        "a.bias": "BF16",
        "a.gate": "F32",
        "b": "F32",
    }


# -- remarks and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "values", "count", "told"),
    [
        (
            "float16",
            [65519.0, 65520.0, -7e4, np.inf],
            2,
            "too large for float16 and became infinite",
        ),
        ("bfloat16", [3.4e38, 1e300], 2, "too large for bfloat16 and became infinite"),
        ("float32", [3.4e38, -1e39], 1, "1 element is too large for float32 and became infinite"),
        ("float8_e5m2", [61439.0, 61440.0], 1, "float8_e5m2 and became infinite"),
        ("float8_e4m3fn", [464.0, 465.0, np.inf], 2, "became 448 or -448, the largest there is"),
    ],
)
def test_what_overflows_is_counted(
    store: Store, tmp_path: Path, dtype: str, values: list[float], count: int, told: str
) -> None:
    """A warning says how many elements the type could not hold, what they became, and where; if
    they became infinite, nothing is published unless that is allowed.
    """
    tensors = {"fits": np.ones(3), "large": np.array([1.0, *values])}
    store.add(save(tmp_path / "m", tensors), name="m")
    if "infinite" in told:
        with pytest.raises(Incompatible, match=told) as refused:
            store.cast("m", dtype=dtype, name="out")
        assert refused.value.hint == "allow_nonfinite=True publishes it as it is"
        assert "out" not in store
    report = store.cast("m", dtype=dtype, allow_nonfinite="infinite" in told)
    (warning,) = report.warnings
    assert told in warning
    assert warning.endswith(f": large {count}")
    assert report.remarks == ()
    assert report.overflowed == count


@pytest.mark.parametrize(
    ("dtype", "became", "value"),
    [("float64", "infinite", np.inf), ("float8_e4m3fn", "448 or -448, the largest there is", 448)],
)
def test_a_product_that_overflows_is_counted(
    store: Store, tmp_path: Path, dtype: str, became: str, value: float
) -> None:
    """A weight and a scale whose product float32 cannot hold: counted, and told apart."""
    tensors = {
        "a.weight": np.array([[0.0, 448.0, -448.0]]).astype(KINDS["F8_E4M3"]),
        "a.weight_scale": np.array([1e37], np.float32),
    }
    store.add(save(tmp_path / "m", tensors), name="m")
    if became == "infinite":
        with pytest.raises(Incompatible, match=r"became infinite: a\.weight 2"):
            store.cast("m", dtype=dtype, name="out")
    report = store.cast("m", dtype=dtype, name="out", allow_nonfinite=became == "infinite")
    told = f"2 products are too large for float32 and became {became}: a.weight 2"
    assert report.warnings == (told,)
    assert report.overflowed == 2
    found = store["out"].tensor("a.weight").astype(np.float64)
    assert found.tolist() == [[0, value, -value]]


def test_an_infinite_weight_is_no_overflow(store: Store, tmp_path: Path) -> None:
    """Infinite elements that a scale makes none do not count, and hide no real overflow."""
    weight = np.array([np.inf, np.inf, 2.0, 1.0], dtype=ml_dtypes.float8_e5m2).reshape(2, 2)
    scale = np.array([[0.0], [3e38]], dtype=np.float32)
    path = save(tmp_path / "m", {"a.weight": weight, "a.weight_scale": scale}, {})
    store.add(path, name="m")
    report = store.cast("m", dtype="float32", name="out", allow_nonfinite=True)
    assert report.overflowed == 1
    found = stored(store, "out")["a.weight"]
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [np.inf, np.float32(3e38)]


def test_scales_are_of_weights_in_fp8(store: Store, tmp_path: Path) -> None:
    """A tensor of the same name in another file, in another type, is not multiplied."""
    own = normal(4, 6).astype(ml_dtypes.bfloat16)
    for name, tensors in (
        ("a.safetensors", {"w.weight": W, "w.weight_scale": 4 * ONE}),
        ("b.safetensors", {"w.weight": own}),
    ):
        (tmp_path / "m").mkdir(exist_ok=True)
        write(tmp_path / "m" / name, tensors)
    store.add(tmp_path / "m", name="m")
    store.cast("m", dtype="bfloat16", name="out")
    store.checkout("out", tmp_path / "out")
    found = [
        families.read_safetensors(tmp_path / "out" / name)["w.weight"]
        for name in ("a.safetensors", "b.safetensors")
    ]
    assert same(found[1], own)
    assert same(found[0], (4 * W.astype(np.float32)).astype(ml_dtypes.bfloat16))


def test_a_directory_without_a_config_may_hold_other_weights(store: Store, tmp_path: Path) -> None:
    """What lies below a quantized model without a config of its own is cast as it is; what is
    quantized there has the config of the model."""
    path = save(
        tmp_path / "m", {"a.weight": W, "a.weight_scale": ONE}, {"quantization_config": FP8}
    )
    (path / "more").mkdir()
    write(path / "more" / "x.safetensors", {"b.weight": normal(3), "b.weight_scale": ONE})
    store.add(path, name="m")
    store.cast("m", dtype="bfloat16", name="out")
    kinds = {one.name: one.dtype for one in store.tensors("out")}
    assert kinds == dict.fromkeys(("a.weight", "more:b.weight", "more:b.weight_scale"), "BF16")
    write(path / "more" / "x.safetensors", {"b.qweight": np.ones(3, np.int64)})
    store.add(path, name="m")
    with pytest.raises(Incompatible, match="without weights in fp8"):
        store.cast("m", dtype="bfloat16", name="out")


# -- single files ------------------------------------------------------------------------------


def marked(kind: str) -> Array:
    return np.frombuffer(json.dumps({"format": f"float8_{kind}"}).encode(), np.uint8)


def file_of(
    path: Path, tensors: Mapping[str, Array], formats: Mapping[str, object] | None = None
) -> Path:
    """A single file as ComfyUI has them; formats: what its header says of layers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "modelspec.architecture": "video"}
    if formats is not None:
        metadata["_quantization_metadata"] = json.dumps({"layers": formats})
    write(path, tensors, metadata)
    return path


MARK = np.zeros(2, KINDS["F8_E4M3"])
# Beside a.weight: its scale, how that is wide, the marks, and what the header says.
SINGLE: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Array], dict[str, object] | None]] = {
    "a marker": ("scale_weight", (), {"scaled_fp8": MARK}, None),
    "a marker of part": ("scale_weight", (1,), {"x.scaled_fp8": np.zeros(0, np.float32)}, None),
    "no marker": ("scale_weight", (24, 1), {}, None),
    "runs of rows": ("scale_weight", (24, 4, 1), {"scaled_fp8": MARK}, None),
    "a row of numbers": ("scale_weight", (24,), {"scaled_fp8": MARK}, None),
    "a mark": ("weight_scale", (), {"a.comfy_quant": marked("e4m3fn")}, None),
    "rows": ("weight_scale", (24,), {"a.comfy_quant": marked("e4m3fn_rowwise")}, None),
    "blocks": (
        "weight_scale",
        (3, 2),
        {},
        {"a": {"format": "float8_e4m3fn_blockwise", "group_size": 8}},
    ),
    "a header": ("weight_scale", (1,), {}, {"a": {"format": "float8_e4m3fn"}}),
}


@pytest.mark.parametrize("form", SINGLE)
def test_a_single_file_with_scales(store: Store, tmp_path: Path, form: str) -> None:
    """Scales are found by keys, marks and the header, without a config; all of them are gone."""
    name, grid, marks, formats = SINGLE[form]
    weight = normal(24, 16).astype(KINDS["F8_E4M3"])
    scale = np.abs(normal(*grid, seed=1)).astype(np.float32).reshape(grid)
    wide = scale.reshape(-1, 1)
    if grid == (24, 4, 1):
        wide = np.repeat(scale[:, :, 0], 4, 1)
    elif grid == (3, 2):
        wide = np.repeat(np.repeat(scale, 8, 0), 8, 1)
    norm = normal(7).astype(ml_dtypes.bfloat16)
    tensors = {"a.weight": weight, f"a.{name}": scale, "a.scale_input": ONE, "norm.weight": norm}
    path = file_of(tmp_path / "video.safetensors", {**tensors, **marks}, formats)
    store.add(path, name="m")
    report = store.cast("m", dtype="bfloat16", name="out")
    found = stored(store, "out")
    assert found.keys() == {"a.weight", "norm.weight"}
    assert same(found["a.weight"], (weight.astype(np.float32) * wide).astype(ml_dtypes.bfloat16))
    assert (report.scaled, report.scales_dropped) == (1, 2 + len(marks))
    store.checkout("out", tmp_path / "out")
    with safe_open(tmp_path / "out" / "video.safetensors", "np") as opened:
        told = opened.metadata()
    lineage = {"sd_merge_recipe", "sd_merge_models"}
    assert {key: told[key] for key in told.keys() - lineage} == {
        "format": "pt",
        "modelspec.architecture": "video",
    }


W = np.ones((4, 6), KINDS["F8_E4M3"])
ONE = np.ones((1,), np.float32)
ERRORS: Mapping[str, tuple[Mapping[str, Array], object, str]] = {
    "no scales": (
        {"a.weight": W, "b.weight": W, "b.weight_scale": ONE},
        FP8,
        r"says that it is quantized \(fp8\), and there are no scales of a.weight$",
    ),
    "another quantization": (
        {"a.qweight": np.ones(3, np.int64)},
        {"quant_method": "gptq"},
        r"is quantized \(gptq\) without weights in fp8",
    ),
    "scales of integers": (
        {
            "a.weight": W,
            "a.weight_scale": ONE,
            "b.weight": W.astype(np.int8),
            "b.weight_scale": ONE,
        },
        FP8,
        "has scales of I8 elements: casting knows those of fp8 alone: b.weight",
    ),
    "two scales": (
        {"a.weight": W, "a.weight_scale": ONE, "a.weight_scale_inv": ONE},
        None,
        "a.weight has two scales: a.weight_scale_inv, a.weight_scale",
    ),
    "a zero point": (
        {"a.weight": W, "a.weight_scale": ONE, "a.weight_zero_point": ONE},
        None,
        "a.weight has a zero point",
    ),
    "scales of another type": (
        {"a.weight": W, "a.weight_scale": np.ones(1, np.int64)},
        None,
        "a.weight_scale has elements of I64; those of scales are BF16, F16, F32, F8_E8M0",
    ),
    "blocks that no one states": (
        {"a.weight": W, "a.weight_scale_inv": np.ones((2, 2), np.float32)},
        None,
        r"a.weight_scale_inv has shape \[2, 2\] for a weight of \[4, 6\], and nothing",
    ),
    "blocks of another size": (
        {"a.weight": W, "a.weight_scale_inv": np.ones((2, 2), np.float32)},
        FP8,
        r"its blocks are stated as \[128, 128\]",
    ),
    "a scale that is not finite": (
        {"a.weight": W, "a.weight_scale": ONE * np.inf},
        None,
        "a.weight_scale: has elements that are not finite",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_scales_of_another_form_are_refused(store: Store, tmp_path: Path, case: str) -> None:
    """An error names the tensor and what is wrong with its scale, and nothing is published."""
    tensors, stated, told = ERRORS[case]
    config = {} if stated is None else {"quantization_config": stated}
    store.add(save(tmp_path / "m", tensors, config | {"model_type": "llama"}), name="m")
    with pytest.raises(Incompatible, match=told):
        store.cast("m", dtype="bfloat16", name="out")
    assert "out" not in store
    assert store.fsck(read_data=True).garbage == ()


def of_nothing(text: bytes) -> Array:
    return np.frombuffer(text, np.uint8)


MARKED: Mapping[str, tuple[Mapping[str, Array], dict[str, object] | None, str]] = {
    "a marker of nothing": (
        {"a.weight": W, "scaled_fp8": MARK},
        None,
        r"says that its weights have scales \(scaled_fp8\), and there are none",
    ),
    "a mark without a scale": (
        {"a.weight": W, "a.comfy_quant": marked("e4m3fn")},
        None,
        "quantized as float8_e4m3fn, and there are no weights in fp8 with scales of a$",
    ),
    "a header without a scale": ({"a.weight": W}, {"a": {"format": "float8_e5m2"}}, "scales of a$"),
    "a mark beside bf16": (
        {"a.weight": W.astype(ml_dtypes.bfloat16), "a.comfy_quant": marked("e4m3fn")},
        None,
        "no weights in fp8 with scales of a$",
    ),
    "a scale beside bf16": (
        {
            "a.weight": W.astype(ml_dtypes.bfloat16),
            "a.scale_weight": ONE,
            "b.weight": W,
            "b.scale_weight": ONE,
            "scaled_fp8": MARK,
        },
        None,
        "has scales of BF16 elements: casting knows those of fp8 alone: a.weight",
    ),
    "permuted scales": (
        {"a.weight": W, "a.weight_scale": ONE},
        {"a": {"format": "mxfp8"}},
        "a is quantized as mxfp8: casting knows float8 with scales alone",
    ),
    "4 bits": (
        {"a.weight": np.ones((4, 3), np.uint8), "a.weight_scale": W, "a.weight_scale_2": ONE},
        None,
        "has scales of scales, as weights in 4 bits have: a.weight_scale_2",
    ),
    "a mark that is no JSON": (
        {"a.weight": W, "a.weight_scale": ONE, "a.comfy_quant": of_nothing(b"\xff")},
        None,
        "a.comfy_quant does not say how weights are quantized",
    ),
    "a mark that is too long": (
        {"a.weight": W, "a.weight_scale": ONE, "a.comfy_quant": of_nothing(b" " * (1 << 17))},
        None,
        "a.comfy_quant does not say",
    ),
    "a header of another form": (
        {"a.weight": W, "a.weight_scale": ONE},
        {"a": "float8_e4m3fn"},
        "a does not say how weights are quantized",
    ),
    "blocks that no one states": (
        {"a.weight": W, "a.scale_weight": np.ones((2, 2), np.float32)},
        None,
        "nothing states its blocks",
    ),
    "one scale for each column": (
        {"a.weight": W, "a.scale_weight": np.ones(6, np.float32)},
        None,
        r"a.scale_weight has shape \[6\]",
    ),
    "a weight without its scale": (
        {"a.weight": W, "a.scale_weight": ONE, "b.weight": W, "scaled_fp8": MARK},
        None,
        r"says that its weights have scales \(scaled_fp8\), and there are none of b.weight(\n|$)",
    ),
}


@pytest.mark.parametrize("case", MARKED)
def test_marks_that_are_not_understood(store: Store, tmp_path: Path, case: str) -> None:
    """What a single file says of its scales, and casting does not know, is refused by name."""
    tensors, formats, told = MARKED[case]
    store.add(file_of(tmp_path / "video.safetensors", tensors, formats), name="m")
    with pytest.raises(Incompatible, match=told):
        store.cast("m", dtype="bfloat16", name="out")
    assert "out" not in store


def test_weights_without_their_scales_can_be_left_as_they_are(store: Store, tmp_path: Path) -> None:
    """A mark counts for what is below it, and for matrices; a skipped one stays in fp8."""
    tensors = {"x.a.weight": W, "x.a.scale_weight": ONE, "x.b.weight": W, "x.scaled_fp8": MARK}
    others = {"y.c.weight": W, "x.norm.weight": np.ones(6, KINDS["F8_E4M3"])}
    store.add(file_of(tmp_path / "video.safetensors", {**tensors, **others}), name="m")
    with pytest.raises(Incompatible, match=r"none of x.b.weight(\n|$)") as caught:
        store.cast("m", dtype="bfloat16", name="out")
    assert str(caught.value.hint) == "skip=['x.b.weight'] leaves them as they are"
    store.cast("m", dtype="bfloat16", skip=["x.b.weight"], name="out")
    found = {name: one.dtype for name, one in stored(store, "out").items()}
    assert found.pop("x.b.weight") == KINDS["F8_E4M3"]
    assert set(found) == {"x.a.weight", "y.c.weight", "x.norm.weight"}
    assert set(found.values()) == {np.dtype(ml_dtypes.bfloat16)}


def test_merges_of_marked_files_say_how_to_cast(store: Store, tmp_path: Path) -> None:
    """A merge with a single file of scaled weights names the cast, whatever scales are called."""
    store.add(file_of(tmp_path / "base.safetensors", {"a.weight": normal(4, 6)}), name="base")
    turned = {"a.weight": W, "a.scale_weight": ONE, "a.scale_input": ONE, "scaled_fp8": MARK}
    store.add(file_of(tmp_path / "video.safetensors", turned), name="video")
    marks = {"a.weight": W, "a.weight_scale": ONE, "a.comfy_quant": marked("e4m3fn")}
    store.add(file_of(tmp_path / "other.safetensors", marks), name="other")
    for expert in ("video", "other"):
        with pytest.raises(Incompatible) as caught:
            store.plan(MergeRequest(base="base", experts=[expert], method="linear"))
        assert str(caught.value.hint) == (
            f"store.cast('{expert}', dtype='bfloat16') multiplies its weights by their scales"
        )


def test_bad_requests(store: Store, tmp_path: Path) -> None:
    """A dtype, a pattern, a name, a weight with scales that is left out, sub-byte elements."""
    store.add(save(tmp_path / "m", {"a.weight": W, "a.weight_scale": ONE, "b": W}), name="m")
    with pytest.raises(BadRequest, match="cannot cast to dtype 'int8'") as error:
        store.cast("m", dtype="int8")
    hint = "dtype='bfloat16', float16, float32, float64, float8_e4m3fn, float8_e5m2"
    assert str(error.value.hint) == hint
    with pytest.raises(BadRequest, match=r"a\.weight has scales, and a weight with scales cannot"):
        store.cast("m", dtype="bfloat16", only=["b"])
    with pytest.raises(BadRequest, match="no tensor's name matches"):
        store.cast("m", dtype="bfloat16", skip=["x"])
    with pytest.raises(NotFound):
        store.cast("x", dtype="bfloat16")
    store.tag("v1", "m")
    with pytest.raises(Conflict, match="is a tag"):
        store.cast("m", dtype="bfloat16", name="v1")
    write_safetensors(tmp_path / "f4" / "model.safetensors", [("a", "F4", (4,), b"ab")])
    store.add(tmp_path / "f4", name="f4")
    with pytest.raises(Incompatible, match="elements of F4 cannot be cast: a"):
        store.cast("f4", dtype="bfloat16")


def test_a_name_that_cannot_be_is_refused_first(store: Store, tmp_path: Path) -> None:
    """A name below or above a ref is refused before anything is read."""
    store.add(save(tmp_path / "m", {"a": normal(9)}), name="team/m")
    ticks: list[Any] = []
    for name in ("team/m/cast", "team"):
        with pytest.raises(Conflict, match="is a ref, so"):
            store.cast("team/m", dtype="bfloat16", name=name, progress=ticks.append)
    assert ticks == []


def test_plain_fp8_needs_no_scales(store: Store, tmp_path: Path) -> None:
    """Without a quantization in the config, elements of fp8 are numbers as they are."""
    store.add(save(tmp_path / "m", {"a.weight": W * W, "x_scale": ONE}), name="m")
    store.cast("m", dtype="float32", name="out")
    assert same(store["out"].tensor("a.weight"), W.astype(np.float32))
    assert "x_scale" in store["out"].tensor_names()


# -- merging -----------------------------------------------------------------------------------


def test_merges_say_how_to_cast(store: Store, tmp_path: Path) -> None:
    """Errors about types name the model to cast, and its new type; a cast one merges."""
    own = normal(6, 4)
    store.add(save(tmp_path / "base", {"a.weight": own.astype(np.float16)}), name="base")
    store.add(save(tmp_path / "f64", {"a.weight": own.astype(np.float64) + 1}), name="f64")
    scaled = {"a.weight": own.astype(KINDS["F8_E4M3"]), "a.weight_scale": ONE, "a.input_scale": ONE}
    store.add(save(tmp_path / "f8", scaled), name="f8")

    def request(base: str, expert: str, **more: Any) -> MergeRequest:
        return MergeRequest(base=base, experts=[expert], method="linear", **more)

    f64 = "store.cast('f64', dtype='float16') stores it in a type that can be"
    for base, expert, hint in (
        ("base", "f64", f64),
        ("f64", "base", f64),
        ("base", "f8", "store.cast('f8', dtype='bfloat16') multiplies its weights by their scales"),
        ("f8", "base", "store.cast('f8', dtype='bfloat16') multiplies its weights by their scales"),
    ):
        with pytest.raises(Incompatible) as error:
            store.plan(request(base, expert))
        assert hint in str(error.value.hint), (base, expert)
        found = store.check_merge(request(base, expert)).findings
        assert any(hint in str(one.hint) for one in found), (base, expert)
    other = {**scaled, "a.weight": -scaled["a.weight"]}
    store.add(save(tmp_path / "f8b", other), name="f8b")
    with pytest.raises(Incompatible) as both:
        store.plan(request("f8", "f8b"))
    told = "elements of F8_E4M3 cannot be merged, and have other values than in f8: a.weight"
    assert both.value.what == told
    for name in ("f8", "f8b"):
        assert f"store.cast('{name}', dtype='bfloat16')" in str(both.value.hint)
    with pytest.raises(BadRequest) as refused:
        store.plan(request("base", "f64", dtype="float64"))
    assert "then store.cast(REF, dtype='float64')" in str(refused.value.hint)
    for expert in ("f64", "f8"):
        store.cast(expert, dtype="float16", name=f"half/{expert}")
        assert store.check_merge(request("base", f"half/{expert}")).mergeable
        store.merge(store.plan(request("base", f"half/{expert}")), name="merged")


def test_adapters_say_how_to_cast(store: Store, tmp_path: Path) -> None:
    """Where elements cannot be an adapter's, or changed by one, the error says what helps."""
    own = normal(6, 4).astype(np.float64)
    store.add(save(tmp_path / "base", {"a.weight": own}), name="base")
    store.add(save(tmp_path / "f64", {"a.weight": own + 1}), name="f64")
    with pytest.raises(BadRequest) as error:
        store.extract_lora("f64", "base", name="lora")
    for name in ("base", "f64"):
        assert f"store.cast('{name}', dtype='bfloat16')" in str(error.value.hint)
    for name in ("base", "f64"):
        store.cast(name, dtype="float32", name=f"single/{name}")
    assert store.extract_lora("single/f64", "single/base", name="lora", rank=4).products == 1
    store.cast("lora", dtype="float64", name="lora64")
    # It is still an adapter of its base.
    store.cast("lora64", dtype="float32", name="lora32")
    request = MergeRequest(base="single/base", experts=["lora32"], method="linear")
    assert {one.kind for one in store.plan(request).warnings} == {FAR}
    assert [one.role for one in store.log("lora32")[0].parents] == ["base", "expert"]
    for base in ("base", "single/base"):
        request = MergeRequest(base=base, experts=["lora64"], method="linear")
        with pytest.raises(Incompatible, match="adapter to elements of F64") as refused:
            store.plan(request)
        assert "cast(REF, dtype='bfloat16')" in str(refused.value.hint)
    with pytest.raises(Incompatible, match="cannot combine elements of F64") as combined:
        store.combine_adapters(["lora64", "lora"], "cat", name="both")
    assert "store.cast('lora64', dtype='bfloat16')" in str(combined.value.hint)


LLAMA = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def fp8_tune(source: Path, path: Path) -> None:
    """A model with its matrices in fp8, in blocks of 32, as DeepSeek and Qwen store them."""
    tensors: dict[str, Array] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            own = file.get_tensor(name).float().numpy()
            if "proj" not in name:
                tensors[name] = own.astype(ml_dtypes.bfloat16)
                continue
            grid = tuple(-(-side // 32) for side in own.shape)
            scale = np.zeros(grid, np.float32)
            for at in np.ndindex(grid):
                block = own[32 * at[0] : 32 * at[0] + 32, 32 * at[1] : 32 * at[1] + 32]
                scale[at] = np.abs(block).max() / 448
            wide = np.repeat(np.repeat(scale, 32, 0), 32, 1)[: own.shape[0], : own.shape[1]]
            tensors[name] = (own / wide).astype(KINDS["F8_E4M3"])
            tensors[f"{name}_scale_inv"] = scale
    config = json.loads((source / "config.json").read_text())
    stated = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    save(path, tensors, config | {"quantization_config": stated})


def test_an_adapter_of_a_part_says_what_is_not_in_it(store: Store, tmp_path: Path) -> None:
    """Where only some differences have a type that an adapter can state, a remark says how to cast
    the others."""
    own = {"a.weight": normal(6, 4), "b.weight": normal(6, 4).astype(np.float64)}
    store.add(save(tmp_path / "base", own), name="base")
    store.add(save(tmp_path / "tuned", {name: one + 1 for name, one in own.items()}), name="tuned")
    report = store.extract_lora("tuned", "base", name="lora", rank=4)
    assert report.left_out == ("b.weight",)
    assert report.remarks[0].startswith("no difference of F64 is in it: store.cast('base', dtype=")
    assert "store.cast('tuned', dtype='bfloat16')" in report.remarks[0]


@pytest.mark.rest
def test_fine_tunes_in_fp64_and_fp8_are_merged_and_loaded(store: Store, tmp_path: Path) -> None:
    """A base in bf16, a fine-tune in fp64 and one in scaled fp8: cast, merged, and transformers
    loads the merge and each cast, which are near what they were."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA)
    base = transformers.LlamaForCausalLM(config)
    models = {"base": base.to(torch.bfloat16)}
    models["base"].save_pretrained(tmp_path / "base")
    for name, dtype in (("f64", torch.float64), ("f8", torch.float32)):
        tuned = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
        with torch.no_grad():
            for one in tuned.parameters():
                one.add_(torch.randn_like(one), alpha=0.01)
        tuned.save_pretrained(tmp_path / name)
        models[name] = tuned
    (tmp_path / "f8").rename(tmp_path / "f8-whole")
    fp8_tune(tmp_path / "f8-whole", tmp_path / "f8")
    for name in ("base", "f64", "f8"):
        store.add(tmp_path / name, name=name)
    for name in ("f64", "f8"):
        assert store.cast(name, dtype="bfloat16").overflowed == 0
    experts = ["cast/f64-bfloat16", "cast/f8-bfloat16"]
    request = MergeRequest(base="base", experts=experts, method="linear")
    store.merge(store.plan(request), name="merged")
    tokens = torch.arange(12)[None]
    found = {}
    for number, ref in enumerate([*experts, "merged"]):
        out = tmp_path / f"out{number}"
        store.checkout(ref, out)
        model, told = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.dtype == torch.bfloat16
        found[ref] = {name: one.double() for name, one in model.state_dict().items()}
        with torch.inference_mode():
            assert torch.isfinite(model(tokens).logits).all()
    f64, f8 = (models[name].state_dict() for name in ("f64", "f8"))
    for name, merged in found["merged"].items():
        one, two = (found[ref][name] for ref in experts)
        assert torch.equal(one, f64[name].to(torch.bfloat16).double())
        # fp8 keeps four bits, bf16 eight.
        assert torch.allclose(two, f8[name].double(), rtol=2**-4, atol=2**-4 * 0.1)
        wanted = ((one.float() + two.float()) / 2).to(torch.bfloat16).double()
        assert torch.allclose(merged, wanted, rtol=2**-7, atol=0)


# -- the command line --------------------------------------------------------------------------


def test_on_the_command_line(tmp_path: Path) -> None:
    """It says what was cast, dropped and lost; errors of merges spell the command."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    tensors = {"a.weight": np.full((4, 6), 448, KINDS["F8_E4M3"]), "a.weight_scale": ONE * 1000}
    mstore.succeed("add", save(tmp_path / "f8", tensors), "--name", "f8")
    base = {"a.weight": np.ones((4, 6), np.float16)}
    mstore.succeed("add", save(tmp_path / "base", base), "--name", "base")
    merge = ("plan", "--base", "base", "--expert", "f8", "--method", "linear")
    assert "cast f8 --dtype bfloat16 multiplies its weights by their scales" in mstore(*merge).err
    cast = ("cast", "f8", "--dtype", "float16", "--allow-nonfinite")
    refused = mstore(*cast[:-1]).err
    assert "24 elements are too large for float16 and became infinite: a.weight 24" in refused
    assert "hint: --allow-nonfinite publishes it as it is" in refused
    told = mstore.succeed(*cast).out
    assert "cast to cast/f8-float16" in told
    assert "1 tensor, 1 with scales" in told
    assert "warning: 24 elements are too large for float16 and became infinite: a.weight 24" in told
    document = mstore.succeed(*cast, "--json").document
    assert (document["new_snapshot"], document["overflowed"]) == (False, 24)
    assert "nothing new: " in mstore.succeed(*cast).out
