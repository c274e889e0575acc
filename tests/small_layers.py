"""A small model with layers, and fine-tunes of it, for tests of recipes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from families import Arrays, cast, write_checkpoint

LAYERS = 4
NAMES = (
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{part}.weight"
        for layer in range(LAYERS)
        for part in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    ),
    "model.norm.weight",
    "lm_head.weight",
)


def member(number: int) -> Arrays:
    """The base (0) or a fine-tune of it, the same each time."""
    rng = np.random.default_rng(number)
    own = {name: rng.standard_normal((24, 32), dtype=np.float32) for name in NAMES}
    if number:
        for name, value in member(0).items():
            own[name] = value.astype(np.float32) + own[name] / 16
    return {name: cast(value, "BF16") for name, value in own.items()}


def write(root: Path) -> Path:
    """Write ROOT/base, ROOT/math and ROOT/code."""
    for number, name in enumerate(("base", "math", "code")):
        write_checkpoint(root / name, member(number), note=name)
    return root
