"""Generations: how a store detects that its index is outdated.

Each commit that publishes something gives the index the next *generation*. Other files than the
index tell of generations, and so reveal an index that was replaced by an older one, or that fell
back to an earlier state because of damage:

    mirror        never has a later generation than the index that it was written from; one that
                  was replaced and kept has an earlier one, also where an older mirror and index
                  were both copied over newer ones
    pack list     is written for the next commit, whose writer may have been killed before it, so
                  the index is at most one generation behind the newest list
    pack          has a line in the list before it gets its name. One without a line, which the
                  index does not name, tells that the list was replaced by an older one, too, or
                  that somebody put the pack there

An outdated index can only be read: writers refuse it until `reindex` rebuilds it.  Functions change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.pack_store import Packs
from mstore.store import mirror, pack_list
from mstore.store.layout import BACKUP_MARKER, Layout
from mstore.terms.errors import Corrupt
from mstore.terms.ids import PackId
from mstore.terms.phrases import call


def is_backup(layout: Layout, index: Index) -> bool:
    """Return whether the store is a backup that nobody has written to."""
    if not (layout.root / BACKUP_MARKER).exists():
        return False
    with index.env.read() as transaction:
        row = index.backup(transaction)
        return row is not None and row.generation == index.generation(transaction)


def damaged_when_copied(index: Index) -> frozenset[PackId]:
    """Return the packs of a backup that were already damaged in its store."""
    with index.env.read() as transaction:
        row = index.backup(transaction)
    return frozenset() if row is None else frozenset(row.damaged)


def doubt(layout: Layout, index: Index, packs: Packs, *, with_packs: bool = False) -> str | None:
    """Return why the index is not trusted; None if it is current.

    with_packs: also look for packs that the index does not know, not only at names and texts in
    refs/.
    """
    # Read the evidence first: the index then includes anything published in between.
    told = mirror.generation(layout)
    mirrored = max(told or 0, mirror.replaced_by(layout))
    listed = pack_list.newest(layout) - 1
    try:
        unknown = unknown_packs(packs, index) if with_packs or told is None else []
        index.env.refresh()
        with index.env.read() as transaction:
            own = index.generation(transaction)
    except Corrupt as error:
        return error.what
    for newest, what in ((mirrored, "the mirror of the refs"), (listed, "the pack list")):
        if newest > own:
            return (
                f"the index is older than {what} (it is of generation {own}, refs/ tells of "
                f"{newest}): it was replaced by an older one, or is damaged"
            )
    # A readable mirror records the last acknowledged commit.
    return _told_by(layout, packs, unknown, own if told is None else own + 1)


def lasting_doubt(layout: Layout, index: Index, packs: Packs) -> str | None:
    """Return the doubt of two looks, with packs: others may publish during the first."""
    why = doubt(layout, index, packs, with_packs=True)
    return why and doubt(layout, index, packs, with_packs=True)


def _told_by(layout: Layout, packs: Packs, unknown: Sequence[PackId], excused: int) -> str | None:
    """Return what packs that the index does not name say of it.

    excused: the generation in which a killed writer may have left them.
    """
    since = pack_list.read(layout).since if unknown else {}
    for pack in unknown:
        if pack not in since and packs.is_there(pack):
            return (
                f"pack {pack.short} has no line in the pack list: index and list were replaced by "
                "older ones, or somebody put it there"
            )
        if since.get(pack, 0) > excused:
            return (
                f"the index is older than pack {pack.short} (of generation {since[pack]}): it was "
                "replaced by an older one, or is damaged"
            )
    return None


def require_current(
    layout: Layout, index: Index, packs: Packs, *, with_packs: bool = False
) -> None:
    """Raise Corrupt if the index is not trusted: nothing may be written based on it."""
    why = doubt(layout, index, packs, with_packs=with_packs)
    if why is not None:
        raise Corrupt(why, where=str(layout.index), hint=call("reindex"))


def unknown_packs(packs: Packs, index: Index) -> list[PackId]:
    """Return packs that the index does not name.

    A running writer's may be among them, but not while the caller holds the writer lock.
    """
    # List packs first: the index then includes anything published in between.
    listed = list(packs.listed())
    index.env.refresh()
    with index.env.read() as transaction:
        # Reading and checking all rows takes long, and nearly always every pack is named.
        named = set(index.pack_ids(transaction))
        unnamed = [pack for pack in listed if pack not in named]
        # Ids alone are not proof that a pack is unknown: nothing checks a key.
        known = pack_list.known_packs(index, transaction) if unnamed else set()
    return [pack for pack in unnamed if pack not in known]


class _NothingToWrite(Exception):
    """Ends a transaction without a commit."""


def show_commits(index: Index) -> None:
    """Make every commit visible to reads from now on. Raises StorageFailed.

    A writer that is killed after LMDB wrote its commit, and before LMDB updated the number from
    which readers find it, leaves a commit that is invisible while another process has the index
    open. The next writer inherits its lock, and LMDB corrects the number.
    """
    with suppress(_NothingToWrite), index.env.write():
        # Beginning a write transaction is enough.
        raise _NothingToWrite
