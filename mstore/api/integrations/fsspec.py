"""Snapshots as files for programs that read through fsspec: pandas, datasets, huggingface_hub.

    mstore://REVISION/PATH?store=STORE

    fsspec.open("mstore://llama/merged/config.json?store=/srv/models/.mstore")
    fsspec.filesystem("mstore", store=".mstore").ls("llama/merged")

The path begins with a revision as on the command line: a ref, `REF@{1}`, `REF~1`, or an id or its
beginning.  Refs look like directories, because their names may have slashes.  Read-only.  A file
that is open stays what it was when the ref moves.  (filesystem-spec.readthedocs.io)
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final
from urllib.parse import urlencode

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from mstore.api import Store
from mstore.api.integrations.urls import DEFAULT_STORE, HEAD, PROTOCOL, open_store, store_of
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadName, NotFound
from mstore.terms.ids import SnapshotId

_MARKS: Final = re.compile(r"[@~]")
_ID: Final = re.compile(r"[0-9a-f]{4,64}")
_FILE: Final = "file"
_DIRECTORY: Final = "directory"


class MstoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The refs and snapshots of one store.

    store: its directory; .mstore of the current one if none is given, which must then be this
    user's.  It may travel to other processes, and forked children may use it: each opens the store
    for itself.
    """

    protocol = PROTOCOL
    root_marker = ""

    def __init__(self, store: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._is_named = store is not None
        self._path = DEFAULT_STORE if store is None else os.fspath(store)
        super().__init__(store=self._path, **options)
        # By process: a forked child leaves alone what it inherits, locked or not.
        self._locks: dict[int, Lock] = {}
        self._opened: dict[int, Store] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        plain = text.removeprefix(HEAD).removeprefix(f"{PROTOCOL}::")
        return plain.partition("?")[0].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        """Return what a URL says beside the path.  Raises BadRequest for another query."""
        store = store_of(path)
        return {} if store is None else {"store": store}

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path, with its store."""
        return f"{HEAD}{self._strip_protocol(name)}?{urlencode({'store': self._path})}"

    @property
    def store(self) -> Store:
        """The open store.

        Raises as `Store.open`, and Conflict for a store of another user that was not named.
        """
        process = os.getpid()
        with self._locks.setdefault(process, Lock()):
            if process not in self._opened:
                self._opened[process] = open_store(self._path if self._is_named else None)
            return self._opened[process]

    # -- where a path leads --------------------------------------------------------------------

    def _snapshot(self, path: str) -> tuple[str, SnapshotView, str] | None:
        """Split a path into a revision, its view, and the rest; None if no revision begins it."""
        parts = self._strip_protocol(path).split("/")
        names = self.store.ref_ids()
        for count in range(1, len(parts) + 1):
            revision = "/".join(parts[:count])
            name = _MARKS.split(revision)[0]
            if name in names or (count == 1 and _ID.fullmatch(name)):
                try:
                    return revision, self.store.view(revision), "/".join(parts[count:])
                except (NotFound, BadName) as error:
                    raise FileNotFoundError(f"{path}: {error}") from error
        return None

    def _file(self, path: str) -> tuple[SnapshotView, str]:
        """Return the view that has a file, and the path in it.  Raises FileNotFoundError."""
        found = self._snapshot(path)
        if found is not None:
            _, view, inner = found
            if inner in view.files:
                return view, inner
            if not inner or any(one.startswith(f"{inner}/") for one in view.files):
                raise IsADirectoryError(path)
            raise _missing("the snapshot has no such file", path)
        if self._is_above_refs(path):
            raise IsADirectoryError(path)
        raise _missing("no ref or snapshot has this name", path)

    def _is_above_refs(self, path: str) -> bool:
        below = self._strip_protocol(path)
        return not below or any(name.startswith(f"{below}/") for name in self.store.ref_ids())

    # -- what programs call --------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return what is in a directory, or a file alone."""
        path = self._strip_protocol(path)
        found = self._snapshot(path)
        if found is not None:
            entries = list(self._inside(*found))
        elif self._is_above_refs(path):
            entries = _children(path, dict.fromkeys(self.store.ref_ids(), None))
        else:
            entries = []
        if not entries and found is None and path:
            raise FileNotFoundError(path)
        if found is not None and found[2] and not entries:
            raise FileNotFoundError(path)
        entries.sort(key=lambda entry: entry["name"])
        return entries if detail else [entry["name"] for entry in entries]

    def _inside(self, revision: str, view: SnapshotView, inner: str) -> Iterator[dict[str, Any]]:
        if inner in view.files:
            yield _entry(f"{revision}/{inner}", view, inner)
            return
        named = {f"{revision}/{path}": size for path, size in view.files.items()}
        for entry in _children(f"{revision}/{inner}".rstrip("/"), named):
            is_file = entry["type"] == _FILE
            inner_path = entry["name"].removeprefix(f"{revision}/")
            yield _entry(entry["name"], view, inner_path) if is_file else entry

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return one entry: its name, size and type, and the snapshot of a file."""
        path = self._strip_protocol(path)
        try:
            view, inner = self._file(path)
        except IsADirectoryError:
            return {"name": path, "size": 0, "type": _DIRECTORY}
        return _entry(path, view, inner)

    def modified(self, path: str) -> datetime:
        """Return the time of a file's snapshot."""
        found: datetime = self.info(path)["modified"]
        return found

    created = modified

    def ukey(self, path: str) -> str:
        """Return a text that changes when the file belongs to another snapshot."""
        entry = self.info(path)
        return f"{entry.get('snapshot')}/{entry['name']}"

    def checksum(self, path: str) -> int:
        """Return a number that follows from `ukey`."""
        return int.from_bytes(self.ukey(path).encode(), "big")

    def mkdir(self, path: str, *_: Any, **__: Any) -> None:
        """Raise OSError: nothing is written here."""
        raise _read_only(path)

    makedirs = mkdir

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the bytes of a file, or those from `start` to before `end`."""
        view, inner = self._file(path)
        first, last, _step = slice(start, end).indices(view.files[inner])
        return view.read(inner, first, max(0, last - first))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> MstoreFile:
        if mode != "rb":
            raise _read_only(path)
        view, inner = self._file(path)
        return MstoreFile(
            self,
            path,
            view,
            inner,
            block_size=block_size or "default",
            cache_options=cache_options,
            **options,
        )


class MstoreFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file of a snapshot."""

    def __init__(
        self, fs: MstoreFileSystem, path: str, view: SnapshotView, inner: str, **options: Any
    ) -> None:
        self._snapshot = view.id
        self._inner = inner
        super().__init__(fs, path, "rb", size=view.files[inner], **options)

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that the file belongs to."""
        return self._snapshot

    def _fetch_range(self, start: int, end: int) -> bytes:
        store: Store = self.fs.store
        return store.view(self._snapshot).read(self._inner, start, end - start)


def _missing(what: str, path: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, what, path)


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, "snapshots are read-only", path)


def _entry(name: str, view: SnapshotView, inner: str) -> dict[str, Any]:
    """Return the entry of a file."""
    return {
        "name": name,
        "size": view.files[inner],
        "type": _FILE,
        "snapshot": view.id.hex(),
        "modified": datetime.fromtimestamp(view.time_ns / 1e9, UTC),
    }


def _children(path: str, named: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Return the entries of a directory, from names and their sizes (None: a directory)."""
    head = f"{path}/" if path else ""
    found: dict[str, dict[str, Any]] = {}
    for name, size in named.items():
        if not name.startswith(head):
            continue
        first, slash, _ = name[len(head) :].partition("/")
        is_file = not slash and size is not None
        found.setdefault(
            first,
            {
                "name": head + first,
                "size": size if is_file else 0,
                "type": _FILE if is_file else _DIRECTORY,
            },
        )
    return list(found.values())
