"""What system calls answer on every kind of mount: pjdfstest, for a filesystem that is read-only.

Errors are those of a directory that is mounted read-only; names and attributes are consistent
however a program comes by them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from mount_drivers import SHARDS, Driver, Family, Mount, on_disk, write_family

from mstore import Store

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk

MANY = 2400
LIBC = ctypes.CDLL(None, use_errno=True)
LONG = "n" * 256
"""A name of one byte more than names may have."""


@pytest.fixture(scope="module")
def family(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A store that nobody damages."""
    return write_family(tmp_path_factory.mktemp("posix"), driver)


@pytest.fixture(scope="module")
def shown(family: Family, mounted: Mount) -> Path:
    """`base`, mounted."""
    return mounted(family.store, "base", family.store.parent / "mnt")


@pytest.fixture
def at(shown: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the current directory."""
    monkeypatch.chdir(shown)
    return shown


def answer(call: Callable[[], object]) -> str:
    """The name of the error that a call ends with; '' if it ends well."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def opens(path: str, flags: int) -> None:
    os.close(os.open(path, flags, 0o644))


@contextmanager
def opened(path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def with_file(call: Callable[[int], object]) -> None:
    """A call on a descriptor of config.json, opened for reading."""
    with opened("config.json") as descriptor:
        call(descriptor)


def write_shared() -> None:
    """Map a file to write it, through a descriptor that may only read."""
    with opened(SHARDS[0]) as descriptor:
        mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()


def may_not_write(path: str) -> None:
    if LIBC.access(os.fsencode(path), os.W_OK):
        raise OSError(ctypes.get_errno(), path)


WRITING: dict[str, Callable[[], object]] = {
    "open to write": lambda: opens("config.json", os.O_WRONLY),
    "open to read and write": lambda: opens("config.json", os.O_RDWR),
    "open to append": lambda: opens("config.json", os.O_WRONLY | os.O_APPEND),
    "open and truncate": lambda: opens("config.json", os.O_RDONLY | os.O_TRUNC),
    "create": lambda: opens("new", os.O_WRONLY | os.O_CREAT),
    "create below": lambda: opens("sub/new", os.O_RDONLY | os.O_CREAT | os.O_EXCL),
    "truncate": lambda: os.truncate("config.json", 0),
    "truncate to its size": lambda: os.truncate("empty", 0),
    "unlink": lambda: os.unlink("config.json"),
    "rmdir": lambda: os.rmdir("sub/deeper"),
    "rename": lambda: os.rename("config.json", "other"),
    "rename onto": lambda: os.rename("config.json", "empty"),
    "rename a directory": lambda: os.rename("sub", "other"),
    "mkdir": lambda: os.mkdir("new"),
    "link": lambda: os.link("config.json", "new"),
    "symlink": lambda: os.symlink("config.json", "new"),
    "mknod": lambda: os.mknod("new"),
    "mkfifo": lambda: os.mkfifo("new"),
    "chmod": lambda: os.chmod("config.json", 0o600),
    "chmod of the root": lambda: os.chmod(".", 0o700),
    "fchmod": lambda: with_file(lambda fd: os.fchmod(fd, 0o600)),
    "chown": lambda: os.chown("config.json", 1, 1),
    "utime": lambda: os.utime("config.json"),
    "utime to a time": lambda: os.utime("config.json", ns=(1, 1)),
    "setxattr": lambda: os.setxattr("config.json", "user.a", b"b"),
    "removexattr": lambda: os.removexattr("config.json", "user.a"),
    "access to write": lambda: may_not_write("config.json"),
}

ERRORS: dict[str, tuple[str, Callable[[], object]]] = {
    "stat of nothing": ("ENOENT", lambda: os.stat("nothing")),
    "open of nothing": ("ENOENT", lambda: opens("nothing", os.O_RDONLY)),
    "list of nothing": ("ENOENT", lambda: os.listdir("nothing")),
    "stat below nothing": ("ENOENT", lambda: os.stat("nothing/config.json")),
    "access to nothing": ("ENOENT", lambda: os.stat("sub/nothing")),
    "stat below a file": ("ENOTDIR", lambda: os.stat("config.json/x")),
    "a file with a slash": ("ENOTDIR", lambda: os.stat("config.json/")),
    "open below a file": ("ENOTDIR", lambda: opens("config.json/x", os.O_RDONLY)),
    "list of a file": ("ENOTDIR", lambda: os.listdir("config.json")),
    "a file as a directory": ("ENOTDIR", lambda: opens("config.json", os.O_DIRECTORY)),
    "chdir to a file": ("ENOTDIR", lambda: os.chdir("config.json")),
    "read of a directory": ("EISDIR", lambda: _read("sub")),
    "a directory to write": ("EISDIR", lambda: opens("sub", os.O_WRONLY)),
    "truncate of a directory": ("EISDIR", lambda: os.truncate("sub", 0)),
    "stat of a long name": ("ENAMETOOLONG", lambda: os.stat(LONG)),
    "open of a long name": ("ENAMETOOLONG", lambda: opens(LONG, os.O_RDONLY)),
    "a long name below": ("ENAMETOOLONG", lambda: os.stat(f"sub/{LONG}")),
    "a long name above": ("ENAMETOOLONG", lambda: os.stat(f"{LONG}/x")),
    "a longer name": ("ENAMETOOLONG", lambda: os.stat("n" * 2000)),
    "a long path": ("ENAMETOOLONG", lambda: os.stat("x/" * 2100)),
    "the longest name": ("ENOENT", lambda: os.stat(LONG[:-1])),
    "create what exists": ("EEXIST", lambda: opens("config.json", os.O_CREAT | os.O_EXCL)),
    "mkdir of what exists": ("EEXIST", lambda: os.mkdir("sub")),
    "readlink of a file": ("EINVAL", lambda: os.readlink("config.json")),
    "run a file": ("EACCES", lambda: subprocess.run(["./config.json"], check=False)),
    "write to what is read": ("EBADF", lambda: with_file(lambda fd: os.write(fd, b"x"))),
    "truncate what is read": ("EINVAL", lambda: with_file(lambda fd: os.ftruncate(fd, 0))),
    "allocate in it": ("EBADF", lambda: with_file(lambda fd: os.posix_fallocate(fd, 0, 1))),
    "seek before it": ("EINVAL", lambda: with_file(lambda fd: os.lseek(fd, -1, os.SEEK_SET))),
    "read before it": ("EINVAL", lambda: with_file(lambda fd: os.pread(fd, 1, -1))),
    "map to write": ("EACCES", write_shared),
}

WORKING: dict[str, Callable[[], object]] = {
    "create where there is one": lambda: opens("config.json", os.O_RDONLY | os.O_CREAT),
    "open a path": lambda: opens("config.json", os.O_PATH),
    "open a directory": lambda: opens("sub", os.O_RDONLY | os.O_DIRECTORY),
    "open and follow nothing": lambda: opens("config.json", os.O_RDONLY | os.O_NOFOLLOW),
    "open in two steps": lambda: opens("sub/deeper/../../config.json", os.O_RDONLY),
    "fsync": lambda: with_file(os.fsync),
    "fsync of a directory": lambda: _sync("sub"),
    "flock": lambda: with_file(lambda fd: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)),
    "lock of a range": lambda: with_file(lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH, 10)),
    "access to read": lambda: os.stat("config.json") if os.access("config.json", os.R_OK) else 1,
}


