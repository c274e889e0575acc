"""How much address space an LMDB environment maps: all that it may ever need, or a share.

A map costs only addresses, so an environment maps more than its file will ever need. If `ulimit -v`
(RLIMIT_AS) limits the addresses of a process, it maps its file with room to grow, and remaps with
more before a later transaction when that room gets narrow.
"""

from __future__ import annotations

import resource

MAP_SIZE = 1 << 38
_UNIT = 1 << 24
# A process opens index, statistics and memo table, and other things need addresses too.
_LEAST_SHARE = 16
_MOST_SHARE = 4


def limit() -> int | None:
    """Return the bytes of address space this process may use; None if practically unlimited."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY or allowed >= 4 * MAP_SIZE else allowed


def map_sizes(file_bytes: int) -> list[int]:
    """Return sizes to try for mapping a file of so many bytes, best first."""
    room = _room(file_bytes)
    if room is None:
        return [max(MAP_SIZE, file_bytes)]
    rooms = [room]
    while rooms[-1] > _UNIT:
        rooms.append(rooms[-1] // 2)
    return [_rounded(file_bytes + one) for one in rooms]


def is_narrow(mapped: int, file_bytes: int) -> bool:
    """Return whether less than half of the room that this file would now get is left."""
    room = _room(file_bytes)
    return room is not None and mapped - file_bytes < room // 2


def _room(file_bytes: int) -> int | None:
    allowed = limit()
    if allowed is None:
        return None
    # A transaction that touches every page of the file rewrites each one.
    return max(_UNIT, allowed // _LEAST_SHARE, min(file_bytes, allowed // _MOST_SHARE))


def _rounded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
