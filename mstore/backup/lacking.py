"""What a copy lacks that its names need, and what an older copy still has of it.

A store that lost payloads and dropped their rows (`fsck --repair` does that where no good copy is
left) has no damaged pack, and neither has a copy of it. Only a walk from the names down to the
blocks tells whether everything is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.location import Key, base_of, moved, pack_number
from mstore.blocks.packs import Kind
from mstore.check.findings import Findings
from mstore.check.graph import Graph
from mstore.errors import Corrupt, NotFound
from mstore.ids import SnapshotId
from mstore.store import listing
from mstore.store.catalog import Catalog

_KEPT = "missing from the store; this backup keeps its copy"


def found(catalog: Catalog) -> Findings:
    """Find what is missing on the way down from the names, and missing bases of deltas."""
    findings = Findings()
    Graph(catalog, findings).run(with_mirror=False)
    index = catalog.index
    for batch in index.block_batches():
        named = (base_of(row) for _, row in batch)
        bases = sorted({base for base in named if base is not None})
        with index.env.read() as transaction:
            stored = index.has_blocks(transaction, bases) if bases else []
        for base, is_stored in zip(bases, stored, strict=True):
            if not is_stored:
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
        packs = old.named_packs(reading)
        numbers = {pack.number: new.pack_number(writing, pack.id) for pack in packs}
        for key in sorted(wanted):
            row = old.row(reading, key)
            number = None if row is None else numbers.get(pack_number(row))
            if row is None or number is None or new.row(writing, key) is not None:
                continue
            new.put_row(writing, key, moved(row, number))
            yield key


def _list_again(catalog: Catalog, snapshots: Iterable[SnapshotId]) -> None:
    for id in snapshots:
        with suppress(NotFound, Corrupt):
            record = catalog.snapshot(id)
            with catalog.index.env.write() as transaction:
                listing.insert(catalog.index, transaction, record)
