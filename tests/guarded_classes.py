"""Damaged payloads of codec 5 between pages that nobody may touch; run by `test_codecs`.

Takes payload, block and base from its input, as a JSON list of hex strings. Each lies directly
before a page without access, and once directly behind one, so that a read or write outside ends
this process by a signal. Says "ok" if none did.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mstore.blocks import classes

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Memory between two pages without access."""

    def __init__(self, length: int) -> None:
        self._inside = -(-length // PAGE) * PAGE
        self._map = mmap.mmap(-1, self._inside + 2 * PAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (first, first + PAGE + self._inside):
            assert LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0

    def room(self, length: int, *, at_end: bool) -> memoryview:
        begin = PAGE + (self._inside - length if at_end else 0)
        return memoryview(self._map)[begin : begin + length]

    def holding(self, data: bytes, *, at_end: bool) -> memoryview:
        room = self.room(len(data), at_end=at_end)
        room[:] = data
        return room


def main() -> None:
    payload, data, base = (bytes.fromhex(each) for each in json.loads(sys.stdin.read()))
    source, below, target = Guarded(len(payload)), Guarded(len(base)), Guarded(len(data))
    draw = random.Random(1)
    bad = []
    for at in range(len(payload)):
        bad += [(at, payload[at] ^ 1 << bit) for bit in range(8)]
        bad += [(at, 0), (at, 255), (at, draw.randrange(256))]
    for number, (at, byte) in enumerate(bad):
        damaged = bytearray(payload)
        damaged[at] = byte
        at_end = number % 2 == 0
        room = target.room(len(data), at_end=at_end)
        under = below.holding(base, at_end=at_end)
        # Whether it is refused is for its id to tell: here only where it reads and writes counts.
        classes.decode(source.holding(bytes(damaged), at_end=at_end), under, room)
    for length in (*range(80), len(payload)):
        for _ in range(20):
            wild = draw.randbytes(length)
            classes.decode(
                source.holding(wild, at_end=True),
                below.holding(base, at_end=True),
                target.room(len(data), at_end=True),
            )
    print("ok")


main()
