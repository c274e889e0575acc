"""Repair: what is broken is healed from any good copy, and what has none is dropped and listed."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BLOCK, files_of, small_model

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.blocks.packs import PAGE, Kind
from mstore.terms.errors import BadCheckpoint, Corrupt, NotFound, StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call

ADDED = ("base", "expert", "second")


def fine_tune(directory: Path, base: Path, step: int) -> Path:
    """A copy of a small model in which every `step`-th element differs by its last bit."""
    shutil.copytree(base, directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 2 * step):
        data[at] ^= 1
    file.write_bytes(data)
    return directory


def sources(root: Path) -> dict[str, Path]:
    """A base and two fine-tunes, by name."""
    base = small_model(root / "base", "s")
    return {
        "base": base,
        "expert": fine_tune(root / "expert", base, 3),
        "second": fine_tune(root / "second", base, 5),
    }


def build(root: Path) -> None:
    """A store with a base, fine-tunes of it, a merge and a virtual merge; its sources beside."""
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        for name, path in sources(root).items():
            base = None if name == "base" else "base"
            store.add(path, name=name, base=base, threads=1)
        experts = ["expert", "second"]
        plan = store.plan(MergeRequest(base="base", experts=experts, method="linear"), threads=1)
        store.merge(plan, name="merged", threads=1)
        plan = store.plan(
            MergeRequest(base="base", experts=experts, method="task_arithmetic"), threads=1
        )
        store.merge(plan, name="virtual", threads=1, virtual=True)
        store.tag("v1", "expert")
        store.note("merged", {"mmlu": 0.62, "seen by": "ada"})


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy of it: `store`, `other` (an intact copy of the store), and what was added."""
    shutil.copytree(template, tmp_path / "root")
    shutil.copytree(template / "store", tmp_path / "root" / "other")
    return tmp_path / "root"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root as `root` gives it, of a base, a fine-tune and a merge: each step of a repair is in
    it, and few are repeated."""
    root = tmp_path_factory.mktemp("few")
    base = small_model(root / "base", "s")
    fine_tune(root / "expert", base, 3)
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        store.add(base, name="base", base=None, threads=1)
        store.add(root / "expert", name="expert", base="base", threads=1)
        asked = MergeRequest(base="base", experts=[("expert", 0.5)], method="task_arithmetic")
        store.merge(store.plan(asked, threads=1), name="merged", threads=1)
    shutil.copytree(root / "store", root / "other")
    return root


@pytest.fixture(scope="module")
def kept(template: Path) -> dict[SnapshotId, dict[str, bytes]]:
    """Every file of every snapshot of the template."""
    return contents(template / "store")


def contents(path: Path) -> dict[SnapshotId, dict[str, bytes]]:
    """Every file of every snapshot."""
    found = {}
    with Store.open(path) as store:
        for id in store.snapshot_ids():
            snapshot = store[str(id)]
            found[id] = {file.path: snapshot.read(file.path) for file in snapshot.files()}
    return found


def overwrite(path: Path, place: int, data: bytes) -> None:
    """Write into a read-only file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def flip(path: Path, place: int) -> None:
    """One bit of a file."""
    overwrite(path, place, bytes([path.read_bytes()[place] ^ 1]))


def packs(path: Path) -> list[Path]:
    """The packs of a store, the largest first."""
    return sorted((path / "packs").glob("*/*.pack"), key=lambda pack: (-pack.stat().st_size, pack))


def break_payloads(path: Path) -> int:
    """Flip a bit in every block; returns how many there are."""
    with Store.open(path) as store:
        index = store._catalog.index
        with index.env.read() as rows:
            places = [
                (
                    Path(store._catalog.packs.where(where.pack)),
                    where.offset + where.stored_length // 2,
                )
                for _, where in index.blocks(rows)
            ]
    for pack, place in places:
        flip(pack, place)
    return len(places)


def test_a_sound_store_is_left_alone(root: Path) -> None:
    """Repairing what is not broken writes nothing at all."""
    before = files_of(root / "store")
    with Store.open(root / "store") as store:
        report = store.repair(read_data=True)
    assert (report.healed, report.dropped, report.bytes_written) == ((), (), 0)
    assert report.before == report.after
    after = files_of(root / "store")
    assert {k: v for k, v in after.items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }


def test_every_block_is_healed_from_another_store(root: Path) -> None:
    """With each block broken, an intact store gives all of them back, deltas among them."""
    before = contents(root / "other")
    count = break_payloads(root / "store")
    with Store.open(root / "store") as store:
        assert len(store.fsck(read_data=True).problems) >= count
        report = store.repair(read_data=True, sources=[root / "other"])
        assert len(report.healed) == count
        assert (report.dropped, report.after.problems) == ((), ())
        assert store.fsck(read_data=True).problems == ()
    assert contents(root / "store") == before


