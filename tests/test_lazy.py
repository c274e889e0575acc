"""Lazy stores: a clone has records, and a block comes when something reads it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from exchanges import REMOTE, Place, files, merged, place, placed, refs, sound
from msgspec import structs
from proof_models import MODEL, model_files

from mstore import MergeRequest
from mstore.api import Store
from mstore.remotes.lazy import RemoteParts, Traffic
from mstore.remotes.shared_directory import SharedDirectory
from mstore.store.objects.tensor import Tensor
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest, Conflict, Corrupt, NotFound, RemoteAway
from mstore.terms.ids import BlockId

__all__ = ["place"]


def traffic(store: Store) -> Traffic:
    """What came of the remote since the store was opened."""
    elsewhere = store._catalog.index.elsewhere
    assert elsewhere is not None
    assert isinstance(elsewhere.reader, RemoteParts)
    return elsewhere.reader.traffic


def pack_bytes(store: Store) -> int:
    """Bytes of the packs of a store."""
    return sum(path.stat().st_size for path in (store.path / "packs").rglob("*.pack"))


@pytest.fixture(scope="module")
def family() -> Iterator[Place]:
    """A remote with a base, two experts and a virtual merge of them, and a store of all of it."""
    with placed() as made:
        origin = made.author(experts=2)
        merged(origin, "virtual", "base", "e1", "e2", virtual=True)
        origin.push(REMOTE, every=True)
        yield made


@pytest.fixture
def lazy(family: Place, tmp_path: Path) -> Store:
    """A lazy clone of the family."""
    return family.lazy(tmp_path / "lazy")


def origin(family: Place) -> Store:
    """The store from which the family was pushed."""
    return family.open("origin")


def test_a_lazy_clone_has_no_weights(family: Place, lazy: Store) -> None:
    """Refs, records and small files come with the clone, and weights when they are read."""
    assert refs(lazy, "branch") == refs(origin(family), "branch")
    assert pack_bytes(lazy) < pack_bytes(origin(family)) / 4
    view = lazy.view("base")
    view.read("config.json", 0, 100)
    assert traffic(lazy).bytes == 0
    assert files(lazy, "base") == model_files(1)
    assert traffic(lazy).bytes > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["base", "e1", "e2", "virtual"])
def test_what_comes_is_what_was_pushed(family: Place, lazy: Store, name: str) -> None:
    """Every snapshot has its bytes, read through its blocks and checked out."""
    assert files(lazy, name) == files(origin(family), name)
    if name != "virtual":
        lazy.checkout(name, lazy.path.parent / name)
        assert (lazy.path.parent / name / MODEL).read_bytes() == files(origin(family), name)[MODEL]


@pytest.mark.parametrize("way", ["load", "stream", "checkout"])
def test_reads_of_a_whole_model_ask_ahead(lazy: Store, way: str) -> None:
    """Who reads a whole model asks for several blocks in one request, and for no byte twice."""
    view, catalog = lazy.view("e1"), lazy._catalog
    records = [view.record(name) for name in view.tensors]
    blocks = [id for one in records if isinstance(one, Tensor) for id in one.block_ids()]
    places = set(catalog.locate_with_bases(blocks).values())
    if way == "load":
        lazy["e1"].load()
    elif way == "stream":
        b"".join(view.stream(MODEL))
    else:
        lazy.checkout("e1", lazy.path.parent / "out", only=[MODEL])
    assert 0 < traffic(lazy).requests < len(places)
    needed = sum(at.stored_length for at in places)
    # Gaps between ranges are a sixteenth of these at most.
    assert needed <= traffic(lazy).bytes <= needed * 17 // 16


def test_an_open_store_follows_one_that_becomes_lazy(family: Place, tmp_path: Path) -> None:
    """Who has a store open, such as a mount, reads what another process pulled lazily since."""
    path = tmp_path / "store"
    with Store.init(path, block_size=origin(family).block_size) as made:
        made.add_remote(REMOTE, family.url)
        made.pull(REMOTE, ["base"])
    with Store.open(path) as opened:
        assert files(opened, "base") == model_files(1)
        assert not opened.is_lazy
        with Store.open(path) as other:
            other.pull(REMOTE, lazy=True)
        assert files(opened, "e1") == files(origin(family), "e1")
        assert opened.is_lazy


def test_what_is_under_way_is_not_asked_for_again(lazy: Store) -> None:
    """Of a range that is needed soon, only those bytes come that were not asked for."""
    elsewhere = lazy._catalog.index.elsewhere
    assert elsewhere is not None
    view = lazy.view("base")
    pack = lazy._catalog.locate([_first_block(view)])[0].pack
    elsewhere.will_need(pack, 0, 1000)
    first = bytes(elsewhere.read(pack, 0, 500))
    elsewhere.will_need(pack, 500, 1000)
    second = bytes(elsewhere.read(pack, 500, 1000))
    assert traffic(lazy).bytes == 1500
    shutil.rmtree(lazy.path / "cache")
    assert bytes(elsewhere.read(pack, 0, 1500)) == first + second


def _first_block(view: SnapshotView) -> BlockId:
    records = [view.record(name) for name in view.tensors]
    return next(one.block(0) for one in records if isinstance(one, Tensor) and one.nbytes)


def test_what_came_is_kept(lazy: Store) -> None:
    """The second read comes from the cache, also in another process; without the cache, again."""
    files(lazy, "e1")
    with Store.open(lazy.path) as again:
        files(again, "e1")
        assert traffic(again) == Traffic()
    shutil.rmtree(lazy.path / "cache")
    with Store.open(lazy.path) as again:
        files(again, "e1")
        assert traffic(again).bytes > 0


def test_a_merge_reads_its_plan(family: Place, lazy: Store) -> None:
    """A budget is one over the network, too: same plan, same result, and no byte besides."""
    request = MergeRequest(
        base="base", experts=["e1", "e2"], method="task_arithmetic", skip=["i"], budget="60%"
    )
    plan, known = lazy.plan(request, threads=1), origin(family).plan(request, threads=1)
    assert plan.plan == known.plan
    assert traffic(lazy) == Traffic()
    made = lazy.merge(plan, name="m", threads=1)
    theirs = origin(family).merge(known, name=f"m-{lazy.path.parent.name}", threads=1)
    assert made.manifest == theirs.manifest
    assert 0 < made.expert_bytes_read <= plan.planned_expert_bytes
    read = made.expert_bytes_read + made.base_bytes_read
    # Gaps between ranges are a sixteenth of these at most.
    assert made.remote_bytes == traffic(lazy).bytes <= read * 17 // 16
    sound(lazy)


def test_a_plan_says_what_a_merge_brings(lazy: Store) -> None:
    """`bytes_not_here` of a plan, and of a point of a sweep, is what its merge brings: expert and
    base blocks that are not stored here, and what they are differences to."""
    request = MergeRequest(
        base="base", experts=["e1", "e2"], method="linear", skip=["i"], budget="60%"
    )
    plan = lazy.plan(request, threads=1)
    [low, high] = lazy.sweep(replace(request, budget=None), shares=[0.6, 1], threads=1).points
    assert traffic(lazy) == Traffic()
    told = plan.bytes_not_here
    assert told is not None
    assert told == low.bytes_not_here < high.bytes_not_here
    # What is in the cache does not come again.
    with Store.open(lazy.path) as other:
        files(other, "e1")
    rest = lazy.plan(request, threads=1).bytes_not_here
    assert rest is not None
    assert 0 < rest < told
    shutil.rmtree(lazy.path / "cache")
    lazy = Store.open(lazy.path)
    made = lazy.merge(plan, name="m", threads=1)
    # Gaps between ranges are a sixteenth of these at most.
    assert told <= made.remote_bytes <= told * 17 // 16
    assert low.download_seconds(told, 0) == 1
    assert low.download_seconds(told, 1) >= 2
    # The merge made blocks that are here, and the memo table knows them.
    again = lazy.plan(request, threads=1)
    assert again.bytes_not_here == 0
    lazy.prefetch(every=True)
    assert lazy.plan(replace(request, budget=None), threads=1).bytes_not_here == 0


def test_stats_say_what_is_not_here(lazy: Store) -> None:
    """`stats` tells what is only at the remote, and how much of it the cache has."""
    before = lazy.stats()
    [leaning] = before.leans_on
    assert (leaning.remote, before.cache_bytes) == (REMOTE, 0)
    files(lazy, "e1")
    after = lazy.stats()
    assert after.leans_on == before.leans_on
    kept = sum(one.stat().st_size for one in (lazy.path / "cache").rglob("*-*"))
    assert 0 < kept == after.cache_bytes
    assert kept < leaning.bytes
    lazy.prefetch(every=True)
    assert lazy.stats().leans_on == ()


def test_a_merge_leans_on_the_base(lazy: Store) -> None:
    """What a merge does not change stays at the remote, and `show` says how much that is."""
    [before] = lazy.show("base").leans_on
    assert (before.remote, before.blocks) == (REMOTE, 6)
    merged(lazy, "m", "base", "e1")
    [after] = lazy.show("m").leans_on
    assert 0 < after.blocks < before.blocks
    assert not lazy.fsck(read_data=True, threads=1).problems


def test_added_bytes_are_stored_here(family: Place, lazy: Store) -> None:
    """`add` stores all its blocks, though a remote has them."""
    directory = family.model(1, 1)
    report = lazy.add(directory, name="mine", threads=1)
    assert report.blocks_new
    [left] = lazy.show("e1").leans_on or [None]
    assert left is None
    assert lazy.show("mine").leans_on == ()


def test_an_addition_may_differ_from_a_base_elsewhere(family: Place, lazy: Store) -> None:
    """With a base that is only at the remote, `add` stores differences that lean on it."""
    report = lazy.add(family.model(1, 3), name="mine", base="base", threads=1)
    assert "only at origin" in str(report.remarks[-1])
    sound(lazy)
    assert files(lazy, "mine") == model_files(1, 3)
    lazy.gc()
    lazy.push(REMOTE, ["mine"])
    full = Store.open(Store.clone(family.url, lazy.path.parent / "full").path)
    assert files(full, "mine") == model_files(1, 3)
    full.close()
    lazy.push(REMOTE, delete=["mine"])


def test_prefetch_and_drop(lazy: Store) -> None:
    """What was prefetched is read without the remote, and what was dropped is read there."""
    report = lazy.prefetch(["e1"])
    assert report.blocks > 0
    assert lazy.show("e1").leans_on == ()
    assert lazy.prefetch(["e1"]).blocks == 0
    files(lazy, "e1")
    assert traffic(lazy) == Traffic()
    sound(lazy)
    dropped = lazy.drop(["e1"])
    # Others came as bases of differences, and stay.
    assert 0 < dropped.blocks < report.blocks
    [again] = lazy.show("e1").leans_on
    assert again.blocks == dropped.blocks
    assert lazy.view("e1").read("config.json", 0, 100)
    freed = lazy.gc()
    assert freed.freed_bytes + freed.dead_bytes > 0
    assert files(lazy, "e1") == model_files(1, 1)
    sound(lazy)


def test_prefetch_and_drop_of_all(family: Place, lazy: Store) -> None:
    """Both take several snapshots, or all that refs name; a dry run says the same and does nothing.
    What the remote does not have stays, and is named."""
    told = lazy.prefetch(["base", "e1"], dry_run=True)
    assert (told.dry_run, told.bytes_received, traffic(lazy).bytes) == (True, 0, 0)
    came = lazy.prefetch(["base", "e1"])
    assert (came.blocks, came.bytes) == (told.blocks, told.bytes)
    assert came.bytes <= came.bytes_received
    lazy.prefetch(every=True)
    mine = lazy.add(family.model(1, 5), name="mine", threads=1).snapshot
    with pytest.raises(Conflict, match="only one"):
        lazy.drop(["e1", "mine"])
    assert lazy.prefetch(every=True, dry_run=True).blocks == 0
    told_of = lazy.drop(every=True, dry_run=True)
    dropped = lazy.drop(every=True)
    as_told = structs.replace(dropped, dry_run=True, seconds=0)
    assert as_told == structs.replace(told_of, seconds=0)
    assert dropped.only_here == (mine,)
    assert lazy.prefetch(every=True, dry_run=True).blocks == dropped.blocks > 0
    assert files(lazy, "mine") == model_files(1, 5)
    sound(lazy)
    for wrong in (lazy.drop, lazy.prefetch):
        with pytest.raises(BadRequest):
            wrong()


def test_prefetch_of_some_tensors(lazy: Store) -> None:
    """Only tensors that match come."""
    [before] = lazy.show("e1").leans_on
    lazy.prefetch(["e1"], only=["b"])
    [after] = lazy.show("e1").leans_on
    assert after.blocks == before.blocks - 1
    with pytest.raises(NotFound):
        lazy.prefetch(["nothing"])


def test_what_was_not_pushed_stays(family: Place, lazy: Store) -> None:
    """`drop` keeps what an unpushed snapshot needs, and refuses what the remote does not have."""
    lazy.prefetch(["base"])
    mine = lazy.add(family.model(1, 4), name="mine", base="base", threads=1).snapshot
    with pytest.raises(Conflict, match="only one"):
        lazy.drop(["mine"])
    lazy.drop(["base"])
    lazy.gc()
    assert lazy.show("mine").leans_on == ()
    assert files(lazy, mine) == model_files(1, 4)
    assert traffic(lazy) == Traffic()


def test_what_leans_cannot_leave(lazy: Store, tmp_path: Path) -> None:
    """A backup, a clone, a pin, a copy and the removal of the remote refuse, and name prefetch."""
    other = Store.init(tmp_path / "other", block_size=lazy.block_size)
    other.close()
    for act in (
        lambda: lazy.backup(tmp_path / "backup"),
        lambda: Store.clone(lazy.path, tmp_path / "clone"),
        lambda: lazy.pin("base", raw=True),
        lambda: lazy.copy_to(tmp_path / "other", ["base"]),
        lambda: lazy.remove_remote(REMOTE),
    ):
        with pytest.raises(Conflict, match="only at origin") as refused:
            act()
        assert "prefetch" in str(refused.value.texts[2])
    assert not (tmp_path / "clone").exists()


def test_a_base_that_nothing_else_names_leans(family: Place, lazy: Store, tmp_path: Path) -> None:
    """A difference leans on its base also when the base's snapshot is gone; prefetch brings it."""
    mine = lazy.add(family.model(1, 3), name="mine", base="base", threads=1).snapshot
    others = [name for name in refs(lazy) if name != "mine"]
    lazy.remove(*others)
    lazy.gc(reflog_days=0)
    [leans] = lazy.show("mine").leans_on
    assert leans.blocks > 0
    with pytest.raises(Conflict, match="only at origin"):
        lazy.backup(tmp_path / "backup")
    with pytest.raises(Conflict, match="only at origin"):
        lazy.remove_remote(REMOTE)
    assert files(lazy, mine) == model_files(1, 3)
    lazy.prefetch(["mine"])
    assert lazy.show("mine").leans_on == ()
    place = Path(lazy.path)
    lazy.close()
    shutil.rmtree(place / "cache")
    shutil.rmtree(place / "remotes")
    with Store.open(place) as again:
        assert files(again, mine) == model_files(1, 3)


