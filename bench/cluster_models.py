"""The slices of large models: shapes of public configurations, cut by the library's own `Cutter`.

Of the weights there is nothing here. What a budget chooses is drawn: each block of each expert
with the probability of the budget, times a factor for its tensor and expert (`SPREAD`), since
planners prefer whole tensors that moved far. A block of the output that no expert takes part in is
the base's own and is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
from cluster_events import BLOCK, Rates, Work

from mstore.merge.running.engine import _LEAST_SLICE, _SLICES_EACH
from mstore.merge.running.runners import Cutter
from mstore.merge.running.slices import SLICE_BYTES, Slice
from mstore.merge.running.workplace import Workplace

SPREAD: Final = 0.5
"""Deviation of the logarithm of a tensor's factor."""
REQUEST_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of a public configuration of Llama 3."""

    hidden: int
    layers: int
    heads_kv: int
    inner: int
    vocabulary: int = 128256
    head: int = 128

    def tensors(self) -> Iterator[tuple[str, int]]:
        """Names and elements of the tensors, in file order."""
        hidden, keys = self.hidden, self.heads_kv * self.head
        yield "embed_tokens", self.vocabulary * hidden
        for layer in range(self.layers):
            for name, elements in (
                ("input_layernorm", hidden),
                ("down_proj", hidden * self.inner),
                ("gate_proj", hidden * self.inner),
                ("up_proj", hidden * self.inner),
                ("post_attention_layernorm", hidden),
                ("k_proj", hidden * keys),
                ("o_proj", hidden * hidden),
                ("q_proj", hidden * hidden),
                ("v_proj", hidden * keys),
            ):
                yield f"{layer}.{name}", elements
        yield "norm", hidden
        yield "lm_head", self.vocabulary * hidden


MODELS: Final = {
    "8 B": Dimensions(4096, 32, 8, 14336),
    "70 B": Dimensions(8192, 80, 8, 28672),
    "405 B": Dimensions(16384, 126, 8, 53248),
}


class _Row(NamedTuple):
    dtype: str = "BF16"


class _Chunk(NamedTuple):
    """A chunk as the cutter looks at it: of bf16, with so many experts that are read."""

    number: int
    out_bytes: int
    rows: tuple[_Row, ...] = ()
    base: _Row = _Row()

    @property
    def n(self) -> int:
        """Elements."""
        return self.out_bytes // 2


_ROWS: Final = (_Row(),) * 64


class _Tensor(NamedTuple):
    name: str
    limited: bool


class _Run(NamedTuple):
    tensor: _Tensor
    chunks: tuple[_Chunk, ...]
    keys: tuple[bytes, ...]


class Drawn(NamedTuple):
    """A tensor: bytes of each block of its output, and how many experts take part in each.

    out_bytes: of all of it, also of blocks that are the base's own.
    """

    name: str
    lengths: Sequence[int]
    reads: Sequence[int]
    out_bytes: int


def drawn(dimensions: Dimensions, experts: int, budget: float, seed: int = 0) -> list[Drawn]:
    """What a plan takes of each tensor; blocks that are the base's own are left out."""
    rng = np.random.default_rng(seed)
    found = []
    for name, elements in dimensions.tensors():
        size = 2 * elements
        lengths = np.full(-(-size // BLOCK), BLOCK)
        lengths[-1] = size - BLOCK * (len(lengths) - 1)
        if budget >= 1:
            reads = np.full(len(lengths), experts)
        else:
            factors = rng.lognormal(-(SPREAD**2) / 2, SPREAD, experts)
            shares = np.minimum(1.0, budget * factors)
            reads = (rng.random((len(lengths), experts)) < shares).sum(axis=1)
        taken = reads > 0
        if taken.any():
            found.append(Drawn(name, lengths[taken].tolist(), reads[taken].tolist(), size))
    return found


def slice_bytes(base_bytes: int, workers: int) -> int:
    """Plain bytes of output of a slice, as `run_plan` has it for so many workers."""
    return min(SLICE_BYTES, max(base_bytes // (_SLICES_EACH * workers), _LEAST_SLICE))


def works(
    tensors: Sequence[Drawn],
    rates: Rates,
    *,
    budget: float,
    base_bytes: int,
    workers: int = 1,
    is_limited: bool = True,
) -> list[Work]:
    """The slices as `run_plan` has them cut for so many workers, in the order of their making.

    base_bytes: plain, of the whole model. is_limited: tie quotas end within the tensors.
    """
    read = sum(length * count for one in tensors for length, count in _each(one))
    size = slice_bytes(base_bytes, workers)
    first = Slice(0, cast("Workplace", None), BLOCK, None, cast("Any", None), ())
    cutter = Cutter(first, size, 2 + read / base_bytes)
    by_name = {one.name: one for one in tensors}
    if is_limited:
        # As `WorkList` orders them.
        large = [one for one in tensors if one.out_bytes > size]
        rest = [one for one in tensors if one.out_bytes <= size]
        tensors = [*sorted(large, key=lambda one: -one.out_bytes), *rest]

    def cut() -> Iterator[Slice]:
        for one in tensors:
            chunks = tuple(
                _Chunk(number, length, _ROWS[:count])
                for number, (length, count) in enumerate(_each(one))
            )
            run = _Run(_Tensor(one.name, is_limited), chunks, (b"",) * len(chunks))
            yield from cutter.add(cast("Any", run))
        yield from cutter.rest()

    return [_work(one, by_name, rates, budget) for one in cut()]


def _each(one: Drawn) -> Iterator[tuple[int, int]]:
    return zip(one.lengths, one.reads, strict=True)


def _work(one: Slice, by_name: dict[str, Drawn], rates: Rates, budget: float) -> Work:
    blocks = reads = 0.0
    for run in one.runs:
        tensor = by_name[run.tensor.name]
        for chunk in run.chunks:
            size = chunk.out_bytes / BLOCK
            blocks += size
            reads += size * tensor.reads[chunk.number]
    return worked(blocks, reads, rates, budget)


def worked(blocks: float, reads: float, rates: Rates, budget: float) -> Work:
    """A slice: what of an expert is adjacent at rest comes in one request, up to 2 MiB."""
    size = BLOCK * (blocks * rates.base_share + reads * rates.delta_share)
    requests = math.ceil(size / REQUEST_BYTES + reads * (1 - min(1.0, budget)))
    return Work(blocks, reads, requests)
