"""Codecs: how the plain bytes of one block are stored.

A codec is a property of the stored entry, never of the BlockId.  Codes are part of the format:

    0  raw        the plain bytes
    1  constant   one element of `width` bytes; the block is that element repeated
    2  planes     byte planes, one zstd frame               (reserved: this version refuses it)
    3  delta      difference to a base block, planes, zstd  (reserved: this version refuses it)

Pure functions; nothing here reads or writes files.
"""

from __future__ import annotations

from enum import IntEnum

from mstore.errors import Corrupt, Incompatible
from mstore.ids import Buffer


class Codec(IntEnum):
    """The codec byte of an entry."""

    RAW = 0
    CONSTANT = 1
    PLANES = 2
    DELTA = 3


_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def constant_element(data: Buffer, width: int) -> bytes | None:
    """The element that fills `data` from end to end, or None.

    `width` is the element's size in bytes (1, 2, 4 or 8).  Blocks of one element gain nothing
    and count as not constant.
    """
    length = len(data)
    if width not in _UNSIGNED or length < 2 * width or length % width:
        return None
    view = memoryview(data)
    first = bytes(view[:width])
    middle = length // 2 // width * width
    # Nearly every block differs within three probes; only then is a whole pass worth it.
    if first != view[length - width :] or first != view[middle : middle + width]:
        return None
    import numpy as np  # late: reading a log needs no numpy

    elements = np.frombuffer(data, dtype=_UNSIGNED[width])
    return first if bool((elements == elements[0]).all()) else None


def encode(data: Buffer, width: int) -> tuple[Codec, Buffer]:
    """The codec and payload under which a block is stored."""
    element = constant_element(data, width)
    if element is not None:
        return Codec.CONSTANT, element
    return Codec.RAW, data


def decode(codec: int, payload: bytes, width: int, raw_length: int) -> bytes:
    """The plain bytes of a payload; `raw_length` was checked against the block size by the caller.

    Raises Corrupt where the payload does not fit its entry, Incompatible for a codec of a newer
    version.
    """
    if codec == Codec.RAW:
        if len(payload) != raw_length:
            raise Corrupt(f"raw payload of {len(payload)} bytes for a block of {raw_length}")
        return payload
    if codec == Codec.CONSTANT:
        if width < 1 or len(payload) != width or raw_length % width:
            raise Corrupt(f"constant payload of {len(payload)} bytes, element width {width}")
        return payload * (raw_length // width)
    raise Incompatible(f"codec {codec} needs a newer mstore", hint="pip install -U mstore")
