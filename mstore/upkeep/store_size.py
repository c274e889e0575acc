"""Sizes and counts of a whole store: its snapshots, its blocks, its packs and other files.

Reads the index and each record once, the footers of packs that hold unknown payloads, and never a
block.  Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import numpy as np

from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Kind
from mstore.snapshots import lineage
from mstore.snapshots.lineage import ancestry
from mstore.store import leases, unnamed
from mstore.store.catalog import Catalog
from mstore.store.layout import FORMAT_VERSION
from mstore.terms.errors import Corrupt
from mstore.terms.report import Report
from mstore.upkeep.disk_usage import CodecUsage, Sums, Usage
from mstore.upkeep.reachability import Inventory


class StoreReport(Report, frozen=True):
    """Sizes and counts of a whole store.

    `stored_bytes` includes `unreachable_bytes`, `dead_bytes` and `overhead_bytes`.  It does not
    include `condemned_bytes`, `leftover_bytes` and `lost_found_bytes`.
    """

    path: str
    """the store"""
    uuid: str
    """the store's UUID"""
    format_version: int
    """version of the format on disk"""
    block_size: int
    """bytes"""
    refs: int
    """number of branches and tags"""
    snapshots: int
    """number of snapshots"""
    packs: int
    """number of packs"""
    blocks: int
    """number of distinct blocks"""
    tensors: int
    """number of distinct tensors"""
    plain_bytes: int
    """size of all snapshots that refs reach, as plain files"""
    unique_bytes: int
    """the same with every block counted once"""
    stored_bytes: int
    """size of the packs"""
    index_bytes: int
    """size of the index"""
    statistics_bytes: int
    """size of the cached statistics, which can be discarded"""
    memo_bytes: int
    """size of the memo table, which can be discarded"""
    codecs: tuple[CodecUsage, ...]
    """blocks by how they are stored"""
    unreachable_bytes: int
    """stored bytes of blocks that nothing keeps: gc drops them"""
    dead_bytes: int
    """bytes of payloads in packs that no index row names"""
    overhead_bytes: int
    """bytes of headers, tables and padding in packs"""
    condemned_bytes: int
    """bytes of further packs that are deleted once their last readers end"""
    leftover_bytes: int
    """bytes of files in tmp/ that interrupted commands left"""
    lost_found_bytes: int
    """bytes that gc and reindex put aside in lost+found/"""


def store_report(catalog: Catalog, *, statistics_bytes: int, memo_bytes: int) -> StoreReport:
    """Report a whole store; the caller gives the sizes of the tables that can be discarded.

    Raises Corrupt if a needed record is missing, StorageFailed.
    """
    usage = Usage.read(catalog, catalog.config.reflog_days)
    inventory = usage.inventory
    kept = Sums(usage.kept, inventory.blocks)
    tables = inventory.tables.values()
    named = sum(int(table.heads["stored"].sum(dtype=np.int64)) for table in tables)
    size = sum(size for _, size in inventory.packs.values())
    dead = _dead_bytes(inventory, catalog.packs)
    index = catalog.index
    with index.env.read() as transaction:
        condemned = sum(pack.size for pack in index.condemned(transaction))
        packs = list(index.packs(transaction))
        unique = sum(location.raw_length for _, location in index.blocks(transaction))
        tensors = sum(1 for kind, _, _ in index.records(transaction) if kind == Kind.TENSOR)
        blocks = index.count(transaction, "blocks")
    reached = ancestry(catalog, lineage.names_of(catalog))
    return StoreReport(
        path=str(catalog.layout.root),
        uuid=str(catalog.layout.uuid),
        format_version=FORMAT_VERSION,
        block_size=catalog.block_size,
        refs=len(catalog.refs()),
        snapshots=len(catalog.snapshot_ids()),
        packs=len(packs),
        blocks=blocks,
        tensors=tensors,
        plain_bytes=sum(lineage.plain_bytes(catalog, id) for id in reached),
        unique_bytes=unique,
        stored_bytes=sum(size for _, size in packs),
        index_bytes=index.env.file_bytes(),
        statistics_bytes=statistics_bytes,
        memo_bytes=memo_bytes,
        codecs=kept.codecs(kept.all()),
        unreachable_bytes=kept.stored(~kept.of_any()),
        dead_bytes=dead,
        overhead_bytes=size - named - dead,
        condemned_bytes=condemned,
        leftover_bytes=sum(one.size for one in leases.leftovers(catalog.layout)),
        lost_found_bytes=unnamed.aside_bytes(catalog.layout),
    )


def _dead_bytes(inventory: Inventory, packs: Packs) -> int:
    """Return the payload bytes in packs that no row names. Unreadable packs count nothing."""
    rows, stored = Counter[int](), Counter[int]()
    for table in inventory.tables.values():
        numbers = table.heads["pack"].astype(np.int64)
        counts = np.bincount(numbers)
        sums = np.bincount(numbers, table.heads["stored"])
        for number in np.flatnonzero(counts).tolist():
            rows[number] += int(counts[number])
            stored[number] += int(sums[number])
    dead = 0
    for number, (pack, _) in inventory.packs.items():
        # fsck reports damaged packs; a pack that was just removed holds no dead bytes.
        with suppress(Corrupt):
            dead += packs.dead_bytes(pack, rows[number], stored[number])
    return dead
