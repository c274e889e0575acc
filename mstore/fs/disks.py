"""Disks: what kind of filesystem a path is on, and how much is free there."""

from __future__ import annotations

import os
from pathlib import Path

from mstore.fs.roots import translated

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
