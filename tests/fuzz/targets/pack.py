"""A pack: header and footer, as reindexing and repair read them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from blake3 import blake3
from mutation import Form

from mstore.blocks.codecs import Codec
from mstore.blocks.packs import Kind, PackWriter, read_footer
from mstore.terms.errors import MstoreError
from mstore.terms.ids import BlockId
from targets import samples

FORM = Form.BYTES
TAIL = 64


def target(data: bytes) -> None:
    """Read as it is, and once more with the hash that its table should have."""
    with suppress(MstoreError):
        _read(data)
    _read(_with_its_hash(data))


def _read(data: bytes) -> None:
    path = samples.scratch() / "input.pack"
    path.write_bytes(data)
    entries = read_footer(path).entries
    for entry in entries:
        assert entry.offset + entry.stored_length <= len(data)


def _with_its_hash(data: bytes) -> bytes:
    tail = bytearray(data[-TAIL:].rjust(TAIL, b"\0"))
    offset, length = (int.from_bytes(tail[n : n + 8], "little") for n in (0, 8))
    tail[16:48] = blake3(data[offset : offset + length]).digest()
    return data[:-TAIL] + bytes(tail)


def seeds() -> Iterable[bytes]:
    path = samples.scratch() / "seed.pack"
    path.unlink(missing_ok=True)
    writer = PackWriter(path)
    block = b"block" * 100
    writer.append_raw(BlockId.of(block), block, 1, "f", 0)
    for record in (*samples.TENSORS[:1], *samples.SNAPSHOTS):
        encoded = record.encode()
        writer.append_small(record.id(), Kind(record.kind), Codec.RAW, 1, encoded, len(encoded))
    sealed = writer.seal()
    data = sealed.path.read_bytes()
    # A run of zeros that is mutated teaches nothing: the nonce apart, seeds stay the same.
    yield data[:32] + bytes(32) + data[64:]
    os.unlink(path)
