"""Small models of each architecture whose neurons can be matched, and planted permutations.

Written with numpy alone, tensor by tensor, and not by the table that the library has of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
VOCABULARY = 60


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    layers: int = 2
    width: int = 4
    keys: int = 2
    group: int = 2
    neurons: int = 14
    tied: bool = False

    @property
    def heads(self) -> int:
        return self.keys * self.group

    @property
    def hidden(self) -> int:
        return self.heads * self.width


Draw = Callable[..., Array]


def _llama(shape: Shape, draw: Draw, *, biases: bool, norms: bool) -> dict[str, Array]:
    d, n, q, k = shape.hidden, shape.neurons, shape.hidden, shape.keys * shape.width
    found = {"model.embed_tokens.weight": draw(VOCABULARY, d), "model.norm.weight": draw(d)}
    if not shape.tied:
        found["lm_head.weight"] = draw(VOCABULARY, d)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": draw(d),
            f"{at}post_attention_layernorm.weight": draw(d),
            f"{at}self_attn.q_proj.weight": draw(q, d),
            f"{at}self_attn.k_proj.weight": draw(k, d),
            f"{at}self_attn.v_proj.weight": draw(k, d),
            f"{at}self_attn.o_proj.weight": draw(d, q),
            f"{at}mlp.gate_proj.weight": draw(n, d),
            f"{at}mlp.up_proj.weight": draw(n, d),
            f"{at}mlp.down_proj.weight": draw(d, n),
        }
        if biases:
            sizes = {"q": q, "k": k, "v": k}
            found |= {f"{at}self_attn.{part}_proj.bias": draw(n) for part, n in sizes.items()}
        if norms:
            found |= {f"{at}self_attn.{p}_norm.weight": draw(shape.width) for p in "qk"}
    return found


def _gpt2(shape: Shape, draw: Draw) -> dict[str, Array]:
    d, n = shape.hidden, shape.neurons
    found = {"wte.weight": draw(VOCABULARY, d), "wpe.weight": draw(9, d)}
    found |= {"ln_f.weight": draw(d), "ln_f.bias": draw(d)}
    for layer in range(shape.layers):
        at = f"h.{layer}."
        found |= {
            **{f"{at}ln_{i}.{part}": draw(d) for i in (1, 2) for part in ("weight", "bias")},
            f"{at}attn.c_attn.weight": draw(d, 3 * d),
            f"{at}attn.c_attn.bias": draw(3 * d),
            f"{at}attn.c_proj.weight": draw(d, d),
            f"{at}attn.c_proj.bias": draw(d),
            f"{at}attn.bias": draw(1, 1, 9, 9),
            f"{at}mlp.c_fc.weight": draw(d, n),
            f"{at}mlp.c_fc.bias": draw(n),
            f"{at}mlp.c_proj.weight": draw(n, d),
            f"{at}mlp.c_proj.bias": draw(d),
        }
    return found


def _vit(shape: Shape, draw: Draw) -> dict[str, Array]:
    d, n = shape.hidden, shape.neurons
    found = {
        "vit.embeddings.cls_token": draw(1, 1, d),
        "vit.embeddings.position_embeddings": draw(1, 5, d),
        "vit.embeddings.patch_embeddings.projection.weight": draw(d, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": draw(d),
        "vit.layernorm.weight": draw(d),
        "vit.layernorm.bias": draw(d),
        "classifier.weight": draw(3, d),
        "classifier.bias": draw(3),
    }
    for layer in range(shape.layers):
        at = f"vit.encoder.layer.{layer}."
        parts = {f"attention.attention.{part}": (d, d) for part in ("query", "key", "value")}
        parts |= {"attention.output.dense": (d, d), "intermediate.dense": (n, d)}
        parts |= {"output.dense": (d, n)}
        for part, (rows, columns) in parts.items():
            found[f"{at}{part}.weight"] = draw(rows, columns)
            found[f"{at}{part}.bias"] = draw(rows)
        for part in ("layernorm_before", "layernorm_after"):
            found |= {f"{at}{part}.{kind}": draw(d) for kind in ("weight", "bias")}
    return found


ARCHITECTURES: Mapping[str, Callable[[Shape, Draw], dict[str, Array]]] = {
    "llama": lambda shape, draw: _llama(shape, draw, biases=False, norms=False),
    "mistral": lambda shape, draw: _llama(shape, draw, biases=False, norms=False),
    "qwen2": lambda shape, draw: _llama(shape, draw, biases=True, norms=False),
    "qwen3": lambda shape, draw: _llama(shape, draw, biases=False, norms=True),
    "gpt2": _gpt2,
    "vit": _vit,
}


def shape_for(kind: str, **sizes: Any) -> Shape:
    """A shape that the architecture can have."""
    shape = Shape(**sizes)
    if kind in ("gpt2", "vit"):
        return Shape(**{**sizes, "keys": shape.heads, "group": 1})
    return shape


def tensors_for(kind: str, shape: Shape, dtype: str, seed: int) -> dict[str, Array]:
    """Random tensors of a model."""
    rng = np.random.default_rng(seed)

    def draw(*sizes: int) -> Array:
        return rng.standard_normal(sizes).astype(DTYPES[dtype])

    return ARCHITECTURES[kind](shape, draw)


def config_for(kind: str, shape: Shape) -> dict[str, Any]:
    if kind == "gpt2":
        return {"model_type": kind, "n_head": shape.heads, "n_embd": shape.hidden}
    return {
        "model_type": kind,
        "num_attention_heads": shape.heads,
        **({} if kind == "vit" else {"num_key_value_heads": shape.keys}),
        "hidden_size": shape.hidden,
        "tie_word_embeddings": shape.tied,
    }


def write(directory: Path, kind: str, shape: Shape, tensors: Mapping[str, Array]) -> Path:
    """Write a model, and return its directory."""
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_for(kind, shape)))
    return directory


@dataclass
class Planted:
    """A permutation of everything, drawn from a seed, and what it makes of a model."""

    kind: str
    shape: Shape
    seed: int
    parts: frozenset[str] = frozenset({"residual", "neurons", "heads", "signs"})
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def _order(self, part: str, size: int) -> Array:
        return self.rng.permutation(size) if part in self.parts else np.arange(size)

    def _signs(self, part: str, size: int) -> Array:
        wanted = part in self.parts and "signs" in self.parts
        return self.rng.choice([-1, 1], size) if wanted else np.ones(size, np.int64)

    def of(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        self.rng = np.random.default_rng(self.seed)
        found = {"gpt2": self._of_gpt2, "vit": self._of_vit}.get(self.kind, self._of_llama)(
            {name: one.copy() for name, one in tensors.items()}
        )
        return {name: np.ascontiguousarray(one) for name, one in found.items()}

    def _heads(self) -> tuple[Array, Array]:
        """The dimensions of all query heads, and of all key heads."""
        shape = self.shape
        groups = self._order("heads", shape.keys)
        heads = np.concatenate(
            [one * shape.group + self._order("heads", shape.group) for one in groups]
        )
        width = np.arange(shape.width)
        queries, keys = ((one[:, None] * shape.width + width).ravel() for one in (heads, groups))
        return queries, keys

    def _of_llama(self, t: dict[str, Array]) -> dict[str, Array]:
        d = self.shape.hidden
        p, s = self._order("residual", d), self._signs("residual", d)
        s = s.astype(t["model.norm.weight"].dtype)
        for name, one in t.items():
            if name.endswith("norm.weight") and "self_attn" not in name:
                t[name] = one[p]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                t[name] = one[p] * s[:, None]
            elif one.ndim == 2:
                t[name] = one[:, p] * s
        for layer in range(self.shape.layers):
            queries, keys = self._heads()
            at = f"model.layers.{layer}.self_attn."
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                for kind in ("weight", "bias"):
                    if f"{at}{part}_proj.{kind}" in t:
                        t[f"{at}{part}_proj.{kind}"] = t[f"{at}{part}_proj.{kind}"][rows]
            t[f"{at}o_proj.weight"] = t[f"{at}o_proj.weight"][:, queries]
            at = f"model.layers.{layer}.mlp."
            n = self.shape.neurons
            p = self._order("neurons", n)
            t[f"{at}gate_proj.weight"] = t[f"{at}gate_proj.weight"][p]
            t[f"{at}up_proj.weight"] = t[f"{at}up_proj.weight"][p]
            t[f"{at}down_proj.weight"] = t[f"{at}down_proj.weight"][:, p]
        return t

    def _of_gpt2(self, t: dict[str, Array]) -> dict[str, Array]:
        d = self.shape.hidden
        p = self._order("residual", d)
        stream = ("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")
        for name in t:
            if name.endswith(stream) or "ln_" in name:
                t[name] = t[name][..., p]
            elif name.endswith(("c_attn.weight", "c_fc.weight")):
                t[name] = t[name][p]
        for layer in range(self.shape.layers):
            at = f"h.{layer}."
            heads, _ = self._heads()
            for kind in ("weight", "bias"):
                name = f"{at}attn.c_attn.{kind}"
                t[name] = np.concatenate(
                    [one[..., heads] for one in np.split(t[name], 3, axis=-1)], axis=-1
                )
            t[f"{at}attn.c_proj.weight"] = t[f"{at}attn.c_proj.weight"][heads]
            p = self._order("neurons", self.shape.neurons)
            for kind in ("weight", "bias"):
                t[f"{at}mlp.c_fc.{kind}"] = t[f"{at}mlp.c_fc.{kind}"][..., p]
            t[f"{at}mlp.c_proj.weight"] = t[f"{at}mlp.c_proj.weight"][p]
        return t

    def _of_vit(self, t: dict[str, Array]) -> dict[str, Array]:
        p = self._order("residual", self.shape.hidden)
        for name in t:
            if name == "classifier.bias":
                continue
            if "projection" in name or "output.dense" in name:
                t[name] = t[name][p]
            elif "layernorm" in name or name.endswith(("cls_token", "position_embeddings")):
                t[name] = t[name][..., p]
            elif name.endswith("weight"):
                t[name] = t[name][:, p]
        for layer in range(self.shape.layers):
            at = f"vit.encoder.layer.{layer}."
            heads, _ = self._heads()
            neurons = self._order("neurons", self.shape.neurons)
            rows = {f"attention.attention.{one}": heads for one in ("query", "key", "value")}
            for part, order in {**rows, "intermediate.dense": neurons}.items():
                for kind in ("weight", "bias"):
                    t[f"{at}{part}.{kind}"] = t[f"{at}{part}.{kind}"][order]
            for part, order in {"attention.output.dense": heads, "output.dense": neurons}.items():
                t[f"{at}{part}.weight"] = t[f"{at}{part}.weight"][:, order]
        return t
