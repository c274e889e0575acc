"""A disk that fails when it is told to: a directory seen through FUSE, by a process of its own.

That process is a fork of one that is started with the first disk and ends with the tests.

    with sick_disk(directory, orders) as disk:       # `directory` is mounted over itself
        disk.tell({"ab12.pack": "EIO"})              # reads of such a file fail, by any errno
        disk.tell({"ab12.pack": "wait"})             # they wait until they are told otherwise

Whoever reads gets the error from the kernel, as from a real disk.  Nothing can be written there.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mstore_fuse import connection
from mstore_fuse.connection import Opened
from mstore_fuse.protocol import Room, Status

_POLL = 0.01


@dataclass(frozen=True)
class Disk:
    """The orders of one disk, and the files of which reads are known to wait."""

    orders: Path
    waiting: Path

    def tell(self, orders: Mapping[str, str]) -> None:
        """From now on: file name -> what its reads do ("EIO", "ENOMEM", "wait"); others work."""
        new = self.orders.with_suffix(".new")
        new.write_text(json.dumps(dict(orders)))
        new.rename(self.orders)

    def waits(self) -> int:
        """How many reads have begun to wait so far."""
        return self.waiting.stat().st_size


@contextmanager
def sick_disk(directory: Path, scratch: Path) -> Iterator[Disk]:
    """Put the disk below a directory of files, which are at their place again afterwards."""
    real = scratch / "real"
    directory.rename(real)
    directory.mkdir()
    disk = Disk(scratch / "orders", scratch / "waiting")
    disk.waiting.touch()
    disk.tell({})
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(json.dumps([str(real), str(directory), str(scratch)]).encode() + b"\n")
    forks.stdin.flush()
    said, _, number = forks.stdout.readline().partition(b" ")
    try:
        assert said == b"ready"
        deadline = time.monotonic() + 60
        while not os.path.ismount(directory):
            assert time.monotonic() < deadline
            time.sleep(_POLL)
        # A disk that says it is read-only is refused before anything is read of it.
        remount = ["mount", "-i", "-n", "-o", "remount,rw", str(directory)]
        subprocess.run(remount, check=True, timeout=60)
        yield disk
    finally:
        disk.tell({})
        if said == b"ready":
            os.kill(int(number), signal.SIGKILL)
            while Path("/proc", str(int(number))).exists():
                time.sleep(_POLL)
        subprocess.run(["fusermount3", "-uz", str(directory)], check=False)
        directory.rmdir()
        real.rename(directory)


@cache
def _forks() -> subprocess.Popen[bytes]:
    """The process that all disks of this one are forks of."""
    made = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    # After its last line it ends.
    atexit.register(made.communicate)
    return made


class _Files:
    """What the connection asks (`mstore_fuse.connection.Filesystem`)."""

    def __init__(self, real: Path, disk: Disk) -> None:
        self._real = real
        self._disk = disk

    def status(self, path: str) -> Status:
        found = os.lstat(self._real / path)
        return Status(
            found.st_ino,
            found.st_mode,
            found.st_size,
            found.st_blocks,
            found.st_mtime_ns,
            (found.st_uid, found.st_gid),
            4096,
            1.0,
        )

    def absent_for(self, path: str) -> float:
        return 0.0

    def listing(self, path: str) -> list[tuple[str, Status | None, int, int]]:
        # A name without an inode number is skipped by who reads the directory.
        here = self._real / path
        found = [(name, os.lstat(here / name)) for name in (".", "..", *os.listdir(here))]
        return [(name, None, one.st_ino, one.st_mode) for name, one in found]

    def room(self, path: str) -> Room:
        found = os.statvfs(self._real)
        return Room(found.f_bsize, found.f_frsize, found.f_blocks, found.f_files, found.f_namemax)

    def open(self, path: str, flags: int) -> Opened:
        # Each read of the store comes here, and none is answered from memory.
        handle = os.open(self._real / path, os.O_RDONLY)
        return Opened(handle, keep_cache=False, direct=True)

    def read(self, path: str, handle: int, offset: int, size: int) -> list[bytes]:
        name = path.rpartition("/")[2]
        has_waited = False
        while (order := json.loads(self._disk.orders.read_text()).get(name)) == "wait":
            if not has_waited:
                with self._disk.waiting.open("ab") as file:
                    file.write(b".")
            has_waited = True
            time.sleep(_POLL)
        if order is not None:
            raise OSError(getattr(errno, order), os.strerror(getattr(errno, order)))
        return [os.pread(handle, size, offset)]

    def release(self, path: str, handle: int) -> None:
        os.close(handle)

    def labels(self, path: str) -> list[str]:
        return []

    def label(self, path: str, name: str) -> bytes:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def main() -> None:
    """Make a disk of each line of standard input, in a child."""
    # Nobody waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                serve(*map(Path, json.loads(line)))
            except BaseException:  # noqa: BLE001 -- whatever it is, the parent must not go on here
                traceback.print_exc()
                os.write(1, b"failed\n")
            os._exit(1)


def serve(real: Path, point: Path, scratch: Path) -> None:
    """Be the disk until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert stat.S_ISDIR(real.stat().st_mode)
    files = _Files(real, Disk(scratch / "orders", scratch / "waiting"))
    device = connection.mount(point, "sick_disk", subtype="sick")
    os.write(1, f"ready {os.getpid()}\n".encode())
    connection.serve(device, files)


if __name__ == "__main__":
    main()
