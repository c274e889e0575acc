"""Coded elements: every block comes back, the bytes are those of the page, damage stays inside."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from independent_reader import from_coded

from mstore.blocks import rans
from mstore.blocks.rans import WIDTHS, Mode
from mstore.terms.ids import Buffer

SHORT = 1 << 14
LENGTHS = (1, 31, 32, 33, 64, 127, 1000, SHORT - 1, SHORT, SHORT + 1, SHORT + 127, SHORT + 128)


def coded(mode: Mode, width: int, data: Buffer, base: Buffer | None = None) -> bytes:
    """The payload, however long it is."""
    found = rans.encode(mode, width, data, base, 8 * len(data) + 4096)
    assert found is not None
    return found.tobytes()


def back(
    mode: Mode, width: int, payload: bytes, length: int, base: Buffer | None = None
) -> bytes | None:
    """What it decodes to; None if it is no payload."""
    target = bytearray(length)
    return bytes(target) if rans.decode(mode, width, payload, base, memoryview(target)) else None


def weights(rng: np.random.Generator, count: int) -> np.ndarray:
    """bf16 patterns of weights as a training leaves them."""
    return bf16((rng.standard_normal(count) * 0.02).astype(np.float32))


def bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 patterns."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def nudged(rng: np.random.Generator, stored: np.ndarray, by: float) -> np.ndarray:
    """The same after a fine-tune that moved them by about so much."""
    values = (stored.astype(np.uint32) << 16).view(np.float32)
    return bf16(values + (by * rng.standard_normal(stored.size)).astype(np.float32))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Mode, int, bytes, bytes]:
    """A block and a base: weights that moved a little, far, in part or not at all; zeros; noise.

    Some elements have any bit pattern, so that there are escapes, NaN and infinities.
    """
    mode, width = draw(st.sampled_from(Mode)), draw(st.sampled_from(WIDTHS))
    count = draw(st.one_of(st.integers(1, 200), st.integers(1, SHORT + 3000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(0, 0.02, count).astype(np.float32)
    moved = values + rng.normal(0, 0.02, count) * 10.0 ** -draw(st.integers(0, 6))
    shift = draw(st.sampled_from((0, 13, 16))) if width == 4 else 32 - 8 * width
    unit = np.dtype(f"<u{width}")
    base, data = (
        (one.astype(np.float32).view(np.uint32) >> np.uint32(shift)).astype(unit)
        for one in (values, moved)
    )
    if width == 4:
        base, data = base << unit.type(shift), data << unit.type(shift)
    still = int(count * draw(st.sampled_from((0, 0, 0.5, 0.97, 1))))
    data[:still] = base[:still]
    for side in (base, data):
        wild = rng.random(count) < draw(st.sampled_from((0, 0, 0.01, 1)))
        side[wild] = rng.integers(0, 256**width, int(wild.sum()))
        side[rng.random(count) < draw(st.sampled_from((0, 0, 0.5)))] = 0
    return mode, width, data.tobytes(), base.tobytes()


@given(block=blocks(), cut=st.integers(0, 3))
def test_every_block_comes_back(block: tuple[Mode, int, bytes, bytes], cut: int) -> None:
    """All modes, widths, lengths and bit patterns, from and to any address."""
    mode, width, data, other = block
    base = None if mode is Mode.ALONE else memoryview(bytearray(cut) + other)[cut:]
    payload = coded(mode, width, memoryview(bytearray(cut) + data)[cut:], base)
    target = memoryview(bytearray(cut + len(data)))[cut:]
    source = memoryview(bytearray(cut) + payload)[cut:]
    assert rans.decode(mode, width, source, base, target)
    assert target == data


@given(block=blocks())
def test_payloads_are_what_the_page_says(block: tuple[Mode, int, bytes, bytes]) -> None:
    """A reading of docs/format.md that shares no code gives the same elements."""
    mode, width, data, other = block
    base = None if mode is Mode.ALONE else other
    assert from_coded(coded(mode, width, data, base), width, len(data), base) == data


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_length(mode: Mode, width: int) -> None:
    """Part of a row, whole rows, with few lanes and many; with rows that are listed as empty."""
    for count in LENGTHS:
        rng = np.random.default_rng(count)
        noise = rng.bytes(count * width)
        near = bytearray(noise)
        near[-1] ^= 1
        for data in (noise, bytes(near)):
            base = None if mode is Mode.ALONE else noise
            payload = coded(mode, width, data, base)
            assert back(mode, width, payload, len(data), base) == data
            assert from_coded(payload, width, len(data), base) == data


def test_all_patterns_of_two_bytes() -> None:
    """Each of the 65536 patterns, alone and against each of some bases: NaN, both zeros."""
    data = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert back(Mode.ALONE, 2, coded(Mode.ALONE, 2, data), len(data)) == data
    for pattern in (0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3C00, 0xBF80):
        base = np.full(1 << 16, pattern, dtype=np.uint16).tobytes()
        for mode in (Mode.FLOATS, Mode.INTEGERS):
            assert back(mode, 2, coded(mode, 2, data, base), len(data), base) == data


def test_payloads_are_the_same_everywhere() -> None:
    """Every processor makes these bytes: with escapes, raw bits, zeros, rows without a number."""
    rng = np.random.default_rng(3)
    found = blake3()
    for width in WIDTHS:
        unit = np.dtype(f"<u{width}")
        for count in (700, SHORT + 700, 10 * SHORT):
            base = rng.integers(0, 256**width, count).astype(unit)
            data = base + rng.integers(0, 64, count).astype(unit)
            data[rng.random(count) < 0.01] = 0
            data[: count // 3] = base[: count // 3]
            for mode in Mode:
                other = None if mode is Mode.ALONE else base.tobytes()
                payload = coded(mode, width, data.tobytes(), other)
                assert back(mode, width, payload, data.nbytes, other) == data.tobytes()
                found.update(payload)
                told = rans.measure(mode, width, data.tobytes(), other)
                found.update(told.to_bytes(8, "little"))
                room = np.empty(data.nbytes, dtype=np.uint8)
                own = np.frombuffer(payload, dtype=np.uint8)
                assert rans.check(mode, width, own, other, data.tobytes(), room)
    for noise in (1e-1, 1e-2, 1e-3):
        base = weights(rng, SHORT + 5000)
        data = nudged(rng, base, 0.02 * noise)
        found.update(coded(Mode.FLOATS, 2, data.tobytes(), base.tobytes()))
    assert found.hexdigest() == DIGEST


DIGEST = "b4390005027d1cb0aa73bde8abf5bbb045f9490a6693ccfbd8e63adf476440a3"


# -- sizes -------------------------------------------------------------------------------------


def entropy(keys: np.ndarray, numbers: np.ndarray) -> float:
    """Bytes that the numbers take at least, if each key has a code of its own."""
    _, each = np.unique(np.stack([keys, numbers]), axis=1, return_counts=True)
    _, whole = np.unique(keys, return_counts=True)
    return float((whole * np.log2(whole)).sum() - (each * np.log2(each)).sum()) / 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("noise", [1e-2, 3e-3, 1e-3])
def test_each_class_has_the_code_that_suits_it(noise: float) -> None:
    """A block takes little more than the entropy of its differences, given the base's exponent."""
    rng = np.random.default_rng(8)
    base = weights(rng, 1 << 18)
    data = nudged(rng, base, 0.02 * noise)
    ordered = [
        np.where(one & 0x8000, ~one & 0xFFFF, one | 0x8000).astype(np.int64) for one in (base, data)
    ]
    least = entropy((base >> 7) & 255, ordered[1] - ordered[0])
    taken = len(coded(Mode.FLOATS, 2, data.tobytes(), base.tobytes()))
    assert least < taken < 1.07 * least


