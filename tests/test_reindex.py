"""Reindex: the index made anew from packs and mirror tells what the old one told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import BLOCK, small_model
from test_repair import contents, fine_tune, flip, packs, sources

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.blocks.pack_store import HERE
from mstore.blocks.packs import Kind
from mstore.blocks.schema import CONDEMNED, PRUNED
from mstore.store.plans import plan_ids, sources_of
from mstore.terms.errors import Conflict, MstoreError, NotFound, StorageFailed
from mstore.terms.ids import PackId


def build(root: Path) -> None:
    """A store with history: two of each, deltas, a merge, a virtual merge, a tag, a removed ref."""
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        for name, path in sources(root).items():
            base = None if name == "base" else "base"
            store.add(path, name=name, base=base, threads=1)
        again = fine_tune(root / "again", root / "base", 7)
        store.add(again, name="expert", base="base", threads=1)
        for method, virtual in (("linear", False), ("task_arithmetic", True)):
            plan = store.plan(
                MergeRequest(base="base", experts=["expert", "second"], method=method), threads=1
            )
            store.merge(plan, name=f"merged/{method}", threads=1, virtual=virtual)
        store.tag("v1", "expert")
        store.tag("gone", "second")
        store.remove("gone")


@pytest.fixture
def path(copied: Path) -> Path:
    """A copy of the store, closed."""
    return copied / "store"


def told(path: Path, *, with_history: bool = True) -> dict[str, Any]:
    """Everything that a store tells about itself."""
    with Store.open(path) as store:
        catalog = store._catalog
        assert store.fsck(read_data=True).problems == ()
        found: dict[str, Any] = {
            "refs": store.refs(),
            "log": [store.log(ref.name) for ref in store.refs()],
            "snapshots": store.snapshot_ids(),
            "explained": store.explain("merged/linear"),
            "replayed": store.replay("merged/linear", threads=1).same,
            "plans": {
                id: [s.snapshot for s in (sources.base, *sources.experts)]
                for id in plan_ids(catalog)
                for sources in [sources_of(catalog, id, _plan(store, id))]
            },
        }
        with catalog.index.env.read() as rows:
            for name in ("snapshots", "contents", "children", "refs", "pinned"):
                with rows.cursor(db=catalog.index.db(name)) as cursor:
                    found[name] = [(bytes(key), bytes(value)) for key, value in cursor]
            for name in ("blocks", "records"):
                with rows.cursor(db=catalog.index.db(name)) as cursor:
                    # Pack numbers may be others.
                    found[name] = [(bytes(key), bytes(value)[4:]) for key, value in cursor]
        if with_history:
            names = [ref.name for ref in store.refs()] + ["gone"]
            found["reflogs"] = [store.reflog(name) for name in names]
    found["contents"] = contents(path)
    return found


def _plan(store: Store, id: Any) -> Any:
    from mstore.store.objects.plan import Plan

    return store._catalog.record(Plan, id)


def test_everything_is_as_before(path: Path) -> None:
    """With the old index at hand, nothing is lost: reflogs and names of inputs neither."""
    before = told(path)
    report = Store.reindex(path)
    assert report.old_index
    assert report.remarks == ()
    assert report.reflog_moves
    assert told(path) == before


def _delete(index: Path) -> None:
    shutil.rmtree(index)


def _empty(index: Path) -> None:
    for file in index.iterdir():
        file.write_bytes(b"")


def _nonsense(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"\xa5" * 40_000)


def _cut(index: Path) -> None:
    data = (index / "data.mdb").read_bytes()
    (index / "data.mdb").write_bytes(data[:8192])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("damage", [_delete, _empty, _nonsense, _cut])
def test_without_an_index(path: Path, damage: Callable[[Path], None]) -> None:
    """From packs and mirror alone, all but the reflogs comes back; each begins with a new move."""
    before = told(path, with_history=False)
    damage(path / "index")
    with pytest.raises(MstoreError) as caught:
        Store.open_checked(path)
    assert caught.value.hint == "mstore.Store.reindex(PATH)"
    report = Store.reindex(path)
    assert not report.old_index
    assert told(path, with_history=False) == before
    with Store.open(path) as store:
        assert [move.action for move in store.reflog("base")] == ["reindex"]


def test_a_copy_of_what_cannot_be_made_again_is_enough(path: Path, tmp_path: Path) -> None:
    """docs/keeping.md: format, refs/mirror and packs are a backup; reindex makes the rest."""
    before = told(path, with_history=False)
    copy = tmp_path / "copy"
    (copy / "refs").mkdir(parents=True)
    for name in ("format", "refs/mirror"):
        shutil.copy(path / name, copy / name)
    shutil.copytree(path / "packs", copy / "packs")
    Store.reindex(copy)
    assert told(copy, with_history=False) == before
    with Store.open(copy) as store:
        assert store.fsck(read_data=True).problems == ()


def test_the_old_index_can_be_left_alone(path: Path) -> None:
    """Asked not to look at it, reindex takes the refs from the mirror."""
    report = Store.reindex(path, use_old_index=False)
    assert (report.old_index, report.reflog_moves) == (False, 0)
    with Store.open(path) as store:
        assert len(store.reflog("expert")) == 1


def test_a_mirror_that_is_behind_or_damaged_is_no_loss(path: Path) -> None:
    """Refs come from the old index where it has them all."""
    before = told(path)
    (path / "refs" / "mirror").write_bytes(b"\xff\n")
    report = Store.reindex(path)
    # That the mirror is damaged, and that an earlier one was heard.
    assert len(report.remarks) == 2
    assert told(path) == before


def test_a_running_command_is_named(path: Path) -> None:
    """While somebody is at work, reindex says who, and changes nothing."""
    before = (path / "index" / "data.mdb").read_bytes()
    program = (
        "import sys; from mstore.store.catalog import Catalog; from mstore.store import leases;"
        "from pathlib import Path; c = Catalog.open(Path(sys.argv[1]));"
        "lease = leases.Lease(c.layout, c.index, 'add llama'); c.close();"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        before = (path / "index" / "data.mdb").read_bytes()
        with pytest.raises(Conflict, match=rf"add llama \(process {child.pid}\)"):
            Store.reindex(path)
        assert (path / "index" / "data.mdb").read_bytes() == before
        child.communicate()


def test_an_open_store_is_not_reindexed(path: Path) -> None:
    """A process that only reads, this one or another, stands in the way as well."""
    with Store.open(path), pytest.raises(Conflict, match="this process"):
        Store.reindex(path)
    program = (
        "import sys; from mstore import Store; s = Store.open(sys.argv[1]);"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(Conflict, match=f"process {child.pid}"):
            Store.reindex(path)
        child.communicate()


def test_a_damaged_pack_is_left_out_and_told(path: Path) -> None:
    """What cannot be read of a pack is named; the rest is indexed; fsck names what it affects."""
    lost = packs(path)[0]
    lost.chmod(0o600)
    lost.write_bytes(lost.read_bytes()[:-1])
    report = Store.reindex(path)
    assert any(lost.stem in remark for remark in report.remarks)
    with Store.open(path) as store:
        assert {affected.path for affected in store.fsck().affected} >= {"model.safetensors"}


def test_of_two_copies_the_one_that_reads_right_is_taken(path: Path) -> None:
    """A block that was healed into a new pack does not fall back to its broken copy."""
    before = contents(path)
    shutil.copytree(path, path.parent / "other")
    with Store.open(path) as store:
        index = store._catalog.index
        with index.env.read() as rows:
            found = [
                (Path(store._catalog.packs.where(w.pack)), w.offset) for _, w in index.blocks(rows)
            ]
        for pack, offset in found:
            flip(pack, offset)
        assert store.repair(read_data=True, sources=[path.parent / "other"]).healed
    shutil.rmtree(path / "index")
    Store.reindex(path)
    with Store.open(path) as store:
        assert store.fsck(read_data=True).problems == ()
    assert contents(path) == before


def test_a_delta_without_its_base_is_left_out(path: Path) -> None:
    """Rows lead to what can be read: without its base a delta has none, and the report says so."""
    with Store.open(path) as store:
        index = store._catalog.index
        with index.env.read() as rows:
            placed = {bytes(id): where for id, where in index.blocks(rows)}
        deltas = {id: where for id, where in placed.items() if any(where.base)}
        bases = {placed[where.base].pack for where in deltas.values()}
    assert deltas
    for pack in bases:
        (path / "packs" / pack.hex()[:2] / f"{pack.hex()}.pack").unlink()
    shutil.rmtree(path / "index")
    report = Store.reindex(path)
    assert any("deltas are left out" in remark for remark in report.remarks)
    with Store.open(path) as store, store._catalog.index.env.read() as rows:
        left = {bytes(id) for id, _ in store._catalog.index.blocks(rows)}
    assert not left & deltas.keys()


def test_pruned_snapshots_stay_pruned(path: Path) -> None:
    """Who needs no contents is taken over, or told by contents that are gone."""
    with Store.open(path) as store:
        index = store._catalog.index
        old = store["expert~1"]
        keep = {
            block for id in store.snapshot_ids() if id != old.id for block in _blocks(store, id)
        }
        gone = _blocks(store, old.id) - keep
        assert gone
        with index.env.write() as rows:
            index.put(rows, PRUNED, old.id, 5)
            for block in gone:
                rows.delete(block, db=index.db("blocks"))
        assert store.fsck(read_data=True).problems == ()
    assert Store.reindex(path).pruned == 1
    with Store.open(path) as store:
        assert store.fsck(read_data=True).problems == ()
        with store._catalog.index.env.read() as rows:
            assert store._catalog.index.get(rows, PRUNED, old.id) == 5


def test_a_condemned_pack_is_not_taken_in_again(path: Path) -> None:
    """A pack that waits to be removed gets no rows: it is garbage, before and after."""
    other = path.parent / "elsewhere"
    Store.init(other, block_size=BLOCK).close()
    # The same store, as its packs see it.
    shutil.copy(path / "format", other / "format")
    with Store.open(other) as store:
        store.add(small_model(path.parent / "new", "new"), name="new", threads=1)
    pack = packs(other)[0]
    target = path / "packs" / pack.parent.name / pack.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy(pack, target)
    with Store.open(path) as store, store._catalog.index.env.write() as rows:
        row = PackId.parse(pack.stem), pack.stat().st_size, HERE, ()
        store._catalog.index.put(rows, CONDEMNED, 256, row)
    count = len(packs(path)) - 1
    assert Store.reindex(path).packs == count
    with Store.open(path) as store:
        assert str(target.relative_to(path)) in store.fsck().garbage


def _blocks(store: Store, id: Any) -> set[bytes]:
    manifest = store._catalog.manifest(store[str(id)].manifest)
    found: set[bytes] = set()
    for file in manifest.files:
        for part in file.parts:
            content = store._catalog.content(part.tensor_id())
            if hasattr(content, "block_ids"):
                found.update(content.block_ids())
    return found


def test_garbage_packs_do_no_harm(path: Path) -> None:
    """A pack that an interrupted add left behind is taken in; nothing else changes."""
    before = contents(path)
    other = path.parent / "elsewhere"
    Store.init(other, block_size=BLOCK).close()
    # The same store, as its packs see it.
    shutil.copy(path / "format", other / "format")
    with Store.open(other) as store:
        store.add(small_model(path.parent / "new", "new"), name="new", threads=1)
    for pack in (other / "packs").glob("*/*.pack"):
        target = path / "packs" / pack.parent.name / pack.name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(pack, target)
    shutil.rmtree(path / "index")
    Store.reindex(path)
    after = contents(path)
    assert {id: after[id] for id in before} == before
    with Store.open(path) as store:
        assert store.fsck(read_data=True).problems == ()


def test_requests_are_forgotten_and_outputs_are_not(path: Path) -> None:
    """The memo table keeps what contents decide and forgets plans that may be gone."""
    with Store.open(path) as store:
        store._memo.put_plan(b"k" * 32, plan_ids(store._catalog)[0])
        store._memo.put_outputs([(b"o" * 32, b"row")])
        store._memo.flush()
    Store.reindex(path)
    with Store.open(path) as store:
        assert store._memo.plan(b"k" * 32) is None
        assert store._memo.outputs([b"o" * 32]) == [b"row"]


@pytest.mark.rest
def test_killed_anywhere_it_leaves_one_of_the_two(path: Path) -> None:
    """Failing at any step, reindex leaves a store that opens and tells the same."""
    before = contents(path)
    for at in range(90):
        done = 0

        def fail(operation: fs.Operation, at: int = at) -> None:
            nonlocal done
            if done >= at and operation.kind != "committed":
                raise OSError(5, "Input/output error")
            done += 1

        try:
            with fs.observed(fail):
                Store.reindex(path)
        except StorageFailed:
            with Store.open(path) as store:
                assert store.fsck().problems == ()
            continue
        break
    else:
        pytest.fail("it never ends")
    assert contents(path) == before


def test_there_must_be_a_store(tmp_path: Path) -> None:
    """Without a format file there is nothing to index."""
    with pytest.raises(NotFound):
        Store.reindex(tmp_path)


def test_a_snapshot_that_is_in_no_pack_is_told(path: Path) -> None:
    """A ref whose snapshot is lost keeps its name, and the report says where it pointed."""
    with Store.open(path) as store:
        id = store["v1"].id
        index = store._catalog.index
        with index.env.read() as rows:
            where = index.record(rows, Kind.SNAPSHOT, id)
    assert where is not None
    flip(path / "packs" / where.pack.hex()[:2] / f"{where.pack.hex()}.pack", where.offset)
    report = Store.reindex(path)
    assert any(str(id) in remark for remark in report.remarks)
    with Store.open(path) as store:
        assert any(p.where == "v1" for p in store.fsck().problems)


def test_gc_waits_for_it(path: Path) -> None:
    """Reindex holds the lock of garbage collection whenever it changes anything."""
    taken = []

    def look(operation: fs.Operation) -> None:
        lock = fs.LockFile(path / "packs", create=False)
        taken.append(lock.acquire(blocking=False))
        lock.release()

    with fs.observed(look):
        Store.reindex(path)
    assert taken
    assert not any(taken)


def test_names_are_made_where_all_are_lost(path: Path) -> None:
    """Without mirror and old index, the newest snapshots get names, so that gc takes nothing."""
    before = contents(path)
    shutil.rmtree(path / "index")
    shutil.rmtree(path / "refs")
    report = Store.reindex(path)
    assert report.recovered
    assert report.refs == len(report.recovered)
    assert all(name.startswith("recovered/") for name in report.recovered)
    assert any("store.reset(NAME, 'recovered/" in str(remark) for remark in report.remarks)
    with Store.open(path) as store:
        assert [ref.name for ref in store.refs()] == sorted(report.recovered)
        assert store.fsck().problems == ()
        # What no other snapshot came from, and no more.
        parents = {parent.snapshot for one in store.log() for parent in one.parents}
        assert {ref.snapshot for ref in store.refs()} == set(store.snapshot_ids()) - parents
        store.gc(reflog_days=0)
    assert contents(path) == before
    # A second time, the names are there.
    assert Store.reindex(path).recovered == ()


def test_names_that_are_left_stay(path: Path) -> None:
    """With a mirror, what no ref reaches gets no name: it may have been let go."""
    shutil.rmtree(path / "index")
    assert Store.reindex(path).recovered == ()
