"""The schema of the index: every table, declared once.

To add a table, declare it here and add its line to docs/format.md (a test prints it). The index
then creates the database, writes, reads and checks its rows, copies them into backups and clones,
and fsck proves them. The structs are what rows hold; the modules above say what they mean.

Everything here can be rebuilt from packs and the ref mirror, except for what `reindex` takes from
the old index: reflogs, the names in `plans`, and the marks in `pruned` and `pinned`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from mstore.blocks import location
from mstore.blocks.pack_store import HERE
from mstore.blocks.tables import (
    EMPTY,
    Table,
    ended,
    form,
    id_of,
    many,
    number,
    packed,
    raw,
    word,
)
from mstore.terms.ids import ID_BYTES, BlockId, ManifestId, NoteId, PackId, PlanId, SnapshotId

LEASE_NAME_BYTES: Final = 16
_IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]


class NamedPack(msgspec.Struct, frozen=True):
    """A pack by its number in the index, its id, its size in bytes, and where it lies."""

    number: int
    id: PackId
    size: int
    place: int = HERE


class Condemned(msgspec.Struct, frozen=True):
    """A pack that no row names any more, with the leases that existed when it was condemned."""

    number: int
    pack: PackId
    size: int
    leases: tuple[str, ...]
    place: int = HERE


class BackupRow(msgspec.Struct, frozen=True):
    """The generation of the copied state, and the packs that were damaged when they were copied."""

    generation: int
    damaged: tuple[PackId, ...]


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """What a name points at; `kind` is one of `mstore.store.refs.KINDS`."""

    kind: str
    snapshot: _IdBytes

    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the name points at."""
        return SnapshotId(self.snapshot)


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One line of a reflog. `old` is None for a creation, `new` for a removal.

    generation: of the commit that moved the ref. kind: what the ref is after the move; empty for a
    removal.
    """

    old: _IdBytes | None
    new: _IdBytes | None
    action: str
    time_ns: int
    generation: int
    kind: str


class LeaseRow(msgspec.Struct, frozen=True, array_like=True):
    """The index's row of a lease: process id and purpose, for people; only the lock counts."""

    pid: int
    purpose: str


class NamedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot and the name it was given."""

    snapshot: _IdBytes
    name: str

    def snapshot_id(self) -> SnapshotId:
        """The snapshot."""
        return SnapshotId(self.snapshot)


class Risk(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a plan's output that may get elements that are infinite or NaN.

    of: its number of elements. experts: the numbers, from 0, of experts whose differences from the
    base are not finite; none: the output's type may not hold all results.
    """

    tensor: str
    of: int
    experts: tuple[int, ...]


class PlanInputs(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of a plan, experts in plan order.

    change: the planner's estimate of what the full merge changes, ||full - base|| / ||base||; None
    if unknown. risks: worst first.
    """

    base: NamedSnapshot
    experts: tuple[NamedSnapshot, ...]
    change: float | None = None
    risks: tuple[Risk, ...] = ()


BLOCKS: Final = Table(
    "blocks", form(id_of(BlockId)), location.FORM, "where the block lies", proof="payload"
)
RECORDS: Final = Table(
    "records",
    form(number(1, "kind"), raw("id", ID_BYTES)),
    location.RECORD_FORM,
    "where the record lies",
    proof="payload",
)
PACKS: Final = Table(
    "packs",
    form(number(4, "pack number")),
    form(id_of(PackId), number(8, "size"), number(4, "place")),
    "a pack by its number, which is never reused; place 0 is `packs/`, and no other is written",
)
PACK_IDS: Final = Table(
    "pack_ids", form(id_of(PackId)), form(number(4, "pack number")), "the same, by id"
)
CONDEMNED: Final = Table(
    "condemned",
    form(number(4, "pack number")),
    form(
        id_of(PackId),
        number(8, "size"),
        number(4, "place"),
        many(raw("", LEASE_NAME_BYTES), "16 hex digits of each lease that existed then"),
    ),
    "no location names this pack; its file goes with the last of these leases",
    is_own=True,
)
SNAPSHOTS: Final = Table(
    "snapshots",
    form(id_of(SnapshotId)),
    form(id_of(ManifestId), number(8, "time_ns")),
    "what its record says",
)
CONTENTS: Final = Table(
    "contents", form(id_of(ManifestId), id_of(SnapshotId)), EMPTY, "the snapshots of a content"
)
CHILDREN: Final = Table(
    "children",
    form(id_of(SnapshotId, "parent"), id_of(SnapshotId, "child"), word("role")),
    EMPTY,
    "the snapshots that have a parent, each role",
)
REFS: Final = Table(
    "refs",
    form(word("name")),
    form(packed(Ref)),
    "kind is `branch`, `tag`, `remote` or `candidate`",
    about="ref",
)
REFLOG: Final = Table(
    "reflog",
    form(ended("name"), number(8, "position")),
    form(packed(Move)),
    "the moves of a name; positions count from 0",
    about="reflog",
)
LEASES: Final = Table(
    "leases",
    form(raw("16 hex digits")),
    form(packed(LeaseRow)),
    "process id and purpose, for people",
    proof="lock",
    is_own=True,
)
COUNTERS: Final = Table(
    "counters",
    form(word("name")),
    form(number(8, "count")),
    "`packs`: the next pack number; `generation`: see [Generations](#generations)",
)
PRUNED: Final = Table(
    "pruned",
    form(id_of(SnapshotId)),
    form(number(8, "time_ns")),
    "since when its contents may be dropped",
)
PINNED: Final = Table(
    "pinned",
    form(id_of(SnapshotId)),
    form(number(8, "time_ns")),
    "since when it is pinned, see [Pins](#pins)",
)
PLANS: Final = Table(
    "plans",
    form(id_of(PlanId)),
    form(packed(PlanInputs)),
    "the snapshots that a plan's inputs are, by the names that the user gave",
    about="plan",
)
NOTES: Final = Table(
    "notes", form(id_of(SnapshotId), id_of(NoteId)), EMPTY, "the notes of a snapshot"
)
JUDGED: Final = Table(
    "judged",
    form(id_of(SnapshotId), word("key of a note")),
    form(id_of(NoteId), number(1, "passed")),
    "an evaluation or verdict that this store made by running a command, and whether the snapshot "
    "passed; no other note counts at a gate",
    is_own=True,
)
BACKUP: Final = Table(
    "backup",
    form(number(8, "generation")),
    form(many(id_of(PackId), "PackIds")),
    "in a backup: the generation of the copied state, and packs that were damaged when copied",
    is_own=True,
)

TABLES: Final[tuple[Table[Any, Any], ...]] = tuple(
    one for one in list(globals().values()) if isinstance(one, Table)
)
DATABASES: Final = tuple(table.name for table in TABLES)
