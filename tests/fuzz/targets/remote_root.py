"""The root of a remote, which a stranger may have written."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from mutation import Form

from mstore.remotes.layout import VERSION, ListId, Named, RemoteRoot, place, read_root
from mstore.terms.ids import ID_BYTES

FORM = Form.JSON


def target(data: bytes) -> None:
    root = read_root(data, "input")
    for kind in ("refs", "packs"):
        lists = root.of(kind)
        assert 0 <= place(lists, bytes(ID_BYTES)) <= max(0, len(lists) - 1)
    assert read_root(root.encode(), "input") == root


def seeds() -> Iterable[bytes]:
    made = RemoteRoot(VERSION, uuid.UUID(int=1), 65536, 3, "ab" * 16, ())
    lists = [
        Named(kind, str(ListId.of(first.encode())), first, 7, 900, 2)
        for kind, first in (("refs", "61"), ("packs", "00" * 32), ("packs", "ff" * 32))
    ]
    yield made.encode()
    yield RemoteRoot(VERSION, made.uuid, 65536, 3, made.nonce, tuple(lists)).encode()
