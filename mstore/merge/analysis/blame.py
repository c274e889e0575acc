"""Blame: each expert's share of what a merge changed, by running the plan's blocks again.

Reads exactly what the merge read from experts, at most; writes nothing.  A worker holds one chunk
of the base and of each expert.  Sums run chunk by chunk and tensor by tensor in order, so any
number of threads gives the same bits.

**Attribution** says how much each expert contributed to a chunk's merged delta, in float64.  It
splits the merged delta m (what a merge adds to the base, after consensus, lambda and scale, before
rounding to the output) into contributions: m = m_0 + sum of m_k, with

    m_k = lambda * w_k s_k / divisor              s_k the sparsified delta, 0 where expert k lost
                                                  the election of the sign
    m_k = w_k (e_k - b) / sum of w                for methods that mix whole experts
                                                  (w_k: of the row, where rows have their own)
    m_k = v (e_k - b)                             for `nearswap`, v e_k + (1 - v) b in float32
    m_k = s_k / n, w_k s_k if n = 1               for means of the n experts that move an element
    m_k = f_k d_k                                 for competitions, f_k the float32 factor
    m_k = w_k F_k d_k / sum of w F                for averages by Fishers, whose own m_k are 0
    m_0 = (sum of w - 1) b                        for whole experts without normalize, else 0

times the parameter scale, if there is one.

Sparsification, draws and elections are those of `merge.arithmetic`, in the same float32 and the
same order of experts, so their results are bit-identical. From there on, products, quotients and
sums are float64. Elements whose m is not finite are counted and left out of every sum.
`attribution_passes` implements these steps again in a plain form; there they are fused for speed.

Deterministic: a chunk's sums are made of 64 partial ones by index, in order. `attribute` releases
the GIL, keeps nothing between calls and may run on any number of threads.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.analysis.explain import require_tensor
from mstore.merge.arithmetic.arguments import pack
from mstore.merge.arithmetic.chunk_sums import ChunkSums
from mstore.merge.arithmetic.tiles import LANES, TILE, address
from mstore.merge.planning.validate import check_fits
from mstore.merge.running.commit import inputs_held
from mstore.merge.running.compute import PlanChunks, chunk_of, masks_of, weights_of
from mstore.merge.running.loading import Loaded
from mstore.merge.running.slices import TieLedger
from mstore.merge.running.task import ChunkTask, TensorTask, item_size
from mstore.numeric.passes import Pass
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
    culprit: str | None = None
    """what a bisection found to be to blame for a bad merge, in words"""


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
    if plan.is_assembly:
        raise BadRequest(
            "its tensors are those of its inputs as they are: nothing was merged",
            where=snapshot.short,
            hint=call("explain", snapshot.short),
        )
    with inputs_held(catalog, snapshot, record):
        check_fits(catalog, plan)
        run = _BlamePass(catalog, plan, threads, progress)
        measured = run.attributions(tensor)
    sources = sources_of_merge(catalog, plan_id, plan, record).experts
    # Companions come last.
    who = [(source.name, weight) for source, weight in zip(sources, plan.weights, strict=False)]
    layers = layers_of(names)
    nothing = ElementSums(0, Attribution.nothing(len(plan.weights)))
    called: dict[str, list[str]] = defaultdict(list)
    for name in names:
        called[run.tasks.first.get(name, name)].append(name)
    tensors = []
    sums: dict[str, ElementSums] = {}
    counts: Counter[str] = Counter()
    total = nothing
    for first, one in measured.items():
        name = tensor or first
        tied = tuple(one for one in called[first] if one != name)
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
        expert_bytes_read=run.chunks.expert_meter.total,
        base_bytes_read=run.chunks.base_meter.total,
        seconds=time.monotonic() - began,
    )


class ElementSums(msgspec.Struct, frozen=True):
    """A number of elements and the sums over them."""

    elements: int
    sums: Attribution

    def __add__(self, other: ElementSums) -> ElementSums:
        return ElementSums(self.elements + other.elements, self.sums + other.sums)


Who = list[tuple[str, float]]


def _shares(one: ElementSums, who: Who) -> dict[str, Any]:
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


class _BlamePass:
    """One pass over the chunks of a plan in which an expert takes part."""

    def __init__(
        self,
        catalog: Catalog,
        plan: Plan,
        threads: int,
        progress: ProgressCallback | None,
    ) -> None:
        self.chunks = PlanChunks(catalog, plan)
        self.tasks = self.chunks.tasks
        self._catalog = catalog
        self._plan = plan
        self._weights = {one.name: plan.operation_of(one).weights for one in plan.tensors}
        self._threads = threads
        self._progress = progress

    def who(self, name: str, who: Who) -> Who:
        """Return the experts with their weights in one planned tensor."""
        if name not in self._weights:
            return who
        # Companions come last, and are not among them.
        return [(own, weight) for (own, _), weight in zip(who, self._weights[name], strict=False)]

    def attributions(self, tensor: str | None) -> dict[str, ElementSums]:
        """Measure each planned tensor, or the one that `tensor` was merged as."""
        wanted = [planned.name for planned in self._plan.tensors]
        if tensor is not None:
            first = self.tasks.first.get(tensor, tensor)
            if first not in wanted:
                base = tensors_of(self._catalog, self._catalog.manifest(self._plan.base_id()))[
                    first
                ]
                elements = math.prod(self._catalog.tensor(base).shape)
                return {first: ElementSums(elements, Attribution.nothing(len(self._plan.weights)))}
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
                found[name] = ElementSums(task.elements, one)
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
            loaded, quotas = self.chunks.load(task, ledger)
            return attribute(loaded, quotas, len(self._plan.weights))
        except BaseException:
            ledger.fail(task.number)
            raise


def _bytes(task: TensorTask, number: int) -> int:
    return task.chunk_length(number) * item_size(task.base_dtype)


_attribute: Final = Pass(
    "mstore.merge.analysis.attribution_passes",
    "attribute",
    "ppppppp",
    (
        *("numeric/codes.py", "numeric/floats.py", "merge/arithmetic/draws.py"),
        *("merge/arithmetic/tiles.py", "merge/arithmetic/arguments.py"),
        *("merge/arithmetic/stages.py", "merge/arithmetic/competition_passes.py"),
        "merge/analysis/attribution_passes.py",
    ),
)


class Attribution(msgspec.Struct, frozen=True):
    """Sums over some elements. Add them up in a fixed order.

    square      ||m||^2
    base        <m_0, m>
    products    float64[K]: <m_k, m>; with `base` they add up to `square`
    squares     float64[K]: ||m_k||^2
    moved       int64[K]: elements with m_k not 0
    changed     elements with m not 0
    not_finite  elements left out because m is NaN or infinite there
    """

    square: float
    base: float
    products: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    moved: npt.NDArray[np.int64]
    changed: int
    not_finite: int

    @classmethod
    def nothing(cls, experts: int) -> Attribution:
        """Return the sums over no elements."""
        zeros = np.zeros(experts)
        return cls(0.0, 0.0, zeros, zeros, zeros.astype(np.int64), 0, 0)

    def __add__(self, other: Attribution) -> Attribution:
        return Attribution(
            self.square + other.square,
            self.base + other.base,
            self.products + other.products,
            self.squares + other.squares,
            self.moved + other.moved,
            self.changed + other.changed,
            self.not_finite + other.not_finite,
        )


def attribute(loaded: Loaded, quotas: Sequence[int], count: int) -> Attribution:
    """Split one chunk's merged delta among so many experts, the first of its sides.

    quotas: as in `mix_chunk`, the ties that THIS chunk keeps.
    """
    tensor = loaded.task.tensor
    mix = tensor.mix
    experts = mix.weights.size
    sums = np.zeros((2, experts + 2))
    counts = np.zeros(experts + 3, dtype=np.int64)
    # Keep these alive until the pass is done: it gets their addresses.
    room = (
        np.empty((experts + 3, TILE), dtype=np.float32),
        np.empty((experts + 4, TILE)),
        np.zeros((2, experts + 2, LANES)),
        np.empty(TILE, dtype=np.uint8),
    )
    chunk = chunk_of(loaded, quotas)
    masks, own = masks_of(tensor, chunk), tensor.chunk_factors
    rows: npt.NDArray[Any] | None = weights_of(tensor, chunk)
    if isinstance(own, ChunkSums):
        rows = own.each(chunk, tensor.shape, mix.weights.tolist())
    packed = pack(mix, chunk, None, tensor.out_dtype, masks, row_weights=rows)
    _attribute(packed.at, *[address(array) for array in (sums, counts, *room)])
    # Companions, which come last, change nothing by themselves.
    experts_only = slice(int(mix.has_base), int(mix.has_base) + count)
    return Attribution(
        square=float(sums[1, experts + 1]),
        base=float(sums[0, experts]),
        products=sums[0, experts_only],
        squares=sums[1, experts_only],
        moved=counts[experts_only],
        changed=int(counts[experts + 1]),
        not_finite=int(counts[experts + 2]),
    )
