"""Neighbours: who else may rename and remove what we make in a directory.

Whoever may write a directory may rename and remove every name in it, also of directories that he
may not enter.  A sticky directory leaves that to the owners of the directory and of each name.

Judged by owner, mode and POSIX access list, as they are now.  Root may do everything everywhere and
is nobody's neighbour.  This module changes nothing.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from mstore.errors import Conflict

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
    hint = "name a new directory in one of your own, or add --shared if you trust them"
    if status.st_uid == os.geteuid():
        hint = f"chmod +t {shlex.quote(str(path))}    (or add --shared if you trust them)"
    raise Conflict(what, where=str(path), hint=hint)


def _is_written_by_others(descriptor: int, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    # With an access list the group's bits stand for everybody on it.
    return _has_access_list(descriptor) or not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether nobody but this user is in the group, as where each has one of the same name.

    Such users mostly have a umask of 002: all their directories may be written by their groups.
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
