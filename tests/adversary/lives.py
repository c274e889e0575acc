"""A store with a history, and what of it was acknowledged: for tests that lie to it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import MstoreError
from mstore.terms.ids import SnapshotId

Contents = dict[str, bytes]


@dataclass
class Promises:
    """What calls have returned: where each ref is, and the bytes of each added snapshot."""

    refs: dict[str, SnapshotId] = field(default_factory=dict)
    contents: dict[SnapshotId, Contents] = field(default_factory=dict)

    def broken(self, root: Path) -> Iterator[str]:
        """What of it the store at `root` does not keep; no snapshot may need its old name."""
        with Store.open(root) as store:
            named = {ref.snapshot for ref in store.refs()}
            for name, id in self.refs.items():
                reached = {one.snapshot for ref in store.refs() for one in store.log(ref.name)}
                if id not in named | reached:
                    yield f"{name}: no ref leads to {id.short}"
            yield from self._spoiled(store, set(self.refs.values()))

    def lost(self, root: Path) -> Iterator[str]:
        """Every snapshot that was acknowledged under a name that stands, and is not there whole."""
        with Store.open(root) as store:
            yield from self._spoiled(store, self.contents)

    def _spoiled(self, store: Store, ids: Iterable[SnapshotId]) -> Iterator[str]:
        for id in sorted(ids):
            try:
                view = store.view(str(id))
                found = {path: b"".join(view.stream(path)) for path in view.files}
            except MstoreError as error:
                yield f"snapshot {id.short}: {error}"
                continue
            if found != self.contents[id]:
                yield f"snapshot {id.short}: other bytes"

    def require_kept(self, root: Path) -> None:
        """All of it is there, and a garbage collection takes nothing of it."""
        assert list(self.broken(root)) == []
        with Store.open(root) as store:
            assert store.fsck(read_data=True).problems == ()
            store.gc(reflog_days=0)
        assert list(self.broken(root)) == []


@dataclass
class Life:
    """A store, the models that are added to it, and what was promised."""

    root: Path
    sources: Path
    promises: Promises = field(default_factory=Promises)
    count: int = 0

    @classmethod
    def begin(cls, directory: Path, *, codec: str = "auto") -> Life:
        """An empty store below `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        Store.init(directory / "store", block_size=BLOCK, codec=codec).close()
        return cls(directory / "store", directory / "sources")

    def add(self, name: str, seed: str = "", changed: str = "") -> SnapshotId:
        """Add a model of its own under this name."""
        self.count += 1
        path = small_model(
            self.sources / str(self.count), seed or f"s{self.count}", changed=changed
        )
        with Store.open(self.root) as store:
            id = store.add(path, name=name, threads=1).snapshot
        self.promises.refs[name] = id
        self.promises.contents[id] = files_of(path)
        return id

    def remove(self, name: str) -> None:
        """Remove a ref: nothing is promised of it any more."""
        with Store.open(self.root) as store:
            store.remove(name)
        id = self.promises.refs.pop(name)
        if id not in self.promises.refs.values():
            del self.promises.contents[id]

    def merge(self, name: str, base: str, experts: list[str], weight: float) -> SnapshotId:
        """Merge experts into a base, in equal parts."""
        with Store.open(self.root) as store:
            plan = store.plan(
                MergeRequest(
                    base=base,
                    experts=[(expert, weight) for expert in experts],
                    method="task_arithmetic",
                ),
                threads=1,
            )
            id = store.merge(plan, name=name, threads=1).snapshot
            view = store.view(name)
            files = {path: b"".join(view.stream(path)) for path in view.files}
        self.promises.refs[name] = id
        self.promises.contents[id] = files
        return id

    def tag(self, name: str, revision: str) -> None:
        """Give a snapshot another name."""
        with Store.open(self.root) as store:
            self.promises.refs[name] = store.tag(name, revision).snapshot


def attempt(root: Path, call: str, extra: Path) -> MstoreError | None:
    """Do one thing that changes a store; the error that it ended with."""
    try:
        with Store.open(root) as store:
            _do(store, call, extra)
    except MstoreError as error:
        return error
    return None


def _do(store: Store, call: str, extra: Path) -> None:
    match call:
        case "add":
            store.add(extra, name="extra", threads=1)
        case "tag":
            store.tag("extra-tag", store.refs()[0].name)
        case "rm":
            store.remove(store.refs()[0].name)
        case "gc":
            store.gc(reflog_days=0, dead_share=0.0)
        case "prune":
            store.prune(keep_last=1, unnamed_inputs=True)
        case "repair":
            store.repair(read_data=True)
        case _:
            raise AssertionError(call)


def packs(root: Path) -> set[str]:
    """The packs that are there, put aside or not."""
    with suppress(FileNotFoundError):
        return {path.stem for path in root.rglob("*.pack")}
    return set()
