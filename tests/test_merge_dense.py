"""Merging on dense stores: how blocks lie at rest changes what a merge costs, and nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from families import BLOCK, Arrays, Family
from msgspec import structs

from mstore import MergeRequest, Store
from mstore.api.reports import PlanReport
from mstore.blocks import codecs
from mstore.blocks.codecs import Codec, Policy
from mstore.blocks.location import Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import NO_BASE, PackWriter
from mstore.blocks.reader import Meter
from mstore.merge.planning.request import resolve
from mstore.merge.planning.session import request_key
from mstore.merge.running.engine import RESERVE, Resources, bounds, run_plan
from mstore.merge.running.leftovers import sound_pack
from mstore.merge.running.loading import SPARE_SIDES, LoadBuffers, load, will_need
from mstore.merge.running.slices import batch_chunks
from mstore.merge.running.task import ChunkTask, Row, StoredBlock, Tasks
from mstore.store import leases
from mstore.store.models import Input
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, BudgetExceeded, Conflict, Corrupt
from mstore.terms.ids import BlockId, PackId, SnapshotId
from mstore.terms.sizes import Budget

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {"lambda": 0.7},
    "ties": {"density": 0.3},
    "dare_linear": {"density": 0.5, "seed": 3},
    "dare_ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.3, "gamma": 0.2},
    "breadcrumbs_ties": {"density": 0.3, "gamma": 0.2},
}
WEIGHTS = (1.0, 0.5, 0.75)

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("BF16", ("BF16", "BF16", "BF16")),
    "fp16": ("F16", ("F16", "F16", "F16")),
    "fp32": ("F32", ("F32", "F32", "F32")),
    "mixed": ("BF16", ("F32", "BF16", "F16")),
}

WAYS = {
    "raw": ("raw", None, "base"),
    "alone": ("dense", None, None),
    "delta": ("dense", None, "base"),
    "chain": ("dense", "root", "base"),
    "cousins": ("dense", None, "root"),
}
"""How a family is stored: the policy, the base of the base, the base of the experts.

alone: nothing has a base.  delta: experts are differences to the base.  chain: the base itself is
one to another checkpoint, and so are the experts then.  cousins: only the experts are.
"""


def _root(family: Family) -> Arrays:
    """A checkpoint that the base may have been tuned from."""
    rng = np.random.default_rng(5)
    found = {}
    for name, array in family.base.items():
        dtype = families._NAMES[array.dtype]
        found[name] = array
        if dtype in families.reference.DTYPES:
            noise = rng.standard_normal(array.shape, dtype=np.float32) / 64
            found[name] = families.cast(array.astype(np.float32) + noise, dtype)
    return found


@dataclass
class Place:
    """A family of one kind, and the stores that hold it, made when they are asked for."""

    root: Path
    family: Family
    opened: dict[str, Store]

    def store(self, way: str) -> Store:
        if way not in self.opened:
            self.opened[way] = self.copy(way, self.root / f"store-{way}")
        return self.opened[way]

    def copy(self, way: str, at: Path) -> Store:
        """A store at `at` that is nobody else's: of each way one is made, and copied."""
        template = self.root / f"template-{way}"
        if not template.exists():
            make(template, self.root, way).close()
        shutil.copytree(template, at)
        return Store.open(at)


def make(at: Path, root: Path, way: str) -> Store:
    """A store at `at` of the checkpoints below `root`."""
    codec, under, of = WAYS[way]
    store = Store.init(at, block_size=BLOCK, codec=codec)
    store.add(root / "root", name="root")
    store.add(root / "base", name="base", base=under)
    for name in ("e0", "e1", "e2"):
        store.add(root / name, name=name, base=of)
    return store


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    made: dict[str, Place] = {}

    def place(kind: str) -> Place:
        if kind not in made:
            base, experts = KINDS[kind]
            family = families.layered(9, base_dtype=base, expert_dtypes=experts, rows=100)
            root = family.write(tmp_path_factory.mktemp(kind))
            families.write_checkpoint(root / "root", _root(family), note="root")
            made[kind] = Place(root, family, {})
        return made[kind]

    yield place
    for one in made.values():
        for store in one.opened.values():
            store.close()


@pytest.fixture(scope="module")
def raw_and_dense(
    places: Callable[[str], Place], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Store]]:
    """A raw store and a dense one whose inputs stay as they are stored."""
    place, root = places("bf16"), tmp_path_factory.mktemp("two")
    with place.copy("raw", root / "raw") as raw, place.copy("delta", root / "d") as dense:
        yield raw, dense


def planned(store: Store, method: str, **options: Any) -> PlanReport:
    """A plan of all three experts."""
    return store.plan(
        MergeRequest(
            base="base",
            experts=list(zip(("e0", "e1", "e2"), WEIGHTS, strict=True)),
            method=method,
            parameters=METHODS[method],
            **options,
        )
    )


def plan_of(store: Store, method: str, **options: Any) -> Plan:
    """The same as a record."""
    return store._catalog.record(Plan, planned(store, method, **options).plan)


def at_rest(store: Store, revision: str) -> dict[BlockId, Location]:
    """Where each block of a snapshot's tensors lies."""
    catalog = store._catalog
    tensors = store.view(revision).tensors.values()
    ids = {b for id in tensors for b in catalog.tensor(id).block_ids()}
    wanted = sorted(ids)
    return dict(zip(wanted, catalog.locate(wanted), strict=True))


def kinds_at_rest(store: Store, revision: str) -> Counter[Codec]:
    """How often each codec occurs among the blocks of a snapshot's tensors."""
    return Counter(Codec(at.codec) for at in at_rest(store, revision).values())


