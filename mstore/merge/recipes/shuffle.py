"""Shuffles of layers: a recipe of a stack whose layers are drawn from several models.

This is what mergekit-layershuffle 0.1.5 makes.  Pure: the draws are hashes of the seed and of the
place, the same on every machine and in every version of Python.  mergekit's are those of Python's
generator, so a seed gives another shuffle there.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from blake3 import blake3

from mstore.merge.recipes.prepared import STACK
from mstore.merge.recipes.write import stacked
from mstore.terms.errors import BadRequest
from mstore.terms.sizes import counted

_MOST: Final = 10_000
"""Layers of a shuffle: some more, and no recipe could name them."""
_BITS: Final = 53


class Shuffled(NamedTuple):
    """A model whose layers are drawn, and how many it has."""

    name: str
    weight: float
    layers: int


def shuffled(models: Sequence[Shuffled], seed: int, *, full_random: bool) -> str:
    """Return the recipe of a shuffle; its other files are from the first model.

    The layer at each place is that of a model, drawn by weight. full_random: int(layers * weight)
    layers of each model instead, each drawn from all of its layers, in an order that is drawn.

    Raises BadRequest.
    """
    if not models:
        raise BadRequest("a shuffle needs one model at least")
    for one in models:
        if not (math.isfinite(one.weight) and one.weight >= 0):
            raise BadRequest("a weight is a number from 0", where=one.name)
    drawn = _anywhere(models, seed) if full_random else _in_place(models, seed)
    kind = "full random, " if full_random else ""
    lines = [
        f"# A shuffle of layers: {kind}seed {seed}.",
        f"merge_method: {STACK}",
        f"base_model: {json.dumps(models[0].name)}",
        *stacked(list(drawn)),
    ]
    return "\n".join(lines) + "\n"


def _in_place(models: Sequence[Shuffled], seed: int) -> Iterator[tuple[str, int]]:
    count = models[0].layers
    for one in models:
        if one.layers < count:
            raise BadRequest(
                f"it has {counted(one.layers, 'layer')}, and {models[0].name} has {count}: each "
                "layer keeps its place",
                where=one.name,
            )
    sums = list(accumulate(one.weight for one in models))
    if not sums[-1]:
        raise BadRequest("all weights are 0")
    for layer in range(count):
        share = _draw(seed, "model", layer) * sums[-1]
        yield models[bisect(sums, share, hi=len(sums) - 1)].name, layer


def _anywhere(models: Sequence[Shuffled], seed: int) -> Iterator[tuple[str, int]]:
    total = sum(one.layers * one.weight for one in models)
    if total > _MOST:
        raise BadRequest(f"a shuffle has at most {_MOST} layers, not {total:.0f}")
    owners = [one for one in models for _ in range(int(one.layers * one.weight))]
    if not owners:
        raise BadRequest("the weights give no model a layer: each has int(layers * weight)")
    order = sorted(range(len(owners)), key=lambda place: (_draw(seed, "order", place), place))
    for place in order:
        yield owners[place].name, int(_draw(seed, "layer", place) * owners[place].layers)


def _draw(seed: int, what: str, place: int) -> float:
    """Return a number from 0 to below 1."""
    digest = blake3(f"{what} {seed} {place}".encode()).digest(length=8)
    # As many bits as a float has, so that none rounds up to 1.
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / (1 << _BITS)
