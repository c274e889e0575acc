"""Where entries lie in a remote's packs: the tables of its packs, as sealed local segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from mstore.blocks.codecs import Codec
from mstore.blocks.elsewhere import KnownPlaces
from mstore.blocks.location import Key, Location
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, table_entries
from mstore.blocks.reader import RECORD_LIMIT, located
from mstore.blocks.segments import Segments
from mstore.remotes.layout import PackRow
from mstore.remotes.state import Remote, RemoteState
from mstore.store.ahead import in_groups
from mstore.store.layout import tables_of
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import PackId

_MOST_READ: Final = 4 << 20
"""Bytes of tables that are read at once."""
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
        self._segments.add(self._tables(new, state.root.block_size))
        self._there = set(rows)

    def _tables(
        self, rows: Sequence[PackRow], block_size: int
    ) -> Iterator[tuple[PackId, Sequence[PackEntry]]]:
        by_table: dict[str, list[PackRow]] = defaultdict(list)
        for row in rows:
            by_table[row.table_name].append(row)
        for name, some in by_table.items():
            ordered = sorted(some, key=lambda row: row.offset)
            for few in in_groups(ordered, lambda row: row.length, _MOST_READ):
                spans = [(row.offset, row.length) for row in few]
                for row, data in zip(few, self._remote.objects.read_each(name, spans), strict=True):
                    where = f"{self._remote.where}/{name}"
                    entries = table_entries(row.pack, bytes(data), where)
                    for entry in entries:
                        require_possible(entry, row, block_size, where)
                    yield row.pack, entries

    def entries(self, row: PackRow, block_size: int) -> list[tuple[Key, Location]]:
        """Return what the table of one pack says. Raises Corrupt, Unavailable."""
        [(pack, entries)] = self._tables([row], block_size)
        return [((Kind(one.kind), one.id), located(pack, one)) for one in entries]


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
