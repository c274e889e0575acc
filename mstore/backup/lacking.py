"""What a copy lacks that its names need, and what an older copy still has of it.

A store that lost payloads and dropped their rows (`fsck --repair` does that where no good copy is
left) has no damaged pack, and neither has a copy of it. Only a walk from the names down to the
blocks tells whether everything is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.packs import Kind
from mstore.check import rows
from mstore.check.findings import Findings, Key
from mstore.check.graph import Graph
from mstore.errors import MstoreError
from mstore.ids import PackId, SnapshotId
from mstore.store.catalog import Catalog, insert_snapshot

_KEPT = "missing from the store; this backup keeps its copy"


def found(catalog: Catalog) -> Findings:
    """Find what is missing on the way down from the names, and missing bases of deltas."""
    findings = Findings()
    Graph(catalog, findings).run(with_mirror=False)
    index = catalog.index
    for batch in rows.batches(index, "blocks"):
        bases = sorted({base for _, row in batch if (base := rows.base_of(row)) is not None})
        with index.env.read() as transaction:
            there = index.block_rows(transaction, bases) if bases else []
        for base, row in zip(bases, there, strict=True):
            if row is None:
                findings.tell_row(Kind.BLOCK, base, None, "the base of other blocks: missing")
    return findings


def kept(catalog: Catalog, old: Index, findings: Findings) -> frozenset[Key]:
    """Copy missing rows from the old index to the new one; return their keys.

    Adds everything that the store lacks to the findings, restored or not. A restored record may
    need more, so this repeats until nothing more is restored.
    """
    back: set[Key] = set()
    while True:
        lacking = found(catalog)
        wanted = {key for key, row in lacking.broken.items() if row is None}
        wanted |= {(Kind.SNAPSHOT, id) for id in lacking.incomplete}
        more = set(_restored(catalog.index, old, wanted - back))
        _list_again(catalog, (SnapshotId(id) for kind, id in more if kind == Kind.SNAPSHOT))
        back |= more
        if not more:
            break
    for kind, id in sorted(back):
        findings.tell_row(kind, id, None, _KEPT)
    findings.take(lacking)
    return frozenset(back)


def _restored(new: Index, old: Index, wanted: Iterable[Key]) -> Iterator[Key]:
    """Restore the rows in packs that the new index names as well; yield their keys."""
    with old.env.read() as reading, new.env.write() as writing:
        numbers = {
            number: new.get(writing, "pack_ids", PackId(pack[:32]))
            for number, pack in old.walk(reading, "packs")
        }
        for kind, id in sorted(wanted):
            database, key = rows.record_key(kind, id)
            row = old.row(reading, database, key)
            number = None if row is None else numbers.get(rows.pack_number(row))
            if row is None or number is None or new.row(writing, database, key) is not None:
                continue
            writing.put(key, number + row[len(number) :], db=new.db(database))
            yield kind, id


def _list_again(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> None:
    for id in snapshots:
        with suppress(MstoreError):
            record = catalog.snapshot(id)
            with catalog.index.env.write() as transaction:
                insert_snapshot(catalog.index, transaction, record)
