"""The store that is copied: sound enough to be believed, and held while it is copied.

Whoever copies packs holds a lease, as a writer does: a pack that garbage collection condemns
meanwhile keeps its file until the lease has ended.  Where no lease can be taken (a store of
another user, a full disk), a pack may go while it is copied; then the copy begins anew with the
rows of now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mstore.blocks.index import Index
from mstore.errors import BadRequest, Corrupt, StorageFailed
from mstore.ids import PackId
from mstore.store import generation
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.leases import Lease


def require_sound(catalog: Catalog) -> None:
    """Raise Corrupt where the index is not the newest word: a copy would make the loss last."""
    why = generation.doubt(catalog.layout, catalog.index, packs=True)
    if why is not None:
        # Once more, with the index as it is by now: others publish meanwhile.
        why = generation.doubt(catalog.layout, catalog.index, packs=True)
    if why is not None:
        raise Corrupt(why, where=str(catalog.layout.index), hint="mstore reindex")


def require_outside(layout: Layout, target: Path) -> None:
    """Raise BadRequest where `target` is the store, or lies in it."""
    own, other = os.path.realpath(layout.root), os.path.realpath(target)
    if other == own or other.startswith(own + os.sep):
        raise BadRequest(
            "this is the store itself" if other == own else "this lies in the store itself",
            where=str(target),
            hint="name a directory on another disk",
        )


@contextmanager
def held(catalog: Catalog, purpose: str) -> Iterator[None]:
    """Keep the packs that the index names from now on in place, where this user can."""
    lease = None
    with suppress(StorageFailed):
        lease = Lease(catalog.layout, catalog.index, purpose)
    try:
        yield
    finally:
        if lease is not None:
            lease.release()


def names(index: Index, pack: PackId) -> bool:
    """Whether the index, as it is now, names this pack."""
    index.env.refresh()
    with index.env.read() as transaction:
        return index.get(transaction, "pack_ids", pack) is not None