def deltas_at_rest(store: Store, revision: str) -> int:
    """How many of these blocks are differences."""
    return kinds_at_rest(store, revision)[Codec.DELTA]


# -- the same content ----------------------------------------------------------------------------


def covering() -> Iterator[Any]:
    """Every kind in every way; the short lane has each kind, each way, and the two that differ
    most among themselves (half the bits, three types) in all."""
    for way in WAYS:
        for kind in KINDS if way != "raw" else ():
            short = kind in ("bf16", "mixed") or (way, kind) in (
                ("chain", "fp16"),
                ("delta", "fp32"),
            )
            yield pytest.param(kind, way, marks=[] if short else [pytest.mark.slow])


@pytest.mark.rest
@pytest.mark.parametrize(("kind", "way"), list(covering()))
def test_all_methods_give_the_same_content(
    kind: str, way: str, places: Callable[[str], Place]
) -> None:
    """However base and experts are stored, every method makes the ManifestId of a raw store, with 1
    thread or with 2; it reads what was planned, less than from a raw store; all of it is sound.
    """
    place = places(kind)
    raw, store = place.store("raw"), place.store(way)
    found = sum((kinds_at_rest(store, name) for name in ("base", "e0", "e1", "e2")), Counter())
    assert found[Codec.FLOATS if way != "chain" else Codec.DELTA] > 0
    deltas = sum(deltas_at_rest(store, name) for name in ("e0", "e1", "e2"))
    assert (deltas > 10) == (way != "alone")
    for number, method in enumerate(METHODS):
        plan, dense = planned(raw, method), planned(store, method)
        wanted = raw.merge(plan, name=method)
        assert dense.full_expert_bytes < plan.full_expert_bytes
        report = store.merge(dense, name=method, threads=1 + number % 2, memo=False)
        assert report.manifest == wanted.manifest
        assert report.expert_bytes_read == dense.planned_expert_bytes
        # What is planned follows from contents; only what it costs depends on how they lie.
        ours, theirs = (s._catalog.record(Plan, p.plan) for s, p in ((store, dense), (raw, plan)))
        assert ours.tensors == theirs.tensors
    assert store.fsck(read_data=True).problems == ()
    assert store.replay("ties").same


@pytest.mark.rest
@pytest.mark.parametrize("way", ["delta", "chain"])
@pytest.mark.parametrize("kind", ["bf16", "mixed"])
def test_processes_give_the_same(way: str, kind: str, places: Callable[[str], Place]) -> None:
    """Slices that ran in another process, from packs alone: the same content, bytes as planned, and
    what they wrote are sound deltas.
    """
    place = places(kind)
    store = place.copy(way, place.root / f"pool-{way}")
    wanted = place.store("raw").merge(planned(place.store("raw"), "ties"), name="m").manifest
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool, store:
        plan = planned(store, "ties")
        report = store.merge(plan, name="m", cluster=pool, memo=False)
        assert report.manifest == wanted
        assert report.expert_bytes_read == plan.planned_expert_bytes
        assert deltas_at_rest(store, "m") > 5
        assert store.fsck(read_data=True).problems == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["delta", "chain", "cousins"])
def test_output_is_stored_against_the_base(way: str, places: Callable[[str], Place]) -> None:
    """A merge's new blocks are differences to the base's block at the same place; where that is one
    itself, to the block that it is a difference to.
    """
    store = places("bf16").store(way)
    catalog = store._catalog
    store.merge(planned(store, "task_arithmetic"), name="coded", memo=False)
    base, merged = (store.view(name).tensors for name in ("base", "coded"))
    deltas = 0
    for name, id in merged.items():
        ours, theirs = catalog.tensor(id), catalog.tensor(base[name])
        blocks = list(ours.block_ids())
        for number, (block, at) in enumerate(zip(blocks, catalog.locate(blocks), strict=True)):
            if not Codec(at.codec).is_delta or block == theirs.block(number):
                continue
            (under,) = catalog.locate([theirs.block(number)])
            natural = under.base if under.base != NO_BASE else theirs.block(number)
            assert at.base == natural
            assert not Codec(catalog.locate([BlockId(at.base)])[0].codec).is_delta
            assert at.stored_length < at.raw_length
            deltas += 1
    assert deltas > 5
    directory = places("bf16").root / f"out-{way}"
    store.checkout("coded", directory)
    for path in store.view("coded").files:
        assert (directory / path).read_bytes() == b"".join(store.read_file("coded", path))


@pytest.mark.rest
def test_output_of_another_dtype_has_no_base(places: Callable[[str], Place]) -> None:
    """Blocks of another element type than the base's are stored without one, and are right."""
    store, raw = places("bf16").store("delta"), places("bf16").store("raw")
    wanted = raw.merge(planned(raw, "linear", dtype="F32"), name="wide")
    assert store.merge(planned(store, "linear", dtype="F32"), name="wide").manifest == (
        wanted.manifest
    )
    own = at_rest(store, "wide").keys() - at_rest(store, "base").keys()
    assert own
    assert {Codec(at_rest(store, "wide")[block].codec).is_delta for block in own} == {False}
    assert store.fsck(read_data=True).problems == ()


def test_a_raw_store_stays_raw(places: Callable[[str], Place]) -> None:
    """Where the policy is raw, a merge writes raw and constant blocks only."""
    store = places("bf16").store("raw")
    store.merge(planned(store, "linear"), name="plain", memo=False)
    assert kinds_at_rest(store, "plain").keys() <= {Codec.RAW, Codec.CONSTANT}


