"""Fetch and pull: what refs need comes, proved, in one step; hostile remotes harm nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exchanges import REMOTE, Place, files, merged, place, refs, sound
from proof_models import model_files, write_files

from mstore.api import Store
from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import HEADER_BYTES, Kind, PackWriter
from mstore.remotes import arrival, outgoing
from mstore.remotes.layout import (
    LISTS,
    MOST_LIST_BYTES,
    NoteRow,
    PackRow,
    PackState,
    RefRow,
    SnapshotRow,
    TableId,
    table_name,
)
from mstore.remotes.needs import gather, is_ancestor
from mstore.remotes.places import RemotePlaces
from mstore.remotes.shared_directory import SharedDirectory
from mstore.store import contents, unnamed_packs
from mstore.store.leases import Lease
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.note import VALUE, Note, packed
from mstore.store.objects.snapshot import PREVIOUS, Parent, SnapshotRecord
from mstore.terms.errors import (
    BadName,
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    MstoreError,
    NotFound,
    StorageFailed,
)
from mstore.terms.ids import BlockId, PackId, SnapshotId

__all__ = ["place"]


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 32 KiB, so that a model needs several."""
    monkeypatch.setattr(outgoing, "PACK_BYTES", 32 << 10)


# -- refs ----------------------------------------------------------------------------------------


def test_fetch_moves_no_branch(place: Place) -> None:
    """A fetch moves only refs below remotes/NAME/; without names it removes those that are gone."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    place.add(a, "y", 2)
    a.push(REMOTE, every=True)
    report = b.fetch(REMOTE)
    assert {one.name for one in report.fetched} == {"x", "y"}
    assert not refs(b, "branch", "tag")
    a.push(REMOTE, delete=["x"])
    a.push(REMOTE, ["y"])
    assert not b.fetch(REMOTE, ["y"]).fetched
    assert "remotes/origin/x" in refs(b)
    [moved] = b.fetch(REMOTE).fetched
    assert (moved.name, moved.new) == ("x", None)
    assert "remotes/origin/x" not in refs(b)
    assert [one.new for one in b.reflog("remotes/origin/x")] == [None, moved.old]
    assert files(b, str(moved.old)) == model_files(1)


@pytest.mark.parametrize("jobs", [0, -1, 257, 1.5, True])
def test_jobs(place: Place, jobs: Any) -> None:
    """A number of jobs that makes no sense is refused before anything is done."""
    a = place.store("a")
    place.add(a, "x", 1)
    for call in (
        lambda: a.push(REMOTE, ["x"], jobs=jobs),
        lambda: a.fetch(REMOTE, jobs=jobs),
        lambda: a.pull(REMOTE, jobs=jobs),
        lambda: a.remote_fsck(REMOTE, jobs=jobs),
        lambda: Store.clone(place.url, place.path / "c", jobs=jobs),
    ):
        with pytest.raises(BadRequest, match="jobs must be"):
            call()
    assert not place.remote.exists()


def test_which_refs(place: Place) -> None:
    """Patterns choose; a name that the remote lacks is refused, with the similar one."""
    a, b = place.store("a"), place.store("b")
    for number, name in enumerate(("team/a", "team/b", "other")):
        place.add(a, name, number)
    with pytest.raises(NotFound, match="no remote"):
        b.fetch(REMOTE)
    a.push(REMOTE, every=True)
    assert {one.name for one in b.fetch(REMOTE, ["team/*"]).fetched} == {"team/a", "team/b"}
    with pytest.raises(NotFound, match="no such ref") as caught:
        b.fetch(REMOTE, ["othre"])
    assert "other" in str(caught.value.hint)
    assert set(refs(b)) == {"remotes/origin/team/a", "remotes/origin/team/b"}


def test_a_name_below_one_that_is_gone(place: Place) -> None:
    """The remote has `x/y` where it had `x`: both fetches understand."""
    a, b, c = place.store("a"), place.store("b"), place.store("c")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    b.fetch(REMOTE)
    c.fetch(REMOTE)
    a.remove("x")
    place.add(a, "x/y", 2)
    a.push(REMOTE, ["x/y"], delete=["x"])
    b.fetch(REMOTE)
    c.fetch(REMOTE, ["x/y"])
    assert set(refs(b)) == set(refs(c)) == {"remotes/origin/x/y"}


def test_pull(place: Place) -> None:
    """Branches fast-forward or are made; what has commits of its own stays, and is named."""
    a = place.store("a")
    for number, name in enumerate(("ahead", "behind", "apart", "same")):
        place.add(a, name, number)
    a.tag("v1", "same")
    a.push(REMOTE, every=True)
    b = place.clone("b")
    place.add(b, "ahead", 5)
    place.add(b, "apart", 6)
    b.remove("v1")
    b.tag("v1", "behind")
    place.add(a, "behind", 7)
    place.add(a, "apart", 8)
    place.add(a, "new", 9)
    place.add(a, "under/x", 3)
    place.add(b, "under", 4)
    a.push(REMOTE, every=True)
    before = refs(b, "branch", "tag")

    report = b.pull(REMOTE)

    assert set(report.diverged) == {"apart", "v1", "under/x"}
    assert {one.name for one in report.moved} == {"behind", "new"}
    now = refs(b, "branch", "tag")
    assert now["behind"] == a.show("behind").snapshot
    assert now["new"] == a.show("new").snapshot
    assert {name: now[name] for name in before if name != "behind"} == {
        name: id for name, id in before.items() if name != "behind"
    }
    assert files(b, "origin/under/x") == model_files(3)
    assert b.reflog("behind")[0].action == "pull origin"
    again = b.pull(REMOTE)
    assert not again.moved
    assert set(again.diverged) == set(report.diverged)
    sound(b)


def test_pull_over_a_merge(place: Place) -> None:
    """A branch moves to a merge that it is an input of."""
    a = place.store("a")
    place.add(a, "base", 1)
    place.add(a, "tuned", 1, 1, base="base")
    a.push(REMOTE, every=True)
    b = place.clone("b")
    id = merged(a, "merge", "base", "tuned")
    a.reset("tuned", str(id))
    a.push(REMOTE, ["tuned"])
    assert [one.new for one in b.pull(REMOTE, ["tuned"]).moved] == [id]


# -- what comes ----------------------------------------------------------------------------------


def test_parts_of_packs(place: Place) -> None:
    """Of a pack of which little is needed, only that comes."""
    a, b = place.store("a"), place.store("b")
    for number in range(6):
        place.add(a, f"m{number}", number)
    report = a.push(REMOTE, every=True)
    assert report.packs == 1
    got = b.fetch(REMOTE, ["m3"])
    assert got.bytes_received < report.bytes_sent / 3
    assert files(b, "origin/m3") == model_files(3)
    sound(b)
    rest = b.fetch(REMOTE)
    assert rest.bytes_received < report.bytes_sent * 1.1
    sound(b)


def whole_with_dead_bytes(place: Place) -> Store:
    """A store that has one of two models of a pack, which came whole."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1, codec="raw")
    place.add(a, "y", 2, codec="dense")
    assert a.push(REMOTE, every=True).packs == 1
    size = next(iter(place.state().packs().values())).size
    assert b.fetch(REMOTE, ["x"]).bytes_received >= size
    return b


