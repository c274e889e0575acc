"""Codecs: how the plain bytes of one block are stored.

A codec is a property of the stored entry, never of the BlockId. Codes are part of the format:

    0  raw                the plain bytes
    1  constant           one element of `width` bytes; the block is that element repeated
    2  planes             byte planes of the block, one zstd frame
    3  delta of floats    order-preserving difference to a base block, planes, one zstd frame
    4  delta of integers  the same, without the mapping that orders floats
    5  delta by class     differences as in 3, of two-byte floats, each coded by its class

`planes` defines planes and differences, `classes` the code by class. A base block has the same
plain length and is never stored as a delta itself, so that a block costs two reads at most.

Pure functions; nothing here reads or writes files. Any thread may call. `encode` decodes its result
and compares it with the plain bytes before it returns. `decode` checks the length and the window of
each frame against its entry before it allocates anything.
"""

from __future__ import annotations

import threading
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mstore.checkpoint.dtypes import DTYPES
from mstore.errors import Corrupt, Incompatible
from mstore.ids import BlockId, Buffer

if TYPE_CHECKING:
    import numpy as np
    import zstandard

    from mstore.blocks.planes import Mode

LEVEL: Final = 1
MAX_WINDOW: Final = 1 << 20

FLOATS_HASH_LOG: Final = 7
"""log2 of the entries of the match table for floats (zstd hash_log).

Planes of weights are noise: matches by chance cost more than they save. So few entries suffice to
find larger repeats, such as rows of an embedding.
"""

FLOATS_MIN_MATCH: Final = 7

PLANES_WINDOW_LOG: Final = 19
DELTA_WINDOW_LOG: Final = 16
"""A window limits how far one code table applies: classes are shorter than 128 KiB."""

DELTA_GAIN: Final = 0.85
"""With policy auto, a delta's payload is at most this share of the best one without a base."""

PLANES_GAIN: Final = 0.95
"""With policy auto, a payload without a base is at most this share of the plain bytes."""

SAMPLE_STRIPS: Final = 4
SAMPLE_BYTES: Final = 8 << 10
"""Bytes per strip. Of a block longer than two samples, strips predict which codec will do."""

SAMPLE_SLACK: Final = 1.1
"""A sample has fewer repeats than its block, so its estimate is a little too high."""

FEW_ESCAPES: Final = 64
"""A block is coded by class if at most this part of its sample's elements are escapes."""

_DESCRIPTOR: Final = 4
"""Offset of the byte of a zstd frame that tells what its header has (RFC 8878, 3.1.1.1.1)."""

_CHECKSUM_FLAG: Final = 4
_CHECKSUM_BYTES: Final = 4

_CLASSES_WIDTH: Final = 2

_SHORTEST: Final = 64
"""Below so many bytes a frame and its checksum save nothing worth another read."""


class Codec(IntEnum):
    """The codec byte of an entry.  Raises Incompatible for one that this version does not know."""

    RAW = 0
    CONSTANT = 1
    PLANES = 2
    DELTA_FLOATS = 3
    DELTA_INTEGERS = 4
    DELTA_CLASSES = 5

    @classmethod
    def _missing_(cls, value: object) -> Codec | None:
        raise Incompatible(f"codec {value} needs a newer mstore", hint="pip install -U mstore")

    @property
    def is_delta(self) -> bool:
        """Whether decoding needs the base block."""
        return self in DELTAS

    @property
    def is_of_floats(self) -> bool:
        """Whether it is a delta of floats."""
        return self in (Codec.DELTA_FLOATS, Codec.DELTA_CLASSES)


DELTAS: Final = frozenset({Codec.DELTA_FLOATS, Codec.DELTA_INTEGERS, Codec.DELTA_CLASSES})
"""The codecs that need the base block."""


class Policy(StrEnum):
    """Which codecs new blocks may use.

    auto: the codec must save much; dense: the smallest result; raw: only raw and constant.
    """

    AUTO = "auto"
    RAW = "raw"
    DENSE = "dense"


class Elements(NamedTuple):
    """How to view a block's bytes: elements of 1, 2, 4 or 8 bytes, floats or not."""

    width: int
    floating: bool


PLAIN_BYTES: Final = Elements(1, False)


