"""Read-ahead: how much the kernel requests, and what the store prefetches.

FUSE starts with a read-ahead of 128 KiB and can only lower it; the setting that raises it is in
sysfs and needs root. In addition to the kernel's read-ahead, `Sequence` detects that an open file
is read from front to back, and says which bytes to prefetch. Random readers get neither: they would
wait for every byte read ahead.
"""

from __future__ import annotations

import os
import threading

ENTRIES = "/sys/class/bdi"
"""Where each mount has an entry."""

KERNEL_READ_AHEAD = 1 << 20
"""Bytes; the largest request that FUSE sends."""

PREFETCH = 8 << 20
"""How many bytes to prefetch ahead of a sequential reader."""

_NEAR = 4 << 20
_SEQUENTIAL_AFTER = 3


def widen(device: int, size: int = KERNEL_READ_AHEAD) -> bool:
    """Let the kernel read `size` bytes ahead on a mount (its st_dev). False if it refuses."""
    return widen_named(f"{os.major(device)}:{os.minor(device)}", size)


def widen_named(name: str, size: int) -> bool:
    """Let the kernel read `size` bytes ahead, by the name of a mount's entry in sysfs."""
    try:
        descriptor = os.open(f"{ENTRIES}/{name}/read_ahead_kb", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(size >> 10).encode())
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


class Sequence:
    """Detects sequential reads of one open file. Thread-safe.

    The kernel sends the parts of one read-ahead to several threads at once, so a read counts as the
    next one if it starts near the furthest byte seen, before or after it.
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
        """Note a read; return (offset, size) of what to prefetch now, or None."""
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
            # Prefetch in halves: a call for each read would cost more than it saves.
            if start - self._end > PREFETCH // 2 or start >= stop:
                return None
            self._ahead = stop
            return start, stop - start
