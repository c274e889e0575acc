"""The snapshot record."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.store.objects.canonical import decode
from mstore.store.objects.snapshot import SnapshotRecord
from targets import samples

FORM = Form.MESSAGEPACK


def target(data: bytes) -> None:
    record = decode(SnapshotRecord, data, "input")
    ids = (record.manifest_id(), record.plan_id(), record.coverage_id())
    assert all(len(one) == 32 for one in ids if one is not None)
    assert all(len(parent.snapshot_id()) == 32 for parent in record.parents)


def seeds() -> Iterable[bytes]:
    return [one.encode() for one in samples.SNAPSHOTS]
