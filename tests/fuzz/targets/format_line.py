"""The format line of a store."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store import layout
from targets.samples import scratch

FORM = Form.TEXT


def target(data: bytes) -> None:
    root = scratch() / "located"
    root.mkdir(exist_ok=True)
    (root / "format").write_bytes(data)
    found = layout.locate(root)
    assert layout.MIN_BLOCK_SIZE <= found.block_size <= layout.MAX_BLOCK_SIZE


def seeds() -> Iterable[bytes]:
    yield b"mstore 3 12345678-1234-5678-1234-567812345678 1048576\n"
