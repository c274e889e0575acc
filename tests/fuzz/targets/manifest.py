"""The manifest record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.manifest import Manifest
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Manifest, data, "input")
    assert record.plain_bytes() == sum(part.nbytes for file in record.files for part in file.parts)
    assert all(record.file(file.path) is file for file in record.files[:9])


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.MANIFESTS]