class Encoded(NamedTuple):
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
    if base is not None and len(base[1]) != length:
        base = None
    candidates, split = _candidates(data, elements, policy, base)
    for codec, limit in candidates:
        found = _packed(data, elements, codec, base, limit, is_split=codec is split)
        if found is not None:
            return found
        split = None
    return raw


def _candidates(
    data: Buffer, elements: Elements, policy: Policy, base: tuple[BlockId, Buffer] | None
) -> tuple[list[tuple[Codec, int]], Codec | None]:
    """Return codecs to try in order, each with the maximum length of its payload.

    Also return the codec for which the whole block was split last, so that it need not be split
    again.
    """
    length = len(data)
    codec = Codec.PLANES
    is_auto = policy is Policy.AUTO
    alone_limit = int(PLANES_GAIN * length) if is_auto else length - 1
    is_whole = length <= 2 * SAMPLE_STRIPS * SAMPLE_BYTES
    sample = data if is_whole else _strips(data)
    alone = min(length, _estimate(length, sample, elements, Codec.PLANES, None))
    found = []
    if base is not None:
        limit = int(DELTA_GAIN * alone) if is_auto else alone
        under = base[1] if is_whole else _strips(base[1])
        delta, estimate, was_split = _difference(length, sample, elements, under)
        if estimate <= SAMPLE_SLACK * limit:
            found.append((delta, min(limit, length - 1)))
        codec = was_split or codec
    if alone <= SAMPLE_SLACK * alone_limit:
        found.append((Codec.PLANES, alone_limit))
    return found, codec if is_whole else None


def _difference(
    length: int, sample: Buffer, elements: Elements, base: Buffer
) -> tuple[Codec, int, Codec | None]:
    """Return the codec for differences to a base, and an estimate as `_estimate` does.

    Also return the codec for which the sample was split, if it was.
    """
    ordered = Codec.DELTA_FLOATS if elements.floating else Codec.DELTA_INTEGERS
    by_class = None
    if elements.floating and elements.width == _CLASSES_WIDTH:
        from mstore.blocks import classes

        found = classes.measure(sample, base)
        if found.escapes * FEW_ESCAPES * _CLASSES_WIDTH <= len(sample):
            by_class = found.coded * length // len(sample) + found.tables
            if len(sample) < length:
                return Codec.DELTA_CLASSES, by_class, None
    estimate = _estimate(length, sample, elements, ordered, base)
    # In a short block the tables may take more than zstd's.
    if by_class is not None and by_class <= estimate:
        return Codec.DELTA_CLASSES, by_class, ordered
    return ordered, estimate, ordered


