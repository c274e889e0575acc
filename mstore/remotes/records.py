"""Records of a remote, read as they are asked for, and checked against their ids.

Owns how payloads are read that lie near each other in a pack: in one request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from mstore.blocks.location import Key, Location
from mstore.blocks.packs import NO_BASE, Kind
from mstore.remotes.layout import pack_name
from mstore.remotes.needs import LocalRecords, Needs, R
from mstore.remotes.objects import PIECE_BYTES, read_several
from mstore.remotes.places import RemotePlaces
from mstore.remotes.state import Remote, RemoteState
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import Record, decode
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import Buffer, NoteId, PackId, SnapshotId, TensorId
from mstore.terms.phrases import call, phrase

_GAP: Final = 64 << 10
"""Bytes between two ranges that are downloaded rather than asked around."""


class PackSpan(msgspec.Struct, frozen=True):
    """Neighbouring payloads of one pack: from `start` to `end`."""

    start: int
    end: int
    entries: tuple[tuple[Key, Location], ...]


def spans(entries: Iterable[tuple[Key, Location]], most: int = PIECE_BYTES) -> Iterator[PackSpan]:
    """Join payloads of one pack that lie near each other, up to `most` bytes."""
    some: list[tuple[Key, Location]] = []
    start = end = 0
    for key, at in sorted(entries, key=lambda one: one[1].offset):
        stop = at.offset + at.stored_length
        if some and (at.offset > end + _GAP or stop - start > most):
            yield PackSpan(start, end, tuple(some))
            some = []
        if not some:
            start = at.offset
        some.append((key, at))
        end = max(stop, end) if len(some) > 1 else stop
    if some:
        yield PackSpan(start, end, tuple(some))


def read_span(remote: Remote, pack: PackId, span: PackSpan) -> Buffer:
    """Return the bytes of a part of a pack. Raises as `Objects.read_each`."""
    [data] = remote.objects.read_each(pack_name(pack), [(span.start, span.end - span.start)])
    return data


def placed(needs: Needs, places: RemotePlaces) -> Iterator[tuple[Key, Location | None, bool]]:
    """Yield each thing that is needed, where a remote has it, and whether that is as a base.

    First all needs, as they lie; then what they are differences to, in a form that needs no base.
    None for what the remote does not have.
    """
    bases: dict[bytes, None] = {}
    for kind, ids in needs.by_kind().items():
        for id, at in zip(ids, places.locate(kind, ids), strict=True):
            yield (kind, id), at, False
            if at is not None and at.base != NO_BASE:
                bases[at.base] = None
    for base, at in zip(bases, places.alone(list(bases)), strict=True):
        yield (Kind.BLOCK, base), at, True


class RemoteRecords:
    """Records of a remote, and of this store where it has them, for `gather`."""

    def __init__(self, catalog: Catalog, remote: Remote, places: RemotePlaces, state: RemoteState):
        self._catalog = catalog
        self._remote = remote
        self._places = places
        self._state = state
        self._local = LocalRecords(catalog)
        self._records: dict[Key, Record] = {}
        self.looks_beyond = False
        """Whether to look at ancestors of snapshots that are here."""
        self.received = 0
        self.passed: set[Key] = set()
        """What needs no look because it is here: it must still be when all is published."""

    def load(self, kind: type[R], ids: Sequence[bytes]) -> list[R]:
        self._bring(kind, ids)
        found = []
        for id in ids:
            record = self._records.get((kind.kind, bytes(id)))
            if record is None:
                record = self._catalog.record(kind, kind.id_type(id))
            assert isinstance(record, kind)
            found.append(record)
        return found

    def _bring(self, kind: type[Record], ids: Sequence[bytes], *, may_lack: bool = False) -> None:
        """Read those records from the remote that are neither here nor were read before."""
        wanted = [bytes(id) for id in ids if (kind.kind, bytes(id)) not in self._records]
        here = self._is_here(kind.kind, wanted)
        wanted = [id for id, is_here in zip(wanted, here, strict=True) if not is_here]
        by_pack: dict[PackId, list[tuple[Key, Location]]] = defaultdict(list)
        for id, at in zip(wanted, self._places.locate(kind.kind, wanted), strict=True):
            if at is not None:
                by_pack[at.pack].append(((kind.kind, id), at))
            elif not may_lack:
                raise lacks(self._remote, kind.kind, id)
        joined = [(pack, list(spans(entries))) for pack, entries in by_pack.items()]

        def read(one: tuple[PackId, list[PackSpan]]) -> list[Buffer]:
            pack, some = one
            asked = [(span.start, span.end - span.start) for span in some]
            return self._remote.objects.read_each(pack_name(pack), asked)

        for (pack, some), data in read_several(joined, read):
            for span, part in zip(some, data, strict=True):
                self.received += len(part)
                for (_, id), at in span.entries:
                    start = at.offset - span.start
                    self._records[kind.kind, id] = self._checked(
                        kind, id, bytes(part[start : start + at.stored_length]), pack
                    )

    def _is_here(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        index = self._catalog.index
        with index.env.read() as transaction:
            return [index.row(transaction, (kind, bytes(id))) is not None for id in ids]

    def _checked(self, kind: type[Record], id: bytes, data: bytes, pack: PackId) -> Record:
        where = f"{self._remote.where}/{pack_name(pack)}"
        if kind.id_type.of(data) != id:
            raise Corrupt(f"{kind.__name__} {id.hex()[:12]} does not match its id", where=where)
        return decode(kind, data, where)

    def contents(self, ids: Sequence[TensorId]) -> list[Tensor | VirtualTensor]:
        self._bring(Tensor, ids, may_lack=True)
        found: list[Tensor | VirtualTensor] = []
        for id in ids:
            record = self._records.get((Kind.TENSOR, bytes(id)))
            if isinstance(record, Tensor):
                record.check(self._catalog.block_size, f"tensor {id}")
                found.append(record)
                continue
            with suppress(NotFound):
                found.append(self._catalog.content(id))
                continue
            [virtual] = self.load(VirtualTensor, [id])
            virtual.check(f"virtual tensor {id}")
            found.append(virtual)
        return found

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[tuple[SnapshotId, NoteId]]:
        # Those of snapshots that are here already come, too (`Fetch._add_notes`).
        return []

    def is_known(self, snapshot: SnapshotId) -> bool:
        return self._state.snapshot(snapshot) is not None or self._local.is_known(snapshot)

    def has_contents(self, snapshot: SnapshotId) -> bool:
        row = self._state.snapshot(snapshot)
        return row is not None and row.is_whole

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        if kind != Kind.SNAPSHOT:
            # A stored tensor has all its blocks.
            found = self._is_here(kind, ids)
            self.passed.update(
                (kind, bytes(id)) for id, is_here in zip(ids, found, strict=True) if is_here
            )
            return found
        return [not self.looks_beyond and self._is_whole(SnapshotId(id)) for id in ids]

    def _is_whole(self, id: SnapshotId) -> bool:
        return self._local.is_known(id) and self._local.has_contents(id)


def lacks(remote: Remote, kind: Kind, id: bytes) -> Corrupt:
    """Return the error for what a remote should have, and has not."""
    return Corrupt(
        f"{remote.name} lacks this {kind.name.lower()}, which its refs need",
        where=f"{remote.where}, {id.hex()}",
        hint=phrase("push again from a store that has it: {push}", push=call("push", remote.name)),
    )


class AllRecords(RemoteRecords):
    """What a remote has of its own, whatever this store has: for its gc and fsck.

    reads_local: read a record here if it is here; equal ids, equal bytes.
    known: records that were read before; those that are read now are added.
    """

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        places: RemotePlaces,
        state: RemoteState,
        *,
        reads_local: bool = True,
        known: dict[Key, Record] | None = None,
    ) -> None:
        super().__init__(catalog, remote, places, state)
        self._reads_local = reads_local
        if known is not None:
            self._records = known

    def _is_here(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        return super()._is_here(kind, ids) if self._reads_local else [False] * len(ids)

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[tuple[SnapshotId, NoteId]]:
        wanted = set(snapshots)
        there = [(row.snapshot_id(), NoteId(row.note)) for row in self._state.notes()]
        return [one for one in there if one[0] in wanted]

    def is_known(self, snapshot: SnapshotId) -> bool:
        return self._state.snapshot(snapshot) is not None

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        return [False] * len(ids)
