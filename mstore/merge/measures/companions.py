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

from mstore.errors import MstoreError
from mstore.objects.plan import BASE, BELOW, EQUAL, EXPERT, READ, SHARED

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
States = np.ndarray[Any, np.dtype[np.uint8]]
Shape = tuple[int, ...]


def alike(shape: Shape) -> Shape | None:
    """Return the shape of a tensor of the model: that of a companion which has the same tensors."""
    return shape


class Companion(msgspec.Struct, frozen=True):
    """What a combination asks for beside base and experts.

    role: as requests and plans name it. of: EXPERT: one for each expert, BASE: one for the base,
    None: one for the merge. shape: of its tensor for one of the model, by the latter's shape; None
    if it needs none. is_read: the kernel has it chunk by chunk, after the experts; it is one for
    each, and has the model's shapes.  Others are read by `Combination.settle` (`TensorFacts`).

    Of one that is read planning knows sums over each chunk: totals, how many; measure: makes them
    of stored bytes, their element type and their number, NaN for elements that are none of this
    role; refuse: makes the error for those, with the place.
    """

    role: str
    of: str | None = EXPERT
    shape: Callable[[Shape], Shape | None] = alike
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
    """A companion of one expert that is read with its tensor, by chunk.

    twin: int64[chunks], the first expert whose companion has the same blocks there. cost: int64
    [chunks], stored bytes. totals: float64[totals, chunks], of its elements; None if they are not
    known. item_size: bytes of an element. is_there: False if it lacks the tensor: its expert then
    takes no part in it.
    """

    twin: Counts
    cost: Counts
    totals: Floats | None
    item_size: int
    is_there: bool


class CompanionGrid(msgspec.Struct, frozen=True):
    """The companions of one role of a grid's experts, [K, C] each; see `Beside`.

    totals: float64[totals, K, C], NaN if not known.
    """

    twin: Counts
    cost: Counts
    totals: Floats
    item_size: Counts
    is_there: Bools

    @classmethod
    def of(cls, sides: Sequence[Sequence[Beside]], totals: int) -> CompanionGrid:
        """Build from the companions of each expert, tensor by tensor."""

        def joined(name: str, dtype: Any) -> Any:
            return np.array(
                [
                    np.concatenate([np.zeros(0, dtype), *(_row(one, name) for one in side)])
                    for side in sides
                ],
                dtype=dtype,
            )

        none = np.zeros((totals, 0))
        sums = [
            np.concatenate(
                [none, *(_totals(one, totals) for one in side)],
                axis=1,
            )
            for side in sides
        ]
        return cls(
            joined("twin", np.int64),
            joined("cost", np.int64),
            np.stack(sums, axis=1) if sums else np.zeros((totals, 0, 0)),
            joined("item_size", np.int64),
            joined("is_there", bool),
        )

    def part(self, own: Bools) -> CompanionGrid:
        """Return some of the columns."""
        return CompanionGrid(*(getattr(self, name)[..., own] for name in self.__struct_fields__))


class Together(msgspec.Struct, frozen=True):
    """Experts and the companions that are read with them.

    twin: int64[K, C], the first expert that differs from the base there and whose own blocks are
    the same. companions: of each role, in their order.
    """

    twin: Counts
    companions: tuple[CompanionGrid, ...]

    def part(self, own: Bools) -> Together:
        """Return some of the columns."""
        return Together(self.twin[:, own], tuple([one.part(own) for one in self.companions]))

    def costs(
        self, equal: Bools, cost: Counts, plain: Floats, elements: Floats, leaders: Counts
    ) -> tuple[Counts, Floats]:
        """Return what the units of each leader cost, at rest and plain: int64, float64[K, C].

        equal, cost, plain: of the experts themselves. leaders: as `Planner`.
        """
        columns = np.arange(cost.shape[1])
        found, whole = np.zeros_like(cost), np.zeros_like(plain)
        sides = [
            (self.twin, np.where(equal, 0, cost), np.where(equal, 0.0, plain), ~equal),
            *(
                (one.twin, one.cost, elements * one.item_size, np.ones_like(equal))
                for one in self.companions
            ),
        ]
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


def _row(one: Beside, name: str) -> Any:
    value = getattr(one, name)
    return value if isinstance(value, np.ndarray) else np.full(len(one.twin), value)


def _totals(one: Beside, count: int) -> Floats:
    return np.full((count, len(one.twin)), np.nan) if one.totals is None else one.totals


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
