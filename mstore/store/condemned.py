"""Condemned packs: files that no row names any more, and when they may go.

Garbage collection and repair condemn packs in the transaction that takes the last rows from them
(`Index.condemn`).  Who held a lease at that moment may have looked a block up before and read it
now, so the file stays until all of these leases have ended; readers without a lease look again
when a pack is gone.  Leases that came later can only have seen the new rows.

The file goes first and its row after it: a crash in between leaves a row without a file, which the
next sweep takes away.
"""

from __future__ import annotations

from contextlib import suppress

from mstore import fs
from mstore.blocks.index import Condemned, Index
from mstore.blocks.packs import pack_path
from mstore.errors import StorageFailed
from mstore.store import leases
from mstore.store.layout import Layout


def listed(index: Index) -> list[Condemned]:
    """Every condemned pack.  Its file is garbage, whether it is still there or not."""
    with index.env.read() as transaction:
        return index.condemned(transaction)


def holders(layout: Layout, packs: list[Condemned]) -> set[str]:
    """The leases that keep files of these packs in place."""
    names = {name for pack in packs for name in pack.leases}
    return {name for name in names if leases.is_live(layout, name)}


def sweep(layout: Layout, index: Index) -> list[Condemned]:
    """Remove the files that nobody can be reading; returns those packs.

    Call with the writer lock held.  What cannot be removed (another user's, say) stays.
    """
    packs = listed(index)
    if not packs:
        return []
    held = holders(layout, packs)
    gone = []
    for pack in packs:
        if held.isdisjoint(pack.leases):
            with suppress(StorageFailed):
                fs.unlink(pack_path(layout.packs, pack.pack), missing_ok=True)
                gone.append(pack)
    if gone:
        with index.env.write() as transaction:
            index.forget_condemned(transaction, gone)
    return gone
