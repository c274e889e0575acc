"""The grid: a survey as whole arrays, experts by the chunks of all tensors in order.

A plan of a large model has hundreds of thousands of (expert, chunk) pairs.  The grid holds the
facts about all of them in arrays, so that planning is a few passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mstore.merge.planning.fishers import FisherGrid
from mstore.merge.planning.surveyed import ExpertTensor, Survey, SurveyedTensor
from mstore.stats.chunk import CHUNK

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Grid(msgspec.Struct, frozen=True):
    """K experts by C chunks.

    starts: int64[tensors + 1], the first chunk of each tensor; tensor: int64[C]. elements:
    float64[C], of each chunk. copies: float64[C], how many names the chunk's tensor has. equal,
    known: bool[K, C], the blocks are the base's; statistics exist. twin, cost: int64[K, C] (see
    `ExpertTensor`). rows: CHUNK[C] per expert, zeros if not known. threshold: float64[K, C], where
    trimming cuts, and `ceiling`, from where all is dropped; NaN for no threshold. fishers: of the
    experts, if each has one.
    """

    starts: Ints
    tensor: Ints
    elements: Floats
    copies: Floats
    equal: Bools
    known: Bools
    twin: Ints
    cost: Ints
    rows: tuple[np.ndarray[Any, Any], ...]
    threshold: Floats
    ceiling: Floats
    fishers: FisherGrid | None = None

    @classmethod
    def of(cls, survey: Survey) -> Grid:
        """Build the grid of a survey."""
        tensors = survey.tensors
        chunks = np.array([tensor.chunks for tensor in tensors], dtype=np.int64)
        experts = range(len(survey.experts) - survey.fishers)
        sides = [[tensor.experts[k] for tensor in tensors] for k in experts]
        tensor = np.repeat(np.arange(len(tensors)), chunks)
        return cls(
            starts=np.array([0, *itertools.accumulate(chunks.tolist())], dtype=np.int64),
            tensor=tensor,
            elements=_joined([[_elements(t) for t in tensors]], np.float64)[0],
            copies=np.array([t.copies for t in tensors], dtype=np.float64)[tensor],
            equal=_joined([[e.equal for e in side] for side in sides], bool),
            known=_spread([[e.rows is not None for e in side] for side in sides], tensor, bool),
            twin=_joined([[e.twin for e in side] for side in sides], np.int64),
            cost=_joined([[e.cost for e in side] for side in sides], np.int64),
            rows=tuple(map(_rows, sides)),
            threshold=_spread(_cuts(sides, 0), tensor, np.float64),
            ceiling=_above(_spread(_cuts(sides, 1), tensor, np.float64)),
            fishers=FisherGrid.of([[e.fisher for e in side if e.fisher] for side in sides])
            if survey.fishers
            else None,
        )

    def part(self, tensors: Sequence[int]) -> Grid:
        """Return the grid of some of its tensors, by their positions in order."""
        own = np.isin(self.tensor, tensors)
        chunks = np.diff(self.starts)[list(tensors)]
        return Grid(
            starts=np.array([0, *itertools.accumulate(chunks.tolist())], dtype=np.int64),
            tensor=np.repeat(np.arange(len(chunks)), chunks),
            elements=self.elements[own],
            copies=self.copies[own],
            equal=self.equal[:, own],
            known=self.known[:, own],
            twin=self.twin[:, own],
            cost=self.cost[:, own],
            rows=tuple(rows[own] for rows in self.rows),
            threshold=self.threshold[:, own],
            ceiling=self.ceiling[:, own],
            fishers=None if self.fishers is None else self.fishers.part(own),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of experts and chunks."""
        return len(self.equal), len(self.tensor)

    def column(self, name: str) -> Floats:
        """Return a field of the rows: float64[K, C]."""
        columns = [rows[name].astype(np.float64) for rows in self.rows]
        return np.array(columns).reshape(self.shape)

    def split(self, table: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Split [K, C] into a list of [K, chunks], one per tensor."""
        bounds = self.starts.tolist()
        return [table[:, start:end] for start, end in itertools.pairwise(bounds)]


def _cuts(sides: list[list[ExpertTensor]], place: int) -> list[list[float]]:
    return [
        [e.thresholds[place].value if place < len(e.thresholds) else np.nan for e in side]
        for side in sides
    ]


def _above(cuts: Floats) -> Floats:
    """Return where the next bins begin: of a bin in which a rank ends, some elements are kept.

    Without this a chunk of one magnitude would seem to keep nothing.
    """
    is_finite = np.isfinite(cuts)
    edges = np.where(is_finite, cuts, 0.0).astype(np.float32).view(np.uint32) + np.uint32(1 << 16)
    return np.where(is_finite, edges.view(np.float32).astype(np.float64), cuts)


def added(rows: Sequence[Floats] | Floats) -> Floats:
    """Return their sum, from the first to the last: the same bits on every machine."""
    total = np.zeros_like(rows[0]) if len(rows) else np.zeros(0)
    for row in rows:
        total = total + row
    return total


def _spread(sides: list[list[Any]], tensor: Ints, dtype: Any) -> np.ndarray[Any, Any]:
    """Expand one value per expert and tensor to one per chunk."""
    return np.array(sides, dtype=dtype).reshape(len(sides), -1)[:, tensor]


def _rows(side: Sequence[ExpertTensor]) -> np.ndarray[Any, Any]:
    """Return CHUNK[C] of one expert.  Joined as bytes: numpy joins records field by field."""
    raw = b"".join(
        bytes(len(e.equal) * CHUNK.itemsize) if e.rows is None else e.rows.tobytes() for e in side
    )
    return np.frombuffer(raw, dtype=CHUNK)


def _elements(tensor: SurveyedTensor) -> Floats:
    """Return float64[chunks] of one tensor."""
    elements = np.full(tensor.chunks, float(tensor.chunk_elements))
    elements[-1:] = tensor.elements - (tensor.chunks - 1) * tensor.chunk_elements
    return elements


def _joined(sides: list[list[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.array(
        [np.concatenate(side) if side else np.zeros(0, dtype=dtype) for side in sides], dtype=dtype
    )
