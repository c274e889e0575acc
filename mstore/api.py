"""The public face: an open store, its snapshots, and everything that can be done with them.

    store = mstore.Store.open(path)
    snapshot = store["llama/merged"]
    snapshot.tensor("model.norm.weight")

A store may be shared by threads.  It does not survive a fork: close it before, or start processes
with the spawn method and open it there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mstore import lineage
from mstore.blocks.packs import Kind
from mstore.errors import BadRequest, Conflict, NotFound
from mstore.ids import Buffer, ManifestId, PlanId, SnapshotId
from mstore.objects.snapshot import SnapshotRecord
from mstore.reports import (
    GOOD_SIGNATURE,
    AddReport,
    AnalyzeReport,
    BlameReport,
    CheckoutReport,
    CheckReport,
    DiffReport,
    Explanation,
    FileReport,
    GcReport,
    MaterializeReport,
    MergeReport,
    MigrateReport,
    ParentReport,
    PlanReport,
    Progress,
    PruneReport,
    ReflogReport,
    RefReport,
    ReindexReport,
    RemoveReport,
    RepairReport,
    ReplayReport,
    SignatureReport,
    SnapshotReport,
    StoreReport,
    SweepReport,
    TensorReport,
    UsageReport,
    VerifyReport,
)
from mstore.store import contents, leases, refs
from mstore.store.catalog import Catalog
from mstore.store.config import Config, typed
from mstore.store.layout import DEFAULT_BLOCK_SIZE, FORMAT_VERSION, locate
from mstore.store.memo import Memo
from mstore.store.transaction import RefMove, branch_to_move, move_refs

# numpy, numba and the merge engine are imported by the calls that need them: `log` must not
# wait for a compiler.
if TYPE_CHECKING:
    from concurrent.futures import Executor

    import numpy as np

    from mstore.add import Base
    from mstore.checkpoint.directory import Checkpoint, CheckpointLimits
    from mstore.convert.conversion import ConversionLimits
    from mstore.merge.planning.request import Input, Request
    from mstore.merge.virtual.blocks import VirtualBlocks
    from mstore.merge.virtual.deferred import Deferred
    from mstore.objects.plan import Plan
    from mstore.signing import SigningKey
    from mstore.stats.store import StatsStore
    from mstore.store.plans import Sources
    from mstore.view import BlockCache, SnapshotView

Report = Callable[[Progress], None]
VIEWS_KEPT = 8


class Snapshot:
    """One immutable snapshot of an open store."""

    def __init__(self, store: Store, id: SnapshotId) -> None:
        self._store = store
        self._record: SnapshotRecord = store._catalog.snapshot(id)
        self.id = id

    def __repr__(self) -> str:
        return f"Snapshot({self.id.short})"

    @property
    def manifest(self) -> ManifestId:
        """What it contains: equal ids, equal bytes."""
        return self._record.manifest_id()

    @property
    def parents(self) -> tuple[ParentReport, ...]:
        """Role (previous, base, expert), snapshot and refs of each parent."""
        return lineage.parents(self._record, lineage.names_of(self._store._catalog))

    @property
    def message(self) -> str:
        """What its maker wrote."""
        return self._record.message

    @property
    def time_ns(self) -> int:
        """When it was made, in nanoseconds since the epoch."""
        return self._record.time_ns

    def files(self) -> list[FileReport]:
        """Its files by path."""
        return lineage.files(self._store._catalog, self.id)

    def tensor_names(self) -> list[str]:
        """Names of its tensors in file and data order."""
        return list(self._store.view(self.id).tensors)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only array; bfloat16 and float8 through ml_dtypes.

        Raises NotFound, Corrupt.
        """
        return self._store.view(self.id).tensor(name)

    def read(self, path: str) -> bytes:
        """The bytes of one file."""
        return b"".join(self._store.view(self.id).stream(path))

    def lineage(self) -> list[SnapshotReport]:
        """This snapshot and all that it came from, children before parents."""
        return lineage.log(self._store._catalog, [self.id], None)


