"""Many small tensors: what is done with many at once is what would be done with each alone."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Array, Family, cast
from small_models import BLOCK

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.blocks.location import Location
from mstore.merge.planning import thresholds
from mstore.merge.planning.statistics import KnownDigests
from mstore.merge.running import compute, slices
from mstore.merge.running.loading import Loaded
from mstore.merge.running.task import Tasks
from mstore.models.stats import pairs
from mstore.models.stats.pairs import SingleTables
from mstore.models.stats.store import DIGESTS
from mstore.models.stats.table import unpacked
from mstore.store.models import tensors_of
from mstore.store.objects.canonical import Record
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.ids import BlockId, Id, ManifestId
from mstore.terms.report import Progress

METHODS = ("ties", "dare_ties", "task_arithmetic", "linear", "breadcrumbs", "model_stock")
PARAMETERS: dict[str, dict[str, Any]] = {
    "ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.5, "gamma": 0.1},
}
TENSORS = 60
BAD = 37
"""A tensor in the middle of a batch."""


def family(seed: int = 0) -> Family:
    """Small tensors of all kinds, in between a few of several blocks.

    Of 60 tensors: empty, of one element, of three dtypes, unchanged in all experts or in one, equal
    in two, of a dtype that is not merged, with a NaN, or of two blocks and a bit.
    """
    rng = np.random.default_rng(seed)
    base: dict[str, Array] = {}
    experts: list[dict[str, Array]] = [{}, {}, {}]
    for number in range(TENSORS):
        name = f"t{number:03}"
        dtype = ("BF16", "F16", "F32")[number % 3]
        shape: tuple[int, ...] = (1 + number, 17)
        if number % 10 == 3:
            shape = (0, 4)
        elif number % 10 == 5:
            shape = ()
        elif number % 20 == 7:
            shape = (9, 8000)
        values = np.asarray(rng.standard_normal(shape, dtype=np.float32))
        if number == 30:
            values.reshape(-1)[3] = np.nan
        base[name] = cast(values, dtype) if number != 41 else np.arange(5)
        shared = np.asarray(rng.standard_normal(shape, dtype=np.float32)) / 64
        for k, expert in enumerate(experts):
            own = np.asarray(rng.standard_normal(shape, dtype=np.float32)) / 32
            moved = values + (shared if number % 7 == 2 and k < 2 else own)
            still = number % 9 == 4 or (number % 6 == 1 and k == 0) or number == 41
            expert[name] = base[name] if still else cast(moved, dtype)
    return Family(base, tuple(experts))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family as directories: base, e0, e1, e2."""
    return family().write(tmp_path_factory.mktemp("small"))


def filled(path: Path, sources: Path, codec: str = "auto") -> Store:
    """A store of the family: a copy of one that is made once."""
    first = sources / f"store-{codec}"
    if not first.exists():
        with Store.init(first, block_size=BLOCK, codec=codec) as store:
            store.add(sources / "base", name="base")
            for name in ("e0", "e1", "e2"):
                store.add(sources / name, name=name, base="base")
    shutil.copytree(first, path)
    return Store.open(path)


def merged(store: Store, method: str, budget: str | None) -> tuple[str, ManifestId, int]:
    """PlanId, ManifestId and expert bytes read of one merge, without what was made before."""
    experts = ["e0", "e1", "e2"]
    ask = {"method": method, "parameters": PARAMETERS.get(method, {}), "budget": budget}
    plan = store.plan(MergeRequest(base="base", experts=experts, **ask))
    done = store.merge(plan.plan, name=f"{method}/{budget}", memo=False, allow_nonfinite=True)
    return str(plan.plan), done.manifest, done.expert_bytes_read


