"""A store's own settings."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from mutation import Form

from mstore.store.config import KEYS, Config
from mstore.store.layout import Layout
from targets.samples import scratch

FORM = Form.TEXT


def target(data: bytes) -> None:
    layout = Layout(scratch(), uuid.UUID(int=1), 65536)
    layout.config.write_bytes(data)
    assert tuple(Config.load(layout).values()) == KEYS


def seeds() -> Iterable[bytes]:
    yield b'codec = "auto"\nreflog_days = 30\n'
    yield b'# kept\ncodec = "dense"\n'
