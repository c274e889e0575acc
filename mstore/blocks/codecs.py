"""Codecs: how the plain bytes of one block are stored.

A codec is a property of the stored entry, never of the BlockId. Codes are part of the format:

    0  raw        the plain bytes
    1  constant   one element of `width` bytes; the block is that element repeated
    2  zstd       one zstd frame of the plain bytes
    3  floats     the elements, coded by their exponents
    4  delta      differences to the elements of a base block, coded by their size

`rans` defines the code of 3 and 4, for elements of one, two or four bytes. A base block has the
same plain length and is never stored as a delta itself, so that a block costs two reads at most.

Pure functions; nothing here reads or writes files. Any thread may call. `encode` decodes its result
and compares it with the plain bytes before it returns. `decode` checks length and window of a frame
against its entry before it allocates anything.
"""

from __future__ import annotations

import threading
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mstore.checkpoint.dtypes import DTYPES
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId, Buffer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import zstandard

    from mstore.blocks.rans import Mode

LEVEL: Final = 1
MAX_WINDOW: Final = 1 << 20

DELTA_GAIN: Final = 0.85
"""With policy auto, a delta's payload is at most this share of the best one without a base."""

ALONE_GAIN: Final = 0.95
"""With policy auto, a payload without a base is at most this share of the plain bytes."""

SAMPLE_STRIPS: Final = 4
SAMPLE_BYTES: Final = 8 << 10
"""Bytes per strip. Of a block longer than two samples, strips predict whether zstd will do."""

SAMPLE_SLACK: Final = 1.1
"""A sample of bytes has fewer repeats than its block, so its estimate is a little too high."""

_CODED: Final = (1, 2, 4)
"""Bytes of an element that `rans` codes, which is imported late."""

_SHORTEST: Final = 64
"""Below so many bytes no codec saves what is worth another read."""


class Codec(IntEnum):
    """The codec byte of an entry.  Raises Incompatible for one that this version does not know."""

    RAW = 0
    CONSTANT = 1
    ZSTD = 2
    FLOATS = 3
    DELTA = 4

    @classmethod
    def _missing_(cls, value: object) -> Codec | None:
        raise Incompatible(f"codec {value} needs a newer mstore", hint="pip install -U mstore")

    @property
    def is_delta(self) -> bool:
        """Whether decoding needs the base block."""
        return self is Codec.DELTA


class Policy(StrEnum):
    """Which codecs new blocks may use.

    auto: the codec must save much; dense: the smallest result; raw: only raw and constant.
    """

    AUTO = "auto"
    RAW = "raw"
    DENSE = "dense"


class Elements(msgspec.Struct, frozen=True):
    """How to view a block's bytes: elements of 1, 2, 4 or 8 bytes, floats or not."""

    width: int
    floating: bool


PLAIN_BYTES: Final = Elements(1, False)


class Encoded(msgspec.Struct, frozen=True):
    """A block as it will be stored. base: for a delta, the block that it is a difference to."""

    codec: Codec
    width: int
    payload: Buffer
    raw_length: int
    base: BlockId | None


