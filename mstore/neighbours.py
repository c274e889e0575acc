"""Neighbours: other users who may rename and remove what we create in a directory.

A user who may write a directory may rename and remove every name in it, including directories that
the user may not enter.  In a sticky directory, only the owners of the directory and of each name
may.

Checks owner, mode and POSIX access list, as they are now.  Root may do everything everywhere and
does not count as a neighbour.  This module changes nothing.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from mstore.errors import Conflict
from mstore.phrases import Option, phrase

_ROOT = 0
_ACCESS_LIST = "system.posix_acl_access"


def require_alone(descriptor: int, path: Path) -> None:
    """Raise Conflict unless only this user and root may rename and remove in this directory.

    `path` is its name in the error.  Raises OSError.
    """
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), _ROOT):
        what = "the directory is another user's, who may rename and remove all that is in it"
    elif status.st_mode & stat.S_ISVTX or not _is_written_by_others(descriptor, status):
        return
    else:
        what = "others may write the directory, so they may rename and remove all that is in it"
    shared = Option("shared")
    hint = phrase(
        "name a new directory in one of your own, or add {shared} if you trust them", shared=shared
    )
    if status.st_uid == os.geteuid():
        hint = phrase(
            "chmod +t {path}    (or add {shared} if you trust them)",
            path=shlex.quote(str(path)),
            shared=shared,
        )
    raise Conflict(what, where=str(path), hint=hint)


def _is_written_by_others(descriptor: int, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    # With an access list, the group bits are the mask for everybody on it.
    return _has_access_list(descriptor) or not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether this user is alone in the group, as in a user-private group scheme.

    Such users usually have a umask of 002, so that their groups may write all their directories.
    """
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_first = user.pw_gid == group and entry.gr_name == user.pw_name
    return is_first and set(entry.gr_mem) <= {user.pw_name}


def _has_access_list(descriptor: int) -> bool:
    try:
        return bool(os.getxattr(descriptor, _ACCESS_LIST))
    except OSError:
        return False
