"""What a survey returns: the planner's whole input, as values.

Owns what is known of each tensor and of each expert's side of it, and how it is laid out as a grid.
`planning.surveyor` gathers it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mstore.merge.measures.grid import Beside, Bools, Companion, Floats, Grid, Ints, Together
from mstore.merge.methods.method import Operation
from mstore.models.stats.chunk import CHUNK
from mstore.models.stats.histogram import Threshold
from mstore.store.objects import plan
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.ids import ManifestId, TensorId

# A delta that is zero everywhere needs nothing kept.
NOTHING_KEPT = Threshold(value=0.0, above=0, needed=0, in_bin=0, inexact=0)
KEEPS_NONE = Threshold(value=math.inf, above=0, needed=0, in_bin=0, inexact=0)
"""Trimming that keeps no element: a rank of 0."""


class Candidate(NamedTuple):
    """A tensor to survey: its record in the base and in each expert."""

    name: str
    base_id: TensorId
    base: Tensor
    pairs: list[tuple[TensorId, Tensor]]
    copies: int


class ExpertTensor(msgspec.Struct, frozen=True):
    """One expert's side of one tensor; `pair` is (base, expert).

    equal: bool[chunks], the chunk's blocks are the base's. twin: int64[chunks], the first expert
    with the same blocks there (usually itself). cost: int64[chunks], stored bytes of the blocks.
    rows: CHUNK[chunks], upper bounds for a product, None if statistics are missing. thresholds:
    where trimming cuts, then, for methods that drop the largest elements, where those begin; empty
    if nothing is trimmed. surplus: elements that trimming keeps beyond k because it may not read
    the data to find the exact cut: if all of the expert is read, and if only part of it is. band:
    of the whole tensor, roughly the sum of squares that two thresholds leave, or at most the one
    that a selection by importance leaves; NaN for others. beside: of its
    companions that are read with it, by role; `own_twin` is then the first expert with the same
    blocks, and `twin` the first that shares those of the tensor or of a companion.
    """

    pair: tuple[TensorId, TensorId]
    record: Tensor
    equal: Bools
    twin: Ints
    cost: Ints
    rows: np.ndarray[Any, Any] | None
    thresholds: tuple[Threshold, ...]
    surplus: tuple[int, int] = (0, 0)
    band: float = math.nan
    beside: tuple[Beside, ...] = ()
    own_twin: Ints | None = None

    @property
    def is_applied(self) -> bool:
        """Whether an adapter makes this tensor: its bytes are read for all chunks at once."""
        return isinstance(self.record, AppliedTensor)

    @property
    def plain_bytes(self) -> int:
        """Plain bytes to read for all of it."""
        record = self.record
        return record.factor_bytes if isinstance(record, AppliedTensor) else record.nbytes


class SurveyedTensor(msgspec.Struct, frozen=True):
    """One tensor to merge; `copies` counts its names (see `planning.tensors`).

    operation: settled. sources: its names in the base and in each expert, empty if all are its own.
    dtype: of the output, None for the request's. thresholds: those that were measured with
    the tensor; others follow from the statistics of each expert.
    """

    name: str
    record: Tensor
    elements: int
    chunk_elements: int
    experts: tuple[ExpertTensor, ...]
    copies: int
    operation: Operation
    sources: tuple[str, ...] = ()
    dtype: str | None = None
    thresholds: tuple[plan.TrimThreshold, ...] = ()

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)

    @property
    def cuts(self) -> int:
        """At how many ranks each expert's delta is cut; 0 if nothing is trimmed."""
        return len(self.experts[0].thresholds)


