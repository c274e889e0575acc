"""Transactions: the one way in which anything is published.

The commit order is the promise (docs/format.md, "Commit order"):

    lease -> payloads into tmp/ -> footer, fsync -> rename into packs/ -> fsync directories
    -> writer lock -> ONE index transaction: check again that every block counted as present
       still is, insert rows, compare-and-swap the refs, append the reflog
    -> acknowledge -> refresh the text mirror

Before the index commit a crash leaves garbage and nothing else; after it, everything is there.
A transaction belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mstore import fs
from mstore.blocks.codecs import Codec, Encoded
from mstore.blocks.packs import NO_BASE, Kind, PackWriter, SealedPack
from mstore.errors import BadRequest, Conflict
from mstore.ids import BlockId, Id, TensorId
from mstore.objects.canonical import Record
from mstore.objects.limits import DEFAULT_LIMITS
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.objects.snapshot import PREVIOUS, Parent, SnapshotRecord
from mstore.objects.tensor import Tensor
from mstore.store import condemned, contents, leases, refs
from mstore.store.catalog import Catalog, insert_snapshot, now_ns
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks


@dataclass(frozen=True, slots=True)
class RefMove:
    """A ref to be moved: what it must be now, what it shall be, and the reflog's word for it."""

    name: str
    expect: refs.Ref | None
    new: refs.Ref | None
    action: str