def test_dead_bytes_of_whole_packs(place: Place) -> None:
    """Only what was asked for has rows; gc frees the rest; what comes later is complete."""
    b = whole_with_dead_bytes(place)
    sound(b)
    b.gc()
    sound(b)
    b.fetch(REMOTE)
    assert files(b, "origin/y") == model_files(2)
    sound(b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_old_index", [True, False])
def test_reindex_after_a_whole_pack(place: Place, *, use_old_index: bool) -> None:
    """A rebuilt index lists no tensor whose blocks are not there, so a later fetch is complete."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "z", 3)
    a.push(REMOTE, ["z"])
    # One pack with all of x, with the tensors of y, and only those blocks of it that z has not.
    place.add(a, "x", 1, codec="raw")
    place.add(a, "w", 2, codec="raw")
    place.add(a, "y", 3, 1, base="z")
    assert a.push(REMOTE, every=True).packs == 1
    b.fetch(REMOTE, ["x", "w"])
    packs = {path.name for path in (place.path / "b" / "packs").rglob("*.pack")}
    assert packs & {path.name for path in (place.remote / "packs").rglob("*.pack")}
    b.close()
    Store.reindex(place.path / "b", use_old_index=use_old_index)
    b = place.open("b")
    _stored_tensors_are_whole(b)
    b.fetch(REMOTE)
    for name, content in (("x", (1, 0)), ("y", (3, 1)), ("z", (3, 0))):
        assert files(b, f"origin/{name}") == model_files(*content)
    _stored_tensors_are_whole(b)


def _stored_tensors_are_whole(store: Store) -> None:
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        ids = list(catalog.index.record_ids(transaction, Kind.TENSOR))
    for id in ids:
        assert all(catalog.has_blocks(list(catalog.tensor(id).block_ids()))), id.hex()


def test_a_pack_that_is_condemned_here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pack that gc has given up here, and that a reader still has, only parts come again."""
    monkeypatch.setattr(arrival, "_WHOLE", 0.2)
    b = whole_with_dead_bytes(place)
    b.push(REMOTE, delete=["x"])
    [pack] = packs_here(b)
    reader = Lease(b._catalog.layout, b._catalog.index, "reader")
    try:
        b.gc(reflog_days=0)
        assert pack in {one.pack for one in unnamed_packs.listed(b._catalog.index)}
        b.fetch(REMOTE)
        assert pack not in packs_here(b)
    finally:
        reader.release()
    b.gc(reflog_days=0)
    assert files(b, "origin/y") == model_files(2)
    sound(b)


def packs_here(store: Store) -> set[PackId]:
    """The packs that rows of a store name."""
    with store._catalog.index.env.read() as transaction:
        return {pack for pack, _ in store._catalog.index.packs(transaction)}


def test_two_remotes_with_the_same_packs(place: Place) -> None:
    """A pack that came whole from one remote does not come again by that name from another."""
    b = whole_with_dead_bytes(place)
    shutil.copytree(place.remote, place.path / "other")
    b.add_remote("other", (place.path / "other").as_uri())
    before = packs_here(b)
    b.fetch("other")
    assert before < packs_here(b)
    assert files(b, "other/x") == model_files(1)
    assert files(b, "other/y") == model_files(2)
    sound(b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hold", [False, True])
def test_gc_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch, *, hold: bool) -> None:
    """What a fetch found here, and gc removed before it published, is not published without."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "base", 1)
    a.push(REMOTE, every=True)
    # Another snapshot of another manifest, with the same tensors.
    own = write_files(place.path / "own", model_files(1) | {"config.json": b"{}"})
    b.add(own, name="own", threads=1)
    b.remove("own")
    with Store.open(place.path / "b") as other:
        run = arrival.Arrival.run

        def late(self: arrival.Arrival) -> None:
            run(self)
            other.gc(reflog_days=0)

        monkeypatch.setattr(arrival.Arrival, "run", late)
        if hold:
            # A reader of the contents: gc keeps them, and the fetch goes through.
            with contents.held(other._catalog, other._catalog.snapshot_ids()):
                b.fetch(REMOTE)
        else:
            with pytest.raises(Conflict, match="run the command again"):
                b.fetch(REMOTE)
            assert not refs(b)
    monkeypatch.undo()
    b.fetch(REMOTE)
    assert files(b, "origin/base") == model_files(1)
    sound(b)


@pytest.mark.rest
def test_upkeep(place: Place) -> None:
    """gc, repair, prune, reindex and backup after a fetch leave a sound store that goes on."""
    a = place.store("a")
    place.add(a, "x", 1)
    place.add(a, "x", 1, 1, base="x")
    place.add(a, "y", 2)
    a.push(REMOTE, every=True)
    b = place.store("b")
    b.pull(REMOTE)
    assert not b.fsck(read_data=True).garbage
    b.prune(keep_last=1)
    b.gc(reflog_days=0)
    b.repair(read_data=True)
    b.backup(place.path / "backup")
    sound(b)
    with Store.open(place.path / "backup") as backup:
        assert files(backup, "origin/x") == model_files(1, 1)
        sound(backup)
    b.close()
    Store.reindex(place.path / "b")
    b = place.open("b")
    sound(b)
    place.add(a, "x", 3)
    a.push(REMOTE, every=True)
    b.pull(REMOTE)
    assert files(b, "x") == model_files(3)
    sound(b)
    with Store.open(place.path / "backup") as backup:
        assert [one.name for one in backup.remotes()] in ([], [REMOTE])


def test_a_copy_has_no_remotes(place: Place) -> None:
    """A clone of a directory does not know the remotes of its source: they may be a stranger's."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    Store.clone(place.path / "a", place.path / "copy")
    with Store.open(place.path / "copy") as copy:
        assert copy.remotes() == []
        sound(copy)


def test_a_store_that_is_only_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not write a store is told so, before anything is asked of the remote."""
    a = place.store("a")

    def refuse(_layout: object) -> None:
        raise StorageFailed("this store can be read and not written")

    monkeypatch.setattr("mstore.store.layout.require_writable", refuse)
    with pytest.raises(StorageFailed, match="read and not written"):
        a.fetch(REMOTE)
    assert not (place.path / "a" / "remotes").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_directory_that_is_only_read(place: Place) -> None:
    """The same, by modes."""
    a = place.store("a")
    os.chmod(place.path / "a" / "tmp", 0o500)
    with pytest.raises(StorageFailed):
        a.fetch(REMOTE)


def test_a_shared_store(place: Place) -> None:
    """What a fetch makes in a store of several users has the modes that the rest has."""
    a, b = place.store("a"), place.store("b")
    b._catalog.configure({"shared": "group"})
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    b.pull(REMOTE)
    place.add(b, "y", 2)
    b.push(REMOTE, every=True)
    for path in (place.path / "b" / "remotes").rglob("*"):
        mode = path.stat().st_mode
        wanted = 0o2070 if path.is_dir() else 0o040
        assert mode & wanted == wanted, path
    sound(b)


# -- interruption --------------------------------------------------------------------------------


def reading(monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    """Tell the name of everything that is read."""
    read = SharedDirectory.read_each

    def told(self: SharedDirectory, name: str, spans: Any) -> Any:
        tell(name)
        return read(self, name, spans)

    monkeypatch.setattr(SharedDirectory, "read_each", told)


@pytest.mark.usefixtures("small_packs")
def test_interrupted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole packs that a killed fetch downloaded are used; nothing else is left."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1, codec="raw")
    assert a.push(REMOTE, every=True).packs > 2

    def stop(name: str) -> None:
        if list((place.path / "b").rglob("incoming/*.pack")):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        reading(patch, stop)
        with pytest.raises(KeyboardInterrupt):
            b.fetch(REMOTE, jobs=1)
    incoming = place.path / "b" / "remotes" / REMOTE / "incoming"
    there = {path.name for path in incoming.iterdir()}
    assert there
    assert not refs(b)
    (incoming / f"{'ab' * 32}.pack").write_bytes(b"of a fetch that never goes on")
    (incoming / f"{'cd' * 32}.part").write_bytes(b"of one that was killed")
    sizes = {path.name: path.stat().st_size for path in (place.remote / "packs").rglob("*.pack")}
    finished = sum(sizes[name] for name in there if name in sizes)
    assert finished
    assert b.fetch(REMOTE).bytes_received < sum(sizes.values()) - finished / 2
    assert not list(incoming.iterdir())
    assert files(b, "origin/x") == model_files(1)
    sound(b)


@pytest.mark.usefixtures("small_packs")
def test_what_a_fetch_of_some_refs_leaves(place: Place) -> None:
    """A fetch of other refs leaves what an interrupted one can go on with, and drops the rest."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1, codec="raw")
    place.add(a, "y", 2)
    a.push(REMOTE, every=True)
    packs = list((place.remote / "packs").rglob("*.pack"))
    b.fetch(REMOTE, ["y"])
    incoming = place.path / "b" / "remotes" / REMOTE / "incoming"
    for path in packs:
        shutil.copy(path, incoming / path.name)
    (incoming / f"{'ab' * 32}.pack").write_bytes(b"which the remote does not have")
    a.note("y", {"a": 1})
    a.push(REMOTE, ["y"])
    b.fetch(REMOTE, ["y"])
    assert {path.name for path in incoming.iterdir()} == {path.name for path in packs}
    b.fetch(REMOTE)
    assert not list(incoming.iterdir())
    sound(b)


def test_a_damaged_download_is_not_kept(place: Place) -> None:
    """A pack that came damaged is downloaded again, and does not stop every later fetch."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1, codec="raw")
    a.push(REMOTE, every=True)
    [path] = (place.remote / "packs").rglob("*.pack")
    sane = path.read_bytes()
    path.write_bytes(sane[:9000] + bytes([sane[9000] ^ 1]) + sane[9001:])
    with pytest.raises(Corrupt, match="origin has damaged data"):
        b.fetch(REMOTE)
    assert not refs(b)
    path.write_bytes(sane)
    b.fetch(REMOTE)
    assert files(b, "origin/x") == model_files(1)


def test_two_fetches_at_once(place: Place) -> None:
    """Fetches of one remote in one store wait for each other, and both end right."""
    from threading import Thread

    a = place.store("a")
    for number in range(3):
        place.add(a, f"m{number}", number)
    a.push(REMOTE, every=True)
    place.store("b")
    stores = [place.open("b") for _ in range(3)]
    failed: list[BaseException] = []

    def run(store: Store) -> None:
        try:
            store.fetch(REMOTE)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    sound(stores[0])


# -- other remotes at the address ----------------------------------------------------------------


def test_an_older_root(place: Place) -> None:
    """A remote that went back is refused, also by a push; what was here stays."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    shutil.copytree(place.remote, place.path / "before")
    place.add(a, "x", 2)
    a.push(REMOTE, every=True)
    b.fetch(REMOTE)
    shutil.rmtree(place.remote)
    shutil.copytree(place.path / "before", place.remote)
    for call in (lambda: b.fetch(REMOTE), lambda: a.push(REMOTE, ["x"])):
        with pytest.raises(Conflict, match="went back from generation 2 to 1"):
            call()
    assert files(b, "origin/x") == model_files(2)
    a.remove_remote(REMOTE)
    a.add_remote(REMOTE, place.url)
    a.push(REMOTE, ["x"])
    assert files(place.clone("c"), "x") == model_files(2)


def test_another_remote(place: Place) -> None:
    """Another remote at the address is no news of this one."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    b.fetch(REMOTE)
    shutil.rmtree(place.remote)
    place.add(place.store("c"), "x", 2)
    place.open("c").push(REMOTE, every=True)
    for call in (lambda: b.fetch(REMOTE), lambda: a.push(REMOTE, ["x"])):
        with pytest.raises(Conflict, match="another remote is at this address"):
            call()


# -- damage --------------------------------------------------------------------------------------


class Snapshot:
    """A remote, and a store that can be put back to before it fetched."""

    def __init__(self, place: Place) -> None:
        self.place = place
        a = place.store("a")
        place.add(a, "x", 1)
        a.note("x", {"k": 1})
        a.push(REMOTE, every=True)
        a.tag("v1", "x")
        a.push(REMOTE, ["v1"])
        place.store("b").close()

    def fetch(self) -> dict[str, SnapshotId]:
        """Fetch into a fresh store; a fetch either brings all, right, or raises and leaves none."""
        path = self.place.path / "fresh"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.place.path / "b", path)
        with Store.open(path) as store:
            try:
                store.fetch(REMOTE)
            except MstoreError:
                assert not refs(store)
                assert not list(store._catalog.snapshot_ids())
                raise
            for name, id in refs(store).items():
                assert files(store, str(id)) == model_files(1), name
            return refs(store)


@pytest.fixture
def snapshot(place: Place) -> Snapshot:
    """A remote of one model, and a store that has fetched nothing."""
    return Snapshot(place)


def small_objects(place: Place) -> list[Path]:
    """The root that counts, lists, tables."""
    roots = sorted((place.remote / "roots").iterdir())
    below = [path for kind in ("lists", "tables") for path in (place.remote / kind).iterdir()]
    return [roots[-1], *below]


@pytest.mark.rest
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.rest)])
def test_every_byte_of_small_objects(snapshot: Snapshot, half: int) -> None:
    """A flipped bit anywhere in a list or table is an error that names it; in the root, too, or
    it says as much of the same lists.
    """
    place = snapshot.place
    state = place.state()
    places = RemotePlaces(place.looking(), state)
    wanted = {kind: dict(state.rows(kind)) for kind in LISTS}

    def read() -> None:
        now = place.state()
        assert {kind: dict(now.rows(kind)) for kind in LISTS if now.root.of(kind)}.items() <= (
            wanted.items()
        )
        for row in now.packs().values():
            places.entries(row, now.root.block_size)

    read()
    root, *others = small_objects(place)
    for path in (root, *others):
        data = path.read_bytes()
        told: list[str] = []
        tried = range(half, len(data), 2)
        for at in tried:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            try:
                read()
            except MstoreError as error:
                told.append(str(error))
        path.write_bytes(data)
        if path != root:
            assert all(path.name in one for one in told)
            # Lists of earlier roots are not read.
            assert len(told) in ({0, len(tried)} if path.parent.name == "lists" else {len(tried)})


@pytest.mark.rest
@pytest.mark.parametrize("part", range(3))
def test_bytes_of_small_objects(snapshot: Snapshot, part: int) -> None:
    """A fetch from a remote with a flipped bit fails, or brings what it should."""
    sane = snapshot.fetch()
    for path in small_objects(snapshot.place):
        data = path.read_bytes()
        step = max(1, len(data) // 6)
        for at in range(part * step // 3, len(data), step):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
            try:
                found = snapshot.fetch()
            except MstoreError:
                continue
            assert found.items() <= sane.items()
        path.write_bytes(data)


def test_bytes_of_packs(snapshot: Snapshot) -> None:
    """A flipped bit in a pack is an error that names it, or lies where nothing was needed."""
    for path in (snapshot.place.remote / "packs").rglob("*.pack"):
        data = path.read_bytes()
        told: list[str] = []
        for at in [0, 8, 20, 4096, 9000, len(data) // 2, *range(len(data) - 4000, len(data), 397)]:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            try:
                snapshot.fetch()
            except MstoreError as error:
                told.append(str(error))
        path.write_bytes(data)
        assert told
        assert [one for one in told if "origin" not in one and path.stem[:12] not in one] == []


@pytest.mark.rest
def test_missing_and_foreign_objects(snapshot: Snapshot) -> None:
    """A missing, cut or exchanged object is an error, and nothing is published."""
    others = small_objects(snapshot.place)[1:]
    others += list((snapshot.place.remote / "packs").rglob("*.pack"))
    for path in others:
        data = path.read_bytes()
        used = True
        # What lies sound under another name of the kind is foreign here.
        foreign = [one.read_bytes() for one in others if one.suffix == path.suffix and one != path]
        for bad in (None, b"", data[: len(data) // 2], b"\0" * len(data), *foreign):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            try:
                snapshot.fetch()
                used = False
            except MstoreError:
                pass
            path.write_bytes(data)
        # Lists that no root names any more harm nobody.
        assert used or path.parent.name in ("lists", "tables"), path
    assert snapshot.fetch()


# -- hostile remotes -----------------------------------------------------------------------------


def rows(place: Place, kind: str) -> list[Any]:
    return list(place.state().rows(kind).values())


def refused(place: Place, error: type[MstoreError], match: str = ".") -> None:
    """A fetch and a push raise this, and nothing of it is here."""
    b = place.store(f"refused{len(list(place.path.iterdir()))}")
    with pytest.raises(error, match=match):
        b.fetch(REMOTE)
    assert not refs(b)
    sound(b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["../../x", "a//b", "a/../b", "", "a" * 300, "ab" * 20, "remotes/a/b", "-x\x1b[2J"]
)
def test_hostile_names(place: Place, name: str) -> None:
    """A ref that no ref can be called is refused."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    [row] = rows(place, "refs")
    place.forge("refs", [msgspec.structs.replace(row, name=name)])
    refused(place, BadName)


def test_hostile_refs(place: Place) -> None:
    """Unknown kinds, refs below each other, at snapshots that are not there."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    [row] = rows(place, "refs")
    place.forge("refs", [msgspec.structs.replace(row, kind="remote")])
    refused(place, Corrupt, "'remote'")
    place.forge("refs", [row, msgspec.structs.replace(row, name="x/y")])
    refused(place, Conflict, "is a ref")
    place.forge("refs", [RefRow("x", "branch", bytes(32), ())])
    refused(place, Corrupt, "lacks this snapshot")


def test_hostile_lists(place: Place) -> None:
    """Lists that lie about their rows, are too long, in no order, or of rows without end."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    row = rows(place, "refs")[0]
    other = msgspec.structs.replace(row, name="a")
    for bad in ({"rows": 2}, {"rows": 0}, {"rows": 1 << 40}, {"size": MOST_LIST_BYTES + 1}):
        place.forge("refs", [row], bad)
        refused(place, Corrupt, "list|root")
    place.forge("refs", [row], {"size": MOST_LIST_BYTES})
    refused(place, Corrupt, "shorter")
    place.forge("refs", [row, other])
    refused(place, Corrupt, "not what the root says")
    place.forge("refs", [row], {"first": "00"})
    refused(place, Corrupt, "not what the root says")
    place.forge("refs", [row], {"id": "../../etc/passwd"})
    refused(place, Corrupt, "not the root")


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 3},
        {"block_size": 1 << 62},
        {"block_size": -1},
        {"version": 99},
        {"uuid": "x"},
        {"generation": -5},
        {"lists": [{}]},
        {"lists": None},
    ],
)
def test_hostile_roots(place: Place, change: dict[str, Any]) -> None:
    """A root that says what cannot be is refused, by a clone too, which leaves nothing."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    state = place.state()
    root = msgspec.to_builtins(state.root) | {"generation": 7} | change
    data = msgspec.json.encode({"mstore-remote": root})
    place.objects().swap_root(data, state.stamp)
    wanted = Incompatible if "version" in change else Corrupt
    refused(place, wanted)
    with pytest.raises(wanted):
        Store.clone(place.url, place.path / "clone")
    assert not (place.path / "clone").exists()


def hostile_pack(place: Place, change: Callable[[PackWriter], None]) -> PackRow:
    """Put a pack with what `change` appends, and its table; return its row."""
    path = place.path / f"hostile{len(list(place.path.iterdir()))}"
    writer = PackWriter(path)
    change(writer)
    sealed = writer.seal()
    data = path.read_bytes()
    table = data[:HEADER_BYTES] + b"".join(entry.encode() for entry in sealed.entries)
    objects, id = place.objects(), TableId.of(table)
    name = sealed.id.hex()
    objects.put_bytes(f"packs/{name[:2]}/{name}.pack", data)
    objects.put_bytes(table_name(1, id), table)
    count = len(sealed.entries)
    return PackRow(
        bytes(sealed.id), len(data), PackState.LIVE, 0, count, 1, bytes(id), 0, len(table)
    )


def test_hostile_tables(place: Place) -> None:
    """Lengths beyond the pack or the block size, unknown codecs, tables that are not there."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    [row] = rows(place, "packs")
    sane = rows(place, "packs")
    for bad, match in (
        ({"length": 1 << 40}, "a table of"),
        ({"entries": 1 << 40}, "a table of"),
        ({"size": 10}, "a table of"),
        ({"size": 8192}, "impossible entry"),
        ({"offset": 1 << 62}, "shorter"),
        ({"table": bytes(32)}, "lacks an object"),
        ({"id": b"\1" * 32}, "does not match its pack"),
    ):
        place.forge("packs", [msgspec.structs.replace(row, **bad)])
        refused(place, MstoreError, match)
    place.forge("packs", [msgspec.structs.replace(row, size=row.size + 4096)])
    refused(place, Corrupt, "shorter|does not match")

    block = b"block" * 100
    for codec, plain, match in (
        (Codec.RAW, 1 << 31, "impossible"),
        (77, 500, "newer mstore"),
        (next(one for one in Codec if one.is_delta), 500, "impossible"),
    ):

        def lie(writer: PackWriter, codec: int = codec, plain: int = plain) -> None:
            writer.append_raw(BlockId.of(block), block, 1, "f", 0)
            entry = writer._entries[0]
            writer._entries[0] = msgspec.structs.replace(entry, codec=int(codec), raw_length=plain)

        place.forge("packs", sorted([*sane, hostile_pack(place, lie)], key=lambda one: one.id))
        refused(place, MstoreError, match)


