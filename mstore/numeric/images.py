"""Images: machine code that needs neither a compiler nor a linker to run.

Owns the form in which a compiled pass lies on disk, and how it comes into memory: read, checked,
copied to fresh pages, completed with the few addresses that it needs, and then made executable and
read-only.  Does not own where images lie, nor who makes them (`linking`).

An image is code and constants in one piece that refer to each other by distance, so it runs
anywhere; `bases` are the places of the few absolute addresses, counted from its start, and
`imports` those that hold the address of a function of the C library.

File: BLAKE3 of what the code was made from (32), BLAKE3 of the rest (32); then, little-endian,
five numbers of 4 bytes: entry, number of bases, number of imports, length of `made_by`, length of
the code; the bases (4 each), the imports (4 each for place and function), made_by, the code.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import Any, Final, NamedTuple

from blake3 import blake3

IMPORTS: Final = ("memset", "memcpy", "memmove", "fmaf")
"""The functions of the C library that code may call; all give the same bits everywhere."""
DIGEST: Final = 32
_HEAD: Final = struct.Struct("<5I")
_WORD: Final = struct.Struct("<Q")


class Image(NamedTuple):
    """Code at rest.

    entry: where its function starts. bases: places of addresses counted from the start. imports:
    (place, which of IMPORTS). made_by: the compiler and its version, in words.
    """

    code: bytes
    entry: int
    bases: tuple[int, ...]
    imports: tuple[tuple[int, int], ...]
    made_by: str


def encoded(image: Image, stamp: bytes) -> bytes:
    """Return the bytes of a file; stamp: a digest of what the code was made from (32 bytes)."""
    words = image.made_by.encode()
    sizes = (image.entry, len(image.bases), len(image.imports), len(words), len(image.code))
    places = [*image.bases, *(number for pair in image.imports for number in pair)]
    body = _HEAD.pack(*sizes) + struct.pack(f"<{len(places)}I", *places) + words + image.code
    return stamp + blake3(body).digest() + body


def decoded(data: bytes, stamp: bytes) -> Image | None:
    """Return what a file holds; None if it is incomplete, damaged, or made from something else."""
    body = memoryview(data)[2 * DIGEST :]
    if data[:DIGEST] != stamp or data[DIGEST : 2 * DIGEST] != blake3(body).digest():
        return None
    entry, bases, imports, words, size = _HEAD.unpack_from(body)
    places = struct.unpack_from(f"<{bases + 2 * imports}I", body, _HEAD.size)
    at = _HEAD.size + 4 * len(places)
    named = places[bases:]
    return Image(
        code=bytes(body[at + words : at + words + size]),
        entry=entry,
        bases=places[:bases],
        imports=tuple(zip(named[::2], named[1::2], strict=True)),
        made_by=bytes(body[at : at + words]).decode(),
    )


def mapped(image: Image) -> tuple[int, Any]:
    """Return the address of the function, and what must live as long as it may run.

    Raises OSError if the system lets no program make code executable.
    """
    room = mmap.mmap(-1, len(image.code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = ctypes.c_char.from_buffer(room)
    start = ctypes.addressof(held)
    room[:] = image.code
    for place in image.bases:
        (distance,) = _WORD.unpack_from(image.code, place)
        _WORD.pack_into(room, place, start + distance)
    for place, which in image.imports:
        _WORD.pack_into(room, place, _address(IMPORTS[which]))
    # Fresh pages: the kernel makes what was written visible to the instruction side of a processor
    # when it makes them executable.
    own = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(len(image.code))
    if own.mprotect(ctypes.c_void_p(start), size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "memory cannot be made executable")
    return start + image.entry, (room, held)


def _address(name: str) -> int:
    """Return the address of a function of the C library."""
    for library in (None, "libm.so.6"):
        try:
            function = getattr(ctypes.CDLL(library), name)
        except (AttributeError, OSError):
            continue
        found = ctypes.cast(function, ctypes.c_void_p).value
        if found:
            return found
    raise OSError(f"the C library has no {name}")
