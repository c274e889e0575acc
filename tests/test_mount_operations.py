"""mstore_fuse.operations: what libfuse is told, without a mount."""

from __future__ import annotations

import ctypes
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
from mstore_fuse.operations import FuseOperations
from mstore_fuse.tree import Nothing, SnapshotTree

MIB = 1 << 20
DATA = bytes(range(256)) * (16 * MIB // 256)


@dataclass
class Info:
    """struct fuse_file_info."""

    flags: int = os.O_RDONLY
    fh: int = 0
    keep_cache: int = 0
    direct_io: int = 0


@dataclass
class Connection:
    want: int = 0xFFFF
    max_background: int = 12
    congestion_threshold: int = 9


@dataclass
class Config:
    entry_timeout: float = 1.0
    negative_timeout: float = 0.0
    attr_timeout: float = 1.0
    use_ino: int = 0


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

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        if self.failure is not None:
            raise self.failure
        data = DATA[offset : offset + len(target) - self.short]
        target[: len(data)] = data
        return len(data)

    def continues_to(self, path: str, offset: int, size: int) -> int:
        return offset + size

    def prefetch(self, path: str, offset: int, size: int) -> None:
        self.prefetched.append((path, offset, size))


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def operations(view: View) -> FuseOperations:
    made = FuseOperations(lambda: SnapshotTree(view), lambda: None)
    made.init_with_config(Connection(), Config())
    return made


def opened(operations: FuseOperations, path: str) -> Info:
    info = Info()
    assert operations.open(path, info) == 0
    return info


class Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("mem", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("pos", ctypes.c_int64),
    )


class Buffers(ctypes.Structure):
    """struct fuse_bufvec, as libfuse 3.0 to 3.16 declare it."""

    _fields_ = (
        ("count", ctypes.c_size_t),
        ("idx", ctypes.c_size_t),
        ("off", ctypes.c_size_t),
        ("buf", Buffer * 1),
    )


def read(operations: FuseOperations, path: str, size: int, offset: int, info: Info) -> bytes:
    """What libfuse sends: it takes the answer's memory, sends it and frees it."""
    out = ctypes.POINTER(Buffers)()
    assert operations.read_buf(path, ctypes.pointer(out), size, offset, info) == 0
    answer = out.contents
    (sent,) = answer.buf
    assert (answer.count, answer.idx, answer.off, sent.flags) == (1, 0, 0, 0)
    data = ctypes.string_at(sent.mem, sent.size)
    libc = ctypes.CDLL(None)
    libc.free(ctypes.c_void_p(sent.mem))
    libc.free(out)
    return data


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is the assertion
        call()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def test_attributes(operations: FuseOperations) -> None:
    """Read-only modes, sizes, blocks of 512 bytes, the snapshot's time to the nanosecond."""
    file, folder = operations.getattr("/m.bin"), operations.getattr("/d")
    assert stat.S_ISREG(file["st_mode"])
    assert stat.S_ISDIR(folder["st_mode"])
    assert not (file["st_mode"] | folder["st_mode"]) & 0o222
    assert (file["st_size"], file["st_blocks"]) == (len(DATA), len(DATA) // 512)
    assert operations.getattr("/d/c")["st_blocks"] == 1
    assert file["st_mtime"] == 1_700_000_000_123_456_789
    assert file["st_uid"] == os.getuid()


def test_listing(operations: FuseOperations) -> None:
    """A directory lists itself, its parent, and its names with their types and inodes."""
    listed = {name: attributes for name, attributes, _ in operations.readdir("/", 0)}
    assert set(listed) == {".", "..", "m.bin", "d", "e"}
    for name in ("m.bin", "d", "e"):
        told = operations.getattr(f"/{name}")
        assert listed[name] == {key: told[key] for key in ("st_ino", "st_mode")}
    assert [name for name, _, _ in operations.readdir("/d", 0)] == [".", "..", "c"]


def test_read(operations: FuseOperations) -> None:
    """Bytes as asked for, fewer at the end, none beyond it."""
    info = opened(operations, "/m.bin")
    assert info.keep_cache == 1
    assert read(operations, "/m.bin", 100, 1000, info) == DATA[1000:1100]
    assert read(operations, "/m.bin", 100, len(DATA) - 30, info) == DATA[-30:]
    assert read(operations, "/m.bin", 100, len(DATA), info) == b""
    assert read(operations, "/m.bin", 100, len(DATA) + 4096, info) == b""
    assert read(operations, "/e", 100, 0, opened(operations, "/e")) == b""
    assert operations.release("/m.bin", info) == 0


def test_sequential_reads_are_announced(operations: FuseOperations, view: View) -> None:
    """Reading from front to back tells the store what comes next."""
    info = opened(operations, "/m.bin")
    for offset in range(0, 6 * MIB, MIB):
        read(operations, "/m.bin", MIB, offset, info)
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
    info = opened(operations, "/m.bin")
    view.failure = failure
    with caplog.at_level(logging.ERROR, "mstore_fuse"):
        assert code_of(lambda: read(operations, "/m.bin", 10, 0, info)) == code
    assert "/m.bin" in caplog.text
    assert str(failure.args[0]) in caplog.text
    view.failure = None
    assert read(operations, "/m.bin", 10, 0, info) == DATA[:10]


def test_a_short_read_is_an_io_error(operations: FuseOperations, view: View) -> None:
    """Fewer bytes than the file has are never passed on: the kernel would add zeros."""
    info = opened(operations, "/m.bin")
    view.short = 1
    assert code_of(lambda: read(operations, "/m.bin", 100, 0, info)) == "EIO"


def test_one_failure_is_logged_once(
    operations: FuseOperations, view: View, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad block that is read again and again does not fill the log."""
    info = opened(operations, "/m.bin")
    view.failure = Corrupt("block 12ab is damaged")
    with caplog.at_level(logging.ERROR, "mstore_fuse"):
        for _ in range(5):
            code_of(lambda: read(operations, "/m.bin", 10, 0, info))
    assert caplog.text.count("12ab") == 1


def test_unknown_paths(operations: FuseOperations) -> None:
    """A path that is not there is ENOENT everywhere."""
    for call in (operations.getattr, lambda path: operations.readdir(path, 0)):
        assert code_of(lambda call=call: call("/nope")) == "ENOENT"  # type: ignore[misc]
    assert code_of(lambda: operations.open("/nope", Info())) == "ENOENT"


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC])
def test_opening_for_writing_is_refused(operations: FuseOperations, flags: int) -> None:
    """EROFS, should the kernel ever ask."""
    assert code_of(lambda: operations.open("/m.bin", Info(flags))) == "EROFS"


class Told(Nothing):
    """Tells of a snapshot: a file about it, and what its files take."""

    def files(self, view: object) -> dict[str, Callable[[], bytes]]:
        return {"manifest.json": lambda: b"0123456789"}

    def stored(self, view: object, path: str) -> int | None:
        return {"m.bin": 1000, "d/c": 0}.get(path)


def test_a_file_about_a_snapshot_is_read_past_the_page_cache(view: View) -> None:
    """Its bytes are those that were made, the kernel keeps none of them, nothing is prefetched."""
    operations = FuseOperations(lambda: SnapshotTree(view, Told()), lambda: None)
    operations.init_with_config(Connection(), Config())
    info = opened(operations, "/.mstore/manifest.json")
    assert (info.direct_io, opened(operations, "/m.bin").direct_io) == (1, 0)
    assert read(operations, "/.mstore/manifest.json", 4096, 0, info) == b"0123456789"
    assert read(operations, "/.mstore/manifest.json", 4, 8, info) == b"89"
    assert read(operations, "/.mstore/manifest.json", 4, 10, info) == b""
    assert view.prefetched == []
    assert operations.getattr("/.mstore/manifest.json")["st_size"] == 10
    assert ".mstore" not in [name for name, _, _ in operations.readdir("/", 0)]


def test_blocks_are_those_at_rest(view: View) -> None:
    """What a file takes is told in units of 512 bytes, at least one; unknown, it takes its size."""
    tree = SnapshotTree(view, Told())
    operations = FuseOperations(lambda: tree, lambda: None)
    operations.init_with_config(Connection(), Config())
    blocks = {path: operations.getattr(f"/{path}")["st_blocks"] for path in view.files}
    assert blocks == {"m.bin": 2, "d/c": 1, "e": 0}
    assert SnapshotTree(view).stored("m.bin") == len(DATA)


def test_attributes_of_others(operations: FuseOperations, caplog: pytest.LogCaptureFixture) -> None:
    """An attribute that is not there is an answer, not a failure: nothing is logged."""
    assert code_of(lambda: operations.getxattr("/m.bin", "user.x")) == "ENODATA"
    assert code_of(lambda: operations.getxattr("/m.bin", "system.posix_acl_access")) in {
        "EOPNOTSUPP",
        "ENOTSUP",
    }
    assert operations.getxattr("/m.bin", "user.mstore.snapshot") == b"a" * 64
    assert caplog.text == ""


def test_statfs(operations: FuseOperations) -> None:
    """`df` shows the snapshot's bytes and files, and no room."""
    shown = operations.statfs("/")
    assert shown["f_blocks"] * shown["f_frsize"] >= len(DATA)
    assert shown["f_files"] == 3
    assert shown.get("f_bfree", 0) == 0


def test_the_kernel_is_told_that_nothing_changes(view: View) -> None:
    """Names and attributes of one snapshot may be kept for an hour; inodes are ours."""
    config, connection = Config(), Connection()
    FuseOperations(lambda: SnapshotTree(view), lambda: None).init_with_config(connection, config)
    assert (config.entry_timeout, config.attr_timeout, config.negative_timeout) == (3600,) * 3
    assert config.use_ino == 1
    assert connection.want == 0xEFFF
    # As many as have a thread each.
    assert connection.max_background == 64


def test_a_store_that_does_not_open_ends_the_mount() -> None:
    """If the first request fails, the mount is given up, and until it is gone answers EIO."""
    given_up = []

    def start() -> SnapshotTree:
        raise Corrupt("the index is damaged")

    operations = FuseOperations(start, lambda: given_up.append(True))
    operations.init_with_config(Connection(), Config())
    assert given_up == [True]
    assert code_of(lambda: operations.getattr("/")) == "EIO"
