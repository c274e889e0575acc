"""Clusters: wherever slices are computed and packs lie, the same content comes out, or nothing."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_runs import run_once
from cluster_scenes import (
    EXPERTS,
    REMOTE,
    SMALL,
    Failing,
    Inline,
    Scene,
    Standing,
    build,
    dask_cluster,
    expert_bytes,
    wait_for,
)
from families import BLOCK
from servers import Server
from worker_faults import die, killed_once

from mstore import MergeRequest
from mstore.api import Store
from mstore.clusters import address, probe
from mstore.clusters.at_remote import AtRemote, PushedDelivery
from mstore.clusters.engine import AnyExecutor, Engine, LocalProcesses
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Receipt, Slice
from mstore.store.models import tensors_of
from mstore.store.objects.plan import READ, Plan
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Incompatible,
    Interrupted,
    NotFound,
    Unavailable,
)

__all__ = ["build"]


@pytest.fixture
def scene(copied: Path) -> Iterator[Scene]:
    """The family, its remote on a shared path."""
    made = Scene.at(copied)
    yield made
    made.store.close()


@pytest.fixture
def bucket(copied: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """The family, its remote in a bucket."""
    moto.use(monkeypatch)
    options = {"endpoint": moto.endpoint}
    Store.trusted_endpoints = (moto.endpoint,)  # type: ignore[assignment]
    made = Scene.at(copied, moto.below(), **options)
    yield made
    made.store.close()


# -- engines -------------------------------------------------------------------------------------


@pytest.fixture
def local() -> str:
    """Two processes of this machine."""
    return "local:2"


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[str]:
    """Two workers of Dask."""
    with dask_cluster(tmp_path) as found:
        yield found.address


# -- the same content ----------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("push", [False, True], ids=["fetched", "pushed"])
@pytest.mark.parametrize("place", ["scene", "bucket"])
@pytest.mark.parametrize("cluster", ["local", "dask"])
def test_the_same_as_alone(
    cluster: str, place: str, push: bool, request: pytest.FixtureRequest
) -> None:
    """Ties of four experts on two workers, which read and write at a remote, gives the ManifestId
    of one thread, reads what is planned, and leaves at the remote what its root names."""
    made: Scene = request.getfixturevalue(place)
    plan = made.plan(budget=0.7)
    merged = made.merge(plan, request.getfixturevalue(cluster), push=push)
    assert merged.manifest == made.wanted(plan)
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    told = merged.outcome.workers
    assert sum(one.slices for one in told) > 4
    assert sum(one.bytes_read for one in told) == (
        merged.outcome.expert_bytes_read + merged.outcome.base_bytes_read
    )
    made.sound()
    assert made.strays() == set()
    assert ("m" in made.store) == (not push)
    if push:
        assert made.is_there("m", merged.manifest)
    assert not list((made.store.path / "tmp").iterdir())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cluster", ["local", "dask"])
def test_through_the_store(cluster: str, scene: Scene, request: pytest.FixtureRequest) -> None:
    """Without a remote, workers read and write the store's directory."""
    plan = scene.plan("linear")
    merged = scene.merge(plan, request.getfixturevalue(cluster), remote=None)
    assert merged.manifest == scene.wanted(plan)
    scene.sound()


@pytest.mark.rest
def test_a_lazy_store_downloads_nothing(scene: Scene, local: str) -> None:
    """A lazy clone merges at its remote: its branch moves, too, and no weights come."""
    wanted = scene.wanted(scene.plan())
    Store.clone((scene.path / "remote").as_uri(), scene.path / "lazy", lazy=True)
    with Store.open(scene.path / "lazy") as store:
        lazy = Scene(scene.path, store)
        merged = store.merge(
            str(lazy.plan().id()), name="m", cluster=local, remote=REMOTE, push=True
        )
        assert merged.manifest == store.show("m").manifest == wanted
        assert (merged.pushed_to, merged.remote_bytes) == (REMOTE, 0)
        assert store.stats().stored_bytes < BLOCK * 4
        assert {name: one.local for name, one in told(store).items()}["m"] == merged.snapshot
        lazy.sound()


def told(store: Store) -> dict[str, Any]:
    """The refs of the remote."""
    return {one.name: one for one in store.remote_contents(REMOTE).refs}


