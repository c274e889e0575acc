"""Slices: however a merge is cut up and whoever runs the pieces, the same content comes out."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from families import BLOCK, Family
from worker_faults import peak_memory, watch_memory

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.codecs import Policy
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import PAGE
from mstore.blocks.reader import Meter
from mstore.clusters.engine import AnyExecutor
from mstore.merge.running.commit import Merged, run_merge
from mstore.merge.running.compute import blend, tie_counts
from mstore.merge.running.engine import RESERVE, Resources, bounds, run_plan
from mstore.merge.running.loading import LoadBuffers, load
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Slice
from mstore.merge.running.task import Tasks
from mstore.models.stats.chunks import chunk_blocks
from mstore.store.models import tensors_of
from mstore.store.objects.plan import READ, SHARED, Plan
from mstore.store.plans import sources_of
from mstore.terms.errors import BadRequest, BudgetExceeded, Corrupt
from mstore.terms.ids import BlockId, ManifestId, PackId, PlanId
from mstore.terms.sizes import format_size

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"density": 0.3},
    "dare_ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.3, "gamma": 0.2},
    "breadcrumbs_ties": {"density": 0.4, "gamma": 0.1},
    "model_stock": {},
    "ramplus_tl": {"epsilon": 0.2},
    "sce": {"select_topk": 0.3},
    "consensus": {"tall_mask_lambda": 0.4},
    "fisher": {},
    "karcher": {},
}
SMALL = 3 * BLOCK
"""Bytes of output a slice, so that a small family has many."""


def ties_family(dtype: str = "BF16") -> Family:
    """Three experts with many equal magnitudes, shared blocks and constant blocks."""
    rng = np.random.default_rng(7)
    size = BLOCK // np.dtype(families._DTYPES[dtype]).itemsize
    lengths = {"a": 9 * size + 5, "b": 4 * size, "c": 11, "d": 6 * size}
    base = {n: families.cast(rng.standard_normal(k), dtype) for n, k in lengths.items()}
    base["d"][size : 2 * size] = 1
    experts = []
    for _ in range(3):
        steps = {n: rng.integers(-4, 5, array.shape) / 8 for n, array in base.items()}
        experts.append({n: families.cast(base[n].astype("f4") + steps[n], dtype) for n in base})
    experts[1]["b"] = experts[0]["b"].copy()
    for expert in experts:
        expert["d"][size : 2 * size] = 2
    return Family(base, tuple(experts))


@pytest.fixture(scope="module", params=["BF16", "mixed"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """The family; in `mixed` one expert has wider elements, so that chunks are of two blocks."""
    root = tmp_path_factory.mktemp("family")
    family = ties_family()
    if request.param == "mixed":
        wide = {name: array.astype(np.float32) for name, array in family.experts[2].items()}
        family = Family(family.base, (*family.experts[:2], wide))
    family = family.informed(dtypes=("F32" if request.param == "mixed" else "BF16",))
    family.write(root)
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        store.add(root / "base", name="base")
        for name in family.names:
            store.add(root / name, name=name, base="base")
        for name in family.fisher_names:
            store.add(root / name, name=name)
        yield store


def plan_of(store: Store, method: str, **options: Any) -> Plan:
    """A plan of all three experts."""
    report = store.plan(
        MergeRequest(
            base="base",
            experts=["e0", "e1", "e2"],
            method=method,
            parameters=METHODS[method],
            companions=families.fishers_for(["e0", "e1", "e2"], ["f0", "f1", "f2"])
            if method == "fisher"
            else {},
            **options,
        )
    )
    return store._catalog.record(Plan, report.plan)


def merge(store: Store, plan: Plan, executor: Executor | None = None, **options: Any) -> Merged:
    """Run it in small slices, without a memo table."""
    if executor is not None:
        options["workers"] = AnyExecutor(executor)
    given = {"threads": 2, "slice_bytes": SMALL, "name": "m", "message": ""}
    given |= {"policy": Policy.RAW} | options
    return run_merge(store._catalog, plan, sources_of(store._catalog, plan.id(), plan), **given)


_WANTED: dict[PlanId, ManifestId] = {}


def wanted(store: Store, plan: Plan) -> ManifestId:
    """What one thread in one slice makes."""
    if plan.id() not in _WANTED:
        outcome = run_plan(store._catalog, plan, None, resources=Resources(1))
        _WANTED[plan.id()] = outcome.manifest.id()
    return _WANTED[plan.id()]


# -- any way of running --------------------------------------------------------------------------


@pytest.mark.sampled(44)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [None, 0.5])
def test_slices_and_threads_change_nothing(method: str, budget: float | None, store: Store) -> None:
    """For slices of any size and any number of threads: the same content, bytes as planned."""
    plan = plan_of(store, method, budget=budget)
    for slice_bytes, threads in ((1, 1), (SMALL, 3), (1 << 30, 2)):
        merged = merge(store, plan, slice_bytes=slice_bytes, threads=threads)
        assert merged.manifest == wanted(store, plan)
        assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    assert store.fsck(read_data=True).problems == ()


class Elsewhere(Executor):
    """A process pool whose workers find no index: it is moved away while they work."""

    def __init__(self, store: Store) -> None:
        self._index = store.path / "index"
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.slices: list[Slice] = []

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        self.slices.append(given[0])
        hidden = self._index.with_name("hidden")
        self._index.rename(hidden)
        done: Future[Any] = Future()
        try:
            done.set_result(self._pool.submit(run, *given, **named).result())
        except BaseException as error:  # noqa: BLE001 -- as an executor does
            done.set_exception(error)
        finally:
            hidden.rename(self._index)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


@pytest.mark.rest
def test_processes_without_an_index_give_the_same(store: Store) -> None:
    """Slices run in another process that cannot open the index give the same ManifestId, read the
    planned bytes to the byte, and what they wrote is sound.
    """
    with Elsewhere(store) as pool:
        for method in METHODS:
            plan = plan_of(store, method, budget=0.8)
            pool.slices.clear()
            merged = merge(store, plan, executor=pool)
            assert merged.manifest == wanted(store, plan)
            assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
            assert sum(work.expert_bytes for work in pool.slices) == merged.outcome.costs.planned
            assert len(pool.slices) > 2
    assert store.fsck(read_data=True).problems == ()
    assert list((store.path / "tmp").iterdir()) == []


def test_an_executor_of_threads(store: Store) -> None:
    """Any executor will do, also one that runs several slices at a time in any order."""
    plan = plan_of(store, "ties")
    with ThreadPoolExecutor(3) as pool:
        assert merge(store, plan, executor=pool).manifest == wanted(store, plan)
        report = store.merge(str(plan.id()), name="api", cluster=pool, memo=False)
        assert report.manifest == wanted(store, plan)


class Unlucky(Executor):
    """Workers that are killed once they have begun with a pack: each slice runs again, in another
    process, and a third time at the end; the last comes back first.
    """

    def __init__(self) -> None:
        self.killed = 0
        self.futures: list[tuple[Future[Any], bytes]] = []

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        assert run is execute
        work = pickle.dumps(given[0])
        ended = subprocess.run([sys.executable, "-c", KILLED], input=work, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert list(given[0].workplace.directory.glob(f"{given[0].number}-*.pack"))
        self.killed += 1
        future: Future[Any] = Future()
        self.futures.append((future, work))
        if self.killed == 3:
            for waiting, again in reversed(self.futures):
                execute(pickle.loads(again))
                waiting.set_result(execute(pickle.loads(again)))
            self.futures.clear()
        elif self.killed > 3:
            future.set_result(execute(pickle.loads(work)))
            self.futures.clear()
        return future


KILLED = """
import os, pickle, signal, sys
from mstore.blocks.packs import PackWriter
from mstore.merge.running.runners import execute

