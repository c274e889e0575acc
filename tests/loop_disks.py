"""Disks of their own for tests (root only), mounted from a file; filling them to the last byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20
FILESYSTEMS = {
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "btrfs": ["mkfs.btrfs", "-q"],
    "btrfs-mixed": ["mkfs.btrfs", "-q", "--mixed"],
    "ext4": ["mkfs.ext4", "-q"],
}


@contextmanager
def loop_disk(kind: str, place: Path, size: int) -> Iterator[Path]:
    """A mounted filesystem of this kind and size; skips the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a disk")
    disk = place / "disk"
    disk.mkdir()
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    else:
        program, *_ = FILESYSTEMS[kind]
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        name = kind.partition("-")[0]
        if kind != "ext4" and f"\t{name}\n" not in Path("/proc/filesystems").read_text():
            pytest.skip(f"this kernel has no {kind}")
        with (place / "image").open("wb") as image:
            image.truncate(size)
        command = [*FILESYSTEMS[kind], str(place / "image")]
        subprocess.run(command, check=True, capture_output=True)
        mount = ["mount", "-o", "loop", str(place / "image"), str(disk)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"it cannot be mounted: {done.stderr}")
    try:
        yield disk
    finally:
        unmount(disk)


@contextmanager
def overlay(place: Path, lower: Path, upper_bytes: int = 64 << 20) -> Iterator[Path]:
    """A directory as the lower layer, beneath an upper one of a disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts layers")
    disk, merged = place / "disk", place / "merged"
    disk.mkdir()
    merged.mkdir()
    size = ["mount", "-t", "tmpfs", "-o", f"size={upper_bytes}", "none", str(disk)]
    subprocess.run(size, check=True)
    try:
        (disk / "upper").mkdir()
        (disk / "work").mkdir()
        layers = f"lowerdir={lower},upperdir={disk / 'upper'},workdir={disk / 'work'}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", layers, str(merged)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("no overlayfs here")
        try:
            yield merged
        finally:
            unmount(merged)
    finally:
        unmount(disk)


def unmount(place: Path) -> None:
    """Unmount; waits for processes that are about to end."""
    until = time.monotonic() + 60
    while subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode:
        assert time.monotonic() < until
        time.sleep(0.1)


def fill(disk: Path, *, leave: int = 0) -> None:
    """Fill a disk to its last byte, or but for so many, and have everything written to it.

    What is written frees what was only reserved, so it takes several times.
    """
    fillers = disk / "filler"
    fillers.mkdir(exist_ok=True)
    for size in (MIB, 4096, MIB, 4096):
        try:
            with (fillers / str(time.time_ns())).open("wb", buffering=0) as filler:
                while filler.write(os.urandom(size)):
                    pass
        except OSError:
            pass
        sync(disk)
    if leave:
        largest = max(fillers.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - leave)
        sync(disk)


def room(disk: Path) -> int:
    """How many bytes are free."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def sync(disk: Path) -> None:
    """Have all that was written written to the disk: pages of maps are then protected again."""
    subprocess.run(["sync", "-f", str(disk)], check=True)


def make_room(disk: Path) -> None:
    """Remove what fills it."""
    shutil.rmtree(disk / "filler")
    sync(disk)