def test_after_a_prefetch_all_is_here(lazy: Store, tmp_path: Path) -> None:
    """With everything here, the remote can go, and backups are whole."""
    lazy.prefetch(every=True)
    lazy.remove_remote(REMOTE)
    lazy.backup(tmp_path / "backup")
    for number in (1, 2):
        assert files(lazy, f"e{number}") == model_files(1, number)


def test_reindex_knows_what_is_elsewhere(lazy: Store) -> None:
    """A new index has the tensors whose blocks are at the remote."""
    before = refs(lazy, "branch")
    path = lazy.path
    lazy.close()
    Store.reindex(path)
    with Store.open(path) as again:
        assert refs(again, "branch") == before
        assert files(again, "e1") == model_files(1, 1)
        sound(again)


def test_reindex_without_tables_drops_nothing(family: Place, lazy: Store) -> None:
    """Where the tables of the remote are lost, too, a new index keeps what may lean on it."""
    mine = lazy.add(family.model(1, 3), name="mine", base="base", threads=1).snapshot
    path = lazy.path
    lazy.close()
    shutil.rmtree(path / "remotes")
    Store.reindex(path)
    with Store.open(path) as again:
        again.fetch(REMOTE)
        assert files(again, mine) == model_files(1, 3)
        assert files(again, "e1") == model_files(1, 1)
        sound(again)


