"""Lazy backups and clones: what is here is copied, the rest is read where the store reads it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from exchanges import REMOTE, Place, files, merged, place, placed, refs, sound
from proof_models import model_files
from test_backup import Fault

from mstore import fs
from mstore.api import Store
from mstore.blocks.pack_store import Packs
from mstore.blocks.segments import Segments
from mstore.remotes.lazy import RemoteParts
from mstore.store.layout import tables_of
from mstore.terms.errors import BadName, BadRequest, Conflict, Corrupt, StorageFailed
from mstore.terms.ids import PackId
from mstore.upkeep.backup import copying, remotes

__all__ = ["place"]
NAMES = {"base": 0, "e1": 1}


@pytest.fixture(scope="module")
def family() -> Iterator[Place]:
    """A remote with a base and an expert."""
    with placed() as made:
        made.author(experts=1).push(REMOTE, every=True)
        yield made


@pytest.fixture
def lazy(family: Place, tmp_path: Path) -> Store:
    """A lazy clone of it with an addition, a difference to what is only at the remote."""
    store = family.lazy(tmp_path / "lazy")
    store.add(family.model(1, 3), name="mine", base="base", threads=1)
    return store


@pytest.fixture
def following(place: Place) -> tuple[Store, Store]:
    """A store that pushes, and a lazy clone of what it pushed."""
    author = place.store("author")
    place.add(author, "x", 1)
    author.push(REMOTE, every=True)
    Store.clone(place.url, place.path / "lazy", lazy=True)
    return author, place.open("lazy")


def all_files(store: Store) -> dict[str, dict[str, bytes]]:
    """The files of every branch."""
    return {name: files(store, name) for name in refs(store, "branch")}


def read(root: Path, *, is_done: bool = True) -> dict[str, dict[str, bytes]]:
    """The same of the store in a directory, which is sound if what made it has ended well."""
    with Store.open(root) as store:
        found = all_files(store)
        if is_done:
            sound(store)
        return found


def copied(store: Store, way: str, target: Path) -> Path:
    """A lazy copy of a store."""
    if way == "backup":
        assert not store.backup(target, lazy=True, threads=1).problems
    else:
        Store.clone(store.path, target, lazy=True, threads=1)
    return target


def asked(store: Store) -> int:
    """How often the store has asked a remote."""
    elsewhere = store._catalog.index.elsewhere
    assert elsewhere is not None
    assert isinstance(elsewhere.reader, RemoteParts)
    return elsewhere.reader.traffic.requests


def segments(root: Path) -> dict[str, int]:
    """The segments of a store's tables of the remote, and the file that each is."""
    directory = tables_of(root / "remotes" / REMOTE)
    Segments(directory).verify()
    return {path.name: path.stat().st_ino for path in directory.glob("*.segment")}


# -- what a lazy copy is -----------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backup", "clone"])
def test_a_lazy_copy_reads_what_the_store_reads(lazy: Store, tmp_path: Path, way: str) -> None:
    """A lazy copy has refs and bytes of the store, leans as it does, and is made without the
    remote."""
    requests = asked(lazy)
    target = copied(lazy, way, tmp_path / "copy")
    assert asked(lazy) == requests
    with Store.open(target) as copy:
        assert copy.is_lazy
        assert [one.name for one in copy.remotes()] == [REMOTE]
        assert refs(copy) == refs(lazy)
        assert copy.show("e1").leans_on == lazy.show("e1").leans_on != ()
        assert copy.show("mine").leans_on == lazy.show("mine").leans_on
        sound(copy)
        assert files(copy, "mine") == model_files(1, 3)
        for name, number in NAMES.items():
            assert files(copy, name) == model_files(1, number)
    assert segments(target).keys() == segments(lazy.path).keys()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["backup", "clone"])
def test_a_copy_of_a_copy(lazy: Store, tmp_path: Path, way: str) -> None:
    """A lazy backup is restored, and a lazy copy cloned, by the same word."""
    copied(lazy, way, tmp_path / "copy")
    with Store.open(tmp_path / "copy") as copy:
        copied(copy, way, tmp_path / "again")
    assert read(tmp_path / "again")["mine"] == model_files(1, 3)


@pytest.mark.rest
def test_a_lazy_copy_is_a_lazy_store(family: Place, lazy: Store, tmp_path: Path) -> None:
    """A lazy clone fetches, merges, pushes, drops, collects and is indexed anew like its source;
    the fetch brings the statistics that it lacks."""
    copied(lazy, "clone", tmp_path / "copy")
    with Store.open(tmp_path / "copy") as copy:
        before = copy.stats().statistics_bytes
        copy.fetch(REMOTE)
        assert copy.stats().statistics_bytes >= before
        merged(copy, "m", "base", "e1")
        made = files(copy, "m")
        copy.prefetch(["e1"])
        copy.drop(["e1"])
        copy.gc(reflog_days=0)
        assert files(copy, "e1") == model_files(1, 1)
        copy.push(REMOTE, ["m"])
    Store.reindex(tmp_path / "copy")
    assert read(tmp_path / "copy")["m"] == made
    lazy.pull(REMOTE)
    assert files(lazy, "m") == made
    lazy.push(REMOTE, delete=["m"])


def test_the_report_says_what_is_not_in_the_backup(lazy: Store, tmp_path: Path) -> None:
    """A lazy backup reports what it leans on, and nothing once all of it is here."""
    [leans] = lazy.backup(tmp_path / "backup", lazy=True).leans_on
    assert leans == lazy.fsck().leans_on[0]
    lazy.prefetch(every=True)
    assert lazy.backup(tmp_path / "backup", lazy=True).leans_on == ()


def test_refusals_name_the_lazy_way(lazy: Store, tmp_path: Path) -> None:
    """Without `lazy` nothing is copied, and the hint names both ways, for the right store."""
    with pytest.raises(Conflict, match="only at origin") as refused:
        lazy.backup(tmp_path / "copy")
    assert "prefetch" in str(refused.value.texts[2])
    assert "lazy=True" in str(refused.value.texts[2])
    with pytest.raises(Conflict, match="only at origin") as refused:
        Store.clone(lazy.path, tmp_path / "copy")
    assert f"{lazy.path}').prefetch" in str(refused.value.texts[2])
    assert "lazy=True" in str(refused.value.texts[2])
    assert not (tmp_path / "copy").exists()


def test_a_lazy_clone_needs_a_lazy_store(family: Place, tmp_path: Path) -> None:
    """A store without lazy remotes has all of its blocks: a lazy clone of it is refused, for it
    would be a full one; a lazy backup goes on, for a timer cannot know."""
    store = family.open("origin")
    with pytest.raises(BadRequest, match="no lazy remote"):
        Store.clone(store.path, tmp_path / "copy", lazy=True)
    assert not (tmp_path / "copy").exists()
    assert store.backup(tmp_path / "backup", lazy=True).leans_on == ()
    assert not (tmp_path / "backup" / "remotes" / REMOTE).exists()


def test_a_remote_that_is_not_lazy_stays_out_of_a_clone(lazy: Store, tmp_path: Path) -> None:
    """A lazy clone knows the remotes that it leans on, and no other."""
    lazy.add_remote("other", (tmp_path / "elsewhere").as_uri())
    copied(lazy, "clone", tmp_path / "copy")
    with Store.open(tmp_path / "copy") as copy:
        assert [one.name for one in copy.remotes()] == [REMOTE]


def test_a_remote_with_the_name_of_another_directory_is_refused(
    lazy: Store, tmp_path: Path
) -> None:
    """Settings of a stranger write nothing outside of the copy."""
    with (lazy.path / "config").open("a") as file:
        file.write(f'\n[remote."../../evil"]\nurl = "{tmp_path.as_uri()}"\nlazy = true\n')
    with pytest.raises(BadName):
        Store.clone(lazy.path, tmp_path / "copy", lazy=True)
    assert not (tmp_path / "copy").exists()
    assert not list(tmp_path.rglob("*evil*"))


# -- the next backup ---------------------------------------------------------------------------


@pytest.mark.rest
def test_a_second_backup_follows(place: Place, following: tuple[Store, Store]) -> None:
    """A later backup has what was fetched since; of the tables only new segments are copied."""
    author, store = following
    target = copied(store, "backup", place.path / "backup")
    before = segments(target)
    copied(store, "backup", target)
    assert segments(target) == before
    place.add(author, "y", 2)
    author.push(REMOTE, every=True)
    store.pull(REMOTE)
    copied(store, "backup", target)
    assert segments(target).keys() == segments(store.path).keys()
    assert read(target) == {"x": model_files(1), "y": model_files(2)}


@pytest.mark.rest
def test_a_backup_becomes_whole_and_lazy_again(lazy: Store, tmp_path: Path) -> None:
    """After a prefetch a backup that is not lazy needs no tables, and keeps none; after a drop a
    lazy one leans again."""
    target = copied(lazy, "backup", tmp_path / "backup")
    lazy.prefetch(every=True)
    lazy.backup(target, threads=1)
    assert not (target / "remotes" / REMOTE).exists()
    with Store.open(target) as copy:
        assert all_files(copy) == all_files(lazy)
        assert asked(copy) == 0
    lazy.drop(["e1"])
    lazy.gc(dead_share=0.0, reflog_days=0)
    copied(lazy, "backup", target)
    with Store.open(target) as copy:
        assert copy.show("e1").leans_on
    assert read(target)["e1"] == model_files(1, 1)


@pytest.mark.rest
def test_a_backup_follows_a_renamed_remote(lazy: Store, tmp_path: Path) -> None:
    """The tables of a remote go by its name of now, and those of the name before go."""
    target = copied(lazy, "backup", tmp_path / "backup")
    lazy.rename_remote(REMOTE, "upstream")
    copied(lazy, "backup", target)
    assert [path.name for path in (target / "remotes").iterdir()] == ["upstream"]
    with Store.open(target) as copy:
        assert [one.name for one in copy.remotes()] == ["upstream"]
    assert read(target)["e1"] == model_files(1, 1)


# -- beside a fetch ----------------------------------------------------------------------------


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Once, after a copy has read the rows and before it copies the tables, do this."""
    copy, calls = remotes.copy_kept, []

    def late(*given: object) -> None:
        calls.append(given)
        if len(calls) == 1:
            act()
        copy(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(remotes, "copy_kept", late)


def move(author: Store) -> None:
    """Let x lie in another pack of the remote than before."""
    author.push(REMOTE, delete=["x"])
    for _ in range(2):
        author.remote_gc(REMOTE, reflog_days=0, grace_hours=0.0)
    author.push(REMOTE, ["x"])


@pytest.mark.rest
@pytest.mark.parametrize("way", ["backup", "clone"])
def test_a_fetch_meanwhile(
    place: Place, following: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A fetch between rows and tables, after the remote lost what the rows lean on and got it
    again, leaves a copy that is whole: it has the refs of before."""
    author, store = following

    def fetch() -> None:
        move(author)
        place.add(author, "z", 3)
        author.push(REMOTE, every=True)
        with Store.open(store.path) as other:
            other.pull(REMOTE)

    between(monkeypatch, fetch)
    before = segments(store.path)
    target = copied(store, way, place.path / "copy")
    assert segments(target).keys() == segments(store.path).keys() != before.keys()
    assert read(target) == {"x": model_files(1)}


@pytest.mark.rest
def test_tables_that_are_replaced_while_they_are_copied(
    place: Place, following: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the segments of one list, though the files of others have taken their place."""
    _, store = following
    made = Segments.copy_to

    def late(self: Segments, directory: Path, other: Path) -> None:
        shutil.rmtree(self.directory)
        with Store.open(store.path) as again:
            again.fetch(REMOTE)
        made(self, directory, other)

    before = segments(store.path)
    monkeypatch.setattr(Segments, "copy_to", late)
    target = copied(store, "backup", place.path / "copy")
    assert segments(target).keys() == before.keys()
    assert segments(store.path).keys() != before.keys()
    assert read(target) == {"x": model_files(1)}


def test_new_places_come_before_old_ones_go(
    following: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a fetch learns that the remote has other packs now, every block has a place."""
    author, store = following
    move(author)
    drop, seen = Segments.drop, []

    def watched(self: Segments, packs: set[PackId]) -> None:
        for act in (lambda: None, lambda: drop(self, packs)):
            act()
            with Store.open(store.path) as other:
                seen.append(other.fsck().problems)

    monkeypatch.setattr(Segments, "drop", watched)
    store.fetch(REMOTE)
    assert seen == [(), ()]


# -- when it ends too early, and damage --------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_a_backup_that_is_read(
    place: Place, following: tuple[Store, Store], step: int
) -> None:
    """Wherever the disk fills up, the backup has the old state or the new one and reads all of
    it, though the remote has another name and more packs since; the next run ends what it began."""
    author, store = following
    first = copied(store, "backup", place.path / "first")
    place.add(author, "y", 2)
    author.push(REMOTE, every=True)
    store.rename_remote(REMOTE, "upstream")
    store.pull("upstream")
    old, new = {"x": model_files(1)}, {"x": model_files(1), "y": model_files(2)}
    outcomes = set()
    for at in count(step=step):
        target = place.path / f"backup{at}"
        shutil.copytree(first, target)
        try:
            with fs.observed(Fault(at, target)):
                store.backup(target, lazy=True, threads=1)
        except StorageFailed:
            found = read(target, is_done=False)
            assert found in (old, new)
            outcomes.add(found == new)
            copied(store, "backup", target)
            assert read(target) == new
        else:
            break
        shutil.rmtree(target)
    assert at > 20
    assert outcomes == {False, True}


