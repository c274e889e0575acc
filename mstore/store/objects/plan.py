"""Records of merges: the plan, and the coverage, which says what came of it.

A plan says which blocks of which experts a merge reads, and what that costs.

Content-addressed: inputs are named by their ManifestIds, so equal inputs and parameters give the
same PlanId on any machine.  The names that a user gave the inputs are stored beside the plan (see
`mstore.store.plans`), not in it.

Per tensor and expert there is one state byte per *chunk*. A chunk is a run of elements that is a
whole number of blocks of the base, of every expert and of the output; if all have one dtype, it is
a block.

A plan has operations: a method, parameters, and one weight per expert; the first is that of the
whole merge.  A parameter may have one value per expert.  A tensor may have another operation, be
made of tensors of other names, or have coefficients that depend on the whole tensor.  A plan may
stack layers: then it takes tensors of its inputs as they are, and merges none
(docs/design/020-stacks.md).

Tensors are named as `checkpoint.models` calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import msgspec

from mstore.blocks.packs import Kind
from mstore.checkpoint.dtypes import DTYPES
from mstore.store.objects.canonical import (
    MAX_COUNT,
    Count,
    IdBytes,
    Record,
    RecordLimits,
    too_long,
    too_many,
)
from mstore.terms.ids import CoverageId, ManifestId, PlanId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


Score = Literal["norm", "trimmed", "conflict", "random"]
"""What ranks blocks (`merge.planning.ranking`)."""

SCORES: tuple[Score, ...] = get_args(Score)

BASE = "base"
EXPERT = "expert"
ROUTERS = "routers"
"""The companion of a mixture of experts: what no model has."""
MOE = "moe"
"""By what a mixture of experts is made, and a dense model of one of its experts."""
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,62}")
"""Any other role is that of a companion: the method says what it is."""


class TrimThreshold(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


def _is_sorted(names: Iterable[str]) -> bool:
    """Whether they ascend, each once."""
    return all(a < b for a, b in pairwise(names))


def _problem(parameters: tuple[tuple[str, Value], ...], experts: int) -> str | None:
    if not _is_sorted(name for name, _ in parameters):
        return "parameters that are not sorted"
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

    An expert is here each input but the base, so companions have states, too. states: a byte per
    chunk, per expert. thresholds: one per expert, then, for methods that drop
    the largest elements too, where those begin; empty if nothing is trimmed.  For a method that
    selects elements of all experts by their variance: that variance, and as quota the flat index
    from which equal ones are not selected, the same for each expert.  Methods may keep any whole
    number of them for each expert. omitted: per expert
    the L2 norm of the part of the (sparsified) delta that is left out, -1 if unknown. operation:
    its position in `Plan.operations`. sources: the names of the tensors that it is made of, in the
    base and in each expert; empty if all are `name`. dtype: of the output, None for the plan's.
    mixture: what the method computed from facts about the whole
    tensor, None for other methods.
    """

    name: str
    chunk_elements: Count
    states: tuple[bytes, ...]
    thresholds: tuple[TrimThreshold, ...]
    omitted: tuple[float, ...]
    operation: Count = 0
    sources: tuple[str, ...] = ()
    dtype: str | None = None
    mixture: Mixture | None = None

    def source(self, member: int) -> str:
        """Return its name in the base (member 0) or in expert `member` - 1."""
        return self.sources[member] if self.sources else self.name

    def problem(
        self, experts: int, models: int, operations: int, limits: RecordLimits
    ) -> str | None:
        """Return what is wrong with it in a plan of so many experts and operations, or None.

        models: how many of the experts are no companions.
        """
        if len(self.states) != experts or len(self.omitted) != experts:
            return "a tensor with another number of experts"
        if len(self.thresholds) % max(1, experts):
            return "a tensor with another number of thresholds"
        if self.operation >= operations:
            return "a tensor of an unknown operation"
        if len(self.sources) not in (0, 1 + experts):
            return "a tensor with another number of sources"
        if self.sources and set(self.sources) == {self.name}:
            return "a tensor with sources that are its own name"
        if self.mixture is not None and len(self.mixture.experts) != models:
            return "a tensor with another number of coefficients"
        if len({len(states) for states in self.states}) > 1:
            return "a tensor with different numbers of chunks"
        if any(max(states, default=0) > DROPPED for states in self.states):
            return "an unknown state"
        if SHARED in b"".join(self.states[:1]):
            return "a first expert that shares chunks with an earlier one"
        if not self.chunk_elements:
            return "chunks without elements"
        if self.dtype is not None and self.dtype not in DTYPES:
            return "a tensor of an unknown dtype"
        if any(not -1 <= threshold.quota <= MAX_COUNT for threshold in self.thresholds):
            return "a quota out of range"
        named = (self.name, *self.sources)
        return next(
            filter(None, (too_long("a tensor name", one, limits.name_bytes) for one in named)), None
        )