def elements_of(dtype: str) -> Elements:
    """Return how to view blocks of this dtype; as bytes for sub-byte dtypes and non-tensors."""
    found = DTYPES.get(dtype)
    if found is None or found.bits % 8:
        return PLAIN_BYTES
    if dtype == "C64":
        return Elements(4, True)  # Two floats per element.
    return Elements(found.bits // 8, found.floating)


_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def constant_element(data: Buffer, width: int) -> bytes | None:
    """Return the element that fills all of `data`, or None.

    `width` is the element's size in bytes (1, 2, 4 or 8). Blocks of one element gain nothing and
    count as not constant.
    """
    length = len(data)
    if width not in _UNSIGNED or length < 2 * width or length % width:
        return None
    view = memoryview(data)
    first = bytes(view[:width])
    middle = length // 2 // width * width
    # Nearly every block differs within three probes; only then is a full pass worthwhile.
    if first != view[length - width :] or first != view[middle : middle + width]:
        return None
    import numpy as np  # imported late: reading a log needs no numpy

    elements = np.frombuffer(data, dtype=_UNSIGNED[width])
    return first if bool((elements == elements[0]).all()) else None


# -- encoding ----------------------------------------------------------------------------------


def encode(
    data: Buffer,
    elements: Elements,
    policy: Policy,
    base: tuple[BlockId, Buffer] | None = None,
) -> Encoded:
    """Encode a block under a policy; the payload may be `data` itself.

    base: id and plain bytes of a stored block that the caller knows is no delta; ignored if its
    length differs. The result depends only on the arguments.
    """
    width, length = elements.width, len(data)
    element = constant_element(data, width)
    if element is not None:
        return Encoded(Codec.CONSTANT, width, element, length, None)
    raw = Encoded(Codec.RAW, width, data, length, None)
    if policy is Policy.RAW or length < _SHORTEST or length % width:
        return raw
    is_auto = policy is Policy.AUTO
    most = int(ALONE_GAIN * length) if is_auto else length - 1
    alone = Codec.FLOATS if elements.floating and width in _CODED else Codec.ZSTD
    expected = min(length, _expected(alone, data, elements))
    if base is not None and len(base[1]) == length and width in _CODED:
        limit = min(int(DELTA_GAIN * expected) if is_auto else expected, length - 1)
        if _expected(Codec.DELTA, data, elements, base[1]) <= limit:
            found = _packed(Codec.DELTA, data, elements, limit, base)
            if found is not None:
                return found
    slack = SAMPLE_SLACK if alone is Codec.ZSTD else 1
    if expected <= slack * most:
        found = _packed(alone, data, elements, most)
        if found is not None:
            return found
    return raw


def _expected(codec: Codec, data: Buffer, elements: Elements, base: Buffer | None = None) -> int:
    """Estimate the length in bytes of the payload of a block."""
    if codec is not Codec.ZSTD:
        from mstore.blocks import rans

        return rans.measure(_mode(codec, elements), elements.width, data, base)
    length = len(data)
    sample = data if length <= 2 * SAMPLE_STRIPS * SAMPLE_BYTES else _strips(data)
    return len(_own.compressor.compress(sample)) * length // len(sample)


def _strips(data: Buffer) -> bytes:
    view = memoryview(data)
    # Whole elements of any width, spread evenly over the block.
    step = (len(view) - SAMPLE_BYTES) // (SAMPLE_STRIPS - 1) // 8 * 8
    return b"".join(view[at : at + SAMPLE_BYTES] for at in range(0, SAMPLE_STRIPS * step, step))


def _packed(
    codec: Codec,
    data: Buffer,
    elements: Elements,
    limit: int,
    base: tuple[BlockId, Buffer] | None = None,
) -> Encoded | None:
    """Encode the block with a codec; None if its payload would be longer than `limit`."""
    width, length = elements.width, len(data)
    id, other = (None, None) if base is None else base
    payload: bytes
    if codec is Codec.ZSTD:
        payload = _own.compressor.compress(data)
        if len(payload) > limit:
            return None
        is_right = _decompressed(payload, length) == bytes(data)
    else:
        from mstore.blocks import rans

        mode = _mode(codec, elements)
        coded = rans.encode(mode, width, data, other, limit)
        if coded is None:
            return None
        is_right = rans.check(mode, width, coded, other, data, _own.scratch(length))
        payload = coded.tobytes()
    if not is_right:
        raise Corrupt("a block that was just encoded does not decode: is the memory faulty?")
    return Encoded(codec, width, payload, length, id)


def _mode(codec: Codec, elements: Elements) -> Mode:
    from mstore.blocks.rans import Mode

    if codec is Codec.FLOATS:
        return Mode.ALONE
    return Mode.FLOATS if elements.floating else Mode.INTEGERS


class _Own(threading.local):
    """One thread's compressors and scratch memory, reused because fresh memory costs time."""

    def __init__(self) -> None:
        self._scratch: Any = None
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    @property
    def compressor(self) -> zstandard.ZstdCompressor:
        if self._compressor is None:
            import zstandard

            # The block's id proves its bytes: a checksum would prove nothing more.
            self._compressor = zstandard.ZstdCompressor(
                level=LEVEL, write_checksum=False, write_content_size=True, write_dict_id=False
            )
        return self._compressor

    @property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            import zstandard

            self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        return self._decompressor

    def scratch(self, length: int) -> npt.NDArray[np.uint8]:
        """Return memory for a block; valid until the next call."""
        import numpy as np

        if self._scratch is None or self._scratch.size < length:
            self._scratch = np.empty(length, dtype=np.uint8)
        found: npt.NDArray[np.uint8] = self._scratch[:length]
        return found


_own: Final = _Own()


# -- decoding ----------------------------------------------------------------------------------


def decode(
    codec: int, payload: Buffer, width: int, raw_length: int, base: Buffer | None = None
) -> Buffer:
    """Return the plain bytes of a payload.

    The caller has checked `raw_length` against the block size. Raises Corrupt if the payload does
    not fit its entry, Incompatible for a codec of a newer version.
    """
    if codec == Codec.RAW:
        if len(payload) != raw_length:
            raise Corrupt(f"raw payload of {len(payload)} bytes for a block of {raw_length}")
        return payload
    if codec == Codec.CONSTANT:
        return _repeated(payload, width, raw_length)
    _check(codec, payload, width, raw_length, base)
    if codec == Codec.ZSTD:
        return _decompressed(payload, raw_length)
    import numpy as np

    target: memoryview = np.empty(raw_length, dtype=np.uint8).data
    _fill(codec, payload, width, target, base)
    return target


def decode_into(
    codec: int, payload: Buffer, width: int, target: memoryview, base: Buffer | None = None
) -> None:
    """Like `decode`, into `target`, which is as long as the block."""
    if codec in (Codec.RAW, Codec.CONSTANT, Codec.ZSTD):
        target[:] = decode(codec, payload, width, len(target), base)
        return
    _check(codec, payload, width, len(target), base)
    _fill(codec, payload, width, target, base)


def _repeated(payload: Buffer, width: int, raw_length: int) -> bytes:
    if width < 1 or len(payload) != width or raw_length % width:
        raise Corrupt(f"constant payload of {len(payload)} bytes, element width {width}")
    return bytes(payload) * (raw_length // width)


def _check(codec: int, payload: Buffer, width: int, raw_length: int, base: Buffer | None) -> None:
    """Raise Corrupt or Incompatible for a payload that is not safe to decode."""
    kind = Codec(codec)
    if width not in _UNSIGNED or raw_length % width:
        raise Corrupt(f"a block of {raw_length} bytes of element width {width}")
    if kind.is_delta != (base is not None):
        raise Corrupt(
            "a delta without its base"
            if kind.is_delta
            else "a base for a block that is not a delta"
        )
    if base is not None and len(base) != raw_length:
        raise Corrupt(f"a delta of {raw_length} bytes to a base of {len(base)}")
    if kind is not Codec.ZSTD:
        if width not in _CODED or not 0 < len(payload) < raw_length:
            raise Corrupt(f"{len(payload)} coded bytes for {raw_length} of width {width}")
        return
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(payload)
    except zstandard.ZstdError as error:
        raise Corrupt(f"not a zstd frame: {error}") from error
    # Before anything is allocated: a frame can claim any length.
    if frame.content_size != raw_length:
        raise Corrupt(f"the frame length differs from the block length of {raw_length} bytes")
    if frame.window_size > MAX_WINDOW or frame.dict_id or frame.has_checksum:
        raise Corrupt("a frame with an unexpected window, dictionary or checksum")


def _decompressed(payload: Buffer, raw_length: int) -> bytes:
    import zstandard

    try:
        plain = _own.decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"the frame does not decompress: {error}") from error
    if len(plain) != raw_length:
        raise Corrupt(f"a frame of {len(plain)} bytes for a block of {raw_length}")
    return plain


def _fill(codec: int, payload: Buffer, width: int, target: memoryview, base: Buffer | None) -> None:
    from mstore.blocks import rans

    mode = rans.Mode.ALONE
    if base is not None:
        # The payload tells what its numbers are differences of.
        mode = rans.Mode.INTEGERS if payload[0] == rans.Mode.INTEGERS else rans.Mode.FLOATS
    if not rans.decode(mode, width, payload, base, target):
        raise Corrupt(f"{len(payload)} bytes that are no coded block of {len(target)}")
