"""Element types: casts are torch's, bit for bit, and scaled fp8 is what transformers makes of it.

torch rounds float64 to float32 first, and that to narrower types.  mstore rounds once: results
differ where torch's first step ends on a tie of the second, and there mstore's is the nearer one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mstore import Store
from mstore.numeric.casts import narrowed, widened

TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
MORE = {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
NARROW = ["BF16", "F16", "F8_E4M3", "F8_E5M2"]
Bytes = npt.NDArray[np.uint8]


def cast(stored: Bytes, source: str, target: str) -> Bytes:
    return narrowed(widened(stored.copy(), source), target)[0]


def by_torch(stored: Bytes, source: str, target: str) -> torch.Tensor:
    given = torch.from_numpy(stored.copy()).view((TYPES | MORE)[source])
    return given.to(TYPES[target])


def assert_same(ours: Bytes, theirs: torch.Tensor, target: str) -> None:
    """Every number has the same bits; a NaN is one in both."""
    mine = torch.from_numpy(ours).view(TYPES[target])
    nans = torch.isnan(theirs.float())
    assert torch.equal(torch.isnan(mine.float()), nans)
    width = theirs.element_size()
    bits = [one.contiguous().view(torch.uint8).reshape(-1, width)[~nans] for one in (mine, theirs)]
    assert torch.equal(*bits)


def patterns(dtype: str) -> Bytes:
    """All patterns of a type of 8 or 16 bits."""
    width = (TYPES | MORE)[dtype].itemsize
    return np.arange(1 << (8 * width), dtype=f"<u{width}").view(np.uint8)


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", [*NARROW, *MORE])
def test_every_pattern_is_cast_as_by_torch(source: str, target: str) -> None:
    """All 256 patterns of fp8, and all 65536 of bf16 and fp16, become what torch makes of them."""
    stored = patterns(source)
    assert_same(cast(stored, source, target), by_torch(stored, source, target), target)


def edges(dtype: str) -> list[np.ndarray]:
    """Numbers of a narrow type, the ties between neighbours, and what is next to them: float64."""
    values = widened(patterns(dtype), dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    above = {"BF16": 2.0**128, "F16": 65536.0, "F8_E4M3": 480.0, "F8_E5M2": 65536.0}[dtype]
    values = np.concatenate([[-above], values, [above]])
    ties = (values[1:] + values[:-1]) / 2
    return [values, ties]


def singles() -> npt.NDArray[np.float32]:
    """Special numbers, ties of all narrow types with their neighbours, and random bits."""
    rng = np.random.default_rng(7)
    with np.errstate(over="ignore"):
        exact = np.concatenate([one for dtype in NARROW for one in edges(dtype)]).astype("<f4")
    up, down = (np.nextafter(exact, np.float32(to)) for to in (np.inf, -np.inf))
    random = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    usual = rng.standard_normal(1 << 18, dtype=np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38], np.float32)
    return np.concatenate([exact, up, down, random, usual, usual * np.float32(0.02), special])


@pytest.mark.parametrize("target", TYPES)
def test_singles_are_cast_as_by_torch(target: str) -> None:
    """float32, ties and neighbours of ties among them, becomes what torch makes of it."""
    stored = singles().view(np.uint8)
    assert_same(cast(stored, "F32", target), by_torch(stored, "F32", target), target)


def doubles() -> npt.NDArray[np.float64]:
    """Singles, ties of float32 with their neighbours, and random bits."""
    rng = np.random.default_rng(8)
    wide = singles().astype(np.float64)
    ties = [one for dtype in NARROW for one in edges(dtype)]
    exact = np.concatenate(ties)
    near = [np.nextafter(exact, to) for to in (np.inf, -np.inf)]
    pairs = rng.integers(0, 0x7F7FFFFF, 1 << 16, dtype=np.uint32)
    low, high = (one.view(np.float32).astype(np.float64) for one in (pairs, pairs + np.uint32(1)))
    between = (low + high) / 2
    around = [between, -between, *(np.nextafter(between, to) for to in (np.inf, -np.inf))]
    random = rng.integers(0, 1 << 64, 1 << 20, dtype=np.uint64).view(np.float64)
    usual = rng.standard_normal(1 << 18)
    special = np.array([5e-324, 1e308, -1e308, 2.0**128, -(2.0**-150), 2.0**-149])
    return np.concatenate([wide, exact, *near, *around, random, usual, usual * 0.02, special])


@pytest.mark.parametrize("target", ["F32", "F64"])
def test_doubles_are_cast_as_by_torch(target: str) -> None:
    """float64 becomes the float32 that torch makes of it."""
    stored = doubles().view(np.uint8)
    assert_same(cast(stored, "F64", target), by_torch(stored, "F64", target), target)


@pytest.mark.parametrize("target", NARROW)
def test_doubles_are_rounded_once(target: str) -> None:
    """float64 becomes the nearest number of a narrow type; torch's is another one only where its
    float32 in between is a tie."""
    values = doubles()
    stored = values.view(np.uint8)
    ours, theirs = cast(stored, "F64", target), by_torch(stored, "F64", target)
    mine = torch.from_numpy(ours).view(TYPES[target]).double()
    theirs = theirs.double()
    differ = ((mine != theirs) & ~torch.isnan(theirs)).numpy()
    assert torch.equal(torch.isnan(mine), torch.isnan(theirs))
    # Half of all neighbours of ties, of which there are many here.
    assert 0 < differ.sum() < 0.05 * len(values)
    equal = (mine == theirs).numpy()
    assert np.array_equal(*(np.signbit(one.numpy()[equal]) for one in (mine, theirs)))
    grid = edges(target)[0]
    ties = set(edges(target)[1].tolist())
    for value, one, two in itertools.islice(
        zip(values[differ], mine.numpy()[differ], theirs.numpy()[differ], strict=True), 4000
    ):
        assert float(np.float32(value)) in ties
        # What overflows stands for the number after the largest.
        ends = np.clip([one, two], grid[0], grid[-1])
        mine_off, theirs_off = (abs(Fraction(float(end)) - Fraction(value)) for end in ends)
        assert mine_off < theirs_off


def scaled_model(path: Path, config: Mapping[str, object], **tensors: torch.Tensor) -> Path:
    path.mkdir()
    named = {name.replace("__", "."): one.contiguous() for name, one in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def loaded_after_cast(path: Path, dtype: str) -> dict[str, torch.Tensor]:
    with Store.init(path.parent / "store") as store:
        store.add(path, name="scaled")
        store.cast("scaled", dtype=dtype, name="cast")
        store.checkout("cast", path.parent / "out")
    return load_file(path.parent / "out" / "model.safetensors")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("form", ["block", "row", "tensor"])
def test_scaled_weights_are_those_of_transformers(
    tmp_path: Path, form: str, scale: torch.dtype, dtype: str
) -> None:
    """A cast gives what transformers' own dequantization gives, bit for bit."""
    rows, columns = 384, 640
    shape = {"block": (3, 5), "row": (rows, 1), "tensor": (1, 1)}[form]
    generator = torch.Generator().manual_seed(3)
    scales = (torch.rand(shape, generator=generator) * 0.02 + 1e-4).to(scale)
    bits = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        weight = bits.view(kind)
        wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, getattr(torch, dtype))
        folder = tmp_path / str(kind)
        folder.mkdir()
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        path = scaled_model(folder / "model", config, a__weight=weight, a__weight_scale_inv=scales)
        found = loaded_after_cast(path, dtype)
        assert found.keys() == {"a.weight"}
        target = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
        raw = found["a.weight"].view(torch.uint8).numpy().reshape(-1)
        assert_same(raw, wanted.reshape(-1), target)
