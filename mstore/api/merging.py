"""Calls about merging: plan, merge, and report on both.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import structs

from mstore.api.arguments import check_fields, checked
from mstore.api.open_store import OpenStore, Report, thread_count
from mstore.errors import BadRequest, NotFound
from mstore.ids import PlanId, SnapshotId
from mstore.reports import (
    BlameReport,
    Explanation,
    MaterializeReport,
    MergeReport,
    MergeWarning,
    PlanReport,
    ReplayReport,
    SweepReport,
)
from mstore.requests import MergeRequest
from mstore.store import layout as layouts

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from mstore.merge.planning.request import Input, Request
    from mstore.merge.planning.session import Planned
    from mstore.merge.virtual.deferred import Deferred
    from mstore.objects.plan import Plan
    from mstore.store.plans import Sources


@checked("Store")
class Merging(OpenStore):
    """Calls about merging: plan, merge, and report on both."""

    def plan(
        self,
        request: MergeRequest,
        *,
        allow_noop: bool = False,
        keep: bool = False,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> PlanReport:
        """Plan a merge and store the plan.  The same request gives the same plan.

        allow_noop: also store a plan that reads nothing of what experts changed, or whose result is
        the base.
        keep: the plan must be stored: if this user may only read the store, raise before anything
        is read.  Without it, such a user's plan and newly computed statistics are not stored
        (`PlanReport.kept`).

        Raises BadRequest, NotFound, Incompatible, StorageFailed; then no plan is stored.
        """
        from mstore.merge.analysis.explain import plan_report

        began = time.monotonic()
        if keep:
            layouts.require_writable(self._catalog.layout)
        asked = self._asked(request)
        planned, sources, analyzed = self._made(
            asked, thread_count(threads), progress, allow_noop=allow_noop
        )
        plan = planned.plan
        return plan_report(
            plan,
            plan.id(),
            sources,
            planned.costs,
            analyzed=analyzed,
            memo=self._memo_expert_bytes(planned),
            warnings=self._of_licences(plan, sources),
            kept=plan.id() not in self._unkept,
            seconds=time.monotonic() - began,
        )

    def _made(
        self, asked: Request, threads: int, progress: Report | None, *, allow_noop: bool
    ) -> tuple[Planned, Sources, int]:
        """Return the plan of a request, the sources, and the bytes read for statistics.

        Reuses a plan made before; otherwise makes one and stores it if the store is writable.
        """
        from mstore.merge.planning.costs import costs_of
        from mstore.merge.planning.noop import require_effect
        from mstore.merge.planning.session import Planned, Planning, request_key
        from mstore.merge.running.commit import store_plan
        from mstore.objects.plan import Plan
        from mstore.store.plans import Source, Sources, sources_of

        base = Source(asked.base.snapshot, asked.base.name)
        experts = tuple(Source(expert.snapshot, expert.name) for expert in asked.experts)
        may_write = self._catalog.index.env.may_write()
        key = request_key(self._catalog, asked)
        # Without analysis a plan depends on which statistics happen to exist.
        known = self._memo.plan(key) if asked.analyze else None
        if known is not None:
            with suppress(NotFound):
                plan = self._catalog.record(Plan, known)
                if not allow_noop:
                    require_effect(self._catalog, plan)
                kept = sources_of(self._catalog, known, plan)
                sources = Sources(base, experts, kept.change, kept.overflow)
                if may_write:
                    store_plan(self._catalog, plan, sources)
                return Planned(plan, costs_of(self._catalog, plan)), sources, 0
        planning = Planning(
            self._catalog, self._statistics, asked, threads=threads, progress=progress
        )
        planned = planning.plan()
        if not allow_noop:
            require_effect(self._catalog, planned.plan)
        kept = sources_of(self._catalog, planned.plan.id(), planned.plan)
        overflow = kept.overflow if kept.has_counts else planning.overflow
        sources = Sources(base, experts, planning.change, overflow)
        if not may_write:
            with suppress(NotFound):
                self._catalog.record(Plan, planned.plan.id())
                return planned, sources, planning.analyzed
            self._unkept[planned.plan.id()] = planned.plan, sources
            return planned, sources, planning.analyzed
        id = store_plan(self._catalog, planned.plan, sources)
        if asked.analyze:
            self._memo.put_plan(key, id)
            self._memo.flush()
        return planned, sources, planning.analyzed

    def sweep(
        self,
        request: MergeRequest,
        *,
        shares: Sequence[float] | None = None,
        measure: bool = False,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> SweepReport:
        """Compute the cost and error of merges at many budgets; stores nothing but statistics.

        request: without a budget and without max_error; the sweep varies these itself.
        shares: budgets as shares of the full cost, above 0 and at most 1; None uses 5 % to 100 %.
        measure: also run the merges in memory and compare them with the full one; this reads all
        experts once.

        Each point is the plan that `plan` makes with that budget.

        Raises BadRequest, NotFound, Incompatible.
        """
        from mstore.merge.analysis.sweep import SHARES, check_shares, sweep
        from mstore.merge.planning.session import Planning

        wanted = check_shares(SHARES if shares is None else shares)
        asked = self._asked(request)
        if request.budget is not None or request.max_error is not None:
            raise BadRequest("a sweep goes over budgets itself: leave out budget and max_error")
        number = thread_count(threads)
        return sweep(
            Planning(self._catalog, self._statistics, asked, threads=number, progress=progress),
            wanted,
            memo_expert_bytes=self._memo_expert_bytes,
            measure=measure,
            threads=number,
            progress=progress,
        )

    def plans(self) -> list[PlanReport]:
        """Return every stored plan, sorted by base, method and cost."""
        from mstore.merge.analysis.explain import plan_report
        from mstore.merge.planning.costs import told_costs
        from mstore.objects.plan import Plan
        from mstore.store.plans import plan_ids, sources_of

        found = []
        for id in plan_ids(self._catalog):
            plan = self._catalog.record(Plan, id)
            # A plan whose inputs were removed can be neither named nor run.
            with suppress(NotFound):
                sources = sources_of(self._catalog, id, plan)
                found.append(plan_report(plan, id, sources, told_costs(self._catalog, plan)))
        return sorted(found, key=lambda p: (p.base, p.method, p.planned_expert_bytes, p.plan))

    def _asked(self, request: MergeRequest) -> Request:
        from mstore.merge.planning.request import resolve

        check_fields("MergeRequest", request)
        for rule in request.rules:
            check_fields("TensorRule", rule)
        experts = request.weighted()
        return resolve(
            request,
            base=self._input(request.base),
            experts=[self._input(revision) for revision, _ in experts],
        )

    def _of_licences(self, plan: Plan, sources: Sources) -> tuple[MergeWarning, ...]:
        """Return warnings about the licences that the inputs' model cards state."""
        from mstore.merge.running.papers import Papers
        from mstore.store import contents

        inputs = (sources.base, *sources.experts)
        names = [source.name for source in inputs]
        key = (plan.base, *(expert.manifest for expert in plan.experts), *names)
        if key in self._licences:
            return self._licences[key]
        with contents.held(self._catalog, (source.snapshot_id() for source in inputs)):
            for source in inputs:
                contents.require(self._catalog, source.snapshot_id(), source.name)
            self._licences[key] = tuple(
                MergeWarning(
                    "licences",
                    names[who[0]] if len(who) == 1 else None,
                    f"{', '.join(dict.fromkeys(names[n] for n in who))}: {text}",
                )
                for who, text in Papers(self._catalog, plan).licence_warnings()
            )
        return self._licences[key]

    def _memo_expert_bytes(self, planned: Planned) -> int:
        """Return how many of a plan's expert bytes the memo table saves right now."""
        if not self._memo.has_outputs():
            return 0
        from mstore.merge.running.memo_hits import memo_expert_bytes

        return memo_expert_bytes(self._catalog, self._memo, planned.plan, planned.costs.planned)

    def _input(self, revision: str | SnapshotId) -> Input:
        from mstore.merge.planning.request import Input

        return Input(self._real(revision), str(revision))

    def export_plan(self, plan: str) -> str:
        """Return a plan (id or prefix) as JSON text, also one of this object that is not stored.

        Raises NotFound, BadName.
        """
        from mstore.merge.analysis.exchange import export_plan, plan_text

        for id, (unkept, sources) in self._unkept.items():
            if plan == id.hex():
                return plan_text(unkept, id, sources)
        return export_plan(self._catalog, plan)

    def import_plan(self, text: str) -> PlanReport:
        """Store a plan that `export_plan` wrote.

        Raises BadRequest (not a plan), NotFound (an input is not in this store).
        """
        from mstore.merge.analysis.exchange import import_plan

        return import_plan(self._catalog, text)

    def merge(
        self,
        plan: PlanReport | PlanId | str,
        *,
        name: str,
        message: str = "",
        virtual: bool = False,
        allow_noop: bool = False,
        threads: int | None = None,
        memo: bool = True,
        memory: int | None = None,
        executor: Executor | None = None,
        progress: Report | None = None,
    ) -> MergeReport:
        """Run a stored plan and publish the result under the ref `name`, or publish nothing.

        plan: what `plan` returned, or the id (or id prefix) of a stored plan.
        message: the reason, in words.
        virtual: publish the plan itself; blocks are computed when they are read, and `materialize`
        computes all of them.
        allow_noop: also run a plan, named by its id, that reads nothing or whose result is the
        base; a plan that `plan` returned was already allowed there.
        threads: the most threads to use; None means one per processor.  The result is the same for
        any number.
        memo: reuse outputs of earlier merges from the memo table, and add to it.
        memory: the most anonymous memory in bytes; None means 512 MiB.
        executor: computes slices instead of threads; its workers need the store's directory but not
        its index.

        Raises NotFound, BadRequest, BadName, Conflict (the ref moved meanwhile), Corrupt,
        BudgetExceeded (a read outside the plan), StorageFailed.
        """
        from mstore.merge.analysis.explain import plan_report
        from mstore.merge.planning.costs import Costs, told_costs
        from mstore.merge.planning.noop import require_effect
        from mstore.merge.running.commit import run_merge
        from mstore.objects.plan import Plan
        from mstore.store.plans import find, sources_of

        began = time.monotonic()
        layouts.require_writable(self._catalog.layout)
        id = plan.plan if isinstance(plan, PlanReport) else find(self._catalog, str(plan))
        analyzed = plan.analyze_bytes_read if isinstance(plan, PlanReport) else 0
        record = self._catalog.record(Plan, id)
        if not allow_noop and not isinstance(plan, PlanReport):
            require_effect(self._catalog, record)
        sources = sources_of(self._catalog, id, record)
        licences = self._of_licences(record, sources)
        if virtual:
            from mstore.merge.virtual.deferred import commit_virtual

            deferred = commit_virtual(self._catalog, record, sources, name=name, message=message)
            costs = (
                Costs(plan.full_expert_bytes, plan.planned_expert_bytes)
                if isinstance(plan, PlanReport)
                else told_costs(self._catalog, record)
            )
            return deferred_report(
                deferred,
                plan_report(
                    record,
                    id,
                    sources,
                    costs,
                    analyzed=analyzed,
                    warnings=licences,
                ),
                name=name,
                seconds=time.monotonic() - began,
            )
        merged = run_merge(
            self._catalog,
            record,
            sources,
            name=name,
            message=message,
            threads=thread_count(threads),
            progress=progress,
            memo=self._memo if memo else None,
            memory=memory,
            executor=executor,
        )
        sources = structs.replace(sources, overflow=merged.overflow)
        planned = plan_report(record, id, sources, merged.outcome.costs, warnings=licences)
        return MergeReport(
            name=name,
            plan=id,
            snapshot=merged.snapshot,
            manifest=merged.manifest,
            new_snapshot=merged.is_new,
            virtual=False,
            method=record.method,
            budget_bytes=record.budget,
            max_error=record.criteria.max_error,
            full_expert_bytes=planned.full_expert_bytes,
            planned_expert_bytes=planned.planned_expert_bytes,
            expert_bytes_read=merged.outcome.expert_bytes_read,
            memo_expert_bytes=merged.outcome.memo_expert_bytes,
            resumed_expert_bytes=merged.outcome.resumed_expert_bytes,
            analyze_bytes_read=analyzed,
            base_bytes_read=merged.outcome.base_bytes_read,
            bytes_written=merged.bytes_written,
            blocks_total=merged.outcome.blocks_total,
            blocks_reused=merged.outcome.blocks_reused,
            error_bound=record.error_bound,
            error_estimate=record.error_estimate,
            error_share_estimate=planned.error_share_estimate,
            overflow=planned.overflow,
            warnings=planned.warnings,
            notes=planned.notes,
            seconds=time.monotonic() - began,
        )

    def materialize(
        self,
        name: str,
        *,
        message: str = "",
        threads: int | None = None,
        progress: Report | None = None,
    ) -> MaterializeReport:
        """Compute the virtual merge at a branch in full and move the branch to the result.

        The content equals that of an ordinary merge of the same plan.  The message stays unless a
        new one is given.

        Raises NotFound, BadRequest (not a branch), Conflict (a tag, or it moved).
        """
        from mstore.merge.virtual.deferred import materialize

        began = time.monotonic()
        made = materialize(
            self._catalog,
            self._memo,
            name,
            message=message,
            threads=thread_count(threads),
            progress=progress,
        )
        outcome = None if made.merged is None else made.merged.outcome
        return MaterializeReport(
            name=name,
            plan=made.record.plan_id(),
            snapshot=made.snapshot,
            manifest=made.record.manifest_id(),
            new_snapshot=made.merged is not None,
            expert_bytes_read=0 if outcome is None else outcome.expert_bytes_read,
            base_bytes_read=0 if outcome is None else outcome.base_bytes_read,
            bytes_written=0 if made.merged is None else made.merged.bytes_written,
            blocks_total=0 if outcome is None else outcome.blocks_total,
            blocks_reused=0 if outcome is None else outcome.blocks_reused,
            seconds=time.monotonic() - began,
        )

    def explain(self, revision: str | SnapshotId, tensor: str | None = None) -> Explanation:
        """Report which experts made a merge, block by block, and what was left out and why.

        Reads no block.

        tensor: report only this one, with the fate of each of its chunks.

        Raises BadRequest if it is not a merge, NotFound, BadName.
        """
        from mstore.merge.analysis.explain import explain

        return explain(self._catalog, self._catalog.resolve(revision), tensor)

    def blame(
        self,
        revision: str | SnapshotId,
        tensor: str | None = None,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> BlameReport:
        """Measure each expert's share of what a merge changed, by running its plan again.

        tensor: measure only this one.

        Raises BadRequest (not a merge), NotFound (an unknown revision or tensor), Corrupt.
        """
        from mstore.merge.analysis.blame import blame

        return blame(
            self._catalog,
            self._catalog.resolve(revision),
            tensor,
            threads=thread_count(threads),
            progress=progress,
        )

    def replay(
        self,
        revision: str | SnapshotId,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> ReplayReport:
        """Run a merge's recorded plan again and compare the results.

        Raises BadRequest (not a merge, or a virtual one, which has no bytes to compare with),
        NotFound, Corrupt.
        """
        from mstore.merge.running.replay import replay

        id = self._real(revision)
        return replay(self._catalog, id, threads=thread_count(threads), progress=progress)


def deferred_report(
    merged: Deferred, plan: PlanReport, *, name: str, seconds: float
) -> MergeReport:
    """Return the report of a merge that was committed as its plan: it read nothing."""
    return MergeReport(
        name=name,
        plan=plan.plan,
        snapshot=merged.snapshot,
        manifest=merged.manifest,
        new_snapshot=merged.is_new,
        virtual=merged.is_virtual,
        method=plan.method,
        budget_bytes=plan.budget_bytes,
        max_error=plan.max_error,
        full_expert_bytes=plan.full_expert_bytes,
        planned_expert_bytes=plan.planned_expert_bytes,
        expert_bytes_read=0,
        memo_expert_bytes=0,
        resumed_expert_bytes=0,
        analyze_bytes_read=plan.analyze_bytes_read,
        base_bytes_read=0,
        bytes_written=merged.bytes_written,
        blocks_total=merged.blocks_total,
        blocks_reused=merged.blocks_reused,
        error_bound=plan.error_bound,
        error_estimate=plan.error_estimate,
        error_share_estimate=plan.error_share_estimate,
        overflow=plan.overflow,
        warnings=plan.warnings,
        notes=plan.notes,
        seconds=seconds,
    )
