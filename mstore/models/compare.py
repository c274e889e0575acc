"""Comparing models: how far each moved from their common base, and in which directions.

With d' and d'' the changes of two models to one base, over a tensor, a layer or the whole model,

    change    ||d'|| / ||base||
    cosine    <d', d''> / (||d'|| ||d''||)

Squares of norms are sums over the chunks of statistics.  A product is known where one of the two
changes nothing, where both have the same blocks, and where the distance of the two was measured:
<d', d''> = (||d'||^2 + ||d''||^2 - ||d' - d''||^2) / 2.  Elsewhere the sketches of both estimate
the cosine of each chunk, and with it the product (`stats.chunk`).

Owns these sums (`Measure`), the base that lineage knows (`common_base`) and the report.  Reads
blocks only where it may (`Reads`), chunk by chunk, and keeps what it measured as statistics.  An
interrupted comparison resumes there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Final

import msgspec
import numpy as np

from mstore.blocks.reader import Meter
from mstore.checkpoint.models import split_name
from mstore.models.adapters.inputs import Inputs, ModelChoice
from mstore.models.distances import equal_chunks
from mstore.models.stats.chunk import cosines
from mstore.models.stats.pairs import Pair, known_apart, known_products, known_rows, sum_of_squares
from mstore.models.stats.store import StatsStore
from mstore.models.stats.table import Digest
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.models import Input
from mstore.store.objects.shapes import EMBEDDINGS, layers_of, matching, parts_of, require_matches
from mstore.store.objects.snapshot import BASE
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ID_BYTES, ManifestId, SnapshotId, TensorId
from mstore.terms.phrases import Option, few
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

BY: Final = ("tensor", "part", "layer", "model")
_TOGETHER: Final = 64
"""Tensors whose statistics are looked up together."""


class Reads(Enum):
    """Which blocks may be read."""

    NOTHING = "nothing"
    MISSING = "missing"
    """what has no statistics"""
    EXACT = "exact"
    """also what statistics only estimate"""


class ComparedModel(Report, frozen=True):
    """How far one model moved."""

    model: str
    """the model, as it was named"""
    change: float | None
    """norm of the model's difference from the base / norm of the base; None if unknown, or if the
    base is 0"""
    equal_blocks: float
    """share of the blocks that are the base's"""


class ComparedPair(Report, frozen=True):
    """How alike two models' changes are."""

    a: str
    """one model"""
    b: str
    """the other one"""
    cosine: float | None
    """cosine of the two changes: 1 the same direction, 0 none in common, -1 opposite; None if
    unknown, or if one of the two is 0"""
    deviation: float | None
    """upper limit of the standard deviation of a cosine that sketches estimate; 0 if the cosine
    is exact"""
    equal_blocks: float
    """share of the blocks that are the same in both"""


class ComparedPart(Report, frozen=True):
    """A tensor, a layer or whole models, compared."""

    name: str | None
    """the tensor, the part of a layer (numbers in it as `*`) or the layer; None: whole models"""
    models: tuple[ComparedModel, ...]
    """each model, in the order given"""
    pairs: tuple[ComparedPair, ...]
    """each two of them, in the order given"""


class CompareReport(Report, frozen=True):
    """How far models moved from their common base, and in which directions."""

    base: str
    """the base, as it was named, or the id of the one that lineage knows"""
    models: tuple[str, ...]
    """the models, as they were named"""
    tensors: int
    """number of tensors compared"""
    whole: ComparedPart
    """whole models"""
    parts: tuple[ComparedPart, ...]
    """each tensor, part or layer, as asked; empty for models"""
    remarks: tuple[str, ...]
    """what was left out, as text"""
    bytes_read: int
    """bytes of models read for what statistics did not know"""
    seconds: float
    """how long it took"""