append = PackWriter.append_encoded

def killed(self, *given):
    append(self, *given)
    os.kill(os.getpid(), signal.SIGKILL)

PackWriter.append_encoded = killed
execute(pickle.loads(sys.stdin.buffer.read()))
"""


@pytest.mark.rest
def test_a_slice_may_run_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are killed with a pack half written, slices run twice, receipts come in the reverse
    order: the merge is the same, reads no more, and leaves nothing behind."""
    monkeypatch.setattr("mstore.merge.running.runners._AHEAD", (0, 3))
    plan = plan_of(store, "linear", dtype="F32")
    pool = Unlucky()
    merged = merge(store, plan, executor=pool)
    assert pool.killed >= 3
    assert merged.manifest == wanted(store, plan)
    assert merged.outcome.expert_bytes_read == merged.outcome.costs.planned > 0
    assert store.fsck(read_data=True).problems == ()
    assert list((store.path / "tmp").iterdir()) == []


def test_a_slice_reads_no_more_than_it_says(store: Store) -> None:
    """A slice whose figure is too low refuses the read, and nothing is published or left."""
    plan = plan_of(store, "linear")
    before = store.refs()

    class Cheating(ThreadPoolExecutor):
        def submit(self, run: Any, /, *given: Any, **named: Any) -> Future[Any]:
            return super().submit(_cheated, *given)

    with Cheating(1) as pool, pytest.raises(BudgetExceeded):
        merge(store, plan, executor=pool, name="never")
    assert store.refs() == before
    assert list((store.path / "tmp").iterdir()) == []


