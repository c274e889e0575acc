"""Power loss during init, add and merge: whatever the disk kept, the store keeps its promises.

Each story is run once while its file operations are recorded (`crash_disk`).  Then every disk that
a power loss may leave is built, opened and checked.  Damaged versions of the library (`MUTANTS`)
must be caught by the same check, or it proves nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from crash_disk import Crash, Disk, Event, Recording, Tree
from small_models import BLOCK, files_of, small_model

from mstore import fs
from mstore.api import Store
from mstore.errors import MstoreError, NotFound
from mstore.ids import PlanId, SnapshotId
from mstore.store import refs
from mstore.store.transaction import Transaction

Contents = dict[str, bytes]


@dataclass
class Life:
    """One recorded run: what was there before, what was acknowledged and when, and all contents."""

    recording: Recording
    is_there: int | None = None
    before: dict[str, SnapshotId] = field(default_factory=dict)
    acknowledged: list[tuple[int, str, SnapshotId]] = field(default_factory=list)
    plans: list[tuple[int, PlanId]] = field(default_factory=list)
    contents: dict[SnapshotId, Contents] = field(default_factory=dict)

    @property
    def now(self) -> int:
        return len(self.recording.events)

    def acknowledge(self, name: str, snapshot: SnapshotId, contents: Contents) -> None:
        """A call has returned: from now on `name` is `snapshot`, and holds `contents`."""
        self.acknowledged.append((self.now, name, snapshot))
        self.contents[snapshot] = contents

    def promised(self, after: int) -> dict[str, SnapshotId]:
        """What each name was known to be when `after` operations had been done."""
        told = [(name, id) for number, name, id in self.acknowledged if number <= after]
        return self.before | dict(told)

    def in_flight(self, after: int) -> dict[str, SnapshotId]:
        """What the call that was running then may have made of its name."""
        for number, name, id in self.acknowledged:
            if number > after:
                return {name: id}
        return {}


# -- stories -----------------------------------------------------------------------------------


def first_steps(sources: Path, disk: Path) -> Life:
    """init, and the first add."""
    life = Life(Recording(disk))
    with fs.observed(life.recording.observe):
        store = Store.init(disk / "store", block_size=BLOCK)
        life.is_there = life.now
        report = store.add(sources / "base", name="base", threads=1)
    life.acknowledge("base", report.snapshot, files_of(sources / "base"))
    store.close()
    return life


def moving_add(sources: Path, disk: Path) -> Life:
    """An add with a base under a name that is there already, and the same again under another."""
    with Store.init(disk / "store", block_size=BLOCK) as store:
        base = store.add(sources / "base", name="base", threads=1).snapshot
        expert = store.add(sources / "old", name="team/expert", threads=1).snapshot
    life = Life(Recording(disk), is_there=0, before={"base": base, "team/expert": expert})
    life.contents = {base: files_of(sources / "base"), expert: files_of(sources / "old")}
    with Store.open(disk / "store") as store, fs.observed(life.recording.observe):
        for name in ("team/expert", "copy"):
            report = store.add(sources / "one", name=name, base="base", threads=1)
            life.acknowledge(name, report.snapshot, files_of(sources / "one"))
    return life


def plan_and_merge(sources: Path, disk: Path) -> Life:
    """A plan, and its merge."""
    with Store.init(disk / "store", block_size=BLOCK) as store:
        before = {
            name: store.add(
                sources / name, name=name, base=None if name == "base" else "base", threads=1
            ).snapshot
            for name in ("base", "one", "two")
        }
    life = Life(Recording(disk), is_there=0, before=before)
    life.contents = {id: files_of(sources / name) for name, id in before.items()}
    with Store.open(disk / "store") as store:
        with fs.observed(life.recording.observe):
            plan = store.plan(
                base="base",
                experts=["one", ("two", 0.5)],
                method="ties",
                parameters={"density": 0.4},
                threads=1,
            )
            life.plans.append((life.now, plan.plan))
            report = store.merge(plan, name="merged", threads=1)
        view = store.view("merged")
        merged = {path: b"".join(view.stream(path)) for path in view.files}
        life.acknowledge("merged", report.snapshot, merged)
    return life


STORIES = {story.__name__: story for story in (first_steps, moving_add, plan_and_merge)}


# -- the check ---------------------------------------------------------------------------------


class Inspector:
    """Builds crashed disks and says what is wrong with them."""

    def __init__(self, life: Life, extra: Path, scratch: Path) -> None:
        self._life = life
        self._extra = extra
        self._scratch = scratch
        self.states = 0

    def violations(self) -> Iterator[str]:
        """Everything that is wrong after any crash; each different disk is looked at once."""
        seen = set()
        for crash in self._life.recording.crashes():
            key = (crash.digest(), *self._life.promised(crash.after).values())
            if key in seen:
                continue
            seen.add(key)
            self.states += 1
            root = self._scratch / f"disk{self.states}"
            crash.build(root)
            for what in self._inspect(root / "store", crash.after):
                yield f"after {crash.after} operations, {self._last(crash)}: {what}"
            shutil.rmtree(root)

    def _last(self, crash: Crash) -> str:
        events = self._life.recording.events[: crash.after]
        return f"{events[-1].kind} {events[-1].path}" if events else "nothing"

    def _inspect(self, root: Path, after: int) -> Iterator[str]:
        try:
            try:
                store = Store.open(root)
            except NotFound:
                if self._life.is_there is not None and after >= self._life.is_there:
                    raise
                store = Store.init(root, block_size=BLOCK)
            with store:
                yield from self._promises(store, after)
                yield from self._next_write(store)
        except MstoreError as error:
            yield f"{type(error).__name__}: {error}"

    def _promises(self, store: Store, after: int) -> Iterator[str]:
        life = self._life
        found = {ref.name: ref.snapshot for ref in store.refs()}
        promised, in_flight = life.promised(after), life.in_flight(after)
        for name in promised.keys() | in_flight.keys() | found.keys():
            allowed = {promised.get(name), in_flight.get(name, promised.get(name))}
            if found.get(name) not in allowed:
                yield f"ref {name} is {found.get(name)!r} instead of one of {allowed}"
        for id in promised.values():
            if id not in store.snapshot_ids():
                yield f"the acknowledged snapshot {id!r} is lost"
        for id in store.snapshot_ids():
            view = store.view(id)
            contents = {path: b"".join(view.stream(path)) for path in view.files}
            if contents != life.contents[id]:
                yield f"snapshot {id!r} has other contents"
        for number, plan in life.plans:
            if number <= after:
                store.export_plan(str(plan))
        for problem in store.fsck(read_data=True).problems:
            yield f"fsck: {problem.kind} {problem.where}: {problem.what}"

    def _next_write(self, store: Store) -> Iterator[str]:
        report = store.add(self._extra, name="afterwards", threads=1)
        if store["afterwards"].tensor("x").tobytes() != b"xyz":
            yield "the next add is not what was added"
        if left := sorted(path.name for path in (store.path / "tmp").iterdir()):
            yield f"the next add left {left} in tmp/"
        if refs.read_mirror(store._catalog.layout) != store._catalog.refs():
            yield "the next add left the mirror behind"
        if found := store.fsck().problems:
            yield f"after the next add ({report.snapshot.short}), fsck: {found[0].what}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints for the stories."""
    root = tmp_path_factory.mktemp("sources")
    small_model(root / "base", "base")
    small_model(root / "old", "old")
    small_model(root / "one", "base", changed="one")
    small_model(root / "two", "two")
    write_safetensors(root / "extra" / "model.safetensors", [("x", "U8", (3,), b"xyz")])
    return root


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of syncs on a disk take their time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def inspector(story: str, sources: Path, scratch: Path) -> Inspector:
    """Live a story on a disk in `scratch`, and get ready to look at its crashes."""
    disk = scratch / "disk"
    disk.mkdir()
    return Inspector(STORIES[story](sources, disk), sources / "extra", scratch)