class ComparedSums(msgspec.Struct):
    """ComparedSums over some tensors, of the base, each of K models, and each two of them.

    base, squares: of norms; None if unknown. products: with their variances, None if unknown.
    blocks, equal, shared: numbers of blocks: all, the base's, the same in both.  Where only norms
    are asked for, there are no products and no numbers of blocks.
    """

    base: float | None
    squares: list[float | None]
    products: list[tuple[float, float] | None]
    blocks: int
    equal: list[int]
    shared: list[int]

    @classmethod
    def total(cls, parts: Sequence[ComparedSums]) -> ComparedSums:
        """Return the sums over several, at least one."""
        return cls(
            _sum([one.base for one in parts]),
            [_sum(column) for column in zip(*(one.squares for one in parts), strict=True)],
            [_sum_pairs(column) for column in zip(*(one.products for one in parts), strict=True)],
            sum(one.blocks for one in parts),
            [sum(column) for column in zip(*(one.equal for one in parts), strict=True)],
            [sum(column) for column in zip(*(one.shared for one in parts), strict=True)],
        )

    def change(self, k: int) -> float | None:
        """Return how far model k moved, relative to the base."""
        square = self.squares[k]
        return (
            math.sqrt(square) / math.sqrt(self.base) if self.base and square is not None else None
        )

    def part(self, name: str | None, models: Sequence[str]) -> ComparedPart:
        """Return the report of these sums."""
        blocks = max(1, self.blocks)
        return ComparedPart(
            name,
            tuple(
                ComparedModel(model, self.change(k), self.equal[k] / blocks)
                for k, model in enumerate(models)
            ),
            tuple(
                ComparedPair(models[i], models[j], *self._cosine(n, i, j), self.shared[n] / blocks)
                for n, (i, j) in enumerate(_pairs(len(models)))
            ),
        )

    def _cosine(self, n: int, i: int, j: int) -> tuple[float | None, float | None]:
        one, other, product = self.squares[i], self.squares[j], self.products[n]
        if not one or not other or product is None:
            return None, None
        norms = math.sqrt(one) * math.sqrt(other)
        return max(-1.0, min(1.0, product[0] / norms)), math.sqrt(product[1]) / norms


def _pairs(models: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(models), 2))


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    numbers = [value for value in known if value is not None]
    total = math.fsum(numbers) if len(numbers) == len(known) else math.nan
    return total if math.isfinite(total) else None