@pytest.mark.rest
def test_a_virtual_merge_becomes_real_there(scene: Scene, local: str) -> None:
    """`materialize` on a cluster computes a virtual merge at the remote, and moves its branch."""
    plan = scene.plan()
    store = scene.store
    store.merge(str(plan.id()), name="m", virtual=True)
    store.push(REMOTE, ["m"])
    report = store.materialize("m", cluster=local, remote=REMOTE, push=True)
    assert report.pushed_to == REMOTE
    assert report.manifest == scene.wanted(plan)
    assert store.pull(REMOTE, ["m"]).moved
    assert not store.show("m").virtual
    assert store.show("m").manifest == report.manifest
    scene.sound()
    assert not store.materialize("m", cluster=local, remote=REMOTE).new_snapshot


@pytest.mark.rest
def test_a_merge_that_is_here_is_pushed(scene: Scene) -> None:
    """What this store merged before goes to the remote as it is, and nothing is computed."""
    plan = scene.plan()
    first = scene.store.merge(str(plan.id()), name="m")
    report = scene.store.merge(str(plan.id()), name="m", cluster=Inline(), remote=REMOTE, push=True)
    assert not report.new_snapshot
    assert report.workers == ()
    assert told(scene.store)["m"].snapshot == first.snapshot
    scene.sound()


@pytest.mark.rest
def test_blocks_of_the_inputs_are_not_put_again(scene: Scene, local: str) -> None:
    """A block of the result that an input has is not in the packs of the workers."""
    names = ["e0", "e0"]
    plan = scene.store.plan(
        MergeRequest(base="base", experts=names, method="linear"), allow_noop=True
    )
    before = scene.store.remote_contents(REMOTE).bytes
    report = scene.store.merge(plan, name="m", cluster=local, remote=REMOTE, push=True, memo=False)
    assert report.blocks_reused > report.blocks_total // 2
    assert scene.store.remote_contents(REMOTE).bytes - before < BLOCK * 4


# -- what goes wrong -----------------------------------------------------------------------------


class Killing(Standing):
    """Workers of which one is killed, with its pack half written."""

    def __init__(self, engine: Engine, number: int, mark: Path) -> None:
        super().__init__(engine)
        self._number = number
        self._mark = mark

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        if number != self._number:
            return self.engine.submit(slice)
        return self.engine.call(slice.label, killed_once, self._mark, slice)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("push", [False, True], ids=["fetched", "pushed"])