class Store:
    """An open store.  Use as a context manager, or call `close`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stats: StatsStore | None = None
        self._remembered: Memo | None = None
        self._cache: BlockCache | None = None
        self._views: dict[SnapshotId, SnapshotView] = {}
        self._views_lock = Lock()
        self._virtual: VirtualBlocks | None = None
        self._virtual_lock = Lock()

    @classmethod
    def init(
        cls,
        path: str | Path,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        codec: str | None = None,
    ) -> Self:
        """Make a store in a new or empty directory.

        block_size: bytes, a power of two from 64 KiB to 16 MiB, fixed for the store's life.
        codec: which codecs new blocks may take, as `configure` sets it.  Raises Conflict if
        something is there, BadRequest, Incompatible on a network filesystem.
        """
        config = Config() if codec is None else Config().changed({"codec": codec})
        return cls(Catalog.create(Path(path), block_size, config))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a store.  Raises NotFound, Incompatible (newer format, network filesystem)."""
        return cls(Catalog.open(Path(path)))

    @classmethod
    def open_checked(cls, path: str | Path) -> Self:
        """Open a store whose index may be damaged: it is looked at before LMDB is given it.

        Raises as `open` does, and Corrupt where the index cannot be trusted.
        """
        from mstore.check.index_file import require_sound

        require_sound(locate(Path(path)))
        return cls.open(path)

    def close(self) -> None:
        """Let go of files and index."""
        if self._virtual is not None:
            self._virtual.close()
            self._virtual = None
        if self._stats is not None:
            self._stats.close()
            self._stats = None
        if self._remembered is not None:
            self._remembered.close()
            self._remembered = None
        self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._catalog.layout.root

    @property
    def block_size(self) -> int:
        """Bytes of a full block."""
        return self._catalog.block_size

    @property
    def uuid(self) -> str:
        """The store's own name."""
        return str(self._catalog.layout.uuid)

    @property
    def _statistics(self) -> StatsStore:
        if self._stats is None:
            from mstore.stats.store import StatsStore

            self._stats = StatsStore(self._catalog.layout.stats)
        return self._stats

    def _computing(self) -> VirtualBlocks:
        """What computes virtual blocks, made when the first one is read."""
        with self._virtual_lock:
            if self._virtual is None:
                from mstore.merge.virtual.blocks import VirtualBlocks

                self._virtual = VirtualBlocks(self._catalog, self._memo, threads=thread_count(None))
            return self._virtual

    @property
    def _memo(self) -> Memo:
        if self._remembered is None:
            self._remembered = Memo(self._catalog.layout.memo)
        return self._remembered

    # -- reading -----------------------------------------------------------------------------

    def __getitem__(self, revision: str) -> Snapshot:
        """The snapshot that a ref, tag, id prefix, REV~N or NAME@{N} names."""
        return Snapshot(self, self._catalog.resolve(revision))

    def view(self, revision: str | SnapshotId) -> SnapshotView:
        """A snapshot as read-only files, as a mount shows it."""
        from mstore.view import BlockCache, SnapshotView

        id = revision if isinstance(revision, SnapshotId) else self._catalog.resolve(revision)
        contents.require(self._catalog, id, str(revision))
        with self._views_lock:
            view = self._views.pop(id, None)
            if view is None:
                if self._cache is None:
                    self._cache = BlockCache(self._catalog, computing=self._computing)
                view = SnapshotView(self._catalog, id, self._cache)
            # The view last used goes out last: `tensor` after `tensor` decodes one manifest.
            self._views[id] = view
            if len(self._views) > VIEWS_KEPT:
                del self._views[next(iter(self._views))]
        return view

    def snapshot_ids(self) -> list[SnapshotId]:
        """Every snapshot of the store."""
        return self._catalog.snapshot_ids()

    def log(
        self,
        revision: str | None = None,
        limit: int | None = None,
        *,
        signers: Mapping[bytes, str] | None = None,
    ) -> list[SnapshotReport]:
        """The lineage of a revision, or of all refs: children before parents, newest first.

        signers: trusted keys and their names (`read_signers`), to tell whose signatures there are.
        """
        starts = None if revision is None else [self._catalog.resolve(revision)]
        return self._signed(lineage.log(self._catalog, starts, limit), signers or {})

    def show(self, revision: str, *, signers: Mapping[bytes, str] | None = None) -> SnapshotReport:
        """One snapshot.  signers: as for `log`."""
        id = self._catalog.resolve(revision)
        report = lineage.describe(self._catalog, id, lineage.names_of(self._catalog))
        return self._signed([report], signers or {})[0]

    def _signed(
        self, snapshots: list[SnapshotReport], signers: Mapping[bytes, str]
    ) -> list[SnapshotReport]:
        """The same with the state of their signatures; free in a store without any."""
        with self._catalog.index.env.read() as transaction:
            if self._catalog.index.count(transaction, "signatures") == 0:
                return snapshots
        from mstore.signing import states

        return [
            replace(one, signatures=states(self._catalog, one.snapshot, signers))
            for one in snapshots
        ]

    def files(self, revision: str) -> list[FileReport]:
        """The files of a snapshot."""
        return lineage.files(self._catalog, self._catalog.resolve(revision))

    def tensors(self, revision: str) -> list[TensorReport]:
        """The tensors of a snapshot, in file and data order."""
        return lineage.tensors(self._catalog, self._whole(revision))

    def read_file(self, revision: str, path: str) -> Iterator[Buffer]:
        """The bytes of one file, block by block.  Raises NotFound before the first piece."""
        view = self.view(revision)
        view.require(path)
        return view.stream(path)

    def diff(
        self, a: str, b: str, *, blocks: bool = False, threads: int | None = None
    ) -> DiffReport:
        """How snapshot b differs from snapshot a."""
        from mstore.diff import diff

        older, newer = self._whole(a), self._whole(b)
        with leases.pinned(self._catalog.layout, [older, newer]):
            return diff(
                self._catalog,
                older,
                newer,
                blocks=blocks,
                threads=thread_count(threads),
                computing=self._computing,
            )

    def checkout(
        self,
        revision: str,
        directory: str | Path,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> CheckoutReport:
        """A byte-exact copy in a new or empty directory."""
        from mstore.checkout import checkout

        return checkout(
            self._catalog,
            self._whole(revision),
            Path(directory),
            threads=thread_count(threads),
            progress=progress,
            computing=self._computing,
        )

    # -- settings ----------------------------------------------------------------------------

    @property
    def config(self) -> Mapping[str, str | int]:
        """Every setting of the store and what it is."""
        return self._catalog.config.values()

    def configure(self, key: str, value: str | int) -> None:
        """Change a setting, for this store and whoever opens it later.

        codec: which codecs new blocks may take (auto, raw, dense).  reflog_days: for how many days
        the reflog keeps what refs pointed at.  Raises BadRequest for another key or value.
        """
        self._catalog.configure({key: typed(key, value) if isinstance(value, str) else value})

    # -- writing -----------------------------------------------------------------------------

    def add(
        self,
        path: str | Path,
        *,
        name: str,
        base: str | None = None,
        detect_base: bool = False,
        codec: str | None = None,
        message: str = "",
        threads: int | None = None,
        convert: ConversionLimits | None = None,
        limits: CheckpointLimits | None = None,
        progress: Report | None = None,
    ) -> AddReport:
        """Store a checkpoint directory, or one .safetensors file, under the ref `name`.

        With `base`, statistics of the differences are kept for planning merges.  detect_base:
        where none is named, find the nearest of the stored snapshots; the report says which and
        why.  codec: auto, raw or dense; as the store is set where none is named.  convert: load
        pickled weights in a child process with these limits, and store them as safetensors.
        limits: what the checkpoint may cost, for who trusts one that is refused.

        Raises BadCheckpoint, BadName, Conflict, Incompatible, StorageFailed, and Unavailable
        (conversion without torch); then nothing is published.
        """
        from mstore.add import add
        from mstore.store.leases import pinned

        config = self._catalog.config
        policy = (config if codec is None else config.changed({"codec": codec})).codec
        branch_to_move(self._catalog, name)
        with self._scanned(Path(path), convert, limits) as (checkpoint, notes):
            chosen = self._base(checkpoint, base, detect=detect_base)
            held = [] if chosen.snapshot is None else [chosen.snapshot]
            with pinned(self._catalog.layout, held):
                report = add(
                    self._catalog,
                    self._statistics,
                    checkpoint,
                    name=name,
                    base=chosen,
                    policy=policy,
                    message=message,
                    threads=thread_count(threads),
                    progress=progress,
                )
        return replace(report, notes=notes + report.notes)

    @contextmanager
    def _scanned(
        self, path: Path, convert: ConversionLimits | None, limits: CheckpointLimits | None
    ) -> Iterator[tuple[Checkpoint, tuple[str, ...]]]:
        """A checkpoint, converted if asked for, and what there is to say of that.

        What was converted lies in the store's tmp/ until the block ends, and under a lease: after a
        kill the next writer removes it.
        """
        from mstore.checkpoint.directory import DEFAULT_LIMITS, scan

        allowed = limits or DEFAULT_LIMITS
        if convert is None:
            yield scan(path, limits=allowed), ()
            return
        from mstore.convert import conversion
        from mstore.store.leases import Lease

        lease = Lease(self._catalog.layout, self._catalog.index, f"convert {path.name}")
        try:
            made = conversion.convert(
                path, lease.directory, limits=convert, checkpoint_limits=allowed
            )
            yield scan(path, limits=allowed, replacement=made.replacement), made.notes
        finally:
            lease.release()

    def _base(self, checkpoint: Checkpoint, base: str | None, *, detect: bool) -> Base:
        """What a checkpoint is to be compared with: as named, as found, or nothing."""
        from mstore.add import NO_BASE, Base

        if base is not None:
            return Base(self._real(base), None, given=True)
        if not detect:
            return NO_BASE
        from mstore.nearest import nearest

        found = nearest(self._catalog, checkpoint)
        return Base(found.snapshot, found.reason, given=False)

    def analyze(
        self,
        expert: str,
        base: str,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> AnalyzeReport:
        """Take the statistics of expert minus base that are missing; what is there is kept.

        Merges plan from them; `add` with a base has taken them already.  Raises NotFound,
        BadRequest (a virtual merge), Incompatible (other tensors or shapes), Corrupt.
        """
        from mstore.stats.analysis import Side, analyze

        return analyze(
            self._catalog,
            self._statistics,
            Side(self._real(expert), expert),
            Side(self._real(base), base),
            threads=thread_count(threads),
            progress=progress,
        )

    def plan(
        self,
        *,
        base: str,
        experts: Sequence[str | tuple[str, float]],
        method: str,
        parameters: Mapping[str, object] | None = None,
        budget: float | None = None,
        max_error: float | None = None,
        dtype: str | None = None,
        analyze: bool = True,
        score: str | None = None,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        expert_budget: float | None = None,
        top_p: float | None = None,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> PlanReport:
        """Plan a merge and keep the plan.  An expert is a revision, or (revision, weight).

        budget: bytes (int), share of the full cost (float in (0, 1]) or None.  max_error: find the
        cheapest plan within this relative error.  score: norm, trimmed, conflict or random, None
        for the method's own.  only, skip: patterns of tensor names; what they leave out is the
        base's own.  expert_budget: as budget, for any one expert.  top_p: share of the output's
        blocks that may differ from the base's.  Raises BadRequest, NotFound, Incompatible.
        """
        from mstore.merge.insight.explain import plan_report

        began = time.monotonic()
        asked = self._asked(
            base,
            experts,
            method=method,
            parameters=parameters or {},
            budget=budget,
            max_error=max_error,
            dtype=dtype,
            analyze=analyze,
            score=score,
            only=only,
            skip=skip,
            expert_budget=expert_budget,
            top_p=top_p,
        )
        plan, sources, analyzed = self._made(asked, thread_count(threads), progress)
        memo = self._memo_expert_bytes(plan)
        seconds = time.monotonic() - began
        return plan_report(plan, plan.id(), sources, analyzed=analyzed, memo=memo, seconds=seconds)

    def _made(
        self, asked: Request, threads: int, progress: Report | None
    ) -> tuple[Plan, Sources, int]:
        """The stored plan of a request, made now unless it was before; statistics bytes read."""
        from mstore.merge.planning.planning import Planning, request_key
        from mstore.merge.running.commit import store_plan
        from mstore.objects.plan import Plan
        from mstore.store.plans import Source, Sources

        sources = Sources(
            Source(asked.base.snapshot, asked.base.name),
            tuple(Source(expert.snapshot, expert.name) for expert in asked.experts),
        )
        key = request_key(self._catalog, asked)
        # Without analysis a plan depends on which statistics happen to be there.
        known = self._memo.plan(key) if asked.analyze else None
        if known is not None:
            with suppress(NotFound):
                plan = self._catalog.record(Plan, known)
                store_plan(self._catalog, plan, sources)
                return plan, sources, 0
        planning = Planning(
            self._catalog, self._statistics, asked, threads=threads, progress=progress
        )
        plan = planning.plan()
        id = store_plan(self._catalog, plan, sources)
        if asked.analyze:
            self._memo.put_plan(key, id)
            self._memo.flush()
        return plan, sources, planning.analyzed

    def sweep(
        self,
        *,
        base: str,
        experts: Sequence[str | tuple[str, float]],
        method: str,
        parameters: Mapping[str, object] | None = None,
        shares: Sequence[float] | None = None,
        measure: bool = False,
        dtype: str | None = None,
        analyze: bool = True,
        score: str | None = None,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        expert_budget: float | None = None,
        top_p: float | None = None,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> SweepReport:
        """What merges cost and leave as error at many budgets; nothing is stored but statistics.

        shares: of the full cost, 5 % to 100 % unless given.  measure: also make the merges in
        memory and compare them with the full one, which reads all experts once.  The rest is as
        in `plan`; a point is the plan that `plan` makes with that budget.
        """
        from mstore.merge.insight.sweep import SHARES, check_shares, sweep
        from mstore.merge.planning.planning import Planning

        wanted = check_shares(SHARES if shares is None else shares)
        asked = self._asked(
            base,
            experts,
            method=method,
            parameters=parameters or {},
            budget=None,
            max_error=None,
            dtype=dtype,
            analyze=analyze,
            score=score,
            only=only,
            skip=skip,
            expert_budget=expert_budget,
            top_p=top_p,
        )
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
        """Every stored plan, by base, method and cost."""
        from mstore.merge.insight.explain import plan_report
        from mstore.objects.plan import Plan
        from mstore.store.plans import plan_ids, sources_of

        found = []
        for id in plan_ids(self._catalog):
            plan = self._catalog.record(Plan, id)
            # A plan whose inputs were removed can neither be named nor run.
            with suppress(NotFound):
                found.append(plan_report(plan, id, sources_of(self._catalog, id, plan)))
        return sorted(found, key=lambda p: (p.base, p.method, p.planned_expert_bytes, p.plan))

    def _asked(
        self, base: str, experts: Sequence[str | tuple[str, float]], **options: Any
    ) -> Request:
        from mstore.merge.planning.request import request

        given = [(e, 1.0) if isinstance(e, str) else e for e in experts]
        return request(
            base=self._input(base),
            experts=[(self._input(revision), weight) for revision, weight in given],
            **options,
        )

    def _memo_expert_bytes(self, plan: Plan) -> int:
        """Of what a plan reads, what the memo table saves right now."""
        from mstore.merge.running.memo_hits import memo_expert_bytes

        return memo_expert_bytes(self._catalog, self._memo, plan)

    def _input(self, revision: str) -> Input:
        from mstore.merge.planning.request import Input

        return Input(self._real(revision), revision)

    def _real(self, revision: str) -> SnapshotId:
        """A snapshot whose bytes are stored.  Raises BadRequest for a virtual merge."""
        id = self._whole(revision)
        self._catalog.require_real(id, revision)
        return id

    def _whole(self, revision: str) -> SnapshotId:
        """A snapshot whose contents were not let go.  Raises NotFound, BadName."""
        id = self._catalog.resolve(revision)
        contents.require(self._catalog, id, revision)
        return id

    def pin(self, snapshot: SnapshotId) -> leases.Pin:
        """Keep a snapshot's contents from garbage collection until the pin is released.

        The pin ends with the process.  Where it cannot be made (a store that may only be read), it
        keeps nothing, and that is no error.
        """
        return leases.Pin(self._catalog.layout, snapshot)

    def export_plan(self, plan: str) -> str:
        """A stored plan (id or prefix) as JSON text."""
        from mstore.merge.insight.exchange import export_plan

        return export_plan(self._catalog, plan)

    def import_plan(self, text: str) -> PlanReport:
        """Keep a plan that `export_plan` wrote.  Raises BadRequest, NotFound."""
        from mstore.merge.insight.exchange import import_plan

        return import_plan(self._catalog, text)

    def merge(
        self,
        plan: PlanReport | PlanId | str,
        *,
        name: str,
        message: str = "",
        virtual: bool = False,
        threads: int | None = None,
        memo: bool = True,
        memory: int | None = None,
        executor: Executor | None = None,
        progress: Report | None = None,
    ) -> MergeReport:
        """Run a stored plan and publish the result under the ref `name`, or publish nothing.

        memo: take from the memo table what merges made before, and add to it.  memory: most
        anonymous memory in bytes (512 MiB).  executor: where slices are computed instead of in
        threads; its workers need the store's directory, and not its index.
        virtual: publish the plan itself; blocks are computed when they are read, and
        `materialize` computes all.
        """
        from mstore.merge.insight.explain import plan_report
        from mstore.merge.running.commit import run_merge
        from mstore.objects.plan import Plan
        from mstore.store.plans import find, sources_of

        began = time.monotonic()
        id = plan.plan if isinstance(plan, PlanReport) else find(self._catalog, str(plan))
        analyzed = plan.analyze_bytes_read if isinstance(plan, PlanReport) else 0
        record = self._catalog.record(Plan, id)
        sources = sources_of(self._catalog, id, record)
        if virtual:
            from mstore.merge.virtual.deferred import commit_virtual

            deferred = commit_virtual(self._catalog, record, sources, name=name, message=message)
            return deferred_report(
                deferred,
                plan_report(record, id, sources, analyzed=analyzed),
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
        planned = plan_report(record, id, sources)
        return MergeReport(
            name=name,
            plan=id,
            snapshot=merged.snapshot,
            manifest=merged.manifest,
            new_snapshot=merged.is_new,
            virtual=False,
            method=record.method,
            budget_bytes=record.budget,
            full_expert_bytes=record.full_expert_bytes,
            planned_expert_bytes=record.planned_expert_bytes,
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
        """Compute all of the virtual merge at a branch and move the branch to the real one.

        The content is that of an ordinary merge of the same plan; the message stays unless another
        is given.  Raises NotFound, BadRequest (not a branch), Conflict (a tag, or it moved).
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

    def explain(self, revision: str, tensor: str | None = None) -> Explanation:
        """Which experts made a merge, block by block, what was left out and why."""
        from mstore.merge.insight.explain import explain

        return explain(self._catalog, self._catalog.resolve(revision), tensor)

    def blame(
        self,
        revision: str,
        tensor: str | None = None,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> BlameReport:
        """Each expert's share of what a merge changed, measured by running its plan again.

        Raises BadRequest if it is no merge, NotFound for an unknown tensor.
        """
        from mstore.merge.insight.blame import blame

        return blame(
            self._catalog,
            self._catalog.resolve(revision),
            tensor,
            threads=thread_count(threads),
            progress=progress,
        )

    def replay(
        self, revision: str, *, threads: int | None = None, progress: Report | None = None
    ) -> ReplayReport:
        """Run a merge's recorded plan again and compare.

        Raises BadRequest if it is no merge, or a virtual one: that has no bytes to compare with.
        """
        from mstore.merge.running.replay import replay

        id = self._real(revision)
        return replay(self._catalog, id, threads=thread_count(threads), progress=progress)

    # -- signatures --------------------------------------------------------------------------

    def sign(self, revision: str, key: SigningKey, *, signer: str | None = None) -> SignatureReport:
        """Sign a snapshot: every byte, its lineage and its plan.  `signing.load_key` reads keys.

        signer: a name for people; whom a key belongs to is what its verifier says.  Raises
        NotFound, BadRequest, Conflict, StorageFailed.
        """
        from mstore.signing import sign

        return sign(self._catalog, self._catalog.resolve(revision), key, signer=signer)

    def verify(
        self,
        revision: str,
        signers: Mapping[bytes, str],
        *,
        read_data: bool = False,
        progress: Report | None = None,
    ) -> VerifyReport:
        """Check the signatures of a snapshot against trusted keys (`mstore.signing.read_signers`).

        read_data: also read and check every byte.  A missing or unknown signature is no error, and
        `verified` is False then.  Raises Corrupt (bytes that are not what was signed), NotFound,
        Unavailable (no library to check with), StorageFailed.
        """
        from mstore.signing import read_everything, require_library, states

        began = time.monotonic()
        require_library()
        id = self._catalog.resolve(revision)
        found = states(self._catalog, id, signers)
        with leases.pinned(self._catalog.layout, [id]):
            read = read_everything(self._catalog, id, progress) if read_data else 0
        return VerifyReport(
            snapshot=id,
            verified=any(one.state == GOOD_SIGNATURE for one in found),
            signatures=found,
            bytes_read=read,
            seconds=time.monotonic() - began,
        )

    # -- refs --------------------------------------------------------------------------------

    def refs(self) -> list[RefReport]:
        """All refs by name."""
        return lineage.refs(self._catalog)

    def _ref(self, name: str) -> RefReport:
        return next(ref for ref in self.refs() if ref.name == name)

    def tag(self, name: str, revision: str) -> RefReport:
        """Name a snapshot for good.  Raises Conflict if the name is taken."""
        refs.check_name(name)
        snapshot = self._catalog.resolve(revision)
        if self._catalog.ref(name) is not None:
            raise Conflict("the name is taken", where=name, hint=f"mstore rm {name}")
        new = refs.Ref(refs.TAG, snapshot)
        move_refs(self._catalog, [RefMove(name, None, new, f"tag: {revision}")])
        return self._ref(name)

    def reset(self, name: str, revision: str) -> RefReport:
        """Point a branch at another snapshot; the old position stays in the reflog."""
        refs.check_name(name)
        current = self._catalog.ref(name)
        if current is not None and current.kind == refs.TAG:
            raise Conflict("is a tag, and tags do not move", where=name, hint=f"mstore rm {name}")
        new = refs.Ref(refs.BRANCH, self._catalog.resolve(revision))
        if new != current:
            move_refs(self._catalog, [RefMove(name, current, new, f"reset: {revision}")])
        return self._ref(name)

    def reflog(self, name: str | None = None) -> list[ReflogReport]:
        """Every move of a ref, or of all that ever were, newest first.

        Position N of a name is NAME@{N}, also of one that was removed.
        """
        return lineage.reflog(self._catalog, name)

    def remove(self, *names: str) -> RemoveReport:
        """Remove refs, all or none.  Their snapshots stay, and their reflogs can bring them back.

        Raises NotFound, Conflict (one moved meanwhile).
        """
        with self._catalog.index.env.read() as transaction:
            moves = [
                RefMove(name, refs.require(self._catalog.index, transaction, name), None, "rm")
                for name in dict.fromkeys(names)
            ]
        told = lineage.unnamed_without(self._catalog, set(names))
        move_refs(self._catalog, moves)
        return RemoveReport(
            removed=tuple(move.name for move in moves),
            kinds=tuple(m.expect.kind for m in moves if m.expect is not None),
            snapshots=tuple(SnapshotId(m.expect.snapshot) for m in moves if m.expect is not None),
            unnamed_snapshots=told,
            reflog_days=self._catalog.config.reflog_days,
        )

    # -- letting go --------------------------------------------------------------------------

    def gc(
        self,
        *,
        dry_run: bool = False,
        wait: float = 0.0,
        reflog_days: int | None = None,
        progress: Report | None = None,
    ) -> GcReport:
        """Drop all that no ref, reflog or pin reaches, and give its space back.

        Safe beside everything else; a second one waits for the first.  dry_run: only say what would
        go.  wait: seconds to wait for running operations, so that packs they may be reading can go
        too; else the next writer removes them.  reflog_days: as the store is set (30 days) where
        None.  Raises Corrupt where a needed record is damaged, StorageFailed; nothing is lost then.
        """
        from mstore.gc.collect import Collector, Limits

        collector = Collector(
            self._catalog,
            reflog_days=self._reflog_days(reflog_days),
            limits=Limits(wait=wait),
            progress=progress,
        )
        return collector.dry_run() if dry_run else collector.run(self._memo, self._statistics)

    def _reflog_days(self, days: int | None) -> int:
        if days is None:
            return self._catalog.config.reflog_days
        return self._catalog.config.changed({"reflog_days": days}).reflog_days

    def prune(
        self,
        branches: Sequence[str] = (),
        *,
        keep_last: int,
        keep_tagged: bool = True,
        unnamed_inputs: bool = False,
        dry_run: bool = False,
    ) -> PruneReport:
        """Let the contents of old snapshots go: of a branch, those beyond the newest `keep_last`.

        branches: all of them where none is named.  keep_tagged: but for those that a tag names;
        else these tags are removed.  unnamed_inputs: also what was merged in and no ref names.
        They stay in the lineage.  Space comes back with `gc`.  Raises BadRequest, NotFound.
        """
        from mstore.gc.prune import Wish, prune

        wish = Wish(keep_last, tuple(branches), keep_tagged, unnamed_inputs)
        return prune(self._catalog, wish, reflog_days=self._reflog_days(None), dry_run=dry_run)

    # -- the whole store ---------------------------------------------------------------------

    def fsck(
        self,
        *,
        read_data: bool = False,
        sample: float | None = None,
        seed: int = 0,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> CheckReport:
        """Check the store's structure, and with `read_data` every byte.  Changes nothing.

        sample: reads this share of the blocks instead, drawn by `seed`.
        Raises Corrupt where the index is too damaged to be walked.
        """
        from mstore.check.fsck import Checker, Scope

        scope = Scope.chosen(read_data=read_data, sample=sample, seed=seed)
        threads = thread_count(threads)
        return Checker(self._catalog.layout, scope, threads=threads, progress=progress).run()

    def repair(
        self,
        *,
        sources: Sequence[str | Path] = (),
        read_data: bool = False,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> RepairReport:
        """Check the store, put good copies in the place of what is broken, and drop the rest.

        sources: other stores, or checkpoints, that may have copies.  read_data: look for broken
        payloads everywhere, and not only where the structure is damaged.
        """
        from mstore.check.fsck import Scope
        from mstore.check.repair import Repair

        scope = Scope.chosen(read_data=read_data, sample=None, seed=0)
        paths = [Path(source) for source in sources]
        threads = thread_count(threads)
        return Repair(self._catalog.layout, scope, paths, threads=threads, progress=progress).run()

    @staticmethod
    def reindex(
        path: str | Path, *, use_old_index: bool = True, progress: Report | None = None
    ) -> ReindexReport:
        """Make the index of a store anew, from its packs and its ref mirror.

        use_old_index: take refs, reflogs, plans and prunings over from the index that is there, as
        far as it can be read and agrees with the packs.  Raises Conflict while anybody uses the
        store.
        """
        from mstore.check.reindex import reindex

        return reindex(Path(path), use_old_index=use_old_index, progress=progress)

    @staticmethod
    def migrate(path: str | Path, *, dry_run: bool = False) -> MigrateReport:
        """Bring a store of an older format to this one.  Raises Conflict while it is in use."""
        from mstore.store.migrations import migrate

        return migrate(Path(path), dry_run=dry_run)

    def stats(self) -> StoreReport:
        """Sizes and counts."""
        from mstore.usage import store_usage

        catalog = self._catalog
        used = store_usage(catalog, reflog_days=catalog.config.reflog_days)
        with catalog.index.env.read() as transaction:
            packs = list(catalog.index.packs(transaction))
            unique = sum(location.raw_length for _, location in catalog.index.blocks(transaction))
            tensors = sum(
                1 for kind, _, _ in catalog.index.records(transaction) if kind == Kind.TENSOR
            )
            blocks = catalog.index.count(transaction, "blocks")
        ids = catalog.snapshot_ids()
        reached = lineage.ancestry(catalog, lineage.names_of(catalog))
        manifests = [catalog.snapshot(id).manifest_id() for id in reached]
        return StoreReport(
            path=str(self.path),
            uuid=self.uuid,
            format_version=FORMAT_VERSION,
            block_size=self.block_size,
            refs=len(catalog.refs()),
            snapshots=len(ids),
            packs=len(packs),
            blocks=blocks,
            tensors=tensors,
            plain_bytes=sum(catalog.manifest(id).plain_bytes() for id in manifests),
            unique_bytes=unique,
            stored_bytes=sum(size for _, size in packs),
            index_bytes=catalog.index.env.file_bytes(),
            statistics_bytes=self._statistics.file_bytes(),
            memo_bytes=self._memo.file_bytes(),
            codecs=used.codecs,
            unreachable_bytes=used.unreachable_bytes,
            dead_bytes=used.dead_bytes,
            condemned_bytes=used.condemned_bytes,
        )

    def usage(self, names: Sequence[str] = ()) -> UsageReport:
        """What refs take and share, and what gc would free without them; all refs for no names.

        Raises NotFound, and Corrupt where something that is needed is missing.
        """
        from mstore.usage import usage

        return usage(self._catalog, names, reflog_days=self._catalog.config.reflog_days)


def deferred_report(
    merged: Deferred, plan: PlanReport, *, name: str, seconds: float
) -> MergeReport:
    """What a merge that was committed as its plan tells of itself: nothing was read."""
    return MergeReport(
        name=name,
        plan=plan.plan,
        snapshot=merged.snapshot,
        manifest=merged.manifest,
        new_snapshot=merged.is_new,
        virtual=merged.is_virtual,
        method=plan.method,
        budget_bytes=plan.budget_bytes,
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
        notes=plan.notes,
        seconds=seconds,
    )


def thread_count(threads: int | None) -> int:
    """As many threads as this process may use, unless a number is given.  Raises BadRequest."""
    if threads is None:
        return len(os.sched_getaffinity(0))
    if not 1 <= threads <= 256:
        raise BadRequest(f"threads must be between 1 and 256, not {threads}")
    return threads
