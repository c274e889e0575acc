"""The tensor record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.tensor import Tensor
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Tensor, data, "input")
    record.check(65536, "input")
    assert sum(record.block_length(n, 65536) for n in range(record.block_count())) == record.nbytes


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.TENSORS]
