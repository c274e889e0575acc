"""Garbage collection: what is reached is kept to the byte, what is not goes, and nothing else."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import pack_lines
import pytest
from checkpoints import write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.api.reports import GcReport
from mstore.snapshots.checkout import checkout
from mstore.store import leases, unnamed_packs
from mstore.store.models import Input
from mstore.store.objects.snapshot import PREVIOUS, Parent, SnapshotRecord
from mstore.store.transaction import Transaction
from mstore.terms.errors import Conflict, Corrupt, MstoreError, NotFound, StorageFailed
from mstore.terms.ids import PackId, SnapshotId
from mstore.upkeep.gc.collect import Collector, Limits
from mstore.upkeep.gc.survey import DEAD_SHARE, uses
from mstore.upkeep.reachability import Inventory, Reach, Roots

BLOCK = 1 << 16
WIDTH = 3 * BLOCK + 100


def model(seed: int, tuned: int = 0) -> bytes:
    """A tensor's bytes: `tuned` changes one block of the four a little, and leaves the others."""
    data = bytearray(random.Random(seed).randbytes(WIDTH // 4 * 4))
    if tuned:
        start = (tuned % 3) * BLOCK
        for at in range(start, start + BLOCK, 64):
            data[at] ^= tuned & 0xFF or 1
    return bytes(data)


def write(directory: Path, seed: int, tuned: int = 0, *, first: str = "a") -> Path:
    """A checkpoint of two tensors and a config."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    data = model(seed, tuned)
    write_safetensors(
        directory / "model.safetensors",
        [
            (first, "F32", (len(data) // 4,), data),
            ("b", "F32", (8,), random.Random(seed).randbytes(32)),
        ],
    )
    (directory / "config.json").write_text(f'{{"seed": {seed}}}')
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def contents(store: Store, snapshot: SnapshotId) -> dict[str, bytes]:
    view = store.view(snapshot)
    return {path: b"".join(map(bytes, view.stream(path))) for path in view.files}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store whose reflog keeps nothing."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        yield store


def sound(store: Store) -> None:
    """fsck finds nothing wrong, with every byte read."""
    report = store.fsck(read_data=True)
    assert not report.problems


def told(report: GcReport) -> tuple[object, ...]:
    """What a dry run and a run must agree on."""
    return (
        report.snapshots_dropped,
        report.blocks_dropped,
        report.records_dropped,
        report.plans_dropped,
        report.dropped_bytes,
        report.packs_removed,
        report.packs_rewritten,
        report.packs_joined,
        report.copied_bytes,
        report.freed_bytes,
        report.joined_bytes,
        report.dead_bytes,
        report.leftover_bytes,
        report.left,
    )


def changes(report: GcReport) -> tuple[object, ...]:
    return (
        report.snapshots_dropped,
        report.blocks_dropped,
        report.records_dropped,
        report.packs_removed,
        report.packs_rewritten,
    )


NOTHING: tuple[object, ...] = ((), 0, 0, (), ())


def on_disk(store: Store) -> list[str]:
    """Its files but the index, and the cache: a computed block is put there after it is read."""
    found = (p for p in store.path.rglob("*") if p.is_file() and "mdb" not in p.name)
    return sorted(str(p) for p in found if not p.is_relative_to(store.path / "cache"))


def test_a_removed_ref_gives_its_space_back(store: Store, tmp_path: Path) -> None:
    """What only a removed ref had is gone after gc; what others have too is as it was."""
    kept = store.add(write(tmp_path / "in", 1), name="kept").snapshot
    before = files(tmp_path / "in")
    gone = store.add(write(tmp_path / "in", 1, 5), name="gone").snapshot
    store.remove("gone")
    promised = store.gc(dry_run=True)
    assert promised.snapshots_dropped == (gone,)
    report = store.gc()
    assert told(report) == told(promised)
    assert contents(store, kept) == before
    assert store.snapshot_ids() == [kept]
    sound(store)
    assert changes(store.gc()) == NOTHING


def test_the_reflog_keeps_what_a_ref_was(tmp_path: Path) -> None:
    """Within its days a removed ref can be brought back after gc; without days it is gone, and the
    reflog says so."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        first = store.add(write(tmp_path / "in", 1), name="a").snapshot
        before = files(tmp_path / "in")
        store.remove("a")
        assert changes(store.gc()) == NOTHING
        assert store.reset("a", "a@{1}").snapshot == first
        assert contents(store, first) == before
        store.remove("a")
        assert not any(move.is_collected for move in store.reflog("a"))
        assert store.gc(reflog_days=0).snapshots_dropped == (first,)
        assert [move.is_collected for move in store.reflog("a")] == [False, True, False, True]
        with pytest.raises(NotFound, match="was collected"):
            store.reset("a", "a@{1}")
        sound(store)


def test_a_dry_run_changes_nothing(store: Store, tmp_path: Path) -> None:
    """A dry run writes no file, takes no lock file and no row."""
    store.add(write(tmp_path / "in", 1), name="a")
    store.remove("a")
    seen: list[fs.Operation] = []
    with fs.observed(seen.append):
        store.gc(dry_run=True)
    assert [one for one in seen if one.kind != "map"] == []


def test_pack_numbers_are_never_used_twice(store: Store, tmp_path: Path) -> None:
    """After everything was collected a new pack has a number that no pack had."""
    numbers: set[int] = set()
    for seed in range(3):
        store.add(write(tmp_path / "in", seed), name="a")
        index = store._catalog.index
        with index.env.read() as rows, rows.cursor(db=index.db("packs")) as cursor:
            found = {int.from_bytes(key, "big") for key, _ in cursor}
        assert found
        assert not found & numbers
        numbers |= found
        store.remove("a")
        store.gc()
        assert not list(store.path.glob("packs/*/*"))


def test_a_pin_keeps_a_snapshot(store: Store, tmp_path: Path) -> None:
    """What a live process holds stays; released, it goes."""
    snapshot = store.add(write(tmp_path / "in", 1), name="a").snapshot
    before = files(tmp_path / "in")
    store.remove("a")
    held = store.hold(snapshot)
    assert changes(store.gc()) == NOTHING
    assert contents(store, snapshot) == before
    held.release()
    assert store.gc().snapshots_dropped == (snapshot,)


def test_a_pin_of_a_dead_process_keeps_nothing(store: Store, tmp_path: Path) -> None:
    """The file of a hold whose process is gone is garbage."""
    snapshot = store.add(write(tmp_path / "in", 1), name="a").snapshot
    store.remove("a")
    (store.path / "tmp" / f"{'0' * 16}.{snapshot}.pin").touch()
    assert store.gc().snapshots_dropped == (snapshot,)
    assert list((store.path / "tmp").iterdir()) == []


def test_condemned_packs_wait_for_who_may_read_them(store: Store, tmp_path: Path) -> None:
    """While an operation from before lives its packs stay as files; a later writer removes them."""
    store.add(write(tmp_path / "in", 1), name="a")
    pack = next(store.path.glob("packs/*/*"))
    store.remove("a")
    catalog = store._catalog
    lease = leases.Lease(catalog.layout, catalog.index, "a long merge")
    report = store.gc()
    assert report.waiting_bytes == pack.stat().st_size
    assert len(report.waiting_for) == 1
    assert "a long merge" in report.waiting_for[0]
    assert pack.exists()
    assert store.fsck().garbage
    lease.release()
    later = leases.Lease(catalog.layout, catalog.index, "a later one")
    store.add(write(tmp_path / "in", 2), name="b")
    assert not pack.exists()
    assert unnamed_packs.listed(catalog.index) == []
    later.release()
    sound(store)


def test_a_pack_of_a_killed_writer_is_put_aside(store: Store, tmp_path: Path) -> None:
    """A pack in packs/ that no row names is put aside, and removed only where that is asked for.
    Without a line in the pack list it is unknown: gc does nothing."""
    stray = store.path / "packs" / "ab" / f"{'ab' * 32}.pack"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"x")
    with pytest.raises(Corrupt, match="no line in the pack list"):
        store.gc()
    assert stray.exists()
    pack_lines.give(store.path, stray.stem)
    report = store.gc()
    assert report.put_aside == (stray.stem,)
    assert report.packs_removed == ()
    assert not stray.exists()
    assert report.lost_found_bytes == 1
    assert [path.read_bytes() for path in store.path.glob("lost+found/*/*.pack")] == [b"x"]
    # What is found in the same run is not deleted with what lay there before.
    stray.write_bytes(b"xyz")
    promised = store.gc(empty_lost_found=True, dry_run=True)
    assert (promised.emptied_bytes, promised.put_aside) == (1, (stray.stem,))
    report = store.gc(empty_lost_found=True)
    assert (report.emptied_bytes, report.put_aside, report.lost_found_bytes) == (
        1,
        (stray.stem,),
        3,
    )
    assert [path.read_bytes() for path in store.path.glob("lost+found/*/*.pack")] == [b"xyz"]
    assert store.gc(empty_lost_found=True).lost_found_bytes == 0
    assert not store._catalog.layout.lost_found.exists()


class Meddler:
    """Does something once, just before the operation of gc that `at` picks."""

    def __init__(self, at: int, what: Callable[[], None]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._at = at
        self._what = what
        self._thread: threading.Thread | None = None

    def __call__(self, operation: fs.Operation) -> None:
        self.count += 1
        if self.count - 1 == self._at and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            # A writer waits for the lock if gc holds it; then it goes on when gc is done.
            self._thread.join(0.15)

    def _run(self) -> None:
        try:
            self._what()
        except BaseException as error:  # noqa: BLE001 -- looked at by the test
            self.error = error

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(600)
        assert not self._thread.is_alive()


@lru_cache(maxsize=1)
def stage(root: Path) -> tuple[dict[str, bytes], SnapshotId]:
    """The store with which all scenes of a test begin: what is in `a`, and a dead snapshot."""
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        store.add(write(root / "in", 1), name="base")
        store.add(write(root / "in", 2), name="a")
        held = files(root / "in")
        store.add(write(root / "in", 3, 1), name="b")
        dead = store.add(write(root / "in", 4), name="d").snapshot
        # Of the pack of `b`, a part stays: `c` shares two of its blocks.
        store.add(write(root / "in", 3, 2), name="c")
        store.remove("b", "d")
        # And one that was pruned, whose contents are there until gc comes.
        store.add(write(root / "in", 6), name="p")
        store.add(write(root / "in", 7), name="p")
        store.prune(["p"], keep_last=1)
    return held, dead


def scene(root: Path) -> tuple[Store, dict[str, bytes], SnapshotId]:
    """A store where gc has packs to rewrite and to remove: a copy of what the test made first."""
    held, dead = stage(root.parent / "stage")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(root.parent / "stage" / "store", root / "store")
    return Store.open(root / "store"), held, dead


def steps(root: Path) -> list[str]:
    """The kinds of the operations of gc."""
    store, _, _ = scene(root)
    seen: list[str] = []
    with store, fs.observed(lambda operation: seen.append(operation.kind)):
        store.gc()
    return seen


def meddle(what: str, store: Store, root: Path, held: dict[str, bytes], dead: SnapshotId) -> None:
    """Something that somebody else does while gc is at work."""
    match what:
        case "add":
            store.add(root / "again", name="again")
        case "tag":
            store.tag("saved", str(dead))
        case "reset":
            store.reset("c", str(dead))
        case "delta":
            store.add(write(root / "tuned", 6, 5), name="tuned", base="p~1", codec="dense")
        case "come and go":
            store.add(root / "again", name="again")
            store.remove("again")
        case "read":
            assert contents(store, store["a"].id) == held


MEDDLING = ["add", "tag", "reset", "delta", "come and go", "read"]


@pytest.mark.rest
@pytest.mark.parametrize("what", MEDDLING)
def test_anything_may_happen_at_steps_that_decide(tmp_path: Path, what: str) -> None:
    """Beside gc, just before each of its commits, renames and removals: an add that needs dead
    blocks, one whose blocks are differences to dead ones, a tag on a dead snapshot, a reset, a
    snapshot that comes and goes, and reads either succeed and stay whole, or are refused; never
    anything between."""
    kinds = steps(tmp_path / "count")
    decide = [
        at
        for at, kind in enumerate(kinds)
        if kind in ("commit", "rename", "unlink") and kinds[at - 1] != kind
    ]
    assert len(decide) >= 6
    for at in decide:
        meddle_at(tmp_path / "store", what, at)


@pytest.mark.slow
@pytest.mark.parametrize("what", MEDDLING)
def test_anything_may_happen_at_any_step(tmp_path: Path, what: str) -> None:
    """The same at each of its steps."""
    for at in range(len(steps(tmp_path / "count"))):
        meddle_at(tmp_path / "store", what, at)


def meddle_at(root: Path, what: str, at: int) -> None:
    """One of the steps."""
    store, held, dead = scene(root)
    again = files(write(root / "again", 4))
    other = Store.open(store.path)
    meddler = Meddler(at, lambda: meddle(what, other, root, held, dead))
    with store, other:
        with fs.observed(meddler):
            store.gc()
        if meddler.count <= at:
            # Ids of packs are random: two in one directory make gc a step or two shorter.
            assert meddler.count >= at - 3
            return
        meddler.join()
        refused = isinstance(meddler.error, Conflict | NotFound)
        assert meddler.error is None or (refused and what != "read"), meddler.error
        if refused and what == "add":
            # "Run the command again" is what it said.
            other.add(root / "again", name="again")
        names = {ref.name for ref in store.refs()}
        for name in names & {"again", "saved"}:
            assert contents(store, store[name].id) == again
        assert what not in ("add", "tag", "delta") or refused or names & {"again", "saved", "tuned"}
        if "tuned" in names:
            assert contents(store, store["tuned"].id) == files(root / "tuned")
        sound(store)
        store.gc()
        sound(store)


def test_a_commit_that_counted_on_what_went_is_refused(store: Store, tmp_path: Path) -> None:
    """A writer that found blocks present, and lost them to gc before its commit, is told to run
    again; the second run publishes."""
    store.add(write(tmp_path / "in", 1), name="a")
    store.remove("a")
    seen = False

    def collect(operation: fs.Operation) -> None:
        nonlocal seen
        # When add syncs its pack, all blocks have been looked up.
        if not seen and operation.kind == "fsync" and operation.path.endswith(".pack"):
            seen = True
            with Store.open(store.path) as other:
                other.gc()

    with fs.observed(collect), pytest.raises(Conflict, match="collected") as error:
        store.add(write(tmp_path / "in", 1, 3), name="b")
    assert seen
    assert error.value.hint == "run the command again"
    assert store.refs() == []
    store.add(write(tmp_path / "in", 1, 3), name="b")
    assert contents(store, store["b"].id) == files(tmp_path / "in")
    sound(store)


def test_a_reader_of_what_went_is_told_so(store: Store, tmp_path: Path) -> None:
    """Who reads a snapshot that is collected meanwhile, or whose contents are, is told that, and
    not of damage; where it is there, a missing block is damage."""
    for number in (1, 2):
        store.add(write(tmp_path / "in", number), name="a")
    store.add(write(tmp_path / "in", 3), name="b")
    store.add(write(tmp_path / "in", 4), name="c")
    views = [store.view(name) for name in ("a~1", "b", "c")]
    store.remove("b")
    store.prune(keep_last=1)
    block = store._catalog.tensor(views[2].tensors["a"]).block(0)
    with Store.open(store.path) as other:
        other.gc()
        index = other._catalog.index
        with index.env.write() as transaction:
            transaction.delete(block, db=index.db("blocks"))
    for view in views[:2]:
        with pytest.raises(Conflict, match="was collected while"):
            view.read("model.safetensors", 0, WIDTH)
        with pytest.raises(Conflict, match="was collected while"):
            list(view.stream("config.json"))
        with pytest.raises(Conflict, match="was collected while"):
            checkout(store._catalog, Input(view.id, "m"), tmp_path / "out", threads=1)
    with pytest.raises(Corrupt, match="does not have this block"):
        views[2].read("model.safetensors", 0, WIDTH)


def test_a_reader_follows_blocks_that_moved(store: Store, tmp_path: Path) -> None:
    """A view that has checked raw blocks reads them where gc has moved them to."""
    store.configure("codec", "raw")
    store.add(write(tmp_path / "in", 1), name="a")
    store.add(write(tmp_path / "in", 1, 2), name="b")
    view = store.view("b")

    def packs() -> set[PackId]:
        found = view.physical_extents("model.safetensors")
        return {one.location.pack for one in found if one.location is not None}

    before = packs()
    wanted = view.read("model.safetensors", 0, 5 * WIDTH)
    store.remove("a")
    with Store.open(store.path) as other:
        other.gc(dead_share=0, reflog_days=0)
    assert before - packs()
    for pack in before - packs():
        # gc itself waits for this store, which may be reading there.
        Path(store._catalog.packs.where(pack)).unlink(missing_ok=True)
    found = bytearray(len(wanted))
    assert view.read_into("model.safetensors", 0, memoryview(found)) == len(wanted)
    assert found == wanted
    assert view.read("model.safetensors", 0, 5 * WIDTH) == wanted


def test_a_child_of_a_collected_parent_is_refused(store: Store, tmp_path: Path) -> None:
    """A snapshot is not published when its parent has gone meanwhile."""
    parent = store.add(write(tmp_path / "in", 1), name="a").snapshot
    record = store._catalog.snapshot(parent)
    with Transaction(store._catalog, "test") as transaction:
        store.remove("a")
        with Store.open(store.path) as other:
            other.gc()
        child = SnapshotRecord(
            record.manifest, (Parent(PREVIOUS, parent),), "add", None, "", None, None, "", 1, "test"
        )
        with pytest.raises(Conflict):
            transaction.commit(snapshots=[child])


def test_without_room_the_wholly_dead_goes_first(store: Store, tmp_path: Path) -> None:
    """A disk without room for copies: packs without anything needed go, and the rest is told."""
    store.add(write(tmp_path / "in", 1, first="with a header of its own"), name="dead")
    kept = store.add(write(tmp_path / "in", 3, 1), name="b")
    store.add(write(tmp_path / "in", 3, 2), name="c")
    store.remove("dead", "b")
    collector = Collector(store._catalog, reflog_days=0, limits=Limits(room=0))
    report = collector.run(store._memo, lambda: store._statistics)
    assert len(report.packs_removed) == 1
    assert report.packs_rewritten == ()
    assert any("no room" in remark for remark in report.left)
    assert kept.snapshot in report.snapshots_dropped
    sound(store)
    assert len(store.gc().packs_rewritten) == 1
    sound(store)


def test_what_it_frees_is_room_in_the_same_run(store: Store, tmp_path: Path) -> None:
    """A short disk: what the first round frees is room for the copies of the second, for a run's
    own lease holds up nothing that it condemns."""
    store.add(write(tmp_path / "in", 1, first="with a header of its own"), name="dead")
    store.add(write(tmp_path / "in", 3, 1), name="b")
    store.add(write(tmp_path / "in", 3, 2), name="c")
    store.remove("dead", "b")

    class Disk(Collector):
        """As much room as packs leave of what they had at first."""

        def _room(self) -> int:
            return size - sum(pack.stat().st_size for pack in store.path.glob("packs/*/*"))

    size = sum(pack.stat().st_size for pack in store.path.glob("packs/*/*"))
    collector = Disk(store._catalog, reflog_days=0, limits=Limits())
    report = collector.run(store._memo, lambda: store._statistics)
    assert len(report.packs_rewritten) == 1
    assert report.left == ()
    assert report.waiting_bytes == 0
    assert contents(store, store["c"].id) == files(tmp_path / "in")
    sound(store)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("failing", ["write", "fsync", "rename", "commit"])
def test_a_failing_disk_loses_nothing(tmp_path: Path, failing: str) -> None:
    """Where the N-th write, fsync, rename or commit fails, gc raises or goes on; all is there."""
    number = 0
    while failed_at(tmp_path / "s", failing, number):
        number += 1
    assert number > 0


def failed_at(root: Path, failing: str, number: int) -> bool:
    """One of the failures; False where gc was done before it came."""
    store, held, _ = scene(root)
    seen: list[fs.Operation] = []

    def fail(operation: fs.Operation) -> None:
        if operation.kind == failing:
            seen.append(operation)
            if len(seen) - 1 == number:
                raise OSError(errno.ENOSPC, "full")

    with store:
        with suppress(StorageFailed), fs.observed(fail):
            store.gc()
        sound(store)
        assert contents(store, store["a"].id) == held
        store.gc()
        sound(store)
        assert not store.fsck().garbage
        assert changes(store.gc()) == NOTHING
    return len(seen) > number


def test_a_damaged_block_is_kept_where_it_is(store: Store, tmp_path: Path) -> None:
    """A block that is not what its id says is not copied: its pack stays and is named."""
    store.add(write(tmp_path / "in", 3, 1), name="b")
    pack = next(store.path.glob("packs/*/*"))
    store.add(write(tmp_path / "in", 3, 2), name="c")
    store.remove("b")
    needed = next(iter(store._catalog.tensor(store.view("c").tensors["a"]).block_ids()))
    location = store._catalog.locate([needed])[0]
    assert location.pack.hex() == pack.stem
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(location.offset + 5)
        byte = file.read(1)
        file.seek(location.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    report = store.gc()
    assert pack.exists()
    assert any(needed.hex() in remark for remark in report.left)
    with pytest.raises(MstoreError):
        contents(store, store["c"].id)
    with pack.open("r+b") as file:
        file.seek(location.offset + 5)
        file.write(byte)
    # Mended, the rest is as it was.
    assert contents(store, store["c"].id) == files(tmp_path / "in")


def test_small_packs_are_put_together(store: Store, tmp_path: Path) -> None:
    """Eight small packs become one, in which neighbours are neighbours; seven stay."""
    for number in range(7):
        store.add(write(tmp_path / "in", number), name=f"n{number}")
    assert changes(store.gc()) == NOTHING
    store.add(write(tmp_path / "in", 7), name="n7")
    report = store.gc()
    assert len(report.packs_rewritten) == 8
    assert report.packs_joined == report.packs_rewritten
    assert report.joined_bytes == report.freed_bytes > 0
    assert len(list(store.path.glob("packs/*/*"))) == 1
    for number in range(8):
        tensor = store._catalog.tensor(store.view(f"n{number}").tensors["a"])
        places = store._catalog.locate(tensor.block_ids())
        for left, right in itertools.pairwise(places):
            assert right.offset == left.offset + left.stored_length
    sound(store)
    assert changes(store.gc()) == NOTHING


def large_and_small(path: Path, small: int) -> Path:
    """A checkpoint of eight blocks that are always the same, and of one that is not."""
    parts = [("large", 0, 8 * BLOCK), ("small", small, BLOCK)]
    write_safetensors(
        path, [(n, "U8", (size,), random.Random(seed).randbytes(size)) for n, seed, size in parts]
    )
    return path


def test_what_is_dead_and_stays_is_told(store: Store, tmp_path: Path) -> None:
    """A pack that is less than 30% dead is left; the dead bytes are told until gc is asked to write
    every such pack anew, and then the disk has them back."""
    for small in (1, 2):
        path = large_and_small(tmp_path / "in.safetensors", small)
        store.add(path, name=f"n{small}", base=None)
    assert store.stats().dead_bytes == 0
    store.remove("n1")
    promised = store.gc(dry_run=True)
    assert promised.dropped_bytes == promised.dead_bytes > BLOCK
    report = store.gc()
    assert told(report) == told(promised)
    assert (report.freed_bytes, report.packs_rewritten) == (0, ())
    stats = store.stats()
    assert (stats.unreachable_bytes, stats.dead_bytes) == (0, report.dead_bytes)
    assert stats.overhead_bytes < BLOCK, "what is dead is counted once"
    assert store.gc().dead_bytes == report.dead_bytes
    promised = store.gc(dry_run=True, dead_share=0)
    every = store.gc(dead_share=0)
    assert told(every) == told(promised)
    assert len(every.packs_rewritten) == 1
    assert every.dead_bytes == store.stats().dead_bytes == 0
    assert stats.stored_bytes - store.stats().stored_bytes >= BLOCK
    assert changes(store.gc(dead_share=0)) == NOTHING
    sound(store)


def test_what_interrupted_commands_left_is_told(store: Store, tmp_path: Path) -> None:
    """Files of dead leases count in stats and in gc, which removes them; what the next merge would
    go on from stays, and gc says so."""
    tmp = store.path / "tmp"
    for name, size, also in (("dead", 5000, "1.pack"), ("merge", 700, "0.receipt")):
        (tmp / name).mkdir()
        (tmp / name / "0.pack").write_bytes(bytes(size))
        (tmp / name / also).write_bytes(bytes(60))
    assert store.stats().leftover_bytes == 5060 + 760
    promised = store.gc(dry_run=True)
    report = store.gc()
    assert told(report) == told(promised)
    for one in (promised, report):
        assert (one.leftover_files, one.leftover_bytes) == (2, 5060)
        assert "2 files (760 B) of interrupted merges" in one.left[0]
    assert [path.name for path in tmp.iterdir() if path.is_dir()] == ["merge"]
    assert store.stats().leftover_bytes == 760


SEEDS = st.integers(1, 3)
TUNED = st.integers(0, 6)
NAMES = st.sampled_from(["a", "b", "x/c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, SEEDS, TUNED),
        st.tuples(st.just("merge"), NAMES, NAMES, st.booleans()),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("tag"), NAMES, st.integers(0, 99)),
        st.tuples(st.just("reset"), NAMES, NAMES),
        st.tuples(st.just("prune"), st.integers(1, 2), st.booleans(), st.booleans()),
        st.tuples(st.just("gc")),
    ),
    min_size=3,
    max_size=12,
)


def play(store: Store, root: Path, step: tuple[object, ...]) -> None:
    """One step of a history; what makes no sense just now is refused, and that is fine."""
    match step:
        case "add", str(name), int(seed), int(tuned):
            names = {ref.name for ref in store.refs()}
            base = "base" if tuned and "base" in names else None
            store.add(write(root / "in", seed, tuned), name=name, base=base, codec="auto")
        case "merge", str(name), str(expert), bool(virtual):
            plan = store.plan(
                MergeRequest(base="base", experts=[expert], method="task_arithmetic"), threads=1
            )
            store.merge(plan, name=name, virtual=virtual, threads=1)
        case "remove", str(name):
            store.remove(name)
        case "tag", str(name), int(number):
            store.tag(f"t{number}", name)
        case "reset", str(name), str(other):
            store.reset(name, other)
        case "prune", int(keep), bool(tagged), bool(inputs):
            store.prune(keep_last=keep, keep_tagged=tagged, unnamed_inputs=inputs)
        case ("gc",):
            collect(store)


def collect(store: Store) -> None:
    """gc, and all that must hold of it."""
    store.gc()
    sound(store)
    index = store._catalog.index
    with index.env.read() as transaction:
        inventory = Inventory(store._catalog, transaction)
        roots = Roots.read(store._catalog, transaction, 1 << 64)
    reach = Reach(store._catalog, inventory)
    reach.grow(roots)
    assert all(live.all() for live in reach.live.values())
    assert all(use.dead_share < DEAD_SHARE for use in uses(reach, store._catalog.packs))
    assert changes(store.gc(dry_run=True)) == NOTHING


@settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(history=STEPS)
def test_any_history(tmp_path: Path, history: list[tuple[object, ...]]) -> None:
    """After any history, a dry run says what gc does; every reachable snapshot reads as before it,
    the rows that are left are those that are reached, no pack is a third dead, and a second gc
    finds nothing to do."""
    root = tmp_path / "h"
    shutil.rmtree(root, ignore_errors=True)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        store.add(write(root / "in", 1), name="base")
        for step in history:
            try:
                play(store, root, step)
            except MstoreError:
                continue
        before = {}
        for one in store.log():
            if not one.pruned:
                before[one.snapshot] = contents(store, one.snapshot)
        lying = on_disk(store)
        promised = store.gc(dry_run=True)
        assert on_disk(store) == lying
        assert told(store.gc()) == told(promised)
        for snapshot, held in before.items():
            assert contents(store, snapshot) == held
        collect(store)
    with Store.open(root / "store") as again:
        for snapshot, held in before.items():
            assert contents(again, snapshot) == held
