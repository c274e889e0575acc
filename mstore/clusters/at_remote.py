"""Workplaces at a remote: workers read its packs, and put those that they make there.

    inputs      where the remote's tables say that blocks lie, in the form that they have there
    a pack      sealed in scratch, put as packs/ab/<PackId>.pack, described in the receipt
    afterwards  the packs come here and the merge is committed here (`FetchedDelivery`), or they
                stay and the remote's ref moves, in one swap of its root (`PushedDelivery`)

Until then no root names these packs: whatever happens, the remote's gc removes what is left. Keys
come from the worker's own environment; none is ever pickled.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.blocks.codecs import Elements, encode
from mstore.blocks.location import Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import PackReads
from mstore.blocks.pack_tables import ids_of, read_tables
from mstore.blocks.packs import (
    NO_BASE,
    Kind,
    PackEntry,
    SealedPack,
    SentPack,
    read_footer,
)
from mstore.blocks.reader import BlockReader, decoded, located
from mstore.clusters.probe import scratch_bytes
from mstore.merge.running.delivery import Delivery
from mstore.merge.running.leftovers import pack_away, sound_pack, write_receipt
from mstore.merge.running.slices import Result
from mstore.merge.running.workplace import Bench, BlockPlaces, Delivered, Workplace
from mstore.models.made import Publication
from mstore.remotes import address
from mstore.remotes.arrival import ComingPack, is_pack
from mstore.remotes.layout import pack_name
from mstore.remotes.lazy import RemoteParts
from mstore.remotes.needs import LocalRecords, R, gather, whole
from mstore.remotes.objects import PIECE_BYTES, PROBE, Absent, Objects
from mstore.remotes.places import RemotePlaces
from mstore.remotes.push import Push, Staged
from mstore.remotes.state import Remote
from mstore.store.catalog import Catalog
from mstore.store.config import RemoteConfig
from mstore.store.disk_cache import DiskCache
from mstore.store.leases import PACK
from mstore.store.objects.canonical import Record
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.refs import BRANCH, TAG
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt, MstoreError, NotFound
from mstore.terms.ids import BlockId, Buffer, PackId, SnapshotId, TensorId, split_ids
from mstore.terms.phrases import Text, call
from mstore.terms.report import ProgressCallback

_JOBS: Final = 4
"""Parts of a pack that a worker sends, and the coordinator brings, at once."""
TOKEN: Final = "MSTORE_TOKEN"  # noqa: S105 -- the name of a variable


# -- the worker's side -------------------------------------------------------------------------


@dataclass(frozen=True)
class AtRemote(Workplace):
    """A remote, by its settings."""

    config: RemoteConfig

    @contextmanager
    def entered(self) -> Iterator[Bench]:
        with closing(self._objects()) as objects, fs.scratch() as scratch:
            shared = address.shared_path(self.config.url)
            if shared is not None:
                with closing(PackFiles(shared / "packs")) as files:
                    yield _RemoteBench(objects, files, scratch)
                return
            with closing(_PacksThere(Remote(self.config.name, objects, scratch))) as packs:
                yield _RemoteBench(objects, packs, scratch)

    def _objects(self) -> Objects:
        # The coordinator has asked whether this user trusts the server.
        trusted = {self.config.endpoint, address.web_server(self.config.url)}
        return address.opened(self.config, trusted, os.environ.get(TOKEN, ""))

    def check(self) -> None:
        with closing(self._objects()) as objects:
            objects.read_root()
            name = f"{PROBE}{secrets.token_hex(16)}"
            objects.put_bytes(name, b"")
            objects.remove(name)

    def hint(self) -> Text:
        if address.shared_path(self.config.url) is not None:
            return "workers need this directory under the same path, and may write it"
        return "workers take keys from their own environment: set there what this process has"

    def free_bytes(self) -> int:
        return scratch_bytes()


class _PacksThere(PackReads):
    """The packs of a remote that is no directory."""

    def __init__(self, remote: Remote) -> None:
        self._name = remote.name
        # A slice reads nothing twice, so nothing is kept.
        cache = DiskCache(remote.directory, lambda: 0)
        self._parts = RemoteParts(lambda name: nullcontext(remote), cache)

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        return self._parts.read(self._name, pack, offset, length)

    def read_scattered(
        self, pack: PackId, offset: int, targets: Sequence[memoryview], version: int | None = None
    ) -> None:
        data = memoryview(self.read(pack, offset, sum(map(len, targets)))).cast("B")
        start = 0
        for target in targets:
            target[:] = data[start : start + len(target)]
            start += len(target)

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        self._parts.will_need(self._name, pack, offset, length)

    def close(self) -> None:
        self._parts.close()


class _RemoteBench(Bench):
    is_scratch = True

    def __init__(self, objects: Objects, packs: PackReads, directory: Path) -> None:
        self._objects = objects
        self.packs = packs
        self.directory = directory

    def deliver(self, pack: SealedPack) -> Delivered:
        put_pack(self._objects, pack)
        sent = SentPack.of(pack)
        fs.unlink(pack.path)
        return sent


def put_pack(objects: Objects, pack: SealedPack) -> None:
    """Put a sealed pack at a remote. Raises StorageFailed, Unavailable."""

    def pieces() -> Iterator[bytes]:
        with fs.reading(pack.path), pack.path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    objects.put(pack_name(pack.id), pack.size, pieces(), jobs=_JOBS)


# -- the coordinator's side --------------------------------------------------------------------


class _PlacesThere(BlockPlaces):
    """Where a remote has the blocks that a plan reads."""

    def __init__(self, catalog: Catalog, remote: Remote, places: RemotePlaces) -> None:
        self._catalog = catalog
        self._remote = remote
        self._places = places

    def locate_with_bases(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        found = self._found(blocks)
        bases = [BlockId(base) for base in {at.base for at in found.values()} - {NO_BASE}]
        alone = zip(bases, self._places.alone(bases), strict=True)
        return found | {base: at for base, at in alone if at is not None}

    def stored_lengths(self, blocks: Buffer) -> npt.NDArray[np.int64]:
        ids = split_ids(bytes(blocks))
        lengths = self._places.found(ids).stored
        if (lengths < 0).any():
            raise self._lacking(list(compress(ids, lengths < 0)))
        return lengths

    def _found(self, blocks: Sequence[BlockId]) -> dict[BlockId, Location]:
        found = dict(zip(blocks, self._places.locate(Kind.BLOCK, blocks), strict=True))
        lacking = [block for block, at in found.items() if at is None]
        if lacking:
            raise self._lacking(lacking)
        return {block: at for block, at in found.items() if at is not None}

    def _lacking(self, blocks: Sequence[bytes]) -> NotFound:
        """Return what to raise; it names the models that have such blocks."""
        lost = set(blocks)
        source = LocalRecords(self._catalog)
        models = []
        for name, ref in sorted(self._catalog.refs().items()):
            snapshot = ref.snapshot_id()
            if ref.kind in (BRANCH, TAG):
                needs = gather(source, [snapshot], whole(source, [snapshot], ancestors=False))
                if not lost.isdisjoint(needs.blocks):
                    models.append(name)
        return NotFound(
            f"{len(lost)} blocks of {', '.join(models) or 'the inputs'} are not there, and "
            "workers read there",
            where=self._remote.name,
            hint=call("push", self._remote.name, refs=tuple(models) or ("BASE", "EXPERT...")),
        )


class RemoteDelivery(Delivery):
    """Workers read and put packs at a remote. What becomes of these packs, the two below say.

    Raises Absent, Unavailable, Incompatible if the remote cannot be written.
    """

    def __init__(self, catalog: Catalog, remote: Remote, config: RemoteConfig) -> None:
        self._catalog = catalog
        self._remote = remote
        self._config = config
        remote.objects.require_writable()
        remote.make_directory()
        self._state = remote.state()
        self._uuid = str(self._state.root.uuid)
        self.places = _PlacesThere(catalog, remote, RemotePlaces(remote, self._state))

    def workplace(self, directory: Path) -> Workplace:
        return AtRemote(self._config)

    def keep(self, directory: Path, pack: Delivered, results: Sequence[Result]) -> None:
        if isinstance(pack, SentPack):
            path = directory / f"{pack.id.hex()[:16]}{PACK}"
            write_receipt(path, results, (self._uuid, pack))

    def _here(self, receipt: Path) -> SealedPack | None:
        """Return the pack that lies beside a receipt, if that is sound."""
        return sound_pack(receipt.with_suffix(PACK), self._catalog)

    def _there(self, receipt: Path) -> SentPack | None:
        """Return the pack at this remote that a receipt is of, if that is there."""
        pack = pack_away(receipt, self._uuid)
        if pack is None:
            return None
        row = self._state.packs().get(pack.id)
        with suppress(Absent):
            is_kept = row is None or row.is_there
            if is_kept and self._remote.objects.size(pack_name(pack.id)) == pack.size:
                return pack
        return None


class FetchedDelivery(RemoteDelivery):
    """The packs come here, are proved, and the merge is committed here."""

    def __init__(self, catalog: Catalog, remote: Remote, config: RemoteConfig) -> None:
        super().__init__(catalog, remote, config)
        self._fetched: list[PackId] = []

    def found(self, receipt: Path) -> Delivered | None:
        here, there = self._here(receipt), self._there(receipt)
        if here is None or there is None:
            return here or there
        self._fetched.append(there.id)
        return here

    def adopt(self, sink: Transaction, pack: Delivered) -> Sequence[BlockId]:
        if isinstance(pack, SealedPack):
            return super().adopt(sink, pack)
        path = sink.directory / f"{pack.id.hex()[:16]}{PACK}"
        self._bring(pack, path)
        self._fetched.append(pack.id)
        sealed = SealedPack(pack.id, path, pack.size, read_footer(path).entries)
        self._prove(sink, sealed)
        return [BlockId(entry.id) for entry in sealed.entries]

    def _bring(self, pack: SentPack, path: Path) -> None:
        coming = ComingPack(pack.id, path)
        try:
            for start in range(0, pack.size, _JOBS * PIECE_BYTES):
                end = min(start + _JOBS * PIECE_BYTES, pack.size)
                spans = [(at, min(PIECE_BYTES, end - at)) for at in range(start, end, PIECE_BYTES)]
                parts = self._remote.objects.read_each(pack_name(pack.id), spans)
                for (at, _), data in zip(spans, parts, strict=True):
                    coming.write(at, memoryview(data))
        except BaseException:
            coming.file.abandon()
            raise
        coming.land()
        if not is_pack(path, pack.id, pack.size):
            raise Corrupt("the pack does not match its name", where=self._where(pack.id))

    def _prove(self, sink: Transaction, pack: SealedPack) -> None:
        """Read every block of a pack and hand it to the transaction; raises Corrupt.

        A difference to a block that is not here, or is a difference itself here, is stored anew.
        """
        kept: list[PackEntry] = []
        anew: list[tuple[BlockId, PackEntry, Buffer]] = []
        bases = [BlockId(base) for base in {entry.base for entry in pack.entries} - {NO_BASE}]
        stored = set(compress(bases, self._catalog.has_blocks(bases)))
        alone = self._catalog.stored_alone(bases)
        with closing(PackFiles(sink.directory, staged={pack.id: pack.path})) as files:
            reader = BlockReader(files, self._catalog.block_size)
            for entry in pack.entries:
                id, at = BlockId(entry.id), located(pack.id, entry)
                base = None
                if entry.base != NO_BASE:
                    under = BlockId(entry.base)
                    base = self._catalog.read_block(under) if under in stored else self._base(under)
                try:
                    data = reader.block(id, at, base)
                except Corrupt as error:
                    raise Corrupt(
                        f"a worker's pack is damaged: {error.what}",
                        where=self._where(pack.id),
                        hint="run the same merge again",
                    ) from error
                if entry.base == NO_BASE or entry.base in alone:
                    kept.append(entry)
                else:
                    anew.append((id, entry, data))
        if kept:
            sink.adopt(msgspec.structs.replace(pack, entries=tuple(kept)))
        for id, entry, data in anew:
            how = Elements(entry.width, False)
            sink.put_block(id, encode(data, how, self._catalog.config.codec), "", 0)

    def _base(self, base: BlockId) -> Buffer:
        """Return what a difference is made to, from the remote."""
        at = self.places.locate_with_bases([base])[base]
        [payload] = self._remote.objects.read_each(
            pack_name(at.pack), [(at.offset, at.stored_length)]
        )
        return decoded(base, at, payload)

    def _where(self, pack: PackId) -> str:
        return f"{self._remote.where}/{pack_name(pack)}"

    def publish(self, publication: Publication) -> int:
        publication.commit()
        # Nobody else knows these names.
        for pack in self._fetched:
            with suppress(MstoreError):
                self._remote.objects.remove(pack_name(pack))
        return publication.transaction.bytes_written


class PushedDelivery(RemoteDelivery):
    """The packs stay at the remote, and its ref moves: nothing is published here."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        config: RemoteConfig,
        progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(catalog, remote, config)
        self._progress = progress
        self._sent: list[SentPack] = []

    def found(self, receipt: Path) -> Delivered | None:
        return self._there(receipt) or self._here(receipt)

    def adopt(self, sink: Transaction, pack: Delivered) -> Sequence[BlockId]:
        if isinstance(pack, SealedPack):
            return super().adopt(sink, pack)
        table, _ = read_tables([(pack.id, pack.table)], "")
        blocks = list(map(BlockId, ids_of(table)))
        sink.count_in(blocks)
        self._sent.append(pack)
        return blocks

    def publish(self, publication: Publication) -> int:
        publication.put_snapshots()
        transaction = publication.transaction
        own = transaction.sealed()
        for one in own:
            put_pack(self._remote.objects, one)
        packs = [*self._sent, *map(SentPack.of, own)]
        source = _StagedRecords(self._catalog, transaction)
        report = Push(
            self._catalog,
            self._remote,
            (),
            staged=Staged(publication.refs, source, packs),
            jobs=_JOBS,
            progress=self._progress,
        ).run(dry_run=False)
        return sum(one.size for one in packs) + report.bytes_sent


class _StagedRecords(LocalRecords):
    """The records of this store, and those of a transaction that is not committed here."""

    def __init__(self, catalog: Catalog, transaction: Transaction) -> None:
        super().__init__(catalog)
        self._new: dict[Any, Record] = dict(transaction.records)

    def load(self, kind: type[R], ids: Sequence[bytes]) -> list[R]:
        found: list[Any] = []
        for id in ids:
            own = self._new.get((kind.kind, id))
            found.append(super().load(kind, [id])[0] if own is None else own)
        return found

    def contents(self, ids: Sequence[TensorId]) -> list[Tensor | VirtualTensor]:
        own: list[Any] = [self._new.get((Kind.TENSOR, bytes(id))) for id in ids]
        rest = [id for id, one in zip(ids, own, strict=True) if one is None]
        stored = iter(super().contents(rest))
        return [next(stored) if one is None else one for one in own]

    def is_known(self, snapshot: SnapshotId) -> bool:
        return (Kind.SNAPSHOT, bytes(snapshot)) in self._new or super().is_known(snapshot)
