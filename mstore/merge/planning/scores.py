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

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import numpy as np

from mstore.errors import BadRequest
from mstore.ids import TensorId
from mstore.merge.methods.method import Operation, Select
from mstore.phrases import Option

Score = Literal["norm", "trimmed", "conflict", "random"]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

SCORES: Final[tuple[Score, ...]] = get_args(Score)
"""Every score by name."""


def score_of(operation: Operation, asked: str | None) -> Score:
    """Return the score to rank by; `asked` None means the method's default.  Raises BadRequest."""
    method = operation.method
    if asked is None:
        return "trimmed" if operation.is_trimmed else "norm"
    score = next((name for name in SCORES if name == asked), None)
    if score is None:
        raise BadRequest(f"unknown score {asked!r}; scores: {', '.join(SCORES)}")
    if score == "trimmed" and operation.select not in (Select.TRIMMED, Select.BAND):
        raise BadRequest(f"{method.name} trims nothing to score by", hint=Option("score", "norm"))
    if score == "conflict" and not operation.is_elected:
        raise BadRequest(
            f"{method.name} elects no signs, so nothing conflicts in it",
            hint=Option("score", "norm"),
        )
    return score


def agreement(rows: Sequence[np.ndarray[Any, Any]], weights: Sequence[float]) -> Floats:
    """Estimate how much of each weighted delta the elected signs leave: float64[K, C].

    rows: CHUNK[C] per expert.  With rho the cosine of w_k d_k and sum_j w_j d_j, as their count
    sketches estimate it, (1 + rho) / 2: 1 for a delta with the sum's direction, 1/2 for an
    orthogonal one, 0 for its opposite. 1 where no direction is known.
    """
    directions = []
    for side, weight in zip(rows, weights, strict=True):
        exponents = side["sketch_exponent"].astype(np.int32)[:, None]
        directions.append(weight * np.ldexp(side["sketch"].astype(np.float64), exponents))
    consensus = np.zeros_like(directions[0])
    for direction in directions:
        consensus += direction
    heaviness = _inner(consensus, consensus)
    shares = []
    for direction in directions:
        norms = np.sqrt(_inner(direction, direction)) * np.sqrt(heaviness)
        # Below the smallest normal number a quotient would say nothing.
        known = norms > np.finfo(np.float64).tiny
        cosine = _inner(direction, consensus) / np.where(known, norms, 1.0)
        shares.append(np.where(known, np.clip((1.0 + cosine) / 2.0, 0.0, 1.0), 1.0))
    return np.array(shares)


def dilution(squares: Floats, kept: Floats) -> Floats:
    """Return the effect of leaving a unit out on heavier ones with a shared divisor: float64[K, C].

    squares, kept: float64[K, C], the squared norm of each sparsified delta and the share of
    elements that it keeps.  An operator that divides by the weights that agree takes the mean of a
    heavy and a light delta where both are kept and agree (half of those places, if signs are
    independent).  Without the light one, the heavy one stays whole, which is off by half of it, a
    quarter of its square.
    """
    finite = np.where(np.isfinite(squares), squares, 0.0)
    found = np.zeros_like(finite)
    for light, share in enumerate(kept):
        heavier = np.zeros_like(share)
        for other in finite:
            heavier = heavier + np.where(other > finite[light], other, 0.0)
        found[light] = share * heavier / 8.0
    return found


def _inner(a: Floats, b: Floats) -> Floats:
    products = a * b
    # Pairwise halving, as in `mstore.stats.chunk.inner`: one fixed order of additions.
    while products.shape[-1] > 1:
        half = products.shape[-1] // 2
        products = products[..., :half] + products[..., half:]
    found: Floats = products[..., 0]
    return found


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
