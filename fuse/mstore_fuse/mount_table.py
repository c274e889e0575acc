"""The kernel's table of mounts: the only record of what mstore has mounted.

Nothing is kept in files of our own. The source of a mount says what it shows, and who serves it
(each driver has its form), so the record lives exactly as long as the mount, even if the process
behind it is dead. Reading the table never accesses a mounted file system, so a dead or hanging one
is harmless.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

import msgspec

_MOUNTINFO = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-7]{3})")
_USER = re.compile(rb"(?:^|,)user_id=(\d+)")
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


def escaped(text: str, *, also: str = "") -> str:
    """Return a text for the source of a mount: what mount options would split is %XX.

    also: further characters that the form of the source gives a meaning.
    """
    unsafe = rf"[\x00-\x20\x7f%,\\\"'{re.escape(also)}]"
    return re.sub(unsafe, lambda found: f"%{ord(found.group()):02X}", text)


def unescaped(text: str) -> str:
    """Return the text that `escaped` was given."""
    return os.fsdecode(unquote_to_bytes(os.fsencode(text)))


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
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        _system("umount2", os.fsencode(mountpoint), flags, where=mountpoint)
    else:
        _fusermount(mountpoint, lazy)


def attach(mountpoint: Path, source: str, kind: str, flags: int, options: Sequence[str]) -> None:
    """Mount at this path, as mount(2); for root. Raises OSError."""
    words = source, str(mountpoint), kind, ",".join(options)
    device, point, filesystem, data = map(os.fsencode, words)
    _system("mount", device, point, filesystem, ctypes.c_ulong(flags), data, where=mountpoint)


def _system(call: str, *arguments: object, where: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(where))


def _fusermount(mountpoint: Path, lazy: bool) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise FileNotFoundError("fusermount3 is not installed")
    command = [program, "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        code = 16 if "busy" in done.stderr.lower() else 1
        raise OSError(code, done.stderr.strip() or os.strerror(code), str(mountpoint))
