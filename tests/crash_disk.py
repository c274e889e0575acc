"""A disk that loses power: records what the library does to files, and rebuilds what may be left.

Owns the recording of `mstore.fs` operations, a model of files and directories in which data and
names become durable only by the syncs that POSIX promises it for, and the enumeration of the
disks that a power loss after any operation may leave:

- data written and not fsynced: lost, kept, cut off, turned into zeros, or kept page by page;
- names made, renamed, linked or removed and not followed by an fsync of their directory: lost in
  any combination, later ones without earlier ones, a file's old name without its new one;
- an LMDB commit is one durable step (LMDB's own promise), but for the name of a new data file.

All combinations are tried while few changes are pending (`EXHAUSTIVE`); beyond that none, all,
each alone and all but each.  What a store should look like is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path

from blake3 import blake3

from mstore import fs

PAGE = 4096
EXHAUSTIVE = 8
DATABASE = "data.mdb"


@dataclass(frozen=True, slots=True)
class Event:
    """An operation of `mstore.fs` with its data copied; a `committed` one carries the database."""

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""


class Recording:
    """Everything that was done below `root`, in order.  Pass `observe` to `fs.observed`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.initial = _load(root)
        self.events: list[Event] = []

    def observe(self, operation: fs.Operation) -> None:
        data = bytes(operation.data)
        if operation.kind == "committed":
            data = (Path(operation.path) / DATABASE).read_bytes()
        target = operation.target and self._relative(operation.target)
        self.events.append(
            Event(operation.kind, self._relative(operation.path), target, operation.offset, data)
        )

    def _relative(self, path: str) -> str:
        return str(Path(path).relative_to(self.root))

    def crashes(self) -> Iterator[Crash]:
        """Every disk that a power loss after any number of the operations may leave."""
        disk = Disk(_load_again(self.initial))
        yield from (Crash(0, tree) for tree in disk.states())
        for number, event in enumerate(self.events, 1):
            disk.apply(event)
            yield from (Crash(number, tree) for tree in disk.states())


Tree = dict[str, bytes | None]
"""Path -> contents of a file, or None for a directory; parents come before children."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A disk as found after a power loss that hit when `after` operations had been done."""

    after: int
    tree: Tree

    def digest(self) -> bytes:
        """Equal for equal trees."""
        parts = []
        for path in sorted(self.tree):
            contents = self.tree[path]
            kind = b"d" if contents is None else b"f" + _digest(contents)
            parts.append(path.encode() + b"\0" + kind + b"\0")
        return blake3(b"".join(parts)).digest()

    def build(self, root: Path) -> None:
        """Write the tree below `root`, a new directory."""
        root.mkdir()
        for path, contents in self.tree.items():
            if contents is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(contents)


@lru_cache(maxsize=1024)
def _digest(contents: bytes) -> bytes:
    """Of thousands of disks almost all files are the same objects, whose hash Python keeps."""
    return blake3(contents).digest()


@dataclass(eq=False, slots=True)
class _File:
    """`synced` survives; each write in `pending` may or may not."""

    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    _survivors: list[bytes] | None = None

    def write(self, offset: int, data: bytes) -> None:
        """Write without a sync."""
        self.pending.append((offset, data))
        self._survivors = None

    def sync(self, synced: bytes) -> None:
        """From now on it is this, whatever happens."""
        self.synced, self.pending, self._survivors = synced, [], [synced]

    def current(self) -> bytes:
        data = bytearray(self.synced)
        for offset, written in self.pending:
            data.extend(bytes(max(0, offset + len(written) - len(data))))
            data[offset : offset + len(written)] = written
        return bytes(data)

    def survivors(self) -> list[bytes]:
        """What a power loss may leave of it."""
        if self._survivors is None:
            self._survivors = self._cut() if self.pending else [self.synced]
        return self._survivors

    def _cut(self) -> list[bytes]:
        full = self.current()
        start = len(self.synced)
        middle = start + (len(full) - start) // 2
        zeros = self.synced[:start].ljust(len(full), b"\0")
        pages = range(0, len(full), PAGE)
        odd = b"".join(
            (full if number % 2 else zeros)[page : page + PAGE] for number, page in enumerate(pages)
        )
        last = zeros[: pages[-1]] + full[pages[-1] :] if pages else b""
        return list(dict.fromkeys([self.synced, full, full[:middle], zeros, odd, last]))


@dataclass(eq=False, slots=True)
class _Directory:
    """`synced` names survive; each change in `pending` (name, what or None) may or may not."""

    synced: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Directory | None]] = field(default_factory=list)

    def names(self, kept: set[int] | None = None) -> dict[str, _File | _Directory]:
        """The names with all pending changes, or with those that were kept."""
        found = dict(self.synced)
        for number, (name, what) in enumerate(self.pending):
            if kept is not None and number not in kept:
                continue
            if what is None:
                found.pop(name, None)
            else:
                found[name] = what
        return found


