"""Stored plans: a request gets the plan that was made for it before, or a new one.

Owns when a plan is made again and when it is stored.  A user who may only read the store gets the
plan, and nothing is written.  Stops at any instruction leave the plan stored or not, never half.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from mstore.blocks.schema import Source, Sources
from mstore.errors import NotFound
from mstore.merge.planning.costs import Costs, costs_of, told_costs
from mstore.merge.planning.noop import require_effect
from mstore.merge.planning.report import PlanReport, plan_report
from mstore.merge.planning.request import Request
from mstore.merge.planning.session import Planning, request_key
from mstore.objects.plan import Plan
from mstore.progress import ProgressCallback
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.plans import plan_ids, sources_of, store_plan


class StoredPlan(msgspec.Struct, frozen=True):
    """The plan of a request, its inputs under the request's names, and its costs in this store.

    analyzed: expert bytes read for missing statistics and for norms of adapters' products; factors:
    those for norms.  is_stored: False if this user may only read the store and it does not hold the
    plan.
    """

    plan: Plan
    sources: Sources
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
    base = Source(request.base.snapshot, request.base.name)
    experts = tuple(Source(expert.snapshot, expert.name) for expert in request.experts)
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
            sources = Sources(base, experts, kept.change, kept.risks)
            if may_write:
                store_plan(catalog, plan, sources)
            return StoredPlan(plan, sources, costs_of(catalog, plan), 0, is_stored=True)
    if request.layers:
        from mstore.merge.planning.stack import stacked

        plan = stacked(catalog, request)
        if not allow_noop:
            require_effect(catalog, plan)
        sources = Sources(base, experts)
        if may_write:
            store_plan(catalog, plan, sources)
        is_stored = may_write or _is_stored(catalog, plan)
        return StoredPlan(plan, sources, Costs(0, 0), 0, is_stored)
    since = catalog.lengths.state()
    planning = Planning(catalog, statistics, request, threads=threads, progress=progress)
    planned = planning.plan()
    plan = planned.plan
    # For the merge that mostly follows.
    catalog.lengths.keep_sums(plan.id(), (planned.costs.full, planned.costs.planned), since)
    if not allow_noop:
        require_effect(catalog, plan, in_bytes=in_bytes)
    sources = Sources(base, experts, planning.change, planning.risks)
    if may_write:
        id = store_plan(catalog, plan, sources)
        if request.analyze:
            memo.put_plan(key, id)
            memo.flush()
    is_stored = may_write or _is_stored(catalog, plan)
    return StoredPlan(plan, sources, planned.costs, planning.analyzed, is_stored, planning.factors)


def _is_stored(catalog: Catalog, plan: Plan) -> bool:
    with suppress(NotFound):
        catalog.record(Plan, plan.id())
        return True
    return False


def plan_reports(catalog: Catalog) -> list[PlanReport]:
    """Report every stored plan whose inputs this store has, by base, method and cost."""
    found = []
    for id in plan_ids(catalog):
        plan = catalog.record(Plan, id)
        # A plan whose inputs were removed can be neither named nor run.
        with suppress(NotFound):
            sources = sources_of(catalog, id, plan)
            found.append(plan_report(plan, id, sources, told_costs(catalog, plan)))
    return sorted(found, key=lambda p: (p.base, p.method, p.planned_expert_bytes, p.plan))
