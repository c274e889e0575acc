"""Lists of a remote: rows are changed in the lists that have them, and the others stay."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from mstore.remotes import layout
from mstore.remotes.layout import Named, RemoteRoot, SnapshotRow
from mstore.remotes.objects import RootStamp
from mstore.remotes.state import RemoteState
from mstore.terms.errors import Corrupt
from mstore.terms.ids import SnapshotId

MOST = 8


class Lists:
    """Lists in memory, and the root that names them."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self.root = RemoteRoot(layout.VERSION, uuid.UUID(int=1), 65536, 0, "00", ())

    def state(self) -> RemoteState:
        return RemoteState(self.root, RootStamp("1"), self._read)

    def _read(self, named: Named) -> list[Any]:
        return layout.decode_list(named, self._data[named.name], named.name)

    def change(self, change: dict[bytes, SnapshotRow | None]) -> list[Named]:
        """Make a change; return the lists that are new."""
        new = []
        lists = []
        for named, data in self.state().changed("snapshots", change):
            lists.append(named)
            if data is not None:
                new.append(named)
                self._data[named.name] = data
        self.root = RemoteRoot(
            layout.VERSION, self.root.uuid, 65536, self.root.generation + 1, "00", tuple(lists)
        )
        # As others will read it.
        self.root = layout.read_root(self.root.encode(), "root")
        return new


def row(draw: random.Random) -> SnapshotRow:
    """A row whose key is one of a few."""
    return SnapshotRow(bytes([draw.randrange(60)]) * 32, draw.randbytes(32), draw.random() < 0.5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(8))
def test_changes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows are put and removed, the lists hold them in order, few enough in each."""
    monkeypatch.setattr(layout, "MOST_ROWS", MOST)
    draw = random.Random(seed)
    lists, wanted = Lists(), {}
    for _ in range(60):
        rows = [row(draw) for _ in range(draw.choice((1, 1, 3, 30)))]
        gone = draw.random() < 0.4
        change = {one.key: None if gone else one for one in rows}
        before = lists.root.lists
        new = lists.change(change)
        wanted |= change
        wanted = {key: one for key, one in wanted.items() if one is not None}
        state = lists.state()
        assert dict(state.rows("snapshots")) == wanted
        assert list(state.rows("snapshots")) == sorted(wanted)
        assert all(1 <= one.rows <= MOST for one in lists.root.lists)
        # A list without a changed key is the one that it was.
        for one in before:
            if not any(layout.place(before, key) == before.index(one) for key in change):
                assert one in lists.root.lists
                assert one not in new
        for key, one in wanted.items():
            assert state.snapshot(SnapshotId(key)) == one


def test_lists_that_overlap() -> None:
    """Two lists that are sound by themselves, and not beside each other, are refused."""
    lists = Lists()
    for keys in ((1, 5), (3, 7)):
        some = [SnapshotRow(bytes([key]) * 32, bytes(32), True) for key in keys]
        id, data = layout.encode_list("snapshots", some)
        named = Named("snapshots", str(id), some[0].key.hex(), 2, len(data), keys[0])
        lists._data[named.name] = data
        lists.root = RemoteRoot(
            layout.VERSION, uuid.UUID(int=1), 65536, 1, "00", (*lists.root.lists, named)
        )
    with pytest.raises(Corrupt, match="overlap"):
        lists.state().rows("snapshots")
