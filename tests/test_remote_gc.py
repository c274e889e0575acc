"""gc, fsck and du of a remote: what goes, what stays, and who comes between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from exchanges import REMOTE, Place, files
from proof_models import model_files

from mstore.remotes.collect import RemoteGcReport
from mstore.remotes.layout import PackState, pack_name
from mstore.remotes.objects import Absent
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Remote, RemoteState
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import PackId


class Kept(Place):
    """A place with a store that keeps the remote in order, and the models that it pushed there."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        super().__init__(path, opened)
        self.keeper = self.store("store")
        self.models: dict[str, tuple[int, int]] = {}

    def put(self, name: str, *model: int, base: str | None = None) -> None:
        """Add a model."""
        self.models[name] = (*model, 0)[:2]
        self.add(self.keeper, name, *self.models[name], base=base)

    def push(self, name: str, seed: int) -> None:
        """Add a model and push it."""
        self.put(name, seed)
        self.keeper.push(REMOTE, [name])

    def gc(self, *, reflog_days: int = 0, grace_hours: float = 0) -> RemoteGcReport:
        """Collect; by default nothing is kept for a while."""
        return self.keeper.remote_gc(REMOTE, reflog_days=reflog_days, grace_hours=grace_hours)

    def states(self) -> list[PackState]:
        """The states of its packs, sorted."""
        return sorted(row.state for row in self.state().packs().values())

    def names(self, below: str) -> set[str]:
        """The names of its objects."""
        return {one.name for one in self.objects().names(below)}

    def cloned(self, names: list[str]) -> None:
        """Whoever clones it has these models, byte for byte, and no others."""
        clone = self.clone(f"clone-{len(list(self.path.glob('clone-*')))}")
        assert sorted(clone) == sorted(names)
        for name in names:
            assert files(clone, name) == model_files(*self.models[name])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Kept]:
    """Models a and b at a remote."""
    with ExitStack() as opened:
        place = Kept(tmp_path, opened)
        place.push("a", 1)
        place.push("b", 2)
        yield place


def test_what_refs_need_stays(place: Kept) -> None:
    """A collection of a remote without garbage drops nothing but old lists."""
    before = place.names("packs/")
    report = place.gc()
    assert (report.packs_condemned, report.packs_deleted, report.snapshots_dropped) == (0, 0, ())
    assert report.leftover_objects > 0
    assert place.names("packs/") == before
    place.cloned(["a", "b"])


def test_a_removed_ref_goes_in_two_runs(place: Kept) -> None:
    """The first run condemns the pack of a removed ref, the next one deletes it."""
    place.keeper.push(REMOTE, delete=["b"])
    first = place.gc()
    assert (first.packs_condemned, first.packs_deleted) == (1, 0)
    assert len(first.snapshots_dropped) == 1
    assert place.states() == [PackState.LIVE, PackState.CONDEMNED]
    assert len(place.names("packs/")) == 2
    second = place.gc()
    assert (second.packs_condemned, second.packs_deleted) == (0, 1)
    assert second.freed_bytes == first.waiting_bytes > 0
    assert place.states() == [PackState.LIVE, PackState.DELETED]
    assert len(place.names("packs/")) == 1
    place.gc()
    fourth = place.gc()
    assert (fourth.packs_deleted, fourth.leftover_objects) == (0, 0)
    assert len(place.names("tables/")) == 1
    place.cloned(["a"])


def test_grace_is_by_the_remotes_clock(place: Kept) -> None:
    """A condemned pack stays for the time of grace."""
    place.keeper.push(REMOTE, delete=["b"])
    place.gc()
    report = place.gc(grace_hours=1)
    assert report.packs_deleted == 0
    assert report.waiting_bytes > 0
    assert place.states() == [PackState.LIVE, PackState.CONDEMNED]


