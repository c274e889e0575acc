"""The text mirror of the refs, which a rebuilt index believes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from blake3 import blake3
from mutation import Form

from mstore.store import mirror, refs
from mstore.store.layout import Layout
from targets.samples import scratch

FORM = Form.TEXT


def target(data: bytes) -> None:
    layout = Layout(scratch(), uuid.UUID(int=1), 65536)
    layout.mirror.parent.mkdir(exist_ok=True)
    layout.mirror.write_bytes(data)
    for name, ref in mirror.read(layout).refs.items():
        refs.check_name(name)
        assert ref.kind in (refs.BRANCH, refs.TAG)
        ref.snapshot_id()


def seeds() -> Iterable[bytes]:
    lines = f"branch {'ab' * 32} llama/base\ntag {'cd' * 32} é\n".encode()
    for refs_told in (b"", lines):
        body = b"mstore refs 2\ngeneration 1\n" + refs_told
        yield body + f"blake3 {blake3(body).hexdigest()}\n".encode()
