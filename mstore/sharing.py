"""Sharing: who besides its maker may use a file of a store, as git's core.sharedRepository has it.

    umask   what the umask of whoever makes it leaves
    group   its group may also read and write it, whatever the umask; directories are setgid, so
            that what is made in them later is the same group's
    all     the same, and everybody may read it

A *private* file or directory (locks, all that is being written) is nobody's but those who may also
write it: whoever may open a lock can hold it.  A *sealed* file is written by nobody.

Functions are pure: they say which mode, and change nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

FILE: Final = 0o666
SEALED: Final = 0o444
DIRECTORY: Final = 0o777
_SETGID: Final = 0o2000


class Sharing(StrEnum):
    """Who besides its maker may use what is made in a store."""

    UMASK = "umask"
    GROUP = "group"
    ALL = "all"


def mode(sharing: Sharing, kind: int, umask: int, *, private: bool = False) -> int:
    """The mode of something new; `kind` is FILE, SEALED or DIRECTORY."""
    allowed = kind & ~umask
    if sharing is not Sharing.UMASK:
        allowed |= kind & 0o660
        if kind == DIRECTORY:
            allowed |= 0o070 | _SETGID
    if sharing is Sharing.ALL:
        allowed |= kind & 0o555
    if private:
        # As may write, so may read: neither more nor less.
        allowed &= 0o2700 | (0o070 if allowed & 0o020 else 0) | (0o007 if allowed & 0o002 else 0)
    return allowed
