"""Codecs: whatever a block is stored as, it comes back bit by bit, or an error says why not."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from independent_reader import from_classes

from mstore.blocks import classes, codecs, planes
from mstore.blocks.codecs import (
    DELTA_GAIN,
    PLAIN_BYTES,
    PLANES_GAIN,
    Codec,
    Elements,
    Encoded,
    Policy,
    decode,
    decode_into,
    elements_of,
    encode,
)
from mstore.blocks.planes import Mode
from mstore.checkpoint.dtypes import DTYPES
from mstore.errors import Corrupt, Incompatible
from mstore.ids import BlockId, Buffer

WIDTHS = (1, 2, 4, 8)
FRAMES = (Codec.PLANES, Codec.DELTA_FLOATS, Codec.DELTA_INTEGERS)
MODES = {
    Codec.PLANES: Mode.PLAIN,
    Codec.DELTA_FLOATS: Mode.FLOATS,
    Codec.DELTA_INTEGERS: Mode.INTEGERS,
}
KINDS = [Elements(width, floating) for width in WIDTHS for floating in (False, True)]


def plain(encoded: Encoded, base: Buffer | None = None) -> bytes:
    """What a block decodes to, asked for in both ways."""
    base = base if encoded.base is not None else None
    found = decode(encoded.codec, encoded.payload, encoded.width, encoded.raw_length, base)
    target = bytearray(encoded.raw_length)
    decode_into(encoded.codec, encoded.payload, encoded.width, memoryview(target), base)
    assert bytes(found) == bytes(target)
    return bytes(target)


def framed(codec: Codec, width: int, data: bytes, base: bytes | None = None) -> bytes:
    """The payload of a codec, whatever a policy would think of it."""
    room = np.empty(len(data), dtype=np.uint8)
    planes.split(MODES[codec], width, data, base, room)
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(room.tobytes())


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 patterns."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def weights(rng: np.random.Generator, count: int) -> np.ndarray:
    """bf16 patterns of weights as a training leaves them."""
    values = (rng.standard_normal(count) * 0.02).astype(np.float32)
    return rounded(values)


def nudged(rng: np.random.Generator, stored: np.ndarray, by: float) -> np.ndarray:
    """The same after a fine-tune that moved them by about so much."""
    values = (stored.astype(np.uint32) << 16).view(np.float32)
    moved = values + (by * rng.standard_normal(stored.size)).astype(np.float32)
    return rounded(moved)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Elements, bytes, bytes]:
    """Elements, a block and a base of the same length, near each other in some of their bits."""
    elements = draw(st.sampled_from(KINDS))
    width = elements.width
    count = draw(st.one_of(st.integers(1, 40), st.integers(1, 9_000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.integers(0, 256, count * width, dtype=np.uint8)
    if draw(st.booleans()):
        # Signs and exponents of few kinds, as weights have; zeros, infinities and NaN among them.
        kinds = rng.choice([0x00, 0x80, 0x3C, 0xBC, 0x7F, 0xFF, 0x7C], size=count)
        base[width - 1 :: width] = kinds
    unit = np.dtype(f"<u{width}")
    steps = rng.integers(0, 1 << draw(st.integers(1, 8)), count).astype(unit)
    data = (base.view(unit) + steps).tobytes()
    return elements, data, base.tobytes()


@given(pair=pairs(), policy=st.sampled_from(Policy), shift=st.integers(0, 7))
def test_every_block_comes_back(
    pair: tuple[Elements, bytes, bytes], policy: Policy, shift: int
) -> None:
    """All widths, lengths, policies and bit patterns, at any address, with a base and without."""
    elements, data, base = pair
    where = memoryview(bytearray(shift) + data)[shift:]
    id = BlockId.of(base)
    alone = encode(where, elements, policy)
    assert plain(alone) == data
    assert alone.base is None
    other = memoryview(bytearray(shift) + base)[shift:]
    near = encode(where, elements, policy, (id, other))
    assert plain(near, other) == data
    assert near.base == (id if near.codec.is_delta else None)
    assert len(near.payload) <= len(data)


@given(pair=pairs(), codec=st.sampled_from(FRAMES), cut=st.integers(0, 7))
def test_every_codec_holds_every_block(
    pair: tuple[Elements, bytes, bytes], codec: Codec, cut: int
) -> None:
    """Also what no policy would choose decodes to what it was made from, into any address."""
    (width, _), data, base = pair
    reference = base if codec.is_delta else None
    payload = framed(codec, width, data, reference)
    target = memoryview(bytearray(cut + len(data)))[cut:]
    decode_into(codec, payload, width, target, reference)
    assert target == data


@pytest.mark.parametrize("codec", FRAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_codec_holds_every_width(codec: Codec, width: int) -> None:
    """The same for each width at least once, whatever the examples above are."""
    rng = np.random.default_rng(width)
    data, base = rng.bytes(1000 * width), rng.bytes(1000 * width)
    reference = base if codec.is_delta else None
    target = bytearray(len(data))
    decode_into(codec, framed(codec, width, data, reference), width, memoryview(target), reference)
    assert target == data


def test_all_patterns_of_two_bytes_survive() -> None:
    """Each of the 65536 patterns against each of some bases: NaN with payloads, both zeros."""
    data = np.arange(1 << 16, dtype=np.uint16)
    for base in (0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3C00, 0xBF80):
        against = np.full(1 << 16, base, dtype=np.uint16).tobytes()
        for codec in (Codec.DELTA_FLOATS, Codec.DELTA_INTEGERS):
            payload = framed(codec, 2, data.tobytes(), against)
            assert bytes(decode(codec, payload, 2, 1 << 17, against)) == data.tobytes()


@given(pair=pairs())
def test_planes_are_what_the_page_says(pair: tuple[Elements, bytes, bytes]) -> None:
    """The compiled passes agree with a plain reading of docs/format.md."""
    (width, _), data, base = pair
    unit, bits = np.dtype(f"<u{width}"), 8 * width
    x, b = np.frombuffer(data, unit).tolist(), np.frombuffer(base, unit).tolist()
    top, mask = 1 << (bits - 1), (1 << bits) - 1

    def ordered(value: int) -> int:
        return value ^ mask if value & top else value ^ top

    def zigzag(difference: int) -> int:
        difference &= mask
        return (difference << 1 & mask) ^ (mask if difference & top else 0)

    order = sorted(range(len(b)), key=lambda i: (b[i] << 1 & mask) >> (bits - 8))
    numbers = {
        Mode.PLAIN: x,
        Mode.INTEGERS: [zigzag(one - other) for one, other in zip(x, b, strict=True)],
        Mode.FLOATS: [zigzag(ordered(x[i]) - ordered(b[i])) for i in order],
    }
    for mode, wanted in numbers.items():
        room = np.empty(len(data), dtype=np.uint8)
        planes.split(mode, width, data, None if mode is Mode.PLAIN else base, room)
        by_plane = np.array(wanted, unit).view(np.uint8).reshape(-1, width).T
        assert room.tobytes() == by_plane.tobytes()


def test_the_classes_of_a_base_are_counted_again_unless_it_is_the_last() -> None:
    """`same_base` changes no bit, whatever the thread split or joined since it was counted."""
    rng = np.random.default_rng(4)
    stored = [weights(rng, n) for n in (1 << 12, 1 << 12, 700)]
    bases = [one.tobytes() for one in stored]
    blocks = [nudged(rng, one, 1e-4).tobytes() for one in stored]
    last = None
    for number in rng.integers(0, 3, 200):
        data, width, mode = blocks[number], int(rng.choice([1, 2, 4])), Mode(rng.integers(0, 3))
        base = None if mode is Mode.PLAIN else bases[number]
        found, wanted, back = (np.empty(len(data), dtype=np.uint8) for _ in range(3))
        planes.split(mode, width, data, base, found, same_base=last is base)
        planes.join(mode, width, found, base, back.data, same_base=base is not None)
        assert back.tobytes() == data
        # A thread of its own has counted nothing.
        other = threading.Thread(target=planes.split, args=(mode, width, data, base, wanted))
        other.start()
        other.join()
        assert found.tobytes() == wanted.tobytes()
        last = last if base is None else base


def test_the_last_delta_may_be_by_class() -> None:
    """`same_base` is said of the last delta, whatever its codec: the order knows its own base."""
    rng = np.random.default_rng(6)
    bases = [weights(rng, 3000).tobytes() for _ in range(2)]
    blocks = [nudged(rng, np.frombuffer(base, np.uint16), 1e-4).tobytes() for base in bases]
    pairs = list(zip(blocks, bases, strict=True))
    ordered = [framed(Codec.DELTA_FLOATS, 2, *pair) for pair in pairs]
    coded = [classes.encode(*pair) for pair in pairs]
    last = None
    target = memoryview(bytearray(6000))
    for _ in range(300):
        number = int(rng.integers(0, 2))
        by_class = bool(rng.integers(0, 2))
        codec = Codec.DELTA_CLASSES if by_class else Codec.DELTA_FLOATS
        payload = (coded if by_class else ordered)[number]
        if rng.integers(0, 8) == 0:
            found = encode(
                blocks[number],
                Elements(2, True),
                Policy.DENSE,
                (BlockId.of(bases[number]), bases[number]),
            )
            assert found.codec == Codec.DELTA_CLASSES
            last = number
        decode_into(codec, payload, 2, target, bases[number], same_base=last == number)
        assert target == blocks[number]
        last = number


# -- the code by class -------------------------------------------------------------------------


@st.composite
def moved(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A block and a base of two-byte floats: weights that moved a little, far, in part or at all.

    Some of any bit pattern, so that there are escapes, NaN and infinities.
    """
    count = draw(st.one_of(st.integers(1, 200), st.integers(1, 9_000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = weights(rng, count)
    data = nudged(rng, base, 0.02 * 10.0 ** -draw(st.integers(0, 6)))
    still = int(count * draw(st.sampled_from((0, 0, 0.5, 0.97, 1))))
    data[:still] = base[:still]
    for side in (base, data):
        wild = rng.random(count) < draw(st.sampled_from((0, 0, 0.01, 1)))
        side[wild] = rng.integers(0, 1 << 16, int(wild.sum()))
    return data.tobytes(), base.tobytes()


@given(pair=moved(), cut=st.integers(0, 3))
def test_code_by_class_is_what_the_page_says(pair: tuple[bytes, bytes], cut: int) -> None:
    """What is coded decodes to the block: here into any address, and by a reading of the page."""
    data, base = pair
    payload = classes.encode(memoryview(bytearray(cut) + data)[cut:], base)
    assert from_classes(payload, base) == data
    target = memoryview(bytearray(cut + len(data)))[cut:]
    other = memoryview(bytearray(cut) + base)[cut:]
    assert classes.decode(payload, other, target)
    assert target == data


@pytest.mark.parametrize("count", [1, 63, 64, 65, 2047, 2048, 2049, 4096 + 100])
def test_code_by_class_holds_every_length(count: int) -> None:
    """Part of a group, of a tile, and whole ones; with groups that are listed as empty, too."""
    rng = np.random.default_rng(count)
    base = weights(rng, count)
    for data in (nudged(rng, base, 2e-4), base.copy()):
        data[-1] ^= 1
        payload = classes.encode(data.tobytes(), base.tobytes())
        assert from_classes(payload, base.tobytes()) == data.tobytes()
        target = memoryview(bytearray(2 * count))
        assert classes.decode(payload, base.tobytes(), target)
        assert target == data.tobytes()


def test_each_class_has_the_code_that_suits_it() -> None:
    """A block takes little more than the entropy of its differences, given the base's class."""
    rng = np.random.default_rng(8)
    base = weights(rng, 1 << 19)
    keys = (base << np.uint16(1)) >> np.uint16(8)
    for noise in (1e-2, 1e-3):
        data = nudged(rng, base, 0.02 * noise)
        room = np.empty(data.nbytes, dtype=np.uint8)
        planes.split(Mode.FLOATS, 2, data.tobytes(), base.tobytes(), room)
        low, high = room.reshape(2, -1).astype(np.int64)
        found = np.stack([np.sort(keys), low | high << 8])
        _, each = np.unique(found, axis=1, return_counts=True)
        _, whole = np.unique(keys, return_counts=True)
        bits = float((whole * np.log2(whole)).sum() - (each * np.log2(each)).sum())
        payload = classes.encode(data.tobytes(), base.tobytes())
        assert bits < 8 * len(payload) < 1.05 * bits


def test_rows_that_did_not_move_take_nothing() -> None:
    """Of a block in which one row of a hundred moved, only that takes bytes."""
    rng = np.random.default_rng(9)
    base = weights(rng, 400 * 1024)
    data = base.copy()
    for row in range(0, 400, 100):
        moving = slice(row * 1024, (row + 1) * 1024)
        data[moving] = nudged(rng, base[moving], 2e-4)
    assert len(classes.encode(data.tobytes(), base.tobytes())) < 4 * 1024 + 2000


def test_scratch_is_what_the_passes_need() -> None:
    """Sizes and places that are written twice, where no compiler is imported, are the same."""
    from mstore.blocks import class_passes, class_tables

    assert classes._RESULTS == class_tables.RESULTS
    assert classes._SCRATCH == class_tables.SCRATCH
    own = (classes._SYMBOLS, classes._CONTEXTS, classes._LANES, classes._GROUP)
    tables = class_tables
    assert own == (tables.SYMBOLS, tables.CONTEXTS, tables.LANES, tables.GROUP)
    for n in (1, 64, 65, 100_001, 1 << 19):
        room, payload = classes._rooms(n)
        groups = -(-n // tables.GROUP)
        assert room == 257 * groups + tables.LANES * class_passes.lane_room(n)
        assert payload == class_passes.longest(n)


def test_a_sample_tells_what_a_block_will_take() -> None:
    """The measure of some elements, to a tenth or so, and the same number everywhere."""
    rng = np.random.default_rng(10)
    for noise in (1e-2, 3e-3, 1e-3):
        base = weights(rng, 1 << 17)
        data = nudged(rng, base, 0.02 * noise)
        part = slice(0, 1 << 14)
        told = classes.measure(data[part].tobytes(), base[part].tobytes())
        taken = len(classes.encode(data.tobytes(), base.tobytes()))
        assert math.isclose(8 * told.coded, taken, rel_tol=0.12)
        assert isinstance(told.coded, int)


def test_differences_with_many_escapes_have_planes() -> None:
    """fp16 has more places than bf16: most numbers are no symbols, and the other codec is taken."""
    rng = np.random.default_rng(11)
    base = rng.normal(0, 0.02, 1 << 16).astype(np.float16)
    data = (base + rng.normal(0, 0.02, 1 << 16) * 0.1).astype(np.float16)
    pair = (BlockId.of(base.tobytes()), base.tobytes())
    assert (
        encode(data.tobytes(), elements_of("F16"), Policy.DENSE, pair).codec == Codec.DELTA_FLOATS
    )


def small_by_class() -> tuple[bytes, bytes, bytes]:
    """(payload, block, base) with contexts, escapes and listed groups, of few bytes."""
    rng = np.random.default_rng(12)
    base = weights(rng, 3000)
    data = nudged(rng, base, 1e-4)
    data[:1000] = base[:1000]
    data[-3:] = 0x7FC1
    payload = classes.encode(data.tobytes(), base.tobytes())
    assert payload[1] == 1
    assert payload[4] >= 3
    return payload, data.tobytes(), base.tobytes()


def test_no_payload_by_class_is_taken_for_another() -> None:
    """Cut short, followed by bytes, of another width or length: Corrupt."""
    payload, data, base = small_by_class()
    length = len(data)
    assert bytes(decode(Codec.DELTA_CLASSES, payload, 2, length, base)) == data
    for cut in range(len(payload)):
        refused(Codec.DELTA_CLASSES, payload[:cut], length, base)
    for bad in (payload + b"\0", payload + bytes(8), payload + payload, b"", bytes(len(payload))):
        refused(Codec.DELTA_CLASSES, bad, length, base)
    refused(Codec.DELTA_CLASSES, payload, length - 64, base[:-64])
    for width in (1, 4, 8):
        refused(Codec.DELTA_CLASSES, payload, length, base, width)
    refused(Codec.DELTA_CLASSES, payload, length, None)


def test_damage_by_class_stays_inside() -> None:
    """Any bit flipped, any byte exchanged: no byte outside of payload and block is touched."""
    program = Path(__file__).with_name("guarded_classes.py")
    payload, data, base = small_by_class()
    told = json.dumps([each.hex() for each in (payload, data, base)])
    done = subprocess.run(
        [sys.executable, str(program)], input=told, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


# -- policies ----------------------------------------------------------------------------------


def test_weights_near_a_base_take_a_sixteenth() -> None:
    """bf16 weights take two thirds alone, and a sixteenth as small differences."""
    rng = np.random.default_rng(1)
    base = weights(rng, 1 << 18)
    data = nudged(rng, base, 0.02 * 1e-3).tobytes()
    pair = (BlockId.of(base.tobytes()), base.tobytes())
    elements = elements_of("BF16")
    for policy in (Policy.AUTO, Policy.DENSE):
        alone, near = encode(data, elements, policy), encode(data, elements, policy, pair)
        assert (alone.codec, near.codec) == (Codec.PLANES, Codec.DELTA_CLASSES)
        assert len(alone.payload) < 0.72 * len(data)
        assert len(near.payload) < 0.0625 * len(data)
    assert encode(data, elements, Policy.RAW, pair).codec == Codec.RAW


def test_what_saves_little_stays_raw_unless_dense() -> None:
    """auto wants 5 % of planes and 15 % more of a delta; dense takes whatever is smaller."""
    rng = np.random.default_rng(2)
    length = 1 << 17
    noise = rng.integers(0, 256, length, dtype=np.uint8)
    noise[: length // 50] = 7  # 2 % to be had
    data = noise.tobytes()
    assert encode(data, PLAIN_BYTES, Policy.AUTO).codec == Codec.RAW
    dense = encode(data, PLAIN_BYTES, Policy.DENSE)
    assert dense.codec == Codec.PLANES
    assert PLANES_GAIN * length < len(dense.payload) < length
    # Half of it can be had alone, and a base gives an eighth more.
    half = rng.integers(0, 16, length, dtype=np.uint8).tobytes()
    alone = encode(half, PLAIN_BYTES, Policy.AUTO)
    mixed = bytearray(rng.integers(0, 256, length, dtype=np.uint8).tobytes())
    mixed[: length // 2 + length // 8] = half[: length // 2 + length // 8]
    base = (BlockId.of(bytes(mixed)), bytes(mixed))
    near = encode(half, PLAIN_BYTES, Policy.AUTO, base)
    assert alone.codec == Codec.PLANES
    assert near.codec == Codec.PLANES or len(near.payload) <= DELTA_GAIN * len(alone.payload)
    smallest = encode(half, PLAIN_BYTES, Policy.DENSE, base)
    assert len(smallest.payload) <= len(alone.payload)


def test_an_unrelated_base_is_not_used() -> None:
    """A delta to what has nothing to do with a block is larger than planes, and not taken."""
    rng = np.random.default_rng(3)
    data, other = weights(rng, 1 << 17).tobytes(), weights(rng, 1 << 17).tobytes()
    for policy in Policy:
        found = encode(data, elements_of("BF16"), policy, (BlockId.of(other), other))
        assert not found.codec.is_delta


def test_a_base_of_another_length_is_not_used() -> None:
    """The last block of a tensor and a whole one have no difference."""
    data = bytes(range(256)) * 64
    found = encode(data[:-2], Elements(2, True), Policy.DENSE, (BlockId.of(data), data))
    assert not found.codec.is_delta


@given(pair=pairs(), policy=st.sampled_from(Policy))
def test_encoding_is_a_function(pair: tuple[Elements, bytes, bytes], policy: Policy) -> None:
    """The same arguments give the same bytes, in any thread and however often."""
    elements, data, base = pair
    asked = (data, elements, policy, (BlockId.of(base), base))
    first = encode(*asked)
    found: list[Encoded] = []
    thread = threading.Thread(target=lambda: found.append(encode(*asked)))
    thread.start()
    thread.join()
    assert bytes(first.payload) == bytes(found[0].payload)
    assert first[:2] + first[3:] == found[0][:2] + found[0][3:]


def test_every_dtype_has_elements() -> None:
    """Every dtype of safetensors is seen as elements of 1, 2, 4 or 8 bytes that fit its bits."""
    for name, dtype in DTYPES.items():
        width, floating = elements_of(name)
        assert width in WIDTHS
        assert dtype.bits % 8 or (dtype.bits // 8) % width == 0
        assert floating == (dtype.floating and dtype.bits % 8 == 0) or name == "C64"
    assert elements_of("BYTES") == elements_of("F4") == PLAIN_BYTES
    assert elements_of("C64") == Elements(4, True)
    assert elements_of("F8_E4M3") == Elements(1, True)
    assert elements_of("BOOL") == Elements(1, False)


@given(
    element=st.binary(min_size=1, max_size=8).filter(lambda e: len(e) in WIDTHS),
    count=st.integers(2, 3000),
    at=st.integers(0, 1 << 20),
    policy=st.sampled_from(Policy),
)
def test_constant_blocks(element: bytes, count: int, at: int, policy: Policy) -> None:
    """A repeated element is stored once under any policy; one deviating byte is not lost."""
    elements = Elements(len(element), False)
    data = bytearray(element * count)
    found = encode(bytes(data), elements, policy)
    assert (found.codec, found.payload) == (Codec.CONSTANT, element)
    assert plain(found) == data
    data[at % len(data)] ^= 1
    other = encode(bytes(data), elements, policy)
    assert other.codec != Codec.CONSTANT
    assert plain(other) == data


# -- hostile payloads --------------------------------------------------------------------------


def refused(codec: Codec, payload: bytes, length: int, base: bytes | None, width: int = 2) -> None:
    """Corrupt, from both ways to decode."""
    with pytest.raises(Corrupt):
        decode(codec, payload, width, length, base)
    with pytest.raises(Corrupt):
        decode_into(codec, payload, width, memoryview(bytearray(length)), base)


@pytest.mark.parametrize("codec", FRAMES)
def test_frames_that_are_not_ours_are_refused(codec: Codec) -> None:
    """Cut short, of another length, followed by bytes or a frame, unchecked, wide, not a frame."""
    data = bytes(range(256)) * 8
    base = bytes(len(data)) if codec.is_delta else None
    good = framed(codec, 2, data, base)
    assert bytes(decode(codec, good, 2, len(data), base)) == data
    for cut in range(len(good)):
        refused(codec, good[:cut], len(data), base)
    refused(codec, good + b"\0", len(data), base)
    refused(codec, good + good, len(data), base)
    refused(codec, good, len(data) - 2, base and base[:-2])
    refused(codec, good, len(data) + 2, base and base + b"\0\0")
    make = zstandard.ZstdCompressor
    unchecked = make(level=1).compress(data)
    unsized = make(level=1, write_checksum=True, write_content_size=False).compress(data)
    skippable = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8)
    for bad in (unchecked, unsized, skippable, skippable + good, b"", b"\0", data):
        refused(codec, bad, len(data), base)
    for width in (0, 3, 16):
        refused(codec, good, len(data), base, width)


def test_flipped_bits_of_a_frame_never_pass() -> None:
    """Every bit of a small payload: an error, or the very bytes (where the bit means nothing)."""
    data = weights(np.random.default_rng(5), 300).tobytes()
    good = framed(Codec.PLANES, 2, data)
    for at, bit in itertools.product(range(len(good)), range(8)):
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        try:
            found = decode(Codec.PLANES, bytes(bad), 2, len(data))
        except Corrupt:
            continue
        assert bytes(found) == data


def test_reading_needs_no_checksum_and_checks_all_else() -> None:
    """A damaged checksum: `decode` refuses it, `decode_into` gives the very bytes."""
    data = weights(np.random.default_rng(5), 300).tobytes()
    good = framed(Codec.PLANES, 2, data)
    target = memoryview(bytearray(len(data)))
    bad = bytearray(good)
    bad[-1] ^= 1
    with pytest.raises(Corrupt):
        decode(Codec.PLANES, bytes(bad), 2, len(data))
    for payload in (good, bytes(bad), memoryview(bytearray(good))):
        target[:] = bytes(len(data))
        before = bytes(payload)
        decode_into(Codec.PLANES, payload, 2, target)
        assert target == data
        assert bytes(payload) == before
    broken = [good[:cut] for cut in range(len(good))]
    for wrong in (*broken, good + b"\0", good + good, good + bytes(4), good[:-4] + good[-8:]):
        with pytest.raises(Corrupt):
            decode_into(Codec.PLANES, wrong, 2, target)


def test_a_frame_is_stored_with_a_sound_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encoded is read back whole: a checksum that is wrong is found before the commit."""
    compressor = codecs._compressor

    class Wrong:
        def __init__(self, window: int | None) -> None:
            self._own = compressor(window)

        def compress(self, data: Buffer) -> bytes:
            made = bytearray(self._own.compress(data))
            made[-1] ^= 1
            return bytes(made)

    monkeypatch.setattr(codecs, "_own", codecs._Own())
    monkeypatch.setattr(codecs, "_compressor", Wrong)
    with pytest.raises(Corrupt):
        encode(weights(np.random.default_rng(5), 300).tobytes(), Elements(2, True), Policy.DENSE)


def test_a_wide_window_is_refused() -> None:
    """A frame that asks its reader for more memory than a block may have."""
    wide = zstandard.ZstdCompressionParameters(
        window_log=23, write_checksum=True, write_content_size=True
    )
    length = 9 << 20
    data = np.random.default_rng(6).integers(0, 256, length, dtype=np.uint8).tobytes()
    payload = zstandard.ZstdCompressor(compression_params=wide).compress(data)
    assert zstandard.get_frame_parameters(payload).window_size > codecs.MAX_WINDOW
    refused(Codec.PLANES, payload, length, None, width=1)


def test_a_bomb_costs_no_memory() -> None:
    """A small frame that claims, or holds, far more than its entry says is never unpacked."""
    bomb = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(bytes(256 << 20))
    assert len(bomb) < 1 << 16
    lying = bytearray(bomb)
    size = lying.index((256 << 20).to_bytes(4, "little"))
    lying[size : size + 4] = (1 << 16).to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1 << 16
    tracemalloc.start()
    try:
        for payload in (bomb, bytes(lying)):
            refused(Codec.PLANES, payload, 1 << 16, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_delta_needs_its_base_and_nothing_else_does() -> None:
    """No base for a delta, one of another length, or one for what is no delta: Corrupt."""
    data = bytes(range(256)) * 8
    for codec in (Codec.DELTA_FLOATS, Codec.DELTA_INTEGERS):
        payload = framed(codec, 2, data, bytes(len(data)))
        refused(codec, payload, len(data), None)
        refused(codec, payload, len(data), bytes(len(data) - 2))
    refused(Codec.PLANES, framed(Codec.PLANES, 2, data), len(data), bytes(len(data)))


@given(
    codec=st.integers(0, 255),
    payload=st.one_of(
        st.binary(max_size=9),
        st.binary(max_size=200).map(
            lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)
        ),
    ),
    width=st.integers(0, 9),
    raw=st.one_of(st.integers(0, 200), st.integers(0, 70_000)),
    has_base=st.booleans(),
)
def test_decoding_gives_the_length_it_was_told(
    codec: int, payload: bytes, width: int, raw: int, *, has_base: bool
) -> None:
    """Whatever an entry says: the plain length, or an error of ours."""
    try:
        found = decode(codec, payload, width, raw, bytes(raw) if has_base else None)
    except (Corrupt, Incompatible):
        return
    assert len(found) == raw


def test_codecs_to_come_need_a_newer_version() -> None:
    """A codec that this version does not know is refused as that."""
    for codec in (6, 77, 255):
        with pytest.raises(Incompatible, match="newer"):
            decode(codec, b"x", 1, 1)


def test_codecs_load_nothing_before_they_are_used() -> None:
    """Reading a log needs no numpy, no compressor and no compiler."""
    script = (
        "import sys, mstore.blocks.codecs, mstore.store.catalog\n"
        "heavy = {'numpy', 'zstandard', 'numba', 'llvmlite'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
