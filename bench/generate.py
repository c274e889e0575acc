"""A generated family of Llama-shaped checkpoints in bfloat16, for timing (not for quality).

    python bench/generate.py OUT [--millions 300] [--experts 4] [--frozen 0.0]

Weights are normal with deviation 0.02; an expert adds normal noise of deviation 1e-3 to the share
of layers that is not frozen.  The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN = 1024
FEED_FORWARD = 2816
VOCABULARY = 32000
LAYER_PARAMETERS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
SHARDS = 3


def shapes(millions: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model of about this many million parameters."""
    layers = max(1, round((millions * 1e6 - 2 * VOCABULARY * HIDDEN) / LAYER_PARAMETERS))
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_model(directory: Path, millions: float, expert: int | None, frozen: float) -> None:
    """One checkpoint: the base (expert None) or an expert of it, in three shards."""
    directory.mkdir(parents=True)
    names = list(shapes(millions))
    chosen = np.random.default_rng(1000 if expert is None else 2000 + expert)
    weight_map = {}
    total = 0
    for shard in range(SHARDS):
        tensors = {}
        for number, (name, shape) in list(enumerate(names))[shard::SHARDS]:
            rng = np.random.default_rng(number)
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            values = values.astype(ml_dtypes.bfloat16)
            if expert is not None and chosen.random() >= frozen:
                noise = np.random.default_rng((number, expert + 1))
                delta = noise.standard_normal(shape, dtype=np.float32) * np.float32(1e-3)
                values = (values.astype(np.float32) + delta).astype(ml_dtypes.bfloat16)
            tensors[name] = values
            total += values.nbytes
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def write_family(out: Path, millions: float, experts: int, frozen: float) -> None:
    """base and expert0, expert1, ... below `out`; what is there already is kept."""
    for expert in [None, *range(experts)]:
        directory = out / ("base" if expert is None else f"expert{expert}")
        if not (directory / "config.json").exists():
            write_model(directory, millions, expert, frozen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--millions", type=float, default=300.0)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--frozen", type=float, default=0.0, help="share of tensors not trained")
    arguments = parser.parse_args()
    write_family(arguments.out, arguments.millions, arguments.experts, arguments.frozen)


if __name__ == "__main__":
    main()
