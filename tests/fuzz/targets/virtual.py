"""The virtual tensor record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.tensor import VirtualTensor
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(VirtualTensor, data, "input")
    record.check("input")
    assert record.blocks(65536) * 65536 >= record.nbytes


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.VIRTUALS]
