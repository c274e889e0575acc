"""Sources of good copies: packs of this store or another, of remotes, and checkpoints on disk.

A damaged source has fewer copies.  One that this machine cannot read now, or a remote that is away,
ends the repair: else rows would be dropped that its copies heal.

A source is asked for what is wanted, and returns copies whose bytes it has just hashed to the
requested id. Nothing else of it is trusted: of another store, only the footers and payloads of its
packs are read, never its index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from mstore import fs
from mstore.blocks import codecs
from mstore.blocks.codecs import Codec
from mstore.blocks.elsewhere import RemoteBlocks
from mstore.blocks.location import Key, Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import NO_BASE, Kind, PackEntry
from mstore.blocks.reader import BlockReader, located
from mstore.checkpoint.directory import Checkpoint, SourceFile, scan
from mstore.checkpoint.exclusion import Exclusion
from mstore.checkpoint.reading import open_regular, read_range
from mstore.store import layout as layouts
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.store.objects.tensor import BYTES, Tensor, partition
from mstore.terms.errors import BadCheckpoint, Corrupt
from mstore.terms.ids import BlockId, Buffer, PackId
from mstore.upkeep.check.findings import typed_id

Tick = Callable[[int], None]
"""Called with the number of bytes just read."""


class StoredForm(msgspec.Struct, frozen=True):
    """How a block is stored: element width, codec (None if unknown), base of a delta."""

    width: int
    codec: Codec | None = None
    base: BlockId | None = None


AS_RECORD = StoredForm(1)


class Copy(msgspec.Struct, frozen=True):
    """The checked plain bytes of a wanted block or record, and how to store them.

    file, offset: where they lie in their source file, so that neighbours stay neighbours.
    """

    key: Key
    data: Buffer
    form: StoredForm
    file: str
    offset: int


class Copies(Protocol):
    """Something that may have copies."""

    def copies(self, wanted: set[Key], tick: Tick) -> Iterator[Copy]:
        """Yield at most one copy of each wanted key that is here.

        The data is valid until the next copy is requested.
        """


class RemoteCopies:
    """Blocks that remotes have whose packs this store knows."""

    def __init__(self, elsewhere: RemoteBlocks, block_size: int) -> None:
        self._elsewhere = elsewhere
        self._reader = BlockReader(elsewhere, block_size)

    def copies(self, wanted: set[Key], tick: Tick) -> Iterator[Copy]:
        """See `Copies`. Raises RemoteAway."""
        blocks = sorted(id for kind, id in wanted if kind == Kind.BLOCK)
        for id, at in zip(blocks, self._elsewhere.locate(blocks), strict=True):
            if at is None:
                continue
            with suppress(Corrupt):
                base = None if at.base == NO_BASE else BlockId(at.base)
                plain = None if base is None else self._base(base)
                data = self._reader.block(BlockId(id), at, plain)
                tick(at.stored_length)
                form = StoredForm(at.width, Codec(at.codec), base)
                yield Copy((Kind.BLOCK, id), data, form, at.pack.hex(), at.offset)

    def _base(self, block: BlockId) -> Buffer | None:
        [at] = self._elsewhere.locate([block], alone=True)
        return None if at is None else self._reader.block(block, at)


class PackCopies:
    """The sealed packs of one store.  opened: opens them."""

    def __init__(self, opened: Callable[[], Packs], block_size: int) -> None:
        self._opened = opened
        self._block_size = block_size

    def copies(self, wanted: set[Key], tick: Tick) -> Iterator[Copy]:
        """See `Copies`. Decodes a delta with a base from the same packs."""
        with closing(self._opened()) as packs:
            candidates = self._candidates(packs, wanted)
            deltas = {
                (Kind.BLOCK, entry.base)
                for found in candidates.values()
                for _, entry in found
                if entry.base != NO_BASE
            }
            bases = self._candidates(packs, deltas) if deltas else {}
            reader = BlockReader(packs, self._block_size)
            # In disk order.
            for key, found in sorted(candidates.items(), key=lambda item: _place(item[1][0])):
                for pack, entry in found:
                    # If this copy is bad, another one may be good.
                    with suppress(Corrupt):
                        data = self._checked(reader, key, located(pack, entry), bases)
                        tick(entry.stored_length)
                        base = BlockId(entry.base) if entry.base != NO_BASE else None
                        form = StoredForm(entry.width, Codec(entry.codec), base)
                        yield Copy(key, data, form, pack.hex(), entry.offset)
                        break

    def _candidates(
        self, packs: Packs, wanted: set[Key]
    ) -> dict[Key, list[tuple[PackId, PackEntry]]]:
        found: dict[Key, list[tuple[PackId, PackEntry]]] = defaultdict(list)
        for pack in packs.listed():
            try:
                entries = packs.table(pack).entries
            except Corrupt:
                continue
            for entry in entries:
                with suppress(ValueError):
                    key = (Kind(entry.kind), entry.id)
                    if key in wanted:
                        found[key].append((pack, entry))
        return found

    def _checked(
        self,
        reader: BlockReader,
        key: Key,
        at: Location,
        bases: dict[Key, list[tuple[PackId, PackEntry]]],
    ) -> Buffer:
        kind, id = key
        if kind != Kind.BLOCK:
            return reader.record(typed_id(kind, id), at)
        base = None if at.base == NO_BASE else self._base(reader, BlockId(at.base), bases)
        return reader.block(BlockId(id), at, base)

    def _base(
        self, reader: BlockReader, block: BlockId, bases: dict[Key, list[tuple[PackId, PackEntry]]]
    ) -> Buffer | None:
        for pack, entry in bases.get((Kind.BLOCK, bytes(block)), ()):
            if entry.base == NO_BASE:
                with suppress(Corrupt):
                    return reader.block(block, located(pack, entry))
        return None


def _place(found: tuple[PackId, PackEntry]) -> tuple[PackId, int]:
    return found[0], found[1].offset


class CheckpointCopies:
    """A checkpoint cut as `add` cuts it: its blocks, tensor records and manifest."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._checkpoint: Checkpoint = scan(path)
        self._added: set[str] = set()
        # A checkpoint that `add` would refuse still has usable blocks.
        with suppress(BadCheckpoint):
            checkpoint = scan(path, exclusion=Exclusion.chosen())
            self._added = {file.path for file in checkpoint.files}
        self._block_size = block_size

    def copies(self, wanted: set[Key], tick: Tick) -> Iterator[Copy]:
        """See `Copies`. Reads every byte of the checkpoint."""
        missing = set(wanted)
        files = []
        for source in self._checkpoint.files:
            parts: list[Part] = []
            for copy in self._file(source, missing, parts, tick):
                missing.discard(copy.key)
                yield copy
            form = OPAQUE if source.header is None else SAFETENSORS
            files.append(File(source.path, form, source.size, tuple(parts)))
        files.sort(key=lambda file: file.path)
        # It may have been added with all its files, or only with those that `add` takes by default.
        for taken in (files, [file for file in files if file.path in self._added]):
            manifest = Manifest(tuple(taken))
            key = (Kind.MANIFEST, bytes(manifest.id()))
            if key in missing:
                missing.discard(key)
                yield Copy(key, manifest.encode(), AS_RECORD, "", 0)

    def _file(
        self, source: SourceFile, missing: set[Key], parts: list[Part], tick: Tick
    ) -> Iterator[Copy]:
        with open_regular(source.absolute, source.stamp) as (descriptor, _):
            for name, dtype, shape, begin, nbytes in _cut(source):
                form = StoredForm(codecs.elements_of(dtype).width)
                ids = []
                for start, length in partition(nbytes, self._block_size):
                    data = read_range(descriptor, begin + start, length)
                    if len(data) < length:
                        raise BadCheckpoint(
                            "the file changed while it was being read", where=str(source.absolute)
                        )
                    tick(length)
                    block = BlockId.of(data)
                    ids.append(block)
                    key = (Kind.BLOCK, bytes(block))
                    if key in missing:
                        yield Copy(key, data, form, source.path, begin + start)
                tensor = Tensor(dtype, shape, nbytes, b"".join(ids))
                id = tensor.id()
                parts.append(Part(name, id, nbytes))
                key = (Kind.TENSOR, bytes(id))
                if key in missing:
                    yield Copy(key, tensor.encode(), AS_RECORD, "", 0)


def _cut(source: SourceFile) -> list[tuple[str | None, str, tuple[int, ...], int, int]]:
    """Return name, dtype, shape, begin and length of a file's parts, in data order."""
    start = source.data_start
    tensors = ((s.name, s.dtype, s.shape, start + s.begin, s.nbytes) for s in source.slots)
    return [(None, BYTES, (start,), 0, start), *tensors]


def copies_at(path: Path, block_size: int) -> Copies:
    """Open what lies at `path`: a store (its packs), or a checkpoint."""
    with fs.translated(path):
        is_store = (path / "format").is_file() and (path / "packs").is_dir()
    if is_store:
        directory = layouts.locate(path).packs
        return PackCopies(lambda: PackFiles(directory), block_size)
    return CheckpointCopies(path, block_size)
