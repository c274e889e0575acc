"""Damaged payloads of coded elements between pages that nobody may touch; run by `test_rans`.

Takes mode, width, payload, block and base from its input, as a JSON list; the last three are hex
strings, and the base is empty where there is none. Each lies directly before a page without access,
and once directly behind one, so that a read or write outside ends this process by a signal. Says
"ok" if none did.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from mstore.blocks import rans

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
ENDS = 800
"""Bytes at either end of a payload that are changed: classes, their tables; the lanes' states."""
WITHIN = 160
"""Bytes between the ends, where one word is like another."""


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


def changed(payload: bytes, draw: random.Random) -> Iterator[bytes]:
    """Each bit flipped and each byte exchanged; of a long payload only where it matters most."""
    ends = {*range(ENDS)} | {len(payload) - 1 - at for at in range(ENDS)}
    places = sorted(ends | {draw.randrange(len(payload)) for _ in range(WITHIN)})
    for at in places:
        if 0 <= at < len(payload):
            flips = [payload[at] ^ 1 << bit for bit in range(8)]
            for byte in (*flips, 0, 255, draw.randrange(256)):
                yield payload[:at] + bytes([byte]) + payload[at + 1 :]


def torn(payload: bytes, lanes: int, draw: random.Random) -> Iterator[bytes]:
    """Payloads that begin as this one: words and states of any bits, and words of any number.

    Some are any bits from the first on, which are refused soon.
    """
    (count,) = struct.unpack_from("<I", payload, 8)
    begin = len(payload) - 4 * lanes - 2 * count
    for number in range(400):
        words = min(draw.choice((0, 1, 2, count // 2, count - 1, count, count + 1)), 2 * count)
        words = max(0, words) if number % 2 else count
        rest = bytearray(draw.randbytes(2 * words + 4 * lanes))
        for lane in range(lanes):
            # A state that is one.
            rest[2 * words + 4 * lane + 2] |= 1
        yield payload[:8] + struct.pack("<I", words) + payload[12:begin] + rest
    for _ in range(200):
        yield draw.randbytes(draw.choice((*range(80), len(payload))))


def main() -> None:
    told = json.loads(sys.stdin.read())
    mode, width = rans.Mode(told[0]), told[1]
    payload, data, base = (bytes.fromhex(each) for each in told[2:])
    lanes = 32 if len(data) // width < 1 << 14 else 128
    draw = random.Random(1)
    source, below, target, block = (
        Guarded(2 * len(payload) + 4096),
        *map(Guarded, [len(data)] * 3),
    )

    def under(*, at_end: bool) -> memoryview | None:
        return None if mode is rans.Mode.ALONE else below.holding(base, at_end=at_end)

    for at_end in (False, True):
        # What is sound is read within its bounds by all passes, too.
        own, other = block.holding(data, at_end=at_end), under(at_end=at_end)
        made = rans.encode(mode, width, own, other, 8 * len(data) + 4096)
        assert made is not None
        assert made.tobytes() == payload
        assert rans.measure(mode, width, own, other) > 0
        given = np.frombuffer(source.holding(payload, at_end=at_end), dtype=np.uint8)
        room = np.frombuffer(target.room(len(data), at_end=at_end), dtype=np.uint8)
        assert rans.check(mode, width, given, other, own, room)
        assert room.tobytes() == data
    for number, bad in enumerate((*changed(payload, draw), *torn(payload, lanes, draw))):
        at_end = number % 2 == 0
        # Whether it is refused is for its id to tell: here only where it reads and writes counts.
        rans.decode(
            mode,
            width,
            source.holding(bad, at_end=at_end),
            under(at_end=at_end),
            target.room(len(data), at_end=at_end),
        )
    print("ok")


main()
