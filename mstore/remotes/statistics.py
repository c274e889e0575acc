"""Statistics of a snapshot's weights at a remote, so that who plans a merge need not read these.

    push     what this store has measured of the snapshot's tensors against others, with trim
             thresholds and ties at the usual densities, goes to stats/, once for a snapshot
    fetch    what a fetched snapshot's row names comes into the statistics of this store

An object is a MessagePack array: the text `mstore statistics/1`, and an array of rows
(`models.stats.store.StatsRow`).  Unlike all else at a remote, statistics are not proved by what
they are about: they are the word of whoever pushed them.  So a store that requires signatures does
not take them, and none replaces what this store has measured itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import msgspec

from mstore import fs
from mstore.merge.planning.statistics import Side
from mstore.merge.planning.usual import find_usual
from mstore.models.stats.store import StatsRow, StatsStore
from mstore.remotes.layout import MOST_STATISTICS_BYTES, StatisticsId, StatisticsRow
from mstore.remotes.objects import Absent, read_several
from mstore.remotes.state import Remote, RemoteState
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Corrupt, NotFound, StorageFailed
from mstore.terms.ids import Buffer, SnapshotId, TensorId, split_ids
from mstore.terms.report import ProgressCallback, ProgressCounter

_HEAD: Final = "mstore statistics/1"
_KNOWN: Final = "statistics"
_MOST_KNOWN: Final = 64 << 20
_decode = msgspec.msgpack.Decoder(tuple[str, list[StatsRow]]).decode


def encode(rows: Iterable[StatsRow]) -> bytes:
    """Return an object of statistics."""
    return msgspec.msgpack.encode((_HEAD, list(rows)))


def decode(row: StatisticsRow, data: bytes, where: str) -> list[StatsRow]:
    """Return the rows of an object of statistics.  Raises Corrupt."""
    if StatisticsId.of(data) != row.statistics:
        raise Corrupt("the statistics do not match their name", where=where)
    try:
        head, rows = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not statistics of a remote: {error}", where=where) from error
    if head != _HEAD:
        raise Corrupt("not statistics of a remote", where=where)
    return rows


class OutgoingStatistics:
    """What a push sends of the statistics of this store.

    threads: for the search of thresholds, which reads the weights of each pair at most twice.
    """

    def __init__(
        self,
        catalog: Catalog,
        statistics: StatsStore,
        *,
        threads: int,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._threads = threads
        self._progress = progress
        self._encoded: dict[SnapshotId, bytes] = {}

    def of(
        self,
        snapshots: Iterable[SnapshotId],
        are_there: Callable[[Sequence[bytes]], list[bool]],
        *,
        finds: bool,
    ) -> dict[SnapshotId, bytes]:
        """Return the objects of the snapshots that have statistics.

        are_there: says which tensors the remote has: statistics against others are of no use there.
        finds: find thresholds and ties first.  Raises Corrupt, StorageFailed.
        """
        asked = list(snapshots)
        tensors = {
            id: {part.tensor for file in self._catalog.manifest_of(id).files for part in file.parts}
            for id in asked
            if id not in self._encoded
        }
        bases = self._statistics.bases_of(set().union(*tensors.values()))
        known = list({base for some in bases.values() for base in some})
        there = {base for base, is_there in zip(known, are_there(known), strict=True) if is_there}
        pairs = {
            id: [
                (base, TensorId(one))
                for one in sorted(some & bases.keys())
                for base in bases[TensorId(one)]
                if base in there
            ]
            for id, some in tensors.items()
        }
        if finds:
            self._find(list(dict.fromkeys(pair for some in pairs.values() for pair in some)))
        for id, some in pairs.items():
            alone = map(TensorId, sorted(tensors[id]))
            data = encode(self._statistics.about(some, alone)) if some else b""
            # What is longer is measured again where it is needed.
            self._encoded[id] = data if len(data) <= MOST_STATISTICS_BYTES else b""
        return {id: data for id in asked if (data := self._encoded[id])}

    def _find(self, pairs: Sequence[tuple[TensorId, TensorId]]) -> None:
        """Find thresholds and ties of the pairs whose weights are here."""
        sides: list[tuple[Side, Side]] = []
        for pair in pairs:
            try:
                contents = [self._catalog.content(id) for id in pair]
            except NotFound:
                continue
            records = [one for one in contents if isinstance(one, Tensor)]
            if len(records) == 2:
                sides.append(((pair[0], records[0]), (pair[1], records[1])))
        total = sum(expert[1].nbytes for _, expert in sides)
        tick = ProgressCounter("thresholds", total, self._progress)
        with ThreadPoolExecutor(self._threads, "thresholds") as pool:
            for base, expert in sides:
                find_usual(self._catalog, self._statistics, base, expert, pool)
                tick(expert[1].nbytes)


class IncomingStatistics:
    """What a fetch takes of a remote's statistics, each object once."""

    def __init__(self, remote: Remote, statistics: StatsStore) -> None:
        self._remote = remote
        self._statistics = statistics
        self.received = 0

    def take(self, state: RemoteState, snapshots: Iterable[SnapshotId]) -> None:
        """Take the statistics of these snapshots; pass over an object that is gone.

        Raises Corrupt for one that is damaged, or not what it should be, Unavailable.
        """
        rows, known = state.rows("statistics"), _known(self._remote)
        named = {row.statistics: row for id in snapshots if (row := rows.get(id)) is not None}
        new = [row for id, row in named.items() if id not in known]
        for row, data in read_several(new, self._read):
            if data is None:
                continue
            self.received += row.size
            where = f"{self._remote.where}/{row.name}"
            try:
                self._statistics.take(decode(row, bytes(data), where))
            except Corrupt as error:
                raise Corrupt(error.what, where=where) from error
        know(self._remote, state, new)

    def _read(self, row: StatisticsRow) -> Buffer | None:
        # A gc may have removed it: then nothing needs it, and weights can be measured again.
        with suppress(Absent):
            [data] = self._remote.objects.read_each(row.name, [(0, row.size)])
            return data
        return None


def know(remote: Remote, state: RemoteState, rows: Sequence[StatisticsRow]) -> None:
    """Keep that this store has what these rows name: no fetch takes it again."""
    if not rows:
        return
    # A gc may have removed lists of this root already: then the next fetch takes some again.
    with suppress(Absent):
        there = {row.statistics for row in state.rows("statistics").values()}
        known = (_known(remote) | {row.statistics for row in rows}) & there
        fs.replace_file(remote.directory / _KNOWN, b"".join(sorted(known)))


def _known(remote: Remote) -> set[bytes]:
    try:
        data = fs.read_file(remote.directory / _KNOWN, _MOST_KNOWN)
    except StorageFailed:
        return set()
    return set(split_ids(data))
