"""How much address space an LMDB environment takes: all that it may ever need, or a share.

A map costs nothing but addresses, so an environment maps more than its file will ever be.  Where
`ulimit -v` (RLIMIT_AS) bounds the addresses of a process, it maps its file and room to grow, and
more of it before a later transaction when that room gets narrow.
"""

from __future__ import annotations

import resource

MAP_SIZE = 1 << 38
_UNIT = 1 << 24
# A process opens index, statistics and memo table, and other things need addresses too.
_LEAST_SHARE = 16
_MOST_SHARE = 4


def limit() -> int | None:
    """Bytes of address space that this process may have; None where that is no concern."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY or allowed >= 4 * MAP_SIZE else allowed


def map_sizes(file_bytes: int) -> list[int]:
    """Sizes to map a file of so many bytes with, the best one first."""
    room = _room(file_bytes)
    if room is None:
        return [max(MAP_SIZE, file_bytes)]
    rooms = [room]
    while rooms[-1] > _UNIT:
        rooms.append(rooms[-1] // 2)
    return [_rounded(file_bytes + one) for one in rooms]


def is_narrow(mapped: int, file_bytes: int) -> bool:
    """Whether less than half of the room is left that this file would get now."""
    room = _room(file_bytes)
    return room is not None and mapped - file_bytes < room // 2


def _room(file_bytes: int) -> int | None:
    allowed = limit()
    if allowed is None:
        return None
    # A transaction that touches every page of the file writes each one anew.
    return max(_UNIT, allowed // _LEAST_SHARE, min(file_bytes, allowed // _MOST_SHARE))


def _rounded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