@pytest.mark.parametrize(
    ("story", "at_least"), [("first_steps", 600), ("moving_add", 250), ("plan_and_merge", 250)]
)
def test_no_power_loss_breaks_a_promise(
    story: str, at_least: int, sources: Path, scratch: Path
) -> None:
    """Whatever a power loss leaves: what was acknowledged is whole, refs are true, work goes on."""
    looking = inspector(story, sources, scratch)
    assert list(looking.violations()) == []
    assert looking.states >= at_least


# -- damaged libraries -------------------------------------------------------------------------


def _without_syncs(patch: pytest.MonkeyPatch, files: Callable[[Path], bool]) -> None:
    sync = fs.NewFile.sync
    patch.setattr(fs.NewFile, "sync", lambda self: None if files(self.path) else sync(self))


def _without_directory_syncs(patch: pytest.MonkeyPatch, skip: Callable[[Path], bool]) -> None:
    sync = fs.sync_directory
    patch.setattr(fs, "sync_directory", lambda path: None if skip(path) else sync(path))


def packs_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Packs are renamed into place without an fsync."""
    _without_syncs(patch, lambda path: path.suffix == ".pack")


def texts_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Format file and mirror are renamed into place without an fsync."""
    _without_syncs(patch, lambda path: path.parent.name == "tmp")


def no_directory_synced(patch: pytest.MonkeyPatch) -> None:
    """No directory is ever synced."""
    _without_directory_syncs(patch, lambda path: True)


def pack_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A pack's name is not synced before the index tells of it."""
    _without_directory_syncs(patch, lambda path: path.parent.name == "packs")


def packs_root_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The name of a new directory of packs is not synced before the index tells of it."""
    _without_directory_syncs(patch, lambda path: path.name == "packs")


def index_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The name of the index's file is not synced when it is made."""
    _without_directory_syncs(patch, lambda path: path.name == "index")


def store_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The store's directories are not synced before its format file says that they are there."""
    _without_directory_syncs(patch, lambda path: path.name == "store")


def index_before_packs(patch: pytest.MonkeyPatch) -> None:
    """The index tells of packs that get their names only then."""
    publish, commit = Transaction._publish_packs, Transaction.commit

    def reversed_commit(self: Transaction, **what: Any) -> None:
        commit(self, **what)
        publish(self)

    patch.setattr(Transaction, "_publish_packs", lambda self: None)
    patch.setattr(Transaction, "commit", reversed_commit)


