"""Garbage collection: drop everything that nothing reaches, and free its space.

    lock of garbage collection -> check that index, mirror and generations agree
    -> move packs that the index does not know to lost+found/
    -> lease -> take inventory and mark, at one moment; require rows for what is needed
    -> copy needed payloads out of packs that are mostly dead: tmp/, fsync
    -> writer lock -> pack list, fsync -> rename into packs/, fsync of directories
    -> ONE index transaction: mark what was published since; point rows at the copies; delete the
       rows of the dead; condemn packs that no row names, once their footers have proved it
       (`mstore.upkeep.gc.proof`)
    -> unlink condemned packs, once the leases of that moment have ended

A crash before the index commit leaves only garbage; after it, files that the next writer removes. A
writer that counted a dead block as present finds it missing in its own commit, and retries; one
that published it first keeps it. Reasons: docs/design/008-garbage-collection.md.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Row, pack_number
from mstore.blocks.packs import Kind
from mstore.blocks.schema import JUDGED, NOTES, PINNED, PLANS, PRUNED, Condemned
from mstore.models.stats.store import StatsStore
from mstore.store import generation, leases, listing, unnamed_packs
from mstore.store import layout as layouts
from mstore.store.catalog import Catalog
from mstore.store.leases import Leftover
from mstore.store.memo import Memo
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.store.transaction import RefMove, apply_moves
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.ids import PackId, SnapshotId
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.terms.sizes import format_size
from mstore.upkeep.check.findings import typed_id
from mstore.upkeep.gc import proof
from mstore.upkeep.gc.survey import (
    DEAD_SHARE,
    Choice,
    DeadRows,
    PackUse,
    PlacedRow,
    choose,
    places,
    uses,
)
from mstore.upkeep.reachability import Inventory, Reach, Roots, window_start

RESERVE_BYTES = 8 << 20
"""Free space, in bytes, that copies leave to others."""
_POLL_SECONDS = 0.05


class GcReport(Report, frozen=True):
    """What garbage collection dropped, or with `dry_run` would drop."""

    dry_run: bool
    """whether this only reports what would be dropped"""
    snapshots_dropped: tuple[SnapshotId, ...]
    """ids of unreachable snapshots"""
    blocks_dropped: int
    """unreachable blocks"""
    records_dropped: int
    """unreachable records, including snapshots and plans"""
    plans_dropped: int
    """plans whose inputs are gone"""
    candidates_dropped: tuple[str, ...]
    """candidates that were old, and that no process held"""
    dropped_bytes: int
    """their size in packs"""
    packs_removed: tuple[str, ...]
    """packs deleted because nothing in them is live"""
    packs_rewritten: tuple[str, ...]
    """packs whose live blocks were copied elsewhere"""
    packs_joined: tuple[str, ...]
    """those rewritten only to join many small packs"""
    copied_bytes: int
    """bytes copied out of rewritten packs"""
    freed_bytes: int
    """size of deleted packs minus the copies"""
    joined_bytes: int
    """the part of freed_bytes that joining small packs freed"""
    dead_bytes: int
    """dead payload bytes that stay, in packs with too little dead to rewrite"""
    leftover_files: int
    """deleted files that interrupted commands left in tmp/"""
    leftover_bytes: int
    """their size, not included in freed_bytes"""
    waiting_bytes: int
    """the part that becomes free when running operations have ended"""
    waiting_for: tuple[str, ...]
    """those operations"""
    left: tuple[str, ...]
    """what was not done, and why"""
    put_aside: tuple[str, ...]
    """packs that the index does not know, moved to lost+found/"""
    lost_found_bytes: int
    """size of lost+found/ afterwards"""
    emptied_bytes: int
    """bytes removed from lost+found/"""
    seconds: float
    """how long it took"""


class Limits(msgspec.Struct, frozen=True):
    """Limits of one run.

    room: bytes for copies; None means the free space of the disk, less a reserve. max_pack: bytes
    per pack. wait: seconds to wait for others before their packs are left to the next writer.
    dead_share: the share of dead bytes from which a pack is rewritten; 0 means any.
    empty_lost_found: whether to empty lost+found/.
    """

    room: int | None = None
    max_pack: int = MAX_PACK_BYTES
    wait: float = 0.0
    dead_share: float = DEAD_SHARE
    empty_lost_found: bool = False


@dataclass
class _Tally:
    """What a run has done so far, by the fields of its report."""

    snapshots_dropped: list[SnapshotId] = field(default_factory=list)
    blocks_dropped: int = 0
    records_dropped: int = 0
    plans_dropped: int = 0
    candidates_dropped: list[str] = field(default_factory=list)
    dropped_bytes: int = 0
    packs_removed: list[str] = field(default_factory=list)
    packs_rewritten: list[str] = field(default_factory=list)
    packs_joined: list[str] = field(default_factory=list)
    copied_bytes: int = 0
    freed_bytes: int = 0
    joined_bytes: int = 0
    dead_bytes: int = 0
    leftover_files: int = 0
    leftover_bytes: int = 0
    waiting_bytes: int = 0
    waiting_for: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    put_aside: list[str] = field(default_factory=list)
    lost_found_bytes: int = 0
    emptied_bytes: int = 0

    def drop(self, dead: DeadRows) -> None:
        self.snapshots_dropped += dead.snapshots
        self.blocks_dropped += dead.count(Kind.BLOCK)
        self.records_dropped += dead.count(*(kind for kind in Kind if kind != Kind.BLOCK))
        self.plans_dropped += dead.count(Kind.PLAN)
        self.dropped_bytes += dead.stored_bytes

    def report(self, *, dry_run: bool, seconds: float) -> GcReport:
        for packs in (self.packs_removed, self.packs_rewritten, self.packs_joined, self.put_aside):
            packs.sort()
        done: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(self).items()
        }
        return GcReport(dry_run=dry_run, seconds=seconds, **done)


class Collector:
    """One collection of one store."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        reflog_days: int,
        limits: Limits,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._catalog = catalog
        self._limits = limits
        self._progress = progress
        self._since = window_start(reflog_days)
        self._tally = _Tally()

    # -- looking -----------------------------------------------------------------------------

    def _survey(self) -> tuple[Roots, Reach, DeadRows, Choice]:
        catalog = self._catalog
        with catalog.index.env.read() as transaction:
            inventory = Inventory(catalog, transaction)
            roots = Roots.read(catalog, transaction, self._since)
        reach = Reach(catalog, inventory)
        reach.grow(roots)
        proof.require_rows(catalog, reach)
        found = uses(reach, catalog.packs)
        choice = choose(found, self._room(), self._limits.dead_share)
        return roots, reach, DeadRows.of(reach), choice

    def _room(self) -> int:
        if self._limits.room is not None:
            return self._limits.room
        return max(0, self._catalog.packs.free_bytes() - RESERVE_BYTES)

    def dry_run(self) -> GcReport:
        """Report what `run` would do now. Changes nothing."""
        began = time.monotonic()
        proof.require_sound_names(self._catalog)
        roots, _, dead, choice = self._survey()
        catalog, tally = self._catalog, self._tally
        tally.drop(dead)
        tally.candidates_dropped += [name for name, _ in roots.expired]
        tally.left += choice.left
        copied = sum(use.live_bytes for use in choice.rewrite)
        self._count_packs(choice, choice.remove, choice.rewrite, copied)
        self._count_leftovers(leases.leftovers(catalog.layout), [])
        unknown = generation.unknown_packs(catalog.packs, catalog.index)
        self._tally.put_aside += map(bytes.hex, unknown)
        waiting = unnamed_packs.listed(catalog.index)
        held = unnamed_packs.holders(catalog.layout, waiting)
        self._count_condemned([pack for pack in waiting if held.isdisjoint(pack.leases)])
        self._count_waiting(waiting, held)
        tally.lost_found_bytes = unnamed_packs.aside_bytes(catalog.layout)
        if self._limits.empty_lost_found:
            tally.emptied_bytes, tally.lost_found_bytes = tally.lost_found_bytes, 0
            tally.freed_bytes += tally.emptied_bytes
        return tally.report(dry_run=True, seconds=time.monotonic() - began)

    def _count_packs(
        self, choice: Choice, removed: Iterable[PackUse], rewritten: Iterable[PackUse], copied: int
    ) -> None:
        tally = self._tally
        tally.dead_bytes = choice.stays
        for use in removed:
            tally.packs_removed.append(use.pack.hex())
            tally.freed_bytes += use.size
        for use in rewritten:
            tally.packs_rewritten.append(use.pack.hex())
            tally.freed_bytes += use.size
            if use.number in choice.joined:
                tally.packs_joined.append(use.pack.hex())
                tally.joined_bytes += use.size - use.live_bytes
        tally.copied_bytes += copied
        tally.freed_bytes -= copied

    def _count_leftovers(self, before: list[Leftover], after: list[Leftover]) -> None:
        tally = self._tally
        gone = [one for one in before if not one.resumable]
        still = [one for one in after if not one.resumable]
        tally.leftover_files += max(0, sum(o.files for o in gone) - sum(o.files for o in still))
        tally.leftover_bytes += max(0, sum(o.size for o in gone) - sum(o.size for o in still))
        stays = [one for one in before if one.resumable]
        if stays:
            tally.left.append(
                f"{sum(one.files for one in stays)} files "
                f"({format_size(sum(one.size for one in stays))}) of interrupted merges in tmp: "
                "the next merge goes on from them, or removes them"
            )

    # -- doing -------------------------------------------------------------------------------

    def run(self, memo: Memo, statistics: Callable[[], StatsStore]) -> GcReport:
        """Collect. Raises Corrupt if a needed record is damaged, before anything is changed.

        statistics: opens them.
        """
        began = time.monotonic()
        catalog, tally = self._catalog, self._tally
        with layouts.for_a_full_disk(catalog.layout), leases.collecting(catalog.layout):
            proof.require_sound_names(catalog)
            # Free space first: copies may need what interrupted commands left behind.
            with catalog.publishing(packs=True):
                leftovers = leases.leftovers(catalog.layout)
                leases.sweep(catalog.layout, catalog.index)
                self._count_leftovers(leftovers, leases.leftovers(catalog.layout))
                gone = unnamed_packs.sweep(catalog.layout, catalog.index, catalog.places)
                self._count_condemned(gone)
            if self._limits.empty_lost_found:
                # Empty it before anything is added: packs that this run moves there must stay
                # recoverable.
                tally.emptied_bytes = unnamed_packs.empty_aside(catalog.layout)
                tally.freed_bytes += tally.emptied_bytes
            self._put_unknown_aside()
            again = True
            while again:
                freed = tally.freed_bytes
                again = self._round() and tally.freed_bytes > freed
            self._wait_for_others()
            tally.left += self._tidy(memo, statistics)
            tally.lost_found_bytes = unnamed_packs.aside_bytes(catalog.layout)
        return tally.report(dry_run=False, seconds=time.monotonic() - began)

    def _round(self) -> bool:
        """Mark, copy, publish, unlink; return whether more room would allow more."""
        catalog, tally = self._catalog, self._tally
        roots, reach, dead, choice = self._survey()
        found = dead.snapshots or dead.count(*Kind) or choice.remove or choice.rewrite
        if not (found or roots.expired):
            tally.left += choice.left
            tally.dead_bytes = choice.stays
            return False
        lease = leases.Lease(catalog.layout, catalog.index, "gc")
        try:
            copies = self._copy(reach, choice, lease.directory)
            self._commit(reach, choice, copies, lease)
            unlinked = self._sweep()
        finally:
            lease.release()
        if (choice.short_of_room or copies.ran_out) and unlinked:
            # There is more room now; the next round reports what it still leaves.
            return True
        tally.left += [*choice.left, *copies.left]
        return False

    def _copy(self, reach: Reach, choice: Choice, directory: Path) -> PacksOfCopies:
        inventory = reach.inventory
        copies = PacksOfCopies(self._catalog, inventory, directory, max_pack=self._limits.max_pack)
        total = sum(use.live_bytes for use in choice.rewrite)
        tick = ProgressCounter("gc", total, self._progress)
        copies.copy(places(inventory, reach.live, choice.rewrite), tick)
        return copies

    def _commit(
        self,
        reach: Reach,
        choice: Choice,
        copies: PacksOfCopies,
        lease: leases.Lease,
    ) -> None:
        catalog, tally = self._catalog, self._tally
        useless: list[PackId] = []
        with copies.packs.committing() as transaction:
            # Else the lease's own row would protect the packs that are condemned below.
            lease.drop_row(transaction)
            roots = self._roots_now(reach, transaction)
            reach.grow(roots, transaction)
            moves = [RefMove(name, ref, None, "gc") for name, ref in roots.expired]
            apply_moves(catalog, transaction, moves)
            dead = DeadRows.of(reach)
            gone: Counter[int] = Counter()
            for pack in copies.packs.sealed:
                replaced = catalog.index.move_into(transaction, pack, copies.rows)
                gone.update(replaced)
                if not replaced:
                    useless.append(pack.id)
            gone.update(_drop_rows(catalog, transaction, reach.inventory, dead))
            _drop_snapshots(catalog, transaction, dead)
            _drop_sources(catalog, transaction)
            _drop_pins(catalog, transaction, reach)
            proof.require_rows(catalog, reach)
            empty = {}
            footers = proof.Footers(catalog, copies.packs.sealed)
            for use in (*choice.remove, *choice.rewrite):
                if gone[use.number] != use.rows:
                    continue
                why = footers.why_not(transaction, reach, use.pack)
                if why is None:
                    empty[use.number] = use
                    unnamed_packs.condemn(catalog.index, transaction, use.pack)
                else:
                    tally.left.append(f"pack {use.pack.hex()}: {why}")
        for one in useless:
            with suppress(StorageFailed):
                catalog.packs.remove(one)
        tally.drop(dead)
        tally.candidates_dropped += [move.name for move in moves]
        self._count_packs(
            choice,
            [use for use in choice.remove if use.number in empty],
            [use for use in choice.rewrite if use.number in empty],
            copies.copied_bytes,
        )

    def _roots_now(self, reach: Reach, transaction: IndexTransaction) -> Roots:
        """Read the roots, plus all new snapshots, named or not: what they rely on stays."""
        roots = Roots.read(self._catalog, transaction, self._since)
        known = reach.inventory.snapshots
        new = set(listing.ids(self._catalog.index, transaction)) - known
        return replace(roots, loose=roots.loose | (new - roots.refs))

    # -- packs that nobody needs -------------------------------------------------------------

    def _sweep(self) -> list[Condemned]:
        with self._catalog.publishing():
            catalog = self._catalog
            gone = unnamed_packs.sweep(catalog.layout, catalog.index, catalog.places)
        self._catalog.packs.forget_removed()
        return gone

    def _count_condemned(self, packs: list[Condemned]) -> None:
        self._tally.packs_removed += [pack.pack.hex() for pack in packs]
        self._tally.freed_bytes += sum(pack.size for pack in packs)

    def _put_unknown_aside(self) -> None:
        """Move packs that the index does not name to lost+found, instead of deleting them."""
        catalog = self._catalog
        # Packs get their names under this lock, so none of them is a running writer's.
        with catalog.publishing(packs=True):
            unknown = generation.unknown_packs(catalog.packs, catalog.index)
            moved = unnamed_packs.put_aside(catalog.layout, catalog.packs, unknown)
        self._tally.put_aside += map(bytes.hex, moved)

    def _wait_for_others(self) -> None:
        """Unlink condemned packs as soon as no one can be reading them, within the wait."""
        catalog = self._catalog
        end = time.monotonic() + self._limits.wait
        while True:
            self._sweep()
            waiting = unnamed_packs.listed(catalog.index)
            held = unnamed_packs.holders(catalog.layout, waiting)
            if not held or time.monotonic() >= end:
                break
            time.sleep(_POLL_SECONDS)
        self._count_waiting(waiting, held)

    def _count_waiting(self, waiting: list[Condemned], held: set[str]) -> None:
        kept = [pack for pack in waiting if not held.isdisjoint(pack.leases)]
        self._tally.waiting_bytes = sum(pack.size for pack in kept)
        self._tally.waiting_for = sorted(_purposes(self._catalog, held))

    def _tidy(self, memo: Memo, statistics: Callable[[], StatsStore]) -> list[str]:
        catalog, index = self._catalog, self._catalog.index
        if leases.live(catalog.layout):
            return ["memo table and statistics: others are at work"]
        with index.env.read() as transaction:
            memo.tidy(
                lambda blocks: index.has_blocks(transaction, blocks),
                lambda plan: index.has_record(transaction, Kind.PLAN, plan),
            )
            # They may have been removed to make room; opening makes new ones.
            if catalog.layout.stats.exists():
                statistics().tidy(
                    lambda tensors: [
                        index.row(transaction, (Kind.TENSOR, tensor)) is not None
                        for tensor in tensors
                    ]
                )
        return []


