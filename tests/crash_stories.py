"""Lives of a store, recorded: what was done to the disk, what was promised and when.

A story prepares a store, records some calls on it, and tells what each left behind.  Nothing here
judges: `crash_inspector` holds a disk that lost power against what its life had promised by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from crash_disk import Recording
from proof_models import model_files, write_files
from small_models import BLOCK, files_of

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.terms.ids import PlanId, SnapshotId

Contents = dict[str, bytes]


@dataclass
class Life:
    """One recorded run: what was there before, what was acknowledged and when, and all contents.

    `goes` names the snapshots that may be gone, from that operation on; `pruned` those of them
    whose record stays.  `hurt` are damaged from the start until operation `healed`.
    """

    recording: Recording
    is_there: int | None = None
    before: dict[str, SnapshotId] = field(default_factory=dict)
    acknowledged: list[tuple[int, str, SnapshotId | None]] = field(default_factory=list)
    plans: list[tuple[int, PlanId]] = field(default_factory=list)
    signed: list[tuple[int, SnapshotId]] = field(default_factory=list)
    notes: list[tuple[int, SnapshotId, dict[str, object]]] = field(default_factory=list)
    pins: list[tuple[int, SnapshotId, bool]] = field(default_factory=list)
    contents: dict[SnapshotId, Contents] = field(default_factory=dict)
    goes: dict[SnapshotId, int] = field(default_factory=dict)
    pruned: set[SnapshotId] = field(default_factory=set)
    hurt: set[SnapshotId] = field(default_factory=set)
    healed: int = 0

    @property
    def now(self) -> int:
        return len(self.recording.events)

    def acknowledge(
        self, name: str, snapshot: SnapshotId | None, contents: Contents | None = None
    ) -> None:
        """A call has returned: from now on `name` is `snapshot`, and holds `contents`."""
        self.acknowledged.append((self.now, name, snapshot))
        if snapshot is not None and contents is not None:
            self.contents[snapshot] = contents

    def promised(self, after: int) -> dict[str, SnapshotId]:
        """What each name was known to be when `after` operations had been done."""
        told = {name: id for number, name, id in self.acknowledged if number <= after}
        return {name: id for name, id in (self.before | told).items() if id is not None}

    def in_flight(self, after: int) -> dict[str, SnapshotId | None]:
        """What the call that was running then may have made of its name."""
        for number, name, id in self.acknowledged:
            if number > after:
                return {name: id}
        return {}

    def stage(self, after: int) -> tuple[object, ...]:
        """Equal where the same is promised."""
        told = (*self.plans, *self.signed, *self.notes, *self.pins, (self.healed, None))
        return (
            *sorted(self.promised(after).items()),
            *sorted(self.kept(after)),
            sum(one[0] <= after for one in told),
        )

    def kept(self, after: int) -> set[SnapshotId]:
        """The snapshots that must be there, whole."""
        known = set(self.before.values()) | {
            id for number, _, id in self.acknowledged if number <= after and id is not None
        }
        gone = {id for id, number in self.goes.items() if number <= after}
        return known - gone


def _contents(store: Store, revision: str) -> Contents:
    view = store.view(revision)
    return {path: b"".join(view.stream(path)) for path in view.files}


# -- adding and merging ------------------------------------------------------------------------


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
                MergeRequest(
                    base="base",
                    experts=["one", ("two", 0.5)],
                    method="ties",
                    parameters={"density": 0.4},
                ),
                threads=1,
            )
            life.plans.append((life.now, plan.plan))
            report = store.merge(plan, name="merged", threads=1)
        life.acknowledge("merged", report.snapshot, _contents(store, "merged"))
    return life


def _dense_family(disk: Path, *tuned: int, beside: bytes = b"") -> tuple[Path, Life]:
    """A dense store with a base and fine-tunes `t1`, ... as deltas of it; their sources.

    `beside` is one more file of the base.
    """
    sources = disk.parent / "dense"
    with Store.init(disk / "store", block_size=BLOCK, codec="dense") as store:
        store.configure("reflog_days", 0)
        before, contents = {}, {}
        for number in (0, *tuned):
            files = model_files(7, number)
            name = f"t{number}" if number else "base"
            if beside and not number:
                files["beside"] = beside
            source = write_files(sources / name, files)
            base = "base" if number else None
            before[name] = store.add(source, name=name, base=base, threads=1).snapshot
            contents[before[name]] = files
    life = Life(Recording(disk), is_there=0, before=before, contents=contents)
    return sources, life


def dense_merge(sources: Path, disk: Path) -> Life:
    """An add and a merge whose blocks are stored as differences."""
    dense, life = _dense_family(disk, 1)
    files = model_files(7, 2)
    write_files(dense / "t2", files)
    with Store.open(disk / "store") as store:
        with fs.observed(life.recording.observe):
            added = store.add(dense / "t2", name="t2", base="base", threads=1)
            life.acknowledge("t2", added.snapshot, files)
            plan = store.plan(
                MergeRequest(base="base", experts=["t1", "t2"], method="linear", skip=["i"]),
                threads=1,
            )
            life.plans.append((life.now, plan.plan))
            report = store.merge(plan, name="merged", threads=1)
        life.acknowledge("merged", report.snapshot, _contents(store, "merged"))
    return life


def later_merge(sources: Path, disk: Path) -> Life:
    """A merge that is published as its plan, and computed afterwards."""
    _, life = _dense_family(disk, 1)
    with Store.open(disk / "store") as store:
        with fs.observed(life.recording.observe):
            plan = store.plan(
                MergeRequest(base="base", experts=["t1"], method="task_arithmetic", skip=["i"]),
                threads=1,
            )
            virtual = store.merge(plan, name="merged", virtual=True, threads=1)
            life.acknowledge("merged", virtual.snapshot)
            real = store.materialize("merged", threads=1)
        contents = _contents(store, "merged")
        life.acknowledge("merged", real.snapshot, contents)
        life.contents[virtual.snapshot] = contents
    return life


def trying(sources: Path, disk: Path) -> Life:
    """A candidate is made, moved to and dropped; gc drops another, when its maker is gone."""
    _, life = _dense_family(disk, 1)
    name = "candidates/run/merged"

    def merge(store: Store, weight: float) -> SnapshotId:
        experts = [("t1", weight)]
        request = MergeRequest(base="base", experts=experts, method="task_arithmetic", skip=["i"])
        plan = store.plan(request, threads=1)
        made = store.merge(plan, name="merged", candidate="run", threads=1).snapshot
        life.acknowledge(name, made)
        return made

    with Store.open(disk / "store") as store:
        store.configure("reflog_days", 30)
        life.recording = Recording(disk)
        with fs.observed(life.recording.observe):
            first = merge(store, 1.0)
            store.move("merged", None, name)
            life.acknowledge("merged", first)
            store.remove(name)
            life.acknowledge(name, None)
            second = merge(store, 0.5)
        life.contents |= {id: _contents(store, str(id)) for id in (first, second)}
    with Store.open(disk / "store") as store, fs.observed(life.recording.observe):
        life.goes[second] = life.now
        store.gc(reflog_days=0)
        life.acknowledge(name, None)
    return life


def casting(sources: Path, disk: Path) -> Life:
    """A model is stored again in another element type, under its own name."""
    with Store.init(disk / "store", block_size=BLOCK) as store:
        base = store.add(sources / "base", name="base", threads=1).snapshot
    life = Life(Recording(disk), is_there=0, before={"base": base})
    life.contents = {base: files_of(sources / "base")}
    with Store.open(disk / "store") as store:
        with fs.observed(life.recording.observe):
            report = store.cast("base", dtype="float32", name="base", threads=1)
        life.acknowledge("base", report.snapshot, _contents(store, "base"))
    return life


def signing(sources: Path, disk: Path) -> Life:
    """A signature."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from mstore.snapshots.signing import SigningKey

    _, life = _dense_family(disk, 1)
    with Store.open(disk / "store") as store, fs.observed(life.recording.observe):
        report = store.sign("t1", SigningKey(Ed25519PrivateKey.generate()))
        life.signed.append((life.now, report.snapshot))
    return life


