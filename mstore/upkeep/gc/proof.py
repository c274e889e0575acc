"""Proof, before anything is removed: garbage collection never trusts the index alone.

Garbage collection removes pack files for good. Before that, three things must agree: the mirror
with the index's refs, so that no root was lost; the needed blocks with their rows, so that a
flipped bit in a key cannot make a live block look dead; and, for each pack, the footer with what
the index says became of each entry. Functions here change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Entry, Kind, SealedPack
from mstore.blocks.reader import located
from mstore.store import generation, mirror, unnamed_packs
from mstore.store.catalog import Catalog
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, PackId
from mstore.terms.phrases import call, few, phrase
from mstore.upkeep.check import index_file
from mstore.upkeep.reachability import Reach

_REINDEX = call("reindex")
_REPAIR = phrase(
    "{repair}    (a store or checkpoint with copies)",
    repair=call("repair", read_data=True, sources=("PLACE",)),
)
"""A repair drops rows of damaged data; a new index would only restore them."""
_SHOWN = 3


def require_sound_names(catalog: Catalog) -> None:
    """Require the newest index, sound in every page and row, with the same refs as the mirror.

    Raises Corrupt otherwise: then it is unknown what is needed. Raises Unavailable if the index was
    replaced.
    """
    catalog.index.env.require_in_place()
    generation.require_current(catalog.layout, catalog.index, catalog.packs, with_packs=True)
    with catalog.index.env.read():
        index_file.refuse(catalog.layout, index_file.faults(catalog.layout))
    for table, key in catalog.index.unsound():
        raise table.damaged(key)
    try:
        told = mirror.read(catalog.layout)
    except Corrupt as error:
        raise Corrupt(
            f"the mirror of the refs, which has to agree before anything goes: {error.what}",
            where=str(catalog.layout.mirror),
            hint=call("repair"),
        ) from error
    with catalog.index.env.read() as transaction:
        differ = mirror.differences(told, catalog.index, transaction)
    if differ:
        raise Corrupt(
            f"index and mirror of the refs do not agree about {few(differ, _SHOWN)}",
            where=str(catalog.layout.mirror),
            hint=_REINDEX,
        )


def require_rows(catalog: Catalog, reach: Reach) -> None:
    """Require that no pack has a needed block without a row: such blocks were lost before.

    Raises Corrupt if a pack has one, or is unreadable.
    """
    if reach.lost_bases:
        block = min(reach.lost_bases)
        raise Corrupt(
            "what it is a difference to has no row in the index",
            where=f"block {block.hex()}",
            hint=_REPAIR,
        )
    if not reach.missing:
        return
    with closing(unnamed_packs.aside_packs(catalog.layout)) as aside:
        for packs in (catalog.packs, aside):
            for pack in packs.listed():
                _require_none(catalog, reach, packs, pack)


def _require_none(catalog: Catalog, reach: Reach, packs: Packs, pack: PackId) -> None:
    """Raise Corrupt if a pack has a needed block without a row."""
    try:
        entries = packs.table(pack).entries
    except Corrupt as error:
        raise Corrupt(
            f"{len(reach.missing)} needed blocks have no row in the index, and they may lie in "
            f"a pack that cannot be read: {error.what}",
            where=packs.where(pack),
            hint=_REPAIR,
        ) from error
    for entry in entries:
        if entry.kind == Kind.BLOCK and entry.id in reach.missing:
            # What is in lost+found was moved there for other reasons than damage.
            is_whole = packs is not catalog.packs or _is_whole(catalog, pack, entry)
            raise Corrupt(
                f"this block is needed and in pack {pack.short}, and the index has no row for it",
                where=f"block {entry.id.hex()}",
                hint=_REINDEX if is_whole else _REPAIR,
            )


def _is_whole(catalog: Catalog, pack: PackId, entry: Entry) -> bool:
    """Return whether a new index may take this block: its row was lost, not dropped for damage."""
    try:
        catalog.read_block(BlockId(entry.id), located(pack, entry))
    except Corrupt:
        return False
    return True


class Footers:
    """The footers of packs, each read once."""

    def __init__(self, catalog: Catalog, copies: Iterable[SealedPack]) -> None:
        self._catalog = catalog
        self._held = {pack.id: _places(pack.entries) for pack in copies}

    def why_not(self, transaction: IndexTransaction, reach: Reach, pack: PackId) -> str | None:
        """Return why a pack must stay, in the transaction that would condemn it; None if it may go.

        It may go if each entry of its footer is dead, or has a row that names another pack whose
        footer has it at that place. Raises Corrupt if the index is wrong about a needed entry.
        """
        index = self._catalog.index
        try:
            entries = self._catalog.packs.table(pack).entries
        except Corrupt as error:
            return f"its footer cannot be read: {error.what}"
        absent: dict[Kind, list[bytes]] = {}
        for entry in entries:
            try:
                key: Key = (Kind(entry.kind), entry.id)
            except ValueError:
                return f"it has an entry of kind {entry.kind}, which this version does not know"
            row = index.row(transaction, key)
            if row is None:
                absent.setdefault(key[0], []).append(entry.id)
                continue
            place = index.location(transaction, row)
            if place.pack == pack:
                raise _wrong(key, f"in pack {pack.short}, which is to go")
            told = (place.offset, place.stored_length, place.raw_length, place.codec)
            if self._places_of(place.pack).get(key) != told:
                raise _wrong(key, f"not in pack {place.pack.short}, where the index has it")
        for kind, ids in absent.items():
            if needed := reach.live_among(kind, ids):
                raise _wrong((kind, needed[0]), "needed, and the index has no row for it")
        return None

    def _places_of(self, pack: PackId) -> dict[Key, tuple[int, int, int, int]]:
        if pack not in self._held:
            entries = self._catalog.packs.table(pack).entries
            self._held[pack] = _places(entries)
        return self._held[pack]


def _places(entries: Iterable[Entry]) -> dict[Key, tuple[int, int, int, int]]:
    found: dict[Key, tuple[int, int, int, int]] = {}
    for entry in entries:
        # No reader asks for entries of a kind that this version does not know.
        with suppress(ValueError):
            place = (entry.offset, entry.stored_length, entry.raw_length, entry.codec)
            found[Kind(entry.kind), entry.id] = place
    return found


def _wrong(key: Key, what: str) -> Corrupt:
    return Corrupt(
        f"index and packs do not agree: it is {what}",
        where=f"{key[0].name.lower()} {key[1].hex()}",
        hint=_REINDEX,
    )
