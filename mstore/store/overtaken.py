"""Writers that lose their ref to somebody who is gone by now: they run again by themselves.

A writer that is killed as it commits may leave a commit that shows only when the next writer
begins.  So one that is alone in a store can find its ref moved under it.  Running again is then
all that its user could do.  While others are at work it is for people to say who comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mstore.errors import Conflict
from mstore.store import leases, refs
from mstore.store.catalog import Catalog

T = TypeVar("T")
ATTEMPTS = 3


def unless_overtaken(catalog: Catalog, name: str, attempt: Callable[[], T]) -> T:
    """Run `attempt`, which moves the ref `name`, and again where it lost that to no live writer.

    `attempt` reads what the ref is itself, and leaves nothing behind where it fails.  Raises
    Conflict if others are at work, or after ATTEMPTS tries; and what `attempt` raises.
    """
    for _ in range(ATTEMPTS - 1):
        before = _moves(catalog, name)
        try:
            return attempt()
        except Conflict:
            if _moves(catalog, name) == before or leases.live(catalog.layout):
                raise
    return attempt()


def _moves(catalog: Catalog, name: str) -> int:
    """How often the ref was moved so far."""
    with catalog.index.env.read() as transaction:
        return refs.next_position(catalog.index, transaction, name)