class Disk:
    """Files and directories between what was asked for and what is durable."""

    def __init__(self, root: _Directory) -> None:
        self._root = root

    @classmethod
    def empty(cls) -> Disk:
        """A disk with nothing on it."""
        return cls(_Directory())

    def apply(self, event: Event) -> None:
        """Do one operation."""
        match event.kind:
            case "create":
                if self._find(event.path) is None:
                    self._name(event.path, _File())
            case "write":
                self._file(event.path).write(event.offset, event.data)
            case "fsync":
                file = self._file(event.path)
                file.sync(file.current())
            case "rename":
                self._name(event.target, self._find(event.path))
                self._name(event.path, None)
            case "exchange":
                first, second = self._find(event.path), self._find(event.target)
                self._name(event.target, first)
                self._name(event.path, second)
            case "link":
                self._name(event.target, self._find(event.path))
            case "unlink":
                if self._find(event.path) is not None:
                    self._name(event.path, None)
            case "mkdir":
                self._name(event.path, _Directory())
            case "rmtree":
                self._remove(event.path)
            case "syncdir":
                directory = self._directory(event.path)
                directory.synced, directory.pending = directory.names(), []
            case "commit" | "map":
                pass
            case "committed":
                self._commit(f"{event.path}/{DATABASE}", event.data)
            case _:
                raise AssertionError(f"the model does not know {event.kind}")

    def _commit(self, path: str, database: bytes) -> None:
        if self._find(path) is None:
            self._name(path, _File())
        self._file(path).sync(database)

    def _remove(self, path: str) -> None:
        directory = self._directory(path)
        for name, what in directory.names().items():
            if isinstance(what, _Directory):
                self._remove(f"{path}/{name}")
            else:
                self._name(f"{path}/{name}", None)
        self._name(path, None)

    def _find(self, path: str) -> _File | _Directory | None:
        found: _File | _Directory | None = self._root
        for part in Path(path).parts:
            if not isinstance(found, _Directory):
                return None
            found = found.names().get(part)
        return found

    def _file(self, path: str) -> _File:
        found = self._find(path)
        assert isinstance(found, _File), path
        return found

    def _directory(self, path: str) -> _Directory:
        found = self._find(path)
        assert isinstance(found, _Directory), path
        return found

    def _name(self, path: str, what: _File | _Directory | None) -> None:
        parent, name = str(Path(path).parent), Path(path).name
        self._directory(parent).pending.append((name, what))

    def states(self) -> Iterator[Tree]:
        """Every tree that a power loss now may leave; some of them are equal."""
        changes = [
            (directory, number)
            for directory in self._directories()
            for number in range(len(directory.pending))
        ]
        for kept in _subsets(changes):
            yield from _trees(self._root, kept)

    def _directories(self) -> Iterator[_Directory]:
        """Every directory that any combination of changes can reach, once."""
        seen: list[_Directory] = [self._root]
        for directory in seen:
            below = [*directory.synced.values(), *(what for _, what in directory.pending)]
            for what in below:
                if isinstance(what, _Directory) and what not in seen:
                    seen.append(what)
            yield directory


_Change = tuple[_Directory, int]


def _subsets(changes: list[_Change]) -> Iterator[dict[int, set[int]]]:
    """Which changes are kept, by directory (its `id`)."""
    count = len(changes)
    if count <= EXHAUSTIVE:
        sizes: list[int] = list(range(count + 1))
    else:
        sizes = [0, 1, count - 1, count]
    for size in sizes:
        for chosen in combinations(changes, size):
            kept: dict[int, set[int]] = {}
            for directory, number in chosen:
                kept.setdefault(id(directory), set()).add(number)
            yield kept


def _trees(root: _Directory, kept: dict[int, set[int]]) -> Iterator[Tree]:
    tree: dict[str, _File | None] = {}
    _walk(root, "", kept, tree)
    kept_files: Tree = {path: None if what is None else what.synced for path, what in tree.items()}
    unsynced = {path: what for path, what in tree.items() if what is not None and what.pending}
    for variant in range(max((len(file.survivors()) for file in unsynced.values()), default=1)):
        yield kept_files | {path: _pick(what, variant) for path, what in unsynced.items()}


def _pick(file: _File, variant: int) -> bytes:
    survivors = file.survivors()
    return survivors[min(variant, len(survivors) - 1)]


def _walk(
    directory: _Directory, prefix: str, kept: dict[int, set[int]], tree: dict[str, _File | None]
) -> None:
    for name, what in directory.names(kept.get(id(directory), set())).items():
        path = prefix + name
        if isinstance(what, _Directory):
            tree[path] = None
            _walk(what, f"{path}/", kept, tree)
        else:
            tree[path] = what


def _load(root: Path) -> _Directory:
    """A directory as it is, all of it durable."""
    found = _Directory()
    for path in root.iterdir():
        found.synced[path.name] = _load(path) if path.is_dir() else _File(path.read_bytes())
    return found


def _load_again(directory: _Directory) -> _Directory:
    """A copy that `Disk` may change."""
    copy = _Directory()
    for name, what in directory.synced.items():
        copy.synced[name] = (
            _load_again(what) if isinstance(what, _Directory) else _File(what.synced)
        )
    return copy
