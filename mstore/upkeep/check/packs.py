"""Packs against the index: read every footer once, compare every row with its entry.

Handles one pack at a time, so that memory does not grow with the store. Counts show first whether
rows lack an entry (rows that name a pack, rows that match its footer); only packs whose counts
differ are then compared row by row.

Payloads are read, decoded and hashed pack by pack, on several threads: all of them, or a *sample*:
each block is in it with the same probability, drawn from a seed, so that the same store and seed
read the same blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location, Row, base_of, pack_number, raw_length
from mstore.blocks.packs import NO_BASE, Kind, PackEntry, PackGone
from mstore.blocks.reader import BlockReader, located
from mstore.store.ahead import in_groups, in_order
from mstore.store.catalog import Catalog
from mstore.store.objects.canonical import decode
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.terms.errors import Corrupt, Unreadable
from mstore.terms.ids import BlockId, Buffer, PackId
from mstore.upkeep.check.findings import RECORDS, Findings, typed_id


@dataclass(slots=True)
class CheckedAmounts:
    """How much was checked. sound: the ids of packs whose footers can be trusted."""

    packs: int = 0
    blocks: int = 0
    records: int = 0
    stored_bytes: int = 0
    sound: list[PackId] = field(default_factory=list)


class FooterPass:
    """One pass over all packs that the index names."""

    def __init__(self, catalog: Catalog, findings: Findings) -> None:
        self._catalog = catalog
        self._index = catalog.index
        self._findings = findings
        self._totals = CheckedAmounts()
        self._matched: Counter[int] = Counter()

    def run(self) -> CheckedAmounts:
        """Check packs and rows; report condemned packs and packs that no row names as garbage."""
        packs = self._numbered()
        self._garbage(packs)
        named = self._count_rows(set(packs))
        for number, (pack, size) in sorted(packs.items(), key=lambda item: item[1][0]):
            self._totals.packs += 1
            self._pack(number, pack, size)
        suspects = {
            number: pack
            for number, (pack, _) in packs.items()
            if pack not in self._findings.packs and named[number] != self._matched[number]
        }
        if suspects:
            self._strays(suspects)
        return self._totals

    def _numbered(self) -> dict[int, tuple[PackId, int]]:
        index = self._index
        found = {}
        with index.env.read() as transaction:
            for pack in index.named_packs(transaction):
                found[pack.number] = (pack.id, pack.size)
                if index.pack_number(transaction, pack.id) != pack.number:
                    what = "the pack has two numbers, or none"
                    self._findings.tell("index", pack.id.hex(), what)
        return found

    def _garbage(self, named: dict[int, tuple[PackId, int]]) -> None:
        packs = self._catalog.packs
        known = {pack for pack, _ in named.values()}
        unknown = [packs.where(pack) for pack in packs.listed() if pack not in known]
        root = f"{self._catalog.layout.root}/"
        self._findings.garbage += [
            where.removeprefix(root) for where in (*unknown, *packs.strays())
        ]

    def _count_rows(self, numbers: set[int]) -> Counter[int]:
        named: Counter[int] = Counter()
        for batch in self._index.location_batches():
            counted = Counter(pack_number(row) for _, _, row in batch)
            named.update(counted)
            if counted.keys() - numbers:
                self._unknown_pack(batch, numbers)
        with self._index.env.read() as transaction:
            self._totals.blocks = self._index.count(transaction, "blocks")
            self._totals.records = self._index.count(transaction, "records")
        return named

    def _unknown_pack(self, batch: list[tuple[int, bytes, Row]], numbers: set[int]) -> None:
        with self._index.env.read() as transaction:
            # Include packs that were published after the numbers were read.
            fresh = {pack_number(row) for _, _, row in batch} - numbers
            unknown = {n for n in fresh if not self._index.has_number(transaction, n)}
        for kind, id, row in batch:
            number = pack_number(row)
            if number in unknown:
                self._tell(kind, id, row, f"the index names an unknown pack {number}")

    def _tell(self, kind: int, id: bytes, row: Row, what: str) -> None:
        try:
            known = Kind(kind)
        except ValueError:
            key = f"{kind:02x}{id.hex()}"
            self._findings.tell("index", key, f"a record of an unknown kind {kind}")
            return
        self._findings.tell_row(known, id, row, what)

    def _pack(self, number: int, pack: PackId, size: int) -> None:
        entries = self._entries(pack, size)
        if entries is None:
            return
        blocks = [entry for entry in entries if entry.kind == Kind.BLOCK]
        index = self._index
        with index.env.read() as transaction:
            found = index.block_rows(transaction, [entry.id for entry in blocks])
            own = [
                (entry, row)
                for entry, row in zip(blocks, found, strict=True)
                if row is not None and pack_number(row) == number
            ]
            for entry, row in own:
                self._compare(Kind.BLOCK, entry, row, index.location(transaction, row))
            self._deltas(transaction, [(e, r) for e, r in own if e.base != NO_BASE])
            records = []
            for entry in entries[len(blocks) :]:
                at = index.row(transaction, (entry.kind, entry.id))
                if at is not None and pack_number(at) == number:
                    records.append((entry, at, index.location(transaction, at)))
        self._matched[number] += len(own) + len(records)
        self._totals.stored_bytes += sum(entry.stored_length for entry, _ in own)
        self._totals.sound.append(pack)
        for entry, row, location in records:
            self._record(entry, row, location)

    def _entries(self, pack: PackId, size: int) -> tuple[PackEntry, ...] | None:
        try:
            footer = self._catalog.packs.table(pack)
        except Corrupt as error:
            self._findings.tell_pack(pack, error.what)
            return None
        if footer.size != size:
            self._findings.tell_pack(pack, f"not {size} bytes long")
            return None
        return footer.entries

    def _compare(self, kind: Kind, entry: PackEntry, row: Row, location: Location) -> None:
        if located(location.pack, entry) != location:
            what = "index and pack footer do not agree"
            self._findings.tell_row(kind, entry.id, row, what)
            return
        # The decoder of records limits their length.
        longest = max(entry.raw_length, entry.stored_length)
        if kind == Kind.BLOCK and longest > self._catalog.block_size:
            self._findings.tell_row(kind, entry.id, row, "longer than the block size")

    def _deltas(self, transaction: IndexTransaction, deltas: list[tuple[PackEntry, Row]]) -> None:
        """Check that each delta's base is stored, as long as the block, and not a delta itself."""
        bases = self._index.base_rows(transaction, [entry.base for entry, _ in deltas])
        for (entry, row), base in zip(deltas, bases, strict=True):
            name = entry.base.hex()[:12]
            if base is None:
                what = f"its base {name} is missing"
            elif base_of(base) is not None:
                what = f"its base {name} is a delta itself"
            elif raw_length(base) != entry.raw_length:
                what = f"its base {name} has another length"
            else:
                continue
            self._findings.tell_row(Kind.BLOCK, entry.id, row, what)

    def _record(self, entry: PackEntry, row: Row, location: Location) -> None:
        try:
            kind = Kind(entry.kind)
        except ValueError:
            self._findings.tell("index", entry.id.hex(), f"a record of kind {entry.kind}")
            return
        self._compare(kind, entry, row, location)
        with self._findings.catching_row(kind, entry.id, row):
            check_record(self._catalog, kind, entry.id, location)

    def _strays(self, suspects: dict[int, PackId]) -> None:
        """Report rows that name a sound pack whose footer lacks them."""
        footers = {}
        for number, pack in suspects.items():
            # The pack may have been collected since it was found sound.
            with suppress(PackGone):
                entries = self._catalog.packs.table(pack).entries
                footers[number] = {(entry.kind, entry.id) for entry in entries}
        for batch in self._index.location_batches():
            for kind, id, row in batch:
                number = pack_number(row)
                if number in footers and (kind, id) not in footers[number]:
                    what = f"not in the footer of pack {suspects[number].short}"
                    self._tell(kind, id, row, what)


