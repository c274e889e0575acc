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
    base = None if data[5:6] in (b"", b"\0") else (BASE * -(-length // len(BASE)))[:length]
    plain = decode(int.from_bytes(codec), data[6:], int.from_bytes(width), length, base)
    assert len(plain) == length


def seeds() -> Iterable[bytes]:
    yield bytes([Codec.RAW, 1, 4, 0, 0, 0]) + b"data"
    yield bytes([Codec.CONSTANT, 2, 0, 1, 0, 0]) + b"ab"
    yield from _encoded()


def _encoded() -> Iterable[bytes]:
    from mstore.blocks.codecs import Elements, Policy, encode
    from mstore.ids import BlockId

    near = bytes([*BASE[:-1], 7])
    for width in (1, 2, 4, 8):
        for base in (None, (BlockId.of(BASE), BASE)):
            made = encode(near, Elements(width, width > 1), Policy.DENSE, base)
            has_base = made.base is not None
            head = [made.codec, width, *made.raw_length.to_bytes(3, "little"), has_base]
            yield bytes(head) + bytes(made.payload)
    from mstore.blocks import classes

    payload = classes.encode(near, BASE)
    yield bytes([Codec.DELTA_CLASSES, 2, *len(near).to_bytes(3, "little"), 1]) + payload