def test_a_clock_that_stands_still(place: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without days of the reflog, a move of this very moment keeps nothing: many places count
    seconds."""
    monkeypatch.setattr(SharedDirectory, "time_ns", lambda *_: 2 * 10**18)
    place.keeper.push(REMOTE, delete=["b"])
    assert place.gc().packs_condemned == 1
    assert place.gc().packs_deleted == 1


def test_moves_of_the_last_days_keep_what_they_name(place: Kept) -> None:
    """What a ref was in the last days of the reflog stays, also of a removed ref."""
    place.keeper.push(REMOTE, delete=["b"])
    report = place.gc(reflog_days=1)
    assert (report.snapshots_dropped, report.packs_condemned) == ((), 0)
    assert [row.snapshot for row in place.state().refs().values()].count(None) == 1
    place.gc()
    assert set(place.state().refs()) == {"a"}


@pytest.mark.rest
def test_a_push_revives_a_condemned_pack(place: Kept) -> None:
    """Who needs a condemned pack makes it live again, and sends nothing."""
    place.keeper.push(REMOTE, delete=["b"])
    place.gc()
    report = place.keeper.push(REMOTE, ["b"])
    assert (report.packs, report.bytes_sent) == (0, 0)
    assert place.states() == [PackState.LIVE, PackState.LIVE]
    place.gc()
    place.cloned(["a", "b"])


@pytest.mark.rest
def test_a_deleted_name_never_comes_back(place: Kept) -> None:
    """What was in a deleted pack is sent again in another one."""
    place.keeper.push(REMOTE, delete=["b"])
    before = place.names("packs/")
    place.gc()
    place.gc()
    assert place.keeper.push(REMOTE, ["b"]).packs == 1
    assert len(place.names("packs/") & before) == 1
    assert place.states() == [PackState.LIVE, PackState.LIVE, PackState.DELETED]
    place.cloned(["a", "b"])


def test_a_pack_of_two_refs_stays_for_one(place: Kept) -> None:
    """A pack goes only when nothing in it is needed; bases of differences count."""
    place.put("c", 3)
    place.put("d", 3, 1, base="c")
    place.keeper.push(REMOTE, ["c", "d"])
    place.keeper.push(REMOTE, delete=["c"])
    assert place.gc().packs_condemned == 0
    place.cloned(["a", "b", "d"])


def test_a_pack_that_no_root_names_gets_a_row_first(place: Kept) -> None:
    """The pack of a push that did not end is condemned by name, and then deleted."""
    stray = PackId(bytes(31) + b"\1")
    place.objects().put_bytes(pack_name(stray), bytes(5000))
    assert place.gc().packs_condemned == 1
    assert place.state().packs()[stray].state == PackState.CONDEMNED
    assert pack_name(stray) in place.names("packs/")
    place.cloned(["a", "b"])
    assert place.gc().packs_deleted == 1
    assert pack_name(stray) not in place.names("packs/")


@pytest.mark.rest
def test_a_push_that_was_killed_goes_on_after_a_gc(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was put and not named is used by the next push, condemned or not."""
    place.put("c", 3)

    def killed(*_: object) -> RemoteState:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "change", killed)
        with pytest.raises(KeyboardInterrupt):
            place.keeper.push(REMOTE, ["c"])
    assert len(place.names("packs/")) == 3
    assert place.gc().packs_condemned == 1
    assert place.keeper.push(REMOTE, ["c"]).packs == 0
    assert place.states() == [PackState.LIVE] * 3
    place.gc()
    place.cloned(["a", "b", "c"])