def index_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Index commits are acknowledged before they are on the disk (LMDB's nosync)."""
    announce = fs._announce

    def forgetful(kind: str, path: Path | str, target: Path | str = "") -> None:
        if kind != "committed":
            announce(kind, path, target)

    patch.setattr(fs, "_announce", forgetful)


def nothing_swept(patch: pytest.MonkeyPatch) -> None:
    """Nobody removes what dead writers left in tmp/."""
    patch.setattr("mstore.store.leases.sweep", lambda layout, index: None)


MUTANTS = [
    ("first_steps", packs_not_synced),
    ("moving_add", packs_not_synced),
    ("plan_and_merge", packs_not_synced),
    ("first_steps", texts_not_synced),
    ("moving_add", texts_not_synced),
    ("first_steps", no_directory_synced),
    ("moving_add", no_directory_synced),
    ("plan_and_merge", no_directory_synced),
    ("moving_add", pack_directory_not_synced),
    ("plan_and_merge", pack_directory_not_synced),
    ("moving_add", packs_root_not_synced),
    ("first_steps", index_directory_not_synced),
    ("first_steps", store_directory_not_synced),
    ("moving_add", index_before_packs),
    ("plan_and_merge", index_before_packs),
    ("moving_add", index_not_synced),
    ("plan_and_merge", nothing_swept),
]


@pytest.mark.parametrize(("story", "mutant"), MUTANTS)
def test_a_damaged_library_is_caught(
    story: str,
    mutant: Callable[[pytest.MonkeyPatch], None],
    sources: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each sync and each step's place in the commit order is needed: without it promises break."""
    mutant(monkeypatch)
    assert next(inspector(story, sources, scratch).violations(), None) is not None


# -- the model ---------------------------------------------------------------------------------


def left_by(*steps: Event) -> list[Tree]:
    """The different trees that a power loss after these operations on an empty disk may leave."""
    disk = Disk.empty()
    for step in steps:
        disk.apply(step)
    found = {Crash(0, tree).digest(): tree for tree in disk.states()}
    return list(found.values())


def test_unsynced_data_may_be_lost_in_any_way() -> None:
    """A file with a lasting name and no fsync may be empty, whole, cut, zero, or whole pages."""
    data = b"".join(bytes([page]) * 4096 for page in (1, 2, 3))
    trees = left_by(Event("create", "f"), Event("syncdir", "."), Event("write", "f", data=data))
    zero = bytes(4096)
    assert sorted(tree["f"] or b"" for tree in trees) == sorted(
        [
            b"",
            data,
            data[:6144],
            zero * 3,
            zero + data[4096:8192] + zero,
            zero * 2 + data[8192:],
        ]
    )


def test_synced_data_without_a_synced_name() -> None:
    """A synced file whose directory was not synced is whole or not there."""
    trees = left_by(Event("create", "f"), Event("write", "f", data=b"data"), Event("fsync", "f"))
    assert trees == [{}, {"f": b"data"}]


def test_what_is_synced_stays() -> None:
    """After fsync, rename and directory sync there is one outcome."""
    written = [Event("create", "t"), Event("write", "t", data=b"data"), Event("fsync", "t")]
    trees = left_by(*written, Event("rename", "t", target="f"), Event("syncdir", "."))
    assert trees == [{"f": b"data"}]


def test_a_rename_is_lost_in_parts() -> None:
    """Before the directory sync a renamed file has either name, both, or none."""
    written = [
        Event("create", "t"),
        Event("write", "t", data=b"data"),
        Event("fsync", "t"),
        Event("syncdir", "."),
    ]
    trees = left_by(*written, Event("rename", "t", target="f"))
    whole = b"data"
    assert {tuple(sorted(tree)) for tree in trees} == {("t",), ("f",), ("f", "t"), ()}
    assert all(contents == whole for tree in trees for contents in tree.values())


def test_a_lost_directory_takes_its_files_along() -> None:
    """A synced name in a directory whose own name was not synced may be gone with it."""
    trees = left_by(Event("mkdir", "d"), Event("create", "d/f"), Event("syncdir", "d"))
    assert trees == [{}, {"d": None, "d/f": b""}]


def test_removals_may_come_back() -> None:
    """Unlinked and recursively removed names are there again, in any combination."""
    made = [
        Event("mkdir", "d"),
        Event("create", "d/f"),
        Event("syncdir", "d"),
        Event("syncdir", "."),
    ]
    trees = left_by(*made, Event("rmtree", "d"))
    assert {tuple(tree) for tree in trees} == {(), ("d",), ("d", "d/f")}


def test_an_index_commit_is_durable_in_one_step() -> None:
    """A committed database survives whole as soon as its name does."""
    trees = left_by(
        Event("mkdir", "i"),
        Event("syncdir", "."),
        Event("commit", "i"),
        Event("committed", "i", data=b"db"),
    )
    assert trees == [{"i": None}, {"i": None, "i/data.mdb": b"db"}]
