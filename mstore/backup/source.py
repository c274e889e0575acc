"""The store to copy: checked to be sound first, and protected while it is copied.

The copying process holds a lease, as a writer does: a pack that garbage collection condemns
meanwhile keeps its file until the lease ends. Where no lease can be taken (another user's store, a
full disk), a pack may be removed while it is copied; then the copy starts over with the current
rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mstore.blocks.index import Index
from mstore.errors import BadRequest, Corrupt, StorageFailed
from mstore.ids import PackId
from mstore.phrases import call
from mstore.store import generation
from mstore.store.catalog import Catalog
from mstore.store.layout import Layout
from mstore.store.leases import Lease


def require_sound(catalog: Catalog) -> None:
    """Raise Corrupt if the index is outdated: a copy would make the loss permanent."""
    why = _doubt(catalog)
    if why is not None:
        # Check again with the current index: others may have published meanwhile.
        why = _doubt(catalog)
    if why is not None:
        raise Corrupt(why, where=str(catalog.layout.index), hint=call("reindex"))


def _doubt(catalog: Catalog) -> str | None:
    return generation.doubt(catalog.layout, catalog.index, catalog.packs, with_packs=True)


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


def names(index: Index, pack: PackId) -> bool:
    """Return whether the index currently names this pack."""
    index.env.refresh()
    with index.env.read() as transaction:
        return index.pack_number(transaction, pack) is not None