class Transaction:
    """Blocks and records on their way into the store.

    Invariants: nothing is visible before `commit` returns; after an exception, or without
    `commit`, leaving the block removes all that was written.  With `resumes`, it begins with the
    leftovers of others that were interrupted in its `directory`, and leaves its own there when it
    is interrupted itself (by what is no Exception: KeyboardInterrupt, SystemExit).
    """

    def __init__(
        self,
        catalog: Catalog,
        purpose: str,
        *,
        max_pack: int = MAX_PACK_BYTES,
        resumes: bool = False,
    ) -> None:
        self._catalog = catalog
        self._own: set[bytes] = set()
        self._pending: dict[TensorId, Tensor] = {}
        self._relied_blocks: set[BlockId] = set()
        self._relied_records: set[tuple[Kind, Id]] = set()
        self.bytes_written = 0
        self.blocks_new = 0
        # Before anything is written: what a killed writer left may be the space that is missing.
        with catalog.publishing(packs=True):
            leases.sweep(catalog.layout, catalog.index)
            condemned.sweep(catalog.layout, catalog.index)
        self._lease = leases.Lease(catalog.layout, catalog.index, purpose)
        self._packs = NewPacks(
            catalog, self._lease.directory, prefix="r", max_pack=max_pack, sealing=self._count
        )
        self._resumes = resumes
        if resumes:
            leases.claim(catalog.layout, self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._packs.abandon()
            self._packs.take_back()
        finally:
            if self._resumes and kind is not None and not issubclass(kind, Exception):
                # Interrupted: what is whole and has a receipt waits for the next attempt.
                self._lease.leave()
            else:
                self._lease.release()

    # -- filling -----------------------------------------------------------------------------

    def put_block(self, block: BlockId, encoded: Encoded, file: str, file_offset: int) -> bool:
        """Store a block unless it is there; True if it is new.

        `encoded` must decode to what hashes to `block` (`codecs.encode` has seen to the one, the
        caller to the other).  `file` and `file_offset` say where it lies in the file that is
        written or copied, so that neighbours stay neighbours.
        """
        return self.put_blocks([(block, encoded, file_offset)], file) == 1

    def put_blocks(self, blocks: Sequence[tuple[BlockId, Encoded | None, int]], file: str) -> int:
        """Store blocks of one file unless they are there; how many are new.

        Each with its offset there, as for `put_block`; None in place of its bytes for one that was
        found stored, or was put here.  The index is asked once for all of them.
        """
        own, relied = self._own, self._relied_blocks
        asked = [
            block
            for block, encoded, _ in blocks
            if encoded is not None and block not in own and block not in relied
        ]
        if asked:
            stored = self._catalog.has_blocks(asked)
            relied.update(id for id, is_there in zip(asked, stored, strict=True) if is_there)
        before = self.blocks_new
        for block, encoded, offset in blocks:
            if block in own or block in relied:
                continue
            if encoded is None:
                relied.add(block)
                continue
            self._packs.writer.append_encoded(block, encoded, file, offset)
            own.add(block)
            self.blocks_new += 1
        return self.blocks_new - before

    def rely_on_block(self, block: BlockId) -> None:
        """A block that was found stored, or was put here, must be there when this is published."""
        if block not in self._own:
            self._relied_blocks.add(block)

    @property
    def relied_blocks(self) -> AbstractSet[BlockId]:
        """The blocks that this publishes and did not store: they were there."""
        return self._relied_blocks

    @property
    def has_news(self) -> bool:
        """Whether anything was put here that the store did not have."""
        return bool(self._own)

    @property
    def directory(self) -> Path:
        """Where packs may be written that `adopt` takes."""
        return self._lease.directory

    def has_blocks(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Which blocks are stored, or on their way in this transaction."""
        stored = self._catalog.has_blocks(blocks)
        return [
            is_stored or block in self._own for block, is_stored in zip(blocks, stored, strict=True)
        ]

    def adopt(self, pack: SealedPack) -> int:
        """Publish this pack, which lies in `directory`, as well; returns how many blocks are new.

        Where all of it is stored already, the pack is removed instead.
        """
        ids = [BlockId(entry.id) for entry in pack.entries if entry.kind == Kind.BLOCK]
        known = self.has_blocks(ids)
        if all(known):
            fs.unlink(pack.path)
            return 0
        self._own.update(ids)
        self._packs.adopt(pack)
        self._count(pack)
        self.blocks_new += known.count(False)
        return known.count(False)

    def go_on_with(self, writer: PackWriter, blocks: Iterable[BlockId]) -> None:
        """Take over an unfinished pack in `directory` that holds these blocks, and write on it."""
        self._packs.go_on_with(writer)
        before = len(self._own)
        self._own.update(blocks)
        self.blocks_new += len(self._own) - before

    def rely_on_manifest(self, manifest: Manifest) -> None:
        """All blocks and tensor records of a manifest must be stored, or be this transaction's.

        Of a virtual tensor, the record; `rely_on_inputs` names what it is computed from.
        """
        for file in manifest.files:
            for part in file.parts:
                id = part.tensor_id()
                if bytes([Kind.TENSOR]) + id in self._own:
                    self._rely_on_blocks(self._pending[id])
                    continue
                if bytes([Kind.VIRTUAL]) + id in self._own:
                    continue
                content = self._catalog.content(id)
                self._relied_records.add((type(content).kind, id))
                if isinstance(content, Tensor):
                    self._rely_on_blocks(content)

    def rely_on_inputs(self, plan: Plan) -> None:
        """All that a plan may read must be stored: whoever publishes a virtual merge needs it."""
        for id in (plan.base_id(), *(expert.manifest_id() for expert in plan.experts)):
            self._relied_records.add((Kind.MANIFEST, id))
            self.rely_on_manifest(self._catalog.manifest(id))

    def _rely_on_blocks(self, tensor: Tensor) -> None:
        self._relied_blocks.update(id for id in tensor.block_ids() if id not in self._own)

    def put_record(self, record: Record) -> Id:
        """Store a record unless it is there; returns its id.

        Raises BadRequest for one that no reader would take (`objects.limits`).
        """
        return self.put_records([record])[0]

    def put_records(self, records: Sequence[Record]) -> list[Id]:
        """Store many records, asking the index once; their ids.  Raises as `put_record`.

        What came before one that is refused is stored, and goes as the transaction goes.
        """
        encoded = [record.encode() for record in records]
        ids = [record.id_type.of(data) for record, data in zip(records, encoded, strict=True)]
        keys = [bytes([record.kind]) + id for record, id in zip(records, ids, strict=True)]
        present = self._present(
            {
                key
                for record, id, key in zip(records, ids, keys, strict=True)
                if key not in self._own and (record.kind, id) not in self._relied_records
            }
        )
        for record, id, key, data in zip(records, ids, keys, encoded, strict=True):
            kind = record.kind
            if key in self._own or (kind, id) in self._relied_records:
                continue
            if key in present:
                self._relied_records.add((kind, id))
                continue
            problem = record.problem(DEFAULT_LIMITS)
            if problem is not None:
                raise BadRequest(f"cannot be stored: {problem}", where=f"{kind.name.lower()} {id}")
            self._packs.writer.append_small(id, kind, Codec.RAW, 1, data, len(data))
            self._own.add(key)
            if isinstance(record, Tensor):
                self._pending[TensorId(id)] = record
        return ids

    def _present(self, keys: AbstractSet[bytes]) -> AbstractSet[bytes]:
        """Those of these records, by kind and id, that are stored."""
        if not keys:
            return keys
        index = self._catalog.index
        with index.env.read() as transaction:
            return index.record_rows(transaction, list(keys)).keys()

    def _count(self, pack: SealedPack) -> None:
        self.bytes_written += pack.size

    # -- publishing --------------------------------------------------------------------------

    def commit(
        self,
        *,
        snapshots: Sequence[SnapshotRecord] = (),
        moves: Sequence[RefMove] = (),
        also: Callable[[Any], None] | None = None,
    ) -> None:
        """Publish all of it, or raise and publish nothing.  Raises Conflict, StorageFailed.

        `also` adds rows of its own to the index transaction.
        """
        for snapshot in snapshots:
            self.put_record(snapshot)
        self._packs.publish()
        catalog = self._catalog
        with catalog.committing() as transaction:
            self._check_relied(transaction)
            self._check_parents(transaction, snapshots)
            for pack in self._packs.sealed:
                catalog.index.insert_pack(transaction, pack)
            self._check_bases(transaction)
            for snapshot in snapshots:
                insert_snapshot(catalog.index, transaction, snapshot)
            apply_moves(catalog, transaction, moves)
            if also is not None:
                also(transaction)
            self._lease.drop_row(transaction)
            self._packs.keep()

    def _check_relied(self, transaction: Any) -> None:
        index = self._catalog.index
        blocks = sorted(self._relied_blocks)
        rows = index.block_rows(transaction, blocks)
        gone: list[Id] = [b for b, row in zip(blocks, rows, strict=True) if row is None]
        records = {bytes([kind]) + id: id for kind, id in self._relied_records}
        there = index.record_rows(transaction, list(records))
        gone += [id for key, id in records.items() if key not in there]
        _require_unmoved(gone)

    def _check_parents(self, transaction: Any, snapshots: Sequence[SnapshotRecord]) -> None:
        """A snapshot is published with its parents, or with none of them collected."""
        index = self._catalog.index
        own = {snapshot.id() for snapshot in snapshots}
        parents = {p.snapshot_id() for snapshot in snapshots for p in snapshot.parents} - own
        _require_unmoved(
            [p for p in parents if index.record(transaction, Kind.SNAPSHOT, p) is None]
        )

    def _check_bases(self, transaction: Any) -> None:
        """What a delta is a difference to is stored, and is no delta itself.

        After the rows are in: of a block that another writer stored meanwhile, his row counts.
        """
        bases = {
            BlockId(entry.base)
            for pack in self._packs.sealed
            for entry in pack.entries
            if entry.base != NO_BASE
        }
        gone: list[Id] = []
        for base in bases:
            place = self._catalog.index.block(transaction, base)
            if place is None or Codec(place.codec).is_delta:
                gone.append(base)
        _require_unmoved(gone)


def _require_unmoved(gone: Sequence[Id]) -> None:
    if gone:
        raise Conflict(
            f"{len(gone)} blocks or records were collected while this command was running",
            where=str(min(gone)),
            hint="run the command again",
        )


def branch_to_move(catalog: Catalog, name: str) -> refs.Ref | None:
    """What the branch `name` is now, None if it is new.  Raises BadName, Conflict for a tag.

    Who is going to move it asks with the transaction open: before that, the commit of a writer
    that was killed may not show yet.
    """
    refs.check_name(name)
    with catalog.index.env.read() as transaction:
        current = refs.get(catalog.index, transaction, name)
        if current is None:
            refs.refuse_shadow(catalog.index, transaction, name)
    if current is not None and current.kind == refs.TAG:
        raise Conflict("is a tag, and tags do not move", where=name, hint="choose another --name")
    return current


def tip_of(
    catalog: Catalog, current: refs.Ref | None
) -> tuple[SnapshotRecord | None, tuple[Parent, ...]]:
    """What a branch points at, and the parent of what comes next on it.

    Neither is there for a new branch, nor where the snapshot is missing: then the branch begins
    anew.  One that is stored and cannot be read is a parent that may yet be healed.
    """
    if current is None:
        return None, ()
    id = current.snapshot_id()
    with catalog.index.env.read() as transaction:
        is_stored = catalog.index.record(transaction, Kind.SNAPSHOT, id) is not None
    parents = (Parent(PREVIOUS, current.snapshot),) if is_stored else ()
    return catalog.snapshot_if_there(id), parents


def apply_moves(catalog: Catalog, transaction: Any, moves: Sequence[RefMove]) -> None:
    """Move refs within an open index transaction."""
    for move in moves:
        if move.new is not None:
            contents.keep(catalog, transaction, move.new.snapshot_id(), move.name)
            # Here and not below: reindex gives back a name that was there before the snapshot.
            if move.expect is None:
                refs.refuse_shadow(catalog.index, transaction, move.name)
        refs.move(
            catalog.index,
            transaction,
            move.name,
            expect=move.expect,
            new=move.new,
            action=move.action,
            time_ns=now_ns(),
        )


def move_refs(catalog: Catalog, moves: Sequence[RefMove]) -> None:
    """Publish ref moves that need no new blocks.  Raises Conflict, BadName, StorageFailed."""
    choose_moves(catalog, lambda transaction: moves)


def choose_moves(catalog: Catalog, choose: Callable[[Any], Sequence[RefMove]]) -> Sequence[RefMove]:
    """Publish the ref moves that are right for what the refs are now (tag, reset, remove).

    `choose` is asked in the transaction that moves them, and once before: what it refuses takes no
    lock.  Returns what was moved.  Raises what `choose` raises, BadName, StorageFailed.
    """
    with catalog.index.env.read() as transaction:
        if not choose(transaction):
            return ()
    with catalog.committing() as transaction:
        moves = choose(transaction)
        apply_moves(catalog, transaction, moves)
    return moves
