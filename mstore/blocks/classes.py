"""Differences of two-byte floats, each coded by the class of the base's element.

Owns the code of codec 5, which docs/format.md specifies byte by byte; not which blocks use it
(`codecs`). The numbers are those of `planes` with the mode FLOATS, z(m(x) - m(base)), but in the
order of the elements. A training step of a given size changes a small weight by many units of its
last place and a large one by few, so each class of the base has its own distribution: classes are
divided into contexts, and each context has a table of its own. Writer and reader know the base, so
the context of an element costs no bytes (docs/design/038-code-by-class.md).

    symbol    a number below 255; 255 stands for any other, which is then listed as an escape
    table     how often each symbol occurs in its context, of 1024; from it follow the states of an
              asymmetric numeral system (tANS: Duda 2013, in the form of Collet's FSE)
    lane      elements i, i + 4, i + 8, ...: four strings of bits, which a processor reads at once
    group     64 elements; where many have no difference, they are listed, and have no bits

The code is exact for all bit patterns, NaN included, and the same on every processor.

Any thread may call; a call releases the GIL. A thread keeps scratch of 430 KiB, and one that
encodes another four and a half times as much as its longest block.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.ids import Buffer
from mstore.numeric.passes import Pass

Bytes = npt.NDArray[np.uint8]

_HERE: Final = Path(__file__)
_SOURCES: Final = (
    _HERE.parent.parent / "numeric" / "unaligned.py",
    _HERE.with_name("class_tables.py"),
    _HERE.with_name("class_passes.py"),
)
_MODULE: Final = "mstore.blocks.class_passes"
_measure: Final = Pass(_MODULE, "measure2", "ippp", _SOURCES)
_encode: Final = Pass(_MODULE, "encode2", "ipppp", _SOURCES)
_decode: Final = Pass(_MODULE, "decode2", "iipppp", _SOURCES)

WIDTH: Final = 2
"""Bytes of an element."""

_SYMBOLS: Final = 256
_CONTEXTS: Final = 32
_LANES: Final = 4
_GROUP: Final = 64
_RESULTS: Final = 436_800
_SCRATCH: Final = _RESULTS + 64

MEASURED: Final = 1 << 15
"""The most elements that `measure` takes."""

_HEAD_BYTES: Final = 36
_TABLE_BYTES: Final = 20
"""About what a payload without elements takes, and what a table does."""

_PARTS: Final = 256
"""Logarithms are rounded to so many parts of a bit: processors differ in the last place."""


class Measure(NamedTuple):
    """What elements would take, in bytes: themselves, and tables; and how many are escapes."""

    coded: int
    tables: int
    escapes: int


def _rooms(n: int) -> tuple[int, int]:
    """Return the bytes of scratch behind the fixed part, and of the longest payload."""
    groups = -(-n // _GROUP)
    lanes = _LANES * (groups * 20 + 32)
    tables = _CONTEXTS * (3 + 2 * _SYMBOLS)
    return 257 * groups + lanes, 24 + tables + groups + 2 * n + lanes + 8


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.uint8)
        self._payload = np.empty(0, dtype=np.uint8)

    def room(self, more: int = 0) -> Bytes:
        """Return scratch, with so many bytes behind its fixed part."""
        if self._room.size < _SCRATCH + more:
            self._room = np.empty(_SCRATCH + more, dtype=np.uint8)
        return self._room

    def payload(self, length: int) -> Bytes:
        """Return room for a payload; valid until the next call."""
        if self._payload.size < length:
            self._payload = np.empty(length, dtype=np.uint8)
        return self._payload


_scratch: Final = _Scratch()


def _results(room: Bytes) -> tuple[int, int, int]:
    """Return the length of the payload, the contexts and the escapes of the last pass."""
    found = room[_RESULTS : _RESULTS + 24].view(np.int64)
    return int(found[0]), int(found[1]), int(found[2])


def measure(data: Buffer, base: Buffer) -> Measure:
    """Return what these elements would take; both have the same length, a multiple of two."""
    source, other = _aligned(data), _aligned(base)
    n = source.size // WIDTH
    assert source.size == other.size
    assert 0 < n <= MEASURED
    room = _scratch.room(_rooms(n)[0])
    _measure(n, source.ctypes.data, other.ctypes.data, room.ctypes.data)
    _, contexts, escapes = _results(room)
    found = room[: 4 * contexts * _SYMBOLS].view(np.uint32)
    counts = found.reshape(contexts, _SYMBOLS).astype(np.int64)
    whole = counts.sum(axis=1)
    logarithms = _logarithms()
    parts = (whole * logarithms[whole]).sum() - (counts * logarithms[counts]).sum()
    coded = int(parts) // (8 * _PARTS) + WIDTH * escapes
    return Measure(coded, _HEAD_BYTES + _TABLE_BYTES * contexts, escapes)


@cache
def _logarithms() -> npt.NDArray[np.int64]:
    """Return the logarithm of each possible count, in parts of a bit."""
    # One group may be filled up.
    counts = np.arange(MEASURED + _GROUP, dtype=np.float64)
    counts[0] = 1
    found: npt.NDArray[np.int64] = np.rint(np.log2(counts) * _PARTS).astype(np.int64)
    return found


def encode(data: Buffer, base: Buffer) -> bytes:
    """Return the payload of a block; both have the same length, a multiple of two, and not zero."""
    source, other = _aligned(data), _aligned(base)
    assert source.size == other.size > 0
    n = source.size // WIDTH
    more, longest = _rooms(n)
    room, payload = _scratch.room(more), _scratch.payload(longest)
    _encode(n, source.ctypes.data, other.ctypes.data, payload.ctypes.data, room.ctypes.data)
    return payload[: _results(room)[0]].tobytes()


def decode(payload: Buffer, base: Buffer, target: memoryview) -> bool:
    """Fill `target`, as long as the base; return False if no block has such a payload."""
    source: Bytes = np.frombuffer(payload, dtype=np.uint8)
    other = _aligned(base)
    out: Bytes = np.frombuffer(target, dtype=np.uint8)
    assert out.size == other.size
    assert out.size % WIDTH == 0
    aligned = out if out.ctypes.data % WIDTH == 0 else np.empty_like(out)
    room = _scratch.room()
    _decode(
        out.size // WIDTH,
        source.size,
        source.ctypes.data,
        other.ctypes.data,
        aligned.ctypes.data,
        room.ctypes.data,
    )
    if _results(room)[0] < 0:
        return False
    if aligned is not out:
        out[:] = aligned
    return True


def _aligned(data: Buffer) -> Bytes:
    # Blocks may lie at any offset of a file; compiled code takes aligned elements only.
    found: npt.NDArray[Any] = np.frombuffer(data, dtype=np.uint8)
    return found if found.ctypes.data % WIDTH == 0 else found.copy()
