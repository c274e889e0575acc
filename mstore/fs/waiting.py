"""Waiting: the log says who holds a lock for which this process has waited a while.

Changes nothing.  Names the holder as /proc/locks does; a process in another PID namespace is not
named there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Final

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
