"""Commits that are durable but not visible yet, because their writers were killed.

LMDB writes a commit completely, and then updates the number from which readers find it. A kill in
between leaves a commit that is durable but invisible while another process has the index open. The
next writer inherits the dead writer's lock, and LMDB corrects the number.
"""

from __future__ import annotations

from contextlib import suppress

from mstore.blocks.index import Index


class _NothingToWrite(Exception):
    """Ends a transaction without a commit."""


def show(index: Index) -> None:
    """Make every commit visible to reads from now on. Raises StorageFailed."""
    with suppress(_NothingToWrite), index.env.write():
        # Beginning a write transaction is enough.
        raise _NothingToWrite
