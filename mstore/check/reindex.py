"""Reindex: the index made anew from packs and the ref mirror.

The new LMDB file is built in tmp/ and put in place by one rename: a crash leaves the old index or
the new one.  What packs do not tell (refs, reflogs, what inputs of plans were called, what was
pruned) is taken over from the old index where that can be read, else refs come from the mirror and
reflogs begin anew.  With neither, each snapshot that no other came from gets a branch, so that the
next garbage collection takes none.  Statistics and the memo table are functions of contents and
stay; remembered requests go.

Of a payload that several packs have, the first that reads right is taken, one that needs no base
before one that does.  A delta whose base is nowhere is left out.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mstore import fs
from mstore.blocks import codecs, lmdb_env
from mstore.blocks.index import Index, Location
from mstore.blocks.packs import Kind, PackFiles, SealedPack, read_table
from mstore.check import old_index, rows
from mstore.check.findings import Key, typed
from mstore.check.old_index import OldIndex
from mstore.errors import Conflict, Corrupt, MstoreError
from mstore.ids import BlockId, Buffer, ManifestId, PlanId, SnapshotId, TensorId
from mstore.objects.canonical import decode, plain_id
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.objects.signature import Signature
from mstore.objects.snapshot import BASE, EXPERT, SnapshotRecord
from mstore.objects.tensor import Tensor
from mstore.reports import Progress, ReindexReport
from mstore.store import leases, memo, refs
from mstore.store.catalog import RECORD_LIMIT, insert_snapshot, now_ns
from mstore.store.layout import Layout, locate
from mstore.store.plans import Source, Sources

Report = Callable[[Progress], None]
_DATA = "data.mdb"
_LOCK = "lock.mdb"


def reindex(
    root: Path, *, use_old_index: bool = True, progress: Report | None = None
) -> ReindexReport:
    """Make the index of the store at `root` anew.

    Raises Conflict while anybody has the store open, NotFound, Incompatible, StorageFailed.
    """
    began = time.monotonic()
    layout = locate(root)
    _make_directories(layout)
    with leases.collecting(layout), _alone(layout):
        old = OldIndex.read(layout) if use_old_index else None
        workplace = layout.tmp / f"reindex-{secrets.token_hex(4)}"
        fs.make_directory(workplace, mode=0o700)
        try:
            index = Index(workplace, create=True)
            try:
                built = _Building(layout, index, old, progress).run()
            finally:
                index.close()
            _put_in_place(layout, workplace)
        finally:
            fs.remove_tree(workplace)
        _forget_requests(layout)
        index = Index(layout.index)
        try:
            refs.write_mirror(layout, index)
            size = index.env.file_bytes()
        finally:
            index.close()
    return ReindexReport(
        packs=built.packs,
        blocks=built.blocks,
        records=built.records,
        snapshots=built.snapshots,
        refs=built.refs,
        recovered=tuple(built.recovered),
        pruned=built.pruned,
        old_index=old is not None and bool(old.refs or old.reflog),
        reflog_moves=built.reflog_moves,
        index_bytes=size,
        notes=tuple(built.notes),
        seconds=time.monotonic() - began,
    )


def _make_directories(layout: Layout) -> None:
    """Those that a copy of a store need not have: what lies in them is made anew."""
    made = [
        fs.make_directory(directory, mode=mode, exist_ok=True)
        for directory, mode in ((layout.tmp, 0o700), (layout.index, 0o777), (layout.stats, 0o777))
    ]
    if any(made):
        fs.sync_directory(layout.root)


@contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """Hold the writer lock, with nobody else at work or looking.  Raises Conflict naming them."""
    if lmdb_env.is_open(layout.index):
        raise Conflict("this process has the store open", where=str(layout.root))
    lock = fs.LockFile(layout.lock)
    try:
        if not lock.acquire(blocking=False):
            raise Conflict(
                "another command is publishing",
                where=str(layout.root),
                hint="run the command again when it has ended",
            )
        _require_idle(layout)
        yield
    finally:
        lock.release()


def _require_idle(layout: Layout) -> None:
    live = sorted(leases.live(layout))
    pins = sorted(leases.pins(layout))
    names: dict[str, str] = {}
    if live:
        with suppress(MstoreError):
            names = {
                lease: f"{purpose} (process {pid})"
                for lease, pid, purpose in old_index.at_work(layout)
            }
    holder = _holder(layout.index / _LOCK)
    if live or pins or holder is not None:
        who = [names.get(lease, f"lease {lease}") for lease in live]
        who += [f"a reader of snapshot {snapshot.short}" for snapshot in pins]
        who = who or [f"process {holder} has the store open"]
        raise Conflict(
            f"the store is in use: {', '.join(who)}",
            where=str(layout.root),
            hint="unmount it and let commands end, then: mstore reindex",
        )


# struct flock of 64-bit Linux.
_FLOCK = struct.Struct("hhqqi4x")


def _holder(lock: Path) -> int | None:
    """A process that has an LMDB environment open, by the byte that LMDB locks; None for nobody."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else pid