@pytest.mark.sampled(12)
@pytest.mark.parametrize("budget", [None, "50%"])
@pytest.mark.parametrize("method", METHODS)
def test_together_as_alone(
    method: str,
    budget: str | None,
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plan and output are the same whether small tensors are taken together or one at a time."""
    with filled(tmp_path / "together", written) as store:
        together = merged(store, method, budget)
    monkeypatch.setattr(KnownDigests, "_open", lambda self, singles: None)
    monkeypatch.setattr(slices, "BATCH_BYTES", 1)
    monkeypatch.setattr(thresholds._Cut, "is_read_whole", False)
    with filled(tmp_path / "alone", written) as store:
        alone = merged(store, method, budget)
    assert together[:2] == alone[:2]


def test_small_tensors_are_taken_together(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning and merging take many tensors at once: the test above compares the results."""
    surveyed_together: list[int] = []
    looked_together: list[int] = []
    sizes: list[int] = []
    look = thresholds.Thresholds._look_together
    decode, original = SingleTables.decode, compute.Computer._compute

    def surveyed(values: Sequence[bytes | None], keep: Sequence[int] | None = None) -> SingleTables:
        surveyed_together.append(len(values))
        return decode(values, keep)

    def looked(
        self: thresholds.Thresholds, cuts: Sequence[thresholds._Cut]
    ) -> list[thresholds._Exact]:
        looked_together.append(len(cuts))
        return look(self, cuts)

    def computed(self: compute.Computer, batch: slices.Batch) -> compute.Computed:
        sizes.append(len({part.run.tensor.name for part in batch.parts}))
        return original(self, batch)

    monkeypatch.setattr(SingleTables, "decode", surveyed)
    monkeypatch.setattr(thresholds.Thresholds, "_look_together", looked)
    monkeypatch.setattr(compute.Computer, "_compute", computed)
    with filled(tmp_path / "store", written) as store:
        merged(store, "ties", None)
    assert max(surveyed_together) > 8
    assert max(looked_together) > 8
    assert max(sizes) > 8


def test_a_plan_opens_a_table_once(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings take what the survey found in tables of one chunk, and open none of these again; nor
    does the merge, which takes digests."""
    opened: list[bytes] = []

    def counted(value: bytes | None) -> bytes:
        opened.extend([] if value is None else [value])
        return unpacked(value)

    monkeypatch.setattr(pairs, "unpacked", counted)
    with filled(tmp_path / "store", written) as store:
        asked = MergeRequest(
            base="base",
            experts=["e0", "e1", "e2"],
            method="ties",
            parameters=PARAMETERS["ties"],
        )
        plan = store.plan(asked)
        assert not plan.warnings
    assert len(opened) > TENSORS
    assert len(opened) == len(set(opened))
    opened.clear()
    with Store.open(tmp_path / "store") as store:
        assert not store.merge(plan.plan, name="merged", allow_nonfinite=True).warnings
    assert not opened


def test_a_plan_that_trims_nothing_opens_no_table(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests say all that it needs, also those of one chunk, and where they are missing, tables
    say it once."""
    opened: list[int] = []
    decode = SingleTables.decode

    def counted(values: Sequence[bytes | None], keep: Sequence[int] | None = None) -> SingleTables:
        opened.append(len(values))
        return decode(values, keep)

    monkeypatch.setattr(SingleTables, "decode", counted)
    asked = MergeRequest(base="base", experts=["e0", "e1", "e2"], method="task_arithmetic")
    with filled(tmp_path / "store", written) as store:
        plan = store.plan(asked).plan
        assert not sum(opened)
    with filled(tmp_path / "without", written) as store:
        env = store._statistics._open(create=True)
        assert env is not None
        with env.write() as transaction:
            transaction.drop(env.databases[DIGESTS.name], delete=False)
        assert store.plan(asked).plan == plan
        assert sum(opened) > TENSORS
    opened.clear()
    with Store.open(tmp_path / "without") as store:
        store.merge(plan, name="merged", allow_nonfinite=True)
    # The two tables of the tensor with a NaN have no sound row to make one from.
    assert sum(opened) == 2


def test_a_tensor_of_one_chunk_is_mixed_once(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie quota that ends within a tensor of one chunk costs no second pass: the chunk has it to
    itself."""
    mixed: list[tuple[str, int]] = []
    blend = compute.blend

    def counted(loaded: Loaded, *rest: Any) -> tuple[int, ...]:
        if loaded.task.tensor.limited and loaded.task.tensor.chunks == 1:
            mixed.append((loaded.task.tensor.name, loaded.task.number))
        return blend(loaded, *rest)

    monkeypatch.setattr(compute, "blend", counted)
    with filled(tmp_path / "store", written) as store:
        ask = {"method": "ties", "parameters": {"density": 0.2}}
        plan = store.plan(MergeRequest(base="base", experts=["e0", "e1", "e2"], **ask)).plan
        store.merge(plan, name="merged", allow_nonfinite=True)
    assert len(mixed) > 8
    assert len(mixed) == len(set(mixed))


def test_records_are_put_together(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is asked for all tensor records of an output file at once, not for each."""
    together: list[int] = []
    put = Transaction.put_records

    def counted(self: Transaction, records: Sequence[Record]) -> list[Id]:
        together.append(sum(isinstance(record, Tensor) for record in records))
        return put(self, records)

    with filled(tmp_path / "store", written) as store:
        plan = store.plan(
            MergeRequest(base="base", experts=["e0", "e1", "e2"], method="linear")
        ).plan
        monkeypatch.setattr(Transaction, "put_records", counted)
        store.merge(plan, name="merged", allow_nonfinite=True)
    # The family has three files.
    assert sum(sorted(together)[-3:]) > 40
    assert together.count(1) < 8


def test_the_collector_does_not_walk_what_a_tensor_takes(written: Path, tmp_path: Path) -> None:
    """Records, places and tasks form no cycles, and thousands of them are none of the garbage
    collector's business."""
    with filled(tmp_path / "store", written) as store:
        catalog = store._catalog
        ask = {"method": "ties", "parameters": {"density": 0.2}}
        id = store.plan(MergeRequest(base="base", experts=["e0", "e1", "e2"], **ask)).plan
        plan = catalog.record(Plan, id)
        tasks = Tasks(catalog, plan)
        tensor = tasks.tensor("t020")
        (chunk,) = tasks.chunks(tensor, [0])
        (source,) = chunk.base.sources
        file = next(f for f in catalog.manifest(plan.base_id()).files if f.form)
        part = next(file.tensors())
        values = (
            *(plan.tensors[0], plan.tensors[0].thresholds[0], part, tasks.members("t020").base),
            *(tensor, chunk, chunk.base, source, source.at),
        )
    assert not [type(value).__name__ for value in values if gc.is_tracked(value)]


def test_every_byte_comes_back(written: Path, tmp_path: Path) -> None:
    """Empty tensors, single elements and mixed dtypes are checked out as they were added."""
    with filled(tmp_path / "store", written) as store:
        for name in ("base", "e0", "e1", "e2"):
            (tmp_path / "out").mkdir(exist_ok=True)
            store.checkout(name, tmp_path / "out" / name)
            for path in sorted((written / name).iterdir()):
                assert (tmp_path / "out" / name / path.name).read_bytes() == path.read_bytes()
        assert store.fsck(read_data=True).problems == ()


def _block_of(store: Store, ref: str, tensor: str) -> tuple[BlockId, Location]:
    """The one block of a tensor, and where it lies."""
    catalog = store._catalog
    manifest = catalog.manifest(catalog.snapshot(catalog.resolve(ref)).manifest_id())
    block = catalog.tensor(tensors_of(catalog, manifest)[tensor]).block(0)
    return block, catalog.locate([block])[0]


def _contents(store: Path) -> set[Path]:
    """Packs, and what lies in tmp/."""
    return {path for name in ("packs", "tmp") for path in (store / name).rglob("*")}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_block_in_a_group_is_named(threads: int, written: Path, tmp_path: Path) -> None:
    """A flipped bit in one of many small tensors: the merge names its block and publishes
    nothing."""
    with filled(tmp_path / "store", written, "raw") as store:
        block, place = _block_of(store, "e1", f"t{BAD:03}")
        pack = Path(store._catalog.packs.where(place.pack))
        pack.chmod(0o644)
        with pack.open("r+b") as file:
            file.seek(place.offset + 5)
            flipped = bytes([file.read(1)[0] ^ 4])
            file.seek(place.offset + 5)
            file.write(flipped)
        plan = store.plan(
            MergeRequest(base="base", experts=["e0", "e1", "e2"], method="linear")
        ).plan
        before, refs = _contents(store.path), store.refs()
        with pytest.raises(Corrupt) as caught:
            store.merge(plan, name="merged", threads=threads)
        assert str(block) in str(caught.value.where)
        assert _contents(store.path) == before
        assert store.refs() == refs


class _Full:
    """An observer: the disk is full from write number `at` on."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, operation: fs.Operation) -> None:
        if operation.kind == "write":
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", ["add", "merge"])
def test_a_full_disk_in_a_batch_leaves_nothing(step: str, written: Path, tmp_path: Path) -> None:
    """No space at any write of an add or a merge of many small tensors: nothing is published,
    nothing stays, and with space it works."""
    with filled(tmp_path / "store", written) as store:
        store.remove("e2")
        plan = store.plan(MergeRequest(base="base", experts=["e0", "e1"], method="ties")).plan
        before, refs = _contents(store.path), store.refs()

        def attempt() -> None:
            if step == "add":
                store.add(written / "e2", name="again", base="base", codec="raw")
            else:
                store.merge(plan, name="again", memo=False)

        done = False
        failures = 0
        for at in range(40):
            try:
                with fs.observed(_Full(at)):
                    attempt()
                done = True
                break
            except StorageFailed:
                failures += 1
                assert _contents(store.path) == before
                assert store.refs() == refs
        assert done
        assert failures
        assert store.fsck(read_data=True).problems == ()


def test_an_interrupted_batch_leaves_nothing(written: Path, tmp_path: Path) -> None:
    """Control-C in the middle of an add of many small tensors publishes nothing."""
    with filled(tmp_path / "store", written) as store:
        before, refs = _contents(store.path), store.refs()

        def interrupt(progress: Progress) -> None:
            if progress.done:
                raise KeyboardInterrupt

        other = family(1).write(tmp_path / "other")
        with pytest.raises(KeyboardInterrupt):
            store.add(other / "e0", name="new", base="base", progress=interrupt)
        assert _contents(store.path) == before
        assert store.refs() == refs
        store.add(other / "e0", name="new", base="base")
        assert store.fsck(read_data=True).problems == ()
