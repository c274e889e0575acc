"""Fishers in planning: experts that are read together with their diagonal Fishers.

An expert and its Fisher are one decision: both are read, or neither.  So the grid has one row for
both, and a plan two.  Owns what the grid knows of Fishers, what a pair costs, and how a pair's
states become those of the two.  Pure; arrays are [K, C]: experts by chunks.

Experts that share the blocks of one half share that read, so they are one decision, too: the first
of them leads, as for experts that share all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mstore.objects.plan import BELOW, EQUAL, READ, SHARED

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
States = np.ndarray[Any, np.dtype[np.uint8]]


class Fisher(msgspec.Struct, frozen=True):
    """The Fisher of one expert's tensor, by chunk.

    twin: int64[chunks], the first expert whose Fisher has the same blocks there. cost: int64
    [chunks], stored bytes. sums, squares: float64[chunks], of its elements; None if they are not
    known. item_size: bytes of an element. is_there: False if the Fisher lacks the tensor: its
    expert then takes no part in it. model_twin: the first expert that differs from the base there
    and whose own blocks are the same.
    """

    twin: Counts
    cost: Counts
    sums: Floats | None
    squares: Floats | None
    item_size: int
    is_there: bool
    model_twin: Counts


class FisherGrid(msgspec.Struct, frozen=True):
    """The Fishers of a grid's experts, [K, C] each; see `Fisher`.  Sums are NaN if not known."""

    twin: Counts
    cost: Counts
    sums: Floats
    squares: Floats
    item_size: Counts
    is_there: Bools
    model_twin: Counts

    @classmethod
    def of(cls, sides: Sequence[Sequence[Fisher]]) -> FisherGrid:
        """Build from the Fishers of each expert, tensor by tensor."""

        def joined(name: str, dtype: Any) -> Any:
            return np.array(
                [
                    np.concatenate([np.zeros(0, dtype), *(_row(one, name) for one in side)])
                    for side in sides
                ],
                dtype=dtype,
            )

        return cls(
            joined("twin", np.int64),
            joined("cost", np.int64),
            joined("sums", np.float64),
            joined("squares", np.float64),
            joined("item_size", np.int64),
            joined("is_there", bool),
            joined("model_twin", np.int64),
        )

    def part(self, own: Bools) -> FisherGrid:
        """Return some of the columns."""
        return FisherGrid(*(getattr(self, name)[:, own] for name in self.__struct_fields__))

    def costs(
        self, equal: Bools, cost: Counts, plain: Floats, elements: Floats, leaders: Counts
    ) -> tuple[Counts, Floats]:
        """Return what the units of each leader cost, at rest and plain: int64, float64[K, C].

        equal, cost, plain: of the experts themselves. leaders: as `Planner`.
        """
        columns = np.arange(cost.shape[1])
        found, whole = np.zeros_like(cost), np.zeros_like(plain)
        halves = (
            (self.model_twin, np.where(equal, 0, cost), np.where(equal, 0.0, plain), ~equal),
            (self.twin, self.cost, elements * self.item_size, np.ones_like(equal)),
        )
        for twin, stored, size, counts in halves:
            seen = np.zeros_like(equal)
            for k, lead in enumerate(leaders):
                news = np.flatnonzero((lead >= 0) & counts[k] & ~seen[twin[k], columns])
                seen[twin[k, news], news] = True
                found[lead[news], news] += stored[k, news]
                whole[lead[news], news] += size[k, news]
        return found, whole

    def split(self, states: States, equal: Bools) -> States:
        """Return the states of experts, then of their Fishers, uint8[2 K, C], from those of pairs.

        equal: where the expert's blocks are the base's, so that only its Fisher is read.
        """
        taken = (states == READ) | (states == SHARED)
        models = np.where(taken, _shared(taken & ~equal, self.model_twin), states)
        models[equal] = EQUAL
        fishers = np.where(taken, _shared(taken, self.twin), states)
        fishers[states == EQUAL] = BELOW
        both: States = np.concatenate([models, fishers]).astype(np.uint8)
        return both


def grouped(twins: Sequence[Counts]) -> Counts:
    """Return the first expert of each group that shares blocks of either kind: int64[K, chunks].

    twins: of each kind, the first expert with the same blocks.
    """
    group: Counts = np.minimum.reduce(list(twins))
    columns = np.arange(group.shape[1])
    while True:
        before = group.copy()
        for twin in twins:
            for k, first in enumerate(twin):
                least = np.minimum(group[k], group[first, columns])
                group[k] = group[first, columns] = least
        if (before == group).all():
            return group


def _row(one: Fisher, name: str) -> Any:
    value = getattr(one, name)
    if isinstance(value, np.ndarray):
        return value
    return np.full(len(one.twin), np.nan if value is None else value)


def _shared(taken: Bools, twin: Counts) -> States:
    """Return READ for the first taken one of those with the same blocks, SHARED for the others."""
    columns = np.arange(taken.shape[1])
    seen = np.zeros_like(taken)
    found = np.full(taken.shape, READ, dtype=np.uint8)
    for k, own in enumerate(taken):
        found[k, own & seen[twin[k], columns]] = SHARED
        there = np.flatnonzero(own)
        seen[twin[k, there], there] = True
    return found