def test_weights_alone_take_their_exponents_entropy() -> None:
    """A float without a base takes what its exponent does, and its other bits as they are."""
    rng = np.random.default_rng(9)
    data = weights(rng, 1 << 18)
    least = entropy(np.zeros_like(data), (data >> 7) & 255) + data.size
    assert least < len(coded(Mode.ALONE, 2, data.tobytes())) < 1.01 * least


def test_rows_that_did_not_move_take_nothing() -> None:
    """Of a block in which one row of a hundred moved, only that takes bytes."""
    rng = np.random.default_rng(9)
    base = weights(rng, 400 * 1024)
    data = base.copy()
    for row in range(0, 400, 100):
        moving = slice(row * 1024, (row + 1) * 1024)
        data[moving] = nudged(rng, base[moving], 2e-4)
    assert len(coded(Mode.FLOATS, 2, data.tobytes(), base.tobytes())) < 4 * 1024 + 2000


@pytest.mark.parametrize("mode", [Mode.ALONE, Mode.FLOATS])
def test_f32_that_was_bf16_takes_what_bf16_does(mode: Mode) -> None:
    """Low bits that are zero in all elements take nothing."""
    rng = np.random.default_rng(10)
    base = weights(rng, 1 << 17)
    data = nudged(rng, base, 2e-4)
    wide = [(one.astype(np.uint32) << 16).tobytes() for one in (base, data)]
    narrow = [base.tobytes(), data.tobytes()]
    sizes = [
        len(coded(mode, width, given[1], None if mode is Mode.ALONE else given[0]))
        for width, given in ((4, wide), (2, narrow))
    ]
    assert math.isclose(*sizes, rel_tol=0.01)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sample_tells_what_a_block_will_take(width: int) -> None:
    """The measure of some elements, to a tenth or so."""
    rng = np.random.default_rng(10)
    shift = np.uint32(32 - 8 * width)
    unit = np.dtype(f"<u{width}")
    values = rng.normal(0, 0.02, 1 << 17).astype(np.float32)
    for noise in (1e-1, 1e-2, 1e-3):
        moved = (values + rng.normal(0, 0.02 * noise, values.size)).astype(np.float32)
        base, data = ((one.view("u4") >> shift).astype(unit).tobytes() for one in (values, moved))
        for mode, other in ((Mode.ALONE, None), (Mode.FLOATS, base), (Mode.INTEGERS, base)):
            told = rans.measure(mode, width, data, other)
            taken = len(coded(mode, width, data, other))
            assert math.isclose(told, taken, rel_tol=0.12, abs_tol=600)


