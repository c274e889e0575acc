"""Disks: what kind of filesystem a path is on, how much is free, whether files can be mapped.

Of maps that others share and write, a full disk is a signal and no error.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from mstore.fs.files import write_at
from mstore.fs.roots import open_file, refusal, translated
from mstore.terms.errors import StorageFailed

LOCAL_FILESYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "reiser4"}
    | {"reiserfs", "ubifs", "xfs", "zfs", "fuseblk"}
    # In memory, and layers over others.
    | {"ramfs", "rootfs", "tmpfs", "aufs", "ecryptfs", "overlay", "fuse.fuse-overlayfs"}
    # Media that are only read.
    | {"cramfs", "erofs", "iso9660", "romfs", "squashfs", "udf"}
)
"""Filesystems of one machine: flock, and maps shared with writes, hold for all who use a file."""
MOUNTINFO = Path("/proc/self/mountinfo")


def filesystem_type(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the filesystem type at `path` (proc_pid_mountinfo(5)); '' if unknown."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # =: of two mounts on one point the later line is the visible one.
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind


def free_bytes(path: Path) -> int:
    """Return the free space of the disk at `path` that this user may fill."""
    with translated(path):
        disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def block_bytes(path: Path) -> int:
    """Return the block size of the filesystem at `path`."""
    with translated(path):
        return os.statvfs(path).f_bsize


POPULATE_WRITE: Final = 23
"""madvise(2): prepare pages to be written through a map (Linux 5.14; Python has no name for it)."""
SPARE_BYTES: Final = 1 << 22
"""Bytes: with less, a filesystem that copies on write counts as full.

A full btrfs with mixed block groups says that it has 1.6 to 2.8 MiB free, others 0.
"""


def require_mappable(path: Path, length: int, *, copies: bool) -> None:
    """Raise StorageFailed if others could not map a file shared and write it now.

    The file gets at least this length. Such a write ends the process if the filesystem has no room
    for it, so it is tried without changing a byte, and through a second map as well: with the room
    that the first one takes. Call only while this process has the file open nowhere else, as
    closing it ends this process's locks on it. copies: `copies_on_write`.
    """
    with translated(path):
        fd = open_file(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if size < length:
                write_at(fd, path, size, bytes(length - size))
            with mmap.mmap(fd, length) as first, mmap.mmap(fd, length) as second:
                for one in (first, second):
                    if not is_mappable(path, partial(_populated, one), copies=copies):
                        raise full(path)
        finally:
            os.close(fd)


def copy_up(path: Path) -> None:
    """Have overlayfs copy a file of a lower layer into the upper one, as its first writer would.

    Whoever has mapped the lower one would never see what others write. Changes nothing elsewhere.
    Raises StorageFailed.
    """
    with translated(path):
        os.close(open_file(path, os.O_RDWR))


def _populated(shared: mmap.mmap) -> int:
    try:
        shared.madvise(POPULATE_WRITE)
    except OSError as error:
        return error.errno or 0
    return 0


def is_mappable(path: Path, populate: Callable[[], int], *, copies: bool) -> bool:
    """Return whether a shared map of a file can be written now.

    populate: calls madvise(2) with POPULATE_WRITE and returns the errno. An older kernel does not
    know that; free space then decides. copies: `copies_on_write`. There free space decides first:
    a filesystem that has to search for room writes back what it has, so that the next write through
    the map needs room again, whatever the answer was.
    """
    if copies and not has_free_bytes(path):
        return False
    code = populate()
    return has_free_bytes(path) if code == errno.EINVAL else code != errno.EFAULT


def has_free_bytes(path: Path, size: int = SPARE_BYTES) -> bool:
    """Return whether the filesystem has so many bytes free, or does not tell."""
    try:
        return free_bytes(path) >= size
    except StorageFailed:
        return True


def copies_on_write(path: Path) -> bool:
    """Return whether what is written at `path` takes new room each time, or may do so."""
    return filesystem_type(path) in {"btrfs", "zfs", "bcachefs", "overlay"}


def full(path: Path) -> StorageFailed:
    """Build the error for a full disk."""
    return refusal(errno.ENOSPC, path, "")