def test_hostile_records(place: Place) -> None:
    """A record that is not canonical, a note of another snapshot, a manifest of nothing."""
    a = place.store("a")
    id = place.add(a, "x", 1)
    a.note("x", {"k": 1})
    a.push(REMOTE, every=True)
    packs = rows(place, "packs")
    record = a._catalog.snapshot(id)

    def with_snapshot(made: SnapshotRecord, *more: tuple[Any, Kind, bytes]) -> None:
        data = made.encode()

        def append(writer: PackWriter) -> None:
            writer.append_small(SnapshotId.of(data), Kind.SNAPSHOT, Codec.RAW, 1, data, len(data))
            for name, kind, payload in more:
                writer.append_small(name, kind, Codec.RAW, 1, payload, len(payload))

        pack = hostile_pack(place, append)
        new = bytes(SnapshotId.of(data))
        place.forge("packs", sorted([*packs, pack], key=lambda one: one.id))
        place.forge("snapshots", [SnapshotRow(new, pack.id, is_whole=True)])
        place.forge("refs", [RefRow("x", "branch", new, ())])

    with_snapshot(msgspec.structs.replace(record, manifest=b"\7" * 32))
    refused(place, Corrupt, "lacks this manifest")
    bad = msgspec.msgpack.encode({"not": "a plan"})
    from mstore.terms.ids import PlanId

    with_snapshot(
        msgspec.structs.replace(record, plan=bytes(PlanId.of(bad)), coverage=None),
        (PlanId.of(bad), Kind.PLAN, bad),
    )
    refused(place, Corrupt)
    # A parent that nobody has ends the history there.
    with_snapshot(msgspec.structs.replace(record, parents=(Parent(PREVIOUS, b"\5" * 32),)))
    b = place.store("lost-parent")
    b.fetch(REMOTE)
    assert files(b, "origin/x") == model_files(1)