class PlanInput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An input: the base, an expert, or a companion.

    role: base, expert, or that of a companion. of: of a companion, the number of the input that it
    belongs to (0: the base, k: the k-th expert), None if it belongs to the merge; None for others.
    model: the one of its models that is taken, None for the namesakes of the base's, of the base
    all.
    """

    role: str
    of: Count | None
    manifest: IdBytes
    model: str | None = None

    def manifest_id(self) -> ManifestId:
        """The content of this input."""
        return ManifestId(self.manifest)

    @property
    def key(self) -> tuple[bytes, str | None]:
        """Equal for inputs that are one model: a content may hold several."""
        return self.manifest, self.model


class Criteria(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The constraints on the selection, besides the budget.

    score: how blocks were ranked (`merge.planning.ranking`). max_error: relative, None if not
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

    def problem(self) -> str | None:
        """Return what is wrong with them, or None."""
        if self.score not in SCORES:
            return "an unknown score"
        if self.max_error is not None and not 0 <= self.max_error < inf:
            return "an error limit out of range"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            return "a share out of range"
        if not _is_sorted(self.only) or not _is_sorted(self.skip):
            return "patterns that are not sorted"
        return None


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor of the output that is a tensor of an input as it is.

    member: 0 for the base, k for the k-th expert. source: its name there.
    """

    name: str
    member: Count
    source: str


