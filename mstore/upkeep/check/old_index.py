"""What an index that is to be replaced still says, and which of several witnesses is right.

Reads the file without LMDB, so that no damage can end the process. Takes what is readable of a
damaged database; skips rows that do not match their check or do not decode.

Mirrors, the old index and its reflog are witnesses: each states what a name was when a generation
was published. For each name, the latest statement wins. A mirror knows all names of its generation,
also that a name was removed. An index knows the names that are readable; a missing name counts as
removed only if none of its refs is lost. A move of the reflog knows its own name. Of two witnesses
that differ about one generation, a mirror wins, because it is checked as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

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
    Sources,
)
from mstore.blocks.tables import Table
from mstore.store import mirror, pack_list, refs
from mstore.store.layout import Layout
from mstore.store.mirror import Mirror
from mstore.store.refs import Move, Ref
from mstore.terms.errors import BadName, Corrupt
from mstore.terms.ids import PackId, PlanId, SnapshotId

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


_MIRROR: Final = "the mirror"
_INDEX: Final = "the old index"
_REFLOG: Final = "its reflog"


class _Statement(msgspec.Struct, frozen=True):
    """A statement: this ref, or none, as of a generation. rank: breaks ties of generations."""

    generation: int
    rank: int
    witness: str
    ref: Ref | None


class ChosenRefs(msgspec.Struct, frozen=True):
    """The refs to restore.

    removed: names that have a reflog and no ref. generation: the latest that any witness states.
    remarks: where witnesses differ, and which one won.
    """

    refs: dict[str, Ref]
    removed: set[str]
    generation: int
    remarks: list[str]


def choose_refs(layout: Layout, old: OldIndex) -> ChosenRefs:
    """Choose the refs from all witnesses."""
    remarks = []
    mirrors: list[tuple[str, Mirror]] = []
    newest = -1
    try:
        mirrors.append((_MIRROR, mirror.read(layout)))
        newest = mirrors[0][1].generation
    except Corrupt as error:
        remarks.append(f"ref mirror: {error.what}")
    # If the mirror is lost or outdated, a replaced mirror knows more.
    for path, found in mirror.earlier(layout)[:1]:
        if found.generation > newest:
            mirrors.append((path.name, found))
            what = "in its place" if newest < 0 else f"too: the mirror is of generation {newest}"
            remarks.append(
                f"{path.name} (generation {found.generation}) was read {what}; a ref that moved "
                "since may be where it was then, and one that was removed since may be back"
            )
    index_generation = _index_generation(old)
    names = {name for _, found in mirrors for name in found.refs} | old.refs.keys()
    names |= old.moves.keys()
    settled: dict[str, Ref] = {}
    removed = set()
    for name in sorted(names):
        statements = sorted(
            _statements(name, mirrors, old, index_generation), key=_order, reverse=True
        )
        if not statements:
            continue
        chosen = statements[0]
        if chosen.ref is not None:
            settled[name] = chosen.ref
        elif name in old.moves:
            removed.add(name)
        others = [
            one
            for one in statements[1:]
            if one.ref != chosen.ref
            and one.witness != _REFLOG
            and not _is_explained(one, chosen, old.moves.get(name))
        ]
        if others:
            remarks.append(f"{name}: taken from {_shown(chosen)}; {'; '.join(map(_shown, others))}")
    told = [found.generation for _, found in mirrors]
    # Whoever wrote a list for the next commit saw the one before it.
    told += [mirror.replaced_by(layout), pack_list.newest(layout) - 1]
    return ChosenRefs(
        refs=settled,
        removed=removed,
        generation=max([*told, index_generation], default=0),
        remarks=remarks,
    )


def _index_generation(old: OldIndex) -> int:
    """Return the index's generation, else the latest in its reflog."""
    if old.generation is not None:
        return old.generation
    return max((move.generation for move in old.moves.values()), default=0)


def _statements(
    name: str, mirrors: list[tuple[str, Mirror]], old: OldIndex, generation: int
) -> Iterator[_Statement]:
    for witness, found in mirrors:
        yield _Statement(found.generation, 2, witness, found.refs.get(name))
    if name in old.refs or old.are_refs_whole:
        yield _Statement(generation, 1, _INDEX, old.refs.get(name))
    move = old.moves.get(name)
    if move is not None:
        ref = None if move.new is None else Ref(move.kind, move.new)
        yield _Statement(move.generation, 0, _REFLOG, ref)


def _is_explained(one: _Statement, chosen: _Statement, last: Move | None) -> bool:
    """Return whether the reflog explains the change from one state to the other."""
    if last is None or not one.generation < last.generation <= chosen.generation:
        return False
    return last.new == (None if chosen.ref is None else chosen.ref.snapshot)


def _order(one: _Statement) -> tuple[int, int]:
    return one.generation, one.rank


def _shown(one: _Statement) -> str:
    what = "no such ref" if one.ref is None else f"{one.ref.kind} {one.ref.snapshot_id().short}"
    return f"{one.witness} ({what}, generation {one.generation})"
