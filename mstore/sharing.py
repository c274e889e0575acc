"""Sharing: who besides its creator may use a file of a store, like git's core.sharedRepository.

    umask   what the creator's umask leaves
    group   its group may also read and write it, whatever the umask; directories are setgid, so
            that what is created in them later belongs to the same group
    all     the same, and everyone may read it

A *private* file or directory (a lock, or one being written) is only for users who may also write
it: a user who may open a lock can hold it. A *sealed* file is written by no one. Functions are
pure: they compute modes, and change nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

FILE: Final = 0o666
SEALED: Final = 0o444
DIRECTORY: Final = 0o777
_SETGID: Final = 0o2000


class Sharing(StrEnum):
    """Who besides its creator may use what is created in a store."""

    UMASK = "umask"
    GROUP = "group"
    ALL = "all"


def mode(sharing: Sharing, kind: int, umask: int, *, private: bool = False) -> int:
    """Return the mode of something new; `kind` is FILE, SEALED or DIRECTORY."""
    allowed = kind & ~umask
    if sharing is not Sharing.UMASK:
        allowed |= kind & 0o660
        if kind == DIRECTORY:
            allowed |= 0o070 | _SETGID
    if sharing is Sharing.ALL:
        allowed |= kind & 0o555
    if private:
        # Exactly those who may write may read.
        allowed &= 0o2700 | (0o070 if allowed & 0o020 else 0) | (0o007 if allowed & 0o002 else 0)
    return allowed
