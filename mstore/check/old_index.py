"""What can be read from an index that is to be replaced: refs, reflogs, plans, prunings, pins.

Reads the file without LMDB, so that no damage can end the process. Takes what is readable of a
damaged database; skips rows that do not match their check or do not decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mstore.blocks.index import GENERATION
from mstore.blocks.lmdb_pages import LmdbFile, Tree
from mstore.blocks.schema import (
    CONDEMNED,
    COUNTERS,
    LEASES,
    PACKS,
    PINNED,
    PLANS,
    PRUNED,
    REFLOG,
    REFS,
    SNAPSHOTS,
    Move,
    Ref,
    Sources,
)
from mstore.blocks.tables import Table
from mstore.errors import BadName, Corrupt
from mstore.ids import PackId, PlanId, SnapshotId
from mstore.store import refs
from mstore.store.layout import Layout

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class OldIndex:
    """The rows that packs cannot provide. remarks: what was unreadable.

    generation: None if unreadable. are_refs_whole: every ref is here, so a missing ref was removed;
    is_reflog_whole: every move is here. snapshots, pruned: None if some of them are unreadable.
    moves: the newest readable move of each name. packs: those that the index named, including
    condemned ones.
    """

    generation: int | None = None
    refs: dict[str, Ref] = field(default_factory=dict)
    are_refs_whole: bool = False
    is_reflog_whole: bool = False
    reflog: dict[tuple[str, int], Move] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    plans: dict[PlanId, Sources] = field(default_factory=dict)
    snapshots: set[SnapshotId] | None = None
    pruned: dict[SnapshotId, int] | None = None
    pinned: dict[SnapshotId, int] = field(default_factory=dict)
    packs: set[PackId] = field(default_factory=set)
    condemned: set[PackId] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, layout: Layout) -> OldIndex:
        """Read all that is readable; return an empty one with a remark if nothing is.

        Raises StorageFailed.
        """
        if not (layout.index / "data.mdb").exists():
            return cls(remarks=["there was none"])
        old = cls()
        try:
            with LmdbFile(layout.index / "data.mdb") as file:
                old._take_everything(file)
        except Corrupt as error:
            return cls(remarks=[error.what])
        return old

    def _take_everything(self, file: LmdbFile) -> None:
        databases = file.databases(self.remarks.append)
        if not databases:
            self.remarks.append("nothing of it can be read")
            return
        self.generation = self._rows(file, databases, COUNTERS)[0].get(GENERATION)
        self.plans, _ = self._rows(file, databases, PLANS)
        packs, _ = self._rows(file, databases, PACKS)
        condemned, _ = self._rows(file, databases, CONDEMNED)
        self.condemned = {pack for pack, *_ in condemned.values()}
        self.packs = self.condemned | {pack for pack, *_ in packs.values()}
        self.reflog, self.is_reflog_whole = self._rows(file, databases, REFLOG)
        # Rows come in the order of positions, so the newest comes last.
        self.moves = {name: move for (name, _), move in self.reflog.items()}
        self.refs, self.are_refs_whole = self._rows(file, databases, REFS)
        self.pinned, _ = self._rows(file, databases, PINNED)
        snapshots, is_whole = self._rows(file, databases, SNAPSHOTS)
        self.snapshots = set(snapshots) if is_whole else None
        pruned, is_whole = self._rows(file, databases, PRUNED)
        self.pruned = pruned if is_whole else None

    def _rows(
        self, file: LmdbFile, databases: dict[bytes, Tree], table: Table[_K, _V]
    ) -> tuple[dict[_K, _V], bool]:
        """Return the rows of a table that can be read, and whether these are all."""
        name = table.name.encode()
        if name not in databases:
            self.remarks.append(f"{table.name}: missing")
            return {}, False
        told: list[str] = []
        found: dict[_K, _V] = {}
        count = 0
        for key, row in file.rows(name, databases[name], told.append):
            count += 1
            try:
                one, value = table.item(key, row)
                _require_named(table, one, value)
                found[one] = value
            except (Corrupt, BadName):
                told.append(f"{table.name}: a row cannot be read")
        if count != databases[name].entries and not told:
            told.append(f"{table.name}: {databases[name].entries - count} rows are lost")
        self.remarks += told
        return found, not told


def _require_named(table: Table[Any, Any], key: Any, value: Any) -> None:
    """Raise BadName if a row of refs or reflogs has a name or kind that none has."""
    if table is REFS or table is REFLOG:
        refs.check(key if table is REFS else key[0], value.kind if table is REFS else None)


def at_work(layout: Layout) -> Iterator[tuple[str, int, str]]:
    """Yield lease, process id and purpose of running operations, as far as readable."""
    with LmdbFile(layout.index / "data.mdb") as file:
        databases = file.databases(lambda _: None)
        if b"leases" in databases:
            for key, value in file.rows(b"leases", databases[b"leases"], lambda _: None):
                row = LEASES.found(key, value)
                if row is not None:
                    yield key.decode(errors="replace"), row.pid, row.purpose
