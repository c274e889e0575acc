"""The public face: an open store, its snapshots, and everything that can be done with them.

    store = mstore.Store.open(path)
    snapshot = store["llama/merged"]
    snapshot.tensor("model.norm.weight")

A store may be shared by threads.  It does not survive a fork: close it before, or start processes
with the spawn method and open it there.
"""

from __future__ import annotations

from mstore.api.adding import Adding
from mstore.api.arguments import checked
from mstore.api.keeping import Keeping
from mstore.api.merging import Merging
from mstore.api.naming import Naming
from mstore.api.reading import Reading
from mstore.api.snapshot import Snapshot
from mstore.ids import SnapshotId

__all__ = ["Snapshot", "Store"]


@checked("Store")
class Store(Reading, Adding, Merging, Naming, Keeping):
    """An open store.  Use it as a context manager, or call `close`."""

    def __getitem__(self, revision: str | SnapshotId) -> Snapshot:
        """The snapshot that a ref, tag, id prefix, REV~N or NAME@{N} names, or of a SnapshotId.

        Raises NotFound, BadName.
        """
        return Snapshot(self, self._catalog.resolve(revision))