def _drop_rows(
    catalog: Catalog, transaction: IndexTransaction, inventory: Inventory, dead: DeadRows
) -> Iterator[int]:
    """Delete the rows of the dead if they are unchanged; yield the pack number of each."""
    index = catalog.index
    for kind, flags in dead.rows.items():
        table = inventory.tables[kind]
        for number in np.flatnonzero(flags).tolist():
            key, row = (kind, table.id(number)), table.row(number)
            found = index.row(transaction, key)
            # The row of a delta whose base is gone cannot be compared in full.
            if found is not None and (found == row or row is None):
                index.delete_row(transaction, key)
                yield pack_number(found)


def _drop_snapshots(catalog: Catalog, transaction: IndexTransaction, dead: DeadRows) -> None:
    """Delete all index rows of snapshots that are gone, except their reflogs."""
    index = catalog.index
    for id in dead.snapshots:
        index.delete(transaction, PRUNED, id)
        index.delete_all(transaction, NOTES, id)
        index.delete_all(transaction, JUDGED, id)
    listing.remove(index, transaction, dead.snapshots)


def _drop_sources(catalog: Catalog, transaction: IndexTransaction) -> None:
    """Delete the names of a plan's inputs if the plan or one of these snapshots is gone."""
    index = catalog.index
    for id, sources in list(index.walk(transaction, PLANS)):
        named = {source.snapshot_id() for source in (sources.base, *sources.experts)}
        kept = index.has_record(transaction, Kind.PLAN, id)
        if not kept or not all(listing.is_listed(index, transaction, one) for one in named):
            index.delete(transaction, PLANS, id)