@pytest.mark.rest
def test_a_merge_may_be_stored_unlike_its_store(places: Callable[[str], Place]) -> None:
    """With codec="raw" the output of a merge lies raw in a dense store, and is the same."""
    place = places("bf16")
    store, other = place.store("delta"), place.store("raw")

    def plan(of: Store) -> PlanReport:
        experts = ["e0", "e1"]
        return of.plan(MergeRequest(base="base", experts=experts, method="linear"))

    loose = store.merge(plan(store), name="loose", memo=False, codec="raw")
    assert other.merge(plan(other), name="loose", memo=False).blocks_total == loose.blocks_total
    own = at_rest(store, "loose").keys() - at_rest(store, "base").keys()
    own -= at_rest(store, "e0").keys() | at_rest(store, "e1").keys()
    places_of_own = [at for id, at in at_rest(store, "loose").items() if id in own]
    codecs_of_own = {Codec(at.codec) for at in places_of_own}
    assert codecs_of_own == {Codec.RAW, Codec.CONSTANT}
    assert at_rest(store, "loose").keys() == at_rest(other, "loose").keys()
    assert deltas_at_rest(store, "e0")
    # What is kept is coded like any other: a pin marks it, and unpin codes it against its base.
    store.pin("loose", raw=True)
    store.unpin("loose")
    assert any(Codec(at_rest(store, "loose")[id].codec).is_delta for id in own)
    # Of a very short block nothing can be saved.
    long = [at for id, at in at_rest(store, "loose").items() if id in own and at.raw_length > 1024]
    assert long
    assert Codec.RAW not in {Codec(at.codec) for at in long}
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_a_raw_merge_says_what_stays_coded(places: Callable[[str], Place]) -> None:
    """With codec="raw", a result that was stored before stays coded, and a remark says so and names
    the call that stores it raw; after that call there is no remark."""
    store = places("bf16").store("chain")
    plan = planned(store, "linear")
    assert store.merge(plan, name="first", memo=False).remarks == ()
    again = store.merge(plan, name="second", codec="raw", memo=False)
    (remark,) = again.remarks
    assert "stored before and stay coded" in remark
    assert remark.endswith("store.pin('second', raw=True)")
    store.pin("second", raw=True)
    assert store.merge(plan, name="third", codec="raw", memo=False).remarks == ()


def test_a_wrong_codec_merges_nothing(places: Callable[[str], Place]) -> None:
    """An unknown codec, and any for a virtual merge, is refused before anything is published."""
    store = places("bf16").store("raw")
    plan = planned(store, "linear")
    with pytest.raises(BadRequest, match="zip"):
        store.merge(plan, name="nothing", codec="zip")
    with pytest.raises(BadRequest, match="virtual"):
        store.merge(plan, name="nothing", codec="raw", virtual=True)
    assert "nothing" not in {ref.name for ref in store.refs()}


# -- bytes ---------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["bf16", "mixed"])
@pytest.mark.parametrize("way", ["delta", "chain"])
def test_every_budget_is_kept(kind: str, way: str, places: Callable[[str], Place]) -> None:
    """From 10 to 100 %: bytes read of experts are those planned, within the budget, and a sweep
    foretells them; a delta costs what it takes at rest.
    """
    store = places(kind).store(way)
    whole = planned(store, "task_arithmetic")
    shares = [0.1, 0.3, 0.55, 0.8, 1.0]
    sweep = store.sweep(
        MergeRequest(
            base="base",
            experts=list(zip(("e0", "e1", "e2"), WEIGHTS, strict=True)),
            method="task_arithmetic",
            parameters=METHODS["task_arithmetic"],
        ),
        shares=shares,
    )
    previous = 0
    for share, point in zip(shares, sweep.points, strict=True):
        plan = planned(store, "task_arithmetic", budget=Budget.share(share))
        assert plan.planned_expert_bytes == point.planned_expert_bytes
        report = store.merge(plan, name="within", memo=False)
        budget = int(share * whole.full_expert_bytes)
        assert report.budget_bytes == budget
        assert previous <= report.expert_bytes_read == plan.planned_expert_bytes <= budget
        previous = report.expert_bytes_read
    assert previous == whole.full_expert_bytes


def _expected_reads(store: Store, plan: Plan) -> tuple[int, int]:
    """Expert and base bytes of a merge that reads everything, counted from the index.

    A chunk's blocks of the base, and then those that deltas in it are differences to and that are
    not among what is there.
    """
    catalog = store._catalog
    tasks = Tasks(catalog, plan)
    expert = base = 0
    for tensor in plan.tensors:
        task = tasks.tensor(tensor.name)
        numbers = np.flatnonzero(~tasks.reused(task)).tolist()
        for chunk in tasks.chunks(task, numbers):
            sides = [[s.id for s in row.sources] for row in (chunk.base, *chunk.rows)]
            places = [catalog.locate(side) for side in sides]
            base += sum(at.stored_length for at in places[0])
            expert += sum(at.stored_length for side in places[1:] for at in side)
            there = set(sides[0])
            under = {BlockId(at.base) for side in places for at in side if at.base != NO_BASE}
            base += sum(at.stored_length for at in catalog.locate(sorted(under - there)))
    return expert, base


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["alone", "delta", "chain", "cousins"])
def test_bytes_are_counted_where_they_belong(way: str, places: Callable[[str], Place]) -> None:
    """An expert's block costs its bytes at rest; what its delta is a difference to is read once a
    chunk and charged to the base, and not at all where it is the base's own block.
    """
    store = places("bf16").store(way)
    told = planned(store, "linear")
    report = store.merge(told, name="counted", memo=False, threads=1)
    expert, base = _expected_reads(store, store._catalog.record(Plan, told.plan))
    assert report.expert_bytes_read == expert == told.planned_expert_bytes
    # Small chunks are loaded together, so that one may find what it needs with its neighbour.
    assert report.base_bytes_read == base


