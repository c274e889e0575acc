"""Trees of many snapshots, by the names that refs give them; see tree.py for what they show.

Owns what follows from refs that move while they are read, and from snapshots that come and go.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from mstore.terms.errors import NotFound
from mstore_fuse.tree import (
    COLLECTED_WITHIN,
    IMMUTABLE_FOR,
    NOTHING,
    About,
    Attributes,
    MountHold,
    MountSource,
    MountView,
    OpenFile,
    ShownAmounts,
    SnapshotTree,
    inode_of,
)

_TREES_KEPT = 32


class ShownPath(msgspec.Struct, frozen=True):
    """What a path shows: a snapshot, or its file at `tail`, and the ref that leads there, if any.

    file: the attributes of the file; None for a snapshot.
    """

    snapshot: str
    ref: str | None = None
    tail: str = ""
    file: Attributes | None = None


@dataclass(slots=True)
class _Kept:
    """What a path goes on to show for `count` open files."""

    shown: ShownPath
    count: int


@dataclass(slots=True)
class _Held:
    """A snapshot with `count` open files."""

    hold: MountHold
    count: int


class _Below(msgspec.Struct, frozen=True):
    """A path inside of what is shown `at` a path above it, or there; `tail` is in the snapshot."""

    at: str
    shown: ShownPath
    tail: str


class MovingTree(ABC):
    """A tree of snapshots and files of them, shown at paths. New ones appear in it at once.

    Where one shown path lies below another, the upper one counts. The time of a directory is that
    of the last change in it: something came there, went, or is of another snapshot.

    Holds only snapshots with open files: an unused mount keeps no garbage. A lookup that misses
    reads the store again; one that hits may use what was read up to `max_age` seconds before.
    about, show_about, replaced: as for `SnapshotTree`; replaced is called with the view of each.
    """

    always: ClassVar[tuple[str, ...]] = ("",)
    """Directories that are there also when they are empty."""

    def __init__(
        self,
        source: MountSource,
        about: About = NOTHING,
        *,
        show_about: bool = False,
        max_age: float = 0.1,
        replaced: Callable[[MountView], Mapping[str, bytes]] = lambda view: {},
    ) -> None:
        self._source = source
        self._replaced = replaced
        self._about = about
        self._show_about = show_about
        self._max_age = max_age
        # FUSE has no times before 1970.
        self._time_ns = max(0, time.time_ns())
        # Guards what follows; never held while the store is read.
        self._lock = threading.RLock()
        self._trees: OrderedDict[str, SnapshotTree] = OrderedDict()
        self._shown: Mapping[str, ShownPath] = {}
        # The names in each directory, and what they show: None for a directory.
        self._names: Mapping[str, Mapping[str, ShownPath | None]] = {}
        self._times: Mapping[str, int] = {}
        self._generation: int | None = None
        self._loads = itertools.count(1)
        self._loaded = 0
        self._fresh_until = float("-inf")
        self._kept: dict[str, _Kept] = {}
        self._held: dict[str, _Held] = {}
        self._page_owner: dict[str, tuple[str, str]] = {}
        self._stored: dict[int, int] = {}

    @abstractmethod
    def _read(self) -> Mapping[str, ShownPath]:
        """Read from the store what is shown, by path."""

    @abstractmethod
    def lasts(self, path: str) -> float: ...

    @abstractmethod
    def absent_for(self, path: str) -> float: ...

    def entry(self, path: str) -> Attributes:
        place = self._find(path)
        if place is None:
            return self._directory(path)
        if place.at == path:
            return self._entry_of(place.shown)
        return self._tree(place.shown.snapshot).entry(place.tail)

    def _entry_of(self, shown: ShownPath) -> Attributes:
        # Not the snapshot's own time: `ls -l snapshots` must not read every manifest.
        return shown.file or Attributes(inode_of(shown.snapshot, ""), True, 0, self._time_ns)

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        self._reload()
        place = self._find(path)
        if place is not None:
            return self._tree(place.shown.snapshot).children(place.tail)
        prefix = f"{path}/" if path else ""
        with self._lock:
            inside = self._names.get(path, {})
        return [
            (name, self._directory(prefix + name) if shown is None else self._entry_of(shown))
            for name, shown in sorted(inside.items())
        ]

    def open(self, path: str) -> OpenFile:
        self._find(path)
        with self._lock:
            place = self._look(path)
            if place is None:
                raise NotFound("not a file", where=path)
            shown = place.shown
            at = None if shown.ref is None else place.at
            if at is not None:
                # From here on it stays.
                self._kept.setdefault(at, _Kept(shown, 0)).count += 1
            own = (shown.snapshot, place.tail)
            keep_cache = at is None or self._page_owner.get(path) == own
        try:
            file = self._tree(shown.snapshot).open_as(
                place.tail, mounted=path, keep_cache=keep_cache, at=at
            )
            self._keep(file)
        except BaseException:
            with self._lock:
                self._let_move(at)
            raise
        return file

    def _let_move(self, at: str | None) -> None:
        if at is not None:
            kept = self._kept[at]
            kept.count -= 1
            if not kept.count:
                del self._kept[at]
                if self._shown.get(at) != kept.shown:
                    self._arrange()

    def _keep(self, file: OpenFile) -> None:
        """Hold the snapshot for this file; unlocked, since that makes a file in the store."""
        with self._lock:
            held = self._held.get(file.snapshot)
            if held is not None:
                held.count += 1
                return
        hold = self._source.hold(file.view.id)
        with self._lock:
            held = self._held.setdefault(file.snapshot, _Held(hold, 0))
            held.count += 1
        if held.hold is not hold:
            # Another thread was faster.
            hold.release()

    def _let_go(self, file: OpenFile) -> MountHold | None:
        """Return the hold that the snapshot needs no more, if this was its last file."""
        held = self._held[file.snapshot]
        held.count -= 1
        return None if held.count else self._held.pop(file.snapshot).hold

    def settled(self, file: OpenFile) -> None:
        if file.at is not None:
            with self._lock:
                self._page_owner[file.mounted] = (file.snapshot, file.path)

    def release(self, file: OpenFile) -> None:
        with self._lock:
            unneeded = self._let_go(file)
            if file.at is not None:
                self._page_owner[file.mounted] = (file.snapshot, file.path)
            self._let_move(file.at)
        if unneeded is not None:
            unneeded.release()

    def stored(self, path: str) -> int:
        place = self._find(path)
        if place is None:
            return 0
        file = place.shown.file if place.at == path else None
        if file is None:
            return self._tree(place.shown.snapshot).stored(place.tail)
        # Programs look at all files of a folder again and again: more than there are trees kept.
        known = self._stored.get(file.inode)
        if known is None:
            known = self._tree(place.shown.snapshot).counted(place.tail)
            if known is None:
                return file.size
            self._stored[file.inode] = known
        return known

    def labels(self, path: str) -> Mapping[str, str]:
        place = self._find(path)
        if place is None:
            return {}
        labels = self._tree(place.shown.snapshot).labels(place.tail)
        ref = place.shown.ref
        return labels if ref is None else {**labels, "ref": ref}

    def totals(self) -> ShownAmounts:
        with self._lock:
            each = [tree.totals() for tree in self._trees.values()]
        return ShownAmounts(sum(one.files for one in each), sum(one.size for one in each))

    def _find(self, path: str) -> _Below | None:
        """Find where a path lies; None for a directory outside of all snapshots."""
        if time.monotonic() >= self._fresh_until:
            self._reload()
        try:
            with self._lock:
                return self._look(path)
        except NotFound:
            self._reload()
            with self._lock:
                return self._look(path)

    def _look(self, path: str) -> _Below | None:
        for end in _ends(path):
            shown = self._shown_at(path[:end])
            if shown is not None:
                tail = "/".join(filter(None, (shown.tail, path[end + 1 :])))
                return _Below(path[:end], shown, tail)
        if path in self._names:
            return None
        raise NotFound("no such ref or snapshot", where=path)

    def _shown_at(self, path: str) -> ShownPath | None:
        """Return what this very path shows now: open files keep it in place."""
        kept = self._kept.get(path)
        return self._shown.get(path) if kept is None else kept.shown

    def _directory(self, path: str) -> Attributes:
        time_ns = self._times.get(path, self._time_ns)
        return Attributes(inode_of("", path), True, 0, time_ns)

    def _reload(self) -> None:
        """Read again what is shown, unless the store is the same as before."""
        load = next(self._loads)
        generation = self._source.generation()
        if generation != self._generation:
            shown = self._read()
            with self._lock:
                # A later load may have been faster.
                if load > self._loaded:
                    self._loaded, self._generation = load, generation
                    self._shown = shown
                    self._arrange()
        self._fresh_until = time.monotonic() + self._max_age

    def _arrange(self) -> None:
        """Make the directories above what is shown, and note which have changed."""
        names: dict[str, dict[str, ShownPath | None]] = {one: {} for one in self.always}
        for path in (*self.always, *self._shown):
            _enter(names, path, self._shown_at(path))
        # Later also if the clock was set back, and by as much as a float of seconds can tell.
        now = max(time.time_ns(), max(self._times.values(), default=0) + 1000)
        self._times = {
            directory: self._times[directory] if self._names.get(directory) == inside else now
            for directory, inside in names.items()
        }
        self._names = names

    def _tree(self, snapshot: str) -> SnapshotTree:
        with self._lock:
            tree = self._trees.get(snapshot)
            if tree is not None:
                self._trees.move_to_end(snapshot)
                return tree
        view = self._source.view(snapshot)
        made = SnapshotTree(
            view, self._about, show_about=self._show_about, replaced=self._replaced(view)
        )
        with self._lock:
            # Another thread may have been faster; the first one stays.
            tree = self._trees.setdefault(snapshot, made)
            if len(self._trees) > _TREES_KEPT:
                self._trees.popitem(last=False)
        return tree


def _ends(path: str) -> Iterator[int]:
    """Yield the ends of a path and of the directories above it, from the top."""
    end = path.find("/")
    while end >= 0:
        yield end
        end = path.find("/", end + 1)
    yield len(path)


def _enter(
    names: dict[str, dict[str, ShownPath | None]], path: str, shown: ShownPath | None
) -> None:
    """Add a path, and missing directories above it."""
    while path:
        parent, _, name = path.rpartition("/")
        is_known = parent in names
        inside = names.setdefault(parent, {})
        inside[name] = shown or inside.get(name)
        if is_known:
            return
        path, shown = parent, None


class StoreTree(MovingTree):
    """The tree of a whole store. Its directories keep the time of the mount."""

    always: ClassVar = ("", "refs", "snapshots")

    def _read(self) -> Mapping[str, ShownPath]:
        refs = self._source.ref_ids().items()
        return {
            **{f"refs/{name}": ShownPath(str(id), name) for name, id in refs},
            **{f"snapshots/{id}": ShownPath(str(id)) for id in self._source.snapshot_ids()},
        }

    def lasts(self, path: str) -> float:
        top, _, rest = path.partition("/")
        if not rest:
            # Always there, and always the same.
            return IMMUTABLE_FOR
        if top != "snapshots":
            return 0.0
        return IMMUTABLE_FOR if "/" in rest else COLLECTED_WITHIN

    def absent_for(self, path: str) -> float:
        # Of a snapshot that there is; another one may come.
        is_inside = path.startswith("snapshots/") and path.count("/") > 1
        return COLLECTED_WITHIN if is_inside else 0.0

    def _directory(self, path: str) -> Attributes:
        # The kernel keeps `refs` and `snapshots`.
        return Attributes(inode_of("", path), True, 0, self._time_ns)

    def top(self, ref: str) -> Attributes:
        """Return the directory of a ref, with the time of what it shows; empty if it is gone."""
        tree = self._tree_of(ref)
        return self._directory(f"refs/{ref}") if tree is None else tree.entry("")

    def totals_of(self, ref: str) -> ShownAmounts:
        """Return those of the snapshot that a ref shows; none if the ref is gone."""
        tree = self._tree_of(ref)
        return ShownAmounts(0, 0) if tree is None else tree.totals()

    def _tree_of(self, ref: str) -> SnapshotTree | None:
        try:
            place = self._find(f"refs/{ref}")
        except NotFound:
            return None
        return None if place is None else self._tree(place.shown.snapshot)


class RefTree:
    """The tree of one ref, which follows the ref: a directory of a store's tree, by its rules.

    While there is no such ref, the mount is an empty directory.
    """

    def __init__(self, store: StoreTree, ref: str) -> None:
        self._store = store
        self._ref = ref
        self._top = f"refs/{ref}"

    def _below(self, path: str) -> str:
        return f"{self._top}/{path}" if path else self._top

    def lasts(self, path: str) -> float:
        return self._store.lasts(self._below(path))

    def absent_for(self, path: str) -> float:
        return self._store.absent_for(self._below(path))

    def entry(self, path: str) -> Attributes:
        if not path:
            # One number whatever the ref shows: it is that of the mount.
            return replace(self._store.top(self._ref), inode=inode_of("", self._top))
        return self._store.entry(self._below(path))

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        try:
            return self._store.children(self._below(path))
        except NotFound:
            if path:
                raise
            return []

    def open(self, path: str) -> OpenFile:
        return self._store.open(self._below(path))

    def settled(self, file: OpenFile) -> None:
        self._store.settled(file)

    def release(self, file: OpenFile) -> None:
        self._store.release(file)

    def stored(self, path: str) -> int:
        return self._store.stored(self._below(path))

    def labels(self, path: str) -> Mapping[str, str]:
        try:
            return self._store.labels(self._below(path))
        except NotFound:
            if path:
                raise
            return {}

    def totals(self) -> ShownAmounts:
        return self._store.totals_of(self._ref)
