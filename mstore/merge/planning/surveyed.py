"""What a survey returns: the planner's whole input, as values.

Owns what is known of each tensor and of each expert's side of it.  Does not own how that is
gathered (`survey`, and `small` for many small tensors at once).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from mstore.ids import ManifestId, TensorId
from mstore.merge.arithmetic.spread import Cut
from mstore.merge.methods.method import Operation
from mstore.merge.planning.fishers import Fisher
from mstore.objects.applied import AppliedTensor
from mstore.objects.tensor import Tensor
from mstore.phrases import Option, phrase
from mstore.stats.histogram import Threshold

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

# A delta that is zero everywhere needs nothing kept.
NOTHING_KEPT = Threshold(value=0.0, above=0, needed=0, in_bin=0, inexact=0)
KEEPS_NONE = Threshold(value=math.inf, above=0, needed=0, in_bin=0, inexact=0)
"""Trimming that keeps no element: a rank of 0."""
NEEDS_ANALYSIS: Final = phrase("run the command without {off}", off=Option("analyze", False))
"""The hint where something must be measured and nothing may be read."""


class ExpertTensor(msgspec.Struct, frozen=True):
    """One expert's side of one tensor; `pair` is (base, expert).

    equal: bool[chunks], the chunk's blocks are the base's. twin: int64[chunks], the first expert
    with the same blocks there (usually itself). cost: int64[chunks], stored bytes of the blocks.
    rows: CHUNK[chunks], upper bounds for a product, None if statistics are missing. thresholds:
    where trimming cuts, then, for methods that drop the largest elements, where those begin; empty
    if nothing is trimmed. surplus: elements that trimming keeps beyond k because it may not read
    the data to find the exact cut: if all of the expert is read, and if only part of it is. band:
    of the whole tensor, roughly the sum of squares that two thresholds leave, or at most the one
    that a selection by importance leaves; NaN for others. fisher: of an expert that has one; `twin`
    is then the first expert that shares the blocks of the tensor or of its Fisher.
    """

    pair: tuple[TensorId, TensorId]
    record: Tensor
    equal: Bools
    twin: Counts
    cost: Counts
    rows: np.ndarray[Any, Any] | None
    thresholds: tuple[Threshold, ...]
    surplus: tuple[int, int] = (0, 0)
    band: float = math.nan
    fisher: Fisher | None = None

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
    """One tensor to merge; `copies` counts its names (see `tied`).

    operation: settled. sources: its names in the base and in each expert, empty if all are its own.
    dtype: of the output, None for the request's. cut: where a selection by spread ends, or one by
    importance.
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
    cut: Cut | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk_elements)


class Survey(msgspec.Struct, frozen=True):
    """The planner's whole input, besides the request.

    base_squares: sum of squares of all floating-point tensors of the base, None if unknown. copied:
    (tensor, why) of tensors that are taken from the base although experts differ there. missing:
    (expert and tensor, why) of statistics that could not be computed. unreliable: number of the
    expert, and tensor, of statistics with rows that are not finite although the base's tensor is.
    base_not_finite: tensors of the base with elements that are infinite or NaN. squares: sum of
    squares of each tensor of the base. idle_rules: patterns of rules that no tensor follows.
    has_missing: an expert lacks tensors of the base, or has others. fishers: how many of the
    experts, the last ones, are Fishers of the others. without: as in the plan.
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
    fishers: int = 0
    without: tuple[str, ...] = ()
