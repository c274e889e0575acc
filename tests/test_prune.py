"""Pruning: contents of old snapshots may go, their place in the lineage stays."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from damage import flip_bit
from test_gc import BLOCK, contents, files, sound, write

from mstore import MergeRequest
from mstore.api import Store
from mstore.terms.errors import BadRequest, Conflict, NotFound
from mstore.terms.ids import SnapshotId


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store whose reflog keeps nothing, so that gc follows refs alone."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        yield store


def versions(store: Store, tmp_path: Path, name: str, seeds: list[int]) -> list[SnapshotId]:
    """Several snapshots of a branch, oldest first."""
    return [store.add(write(tmp_path / "in", seed), name=name).snapshot for seed in seeds]


def marks(store: Store) -> dict[SnapshotId, bool]:
    return {one.snapshot: one.pruned for one in store.log()}


def test_what_is_older_goes_and_stays_in_the_log(store: Store, tmp_path: Path) -> None:
    """Beyond the newest N of a branch contents go with gc; the log still tells of them."""
    old, middle, new = versions(store, tmp_path, "a", [1, 2, 3])
    assert store.prune(keep_last=2, dry_run=True).snapshots == (old,)
    assert not any(marks(store).values())
    report = store.prune(keep_last=2)
    assert report.snapshots == (old,)
    assert report.held == ()
    assert marks(store) == {old: True, middle: False, new: False}
    # Until gc comes, they can be read.
    assert contents(store, old)
    assert store.gc().blocks_dropped > 0
    assert marks(store) == {old: True, middle: False, new: False}
    assert store.show(str(old)).files == 2
    assert len(store.files(str(old))) == 2
    sound(store)
    assert store.prune(keep_last=2).snapshots == ()


def sharded(root: Path, value: int) -> Path:
    """A pipeline whose first model has an index; the index and all tensors tell the value."""
    shards = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    data = bytes([value]) * 4
    for shard, name in zip(shards, "ab", strict=True):
        write_safetensors(root / "unet" / shard, [(name, "U8", (4,), data)])
    index = {"metadata": {"value": value}, "weight_map": dict(zip("ab", shards, strict=True))}
    path = root / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index))
    write_safetensors(
        root / "vae" / "diffusion_pytorch_model.safetensors", [("c", "U8", (4,), data)]
    )
    return root


def test_the_log_tells_of_a_pruned_snapshot_with_an_index(store: Store, tmp_path: Path) -> None:
    """Where the index that names the models is gone, or damaged, all else is told."""
    store.configure("codec", "raw")
    old = store.add(sharded(tmp_path / "in", 1), name="x").snapshot
    new = store.add(sharded(tmp_path / "in", 2), name="x").snapshot
    store.prune(keep_last=1)
    store.gc()
    with Store.open(store.path) as again:
        assert {one.snapshot: one.models for one in again.log()} == {old: (), new: ("unet", "vae")}
        assert (again.show("x@{1}").files, again.show("x@{1}").models) == (4, ())
    flip_bit(store.path, b'{"metadata": {"value": 2}')
    with Store.open(store.path) as again:
        assert [one.models for one in again.log()] == [(), ()]
        assert again.show("x").files == 4


def test_a_model_of_what_was_pruned_is_a_clear_error(store: Store, tmp_path: Path) -> None:
    """A pruned snapshot has no models to name: the error says so, not that a tensor is missing."""
    old = store.add(sharded(tmp_path / "in", 1), name="x").snapshot
    store.add(sharded(tmp_path / "in", 2), name="x")
    store.prune(keep_last=1)
    store.gc()
    with Store.open(store.path) as again:
        for model in ("unet", "vae", "none"):
            one = f"{old.hex()}:{model}"
            calls: list[Callable[[], object]] = [
                lambda one=one: again.view(one),
                lambda one=one: again.files(one),
                lambda one=one: again.tensors(one),
                lambda one=one: again.checkout(one, tmp_path / "out"),
                lambda one=one: again.diff(one, "x:unet"),
                lambda one=one: again.diff_directory(one, tmp_path / "in"),
                lambda one=one: again.compare("x:unet", base=one),
                lambda one=one: again.plan(
                    MergeRequest(base=one, experts=["x:unet"], method="linear")
                ),
            ]
            for call in calls:
                with pytest.raises(NotFound, match="contents were pruned"):
                    call()
        assert len(again.files(old)) == 4


def test_reading_what_was_pruned_is_a_clear_error(store: Store, tmp_path: Path) -> None:
    """Whatever needs contents says that they were pruned; nothing is half done."""
    old, new = versions(store, tmp_path, "a", [1, 2])
    store.prune(keep_last=1)
    store.gc()
    calls = [
        lambda: store.view(str(old)),
        lambda: store.tensors(str(old)),
        lambda: store.diff("a", "a~1"),
        lambda: store.checkout(str(old), tmp_path / "out"),
        lambda: store.plan(MergeRequest(base=str(old), experts=["a"], method="ties")),
        lambda: store.plan(MergeRequest(base="a", experts=[str(old)], method="ties")),
        lambda: store.add(tmp_path / "in", name="b", base=str(old)),
        lambda: store.tag("t", str(old)),
        lambda: store.reset("b", str(old)),
        lambda: b"".join(map(bytes, store.read_file(str(old), "config.json"))),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="contents were pruned"):
            call()
    assert not (tmp_path / "out").exists()
    assert [ref.snapshot for ref in store.refs()] == [new]


def test_naming_it_again_takes_it_back(store: Store, tmp_path: Path) -> None:
    """Before gc, a tag on a pruned snapshot keeps its contents, also once the tag is gone."""
    old, _ = versions(store, tmp_path, "a", [1, 2])
    store.prune(keep_last=1)
    store.tag("t", str(old))
    store.gc()
    held = contents(store, old)
    store.remove("t")
    store.gc()
    assert contents(store, old) == held
    assert not any(marks(store).values())


def test_adding_it_again_brings_the_contents_back(store: Store, tmp_path: Path) -> None:
    """Contents that are stored again can be read under the old snapshot too."""
    old, _ = versions(store, tmp_path, "a", [1, 2])
    store.prune(keep_last=1)
    store.gc()
    store.add(write(tmp_path / "in", 1), name="again")
    assert contents(store, old) == files(tmp_path / "in")
    sound(store)


def test_tags_keep_what_they_name_or_go(store: Store, tmp_path: Path) -> None:
    """--keep-tagged leaves what a tag names; without it the tag is removed as well."""
    old, middle, new = versions(store, tmp_path, "a", [1, 2, 3])
    store.tag("v1", str(old))
    assert store.prune(keep_last=1).snapshots == (middle,)
    report = store.prune(keep_last=1, keep_tagged=False)
    assert report.snapshots == (old,)
    assert report.tags_removed == ("v1",)
    assert [ref.name for ref in store.refs()] == ["a"]
    store.gc()
    assert marks(store) == {old: True, middle: True, new: False}
    sound(store)


def test_what_another_branch_keeps_is_kept(store: Store, tmp_path: Path) -> None:
    """A snapshot among the newest of any branch, or of one that was not asked for, stays."""
    old, new = versions(store, tmp_path, "a", [1, 2])
    store.reset("b", str(old))
    assert store.prune(keep_last=1).snapshots == ()
    older = versions(store, tmp_path, "b", [3])
    assert store.prune(["a"], keep_last=1).snapshots == ()
    assert store.prune(keep_last=1).snapshots == (old,)
    assert new != older[0]


def test_inputs_that_no_ref_names(store: Store, tmp_path: Path) -> None:
    """--unnamed-inputs lets bases and experts of a merge go, but those that a ref names."""
    base = store.add(write(tmp_path / "in", 1), name="base").snapshot
    expert = store.add(write(tmp_path / "in", 1, 4), name="expert", base="base").snapshot
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="task_arithmetic"))
    merged = store.merge(plan, name="m").snapshot
    store.remove("expert")
    assert store.prune(keep_last=1).snapshots == ()
    assert store.prune(keep_last=1, unnamed_inputs=True).snapshots == (expert,)
    held = contents(store, merged)
    store.gc()
    assert contents(store, merged) == held
    assert marks(store) == {base: False, expert: True, merged: False}
    assert store.explain("m")
    sound(store)


def test_a_virtual_merge_keeps_its_inputs(store: Store, tmp_path: Path) -> None:
    """What a virtual merge is computed from stays, pruned or not."""
    store.add(write(tmp_path / "in", 1), name="base")
    store.add(write(tmp_path / "in", 1, 4), name="expert", base="base")
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="task_arithmetic"))
    merged = store.merge(plan, name="m", virtual=True).snapshot
    held = contents(store, merged)
    store.remove("expert", "base")
    store.prune(keep_last=1, unnamed_inputs=True)
    store.gc()
    store.close()
    with Store.open(store.path) as again:
        assert contents(again, merged) == held
        sound(again)
        again.materialize("m")
        again.gc()
        assert contents(again, again["m"].id) == held


def test_the_reflog_holds_what_was_pruned(tmp_path: Path) -> None:
    """A move in the window of the reflog keeps contents; prune says so, and gc can be told."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        old, _ = versions(store, tmp_path, "a", [1, 2])
        assert store.prune(keep_last=1).held == (old,)
        assert store.gc().blocks_dropped == 0
        assert contents(store, old)
        assert store.gc(reflog_days=0).blocks_dropped > 0
        sound(store)
        # The reflog names it still, and a reader may hold it: neither can have it back.
        held = store.hold(old)
        assert store.gc().blocks_dropped == 0
        held.release()
        assert store.usage().refs
        sound(store)