def test_a_bundle_streams(lazy: Store, tmp_path: Path) -> None:
    """A bundle of what is not here reads it at the remote."""
    lazy.bundle(tmp_path / "x.mbundle", ["e1"])
    Store.clone(f"bundle:{tmp_path}/x.mbundle", tmp_path / "out")
    with Store.open(tmp_path / "out") as out:
        assert files(out, "e1") == model_files(1, 1)


def test_pull_follows(family: Place, lazy: Store) -> None:
    """What others push later comes as records, and is read like the rest."""
    store = origin(family)
    family.add(store, f"new-{lazy.path.parent.name}", 1, 5, base="base")
    store.push(REMOTE, [f"new-{lazy.path.parent.name}"])
    before = pack_bytes(lazy)
    lazy.pull(REMOTE)
    assert pack_bytes(lazy) - before < 20_000
    assert files(lazy, f"new-{lazy.path.parent.name}") == model_files(1, 5)


# -- faults ------------------------------------------------------------------------------------


def test_damage_on_the_way_is_asked_for_again(lazy: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that do not hash are asked for once more, and are never shown."""
    read, calls = SharedDirectory.read_each, []

    def flipped(self: SharedDirectory, name: str, spans: list[tuple[int, int]]) -> list[bytes]:
        data = [bytearray(one) for one in read(self, name, spans)]
        if name.startswith("packs/"):
            calls.append(name)
            if len(calls) == 1:
                data[0][len(data[0]) // 2] ^= 1
        return [bytes(one) for one in data]

    monkeypatch.setattr(SharedDirectory, "read_each", flipped)
    assert files(lazy, "e1") == model_files(1, 1)
    assert len(calls) > 1


def test_damage_at_the_remote_is_an_error(place: Place) -> None:
    """A pack that is damaged there gives an error that names the block, and no wrong byte."""
    store = place.store("a")
    place.add(store, "x", 1)
    store.push(REMOTE, every=True)
    other = place.lazy(place.path / "lazy")
    for path in (place.remote / "packs").rglob("*.pack"):
        data = bytearray(path.read_bytes())
        for at in range(4096, len(data) - 4096, 1000):
            data[at] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    with pytest.raises(Corrupt, match="block"):
        files(other, "x")


def test_a_flipped_cache_is_no_damage(lazy: Store) -> None:
    """What is wrong in the cache is brought again, and fsck does not speak of it."""
    files(lazy, "e1")
    flipped = 0
    for path in (lazy.path / "cache").rglob("*-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
        flipped += 1
    assert flipped
    with Store.open(lazy.path) as again:
        assert files(again, "e1") == model_files(1, 1)
        assert traffic(again).bytes > 0
        sound(again)


def test_a_remote_that_is_away(place: Place) -> None:
    """Without the remote, what is here is read, and the rest is an error; then it is back."""
    store = place.store("a")
    place.add(store, "x", 1)
    store.push(REMOTE, every=True)
    other = place.lazy(place.path / "lazy")
    place.remote.rename(place.path / "away")
    assert other.view("x").read("config.json", 0, 10)
    with pytest.raises(RemoteAway, match="origin"):
        files(other, "x")
    (place.path / "away").rename(place.remote)
    assert files(other, "x") == model_files(1)


def test_a_pack_that_was_collected(place: Place) -> None:
    """A pack that gc of the remote removed is an error that names the remote and says fetch."""
    store = place.store("a")
    place.add(store, "x", 1)
    store.push(REMOTE, ["x"])
    other = place.lazy(place.path / "lazy")
    store.push(REMOTE, delete=["x"])
    for _ in range(2):
        store.remote_gc(REMOTE, reflog_days=0, grace_hours=0.0)
    with pytest.raises(Corrupt, match="removed") as refused:
        files(other, "x")
    assert "fetch" in str(refused.value.texts[2])
    other.fetch(REMOTE)
    with pytest.raises(Corrupt):
        files(other, "x")
    store.push(REMOTE, ["x"])
    other.fetch(REMOTE)
    assert files(other, "x") == model_files(1)


def test_only_what_lost_blocks_is_told(place: Place) -> None:
    """Where the remote lost blocks of one model, fsck names this one only, prefetch refuses it, and
    another, which is not here either, is whole."""
    store = place.store("a")
    place.add(store, "x", 1)
    place.add(store, "y", 2)
    # The pack of the second one has nothing that the first needs.
    store.push(REMOTE, ["y"])
    store.push(REMOTE, ["x"])
    other = place.lazy(place.path / "lazy")
    store.push(REMOTE, delete=["x"])
    for _ in range(2):
        store.remote_gc(REMOTE, reflog_days=0, grace_hours=0.0)
    other.fetch(REMOTE)
    report = other.fsck(threads=1)
    assert report.problems
    assert {name for one in report.affected for name in one.refs} == {"x"}
    with pytest.raises(Corrupt, match="neither here nor at a lazy remote"):
        other.prefetch(["x"])
    assert other.prefetch(["y"]).blocks > 0
    assert files(other, "y") == model_files(2)


def test_the_cache_has_a_limit(family: Place, tmp_path: Path) -> None:
    """The cache never has more than its limit, and reads go on."""
    Store.clone(family.url, tmp_path / "small", lazy=True)
    limit = 200_000
    with Store.open(tmp_path / "small") as store:
        store.cache_bytes_on_disk = limit
        for name in ("base", "e1", "e2", "base"):
            files(store, name)
            used = sum(p.stat().st_size for p in (store.path / "cache").rglob("*-*"))
            assert used <= limit
        assert used > 0
    Store.clone(family.url, tmp_path / "none", lazy=True)
    with Store.open(tmp_path / "none") as store:
        store.cache_bytes_on_disk = 0
        assert files(store, "e1") == model_files(1, 1)
        assert not (store.path / "cache").exists()


def test_one_cache_for_what_came_and_what_was_computed(family: Place, tmp_path: Path) -> None:
    """A virtual merge whose blocks are in the cache brings nothing of experts; parts of packs and
    computed blocks together have no more than the limit."""
    Store.clone(family.url, tmp_path / "one", lazy=True)

    def read(limit: int | None = None) -> int:
        with Store.open(tmp_path / "one") as store:
            store.cache_bytes_on_disk = limit
            assert files(store, "virtual") == files(origin(family), "virtual")
            return traffic(store).bytes

    def used(kind: str = "*/*/*") -> int:
        return sum(one.stat().st_size for one in (tmp_path / "one" / "cache").glob(kind))

    first = read()
    assert used("blocks/*/*") > 0
    assert used() > used("blocks/*/*")
    for one in (tmp_path / "one" / "cache").glob("??"):
        shutil.rmtree(one)
    assert read() < first / 2
    limit = 200_000
    for _ in range(2):
        read(limit)
        assert 0 < used() <= limit


def test_gc_keeps_what_leans(lazy: Store) -> None:
    """gc of a lazy store drops nothing that refs need, whether it is here or there."""
    merged(lazy, "m", "base", "e1", "e2")
    before = files(lazy, "m")
    lazy.gc()
    assert files(lazy, "m") == before
    sound(lazy)
    lazy.remove("m")
    lazy.gc(reflog_days=0)
    sound(lazy)


def test_a_store_without_tables_says_fetch(lazy: Store) -> None:
    """Without `remotes/`, blocks are missing until the next fetch, and nothing is dropped."""
    path = lazy.path
    lazy.close()
    shutil.rmtree(path / "remotes")
    with Store.open(path) as again:
        with pytest.raises(Corrupt):
            files(again, "e1")
        again.fetch(REMOTE)
        assert files(again, "e1") == model_files(1, 1)
