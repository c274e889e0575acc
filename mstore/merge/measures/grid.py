"""The grid: a survey as whole arrays, experts by the chunks of all tensors in order.

A plan of a large model has hundreds of thousands of (expert, chunk) pairs.  The grid holds the
facts about all of them in arrays, so that planning is a few passes.

Companions are inputs beside base and experts, which a combination asks for by their role.  An
expert and its companions are one decision: all are read, or none.  So the grid has one row for
them, and a plan one for each.  Experts that share the blocks of one of these share that read, so
they are one decision, too: the first of them leads, as for experts that share all.

Pure; arrays are [K, C]: experts by chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mstore.numeric.codes import ITEMSIZES
from mstore.store.objects.plan import BASE, BELOW, EQUAL, EXPERT, READ, SHARED
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import MstoreError

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
States = np.ndarray[Any, np.dtype[np.uint8]]
Shape = tuple[int, ...]
AnyShape = tuple[int | None, ...]
"""A shape in which None is any length."""


def alike(name: str, shape: Shape) -> AnyShape | None:
    """Return the shape of a tensor of the model: that of a companion which has the same tensors."""
    return shape


class Companion(msgspec.Struct, frozen=True):
    """What a combination asks for beside base and experts.

    role: as requests and plans name it. of: EXPERT: one for each expert, BASE: one for the base,
    None: one for the merge. shape: of its tensor for one of the model, by the latter's name and
    shape, None for any length; None if it needs none. dtypes: the element types that it may have.
    is_optional: whether the method does without a tensor that it lacks. called: what one is, if
    that is not its role; made: what makes one. is_read: the kernel has it
    chunk by chunk, after the experts; it is one for each, and has the model's shapes.  Others are
    facts: `Combination.settle` reads them for a plan (`TensorFacts`), and they are there where
    factors follow from them (`ChunkFactors.bound`). unlike: the role of another one of the merge
    that it is compared with, so that both say nothing where they are equal.

    Of one that is read planning knows sums over each chunk: totals, how many; measure: makes them
    of stored bytes, their element type and their number, NaN for elements that are none of this
    role; refuse: makes the error for those, with the place.
    """

    role: str
    of: str | None = EXPERT
    shape: Callable[[str, Shape], AnyShape | None] = alike
    dtypes: tuple[str, ...] = tuple(ITEMSIZES)
    is_optional: bool = False
    called: str | None = None
    made: str | None = None
    is_read: bool = False
    unlike: str | None = None
    totals: int = 0
    measure: Callable[[Bytes, str, int], Sequence[float]] | None = None
    refuse: Callable[[str | None], MstoreError] | None = None

    def places(self, experts: int) -> tuple[int | None, ...]:
        """Return the numbers of the inputs that have one, of so many experts (`PlanInput.of`)."""
        return tuple(range(1, 1 + experts)) if self.of == EXPERT else (0 if self.of else None,)

    def fits(self, shape: AnyShape, record: Tensor) -> bool:
        """Return whether a tensor may be one for which `shape` is asked."""
        same = len(shape) == len(record.shape) and all(
            wanted in (None, own) for wanted, own in zip(shape, record.shape, strict=True)
        )
        return same and record.dtype in self.dtypes

    def __str__(self) -> str:
        return self.called or (self.role.capitalize() if self.of else f"{self.role} model")

    @property
    def any(self) -> str:
        """One of them, for a sentence."""
        return f"{'an' if str(self)[0].lower() in 'aeiou' else 'a'} {self}"

    @property
    def key(self) -> str:
        """What requests name one by: ROLE:EXPERT of an expert, ROLE:base, or ROLE of the merge."""
        return self.role + {EXPERT: ":EXPERT", BASE: f":{BASE}", None: ""}[self.of]

    @property
    def words(self) -> str:
        """What a method takes, for a sentence."""
        whose = {EXPERT: " for each expert", BASE: " for the base", None: ""}
        return f"{self.any}{whose[self.of]}"


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

    twin: Ints
    cost: Ints
    totals: Floats
    item_size: Ints
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

    twin: Ints
    companions: tuple[Beside, ...]

    def part(self, own: Bools) -> Together:
        """Return some of the columns."""
        return Together(self.twin[:, own], tuple([one.part(own) for one in self.companions]))

    def costs(
        self, equal: Bools, cost: Ints, plain: Floats, elements: Floats, leaders: Ints
    ) -> tuple[Ints, Floats]:
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


def grouped(twins: Sequence[Ints]) -> Ints:
    """Return the first expert of each group that shares blocks of any kind: int64[K, chunks].

    twins: of each kind, the first expert with the same blocks.
    """
    group: Ints = np.minimum.reduce(list(twins))
    columns = np.arange(group.shape[1])
    while True:
        before = group.copy()
        for twin in twins:
            for k, first in enumerate(twin):
                least = np.minimum(group[k], group[first, columns])
                group[k] = group[first, columns] = least
        if (before == group).all():
            return group


def _shared(taken: Bools, twin: Ints) -> States:
    """Return READ for the first taken one of those with the same blocks, SHARED for the others."""
    columns = np.arange(taken.shape[1])
    seen = np.zeros_like(taken)
    found = np.full(taken.shape, READ, dtype=np.uint8)
    for k, own in enumerate(taken):
        found[k, own & seen[twin[k], columns]] = SHARED
        there = np.flatnonzero(own)
        seen[twin[k, there], there] = True
    return found


class Grid(msgspec.Struct, frozen=True):
    """K experts by C chunks.

    starts: int64[tensors + 1], the first chunk of each tensor; tensor: int64[C]. shapes: of each
    tensor. elements: float64[C], of each chunk. copies: float64[C], how many names the chunk's
    tensor has. equal, known: bool[K, C], the blocks are the base's; statistics exist. twin, cost:
    int64[K, C] (see `ExpertTensor`). rows: CHUNK[C] per expert, zeros if not known. threshold:
    float64[K, C], where trimming cuts, and `ceiling`, from where all is dropped; NaN for no
    threshold. band: float64[K, C], that of each chunk's tensor (see `ExpertTensor`), and surplus:
    float64[tensors, K, 2]. together: experts with their companions, if any are read with them.
    """

    starts: Ints
    tensor: Ints
    shapes: tuple[Shape, ...]
    elements: Floats
    copies: Floats
    equal: Bools
    known: Bools
    twin: Ints
    cost: Ints
    rows: tuple[np.ndarray[Any, Any], ...]
    threshold: Floats
    ceiling: Floats
    band: Floats
    surplus: Floats
    together: Together | None = None

    def part(self, tensors: Sequence[int]) -> Grid:
        """Return the grid of some of its tensors, by their positions in order."""
        own = np.isin(self.tensor, tensors)
        chunks = np.diff(self.starts)[list(tensors)]
        return Grid(
            starts=np.array([0, *itertools.accumulate(chunks.tolist())], dtype=np.int64),
            tensor=np.repeat(np.arange(len(chunks)), chunks),
            shapes=tuple([self.shapes[number] for number in tensors]),
            elements=self.elements[own],
            copies=self.copies[own],
            equal=self.equal[:, own],
            known=self.known[:, own],
            twin=self.twin[:, own],
            cost=self.cost[:, own],
            rows=tuple(rows[own] for rows in self.rows),
            threshold=self.threshold[:, own],
            ceiling=self.ceiling[:, own],
            band=self.band[:, own],
            surplus=self.surplus[list(tensors)],
            together=None if self.together is None else self.together.part(own),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of experts and chunks."""
        return len(self.equal), len(self.tensor)

    def column(self, name: str) -> Floats:
        """Return a field of the rows: float64[K, C]."""
        columns = [rows[name].astype(np.float64) for rows in self.rows]
        return np.array(columns).reshape(self.shape)

    @property
    def nothing(self) -> Bools:
        """bool[K, C]: where an expert is known to move no element."""
        still: Bools = self.known & (self.column("nonzeros") == 0)
        return still

    @property
    def moved(self) -> Floats:
        """float64[K, C]: the share of a chunk's elements that an expert moves."""
        share: Floats = self.column("nonzeros") / self.elements
        return share

    @property
    def whole(self) -> Floats:
        """float64[K, C]: ||d_k||^2; infinite if unknown."""
        squares = self.column("sum_squares")
        # A NaN would make every comparison false; such a chunk is read first.
        return np.where(self.known & ~np.isnan(squares), squares, np.inf)

    def fitted(self, squares: Sequence[Floats]) -> Floats:
        """Return squares of chunks, scaled so that they add up to the `band` of each tensor.

        A few large elements may have most of a chunk's squares; their share is known of the whole
        tensor only.  No chunk gets more than it has.
        """
        starts = self.starts.tolist()
        for own, whole, band in zip(squares, self.whole, self.band, strict=True):
            for start, end in itertools.pairwise(starts):
                wanted = float(band[start]) if end > start else math.nan
                part = own[start:end]
                total = math.fsum(part[np.isfinite(part)].tolist())
                if math.isfinite(wanted) and wanted >= 0 and total > 0:
                    scaled = np.minimum(part * (wanted / total), whole[start:end])
                    part[:] = np.where(np.isfinite(part), scaled, part)
        return np.array(squares).reshape(self.shape)

    def split(self, table: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Split [K, C] into a list of [K, chunks], one per tensor."""
        bounds = self.starts.tolist()
        return [table[:, start:end] for start, end in itertools.pairwise(bounds)]


def added(rows: Sequence[Floats] | Floats) -> Floats:
    """Return their sum, from the first to the last: the same bits on every machine."""
    total = np.zeros_like(rows[0]) if len(rows) else np.zeros(0)
    for row in rows:
        total = total + row
    return total
