"""The plan record: which blocks of which experts a merge reads, and what that costs.

Content-addressed: inputs are named by their ManifestIds, so equal inputs and parameters give the
same PlanId on any machine.  The names that a user gave the inputs are stored beside the plan (see
`mstore.store.plans`), not in it.

Per tensor and expert there is one state byte per *chunk*. A chunk is a run of elements that is a
whole number of blocks of the base, of every expert and of the output; if all have one dtype, it is
a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.ids import ManifestId, PlanId
from mstore.objects.canonical import Count, IdBytes, Record
from mstore.objects.limits import MAX_COUNT, RecordLimits, too_long, too_many

READ = 0
"""The expert's blocks are read."""
SHARED = 1
"""They are an earlier expert's blocks, read once for both."""
EQUAL = 2
"""They are the base's blocks: the delta is zero."""
BELOW = 3
"""No element reaches the trim threshold: the sparsified delta is zero."""
OMITTED = 4
"""They are left out because of the budget."""
DROPPED = 5
"""They matter, but the output block is outside the top-p share, so it is the base's own."""


class Threshold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Keep |d| > value, and of |d| == value the first `quota` by flat index (-1: all of them)."""

    value: float
    quota: int


class PlanTensor(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One tensor to be merged.

    states: a byte per chunk, per expert. thresholds: per expert, or empty if nothing is trimmed.
    omitted: per expert the L2 norm of the part of the (sparsified) delta that is left out, -1 if
    unknown.
    """

    name: str
    chunk_elements: Count
    states: tuple[bytes, ...]
    thresholds: tuple[Threshold, ...]
    omitted: tuple[float, ...]

    def problem(self, experts: int, limits: RecordLimits) -> str | None:
        """Return what is wrong with it in a plan of this many experts, or None."""
        if len(self.states) != experts or len(self.omitted) != experts:
            return "a tensor with another number of experts"
        if len(self.thresholds) not in (0, experts):
            return "a tensor with another number of thresholds"
        if len({len(states) for states in self.states}) > 1:
            return "a tensor with different numbers of chunks"
        if any(max(states, default=0) > DROPPED for states in self.states):
            return "an unknown state"
        if any(not -1 <= threshold.quota <= MAX_COUNT for threshold in self.thresholds):
            return "a quota out of range"
        return too_long("a tensor name", self.name, limits.name_bytes)


class PlanExpert(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An input and its weight."""

    manifest: IdBytes
    weight: float

    def manifest_id(self) -> ManifestId:
        """The content of this expert."""
        return ManifestId(self.manifest)


class Criteria(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The constraints on the selection, besides the budget.

    score: how blocks were ranked (`merge.planning.scores`). max_error: relative, None if not
    requested. expert_budget: most bytes to read from any one expert. only, skip: patterns of tensor
    names, sorted. top_p: share of the output's blocks that may differ from the base's, None for
    all.
    """

    score: str
    max_error: float | None = None
    expert_budget: Count | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    top_p: float | None = None


class Plan(Record, frozen=True, array_like=True, tag="plan/2"):
    """Inputs, parameters, selection, expected cost and error bound.

    parameters: complete, sorted by name. dtype: of the output, None for that of the base. budget:
    bytes, None for no limit. criteria: the other constraints. tensors: those that are merged, in
    the order of the base; all others are the base's own, and `copied` lists the remarkable ones
    with the reason.
    error_bound, error_estimate: relative to the norm of the base's floating-point tensors.
    """

    kind: ClassVar[Kind] = Kind.PLAN
    id_type: ClassVar[type[PlanId]] = PlanId

    method: str
    parameters: tuple[tuple[str, bool | int | float], ...]
    base: IdBytes
    experts: tuple[PlanExpert, ...]
    dtype: str | None
    block_size: Count
    budget: Count | None
    criteria: Criteria
    full_expert_bytes: Count
    planned_expert_bytes: Count
    error_bound: float | None
    error_estimate: float | None
    tensors: tuple[PlanTensor, ...]
    copied: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def id(self) -> PlanId:
        return PlanId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        return next(filter(None, self._problems(limits)), None)

    def _problems(self, limits: RecordLimits) -> Iterator[str | None]:
        experts = len(self.experts)
        asked = self.criteria
        yield too_many("experts", experts, limits.experts)
        yield too_many("parameters", len(self.parameters), limits.parameters)
        yield too_many("patterns", len(asked.only) + len(asked.skip), limits.patterns)
        yield too_many("notes", len(self.notes), limits.notes)
        yield too_many("tensors", len(self.tensors) + len(self.copied), limits.tensors)
        named = (self.method, asked.score, self.dtype or "", *asked.only, *asked.skip)
        for name in (*named, *dict(self.parameters)):
            yield too_long("a name", name, limits.name_bytes)
        for note in self.notes:
            yield too_long("a note", note, limits.text_bytes)
        for name, why in self.copied:
            yield too_long("a tensor name", name, limits.name_bytes)
            yield too_long("a reason", why, limits.text_bytes)
        for tensor in self.tensors:
            yield tensor.problem(experts, limits)

    def base_id(self) -> ManifestId:
        """The content merged into."""
        return ManifestId(self.base)