def test_hostile_notes(place: Place) -> None:
    """A note is not about a snapshot because a list says so."""
    a = place.store("a")
    id = place.add(a, "x", 1)
    a.push(REMOTE, every=True)
    note = Note(b"\1" * 32, (), VALUE, "k", packed(1), "", 5)
    data = note.encode()

    def append(writer: PackWriter) -> None:
        writer.append_small(note.id(), Kind.NOTE, Codec.RAW, 1, data, len(data))

    pack = hostile_pack(place, append)
    place.forge("packs", sorted([*rows(place, "packs"), pack], key=lambda one: one.id))
    place.forge("notes", [NoteRow(bytes(id), bytes(note.id()), pack.id)])
    refused(place, Corrupt, "is not about snapshot")


def test_spans() -> None:
    """Neighbours are read together, up to a limit; what is far apart is not."""
    from mstore.remotes.records import spans

    def at(offset: int, length: int) -> tuple[Any, Location]:
        return (Kind.BLOCK, bytes(32)), Location(PackId(bytes(32)), offset, length, length, 0, 1)

    found = list(spans([at(0, 10), at(10, 10), at(1 << 20, 10), at((1 << 20) + 10, 10)], 15))
    assert [(one.start, one.end) for one in found] == [
        (0, 10),
        (10, 20),
        (1 << 20, (1 << 20) + 10),
        ((1 << 20) + 10, (1 << 20) + 20),
    ]
    [one] = spans([at(0, 10), at(100, 10)])
    assert (one.start, one.end, len(one.entries)) == (0, 110, 2)


