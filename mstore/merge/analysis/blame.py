"""Blame: each expert's share of what a merge changed, by running the plan's blocks again.

Reads exactly what the merge read from experts, at most; writes nothing.  A worker holds one chunk
of the base and of each expert.  Sums run chunk by chunk and tensor by tensor in order, so any
number of threads gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from mstore.blocks.reader import Meter
from mstore.merge.analysis.attribution import Attribution, attribute
from mstore.merge.analysis.explain import require_tensor
from mstore.merge.planning.costs import costs_of
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.commit import inputs_held
from mstore.merge.running.compute import tie_counts
from mstore.merge.running.loading import Scratch, load
from mstore.merge.running.task import ChunkTask, Tasks, TensorTask, item_size
from mstore.merge.running.ties import TieLedger
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.plan import Plan
from mstore.store.objects.shapes import layers_of
from mstore.store.plans import plan_of, sources_of_merge
from mstore.terms.errors import BadRequest
from mstore.terms.ids import PlanId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import Progress, ProgressCallback, Report

_BATCH = 64
"""How many chunks share one lookup in the index when their tasks are made."""


class ExpertBlame(Report, frozen=True):
    """One expert's part in a merged delta."""

    expert: str
    """the ref or id it was given by"""
    weight: float
    """the expert's weight"""
    share: float | None
    """<contribution, merged delta> / norm of the merged delta squared; None if nothing changed"""
    norm: float
    """norm of its contribution to the merged delta"""
    moved: int
    """elements where its contribution is not 0"""


class TensorBlame(Report, frozen=True):
    """Each expert's share of one merged tensor.  Their shares and `base_share` add up to 1."""

    name: str
    """the tensor"""
    layer: str
    """its layer"""
    tied: tuple[str, ...]
    """other names of this tensor"""
    elements: int
    """number of elements"""
    changed: int
    """elements where the merged delta is not 0"""
    not_finite: int
    """elements where it is NaN or infinite, counted nowhere else"""
    norm: float
    """norm of the merged delta"""
    base_share: float | None
    """share of the base itself: 0 unless the method scales the base"""
    experts: tuple[ExpertBlame, ...]
    """each expert's share"""


class LayerBlame(Report, frozen=True):
    """As `TensorBlame`, over the tensors of one layer; tied tensors count once."""

    name: str
    """the layer"""
    tensors: int
    """number of tensors"""
    elements: int
    """number of elements"""
    changed: int
    """elements where the merged delta is not 0"""
    not_finite: int
    """elements where it is NaN or infinite, counted nowhere else"""
    norm: float
    """norm of the merged delta"""
    base_share: float | None
    """share of the base itself: 0 unless the method scales the base"""
    experts: tuple[ExpertBlame, ...]
    """each expert's share"""


class BlameReport(Report, frozen=True):
    """Each expert's share of what a merge changed, by tensor, by layer, and over all.

    Measured by running the plan's blocks again; the bytes read are counted as for a merge.
    """

    snapshot: SnapshotId
    """the snapshot's id"""
    plan: PlanId
    """the plan's id"""
    method: str
    """the merge method"""
    tensors: tuple[TensorBlame, ...]
    """shares by tensor; tensors equal to the base's only on request"""
    layers: tuple[LayerBlame, ...]
    """the same, summed by layer; a tied tensor counts once"""
    elements: int
    """number of elements, over all requested tensors"""
    changed: int
    """elements where the merged delta is not 0"""
    not_finite: int
    """elements where it is NaN or infinite, counted nowhere else"""
    norm: float
    """norm of the merged delta, over all requested tensors"""
    base_share: float | None
    """share of the base itself: 0 unless the method scales the base"""
    experts: tuple[ExpertBlame, ...]
    """each expert's share of the whole"""
    expert_bytes_read: int
    """bytes read from experts, counted at pread"""
    base_bytes_read: int
    """bytes read from the base"""
    seconds: float
    """how long it took"""