def noting(sources: Path, disk: Path) -> Life:
    """Two notes, and the removal of one."""
    _, life = _dense_family(disk, 1)
    with Store.open(disk / "store") as store, fs.observed(life.recording.observe):
        first, _ = store.note("t1", {"mmlu": 0.62, "seen": True})
        life.notes.append((life.now, first.snapshot, {"mmlu": 0.62, "seen": True}))
        store.remove_notes("t1", [first.note])
        life.notes.append((life.now, first.snapshot, {"seen": True}))
    return life


def pinning(sources: Path, disk: Path) -> Life:
    """A fine-tune whose blocks are differences is pinned; another one is unpinned."""
    _, life = _dense_family(disk, 1, 2)
    with Store.open(disk / "store") as store:
        store.pin("t2", raw=True, threads=1)
        life.recording = Recording(disk)
        with fs.observed(life.recording.observe):
            store.pin("t1", raw=True, threads=1)
            life.pins.append((life.now, life.before["t1"], True))
            store.unpin("t2", threads=1)
            life.pins.append((life.now, life.before["t2"], False))
    return life


# -- removing ----------------------------------------------------------------------------------


def collecting(sources: Path, disk: Path) -> Life:
    """A ref goes, another goes back, and gc takes what nobody names any more; then an add."""
    dense, life = _dense_family(disk, 1, 2)
    third = write_files(dense / "t3", model_files(8))
    with Store.open(disk / "store") as store:
        # A pack of two snapshots, one of which stays.
        old = store.add(third, name="team/old", threads=1).snapshot
        life.before["team/old"], life.contents[old] = old, model_files(8)
        # This process knows the packs by number that gc takes.
        store.log()
        life.recording = Recording(disk)
        with fs.observed(life.recording.observe):
            life.goes[life.before["t1"]] = life.now
            store.remove("t1")
            life.acknowledge("t1", None)
            life.goes[old] = life.now
            store.reset("team/old", "t2")
            life.acknowledge("team/old", life.before["t2"])
            store.gc()
            added = store.add(dense / "t1", name="again", base="base", threads=1)
        life.acknowledge("again", added.snapshot, model_files(7, 1))
        # By whoever has seen the packs that were there before.
        if _contents(store, "again") != model_files(7, 1):
            raise AssertionError("what was added after gc is another to the process that added it")
    return life