@pytest.mark.parametrize("cluster", ["local", pytest.param("dask", marks=pytest.mark.rest)])
def test_a_killed_worker_costs_only_time(
    cluster: str, push: bool, scene: Scene, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A worker is killed in the middle of a slice: the slice runs again, and all is as without."""
    plan = scene.plan("linear")
    mark = tmp_path / "killed"
    merged = scene.merge(
        plan,
        request.getfixturevalue(cluster),
        push=push,
        around=lambda engine: Killing(engine, 3, mark),
    )
    assert mark.exists()
    assert merged.manifest == scene.wanted(plan)
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned
    # Dask also runs finished slices again whose receipts the dead worker held.
    scene.cleared()


class Murderous(Standing):
    """Processes of this machine, one of which is killed at a random moment."""

    def __init__(self, engine: LocalProcesses, seed: int) -> None:
        super().__init__(engine)
        self._random = random.Random(seed)
        self._at = self._random.randrange(8)

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        future = self.engine.submit(slice)
        if number == self._at:
            threading.Timer(self._random.uniform(0, 0.2), self._kill).start()
        return future

    def _kill(self) -> None:
        processes = list((self.engine._pool._processes or {}).values())  # type: ignore[attr-defined]
        if processes:
            self._random.choice(processes).kill()


@pytest.mark.rest
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(seed: int, scene: Scene, local: str) -> None:
    """Whenever a worker dies, the result is right, and gc knows each object that is left."""
    plan = scene.plan("linear")
    merged = scene.merge(
        plan,
        local,
        push=bool(seed % 2),
        around=lambda engine: Murderous(engine, seed),
    )
    assert merged.manifest == scene.wanted(plan)
    scene.cleared()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("push", [False, True], ids=["fetched", "pushed"])
@pytest.mark.parametrize("place", ["scene", "bucket"])
def test_the_same_command_goes_on(place: str, push: bool, request: pytest.FixtureRequest) -> None:
    """When the scheduler is lost, nothing is published; the same merge again computes only what was
    not finished, and reads only that."""
    made: Scene = request.getfixturevalue(place)
    plan = made.plan("linear")
    before = made.store.refs()
    seen: list[Failing] = []

    def failing(engine: Engine) -> Failing:
        seen.append(Failing(engine, 4))
        return seen[0]

    with pytest.raises(Interrupted, match="the scheduler is gone"):
        made.merge(plan, Inline(), push=push, around=failing)
    assert made.store.refs() == before
    assert "m" not in told(made.store)
    again: list[Standing] = []

    def standing(engine: Engine) -> Standing:
        again.append(Standing(engine))
        return again[0]

    merged = made.merge(plan, Inline(), push=push, around=standing)
    done = expert_bytes(seen[0].slices[:4])
    assert merged.outcome.resumed_expert_bytes == done > 0
    assert expert_bytes(again[0].slices) == merged.outcome.costs.planned - done
    assert merged.manifest == made.wanted(plan)
    made.sound()
    assert made.strays() == set()
    assert not list((made.store.path / "tmp").iterdir())


@pytest.mark.rest
def test_what_one_way_left_another_uses(scene: Scene) -> None:
    """A merge through the store that was interrupted goes on at the remote, and the other way."""
    plan = scene.plan("linear")
    for first, second in (((None, False), (REMOTE, True)), ((REMOTE, True), (REMOTE, False))):
        name = f"m-{second[1]}"
        with pytest.raises(Interrupted):
            scene.merge(
                plan,
                Inline(),
                remote=first[0],
                push=first[1],
                name=name,
                around=lambda engine: Failing(engine, 4),
            )
        merged = scene.merge(plan, Inline(), remote=second[0], push=second[1], name=name)
        assert merged.outcome.resumed_expert_bytes > 0
        assert merged.manifest == scene.wanted(plan)
        scene.sound()


@pytest.mark.rest
def test_packs_that_gc_removed_are_made_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote's gc deletes the workers' packs before the root names them: their slices are
    computed again, into packs of other names, and the branch moves once."""
    plan = scene.plan("linear")
    publish = PushedDelivery.publish
    calls: list[set[str]] = []

    def late(self: PushedDelivery, publication: Any) -> int:
        calls.append(scene.strays())
        if len(calls) == 1:
            # The first finds them, the second removes them.
            with Store.open(scene.path / "store") as other:
                other.remote_gc(REMOTE, grace_hours=0)
                other.remote_gc(REMOTE, grace_hours=0)
        return publish(self, publication)

    monkeypatch.setattr(PushedDelivery, "publish", late)
    merged = scene.merge(plan, Inline(), push=True)
    assert len(calls) == 2
    assert calls[0]
    assert calls[0].isdisjoint(calls[1])
    assert merged.manifest == scene.wanted(plan)
    scene.sound()
    assert scene.is_there("m", merged.manifest)


@pytest.mark.rest
def test_condemned_packs_live_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs that gc only found, and did not delete yet, are named by the root as they are."""
    plan = scene.plan("linear")
    publish = PushedDelivery.publish
    calls: list[int] = []

    def late(self: PushedDelivery, publication: Any) -> int:
        calls.append(1)
        with Store.open(scene.path / "store") as other:
            other.remote_gc(REMOTE, grace_hours=0)
        return publish(self, publication)

    monkeypatch.setattr(PushedDelivery, "publish", late)
    merged = scene.merge(plan, Inline(), push=True)
    assert calls == [1]
    assert scene.is_there("m", merged.manifest)
    scene.sound()


@pytest.mark.rest
def test_another_merge_takes_what_fits(scene: Scene) -> None:
    """What a merge at 100 % left is used by one at a budget, where chunks are the same: its report
    counts no block below none."""
    with pytest.raises(Interrupted):
        scene.merge(
            scene.plan("linear"), Inline(), push=True, around=lambda engine: Failing(engine, 6)
        )
    plan = scene.plan("linear", budget=0.5)
    merged = scene.merge(plan, Inline(), push=True)
    assert merged.manifest == scene.wanted(plan)
    assert 0 <= merged.blocks_reused <= merged.blocks_total
    scene.cleared()


@pytest.mark.rest
def test_a_slice_delivered_twice(scene: Scene) -> None:
    """Each slice runs twice: one receipt counts, and gc removes the other packs."""

    class Twice(Standing):
        def instead(self, number: int, slice: Slice) -> Future[Receipt]:
            execute(slice)
            return self.engine.submit(slice)

    plan = scene.plan()
    merged = scene.merge(plan, Inline(), push=True, around=Twice)
    assert merged.manifest == scene.wanted(plan)
    scene.sound()
    assert scene.strays()
    scene.cleared()
    assert scene.is_there("m", merged.manifest)


def test_a_straggler_is_overtaken(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that does not come back at the end runs once more elsewhere."""
    monkeypatch.setattr("mstore.merge.running.runners._LEAST_LATE", 0.0)
    monkeypatch.setattr("mstore.merge.running.runners._LOOK", 0.01)

    class Slow(Standing):
        def instead(self, number: int, slice: Slice) -> Future[Receipt]:
            return Future() if number == 2 else self.engine.submit(slice)

        def slots(self) -> int:
            return 8

    seen: list[Slow] = []

    def slow(engine: Engine) -> Slow:
        seen.append(Slow(engine))
        return seen[0]

    plan = scene.plan("linear")
    with ThreadPoolExecutor(2) as pool:
        merged = scene.merge(plan, pool, around=slow)
    numbers = [one.number for one in seen[0].slices]
    assert numbers.count(2) == 2
    assert merged.manifest == scene.wanted(plan)
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned


@pytest.mark.rest
def test_a_worker_that_always_dies_ends_the_merge(scene: Scene, tmp_path: Path) -> None:
    """A slice that kills each of its workers is handed out four times, and then the merge ends."""

    class Deadly(Standing):
        def instead(self, number: int, slice: Slice) -> Future[Receipt]:
            if slice.number == 1:
                return self.engine.call("die", die)
            return self.engine.submit(slice)

    seen: list[Deadly] = []

    def deadly(engine: Engine) -> Deadly:
        seen.append(Deadly(engine))
        return seen[0]

    with pytest.raises(Interrupted, match="did not return a slice: BrokenProcessPool"):
        scene.merge(scene.plan("linear"), "local:1", around=deadly)
    assert [one.number for one in seen[0].slices].count(1) == 4


def test_a_damaged_pack_of_a_worker_is_refused(scene: Scene) -> None:
    """A pack that is not what its receipt says is not published here."""

    class Lying(Standing):
        def instead(self, number: int, slice: Slice) -> Future[Receipt]:
            future = self.engine.submit(slice)
            for name in scene.strays():
                path = scene.path / "remote" / name
                path.chmod(0o600)
                data = bytearray(path.read_bytes())
                data[4096] ^= 1
                path.write_bytes(data)
            return future

    before = scene.store.refs()
    with pytest.raises(Exception, match="a worker's pack is damaged"):
        scene.merge(scene.plan("linear"), Inline(), around=Lying)
    assert scene.store.refs() == before


@pytest.mark.rest
def test_differences_to_what_is_a_difference_here(copied: Path) -> None:
    """Where the remote has a block whole that is a difference here, what workers stored as a
    difference to it is stored anew: no block here is a difference to a difference."""
    with Store.init(copied / "own", block_size=BLOCK) as store:
        store.add(copied / "e0", name="older")
        store.add(copied / "base", name="base", base="older")
        for name in EXPERTS:
            store.add(copied / name, name=name, base="base")
        catalog = store._catalog
        base = list(
            {
                block
                for id in tensors_of(catalog, catalog.manifest(store["base"].manifest)).values()
                for block in catalog.tensor(id).block_ids()
            }
        )
        assert len(catalog.stored_alone(base)) < len(base)
        store.add_remote(REMOTE, (copied / "remote").as_uri())
        store.fetch(REMOTE)
        own = Scene(copied, store)
        plan = own.plan("linear")
        merged = own.merge(plan, Inline())
        assert merged.manifest == own.wanted(plan)
        own.sound()


@pytest.mark.rest
def test_a_full_scratch_disk(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scratch is full, the merge ends with the worker's name and publishes nothing; with
    room, the same merge ends well."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    plan = scene.plan("linear")
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TMPDIR", str(small))
            with pytest.raises(Unavailable, match=r"scratch space; .* are needed for packs") as few:
                scene.merge(plan, "local:1")
            assert "worker" in str(few.value)
            patch.setattr("mstore.clusters.probe._PACKS", 0)
            with pytest.raises(Exception, match="no space left on device") as full:
                scene.merge(plan, "local:1")
            assert "on worker " in str(full.value)
        assert "m" not in scene.store
        assert scene.merge(plan, "local:1").manifest == scene.wanted(plan)
    finally:
        subprocess.run(["umount", str(small)], check=True)


# -- before any work -----------------------------------------------------------------------------


class Told(AnyExecutor):
    """An engine whose worker says something else of itself."""

    def __init__(self, **other: Any) -> None:
        super().__init__(Inline())
        self.other = other
        self.slices = 0

    def each(self, run: Any, *given: Any) -> dict[str, Any]:
        from msgspec.structs import replace

        return {"w7": replace(run(*given), **self.other)}

    def submit(self, slice: Slice) -> Future[Receipt]:
        self.slices += 1
        return super().submit(slice)


@pytest.mark.parametrize(
    ("other", "error", "what"),
    [
        (
            {"version": "0.0.1"},
            Incompatible,
            "version of mstore is 0.0.1, that of this process ",
        ),
        ({"code": "f" * 16}, Incompatible, "with other sources"),
        ({"problem": "the connection is refused"}, Unavailable, "the connection is refused"),
        ({"scratch_bytes": 1000}, Unavailable, "it has 1000 B of scratch space"),
        (
            {"memory_bytes": 1 << 20},
            Unavailable,
            "it may have 1.0 MiB of memory",
        ),
    ],
)
def test_a_worker_that_differs_is_named(
    other: dict[str, Any], error: type[Exception], what: str, scene: Scene
) -> None:
    """A worker with another mstore, or one that cannot do the work, is named before any work."""
    engine = Told(**other)
    with pytest.raises(error, match=what) as refused:
        probe.require_able(
            engine,
            AtRemote(scene.store._catalog.config.remotes[0]),
            memory=1 << 29,
            slice_bytes=1 << 27,
        )
    assert "worker w7" in str(refused.value)
    assert refused.value.hint  # type: ignore[attr-defined]
    assert engine.slices == 0


def test_a_worker_with_many_threads_needs_as_much_memory(scene: Scene) -> None:
    """What a worker may have is compared with what all slices take that it computes at a time."""

    class Wide(Told):
        def share(self, worker: str) -> tuple[int, int | None]:
            return 4, 1 << 30

    place = AtRemote(scene.store._catalog.config.remotes[0])
    with pytest.raises(Unavailable, match=r"1.0 GiB of memory; .* computes 4 at a time") as few:
        probe.require_able(Wide(), place, memory=512 << 20, slice_bytes=1)
    assert few.value.hint
    probe.require_able(Wide(), place, memory=256 << 20, slice_bytes=1)


def test_a_worker_of_another_level_may_work(scene: Scene) -> None:
    """Kernels of every level give the same bytes: another one is no reason to refuse."""
    place = AtRemote(scene.store._catalog.config.remotes[0])
    probe.require_able(Told(level="aarch64"), place, memory=1, slice_bytes=1)


def test_a_worker_without_keys_is_named(bucket: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose environment has no keys for the remote is named, and told what it needs."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    engine = AnyExecutor(Inline())
    with pytest.raises(Unavailable, match="it cannot work here: ") as refused:
        probe.require_able(
            engine, AtRemote(bucket.store._catalog.config.remotes[0]), memory=1, slice_bytes=1
        )
    assert "worker " in str(refused.value)
    assert "environment" in str(refused.value.hint)


def test_inputs_that_the_remote_lacks(scene: Scene) -> None:
    """A model that was not pushed is an error that says how to push it."""
    store = scene.store
    store.merge(str(scene.plan().id()), name="own", memo=False)
    request = MergeRequest(base="base", experts=["e0", "own"], method="linear")
    plan = store._catalog.record(Plan, store.plan(request).plan)
    with pytest.raises(NotFound, match="blocks of own are not there") as lacking:
        scene.merge(plan, Inline(), push=True)
    assert str(lacking.value.hint) == "store.push('origin', refs=['own'])"


@pytest.mark.rest
def test_what_the_remote_lacks_and_nobody_reads(scene: Scene) -> None:
    """A model that the budget leaves out need not be where workers read."""
    store = scene.store
    store.merge(str(scene.plan().id()), name="own", memo=False)
    request = MergeRequest(
        base="base", experts=[("e0", 1), ("own", 1e-6)], method="task_arithmetic", budget="20%"
    )
    plan = store._catalog.record(Plan, store.plan(request).plan)
    assert all(READ not in tensor.states[1] for tensor in plan.tensors)
    outcome = scene.merge(plan, Inline(), push=True).outcome
    assert 0 < outcome.expert_bytes_read <= outcome.costs.planned
    assert outcome.costs.full == plan.full_expert_bytes
    scene.sound()


@pytest.mark.rest
def test_a_branch_that_moved_there(scene: Scene) -> None:
    """A remote's branch with other commits stays, and the store says what to do."""
    store = scene.store
    Store.clone((scene.path / "remote").as_uri(), scene.path / "other")
    with Store.open(scene.path / "other") as other:
        other.merge(
            other.plan(MergeRequest(base="base", experts=["e0"], method="linear")), name="m"
        )
        other.push("origin", ["m"])
    with pytest.raises(Conflict, match="is no ancestor of"):
        scene.merge(scene.plan(), Inline(), push=True)
    scene.sound()
    assert "m" not in store


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("local:0", "local:4"),
        ("local:x", "local:4"),
        ("tcp://", "one of: "),
        ("ray:", "one of: "),
        ("kubernetes://x", "one of: "),
        ("", "one of: "),
    ],
)
def test_addresses_that_are_none(text: str, hint: str) -> None:
    """What is no address is refused, with one that is."""
    with pytest.raises(BadRequest) as refused:
        address.opened(text)
    assert hint in str(refused.value.hint)


@pytest.mark.rest
def test_a_scheduler_that_is_not_there() -> None:
    """Where nobody answers, the error says how to start a scheduler."""
    pytest.importorskip("distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstore.clusters.dask._PATIENCE", "1s")
        with pytest.raises(Unavailable, match="there is no Dask scheduler") as lost:
            address.opened("tcp://127.0.0.1:9")
    assert "dask scheduler" in str(lost.value.hint)


def test_a_scheduler_file_that_is_not_there(tmp_path: Path) -> None:
    """A file that no scheduler wrote is an error at once; Dask itself would wait for ever."""
    pytest.importorskip("distributed")
    with pytest.raises(Unavailable, match="there is no such file"):
        address.opened(f"dask:{tmp_path / 'nothere.json'}")


def test_options_that_do_not_go_together(scene: Scene) -> None:
    """A push without a remote, and a remote without a cluster, are refused with what is missing."""
    plan = str(scene.plan().id())
    with pytest.raises(BadRequest, match="no remote is named"):
        scene.store.merge(plan, name="m", cluster="local:1", push=True)
    for given in ({"remote": REMOTE}, {"push": True}):
        with pytest.raises(BadRequest, match="a merge on this machine"):
            scene.store.merge(plan, name="m", **given)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="a candidate is of this store"):
        scene.store.merge(
            plan, name="m", cluster="local:1", remote=REMOTE, push=True, candidate="x"
        )


