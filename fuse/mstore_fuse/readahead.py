"""Read-ahead: how much the kernel requests, and what the store prefetches.

FUSE starts with a read-ahead of 128 KiB and can only lower it; the setting that raises it is in
sysfs and needs root. In addition to the kernel's read-ahead, `Sequence` detects that an open file
is read from front to back, or tensor by tensor in any order, and says which bytes to prefetch.
Random readers get neither: they would wait for every byte read ahead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

ENTRIES = "/sys/class/bdi"
"""Where each mount has an entry."""

KERNEL_READ_AHEAD = 1 << 20
"""Bytes; the largest request that FUSE sends."""

PREFETCH = 8 << 20
"""How many bytes to prefetch ahead of a sequential reader."""

_READERS = 8
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


@dataclass(slots=True)
class _Stream:
    """One reader: how far it has read, what was prefetched, how many reads followed another.

    limit: where prefetching stops, until the reader itself goes on.
    """

    end: int
    ahead: int
    streak: int
    limit: int


class Sequence:
    """Detects sequential reads of one open file, of several readers at once. Thread-safe.

    The kernel sends the parts of one read-ahead to several threads at once, so a read counts as the
    next one of a reader if it starts near the furthest byte that it has read, before or after it. A
    read elsewhere is that of another reader. One that reads the begin of a tensor will read all of
    the tensor.
    """

    __slots__ = ("_continues_to", "_lock", "_size", "_streams")

    def __init__(self, size: int, continues_to: Callable[[int, int], int]) -> None:
        """`size` is the file's, in bytes; `continues_to` as that of `tree.MountView`."""
        self._size = size
        self._continues_to = continues_to
        self._streams = [_Stream(0, 0, 0, size)]
        self._lock = threading.Lock()

    def next_after(self, offset: int, size: int) -> tuple[int, int] | None:
        """Note a read; return (offset, size) of what to prefetch now, or None."""
        with self._lock:
            stream = self._stream(offset, size)
            if stream.streak < _SEQUENTIAL_AFTER:
                return None
            start = max(stream.ahead, stream.end)
            stop = min(stream.end + PREFETCH, stream.limit)
            # Prefetch in halves: a call for each read would cost more than it saves.
            if start - stream.end > PREFETCH // 2 or start >= stop:
                return None
            stream.ahead = stop
            return start, stop - start

    def _stream(self, offset: int, size: int) -> _Stream:
        end = offset + size
        for stream in self._streams:
            if abs(offset - stream.end) <= _NEAR:
                self._streams.remove(stream)
                stream.streak += 1
                stream.end = max(stream.end, end)
                if stream.end > stream.limit:
                    stream.limit = self._size
                break
        else:
            stream = _Stream(end, end, 0, self._size)
            del self._streams[_READERS - 1 :]
        # Not at 0: many programs read the header of a file, and no tensor.
        if stream.streak < _SEQUENTIAL_AFTER and offset:
            limit = self._continues_to(offset, size)
            if limit > stream.end:
                stream.streak, stream.limit = _SEQUENTIAL_AFTER, limit
        # The reader that read last comes first, and the last of them goes.
        self._streams.insert(0, stream)
        return stream