def _read(path: str) -> None:
    with opened(path) as descriptor:
        os.read(descriptor, 1)


def _sync(path: str) -> None:
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@pytest.mark.sampled(3)
def test_every_change_is_refused_as_read_only(at: Path) -> None:
    """Opening to write, truncating, creating, removing, renaming, linking, changing modes, owners,
    times or attributes: EROFS each, and nothing has changed."""
    before = sorted(os.walk("."))
    answers = {name: answer(call) for name, call in WRITING.items()}
    assert answers == dict.fromkeys(WRITING, "EROFS")
    assert sorted(os.walk(".")) == before


def test_mistakes_get_the_errors_that_they_get_elsewhere(at: Path) -> None:
    """ENOENT, ENOTDIR, EISDIR, ENAMETOOLONG, EEXIST, EINVAL, EBADF and EACCES, where any
    filesystem gives them."""
    answers = {name: answer(call) for name, (_, call) in ERRORS.items()}
    assert answers == {name: wanted for name, (wanted, _) in ERRORS.items()}


def test_what_only_reads_is_allowed(driver: Driver, at: Path) -> None:
    """O_CREAT on a file that exists, O_PATH, fsync and locks work on a mount; the kernel's own
    filesystem has no fsync."""
    answers = {name: answer(call) for name, call in WORKING.items()}
    fsync = "" if driver.has_process else "EINVAL"
    assert answers == {name: fsync if "fsync" in name else "" for name in WORKING}


