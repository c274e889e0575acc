"""Garbage collection of a remote, while others push and fetch.

    live -> condemned -> deleting -> deleted

Nothing that refs reach, or moves of refs of the last days, is dropped. A pack that they do not need
is condemned, by a swap of the root. A push that needs it makes it live again, by a swap too. When
it has been condemned for the time of grace, another swap says `deleting`; only then its object is
removed. A name that was ever `deleting` never comes back: whoever needs what was in it puts it
into a new pack. So there are no locks, and only the remote's clock counts.

A list, table or object of statistics that no root names is garbage if it was made for a generation
that is over: who made it was overtaken, and puts another. Packs that no root names, of pushes that
did not end, get a row first, and then go as the others. Who reads an old root meanwhile may miss an
object; it reads the root again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from mstore.remotes.layout import (
    PackRow,
    PackState,
    TableId,
    pack_name,
    table_name,
)
from mstore.remotes.needs import Needs, gather
from mstore.remotes.objects import Absent, Overtaken
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import AllRecords, lacks, placed
from mstore.remotes.state import Changes, Remote, RemoteState
from mstore.store.ahead import in_groups
from mstore.store.catalog import Catalog
from mstore.terms.errors import BadName
from mstore.terms.ids import PackId, SnapshotId
from mstore.terms.report import Report

GRACE_HOURS: Final = 24.0
_NS_AN_HOUR: Final = 3600 * 10**9
_FEW_TABLES: Final = 16
_JOINED_BYTES: Final = 16 << 20
_NO_TABLE: Final = bytes(32)


class RemoteGcReport(Report, frozen=True):
    """What garbage collection of a remote dropped, or with `dry_run` would drop."""

    remote: str
    """the remote's name"""
    url: str
    """its address"""
    dry_run: bool
    """whether this only reports what would be dropped"""
    snapshots_dropped: tuple[SnapshotId, ...]
    """ids of snapshots that nothing reaches"""
    packs_condemned: int
    """packs that nothing needs any more; a later run deletes them"""
    packs_revived: int
    """condemned packs that are needed again"""
    packs_deleted: int
    """packs that were deleted"""
    freed_bytes: int
    """their size"""
    waiting_bytes: int
    """size of condemned packs, which wait for the time of grace"""
    dead_bytes: int
    """bytes that nothing needs, in packs that stay"""
    leftover_objects: int
    """other objects that no root names, deleted"""
    tables_joined: int
    """objects of tables that were joined"""
    generation: int
    """number of changes that the remote has seen"""
    seconds: float
    """how long it took"""


