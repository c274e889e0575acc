"""mstore_fuse.operations: what a connection is told, without a mount."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mstore.terms.errors import (
    BadRequest,
    Corrupt,
    Incompatible,
    RemoteAway,
    StorageFailed,
    Unavailable,
    Unreadable,
)
from mstore.terms.ids import Buffer
from mstore_fuse.connection import Opened
from mstore_fuse.operations import FuseOperations
from mstore_fuse.tree import Nothing, SnapshotTree

MIB = 1 << 20
DATA = bytes(range(256)) * (16 * MIB // 256)


@dataclass
class View:
    """One snapshot in memory that can be told to fail."""

    id: str = "a" * 64
    time_ns: int = 1_700_000_000_123_456_789
    files: dict[str, int] = field(default_factory=lambda: {"m.bin": len(DATA), "d/c": 3, "e": 0})
    failure: BaseException | None = None
    short: int = 0
    prefetched: list[tuple[str, int, int]] = field(default_factory=list)
    read_ahead: int = 8 << 20

    def pieces(self, path: str, offset: int, size: int) -> list[Buffer]:
        if self.failure is not None:
            raise self.failure
        middle, end = offset + size // 2, offset + size - self.short
        return [DATA[offset:middle], DATA[middle:end]]

    def continues_to(self, path: str, offset: int, size: int) -> int:
        return offset + size

    def prefetch(self, path: str, offset: int, size: int) -> None:
        self.prefetched.append((path, offset, size))


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def operations(view: View) -> FuseOperations:
    return FuseOperations(SnapshotTree(view))


def read(operations: FuseOperations, path: str, size: int, offset: int, file: Opened) -> bytes:
    return b"".join(operations.read(path, file.handle, offset, size))


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is the assertion
        call()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def test_attributes(operations: FuseOperations) -> None:
    """Read-only modes, sizes, blocks of 512 bytes, the snapshot's time to the nanosecond."""
    file, folder = operations.status("m.bin"), operations.status("d")
    assert stat.S_ISREG(file.mode)
    assert stat.S_ISDIR(folder.mode)
    assert not (file.mode | folder.mode) & 0o222
    assert (file.size, file.blocks) == (len(DATA), len(DATA) // 512)
    assert operations.status("d/c").blocks == 1
    assert file.time_ns == 1_700_000_000_123_456_789
    assert file.owner == (os.getuid(), os.getgid())


def test_listing(operations: FuseOperations) -> None:
    """A directory lists itself, its parent, and its names with their types and inodes; with the
    attributes of directories, because those of files must be counted."""
    listed = {name: (inode, mode) for name, _, inode, mode in operations.listing("")}
    assert set(listed) == {".", "..", "m.bin", "d", "e"}
    for name in ("m.bin", "d", "e"):
        told = operations.status(name)
        assert listed[name] == (told.inode, told.mode)
    with_attributes = {name: status for name, status, *_ in operations.listing("") if status}
    assert with_attributes == {"d": operations.status("d")}
    assert [name for name, *_ in operations.listing("d")] == [".", "..", "c"]


def test_read(operations: FuseOperations) -> None:
    """Bytes as asked for, fewer at the end, none beyond it."""
    file = operations.open("m.bin", os.O_RDONLY)
    assert file.keep_cache
    assert read(operations, "m.bin", 100, 1000, file) == DATA[1000:1100]
    assert read(operations, "m.bin", 100, len(DATA) - 30, file) == DATA[-30:]
    assert read(operations, "m.bin", 100, len(DATA), file) == b""
    assert read(operations, "m.bin", 100, len(DATA) + 4096, file) == b""
    assert read(operations, "e", 100, 0, operations.open("e", os.O_RDONLY)) == b""
    operations.release("m.bin", file.handle)
    assert code_of(lambda: read(operations, "m.bin", 100, 0, file)) == "EIO"


def test_sequential_reads_are_announced(operations: FuseOperations, view: View) -> None:
    """Reading from front to back tells the store what comes next."""
    file = operations.open("m.bin", os.O_RDONLY)
    for offset in range(0, 6 * MIB, MIB):
        read(operations, "m.bin", MIB, offset, file)
    assert view.prefetched
    assert all(path == "m.bin" and size > 0 for path, _, size in view.prefetched)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Corrupt("block 12ab is damaged"), "EIO"),
        (Unreadable("the disk says no"), "EIO"),
        (BadRequest("nonsense"), "EIO"),
        (KeyError("a bug"), "EIO"),
        (StorageFailed("the system says no", errno=errno.EMFILE), "EMFILE"),
        (StorageFailed("the system says no", errno=errno.EACCES), "EACCES"),
        (StorageFailed("the store is gone", errno=errno.ENOENT), "EIO"),
        (StorageFailed("nobody knows"), "EIO"),
        (Unavailable("no kernels"), "EBUSY"),
        (RemoteAway("no answer"), "EIO"),
        (Incompatible("a codec of tomorrow"), errno.errorcode[errno.EOPNOTSUPP]),
        (MemoryError("out of memory"), "ENOMEM"),
    ],
)
def test_a_reader_is_told_damage_from_what_this_machine_cannot_do(
    operations: FuseOperations,
    view: View,
    failure: Exception,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Damage or a bug is EIO for the reader, an error of the machine its own; the log has a line
    that names the reason, and afterwards reads are right."""
    file = operations.open("m.bin", os.O_RDONLY)
    view.failure = failure
    with caplog.at_level(logging.ERROR, "mstore_fuse"):
        assert code_of(lambda: read(operations, "m.bin", 10, 0, file)) == code
    assert "/m.bin" in caplog.text
    assert str(failure.args[0]) in caplog.text
    view.failure = None
    assert read(operations, "m.bin", 10, 0, file) == DATA[:10]


def test_a_short_read_is_an_io_error(operations: FuseOperations, view: View) -> None:
    """Fewer bytes than the file has are never passed on: the kernel would add zeros."""
    file = operations.open("m.bin", os.O_RDONLY)
    view.short = 1
    assert code_of(lambda: read(operations, "m.bin", 100, 0, file)) == "EIO"


def test_one_failure_is_logged_once(
    operations: FuseOperations, view: View, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad block that is read again and again does not fill the log."""
    file = operations.open("m.bin", os.O_RDONLY)
    view.failure = Corrupt("block 12ab is damaged")
    with caplog.at_level(logging.ERROR, "mstore_fuse"):
        for _ in range(5):
            code_of(lambda: read(operations, "m.bin", 10, 0, file))
    assert caplog.text.count("12ab") == 1


def test_unknown_paths(operations: FuseOperations) -> None:
    """A path that is not there is ENOENT everywhere."""
    for call in (operations.status, operations.listing):
        assert code_of(lambda call=call: call("nope")) == "ENOENT"  # type: ignore[misc]
    assert code_of(lambda: operations.open("nope", os.O_RDONLY)) == "ENOENT"


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC])
def test_opening_for_writing_is_refused(operations: FuseOperations, flags: int) -> None:
    """EROFS, should the kernel ever ask."""
    assert code_of(lambda: operations.open("m.bin", flags)) == "EROFS"


