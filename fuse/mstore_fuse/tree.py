"""What a mount shows: the directory tree of one snapshot, or of the whole store.

    one snapshot            the whole store
    /config.json            /refs/<name>/config.json        a ref, slashes as directories
    /...                    /snapshots/<64 hex>/...         every snapshot, read when first entered

    a ref that is followed: the files of /refs/<name> at the top (`RefTree`)
    a folder: the refs that hold models of one kind, as programs look for them (`folders`)

Owns names, attributes and inode numbers. Does not know FUSE, and reads no bytes of files. There are
no links of any kind. An inode number is a hash of (snapshot id, path), so it is the same in every
mount, on every machine and through every name of a snapshot.

**Files about a snapshot.** The directory `.mstore` of each snapshot has files that the mount makes
(`about`): they are found by name, and listed only if the mount was asked for that. They are made
when first looked at, and then stay. A snapshot that has something called `.mstore` itself shows
that and nothing else: what was added comes first.

**Refs move while they are read.** A node is a path (`connection`), and the kernel keeps one size
and one page cache for it. So the two snapshots that `refs/main` means before and after a move share
them. `MovingTree` separates them by two rules. While any file below a ref is open, the ref stays at
that snapshot (nothing open ever changes). The first open after a move gets `keep_cache=False`,
which drops the pages of the other snapshot, and so does every open until one of those has answered
(`settled`). The kernel must not keep names and attributes here (`lasts`).

Threads: every method may be called from any thread. No lock is held while the store is read: a
snapshot that cannot be read, or takes long, delays nobody who asks for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from blake3 import blake3

from mstore.terms.errors import Corrupt, MstoreError, NotFound
from mstore.terms.ids import Buffer

BLOCK = 512
"""Unit of st_blocks, whatever the file system."""

NAME_MAX = 255
"""Bytes that a name may have."""

IMMUTABLE_FOR = 3600.0
"""Seconds for which the kernel may keep names and attributes that never change."""

COLLECTED_WITHIN = 10.0
"""Seconds for which the kernel may keep the name of a snapshot, which can be collected."""

ABOUT = ".mstore"
"""The directory of the files about a snapshot."""


class MountView(Protocol):
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

    def pieces(self, path: str, offset: int, size: int, /) -> list[Buffer]:
        """Return verified bytes in pieces, which nobody may change; fewer only at the file's end.

        Raises Corrupt or StorageFailed.
        """
        ...

    def continues_to(self, path: str, offset: int, size: int, /) -> int:
        """Return the end of the tensor that begins in these bytes, or the end of the bytes."""
        ...

    @property
    def read_ahead(self) -> int:
        """How many bytes to prefetch for a reader who reads one after the other."""
        ...

    def prefetch(self, path: str, offset: int, size: int, /) -> None:
        """Hint that these bytes will be read soon; behind the end, of the file that follows."""
        ...


class MountHold(Protocol):
    """Protects a snapshot's contents from garbage collection."""

    def release(self) -> None: ...


class MountSource(Protocol):
    """An opened store.  Thread-safe."""

    def view(self, revision: str, /) -> MountView:
        """Return the snapshot that this revision names. Raises NotFound or BadName."""
        ...

    def hold(self, snapshot: Any, /, *, sure: bool = False) -> MountHold:
        """Protect this snapshot's contents until the hold is released, or the process ends.

        sure: raises Conflict if the snapshot was collected; else such a hold protects nothing.
        """
        ...

    def ref_ids(self) -> Mapping[str, object]:
        """Return what each ref points at, whether or not that can be read."""
        ...

    def snapshot_ids(self) -> Iterable[object]: ...

    def generation(self) -> int:
        """Return a number that changes whenever refs or snapshots do."""
        ...

    def close(self) -> None: ...