def test_a_payload_beyond_the_limit_is_none() -> None:
    """Noise is not squeezed: the encoder says so, and writes nothing outside of its room."""
    data = np.random.default_rng(1).bytes(1 << 20)
    for width in WIDTHS:
        for limit in (0, 1, 1000, len(data) // 2):
            assert rans.encode(Mode.ALONE, width, data, None, limit) is None


# -- hostile payloads --------------------------------------------------------------------------


def small(mode: Mode, width: int, count: int = 600) -> tuple[bytes, bytes, bytes | None]:
    """(payload, block, base) with escapes, raw bits and, in a delta, listed rows."""
    rng = np.random.default_rng(12)
    unit = np.dtype(f"<u{width}")
    base = rng.integers(0, 256**width, count).astype(unit)
    data = base + rng.integers(0, 20, count).astype(unit)
    data[: count // 3] = base[: count // 3]
    data[-3:] = unit.type(2 ** (8 * width - 1) + 1)
    other = None if mode is Mode.ALONE else base.tobytes()
    return coded(mode, width, data.tobytes(), other), data.tobytes(), other


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_payload_is_taken_for_another(mode: Mode, width: int) -> None:
    """Cut short, followed by bytes, of another mode, width or length: refused."""
    payload, data, base = small(mode, width)
    length = len(data)
    assert back(mode, width, payload, length, base) == data
    for cut in range(len(payload)):
        assert back(mode, width, payload[:cut], length, base) is None
    for bad in (payload + b"\0", payload + bytes(8), payload + payload, b"", bytes(len(payload))):
        assert back(mode, width, bad, length, base) is None
    shorter = base and base[: -128 * width]
    assert back(mode, width, payload, length - 128 * width, shorter) is None
    for other in Mode:
        if other is not mode:
            given = None if other is Mode.ALONE else bytes(length)
            assert back(other, width, payload, length, given) is None


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("width", WIDTHS)
def test_flipped_bits_never_pass_for_the_block(mode: Mode, width: int) -> None:
    """Every bit of a payload: refused, or other bytes, which no id has; never a wrong length."""
    payload, data, base = small(mode, width)
    same = 0
    for at in range(len(payload)):
        for bit in range(8):
            bad = bytearray(payload)
            bad[at] ^= 1 << bit
            found = back(mode, width, bytes(bad), len(data), base)
            same += found == data
            if found is not None:
                room = np.empty(len(data), dtype=np.uint8)
                own = np.frombuffer(bad, dtype=np.uint8)
                assert rans.check(mode, width, own, base, data, room) == (found == data)
    # Bits that mean nothing: classes that no element has, and their likes.
    assert same < len(payload) // 4


COUNTS = (300, SHORT + 300)
"""Elements in few lanes, and in many."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("mode", "width", "count"),
    [
        # `make test` runs each mode with each width, and each of both with each count.
        pytest.param(mode, width, count, marks=[pytest.mark.rest] if (m + w + c) % 2 else [])
        for m, mode in enumerate(Mode)
        for w, width in enumerate(WIDTHS)
        for c, count in enumerate(COUNTS)
    ],
)
def test_damage_stays_inside(mode: Mode, width: int, count: int) -> None:
    """Any bit flipped, any byte exchanged: no byte outside of payload and block is touched."""
    program = Path(__file__).with_name("guarded_rans.py")
    payload, data, base = small(mode, width, count)
    told = json.dumps([int(mode), width, payload.hex(), data.hex(), (base or b"").hex()])
    done = subprocess.run(
        [sys.executable, str(program)], input=told, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
