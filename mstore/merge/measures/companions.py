"""Companions: inputs beside base and experts, which a combination asks for by their role.

Owns what a combination says of a companion that it needs, what the grid knows of those that are
read with their experts, what reading both costs, and how their states follow.

An expert and its companions are one decision: all are read, or none.  So the grid has one row for
them, and a plan one for each.  Experts that share the blocks of one of these share that read, so
they are one decision, too: the first of them leads, as for experts that share all.

Pure; arrays are [K, C]: experts by chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mstore.store.objects.plan import BASE, BELOW, EQUAL, EXPERT, READ, SHARED
from mstore.terms.errors import MstoreError

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
States = np.ndarray[Any, np.dtype[np.uint8]]
Shape = tuple[int, ...]


def alike(name: str, shape: Shape) -> Shape | None:
    """Return the shape of a tensor of the model: that of a companion which has the same tensors."""
    return shape


class Companion(msgspec.Struct, frozen=True):
    """What a combination asks for beside base and experts.

    role: as requests and plans name it. of: EXPERT: one for each expert, BASE: one for the base,
    None: one for the merge. shape: of its tensor for one of the model, by the latter's name and
    shape; None if it needs none. is_read: the kernel has it chunk by chunk, after the experts; it
    is one for each, and has the model's shapes.  Others are read by `Combination.settle`
    (`TensorFacts`).

    Of one that is read planning knows sums over each chunk: totals, how many; measure: makes them
    of stored bytes, their element type and their number, NaN for elements that are none of this
    role; refuse: makes the error for those, with the place.
    """

    role: str
    of: str | None = EXPERT
    shape: Callable[[str, Shape], Shape | None] = alike
    is_read: bool = False
    totals: int = 0
    measure: Callable[[Bytes, str, int], Sequence[float]] | None = None
    refuse: Callable[[str | None], MstoreError] | None = None

    def places(self, experts: int) -> tuple[int | None, ...]:
        """Return the numbers of the inputs that have one, of so many experts (`PlanInput.of`)."""
        return tuple(range(1, 1 + experts)) if self.of == EXPERT else (0 if self.of else None,)

    def __str__(self) -> str:
        return self.role.capitalize()

    @property
    def told(self) -> str:
        """What a method takes."""
        whose = {EXPERT: " for each expert", BASE: " for the base", None: ""}
        return f"a {self}{whose[self.of]}"


def split(
    asked: Sequence[Companion], experts: int, inputs: Sequence[Any]
) -> list[tuple[Companion, Sequence[Any]]]:
    """Return what is asked for with its own part of `inputs`: those of the experts come first."""
    found, at = [], experts
    for one in asked:
        count = len(one.places(experts))
        found.append((one, inputs[at : at + count]))
        at += count
    return found


class Beside(msgspec.Struct, frozen=True):
    """A companion that is read with its expert: [chunks] of a tensor, or [K, C] of a grid.

    twin: the first expert whose companion has the same blocks. cost: stored bytes. totals: of its
    elements, [totals, chunks] or [K, totals, C], NaN if not known. item_size: bytes of an element.
    is_there: False where it lacks the tensor: its expert then takes no part in it.
    """

    twin: Counts
    cost: Counts
    totals: Floats
    item_size: Counts
    is_there: Bools

    @classmethod
    def joined(cls, sides: Sequence[Sequence[Beside]], totals: int) -> Beside:
        """Return those of a grid, from those of each expert, tensor by tensor."""
        none, nowhere = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
        start = cls(none, none, np.zeros((totals, 0)), none, nowhere)
        columns = [
            [[getattr(one, name) for one in (start, *side)] for side in sides]
            for name in cls.__struct_fields__
        ]
        return cls(*(np.array([np.concatenate(own, axis=-1) for own in one]) for one in columns))

    def part(self, own: Bools) -> Beside:
        """Return some of the columns."""
        return Beside(*(getattr(self, name)[..., own] for name in self.__struct_fields__))


class Together(msgspec.Struct, frozen=True):
    """What a grid knows of experts that are read with companions.

    twin: int64[K, C], the first expert that differs from the base there and whose own blocks are
    the same. companions: those of each role.
    """

    twin: Counts
    companions: tuple[Beside, ...]

    def part(self, own: Bools) -> Together:
        """Return some of the columns."""
        return Together(self.twin[:, own], tuple([one.part(own) for one in self.companions]))

    def costs(
        self, equal: Bools, cost: Counts, plain: Floats, elements: Floats, leaders: Counts
    ) -> tuple[Counts, Floats]:
        """Return what the units of each leader cost, at rest and plain: int64, float64[K, C].

        equal, cost, plain: of the experts themselves. leaders: as `Planner`.
        """
        columns, every = np.arange(cost.shape[1]), np.ones_like(equal)
        found, whole = np.zeros_like(cost), np.zeros_like(plain)
        sides = [(self.twin, np.where(equal, 0, cost), np.where(equal, 0.0, plain), ~equal)]
        sides += [(o.twin, o.cost, elements * o.item_size, every) for o in self.companions]
        for twin, stored, size, counts in sides:
            seen = np.zeros_like(equal)
            for k, lead in enumerate(leaders):
                news = np.flatnonzero((lead >= 0) & counts[k] & ~seen[twin[k], columns])
                seen[twin[k, news], news] = True
                found[lead[news], news] += stored[k, news]
                whole[lead[news], news] += size[k, news]
        return found, whole

    def split(self, states: States, equal: Bools) -> list[States]:
        """Return the states of experts, then of the companions of each role, uint8[K, C] each.

        states: of what is read together. equal: where the expert's blocks are the base's, so that
        only its companions are read.
        """
        taken = (states == READ) | (states == SHARED)
        experts = np.where(taken, _shared(taken & ~equal, self.twin), states)
        experts[equal] = EQUAL
        found = [experts]
        for one in self.companions:
            own = np.where(taken, _shared(taken, one.twin), states)
            own[states == EQUAL] = BELOW
            found.append(own)
        return [one.astype(np.uint8) for one in found]


def grouped(twins: Sequence[Counts]) -> Counts:
    """Return the first expert of each group that shares blocks of any kind: int64[K, chunks].

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
