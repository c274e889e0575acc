"""The kernel's table of mounts: the only record of what mstore has mounted.

Nothing is kept in files of our own.  A mount of ours has the type `fuse.mstore` and a source
with all its data, so the record lives exactly as long as the mount, even if the
process behind it is dead:

    mstore:<revision>@<store>#<pid>      `*` stands for the whole store

A kernel mount has the type `erofs` and no process; its source is the path that its image had, in
the store's tmp/:

    <store>/tmp/<lease>/mstore:<revision>

In revision and store `%`, `,`, `\\`, quotes, blanks and control characters are written as %XX, in
the store's path `@` too, in an image's name `/` too. The path of an image is as it is.

Reading the table never accesses a mounted file system, so a dead or hanging one is harmless.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote_to_bytes

import msgspec

TYPE = "fuse.mstore"
KERNEL_TYPE = "erofs"

_WHOLE_STORE = "*"
_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-7]{3})")
_USER = re.compile(rb"(?:^|,)user_id=(\d+)")
_SOURCE = re.compile(r"mstore:(?P<revision>.*)@(?P<store>[^@]*)#(?P<pid>\d+)", re.DOTALL)
_IMAGE = re.compile(r"(?P<store>/.*)/tmp/[0-9a-f]{16}/mstore:(?P<revision>[^/]+)", re.DOTALL)
_UNSAFE_IN_NAME = re.compile(r"[\x00-\x20\x7f%,\\\"'/]")
_UNSAFE = re.compile(r"[\x00-\x20\x7f%,\\\"']")
_UNSAFE_IN_PATH = re.compile(r"[\x00-\x20\x7f%,\\\"'@]")

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


class TableEntry(msgspec.Struct, frozen=True):
    """One line of mountinfo: mount point, type, source, whether it is a whole file system.

    user: who mounted it, for FUSE; None for other types.
    """

    mountpoint: Path
    type: str
    source: str
    whole: bool
    user: int | None = None


class MountedSnapshot(msgspec.Struct, frozen=True):
    """What a mount of ours shows, and which process serves it.

    revision: None for the whole store. pid: None for a kernel mount.
    """

    store: Path
    revision: str | None
    pid: int | None

    def __str__(self) -> str:
        revision = _WHOLE_STORE
        if self.revision is not None:
            revision = _UNSAFE.sub(_percent, self.revision)
        store = _UNSAFE_IN_PATH.sub(_percent, str(self.store))
        return f"mstore:{revision}@{store}#{self.pid}"

    @classmethod
    def of(cls, entry: TableEntry) -> MountedSnapshot | None:
        """Return what a mount shows; None if it is none of ours, or only a part of one."""
        if entry.whole and entry.type == TYPE and entry.user is not None:
            return cls.parse(entry.source)
        if entry.whole and entry.type == KERNEL_TYPE:
            return cls.of_image(entry.source)
        return None

    @classmethod
    def parse(cls, text: str) -> MountedSnapshot | None:
        """Parse a mount's source; None if we did not write it."""
        found = _SOURCE.fullmatch(text)
        if found is None:
            return None
        revision, store = (os.fsdecode(unquote_to_bytes(os.fsencode(found[n]))) for n in (1, 2))
        return cls(Path(store), None if revision == _WHOLE_STORE else revision, int(found["pid"]))

    @classmethod
    def of_image(cls, text: str) -> MountedSnapshot | None:
        """Parse a kernel mount's source; None if we did not make it."""
        found = _IMAGE.fullmatch(text)
        if found is None:
            return None
        revision = os.fsdecode(unquote_to_bytes(os.fsencode(found["revision"])))
        return cls(Path(found["store"]), revision, None)

    @property
    def alive(self) -> bool:
        """Whether the serving process runs; False for a zombie, or another process with its pid.

        The kernel is always there.
        """
        if self.pid is None:
            return True
        try:
            arguments = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"mstore_fuse" in arguments


def image_name(revision: str) -> str:
    """Return the name of the image of a kernel mount of this revision."""
    return f"mstore:{_UNSAFE_IN_NAME.sub(_percent, revision)}"


def _percent(found: re.Match[str]) -> str:
    return f"%{ord(found.group()):02X}"


def entries(table: Path = _MOUNTINFO) -> list[TableEntry]:
    """Return all mounts that this process sees, in the order in which they were made."""
    return [_entry(line) for line in table.read_bytes().splitlines()]


def _entry(line: bytes) -> TableEntry:
    # 36 35 98:0 /root /where opt,opt optional:1 - type source opt,opt     (proc_pid_mountinfo(5))
    before, _, after = line.partition(b" - ")
    fields = before.split(b" ")
    kind, source, *options = after.split(b" ")
    user = _USER.search(options[0]) if options else None
    return TableEntry(
        Path(_plain(fields[4])),
        _plain(kind),
        _plain(source),
        fields[3] == b"/",
        None if user is None else int(user[1]),
    )


def _plain(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), field))


def at(mountpoint: Path) -> TableEntry | None:
    """Return the topmost mount at this very path, or None."""
    found = [entry for entry in entries() if entry.mountpoint == mountpoint]
    return found[-1] if found else None


def detach(mountpoint: Path, *, lazy: bool) -> None:
    """Unmount the topmost mount at this path; `lazy` keeps open files readable.

    Raises OSError: EBUSY if one of its files is in use and not `lazy`, EPERM if it is another
    user's.
    """
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if libc.umount2(os.fsencode(mountpoint), flags) == 0:
            return
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(mountpoint))
    _fusermount(mountpoint, lazy)


def _fusermount(mountpoint: Path, lazy: bool) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise FileNotFoundError("fusermount3 is not installed")
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        code = 16 if "busy" in done.stderr.lower() else 1
        raise OSError(code, done.stderr.strip() or os.strerror(code), str(mountpoint))
