"""Finished chunks: an earlier merge or an interrupted run made their output.

Owns the lookup of both sources, and the rows that a run adds to the memo table.  A hit is a row
whose output blocks are all still stored; a chunk whose remembered blocks were collected is computed
again, and must come out the same.  Hits change what a merge reads and writes, but never what it
selects, or a plan would not be a function of its inputs.

Leftovers are the finished work of an interrupted merge.  Beside each sealed pack in tmp/ lies a
receipt, NAME.receipt: the chunks that the pack was written for, by memo key, and their rows.

    0    16   "mstore receipt 1"
    16   32   BLAKE3 of the rest
    48   ...  MessagePack [[key, value, expert bytes], ...]

Nothing here is trusted: before a pack is used, its receipt must match its hash, and every block its
id; a delta is decoded with its base as currently stored.  A pack is checked only if its receipt has
a chunk that the merge needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.packs import NO_BASE, PAGE, Kind, SealedPack, open_pack, read_footer
from mstore.blocks.reader import decoded, located, verify
from mstore.merge.arithmetic.kernels import UNLIMITED
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.slices import Result
from mstore.merge.running.task import Members, Tasks, TensorTask, item_size
from mstore.store.catalog import Catalog
from mstore.store.leases import PACK, RECEIPT
from mstore.store.memo import Memo
from mstore.store.objects.tensor import block_count
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId
from mstore.terms.phrases import call

TOGETHER: Final = 64
"""Number of tensors whose chunks are looked up together."""


class Shape:
    """What a valid row of one tensor's chunks looks like."""

    def __init__(self, tensor: TensorTask, members: Members, block_size: int) -> None:
        self.per_chunk = tensor.chunk_elements * item_size(tensor.out_dtype) // block_size
        self.blocks = block_count(tensor.out_bytes, block_size)
        self._slots = len(tensor.quotas)
        # Per chunk, the thresholds of participating experts whose ties are limited.
        self._limited: list[list[int]] | None = None
        if tensor.limited:
            experts = len(members.experts)
            ends = [slot for slot, quota in enumerate(tensor.quotas.tolist()) if quota != UNLIMITED]
            columns = members.present.T.tolist()
            self._limited = [[s for s in ends if column[s % experts]] for column in columns]

    def fits(self, number: int, row: Remembered) -> bool:
        """Return whether a row can belong to chunk `number`."""
        blocks = min(self.per_chunk, self.blocks - number * self.per_chunk)
        taken = 0 if self._limited is None else len(self._limited[number])
        return len(row.blocks) == blocks and len(row.taken) == taken

    def ties(self, number: int, row: Remembered) -> tuple[int, ...]:
        """Return a chunk's ties for every threshold; empty if no chunk passes on ties."""
        if self._limited is None:
            return ()
        return row.per_slot(self._limited[number], self._slots)


class Hits(msgspec.Struct, frozen=True, gc=False):
    """Rows of one tensor's chunks, by number: whose blocks are stored, and whose are gone."""

    stored: dict[int, Remembered]
    gone: dict[int, Remembered]


def find_hits(
    memo: Memo,
    has_blocks: Callable[[Sequence[BlockId]], Sequence[bool]],
    wanted: Sequence[tuple[Shape, Mapping[int, bytes]]],
) -> list[Hits]:
    """Look up chunks of several tensors together: for each its shape, and keys by chunk number."""
    rows: dict[bytes, Remembered] = {}
    asked = [key for _, keys in wanted for key in keys.values()]
    for key, value in zip(asked, memo.outputs(asked), strict=True):
        row = None if value is None else Remembered.decode(value)
        if row is not None:
            rows[key] = row
    found = [
        {
            number: row
            for number, key in keys.items()
            if (row := rows.get(key)) is not None and shape.fits(number, row)
        }
        for shape, keys in wanted
    ]
    blocks = [block for own in found for row in own.values() for block in row.blocks]
    there = has_blocks(blocks) if blocks else []
    stored = {block for block, is_there in zip(blocks, there, strict=True) if is_there}
    hits = [Hits({}, {}) for _ in found]
    for own, hit in zip(found, hits, strict=True):
        for number, row in own.items():
            (hit.stored if stored.issuperset(row.blocks) else hit.gone)[number] = row
    return hits


# -- leftovers ---------------------------------------------------------------------------------

_MAGIC: Final = b"mstore receipt 1"
_HASH_END: Final = len(_MAGIC) + 32
_MAX_RECEIPT: Final = 1 << 28
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, int]]).decode


def write_receipt(pack: SealedPack, results: Sequence[Result]) -> None:
    """Write the receipt of a sealed pack. Raises StorageFailed.

    Not synced: a receipt that a power loss tears does not match its hash and is ignored.
    """
    rows = msgspec.msgpack.encode([(r.key, r.value, r.expert_bytes) for r in results])
    file = fs.NewFile(pack.path.with_suffix(RECEIPT))
    try:
        file.append(_MAGIC + blake3(rows).digest() + rows)
        file.close()
    except BaseException:
        file.abandon()
        raise


class FinishedChunk(msgspec.Struct, frozen=True):
    """A chunk of a receipt: its row, how many expert bytes were read for it, and its pack."""

    row: Remembered
    expert_bytes: int
    pack: Path


