"""One immutable snapshot of an open store."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mstore import lineage
from mstore.api.arguments import checked
from mstore.api.reading import Reading
from mstore.errors import BadRequest, Unavailable
from mstore.ids import ManifestId, SnapshotId
from mstore.objects.snapshot import SnapshotRecord

if TYPE_CHECKING:
    import numpy as np

    from mstore.lineage import FileReport, ParentReport, SnapshotReport


@checked("Snapshot")
class Snapshot:
    """One immutable snapshot of an open store; `id` is its SnapshotId.

    It reads through its store and is usable only while that is open.
    """

    def __init__(self, store: Reading, id: SnapshotId) -> None:
        self._store = store
        self._record: SnapshotRecord = store._catalog.snapshot(id)
        self.id = id

    def __repr__(self) -> str:
        return f"Snapshot({self.id.short})"

    @property
    def manifest(self) -> ManifestId:
        """The id of its content: equal ids mean equal bytes."""
        return self._record.manifest_id()

    @property
    def parents(self) -> tuple[ParentReport, ...]:
        """Role (previous, base, expert), snapshot and refs of each parent."""
        return lineage.parents(self._record, lineage.names_of(self._store._catalog))

    @property
    def message(self) -> str:
        """The commit message."""
        return self._record.message

    @property
    def time_ns(self) -> int:
        """The creation time in nanoseconds since the epoch."""
        return self._record.time_ns

    def files(self) -> list[FileReport]:
        """Its files, by path."""
        return lineage.files(self._store._catalog, self.id)

    def tensor_names(self) -> list[str]:
        """The names of its tensors, in file and data order."""
        return list(self._store.view(self.id).tensors)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor as a read-only array of its shape; bfloat16 and float8 use ml_dtypes.

        Raises NotFound, Corrupt, Incompatible (an element type that numpy cannot hold).
        """
        return self._store.view(self.id).tensor(name)

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return every tensor by name, as `tensor` does: the whole model in memory.

        If several files have a tensor of the same name, as parts of a pipeline may, the first
        counts.

        Raises Corrupt, Incompatible.
        """
        view = self._store.view(self.id)
        return {name: view.tensor(name) for name in view.tensors}

    def torch(self) -> dict[str, Any]:
        """Return the tensors as torch tensors, for `load_state_dict`; keeps bfloat16 and float8.

        They own their memory and are writable.

        Raises Unavailable (torch is not installed), BadRequest (an element type that torch lacks),
        Corrupt.
        """
        try:
            # Imported by name: the library needs no framework, and a test checks that.
            torch: Any = import_module("torch")
        except ImportError as error:
            raise Unavailable("torch is not installed", hint="pip install torch") from error
        found = {}
        for name, array in self.state_dict().items():
            kind = getattr(torch, array.dtype.name, None)
            if not isinstance(kind, torch.dtype):
                raise BadRequest(f"torch has no {array.dtype.name}", where=f"tensor {name}")
            # Goes through plain bytes: torch does not take ml_dtypes arrays.
            tensor = found[name] = torch.empty(array.shape, dtype=kind)
            if array.size:
                raw = torch.from_numpy(array.reshape(-1).view("uint8").copy())
                tensor.view(-1).view(torch.uint8).copy_(raw)
        return found

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """Return the bytes of one file.  Raises NotFound, Corrupt."""
        return b"".join(self._store.view(self.id).stream(os.fspath(path)))

    def lineage(self) -> list[SnapshotReport]:
        """Return this snapshot and all its ancestors, children before parents."""
        return lineage.log(self._store._catalog, [self.id], None)