@pytest.mark.rest
def test_and_is_sent_again_if_the_gc_deleted_it(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that was put, not named, and deleted is put again under another name."""
    place.put("c", 3)

    def killed(*_: object) -> RemoteState:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "change", killed)
        with pytest.raises(KeyboardInterrupt):
            place.keeper.push(REMOTE, ["c"])
    place.gc()
    place.gc()
    assert place.keeper.push(REMOTE, ["c"]).packs == 1
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


@pytest.mark.rest
def test_a_push_between_reading_and_condemning(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gc that a push overtakes decides again, and condemns nothing that the push needs."""
    place.keeper.push(REMOTE, delete=["b"])
    _between(monkeypatch, "gc", lambda: place.keeper.push(REMOTE, ["b"]))
    report = place.gc()
    assert report.packs_condemned == 0
    assert place.states() == [PackState.LIVE, PackState.LIVE]
    place.cloned(["a", "b"])


@pytest.mark.rest
def test_a_gc_that_is_overtaken_reads_nothing_twice(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next attempt reads only what is new: else many who push could delay it for ever."""
    asked: list[tuple[str, object]] = []
    read, names = SharedDirectory.read_each, SharedDirectory.names

    def reading(self: SharedDirectory, name: str, spans: Sequence[tuple[int, int]]) -> object:
        asked.append((name, tuple(spans)))
        return read(self, name, spans)

    def listing(self: SharedDirectory, below: str) -> object:
        asked.append(("names", below))
        return names(self, below)

    other = place.store("other")
    place.put("c", 3)

    def push() -> None:
        before = [*asked]
        place.keeper.push(REMOTE, ["c"])
        asked[:] = before

    _between(monkeypatch, "gc", push)
    with monkeypatch.context() as patch:
        patch.setattr(SharedDirectory, "read_each", reading)
        patch.setattr(SharedDirectory, "names", listing)
        other.remote_gc(REMOTE, reflog_days=0, grace_hours=0)
    assert sum("packs/" in name for name, _ in asked) > 2
    assert len(set(asked)) == len(asked)
    place.cloned(["a", "b", "c"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("command", "kind", "call", "number"),
    [
        pytest.param("push", Remote, "change", 0, id="push"),
        pytest.param("push", SharedDirectory, "time_ns", 0, id="stamp"),
        pytest.param("gc", Remote, "change", 0, id="gc"),
        pytest.param("gc", Remote, "change", 1, id="note-deleted"),
    ],
)
def test_a_gc_between_deciding_and_changing(
    place: Kept, command: str, kind: type, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a change starts from may be gone, lists here by another command of the store, lists and
    new tables there by a gc that came between: then the change begins anew."""
    other = place.store("other")
    place.add(other, "d", 4)
    place.put("c", 3)
    place.keeper.push(REMOTE, delete=["b"])
    place.gc()
    known = other.path / "remotes" / REMOTE / "lists"
    original, done = getattr(kind, call), []

    def late(*given: Any) -> Any:
        done.append(given)
        if len(done) == number + 1:
            place.keeper.push(REMOTE, ["c"])
            place.gc()
            place.gc()
            for path in known.iterdir():
                path.unlink()
        return original(*given)

    monkeypatch.setattr(kind, call, late)
    if command == "push":
        other.push(REMOTE, ["d"])
        place.models["d"] = (4, 0)
        place.cloned(["a", "c", "d"])
    else:
        other.remote_gc(REMOTE, reflog_days=0, grace_hours=0)
        place.cloned(["a", "c"])
    assert PackState.DELETING not in place.states()
    assert place.keeper.remote_fsck(REMOTE, read_data=True).problems == ()


def test_a_gc_between_sending_and_naming(place: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that two runs of gc overtake, which delete what it relied on, sends it again."""
    place.keeper.push(REMOTE, delete=["b"])

    def collect() -> None:
        place.gc()
        place.gc()

    _between(monkeypatch, "push", collect)
    place.keeper.push(REMOTE, ["b"])
    assert place.keeper.remote_fsck(REMOTE, read_data=True).problems == ()
    place.cloned(["a", "b"])


def test_a_gc_that_is_killed_before_it_deletes(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run removes what a killed one had only said to delete."""
    place.keeper.push(REMOTE, delete=["b"])
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
    assert len(place.names("packs/")) == 1


@pytest.mark.rest
def test_tables_are_joined(place: Kept) -> None:
    """Tables of many pushes become few objects, and every pack is still found."""
    for number in range(18):
        place.push(f"m{number}", 10 + number)
    assert len(place.names("tables/")) == 20
    assert place.gc().tables_joined == 20
    assert len(place.names("tables/")) == 1
    assert place.keeper.remote_fsck(REMOTE, read_data=True).problems == ()
    place.cloned([*place.models])


def test_a_dry_run_changes_nothing(place: Kept) -> None:
    """It reports what a run would do."""
    place.keeper.push(REMOTE, delete=["b"])
    before = {path: path.stat().st_mtime_ns for path in place.remote.rglob("*") if path.is_file()}
    told = place.keeper.remote_gc(REMOTE, reflog_days=0, grace_hours=0, dry_run=True)
    assert (told.dry_run, told.packs_condemned, len(told.snapshots_dropped)) == (True, 1, 1)
    after = {path: path.stat().st_mtime_ns for path in place.remote.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.rest
def test_a_dry_run_joins_no_tables(place: Kept) -> None:
    """It counts the tables that a run would join, and puts nothing at the remote."""
    for number in range(18):
        place.push(f"m{number}", 10 + number)
    before = place.names("")
    told = place.keeper.remote_gc(REMOTE, reflog_days=0, grace_hours=0, dry_run=True)
    assert told.tables_joined == 20
    assert place.names("") == before


def test_nothing_is_dropped_where_something_is_missing(place: Kept) -> None:
    """A remote that lacks what a ref needs is not collected."""
    place.keeper.push(REMOTE, delete=["b"])
    [table] = [row.table_name for row in place.state().packs().values()][:1]
    before = place.names("packs/")
    (place.remote / table).unlink()
    with pytest.raises((Corrupt, Absent)):
        place.store("other").remote_gc(REMOTE, reflog_days=0, grace_hours=0)
    assert place.names("packs/") == before


def test_fsck_finds_what_is_wrong(place: Kept) -> None:
    """A missing pack, a short one, and a flipped byte are told with the pack's name."""
    assert place.keeper.remote_fsck(REMOTE, read_data=True).problems == ()
    first, second = sorted(place.remote.glob("packs/*/*.pack"))
    data = bytearray(second.read_bytes())
    data[5000] ^= 1
    second.chmod(0o644)
    second.write_bytes(data)
    first.unlink()
    assert len(place.keeper.remote_fsck(REMOTE).problems) == 1
    report = place.keeper.remote_fsck(REMOTE, read_data=True)
    assert {second.name in one.where or first.name in one.where for one in report.problems} == {
        True
    }
    assert report.hint is not None
    second.write_bytes(data[:-4096])
    problems = place.keeper.remote_fsck(REMOTE).problems
    assert {one.where.rpartition("/")[2] for one in problems} == {first.name, second.name}


def test_du_tells_what_refs_share(place: Kept) -> None:
    """What a fine-tune shares with its base counts for both, and is nobody's own."""
    place.push("c", 1)
    report = place.keeper.remote_usage(REMOTE)
    own = {one.name: one.own_bytes for one in report.refs}
    whole = {one.name: one.bytes for one in report.refs}
    assert whole["a"] > 30_000
    assert own["a"] < 2000
    assert own["b"] > 30_000
    assert report.needed_bytes < report.pack_bytes
    assert report.condemned_bytes == 0


def test_a_remote_never_goes_back(place: Kept) -> None:
    """An older root that is put back is refused by a store that saw a newer one."""
    roots = sorted((place.remote / "roots").iterdir())
    roots[-1].unlink()
    with pytest.raises(Conflict):
        place.keeper.fetch(REMOTE)


@pytest.mark.rest
def test_a_fetch_that_a_gc_overtakes_reads_the_root_again(
    place: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists and tables that a fetch has read of, and that a gc removes before it reads them, are
    no damage: the fetch begins anew."""
    for number in range(18):
        place.push(f"m{number}", 10 + number)
    other = place.store("other")
    read = SharedDirectory.read_each
    done: list[str] = []

    def first(self: SharedDirectory, name: str, spans: object) -> object:
        if name.startswith("tables/") and not done:
            done.append(name)
            assert place.gc().tables_joined
        return read(self, name, spans)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedDirectory, "read_each", first)
    assert len(other.pull(REMOTE).moved) == 20
    assert done


def test_what_the_newest_root_lacks_is_damage(place: Kept) -> None:
    """A table that is gone, though the root of this moment needs it, is told as such."""
    [table, *_] = (place.remote / "tables").iterdir()
    table.unlink()
    with pytest.raises(Corrupt, match="lacks an object"):
        place.store("other").fetch(REMOTE)
