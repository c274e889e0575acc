"""Codecs: whatever a block is stored as, it comes back bit by bit, or an error says why not."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_rans import nudged, weights

from mstore.blocks import codecs, rans
from mstore.blocks.codecs import (
    ALONE_GAIN,
    DELTA_GAIN,
    PLAIN_BYTES,
    Codec,
    Elements,
    Encoded,
    Policy,
    decode,
    decode_into,
    elements_of,
    encode,
)
from mstore.checkpoint.dtypes import DTYPES
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import BlockId, Buffer

WIDTHS = (1, 2, 4, 8)
KINDS = [Elements(width, floating) for width in WIDTHS for floating in (False, True)]


def plain(encoded: Encoded, base: Buffer | None = None) -> bytes:
    """What a block decodes to, asked for in both ways."""
    base = base if encoded.base is not None else None
    found = decode(encoded.codec, encoded.payload, encoded.width, encoded.raw_length, base)
    target = bytearray(encoded.raw_length)
    decode_into(encoded.codec, encoded.payload, encoded.width, memoryview(target), base)
    assert bytes(found) == bytes(target)
    return bytes(target)


def payload_of(
    codec: Codec, width: int, data: bytes, base: bytes | None = None, *, floating: bool = True
) -> bytes:
    """The payload of a codec, whatever a policy would think of it."""
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=1).compress(data)
    found = rans.encode(
        codecs._mode(codec, Elements(width, floating)), width, data, base, 8 * len(data) + 4096
    )
    assert found is not None
    return found.tobytes()


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
        assert (alone.codec, near.codec) == (Codec.FLOATS, Codec.DELTA)
        assert len(alone.payload) < 0.72 * len(data)
        assert len(near.payload) < 0.064 * len(data)
    assert encode(data, elements, Policy.RAW, pair).codec == Codec.RAW


def test_what_saves_little_stays_raw_unless_dense() -> None:
    """auto wants 5 % without a base and 15 % more of a delta; dense takes whatever is smaller."""
    rng = np.random.default_rng(2)
    length = 1 << 17
    noise = rng.integers(0, 256, length, dtype=np.uint8)
    noise[: length // 50] = 7  # 2 % to be had
    data = noise.tobytes()
    assert encode(data, PLAIN_BYTES, Policy.AUTO).codec == Codec.RAW
    dense = encode(data, PLAIN_BYTES, Policy.DENSE)
    assert dense.codec == Codec.ZSTD
    assert ALONE_GAIN * length < len(dense.payload) < length
    # Half of it can be had alone, and a base gives an eighth more.
    half = rng.integers(0, 16, length, dtype=np.uint8).tobytes()
    alone = encode(half, PLAIN_BYTES, Policy.AUTO)
    mixed = bytearray(rng.integers(0, 256, length, dtype=np.uint8).tobytes())
    mixed[: length // 2 + length // 8] = half[: length // 2 + length // 8]
    base = (BlockId.of(bytes(mixed)), bytes(mixed))
    near = encode(half, PLAIN_BYTES, Policy.AUTO, base)
    assert alone.codec == Codec.ZSTD
    assert near.codec == Codec.ZSTD or len(near.payload) <= DELTA_GAIN * len(alone.payload)
    smallest = encode(half, PLAIN_BYTES, Policy.DENSE, base)
    assert len(smallest.payload) <= len(alone.payload)


def test_an_unrelated_base_is_not_used() -> None:
    """A delta to what has nothing to do with a block saves nothing, and is not taken."""
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
    assert replace(first, payload=b"") == replace(found[0], payload=b"")


def test_every_dtype_has_elements() -> None:
    """Every dtype of safetensors is seen as elements of 1, 2, 4 or 8 bytes that fit its bits."""
    for name, dtype in DTYPES.items():
        elements = elements_of(name)
        assert elements.width in WIDTHS
        assert dtype.bits % 8 or (dtype.bits // 8) % elements.width == 0
        assert elements.floating == (dtype.floating and dtype.bits % 8 == 0) or name == "C64"
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


def test_frames_that_are_not_ours_are_refused() -> None:
    """Cut short, of another length, followed by bytes or a frame, with a checksum, not a frame."""
    data = bytes(range(256)) * 8
    good = payload_of(Codec.ZSTD, 1, data)
    assert bytes(decode(Codec.ZSTD, good, 1, len(data))) == data
    for cut in range(len(good)):
        refused(Codec.ZSTD, good[:cut], len(data), None, 1)
    refused(Codec.ZSTD, good + b"\0", len(data), None, 1)
    refused(Codec.ZSTD, good + good, len(data), None, 1)
    refused(Codec.ZSTD, good, len(data) - 2, None, 1)
    refused(Codec.ZSTD, good, len(data) + 2, None, 1)
    make = zstandard.ZstdCompressor
    checked = make(level=1, write_checksum=True).compress(data)
    unsized = make(level=1, write_content_size=False).compress(data)
    skippable = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8)
    for bad in (checked, unsized, skippable, skippable + good, b"", b"\0", data):
        refused(Codec.ZSTD, bad, len(data), None, 1)
    for width in (0, 3, 16):
        refused(Codec.ZSTD, good, len(data), None, width)


def test_flipped_bits_of_a_frame_give_the_length_or_an_error() -> None:
    """Every bit of a small frame: an error, or as many bytes, whose id tells what they are."""
    data = bytes(range(64)) * 20
    good = payload_of(Codec.ZSTD, 1, data)
    for at, bit in itertools.product(range(len(good)), range(8)):
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        try:
            found = decode(Codec.ZSTD, bytes(bad), 1, len(data))
        except Corrupt:
            continue
        assert len(found) == len(data)


@pytest.mark.parametrize("codec", [Codec.FLOATS, Codec.DELTA])
def test_coded_payloads_fit_their_entry_or_are_refused(codec: Codec) -> None:
    """Longer than the block, of another width or length, with a base too many or missing."""
    rng = np.random.default_rng(1)
    base = weights(rng, 4000)
    data = nudged(rng, base, 2e-5).tobytes()
    other = base.tobytes() if codec.is_delta else None
    good = payload_of(codec, 2, data, other)
    assert bytes(decode(codec, good, 2, len(data), other)) == data
    for width in (0, 1, 3, 4, 8, 16):
        refused(codec, good, len(data), other, width)
    refused(codec, good + bytes(len(data)), len(data), other)
    refused(codec, good, len(data) - 2, other and other[:-2])
    refused(codec, good, len(data), None if other else data)


@pytest.mark.parametrize("elements", [Elements(2, True), Elements(2, False), PLAIN_BYTES])
def test_what_is_encoded_is_decoded_before_it_is_stored(
    monkeypatch: pytest.MonkeyPatch, elements: Elements
) -> None:
    """Whatever went wrong with a payload is found before anyone commits it."""
    encode_right, compress = rans.encode, codecs._Own.compressor

    class Wrong:
        def compress(self, data: Buffer) -> bytes:
            return compress.fget(codecs._own).compress(bytes(len(data)))  # type: ignore[misc]

    def coded(*asked: object) -> np.ndarray | None:
        found = encode_right(*asked)  # type: ignore[arg-type]
        if found is not None:
            found[-40] ^= 1
        return found

    rng = np.random.default_rng(5)
    base = weights(rng, 3000)
    data = nudged(rng, base, 2e-5).tobytes()
    if elements == PLAIN_BYTES:
        data = bytes(range(64)) * 50
    given = None if elements == PLAIN_BYTES else (BlockId.of(base.tobytes()), base.tobytes())
    assert encode(data, elements, Policy.DENSE, given).codec != Codec.RAW
    monkeypatch.setattr(rans, "encode", coded)
    monkeypatch.setattr(codecs._Own, "compressor", Wrong())
    with pytest.raises(Corrupt, match="memory"):
        encode(data, elements, Policy.DENSE, given)


def test_a_wide_window_is_refused() -> None:
    """A frame that asks its reader for more memory than a block may have."""
    wide = zstandard.ZstdCompressionParameters(window_log=23, write_content_size=True)
    length = 9 << 20
    data = np.random.default_rng(6).integers(0, 256, length, dtype=np.uint8).tobytes()
    payload = zstandard.ZstdCompressor(compression_params=wide).compress(data)
    assert zstandard.get_frame_parameters(payload).window_size > codecs.MAX_WINDOW
    refused(Codec.ZSTD, payload, length, None, width=1)


def test_a_bomb_costs_no_memory() -> None:
    """A small frame that claims, or holds, far more than its entry says is never unpacked."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    assert len(bomb) < 1 << 16
    lying = bytearray(bomb)
    size = lying.index((256 << 20).to_bytes(4, "little"))
    lying[size : size + 4] = (1 << 16).to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 1 << 16
    tracemalloc.start()
    try:
        for payload in (bomb, bytes(lying)):
            refused(Codec.ZSTD, payload, 1 << 16, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(
    codec=st.integers(0, 255),
    payload=st.one_of(
        st.binary(max_size=9),
        st.binary(max_size=200).map(lambda data: zstandard.ZstdCompressor().compress(data)),
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
    for codec in (5, 77, 255):
        with pytest.raises(Incompatible, match="newer"):
            decode(codec, b"x", 1, 1)


def test_widths_are_those_that_the_coder_takes() -> None:
    """What is written twice, because the coder is imported late, is the same."""
    assert codecs._CODED == rans.WIDTHS


def test_codecs_load_nothing_before_they_are_used() -> None:
    """Reading a log needs no numpy, no compressor and no compiler."""
    script = (
        "import sys, mstore.blocks.codecs, mstore.store.catalog\n"
        "heavy = {'numpy', 'zstandard', 'numba', 'llvmlite'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