def blame(
    catalog: Catalog,
    snapshot: SnapshotId,
    tensor: str | None,
    *,
    threads: int,
    progress: ProgressCallback | None = None,
) -> BlameReport:
    """Return the shares of a merged snapshot, or of one tensor of it; virtual merges too.

    Without `tensor`, tensors identical to the base's are not listed.  Raises BadRequest for a
    snapshot that no merge made, NotFound for an unknown tensor or if an input was pruned, Corrupt,
    StorageFailed.
    """
    began = time.monotonic()
    record = catalog.snapshot(snapshot)
    plan_id = plan_of(snapshot, record, so="no expert has a share in it")
    names = tensors_of(catalog, catalog.manifest(record.manifest_id()))
    if tensor is not None:
        require_tensor(tensor, names, snapshot)
    plan = catalog.record(Plan, plan_id)
    if plan.layers:
        raise BadRequest(
            "its layers are those of its inputs as they are: nothing was merged",
            where=snapshot.short,
            hint=call("explain", snapshot.short),
        )
    with inputs_held(catalog, snapshot, record):
        check_fits(catalog, plan)
        run = _Run(catalog, plan, threads, progress)
        measured = run.attributions(tensor)
    sources = sources_of_merge(catalog, plan_id, plan, record).experts
    # Companions come last.
    who = [(source.name, weight) for source, weight in zip(sources, plan.weights, strict=False)]
    layers = layers_of(names)
    nothing = Measured(0, Attribution.nothing(len(plan.weights)))
    tensors = []
    sums: dict[str, Measured] = {}
    counts: Counter[str] = Counter()
    total = nothing
    for first, one in measured.items():
        name = tensor or first
        tied = tuple(n for n in names if run.tasks.first.get(n, n) == first and n != name)
        shares = _shares(one, run.who(first, who))
        tensors.append(TensorBlame(name=name, layer=layers[name], tied=tied, **shares))
        sums[layers[name]] = sums.get(layers[name], nothing) + one
        counts[layers[name]] += 1
        total += one
    order = [layer for layer in dict.fromkeys(layers.values()) if layer in sums]
    return BlameReport(
        snapshot=snapshot,
        plan=plan_id,
        method=plan.method,
        tensors=tuple(tensors),
        layers=tuple(
            LayerBlame(name=layer, tensors=counts[layer], **_shares(sums[layer], who))
            for layer in order
        ),
        **_shares(total, who),
        expert_bytes_read=run.expert_meter.total,
        base_bytes_read=run.base_meter.total,
        seconds=time.monotonic() - began,
    )


class Measured(msgspec.Struct, frozen=True):
    """A number of elements and the sums over them."""

    elements: int
    sums: Attribution

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.elements + other.elements, self.sums + other.sums)


Who = list[tuple[str, float]]


def _shares(one: Measured, who: Who) -> dict[str, Any]:
    """Return the fields that all reports of shares have."""
    return {
        "elements": one.elements,
        "changed": one.sums.changed,
        "not_finite": one.sums.not_finite,
        "norm": math.sqrt(one.sums.square),
        "base_share": _share(one.sums.base, one.sums),
        "experts": _experts(one.sums, who),
    }


def _experts(sums: Attribution, who: Who) -> tuple[ExpertBlame, ...]:
    return tuple(
        ExpertBlame(
            expert=name,
            weight=weight,
            share=_share(float(sums.products[k]), sums),
            norm=math.sqrt(float(sums.squares[k])),
            moved=int(sums.moved[k]),
        )
        for k, (name, weight) in enumerate(who)
    )


def _share(product: float, sums: Attribution) -> float | None:
    return product / sums.square if 0 < sums.square < math.inf else None


