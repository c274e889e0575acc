"""Distances: how far apart two tensors are, as far as statistics against a common base say it.

With d' and d'' the deltas of two tensors to the same base, chunk by chunk,

    ||d'' - d'|| = ||d''||  where d' is 0, ||d'|| where d'' is 0, 0 where both have the same block
    | ||d''|| - ||d'|| |  <=  ||d'' - d'||  <=  ||d''|| + ||d'||          elsewhere

Where a is the base of b, or no chunk differs in both and the norm of a is known, these tell the
distance.  Elsewhere it has bounds, and the sketches of both deltas estimate it
(`mstore.models.stats.chunk`).  Statistics take differences in float32, which rounds each by at most
2^-24 of its size; bounds leave room for that.  No block is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.models.stats.chunk import CHUNK, Rows, cosines, finite
from mstore.models.stats.store import StatsStore, readable
from mstore.models.stats.table import DeltaTable, Digest
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.snapshot import BASE
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import ID_BYTES, SnapshotId, TensorId

_ROUNDING: Final = 1e-6
"""Room in bounds, relative to the norms that are added: sums and differences are rounded."""
_WORDS: Final = ID_BYTES // 8
Pair = tuple[TensorId, TensorId]


class Distance(msgspec.Struct, frozen=True):
    """||b - a|| / ||a||: bounds, equal where it is known, and an estimate within them."""

    low: float
    high: float
    estimate: float

    @classmethod
    def known(cls, value: float) -> Distance:
        """Return a distance that is known."""
        return cls(value, value, value)

    @property
    def is_known(self) -> bool:
        """Whether the bounds are one number."""
        return self.low == self.high


class Distances:
    """What statistics say of the tensors of two snapshots.  Used by one thread."""

    def __init__(
        self, catalog: Catalog, statistics: StatsStore, a: SnapshotId, b: SnapshotId
    ) -> None:
        self._statistics = statistics
        self._block_size = catalog.block_size
        self._bases = [
            tensors_of(catalog, manifest)
            for id in _bases(catalog, a) & _bases(catalog, b)
            if (record := catalog.snapshot_if_there(id)) is not None
            and (manifest := catalog.manifest_if_there(record.manifest_id())) is not None
        ]
        self._tables: dict[Pair, bytes] = {}
        self._squares: dict[TensorId, float] = {}

    def prepare(
        self, names: Iterable[str], a: Mapping[str, TensorId], b: Mapping[str, TensorId]
    ) -> None:
        """Look up the statistics of these tensors, all together."""
        pairs = [(name, a[name], b[name]) for name in names if name in a and name in b]
        differ = [(name, one, other) for name, one, other in pairs if one != other]
        wanted = dict.fromkeys(
            pair
            for name, one, other in differ
            for base in self._candidates(name, one, other)
            for pair in ((base, one), (base, other))
            if pair[0] != pair[1]
        )
        keys = list(wanted)
        values = self._statistics.encoded_pairs(keys)
        self._tables = {
            key: value for key, value in zip(keys, values, strict=True) if value is not None
        }
        ours = [one for _, one, _ in differ]
        squares = self._statistics.squares_of(ours)
        self._squares = {
            id: value for id, value in zip(ours, squares, strict=True) if value is not None
        }

    def of(
        self, name: str, a: TensorId, b: TensorId, tensors: tuple[Tensor, Tensor]
    ) -> Distance | None:
        """Return the distance of two tensors that `prepare` named; None if nothing is known of it.

        tensors: their records, of one dtype and shape.
        """
        for base in self._candidates(name, a, b):
            of_a, of_b = (
                None if side == base else readable(self._tables.get((base, side)))
                for side in (a, b)
            )
            either = of_a or of_b
            if either is None or (of_a is None and a != base) or (of_b is None and b != base):
                continue
            ours, theirs = (
                np.zeros(len(either.rows), CHUNK) if one is None else one.rows
                for one in (of_a, of_b)
            )
            if len(ours) != len(theirs) or not (finite(ours) & finite(theirs)).all():
                continue
            squares = self._squares.get(a)
            if a == base:
                squares = math.fsum(either.rows["base_squares"].tolist())
            same = equal_chunks(tensors, either, self._block_size)
            found = _relative(either.rows, ours, theirs, same, squares)
            if found is not None:
                return found
        return None

    def _candidates(self, name: str, a: TensorId, b: TensorId) -> Sequence[TensorId]:
        """Return the tensors that may be the base of both; each of the two may be the other's."""
        common = (base[name] for base in self._bases if name in base)
        return list(dict.fromkeys((a, b, *common)))


def equal_chunks(
    tensors: tuple[Tensor, Tensor], rows: DeltaTable | Digest, block_size: int
) -> npt.NDArray[np.bool_]:
    """Return which chunks of rows have one block in both tensors; none where chunks are no blocks.

    tensors: of one shape.
    """
    a, b = tensors
    if a.dtype != b.dtype or rows.chunk_elements * a.nbytes != block_size * rows.elements:
        return np.zeros(len(rows.rows), np.bool_)
    ours, theirs = (np.frombuffer(one.blocks, np.uint64).reshape(-1, _WORDS) for one in tensors)
    return np.asarray((ours == theirs).all(axis=1), np.bool_)


def _bases(catalog: Catalog, id: SnapshotId) -> set[SnapshotId]:
    return set(catalog.snapshot(id).of_role(BASE))


def _relative(
    base: Rows,
    a: Rows,
    b: Rows,
    same: npt.NDArray[np.bool_],
    squares: float | None,
) -> Distance | None:
    """Return the distance of two deltas relative to the norm of base + a.

    base: rows with the sums of squares of the base. same: chunks where the deltas are equal.
    squares: sum of squares of base + a, if it is known. Returns None if its norm may be 0.
    """
    of_a, of_b = a["sum_squares"], b["sum_squares"]
    open_ = ~same & (of_a > 0) & (of_b > 0)
    # Outside of these, one of the two is 0.
    told = math.fsum(np.where(same | open_, 0.0, of_a + of_b).tolist())
    one, other = np.sqrt(of_a[open_]), np.sqrt(of_b[open_])
    room = _ROUNDING * (one + other)
    least = np.maximum(0.0, np.abs(one - other) - room) ** 2
    most = (one + other + room) ** 2
    cosine, _ = cosines(a[open_], b[open_])
    guess = np.clip(of_a[open_] + of_b[open_] - 2.0 * one * other * cosine, least, most)
    low, high, middle = (
        math.sqrt(told + math.fsum(part.tolist())) for part in (least, most, guess)
    )
    if squares is not None:
        shortest = longest = norm = math.sqrt(squares)
    else:
        norm = math.sqrt(math.fsum(base["base_squares"].tolist()))
        moved = math.sqrt(math.fsum(of_a.tolist()))
        spare = moved + _ROUNDING * (norm + moved)
        shortest, longest = norm - spare, norm + spare
    if not (shortest > 0 and math.isfinite(high) and math.isfinite(longest)):
        return None
    if shortest == longest and not open_.any():
        return Distance.known(middle / norm)
    return Distance(
        low / longest * (1 - _ROUNDING), high / shortest * (1 + _ROUNDING), middle / norm
    )
