"""Condemned packs: files that no row names any more, and when they may be removed.

Garbage collection and repair condemn packs in the transaction that removes their last rows. A
holder of a lease at that moment may have looked up a block before and read it now. So the file
stays until all those leases have ended; later leases see only the new rows. Readers without a lease
look the block up again when a pack is gone.

The file is removed before its row. A crash in between leaves a row without a file, which the next
sweep removes.
"""

from __future__ import annotations

from contextlib import suppress

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_store import Places
from mstore.blocks.schema import Condemned
from mstore.errors import StorageFailed
from mstore.ids import PackId
from mstore.store import leases
from mstore.store.layout import Layout


def condemn(index: Index, transaction: IndexTransaction, pack: PackId) -> None:
    """Condemn a pack that no row names any more, and note which leases protect its file."""
    index.condemn(transaction, pack, leases.names(index, transaction))


def listed(index: Index) -> list[Condemned]:
    """Return every condemned pack. Its file is garbage, whether it still exists or not."""
    with index.env.read() as transaction:
        return index.condemned(transaction)


def holders(layout: Layout, packs: list[Condemned]) -> set[str]:
    """Return the leases that still protect files of these packs."""
    names = {name for pack in packs for name in pack.leases}
    return {name for name in names if leases.is_live(layout, name)}


def sweep(layout: Layout, index: Index, places: Places) -> list[Condemned]:
    """Remove the files that no lease protects any more; return those packs.

    Call with the writer lock held. Skips files that cannot be removed (another user's, for
    example).
    """
    waiting = listed(index)
    if not waiting:
        return []
    held = holders(layout, waiting)
    gone = []
    for pack in waiting:
        if held.isdisjoint(pack.leases):
            with suppress(StorageFailed):
                places[pack.place].remove(pack.pack)
                gone.append(pack)
    if gone:
        with index.env.write() as transaction:
            index.forget_condemned(transaction, gone)
    return gone
