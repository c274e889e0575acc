"""What a mount tells about snapshots: `.mstore/manifest.json`, `.mstore/lineage.json`, labels.

    manifest.json   snapshot and manifest ids, files with their ids, tensors with type, shape and id
    lineage.json    the snapshot and its ancestors, in the words of the reports
    labels          tensors (how many a safetensors file has), file (the id of its content)

Owns their contents; `tree` decides where they show. The words are those of the library's reports,
so that a script reads here what it reads from the command line.

What a file takes at rest is read from the packs, and stat(2) must not wait for a disk that does not
answer: then it is unknown.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mstore.snapshots import lineage
from mstore.store.objects.manifest import SAFETENSORS
from mstore.terms.report import plain

if TYPE_CHECKING:
    from mstore import Store
    from mstore.store.view import SnapshotView


class AboutStore:
    """Tells about the snapshots of an open store. Thread-safe.

    patience: how long `stored` waits for the disk, in seconds.
    """

    def __init__(self, store: Store, *, patience: float = 1.0) -> None:
        self._store = store
        self._patience = patience
        self._lock = threading.Lock()
        self._counting: dict[tuple[object, str], Future[int]] = {}
        self._is_late = False

    def files(self, view: SnapshotView) -> Mapping[str, Callable[[], bytes]]:
        """Return the files about a snapshot: by name, what makes the content of each."""
        return {
            "manifest.json": lambda: _text(self._manifest(view)),
            "lineage.json": lambda: _text({"snapshots": self._store.log(view.id)}),
        }

    def _manifest(self, view: SnapshotView) -> dict[str, object]:
        files = [
            {**plain(file), "id": view.content_id(file.path).hex()}
            for file in lineage.reported(view.manifest.files)
        ]
        tensors = [
            {**plain(lineage.tensor(view.models, name, view.record(name))), "id": id.hex()}
            for name, id in view.tensors.items()
        ]
        return {
            "snapshot": view.id,
            "manifest": view.manifest_id,
            "time_ns": view.time_ns,
            "files": files,
            "tensors": tensors,
        }

    def labels(self, view: SnapshotView, path: str) -> Mapping[str, str]:
        """Return the number of tensors, for a safetensors file, and the id of the content."""
        labels = {"file": view.content_id(path).hex()}
        file = view.manifest.file(path)
        if file is not None and file.form == SAFETENSORS:
            labels["tensors"] = str(sum(1 for _ in file.tensors()))
        return labels

    def stored(self, view: SnapshotView, path: str) -> int | None:
        """Return the bytes at rest of a file; None as long as the disk is late. Raises Corrupt."""
        key = (view.id, path)
        with self._lock:
            counting = self._counting.get(key)
            if counting is None:
                if self._is_late:
                    return None
                counting = self._counting[key] = Future()
                # No pool: a thread that waits for a disk for ever must not keep the process.
                count = threading.Thread(target=self._count, args=(view, path), daemon=True)
                try:
                    count.start()
                except RuntimeError:
                    # No more threads: whoever asks later starts anew.
                    del self._counting[key]
                    return None
            patience = 0.0 if self._is_late else self._patience
        try:
            return counting.result(patience)
        except TimeoutError:
            with self._lock:
                self._is_late = key in self._counting
            return None

    def _count(self, view: SnapshotView, path: str) -> None:
        """Settle what `stored` waits for; whoever asks later starts anew."""
        with self._lock:
            counting = self._counting[view.id, path]
        try:
            counting.set_result(view.stored_bytes(path))
        except BaseException as error:  # noqa: BLE001 - carried to those who wait
            counting.set_exception(error)
        with self._lock:
            del self._counting[view.id, path]
            self._is_late = False


def _text(value: object) -> bytes:
    return json.dumps(plain(value), indent=1, allow_nan=False).encode() + b"\n"