def _sum_pairs(values: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    columns = list(zip(*(value or (math.nan, math.nan) for value in values), strict=True))
    product, variance = (_sum(column) for column in columns)
    return None if product is None or variance is None else (product, variance)


def by_layer(sums: Mapping[str, ComparedSums]) -> dict[str, ComparedSums]:
    """Return the sums over each layer.  sums: of tensors, by name."""
    parts: dict[str, list[ComparedSums]] = {}
    for name, layer in layers_of(sums).items():
        parts.setdefault(layer, []).append(sums[name])
    return {layer: ComparedSums.total(own) for layer, own in parts.items()}


def _by_part(sums: Mapping[str, ComparedSums]) -> dict[str, ComparedSums]:
    parts: dict[str, list[ComparedSums]] = {}
    for name, (layer, part) in parts_of(sums).items():
        parts.setdefault(".".join(filter(None, (layer, part))), []).append(sums[name])
    return {part: ComparedSums.total(own) for part, own in parts.items()}


def comparable(
    inputs: Inputs, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that can be compared, and of those that cannot.

    A tensor can if base and all models have it, of one shape and of elements that have statistics.
    Tied embeddings with the same content everywhere count once, with their first name.
    """
    members = (inputs.base, *inputs.models)
    every = dict.fromkeys(name for names in members for name in names)
    kept = (matching(every, only) if only else every.keys()) - matching(every, skip)
    ties = inputs.ties_embeddings()
    tied = {name for name in kept if split_name(name)[0] in ties and EMBEDDINGS.search(name)}
    found: dict[str, tuple[TensorId | None, ...]] = {}
    seen: set[tuple[TensorId | None, ...]] = set()
    for name in every:
        ids = tuple(names.get(name) for names in members)
        if name in kept and not (name in tied and ids in seen):
            found[name] = ids
            if name in tied:
                seen.add(ids)
    wanted = list(dict.fromkeys(id for ids in found.values() for id in ids if id is not None))
    record_of = dict(zip(wanted, inputs.records(wanted), strict=True))
    can: list[str] = []
    cannot: list[str] = []
    for name, ids in found.items():
        there = [id for id in ids if id is not None]
        records = [record_of[id] for id in there]
        fits = len(there) == len(ids) and len({record.shape for record in records}) == 1
        fits = fits and {record.dtype for record in records} <= ITEMSIZES.keys()
        if not (fits and 0 in records[0].shape):
            (can if fits else cannot).append(name)
    return can, cannot


class Measure:
    """ComparedSums over each of some tensors.  Used by one thread.

    meter: counts the bytes of models that are read.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        inputs: Inputs,
        *,
        reads: Reads = Reads.NOTHING,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._inputs = inputs
        self._reads = reads
        self._pool = pool
        self.meter = Meter("compared")

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, ComparedSums]]:
        """Yield each tensor's sums.  Raises Corrupt, StorageFailed."""
        for start in range(0, len(names), _TOGETHER):
            batch = names[start : start + _TOGETHER]
            sides = {name: [member[name] for member in self._inputs.models] for name in batch}
            bases = {name: self._inputs.base[name] for name in batch}
            pairs = [(bases[name], id) for name in batch for id in sides[name] if id != bases[name]]
            rows = known_rows(self._statistics, pairs, sketches=True)
            bounds: Mapping[Pair, float] = {}
            if self._reads is Reads.NOTHING:
                bounds = _bounds(self._statistics, pairs, rows)
            squares = self._statistics.squares_of(list(bases.values()))
            two = [pair for ids in sides.values() for pair in itertools.combinations(ids, 2)]
            apart = known_apart(self._statistics, two)
            every = [(bases[name], *sides[name]) for name in batch]
            records = iter(self._inputs.records([id for ids in every for id in ids]))
            for name, ids, square in zip(batch, every, squares, strict=True):
                own = [(id, next(records)) for id in ids]
                yield name, self._tensor(own, rows, bounds, apart, square)

    def _tensor(
        self,
        sides: Sequence[tuple[TensorId, Tensor]],
        rows: dict[Pair, Digest],
        bounds: Mapping[Pair, float],
        apart: Mapping[Pair, float],
        square: float | None,
    ) -> ComparedSums:
        (base_id, base), *models = sides
        found: list[Digest | None] = []
        squares: list[float | None] = []
        for id, record in models:
            pair = base_id, id
            if id != base_id and pair not in rows and self._pool and self._reads != Reads.NOTHING:
                from mstore.models.stats.analysis import measure_pair

                measured = measure_pair(self._catalog, base, record, self._pool, self.meter)
                self._statistics.put_pair(measured.finish(*pair))
                rows |= known_rows(self._statistics, [pair], sketches=True)
            own = rows.get(pair)
            found.append(own)
            squares.append(0.0 if id == base_id else _square(own, bounds.get(pair)))
            if square is None and own is not None:
                square = math.fsum(own.rows["base_squares"].tolist())
        if square is None and self._pool and self._reads != Reads.NOTHING:
            from mstore.models.stats.analysis import measure_squares

            square = measure_squares(self._catalog, base, self._pool)
            self._statistics.put_squares(base_id, square)
        return ComparedSums(
            _finite(square),
            squares,
            self._all_products(models, squares, found, apart),
            base.block_count(),
            [_equal(sides[0], one) for one in models],
            [_equal(models[i], models[j]) for i, j in _pairs(len(models))],
        )

    def _all_products(
        self,
        models: Sequence[tuple[TensorId, Tensor]],
        squares: Sequence[float | None],
        rows: Sequence[Digest | None],
        apart: Mapping[Pair, float],
    ) -> list[tuple[float, float] | None]:
        """Return the product of each two changes, and its variance."""
        found: list[tuple[float, float] | None] = []
        missing = []
        for i, j in _pairs(len(models)):
            one, other = squares[i], squares[j]
            product: tuple[float, float] | None = None
            if one is not None and other is not None:
                distance = apart.get((models[i][0], models[j][0]))
                if not one or not other:
                    product = 0.0, 0.0
                elif distance is not None:
                    product = _by_distance(one, other, distance)
                else:
                    both = models[i][1], models[j][1]
                    product = _by_rows(rows[i], rows[j], both, self._catalog.block_size)
                    exact = self._reads == Reads.EXACT and (product is None or product[1] > 0)
                    if exact or (product is None and self._reads == Reads.MISSING):
                        missing.append((len(found), i, j))
            found.append(product)
        if missing and self._pool:
            from mstore.models.stats.analysis import measure_apart

            pairs = [(i, j) for _, i, j in missing]
            measured = measure_apart(
                self._catalog, self._statistics, models, pairs, self._pool, self.meter
            )
            for (n, i, j), distance in zip(missing, measured, strict=True):
                found[n] = _by_distance(squares[i] or 0.0, squares[j] or 0.0, distance)
        return found


