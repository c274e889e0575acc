"""Tiny families for the tests of what survives: contents as `path -> bytes`, made from numbers.

`model_files` is a pure function: a test that knows the numbers knows every byte, and needs no
copy of what it stored.  A tuned model differs from its seed as a fine-tune does (low bits, some
blocks not at all), so that stored differences are worth their while.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import reference
from checkpoints import Tensor, safetensors_bytes

BLOCK = 1 << 16
"""The block size that the sizes below are made for."""

Files = dict[str, bytes]
FLOATS = {"a": (36, 1024), "b": (40, 16)}
INTEGERS = {"i": (18, 1024)}
MODEL = "model.safetensors"


@lru_cache(maxsize=16)
def _arrays(seed: int, tuned: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for name, shape in FLOATS.items():
        found[name] = draw.normal(0, 0.02, shape).astype("f4")
    for name, shape in INTEGERS.items():
        found[name] = draw.integers(-(1 << 30), 1 << 30, shape, dtype="i4")
    if tuned:
        draw = np.random.default_rng([seed, tuned])
        # The second block of `a` stays as it is.
        found["a"][:32] += draw.normal(0, 2e-4, (32, 1024)).astype("f4")
        found["b"] += draw.normal(0, 1e-2, FLOATS["b"]).astype("f4")
        found["i"] += draw.integers(-3, 4, INTEGERS["i"], dtype="i4")
    for name in FLOATS:
        found[name] = found[name].astype(ml_dtypes.bfloat16)
    return found


def _file(arrays: dict[str, np.ndarray]) -> bytes:
    kinds = dict.fromkeys(FLOATS, "BF16") | dict.fromkeys(INTEGERS, "I32")
    tensors: list[Tensor] = [
        (name, kinds[name], array.shape, array.tobytes()) for name, array in arrays.items()
    ]
    tensors.append(("zeros", "BF16", (64, 16), bytes(2048)))
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def model_files(seed: int, tuned: int = 0) -> Files:
    """A model of seven blocks and a configuration; `tuned` numbers the fine-tunes of a seed."""
    config = f'{{"seed": {seed}, "tuned": {tuned}}}\n'.encode()
    return {MODEL: _file(_arrays(seed, tuned)), "config.json": config}


def merged_files(base: Files, experts: list[Files], weights: list[float]) -> Files:
    """What task arithmetic makes of these, by the numpy reference: the base but for its floats."""
    whole = base[MODEL]
    arrays = tensors_in(whole)
    others = [tensors_in(expert[MODEL]) for expert in experts]
    for name in FLOATS:
        arrays[name] = reference.merge(
            "task_arithmetic",
            {},
            weights,
            arrays[name],
            [other[name] for other in others],
            tensor=name,
        )
    return base | {MODEL: _file(arrays)}


def tensors_in(file: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file that `model_files` or `merged_files` made."""
    start = 8 + int.from_bytes(file[:8], "little")
    found: dict[str, np.ndarray] = {}
    for name, shape in (FLOATS | INTEGERS).items():
        kind = np.dtype(ml_dtypes.bfloat16) if name in FLOATS else np.dtype("<i4")
        count = int(np.prod(shape))
        found[name] = np.frombuffer(file, kind, count, start).reshape(shape)
        start += count * kind.itemsize
    return found


def write_files(directory: Path, files: Files) -> Path:
    """Put files into a directory, which is made.  Returns it."""
    for path, contents in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(contents)
    return directory
