"""Stores whose pages are looked at: families with the names of real models, and tiny tensors.

Owns the names of the tensors of a model (`tensors`), and how a family with a merge of it is made
(`family`).  All numbers are drawn from one generator with a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from checkpoints import write_safetensors

from mstore import MergeRequest, Store

PARTS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
BLOCK = 1 << 16
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'"


def tensors(layers: int, experts: int = 0) -> Iterator[str]:
    """The names of a model's tensors; experts: of a mixture, in each layer."""
    yield "model.embed_tokens.weight"
    for layer in range(layers):
        for part in PARTS:
            if experts and part.startswith("mlp."):
                for one in range(experts):
                    yield f"model.layers.{layer}.mlp.experts.{one}.{part[4:]}"
            else:
                yield f"model.layers.{layer}.{part}"
    yield "model.norm.weight"
    yield "lm_head.weight"


def family(
    path: Path,
    layers: int,
    names: tuple[str, ...],
    *,
    experts: int = 0,
    size: int = 24,
    method: str = "task_arithmetic",
    budget: str | None = "50%",
    title: str = "model",
    extra: tuple[str, ...] = (),
    licence: str = "mit",
) -> Store:
    """Return a store with TITLE/base, an expert of each name, and their merge TITLE/merged.

    extra: names of more tensors. licence: what the cards of experts state.
    """
    rng = np.random.default_rng(7)
    store = Store.init(path / "store", block_size=BLOCK)
    base = {
        name: rng.standard_normal((size, size)).astype("f4")
        for name in (*tensors(layers, experts), *extra)
    }
    _add(store, path / "base", base, f"{title}/base", "apache-2.0")
    for number, name in enumerate(names):
        # Each expert has a centre of its own in depth, and parts that it leaves alone.
        centre = layers * (number + 0.5) / len(names)
        own = {}
        for at, (tensor, values) in enumerate(base.items()):
            depth = at / len(base) * layers
            strength = 0.02 * np.exp(-(((depth - centre) / (layers / 3 + 1)) ** 2))
            alone = (at + number) % 7 == 0 or tensor.endswith("layernorm.weight")
            noise = rng.standard_normal(values.shape).astype("f4")
            own[tensor] = values if alone else values + np.float32(strength) * noise
        directory = path / f"expert-{number}"
        _add(store, directory, own, f"{title}/{name}", licence, base=f"{title}/base")
    request = MergeRequest(
        base=f"{title}/base",
        experts={
            f"{title}/{name}": 0.6 - 0.3 * number / len(names) for number, name in enumerate(names)
        },
        method=method,
        budget=budget,
    )
    store.merge(store.plan(request), name=f"{title}/merged", message="all of them")
    return store


def _add(
    store: Store,
    directory: Path,
    arrays: dict[str, np.ndarray],
    name: str,
    licence: str,
    base: str | None = None,
) -> None:
    directory.mkdir()
    write_safetensors(
        directory / "model.safetensors",
        [(key, "F32", one.shape, one.tobytes()) for key, one in arrays.items()],
    )
    (directory / "README.md").write_text(f"---\nlicense: {licence}\n---\n# {name}\n")
    store.add(directory, name=name, base=base)