class Plan(Record, frozen=True, array_like=True, tag="plan/1", dict=True):
    """Inputs, operations, selection, expected cost and error bound.

    operations: the merge's own, then those of tensors that have another, each used by one at least.
    inputs: the base, the experts, then companions in the order of their roles and what they are of.
    dtype: of the output, None for that of the base. budget: bytes, None for no limit. criteria: the
    other constraints. allow_missing: a tensor that an expert lacks stands for the base's, and what
    the base lacks is left out. tensors: those that are merged, in the order of the base; all others
    are the base's own, and `copied` lists the notable ones with the reason.
    error_bound, error_estimate: relative to the norm of the base's floating-point tensors.
    without: models of the base that the output does not have, because an expert lacks this form of
    its weights.

    An assembly merges nothing: its tensors are those of its inputs as they are. taken: those that
    are not the base's of their name, sorted by name. dropped: tensors of the base that it does not
    have, sorted. config: entries of config.json in place of the base's, a JSON object; null for one
    that is gone; empty for none. layers: of a stack: where each layer of the output is from, as
    (member, layer), for people.
    """

    kind: ClassVar[Kind] = Kind.PLAN
    id_type: ClassVar[type[PlanId]] = PlanId

    operations: tuple[PlanOperation, ...]
    inputs: tuple[PlanInput, ...]
    dtype: str | None
    block_size: Count
    budget: Count | None
    criteria: Criteria
    allow_missing: bool
    full_expert_bytes: Count
    planned_expert_bytes: Count
    error_bound: float | None
    error_estimate: float | None
    tensors: tuple[PlanTensor, ...]
    copied: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    layers: tuple[tuple[Count, Count], ...] = ()
    taken: tuple[Taken, ...] = ()
    dropped: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    config: str = ""

    def id(self) -> PlanId:
        return PlanId.of(self.encode())

    @property
    def operation(self) -> PlanOperation:
        """The merge's own operation."""
        return self.operations[0]

    @property
    def method(self) -> str:
        """The name of the merge's own method."""
        return self.operation.method

    @property
    def experts(self) -> tuple[PlanInput, ...]:
        """The experts, in order."""
        return tuple(one for one in self.inputs if one.role == EXPERT)

    @property
    def companions(self) -> tuple[PlanInput, ...]:
        """The companions, in order."""
        return tuple(one for one in self.inputs if one.role not in (BASE, EXPERT))

    @property
    def weights(self) -> tuple[float, ...]:
        """The experts' weights in the merge's own operation."""
        return self.operation.weights

    @property
    def model(self) -> str | None:
        """The model of the base that is merged, None for all."""
        return self.inputs[0].model

    @property
    def is_assembly(self) -> bool:
        """Whether tensors are taken as they are, and none is merged."""
        return bool(self.layers or self.taken or self.dropped or self.config)

    @property
    def is_mixture(self) -> bool:
        """Whether its output is a mixture of experts."""
        return self.is_assembly and any(one.role == ROUTERS for one in self.inputs)

    @property
    def made_by(self) -> str:
        """What people call the way it is made: its method; `moe` for a mixture, and back."""
        return self.method if self.layers or not self.is_assembly else MOE

    def operation_of(self, tensor: PlanTensor) -> PlanOperation:
        """Return the operation of one of its tensors."""
        return self.operations[tensor.operation]

    def problem(self, limits: RecordLimits) -> str | None:
        return next(filter(None, self._problems(limits)), None)

    def _problems(self, limits: RecordLimits) -> Iterator[str | None]:
        asked = self.criteria
        yield self._problem_of_inputs(limits)
        yield too_many("patterns", len(asked.only) + len(asked.skip), limits.patterns)
        yield too_many("remarks", len(self.remarks), limits.remarks)
        yield too_many("tensors", len(self.tensors) + len(self.copied), limits.tensors)
        yield asked.problem()
        if self.dtype is not None and self.dtype not in DTYPES:
            yield "an unknown dtype"
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            yield "two tensors of one name"
        for name in (*asked.only, *asked.skip, *self.without):
            yield too_long("a name", name, limits.name_bytes)
        for remark in self.remarks:
            yield too_long("a remark", remark, limits.text_bytes)
        for name, why in self.copied:
            yield too_long("a tensor name", name, limits.name_bytes)
            yield too_long("a reason", why, limits.text_bytes)
        if not _is_sorted(self.without):
            yield "models that are not sorted"
        if not self.operations:
            yield "no operation"
            return
        yield too_many("operations", len(self.operations), limits.operations)
        for operation in self.operations:
            yield operation.problem(len(self.experts), limits)
        used = {0, *(tensor.operation for tensor in self.tensors)}
        if not used.issuperset(range(len(self.operations))):
            yield "an operation that no tensor has"
        for tensor in self.tensors:
            experts = len(self.inputs) - 1
            yield tensor.problem(experts, len(self.experts), len(self.operations), limits)
        yield from self._problems_of_assembly(limits)

    def _problem_of_inputs(self, limits: RecordLimits) -> str | None:
        roles = [one.role for one in self.inputs]
        if roles.count(BASE) != 1 or not all(map(_ROLE.fullmatch, roles)):
            return "inputs without one base, or of unknown roles"
        experts = len(self.experts)
        if roles[: 1 + experts] != [BASE, *[EXPERT] * experts]:
            return "inputs that are out of order"
        if any(one.of is not None for one in self.inputs[: 1 + experts]):
            return "a base or an expert that belongs to another input"
        keys = [(one.role, -1 if one.of is None else one.of) for one in self.companions]
        if keys != sorted(set(keys)) or any(of > experts for _, of in keys):
            return "companions that are out of order, or of no input"
        named = next(
            filter(
                None,
                (too_long("a model", one.model or "", limits.name_bytes) for one in self.inputs),
            ),
            None,
        )
        return too_many("experts", len(self.inputs) - 1, limits.experts) or named

    def _problems_of_assembly(self, limits: RecordLimits) -> Iterator[str | None]:
        members = len(self.inputs)
        yield too_many("layers", len(self.layers), limits.tensors)
        yield too_many("tensors", len(self.taken) + len(self.dropped), limits.tensors)
        yield too_long("a config", self.config, limits.text_bytes)
        if self.config:
            # Late: few plans have one.
            from mstore.checkpoint.strict_json import json_object

            if not json_object(self.config.encode()):
                yield "a config that is no object, or an empty one"
        if self.is_assembly and (self.tensors or len(self.operations) > 1):
            yield "tensors that are taken, and tensors that are merged"
        names = [one.name for one in self.taken]
        for listed in (names, list(self.dropped)):
            if not _is_sorted(listed):
                yield "names that are not sorted"
            for name in listed:
                yield too_long("a tensor name", name, limits.name_bytes)
        if not set(names).isdisjoint(self.dropped):
            yield "a tensor that is taken and dropped"
        for one in self.taken:
            yield too_long("a tensor name", one.source, limits.name_bytes)
            if not one.member and one.name == one.source:
                yield "a tensor of the base that is taken as its own"
        if any(member >= members for member, _ in self.layers) or any(
            one.member >= members for one in self.taken
        ):
            yield "a tensor of an unknown input"

    def base_id(self) -> ManifestId:
        """The content merged into."""
        return self.inputs[0].manifest_id()

    def manifest_ids(self) -> list[ManifestId]:
        """The contents of all inputs, in order."""
        return [one.manifest_id() for one in self.inputs]