class Leftovers:
    """The leftovers in one directory, for this store. Belongs to one thread."""

    def __init__(self, directory: Path, catalog: Catalog) -> None:
        self._catalog = catalog
        self._found: dict[bytes, FinishedChunk] = {}
        self._packs: dict[Path, SealedPack | None] = {}
        with fs.translated(directory):
            names = [name for name in fs.listed(directory) if name.endswith(RECEIPT)]
        for path in map(directory.joinpath, names):
            for key, value, expert_bytes in _rows(path):
                row = Remembered.decode(value)
                if row is not None:
                    self._found[key] = FinishedChunk(row, expert_bytes, path.with_suffix(PACK))

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self, key: bytes) -> tuple[FinishedChunk, SealedPack] | None:
        """Return the chunk of a memo key with its pack, if that is sound: it is read whole once."""
        found = self._found.get(key)
        if found is None:
            return None
        if found.pack not in self._packs:
            self._packs[found.pack] = sound_pack(found.pack, self._catalog)
        pack = self._packs[found.pack]
        return None if pack is None else (found, pack)


def _rows(path: Path) -> list[tuple[bytes, bytes, int]]:
    try:
        with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
            data = file.read(_MAX_RECEIPT + 1)
        if len(data) > _MAX_RECEIPT or not data.startswith(_MAGIC):
            return []
        if blake3(data[_HASH_END:]).digest() != data[len(_MAGIC) : _HASH_END]:
            return []
        return _decode(data[_HASH_END:])
    except (Corrupt, msgspec.MsgspecError):
        return []


def sound_pack(path: Path, catalog: Catalog) -> SealedPack | None:
    """Return the pack if it holds only blocks, each of which matches its id, or None."""
    try:
        return _read_whole(path, catalog)
    except (Corrupt, Incompatible):
        return None


def _read_whole(path: Path, catalog: Catalog) -> SealedPack | None:
    footer = read_footer(path)
    id, entries = footer.id, footer.entries
    with fs.reading(path), os.fdopen(open_pack(path), "rb") as file:
        for entry in sorted(entries, key=lambda entry: entry.offset):
            file.seek(entry.offset)
            longest = max(entry.raw_length, entry.stored_length)
            if entry.kind != Kind.BLOCK or longest > catalog.block_size:
                return None
            base = None if entry.base == NO_BASE else catalog.read_block(BlockId(entry.base))
            payload = file.read(entry.stored_length)
            if len(payload) != entry.stored_length:
                return None
            block, at = BlockId(entry.id), located(id, entry)
            verify(block, at, decoded(block, at, payload, base), base)
        size = file.seek(0, 2)
    return SealedPack(id, path, size, entries) if size % PAGE == 0 else None


# -- both --------------------------------------------------------------------------------------


class FinishedChunks:
    """The finished chunks of one run, by memo key.  Belongs to one thread.

    sink: None if the output is not stored: then none is finished, and no key is needed. memo: None
    to use no memo table. written: the blocks that this run has written; grows by those of adopted
    packs.

    hits: chunks found in the memo table. resumed_bytes: expert bytes that an interrupted run read
    for the chunks taken from it. rows: new rows for the memo table.
    """

    def __init__(
        self,
        catalog: Catalog,
        tasks: Tasks,
        sink: Transaction | None,
        memo: Memo | None,
        written: set[BlockId],
    ) -> None:
        self._sink = sink
        self._memo = memo
        self._written = written
        self._keys = MemoKeys(tasks)
        self._leftovers = None if sink is None else Leftovers(sink.directory, catalog)
        self._adopted: set[Path] = set()
        self._expected: dict[bytes, tuple[BlockId, ...]] = {}
        self.hits = 0
        self.resumed_bytes = 0
        self.rows: list[tuple[bytes, bytes]] = []

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks, by number; empty keys if none is needed."""
        if self._sink is None:
            return dict.fromkeys(numbers, b"")
        return self._keys.by_number(tensor, numbers)

    def find(
        self, shapes: Sequence[Shape], keys: Sequence[Mapping[int, bytes]]
    ) -> list[dict[int, Remembered]]:
        """Return the finished chunks of some tensors, by number, with one lookup for all."""
        if self._sink is None:
            return [{} for _ in shapes]
        hits = [Hits({}, {}) for _ in shapes]
        if self._memo is not None:
            wanted = list(zip(shapes, keys, strict=True))
            hits = find_hits(self._memo, self._sink.has_blocks, wanted)
        return [
            self._of_tensor(self._sink, shape, named, found)
            for shape, named, found in zip(shapes, keys, hits, strict=True)
        ]

    def _of_tensor(
        self, sink: Transaction, shape: Shape, keys: Mapping[int, bytes], hits: Hits
    ) -> dict[int, Remembered]:
        rows = dict(hits.stored)
        self.hits += len(hits.stored)
        # gc deleted their blocks: recomputing them must give the same ids.
        self._expected.update((keys[number], row.blocks) for number, row in hits.gone.items())
        if self._leftovers:
            for number in sorted(keys.keys() - rows.keys()):
                found = self._leftovers.find(keys[number])
                if found is None or not shape.fits(number, found[0].row):
                    continue
                chunk, pack = found
                if pack.path not in self._adopted:
                    self._adopted.add(pack.path)
                    self._written.update(BlockId(entry.id) for entry in pack.entries)
                    sink.adopt(pack)
                if all(sink.has_blocks(chunk.row.blocks)):
                    rows[number] = chunk.row
                    self.resumed_bytes += chunk.expert_bytes
                    self.rows.append((keys[number], chunk.row.encode()))
        return rows

    def learn(self, result: Result) -> None:
        """Add a computed chunk.  Raises Corrupt if the memo table remembers another output."""
        expected = self._expected.get(result.key)
        if expected is not None and expected != result.blocks:
            raise Corrupt(
                "the recomputed chunk differs from the memo table",
                where=f"{result.tensor}, chunk {result.number}",
                hint=call("fsck", read_data=True),
            )
        if result.key:
            self.rows.append((result.key, result.value))
