"""Weighted sums of models: sums of such sums are one, whose weights are products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def weighed(parts: Iterable[tuple[Mapping[T, float], float]]) -> dict[T, float]:
    """Return a sum of sums, each times its weight; what has a weight of 0 stays in it."""
    total: dict[T, float] = {}
    for own, weight in parts:
        for model, share in own.items():
            total[model] = total.get(model, 0.0) + share * weight
    return total