@pytest.mark.rest
def test_every_added_block_is_healed_from_checkpoints(root: Path) -> None:
    """The directories that were added give back what they have, cut as add cuts it."""
    before = contents(root / "other")
    break_payloads(root / "store")
    with Store.open(root / "store") as store:
        report = store.repair(read_data=True, sources=[root / name for name in ADDED])
        assert report.healed
        # What merges made is in no checkpoint; their files are named. A virtual one has a card
        # and a recipe.
        assert report.dropped
        assert {affected.refs for affected in report.after.affected} == {("merged",), ("virtual",)}
        assert {
            affected.path for affected in report.after.affected if affected.refs == ("virtual",)
        } == {
            "README.md",
            "mergekit_config.yml",
        }
    after = contents_but(root / "store", "merged", "virtual")
    assert after == {id: files for id, files in before.items() if id in after}
    assert len(after) == len(before) - 2


def contents_but(path: Path, *refs: str) -> dict[SnapshotId, dict[str, bytes]]:
    """The files of every snapshot but these."""
    found = {}
    with Store.open(path) as store:
        left_out = {store[ref].id for ref in refs}
        for id in store.snapshot_ids():
            if id not in left_out:
                snapshot = store[str(id)]
                found[id] = {file.path: snapshot.read(file.path) for file in snapshot.files()}
    return found


@pytest.mark.rest
def test_what_has_no_copy_is_dropped_and_comes_back_with_good_files(root: Path) -> None:
    """Damage, repair without a copy, add the same files again: everything is exact."""
    before = contents(root / "other")
    break_payloads(root / "store")
    with Store.open(root / "store") as store:
        report = store.repair(read_data=True)
        assert report.healed == ()
        assert report.dropped
        affected = {
            (ref, affected.path, affected.tensor)
            for affected in report.after.affected
            for ref in affected.refs
        }
        for ref in ("base", "expert", "v1"):
            assert (ref, "model.safetensors", "a") in affected
            assert (ref, "config.json", None) in affected
        assert ("merged", "model.safetensors", "b") in affected
        with pytest.raises(Exception, match="does not have"):
            store["base"].read("model.safetensors")
        for name in ADDED:
            base = None if name == "base" else "base"
            store.add(root / name, name=name, base=base, threads=1)
        plan = store.plan(
            MergeRequest(base="base", experts=["expert", "second"], method="linear"), threads=1
        )
        store.merge(plan, name="merged", threads=1)
        plan = store.plan(
            MergeRequest(base="base", experts=["expert", "second"], method="task_arithmetic"),
            threads=1,
        )
        store.merge(plan, name="virtual", threads=1, virtual=True)
        assert store.fsck(read_data=True).problems == ()
    after = contents(root / "store")
    assert {id: after[id] for id in before} == before


def truncate(path: Path) -> None:
    """Cut a pack's end off: the footer and some payloads."""
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-PAGE][: 3 * PAGE])


def break_table(path: Path) -> None:
    """Damage a footer's table."""
    data = path.read_bytes()
    flip(path, struct.unpack_from("<Q", data, len(data) - 64)[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, break_table])
def test_a_damaged_pack_is_healed_and_condemned(
    root: Path, damage: Callable[[Path], None], which: int
) -> None:
    """A pack that is missing, cut or broken is emptied with the help of another store."""
    before = contents(root / "other")
    path = packs(root / "store")[which]
    damage(path)
    with Store.open(root / "store") as store:
        assert store.fsck().problems
        report = store.repair(sources=[root / "other"])
        assert (report.dropped, report.after.problems) == ((), ())
        assert [pack.hex() for pack in report.condemned] == [path.stem]
        assert store.fsck(read_data=True).problems == ()
    assert contents(root / "store") == before


def test_payloads_under_a_broken_footer_are_saved(root: Path) -> None:
    """Where only the footer is damaged, all payloads move to a new pack; no copy is needed."""
    before = contents(root / "other")
    for path in packs(root / "store"):
        break_table(path)
    with Store.open(root / "store") as store:
        report = store.repair()
        assert (report.dropped, report.after.problems) == ((), ())
        assert len(report.condemned) == len(packs(root / "other"))
        assert store.fsck(read_data=True).problems == ()
    assert contents(root / "store") == before


