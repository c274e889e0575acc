"""Stores that share a remote in a directory, for tests of what push, fetch and pull do.

`Place` makes stores of models from numbers (`proof_models`), so a test knows every byte without a
copy. `sound` is what must hold of a store at all times.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proof_models import BLOCK, Files, model_files, write_files

from mstore import MergeRequest
from mstore.api import Store
from mstore.remotes.layout import encode_list
from mstore.remotes.objects import RootStamp
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Changes, Remote, RemoteState
from mstore.terms.ids import SnapshotId

REMOTE = "origin"


class Place:
    """A directory with a remote, stores that know it, and models."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = path
        self.remote = path / "remote"
        self.url = self.remote.as_uri()
        self._opened = opened

    def store(self, name: str) -> Store:
        """A new store that knows the remote."""
        made = Store.init(self.path / name, block_size=BLOCK)
        self._opened.callback(made.close)
        made.add_remote(REMOTE, self.url)
        return made

    def open(self, name: str) -> Store:
        """A store of this place, opened once more."""
        found = Store.open(self.path / name)
        self._opened.callback(found.close)
        return found

    def clone(self, name: str) -> Store:
        """A store with all that the remote has."""
        Store.clone(self.url, self.path / name)
        return self.open(name)

    def model(self, seed: int, tuned: int = 0) -> Path:
        """A directory with a model."""
        path = self.path / f"model-{seed}-{tuned}"
        return path if path.exists() else write_files(path, model_files(seed, tuned))

    def add(self, store: Store, name: str, seed: int, tuned: int = 0, **options: Any) -> SnapshotId:
        """Add a model to a branch."""
        return store.add(self.model(seed, tuned), name=name, threads=1, **options).snapshot

    def author(self, experts: int) -> Store:
        """A store with `base` and its tunes `e1`, `e2` and so on, of seed 1."""
        made = self.store("origin")
        self.add(made, "base", 1)
        for number in range(1, experts + 1):
            self.add(made, f"e{number}", 1, number, base="base")
        return made

    def lazy(self, path: Path) -> Store:
        """A lazy store with all that the remote has."""
        made = Store.open(Store.clone(self.url, path, lazy=True).path)
        self._opened.callback(made.close)
        return made

    # -- the remote itself -----------------------------------------------------------------------

    def objects(self) -> SharedDirectory:
        """What is at the remote."""
        return SharedDirectory(self.remote)

    def looking(self) -> Remote:
        """The remote as a client without a store sees it."""
        made = Remote("looking", self.objects(), Path(tempfile.mkdtemp(dir=self.path)))
        made.make_directory()
        return made

    def state(self) -> RemoteState:
        """What the remote is now."""
        return self.looking().state()

    def change(self, kind: str, *rows: Any) -> None:
        """Put rows into the remote, as some other client would."""
        remote = self.looking()
        changes = Changes()
        for row in rows:
            changes.put(kind, row)
        remote.change(remote.state(), changes)

    def forge(self, kind: str, rows: list[Any], lies: dict[str, Any] | None = None) -> None:
        """Put a list with these rows, whatever they are, in the place of all lists of the kind."""
        got = self.objects().read_root()
        assert got is not None
        root, stamp = json.loads(got[0])["mstore-remote"], got[1]
        id, data = encode_list(kind, rows)
        made = root["generation"] + 1
        self.objects().put_bytes(f"lists/{made:016x}-{id}", data)
        first = rows[0].key.hex() if rows else ""
        one = {
            "kind": kind,
            "id": str(id),
            "first": first,
            "rows": len(rows),
            "size": len(data),
            "made": made,
        }
        root["lists"] = [old for old in root["lists"] if old["kind"] != kind] + [one | (lies or {})]
        self.put_root(root, stamp)

    def put_root(self, root: dict[str, Any], before: RootStamp) -> None:
        """Replace the root by one of these values."""
        root = root | {"generation": root["generation"] + 1, "nonce": "f" * 32}
        data = msgspec.json.encode({"mstore-remote": root})
        self.objects().swap_root(data, before)


@contextmanager
def placed() -> Iterator[Place]:
    """A place, which is removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="mstore-test-"))
    try:
        with ExitStack() as opened:
            yield Place(path, opened)
    finally:
        shutil.rmtree(path)


@pytest.fixture
def place() -> Iterator[Place]:
    """A directory with a remote, stores that know it, and models."""
    with placed() as made:
        yield made


def files(store: Store, revision: str | SnapshotId) -> Files:
    """All bytes of a snapshot, read through its blocks."""
    view = store.view(revision)
    return {path: b"".join(view.stream(path)) for path in view.files}


def refs(store: Store, *kinds: str) -> dict[str, SnapshotId]:
    """The refs of these kinds, or all."""
    found = store._catalog.refs().items()
    return {name: ref.snapshot_id() for name, ref in found if ref.kind in kinds or not kinds}


def sound(store: Store) -> None:
    """Nothing is missing or damaged, and no block is a difference to a difference."""
    problems = store.fsck(read_data=True, threads=1).problems
    assert not problems, problems


def merged(store: Store, name: str, base: str, *experts: str, virtual: bool = False) -> SnapshotId:
    """Merge branches by task arithmetic."""
    request = MergeRequest(
        base=base,
        experts=[(one, 0.5) for one in experts],
        method="task_arithmetic",
        skip=["i"],
    )
    plan = store.plan(request, allow_noop=True, threads=1)
    return store.merge(plan, name=name, virtual=virtual, threads=1).snapshot


@contextmanager
def before_swap(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[list[int]]:
    """Once, between what a push decides and its replacement of the root, do this."""
    calls: list[int] = []
    swap = SharedDirectory.swap_root

    def late(self: SharedDirectory, data: bytes, before: RootStamp | None) -> RootStamp:
        calls.append(len(calls))
        if len(calls) == 1:
            act()
        return swap(self, data, before)

    with monkeypatch.context() as patch:
        patch.setattr(SharedDirectory, "swap_root", late)
        yield calls
