"""From a request to a plan record: the one that was made for it before, or a new one.

`Planning` surveys and ranks once for one request, and serves any number of budgets.
`plan_of_request` owns when a plan is made again and when it is stored.  A user who may only read
the store gets the plan, and nothing is written.  Stops at any instruction leave the plan stored or
not, never half.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
from blake3 import blake3

from mstore.blocks.schema import NamedSnapshot, PlanInputs, Risk
from mstore.merge.methods.method import Operation
from mstore.merge.methods.model import States
from mstore.merge.methods.parameters import Value
from mstore.merge.planning.costs import Costs, costs_of
from mstore.merge.planning.planner import ChosenChunks, Planner
from mstore.merge.planning.request import Request
from mstore.merge.planning.survey import Survey
from mstore.merge.planning.surveyor import Surveyor
from mstore.merge.planning.tensors import AT_EDGES
from mstore.merge.planning.thresholds import Found, Thresholds
from mstore.merge.planning.validate import require_effect
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.models import tensors_of
from mstore.store.objects.plan import Criteria, Plan, PlanOperation, PlanTensor, TrimThreshold
from mstore.store.plans import sources_of, store_plan
from mstore.terms.errors import NotFound
from mstore.terms.ids import ManifestId
from mstore.terms.report import ProgressCallback

PLANNER = 10
"""Increment whenever the same request leads to a different plan."""


def request_key(catalog: Catalog, request: Request) -> bytes:
    """Return the 32-byte key of all that determines a plan: contents, costs, parameters, criteria.

    Excludes statistics: if they may be computed (`Request.analyze`), none is missing.
    """
    base, *experts = (
        catalog.snapshot(one.snapshot).manifest_id() for one in (request.base, *request.experts)
    )
    # A block that was dropped and stored again may have come back with another codec.
    costs = _costs(catalog, base, experts)
    operation = request.operation
    said = (
        *(PLANNER, catalog.block_size, bytes(base), list(map(bytes, experts)), costs),
        *(operation.weights, operation.method.name),
        *(sorted(operation.parameters.items()), request.budget, request.max_error, request.dtype),
        *(request.score, request.only, request.skip, request.expert_budget, request.top_p),
    )
    more: tuple[object, ...] = ()
    if request.rules or request.outputs or request.layers:
        rules = [
            (
                *(rule.patterns, rule.operation.method.name, rule.operation.weights, rule.dtype),
                sorted(rule.operation.parameters.items()),
            )
            for rule in request.rules
        ]
        more = (rules, request.outputs, *([request.layers] if request.layers else []))
    if request.allow_missing:
        more = (*more, "allow missing")
    choice = request.choice
    if choice.base is not None or request.companions:
        more = (*more, choice.base, choice.experts, request.companions)
    text = msgspec.msgpack.encode((*said, *more))
    return blake3(text, derive_key_context="mstore 1 request").digest()


def _costs(catalog: Catalog, base: ManifestId, experts: Sequence[ManifestId]) -> list[bytes]:
    """Return a digest of the bytes at rest of each expert's blocks, for tensors unlike the base's.

    All are looked up together: what many experts share is looked up once.
    """
    same = set(tensors_of(catalog, catalog.manifest(base)).values())
    own = [
        [
            id
            for id in dict.fromkeys(tensors_of(catalog, catalog.manifest(expert)).values())
            if id not in same
        ]
        for expert in experts
    ]
    ids = list(dict.fromkeys(itertools.chain.from_iterable(own)))
    records = catalog.tensors(ids)
    found = catalog.lengths.of([record.blocks for record in records])
    lengths = {
        id: one.astype("<i8", copy=False).tobytes() for id, one in zip(ids, found, strict=True)
    }
    return [blake3(b"".join([lengths[id] for id in some])).digest() for some in own]


class Planned(msgspec.Struct, frozen=True):
    """A plan, and its costs in the store that it was made in."""

    plan: Plan
    costs: Costs


class Planning:
    """One request, surveyed and ranked.  Not thread-safe.

    Raises BadRequest, Incompatible, Corrupt, StorageFailed wherever it reads the store.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        request: Request,
        *,
        threads: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.catalog = catalog
        self.request = request
        self._statistics = statistics
        self._threads = threads
        self._progress = progress
        self._surveyor = Surveyor(catalog, statistics, request, threads=threads, progress=progress)
        self._survey = self._surveyor.survey()
        self._planner = Planner(self._survey, request)
        self._thresholds: Found = {}

    @property
    def analyzed(self) -> int:
        """Expert bytes read so far for missing statistics and for norms of products."""
        return self._surveyor.analyzed.total + self.factors

    @property
    def factors(self) -> int:
        """Bytes of adapters read so far for the norms of their products."""
        return self._surveyor.factors.total

    @property
    def full_expert_bytes(self) -> int:
        """Cost of all expert blocks that matter."""
        return self._planner.full_expert_bytes

    def plan(self) -> Planned:
        """Return the requested plan."""
        return self._finished(self._planner.select(), self.request)

    @property
    def change(self) -> float | None:
        """Estimate of what the full merge changes (`ChosenChunks.change`)."""
        return self._planner.change

    @property
    def risks(self) -> tuple[Risk, ...]:
        """Tensors of which some elements of the full merge may not be finite, worst first."""
        experts: dict[str, list[int]] = {}
        for number, name in self._survey.unreliable:
            experts.setdefault(name, []).append(number)
        elements = {one.name: one.elements for one in self._survey.tensors}
        return (
            *(Risk(name, elements[name], tuple(own)) for name, own in experts.items()),
            *(Risk(name, of, ()) for name, of in self._planner.overflow() if name not in experts),
        )

    def plan_within(self, budget: int) -> Planned:
        """Return the plan of the same request with this budget, in bytes, and no error limit."""
        return self._finished(
            self._planner.cut(budget), msgspec.structs.replace(self.request, max_error=None)
        )

    def full_plan(self) -> Planned:
        """Return the plan of the same merge that leaves nothing out: errors are relative to it."""
        whole = msgspec.structs.replace(
            self.request, budget=None, max_error=None, expert_budget=None, top_p=None
        )
        return self._finished(Planner(self._survey, whole).select(), whole)

    @property
    def base_squares(self) -> float | None:
        """Square of the norm that errors are relative to, None if unknown."""
        return self._survey.base_squares

    def _finished(self, selection: ChosenChunks, request: Request) -> Planned:
        remarks = list(selection.remarks)
        thresholds = [one.thresholds for one in self._survey.tensors]
        if any(tensor.cuts for tensor in self._survey.tensors):
            with ThreadPoolExecutor(self._threads, "second look") as pool:
                cut = Thresholds(
                    self.catalog,
                    self._statistics,
                    analyze=request.analyze,
                    pool=pool,
                    meter=self._surveyor.analyzed,
                    known=self._thresholds,
                    progress=self._progress,
                )
                cut.expect(zip(self._survey.tensors, selection.states, strict=True))
                thresholds = [
                    own or cut.of_tensor(tensor, states)
                    for own, tensor, states in zip(
                        thresholds, self._survey.tensors, selection.states, strict=True
                    )
                ]
            if cut.at_edges:
                remarks.append(AT_EDGES)
        self._statistics.flush()
        return Planned(
            _record(self._survey, request, selection, thresholds, remarks),
            Costs(selection.full_expert_bytes, selection.planned_expert_bytes),
        )


