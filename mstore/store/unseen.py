"""Commits that nobody sees yet: their writers were killed before they could say that they are done.

LMDB writes a commit whole, and then moves the number by which readers go.  A kill in between
leaves a commit that is durable and not seen as long as another process has the index open.  The
next writer inherits the dead one's lock, and LMDB puts the number right.
"""

from __future__ import annotations

from contextlib import suppress

from mstore.blocks.index import Index


class _NothingToWrite(Exception):
    """Ends a transaction without a commit."""


def show(index: Index) -> None:
    """Have every commit seen by what is read from now on.  Raises StorageFailed."""
    with suppress(_NothingToWrite), index.env.write():
        # That it began is all that is needed.
        raise _NothingToWrite
