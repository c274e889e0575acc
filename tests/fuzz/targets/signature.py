"""The signature record, checked as `verify` does."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.objects.canonical import decode
from mstore.objects.signature import Signature
from mstore.signing import is_good
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Signature, data, "input")
    is_good(record)


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.SIGNATURES]
