"""Payloads: blocks read, decoded and hashed, pack by pack, on several threads.

Reads all of them, or a *sample*: each block is in it with the same probability, drawn from a seed,
so that the same store and seed read the same blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from mstore.ahead import in_order
from mstore.blocks.location import Location, Row
from mstore.blocks.packs import Kind
from mstore.check.findings import Findings
from mstore.errors import Corrupt, Unreadable
from mstore.ids import BlockId, PackId
from mstore.store.catalog import Catalog

_GROUP_BYTES = 8 << 20
_Block = tuple[BlockId, Location, Row]
_Failure = tuple[BlockId, Row, Corrupt]


class Payloads:
    """One pass over the payloads of sound packs."""

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
        self.bytes_read = 0

    def run(self, packs: list[PackId]) -> None:
        """Read every block (or the sampled ones) that the index has in these packs."""
        with ThreadPoolExecutor(self._threads, "fsck") as pool:
            reading = in_order(
                lambda group: pool.submit(self._read, group),
                self._groups(packs),
                ahead=2 * self._threads,
            )
            for group, failures in reading:
                for block, row, error in failures:
                    self._findings.tell_row(Kind.BLOCK, block, row, error.what)
                    if isinstance(error, Unreadable):
                        self._findings.unreadable.add((Kind.BLOCK, bytes(block)))
                self.bytes_read += sum(location.stored_length for _, location, _ in group)
                self._tick(self.bytes_read)

    def _groups(self, packs: list[PackId]) -> Iterator[list[_Block]]:
        for pack in packs:
            group: list[_Block] = []
            size = 0
            for block in self._blocks(pack):
                if group and size + block[1].stored_length > _GROUP_BYTES:
                    yield group
                    group, size = [], 0
                group.append(block)
                size += block[1].stored_length
            if group:
                yield group

    def _blocks(self, pack: PackId) -> list[_Block]:
        """Return the blocks of a pack that the index has there, in pack order."""
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
                        found.append((BlockId(id), location, row))
        found.sort(key=lambda block: block[1].offset)
        return found

    def _read(self, group: list[_Block]) -> list[_Failure]:
        failures = []
        for block, location, row in group:
            try:
                self._catalog.read_block(block, location)
            except Corrupt as error:
                failures.append((block, row, error))
        return failures
