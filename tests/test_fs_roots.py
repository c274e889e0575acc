"""Roots: what lies in a store is reached from its open directory, and never over a link."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mstore import Store, fs
from mstore.store.layout import Layout, read
from mstore.terms.errors import Conflict, StorageFailed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with one below it, and somebody else's things beside it."""
    (tmp_path / "s" / "tmp").mkdir(parents=True)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "thesis").write_text("precious")
    return tmp_path / "s"


def make_link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "victim")


def make_socket(path: Path) -> None:
    above = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{above}/{path.name}")
    os.close(above)


def descriptors_below(path: Path) -> int:
    """How many open files and directories of this process lie at a path or below it."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(path))
    return found


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "create": lambda tmp: fs.NewFile(tmp / "new"),
    "replace": lambda tmp: fs.replace_file(tmp / "thesis", "lost"),
    "create whole": lambda tmp: fs.create_whole(tmp / "new", b"1"),
    "overwrite": lambda tmp: fs.overwrite(tmp / "thesis", b"lost"),
    "unnamed": lambda tmp: fs.unnamed(tmp, [b"1"]),
    "rename": lambda tmp: fs.rename(tmp / "thesis", tmp.parent / "stolen"),
    "rename into": lambda tmp: fs.rename(tmp.parent / "file", tmp / "thesis"),
    "link": lambda tmp: fs.link(tmp.parent / "file", tmp / "new"),
    "unlink": lambda tmp: fs.unlink(tmp / "thesis"),
    "remove": lambda tmp: fs.remove_tree(tmp / "docs"),
    "mkdir": lambda tmp: fs.make_directory(tmp / "new"),
    "sync": fs.sync_directory,
    "lock": lambda tmp: fs.LockFile(tmp / "new.lock"),
    "list": fs.listed,
    "read": lambda tmp: fs.read_file(tmp / "thesis", 8),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_follows_a_link_below_an_open_root(root: Path, operation: str) -> None:
    """Each operation through a directory that became a link is refused, and names the link."""
    (root / "file").write_text("own")
    (root.parent / "victim" / "docs").mkdir()
    opened = fs.Root(root)
    (root / "tmp").rmdir()
    make_link(root / "tmp")
    before = sorted((root.parent / "victim").rglob("*"))
    with pytest.raises(Conflict, match="symbolic link") as refused:
        OPERATIONS[operation](root / "tmp")
    assert refused.value.where == str(root / "tmp")
    assert sorted((root.parent / "victim").rglob("*")) == before
    assert (root.parent / "victim" / "thesis").read_text() == "precious"
    opened.close()


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, make_link, os.mkdir])
def test_only_a_regular_file_is_opened(root: Path, make: Callable[[Path], None]) -> None:
    """A fifo, socket, link or directory in place of a file is refused at once, in a root or not."""
    make(root / "file")
    for _ in range(2):
        with pytest.raises(Conflict, match="this is a") as refused:
            fs.read_file(root / "file", 10)
        assert refused.value.where == str(root / "file")
        with pytest.raises(Conflict, match="this is a"):
            fs.overwrite(root / "file", b"1")
        opened = fs.Root(root)
    opened.close()


def test_a_removed_tree_may_hold_links(root: Path) -> None:
    """A link in a tree is removed as a link, and one in the place of a tree is refused."""
    opened = fs.Root(root)
    (root / "tmp" / "a").mkdir()
    (root / "tmp" / "a" / "b").symlink_to(root.parent / "victim")
    fs.remove_tree(root / "tmp" / "a")
    assert not (root / "tmp" / "a").exists()
    make_link(root / "lost")
    with pytest.raises(Conflict, match="symbolic link"):
        fs.remove_tree(root / "lost")
    assert (root.parent / "victim" / "thesis").exists()
    opened.close()


def test_a_root_stays_where_it_was_opened(root: Path) -> None:
    """Whoever renames the directory of an open store and puts another there leads nothing away."""
    opened = fs.Root(root)
    root.rename(root.with_name("aside"))
    root.symlink_to(root.parent / "victim")
    fs.make_directory(root / "made")
    assert (root.parent / "aside" / "made").is_dir()
    assert not (root.parent / "victim" / "made").exists()
    opened.close()


def test_a_newer_root_of_another_directory_serves_its_path(root: Path) -> None:
    """A directory that took the place of an open one is served when it is opened, and stays so."""
    first = fs.Root(root)
    root.rename(root.with_name("aside"))
    root.mkdir()
    second = fs.Root(root)
    fs.make_directory(root / "made")
    second.close()
    fs.make_directory(root / "plain")
    assert sorted(path.name for path in root.iterdir()) == ["made", "plain"]
    first.close()


@pytest.mark.rest
def test_descriptors_end_with_their_roots(root: Path) -> None:
    """Closed, or collected without that, a root leaves no descriptor and serves nothing."""
    opened = fs.Root(root)
    opened.close()
    opened.close()
    kept = [fs.Root(root) for _ in range(3)]
    assert descriptors_below(root) == 3
    del kept
    gc.collect()
    assert descriptors_below(root) == 0
    (root / "tmp").rmdir()
    make_link(root / "tmp")
    fs.make_directory(root / "tmp" / "as paths lead")
    assert (root.parent / "victim" / "as paths lead").is_dir()


def test_a_closed_store_holds_no_descriptor(tmp_path: Path) -> None:
    """After `close`, also of a store whose object lives on, its disk can be unmounted."""
    store = Store.init(tmp_path / "s")
    store.close()
    reopened = Store.open(tmp_path / "s")
    reopened.close()
    assert descriptors_below(tmp_path) == 0


def test_a_store_may_be_named_by_a_link(tmp_path: Path) -> None:
    """The user chose the path of the store: links in it are followed."""
    Store.init(tmp_path / "s").close()
    (tmp_path / "link").symlink_to("s")
    with Store.open(tmp_path / "link") as store:
        store.configure("codec", "raw")
    with Store.open(tmp_path / "s") as store:
        assert store.config["codec"] == "raw"


def test_a_missing_root_is_an_error_that_names_it(tmp_path: Path) -> None:
    """No root is opened where there is no directory."""
    with pytest.raises(StorageFailed) as refused:
        fs.Root(tmp_path / "none")
    assert refused.value.where == str(tmp_path / "none")


ENTRIES = {
    **dict.fromkeys(("tmp", "stats", "lock", "index/lock.mdb"), "remove it: it is made anew"),
    **dict.fromkeys(
        ("index", "index/data.mdb", "refs", "refs/mirror"), "and run: mstore.Store.reindex(PATH)"
    ),
    **dict.fromkeys(("packs", "packs/00"), "store.repair(read_data=True, sources=[BACKUP])"),
    **dict.fromkeys(("format", "config"), "put back what belongs there"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_store_with_a_link_in_it_is_refused(tmp_path: Path, entry: str) -> None:
    """An entry of a store that is a link is named when the store is opened, before LMDB is, with
    what to do."""
    Store.init(tmp_path / "s").close()
    (tmp_path / "s" / "packs" / "00").mkdir()
    path = tmp_path / "s" / entry
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Conflict, match="this is a symbolic link, where a store has a") as refused:
        Store.open(tmp_path / "s")
    assert refused.value.where == str(path)
    assert (refused.value.hint or "").endswith(ENTRIES[entry])


def test_a_layout_serves_its_paths(tmp_path: Path) -> None:
    """Whoever knows the layout of a store reaches everything in it from its open directory."""
    Store.init(tmp_path / "s").close()
    layout = read(tmp_path / "s")
    assert isinstance(layout, Layout)
    layout.tmp.rmdir()
    layout.tmp.symlink_to(tmp_path)
    with pytest.raises(Conflict, match="symbolic link"):
        fs.make_directory(layout.tmp / "made")
    assert not (tmp_path / "made").exists()