class Told(Nothing):
    """Tells of a snapshot: a file about it, and what its files take."""

    def files(self, view: object) -> dict[str, Callable[[], bytes]]:
        return {"manifest.json": lambda: b"0123456789"}

    def stored(self, view: object, path: str) -> int | None:
        return {"m.bin": 1000, "d/c": 0}.get(path)


def test_a_file_about_a_snapshot_is_read_past_the_page_cache(view: View) -> None:
    """Its bytes are those that were made, the kernel keeps none of them, nothing is prefetched."""
    operations = FuseOperations(SnapshotTree(view, Told()))
    file = operations.open(".mstore/manifest.json", os.O_RDONLY)
    assert (file.direct, operations.open("m.bin", os.O_RDONLY).direct) == (True, False)
    assert read(operations, ".mstore/manifest.json", 4096, 0, file) == b"0123456789"
    assert read(operations, ".mstore/manifest.json", 4, 8, file) == b"89"
    assert read(operations, ".mstore/manifest.json", 4, 10, file) == b""
    assert view.prefetched == []
    assert operations.status(".mstore/manifest.json").size == 10
    assert ".mstore" not in [name for name, *_ in operations.listing("")]


def test_blocks_are_those_at_rest(view: View) -> None:
    """What a file takes is told in units of 512 bytes, at least one; unknown, it takes its size."""
    tree = SnapshotTree(view, Told())
    operations = FuseOperations(tree)
    blocks = {path: operations.status(path).blocks for path in view.files}
    assert blocks == {"m.bin": 2, "d/c": 1, "e": 0}
    assert SnapshotTree(view).stored("m.bin") == len(DATA)


def test_attributes_of_others(operations: FuseOperations, caplog: pytest.LogCaptureFixture) -> None:
    """An attribute that is not there is an answer, not a failure: nothing is logged."""
    assert code_of(lambda: operations.label("m.bin", "user.x")) == "ENODATA"
    assert code_of(lambda: operations.label("m.bin", "system.posix_acl_access")) in {
        "EOPNOTSUPP",
        "ENOTSUP",
    }
    assert operations.label("m.bin", "user.mstore.snapshot") == b"a" * 64
    assert caplog.text == ""


def test_statfs(operations: FuseOperations) -> None:
    """`df` shows the snapshot's bytes and files, and no room."""
    shown = operations.room("")
    assert shown.blocks * shown.unit >= len(DATA)
    assert shown.files == 3


def test_the_kernel_is_told_that_nothing_changes(operations: FuseOperations) -> None:
    """Names and attributes of one snapshot may be kept for an hour; what is not there, too."""
    assert (operations.status("m.bin").lasts, operations.absent_for("nope")) == (3600, 3600)
