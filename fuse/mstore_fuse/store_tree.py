"""The trees of a whole store and of directories of it; see tree.py for what they show.

Owns what follows from refs that move while they are read, and from snapshots that come and go.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(slots=True)
class _HeldRef:
    """A ref that `count` open files keep at a snapshot."""

    snapshot: str
    count: int


@dataclass(slots=True)
class _Held:
    """A snapshot with `count` open files."""

    hold: MountHold
    count: int


class _Below(msgspec.Struct, frozen=True):
    """A path inside a snapshot: the snapshot, the ref that led there, the rest of the path."""

    snapshot: str
    ref: str | None
    tail: str


class StoreTree:
    """The tree of a whole store. New refs and snapshots appear in it at once.

    Holds only snapshots with open files: an unused mount keeps no garbage. A lookup that misses
    reads the store again; one that hits may use a list of refs up to `max_age` seconds old.
    about, show_about, replaced: as for `SnapshotTree`; replaced is called with the view of each.
    """

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
        self._refs: dict[str, str] = {}
        self._snapshots: set[str] = set()
        self._generation: int | None = None
        self._loads = itertools.count(1)
        self._loaded = 0
        self._fresh_until = float("-inf")
        self._held_refs: dict[str, _HeldRef] = {}
        self._held: dict[str, _Held] = {}
        self._page_owner: dict[str, str] = {}

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

    def entry(self, path: str) -> Attributes:
        place = self._find(path)
        if place is None:
            return self._directory(path)
        if not place.tail:
            # Not the snapshot's own time: `ls -l snapshots` must not read every manifest.
            return self._top_of(place.snapshot)
        return self._tree(place.snapshot).entry(place.tail)

    def _top_of(self, snapshot: str) -> Attributes:
        return Attributes(inode_of(snapshot, ""), True, 0, self._time_ns)

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        self._reload()
        place = self._find(path)
        if place is not None:
            return self._tree(place.snapshot).children(place.tail)
        with self._lock:
            names = self._names(path)
        if path == "snapshots":
            return [(name, self._top_of(name)) for name in names]
        prefix = f"{path}/" if path else ""
        return [(name, self.entry(prefix + name)) for name in names]

    def open(self, path: str) -> OpenFile:
        self._find(path)
        with self._lock:
            place = self._look(path)
            if place is None:
                raise NotFound("not a file", where=path)
            # From here on the ref stays.
            self._hold_ref(place)
            keep_cache = place.ref is None or self._page_owner.get(path) == place.snapshot
        try:
            file = self._tree(place.snapshot).open_as(
                place.tail, mounted=path, keep_cache=keep_cache, ref=place.ref
            )
            self._keep(file)
        except BaseException:
            with self._lock:
                self._let_ref_go(place.ref)
            raise
        return file

    def _hold_ref(self, place: _Below) -> None:
        if place.ref is not None:
            self._held_refs.setdefault(place.ref, _HeldRef(place.snapshot, 0)).count += 1

    def _let_ref_go(self, ref: str | None) -> None:
        if ref is not None:
            held = self._held_refs[ref]
            held.count -= 1
            if not held.count:
                del self._held_refs[ref]

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
        if file.ref is not None:
            with self._lock:
                self._page_owner[file.mounted] = file.snapshot

    def release(self, file: OpenFile) -> None:
        with self._lock:
            unneeded = self._let_go(file)
            if file.ref is not None:
                self._page_owner[file.mounted] = file.snapshot
            self._let_ref_go(file.ref)
        if unneeded is not None:
            unneeded.release()

    def stored(self, path: str) -> int:
        place = self._find(path)
        return 0 if place is None else self._tree(place.snapshot).stored(place.tail)

    def labels(self, path: str) -> Mapping[str, str]:
        place = self._find(path)
        if place is None:
            return {}
        labels = self._tree(place.snapshot).labels(place.tail)
        return labels if place.ref is None else {**labels, "ref": place.ref}

    def totals(self) -> ShownAmounts:
        with self._lock:
            each = [tree.totals() for tree in self._trees.values()]
        return ShownAmounts(sum(one.files for one in each), sum(one.size for one in each))

    def top(self, ref: str) -> Attributes:
        """Return the directory of a ref, with the time of what it shows; empty if it is gone."""
        tree = self._shown(ref)
        return self._directory(f"refs/{ref}") if tree is None else tree.entry("")

    def totals_of(self, ref: str) -> ShownAmounts:
        """Return those of the snapshot that a ref shows; none if the ref is gone."""
        tree = self._shown(ref)
        return ShownAmounts(0, 0) if tree is None else tree.totals()

    def _shown(self, ref: str) -> SnapshotTree | None:
        try:
            place = self._find(f"refs/{ref}")
        except NotFound:
            return None
        return None if place is None else self._tree(place.snapshot)

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
                target = self._target(ref)
                if target is not None:
                    return _Below(target, ref, "/".join(parts[length:]))
            if any(ref.startswith(f"{rest}/") for ref in self._refs):
                return None
        raise NotFound("no such ref or snapshot", where=path)

    def _target(self, ref: str) -> str | None:
        """Return the snapshot that a ref shows now: open files keep it in place."""
        held = self._held_refs.get(ref)
        return self._refs.get(ref) if held is None else held.snapshot

    def _names(self, path: str) -> list[str]:
        if path == "":
            return ["refs", "snapshots"]
        if path == "snapshots":
            return sorted(self._snapshots)
        prefix = "" if path == "refs" else path.removeprefix("refs/") + "/"
        below = (ref for ref in self._refs if ref.startswith(prefix))
        return sorted({ref[len(prefix) :].partition("/")[0] for ref in below})

    def _directory(self, path: str) -> Attributes:
        return Attributes(inode_of("", path), True, 0, self._time_ns)

    def _reload(self) -> None:
        """Read refs and snapshots again, unless the store is the same as before."""
        load = next(self._loads)
        generation = self._source.generation()
        if generation != self._generation:
            refs = {name: str(id) for name, id in self._source.ref_ids().items()}
            snapshots = {str(snapshot) for snapshot in self._source.snapshot_ids()}
            with self._lock:
                # A later load may have been faster.
                if load > self._loaded:
                    self._loaded, self._generation = load, generation
                    self._refs, self._snapshots = refs, snapshots
        self._fresh_until = time.monotonic() + self._max_age

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


class BelowTree:
    """A directory of a store's tree, at the top of a mount; its rules are those of `StoreTree`."""

    def __init__(self, store: StoreTree, top: str) -> None:
        self._store = store
        self._top = top

    def _below(self, path: str) -> str:
        return f"{self._top}/{path}" if path else self._top

    def lasts(self, path: str) -> float:
        return self._store.lasts(self._below(path))

    def absent_for(self, path: str) -> float:
        return self._store.absent_for(self._below(path))

    def entry(self, path: str) -> Attributes:
        return self._store.entry(self._below(path))

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        return self._store.children(self._below(path))

    def open(self, path: str) -> OpenFile:
        return self._store.open(self._below(path))

    def settled(self, file: OpenFile) -> None:
        self._store.settled(file)

    def release(self, file: OpenFile) -> None:
        self._store.release(file)

    def stored(self, path: str) -> int:
        return self._store.stored(self._below(path))

    def labels(self, path: str) -> Mapping[str, str]:
        return self._store.labels(self._below(path))

    def totals(self) -> ShownAmounts:
        return self._store.totals()


class RefTree(BelowTree):
    """The tree of one ref, which follows the ref.

    While there is no such ref, the mount is an empty directory.
    """

    def __init__(self, store: StoreTree, ref: str) -> None:
        super().__init__(store, f"refs/{ref}")
        self._ref = ref

    def entry(self, path: str) -> Attributes:
        if not path:
            # One number whatever the ref shows: it is that of the mount.
            return replace(self._store.top(self._ref), inode=inode_of("", self._top))
        return super().entry(path)

    def children(self, path: str) -> list[tuple[str, Attributes]]:
        try:
            return super().children(path)
        except NotFound:
            if path:
                raise
            return []

    def labels(self, path: str) -> Mapping[str, str]:
        try:
            return super().labels(path)
        except NotFound:
            if path:
                raise
            return {}

    def totals(self) -> ShownAmounts:
        return self._store.totals_of(self._ref)
