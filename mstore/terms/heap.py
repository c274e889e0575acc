"""The heap: what the C library does with memory that is freed.

For programs that read many blocks, not for the library: it concerns the whole process.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGEST: Final = 32 << 20
_MOST_FREE: Final = 256 << 20


def keep_freed(*, one_arena: bool = False) -> None:
    """Keep freed buffers of up to 32 MiB, at most 256 MiB of them, for the next ones.

    Otherwise glibc gives a buffer of 1 MiB back to the kernel, and the next one costs 256 page
    faults, which can be half of the time.  one_arena: one heap for all threads, for programs that
    run for long.  Does nothing with other C libraries.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE)
        if one_arena:
            libc.mallopt(_M_ARENA_MAX, 1)