def known_norms(
    statistics: StatsStore, inputs: Inputs, names: Sequence[str]
) -> dict[str, ComparedSums]:
    """Return the norms of each tensor as far as statistics know them; nothing is read."""
    found = {}
    for start in range(0, len(names), _TOGETHER):
        batch = names[start : start + _TOGETHER]
        bases = [inputs.base[name] for name in batch]
        pairs = [
            [(base, member[name]) for member in inputs.models]
            for name, base in zip(batch, bases, strict=True)
        ]
        moved = [pair for own in pairs for pair in own if pair[0] != pair[1]]
        rows = known_rows(statistics, moved)
        bounds = _bounds(statistics, moved, rows)
        for name, own, known in zip(batch, pairs, statistics.squares_of(bases), strict=True):
            there = [rows[pair] for pair in own if pair in rows]
            square = known
            if square is None and there:
                square = math.fsum(there[0].rows["base_squares"].tolist())
            norms = [
                0.0 if base == id else _square(rows.get((base, id)), bounds.get((base, id)))
                for base, id in own
            ]
            found[name] = ComparedSums(_finite(square), norms, [], 0, [], [])
    return found


def _bounds(
    statistics: StatsStore, pairs: Iterable[Pair], rows: Mapping[Pair, Digest]
) -> Mapping[Pair, float]:
    """Return what is known of the norms of pairs without rows."""
    without = [pair for pair in dict.fromkeys(pairs) if pair not in rows]
    return known_products(statistics, without) if without else {}


def _finite(square: float | None) -> float | None:
    return square if square is not None and math.isfinite(square) else None


def _square(rows: Digest | None, bound: float | None) -> float | None:
    """Return the square of a norm, by rows or else by a bound that is near; None if unknown."""
    return _finite(bound if rows is None else sum_of_squares(rows.rows))


def _by_distance(one: float, other: float, distance: float) -> tuple[float, float] | None:
    return ((one + other - distance) / 2, 0.0) if math.isfinite(distance) else None


def _by_rows(
    one: Digest | None, other: Digest | None, tensors: tuple[Tensor, Tensor], block_size: int
) -> tuple[float, float] | None:
    """Return the product of two changes of a tensor, and its variance; None if rows do not tell."""
    if one is None or other is None or one.chunk_elements != other.chunk_elements:
        return None
    of_a, of_b = one.rows["sum_squares"], other.rows["sum_squares"]
    same = equal_chunks(tensors, one, block_size)
    open_ = ~same & (of_a > 0) & (of_b > 0)
    most = np.sqrt(of_a[open_]) * np.sqrt(of_b[open_])
    cosine, variance = cosines(one.rows[open_], other.rows[open_])
    known = math.fsum(of_a[same].tolist())
    product = known + math.fsum((most * cosine).tolist())
    return product, math.fsum((most * most * variance).tolist())


