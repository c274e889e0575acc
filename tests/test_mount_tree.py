"""mstore_fuse.tree: names, attributes and inodes of a snapshot and of a whole store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import Buffer
from mstore_fuse.store_tree import RefTree, StoreTree
from mstore_fuse.tree import MountTree, OpenFile, SnapshotTree, inode_of

A, B = "a" * 64, "b" * 64
NAMES = st.sampled_from(["a", "b", "config.json", "ü", "x y", "..x"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@dataclass
class View:
    """A snapshot in memory."""

    id: str
    contents: dict[str, bytes]
    time_ns: int = 1_700_000_000_123_456_789

    @property
    def files(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self.contents.items()}

    def pieces(self, path: str, offset: int, size: int) -> list[Buffer]:
        return [self.contents[path][offset : offset + size]]

    def continues_to(self, path: str, offset: int, size: int) -> int:
        raise AssertionError("a tree reads nothing")

    def prefetch(self, path: str, offset: int, size: int) -> None:
        raise AssertionError("a tree reads nothing")


def first_bytes(file: OpenFile) -> bytes:
    """Up to nine bytes of an open file."""
    return b"".join(file.view.pieces(file.path, 0, 9))


@dataclass
class Hold:
    """A hold of a store in memory."""

    held: list[str]
    snapshot: str

    def release(self) -> None:
        self.held.remove(self.snapshot)


@dataclass
class Store:
    """A store in memory; counts how often a snapshot was read."""

    views: dict[str, View]
    pointers: dict[str, str]
    viewed: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def view(self, revision: str) -> View:
        self.viewed.append(revision)
        return self.views[revision]

    def hold(self, snapshot: str, *, sure: bool = False) -> Hold:
        self.held.append(snapshot)
        return Hold(self.held, snapshot)

    def ref_ids(self) -> Mapping[str, str]:
        return self.pointers

    def snapshot_ids(self) -> Iterable[str]:
        return list(self.views)

    def generation(self) -> int:
        return hash((*self.views, *self.pointers.items()))

    def close(self) -> None:
        raise AssertionError("a tree does not own its store")


@pytest.fixture
def store() -> Store:
    views = {
        A: View(A, {"config.json": b"old", "sub/x.bin": b"1234"}),
        B: View(B, {"config.json": b"newer"}),
    }
    return Store(views, {"llama/base": A, "main": A})


def walk(tree: MountTree, path: str = "") -> dict[str, int | None]:
    """Every path below `path`: its size, or None for a directory."""
    found: dict[str, int | None] = {}
    for name, entry in tree.children(path):
        below = f"{path}/{name}" if path else name
        assert tree.entry(below) == entry
        found[below] = None if entry.is_directory else entry.size
        if entry.is_directory:
            found |= walk(tree, below)
    return found


def names(tree: MountTree, path: str) -> list[str]:
    return [name for name, _ in tree.children(path)]


@given(st.dictionaries(PATHS, st.binary(max_size=9), max_size=12))
def test_a_walk_finds_every_file(contents: dict[str, bytes]) -> None:
    """Each file is found at its path with its size, with the directories above it, nothing else;
    where a file lies below a file, the snapshot is refused."""
    above = {path[:at] for path in contents for at, c in enumerate(path) if c == "/"}
    if above & set(contents):
        with pytest.raises(Corrupt):
            SnapshotTree(View(A, contents))
        return
    expected: dict[str, int | None] = {path: len(data) for path, data in contents.items()}
    expected |= dict.fromkeys(above)
    tree = SnapshotTree(View(A, contents))
    assert walk(tree) == expected
    inodes = [tree.entry(path).inode for path in ["", *expected]]
    assert len(set(inodes)) == len(inodes)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "a//b", "../x", "a/../b", ".", "a/", "a\0b"])
def test_paths_that_no_directory_holds_are_refused(path: str) -> None:
    """A manifest from elsewhere cannot put names into a mount that a shell would misread."""
    with pytest.raises(Corrupt):
        SnapshotTree(View(A, {path: b""}))


def test_inode_numbers_never_change() -> None:
    """They are written down here: a program that remembers them across mounts may."""
    assert inode_of(A, "config.json") == 690753943230920349
    assert inode_of("", "") == inode_of("", "")
    assert all(0 < inode_of(snapshot, "x") < 1 << 63 for snapshot in ("", A, B))


def test_whole_store(store: Store) -> None:
    """Refs appear as nested directories, snapshots by id, and the same file has one inode."""
    tree = StoreTree(store)
    assert walk(tree) == {
        "refs": None,
        "refs/llama": None,
        "refs/llama/base": None,
        "refs/llama/base/config.json": 3,
        "refs/llama/base/sub": None,
        "refs/llama/base/sub/x.bin": 4,
        "refs/main": None,
        "refs/main/config.json": 3,
        "refs/main/sub": None,
        "refs/main/sub/x.bin": 4,
        "snapshots": None,
        f"snapshots/{A}": None,
        f"snapshots/{A}/config.json": 3,
        f"snapshots/{A}/sub": None,
        f"snapshots/{A}/sub/x.bin": 4,
        f"snapshots/{B}": None,
        f"snapshots/{B}/config.json": 5,
    }
    same = [f"refs/main/{'sub/x.bin'}", f"snapshots/{A}/sub/x.bin"]
    assert len({tree.entry(path).inode for path in same}) == 1


def test_snapshots_are_read_when_entered(store: Store) -> None:
    """Listing all snapshots reads none of them; entering one reads that one, once."""
    tree = StoreTree(store)
    assert len(tree.children("snapshots")) == 2
    assert store.viewed == []
    tree.entry(f"snapshots/{B}/config.json")
    tree.children(f"snapshots/{B}")
    assert store.viewed == [B]


@pytest.mark.parametrize(
    "path",
    ["x", "refs/x", "refs/ma", "refs/llama/x", "refs/main/x", "snapshots/x", f"snapshots/{A[:8]}"],
)
def test_what_is_not_there_is_not_found(store: Store, path: str) -> None:
    """Unknown names, prefixes of names and short ids are no paths."""
    with pytest.raises(NotFound):
        StoreTree(store).entry(path)


def test_new_refs_appear_and_removed_ones_go(store: Store) -> None:
    """A mount of the store follows the store; a new name is found at once."""
    tree = StoreTree(store, max_age=3600)
    tree.entry("refs/main/config.json")
    store.pointers["fresh/one"] = B
    assert tree.entry("refs/fresh/one/config.json").size == 5
    assert names(tree, "refs") == ["fresh", "llama", "main"]
    del store.pointers["main"]
    assert names(tree, "refs") == ["fresh", "llama"]
    with pytest.raises(NotFound):
        tree.entry("refs/main/config.json")


def test_a_ref_stays_while_a_file_below_it_is_open(store: Store) -> None:
    """What a reader sees below a ref is one snapshot until its last close."""
    tree = StoreTree(store, max_age=0)
    first, second = tree.open("refs/main/config.json"), tree.open("refs/main/sub/x.bin")
    store.pointers["main"] = B
    assert tree.entry("refs/main/config.json").size == 3
    tree.release(first)
    third = tree.open("refs/main/config.json")
    assert third.size == 3
    tree.release(second)
    del store.pointers["main"]
    assert tree.entry("refs/main/sub/x.bin").size == 4
    tree.release(third)
    with pytest.raises(NotFound):
        tree.entry("refs/main/config.json")


def test_pages_of_another_snapshot_are_dropped(store: Store) -> None:
    """The kernel keeps a path's pages only for the snapshot that they were read from, and not
    before an open that dropped the others has been seen to be done."""
    tree = StoreTree(store, max_age=0)
    path = "refs/main/config.json"
    first = tree.open(path)
    assert not first.keep_cache
    assert not tree.open(path).keep_cache, "the first open may not have dropped them yet"
    tree.settled(first)
    again = tree.open(path)
    assert again.keep_cache
    for file in (first, again, again):
        tree.release(file)
    store.pointers["main"] = B
    moved = tree.open(path)
    assert not moved.keep_cache
    assert first_bytes(moved) == b"newer"
    tree.release(moved)
    store.pointers["main"] = A
    assert not tree.open(path).keep_cache


def test_pages_of_a_snapshot_are_kept(store: Store) -> None:
    """Below an id nothing ever changes."""
    tree = StoreTree(store)
    assert tree.open(f"snapshots/{A}/config.json").keep_cache
    assert SnapshotTree(store.views[A]).open("config.json").keep_cache


def test_names_may_be_remembered_only_where_nothing_moves(store: Store) -> None:
    """A snapshot is remembered for an hour; in a store a ref not at all, a name that can be
    collected for seconds, and the directories that are always there for an hour."""
    one, tree = SnapshotTree(store.views[A]), StoreTree(store)
    assert (one.lasts("config.json"), one.absent_for("x")) == (3600, 3600)
    assert [tree.lasts(path) for path in ("", "refs", "snapshots")] == [3600] * 3
    assert [tree.lasts(path) for path in ("refs/main", "refs/main/config.json")] == [0, 0]
    assert tree.lasts(f"snapshots/{A}/config.json") == 3600
    assert 0 < tree.lasts(f"snapshots/{A}") <= 60
    assert [tree.absent_for(path) for path in ("x", "refs/x", "snapshots/x", "refs/main/x")] == [
        0
    ] * 4
    assert RefTree(tree, "main").lasts("") == 0


def test_directories_are_not_opened_as_files(store: Store) -> None:
    """`open` takes files only, inside and outside of snapshots."""
    tree = StoreTree(store)
    for path in ("refs", "refs/main", "refs/main/sub"):
        with pytest.raises(NotFound):
            tree.open(path)


def test_depth_costs_no_stack() -> None:
    """A path of thousands of directories is a path like any other."""
    path = "/".join(["d"] * 2000)
    tree = SnapshotTree(View(A, {path: b"deep"}))
    assert tree.entry(path).size == 4
    assert names(tree, path[: -len("/d")]) == ["d"]


def test_what_is_open_is_held(store: Store) -> None:
    """A snapshot is held once, from the first open of any of its files to the last release."""
    tree = StoreTree(store)
    walk(tree)
    assert store.held == []
    first = tree.open("refs/main/config.json")
    second = tree.open(f"snapshots/{A}/sub/x.bin")
    other = tree.open(f"snapshots/{B}/config.json")
    assert sorted(store.held) == [A, B]
    tree.release(first)
    tree.release(other)
    assert store.held == [A]
    tree.release(second)
    assert store.held == []


def test_directories_of_a_store_keep_their_times(store: Store) -> None:
    """The kernel keeps them: refs that come and go change no time."""
    tree = StoreTree(store, max_age=0)
    was = {path: tree.entry(path) for path in ("", "refs", "refs/llama", "snapshots")}
    store.pointers |= {"llama/new": B, "other": B}
    assert "new" in names(tree, "refs/llama")
    assert {path: tree.entry(path) for path in was} == was