def _put_in_place(layout: Layout, workplace: Path) -> None:
    if fs.make_directory(layout.index, exist_ok=True):
        fs.sync_directory(layout.root)
    if not (layout.index / _LOCK).exists():
        fs.rename(workplace / _LOCK, layout.index / _LOCK)
    fs.rename(workplace / _DATA, layout.index / _DATA)
    fs.sync_directory(layout.index)


def _forget_requests(layout: Layout) -> None:
    """Plans that a request led to may be gone; the table can be thrown away, so damage is too."""
    if not (layout.memo / _DATA).exists():
        return
    with suppress(MstoreError):
        env = lmdb_env.Environment.acquire(layout.memo, memo.DATABASES)
        try:
            with env.write() as transaction:
                transaction.drop(env.databases[memo.REQUESTS], delete=False)
        finally:
            env.release()


@dataclass(slots=True)
class _Built:
    packs: int
    blocks: int
    records: int
    snapshots: int
    refs: int
    pruned: int
    reflog_moves: int
    recovered: list[str]
    notes: list[str]


class _Building:
    """One new index, from the first pack to the last ref."""

    def __init__(
        self, layout: Layout, index: Index, old: OldIndex | None, progress: Report | None
    ) -> None:
        self._layout = layout
        self._index = index
        self._old = old or OldIndex()
        self._progress = progress
        self._files = PackFiles(layout.packs)
        self._doubles: dict[Key, list[bytes]] = {}
        self._notes = [f"old index: {note}" for note in self._old.notes]
        self._whole: dict[TensorId, bool] = {}
        self._manifests: dict[ManifestId, bool] = {}
        self._are_refs_lost = False

    def run(self) -> _Built:
        """Fill it."""
        try:
            packs = self._packs()
            self._settle_doubles()
            self._leave_out_orphans()
            snapshots = self._snapshots()
            names, moves = self._refs(set(snapshots))
            recovered = self._recover(snapshots, names) if self._are_refs_lost else {}
            names.update(recovered)
            self._plans(snapshots, names)
            pruned = self._pruned(snapshots, names)
        finally:
            self._files.close()
        with self._index.env.read() as transaction:
            blocks, records = (
                self._index.count(transaction, name) for name in ("blocks", "records")
            )
        return _Built(
            packs,
            blocks,
            records,
            len(snapshots),
            len(names),
            pruned,
            moves,
            list(recovered),
            self._notes,
        )

    # -- rows of blocks and records ----------------------------------------------------------

    def _packs(self) -> int:
        paths = sorted(self._layout.packs.glob("*/*.pack"), key=lambda path: path.name)
        sizes = [path.stat().st_size for path in paths]
        count = done = 0
        for path, size in zip(paths, sizes, strict=True):
            done += size
            try:
                id, entries = read_table(path)
            except MstoreError as error:
                self._notes.append(f"pack {path.stem} is left out: {error.what}")
                continue
            if id.hex() != path.stem:
                self._notes.append(f"pack {path.stem} is left out: it is {id.short}")
                continue
            if id in self._old.condemned:
                continue
            self._pack(SealedPack(id, path, size, entries))
            count += 1
            if self._progress is not None:
                self._progress(Progress("reindex", done, sum(sizes)))
        return count

    def _pack(self, pack: SealedPack) -> None:
        keys: list[Key] = []
        for entry in pack.entries:
            # A record of a kind that this version does not know gets its row all the same.
            with suppress(ValueError):
                keys.append((Kind(entry.kind), entry.id))
        index = self._index
        with index.env.write() as transaction:
            known = {key: row for key in keys if (row := _row(index, transaction, key)) is not None}
            # The rows that this pack would have had, were it the first.
            for database, name in (rows.record_key(*key) for key in known):
                transaction.delete(name, db=index.db(database))
            index.insert_pack(transaction, pack)
            for key, row in known.items():
                mine = _row(index, transaction, key)
                assert mine is not None
                self._doubles.setdefault(key, [row]).append(mine)
                _put(index, transaction, key, row)

    def _settle_doubles(self) -> None:
        """Of each payload that several packs have, the first that reads right."""
        index = self._index
        # Deltas last: what they are differences to must have been settled.
        for is_delta in (False, True):
            settled = {
                key: row
                for key, found in self._doubles.items()
                if (row := self._first_right(key, found, is_delta=is_delta)) is not None
            }
            with index.env.write() as transaction:
                for key, row in settled.items():
                    _put(index, transaction, key, row)
                    del self._doubles[key]

    def _first_right(self, key: Key, found: list[bytes], *, is_delta: bool) -> bytes | None:
        for row in found:
            if (rows.base_of(row) is not None) == is_delta:
                with suppress(MstoreError):
                    self._payload(key, row)
                    return row
        return None

    def _payload(self, key: Key, row: bytes) -> Buffer:
        """The plain bytes that a row leads to, checked.  Raises Corrupt, StorageFailed."""
        kind, id = key
        with self._index.env.read() as transaction:
            location = self._index.location(transaction, row)
            base = rows.base_of(row)
            under = None if base is None else _row(self._index, transaction, (Kind.BLOCK, base))
        limit = self._layout.block_size if kind == Kind.BLOCK else RECORD_LIMIT
        if max(location.raw_length, location.stored_length) > limit:
            raise Corrupt("longer than it may be", where=id.hex())
        plain = None
        if base is not None:
            if under is None or rows.base_of(under) is not None:
                raise Corrupt("its base is missing", where=id.hex())
            plain = self._payload((Kind.BLOCK, base), under)
        data = self._decoded(location, plain)
        if typed(kind, id).of(data) != id:
            raise Corrupt("the stored bytes do not match the id", where=id.hex())
        return data

    def _decoded(self, location: Location, base: Buffer | None) -> Buffer:
        payload = self._files.read(location.pack, location.offset, location.stored_length)
        return codecs.decode(location.codec, payload, location.width, location.raw_length, base)

    def _leave_out_orphans(self) -> None:
        """Deltas whose base is not there, or cannot be one."""
        index = self._index
        left_out = 0
        for batch in rows.batches(index, "blocks"):
            deltas = [(key, row, base) for key, row in batch if (base := rows.base_of(row))]
            if not deltas:
                continue
            with index.env.read() as transaction:
                bases = index.block_rows(transaction, [base for _, _, base in deltas])
            orphans = [
                key
                for (key, row, _), base in zip(deltas, bases, strict=True)
                if base is None
                or rows.base_of(base) is not None
                or rows.raw_length(base) != rows.raw_length(row)
            ]
            left_out += len(orphans)
            if orphans:
                with index.env.write() as transaction:
                    for key in orphans:
                        transaction.delete(key, db=index.db("blocks"))
        if left_out:
            self._notes.append(f"{left_out} deltas are left out: their bases are in no pack")

    # -- snapshots ---------------------------------------------------------------------------

    def _record(self, kind: Kind, id: bytes) -> Buffer | None:
        """The bytes of a record; None where it is missing or wrong."""
        with self._index.env.read() as transaction:
            row = _row(self._index, transaction, (kind, id))
        if row is None:
            return None
        try:
            return self._payload((kind, id), row)
        except MstoreError:
            return None

    def _snapshots(self) -> dict[SnapshotId, SnapshotRecord]:
        """Rows of snapshots, edges and signatures."""
        index = self._index
        snapshots: dict[SnapshotId, SnapshotRecord] = {}
        signatures: list[bytes] = []
        for batch in rows.batches(index, "records"):
            for key, _ in batch:
                if key[0] not in (Kind.SNAPSHOT, Kind.SIGNATURE):
                    continue
                data = self._record(Kind(key[0]), key[1:])
                if data is None:
                    self._notes.append(f"{Kind(key[0]).name.lower()} {key[1:].hex()} is unreadable")
                elif key[0] == Kind.SNAPSHOT:
                    with suppress(Corrupt):
                        snapshot = decode(SnapshotRecord, data, key[1:].hex())
                        snapshots[SnapshotId(key[1:])] = snapshot
                else:
                    with suppress(Corrupt):
                        signature = decode(Signature, data, key[1:].hex())
                        signatures.append(signature.snapshot + key[1:])
        with index.env.write() as transaction:
            for snapshot in snapshots.values():
                insert_snapshot(index, transaction, snapshot)
            for name in signatures:
                transaction.put(name, b"", db=index.db("signatures"))
        return snapshots

    def _refs(self, known: set[SnapshotId]) -> tuple[dict[str, refs.Ref], int]:
        """Refs and reflogs: of the old index where it has them all, else of the mirror."""
        old, index = self._old, self._index
        mirrored: dict[str, refs.Ref] = {}
        try:
            mirrored = refs.read_mirror(self._layout)
        except MstoreError as error:
            self._notes.append(f"ref mirror: {error.what}")
            self._are_refs_lost = not old.are_refs_whole
        # The mirror may be a commit behind, and knows nothing of what was removed since.
        named = old.refs if old.are_refs_whole else {**old.refs, **mirrored}
        found = {}
        with index.env.write() as transaction:
            for key, value in old.reflog.items():
                transaction.put(key, value, db=index.db("reflog"))
            for name, ref in sorted(named.items()):
                if ref.snapshot_id() not in known:
                    what = f"{name} is at {ref.snapshot_id()}, which is in no pack"
                    self._notes.append(f"{what}; next: mstore fsck")
                last = refs.reflog(index, transaction, name)[-1:]
                if last and last[0].new == ref.snapshot:
                    value = msgspec.msgpack.encode(ref, enc_hook=plain_id)
                    transaction.put(name.encode(), value, db=index.db("refs"))
                else:
                    refs.move(
                        index,
                        transaction,
                        name,
                        expect=None,
                        new=ref,
                        action="reindex",
                        time_ns=now_ns(),
                    )
                found[name] = ref
        return found, len(old.reflog)

    def _recover(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> dict[str, refs.Ref]:
        """A branch for each snapshot that no other came from, and that no ref reaches.

        Without any ref, the next garbage collection would take all of them.
        """
        parents = {p.snapshot_id() for record in snapshots.values() for p in record.parents}
        named = {ref.snapshot_id() for ref in names.values()}
        directory = "recovered"
        while directory in names:
            directory += "-again"
        found: dict[str, refs.Ref] = {}
        with self._index.env.write() as transaction:
            for id in sorted(snapshots.keys() - parents - named):
                name = f"{directory}/{id.short}"
                if name in names or name in found:
                    name = f"{directory}/{id}"
                new = refs.Ref(refs.BRANCH, id)
                refs.move(
                    self._index,
                    transaction,
                    name,
                    expect=None,
                    new=new,
                    action="reindex: recovered",
                    time_ns=now_ns(),
                )
                found[name] = new
        if found:
            self._notes.append(
                f"the names of refs are lost: {len(found)} branches {directory}/... are what no "
                f"other snapshot came from (mstore log shows all); to name one again: mstore reset "
                f"NAME {next(iter(found))}, then mstore rm {next(iter(found))}"
            )
        return found

    def _plans(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> None:
        """What plans' inputs were called: as the old index says, else by their names of today."""
        # Of several names a branch's: that is what people type.
        ordered = sorted(names.items(), key=lambda item: (item[1].kind == refs.BRANCH, item[0]))
        called = {ref.snapshot_id(): name for name, ref in ordered}
        derived: dict[PlanId, bytes] = {}

        def source(snapshot: bytes) -> Source:
            id = SnapshotId(snapshot)
            return Source(bytes(id), called.get(id, id.short))

        for record in snapshots.values():
            plan = record.plan_id()
            bases = [p.snapshot for p in record.parents if p.role == BASE]
            experts = [p.snapshot for p in record.parents if p.role == EXPERT]
            if plan is not None and len(bases) == 1:
                sources = Sources(source(bases[0]), tuple(map(source, experts)))
                derived[plan] = msgspec.msgpack.encode(sources, enc_hook=plain_id)
        index = self._index
        with index.env.write() as transaction:
            for plan, value in {**derived, **self._old.plans}.items():
                if index.record(transaction, Kind.PLAN, plan) is not None:
                    transaction.put(plan, value, db=index.db("plans"))

    # -- contents ----------------------------------------------------------------------------

    def _pruned(
        self, snapshots: dict[SnapshotId, SnapshotRecord], names: dict[str, refs.Ref]
    ) -> int:
        """Who needs no contents: as the old index says, else those that no longer have them."""
        old = self._old.pruned
        if old is None:
            named = {ref.snapshot_id() for ref in names.values()}
            now = now_ns().to_bytes(8, "big")
            pruned = {
                id: now
                for id, record in snapshots.items()
                if id not in named and not self._is_complete(record)
            }
        else:
            pruned = {id: value for id, value in old.items() if id in snapshots}
        with self._index.env.write() as transaction:
            for id, value in pruned.items():
                transaction.put(id, value, db=self._index.db("pruned"))
        return len(pruned)

    def _is_complete(self, record: SnapshotRecord) -> bool:
        manifests = [record.manifest_id()]
        plan = record.plan_id()
        if plan is not None and record.is_virtual:
            data = self._record(Kind.PLAN, plan)
            if data is None:
                return False
            inputs = decode(Plan, data, plan.hex())
            manifests += [inputs.base_id(), *(e.manifest_id() for e in inputs.experts)]
        return all(self._has_contents(manifest) for manifest in manifests)

    def _has_contents(self, id: ManifestId) -> bool:
        if id not in self._manifests:
            data = self._record(Kind.MANIFEST, id)
            self._manifests[id] = data is not None and all(
                self._has_tensor(part.tensor_id())
                for file in decode(Manifest, data, id.hex()).files
                for part in file.parts
            )
        return self._manifests[id]

    def _has_tensor(self, id: TensorId) -> bool:
        if id not in self._whole:
            data = self._record(Kind.TENSOR, id)
            if data is None:
                self._whole[id] = self._record(Kind.VIRTUAL, id) is not None
            else:
                blocks = [BlockId(b) for b in decode(Tensor, data, id.hex()).block_ids()]
                with self._index.env.read() as transaction:
                    found = self._index.block_rows(transaction, blocks)
                self._whole[id] = all(row is not None for row in found)
        return self._whole[id]


def _row(index: Index, transaction: Any, key: Key) -> bytes | None:
    database, name = rows.record_key(*key)
    value = transaction.get(name, db=index.db(database))
    return None if value is None else bytes(value)


def _put(index: Index, transaction: Any, key: Key, row: bytes) -> None:
    database, name = rows.record_key(*key)
    transaction.put(name, row, db=index.db(database))
