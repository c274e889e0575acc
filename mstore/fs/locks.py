"""Locks: files and directories that one process holds at a time (flock(2)).

The log says who holds a lock for which this process has waited a while, as /proc/locks names it; a
process in another PID namespace is not named there.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Final

from mstore.fs.files import make_empty, unlink
from mstore.fs.rights import require_giving
from mstore.fs.roots import directory, open_file, status_of, translated

AFTER: Final = 2.0
"""Seconds of waiting before the log says so."""
LOGGER: Final = "mstore"
_LONGEST: Final = 100
_PROGRAMS: Final = ("mstore", "mstore_cli")
_PROC: Final = Path("/proc")


@contextmanager
def logged(descriptor: int, path: Path) -> Iterator[None]:
    """Log once who holds the flock on an open file, if the block takes longer than AFTER."""
    timer = Timer(AFTER, _log, (descriptor, path))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        # No thread may be started: wait silently.
        yield
        return
    try:
        yield
    finally:
        timer.cancel()
        # The caller may close the descriptor now.
        timer.join()


def _log(descriptor: int, path: Path) -> None:
    import logging  # late: few processes wait

    logging.getLogger(LOGGER).info("waiting for %s, held by %s", path, holder(descriptor))


def holder(descriptor: int) -> str:
    """Return who holds the flock on an open file, as far as this process can see."""
    try:
        file = f"{_device(descriptor)}:{os.fstat(descriptor).st_ino}"
        for line in (_PROC / "locks").read_text().splitlines():
            # "7: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF"; one that waits has "->" after "7:".
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == file:
                return _process(int(fields[4]))
    except (OSError, ValueError, LookupError):
        pass
    return "another process"


def _device(descriptor: int) -> str:
    """Return the device of a file as /proc/locks names it: btrfs gives stat(2) other numbers."""
    about = (_PROC / "self" / "fdinfo" / str(descriptor)).read_text().split()
    mount = about[about.index("mnt_id:") + 1]
    for line in (_PROC / "self" / "mountinfo").read_text(errors="replace").splitlines():
        number, _, device, *_ = line.split(" ")
        if number == mount:
            major, minor = map(int, device.split(":"))
            return f"{major:02x}:{minor:02x}"
    raise LookupError(mount)


def _process(number: int) -> str:
    if number == os.getpid():
        return "another thread of this process"
    words = (_PROC / str(number) / "cmdline").read_text(errors="replace").split("\0")
    names = [os.path.basename(word) for word in words]
    at = next((names.index(program) for program in _PROGRAMS if program in names), None)
    if at is not None:
        words[: at + 1] = ["mstore"]
    command = "".join(c if c.isprintable() else "?" for c in " ".join(words).strip())
    if len(command) > _LONGEST:
        command = f"{command[:_LONGEST]}..."
    return f"process {number} ({command})" if command else f"process {number}"


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

        The log says who holds it, if that takes a while.
        """
        with translated(self.path):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not blocking:
                    return False

                with logged(self._fd, self.path):
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


@contextmanager
def locked(path: Path, *, create: bool = True) -> Iterator[None]:
    """Hold the lock on a file while the block runs; waits for others.  Raises as LockFile."""
    lock = LockFile(path, create=create)
    try:
        lock.acquire()
        yield
    finally:
        lock.release()