class RemoteCollector:
    """One collection of one remote."""

    def __init__(
        self, catalog: Catalog, remote: Remote, *, reflog_days: int, grace_hours: float
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self._window_ns = reflog_days * 24 * _NS_AN_HOUR
        self._grace_ns = int(grace_hours * _NS_AN_HOUR)

    def run(self, *, dry_run: bool) -> RemoteGcReport:
        """Collect. Raises Corrupt if anything needed is missing; then nothing is dropped."""
        began = time.monotonic()
        remote = self._remote
        remote.objects.require_writable()
        remote.make_directory()
        for _ in remote.attempts():
            state = remote.state()
            # Before the root is replaced: what is put later is for a later root.
            objects = _Objects(remote)
            remote.dry_run = False
            now = remote.clock_ns()
            remote.dry_run = dry_run
            try:
                decision = _Decision(self._catalog, remote, state, objects)
                decision.decide(now, now - self._window_ns, now - self._grace_ns)
            except Absent as error:
                remote.require_replaced(state, error)
                continue
            leftovers = objects.leftovers(state)
            if dry_run:
                break
            try:
                if decision.changes:
                    state = remote.change(state, decision.changes)
            except Overtaken:
                continue
            leftovers = objects.leftovers(state)
            for name in (*(pack_name(row.pack) for row in decision.deleting), *leftovers):
                remote.objects.remove(name)
            state = self._note_deleted(state, decision.deleting)
            remote.remember(state)
            break
        return RemoteGcReport(
            remote=remote.name,
            url=remote.where,
            dry_run=dry_run,
            snapshots_dropped=decision.dropped,
            packs_condemned=decision.count(PackState.CONDEMNED),
            packs_revived=decision.count(PackState.LIVE),
            packs_deleted=len(decision.deleting),
            freed_bytes=sum(row.size for row in decision.deleting),
            waiting_bytes=decision.waiting_bytes,
            dead_bytes=decision.dead_bytes,
            leftover_objects=len(leftovers),
            tables_joined=decision.joined,
            generation=state.root.generation,
            seconds=time.monotonic() - began,
        )

    def _note_deleted(self, state: RemoteState, rows: Iterable[PackRow]) -> RemoteState:
        """Say of packs that their objects are gone: no later run tries it again."""
        for attempt in self._remote.attempts():
            if attempt:
                state = self._remote.state()
            changes = Changes()
            for row in rows:
                if state.packs()[row.id].state == PackState.DELETING:
                    gone = replace(
                        row,
                        state=PackState.DELETED,
                        entries=0,
                        made=0,
                        table=_NO_TABLE,
                        offset=0,
                        length=0,
                    )
                    changes.put("packs", gone)
            if not changes:
                break
            with suppress(Overtaken):
                return self._remote.change(state, changes)
        return state


class _Objects:
    """The objects that were there before the root was replaced."""

    def __init__(self, remote: Remote) -> None:
        self._lists = {one.name for one in remote.objects.names("lists/")}
        self._others = {
            one.name for below in ("tables/", "stats/") for one in remote.objects.names(below)
        }
        self.packs = {
            pack: one.size
            for one in remote.objects.names("packs/")
            if (pack := _pack_of(one.name)) is not None
        }

    def leftovers(self, state: RemoteState) -> list[str]:
        """Return what packs are not, that this root does not name, and no later one will."""
        named = {one.name for one in state.root.lists}
        named |= {row.table_name for row in state.packs().values() if row.length}
        named |= {row.name for row in state.rows("statistics").values()}
        return sorted(
            name
            for name in self._lists | self._others
            if name not in named and _made(name) <= state.root.generation
        )


class _Decision:
    """What changes, as one state of the remote has it."""

    def __init__(
        self, catalog: Catalog, remote: Remote, state: RemoteState, objects: _Objects
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self.before = state
        self._objects = objects
        self._places = RemotePlaces(remote, state)
        self.changes = Changes()
        self.dropped: tuple[SnapshotId, ...] = ()
        self.deleting: list[PackRow] = []
        self.waiting_bytes = self.dead_bytes = self.joined = 0

    def count(self, state: PackState) -> int:
        """Return how many packs get this state."""
        before = self.before.packs()
        return sum(
            row.state == state and (id not in before or before[id].state != state)
            for id, row in self.changes.rows["packs"].items()
        )

    def decide(self, now: int, since: int, condemned_before: int) -> None:
        """Decide. Times by the remote's clock, in ns since the epoch."""
        heads = self._refs(since)
        source = AllRecords(self._catalog, self._remote, self._places, self.before)
        needs = gather(source, filter(source.is_known, heads), source.has_contents)
        self._snapshots(needs)
        self._packs(self._needed(needs), now, condemned_before)
        self._join_tables()

    def _refs(self, since: int) -> list[SnapshotId]:
        """Return what refs and recent moves name; drop older moves, and refs that are long gone."""
        heads: dict[SnapshotId, None] = {}
        for key, row in self.before.rows("refs").items():
            moves = tuple(move for move in row.moves if move.time_ns >= since)
            named = [row.snapshot, *(id for move in moves for id in (move.old, move.new))]
            heads.update(dict.fromkeys(SnapshotId(id) for id in named if id is not None))
            if row.snapshot is None and not moves:
                self.changes.rows["refs"][key] = None
            elif moves != row.moves:
                self.changes.put("refs", replace(row, moves=moves))
        return list(heads)

    def _snapshots(self, needs: Needs) -> None:
        self.dropped = tuple(
            SnapshotId(id) for id in self.before.rows("snapshots") if id not in needs.snapshots
        )
        for id in self.dropped:
            self.changes.rows["snapshots"][bytes(id)] = None
        for key, row in self.before.rows("notes").items():
            if row.snapshot not in needs.snapshots:
                self.changes.rows["notes"][key] = None
        for key in self.before.rows("statistics"):
            if key not in needs.whole:
                self.changes.rows["statistics"][key] = None

    def _needed(self, needs: Needs) -> dict[PackId, int]:
        """Return the packs that are needed, and how many of their bytes. Raises Corrupt."""
        found: dict[PackId, int] = defaultdict(int)
        for (kind, id), at, is_base in placed(needs, self._places):
            if at is None:
                raise lacks(self._remote, kind, id)
            is_counted = is_base and id in needs.blocks
            found[at.pack] += 0 if is_counted else at.stored_length
        return found

    def _packs(self, needed: dict[PackId, int], now: int, condemned_before: int) -> None:
        for row in self.before.packs().values():
            if row.state in (PackState.DELETING, PackState.DELETED):
                if row.state == PackState.DELETING:
                    self.deleting.append(row)
                continue
            if row.pack in needed:
                self.dead_bytes += max(0, row.size - needed[row.pack])
                if row.state == PackState.CONDEMNED:
                    self.changes.put("packs", replace(row, state=PackState.LIVE, time_ns=now))
            elif row.state == PackState.LIVE:
                self._condemn(row, now)
            elif row.time_ns <= condemned_before:
                self.deleting.append(row)
                self.changes.put("packs", replace(row, state=PackState.DELETING, time_ns=now))
            else:
                self.waiting_bytes += row.size
        for pack, size in self._objects.packs.items():
            if pack not in self.before.packs():
                unknown = PackRow(
                    id=bytes(pack),
                    size=size,
                    state=PackState.LIVE,
                    time_ns=0,
                    entries=0,
                    made=0,
                    table=_NO_TABLE,
                    offset=0,
                    length=0,
                )
                self._condemn(unknown, now)

    def _condemn(self, row: PackRow, now: int) -> None:
        self.waiting_bytes += row.size
        self.changes.put("packs", replace(row, state=PackState.CONDEMNED, time_ns=now))

    def _join_tables(self) -> None:
        """Put many small objects of tables into few."""
        rows = {**self.before.packs(), **self.changes.rows["packs"]}
        by_table: dict[str, list[PackRow]] = defaultdict(list)
        for row in rows.values():
            if row.is_there and row.is_known:
                by_table[row.table_name].append(row)
        sizes = {name: sum(row.length for row in some) for name, some in by_table.items()}
        small = [name for name, size in sizes.items() if size < _JOINED_BYTES // 2]
        if len(small) <= _FEW_TABLES:
            return
        self.joined = len(small)
        rows_of = (row for name in sorted(small) for row in by_table[name])
        for some in in_groups(rows_of, lambda row: row.length, _JOINED_BYTES):
            data = b"".join(self._table(row) for row in some)
            made, table = self.before.root.generation + 1, TableId.of(data)
            self._remote.put_bytes(table_name(made, table), data)
            offset = 0
            for row in some:
                moved = replace(row, made=made, table=bytes(table), offset=offset)
                self.changes.put("packs", moved)
                offset += row.length

    def _table(self, row: PackRow) -> bytes:
        [data] = self._remote.objects.read_each(row.table_name, [(row.offset, row.length)])
        return bytes(data)


def _made(name: str) -> int:
    """Return the generation that a list or table was made for; 0 for what is neither."""
    with suppress(ValueError):
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    return 0


def _pack_of(name: str) -> PackId | None:
    with suppress(BadName):
        return PackId.parse(name.rpartition("/")[2].removesuffix(".pack"))
    return None