class Survey(msgspec.Struct, frozen=True):
    """The planner's whole input, besides the request.

    base_squares: sum of squares of all floating-point tensors of the base, None if unknown. copied:
    (tensor, why) of tensors that are taken from the base although experts differ there. missing:
    (expert and tensor, why) of statistics that could not be computed. unreliable: number of the
    expert, and tensor, of statistics with rows that are not finite although the base's tensor is.
    base_not_finite: tensors of the base with elements that are infinite or NaN. squares: sum of
    squares of each tensor of the base. idle_rules: patterns of rules that no tensor follows.
    has_missing: an expert lacks tensors of the base, or has others. listed: how many of the
    experts, the last ones, are companions. read: those that are read with experts. without: as in
    the plan.
    """

    base: ManifestId
    experts: tuple[ManifestId, ...]
    block_size: int
    tensors: tuple[SurveyedTensor, ...]
    base_squares: float | None
    copied: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, str], ...]
    unreliable: tuple[tuple[int, str], ...]
    base_not_finite: tuple[str, ...] = ()
    idle_rules: tuple[str, ...] = ()
    squares: Mapping[str, float] = msgspec.field(default_factory=dict)
    has_missing: bool = False
    listed: int = 0
    read: tuple[Companion, ...] = ()
    without: tuple[str, ...] = ()


def grid_of(survey: Survey) -> Grid:
    """Build the grid of a survey."""
    tensors = survey.tensors
    chunks = np.array([tensor.chunks for tensor in tensors], dtype=np.int64)
    experts = range(len(survey.experts) - survey.listed)
    sides = [[tensor.experts[k] for tensor in tensors] for k in experts]
    tensor = np.repeat(np.arange(len(tensors)), chunks)
    return Grid(
        starts=np.array([0, *itertools.accumulate(chunks.tolist())], dtype=np.int64),
        tensor=tensor,
        shapes=tuple([t.record.shape for t in tensors]),
        elements=_joined([[_elements(t) for t in tensors]], np.float64)[0],
        copies=np.array([t.copies for t in tensors], dtype=np.float64)[tensor],
        equal=_joined([[e.equal for e in side] for side in sides], bool),
        known=_spread([[e.rows is not None for e in side] for side in sides], tensor, bool),
        twin=_joined([[e.twin for e in side] for side in sides], np.int64),
        cost=_joined([[e.cost for e in side] for side in sides], np.int64),
        rows=tuple(map(_rows, sides)),
        threshold=_spread(_cuts(sides, 0), tensor, np.float64),
        ceiling=_above(_spread(_cuts(sides, 1), tensor, np.float64)),
        band=_spread([[e.band for e in side] for side in sides], tensor, np.float64),
        surplus=np.array(
            [[e.surplus for e in t.experts] for t in tensors], dtype=np.float64
        ).reshape(len(tensors), len(experts), 2),
        together=_together(survey.read, sides) if survey.read else None,
    )


def _together(read: Sequence[Companion], sides: list[list[ExpertTensor]]) -> Together:
    twin = [[e.twin if e.own_twin is None else e.own_twin for e in side] for side in sides]
    grids = [
        Beside.joined([[e.beside[number] for e in side] for side in sides], one.totals)
        for number, one in enumerate(read)
    ]
    return Together(_joined(twin, np.int64), tuple(grids))


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


def _spread(sides: list[list[Any]], tensor: Ints, dtype: Any) -> np.ndarray[Any, Any]:
    """Expand one value per expert and tensor to one per chunk."""
    return np.array(sides, dtype=dtype).reshape(len(sides), -1)[:, tensor]


def _rows(side: Sequence[ExpertTensor]) -> np.ndarray[Any, Any]:
    """Return CHUNK[C] of one expert.  Joined as bytes: numpy joins records field by field."""
    rows = np.zeros((sum(len(e.equal) for e in side), CHUNK.itemsize), np.uint8)
    end = 0
    for e in side:
        start, end = end, end + len(e.equal)
        if e.rows is not None:
            own = np.ascontiguousarray(e.rows).view(np.uint8)
            rows[start:end] = own.reshape(-1, CHUNK.itemsize)
    return rows.view(CHUNK)[:, 0]


def _elements(tensor: SurveyedTensor) -> Floats:
    """Return float64[chunks] of one tensor."""
    elements = np.full(tensor.chunks, float(tensor.chunk_elements))
    elements[-1:] = tensor.elements - (tensor.chunks - 1) * tensor.chunk_elements
    return elements


def _joined(sides: list[list[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.array(
        [np.concatenate(side) if side else np.zeros(0, dtype=dtype) for side in sides], dtype=dtype
    )