def test_a_row_that_lies_is_healed_from_its_own_pack(root: Path) -> None:
    """An index row that differs from the footer is put right from the pack itself."""
    before = contents(root / "other")
    with Store.open(root / "store") as store:
        index = store._catalog.index
        with index.env.write() as rows:
            with rows.cursor(db=index.db("blocks")) as cursor:
                found = [(bytes(key), bytes(value)) for key, value in cursor]
            for key, value in found:
                changed = value[:11] + bytes([value[11] ^ 1]) + value[12:]
                rows.put(key, changed, db=index.db("blocks"))
        report = store.repair()
        assert (report.dropped, report.after.problems) == ((), ())
    assert contents(root / "store") == before


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [k for k in Kind if k != Kind.BLOCK])
def test_broken_records_are_healed_by_id(root: Path, kind: Kind) -> None:
    """Each kind of record is taken from another store, broken or without a row."""
    before = contents(root / "other")
    with Store.open(root / "store") as store:
        index = store._catalog.index
        with index.env.read() as rows:
            found = [(id, where) for k, id, where in index.records(rows) if k == kind]
        assert found
        for number, (id, where) in enumerate(found):
            if number % 2:
                with index.env.write() as rows:
                    rows.delete(bytes([kind]) + id, db=index.db("records"))
            else:
                flip(Path(store._catalog.packs.where(where.pack)), where.offset + 1)
        assert store.fsck().problems
        report = store.repair(sources=[root / "other"])
        assert (report.dropped, report.after.problems) == ((), ())
    assert contents(root / "store") == before


def test_the_tensors_and_manifest_of_a_checkpoint_are_healed_from_it(root: Path) -> None:
    """A checkpoint directory gives back the records that adding it would make."""
    with Store.open(root / "store") as store:
        index = store._catalog.index
        manifest = store["base"].manifest
        with index.env.write() as rows:
            for file in store._catalog.manifest(manifest).files:
                for part in file.parts:
                    rows.delete(bytes([Kind.TENSOR]) + part.tensor, db=index.db("records"))
            rows.delete(bytes([Kind.MANIFEST]) + manifest, db=index.db("records"))
        report = store.repair(sources=[root / "base"])
        assert (report.dropped, report.after.problems) == ((), ())
        assert any(key.startswith("manifest ") for key in report.healed)


def test_a_lost_snapshot_record_leaves_its_ref_and_says_so(root: Path) -> None:
    """Without a copy, the ref stays where it was, is named, and is the user's to remove."""
    with Store.open(root / "store") as store:
        index = store._catalog.index
        id = store["virtual"].id
        with index.env.read() as rows:
            where = index.record(rows, Kind.SNAPSHOT, id)
        assert where is not None
        flip(Path(store._catalog.packs.where(where.pack)), where.offset + 1)
        report = store.repair()
        assert report.dropped == (f"snapshot {id}",)
        assert report.after.problems
        again = store.repair(sources=[root / "other"])
        assert again.healed == (f"snapshot {id}",)
        assert again.after.problems == ()


def test_a_damaged_mirror_is_written_anew(root: Path) -> None:
    """The mirror is a copy of the refs, and repair makes it one again."""
    mirror = root / "store" / "refs" / "mirror"
    good = mirror.read_text().splitlines()
    mirror.write_bytes(b"nonsense")
    with Store.open(root / "store") as store:
        assert store.repair().after.problems == ()
    assert mirror.read_text().splitlines()[2:-1] == good[2:-1]


def test_a_source_that_is_none_stops_it_before_anything_changes(root: Path) -> None:
    """A place that is missing or no checkpoint is refused, and nothing was repaired."""
    break_payloads(root / "store")
    before = files_of(root / "store")
    (root / "empty").mkdir()
    with Store.open(root / "store") as store:
        with pytest.raises(NotFound):
            store.repair(read_data=True, sources=[root / "nowhere"])
        with pytest.raises(BadCheckpoint):
            store.repair(read_data=True, sources=[root / "empty"])
    assert files_of(root / "store")["index/data.mdb"] == before["index/data.mdb"]


def test_another_stores_index_is_never_opened(root: Path) -> None:
    """Of the store that copies come from, packs are enough: its index may be anything."""
    break_payloads(root / "store")
    (root / "other" / "index" / "data.mdb").write_bytes(b"\xff" * 10_000)
    with Store.open(root / "store") as store:
        assert store.repair(read_data=True, sources=[root / "other"]).after.problems == ()


def test_a_lie_in_another_store_is_not_taken(root: Path) -> None:
    """A copy whose bytes are wrong is no copy."""
    break_payloads(root / "store")
    break_payloads(root / "other")
    with Store.open(root / "store") as store:
        report = store.repair(read_data=True, sources=[root / "other"])
    assert report.healed == ()


