"""Sharings: the blocks that the same owners need, and sums over them.

Owners are refs, or reasons for keeping contents. Every block is in one sharing, so sums over
sharings add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec
from mstore.blocks.location_arrays import LocationTable, id_at
from mstore.blocks.packs import Kind
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible
from mstore.terms.ids import ID_BYTES, TensorId
from mstore.terms.report import Report
from mstore.upkeep.reachability import Inventory

Numbers = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]
Owners = int
"""A set of refs: bit k for ref number k. Or a set of reasons."""
BLOCKS, PLAIN, STORED = range(3)
_CHUNK = 1 << 10
_BATCH = 1 << 17


class CodecUsage(Report, frozen=True):
    """Blocks stored with one codec: how many, and their bytes."""

    codec: str
    """raw, constant, zstd, floats or delta"""
    blocks: int
    """number of blocks"""
    plain_bytes: int
    """their size as plain bytes"""
    stored_bytes: int
    """their size at rest"""


class TensorBlocks:
    """The row numbers of the blocks of stored tensors: four bytes for each block of each tensor."""

    def __init__(self, catalog: Catalog, inventory: Inventory, tensors: Iterable[bytes]) -> None:
        """Read the records of these tensors."""
        self._tensors = inventory.tables[Kind.TENSOR]
        self._base = inventory.blocks.base
        self._starts = np.zeros(len(self._tensors), np.int64)
        self._counts = np.zeros(len(self._tensors), np.int64)
        ids = b"".join(tensors)
        found = self._tensors.find(ids)
        stored = [TensorId(id_at(ids, at)) for at in np.flatnonzero(found >= 0).tolist()]
        done = 0
        # The search runs beside the reading: numpy lets other threads run meanwhile.
        with ThreadPoolExecutor(1, "usage") as pool:
            searches: list[Future[npt.NDArray[np.int32]]] = []
            for some in _together(catalog, inventory, stored):
                lists = b"".join([tensor.blocks for _, tensor in some])
                if searches:
                    # One waits at most: its ids take eight times what is found.
                    searches[-1].result()
                searches.append(pool.submit(_found, inventory.blocks, lists))
                numbers = self._tensors.find(b"".join([id for id, _ in some]))
                counts = np.array([tensor.block_count() for _, tensor in some], np.int64)
                self._starts[numbers] = done + np.cumsum(counts) - counts
                self._counts[numbers] = counts
                done += len(lists) // ID_BYTES
            pieces = [search.result() for search in searches]
        self._blocks = np.concatenate([np.empty(0, np.int32), *pieces])

    def of(self, rows: Numbers) -> Numbers:
        """Return the row numbers of the blocks of the tensors of these rows, and of their bases.

        Each once, ascending.
        """
        starts, counts = self._starts[rows], self._counts[rows]
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = self._blocks[np.repeat(starts, counts) + steps].astype(np.int64)
        blocks = blocks[blocks >= 0]
        bases = self._base[blocks].astype(np.int64)
        return distinct(np.concatenate([blocks, bases[bases >= 0]]))


def distinct(numbers: Numbers) -> Numbers:
    """Return each of these numbers once, ascending."""
    # Sorted by hand: numpy's `unique` takes ten times as long on integers like these.
    both = np.sort(numbers)
    return both[np.append(True, both[1:] != both[:-1])] if len(both) else both


def _found(blocks: LocationTable, ids: bytes) -> npt.NDArray[np.int32]:
    return blocks.find(ids).astype(np.int32)


def _together(
    catalog: Catalog, inventory: Inventory, tensors: Iterable[TensorId]
) -> Iterator[list[tuple[TensorId, Tensor]]]:
    """Yield the records that are not lost, in groups of about `_BATCH` blocks."""
    some: list[tuple[TensorId, Tensor]] = []
    blocks = 0
    for id, tensor in inventory.readable(catalog, Tensor, tensors):
        if tensor.fits(catalog.block_size):
            some.append((id, tensor))
            blocks += 1 + tensor.block_count()
        if blocks >= _BATCH:
            yield some
            some, blocks = [], 0
    yield some


class Sharings:
    """Blocks grouped by who needs them. Filled by `add`; two sharings may have the same owners.

    labels: the sharing of each block, int32[blocks]; 0 means nobody's. owners: of each sharing, a
    set of numbers below `width`.
    """

    def __init__(self, blocks: int, width: int) -> None:
        self.labels = np.zeros(blocks, np.int32)
        self.owners: list[Owners] = [0]
        self.width = width
        self._table: Numbers | None = None

    def part(self, lowest: int, width: int) -> Sharings:
        """Return the same sharings with only these owners, of whom the lowest is number 0."""
        found = Sharings(0, width)
        found.labels, found._table = self.labels, self._table
        mask = (1 << width) - 1
        found.owners = [owners >> lowest & mask for owners in self.owners]
        return found

    def add(self, owners: Owners, numbers: Numbers) -> None:
        """Record that these owners need these blocks (each listed once)."""
        if not owners:
            return
        self._table = None
        # Split every sharing that is touched: its touched blocks become a new sharing.
        labels = self.labels[numbers]
        first = int(labels[0]) if len(labels) else 0
        if (labels == first).all():
            touched = [first]
            self.labels[numbers] = len(self.owners)
        else:
            found, within = np.unique(labels, return_inverse=True)
            touched = found.tolist()
            self.labels[numbers] = len(self.owners) + within
        self.owners += [self.owners[label] | owners for label in touched]

    def table(self, blocks: LocationTable) -> Numbers:
        """Return int64[sharings, codecs, 3]: blocks, plain and stored bytes by codec.

        Counted at the first call, also for later parts.
        """
        if self._table is None:
            self._table = self._counted(blocks)
        return self._table

    def _counted(self, blocks: LocationTable) -> Numbers:
        shape = (len(self.owners), len(Codec))
        codec = blocks.heads["codec"].astype(np.int64)
        if len(codec) and codec.max() >= len(Codec):
            raise Incompatible("a block's codec needs a newer mstore", hint="pip install -U mstore")
        cells = self.labels * np.int64(len(Codec)) + codec
        columns = (
            np.bincount(cells, weights, shape[0] * shape[1]).reshape(shape)
            for weights in (None, blocks.heads["plain"], blocks.heads["stored"])
        )
        # bincount sums in float64; integers below 2**53 are exact there.
        return np.stack([column.astype(np.int64) for column in columns], axis=2)


class Figures(msgspec.Struct, frozen=True):
    """The figures of one owner, int64[codecs, 3]: counts, plain and stored bytes by codec.

    all: of everything that it has. unique: of what it alone has. portion: its stored bytes, where a
    block with n owners counts as an n-th.
    """

    all: Numbers
    unique: Numbers
    portion: int


class Sums:
    """Sums over chosen sharings: every figure of a report."""

    def __init__(self, sharings: Sharings, blocks: LocationTable) -> None:
        table = sharings.table(blocks)
        # Later sharings split many earlier ones; drop those without blocks.
        used = np.flatnonzero(table[:, :, BLOCKS].any(axis=1)).tolist()
        # Merge sharings of the same owners.
        owners = [sharings.owners[label] for label in used]
        places = {who: place for place, who in enumerate(dict.fromkeys(owners))}
        into = np.array([places[who] for who in owners], np.int64)
        self._table = np.zeros((len(places), len(Codec), 3), np.int64)
        np.add.at(self._table, into, table[used])
        self._stored = self._table[:, :, STORED].sum(axis=1)
        self._owned = flags(list(places), sharings.width)
        self._owners = self._owned.sum(axis=1)

    def all(self) -> Chosen:
        """Select every sharing."""
        return np.ones(len(self._owners), np.bool_)

    def of_any(self, *asked: int) -> Chosen:
        """Select the sharings that any of these owners has; with none, those that anyone has."""
        counted = self._owned[:, list(asked)] if asked else self._owned
        return np.asarray(counted.any(axis=1), np.bool_)

    def of_none_but(self, asked: Sequence[int]) -> Chosen:
        """Select the sharings that only these owners have."""
        mine = self._owned[:, list(asked)].sum(axis=1)
        return np.asarray((mine > 0) & (mine == self._owners), np.bool_)

    def stored(self, chosen: Chosen) -> int:
        """Return the stored bytes of these sharings."""
        return int(self._stored[chosen].sum())

    def each(self, asked: Sequence[int]) -> list[Figures]:
        """Return the sums of each of these owners, in one pass over all sharings."""
        cells = self._table.reshape(len(self._table), len(Codec) * 3).astype(np.float64)
        unique = cells * (self._owners == 1)[:, None]
        portion = self._stored / np.maximum(self._owners, 1)
        columns = np.hstack([cells, unique, portion[:, None]])
        found = np.zeros((len(asked), columns.shape[1]))
        for start in range(0, len(columns), _CHUNK):
            # float64 products are fast, and exact for integers below 2**53.
            owned = self._owned[start : start + _CHUNK, list(asked)].astype(np.float64)
            found += owned.T @ columns[start : start + _CHUNK]
        whole = found[:, :-1].astype(np.int64).reshape(len(asked), 2, len(Codec), 3)
        return [
            Figures(sums[0], sums[1], int(own[-1])) for sums, own in zip(whole, found, strict=True)
        ]

    def common(self, owner: int) -> Numbers:
        """Return the stored bytes that an owner has in common with each owner: int64[owners]."""
        mine = self._owned[:, owner]
        return np.asarray(self._stored[mine] @ self._owned[mine], np.int64)

    def codecs(self, chosen: Chosen) -> tuple[CodecUsage, ...]:
        """Return counts and bytes by codec."""
        return by_codec(self._table[chosen].sum(axis=0))


def by_codec(sums: Numbers) -> tuple[CodecUsage, ...]:
    """Convert sums of int64[codecs, 3] to report rows."""
    return tuple(
        CodecUsage(codec.name.lower(), *figures)
        for codec, figures in zip(Codec, sums.tolist(), strict=True)
        if figures[BLOCKS]
    )


def flags(sets: Sequence[Owners], width: int) -> Chosen:
    """Convert sets to rows of flags: bool[sets, width]."""
    size = -(-width // 8)
    packed = b"".join(who.to_bytes(size, "little") for who in sets)
    rows = np.frombuffer(packed, np.uint8).reshape(len(sets), size)
    return np.unpackbits(rows, axis=1, count=width, bitorder="little").astype(np.bool_)
