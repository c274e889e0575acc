"""Elements of a block, coded by interleaved rANS: differences to a base block's, or floats alone.

Owns the code that docs/format.md specifies ("Coded elements"); not which blocks use it (`codecs`).
Each element becomes a number: small if it is near the base's, or, of a float alone, ordered by its
exponent. A symbol says what the number is, or its upper part; raw bits say the rest. A training
step of a given size changes a small weight by many units of its last place and a large one by few:
so each class of the base's element, its exponent, has a table of its own. Writer and reader know
the base, so the class costs no bytes (docs/design/040-rans.md).

The code is exact for all bit patterns, NaN included, and the same on every processor. The
arithmetic is in rans.c, which the build compiles.

Any thread may call; a call releases the GIL. A thread keeps scratch of 200 KB, and one that encodes
room for its longest payload.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.numeric.passes import Pass
from mstore.terms.ids import Buffer

Bytes = npt.NDArray[np.uint8]

_SOURCES: Final = ("blocks/rans.c", "blocks/lanes.h")
_MODULE: Final = "mstore.blocks.rans"
_encode: Final = Pass(_MODULE, "encode", "iiiipppp", _SOURCES)
_decode: Final = Pass(_MODULE, "decode", "iiiipppp", _SOURCES)
_check: Final = Pass(_MODULE, "check", "iiiippppp", _SOURCES)
_measure: Final = Pass(_MODULE, "measure", "iiippp", _SOURCES)

WIDTHS: Final = (1, 2, 4)
"""Bytes of an element that can be coded."""

_SCRATCH: Final = 200_000
_SLACK: Final = 8192
"""Behind the longest payload: what tables and a row take that turn out to be too long."""


class Mode(IntEnum):
    """What elements are coded as."""

    ALONE = 0
    FLOATS = 1
    INTEGERS = 2


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._area = np.zeros(_SCRATCH, dtype=np.uint8)
        self._result = self._area[:8].view(np.int64)
        self._payload = np.empty(0, dtype=np.uint8)
        self.at = self._area.ctypes.data

    @property
    def result(self) -> int:
        """What the last pass returned."""
        return int(self._result[0])

    def payload(self, length: int) -> Bytes:
        """Return room for a payload; valid until the next call."""
        if self._payload.size < length:
            self._payload = np.empty(length, dtype=np.uint8)
        return self._payload


_scratch: Final = _Scratch()


def measure(mode: Mode, width: int, data: Buffer, base: Buffer | None) -> int:
    """Return about how many bytes the payload of a block has, by a sample of its elements."""
    own, other, n = _given(mode, width, data, base)
    _measure(mode, width, n, own, other, _scratch.at)
    return _scratch.result


def encode(mode: Mode, width: int, data: Buffer, base: Buffer | None, limit: int) -> Bytes | None:
    """Return the payload of a block, valid until the thread's next call; None if beyond `limit`.

    width: bytes of an element, 1, 2 or 4. data: one element or more. base: as long as `data`;
    None if ALONE.
    """
    own, other, n = _given(mode, width, data, base)
    capacity = limit + _SLACK + n // 256
    room = _scratch.payload(capacity)
    _encode(mode, width, n, capacity, own, other, room.ctypes.data, _scratch.at)
    length = _scratch.result
    return room[:length] if 0 <= length <= limit else None


def decode(
    mode: Mode, width: int, payload: Buffer, base: Buffer | None, target: memoryview
) -> bool:
    """Fill `target`, as long as the block; return False if no block has such a payload."""
    out, other, n = _given(mode, width, target, base)
    source: Bytes = np.frombuffer(payload, dtype=np.uint8)
    _decode(mode, width, n, source.size, source.ctypes.data, other, out, _scratch.at)
    return bool(_scratch.result)


def check(
    mode: Mode, width: int, payload: Bytes, base: Buffer | None, data: Buffer, room: Bytes
) -> bool:
    """Return whether a payload decodes to `data`. room: as long as that, for the elements."""
    own, other, n = _given(mode, width, data, base)
    at = payload.ctypes.data
    _check(mode, width, n, payload.size, at, other, own, room.ctypes.data, _scratch.at)
    return bool(_scratch.result)


def _given(mode: Mode, width: int, data: Buffer, base: Buffer | None) -> tuple[int, int, int]:
    """Return the addresses of a block and its base, and how many elements they have."""
    own = np.frombuffer(data, dtype=np.uint8)
    assert width in WIDTHS
    assert own.size > 0
    assert own.size % width == 0
    assert (mode is Mode.ALONE) == (base is None)
    if base is None:
        return own.ctypes.data, 0, own.size // width
    other: npt.NDArray[Any] = np.frombuffer(base, dtype=np.uint8)
    assert other.size == own.size
    return own.ctypes.data, other.ctypes.data, own.size // width
