"""Byte planes of a block's elements, or of their differences to a base block's.

Owns the transform, not the compression of planes. Plane p holds byte p (from the lowest) of each
number in turn; planes follow each other from the lowest. The numbers are:

    PLAIN      the elements
    INTEGERS   z(x - base modulo 2^n)
    FLOATS     z(m(x) - m(base) modulo 2^n), ordered by the class of the base's element, and within
               a class as the elements are

m flips all bits of a negative float and the sign bit of any other, which keeps the order of floats.
z turns small differences of either sign into small numbers: shifted left by one, with all bits
flipped if the difference is negative (zigzag). The class is the byte below the sign bit (below it
and a zero bit, for elements of one byte): the exponent of a bf16 or an f32. A training step of a
given size changes a small weight by many units of its last place and a large one by few. So
differences within a class are similar, and compress well (docs/design/006-codecs.md). The transform
is bijective for all bit patterns, including NaN.

Any thread may call; a call releases the GIL. A thread keeps 39 KiB of scratch, and without AVX-512
VBMI2 as much again as its longest block.

Ordering counts the classes of the base, up to a quarter of the time. `same_base` saves that: it
says that the base's bytes are those of the thread's last call that had a base.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.ids import Buffer
from mstore.numeric.passes import Pass

Bytes = npt.NDArray[np.uint8]

_HERE: Final = Path(__file__)
_SOURCES: Final = (
    _HERE.parent.parent / "numeric" / "expansion.py",
    _HERE.with_name("plane_passes.py"),
)
_MODULE: Final = "mstore.blocks.plane_passes"
_WIDTHS: Final = (1, 2, 4, 8)
_split: Final = {width: Pass(_MODULE, f"split{width}", "iipppp", _SOURCES) for width in _WIDTHS}
_join: Final = {width: Pass(_MODULE, f"join{width}", "iipppp", _SOURCES) for width in _WIDTHS}
_SCRATCH: Final = 17 * 2048 + 4 * 256 * 4 + 2 * 32
_AGAIN: Final = 3
"""The mode of a pass whose scratch is as the last one left it, which had the same base."""


class Mode(IntEnum):
    """What to split into planes."""

    PLAIN = 0
    FLOATS = 1
    INTEGERS = 2


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.uint8)
        self._at = 0
        # Width and length of the block whose base's classes the scratch has.
        self._counted: tuple[int, int] | None = None

    def at(self, length: int) -> int:
        """Return the address of scratch for a block of so many bytes."""
        if self._room.size < _SCRATCH + length:
            self._room = np.empty(_SCRATCH + length, dtype=np.uint8)
            self._at = self._room.ctypes.data
            self._counted = None
        return self._at

    def mode(self, mode: Mode, width: int, length: int, same_base: bool) -> int:
        """Return the mode of the next pass: whether it must count the classes of its base."""
        if mode is Mode.PLAIN:
            return mode
        shape = (width, length) if mode is Mode.FLOATS else None
        before, self._counted = self._counted, shape
        return _AGAIN if same_base and shape is not None and shape == before else mode


_scratch: Final = _Scratch()


def split(
    mode: Mode,
    width: int,
    data: Buffer,
    base: Buffer | None,
    planes: Bytes,
    *,
    same_base: bool = False,
) -> None:
    """Write the planes of `data` (and `base`, unless PLAIN) to `planes`, all of the same length.

    The length is a multiple of `width`, which is 1, 2, 4 or 8. same_base: see the module.
    """
    source = _aligned(data, width)
    other = source if base is None else _aligned(base, width)
    _check(mode, width, source, base, other, planes)
    room = _scratch.at(planes.size)
    _split[width](
        _scratch.mode(mode, width, planes.size, same_base),
        planes.size // width,
        source.ctypes.data,
        other.ctypes.data,
        planes.ctypes.data,
        room,
    )


def join(
    mode: Mode,
    width: int,
    planes: Buffer,
    base: Buffer | None,
    target: memoryview,
    *,
    same_base: bool = False,
) -> None:
    """The inverse of `split`: fill `target`."""
    source = np.frombuffer(planes, dtype=np.uint8)
    other = source if base is None else _aligned(base, width)
    out: Bytes = np.frombuffer(target, dtype=np.uint8)
    _check(mode, width, source, base, other, out)
    room = out if out.ctypes.data % width == 0 else np.empty_like(out)
    scratch = _scratch.at(out.size)
    _join[width](
        _scratch.mode(mode, width, out.size, same_base),
        out.size // width,
        source.ctypes.data,
        # Not read if there is no base, but it must be aligned nevertheless.
        room.ctypes.data if base is None else other.ctypes.data,
        room.ctypes.data,
        scratch,
    )
    if room is not out:
        out[:] = room


def _check(
    mode: Mode, width: int, source: Bytes, base: Buffer | None, other: Bytes, target: Bytes
) -> None:
    assert width in _WIDTHS
    assert source.size == other.size == target.size
    assert target.size % width == 0
    assert (mode is Mode.PLAIN) == (base is None)


def _aligned(data: Buffer, width: int) -> Bytes:
    # Blocks may lie at any offset of a file; compiled code takes aligned elements only.
    found: npt.NDArray[Any] = np.frombuffer(data, dtype=np.uint8)
    return found if found.ctypes.data % width == 0 else found.copy()