@pytest.mark.rest
def test_kernel_counts_the_same_bytes(places: Callable[[str], Place], tmp_path: Path) -> None:
    """What the kernel counts as read (/proc/self/io) is what the meters say, within one block."""
    if not Path("/proc/self/io").exists():
        pytest.skip("this kernel counts no reads")
    program = """
import json, sys
from mstore import Store

def read_by_kernel():
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))

for place, *plans in json.loads(sys.argv[1]):
    with Store.open(place) as store:
        for plan in plans:  # code and kernels of each are loaded, records are cached
            store.merge(plan, name="warm", memo=False)
        for plan in plans:
            before = read_by_kernel()
            report = store.merge(plan, name="counted", memo=False)
            after = read_by_kernel()
            print(json.dumps([after - before, report.expert_bytes_read, report.base_bytes_read]))
"""
    asked = []
    for way in ("delta", "chain"):
        store = places("bf16").store(way)
        shares = [Budget.share(share) for share in (1.0, 0.2, 0.6)]
        plans = [str(planned(store, "ties", budget=share).plan) for share in shares]
        asked.append([str(store.path), *plans])
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    counted = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(counted) == 6
    for by_kernel, expert, base in counted:
        assert expert + base <= by_kernel < expert + base + BLOCK


def test_a_delta_beyond_the_plan_is_refused(places: Callable[[str], Place]) -> None:
    """A meter with a byte less than a chunk's deltas take refuses the read before it happens."""
    store = places("bf16").store("delta")
    plan = plan_of(store, "linear")
    tasks = Tasks(store._catalog, plan)
    task = tasks.chunk(tasks.tensor("model.embed.weight"), 0)
    assert any(source.base is not None for row in task.rows for source in row.sources)
    base = Meter("base")
    with pytest.raises(BudgetExceeded):
        load([task], store._catalog.packs, LoadBuffers(), Meter("e", task.expert_bytes - 1), base)
    meter = Meter("expert", task.expert_bytes)
    load([task], store._catalog.packs, LoadBuffers(), meter, base)
    assert meter.total == task.expert_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_says_what_is_merged(method: str, raw_and_dense: tuple[Store, Store]) -> None:
    """Without a budget, equal requests are one plan however blocks lie: made in a raw store or a
    dense one, it merges to the same in both, and each tells and reads its own bytes.
    """
    raw, dense = raw_and_dense
    plans = {one: planned(one, method) for one in (raw, dense)}
    assert plans[raw].plan == plans[dense].plan
    assert plans[raw].full_expert_bytes > plans[dense].full_expert_bytes
    manifests = set()
    for one, other in ((raw, dense), (dense, raw)):
        taken = one.import_plan(other.export_plan(str(plans[other].plan)))
        assert taken.planned_expert_bytes == plans[one].planned_expert_bytes
        report = one.merge(taken, name="m", memo=False)
        assert report.expert_bytes_read == taken.planned_expert_bytes
        assert report.full_expert_bytes == taken.full_expert_bytes
        manifests.add(report.manifest)
    assert len(manifests) == 1


@pytest.mark.rest
def test_a_plan_of_another_store(raw_and_dense: tuple[Store, Store]) -> None:
    """A plan with a budget names its blocks, so it makes the same in any store, by every way of
    running it, and tells what those blocks take there: also where that is more than the budget.
    """
    raw, dense = raw_and_dense
    plans = {one: planned(one, "linear", budget=0.7) for one in (raw, dense)}
    for one, other in ((raw, dense), (dense, raw)):
        wanted = other.merge(plans[other], name="m", memo=False)
        taken = one.import_plan(other.export_plan(str(plans[other].plan)))
        report = one.merge(taken, name="m", memo=False)
        assert report.manifest == wanted.manifest
        assert report.expert_bytes_read == taken.planned_expert_bytes
        assert taken.planned_expert_bytes != plans[other].planned_expert_bytes
        over = report.expert_bytes_read > (report.budget_bytes or 0)
        assert over == (one is raw)
        assert over == any("more than its budget" in remark for remark in report.remarks)
        assert one.replay("m").same
        assert one.blame("m").experts
        assert one.explain("m").plan is not None
        one.merge(taken, name="v", virtual=True)
        assert one.materialize("v").manifest == wanted.manifest


@pytest.mark.rest
def test_a_merge_is_replayed_after_its_inputs_were_stored_anew(
    places: Callable[[str], Place], tmp_path: Path
) -> None:
    """Where blocks lie otherwise than when a plan was made, replay, blame and another merge by it
    make what they made, and read what the blocks take now.
    """
    place = places("bf16")
    root = place.root
    with place.copy("delta", tmp_path / "store") as store:
        plan = planned(store, "ties", budget=0.6)
        made = store.merge(plan, name="m")
        catalog = store._catalog
        for name in ("e0", "e1", "e2"):
            # As if they had been dropped.
            gone = [id for id, at in at_rest(store, name).items() if Codec(at.codec).is_delta]
            with catalog.index.env.write() as rows:
                for block in gone:
                    rows.delete(block, db=catalog.index.db("blocks"))
            store.add(root / name, name=f"{name}-anew", base="base", codec="raw")
        now = store.explain("m").plan
        assert now is not None
        assert now.planned_expert_bytes > plan.planned_expert_bytes
        assert store.replay("m").same
        assert store.blame("m").experts
        again = store.merge(plan, name="again", memo=False)
        assert again.manifest == made.manifest
        assert again.expert_bytes_read == now.planned_expert_bytes


