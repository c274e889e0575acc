"""Repair: replace what is broken by good copies, and drop the rest from the index.

Works in rounds, because healing a manifest shows which of its tensors are missing: check, look for
copies, publish those that were found, until a round finds none. Then it drops the rows of what is
left, so that adding good files stores them again, and condemns damaged packs.

Copies are published like everything else: lease, pack, fsync, rename, and one index transaction
that deletes the old row only if it is still the one that was found broken. A kill at any point
leaves the store as it was, or better. A pack is condemned once every row that named it was moved or
belongs to wrong bytes. A payload that the disk failed to read (`Unreadable`) keeps its row and its
pack, because it may be the only copy. Any other error ends the repair: nothing is dropped for what
this machine cannot do. Repair holds the lock of garbage collection: what it relies on is not
collected, and no one else moves what it moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from mstore.blocks import codecs, location
from mstore.blocks.codecs import Codec, Elements, Encoded, Policy
from mstore.blocks.elsewhere import PartReader
from mstore.blocks.location import Key, Location, Row, base_of, pack_number
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import Kind
from mstore.snapshots import notes
from mstore.store import leases, listing, pack_list, unnamed_packs
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.objects.canonical import decode
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.publishing import MAX_PACK_BYTES, NewPacks
from mstore.terms.errors import Corrupt, Incompatible, NotFound, Unreadable
from mstore.terms.ids import BlockId, Buffer, PackId, SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.upkeep.check.copies import Copies, Copy, PackCopies, RemoteCopies, StoredForm, copies_at
from mstore.upkeep.check.findings import Findings, typed_id
from mstore.upkeep.check.fsck import Checker, CheckReport, Scope

_DROPS = 3
WIDTHS = (1, 2, 4, 8)


class RepairReport(Report, frozen=True):
    """The result of `repair`; `after.affected` lists what the dropped objects make unreadable."""

    before: CheckReport
    """the check before the repair"""
    healed: tuple[str, ...]
    """kind and id of what was restored from a good copy"""
    dropped: tuple[str, ...]
    """kind and id of what had no good copy; not in the index until it is added again"""
    bytes_written: int
    """bytes added to the store"""
    condemned: tuple[PackId, ...]
    """damaged packs with nothing good left in them; gc deletes them"""
    kept: tuple[PackId, ...]
    """damaged packs that stay, because the disk could not read them"""
    after: CheckReport
    """the check after the repair"""
    seconds: float
    """how long it took"""


class Repair:
    """One run of `fsck --repair`."""

    def __init__(
        self,
        layout: Layout,
        scope: Scope,
        sources: list[Path],
        *,
        threads: int,
        progress: ProgressCallback | None = None,
        max_pack: int = MAX_PACK_BYTES,
        reader: PartReader | None = None,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._scope = scope
        self._threads = threads
        self._progress = progress
        self._max_pack = max_pack
        # Open the sources first: an unusable one stops the repair before anything changes.
        self._sources = [copies_at(path, layout.block_size) for path in sources]
        self._healed: list[Key] = []
        self._dropped: list[Key] = []
        self._written = 0
        self._tick = ProgressCounter("repair", 0, progress)

    def run(self) -> RepairReport:
        """Check, heal, drop, check again. Raises Corrupt if the index cannot be walked."""
        with leases.collecting(self._layout):
            return self._run()

    def _run(self) -> RepairReport:
        began = time.monotonic()
        checker = self._checker(self._scope)
        before = after = checker.run()
        condemned: list[PackId] = []
        if checker.findings.is_index_wrong:
            problem = before.problems[0]
            raise Corrupt(
                f"the index is not usable for a repair: {problem.what}",
                where=problem.where,
                hint=call("reindex"),
            )
        if before.problems:
            with closing(Catalog.opened(self._layout)) as catalog:
                catalog.read_elsewhere(self._reader)
                damage = self._healing(catalog, checker.findings)
                for _ in range(_DROPS):
                    condemned += self._give_up(catalog, damage)
                    checker = self._checker(Scope())
                    after = checker.run()
                    # A delta is dropped with its base; only now does what depends on it show.
                    damage = Damage.of(catalog, checker.findings)
                    # What is left in damaged packs stays: it was kept, or is new and not looked at.
                    damage.unreadable |= set(damage.in_packs)
                    if not damage.can_be_dropped():
                        break
        return RepairReport(
            before=before,
            healed=tuple(map(_shown, self._healed)),
            dropped=tuple(map(_shown, self._dropped)),
            bytes_written=self._written,
            condemned=tuple(condemned),
            kept=tuple(checker.findings.packs),
            after=after,
            seconds=time.monotonic() - began,
        )

    def _checker(self, scope: Scope) -> Checker:
        return Checker(
            *(self._layout, scope),
            threads=self._threads,
            progress=self._progress,
            reader=self._reader,
        )

    def _healing(self, catalog: Catalog, found: Findings) -> Damage:
        """Heal in rounds; return what could not be healed."""
        with catalog.publishing():
            leases.sweep(catalog.layout, catalog.index)
        lease = leases.Lease(catalog.layout, catalog.index, "repair")
        try:
            damage = Damage.of(catalog, found)
            tried: set[Key] = set()
            while fresh := damage.rows.keys() - tried:
                tried |= fresh
                if not self._heal(catalog, lease, damage):
                    break
                # Healed records may show what else is missing.
                checker = self._checker(Scope())
                checker.run()
                damage.update(Damage.of(catalog, checker.findings))
            return damage
        finally:
            lease.release()

    # -- healing -----------------------------------------------------------------------------

    def _heal(self, catalog: Catalog, lease: leases.Lease, damage: Damage) -> bool:
        """Publish copies of what is damaged from all sources; return whether anything was found.

        Deltas last: their bases may have to be healed first.
        """
        deltas = {
            key for key, row in damage.rows.items() if row is not None and base_of(row) is not None
        }
        first = self._heal_these(catalog, lease, damage, damage.rows.keys() - deltas)
        second = self._heal_these(catalog, lease, damage, deltas)
        return first or second

    def _heal_these(
        self, catalog: Catalog, lease: leases.Lease, damage: Damage, keys: set[Key]
    ) -> bool:
        shelf = _Shelf(catalog, lease, self._max_pack)
        try:
            for key in damage.in_packs:
                if key in keys:
                    self._salvage(catalog, shelf, key, damage)
            own: Copies = PackCopies(lambda: PackFiles(catalog.layout.packs), catalog.block_size)
            elsewhere = catalog.index.elsewhere
            there: list[Copies] = (
                [] if elsewhere is None else [RemoteCopies(elsewhere, catalog.block_size)]
            )
            for source in (own, *self._sources, *there):
                missing = keys - shelf.keys
                for copy in source.copies(missing, self._tick) if missing else ():
                    shelf.put(copy, damage.rows[copy.key])
            healed = shelf.publish(damage)
        except BaseException:
            shelf.packs.abandon()
            raise
        self._healed += sorted(healed)
        self._written += shelf.packs.bytes_written
        damage.remove(healed)
        return bool(healed)

    def _salvage(self, catalog: Catalog, shelf: _Shelf, key: Key, damage: Damage) -> None:
        """Copy a payload out of a damaged pack, if the payload is whole."""
        kind, id = key
        row = damage.rows[key]
        assert row is not None
        try:
            with catalog.index.env.read() as transaction:
                location = catalog.index.location(transaction, row)
            if kind == Kind.BLOCK:
                catalog.read_block(BlockId(id), location)
            else:
                catalog.record_bytes(typed_id(kind, id), location)
            stored = catalog.packs.read(location.pack, location.offset, location.stored_length)
        except Corrupt as error:
            if isinstance(error, Unreadable):
                damage.unreadable.add(key)
            return
        self._tick(location.stored_length)
        shelf.put_as_it_is(key, location, bytes(stored))

    # -- giving up ---------------------------------------------------------------------------

    def _give_up(self, catalog: Catalog, damage: Damage) -> list[PackId]:
        """Drop rows with wrong bytes, list whole snapshots and notes, condemn emptied packs."""
        index = catalog.index
        if damage.stale_mirror:
            # The commit below writes the mirror.
            with catalog.publishing():
                pack_list.add(catalog.layout, index, (), catalog.packs.is_there)
        snapshots = list(_readable(catalog, damage.incomplete))
        noted = notes.stored(catalog)
        dropped: list[Key] = []
        condemned: list[PackId] = []
        with catalog.committing() as transaction:
            for key, row in damage.can_be_dropped().items():
                if index.delete_row_if(transaction, key, row):
                    dropped.append(key)
            for snapshot in snapshots:
                listing.insert(index, transaction, snapshot)
            for kind, id in damage.rows:
                # Healing the record of a snapshot lists it again.
                if kind == Kind.SNAPSHOT and not index.has_record(transaction, kind, id):
                    listing.unlist(index, transaction, SnapshotId(id))
            notes.list_again(index, transaction, noted.values())
            kept = damage.kept_numbers()
            for pack in sorted(damage.packs):
                number = index.pack_number(transaction, pack)
                if number is not None and number not in kept:
                    unnamed_packs.condemn(index, transaction, pack)
                    condemned.append(pack)
        self._dropped += sorted(dropped)
        return condemned


@dataclass(slots=True)
class Damage:
    """What is broken and not healed yet.

    rows: the row that was seen, None if there is none. in_packs: those in damaged packs, where the
    payload may be whole. unreadable: those where the disk failed.
    """

    rows: dict[Key, Row | None]
    in_packs: list[Key]
    unreadable: set[Key]
    packs: set[PackId]
    incomplete: set[SnapshotId]
    stale_mirror: bool

    @classmethod
    def of(cls, catalog: Catalog, findings: Findings) -> Damage:
        """Collect the damage that a check found, with the rows of damaged packs."""
        index = catalog.index
        broken = dict(findings.broken)
        incomplete = {SnapshotId(id) for id in findings.incomplete}
        with index.env.read() as transaction:
            numbers = {index.pack_number(transaction, pack) for pack in findings.packs}
            for snapshot in incomplete:
                if not index.has_record(transaction, Kind.SNAPSHOT, snapshot):
                    broken.setdefault((Kind.SNAPSHOT, bytes(snapshot)), None)
        for kind, id in [key for key, row in broken.items() if row is None]:
            if kind == Kind.TENSOR:
                # The missing record may be of either kind; a manifest names both in the same way.
                broken.setdefault((Kind.VIRTUAL, id), None)
        in_packs = list(_rows_in(catalog, numbers)) if findings.packs else []
        broken.update(in_packs)
        return cls(
            rows=broken,
            in_packs=[key for key, _ in in_packs],
            unreadable=set(findings.unreadable),
            packs=set(findings.packs),
            incomplete=incomplete,
            stale_mirror=findings.stale_mirror,
        )

    def update(self, other: Damage) -> None:
        """Add the damage that another check found."""
        self.rows = {**other.rows, **self.rows}
        self.in_packs = list(dict.fromkeys([*self.in_packs, *other.in_packs]))
        self.unreadable |= other.unreadable
        self.packs |= other.packs
        self.incomplete |= other.incomplete

    def remove(self, keys: set[Key]) -> None:
        """Remove keys that are healed."""
        for key in keys:
            self.rows.pop(key, None)
        self.in_packs = [key for key in self.in_packs if key in self.rows]

    def can_be_dropped(self) -> dict[Key, Row]:
        """Return the rows whose bytes are known to be wrong or gone."""
        return {
            key: row
            for key, row in self.rows.items()
            if row is not None and key not in self.unreadable
        }

    def kept_numbers(self) -> set[int]:
        """Return the numbers of packs with payloads that may become readable again."""
        kept = (self.rows.get(key) for key in self.unreadable)
        return {pack_number(row) for row in kept if row is not None}


class _Shelf:
    """Good copies on their way into new packs, and then into the index."""

    def __init__(self, catalog: Catalog, lease: leases.Lease, max_pack: int) -> None:
        self._catalog = catalog
        self.packs = NewPacks(catalog, lease.directory, prefix="r", max_pack=max_pack)
        self._snapshots: list[SnapshotRecord] = []
        self.keys: set[Key] = set()

    def put(self, copy: Copy, row: Row | None) -> None:
        """Add a copy from elsewhere, encoded as its row says, or else as in its source.

        A plan relies on the stored length of what it reads, so a repair must not make it longer.
        """
        kind, id = copy.key
        if copy.key in self.keys:
            return
        if kind != Kind.BLOCK:
            self._put_record(copy.key, bytes(copy.data))
            return
        encoded = self._encoded(copy, _form(row, len(copy.data)) or copy.form)
        self.packs.writer.append_encoded(id, encoded, copy.file, copy.offset)
        self.keys.add(copy.key)

    def _encoded(self, copy: Copy, form: StoredForm) -> Encoded:
        if form.codec is None:
            elements = Elements(form.width, False)
            return codecs.encode(copy.data, elements, self._catalog.config.codec)
        base = None if form.base is None else self._base(form.base)
        policy = Policy.RAW if form.codec == Codec.RAW else Policy.DENSE
        elements = Elements(form.width, form.codec in (Codec.FLOATS, Codec.DELTA))
        return codecs.encode(copy.data, elements, policy, base)

    def _base(self, block: BlockId) -> tuple[BlockId, Buffer] | None:
        """Return a block to use as the base of a delta; None if it cannot be read."""
        with suppress(Corrupt):
            (location,) = self._catalog.locate([block])
            if not Codec(location.codec).is_delta:
                return block, self._catalog.read_block(block, location)
        return None

    def _put_record(self, key: Key, data: bytes) -> None:
        kind, id = key
        if kind == Kind.SNAPSHOT:
            self._snapshots.append(decode(SnapshotRecord, data, id.hex()))
        self.packs.writer.append_small(id, kind, Codec.RAW, 1, data, len(data))
        self.keys.add(key)

    def put_as_it_is(self, key: Key, location: Location, payload: bytes) -> None:
        """Add a payload of this store that was found whole in a damaged pack."""
        if key[0] != Kind.BLOCK:
            self._put_record(key, payload)
            return
        self.packs.copy(key, location, payload)
        self.keys.add(key)

    def publish(self, damage: Damage) -> set[Key]:
        """Replace the rows that were found broken; return the keys of what was published."""
        if not self.keys:
            return set()
        index = self._catalog.index
        with self.packs.committing() as transaction:
            for key in self.keys:
                row = damage.rows.get(key)
                if row is not None:
                    index.delete_row_if(transaction, key, row)
            for pack in self.packs.sealed:
                # A row that someone else healed meanwhile stays.
                index.insert_pack(transaction, pack)
            for snapshot in self._snapshots:
                listing.insert(index, transaction, snapshot)
        return set(self.keys)


def _form(row: Row | None, length: int) -> StoredForm | None:
    """Parse how a row says that its block is stored; None if it cannot be right."""
    if row is None or location.raw_length(row) != length:
        return None
    codec, width = location.codec(row), location.width(row)
    base = base_of(row)
    with suppress(Incompatible):
        if width in WIDTHS and Codec(codec).is_delta == (base is not None):
            return StoredForm(width, Codec(codec), None if base is None else BlockId(base))
    return None


def _rows_in(catalog: Catalog, numbers: set[int | None]) -> Iterator[tuple[Key, Row]]:
    """Yield every row that names one of these packs."""
    for batch in catalog.index.location_batches():
        for kind, id, row in batch:
            if pack_number(row) in numbers:
                # Skip records of a kind that this version does not know.
                with suppress(ValueError):
                    yield (Kind(kind), id), row


def _readable(catalog: Catalog, snapshots: set[SnapshotId]) -> Iterator[SnapshotRecord]:
    for id in sorted(snapshots):
        with suppress(NotFound, Corrupt):
            yield catalog.snapshot(id)


def _shown(key: Key) -> str:
    return f"{key[0].name.lower()} {key[1].hex()}"
