"""The plan record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import Plan
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Plan, data, "input")
    others = record.experts + record.companions
    assert record.inputs[1:] == others
    assert len(record.weights) == len(record.experts)
    assert all(len(tensor.states) == len(others) for tensor in record.tensors)
    assert all(record.operation_of(tensor) in record.operations for tensor in record.tensors)
    record.base_id()


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.PLANS]
