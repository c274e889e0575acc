"""The plan record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.objects.canonical import decode
from mstore.objects.plan import Plan
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Plan, data, "input")
    assert all(len(tensor.states) == len(record.experts) for tensor in record.tensors)
    record.base_id()


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.PLANS]