class _Run:
    """One pass over the chunks of a plan in which an expert takes part."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        threads: int,
        progress: ProgressCallback | None,
    ) -> None:
        # The meter not only counts: it refuses a read beyond the plan.
        self.expert_meter = Meter("expert", costs_of(catalog, plan).planned)
        self.tasks = Tasks(catalog, plan, self.expert_meter)
        self.base_meter = Meter("base")
        self._catalog = catalog
        self._plan = plan
        self._weights = {one.name: plan.operation_of(one).weights for one in plan.tensors}
        self._threads = threads
        self._progress = progress
        self._scratch = Scratch()

    def who(self, name: str, who: Who) -> Who:
        """Return the experts with their weights in one planned tensor."""
        if name not in self._weights:
            return who
        # Companions come last, and are not among them.
        return [(own, weight) for (own, _), weight in zip(who, self._weights[name], strict=False)]

    def attributions(self, tensor: str | None) -> dict[str, Measured]:
        """Measure each planned tensor, or the one that `tensor` was merged as."""
        wanted = [planned.name for planned in self._plan.tensors]
        if tensor is not None:
            first = self.tasks.first.get(tensor, tensor)
            if first not in wanted:
                base = tensors_of(self._catalog, self._catalog.manifest(self._plan.base_id()))[
                    first
                ]
                elements = math.prod(self._catalog.tensor(base).shape)
                return {first: Measured(elements, Attribution.nothing(len(self._plan.weights)))}
            wanted = [first]
        jobs = [(name, self.tasks.tensor(name), self._chunks(name)) for name in wanted]
        total = sum(_bytes(task, number) for _, task, numbers in jobs for number in numbers)
        done = 0
        found = {}
        with ThreadPoolExecutor(self._threads, "blame") as pool:
            for name, task, numbers in jobs:
                one = Attribution.nothing(len(self._plan.weights))
                for number, part in zip(numbers, self._parts(task, numbers, pool), strict=True):
                    one += part
                    done += _bytes(task, number)
                    if self._progress is not None:
                        self._progress(Progress("blame", done, total))
                found[name] = Measured(task.elements, one)
        return found

    def _chunks(self, name: str) -> list[int]:
        """Return the chunks in which something can have changed."""
        present = self.tasks.members(name).present
        if not self.tasks.operation(name).keeps_base:
            return list(range(present.shape[1]))
        return [int(number) for number in np.flatnonzero(present.any(axis=0))]

    def _parts(
        self, tensor: TensorTask, numbers: list[int], pool: ThreadPoolExecutor
    ) -> Iterator[Attribution]:
        """Yield each chunk's sums, in order; the pool works a few ahead of the one yielded."""
        # A skipped chunk contains no expert, so no ties.
        ledger = TieLedger(tensor.quotas.tolist(), numbers)
        measuring = in_order(
            lambda task: pool.submit(self._part, task, ledger),
            self._made(tensor, numbers),
            ahead=2 * self._threads,
            stopping=lambda _: ledger.fail(-1),
        )
        with closing(measuring):
            for _, part in measuring:
                yield part

    def _made(self, tensor: TensorTask, numbers: list[int]) -> Iterator[ChunkTask]:
        for start in range(0, len(numbers), _BATCH):
            yield from self.tasks.chunks(tensor, numbers[start : start + _BATCH])

    def _part(self, task: ChunkTask, ledger: TieLedger) -> Attribution:
        try:
            (loaded,) = load(
                [task],
                self._catalog.packs,
                self._scratch,
                self.expert_meter,
                self.base_meter,
                self.tasks.moved,
            )
            grant = ledger.take(task.number, tie_counts(loaded, ledger.open))
            quotas = np.array(grant.quotas, dtype=np.int64)
            return attribute(loaded, quotas, len(self._plan.weights))
        except BaseException:
            ledger.fail(task.number)
            raise


def _bytes(task: TensorTask, number: int) -> int:
    """Return the plain bytes of a chunk of the base."""
    return task.chunk_length(number) * item_size(task.base_dtype)
