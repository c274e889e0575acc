"""The payload of a block under any codec, with any lengths beside it."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.blocks.codecs import Codec, decode

FORM = Form.BYTES
BASE = bytes(range(256)) * 16


def target(data: bytes) -> None:
    """codec, width, plain length (three bytes), whether there is a base; then the payload."""
    codec, width = data[:1], data[1:2]
    length = min(int.from_bytes(data[2:5], "little"), 1 << 20)
    base = None if data[5:6] in (b"", b"\0") else _base(length)
    plain = decode(int.from_bytes(codec), data[6:], int.from_bytes(width), length, base)
    assert len(plain) == length


def seeds() -> Iterable[bytes]:
    yield bytes([Codec.RAW, 1, 4, 0, 0, 0]) + b"data"
    yield bytes([Codec.CONSTANT, 2, 0, 1, 0, 0]) + b"ab"
    yield from _framed()
    yield from _coded()


def _base(length: int) -> bytes:
    return (BASE * -(-length // len(BASE)))[:length]


def _framed() -> Iterable[bytes]:
    from mstore.blocks.codecs import Elements, Policy, encode

    made = encode(BASE, Elements(8, True), Policy.DENSE)
    assert made.codec == Codec.ZSTD
    yield bytes([made.codec, 8, *made.raw_length.to_bytes(3, "little"), 0]) + bytes(made.payload)


def _coded() -> Iterable[bytes]:
    """Each mode and width: with escapes, raw bits and listed rows, for few lanes and many."""
    import numpy as np

    from mstore.blocks.rans import WIDTHS, Mode, encode

    draw = np.random.default_rng(1)
    for width in WIDTHS:
        for count in (1000, 16_400):
            base = np.frombuffer(_base(count * width), f"<u{width}")
            # A tenth of the elements move, some of them far.
            steps = draw.integers(0, 8, count) * draw.choice([1, 9_999], count)
            moved = ((np.arange(count) % 256 < 26) * steps).astype(base.dtype)
            for mode in Mode:
                under = None if mode is Mode.ALONE else base.tobytes()
                data = (moved if under is None else base + moved).tobytes()
                payload = encode(mode, width, data, under, len(data) - 1)
                if payload is not None:
                    codec = Codec.FLOATS if under is None else Codec.DELTA
                    head = [codec, width, *len(data).to_bytes(3, "little"), under is not None]
                    yield bytes(head) + payload.tobytes()