# -- what travels --------------------------------------------------------------------------------


class Weighing(Standing):
    """Counts what goes to workers and comes back, as an engine sends it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.sent = self.received = self.read = self.made = 0
        self.texts: list[bytes] = []

    def instead(self, number: int, slice: Slice) -> Future[Receipt]:
        data = pickle.dumps(slice)
        future = self.engine.submit(pickle.loads(data))
        back = pickle.dumps(future.result())
        self.sent += len(data)
        self.received += len(back)
        self.read += len(
            {
                source.id
                for run in slice.runs
                for task in run.chunks
                for row in (task.base, *task.rows)
                for source in row.sources
            }
        )
        self.made += sum(len(one.blocks) for one in future.result().results)
        self.texts += [data, back, pickle.dumps(slice.workplace)]
        return future


def test_a_slice_is_small(scene: Scene) -> None:
    """A slice takes at most 100 bytes for each block that it reads, a receipt 200 for each that it
    made; a family of more chunks a slice needs less."""
    plan = scene.plan()
    weighing: list[Weighing] = []

    def weigh(engine: Engine) -> Weighing:
        weighing.append(Weighing(engine))
        return weighing[0]

    scene.merge(plan, Inline(), push=True, around=weigh)
    found = weighing[0]
    # What a slice has of its own is the same for each, and most of so small ones.
    fixed = 1500 * len(found.slices)
    assert (found.sent - fixed) / found.read <= 100
    assert (found.received - fixed) / found.made <= 200


def test_no_secret_is_pickled(bucket: Scene, moto: Server) -> None:
    """No key is in what goes to workers or comes back."""
    seen: list[Weighing] = []

    def weigh(engine: Engine) -> Weighing:
        seen.append(Weighing(engine))
        return seen[0]

    bucket.merge(bucket.plan("linear"), Inline(), push=True, around=weigh)
    assert seen[0].texts
    for text in seen[0].texts:
        assert not any(secret.encode() in text for secret in moto.secrets)


def test_slices_have_names_for_people(scene: Scene) -> None:
    """A slice is called by its first and last tensor and chunk, as dashboards show it."""
    seen: list[Standing] = []

    def standing(engine: Engine) -> Standing:
        seen.append(Standing(engine))
        return seen[0]

    scene.merge(scene.plan("linear"), Inline(), around=standing)
    assert seen[0].slices[0].label == "0: a[0] to a[1]"
    assert SMALL == 2 * BLOCK


# -- the command line ----------------------------------------------------------------------------


@pytest.mark.rest
def test_the_command_says_how_to_have_the_result_here(scene: Scene) -> None:
    """After a push from a store that is not lazy, the command names the pull."""
    words = ["--store", str(scene.path / "store"), "merge", "--plan", str(scene.plan().id())]
    words += ["--name", "m", "--cluster", "local:1", "--remote", REMOTE, "--push"]
    done = run_once(words)
    assert done.status == 0, done.err
    assert "to have it here: mstore --store " in done.out
    assert " pull origin m" in done.out
    assert "m" not in scene.store


@pytest.mark.rest
def test_ctrl_c_leaves_nothing_running(scene: Scene, tmp_path: Path) -> None:
    """Ctrl-C ends the workers, publishes nothing, and gc knows every object; the same command
    then ends the merge."""
    plan = scene.plan("linear")
    words = ["-m", "mstore_cli", "--store", str(scene.path / "store"), "merge"]
    words += ["--plan", str(plan.id()), "--name", "m", "--no-memo", "--cluster", "local:2"]
    words += ["--remote", REMOTE, "--push"]
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    running = subprocess.Popen(
        [sys.executable, str(program), *words[2:]],
        env=os.environ | {"BEGAN": str(tmp_path / "began")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_for((tmp_path / "began").exists)
    time.sleep(0.5)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130, said
    assert b"the same command goes on" in said
    wait_for(lambda: not is_group(running.pid))
    assert "m" not in told(scene.store)
    done = subprocess.run([sys.executable, *words, "--json"], check=True, capture_output=True)
    assert scene.wanted(plan).hex() in done.stdout.decode()
    scene.cleared()


def is_group(number: int) -> bool:
    """Whether a group of processes has one."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


SLOW = """
import os, time
from pathlib import Path

import mstore.merge.running.commit as commit
import mstore.merge.running.compute as compute

mark = Path(os.environ["BEGAN"])
batch = compute.Computer.batch

def slow(self, one):
    mark.touch()
    time.sleep(0.3)
    return batch(self, one)

compute.Computer.batch = slow
run_merge = commit.run_merge
commit.run_merge = lambda *given, **named: run_merge(*given, **named, slice_bytes=131072)

if __name__ == "__main__":
    from mstore_cli.main import main

    main()
"""
