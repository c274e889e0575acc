"""Adapters for tests, in PEFT's form, and what they make of a base, computed a second time.

The reference holds whole products: numpy on float32, one product after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import reference
from checkpoints import write_safetensors

Array = npt.NDArray[Any]
Single = npt.NDArray[np.float32]
PREFIX = "base_model.model."


@dataclass
class Adapter:
    """Factors by module (up [rows, rank], down [rank, columns]), and modules trained whole."""

    factors: dict[str, tuple[Array, Array]]
    whole: dict[str, Array] = field(default_factory=dict)
    magnitudes: dict[str, Array] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Array]:
        """Its tensors, by the names that PEFT gives them."""
        found: dict[str, Array] = {}
        for module, (up, down) in self.factors.items():
            found[f"{PREFIX}{module}.lora_A.weight"] = down
            found[f"{PREFIX}{module}.lora_B.weight"] = up
        for module, values in self.magnitudes.items():
            found[f"{PREFIX}{module}.lora_magnitude_vector"] = values
        return found | {PREFIX + name: values for name, values in self.whole.items()}

    def config(self) -> dict[str, Any]:
        """Its adapter_config.json."""
        ranks = {up.shape[1] for up, _ in self.factors.values()} or {8}
        return {"peft_type": "LORA", "r": max(ranks), "lora_alpha": 16, **self.settings}

    def write(self, path: Path) -> Path:
        """Write the directory."""
        write(path, self.tensors(), {"adapter_config.json": self.config()}, "adapter_model")
        return path

    def applied(self, base: Mapping[str, Array]) -> dict[str, Array]:
        """What it makes of a base: float32 where it has a product, else the tensor itself."""
        config = self.config()
        scale = config["lora_alpha"] / config["r"]
        found = {**base, **self.whole}
        for module, (up, down) in self.factors.items():
            name = f"{module}.weight"
            values = added(base[name], up, down, scale)
            if module in self.magnitudes:
                norms = np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))
                factor = self.magnitudes[module].reshape(-1) / norms.astype(np.float32)
                values = factor[:, None] * values
            found[name] = values
        return found


def added(base: Array, up: Array, down: Array, scale: float) -> Single:
    """base + scale * (up @ down), each sum in order of rank."""
    one, other = reference.single(up), reference.single(down)
    total = np.zeros(base.shape, dtype=np.float32)
    for r in range(one.shape[1]):
        total += one[:, r : r + 1] * other[r]
    values: Single = reference.single(base) + np.float32(scale) * total
    return values


def write(path: Path, tensors: Mapping[str, Array], files: Mapping[str, Any], stem: str) -> None:
    """Write a checkpoint: tensors, and JSON files."""
    path.mkdir(parents=True)
    write_safetensors(
        path / f"{stem}.safetensors",
        [
            (name, reference.name_of(value), value.shape, np.ascontiguousarray(value).tobytes())
            for name, value in tensors.items()
        ],
    )
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
