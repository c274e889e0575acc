"""The coverage record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import Coverage, bit
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Coverage, data, "input")
    for tensor in record.tensors:
        last = min(tensor.blocks, 1 << 16)
        for number in range(last):
            bit(tensor.reused, number)


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.COVERAGES]