def _cheated(work: Slice) -> Any:
    class Cheap(Slice):
        expert_bytes = 10  # type: ignore[assignment]

    fields = {name: getattr(work, name) for name in Slice.__struct_fields__}
    return execute(Cheap(**fields))


def test_a_failing_slice_publishes_nothing(store: Store) -> None:
    """Where one slice fails, those that ran are thrown away with it."""

    class Failing(ThreadPoolExecutor):
        calls = 0

        def submit(self, run: Any, /, *given: Any, **named: Any) -> Future[Any]:
            self.calls += 1
            return super().submit(_fail if self.calls == 2 else run, *given)

    before = store.refs()
    with Failing(2) as pool, pytest.raises(Corrupt, match="broken on purpose"):
        merge(store, plan_of(store, "linear"), executor=pool, name="never")
    assert store.refs() == before
    assert list((store.path / "tmp").iterdir()) == []


def _fail(work: Slice) -> None:
    raise Corrupt("broken on purpose")


# -- what a plan lets a merge read ---------------------------------------------------------------


def test_no_byte_outside_the_plan_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range that is read lies in a planned block of an expert, in a block of the base, in a
    parent's card or config, or in a header of the base.
    """
    plan = plan_of(store, "ties", budget=0.4)
    catalog = store._catalog
    allowed: dict[tuple[PackId, int], int] = {}

    def allow(block: BlockId) -> None:
        (place,) = catalog.locate([block])
        allowed[place.pack, place.offset] = place.stored_length

    base = tensors_of(catalog, catalog.manifest(plan.base_id()))
    experts = [tensors_of(catalog, catalog.manifest(e.manifest_id())) for e in plan.experts]
    for tensor in plan.tensors:
        for block in catalog.tensor(base[tensor.name]).block_ids():
            allow(block)
        for k, states in enumerate(tensor.states):
            record = catalog.tensor(experts[k][tensor.name])
            for number, state in enumerate(states):
                if state in (READ, SHARED):
                    for block in chunk_blocks(record, tensor.chunk_elements, number, BLOCK):
                        allow(block)
    papers: set[tuple[PackId, int]] = set()
    for id in (plan.base_id(), *(e.manifest_id() for e in plan.experts)):
        for path in ("README.md", "config.json"):
            file = catalog.manifest(id).file(path)
            assert file is not None
            places = catalog.locate(catalog.tensor(file.parts[0].tensor_id()).block_ids())
            papers |= {(place.pack, place.offset) for place in places}
    for file in catalog.manifest(plan.base_id()).files:
        places = catalog.locate(catalog.tensor(file.parts[0].tensor_id()).block_ids())
        papers |= {(place.pack, place.offset) for place in places}
    read: list[tuple[PackId, int, int]] = []
    scattered, plain = PackFiles.read_scattered, PackFiles.read

    def spy(self: PackFiles, pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        at = offset
        for target in targets:
            read.append((pack, at, len(target)))
            at += len(target)
        scattered(self, pack, offset, targets)

    def spy_plain(self: PackFiles, pack: PackId, offset: int, length: int) -> bytes:
        read.append((pack, offset, length))
        return plain(self, pack, offset, length)

    run_plan(catalog, plan, None, resources=Resources(1))  # records are in the cache
    monkeypatch.setattr(PackFiles, "read_scattered", spy)
    monkeypatch.setattr(PackFiles, "read", spy_plain)
    outcome = run_plan(catalog, plan, None, resources=Resources(2))
    read = [one for one in read if one[:2] not in papers]
    assert [one for one in read if allowed.get(one[:2]) != one[2]] == []
    assert sum(length for *_, length in read) == (
        outcome.expert_bytes_read + outcome.base_bytes_read
    )


def test_neighbours_are_read_in_one_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks are loaded together: far fewer reads than blocks."""
    plan = plan_of(store, "linear")
    calls = blocks = 0
    scattered = PackFiles.read_scattered

    def spy(self: PackFiles, pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        nonlocal calls, blocks
        calls += 1
        blocks += len(targets)
        scattered(self, pack, offset, targets)

    monkeypatch.setattr(PackFiles, "read_scattered", spy)
    run_plan(store._catalog, plan, None, resources=Resources(2))
    assert blocks > 60
    # The headers of the base's files are read, too.
    assert calls < blocks / 4 + 3


# -- tasks ---------------------------------------------------------------------------------------


def test_tasks_say_it_all(store: Store, tmp_path: Path) -> None:
    """A task that went through pickle is computed from packs alone, to the bytes of the merge."""
    plan = plan_of(store, "linear")
    merged = merge(store, plan, name="whole")
    view = store.view(merged.snapshot)
    tasks = Tasks(store._catalog, plan)
    tensor = tasks.tensor("a")
    assert not tensor.limited
    packs = PackFiles(store._catalog.layout.packs)
    out = b""
    meter = Meter("expert")
    for number in range(tensor.chunks):
        task = pickle.loads(pickle.dumps(tasks.chunk(tensor, number)))
        quotas = task.tensor.quotas
        (loaded,) = load([task], packs, LoadBuffers(), meter, Meter("base"))
        made = np.empty(task.out_bytes, dtype=np.uint8)
        blend(loaded, quotas, made)
        out += bytes(made)
    assert out == view.tensor("a").tobytes()
    costs = sum(task.expert_bytes for task in tasks.chunks(tensor, range(tensor.chunks)))
    assert meter.total == costs
    packs.close()


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_ties_are_counted_per_threshold(method: str, store: Store) -> None:
    """`tie_counts` counts what equals a threshold, for those asked for and no other."""
    plan = plan_of(store, method)
    tasks = Tasks(store._catalog, plan)
    tensor = tasks.tensor("a")
    (one,) = load(
        [tasks.chunk(tensor, 0)], store._catalog.packs, LoadBuffers(), Meter("e"), Meter("b")
    )
    base = store["base"].tensor("a").astype(np.float32)[: tensor.chunk_elements]
    wanted = []
    for slot, value in enumerate(tensor.thresholds):
        expert = store[f"e{slot % 3}"].tensor("a").astype(np.float32)[: tensor.chunk_elements]
        wanted.append(int((np.abs(expert - base) == value).sum()))
    assert len(wanted) == (6 if method == "breadcrumbs" else 3)
    assert min(wanted) > 0
    assert tie_counts(one, [True] * len(wanted)) == wanted
    some = [slot % 3 == 1 for slot in range(len(wanted))]
    assert tie_counts(one, some) == [n if yes else 0 for n, yes in zip(wanted, some, strict=True)]


# -- packs ---------------------------------------------------------------------------------------


def test_runs_lie_as_in_the_file(store: Store, tmp_path: Path) -> None:
    """Raw blocks of a slice's pack lie congruent to their place in the file, modulo a page."""
    catalog = store._catalog
    merged = merge(store, plan_of(store, "ties"), name="congruent")
    checked = 0
    for file in catalog.manifest(merged.manifest).files:
        offset = 0
        for part in file.parts:
            record = catalog.tensor(part.tensor_id())
            for number, block in enumerate(record.block_ids()):
                (place,) = catalog.locate([block])
                if place.codec == 0 and part.name in ("a", "d") and "e" not in file.path[:1]:
                    own = offset + number * catalog.block_size
                    checked += 1
                    assert (place.offset - own) % PAGE == 0
            offset += part.nbytes
    assert checked > 10


# -- memory --------------------------------------------------------------------------------------


def test_memory_bounds_threads(store: Store) -> None:
    """More memory allows more threads; what holds no chunk is refused with the least that does."""
    plan = plan_of(store, "linear")
    tasks = Tasks(store._catalog, plan)
    counts = [
        bounds(tasks, memory=RESERVE + (megabytes << 20), threads=64).threads
        for megabytes in (16, 64, 1024)
    ]
    assert counts == sorted(counts)
    assert 1 <= counts[0] < counts[1] < counts[2] == 64
    with pytest.raises(BadRequest) as refused:
        merge(store, plan, memory=RESERVE)
    assert (
        f"{format_size(RESERVE)} is the fixed working memory of the process" in refused.value.what
    )
    hint = refused.value.hint or ""
    enough = int(hint.removeprefix("the least that works: memory="))
    with pytest.raises(BadRequest):
        merge(store, plan, memory=enough - (1 << 20))
    assert merge(store, plan, memory=enough).manifest == wanted(store, plan)


ANONYMOUS = """
import sys, threading
from mstore import MergeRequest, Store
from mstore.store.models import tensors_of

def anonymous():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0]) << 10

peak = 0
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

with Store.open(sys.argv[1]) as store:
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    experts = [f"e{k}" for k in range(24)]
    asked = MergeRequest(base="base", experts=experts, method="linear")
    plan = store.plan(asked, threads=1)
    store.merge(plan, name="m", threads=64, memory=int(sys.argv[2]))
    done.set()
    watcher.join()
print(peak)
"""


def words_below_two(count: int) -> np.ndarray[Any, Any]:
    """Random elements in bf16; turned by a place they are another model, with no block the same."""
    words = np.random.default_rng(0).integers(0, 1 << 16, count, dtype=np.uint16)
    return words & np.uint16(0xBFFF)


@pytest.mark.rest
def test_many_experts_take_no_more_memory(tmp_path: Path) -> None:
    """With 24 experts, blocks of 1 MiB and 64 threads asked for, the bound is kept."""
    drawn = words_below_two(2 << 20)
    with Store.init(tmp_path / "store", codec="raw") as store:
        for turn, name in enumerate(("base", *(f"e{k}" for k in range(24)))):
            words = np.roll(drawn, turn)
            tensor = ("w", "BF16", (2 << 20,), words.tobytes())
            write_safetensors(tmp_path / name / "m.safetensors", [tensor])
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
    bound = 256 << 20
    done = subprocess.run(
        [sys.executable, "-c", ANONYMOUS, str(tmp_path / "store"), str(bound)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) <= bound


@pytest.mark.rest
def test_a_worker_keeps_the_bound_of_its_slice(tmp_path: Path) -> None:
    """In the process of an executor, with 24 experts, blocks of 1 MiB and 64 threads asked for, the
    bound is kept; the result is that of a bound that allows more threads, which together take more
    on a machine where they run at once."""
    drawn = words_below_two(4 << 20)
    bound = 168 << 20
    names = [f"e{k}" for k in range(24)]
    with Store.init(tmp_path / "store", codec="raw") as store:
        for turn, name in enumerate(("base", *names)):
            words = np.roll(drawn, turn)
            tensor = ("w", "BF16", (4 << 20,), words.tobytes())
            write_safetensors(tmp_path / name / "m.safetensors", [tensor])
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        plan = store.plan(MergeRequest(base="base", experts=names, method="linear"), threads=1)
        for name, memory in (("tight", bound), ("loose", 1 << 30)):
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, spawn, initializer=watch_memory) as pool:
                store.merge(plan, name=name, threads=64, memory=memory, cluster=pool, memo=False)
                assert pool.submit(peak_memory).result() <= memory
        assert store["tight"].manifest == store["loose"].manifest


def test_a_slice_carries_its_bounds(store: Store) -> None:
    """With an executor, `threads` and `memory` hold for each slice: one thread unless more are
    asked for, as many as fit, and a merge that cannot fit is refused before any slice."""
    plan = plan_of(store, "linear")
    seen: list[Slice] = []

    class Seeing(ThreadPoolExecutor):
        def submit(self, run: Any, /, *given: Any, **named: Any) -> Future[Any]:
            seen.extend(one for one in given if isinstance(one, Slice))
            return super().submit(run, *given, **named)

    def threads(**options: Any) -> set[int]:
        seen.clear()
        store.merge(str(plan.id()), name="m", memo=False, cluster=pool, **options)
        return {slice.bounds.threads for slice in seen}

    with Seeing(2) as pool:
        assert threads() == {1}
        assert threads(threads=3) == {3}
        (fitting,) = threads(threads=64, memory=RESERVE + (16 << 20))
        assert 1 <= fitting < 64
        seen.clear()
        with pytest.raises(BadRequest, match="is the fixed working memory of the process"):
            threads(memory=RESERVE)
        assert seen == []
