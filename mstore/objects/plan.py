"""The plan record: which blocks of which experts a merge reads, and what that costs.

Content-addressed: inputs are named by their ManifestIds, so equal inputs and parameters give the
same PlanId on any machine.  The names that a user gave the inputs are stored beside the plan (see
`mstore.store.plans`), not in it.

Per tensor and expert there is one state byte per *chunk*. A chunk is a run of elements that is a
whole number of blocks of the base, of every expert and of the output; if all have one dtype, it is
a block.

A plan has an operation of its own: method, parameters, and one weight per expert.  A parameter may
have one value per expert.  A tensor may have another operation, be made of tensors of other names,
or have coefficients that depend on the whole tensor.  Such a plan is encoded as plan/3.  A plan may
stack layers: then it takes tensors of its inputs as they are, and merges none.  Such a plan is
plan/4, and any other plan/2, so that equal plans have equal ids in all versions
(docs/design/016-plan-3.md, 020-stacks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.ids import Buffer, ManifestId, PlanId
from mstore.objects.canonical import Count, IdBytes, Record, encode_struct
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


MISSING_ALLOWED = (
    "tensors may be missing: the base's count for what an expert lacks, and what the base lacks is "
    "left out"
)
"""The note of a plan of models that lack tensors of the base, or have others.

Of such a plan, and of no other, a tensor that an expert lacks stands for the base's.
"""


class Threshold(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Keep |d| > value, and of |d| == value the first `quota` by flat index (-1: all of them)."""

    value: float
    quota: int


