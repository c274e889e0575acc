"""Checkpoints of a few blocks, made in a moment: for tests that add and merge hundreds of times."""

from __future__ import annotations

import random
from pathlib import Path

from checkpoints import size_of, write_safetensors

BLOCK = 1 << 16
"""The block size that the sizes below are made for."""


def small_model(directory: Path, seed: str, *, changed: str = "") -> Path:
    """A tensor of a block and a bit, a constant one, a small one, and a file that is no tensor.

    Equal seeds give equal bytes; `changed` makes another small tensor.  Returns `directory`.
    """
    draw = random.Random(seed)

    def floats(name: str, *shape: int) -> tuple[str, str, tuple[int, ...], bytes]:
        raw = bytearray(draw.randbytes(size_of("BF16", shape)))
        for high in range(1, len(raw), 2):
            # An exponent below 1: sums stay finite.
            raw[high] = 0x3E | raw[high] & 0x80
        return name, "BF16", shape, bytes(raw)

    tensors = [floats("a", 33, 1024), ("zeros", "BF16", (64, 16), bytes(2048))]
    draw = random.Random(seed + changed)
    tensors.append(floats("b", 40, 16))
    write_safetensors(directory / "model.safetensors", tensors, metadata={"format": "pt"})
    (directory / "config.json").write_text(f'{{"seed": "{seed}"}}\n')
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """Path -> bytes of every file below a directory."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}
