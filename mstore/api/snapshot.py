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
from mstore.reports import (
    FileReport,
    ParentReport,
    SnapshotReport,
)

if TYPE_CHECKING:
    import numpy as np


@checked("Snapshot")
class Snapshot:
    """One immutable snapshot of an open store; `id` is its SnapshotId.

    It reads through its store, and no longer than that is open.
    """

    def __init__(self, store: Reading, id: SnapshotId) -> None:
        self._store = store
        self._record: SnapshotRecord = store._catalog.snapshot(id)
        self.id = id

    def __repr__(self) -> str:
        return f"Snapshot({self.id.short})"

    @property
    def manifest(self) -> ManifestId:
        """What it contains: equal ids, equal bytes."""
        return self._record.manifest_id()

    @property
    def parents(self) -> tuple[ParentReport, ...]:
        """Role (previous, base, expert), snapshot and refs of each parent."""
        return lineage.parents(self._record, lineage.names_of(self._store._catalog))

    @property
    def message(self) -> str:
        """The words that its maker gave it."""
        return self._record.message

    @property
    def time_ns(self) -> int:
        """When it was made, in nanoseconds since the epoch."""
        return self._record.time_ns

    def files(self) -> list[FileReport]:
        """Its files, by path."""
        return lineage.files(self._store._catalog, self.id)

    def tensor_names(self) -> list[str]:
        """The names of its tensors, in file and data order."""
        return list(self._store.view(self.id).tensors)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only array of its shape; bfloat16 and float8 through ml_dtypes.

        Raises NotFound, Corrupt, Incompatible (an element type that numpy cannot hold).
        """
        return self._store.view(self.id).tensor(name)

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every tensor by name, as `tensor` gives them: all of the model in memory.

        Where several files have a tensor of one name, as parts of a pipeline may, the first counts.

        Raises Corrupt, Incompatible.
        """
        view = self._store.view(self.id)
        return {name: view.tensor(name) for name in view.tensors}

    def torch(self) -> dict[str, Any]:
        """The same as tensors of torch, for `load_state_dict`; bfloat16 and float8 as they are.

        They own their memory, and may be written to.

        Raises Unavailable (torch is not installed), BadRequest (an element type that torch has
        not), Corrupt.
        """
        try:
            # By name: the library does without a framework, and is checked to.
            torch: Any = import_module("torch")
        except ImportError as error:
            raise Unavailable("torch is not installed", hint="pip install torch") from error
        found = {}
        for name, array in self.state_dict().items():
            kind = getattr(torch, array.dtype.name, None)
            if not isinstance(kind, torch.dtype):
                raise BadRequest(f"torch has no {array.dtype.name}", where=f"tensor {name}")
            # Through plain bytes, as torch takes no arrays of ml_dtypes.
            tensor = found[name] = torch.empty(array.shape, dtype=kind)
            if array.size:
                raw = torch.from_numpy(array.reshape(-1).view("uint8").copy())
                tensor.view(-1).view(torch.uint8).copy_(raw)
        return found

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """The bytes of one file.  Raises NotFound, Corrupt."""
        return b"".join(self._store.view(self.id).stream(os.fspath(path)))

    def lineage(self) -> list[SnapshotReport]:
        """This snapshot and all that it came from, children before parents."""
        return lineage.log(self._store._catalog, [self.id], None)
