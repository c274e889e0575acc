"""Scores: how the units of a plan are ranked, and the default score of each method.

    norm      the part of the output's norm that reading a unit brings, per stored byte
    trimmed   as `norm`, of the part of the delta above the trim threshold
    conflict  as `trimmed` (or `norm`), less where the unit points against the heavier consensus,
              and more where it shares the divisor of heavier ones (`normalize`)
    random    a hash of the ids: the baseline that any other score has to beat

A score only orders what is read.  The certified bound is computed from what is left out, for any
order.  Pure functions on numpy arrays; they use only operations that IEEE 754 rounds correctly, in
a fixed order, so that every machine makes the same plan.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np

from mstore.errors import BadRequest
from mstore.ids import TensorId
from mstore.merge.methods.method import Operation
from mstore.phrases import Option

Score = Literal["norm", "trimmed", "conflict", "random"]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

SCORES: Final[tuple[Score, ...]] = get_args(Score)
"""Every score by name."""


def score_of(operation: Operation, asked: str | None) -> Score:
    """Return the score to rank by; `asked` None means the method's default.  Raises BadRequest."""
    if asked is None:
        return operation.selection.score
    score = next((name for name in SCORES if name == asked), None)
    if score is None:
        raise BadRequest(f"unknown score {asked!r}; scores: {', '.join(SCORES)}")
    why = operation.unscored(score)
    if why is not None:
        raise BadRequest(f"{operation.method.name} {why}", hint=Option("score", "norm"))
    return score


def seed(base: TensorId, expert: TensorId) -> int:
    """Return the 64-bit seed of `lottery` for the chunks of one tensor of one expert."""
    return int.from_bytes(base[:8], "big") ^ int.from_bytes(expert[8:16], "big")


def lottery(seeds: np.ndarray[Any, np.dtype[np.uint64]], chunk: Ints) -> Floats:
    """Return a number in [0, 1) per unit, from its seed and its chunk (-1: the whole tensor).

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = seeds + (chunk + 2).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    drawn: Floats = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn
