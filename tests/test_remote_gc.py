"""gc, fsck and du of a remote: what goes, what stays, and who comes between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore.api import Store
from mstore.remotes.collect import RemoteGcReport
from mstore.remotes.layout import PackState, pack_name
from mstore.remotes.objects import Absent
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Remote, RemoteState
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import PackId


class Place:
    """A remote in a directory, and stores that know it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "remote"
        self.models: dict[str, dict[str, bytes]] = {}
        self.store = self.new("store")

    def new(self, name: str) -> Store:
        """A new store that knows the remote."""
        store = Store.init(self.root / name, block_size=BLOCK)
        store.add_remote("origin", self.path.as_uri())
        return store

    def add(
        self, name: str, seed: str, *, base: str | None = None, store: Store | None = None
    ) -> None:
        """Add a model to a store, and remember its files."""
        directory = self.root / "in" / seed
        if not directory.exists():
            directory.mkdir(parents=True)
            small_model(directory, seed)
        self.store.add(directory, name=name, base=base)
        self.models[name] = files_of(directory)

    def gc(self, *, reflog_days: int = 0, grace_hours: float = 0) -> RemoteGcReport:
        """Collect; by default nothing is kept for a while."""
        return self.store.remote_gc("origin", reflog_days=reflog_days, grace_hours=grace_hours)

    def state(self) -> RemoteState:
        """What the remote is now."""
        remote = Remote("origin", SharedDirectory(self.path), self.root / "look")
        remote.make_directory()
        return remote.state()

    def states(self) -> list[PackState]:
        """The states of its packs, sorted."""
        return sorted(row.state for row in self.state().packs().values())

    def objects(self, below: str) -> set[str]:
        """The names of its objects."""
        return {one.name for one in SharedDirectory(self.path).names(below)}

    def cloned(self, names: list[str]) -> None:
        """Whoever clones it has these models, byte for byte, and no others."""
        number = len(list(self.root.glob("clone*")))
        Store.clone(self.path.as_uri(), self.root / f"clone{number}")
        with Store.open(self.root / f"clone{number}") as clone:
            assert sorted(clone) == sorted(names)
            for name in names:
                out = self.root / f"out{number}-{name}"
                clone.checkout(name, out)
                assert files_of(out) == self.models[name]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Models a and b at a remote."""
    place = Place(tmp_path)
    place.add("a", "1")
    place.store.push("origin", ["a"])
    place.add("b", "2")
    place.store.push("origin", ["b"])
    yield place
    place.store.close()


def test_what_refs_need_stays(place: Place) -> None:
    """A collection of a remote without garbage drops nothing but old lists."""
    before = place.objects("packs/")
    report = place.gc()
    assert (report.packs_condemned, report.packs_deleted, report.snapshots_dropped) == (0, 0, ())
    assert report.leftover_objects > 0
    assert place.objects("packs/") == before
    place.cloned(["a", "b"])


def test_a_removed_ref_goes_in_two_runs(place: Place) -> None:
    """The first run condemns the pack of a removed ref, the next one deletes it."""
    place.store.push("origin", delete=["b"])
    first = place.gc()
    assert (first.packs_condemned, first.packs_deleted) == (1, 0)
    assert len(first.snapshots_dropped) == 1
    assert place.states() == [PackState.LIVE, PackState.CONDEMNED]
    assert len(place.objects("packs/")) == 2
    second = place.gc()
    assert (second.packs_condemned, second.packs_deleted) == (0, 1)
    assert second.freed_bytes == first.waiting_bytes > 0
    assert place.states() == [PackState.LIVE, PackState.DELETED]
    assert len(place.objects("packs/")) == 1
    place.gc()
    fourth = place.gc()
    assert (fourth.packs_deleted, fourth.leftover_objects) == (0, 0)
    assert len(place.objects("tables/")) == 1
    place.cloned(["a"])


def test_grace_is_by_the_remotes_clock(place: Place) -> None:
    """A condemned pack stays for the time of grace."""
    place.store.push("origin", delete=["b"])
    place.gc()
    report = place.gc(grace_hours=1)
    assert report.packs_deleted == 0
    assert report.waiting_bytes > 0
    assert place.states() == [PackState.LIVE, PackState.CONDEMNED]


def test_a_clock_that_stands_still(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without days of the reflog, a move of this very moment keeps nothing: many places count
    seconds."""
    monkeypatch.setattr(SharedDirectory, "time_ns", lambda *_: 10**18)
    place.store.push("origin", delete=["b"])
    assert place.gc().packs_condemned == 1
    assert place.gc().packs_deleted == 1


def test_moves_of_the_last_days_keep_what_they_name(place: Place) -> None:
    """What a ref was in the last days of the reflog stays, also of a removed ref."""
    place.store.push("origin", delete=["b"])
    report = place.gc(reflog_days=1)
    assert (report.snapshots_dropped, report.packs_condemned) == ((), 0)
    assert [row.snapshot for row in place.state().refs().values()].count(None) == 1
    place.gc()
    assert set(place.state().refs()) == {"a"}


def test_a_push_revives_a_condemned_pack(place: Place) -> None:
    """Who needs a condemned pack makes it live again, and sends nothing."""
    place.store.push("origin", delete=["b"])
    place.gc()
    report = place.store.push("origin", ["b"])
    assert (report.packs, report.bytes_sent) == (0, 0)
    assert place.states() == [PackState.LIVE, PackState.LIVE]
    place.gc()
    place.cloned(["a", "b"])


def test_a_deleted_name_never_comes_back(place: Place) -> None:
    """What was in a deleted pack is sent again in another one."""
    place.store.push("origin", delete=["b"])
    before = place.objects("packs/")
    place.gc()
    place.gc()
    assert place.store.push("origin", ["b"]).packs == 1
    assert len(place.objects("packs/") & before) == 1
    assert place.states() == [PackState.LIVE, PackState.LIVE, PackState.DELETED]
    place.cloned(["a", "b"])


def test_a_pack_of_two_refs_stays_for_one(place: Place) -> None:
    """A pack goes only when nothing in it is needed; bases of differences count."""
    place.add("c", "3")
    place.add("d", "4", base="c")
    place.store.push("origin", ["c", "d"])
    place.store.push("origin", delete=["c"])
    assert place.gc().packs_condemned == 0
    place.cloned(["a", "b", "d"])


def test_a_pack_that_no_root_names_gets_a_row_first(place: Place) -> None:
    """The pack of a push that did not end is condemned by name, and then deleted."""
    stray = PackId(bytes(31) + b"\1")
    SharedDirectory(place.path).put_bytes(pack_name(stray), bytes(5000))
    assert place.gc().packs_condemned == 1
    assert place.state().packs()[stray].state == PackState.CONDEMNED
    assert pack_name(stray) in place.objects("packs/")
    place.cloned(["a", "b"])
    assert place.gc().packs_deleted == 1
    assert pack_name(stray) not in place.objects("packs/")


def test_a_push_that_was_killed_goes_on_after_a_gc(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was put and not named is used by the next push, condemned or not."""
    place.add("c", "3")

    def killed(*_: object) -> RemoteState:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "change", killed)
        with pytest.raises(KeyboardInterrupt):
            place.store.push("origin", ["c"])
    assert len(place.objects("packs/")) == 3
    assert place.gc().packs_condemned == 1
    assert place.store.push("origin", ["c"]).packs == 0
    assert place.states() == [PackState.LIVE] * 3
    place.gc()
    place.cloned(["a", "b", "c"])


def test_and_is_sent_again_if_the_gc_deleted_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was put, not named, and deleted is put again under another name."""
    place.add("c", "3")

    def killed(*_: object) -> RemoteState:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "change", killed)
        with pytest.raises(KeyboardInterrupt):
            place.store.push("origin", ["c"])
    place.gc()
    place.gc()
    assert place.store.push("origin", ["c"]).packs == 1
    place.cloned(["a", "b", "c"])


def _between(monkeypatch: pytest.MonkeyPatch, kind: str, act: Callable[[], object]) -> None:
    """Do something once, just before the root is replaced by the next command."""
    swap = SharedDirectory.swap_root
    done = []

    def first(self: SharedDirectory, data: bytes, before: object) -> object:
        if not done:
            done.append(kind)
            act()
        return swap(self, data, before)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedDirectory, "swap_root", first)


def test_a_push_between_reading_and_condemning(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gc that a push overtakes decides again, and condemns nothing that the push needs."""
    place.store.push("origin", delete=["b"])
    _between(monkeypatch, "gc", lambda: place.store.push("origin", ["b"]))
    report = place.gc()
    assert report.packs_condemned == 0
    assert place.states() == [PackState.LIVE, PackState.LIVE]
    place.cloned(["a", "b"])


def test_a_gc_between_sending_and_naming(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that two runs of gc overtake, which delete what it relied on, sends it again."""
    place.store.push("origin", delete=["b"])

    def collect() -> None:
        place.gc()
        place.gc()

    _between(monkeypatch, "push", collect)
    place.store.push("origin", ["b"])
    assert place.store.remote_fsck("origin", read_data=True).problems == ()
    place.cloned(["a", "b"])


def test_a_gc_that_is_killed_before_it_deletes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run removes what a killed one had only said to delete."""
    place.store.push("origin", delete=["b"])
    place.gc()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedDirectory, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            place.gc()
    # The probe for the clock is removed, too: so it was killed there, or at the pack.
    place.gc()
    place.gc()
    assert place.states() == [PackState.LIVE, PackState.DELETED]
    assert len(place.objects("packs/")) == 1


def test_tables_are_joined(place: Place) -> None:
    """Tables of many pushes become few objects, and every pack is still found."""
    for number in range(18):
        place.add(f"m{number}", f"m{number}")
        place.store.push("origin", [f"m{number}"])
    assert len(place.objects("tables/")) == 20
    assert place.gc().tables_joined == 20
    assert len(place.objects("tables/")) == 1
    assert place.store.remote_fsck("origin", read_data=True).problems == ()
    place.cloned([*place.models])


def test_a_dry_run_changes_nothing(place: Place) -> None:
    """It reports what a run would do."""
    place.store.push("origin", delete=["b"])
    before = {path: path.stat().st_mtime_ns for path in place.path.rglob("*") if path.is_file()}
    told = place.store.remote_gc("origin", reflog_days=0, grace_hours=0, dry_run=True)
    assert (told.dry_run, told.packs_condemned, len(told.snapshots_dropped)) == (True, 1, 1)
    after = {path: path.stat().st_mtime_ns for path in place.path.rglob("*") if path.is_file()}
    assert after == before


def test_a_dry_run_joins_no_tables(place: Place) -> None:
    """It counts the tables that a run would join, and puts nothing at the remote."""
    for number in range(18):
        place.add(f"m{number}", f"m{number}")
        place.store.push("origin", [f"m{number}"])
    before = place.objects("")
    told = place.store.remote_gc("origin", reflog_days=0, grace_hours=0, dry_run=True)
    assert told.tables_joined == 20
    assert place.objects("") == before


def test_nothing_is_dropped_where_something_is_missing(place: Place) -> None:
    """A remote that lacks what a ref needs is not collected."""
    place.store.push("origin", delete=["b"])
    [table] = [row.table_name for row in place.state().packs().values()][:1]
    before = place.objects("packs/")
    (place.path / table).unlink()
    with pytest.raises((Corrupt, Absent)):
        Place.gc(_other(place))
    assert place.objects("packs/") == before


def _other(place: Place) -> Place:
    """The same remote for a store that knows nothing of it yet."""
    other = Place.__new__(Place)
    other.root, other.path, other.models = place.root, place.path, place.models
    other.store = other.new("other")
    return other


def test_fsck_finds_what_is_wrong(place: Place) -> None:
    """A missing pack, a short one, and a flipped byte are told with the pack's name."""
    assert place.store.remote_fsck("origin", read_data=True).problems == ()
    first, second = sorted(place.path.glob("packs/*/*.pack"))
    data = bytearray(second.read_bytes())
    data[5000] ^= 1
    second.chmod(0o644)
    second.write_bytes(data)
    first.unlink()
    assert len(place.store.remote_fsck("origin").problems) == 1
    report = place.store.remote_fsck("origin", read_data=True)
    assert {second.name in one.where or first.name in one.where for one in report.problems} == {
        True
    }
    assert report.hint is not None
    second.write_bytes(data[:-4096])
    problems = place.store.remote_fsck("origin").problems
    assert {one.where.rpartition("/")[2] for one in problems} == {first.name, second.name}


def test_du_tells_what_refs_share(place: Place) -> None:
    """What a fine-tune shares with its base counts for both, and is nobody's own."""
    place.add("c", "1")
    place.store.push("origin", ["c"])
    report = place.store.remote_usage("origin")
    own = {one.name: one.own_bytes for one in report.refs}
    whole = {one.name: one.bytes for one in report.refs}
    assert whole["a"] > 30_000
    assert own["a"] < 2000
    assert own["b"] > 30_000
    assert report.needed_bytes < report.pack_bytes
    assert report.condemned_bytes == 0


def test_a_remote_never_goes_back(place: Place) -> None:
    """An older root that is put back is refused by a store that saw a newer one."""
    roots = sorted((place.path / "roots").iterdir())
    roots[-1].unlink()
    with pytest.raises(Conflict):
        place.store.fetch("origin")


def test_a_fetch_that_a_gc_overtakes_reads_the_root_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists and tables that a fetch has read of, and that a gc removes before it reads them, are
    no damage: the fetch begins anew."""
    for number in range(18):
        place.add(f"m{number}", f"m{number}")
        place.store.push("origin", [f"m{number}"])
    other = place.new("other")
    read = SharedDirectory.read_each
    done: list[str] = []

    def first(self: SharedDirectory, name: str, spans: object) -> object:
        if name.startswith("tables/") and not done:
            done.append(name)
            assert place.gc().tables_joined
        return read(self, name, spans)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedDirectory, "read_each", first)
    with other:
        assert len(other.pull("origin").moved) == 20
    assert done


def test_what_the_newest_root_lacks_is_damage(place: Place) -> None:
    """A table that is gone, though the root of this moment needs it, is told as such."""
    [table, *_] = (place.path / "tables").iterdir()
    table.unlink()
    with place.new("other") as other, pytest.raises(Corrupt, match="lacks an object"):
        other.fetch("origin")
