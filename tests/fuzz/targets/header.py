"""The header of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints import safetensors_bytes
from mutation import Form

from mstore.checkpoint.header import parse_header
from mstore.checkpoint.strict_json import LENGTH_BYTES

FORM = Form.HEADER
REST = 24


def target(data: bytes) -> None:
    """`data` is the beginning of a file; REST bytes of tensors are taken to be behind it."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = parse_header(data[:end], file_size=end + REST, where="input")
    assert header.data_bytes == REST
    assert len({slot.name for slot in header.tensors}) == len(header.tensors)


def seeds() -> Iterable[bytes]:
    tensors = [
        ("w", "BF16", (2, 3), bytes(12)),
        ("é", "F32", (3,), bytes(12)),
        ("e", "U8", (0,), b""),
    ]
    yield safetensors_bytes(tensors, metadata={"format": "pt"}, padding=3)
