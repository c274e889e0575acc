"""Packs that are sent: their tables are known before a byte is read, so that they need no disk.

Owns what goes into which pack, and where; and what lies where in those that were sent. The bytes
are those of `mstore.blocks.packs`: blocks in file order, raw ones as they lie to pages here, then
what is small. Every payload is checked against its id while it is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Key, Location
from mstore.blocks.pack_tables import FIELDS as TABLE_FIELDS
from mstore.blocks.pack_tables import read_tables
from mstore.blocks.packs import (
    ENTRY,
    HEADER_BYTES,
    NO_BASE,
    NONCE_BYTES,
    PAGE,
    Kind,
    PackEntry,
    SentPack,
    footer_bytes,
    header,
    table_of,
)
from mstore.blocks.segment import FIELDS, Rows, rows_of
from mstore.blocks.segments import Found
from mstore.store.ahead import in_groups, in_order
from mstore.store.payloads import Payloads
from mstore.terms.ids import ID_BYTES, PackId
from mstore.upkeep.check.findings import typed_id

PACK_BYTES: Final = 128 << 20
_GROUP_BYTES: Final = 4 << 20
_TABLE_BYTES: Final = 16 << 20
"""Bytes of tables whose rows are looked at together."""
_THREADS: Final = min(4, os.cpu_count() or 1)


class Outgoing(msgspec.Struct, frozen=True):
    """A pack that can be made: its name, size, header and table, and where its payloads lie here.

    sources: in the order of their offsets in the pack.
    """

    pack: PackId
    size: int
    table: bytes
    entries: tuple[PackEntry, ...]
    end: int
    sources: tuple[tuple[Key, Location, int], ...]


class SentPacks:
    """Packs that lie at a remote and that no root names yet. For one thread."""

    def __init__(self) -> None:
        self.packs: dict[PackId, SentPack] = {}
        self._rows: list[tuple[list[PackId], Rows]] | None = None

    def add(self, *packs: SentPack) -> None:
        """Add packs. Raises Corrupt for one that is not what its table says."""
        for some in _together(packs):
            read_tables([(one.id, one.table) for one in some], "")
        self.packs.update((one.id, one) for one in packs)
        self._rows = None

    def drop(self, packs: Iterable[PackId]) -> None:
        """Forget packs."""
        for pack in packs:
            del self.packs[pack]
        self._rows = None

    def found(self, kind: Kind, ids: Sequence[bytes]) -> Found:
        """Return where these lie. A form that needs no base goes before one that does."""
        result = Found.nothing(len(ids))
        if self._rows is None:
            full = (one for one in self.packs.values() if len(one.table) > HEADER_BYTES)
            self._rows = list(map(_rows_by_key, _together(full)))
        wanted = np.array([id + bytes([kind]) for id in ids], f"S{ID_BYTES + 1}")
        for packs, rows in self._rows if ids else ():
            keys = rows.view(FIELDS)["key"]
            numbers = np.minimum(np.searchsorted(keys, wanted), len(rows) - 1)
            better = (keys[numbers] == wanted) & ~result.is_alone
            result.put(np.flatnonzero(better), packs, rows[numbers[better]])
        return result


def _together(packs: Iterable[SentPack]) -> Iterator[list[SentPack]]:
    """Yield packs in groups: all their rows at once, and in order, would be there several times."""
    return in_groups(packs, lambda one: len(one.table), _TABLE_BYTES)


def _rows_by_key(some: Sequence[SentPack]) -> tuple[list[PackId], Rows]:
    """Return all rows of some packs by kind and id, those without a base first."""
    tables = {one.id: np.frombuffer(one.table, TABLE_FIELDS, offset=HEADER_BYTES) for one in some}
    packs, rows = rows_of(tables)
    fields = rows.view(FIELDS)
    if (fields["key"][1:] == fields["key"][:-1]).any():
        rows = rows[np.lexsort((fields["base"] != np.void(NO_BASE), fields["key"]))]
    return packs, rows


class _Filling:
    """One pack being laid out."""

    def __init__(self) -> None:
        self._end = PAGE
        self._run: tuple[PackId, int] | None = None
        self._sources: list[tuple[Key, Location, int]] = []
        self._small: list[tuple[Key, Location]] = []
        self._small_bytes = 0

    @property
    def size(self) -> int:
        count = len(self._sources) + len(self._small)
        return self._end + self._small_bytes + count * ENTRY.size

    @property
    def is_empty(self) -> bool:
        return not (self._sources or self._small)

    def add(self, key: Key, at: Location) -> None:
        if key[0] != Kind.BLOCK or at.codec == Codec.CONSTANT:
            self._small.append((key, at))
            self._small_bytes += at.stored_length
            return
        if at.codec != Codec.RAW:
            self._run = None
        else:
            if self._run != (at.pack, at.offset):
                self._end += (at.offset - self._end) % PAGE
            self._run = at.pack, at.offset + at.stored_length
        self._place(key, at)

    def _place(self, key: Key, at: Location) -> None:
        self._sources.append((key, at, self._end))
        self._end += at.stored_length

    def done(self) -> Outgoing:
        for key, at in self._small:
            self._place(key, at)
        entries, table = table_of(
            PackEntry(
                id, kind, at.codec, at.width, offset, at.stored_length, at.raw_length, at.base
            )
            for (kind, id), at, offset in self._sources
        )
        head = header(os.urandom(NONCE_BYTES))
        data = head + table
        size = self._end + len(footer_bytes(table, self._end))
        return Outgoing(PackId.of(data), size, data, entries, self._end, tuple(self._sources))


def laid_out(payloads: Iterable[tuple[Key, Location]]) -> Iterator[Outgoing]:
    """Yield packs of about `PACK_BYTES` with these payloads, in their order."""
    filling = _Filling()
    for key, at in payloads:
        filling.add(key, at)
        if filling.size >= PACK_BYTES:
            yield filling.done()
            filling = _Filling()
    if not filling.is_empty:
        yield filling.done()


def pieces(
    store: Payloads, one: Outgoing, tick: Callable[[int], None]
) -> Iterator[bytes | bytearray]:
    """Yield the bytes of a pack, in pieces of some MiB. Raises Corrupt, StorageFailed."""
    head, table = one.table[:HEADER_BYTES], one.table
    yield head.ljust(PAGE, b"\0")
    at = PAGE

    def groups() -> Iterator[tuple[int, Sequence[tuple[Key, Location, int]]]]:
        nonlocal at
        some: list[tuple[Key, Location, int]] = []
        start = at
        for source in one.sources:
            end = source[2] + source[1].stored_length
            if some and end - start > _GROUP_BYTES:
                yield start, some
                start, some = at, []
            some.append(source)
            at = end
        if some:
            yield start, some

    def load(group: tuple[int, Sequence[tuple[Key, Location, int]]]) -> bytearray:
        start, some = group
        data = bytearray()
        for (kind, id), location, offset in some:
            data += bytes(offset - start - len(data))
            data += store.stored(typed_id(kind, id), location)
        return data

    with ThreadPoolExecutor(_THREADS, "send") as pool:
        for _, data in in_order(lambda group: pool.submit(load, group), groups(), ahead=_THREADS):
            yield data
            tick(len(data))
    yield footer_bytes(table[len(head) :], one.end)
