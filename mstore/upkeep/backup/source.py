"""The store to copy: checked to be sound, protected, its rows copied, and what it lacks.

The copying process holds a lease, as a writer does: a pack that garbage collection condemns
meanwhile keeps its file until the lease ends. Where no lease can be taken (another user's store, a
full disk), a pack may be removed while it is copied; then the copy starts over with the current
rows.

A store that lost payloads and dropped their rows (`fsck --repair` does that where no good copy is
left) has no damaged pack, and neither has a copy of it. Only a walk from the names down to the
blocks tells what is missing; an older copy may still have it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, base_of, moved, pack_number
from mstore.blocks.packs import Kind
from mstore.blocks.schema import PACK_IDS, PACKS, TABLES, NamedPack
from mstore.blocks.tables import Table
from mstore.store import generation, listing
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.leases import Lease
from mstore.terms.errors import BadRequest, Corrupt, NotFound, StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call
from mstore.upkeep.check.findings import Findings
from mstore.upkeep.check.graph import Graph


def require_sound(catalog: Catalog) -> None:
    """Raise Corrupt if the index is outdated: a copy would make the loss permanent."""
    why = generation.lasting_doubt(catalog.layout, catalog.index, catalog.packs)
    if why is not None:
        raise Corrupt(why, where=str(catalog.layout.index), hint=call("reindex"))


def require_outside(layout: Layout, target: Path) -> None:
    """Raise BadRequest if `target` is the store, or lies in it."""
    own, other = os.path.realpath(layout.root), os.path.realpath(target)
    if other == own or other.startswith(own + os.sep):
        raise BadRequest(
            "this is the store itself" if other == own else "this lies in the store itself",
            where=str(target),
            hint="name a directory on another disk",
        )


@contextmanager
def held(catalog: Catalog, purpose: str) -> Iterator[None]:
    """Protect the packs that the index names from now on, if this user can take a lease."""
    lease = None
    with suppress(StorageFailed):
        lease = Lease(catalog.layout, catalog.index, purpose)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def copy_rows(source: Index, target: Index) -> list[NamedPack]:
    """Put all rows except those of packs into an empty index; return the packs, by number.

    Raises Corrupt at a row that does not match its check, StorageFailed.
    """
    source.env.refresh()
    with source.env.read() as reading, target.env.write() as writing:
        for table in TABLES:
            if not (table.is_own or table in (PACKS, PACK_IDS)):
                with writing.cursor(db=target.db(table.name)) as cursor:
                    cursor.putmulti(_checked(source, reading, table), append=True)
        return list(source.named_packs(reading))


def _checked(
    index: Index, transaction: IndexTransaction, table: Table[Any, Any]
) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor(db=index.db(table.name)) as cursor:
        for key, row in cursor:
            if table.has_check:
                table.item(key, row)
            yield key, row


_KEPT = "missing from the store; this backup keeps its copy"


def missing_in(catalog: Catalog) -> Findings:
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


def kept_rows(catalog: Catalog, old: Index, findings: Findings) -> frozenset[Key]:
    """Copy missing rows from the old index to the new one; return their keys.

    Adds everything that the store lacks to the findings, restored or not. A restored record may
    need more, so this repeats until nothing more is restored.
    """
    back: set[Key] = set()
    while True:
        lacking = missing_in(catalog)
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
