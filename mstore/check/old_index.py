"""What can be read from an index that is to be replaced: refs, reflogs, plans, prunings, pins.

Reads the file without LMDB, so that no damage can end the process. Takes what is readable of a
damaged database; skips rows that do not match their check or do not decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from mstore.blocks.index import opened, read_generation
from mstore.blocks.lmdb_pages import LmdbFile, Tree
from mstore.blocks.pack_numbers import decode_condemned, decode_pack
from mstore.errors import BadName, Corrupt
from mstore.ids import PackId, PlanId, SnapshotId
from mstore.store import leases, pin_rows, plan_rows, pruned_rows, refs
from mstore.store.layout import Layout
from mstore.store.refs import LogRow, Move, Ref


@dataclass(slots=True)
class OldIndex:
    """The rows that packs cannot provide. notes: what was unreadable.

    generation: None if unreadable. are_refs_whole: every ref is here, so a missing ref was removed;
    is_reflog_whole: every move is here. snapshots, pruned: None if some of them are unreadable.
    moves: the newest readable move of each name. packs: those that the index named, including
    condemned ones.
    """

    generation: int | None = None
    refs: dict[str, Ref] = field(default_factory=dict)
    are_refs_whole: bool = False
    is_reflog_whole: bool = False
    reflog: dict[bytes, LogRow] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    plans: dict[PlanId, bytes] = field(default_factory=dict)
    snapshots: set[SnapshotId] | None = None
    pruned: dict[SnapshotId, int] | None = None
    pinned: dict[SnapshotId, int] = field(default_factory=dict)
    packs: set[PackId] = field(default_factory=set)
    condemned: set[PackId] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, layout: Layout) -> OldIndex:
        """Read all that is readable; return an empty one with a note if nothing is.

        Raises StorageFailed.
        """
        if not (layout.index / "data.mdb").exists():
            return cls(notes=["there was none"])
        old = cls()
        try:
            with LmdbFile(layout.index / "data.mdb") as file:
                old._take_everything(file)
        except Corrupt as error:
            return cls(notes=[error.what])
        return old

    def _take_everything(self, file: LmdbFile) -> None:
        databases = file.databases(self.notes.append)
        if not databases:
            self.notes.append("nothing of it can be read")
            return
        for name, take in (
            (b"counters", self._take_counter),
            (b"plans", self._take_plan),
            (b"packs", self._take_pack),
            (b"condemned", self._take_condemned),
        ):
            self._take_all(file, databases, name, take)
        self.is_reflog_whole = not self._take_all(file, databases, b"reflog", self._take_move)
        self.are_refs_whole = not self._take_all(file, databases, b"refs", self._take_ref)
        snapshots: set[SnapshotId] = set()
        pruned: dict[SnapshotId, int] = {}

        def take_snapshot(key: bytes, value: bytes) -> None:
            snapshots.add(SnapshotId(key))

        def take_pruned(key: bytes, value: bytes) -> None:
            id, time_ns = pruned_rows.parse(key, value)
            pruned[id] = time_ns

        if not self._take_all(file, databases, b"snapshots", take_snapshot):
            self.snapshots = snapshots
        if not self._take_all(file, databases, b"pruned", take_pruned):
            self.pruned = pruned

    def _take_all(
        self,
        file: LmdbFile,
        databases: dict[bytes, Tree],
        name: bytes,
        take: Callable[[bytes, bytes], None],
    ) -> bool:
        """Take the rows of one database; return whether any were lost."""
        if name not in databases:
            self.notes.append(f"{name.decode()}: missing")
            return True
        told: list[str] = []
        count = 0
        for key, row in file.rows(name, databases[name], told.append):
            count += 1
            value = opened(name.decode(), key, row)
            try:
                if value is None:
                    raise ValueError("does not match its check")
                take(key, value)
            except (msgspec.MsgspecError, ValueError, BadName, Corrupt):
                told.append(f"{name.decode()}: a row cannot be read")
        if count != databases[name].entries and not told:
            told.append(f"{name.decode()}: {databases[name].entries - count} rows are lost")
        self.notes += told
        return bool(told)

    def _take_counter(self, key: bytes, value: bytes) -> None:
        found = read_generation(key, value)
        if found is not None:
            self.generation = found
        pin = pin_rows.parse(key, value)
        if pin is not None:
            self.pinned[pin[0]] = pin[1]

    def _take_ref(self, key: bytes, value: bytes) -> None:
        name, ref = refs.parse(key, value)
        self.refs[name] = ref

    def _take_move(self, key: bytes, value: bytes) -> None:
        row = LogRow(key, value)
        name, move = refs.parse_log(row)
        self.reflog[key] = row
        # Rows come in the order of positions, so the newest comes last.
        self.moves[name] = move

    def _take_plan(self, key: bytes, value: bytes) -> None:
        id = PlanId(key)
        plan_rows.decode(id, value)
        self.plans[id] = value

    def _take_pack(self, key: bytes, value: bytes) -> None:
        self.packs.add(decode_pack(key, value).id)

    def _take_condemned(self, key: bytes, value: bytes) -> None:
        pack = decode_condemned(key, value).pack
        self.condemned.add(pack)
        self.packs.add(pack)


def at_work(layout: Layout) -> Iterator[tuple[str, int, str]]:
    """Yield lease, process id and purpose of running operations, as far as readable."""
    with LmdbFile(layout.index / "data.mdb") as file:
        databases = file.databases(lambda _: None)
        if b"leases" in databases:
            for key, value in file.rows(b"leases", databases[b"leases"], lambda _: None):
                try:
                    name, row = leases.parse(key, value)
                    yield name, row.pid, row.purpose
                except (msgspec.MsgspecError, ValueError):
                    continue