class Mixture(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Coefficients of whole tensors: output = base * the base + the sum of experts_k * expert k.

    For a method that adds deltas they are those of the deltas, and `base` is 1.
    keeps_base: an element that no expert changes keeps the base's bits, whatever the sum is.
    """

    base: float
    experts: tuple[float, ...]
    keeps_base: bool


Value = bool | int | float | str | tuple[float, ...]
"""Of a parameter: a number or a word for all experts, or, where they differ, a number for each."""


def _problem(parameters: tuple[tuple[str, Value], ...], experts: int) -> str | None:
    for _, value in parameters:
        if isinstance(value, tuple) and (len(value) != experts or len(set(value)) == 1):
            return "a parameter with another number of values, or with equal ones"
    return None


class PlanOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A method with complete parameters, sorted by name, and one weight per expert."""

    method: str
    parameters: tuple[tuple[str, Value], ...]
    weights: tuple[float, ...]

    def problem(self, experts: int, limits: RecordLimits) -> str | None:
        """Return what is wrong with it in a plan of this many experts, or None."""
        if len(self.weights) != experts:
            return "an operation with another number of weights"
        names = (self.method, *dict(self.parameters))
        found = (
            _problem(self.parameters, experts),
            too_many("parameters", len(self.parameters), limits.parameters),
            *(too_long("a name", name, limits.name_bytes) for name in names),
        )
        return next(filter(None, found), None)


class PlanTensor(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One tensor of the output that is merged.

    states: a byte per chunk, per expert. thresholds: one per expert, then, for methods that drop
    the largest elements too, where those begin; empty if nothing is trimmed.  For a method that
    selects elements of all experts by their variance: that variance, and as quota the flat index
    from which equal ones are not selected, the same for each expert. omitted: per expert
    the L2 norm of the part of the (sparsified) delta that is left out, -1 if unknown. operation: 0
    for the plan's own, else the position in `Plan.operations`, from 1. sources: the names of the
    tensors that it is made of, in the base and in each expert; empty if all are `name`. dtype: of
    the output, None for the plan's. mixture: what the method computed from facts about the whole
    tensor, None for other methods.
    """

    name: str
    chunk_elements: Count
    states: tuple[bytes, ...]
    thresholds: tuple[Threshold, ...]
    omitted: tuple[float, ...]
    operation: Count = 0
    sources: tuple[str, ...] = ()
    dtype: str | None = None
    mixture: Mixture | None = None

    @property
    def is_plain(self) -> bool:
        """Whether plan/2 can express it."""
        return (
            not self.operation
            and not self.sources
            and self.dtype is None
            and self.mixture is None
            and len(self.thresholds) <= len(self.states)
        )

    def source(self, member: int) -> str:
        """Return its name in the base (member 0) or in expert `member` - 1."""
        return self.sources[member] if self.sources else self.name

    def problem(self, experts: int, operations: int, limits: RecordLimits) -> str | None:
        """Return what is wrong with it in a plan of so many experts and operations, or None."""
        if len(self.states) != experts or len(self.omitted) != experts:
            return "a tensor with another number of experts"
        if len(self.thresholds) not in (0, experts, 2 * experts):
            return "a tensor with another number of thresholds"
        if self.operation > operations:
            return "a tensor of an unknown operation"
        if len(self.sources) not in (0, 1 + experts):
            return "a tensor with another number of sources"
        if self.sources and set(self.sources) == {self.name}:
            return "a tensor with sources that are its own name"
        if self.mixture is not None and len(self.mixture.experts) != experts:
            return "a tensor with another number of coefficients"
        if len({len(states) for states in self.states}) > 1:
            return "a tensor with different numbers of chunks"
        if any(max(states, default=0) > DROPPED for states in self.states):
            return "an unknown state"
        if any(not -1 <= threshold.quota <= MAX_COUNT for threshold in self.thresholds):
            return "a quota out of range"
        named = (self.name, *self.sources, self.dtype or "")
        return next(
            filter(None, (too_long("a tensor name", one, limits.name_bytes) for one in named)), None
        )


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


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor of the output that is a tensor of an input as it is.

    member: 0 for the base, k for the k-th expert. source: its name there.
    """

    name: str
    member: Count
    source: str


class Plan(Record, frozen=True, array_like=True, tag="plan/4"):
    """Inputs, parameters, selection, expected cost and error bound.

    parameters: complete, sorted by name. dtype: of the output, None for that of the base. budget:
    bytes, None for no limit. criteria: the other constraints. tensors: those that are merged, in
    the order of the base; all others are the base's own, and `copied` lists the remarkable ones
    with the reason.
    error_bound, error_estimate: relative to the norm of the base's floating-point tensors.
    operations: those of tensors that do not have the plan's own, each used by one at least.
    layers: of a stack: where each layer of the output is from, as (member, layer). taken: its
    tensors that are not the base's of their name, sorted by name. dropped: tensors of the base that
    it does not have, sorted.
    """

    kind: ClassVar[Kind] = Kind.PLAN
    id_type: ClassVar[type[PlanId]] = PlanId

    method: str
    parameters: tuple[tuple[str, Value], ...]
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
    operations: tuple[PlanOperation, ...] = ()
    layers: tuple[tuple[Count, Count], ...] = ()
    taken: tuple[Taken, ...] = ()
    dropped: tuple[str, ...] = ()

    def id(self) -> PlanId:
        return PlanId.of(self.encode())

    @property
    def allows_missing(self) -> bool:
        """Whether a tensor that an expert lacks stands for the base's."""
        return MISSING_ALLOWED in self.notes

    @property
    def operation(self) -> PlanOperation:
        """The plan's own operation."""
        weights = tuple([expert.weight for expert in self.experts])
        return PlanOperation(self.method, self.parameters, weights)

    def operation_of(self, tensor: PlanTensor) -> PlanOperation:
        """Return the operation of one of its tensors."""
        return self.operations[tensor.operation - 1] if tensor.operation else self.operation

    def encode(self) -> bytes:
        """Return the canonical bytes: the oldest form that can express the plan."""
        if self.layers:
            return super().encode()
        return encode_struct(_Plan2.of(self) if self.is_plain else _Plan3.of(self))

    @property
    def is_plain(self) -> bool:
        """Whether plan/2 can express it."""
        return (
            not self.layers
            and not self.operations
            and not any(isinstance(value, tuple | str) for _, value in self.parameters)
            and all(tensor.is_plain for tensor in self.tensors)
        )

    @classmethod
    def decoder(cls) -> Callable[[Buffer], Plan]:
        """Return a function that decodes every form; raises as msgspec does."""
        parse = msgspec.msgpack.Decoder(Plan | _Plan3 | _Plan2).decode

        def decoded(data: Buffer) -> Plan:
            found = parse(data)
            return found if isinstance(found, Plan) else found.plan()

        return decoded

    def problem(self, limits: RecordLimits) -> str | None:
        return next(filter(None, self._problems(limits)), None)

    def _problems(self, limits: RecordLimits) -> Iterator[str | None]:
        experts = len(self.experts)
        asked = self.criteria
        yield too_many("experts", experts, limits.experts)
        yield too_many("parameters", len(self.parameters), limits.parameters)
        yield _problem(self.parameters, experts)
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
        yield too_many("operations", len(self.operations), limits.operations)
        for operation in self.operations:
            yield operation.problem(experts, limits)
        used = {tensor.operation for tensor in self.tensors}
        if not used.issuperset(range(1, 1 + len(self.operations))):
            yield "an operation that no tensor has"
        for tensor in self.tensors:
            yield tensor.problem(experts, len(self.operations), limits)
        yield from self._problems_of_stack(limits)

    def _problems_of_stack(self, limits: RecordLimits) -> Iterator[str | None]:
        members = 1 + len(self.experts)
        yield too_many("layers", len(self.layers), limits.tensors)
        yield too_many("tensors", len(self.taken) + len(self.dropped), limits.tensors)
        if (self.taken or self.dropped) and not self.layers:
            yield "tensors that are taken, and no layers"
        if self.layers and (self.tensors or self.operations):
            yield "layers, and tensors that are merged"
        names = [one.name for one in self.taken]
        for listed in (names, list(self.dropped)):
            if listed != sorted(set(listed)):
                yield "names that are not sorted"
            for name in listed:
                yield too_long("a tensor name", name, limits.name_bytes)
        if not set(names).isdisjoint(self.dropped):
            yield "a tensor that is taken and dropped"
        for one in self.taken:
            yield too_long("a tensor name", one.source, limits.name_bytes)
        if any(member >= members for member, _ in self.layers) or any(
            one.member >= members for one in self.taken
        ):
            yield "a tensor of an unknown input"

    def base_id(self) -> ManifestId:
        """The content merged into."""
        return ManifestId(self.base)


class _Tensor2(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor as plan/2 encodes it."""

    name: str
    chunk_elements: Count
    states: tuple[bytes, ...]
    thresholds: tuple[Threshold, ...]
    omitted: tuple[float, ...]


class _Plan2(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="plan/2"
):
    """A plan as plan/2 encodes it: one operation, and every tensor made of those of its name."""

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
    tensors: tuple[_Tensor2, ...]
    copied: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan) -> _Plan2:
        fields = {name: getattr(plan, name) for name in cls.__struct_fields__}
        fields["tensors"] = tuple(
            [
                _Tensor2(one.name, one.chunk_elements, one.states, one.thresholds, one.omitted)
                for one in plan.tensors
            ]
        )
        return cls(**fields)

    def plan(self) -> Plan:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        fields["tensors"] = tuple(
            [
                PlanTensor(one.name, one.chunk_elements, one.states, one.thresholds, one.omitted)
                for one in self.tensors
            ]
        )
        return Plan(**fields)


class _Plan3(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="plan/3"
):
    """A plan as plan/3 encodes it: no layers are stacked."""

    method: str
    parameters: tuple[tuple[str, Value], ...]
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
    operations: tuple[PlanOperation, ...]

    @classmethod
    def of(cls, plan: Plan) -> _Plan3:
        return cls(**{name: getattr(plan, name) for name in cls.__struct_fields__})

    def plan(self) -> Plan:
        return Plan(**{name: getattr(self, name) for name in self.__struct_fields__})