def _record(
    survey: Survey,
    request: Request,
    selection: ChosenChunks,
    thresholds: list[tuple[TrimThreshold, ...]],
    remarks: list[str],
) -> Plan:
    numbers, operations = _numbered(survey, request)
    tensors = tuple(
        PlanTensor(
            tensor.name,
            tensor.chunk_elements,
            states,
            cut,
            omitted,
            number,
            tensor.sources,
            tensor.dtype,
            tensor.operation.mixture,
        )
        for tensor, number, states, cut, omitted in zip(
            survey.tensors,
            numbers,
            map(_bytes_of, selection.states),
            thresholds,
            selection.omitted,
            strict=True,
        )
    )
    return Plan(
        operations=operations,
        inputs=request.inputs(survey.base, survey.experts),
        dtype=request.dtype,
        block_size=survey.block_size,
        budget=selection.budget,
        criteria=Criteria(
            score=request.score,
            max_error=request.max_error,
            expert_budget=selection.expert_budget,
            only=request.only,
            skip=request.skip,
            top_p=request.top_p,
        ),
        allow_missing=survey.has_missing,
        full_expert_bytes=selection.plain_bytes[0],
        planned_expert_bytes=selection.plain_bytes[1],
        error_bound=selection.error_bound,
        error_estimate=selection.error_estimate,
        tensors=tensors,
        copied=survey.copied,
        remarks=tuple(remarks),
        without=survey.without,
    )


