"""Reading ahead: how much the kernel asks for, and what the store is told to expect.

FUSE starts with a read-ahead of 128 KiB and can only lower it; the knob that raises it is in
sysfs and belongs to root.  Behind the kernel's own read-ahead, `Sequence` notices that one open
file is read from front to back and says which bytes to prefetch.  Random readers get neither:
for them, every byte read ahead is a byte that somebody waits for.
"""

from __future__ import annotations

import os
import threading

KERNEL_READ_AHEAD = 1 << 20
"""Bytes; the largest request that FUSE sends."""

PREFETCH = 8 << 20
"""Bytes that the store is told about ahead of a sequential reader."""

_NEAR = 4 << 20
_SEQUENTIAL_AFTER = 3


def widen(device: int, size: int = KERNEL_READ_AHEAD) -> bool:
    """Let the kernel read `size` bytes ahead on a mount (its st_dev).  False if it refuses."""
    knob = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    try:
        descriptor = os.open(knob, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(size >> 10).encode())
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


class Sequence:
    """Watches the reads of one open file.  Thread-safe.

    The kernel sends the parts of one read-ahead to several threads at once, so a read counts as
    the next one if it starts near the furthest byte seen, on either side.
    """

    __slots__ = ("_ahead", "_end", "_lock", "_size", "_streak")

    def __init__(self, size: int) -> None:
        """`size` is the file's, in bytes."""
        self._size = size
        self._end = 0
        self._ahead = 0
        self._streak = 0
        self._lock = threading.Lock()

    def next_after(self, offset: int, size: int) -> tuple[int, int] | None:
        """Note a read; (offset, size) of what to prefetch now, or None."""
        with self._lock:
            if abs(offset - self._end) <= _NEAR:
                self._streak += 1
                self._end = max(self._end, offset + size)
            else:
                self._streak = 0
                self._end = self._ahead = offset + size
            if self._streak < _SEQUENTIAL_AFTER:
                return None
            start = max(self._ahead, self._end)
            stop = min(self._end + PREFETCH, self._size)
            # In halves: a call for each read would cost more than it brings.
            if start - self._end > PREFETCH // 2 or start >= stop:
                return None
            self._ahead = stop
            return start, stop - start