def _equal(a: tuple[TensorId, Tensor], b: tuple[TensorId, Tensor]) -> int:
    """Return how many blocks of two tensors are the same."""
    (a_id, ours), (b_id, theirs) = a, b
    if a_id == b_id:
        return ours.block_count()
    if ours.dtype != theirs.dtype:
        return 0
    one, other = (np.frombuffer(side.blocks, f"V{ID_BYTES}") for side in (ours, theirs))
    return int((one == other).sum())


# -- lineage ---------------------------------------------------------------------------------------


def common_base(catalog: Catalog, models: Sequence[SnapshotId]) -> SnapshotId | None:
    """Return the nearest model that all were made from, by their bases; None if there is none.

    One of the models may be the base of the others.
    """
    lines = [_line(catalog, id) for id in models]
    contents = {line[0][1] for line in lines}
    for id, content in lines[0]:
        if contents != {content} and all(content in {one for _, one in line} for line in lines):
            return id
    return None


def _line(catalog: Catalog, id: SnapshotId) -> list[tuple[SnapshotId, ManifestId]]:
    """Return a snapshot, its base, the base of that, and so on, as far as they are stored."""
    line = catalog.nearest_first(id, lambda record: record.of_role(BASE))
    return [(one, record.manifest_id()) for one, record in line]


# -- the report ------------------------------------------------------------------------------------


def compare(
    catalog: Catalog,
    statistics: StatsStore,
    base: Input,
    models: Sequence[Input],
    *,
    by: str,
    only: Sequence[str],
    skip: Sequence[str],
    reads: Reads,
    threads: int,
    progress: ProgressCallback | None = None,
) -> CompareReport:
    """Compare models with their base and with each other; see `Store.compare`."""
    if by not in BY:
        raise BadRequest(f"by is {', '.join(BY)}, not {by!r}", where=Option("by"))
    began = time.monotonic()
    names = [model.name for model in models]
    base_id, *others = (catalog.snapshot(one.snapshot).manifest_id() for one in (base, *models))
    choice = ModelChoice(base.model, tuple(model.model for model in models))
    inputs = Inputs(catalog, base_id, others, (base.name, *names), choice=choice)
    require_matches({name for names in inputs.members for name in names}, only, skip, base.name)
    can, cannot = comparable(inputs, only, skip)
    if not can:
        raise Incompatible(
            "no tensor is in the base and in all models, with one shape", where=base.name
        )
    found: dict[str, ComparedSums] = {}
    tick = ProgressCounter("compare", len(can), progress)
    with ThreadPoolExecutor(threads, "compare") as pool:
        measure = Measure(catalog, statistics, inputs, reads=reads, pool=pool)
        try:
            for name, sums in measure.tensors(can):
                found[name] = sums
                tick(1)
        finally:
            statistics.flush()
    grouped = {"part": _by_part, "layer": by_layer}
    parts = grouped[by](found) if by in grouped else found
    remarks = []
    if cannot:
        remarks.append(
            f"not compared: {few(cannot, 1)}, which not all have, or not in one shape and with "
            "floating-point elements"
        )
    return CompareReport(
        base=base.name,
        models=tuple(names),
        tensors=len(can),
        whole=ComparedSums.total(list(found.values())).part(None, names),
        parts=() if by == "model" else tuple(own.part(name, names) for name, own in parts.items()),
        remarks=tuple(remarks),
        bytes_read=measure.meter.total,
        seconds=time.monotonic() - began,
    )