class TensorCoverage(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One merged tensor.  Bit i of a bitmap (least significant first) is output block i.

    reused: blocks that are the base's own. contributed: per expert, the blocks it contributed to.
    """

    name: str
    blocks: Count
    reused: bytes
    contributed: tuple[bytes, ...]

    def problem(self, limits: RecordLimits) -> str | None:
        """Return what is wrong with its bitmaps, or None."""
        if any(not _is_bitmap(bits, self.blocks) for bits in (self.reused, *self.contributed)):
            return "a bitmap that does not fit the blocks"
        return too_many("experts", len(self.contributed), limits.experts) or too_long(
            "a tensor name", self.name, limits.name_bytes
        )


class Coverage(Record, frozen=True, array_like=True, tag="coverage/1"):
    """The outcome of one plan; tensors as in the plan, all others are the base's own.

    not_finite: tensors with elements that are infinite or NaN, and are finite in the base, and how
    many, in the order of `tensors`.
    """

    kind: ClassVar[Kind] = Kind.COVERAGE
    id_type: ClassVar[type[CoverageId]] = CoverageId

    plan: IdBytes
    tensors: tuple[TensorCoverage, ...]
    not_finite: tuple[tuple[str, Count], ...]

    def id(self) -> CoverageId:
        return CoverageId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        if len({len(tensor.contributed) for tensor in self.tensors}) > 1:
            return "tensors with different numbers of experts"
        odd = dict(self.not_finite)
        named = tuple((t.name, odd[t.name]) for t in self.tensors if odd.get(t.name))
        if named != self.not_finite:
            return "counts of elements that are not finite, and not of its tensors"
        problems = (tensor.problem(limits) for tensor in self.tensors)
        return too_many("tensors", len(self.tensors), limits.tensors) or next(
            filter(None, problems), None
        )


def bitmap(flags: npt.ArrayLike) -> bytes:
    """Pack flags, bool[flags], into bits, least significant first."""
    import numpy as np  # late: most commands read plans and make none

    return np.packbits(np.asarray(flags, np.bool_), bitorder="little").tobytes()


def bitmaps(flags: npt.NDArray[np.bool_]) -> tuple[bytes, ...]:
    """Return `bitmap` of each row of bool[rows, flags]."""
    import numpy as np  # late, as above

    packed = np.packbits(flags, axis=1, bitorder="little")
    raw, length = packed.tobytes(), packed.shape[1]
    return tuple([raw[at * length : (at + 1) * length] for at in range(len(flags))])


def bit(data: bytes, number: int) -> bool:
    """Bit `number` of a bitmap."""
    return bool(data[number >> 3] >> (number & 7) & 1)


def _is_bitmap(data: bytes, count: int) -> bool:
    """Return whether these are `count` flags with zero spare bits."""
    return len(data) == -(-count // 8) and not (count & 7 and data[-1] >> (count & 7))