@pytest.mark.rest
@pytest.mark.parametrize("when", [0, 1], ids=["before", "after"])
def test_an_end_beside_the_new_index(
    place: Place, following: tuple[Store, Store], when: int
) -> None:
    """Just before the new index is in place the old one reads at a remote that the store has left
    since, and just after it the new one at the remote that took its place."""
    author, store = following
    target = copied(store, "backup", place.path / "backup")
    store.prefetch(every=True)
    store.remove_remote(REMOTE)
    author.add_remote("second", (place.path / "second").as_uri())
    place.add(author, "y", 2)
    author.push("second", ["y"])
    store.add_remote("second", (place.path / "second").as_uri())
    store.pull("second", lazy=True)
    passed: list[str] = []

    def stop(operation: fs.Operation) -> None:
        if passed or operation.target == str(target / "index"):
            passed.append(operation.kind)
        if len(passed) > when and operation.path.startswith(str(target)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fs.observed(stop), pytest.raises(StorageFailed):
        store.backup(target, lazy=True, threads=1)
    assert passed[0] == "exchange"
    names = ("x", "y")[: 1 + when]
    found = read(target, is_done=False)
    assert found == {name: model_files(seed) for seed, name in enumerate(names, 1)}
    copied(store, "backup", target)
    assert [path.name for path in (target / "remotes").iterdir()] == ["second"]


@pytest.mark.rest
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_no_lazy_clone(lazy: Store, tmp_path: Path, step: int) -> None:
    """Wherever the disk fills up, no store is there, and the next try is not in its way."""
    target = tmp_path / "clone"
    for at in count(step=step):
        try:
            with fs.observed(Fault(at, target)):
                copied(lazy, "clone", target)
        except StorageFailed:
            assert not (target / "format").exists()
        else:
            break
    assert at > 20
    assert read(target)["mine"] == model_files(1, 3)


def test_a_copy_that_turned_on_its_way_is_found(
    lazy: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference to a block that is only at the remote is compared with the store's bytes."""
    catalog = lazy._catalog
    leaning = {
        id
        for batch in catalog.index.block_batches()
        for id, _ in batch
        if copying.base_of(catalog.rows_of([id])[0][0]) is not None
    }
    assert leaning
    at = catalog.locate(sorted(leaning))[0]
    made = copying.copy

    def badly(source: Packs, pack: PackId, target: Path, tick: Callable[[int], None]) -> None:
        made(source, pack, target, tick)
        if pack == at.pack:
            target.chmod(0o644)
            data = bytearray(target.read_bytes())
            data[at.offset + at.stored_length // 2] ^= 1
            target.write_bytes(data)

    monkeypatch.setattr(copying, "copy", badly)
    [problem] = lazy.backup(tmp_path / "backup", lazy=True, threads=1).problems
    assert "another payload" in problem.what
    with pytest.raises(Corrupt, match="damaged"):
        Store.clone(lazy.path, tmp_path / "clone", lazy=True, threads=1)
    assert not (tmp_path / "clone").exists()


def flip(path: Path) -> None:
    """Turn a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.rest
def test_damaged_tables_end_a_copy(lazy: Store, tmp_path: Path) -> None:
    """Tables that are damaged are not copied: the error names the file, and nothing is made or
    changed; those of an earlier backup that is damaged are copied again."""
    target = copied(lazy, "backup", tmp_path / "backup")
    directory = tables_of(target / "remotes" / REMOTE)
    damaged = next(directory.glob("*.segment"))
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    copied(lazy, "backup", target)
    before = segments(target)
    for path in tables_of(lazy.path / "remotes" / REMOTE).glob("*.segment"):
        flip(path)
    with pytest.raises(Corrupt, match="does not match") as refused:
        Store.clone(lazy.path, tmp_path / "clone", lazy=True)
    assert str(lazy.path) in str(refused.value.where)
    assert not (tmp_path / "clone").exists()
    assert segments(target) == before


@pytest.mark.rest
@pytest.mark.parametrize("way", ["backup", "clone"])
def test_what_is_nowhere_is_told(place: Place, following: tuple[Store, Store], way: str) -> None:
    """What the remote has lost is missing: a backup names it and copies all else, a clone is not
    made."""
    author, store = following
    place.add(author, "y", 2)
    author.push(REMOTE, every=True)
    store.pull(REMOTE)
    author.push(REMOTE, delete=["y"])
    for _ in range(2):
        author.remote_gc(REMOTE, reflog_days=0, grace_hours=0.0)
    store.fetch(REMOTE)
    target = place.path / "copy"
    if way == "clone":
        with pytest.raises(Corrupt, match="no clone"):
            Store.clone(store.path, target, lazy=True)
        assert not target.exists()
        return
    report = store.backup(target, lazy=True)
    assert {name for one in report.affected for name in one.refs} == {"y"}
    with Store.open(target) as copy:
        assert files(copy, "x") == model_files(1)


@pytest.mark.rest
def test_without_tables_a_copy_leans_on_nothing(lazy: Store, tmp_path: Path) -> None:
    """A store that lost its tables cannot read there: its blocks are reported as missing, and no
    clone is made; after a fetch both go well."""
    path = lazy.path
    lazy.close()
    shutil.rmtree(path / "remotes")
    with Store.open(path) as again:
        assert again.backup(tmp_path / "backup", lazy=True).problems
        with pytest.raises(Corrupt):
            Store.clone(path, tmp_path / "clone", lazy=True)
        again.fetch(REMOTE)
        copied(again, "backup", tmp_path / "backup")
        copied(again, "clone", tmp_path / "clone")
    assert read(tmp_path / "backup") == read(tmp_path / "clone")