def test_neighbours_are_read_in_one_go(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads that follow each other at rest are one read, encoded or not."""
    store = places("bf16").store("delta")
    plan = plan_of(store, "linear")
    calls = blocks = 0
    scattered = PackFiles.read_scattered

    def spy(self: PackFiles, pack: PackId, offset: int, targets: list[memoryview]) -> None:
        nonlocal calls, blocks
        calls += 1
        blocks += len(targets)
        scattered(self, pack, offset, targets)

    run_plan(store._catalog, plan, None, resources=Resources(1))  # records are in the cache
    monkeypatch.setattr(PackFiles, "read_scattered", spy)
    run_plan(store._catalog, plan, None, resources=Resources(2))
    assert blocks > 25
    assert calls < 0.8 * blocks


def test_the_kernel_is_asked_for_what_is_read(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is prefetched is what is then read, to the byte, payloads and bases of deltas too."""
    store = places("bf16").store("cousins")
    tasks = Tasks(store._catalog, plan_of(store, "linear"))
    tensor = tasks.tensor("model.embed.weight")
    chunks = tasks.chunks(tensor, range(tensor.chunks))
    asked: list[tuple[PackId, int, int]] = []
    read: list[tuple[PackId, int, int]] = []

    def advise(self: PackFiles, pack: PackId, offset: int, length: int) -> None:
        asked.append((pack, offset, offset + length))

    scattered = PackFiles.read_scattered

    def spy(self: PackFiles, pack: PackId, offset: int, targets: list[memoryview]) -> None:
        read.append((pack, offset, offset + sum(map(len, targets))))
        scattered(self, pack, offset, targets)

    monkeypatch.setattr(PackFiles, "will_need", advise)
    monkeypatch.setattr(PackFiles, "read_scattered", spy)
    will_need(chunks, store._catalog.packs)
    load(chunks, store._catalog.packs, LoadBuffers(), Meter("e"), Meter("b"))
    assert _joined(asked) == _joined(read) != []


def _joined(spans: list[tuple[PackId, int, int]]) -> list[tuple[PackId, int, int]]:
    """The bytes that spans cover, as spans that touch no other."""
    found: list[tuple[PackId, int, int]] = []
    for pack, start, end in sorted(spans):
        if found and found[-1][0] == pack and start <= found[-1][2]:
            found[-1] = (pack, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((pack, start, end))
    return found


def test_what_is_stored_is_not_encoded(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge encodes the blocks that nobody has, in its computing threads, and its card and
    recipe; made again, none.
    """
    store = places("fp16").store("delta")
    # Weights of its own: no other test has made these blocks.
    plan = store.plan(
        MergeRequest(base="base", experts=[("e0", 0.3), ("e1", 0.2)], method="task_arithmetic")
    )
    threads = []
    honest = codecs.encode

    def spy(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return honest(*given)

    monkeypatch.setattr(codecs, "encode", spy)
    # With more threads, the one that merges computes, too.
    store.merge(plan, name="first", memo=False, threads=1)
    assert len(threads) > 5
    papers = [name for name in threads if not name.startswith("merge")]
    assert papers == [threading.main_thread().name] * 2
    threads.clear()
    store.merge(plan, name="second", memo=False)
    assert threads == []


def test_every_byte_is_charged_before_it_is_read(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When bytes are read, the meters have counted them: a limit can stop no read afterwards."""
    store = places("bf16").store("cousins")
    tasks = Tasks(store._catalog, plan_of(store, "linear"))
    tensor = tasks.tensor("model.embed.weight")
    expert, base = Meter("expert"), Meter("base")
    read = 0
    scattered = PackFiles.read_scattered

    def spy(self: PackFiles, pack: PackId, offset: int, targets: list[memoryview]) -> None:
        nonlocal read
        read += sum(map(len, targets))
        assert read <= expert.total + base.total
        scattered(self, pack, offset, targets)

    monkeypatch.setattr(PackFiles, "read_scattered", spy)
    chunks = tasks.chunks(tensor, range(tensor.chunks))
    load(chunks, store._catalog.packs, LoadBuffers(), expert, base)
    assert read == expert.total + base.total > 0


# -- damage and disappearance --------------------------------------------------------------------


def _one(places: Callable[[str], Place], way: str = "delta") -> tuple[Store, Tasks, ChunkTask]:
    store = places("bf16").store(way)
    tasks = Tasks(store._catalog, plan_of(store, "linear"))
    return store, tasks, tasks.chunk(tasks.tensor("model.embed.weight"), 1)


def _with_row(task: ChunkTask, source: StoredBlock) -> ChunkTask:
    """The task with another source for its first expert."""
    rows = (Row(task.rows[0].dtype, (source,)), *task.rows[1:])
    return structs.replace(task, rows=rows)


def test_a_pack_that_went_is_looked_up_again(places: Callable[[str], Place]) -> None:
    """Where gc moved what was located before, it is read at its new place and paid for once; what
    is gone altogether, or is stored another way now, ends with "run the command again".
    """
    store, tasks, task = _one(places)
    (source,) = task.rows[0].sources
    stale = structs.replace(
        source, at=structs.replace(source.at, pack=PackId(bytes(32)), offset=4096)
    )
    meter, packs = Meter("expert", task.expert_bytes), store._catalog.packs
    scratch = LoadBuffers()
    (one,) = load([_with_row(task, stale)], packs, scratch, meter, Meter("b"), tasks.moved)
    assert BlockId.of(one.sides[1][: source.at.raw_length].data) == source.id
    assert meter.total == task.expert_bytes
    with pytest.raises(Corrupt):
        load([_with_row(task, stale)], packs, scratch, Meter("e"), Meter("b"))
    longer = structs.replace(stale, at=structs.replace(stale.at, stored_length=7))
    unknown = structs.replace(stale, id=BlockId(bytes(32)))
    for gone in (longer, unknown):
        with pytest.raises(Conflict) as refused:
            load([_with_row(task, gone)], packs, scratch, Meter("e"), Meter("b"), tasks.moved)
        assert refused.value.hint == "run the command again"


def test_an_input_that_went_says_so(places: Callable[[str], Place], tmp_path: Path) -> None:
    """Where an input is collected in spite of all, a merge says to run the command again; a block
    that is missing although its snapshot is there is damage.
    """
    with places("bf16").copy("delta", tmp_path / "store") as store:
        catalog = store._catalog
        plan = plan_of(store, "linear")
        tasks = Tasks(catalog, plan)
        tensor = tasks.tensor("model.embed.weight")
        (source,) = tasks.chunk(tensor, 0).rows[0].sources
        with catalog.index.env.write() as rows:
            rows.delete(source.id, db=catalog.index.db("blocks"))
        with pytest.raises(Corrupt) as damaged:
            tasks.chunk(tensor, 0)
        assert str(source.id) in str(damaged.value)
        with catalog.index.env.write() as rows:
            key = bytes([Manifest.kind]) + plan.experts[0].manifest
            assert rows.delete(key, db=catalog.index.db("records"))
        with pytest.raises(Conflict) as gone:
            tasks.chunk(tensor, 0)
        assert gone.value.hint == "run the command again"


def test_inputs_are_pinned_while_they_are_read(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merge, replay and blame pin base and experts as long as they read, and no longer."""
    store = places("bf16").store("delta")
    layout = store._catalog.layout
    store.merge(planned(store, "linear"), name="pins", memo=False)
    seen: list[set[SnapshotId]] = []
    honest = Tasks.chunks_of

    def spy(self: Tasks, *given: Any) -> Any:
        seen.append(leases.holds(layout))
        return honest(self, *given)

    monkeypatch.setattr(Tasks, "chunks_of", spy)
    inputs = {store[name].id for name in ("base", "e0", "e1", "e2")}
    for run in (
        lambda: store.merge(planned(store, "linear"), name="pins", memo=False),
        lambda: store.replay("pins"),
        lambda: store.blame("pins"),
    ):
        seen.clear()
        run()
        assert seen
        assert all(inputs <= pinned for pinned in seen)
        assert leases.holds(layout) == set()


def test_what_does_not_decode_names_its_block(places: Callable[[str], Place]) -> None:
    """A payload that is damaged, a base that is another block, lengths that contradict: Corrupt
    that names the block, and never other bytes.
    """
    store, _, task = _one(places)
    (source,) = task.rows[0].sources
    base = source.base
    assert base is not None
    other = task.rows[1].sources[0].base or task.base.sources[0]
    assert other.id == base.id
    wrong = StoredBlock(source.id, source.at, _other_base(store, base))
    elsewhere = StoredBlock(
        source.id, structs.replace(source.at, offset=source.at.offset + 1), base
    )
    alone = StoredBlock(source.id, source.at, None)
    short = StoredBlock(
        source.id,
        source.at,
        StoredBlock(base.id, structs.replace(base.at, raw_length=base.at.raw_length - 8), None),
    )
    for bad in (wrong, elsewhere, alone, short):
        with pytest.raises(Corrupt) as found:
            load(
                [_with_row(task, bad)], store._catalog.packs, LoadBuffers(), Meter("e"), Meter("b")
            )
        assert str(source.id) in (found.value.where or "") or bad is short


def _other_base(store: Store, base: StoredBlock) -> StoredBlock:
    """Another stored block of the same length that is no delta."""
    for id, at in at_rest(store, "base").items():
        if id != base.id and at.raw_length == base.at.raw_length and at.base == NO_BASE:
            return StoredBlock(id, at)
    raise AssertionError


def test_a_delta_of_a_delta_is_refused(
    places: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that says that a base is a delta itself is Corrupt, before anything is read."""
    store, tasks, task = _one(places)
    catalog = store._catalog
    (source,) = task.rows[0].sources
    honest = catalog.locate_with_bases

    def locate(blocks: Any) -> dict[BlockId, Location]:
        return {
            id: structs.replace(at, codec=Codec.DELTA, base=bytes(source.id))
            if source.base is not None and id == source.base.id
            else at
            for id, at in honest(blocks).items()
        }

    monkeypatch.setattr(catalog, "locate_with_bases", locate)
    with pytest.raises(Corrupt, match="a delta itself"):
        tasks.chunk(task.tensor, task.number)


# -- interrupted, remembered, virtual ------------------------------------------------------------


def test_leftovers_are_decoded_with_their_bases(
    places: Callable[[str], Place], tmp_path: Path
) -> None:
    """A pack of deltas that was left is sound where its bases are stored and give what its ids say.

    One without a base, or with another base than it was made with, is not taken.
    """
    store = places("bf16").store("delta")
    catalog = store._catalog
    tensor = catalog.tensor(store.view("base").tensors["model.embed.weight"])
    base = tensor.block(0)
    plain = bytes(catalog.read_block(base))
    moved = (np.frombuffer(plain, dtype="<u2") + np.uint16(1)).tobytes()
    elements = codecs.elements_of("BF16")

    def leave(name: str, under: BlockId, like: bytes) -> Path:
        encoded = codecs.encode(moved, elements, Policy.DENSE, (under, like))
        assert encoded.base == under
        writer = PackWriter(tmp_path / name)
        writer.append_encoded(BlockId.of(moved), encoded, "f", 0)
        return writer.seal().path

    unknown = BlockId.of(b"nobody has it")
    assert sound_pack(leave("good.pack", base, plain), catalog) is not None
    assert sound_pack(leave("gone.pack", unknown, plain), catalog) is None
    assert sound_pack(leave("other.pack", tensor.block(1), plain), catalog) is None


RESUME = """
import os, signal, sys
from mstore.api import Store
from mstore.blocks.codecs import Policy
from mstore.merge.running.commit import run_merge
from mstore.merge.running.runners import LocalRunner
from mstore.store.objects.plan import Plan
from mstore.store.plans import find, sources_of

honest = LocalRunner._publish

def publish(runner, pack):
    honest(runner, pack)
    publish.sealed += 1
    if publish.sealed == 2:
        os.kill(os.getpid(), signal.SIGKILL)

publish.sealed = 0
LocalRunner._publish = publish
with Store.open(sys.argv[1]) as store:
    catalog = store._catalog
    plan = catalog.record(Plan, find(catalog, sys.argv[2]))
    run_merge(
        catalog, plan, sources_of(catalog, plan.id(), plan), name="m", message="", threads=1,
        slice_bytes=1 << 17, policy=Policy.DENSE,
    )
"""


def test_an_interrupted_merge_goes_on(places: Callable[[str], Place], tmp_path: Path) -> None:
    """What a killed merge had coded against the base is taken over, and the rest is made."""
    place = places("bf16")
    wanted = place.store("raw").merge(planned(place.store("raw"), "linear"), name="l").manifest
    with place.copy("chain", tmp_path / "store") as store:
        plan = planned(store, "linear")
        done = subprocess.run(
            [sys.executable, "-c", RESUME, str(store.path), str(plan.plan)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -9, done.stderr
        report = store.merge(plan, name="m", memo=False)
        assert report.manifest == wanted
        assert report.resumed_expert_bytes > 0
        assert report.expert_bytes_read == (plan.planned_expert_bytes - report.resumed_expert_bytes)
        assert deltas_at_rest(store, "m") > 5
        assert store.fsck(read_data=True).problems == ()
        assert list((store.path / "tmp").iterdir()) == []


def test_a_remembered_plan_costs_what_it_says(
    places: Callable[[str], Place], tmp_path: Path
) -> None:
    """A plan is remembered only as long as blocks take at rest what they took when it was made, and
    what it costs is looked up: without a budget the plan made anew is the same one.
    """
    place = places("bf16")
    with place.copy("delta", tmp_path / "store") as store:
        catalog = store._catalog
        first = planned(store, "linear")
        assert planned(store, "linear").plan == first.plan
        block, at = next(
            (id, at) for id, at in at_rest(store, "e1").items() if Codec(at.codec).is_delta
        )
        inputs = [Input(store[name].id, name) for name in ("base", "e0", "e1", "e2")]
        named = list(zip(("e0", "e1", "e2"), WEIGHTS, strict=True))
        asked = resolve(
            MergeRequest(base="base", experts=named, method="linear"),
            base=inputs[0],
            experts=inputs[1:],
        )
        before = request_key(catalog, asked)
        # As if it had been dropped, and stored again without a base.
        with catalog.index.env.write() as rows:
            row = rows.get(block, db=catalog.index.db("blocks"))
            changed = row[:12] + (at.stored_length + 9).to_bytes(4, "big") + row[16:]
            rows.put(block, changed, db=catalog.index.db("blocks"))
        assert request_key(catalog, asked) != before
        again = planned(store, "linear")
        assert again.full_expert_bytes == first.full_expert_bytes + 9
        assert again.plan == first.plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["alone", "delta", "chain"])
def test_virtual_merges_and_what_reads_them(way: str, places: Callable[[str], Place]) -> None:
    """A virtual merge of a dense family reads as the real one of a raw family, file for file, and
    becomes it; replay, blame and analyze find what they find there.
    """
    place = places("bf16")
    raw, store = place.store("raw"), place.store(way)
    wanted = raw.merge(planned(raw, "dare_ties"), name="real")
    store.merge(planned(store, "dare_ties"), name="virtual", virtual=True)
    assert store.show("virtual").virtual
    for path in raw.view("real").files:
        assert b"".join(store.read_file("virtual", path)) == b"".join(raw.read_file("real", path))
    ours, theirs = store.blame("virtual"), raw.blame("real")
    assert (ours.norm, ours.experts, ours.tensors) == (theirs.norm, theirs.experts, theirs.tensors)
    assert ours.expert_bytes_read < theirs.expert_bytes_read
    assert store.materialize("virtual").manifest == wanted.manifest
    assert store.replay("virtual").same
    tables = []
    for one in (store, raw):
        one.analyze("e1", "root")
        sides = [one.view(name).tensors for name in ("root", "e1")]
        pairs = [(sides[0][name], sides[1][name]) for name in sides[0]]
        found = one._statistics.pairs(pairs)
        tables.append([None if table is None else table.encode() for table in found])
    assert tables[0] == tables[1]
    assert any(tables[0])
    ours, theirs = store.diff("base", "virtual"), raw.diff("base", "real")
    assert (ours.files, ours.tensors) == (theirs.files, theirs.tensors)


@pytest.mark.rest
def test_a_virtual_merge_is_read_while_gc_moves_its_inputs(
    places: Callable[[str], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that knows where blocks lay finds them where gc has put them, and reads the same."""
    family, root = places("bf16").family, places("bf16").root
    junk = np.random.default_rng(1).standard_normal(1 << 20).astype(np.float32)
    families.write_checkpoint(tmp_path / "junk", family.experts[0] | {"junk": junk})
    moved: list[StoredBlock] = []
    honest = Tasks.moved
    monkeypatch.setattr(Tasks, "moved", lambda self, one: (moved.append(one), honest(self, one))[1])
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="dense") as store:
        # The expert's blocks lie in a pack that is mostly of something else.
        store.add(tmp_path / "junk", name="junk")
        for name in ("base", "e0", "e1", "e2"):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        store.merge(planned(store, "ties"), name="v", virtual=True)
        # What the first read computes is not kept: the second computes it again.
        store.cache_bytes_on_disk = 0
        files = store.view("v").files
        wanted = {path: b"".join(store.read_file("v", path)) for path in files}
        store.remove("junk")
        assert store.gc(reflog_days=0).packs_rewritten
        again = {path: b"".join(store.read_file("v", path)) for path in files}
        assert again == wanted
        assert moved
        assert store.materialize("v").expert_bytes_read > 0
        assert store.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_a_virtual_merge_is_read_while_its_inputs_are_pinned(
    places: Callable[[str], Place], tmp_path: Path
) -> None:
    """A reader goes on when blocks that it has looked up, or costs of, are stored in another form:
    what its plan reads at rest changes, and the packs that it knows go."""
    root = places("bf16").root
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="dense") as store:
        for name in ("base", "e0", "e1", "e2"):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        store.merge(planned(store, "ties"), name="v", virtual=True)
        with Store.open(tmp_path / "store") as other:
            view = other.view("v")
            wanted = {path: b"".join(other.read_file("v", path)) for path in view.files}
        view = store.view("v")
        path = max(view.files, key=lambda path: view.files[path])
        start = view.files[path] // 2
        # Some chunks are looked up, and a few of them computed.
        assert view.read(path, start, 100) == wanted[path][start : start + 100]
        for name in ("e0", "e1", "e2"):
            store.pin(name, raw=True)
        store.gc(reflog_days=0)
        shutil.rmtree(tmp_path / "store" / "memo", ignore_errors=True)
        assert {path: b"".join(store.read_file("v", path)) for path in view.files} == wanted


# -- memory --------------------------------------------------------------------------------------


def test_memory_counts_what_decoding_takes(places: Callable[[str], Place]) -> None:
    """A chunk needs its sides, three more to undo deltas, and its outputs plain and encoded."""
    store = places("bf16").store("delta")
    tasks = Tasks(store._catalog, plan_of(store, "linear"))
    sides = outputs = 0
    for planned_tensor in tasks.plan.tensors:
        one = tasks.tensor(planned_tensor.name)
        chunks = batch_chunks(one.chunk_elements, one.base_dtype, one.out_dtype)
        length = 2 * min(one.elements, one.chunk_elements * chunks)
        experts = int(tasks.members(one.name).present.sum(axis=0).max())
        sides = max(sides, (1 + experts + SPARE_SIDES) * length)
        outputs = max(outputs, 2 * length)
    # With one thread: two chunks wait, one is computed and one written.
    least = RESERVE + sides + 4 * outputs
    assert bounds(tasks, memory=least, threads=1).threads == 1
    with pytest.raises(BadRequest):
        bounds(tasks, memory=least - 1, threads=1)


@pytest.mark.rest
def test_memory_is_a_few_blocks(tmp_path: Path) -> None:
    """Merging delta-coded tensors of 32 MiB takes less memory than one of them."""
    elements = 16 << 20
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, elements, dtype=np.uint16) & np.uint16(0xBFFF)
    with Store.init(tmp_path / "store", codec="dense") as store:
        for number, name in enumerate(("base", "e0", "e1")):
            own = words ^ rng.integers(0, 1 + 7 * bool(number), elements, dtype=np.uint16)
            tensor = ("w", "BF16", (elements,), own.astype(np.uint16).tobytes())
            write_safetensors(tmp_path / name / "m.safetensors", [tensor])
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        for name, like in (("tiny", None), ("moved", "tiny")):
            tensor = ("w", "BF16", (4096,), (words[:4096] ^ bool(like)).tobytes())
            write_safetensors(tmp_path / name / "m.safetensors", [tensor])
            store.add(tmp_path / name, name=name, base=like)
        assert kinds_at_rest(store, "moved").keys() == {Codec.DELTA}
        assert deltas_at_rest(store, "e1") > 26
    program = """
import sys
from mstore import MergeRequest, Store
from mstore.store.models import tensors_of

def peak():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) << 10

def merge(base, *experts):
    ask = {"method": "ties", "parameters": {"density": 0.2}}
    plan = store.plan(MergeRequest(base=base, experts=experts, **ask), threads=2)
    return store.merge(plan, name="merged", threads=2)

with Store.open(sys.argv[1]) as store:
    merge("tiny", "moved")  # kernels are loaded
    before = peak()
    report = merge("base", "e0", "e1")
    print(peak() - before, report.expert_bytes_read)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, read = map(int, done.stdout.split())
    assert read < 2 * elements
    assert grown < 2 * elements
