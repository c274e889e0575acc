"""Transactions: the only way to publish anything.

The commit order is a promise (docs/format.md, "Commit order"):

    lease -> payloads into tmp/ -> footer, fsync -> writer lock -> pack list, fsync
    -> rename into packs/ -> fsync directories
    -> ONE index transaction: check again that every block counted as present still is, insert
       rows, compare-and-swap the refs, append the reflog
    -> acknowledge -> refresh the text mirror

A crash before the index commit leaves only garbage. After it, everything is stored. A transaction
belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Self, cast

import msgspec

from mstore import fs
from mstore.blocks.codecs import PLAIN_BYTES, Codec, Encoded, elements_of, encode
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, base_of
from mstore.blocks.packs import NO_BASE, Kind, PackWriter, SealedPack
from mstore.store import contents, gates, leases, listing, refs, unnamed_packs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.canonical import DEFAULT_LIMITS, Record
from mstore.store.objects.manifest import Manifest, Part
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import PREVIOUS, Parent, SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor, in_blocks, partition
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.store.refs import refs_in
from mstore.terms.errors import BadRequest, Conflict, Interrupted, NotFound
from mstore.terms.ids import BlockId, Id, SnapshotId
from mstore.terms.phrases import Option, phrase


class RefMove(msgspec.Struct, frozen=True):
    """A ref to move: its expected value, its new value, and the action for the reflog."""

    name: str
    expect: refs.Ref | None
    new: refs.Ref | None
    action: str


class Transaction:
    """Blocks and records to be published together.

    Invariants: nothing is visible before `commit` returns. Leaving the block after an exception, or
    without `commit`, removes all that was written. With `resumes`, the transaction starts from
    leftovers of interrupted transactions in its `directory`. If it is itself interrupted (by
    KeyboardInterrupt, SystemExit or anything else that is not an Exception, or by Interrupted), it
    leaves its own there.
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
        self._own_records: set[Key] = set()
        self._records: dict[Key, Record] = {}
        self._relied_blocks: set[BlockId] = set()
        # Of stored tensors: these may lie elsewhere.  What this transaction was given may not.
        self._read_blocks: set[bytes] = set()
        self._relied_records: set[Key] = set()
        self.blocks_new = 0
        # Before any write: garbage of a killed writer may occupy the space that is needed.
        with catalog.publishing(packs=True):
            leases.sweep(catalog.layout, catalog.index)
            unnamed_packs.sweep(catalog.layout, catalog.index, catalog.places)
        self._lease = leases.Lease(catalog.layout, catalog.index, purpose)
        catalog.lengths.outlive(self._lease.number)
        self._packs = NewPacks(catalog, self._lease.directory, prefix="r", max_pack=max_pack)
        self._resumes = resumes
        if resumes:
            leases.claim(catalog.layout, self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._packs.abandon()
        finally:
            interrupted = kind is not None and (
                issubclass(kind, Interrupted) or not issubclass(kind, Exception)
            )
            if self._resumes and interrupted:
                # Sealed packs with a receipt wait for the next attempt.
                self._lease.leave()
            else:
                self._lease.release()

    # -- filling -----------------------------------------------------------------------------

    def put_block(self, block: BlockId, encoded: Encoded, file: str, file_offset: int) -> bool:
        """Store a block unless it is stored; return whether it is new.  See `put_blocks`."""
        return self.put_blocks([(block, encoded, file_offset)], file) == 1

    def put_blocks(self, blocks: Sequence[tuple[BlockId, Encoded | None, int]], file: str) -> int:
        """Store those blocks of one file that are not stored yet; return how many are new.

        Each block comes with its bytes, which `codecs.encode` made and the caller has checked
        against the id, and with its offset in the file, so that neighbours stay neighbours in the
        pack. Pass None instead of the bytes of a block that was found stored or was put here
        before.
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

    def put_bytes(self, data: bytes, file: str) -> Part:
        """Store a header, or a whole file, and return it as a part of `file`."""
        ids = []
        for start, length in partition(len(data), self._catalog.block_size):
            piece = data[start : start + length]
            ids.append(BlockId.of(piece))
            encoded = encode(piece, PLAIN_BYTES, self._catalog.config.codec)
            self.put_block(ids[-1], encoded, file, start)
        tensor = Tensor(BYTES, (len(data),), len(data), b"".join(ids))
        return Part(None, self.put_record(tensor), len(data))

    def put_tensor(
        self, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes], file: str
    ) -> Tensor:
        """Store a tensor's bytes, in pieces of any length; return its record, not stored yet."""
        ids: list[BlockId] = []
        length = 0
        for piece in in_blocks(pieces, self._catalog.block_size):
            id = BlockId.of(piece)
            encoded = None
            if not self.has_blocks([id])[0]:
                encoded = encode(piece, elements_of(dtype), self._catalog.config.codec)
            self.put_blocks([(id, encoded, length)], file)
            ids.append(id)
            length += len(piece)
        return Tensor(dtype, shape, length, b"".join(ids))

    @property
    def relied_blocks(self) -> AbstractSet[BlockId]:
        """Blocks that this transaction refers to but did not store: they were stored already."""
        return self._relied_blocks

    @property
    def has_news(self) -> bool:
        """Whether this transaction stored anything that the store did not have."""
        return bool(self._own or self._own_records)

    @property
    def bytes_written(self) -> int:
        """Bytes of the packs that are sealed by now."""
        return self._packs.bytes_written

    @property
    def records(self) -> Mapping[Key, Record]:
        """The records that are new."""
        return self._records

    def sealed(self) -> Sequence[SealedPack]:
        """Seal what was put and return its packs: to publish elsewhere, in place of `commit`.

        Nothing can be put afterwards: which blocks were is forgotten, a hundred bytes for each.
        """
        self._packs.seal()
        self._own, self._relied_blocks = set(), set()
        return self._packs.sealed

    @property
    def directory(self) -> Path:
        """The directory in which to write packs for `adopt`."""
        return self._lease.directory

    def has_blocks(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return, for each block, whether it is stored or part of this transaction."""
        stored = self._catalog.has_blocks(blocks)
        return [
            is_stored or block in self._own for block, is_stored in zip(blocks, stored, strict=True)
        ]

    def adopt(self, pack: SealedPack) -> int:
        """Publish a pack from `directory` as well; return how many of its blocks are new.

        If all its blocks are stored already, the pack is removed instead.
        """
        ids = [BlockId(entry.id) for entry in pack.entries if entry.kind == Kind.BLOCK]
        known = self.has_blocks(ids)
        if all(known):
            fs.unlink(pack.path)
            return 0
        self._own.update(ids)
        self._packs.adopt(pack)
        self.blocks_new += known.count(False)
        return known.count(False)

    def count_in(self, blocks: Iterable[BlockId]) -> None:
        """Take blocks as part of this that lie in no pack which it was given to publish.

        Where their pack lies elsewhere, `commit` is not called.
        """
        before = len(self._own)
        self._own.update(blocks)
        self.blocks_new += len(self._own) - before

    def receive(self, pack: SealedPack) -> None:
        """Publish a pack from elsewhere as well, of whose entries those given here get rows."""
        self._packs.adopt(pack)
        self._own.update(entry.id for entry in pack.entries if entry.kind == Kind.BLOCK)
        self._own_records.update(
            (Kind(entry.kind), entry.id) for entry in pack.entries if entry.kind != Kind.BLOCK
        )

    def new_packs(self, prefix: str) -> NewPacks:
        """Return a writer of packs in `directory`, which `receive` takes once they are sealed."""
        return NewPacks(self._catalog, self._lease.directory, prefix=prefix)

    def go_on_with(self, writer: PackWriter, blocks: Iterable[BlockId]) -> None:
        """Take over an unfinished pack in `directory` that holds these blocks, and append to it."""
        self._packs.go_on_with(writer)
        self.count_in(blocks)

    def rely_on(self, keys: Iterable[Key]) -> None:
        """Require these blocks and records to be stored still when this commits."""
        for kind, id in keys:
            if kind == Kind.BLOCK:
                self._relied_blocks.add(BlockId(id))
            else:
                self._relied_records.add((kind, id))

    def rely_on_manifest(self, manifest: Manifest) -> None:
        """Require all blocks and tensor records of a manifest to be stored, or to be part of this.

        For a virtual tensor that is its record; `rely_on_inputs` covers what it is computed from.
        Raises NotFound for a tensor that is neither, Conflict if it was stored and is no longer.
        """
        stored = []
        for file in manifest.files:
            for part in file.parts:
                id = part.tensor_id()
                if (Kind.TENSOR, id) in self._own_records:
                    self._rely_on_blocks(cast("Tensor", self._records[Kind.TENSOR, id]))
                elif (Kind.VIRTUAL, id) not in self._own_records:
                    stored.append(id)
        self._catalog.preload_tensors(stored)
        for id in stored:
            try:
                content = self._catalog.content(id)
            except NotFound:
                if not self._relied_records.isdisjoint({(Kind.TENSOR, id), (Kind.VIRTUAL, id)}):
                    _require_unmoved([id])
                raise
            self._relied_records.add((type(content).kind, id))
            if isinstance(content, Tensor):
                self._rely_on_blocks(content)

    def rely_on_inputs(self, plan: Plan) -> None:
        """Require all that a plan may read to be stored, for publishing a virtual merge."""
        for id in plan.manifest_ids():
            self._relied_records.add((Kind.MANIFEST, id))
            self.rely_on_manifest(self._catalog.manifest(id))

    def _rely_on_blocks(self, tensor: Tensor) -> None:
        blocks = [id for id in tensor.block_ids() if id not in self._own]
        self._relied_blocks.update(blocks)
        if self._catalog.index.elsewhere is not None:
            self._read_blocks.update(blocks)

    def put_record(self, record: Record) -> Id:
        """Store a record unless it is stored already; return its id.  Raises as `put_records`."""
        return self.put_records([record])[0]

    def put_records(self, records: Sequence[Record]) -> list[Id]:
        """Store many records with one index lookup; return their ids.

        Raises BadRequest for a record that readers would reject (`objects.canonical`); those before
        it stay part of the transaction.
        """
        encoded = [record.encode() for record in records]
        ids = [record.id_type.of(data) for record, data in zip(records, encoded, strict=True)]
        own, relied = self._own_records, self._relied_records
        keys = [(record.kind, id) for record, id in zip(records, ids, strict=True)]
        present = self._present({key for key in keys if key not in own and key not in relied})
        for record, id, key, data in zip(records, ids, keys, encoded, strict=True):
            if key in own or key in relied:
                continue
            if key in present:
                relied.add(key)
                continue
            kind = record.kind
            problem = record.problem(DEFAULT_LIMITS)
            if problem is not None:
                raise BadRequest(f"cannot be stored: {problem}", where=f"{kind.name.lower()} {id}")
            self._packs.writer.append_small(id, kind, Codec.RAW, 1, data, len(data))
            own.add(key)
            self._records[kind, id] = record
        return ids

    def _present(self, keys: AbstractSet[Key]) -> AbstractSet[Key]:
        """Return those of these records that are stored."""
        if not keys:
            return keys
        index = self._catalog.index
        with index.env.read() as transaction:
            return index.has_records(transaction, keys)

    # -- publishing --------------------------------------------------------------------------

    def commit(
        self,
        *,
        snapshots: Sequence[SnapshotRecord] = (),
        moves: Sequence[RefMove] = (),
        lost_parents: AbstractSet[SnapshotId] = frozenset(),
        also: Callable[[IndexTransaction], None] | None = None,
    ) -> None:
        """Publish everything, or raise and publish nothing. Raises Conflict, StorageFailed.

        lost_parents: parents of snapshots from elsewhere that are lost there, too.
        `also` adds rows of its own to the index transaction, none of blocks.
        """
        for snapshot in snapshots:
            self.put_record(snapshot)
        catalog = self._catalog
        with self._packs.committing() as transaction:
            self._check_relied(transaction)
            self._check_parents(transaction, snapshots, lost_parents)
            for pack in self._packs.sealed:
                catalog.index.insert_pack(transaction, pack)
            self._check_bases(transaction)
            for snapshot in snapshots:
                listing.insert(catalog.index, transaction, snapshot)
            apply_moves(catalog, transaction, moves)
            if also is not None:
                also(transaction)
            self._lease.drop_row(transaction)
            number = transaction.id()
        # Blocks that were stored before keep their rows (`Index.insert_pack`).
        catalog.lengths.outlive(number)

    def _check_relied(self, transaction: IndexTransaction) -> None:
        index = self._catalog.index
        blocks = sorted(self._relied_blocks)
        there = index.has_blocks(transaction, blocks)
        gone: list[bytes] = [b for b, is_there in zip(blocks, there, strict=True) if not is_there]
        if index.elsewhere is not None and gone:
            places = index.elsewhere.locate(gone)
            may_lean = self._read_blocks
            leans = [at is not None and b in may_lean for b, at in zip(gone, places, strict=True)]
            gone = [b for b, is_read in zip(gone, leans, strict=True) if not is_read]
        records = self._relied_records
        gone += [id for _, id in records - index.has_records(transaction, records)]
        _require_unmoved(gone)

    def _check_parents(
        self,
        transaction: IndexTransaction,
        snapshots: Sequence[SnapshotRecord],
        lost: AbstractSet[SnapshotId],
    ) -> None:
        """Raise Conflict if a parent of a snapshot was collected meanwhile."""
        index = self._catalog.index
        own = {snapshot.id() for snapshot in snapshots}
        parents = {p.snapshot_id() for snapshot in snapshots for p in snapshot.parents}
        parents -= own | lost
        _require_unmoved(
            [p for p in parents if not index.has_record(transaction, Kind.SNAPSHOT, p)]
        )

    def _check_bases(self, transaction: IndexTransaction) -> None:
        """Raise Conflict unless the base of every delta is stored and is not itself a delta.

        Runs after the rows are inserted: if another writer stored a block first, its row counts.
        """
        bases = sorted(
            {
                entry.base
                for pack in self._packs.sealed
                for entry in pack.entries
                if entry.base != NO_BASE
            }
        )
        rows = self._catalog.index.base_rows(transaction, bases)
        _require_unmoved(
            [
                base
                for base, row in zip(bases, rows, strict=True)
                if row is None or base_of(row) is not None
            ]
        )


def _require_unmoved(gone: Sequence[bytes]) -> None:
    if gone:
        raise Conflict(
            f"{len(gone)} blocks or records were collected while this command was running",
            where=min(gone).hex(),
            hint="run the command again",
        )


def branch_to_move(catalog: Catalog, name: str, candidate: str | None = None) -> refs.Ref | None:
    """Return what the branch `name` points at, None if it is new.

    candidate: a run whose candidate for the branch will move in its place, and must be able to.
    Raises BadName, Conflict for a tag or a name below or above a ref. Call it with the transaction
    open: before that, the commit of a killed writer may not be visible yet.
    """
    refs.check_name(name)
    with catalog.index.env.read() as transaction:
        current = refs_in(catalog.index, transaction).get(name)
        if current is None:
            refs.refuse_shadow(catalog.index, transaction, name)
            # Not only at the commit: what comes before it may take long.
            refs_in(catalog.index, transaction).refuse_nesting(name)
        if candidate is not None:
            own = refs.below(refs.CANDIDATE, candidate, name)
            if refs_in(catalog.index, transaction).get(own) is None:
                refs_in(catalog.index, transaction).refuse_nesting(own)
    if current is not None and current.kind == refs.TAG:
        raise Conflict(
            "is a tag, and tags do not move",
            where=name,
            hint=phrase("choose another {name}", name=Option("name")),
        )
    return current


def tip_of(
    catalog: Catalog, current: refs.Ref | None
) -> tuple[SnapshotRecord | None, tuple[Parent, ...]]:
    """Return the snapshot that a branch points at, and the parents of the next one on it.

    Both are empty for a new branch, and where the snapshot is missing: the branch then starts over.
    A snapshot that is stored but unreadable is still a parent, because it may be repaired.
    """
    if current is None:
        return None, ()
    id = current.snapshot_id()
    with catalog.index.env.read() as transaction:
        is_stored = catalog.index.has_record(transaction, Kind.SNAPSHOT, id)
    parents = (Parent(PREVIOUS, current.snapshot),) if is_stored else ()
    return catalog.snapshot_if_there(id), parents


def apply_moves(catalog: Catalog, transaction: IndexTransaction, moves: Sequence[RefMove]) -> None:
    """Move refs within an open index transaction.  Raises Conflict, GateFailed."""
    new = {move.name: move.new.snapshot_id() for move in moves if move.new is not None}
    gates.require_passed(catalog, transaction, new)
    for move in moves:
        if move.new is not None:
            contents.keep(catalog, transaction, move.new.snapshot_id(), move.name)
            # Only here, not in `refs.move`: reindex restores names that were there before the
            # snapshot.
            if move.expect is None:
                refs.refuse_shadow(catalog.index, transaction, move.name)
        refs_in(catalog.index, transaction).move(
            move.name,
            expect=move.expect,
            new=move.new,
            action=move.action,
            time_ns=now_ns(),
        )
        if refs.is_candidate(move.name):
            catalog.hold_candidate(move.name, move.new)


def drop_ref(catalog: Catalog, name: str, action: str) -> None:
    """Remove a ref if it is there.  action: for the reflog."""

    def choose(transaction: IndexTransaction) -> list[RefMove]:
        mine = refs_in(catalog.index, transaction).get(name)
        return [] if mine is None else [RefMove(name, mine, None, action)]

    choose_moves(catalog, choose)


def choose_moves(
    catalog: Catalog, choose: Callable[[IndexTransaction], Sequence[RefMove]]
) -> Sequence[RefMove]:
    """Publish ref moves that depend on the current refs (tag, reset, remove); return them.

    Calls `choose` once before taking the lock, so that a refusal takes none, and again inside the
    transaction.
    """
    with catalog.index.env.read() as transaction:
        if not choose(transaction):
            return ()
    with catalog.committing() as transaction:
        moves = choose(transaction)
        apply_moves(catalog, transaction, moves)
    return moves