def test_the_mount_is_read_only_and_says_so(driver: Driver, shown: Path) -> None:
    """statvfs: read-only, neither set-user-id nor devices, full, names of 255 bytes; the same for
    each file of the mount."""
    told = os.statvfs(shown)
    assert told.f_flag & os.ST_RDONLY
    assert told.f_flag & os.ST_NOSUID
    assert told.f_flag & os.ST_NODEV
    assert (told.f_bfree, told.f_bavail) == (0, 0)
    assert told.f_namemax == 255
    if driver.has_process:
        # Else the kernel counts the image alone.
        assert told.f_ffree == 0
        size = sum(os.path.getsize(path) for path in shown.rglob("*") if path.is_file())
        assert 0 <= told.f_blocks * told.f_frsize - size < told.f_frsize
    assert os.statvfs(shown / "config.json") == told


def test_attributes_are_consistent(shown: Path) -> None:
    """Numbers of inodes are those of one file each, and the same by stat, lstat, fstat and in
    listings, with the type; a file has one link, the device is the mount's, times are one."""
    seen: dict[int, str] = {}
    device = os.stat(shown).st_dev
    for folder, folders, files in os.walk(shown):
        entries = {entry.name: entry for entry in os.scandir(folder)}
        assert sorted(entries) == sorted(folders + files)
        for name, entry in entries.items():
            path = os.path.join(folder, name)
            status = os.stat(path)
            with opened(path) as descriptor:
                assert os.fstat(descriptor) == os.lstat(path) == status
            assert entry.inode() == status.st_ino
            assert entry.is_dir() == stat.S_ISDIR(status.st_mode) == (name in folders)
            assert seen.setdefault(status.st_ino, path) == path
            assert status.st_dev == device
            assert status.st_nlink == 1
            assert status.st_mtime_ns == status.st_ctime_ns
    # The root has a number of its own.
    assert os.stat(shown).st_ino not in seen


# -- a directory of many files ------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(driver: Driver, mounted: Mount, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mount with a directory of many files."""
    root = tmp_path_factory.mktemp("many")
    folder = root / "source" / "all"
    folder.mkdir(parents=True)
    write_safetensors(root / "source" / "model.safetensors", [("a", "U8", (1,), b"a")])
    for number in range(MANY):
        (folder / f"{number:05} é").write_bytes(b"%d" % (number % 7))
    with driver.store(root / "store") as store:
        store.add(root / "source", name="many")
    return mounted(root / "store", "many", root / "mnt") / "all"


@dataclass
class Directory:
    """A directory by opendir(3) and its siblings."""

    stream: int

    @classmethod
    def open(cls, path: Path) -> Directory:
        stream: int | None = LIBC.opendir(os.fsencode(path))
        assert stream, os.strerror(ctypes.get_errno())
        return cls(stream)

    def next(self) -> tuple[str, int, int] | None:
        """Name, inode and type of the next entry."""
        found = LIBC.readdir64(ctypes.c_void_p(self.stream))
        if not found:
            return None
        entry = ctypes.string_at(found, 19)
        name = ctypes.string_at(found + 19).decode()
        return name, int.from_bytes(entry[:8], sys.byteorder), entry[18]

    def rest(self) -> list[tuple[str, int, int]]:
        """All that follow."""
        found = []
        while (entry := self.next()) is not None:
            found.append(entry)
        return found

    def tell(self) -> int:
        place: int = LIBC.telldir(ctypes.c_void_p(self.stream))
        return place

    def seek(self, place: int) -> None:
        LIBC.seekdir(ctypes.c_void_p(self.stream), ctypes.c_long(place))

    def rewind(self) -> None:
        LIBC.rewinddir(ctypes.c_void_p(self.stream))

    def close(self) -> None:
        LIBC.closedir(ctypes.c_void_p(self.stream))