def test_senseless_wishes(store: Store, tmp_path: Path) -> None:
    """No snapshot to keep, no such branch, a tag for a branch: refused."""
    versions(store, tmp_path, "a", [1])
    store.tag("t", "a")
    with pytest.raises(BadRequest):
        store.prune(keep_last=0)
    for name in ("t", "nobody"):
        with pytest.raises(NotFound):
            store.prune([name], keep_last=1)


def test_refs_are_removed_all_or_none(store: Store, tmp_path: Path) -> None:
    """`remove` of several names takes all of them, or, where one is unknown, none."""
    versions(store, tmp_path, "a", [1, 2])
    store.tag("t", "a")
    with pytest.raises(NotFound):
        store.remove("a", "nobody")
    assert len(store.refs()) == 2
    report = store.remove("a", "t", "a")
    assert report.removed == ("a", "t")
    assert report.kinds == ("branch", "tag")
    assert report.unnamed_snapshots == 2
    assert store.refs() == []
    # All that ever was is in the reflog of everything.
    assert {one.name for one in store.reflog()} == {"a", "t"}
    assert {one.action for one in store.reflog()[:2]} == {"rm"}
    store.reset("a", "a@{1}")
    with pytest.raises(Conflict):
        store.tag("a", "a~1")


def test_a_merge_of_what_was_pruned_is_not_run_again(store: Store, tmp_path: Path) -> None:
    """Replay, blame and the plan itself name the input that is gone; the merge stays readable."""
    store.add(write(tmp_path / "in", 1), name="base")
    store.add(write(tmp_path / "in", 2), name="expert")
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="task_arithmetic"))
    store.merge(plan, name="merged", allow_nonfinite=True)
    merged = contents(store, store["merged"].id)
    store.remove("expert")
    store.prune(keep_last=1, unnamed_inputs=True)
    assert store.gc().blocks_dropped > 0
    for call in (
        lambda: store.replay("merged"),
        lambda: store.blame("merged"),
        lambda: store.merge(plan, name="again"),
    ):
        with pytest.raises(NotFound, match="contents were pruned"):
            call()
    assert contents(store, store["merged"].id) == merged
    told = store.explain("merged").plan
    assert told is not None
    assert told.plan == plan.plan
    sound(store)