class Circle:
    """Records whose parents go in a circle, which ids of hashes forbid; of nothing else."""

    def __init__(self, record: SnapshotRecord, count: int) -> None:
        self.loaded = 0
        self._records = [
            msgspec.structs.replace(record, parents=(Parent(PREVIOUS, self.id((at + 1) % count)),))
            for at in range(count)
        ]

    @staticmethod
    def id(at: int) -> SnapshotId:
        return SnapshotId(bytes([at]) * 32)

    def load(self, kind: type[Any], ids: Sequence[bytes]) -> list[Any]:
        self.loaded += len(ids)
        return [self._records[id[0]] if kind is SnapshotRecord else Manifest(()) for id in ids]

    def contents(self, ids: Sequence[bytes]) -> list[Any]:
        return []

    def notes(self, snapshots: Sequence[SnapshotId]) -> list[Any]:
        return []

    def is_known(self, snapshot: SnapshotId) -> bool:
        return True

    def has_contents(self, snapshot: SnapshotId) -> bool:
        return True

    def passes(self, kind: Kind, ids: Sequence[bytes]) -> list[bool]:
        return [False] * len(ids)


def test_circles_end() -> None:
    """History that leads to itself is walked once."""
    record = SnapshotRecord(bytes(32), (), "add", None, "", None, None, "", 1, "mstore")
    circle = Circle(record, 5)
    found = gather(circle, [circle.id(0)], lambda _: True)
    assert len(found.snapshots) == len(found.whole) == 5
    assert is_ancestor(circle, circle.id(3), [circle.id(0)])
    assert not is_ancestor(circle, SnapshotId(b"\x77" * 32), [circle.id(0)])
    assert circle.loaded < 20


def test_contents_of_ancestors_come_when_asked_for(place: Place) -> None:
    """What was pushed with ancestors comes with ancestors: to a store that has their records, and
    to one that has nothing; the mark that they are pruned goes."""
    a, b = place.store("a"), place.store("b")
    for seed in (1, 2, 3):
        place.add(a, "x", seed)
    first, second, _ = reversed([one.snapshot for one in a.log("x")])
    a.push("origin", ["x"], ancestors=True)
    b.pull("origin")
    assert {one.snapshot: one.pruned for one in b.log("x")}[first]
    report = b.fetch("origin", ancestors=True)
    assert (report.fetched, report.blocks > 0) == ((), True)
    c = place.store("c")
    c.pull("origin", ancestors=True)
    for store in (b, c):
        assert not any(one.pruned for one in store.log("x"))
        for id in (first, second):
            for file in store.view(id).files:
                assert b"".join(store.read_file(id, file)) == b"".join(a.read_file(id, file))
        assert store.fsck(read_data=True).problems == ()
    assert b.fetch("origin", ancestors=True).blocks == 0