@pytest.mark.rest
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.rest)])
def test_failing_at_any_step_leaves_the_store_no_worse(
    few: Path, tmp_path: Path, half: int
) -> None:
    """Whatever operation fails, what could be read before can still be, and repair can go on."""
    root = tmp_path / "root"
    shutil.copytree(few, root)
    before = contents(root / "other")
    break_table(packs(root / "store")[0])
    with Store.open(root / "store") as store:
        index = store._catalog.index
        with index.env.read() as rows:
            where = max((at for _, at in index.blocks(rows)), key=lambda at: at.stored_length)
        flip(Path(store._catalog.packs.where(where.pack)), where.offset + where.stored_length // 2)
        problems = {problem.where for problem in store.fsck(read_data=True).problems}
    for at in range(half, 100, 2):
        seen = 0

        def fail(operation: fs.Operation, at: int = at) -> None:
            nonlocal seen
            seen += operation.kind not in ("committed", "map")
            if seen > at and operation.kind not in ("committed", "map"):
                raise OSError(5, "Input/output error")

        shutil.copytree(root / "store", root / "trial")
        with Store.open(root / "trial") as store:
            is_done = True
            try:
                with fs.observed(fail):
                    store.repair(read_data=True, sources=[root / "other"])
            except StorageFailed:
                is_done = False
            left = {problem.where for problem in store.fsck(read_data=True).problems}
            assert left <= problems
            assert store.repair(read_data=True, sources=[root / "other"]).after.problems == ()
        assert contents(root / "trial") == before
        shutil.rmtree(root / "trial")
        if is_done:
            break
    else:
        pytest.fail("it never ends")
    assert at > 10


@pytest.mark.rest
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_damage_is_healed_from_an_intact_copy(
    template: Path,
    kept: dict[SnapshotId, dict[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    """Whatever bytes of whatever packs are wrong, a good copy restores every snapshot exactly."""
    root = tmp_path_factory.mktemp("random")
    shutil.copytree(template / "store", root / "store")
    for path in packs(root / "store"):
        size = path.stat().st_size
        places = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
        for place in places:
            noise = data.draw(st.integers(1, 255))
            overwrite(path, place, bytes([path.read_bytes()[place] ^ noise]))
    with Store.open(root / "store") as store:
        store.repair(read_data=True, sources=[template / "store"])
        assert store.fsck(read_data=True).problems == ()
    assert contents(root / "store") == kept


def test_gc_waits_for_it(root: Path) -> None:
    """Repair holds the lock of garbage collection whenever it changes anything."""
    taken = []

    def look(operation: fs.Operation) -> None:
        lock = fs.LockFile(root / "store" / "packs", create=False)
        taken.append(lock.acquire(blocking=False))
        lock.release()

    with Store.open(root / "store") as store:
        (largest := packs(root / "store")[0]).chmod(0o644)
        flip(largest, largest.stat().st_size // 2)
        with fs.observed(look):
            assert store.repair(sources=[root / "other"], read_data=True, threads=1).healed
    assert taken
    assert not any(taken)


# Adding again


def oldest_pack(root: Path) -> Path:
    """The pack of what was added first, the base."""
    packs = (root / "store" / "packs").rglob("*.pack")
    return min(packs, key=lambda pack: pack.stat().st_mtime_ns)


def drop_blocks(root: Path) -> None:
    """Damage the base's pack and repair without a copy: its blocks go."""
    pack = oldest_pack(root)
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    for at in range(PAGE, len(data) * 3 // 4, 512):
        data[at] ^= 0xFF
    pack.write_bytes(data)
    with Store.open(root / "store") as store:
        assert store.repair(read_data=True).dropped


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [True, False])
def test_adding_again_heals(root: Path, given: bool) -> None:
    """With a damaged base, named or found, good files are added, and are whole again."""
    drop_blocks(root)
    with Store.open(root / "store") as store:
        for name in reversed(ADDED):
            base = "base" if given and name != "base" else None
            store.add(root / name, name=name, base=base, detect_base=not given, threads=2)
        for name in ADDED:
            store.checkout(name, root / f"out-{name}")
            assert files_of(root / f"out-{name}") == files_of(root / name)


def test_a_damaged_base_is_told(root: Path, tmp_path: Path) -> None:
    """A fine-tune of a base that lost blocks is stored whole, and a remark tells."""
    drop_blocks(root)
    new = fine_tune(tmp_path / "new", root / "base", 7)
    with Store.open(root / "store") as store:
        report = store.add(new, name="new", base="base", threads=2)
        assert any("the base is damaged" in remark for remark in report.remarks)
        store.checkout("new", tmp_path / "copy")
        assert files_of(tmp_path / "copy") == files_of(new)


def test_bytes_in_a_missing_pack_are_not_held(root: Path) -> None:
    """Where packs are gone, "nothing new" is not said; the hint is the line that heals."""
    oldest_pack(root).unlink()
    with Store.open(root / "store") as store:
        with pytest.raises(Corrupt, match="packs that are missing") as refused:
            store.add(root / "base", name="base")
        assert refused.value.texts[2] == call("repair", sources=(str(root / "base"),))
        store.repair(sources=[root / "base"])
        store.add(root / "base", name="base")
        store.checkout("base", root / "out")
        assert files_of(root / "out") == files_of(root / "base")
