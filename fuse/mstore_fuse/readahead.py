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

_READERS = 8
_NEAR = 4 << 20
_STEPS = 4
"""Prefetch in so many parts of a window: a call for each read would cost more than it saves."""


def widen(name: str, size: int = KERNEL_READ_AHEAD) -> bool:
    """Let the kernel read `size` bytes ahead on a mount, by its name in ENTRIES.

    Returns False if the kernel refuses.
    """
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
    """One reader: from where to where it has read, and how far what was prefetched goes.

    limit: where prefetching stops, until the reader itself goes on. is_sure: whether it will read
    so far. follows: whether one of its reads followed another.
    """

    begin: int
    end: int
    ahead: int
    limit: int
    is_sure: bool = False
    follows: bool = False


class Sequence:
    """Detects sequential reads of one open file, of several readers at once. Thread-safe.

    The kernel sends the parts of one read-ahead to several threads at once, so a read counts as the
    next one of a reader if it starts near the furthest byte that it has read, before or after it. A
    read elsewhere is that of another reader. One that reads the begin of a tensor will read all of
    the tensor. For others the window grows with what they have read, up to `window` bytes. It goes
    on behind the end of the file: whoever reads a model reads its files one after the other.
    """

    __slots__ = ("_continues_to", "_end", "_lock", "_streams", "_window")

    def __init__(self, size: int, continues_to: Callable[[int, int], int], window: int) -> None:
        """`size` is the file's, in bytes; `continues_to` as that of `tree.MountView`."""
        self._end = size + window
        self._continues_to = continues_to
        self._window = window
        self._streams = [_Stream(0, 0, 0, self._end)]
        self._lock = threading.Lock()

    def next_after(self, offset: int, size: int) -> tuple[int, int] | None:
        """Note a read; return (offset, size) of what to prefetch now, or None."""
        with self._lock:
            stream = self._stream(offset, size)
            if not (stream.is_sure or stream.follows):
                return None
            window = self._window
            if not stream.is_sure:
                window = min(window, 2 * (stream.end - stream.begin))
            start = max(stream.ahead, stream.end)
            stop = min(stream.end + window, stream.limit)
            if start >= stop or start - stream.end > window - window // _STEPS:
                return None
            stream.ahead = stop
            return start, stop - start

    def _stream(self, offset: int, size: int) -> _Stream:
        end = offset + size
        for stream in self._streams:
            if abs(offset - stream.end) <= _NEAR:
                self._streams.remove(stream)
                # What programs read first of a file is its header.
                stream.follows |= stream.end > 0
                stream.end = max(stream.end, end)
                if stream.end > stream.limit:
                    stream.limit, stream.is_sure = self._end, False
                break
        else:
            stream = _Stream(offset, end, end, self._end)
            del self._streams[_READERS - 1 :]
        # Not at 0: many programs read the header of a file, and no tensor.
        if not stream.follows and offset:
            limit = self._continues_to(offset, size)
            if limit > stream.end:
                stream.is_sure, stream.limit = True, limit
        # The reader that read last comes first, and the last of them goes.
        self._streams.insert(0, stream)
        return stream
