"""Generated families of checkpoints: a small Llama in name, with tensors of awkward content.

Owns the tensors and how they are written.  Names and config.json are those of a real model, so
that mergekit takes the directories for checkpoints; shapes are chosen for blocks of 64 KiB: some
tensors of several blocks, a whole number of them and not, some smaller than one.  No NaN and no
infinity: what becomes of those is in docs/merge-methods.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 1 << 16
"""The block size that the shapes are made for."""

Head = Literal["own", "tied", "none"]
Tensors = dict[str, Tensor]

EXPERTS = 6
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Family:
    """A base and experts on disk.  Members are called `base`, `e0`, `e1`, ..."""

    directory: Path
    dtype: str
    members: dict[str, Tensors]

    @property
    def base(self) -> Tensors:
        return self.members["base"]

    def expert(self, k: int) -> Tensors:
        return self.members[f"e{k}"]

    def path(self, member: str) -> Path:
        return self.directory / member


class _Maker:
    """Draws a base tensor and its experts, one kind of content a method."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def _normal(self, shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=self._generator) * scale

    def _moved(self, base: Tensor, delta: Tensor) -> Tensor:
        return (base.float() + delta).to(self._dtype)

    def noise(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Every expert changes everything, each by another scale."""
        base = self._normal(shape, 0.05).to(self._dtype)
        return [
            base,
            *(self._moved(base, self._normal(shape, 0.02 / (k + 1))) for k in range(EXPERTS)),
        ]

    def rows(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Expert k changes every row whose number is k modulo 8, so some nobody changes."""
        base = self._normal(shape, 1.0).to(self._dtype)
        experts = []
        for k in range(EXPERTS):
            delta = torch.zeros(shape)
            delta[k::8] = self._normal(tuple(delta[k::8].shape), 0.1)
            experts.append(self._moved(base, delta))
        return [base, *experts]

    def same(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Nobody changes anything."""
        base = self._normal(shape, 0.3).to(self._dtype)
        return [base, *(base.clone() for _ in range(EXPERTS))]

    def shared(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Experts 1 and 2 are equal, 0 is the base."""
        base, *experts = self.noise(shape)
        return [base, base.clone(), experts[1], experts[1].clone(), *experts[3:]]

    def grid(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Steps of 1/8: deltas tie everywhere, and many sums are zero."""

        def steps(most: int) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=self._generator) / 8

        base = steps(16).to(self._dtype)
        return [base, *(self._moved(base, steps(2)) for _ in range(EXPERTS))]

    def constant(self, shape: tuple[int, ...]) -> list[Tensor]:
        """One value everywhere, another one in each expert; expert 3 has the base's."""
        base = torch.full(shape, 0.3, dtype=self._dtype)
        return [
            base,
            *(self._moved(base, torch.full(shape, 0.07 * (3 - k))) for k in range(EXPERTS)),
        ]

    def zeros(self, shape: tuple[int, ...]) -> list[Tensor]:
        """A base of zeros: what an expert has is its delta, and what is kept can be counted."""
        base = torch.zeros(shape, dtype=self._dtype)
        return [base, *(self._normal(shape, 0.1).to(self._dtype) for _ in range(EXPERTS))]

    def signs(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Zeros of both signs, the least subnormals, and experts that turn the base around."""
        least = torch.finfo(self._dtype).smallest_normal / 8
        values = torch.tensor([0.0, -0.0, least, -least, 1.0, -1.0, 2.5], dtype=self._dtype)

        def choice() -> Tensor:
            return values[torch.randint(0, len(values), shape, generator=self._generator)]

        base = choice()
        return [base, -base, *(choice() for _ in range(EXPERTS - 1))]

    def large(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Near the largest fp16: sums overflow to infinity where the output is one."""
        base = self._normal(shape, 2e4).clamp(-6e4, 6e4).to(self._dtype)
        return [
            base,
            *(self._normal(shape, 2e4).clamp(-6e4, 6e4).to(self._dtype) for _ in range(EXPERTS)),
        ]


_Kind = Callable[[_Maker, tuple[int, ...]], list[Tensor]]
_FIRST = "model.layers.0."
_SECOND = "model.layers.1."

_LAYOUT: dict[str, tuple[_Kind, tuple[int, ...]]] = {
    EMBEDDING: (_Maker.noise, (700, 150)),  # more than three blocks, not a multiple
    HEAD: (_Maker.rows, (700, 150)),
    "model.norm.weight": (_Maker.noise, (37,)),
    _FIRST + "input_layernorm.weight": (_Maker.constant, (64,)),
    _FIRST + "post_attention_layernorm.weight": (_Maker.grid, (65,)),
    _FIRST + "self_attn.q_proj.weight": (_Maker.noise, (256, 128)),  # one block of 16-bit elements
    _FIRST + "self_attn.k_proj.weight": (_Maker.same, (256, 256)),
    _FIRST + "self_attn.v_proj.weight": (_Maker.constant, (128, 300)),
    _FIRST + "self_attn.o_proj.weight": (_Maker.rows, (256, 256)),
    _FIRST + "mlp.up_proj.weight": (_Maker.grid, (300, 256)),
    _FIRST + "mlp.gate_proj.weight": (_Maker.shared, (100, 1000)),
    _FIRST + "mlp.down_proj.weight": (_Maker.noise, (98305,)),  # one element more than the blocks
    _SECOND + "input_layernorm.weight": (_Maker.noise, (1,)),
    _SECOND + "post_attention_layernorm.weight": (_Maker.same, (3,)),
    _SECOND + "self_attn.q_proj.weight": (_Maker.zeros, (251, 331)),
    _SECOND + "self_attn.k_proj.weight": (_Maker.signs, (211, 199)),
    _SECOND + "self_attn.v_proj.weight": (_Maker.large, (97, 101)),
    _SECOND + "self_attn.o_proj.weight": (_Maker.zeros, (7, 11)),
    _SECOND + "mlp.up_proj.weight": (_Maker.noise, (2, 3, 5)),
    _SECOND + "mlp.gate_proj.weight": (_Maker.grid, (127,)),
    _SECOND + "mlp.down_proj.weight": (_Maker.signs, (31,)),
}

ZERO_BASED = (_SECOND + "self_attn.q_proj.weight", _SECOND + "self_attn.o_proj.weight")
"""Tensors whose base is zero."""


def generate(directory: Path, dtype: str, head: Head, seed: int) -> Family:
    """Make a family and write it; `head` as in `write`."""
    maker = _Maker(DTYPES[dtype], seed)
    names = ["base", *(f"e{k}" for k in range(EXPERTS))]
    members: dict[str, Tensors] = {name: {} for name in names}
    for tensor, (kind, shape) in _LAYOUT.items():
        for name, content in zip(names, kind(maker, shape), strict=True):
            members[name][tensor] = content.contiguous()
    return write(directory, dtype, head, members)


def write(
    directory: Path, dtype: str, head: Head, members: dict[str, Tensors], *, layers: int = 2
) -> Family:
    """Write members as checkpoints of a Llama.

    `head`: lm_head has a content of its own, the embedding's (stored under both names), or is not
    there at all, as transformers writes a tied model.
    """
    for tensors in members.values():
        if head == "tied":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        elif head == "none":
            del tensors[HEAD]
    family = Family(directory, dtype, members)
    for name, tensors in members.items():
        family.path(name).mkdir(parents=True)
        save_file(tensors, family.path(name) / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": layers,
            "vocab_size": 700,
            "tie_word_embeddings": head != "own",
            "torch_dtype": dtype,
        }
        (family.path(name) / "config.json").write_text(json.dumps(config))
    return family
