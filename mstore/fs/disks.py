"""Disks: what kind of filesystem a path is on, and how much is free there."""

from __future__ import annotations

import os
from pathlib import Path

from mstore.errors import Incompatible
from mstore.fs.roots import translated
from mstore.phrases import call

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "glusterfs"}
    | {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.glusterfs", "beegfs", "gpfs"}
)
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


def require_local(path: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Raise Incompatible if LMDB's locks and memory map are unreliable on this filesystem."""
    kind = filesystem_type(path, mountinfo)
    if kind in NETWORK_FILESYSTEMS:
        raise Incompatible(
            f"a store cannot live on a network filesystem ({kind})",
            where=str(path),
            hint=call("init", store="/a/local/disk/.mstore"),
        )
