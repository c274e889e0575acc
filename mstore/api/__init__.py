"""The public API: an open store, its snapshots, and every operation on them.

    store = mstore.Store.open(path)
    snapshot = store["llama/merged"]
    snapshot.tensor("model.norm.weight")

Threads may share a store.  A store does not survive a fork: close it first, or start processes with
the spawn method and open the store there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from mstore.api.adding import Adding
from mstore.api.assembling import Assembling
from mstore.api.exchanging import Exchanging
from mstore.api.exporting import Exporting
from mstore.api.keeping import Keeping
from mstore.api.naming import Naming
from mstore.api.reading import Reading
from mstore.api.searching import Searching
from mstore.api.snapshot import Snapshot
from mstore.store.refs import BRANCH, TAG
from mstore.terms.errors import BadName, BadRequest, NotFound
from mstore.terms.ids import Revision
from mstore.terms.report import html

__all__ = ["Snapshot", "Store"]


class Store(Reading, Adding, Searching, Assembling, Naming, Exchanging, Exporting, Keeping):
    """An open store.  Use it as a context manager, or call `close`.

    Iterating gives the names of its branches and tags.
    """

    def __getitem__(self, revision: Revision) -> Snapshot:
        """Return the snapshot that a ref, tag, id prefix, REV~N, NAME@{N} or SnapshotId names.

        Raises NotFound, BadName.
        """
        return Snapshot(self, self._catalog.resolve(revision))

    def __contains__(self, revision: object) -> bool:
        """Return whether `store[revision]` finds a snapshot."""
        try:
            self[cast(Revision, revision)]
        except (NotFound, BadName, BadRequest):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        """The names of its branches and tags."""
        return iter(self._names())

    def __len__(self) -> int:
        """How many branches and tags it has."""
        return len(self._names())

    def _names(self) -> list[str]:
        kinds = (BRANCH, TAG)
        return [name for name, ref in self._catalog.refs().items() if ref.kind in kinds]

    def __bool__(self) -> bool:
        """Return True, also for an empty store."""
        return True

    def _repr_html_(self) -> str:
        return html(self.refs())