def payload(index: Index, reader: BlockReader, key: Key, row: Row) -> Buffer:
    """Return the plain bytes that a row leads to, checked against the id."""
    kind, id = key
    with index.env.read() as transaction:
        location = index.location(transaction, row)
        base = base_of(row)
        under = None if base is None else index.base(transaction, BlockId(base))
    if kind != Kind.BLOCK:
        return reader.record(typed_id(kind, id), location)
    plain = None
    if base is not None:
        if under is None or under.base != NO_BASE:
            raise Corrupt(f"its base {BlockId(base).short} is missing", where=id.hex())
        reader.check_lengths(BlockId(id), location)
        plain = reader.block(BlockId(base), under)
    return reader.block(BlockId(id), location, plain)


def check_record(catalog: Catalog, kind: Kind, id: bytes, location: Location) -> None:
    """Read, decode and check one record. Raises Corrupt, StorageFailed."""
    type_ = RECORDS.get(kind)
    if type_ is None:
        raise Corrupt(f"not a kind of record: {kind}")
    record = decode(type_, catalog.record_bytes(type_.id_type(id), location), id.hex())
    if isinstance(record, Tensor):
        record.check(catalog.block_size, id.hex())
    elif isinstance(record, VirtualTensor):
        record.check(id.hex())


_GROUP_BYTES = 8 << 20