_Key = tuple[str, tuple[tuple[str, Value], ...], tuple[float, ...]]


def _shape(operation: Operation) -> _Key:
    """Return what tells operations apart in a plan: all but the mixture of one tensor."""
    return operation.method.name, tuple(sorted(operation.parameters.items())), operation.given


def _numbered(survey: Survey, request: Request) -> tuple[list[int], tuple[PlanOperation, ...]]:
    """Return the number of each tensor's operation, and all operations, the plan's own first."""
    numbers = {_shape(request.operation): 0}
    # Mostly all tensors have one object.
    known: dict[int, int] = {}
    found = []
    for tensor in survey.tensors:
        number = known.get(id(tensor.operation))
        if number is None:
            number = numbers.setdefault(_shape(tensor.operation), len(numbers))
            known[id(tensor.operation)] = number
        found.append(number)
    return found, tuple(PlanOperation(*key) for key in numbers)


def _bytes_of(states: States) -> tuple[bytes, ...]:
    """Convert uint8[K, chunks] to one byte per chunk, for each expert."""
    raw, chunks = states.tobytes(), states.shape[1]
    return tuple(raw[at : at + chunks] for at in range(0, len(raw), chunks))


class StoredPlan(msgspec.Struct, frozen=True):
    """The plan of a request, its inputs under the request's names, and its costs in this store.

    analyzed: expert bytes read for missing statistics and for norms of adapters' products; factors:
    those for norms.  is_stored: False if this user may only read the store and it does not hold the
    plan.
    """

    plan: Plan
    sources: PlanInputs
    costs: Costs
    analyzed: int
    is_stored: bool
    factors: int = 0


def plan_of_request(
    catalog: Catalog,
    statistics: StatsStore,
    memo: Memo,
    request: Request,
    *,
    allow_noop: bool,
    threads: int,
    progress: ProgressCallback | None,
) -> StoredPlan:
    """Return the plan of a request, stored if the store is writable for this user.

    allow_noop: also of a plan without effect.

    Raises BadRequest, Incompatible, Corrupt, StorageFailed; then no plan is stored.
    """
    base = NamedSnapshot(request.base.snapshot, request.base.name)
    experts = tuple(NamedSnapshot(expert.snapshot, expert.name) for expert in request.experts)
    may_write = catalog.index.env.may_write()
    limits = {"budget": request.budget, "expert_budget": request.expert_budget}
    in_bytes = [name for name, limit in limits.items() if isinstance(limit, int)]
    key = request_key(catalog, request)
    # Without analysis a plan depends on which statistics happen to exist.
    known = memo.plan(key) if request.analyze and not request.layers else None
    if known is not None:
        with suppress(NotFound):
            plan = catalog.record(Plan, known)
            if not allow_noop:
                require_effect(catalog, plan, in_bytes=in_bytes)
            kept = sources_of(catalog, known, plan)
            sources = PlanInputs(base, experts, kept.change, kept.risks)
            if may_write and sources != kept:
                store_plan(catalog, plan, sources)
            return StoredPlan(plan, sources, costs_of(catalog, plan), 0, is_stored=True)
    analyzed = factors = 0
    if request.layers:
        from mstore.merge.planning.stack import stacked

        plan, costs = stacked(catalog, request), Costs(0, 0)
        sources = PlanInputs(base, experts)
    else:
        planning = Planning(catalog, statistics, request, threads=threads, progress=progress)
        planned = planning.plan()
        plan, costs = planned.plan, planned.costs
        analyzed, factors = planning.analyzed, planning.factors
        sources = PlanInputs(base, experts, planning.change, planning.risks)
    if not allow_noop:
        require_effect(catalog, plan, in_bytes=in_bytes)
    if may_write:
        id = store_plan(catalog, plan, sources)
        if request.analyze and not request.layers:
            memo.put_plan(key, id)
            memo.flush()
    is_stored = may_write or _is_stored(catalog, plan)
    return StoredPlan(plan, sources, costs, analyzed, is_stored, factors)


def _is_stored(catalog: Catalog, plan: Plan) -> bool:
    with suppress(NotFound):
        catalog.record(Plan, plan.id())
        return True
    return False