DAY = 86_400
NOON = 1_700_000_000 // DAY * DAY + DAY // 2


def at_days(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: list[float]
) -> list[SnapshotId]:
    """A snapshot of the branch `a` at each of these days, by the clock."""
    found = []
    for number, day in enumerate(days):
        when = int((NOON + day * DAY) * 1e9)
        monkeypatch.setattr("time.time_ns", lambda when=when: when)
        found.append(store.add(write(tmp_path / "in", number), name="a").snapshot)
    return found


@pytest.fixture(scope="module")
def diary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SnapshotId]]:
    """A store with snapshots of several days, closed."""
    root = tmp_path_factory.mktemp("diary")
    # Two in October 2023, two on 4 November, three on the 14th, one on each of the next two days.
    days = [-30, -29, -10, -9.9, 0, 0.1, 0.2, 1, 2]
    with (
        Store.init(root / "store", block_size=BLOCK) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        return root / "store", at_days(store, root, patch, days)


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        ({"keep_daily": 3}, {8, 7, 6}),
        ({"keep_daily": 2, "keep_last": 4}, {8, 7, 6, 5}),
        ({"keep_weekly": 2}, {8, 3}),
        ({"keep_monthly": 2}, {8, 1}),
        ({"keep_monthly": 99}, {8, 1}),
        ({"keep_yearly": 1}, {8}),
        ({"keep_daily": 1, "keep_monthly": 2}, {8, 1}),
    ],
)
def test_periods(
    wish: dict[str, int],
    kept: set[int],
    diary: tuple[Path, list[SnapshotId]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The newest of each of the last so many days, weeks, months and years stays."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    request.addfinalizer(lambda: (monkeypatch.undo(), time.tzset()))
    made, ids = diary
    shutil.copytree(made, tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        pruned = store.prune(**wish, dry_run=True).snapshots
        assert {number for number, id in enumerate(ids) if id not in pruned} == kept
        # The tip stays, whatever is kept.
        assert store.prune(**wish).snapshots == pruned
        assert store.show("a").snapshot == ids[8]
        assert store.prune(**wish).snapshots == ()


def test_nothing_kept_is_no_wish(store: Store) -> None:
    """Without any --keep-..., or with less than none, nothing is pruned."""
    for wish in ({}, {"keep_last": 0}, {"keep_daily": -1, "keep_last": 1}):
        with pytest.raises(BadRequest):
            store.prune(**wish)