class Payload(NamedTuple):
    """A payload that a row of the index leads to, and where it lies."""

    kind: Kind
    id: bytes
    location: Location
    row: Row


def checked(
    groups: Iterable[list[Payload]], check: Callable[[Payload], object], threads: int
) -> Iterator[tuple[list[Payload], list[tuple[Payload, Corrupt]]]]:
    """Check groups of payloads on a pool; yield each group with what is damaged, in order."""

    def damaged(group: list[Payload]) -> list[tuple[Payload, Corrupt]]:
        found = []
        for one in group:
            try:
                check(one)
            except Corrupt as error:
                found.append((one, error))
        return found

    with ThreadPoolExecutor(threads, "check") as pool:
        yield from in_order(lambda group: pool.submit(damaged, group), groups, ahead=2 * threads)


def in_pack_order(payloads: Iterable[Payload]) -> Iterator[list[Payload]]:
    """Yield the payloads of one pack in groups of neighbours."""
    ordered = sorted(payloads, key=lambda one: one.location.offset)
    return in_groups(ordered, lambda one: one.location.stored_length, _GROUP_BYTES)


class PayloadPass:
    """One pass over the blocks in sound packs."""

    def __init__(
        self,
        catalog: Catalog,
        findings: Findings,
        tick: Callable[[int], None],
        *,
        threads: int,
        share: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._catalog = catalog
        self._findings = findings
        self._tick = tick
        self._threads = threads
        self._share = share
        self._random = random.Random(seed)  # noqa: S311 -- a sample, not a secret

    def run(self, packs: list[PackId]) -> None:
        """Read every block (or the sampled ones) that the index has in these packs."""
        groups = (group for pack in packs for group in in_pack_order(self._blocks(pack)))
        for group, damaged in checked(groups, self._read, self._threads):
            for one, error in damaged:
                self._findings.tell_row(Kind.BLOCK, one.id, one.row, error.what)
                if isinstance(error, Unreadable):
                    self._findings.unreadable.add((Kind.BLOCK, one.id))
            self._tick(sum(one.location.stored_length for one in group))

    def _read(self, one: Payload) -> None:
        self._catalog.read_block(BlockId(one.id), one.location)

    def _blocks(self, pack: PackId) -> list[Payload]:
        """Return the blocks of a pack that the index has there."""
        try:
            entries = self._catalog.packs.table(pack).entries
        except Corrupt as error:
            self._findings.tell_pack(pack, error.what)
            return []
        ids = [
            entry.id
            for entry in entries
            if entry.kind == Kind.BLOCK
            and (self._share >= 1 or self._random.random() < self._share)
        ]
        index = self._catalog.index
        found = []
        with index.env.read() as transaction:
            for id, row in zip(ids, index.block_rows(transaction, ids), strict=True):
                if row is not None:
                    location = index.location(transaction, row)
                    if location.pack == pack:
                        found.append(Payload(Kind.BLOCK, id, location, row))
        return found
