"""Where entries lie in a remote's packs: the tables of its packs, as sealed local segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import Kind, PackEntry, table_entries
from mstore.blocks.segments import Segments
from mstore.remotes.layout import PackRow
from mstore.remotes.state import Remote, RemoteState
from mstore.terms.ids import PackId

_MOST_READ = 4 << 20
"""Bytes of tables that are read at once."""


class RemotePlaces:
    """Where a remote has blocks and records, as one state of it says. For one thread."""

    def __init__(self, remote: Remote, state: RemoteState) -> None:
        self._remote = remote
        self._segments = Segments.create(remote.directory / "places")
        self._there: set[bytes] = set()
        self.follow(state)

    def follow(self, state: RemoteState) -> None:
        """Know the packs of this state: read the tables of new ones, forget those that are gone."""
        rows = {id: row for id, row in state.packs().items() if row.is_there}
        known: set[bytes] = set(self._segments.packs())
        gone = [PackId(id) for id in known - rows.keys()]
        if gone:
            self._segments.drop(gone)
        new = [row for id, row in rows.items() if id not in known]
        self._segments.add(self._tables(new))
        self._there = set(rows)

    def _tables(self, rows: Sequence[PackRow]) -> Iterator[tuple[PackId, Sequence[PackEntry]]]:
        by_table: dict[bytes, list[PackRow]] = defaultdict(list)
        for row in rows:
            by_table[row.table].append(row)
        for table, some in by_table.items():
            name = f"tables/{table.hex()}"
            for few in _batches(sorted(some, key=lambda row: row.offset)):
                spans = [(row.offset, row.length) for row in few]
                for row, data in zip(few, self._remote.objects.read_each(name, spans), strict=True):
                    where = f"{self._remote.where}/{name}"
                    yield row.pack, table_entries(row.pack, bytes(data), where)

    def locate(self, kind: Kind, ids: Sequence[bytes]) -> list[Location | None]:
        """Return where the remote has each of these; None for what it does not have."""
        found = self._segments.locations(kind, b"".join(ids))
        return [
            at if at is None or at.pack in self._there else self._other(kind, id)
            for id, at in zip(ids, found, strict=True)
        ]

    def _other(self, kind: Kind, id: bytes) -> Location | None:
        places = self._segments.places(kind, id)
        return next((at for at in places if at.pack in self._there), None)

    def alone(self, block: bytes) -> Location | None:
        """Return where the remote has a block that needs no base, so that it can be one."""
        places = self._segments.places(Kind.BLOCK, block)
        fit = (at for at in places if at.pack in self._there and not Codec(at.codec).is_delta)
        return next(fit, None)


def _batches(rows: Sequence[PackRow]) -> Iterator[list[PackRow]]:
    some: list[PackRow] = []
    size = 0
    for row in rows:
        if some and size + row.length > _MOST_READ:
            yield some
            some, size = [], 0
        some.append(row)
        size += row.length
    if some:
        yield some
