"""What a mount shows: the directory tree of one snapshot, or of the whole store.

    one snapshot            the whole store
    /config.json            /refs/<name>/config.json        a ref, slashes as directories
    /...                    /snapshots/<64 hex>/...         every snapshot, read when first entered

Owns names, attributes and inode numbers. Does not know FUSE, and reads no bytes of files. There are
no links of any kind. An inode number is a hash of (snapshot id, path), so it is the same in every
mount, on every machine and through every name of a snapshot.

**Refs move while they are read.** libfuse names a node by its path, and the kernel keeps one size
and one page cache for it. So the two snapshots that `refs/main` means before and after a move share
them. `StoreTree` separates them by two rules. While any file below a ref is open, the ref stays at
that snapshot (nothing open ever changes). The first open after a move gets `keep_cache=False`,
which drops the pages of the other snapshot, and so does every open until one of those has answered
(`settled`). The mount itself must not cache names and attributes here (`attributes_last_for`).

Threads: every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from mstore.errors import Corrupt, NotFound

BLOCK = 512
"""Unit of st_blocks, whatever the file system."""

IMMUTABLE_FOR = 3600.0
"""Seconds for which the kernel may cache names and attributes that never change."""

_TREES_KEPT = 32


class SnapshotView(Protocol):
    """One snapshot as read-only files.  Thread-safe."""

    @property
    def id(self) -> object:
        """The SnapshotId (its `str` is 64 hex digits)."""
        ...

    @property
    def files(self) -> Mapping[str, int]:
        """Maps relative POSIX path to size in bytes."""
        ...

    @property
    def time_ns(self) -> int:
        """When the snapshot was made, nanoseconds since the epoch."""
        ...

    def read(self, path: str, offset: int, size: int, /) -> bytes:
        """Return exactly these bytes, verified. Raises Corrupt or StorageFailed."""
        ...

    def prefetch(self, path: str, offset: int, size: int, /) -> None:
        """Hint that these bytes will be read soon."""
        ...


class NamedRef(Protocol):
    """A name and the snapshot (its `str` is 64 hex digits) that it points at."""

    @property
    def name(self) -> str: ...

    @property
    def snapshot(self) -> object: ...


class Hold(Protocol):
    """Protects a snapshot's contents from garbage collection."""

    def release(self) -> None: ...


