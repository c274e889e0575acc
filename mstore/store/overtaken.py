"""Retries for writers that lose their ref to a writer which is dead by now.

A writer that is killed while it commits may leave a commit that becomes visible only when the next
writer begins. So a writer that is alone in a store can find that its ref has moved. The user could
only run the command again, so the library does. While other writers are alive, people decide who
comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mstore.errors import Conflict
from mstore.store import leases
from mstore.store.catalog import Catalog
from mstore.store.ref_store import refs_in

T = TypeVar("T")
ATTEMPTS = 3


def unless_overtaken(catalog: Catalog, name: str, attempt: Callable[[], T]) -> T:
    """Run `attempt`, which moves the ref `name`; retry if it lost the ref to no live writer.

    `attempt` reads the ref itself, and leaves nothing behind if it fails. Raises Conflict if others
    are at work, or after ATTEMPTS tries, and whatever `attempt` raises.
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
    """Return how often the ref has moved so far."""
    with catalog.index.env.read() as transaction:
        return refs_in(catalog.index, transaction).count_moves(name)