class About(Protocol):
    """What a mount tells about a snapshot and its files, beside their bytes."""

    def files(self, view: Any, /) -> Mapping[str, Callable[[], bytes]]:
        """Return the files about a snapshot: by name, what makes the content of each."""
        ...

    def labels(self, view: Any, path: str, /) -> Mapping[str, str]:
        """Return what there is to say of a file in a few words, by name."""
        ...

    def stored(self, view: Any, path: str, /) -> int | None:
        """Return the bytes at rest of a file; None if they are unknown, perhaps for now."""
        ...


class Nothing:
    """An `About` that tells nothing."""

    def files(self, view: Any) -> Mapping[str, Callable[[], bytes]]:
        return {}

    def labels(self, view: Any, path: str) -> Mapping[str, str]:
        return {}

    def stored(self, view: Any, path: str) -> int | None:
        return None


NOTHING = Nothing()


class Attributes(msgspec.Struct, frozen=True):
    """The attributes of a file or directory; `size` is 0 for a directory."""

    inode: int
    is_directory: bool
    size: int
    time_ns: int


class ShownAmounts(msgspec.Struct, frozen=True):
    """What `df` shows: files and bytes of the snapshots read so far."""

    files: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """One open of one file: whose bytes, and whether the kernel's cached pages are of these.

    `mounted` is the path in the mount, `path` the one in the snapshot, `at` the path in the mount
    that goes on to show this snapshot until `release`, if any could show another one. `content`
    holds the bytes of a file that is not in the snapshot, but about it or in place of one.
    """

    view: MountView
    path: str
    size: int
    keep_cache: bool
    mounted: str
    snapshot: str
    at: str | None
    content: bytes | None = None


class MountTree(Protocol):
    """The files of a mount. A path is relative, without a leading slash; the root is ''.

    Each `open` needs exactly one `release`; `settled` may be called any number of times in between,
    once the kernel has used the opened file. Methods that take a path raise NotFound.
    """

    def lasts(self, path: str) -> float:
        """Return for how many seconds the kernel may keep a name and its attributes."""
        ...

    def absent_for(self, path: str) -> float:
        """Return for how many seconds the kernel may take it that there is no such path."""
        ...

    def entry(self, path: str) -> Attributes: ...

    def children(self, path: str) -> list[tuple[str, Attributes]]: ...

    def open(self, path: str) -> OpenFile: ...

    def settled(self, file: OpenFile) -> None: ...

    def release(self, file: OpenFile) -> None: ...

    def stored(self, path: str) -> int:
        """Return the bytes that a file takes at rest; its size if they are unknown."""
        ...

    def labels(self, path: str) -> Mapping[str, str]:
        """Return what there is to say of a file or directory, by name: snapshot, ref, ..."""
        ...

    def totals(self) -> ShownAmounts: ...


def inode_of(snapshot: str, path: str) -> int:
    """Return a stable positive 63-bit number; `snapshot` is '' outside of all snapshots."""
    digest = blake3(f"{snapshot}\0{path}".encode(errors="surrogateescape")).digest(8)
    return (int.from_bytes(digest, "big") >> 1) | 1