class MountSource(Protocol):
    """An opened store.  Thread-safe."""

    def view(self, revision: str, /) -> SnapshotView:
        """Return the snapshot that this revision names. Raises NotFound or BadName."""
        ...

    def hold(self, snapshot: Any, /) -> Hold:
        """Protect this snapshot's contents until the hold is released, or the process ends."""
        ...

    def refs(self) -> Iterable[NamedRef]: ...

    def snapshot_ids(self) -> Iterable[object]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """The attributes of a file or directory; `size` is 0 for a directory."""

    inode: int
    is_directory: bool
    size: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What `df` shows: files and bytes of the snapshots read so far."""

    files: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """One open of one file: whose bytes, and whether the kernel's cached pages are of these.

    `mounted` is the path in the mount, `path` the one in the snapshot, `ref` the ref that stays at
    this snapshot until `release`.
    """

    view: SnapshotView
    path: str
    size: int
    keep_cache: bool
    mounted: str
    snapshot: str
    ref: str | None


class Tree(Protocol):
    """The files of a mount. A path is relative, without a leading slash; the root is ''.

    Each `open` needs exactly one `release`; `settled` may be called any number of times in between,
    once the kernel has used the opened file. Methods that take a path raise NotFound.
    """

    @property
    def attributes_last_for(self) -> float:
        """Seconds for which the kernel may cache names and attributes."""
        ...

    def entry(self, path: str) -> Entry: ...

    def children(self, path: str) -> list[tuple[str, Entry]]: ...

    def open(self, path: str) -> OpenFile: ...

    def settled(self, file: OpenFile) -> None: ...

    def release(self, file: OpenFile) -> None: ...

    def totals(self) -> Totals: ...


def inode_of(snapshot: str, path: str) -> int:
    """Return a stable positive 63-bit number; `snapshot` is '' outside of all snapshots."""
    digest = blake3(f"{snapshot}\0{path}".encode(errors="surrogateescape")).digest(8)
    return (int.from_bytes(digest, "big") >> 1) | 1


class SnapshotTree:
    """The tree of one snapshot, complete in memory; nothing in it ever changes.

    Raises Corrupt if the snapshot's paths do not form a tree of plain names.
    """

    attributes_last_for = IMMUTABLE_FOR

    def __init__(self, view: SnapshotView) -> None:
        self._view = view
        self._snapshot = str(view.id)
        self._entries: dict[str, Entry] = {"": self._directory("")}
        self._children: dict[str, list[str]] = {"": []}
        files = view.files
        for path, size in sorted(files.items()):
            inode = inode_of(self._snapshot, path)
            self._insert(path, Entry(inode, False, size, view.time_ns))
        self._totals = Totals(len(files), sum(files.values()))

    def _directory(self, path: str) -> Entry:
        return Entry(inode_of(self._snapshot, path), True, 0, self._view.time_ns)

    def _insert(self, path: str, entry: Entry) -> None:
        """Add a file, and its missing parent directories."""
        if path.startswith("/"):
            raise _no_directory_holds(path)
        while True:
            parent, _, name = path.rpartition("/")
            if name in ("", ".", "..") or "\0" in name or path in self._entries:
                raise _no_directory_holds(path)
            self._entries[path] = entry
            siblings = self._children.get(parent)
            if siblings is not None:
                siblings.append(name)
                return
            self._children[parent] = [name]
            path, entry = parent, self._directory(parent)

    def entry(self, path: str) -> Entry:
        entry = self._entries.get(path)
        if entry is None:
            raise NotFound("no such file", where=path)
        return entry

    def children(self, path: str) -> list[tuple[str, Entry]]:
        names = self._children.get(path)
        if names is None:
            raise NotFound("no such directory", where=path)
        prefix = f"{path}/" if path else ""
        return [(name, self._entries[prefix + name]) for name in names]

    def open(self, path: str) -> OpenFile:
        return self.open_as(path, mounted=path, keep_cache=True, ref=None)

    def open_as(self, path: str, *, mounted: str, keep_cache: bool, ref: str | None) -> OpenFile:
        """Open for an enclosing tree, in which the file is called `mounted`."""
        entry = self.entry(path)
        if entry.is_directory:
            raise NotFound("not a file", where=path)
        return OpenFile(self._view, path, entry.size, keep_cache, mounted, self._snapshot, ref)

    def settled(self, file: OpenFile) -> None:
        """Do nothing: one path, one snapshot."""

    def release(self, file: OpenFile) -> None:
        """Do nothing: nothing is held."""

    def totals(self) -> Totals:
        return self._totals


def _no_directory_holds(path: str) -> Corrupt:
    return Corrupt("the snapshot has a file that no directory can hold", where=repr(path))


@dataclass(slots=True)
class _RefPin:
    """A ref that `count` open files keep at a snapshot."""

    snapshot: str
    count: int


@dataclass(slots=True)
class _Held:
    """A snapshot with `count` open files."""

    hold: Hold
    count: int


@dataclass(frozen=True, slots=True)
class _Below:
    """A path inside a snapshot: the snapshot, the ref that led there, the rest of the path."""

    snapshot: str
    ref: str | None
    tail: str


class StoreTree:
    """The tree of a whole store. New refs and snapshots appear in it at once.

    Holds only snapshots with open files: an unused mount keeps no garbage. A lookup that misses
    reads the store again; one that hits may use a list of refs up to `max_age` seconds old.
    """

    attributes_last_for = 0.0

    def __init__(self, source: MountSource, *, max_age: float = 0.1) -> None:
        self._source = source
        self._max_age = max_age
        # FUSE has no times before 1970.
        self._time_ns = max(0, time.time_ns())
        self._lock = threading.RLock()
        self._trees: OrderedDict[str, SnapshotTree] = OrderedDict()
        self._refs: dict[str, str] = {}
        self._snapshots: set[str] = set()
        self._fresh_until = float("-inf")
        self._ref_pins: dict[str, _RefPin] = {}
        self._held: dict[str, _Held] = {}
        self._page_owner: dict[str, str] = {}

    def entry(self, path: str) -> Entry:
        with self._lock:
            place = self._find(path)
            if place is None:
                return self._directory(path)
            if not place.tail:
                # Not the snapshot's own time: `ls -l snapshots` must not read every manifest.
                return Entry(inode_of(place.snapshot, ""), True, 0, self._time_ns)
            return self._tree(place.snapshot).entry(place.tail)

    def children(self, path: str) -> list[tuple[str, Entry]]:
        with self._lock:
            self._reload()
            place = self._find(path)
            if place is not None:
                return self._tree(place.snapshot).children(place.tail)
            prefix = f"{path}/" if path else ""
            return [(name, self.entry(prefix + name)) for name in self._names(path)]

    def open(self, path: str) -> OpenFile:
        with self._lock:
            place = self._find(path)
            if place is None:
                raise NotFound("not a file", where=path)
            keep_cache = place.ref is None or self._page_owner.get(path) == place.snapshot
            file = self._tree(place.snapshot).open_as(
                place.tail, mounted=path, keep_cache=keep_cache, ref=place.ref
            )
            if place.ref is not None:
                self._ref_pins.setdefault(place.ref, _RefPin(place.snapshot, 0)).count += 1
            self._hold(file)
            return file

    def _hold(self, file: OpenFile) -> None:
        held = self._held.get(file.snapshot)
        if held is None:
            held = self._held[file.snapshot] = _Held(self._source.hold(file.view.id), 0)
        held.count += 1

    def _let_go(self, file: OpenFile) -> None:
        held = self._held[file.snapshot]
        held.count -= 1
        if not held.count:
            held.hold.release()
            del self._held[file.snapshot]

    def settled(self, file: OpenFile) -> None:
        if file.ref is not None:
            with self._lock:
                self._page_owner[file.mounted] = file.snapshot

    def release(self, file: OpenFile) -> None:
        with self._lock:
            self._let_go(file)
            if file.ref is not None:
                self._page_owner[file.mounted] = file.snapshot
                pin = self._ref_pins[file.ref]
                pin.count -= 1
                if not pin.count:
                    del self._ref_pins[file.ref]

    def totals(self) -> Totals:
        with self._lock:
            each = [tree.totals() for tree in self._trees.values()]
        return Totals(sum(one.files for one in each), sum(one.size for one in each))

    def _find(self, path: str) -> _Below | None:
        """Find where a path lies; None for a directory outside of all snapshots."""
        if time.monotonic() >= self._fresh_until:
            self._reload()
        try:
            return self._look(path)
        except NotFound:
            self._reload()
            return self._look(path)

    def _look(self, path: str) -> _Below | None:
        top, _, rest = path.partition("/")
        if not rest:
            if top in ("", "refs", "snapshots"):
                return None
            raise NotFound("no such directory", where=path)
        if top == "snapshots":
            snapshot, _, tail = rest.partition("/")
            if snapshot in self._snapshots:
                return _Below(snapshot, None, tail)
        elif top == "refs":
            parts = rest.split("/")
            for length in range(1, len(parts) + 1):
                ref = "/".join(parts[:length])
                if ref in self._ref_pins or ref in self._refs:
                    pin = self._ref_pins.get(ref)
                    snapshot = pin.snapshot if pin is not None else self._refs[ref]
                    return _Below(snapshot, ref, "/".join(parts[length:]))
            if any(ref.startswith(f"{rest}/") for ref in self._refs):
                return None
        raise NotFound("no such ref or snapshot", where=path)

    def _names(self, path: str) -> list[str]:
        if path == "":
            return ["refs", "snapshots"]
        if path == "snapshots":
            return sorted(self._snapshots)
        prefix = "" if path == "refs" else path.removeprefix("refs/") + "/"
        below = (ref for ref in self._refs if ref.startswith(prefix))
        return sorted({ref[len(prefix) :].partition("/")[0] for ref in below})

    def _directory(self, path: str) -> Entry:
        return Entry(inode_of("", path), True, 0, self._time_ns)

    def _reload(self) -> None:
        self._refs = {ref.name: str(ref.snapshot) for ref in self._source.refs()}
        self._snapshots = {str(snapshot) for snapshot in self._source.snapshot_ids()}
        self._fresh_until = time.monotonic() + self._max_age

    def _tree(self, snapshot: str) -> SnapshotTree:
        tree = self._trees.get(snapshot)
        if tree is None:
            tree = SnapshotTree(self._source.view(snapshot))
            self._trees[snapshot] = tree
            if len(self._trees) > _TREES_KEPT:
                self._trees.popitem(last=False)
        self._trees.move_to_end(snapshot)
        return tree