def pruning(sources: Path, disk: Path) -> Life:
    """History goes while differences to it stay: gc moves the blocks that live ones rest on."""
    _, life = _dense_family(disk, 1, beside=random.Random(1).randbytes(300_000))
    with Store.open(disk / "store") as store:
        # The base is named no more, and remains in the lineage of t1, and under its deltas.
        store.remove("base")
        base = life.before.pop("base")
        life.recording = Recording(disk)
        with fs.observed(life.recording.observe):
            life.goes[base] = life.now
            life.pruned.add(base)
            store.prune(keep_last=1, unnamed_inputs=True)
            store.gc()
    return life


# -- mending -----------------------------------------------------------------------------------


def reindexing(sources: Path, disk: Path) -> Life:
    """The index is made anew."""
    _, life = _dense_family(disk, 1)
    with fs.observed(life.recording.observe):
        Store.reindex(disk / "store")
    return life


def repairing(sources: Path, disk: Path) -> Life:
    """A payload is broken, and a good copy comes from the checkpoint it was added from."""
    dense, life = _dense_family(disk, 1)
    with Store.open(disk / "store") as store:
        catalog = store._catalog
        with catalog.index.env.read() as transaction:
            location = max(
                (place for _, place in catalog.index.blocks(transaction)),
                key=lambda place: place.stored_length,
            )
        path = Path(catalog.packs.where(location.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(location.offset + location.stored_length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    path.chmod(0o444)
    life.recording = Recording(disk)
    life.hurt = set(life.contents)
    with Store.open(disk / "store") as store, fs.observed(life.recording.observe):
        store.repair(sources=[dense / "base", dense / "t1"], read_data=True, threads=1)
    life.healed = life.now
    return life


STORIES: dict[str, Callable[[Path, Path], Life]] = {
    story.__name__: story
    for story in (
        first_steps,
        moving_add,
        plan_and_merge,
        dense_merge,
        later_merge,
        trying,
        casting,
        signing,
        noting,
        pinning,
        collecting,
        pruning,
        reindexing,
        repairing,
    )
}