class SnapshotTree:
    """The tree of one snapshot, complete in memory; nothing in it ever changes.

    about: makes the files about the snapshot. show_about: whether its directory is listed.
    replaced: files that show other bytes than they have, by their paths.

    Raises Corrupt if the snapshot's paths do not form a tree of plain names.
    """

    def __init__(
        self,
        view: MountView,
        about: About = NOTHING,
        *,
        show_about: bool = False,
        replaced: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._view = view
        self._snapshot = str(view.id)
        self._replaced = replaced
        self._entries: dict[str, Attributes] = {"": self._directory("")}
        self._children: dict[str, list[str]] = {"": []}
        files = {**view.files, **{path: len(data) for path, data in replaced.items()}}
        for path, size in sorted(files.items()):
            self._insert(path, self._file(path, size))
        self._totals = ShownAmounts(len(files), sum(files.values()))
        self._about = about
        self._stored: dict[str, int] = {}
        self._made: Mapping[str, Callable[[], bytes]] = {}
        self._contents: dict[str, bytes] = {}
        if ABOUT not in self._entries:
            self._made = {f"{ABOUT}/{name}": make for name, make in about.files(view).items()}
        if self._made:
            self._entries[ABOUT] = self._directory(ABOUT)
            self._children[ABOUT] = [path.rpartition("/")[2] for path in self._made]
            if show_about:
                self._children[""].append(ABOUT)

    def lasts(self, path: str) -> float:
        return IMMUTABLE_FOR

    def absent_for(self, path: str) -> float:
        return IMMUTABLE_FOR

    def _directory(self, path: str) -> Attributes:
        return Attributes(inode_of(self._snapshot, path), True, 0, self._view.time_ns)

    def _file(self, path: str, size: int) -> Attributes:
        return Attributes(inode_of(self._snapshot, path), False, size, self._view.time_ns)

    def _insert(self, path: str, entry: Attributes) -> None:
        """Add a file, and its missing parent directories."""
        if path.startswith("/"):
            raise no_directory_holds(path)
        while True:
            parent, _, name = path.rpartition("/")
            if name in ("", ".", "..") or "\0" in name or path in self._entries:
                raise no_directory_holds(path)
            self._entries[path] = entry
            siblings = self._children.get(parent)
            if siblings is not None:
                siblings.append(name)
                return
            self._children[parent] = [name]
            path, entry = parent, self._directory(parent)

    def entry(self, path: str) -> Attributes:
        entry = self._entries.get(path)
        if entry is None:
            if path not in self._made:
                raise NotFound("no such file", where=path)
            entry = self._file(path, len(self._content(path)))
        return entry

    def _content(self, path: str) -> bytes:
        """Return the bytes of a file about the snapshot; the first that were made stay."""
        content = self._contents.get(path)
        if content is None:
            content = self._contents.setdefault(path, self._made[path]())
        return content

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        names = self._children.get(path)
        if names is None:
            raise NotFound("no such directory", where=path)
        prefix = f"{path}/" if path else ""
        return [(name, self.entry(prefix + name)) for name in names]

    def open(self, path: str) -> OpenFile:
        return self.open_as(path, mounted=path, keep_cache=True, at=None)

    def open_as(self, path: str, *, mounted: str, keep_cache: bool, at: str | None) -> OpenFile:
        """Open for an enclosing tree, in which the file is called `mounted`."""
        entry = self.entry(path)
        if entry.is_directory:
            raise NotFound("not a file", where=path)
        content = self._replaced.get(path)
        if path in self._made:
            content = self._content(path)
        return OpenFile(
            self._view, path, entry.size, keep_cache, mounted, self._snapshot, at, content
        )

    def settled(self, file: OpenFile) -> None:
        """Do nothing: one path, one snapshot."""

    def release(self, file: OpenFile) -> None:
        """Do nothing: nothing is held."""

    def stored(self, path: str) -> int:
        counted = self.counted(path)
        return self.entry(path).size if counted is None else counted

    def counted(self, path: str) -> int | None:
        """Return the bytes that a file takes at rest; None if they are unknown, perhaps for now."""
        known = self._stored.get(path)
        if known is not None:
            return known
        size = self.entry(path).size
        if path in self._made or path in self._replaced or size == 0:
            return size
        try:
            told = self._about.stored(self._view, path)
        except MstoreError:
            # Whoever reads the file is told what is wrong; `ls` need not fail.
            return None
        if told is None:
            return None
        # Zero would tell programs that the file is one hole, and they would not read it.
        known = self._stored[path] = max(1, told)
        return known

    def labels(self, path: str) -> Mapping[str, str]:
        self.entry(path)
        labels = {"snapshot": self._snapshot}
        if not any(path in those for those in (self._children, self._made, self._replaced)):
            labels |= self._about.labels(self._view, path)
        return labels

    def totals(self) -> ShownAmounts:
        return self._totals


def no_directory_holds(path: str) -> Corrupt:
    """Return the error for paths that form no tree of plain names."""
    return Corrupt("the snapshot has a file that no directory can hold", where=repr(path))
