"""The note record, checked as `note` and `verify` do."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.snapshots.signing import is_good
from mstore.store.objects.canonical import decode
from mstore.store.objects.note import SIGNATURE, Note, packed, states
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(Note, data, "input")
    assert packed(record.value) == record.data
    states({record.id(): record})
    if record.form == SIGNATURE:
        is_good(record)


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.NOTES]
