"""The kernel's protocol for FUSE: requests and answers as bytes (linux/fuse.h, version 7.31).

Owns the forms of messages, and no connection. The kernel never changes what an older version of
the protocol has, and speaks the one that it is answered with. Numbers are in the machine's own
order. Only what a mount needs that nobody writes to is here.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

MAJOR, MINOR = 7, 31
ROOT: Final = 1
"""The node that the kernel knows from the start."""
SMALLEST_BUFFER: Final = 1 << 16
"""Bytes that a request may take: more than the kernel insists on, for it sends nothing to write."""
_MOST_WRITTEN: Final = 4096
_PAGES_A_READ: Final = 256


class Opcode(IntEnum):
    """What a request asks for; others are answered with ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    GETXATTR = 22
    LISTXATTR = 23
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44


_ASYNC_READ: Final = 1 << 0
_DO_READDIRPLUS: Final = 1 << 13
_PARALLEL_DIROPS: Final = 1 << 18
_MAX_PAGES: Final = 1 << 22
# Attributes with every listing: left to choose, the kernel asks for those of the first names only.
_WANTED: Final = _ASYNC_READ | _DO_READDIRPLUS | _PARALLEL_DIROPS | _MAX_PAGES

DIRECT_IO: Final = 1 << 0
"""Of an opened file: nothing is read from, nor kept in, the page cache."""
KEEP_CACHE: Final = 1 << 1
"""Of an opened file: what the page cache has of it is right."""

REQUEST: Final = struct.Struct("=IIQQIIIHH")
"""Length, opcode, number of the request, node, user, group, process, and what is not used here."""
_ANSWER: Final = struct.Struct("=IiQ")
_INIT: Final = struct.Struct("=IIII")
_INIT_ANSWER: Final = struct.Struct("=IIIIHHIIHHI28x")
_NODE: Final = struct.Struct("=QQQQII")
_ATTRIBUTES: Final = struct.Struct("=QQQQQQIIIIIIIIII")
_ATTRIBUTES_LAST: Final = struct.Struct("=QII")
_OPENED: Final = struct.Struct("=QII")
_NAME: Final = struct.Struct("=QQII")
_ROOM: Final = struct.Struct("=QQQQQIIII24x")
_NUMBER: Final = struct.Struct("=Q")
_SIZE: Final = struct.Struct("=II")
_READ: Final = struct.Struct("=QQI")
_FORGOTTEN: Final = struct.Struct("=QQ")
_NS: Final = 10**9
_TYPE_SHIFT: Final = 12


class Status(NamedTuple):
    """The attributes of a file or directory, as stat(2) has them.

    blocks: of 512 bytes. lasts: seconds for which the kernel may keep name and attributes.
    """

    inode: int
    mode: int
    size: int
    blocks: int
    time_ns: int
    owner: tuple[int, int]
    block_size: int
    lasts: float


class Room(NamedTuple):
    """What statvfs(3) tells: blocks of `unit` bytes, all of them used, and files."""

    block_size: int
    unit: int
    blocks: int
    files: int
    longest_name: int


def answer(request: int, error: int, length: int) -> bytes:
    """Return the begin of an answer: an errno or 0, and how many bytes follow."""
    return _ANSWER.pack(_ANSWER.size + length, -error, request)


def init(body: memoryview, background: int) -> bytes:
    """Return the answer to INIT. background: how many reads of the page cache may wait at once."""
    _, _, read_ahead, flags = _INIT.unpack_from(body)
    return _INIT_ANSWER.pack(
        MAJOR,
        MINOR,
        read_ahead,
        flags & _WANTED,
        background,
        background * 3 // 4,
        _MOST_WRITTEN,
        1,
        _PAGES_A_READ,
        0,
        0,
    )


def attributes(status: Status) -> bytes:
    """Return the answer to GETATTR."""
    return _ATTRIBUTES_LAST.pack(*_lasting(status.lasts), 0) + _attributes(status)


def entry(node: int, status: Status) -> bytes:
    """Return the answer to LOOKUP: a node, and its attributes."""
    lasts, ns = _lasting(status.lasts)
    return _NODE.pack(node, 0, lasts, lasts, ns, ns) + _attributes(status)


def absent(lasts: float) -> bytes:
    """Return the answer to LOOKUP of a name that is not there, and will not be for so long."""
    seconds, ns = _lasting(lasts)
    return _NODE.pack(0, 0, seconds, 0, ns, 0) + bytes(_ATTRIBUTES.size)


def _lasting(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * _NS)


def _attributes(status: Status) -> bytes:
    seconds, ns = divmod(status.time_ns, _NS)
    return _ATTRIBUTES.pack(
        status.inode, status.size, status.blocks, seconds, seconds, seconds, ns, ns, ns,
        # 1 for directories too: programs that infer subdirectories from it then do not.
        status.mode, 1, *status.owner, 0, status.block_size, 0,
    )  # fmt: skip


def opened(handle: int, flags: int) -> bytes:
    """Return the answer to OPEN and OPENDIR."""
    return _OPENED.pack(handle, flags, 0)


def named(name: bytes, inode: int, mode: int, following: int) -> bytes:
    """Return one name of an answer to READDIR; following: the number of the name after it."""
    told = _NAME.pack(inode, following, len(name), mode >> _TYPE_SHIFT) + name
    return told + bytes(-len(told) % 8)


NO_NODE: Final = bytes(_NODE.size + _ATTRIBUTES.size)
"""Before a name in an answer to READDIRPLUS: the kernel asks for it if it needs it.

In place of the answer to a LOOKUP.
"""


def room(told: Room) -> bytes:
    """Return the answer to STATFS."""
    return _ROOM.pack(
        told.blocks, 0, 0, told.files, 0, told.block_size, told.longest_name, told.unit, 0
    )


def size(length: int) -> bytes:
    """Return the answer to a request that asks how long a value is."""
    return _SIZE.pack(length, 0)


def number(body: memoryview) -> int:
    """Return what RELEASE, RELEASEDIR and FORGET begin with."""
    found: int = _NUMBER.unpack_from(body)[0]
    return found


def flags(body: memoryview) -> int:
    """Return the flags of OPEN."""
    found: int = _SIZE.unpack_from(body)[0]
    return found


def text(body: memoryview) -> str:
    """Return a name, which ends with a zero byte."""
    return bytes(body[:-1]).decode(errors="surrogateescape")


def read(body: memoryview) -> Any:
    """Return handle, offset and size of READ, READDIR and READDIRPLUS."""
    return _READ.unpack_from(body)


def value(body: memoryview) -> tuple[int, memoryview]:
    """Return the room that GETXATTR and LISTXATTR have for their answer, and what follows."""
    return _SIZE.unpack_from(body)[0], body[_SIZE.size :]


def forgotten(body: memoryview) -> list[tuple[int, int]]:
    """Return the nodes of BATCH_FORGET, each with how many of its answers the kernel forgets."""
    count = _SIZE.unpack_from(body)[0]
    start = _SIZE.size
    return list(_FORGOTTEN.iter_unpack(body[start : start + count * _FORGOTTEN.size]))
