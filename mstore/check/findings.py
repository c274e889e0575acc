"""Findings: what a check found, for people and for repair.

Only `Corrupt`, and `NotFound` of what must be there, become findings: any other error says what
this machine cannot do, and ends the check (`mstore.errors`).

A *problem* is a line for people. For repair there are also the broken blocks and records, each with
the index row that was seen (None if there is none), and the damaged packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mstore.blocks.location import Key, Row
from mstore.blocks.packs import Kind
from mstore.errors import Corrupt, NotFound, Unreadable
from mstore.frozen import frozen
from mstore.ids import BlockId, Id, PackId
from mstore.objects.canonical import Record
from mstore.objects.coverage import Coverage
from mstore.objects.manifest import Manifest
from mstore.objects.note import Note
from mstore.objects.plan import Plan
from mstore.objects.snapshot import SnapshotRecord
from mstore.objects.tensor import Tensor
from mstore.objects.virtual import VirtualTensor

RECORDS: dict[Kind, type[Record]] = {
    Kind.TENSOR: Tensor,
    Kind.MANIFEST: Manifest,
    Kind.SNAPSHOT: SnapshotRecord,
    Kind.PLAN: Plan,
    Kind.COVERAGE: Coverage,
    Kind.VIRTUAL: VirtualTensor,
    Kind.NOTE: Note,
}


@frozen
class Problem:
    """One finding of `fsck`."""

    kind: str
    """kind of problem"""
    where: str
    """the object or file"""
    what: str
    """what is wrong"""


class Findings:
    """What one check has found so far.

    broken: rows that cannot be used as they are; the value is the row that was seen. unreadable:
    those of them where the disk failed, not the bytes. packs: damaged packs and what is wrong with
    each; their rows are not in `broken`. incomplete: snapshots whose own index rows disagree with
    their record. stale_mirror: the mirror or the pack list is missing or damaged. is_index_wrong:
    rows of the index disagree with their checks, the mirror or the generations, so that only a new
    index helps.
    """

    def __init__(self) -> None:
        self._problems: dict[tuple[str, str, str], Problem] = {}
        self.garbage: list[str] = []
        self.broken: dict[Key, Row | None] = {}
        self.unreadable: set[Key] = set()
        self.packs: dict[PackId, str] = {}
        self.incomplete: set[bytes] = set()
        self.stale_mirror = False
        self.is_index_wrong = False

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the order in which they were found."""
        return tuple(self._problems.values())

    def tell(self, kind: str, where: str, what: str) -> None:
        """Add a problem for people."""
        self._problems.setdefault((kind, where, what), Problem(kind, where, what))

    def tell_row(self, kind: Kind, id: bytes, row: Row | None, what: str) -> None:
        """Add a block or record that is missing, or whose row or payload is wrong."""
        self.broken.setdefault((kind, bytes(id)), row)
        self.tell(kind.name.lower(), id.hex(), what)

    def tell_pack(self, pack: PackId, what: str) -> None:
        """Add a damaged pack."""
        self.packs.setdefault(pack, what)
        self.tell("pack", pack.hex(), what)

    def forget_row(self, kind: Kind, id: bytes) -> None:
        """Remove a row: another process changed it during the check, so it is not damaged."""
        self.broken.pop((kind, id), None)
        self._forget(kind.name.lower(), id.hex())

    def forget_pack(self, pack: PackId) -> None:
        """Remove a pack: it was collected during the check."""
        self.packs.pop(pack, None)
        self._forget("pack", pack.hex())

    def _forget(self, kind: str, where: str) -> None:
        gone = [key for key in self._problems if key[:2] == (kind, where)]
        for key in gone:
            del self._problems[key]

    def confirm(self, earlier: Findings) -> None:
        """Keep only what an earlier pass found as well: real damage shows in every pass."""
        seen = {key[:2] for key in earlier._problems}
        self._problems = {key: told for key, told in self._problems.items() if key[:2] in seen}
        self.broken = {key: row for key, row in self.broken.items() if key in earlier.broken}
        self.incomplete &= earlier.incomplete
        self.stale_mirror &= earlier.stale_mirror
        self.is_index_wrong &= earlier.is_index_wrong

    def take(self, other: Findings) -> None:
        """Add the findings of another pass over the same store."""
        for key, told in other._problems.items():
            self._problems.setdefault(key, told)
        for broken, row in other.broken.items():
            self.broken.setdefault(broken, row)
        self.unreadable |= other.unreadable
        self.incomplete |= other.incomplete
        self.stale_mirror |= other.stale_mirror
        self.is_index_wrong |= other.is_index_wrong

    @contextmanager
    def catching(self, kind: str, where: str) -> Iterator[None]:
        """Turn damage that an error inside the block tells of into a problem."""
        try:
            yield
        except (NotFound, Corrupt) as error:
            self.tell(kind, where, error.what)

    @contextmanager
    def catching_row(self, kind: Kind, id: bytes, row: Row | None) -> Iterator[None]:
        """Turn damage that an error inside the block tells of into a broken block or record."""
        try:
            yield
        except Corrupt as error:
            self.tell_row(kind, id, row, error.what)
            if isinstance(error, Unreadable):
                self.unreadable.add((kind, bytes(id)))


def typed(kind: Kind, id: bytes) -> Id:
    """Return the id in its own type."""
    return BlockId(id) if kind == Kind.BLOCK else RECORDS[kind].id_type(id)