def _estimate(
    length: int, sample: Buffer, elements: Elements, codec: Codec, base: Buffer | None
) -> int:
    """Estimate the length in bytes of the payload of a block of `length` bytes.

    sample: of the block. base: the same of its base.
    """
    width = elements.width
    planes = memoryview(_own.split(sample, width, codec, base))
    # Compress each plane alone: in a sample they would share a code table, in a block they do not.
    step = max(len(planes) // width, _SHORTEST)
    compress = _own.compressor(elements, codec).compress
    size = sum(len(compress(planes[at : at + step])) for at in range(0, len(planes), step))
    return size * length // len(sample)


def _strips(data: Buffer) -> bytes:
    view = memoryview(data)
    # Whole elements of any width, spread evenly over the block.
    step = (len(view) - SAMPLE_BYTES) // (SAMPLE_STRIPS - 1) // 8 * 8
    return b"".join(view[at : at + SAMPLE_BYTES] for at in range(0, SAMPLE_STRIPS * step, step))


def _packed(
    data: Buffer,
    elements: Elements,
    codec: Codec,
    base: tuple[BlockId, Buffer] | None,
    limit: int,
    *,
    is_split: bool = False,
) -> Encoded | None:
    """Encode the block with a codec; None if its payload would be longer than `limit`.

    is_split: this very block was the last that this thread split, for this codec.
    """
    plain_base = base[1] if base is not None and codec.is_delta else None
    width = elements.width
    payload: bytes
    if codec is Codec.DELTA_CLASSES:
        from mstore.blocks import classes

        assert plain_base is not None
        payload = classes.encode(data, plain_base)
        _own.has_ordered = False
    else:
        planes = (
            _own.split_before(data, width, plain_base)
            if is_split
            else _own.split(data, width, codec, plain_base)
        )
        payload = _own.compressor(elements, codec).compress(planes)
    if len(payload) > limit:
        return None
    room = _own.room(len(data))
    # All of the frame, with its checksum, which other readers may rely on.
    _joined(
        _checked(codec, payload, width, len(data), plain_base),
        payload,
        width,
        room.data,
        plain_base,
        # Planes of deltas are made again from the base that they were just split with.
        same_base=True,
    )
    if not _same(room, data):
        raise Corrupt("a block that was just encoded does not decode: is the memory faulty?")
    id = base[0] if base is not None and codec.is_delta else None
    return Encoded(codec, width, payload, len(data), id)


def _same(room: np.ndarray[Any, np.dtype[np.uint8]], data: Buffer) -> bool:
    import numpy as np

    # Compare eight bytes at a time: this runs on every block that is stored.
    word = "u8" if room.size % 8 == 0 else "u1"
    return np.array_equal(room.view(word), np.frombuffer(data, dtype=word))


class _Own(threading.local):
    """One thread's compressors and scratch memory, reused because fresh memory costs time."""

    def __init__(self) -> None:
        self._planes: Any = None
        self._room: Any = None
        self._compressors: dict[int | None, zstandard.ZstdCompressor] = {}
        self._decompressor: zstandard.ZstdDecompressor | None = None
        # Whether `planes` had the base of the last delta: then it knows the classes of that base.
        self.has_ordered = False

    def compressor(self, elements: Elements, codec: Codec) -> zstandard.ZstdCompressor:
        window = None
        if elements.floating:
            window = DELTA_WINDOW_LOG if codec.is_delta else PLANES_WINDOW_LOG
        if window not in self._compressors:
            self._compressors[window] = _compressor(window)
        return self._compressors[window]

    @property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            import zstandard

            self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        return self._decompressor

    def split(self, data: Buffer, width: int, codec: Codec, base: Buffer | None) -> Buffer:
        """Return what of a block goes into its frame; valid until the next call."""
        from mstore.blocks import planes

        if width == 1 and base is None:
            return data
        self._planes = room = _grown(self._planes, len(data))
        planes.split(_mode(codec), width, data, base, room[: len(data)])
        self.has_ordered |= base is not None
        found: memoryview = room[: len(data)].data
        return found

    def split_before(self, data: Buffer, width: int, base: Buffer | None) -> Buffer:
        """Return the result of the last `split` again, which had this block and this base."""
        if width == 1 and base is None:
            return data
        found: memoryview = self._planes[: len(data)].data
        return found

    def room(self, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return memory for a block; valid until the next call."""
        self._room = room = _grown(self._room, length)
        found: np.ndarray[Any, np.dtype[np.uint8]] = room[:length]
        return found


def _compressor(float_window: int | None) -> zstandard.ZstdCompressor:
    """Return a compressor: for floats with a window of so many bits, for others if None."""
    import zstandard

    if float_window is None:
        return zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=True, write_content_size=True, write_dict_id=False
        )
    chosen = zstandard.ZstdCompressionParameters.from_level(
        LEVEL,
        window_log=float_window,
        hash_log=FLOATS_HASH_LOG,
        min_match=FLOATS_MIN_MATCH,
        write_checksum=True,
        write_content_size=True,
        write_dict_id=False,
    )
    return zstandard.ZstdCompressor(compression_params=chosen)


def _grown(room: Any, length: int) -> Any:
    import numpy as np

    return room if room is not None and room.size >= length else np.empty(length, dtype=np.uint8)


def _mode(codec: Codec) -> Mode:
    from mstore.blocks.planes import Mode

    if codec is Codec.DELTA_FLOATS:
        return Mode.FLOATS
    return Mode.INTEGERS if codec is Codec.DELTA_INTEGERS else Mode.PLAIN


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
    known = _checked(codec, payload, width, raw_length, base)
    if width == 1 and not known.is_delta:
        return _decompressed(payload, raw_length)
    import numpy as np

    target: memoryview = np.empty(raw_length, dtype=np.uint8).data
    _joined(known, payload, width, target, base)
    return target


def decode_into(
    codec: int,
    payload: Buffer,
    width: int,
    target: memoryview,
    base: Buffer | None = None,
    *,
    same_base: bool = False,
) -> None:
    """Like `decode`, into `target`, which is as long as the block.

    same_base: the base's bytes are those of the last delta that this thread decoded or encoded;
    that saves time.

    Does not compute the checksum of a frame, a fifth of the time that its decompression takes: the
    caller compares the block with its id, which also finds all that the checksum could. Only
    damage to the checksum itself goes unnoticed, which `decode` finds.
    """
    if codec in (Codec.RAW, Codec.CONSTANT):
        target[:] = decode(codec, payload, width, len(target))
        return
    known = _checked(codec, payload, width, len(target), base)
    _joined(known, _without_checksum(known, payload), width, target, base, same_base=same_base)


def _repeated(payload: Buffer, width: int, raw_length: int) -> bytes:
    if width < 1 or len(payload) != width or raw_length % width:
        raise Corrupt(f"constant payload of {len(payload)} bytes, element width {width}")
    return bytes(payload) * (raw_length // width)


def _checked(
    codec: int, payload: Buffer, width: int, raw_length: int, base: Buffer | None
) -> Codec:
    """Return the codec of a payload that is safe to decode. Raises Corrupt, Incompatible."""
    known = Codec(codec)
    if width not in _UNSIGNED or raw_length % width:
        raise Corrupt(f"a block of {raw_length} bytes of element width {width}")
    if known.is_delta != (base is not None):
        raise Corrupt(
            "a delta without its base"
            if known.is_delta
            else "a base for a block that is not a delta"
        )
    if base is not None and len(base) != raw_length:
        raise Corrupt(f"a delta of {raw_length} bytes to a base of {len(base)}")
    if known is Codec.DELTA_CLASSES:
        if width != _CLASSES_WIDTH or len(payload) >= raw_length:
            raise Corrupt(f"{len(payload)} bytes by class for {raw_length} of width {width}")
        return known
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(payload)
    except zstandard.ZstdError as error:
        raise Corrupt(f"not a zstd frame: {error}") from error
    # Before anything is allocated: a frame can claim any length.
    if frame.content_size != raw_length:
        raise Corrupt(f"the frame length differs from the block length of {raw_length} bytes")
    if frame.window_size > MAX_WINDOW or frame.dict_id or not frame.has_checksum:
        raise Corrupt("a frame with an unexpected window or dictionary, or without a checksum")
    return known


def _without_checksum(known: Codec, payload: Buffer) -> Buffer:
    """Return a frame that has a checksum as one without; other payloads have none."""
    if known is Codec.DELTA_CLASSES:
        return payload
    frame = bytearray(payload)
    frame[_DESCRIPTOR] &= ~_CHECKSUM_FLAG
    del frame[-_CHECKSUM_BYTES:]
    return frame


def mended(
    codec: int, payload: Buffer, width: int, raw_length: int, base: Buffer | None = None
) -> Buffer:
    """Return a payload whose frame has the checksum of what is in it, whatever it had.

    For a payload of which only that is damaged, so that its block still matches its id: the caller
    checks that. Raises as `decode` does, but not for the checksum.
    """
    if codec in (Codec.RAW, Codec.CONSTANT, Codec.DELTA_CLASSES):
        return payload
    known = _checked(codec, payload, width, raw_length, base)
    plain = _decompressed(_without_checksum(known, payload), raw_length)
    import zstandard

    # Every frame with these contents ends with the same checksum.
    other = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plain)
    return bytes(payload[:-_CHECKSUM_BYTES]) + other[-_CHECKSUM_BYTES:]


def _decompressed(payload: Buffer, raw_length: int) -> bytes:
    import zstandard

    try:
        plain = _own.decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"the frame does not decompress: {error}") from error
    if len(plain) != raw_length:
        raise Corrupt(f"a frame of {len(plain)} bytes for a block of {raw_length}")
    return plain


def _joined(
    codec: Codec,
    payload: Buffer,
    width: int,
    target: memoryview,
    base: Buffer | None,
    *,
    same_base: bool = False,
) -> None:
    if codec is Codec.DELTA_CLASSES:
        from mstore.blocks import classes

        assert base is not None
        _own.has_ordered = False
        if not classes.decode(payload, base, target):
            raise Corrupt(f"{len(payload)} bytes that are no block of {len(target)} by class")
        return
    plain = _decompressed(payload, len(target))
    if width == 1 and base is None:
        target[:] = plain
        return
    from mstore.blocks import planes

    is_same = same_base and _own.has_ordered
    planes.join(_mode(codec), width, plain, base, target, same_base=is_same)
    _own.has_ordered |= base is not None
