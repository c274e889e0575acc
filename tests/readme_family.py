"""The three checkpoints that the README's transcript works on, small and always the same."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

SHAPES = {
    "model.embed_tokens.weight": (4096, 512),
    "model.layers.0.mlp.up_proj.weight": (2048, 512),
    "model.layers.1.mlp.up_proj.weight": (2048, 512),
    "model.norm.weight": (512,),
    "lm_head.weight": (4096, 512),
}
# Which tensors a fine-tune changed, and how far: some layers far, others little.
CHANGES = {
    "code": {
        "model.embed_tokens.weight": 1e-4,
        "model.layers.0.mlp.up_proj.weight": 4e-3,
        "lm_head.weight": 1e-4,
    },
    "math": {"model.layers.1.mlp.up_proj.weight": 4e-3, "lm_head.weight": 1e-4},
}


def write(root: Path) -> None:
    """llama/, code/ and math/ below `root`: the base and two fine-tunes of it."""
    rng = np.random.default_rng(1)
    base = {name: rng.standard_normal(shape) * 0.02 for name, shape in SHAPES.items()}
    _save(root / "llama", base)
    for name, changes in CHANGES.items():
        tensors = {
            tensor: values + rng.standard_normal(values.shape) * changes.get(tensor, 0.0)
            for tensor, values in base.items()
        }
        _save(root / name, tensors)


def _save(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir()
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
