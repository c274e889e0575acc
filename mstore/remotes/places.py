"""Where entries lie in a remote's packs: the tables of its packs, as sealed local segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Final

from mstore.blocks.codecs import Codec
from mstore.blocks.elsewhere import KnownPlaces
from mstore.blocks.location import Key, Location
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, table_entries
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
_KEPT: Final = 48 << 20
"""Bytes of tables that are held in memory until they become rows of segments."""
_CODECS: Final = frozenset(Codec)
_DELTAS: Final = frozenset(codec for codec in Codec if codec.is_delta)


class RemotePlaces(KnownPlaces):
    """Where a remote has blocks and records, as one state of it says. For one thread."""

    def __init__(self, remote: Remote, state: RemoteState) -> None:
        super().__init__(Segments.create(tables_of(remote.directory)), frozenset())
        self._remote = remote
        self.follow(state)

    def follow(self, state: RemoteState) -> None:
        """Know the packs of this state: read the tables of new ones, forget those that are gone."""
        rows = {id: row for id, row in state.packs().items() if row.is_there and row.is_known}
        known: set[bytes] = set(self._segments.packs())
        gone = [PackId(id) for id in known - rows.keys()]
        if gone:
            self._segments.drop(gone)
        new = [row for id, row in rows.items() if id not in known]
        # The segments are locked for what is in memory, not for requests: other commands of this
        # store wait for no network, and one that ends early leaves what it has read.
        with closing(self._read(new)) as tables:
            for some in in_groups(tables, lambda one: len(one[1]), _KEPT):
                self._segments.add(
                    (row.pack, self._checked(row, data, state.root.block_size))
                    for row, data in some
                )
        self._there = set(rows)

    def _read(self, rows: Sequence[PackRow]) -> Generator[tuple[PackRow, Buffer]]:
        """Yield rows with the bytes of their tables, several requests ahead."""
        by_table: dict[str, list[PackRow]] = defaultdict(list)
        for row in rows:
            by_table[row.table_name].append(row)
        groups = [
            few
            for some in by_table.values()
            for few in in_groups(
                sorted(some, key=lambda row: row.offset), lambda row: row.length, _MOST_READ
            )
        ]

        def read(few: Sequence[PackRow]) -> list[Buffer]:
            spans = [(row.offset, row.length) for row in few]
            return self._remote.objects.read_each(few[0].table_name, spans)

        with closing(read_several(groups, read)) as done:
            for few, found in done:
                yield from zip(few, found, strict=True)

    def _checked(self, row: PackRow, data: Buffer, block_size: int) -> Sequence[PackEntry]:
        """Return the entries of a table. Raises Corrupt for one that is not what the row says."""
        where = f"{self._remote.where}/{row.table_name}"
        entries = table_entries(row.pack, bytes(data), where)
        for entry in entries:
            require_possible(entry, row, block_size, where)
        return entries

    def entries(self, row: PackRow, block_size: int) -> list[tuple[Key, Location]]:
        """Return what the table of one pack says. Raises Corrupt, Unavailable."""
        [(_, data)] = self._read([row])
        entries = self._checked(row, data, block_size)
        return [((Kind(one.kind), one.id), located(row.pack, one)) for one in entries]


def require_possible(entry: PackEntry, row: PackRow, block_size: int, where: str) -> None:
    """Raise Corrupt for an entry whose lengths or codec cannot be, before memory is taken for it.

    A table is proved by its pack's name; but who made the pack may be a stranger.
    """
    codec = entry.codec
    if codec not in _CODECS:
        raise Incompatible(
            f"codec {codec} is of a newer mstore", where=where, hint="pip install -U mstore"
        )
    stored, plain = entry.stored_length, entry.raw_length
    if entry.kind == Kind.BLOCK:
        is_possible = max(stored, plain) <= block_size and (
            (codec in _DELTAS) == (entry.base != NO_BASE)
        )
    else:
        is_possible = codec == Codec.RAW and stored == plain <= RECORD_LIMIT
    if not is_possible or entry.offset + stored > row.size:
        raise Corrupt(f"impossible entry {entry.id.hex()[:12]} of pack {row.pack}", where=where)
