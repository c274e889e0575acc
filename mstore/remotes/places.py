"""Where entries lie in a remote's packs: the tables of its packs, as sealed local segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Final

import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.elsewhere import KnownPlaces
from mstore.blocks.location import Key, Location
from mstore.blocks.location_arrays import Numbers
from mstore.blocks.pack_tables import PackTable, entries_of, read_tables
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.reader import RECORD_LIMIT, located
from mstore.blocks.segments import Segments
from mstore.remotes.layout import PackRow
from mstore.remotes.objects import read_several
from mstore.remotes.state import Remote, RemoteState
from mstore.store.ahead import in_groups
from mstore.store.layout import tables_of
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import Buffer, PackId

_MOST_READ: Final = 4 << 20
"""Bytes of tables that one request, or one for each of neighbours, brings."""
_KEPT: Final = 16 << 20
"""Bytes of tables that are held in memory until they become rows of segments."""
_IS_CODEC: Final = np.isin(np.arange(256), list(Codec))
_IS_DELTA: Final = np.isin(np.arange(256), [codec for codec in Codec if codec.is_delta])


class RemotePlaces(KnownPlaces):
    """Where a remote has blocks and records, as one state of it says. For one thread."""

    def __init__(self, remote: Remote, state: RemoteState) -> None:
        super().__init__(Segments.create(tables_of(remote.directory)), frozenset())
        self._remote = remote
        self.follow(state)

    def follow(self, state: RemoteState) -> None:
        """Know the packs of this state: read the tables of new ones, forget those that are gone.

        In this order: for others who look, what has moved there is never without a place.
        """
        rows = {id: row for id, row in state.packs().items() if row.is_there and row.is_known}
        known: set[bytes] = set(self._segments.packs())
        new = [row for id, row in rows.items() if id not in known]
        # The segments are locked for what is in memory, not for requests: other commands of this
        # store wait for no network, and one that ends early leaves what it has read.
        with closing(self._read(new, state.root.block_size)) as tables:
            for some in in_groups(tables, lambda one: one[1].nbytes, _KEPT):
                self._segments.add(some)
        gone = [PackId(id) for id in known - rows.keys()]
        if gone:
            self._segments.drop(gone)
        self._there = set(rows)

    def _read(
        self, rows: Sequence[PackRow], block_size: int
    ) -> Generator[tuple[PackId, PackTable]]:
        """Yield packs with their tables, several requests ahead.

        Raises Corrupt for an entry that cannot be, Unavailable.
        """
        by_object: dict[str, list[PackRow]] = defaultdict(list)
        for row in rows:
            by_object[row.table_name].append(row)
        groups = [
            (name, few)
            for name, some in by_object.items()
            for few in in_groups(
                sorted(some, key=lambda row: row.offset), lambda row: row.length, _MOST_READ
            )
        ]

        def read(group: tuple[str, Sequence[PackRow]]) -> list[Buffer]:
            name, few = group
            return self._remote.objects.read_each(name, [(row.offset, row.length) for row in few])

        with closing(read_several(groups, read)) as done:
            for (name, few), found in done:
                where = f"{self._remote.where}/{name}"
                packs = [row.pack for row in few]
                parts = list(zip(packs, map(bytes, found), strict=True))
                table, places = read_tables(parts, where)
                sizes = np.repeat([row.size for row in few], np.diff(places))
                require_possible(table, sizes, block_size, where)
                for pack, (start, end) in zip(packs, pairwise(places), strict=True):
                    yield pack, table[start:end]

    def entries(self, row: PackRow, block_size: int) -> list[tuple[Key, Location]]:
        """Return what the table of one pack says. Raises Corrupt, Unavailable."""
        [(pack, table)] = self._read([row], block_size)
        return [((Kind(one.kind), one.id), located(pack, one)) for one in entries_of(table)]


def require_possible(table: PackTable, sizes: Numbers, block_size: int, where: str) -> None:
    """Raise Corrupt for an entry whose lengths or codec cannot be, before memory is taken for it.

    sizes: bytes of the pack of each entry. A table is proved by its pack's name; but who made the
    pack may be a stranger. Raises Incompatible for a codec of a newer version.
    """
    codec, stored, plain = table["codec"], table["stored"], table["plain"]
    if not _IS_CODEC[codec].all():
        raise Incompatible(
            f"codec {codec[~_IS_CODEC[codec]][0]} is of a newer mstore",
            where=where,
            hint="pip install -U mstore",
        )
    has_base = table["base"] != np.void(NO_BASE)
    is_possible = np.where(
        table["kind"] == Kind.BLOCK,
        (np.maximum(stored, plain) <= block_size) & (_IS_DELTA[codec] == has_base),
        (codec == Codec.RAW) & (stored == plain) & (plain <= RECORD_LIMIT),
    )
    # The table's own check has shown that this is no overflow.
    is_possible &= table["offset"] + stored <= sizes
    if not is_possible.all():
        [bad, *_] = entries_of(table[~is_possible])
        raise Corrupt(f"impossible entry {bad.id.hex()[:12]} of a pack", where=where)