def _drop_pins(catalog: Catalog, transaction: IndexTransaction, reach: Reach) -> None:
    """Delete the marks of pinned snapshots whose contents are gone."""
    index = catalog.index
    for id in [id for id, _ in index.walk(transaction, PINNED) if id not in reach.whole]:
        index.delete(transaction, PINNED, id)


def _purposes(catalog: Catalog, names: set[str]) -> list[str]:
    """Return the purposes that live leases state."""
    found = []
    with catalog.index.env.read() as transaction:
        for name in names:
            row = leases.row_of(catalog.index, transaction, name)
            found.append(name if row is None else f"{row.purpose} (process {row.pid})")
    return found


class PacksOfCopies:
    """Packs of copies, and each row as it was when its payload was copied.  For one thread."""

    def __init__(
        self,
        catalog: Catalog,
        inventory: Inventory,
        directory: Path,
        *,
        max_pack: int = MAX_PACK_BYTES,
    ) -> None:
        self._catalog = catalog
        self._inventory = inventory
        self.packs = NewPacks(catalog, directory, prefix="c", max_pack=max_pack)
        self.rows: dict[Key, Row] = {}
        self.left: list[str] = []
        self.ran_out = False

    def copy(self, places: Iterable[PlacedRow], tick: Callable[[int], None]) -> None:
        """Copy the payloads at these places, and seal.

        A full disk ends this early, without an error: `ran_out` is then True.
        """
        try:
            for place in places:
                tick(self._copy(place))
            self.packs.seal()
        except StorageFailed as error:
            self.packs.abandon()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.ran_out = True
            self.left.append("the disk is full: not all packs could be rewritten")
        except BaseException:
            self.packs.abandon()
            raise

    @property
    def copied_bytes(self) -> int:
        """Payload bytes in the sealed packs."""
        return sum(entry.stored_length for pack in self.packs.sealed for entry in pack.entries)

    def _copy(self, place: PlacedRow) -> int:
        table = self._inventory.tables[place.kind]
        id, row = table.id(place.row), table.row(place.row)
        location = self._inventory.location(table, place.row)
        length = location.stored_length
        if row is None:
            self.left.append(f"{place.kind.name.lower()} {id.hex()}: its base is missing")
            return length
        try:
            payload = self._catalog.stored(typed_id(place.kind, id), location)
        except Corrupt as error:
            self.left.append(f"{place.kind.name.lower()} {id.hex()}: {error.what}")
            return length
        self.packs.copy((place.kind, id), location, payload)
        self.rows[place.kind, id] = row
        return length