for _function, _result in (
    ("opendir", ctypes.c_void_p), ("readdir64", ctypes.c_void_p), ("telldir", ctypes.c_long),
    ("seekdir", None), ("rewinddir", None),
):  # fmt: skip
    getattr(LIBC, _function).restype = _result


@pytest.mark.rest
def test_a_large_directory_is_listed_whole(many: Path) -> None:
    """2,400 files: each once, with the number and type that stat gives; `.` and `..` first."""
    listing = Directory.open(many)
    entries = listing.rest()
    listing.close()
    assert [name for name, _, _ in entries[:2]] == [".", ".."]
    names = [name for name, _, _ in entries[2:]]
    assert sorted(names) == [f"{number:05} é" for number in range(MANY)]
    assert {kind for _, _, kind in entries[2:]} == {8}  # DT_REG
    for name, number, _ in entries[2::50]:
        assert (many / name).stat().st_ino == number
    assert len({number for _, number, _ in entries[2:]}) == MANY


@pytest.mark.rest
def test_a_listing_goes_on_from_any_place(many: Path) -> None:
    """telldir and seekdir return to an entry in any order, rewinddir to the first; two listings at
    once do not disturb each other."""
    listing, other = Directory.open(many), Directory.open(many)
    places, entries = [], []
    while True:
        places.append(listing.tell())
        entry = listing.next()
        if entry is None:
            break
        entries.append(entry)
    assert len(set(places)) == len(places) == MANY + 3
    for number in (MANY, 1, MANY + 1, 0, 1250, 1249, 37):
        listing.seek(places[number])
        assert listing.next() == entries[number]
        assert other.next() is not None
    listing.seek(places[1900])
    assert listing.rest() == entries[1900:]
    listing.rewind()
    assert listing.rest() == entries
    assert other.rest() == entries[7:]
    for each in (listing, other):
        each.close()


@pytest.mark.rest
def test_every_file_of_a_large_directory_can_be_read(many: Path) -> None:
    """They are there with their bytes, one of eight, and all 2,400 by stat."""
    assert {(many / f"{n:05} é").stat().st_size for n in range(MANY)} == {1}
    chosen = range(0, MANY, 8)
    assert {(many / f"{n:05} é").read_bytes() == b"%d" % (n % 7) for n in chosen} == {True}


# -- other users --------------------------------------------------------------------------------

AS_NOBODY = """
import errno, os, sys
parent, *names = sys.argv[1:]
os.chdir(parent)
os.setgid(65534); os.setuid(65534)
for name in names:
    try:
        print(len(os.listdir(name)) > 0)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_mount_is_its_owners(family: Family, shown: Path) -> None:
    """Another user gets EACCES from a mount, and reads the directory beside it."""
    parent = shown.parent
    parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(parent), shown.name, "base"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["EACCES", "True"]


@pytest.mark.sampled(3)
def test_a_snapshot_is_the_same_under_every_name(
    family: Family, mounted: Mount, shown: Path
) -> None:
    """Attributes of a file are those of every mount that shows it: by its ref, by its id, alone or
    in the whole store; only the device differs."""
    with Store.open(family.store) as store:
        (number,) = (str(ref.snapshot) for ref in store.refs() if ref.name == "base")
    whole = mounted(family.store, None, family.store.parent / "whole")
    alone = mounted(family.store, number, family.store.parent / "by id")

    def attributes(path: Path) -> list[int]:
        found = os.stat(path)
        return [found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_blocks]

    for name in (*SHARDS, "config.json", "empty", "sub/deeper"):
        for root in (alone, whole / "refs" / "base", whole / "snapshots" / number):
            assert attributes(root / name) == attributes(shown / name)
