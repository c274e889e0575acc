"""Locks: files and directories that one process holds at a time (flock(2))."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from mstore.fs.files import make_empty, unlink
from mstore.fs.rights import require_giving
from mstore.fs.roots import directory, open_file, status_of, translated


class LockFile:
    """An flock on a file of its own; the kernel drops it when the process ends in any way."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open `path`: a file, made if missing; with `create` off also a directory.

        Raises StorageFailed; Conflict if something else is there.
        """
        self.path = path
        self._pid = os.getpid()
        if create:
            # Every writer takes a lock first, so this refuses before anything is written.
            require_giving(path)
        while True:
            if create:
                make_empty(path, private=True)
            with translated(path):
                try:
                    self._fd = self._opened(create=create)
                    break
                except FileNotFoundError:
                    # Another process removed the name right after it was created.
                    if not create:
                        raise

    def _opened(self, *, create: bool) -> int:
        if not create and stat.S_ISDIR(status_of(self.path).st_mode):
            with directory(self.path) as descriptor:
                return os.dup(descriptor)
        return open_file(self.path, os.O_RDWR if create else os.O_RDONLY)

    @property
    def is_own(self) -> bool:
        """Whether this process opened it; a forked child only inherits it."""
        return self._pid == os.getpid()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; return False if it is held elsewhere and `blocking` is off.

        The log says who holds it, if that takes a while (`fs.waiting`).
        """
        with translated(self.path):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not blocking:
                    return False
                from mstore.fs import waiting  # late: few locks are held elsewhere

                with waiting.logged(self._fd, self.path):
                    fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def is_current(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            named = status_of(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def remove(self) -> None:
        """Remove the name while holding the lock, then unlock: no one takes it in between."""
        try:
            if self.is_own:
                unlink(self.path, missing_ok=True)
        finally:
            self.release()

    def release(self) -> None:
        """Unlock and close; idempotent.  In a forked child: close what it inherited."""
        if self._fd >= 0:
            if self.is_own:
                # A child that was forked meanwhile has the file open too: closing would not unlock.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
