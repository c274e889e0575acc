"""One immutable snapshot of an open store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mstore.api.open_store import thread_count
from mstore.api.reading import Reading
from mstore.snapshots import lineage
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.terms.errors import BadRequest
from mstore.terms.ids import ManifestId, SnapshotId
from mstore.terms.report import html

if TYPE_CHECKING:
    import numpy as np

    from mstore.api.load import SafeOpen
    from mstore.snapshots.lineage import FileReport, OriginReport, ParentReport, SnapshotReport
    from mstore.store.view import SnapshotView
    from mstore.terms.report import ProgressCallback


class Snapshot:
    """One immutable snapshot of an open store; `id` is its SnapshotId.

    It reads through its store and is usable only while that is open.  Iterating gives the names of
    its tensors.  Two are equal if store and id are.  Every call that takes a revision takes it.  It
    may travel to other processes (pickle), which open the store when they first use it.
    """

    def __init__(self, store: Reading, id: SnapshotId) -> None:
        self._store = store
        self.id = id

    def __repr__(self) -> str:
        return f"Snapshot({self.id.short})"

    def __str__(self) -> str:
        return str(self.id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return (self._store, self.id) == (other._store, other.id)

    def __hash__(self) -> int:
        return hash(self.id)

    def __bool__(self) -> bool:
        """Return True, also for a snapshot without tensors."""
        return True

    def __len__(self) -> int:
        """How many tensors it has, by name."""
        return len(self._view().tensors)

    def __iter__(self) -> Iterator[str]:
        """The names of its tensors, in file and data order."""
        return iter(self._view().tensors)

    def __contains__(self, name: object) -> bool:
        """Return whether it has a tensor of this name."""
        return name in self._view().tensors

    def _repr_html_(self) -> str:
        return html(self._store.show(self.id))

    @property
    def _record(self) -> SnapshotRecord:
        return self._store._catalog.snapshot(self.id)

    def _view(self, file: str | None = None) -> SnapshotView:
        """Return the view; with only the tensors of one file, if one is given."""
        view = self._store.view(self.id)
        return view if file is None else view.of_file(file)

    @property
    def manifest(self) -> ManifestId:
        """The id of its content: equal ids mean equal bytes."""
        return self._record.manifest_id()

    @property
    def parents(self) -> tuple[ParentReport, ...]:
        """Role (previous, base, expert, companion), snapshot, refs and model of each parent."""
        catalog, record = self._store._catalog, self._record
        names, plan = lineage.names_of(catalog), lineage.plan_of(catalog, record)
        return lineage.parents(record, names, plan)

    @property
    def made(self) -> str:
        """What made it: add, merge, prepare, cast, align, extract or combine."""
        return self._record.made

    @property
    def origin(self) -> OriginReport | None:
        """Where it came from; None if that is not known, or it was made here."""
        return lineage.origin(self._record)

    @property
    def author(self) -> str:
        """Who made it; empty if that was not given."""
        return self._record.author

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
        return list(self._view().tensors)

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor as a read-only array of its shape; bfloat16 and float8 use ml_dtypes.

        Raises NotFound, Corrupt, Incompatible (an element type that numpy cannot hold).
        """
        return self._view().tensor(name)

    def models(self) -> list[str]:
        """The names of its models: "" is that of the top directory.

        A tensor of another model is called MODEL:NAME.
        """
        return list(self._view().models.named)

    def load(
        self,
        names: Sequence[str] | None = None,
        *,
        model: str | None = None,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return tensors by name, as read-only arrays: the whole model, or those of `names`.

        model: which one, of a snapshot with several; without it, that of the top directory.  Its
        tensors have then the names that they have in it.

        Several threads read and decode.  A tensor that lies raw and in one piece is not copied: its
        array is a map of the pack, which stays valid whatever happens to the store.  Every block is
        checked first.  (If the disk fails later, touching a mapped array ends the process with
        SIGBUS, as with any mapped file.)

        Raises NotFound, Corrupt, Conflict (collected meanwhile), StorageFailed, Incompatible (an
        element type that numpy cannot hold; the other tensors can be loaded by their names).
        """
        view = self._view()
        if names is None or model is not None:
            view = view.of_model(model, self.id.short)
        return self._load(view, names, threads, progress, for_torch=False)

    def load_torch(
        self,
        names: Sequence[str] | None = None,
        *,
        model: str | None = None,
        device: Any = None,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> dict[str, Any]:
        """Return tensors by name as torch tensors, for `load_state_dict`; see `load`.

        Keeps bfloat16 and float8; F4 becomes pairs (float4_e2m1fn_x2), as safetensors gives it.
        Each tensor may be changed, which changes no other one and nothing of the store.  device:
        where torch puts them; None keeps them in this memory.

        Raises Unavailable (torch is not installed), BadRequest or Incompatible (an element type
        that torch lacks; the other tensors can be loaded by their names), and as `load`.
        """
        from mstore.api.load import to_torch, torch_module

        torch_module()
        view = self._view()
        if names is None or model is not None:
            view = view.of_model(model, self.id.short)
        found = self._load(view, names, threads, progress, for_torch=True)
        # One after the other, so that what went to another device is no longer needed here.
        return {
            name: to_torch(name, found.pop(name), view.record(name).dtype, device)
            for name in list(found)
        }

    def _load(
        self,
        view: SnapshotView,
        names: Sequence[str] | None,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
        *,
        for_torch: bool,
    ) -> dict[str, np.ndarray[Any, Any]]:
        from mstore.api.load import load

        if isinstance(names, str | Snapshot):
            raise BadRequest("names of tensors are a list of texts", hint="names=[NAME]")
        return load(
            self._store._catalog,
            view,
            list(view.tensors) if names is None else list(dict.fromkeys(names)),
            threads=thread_count(threads),
            for_torch=for_torch,
            progress=progress,
        )

    def _load_one(self, view: SnapshotView, name: str, *, for_torch: bool) -> np.ndarray[Any, Any]:
        from mstore.api.load import load_one

        threads = thread_count(None)
        return load_one(self._store._catalog, view, name, threads=threads, for_torch=for_torch)

    def safe_open(
        self, framework: str = "np", device: Any = None, *, file: str | None = None
    ) -> SafeOpen:
        """Return an object with the interface of `safetensors.safe_open`.

        It has `keys`, `get_tensor`, `get_slice` and `metadata`, and is a context manager; a slice
        reads the blocks of its rows only. Large tensors are read as `load` does.

        framework: "np" or "pt".
        device: for torch.
        file: only the tensors of this file, and its metadata; None: those of all files, with
        metadata if there is only one.

        Raises NotFound (no such file, or it is not a safetensors file), BadRequest.
        """
        from mstore.api.load import SafeOpen

        opened = SafeOpen(self, framework, device, file)
        # Whatever is wrong with the file is told here.
        opened.keys()
        return opened

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """Return the bytes of one file.  Raises NotFound, Corrupt."""
        return b"".join(self._view().stream(os.fspath(path)))

    def lineage(self) -> list[SnapshotReport]:
        """Return this snapshot and all its ancestors, children before parents."""
        return lineage.log(self._store._catalog, [self.id], None)
