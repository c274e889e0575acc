"""The memo table and merges: what was made before is neither read nor written, and nothing else
changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK, Family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstore import MergeRequest
from mstore.api import Store
from mstore.api.reports import MergeReport, PlanReport
from mstore.merge.methods import registry
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.outstanding import outstanding
from mstore.merge.running.slices import ALL_FINITE, NotFinite
from mstore.merge.running.task import Tasks
from mstore.store.objects.plan import Plan
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, CoverageId, ManifestId

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {"lambda": 0.5},
    "ties": {"density": 0.3},
    "dare_linear": {"density": 0.5, "seed": 3},
    "dare_ties": {"density": 0.5},
    "breadcrumbs": {"density": 0.3, "gamma": 0.05},
    "breadcrumbs_ties": {"density": 0.4, "gamma": 0.05},
    "ram": {"epsilon": 0.2},
    "sce": {"select_topk": 0.4},
    "consensus": {"k": 1, "tall_mask_lambda": 0.4},
    "fisher": {},
}


@dataclass
class Place:
    """A store with base, e0, e1, ..."""

    store: Store
    experts: int

    def plan(
        self, method: str, experts: Sequence[Any], *, allow_noop: bool = False, **options: Any
    ) -> PlanReport:
        """A plan with this module's parameters; a later expert has the Fisher of the last."""
        names = [one if isinstance(one, str) else one[0] for one in experts]
        fishers = [name.replace("e", "f") if name[1:].isdigit() else "f1" for name in names]
        return self.store.plan(
            MergeRequest(
                base="base",
                experts=experts,
                method=method,
                parameters=METHODS[method],
                companions=families.fishers_for(experts, fishers) if method == "fisher" else {},
                **options,
            ),
            allow_noop=allow_noop,
        )

    def merge(self, plan: PlanReport, name: str = "m", **options: Any) -> MergeReport:
        """Run it; what was read is what the plan and the table say, to the byte."""
        promised = outstanding(
            self.store._catalog,
            self.store._memo,
            self.store._catalog.record(Plan, plan.plan),
            plan.planned_expert_bytes,
        ).saved
        report = self.store.merge(plan, name=name, **options)
        saved = promised if options.get("memo", True) else 0
        assert report.memo_expert_bytes == saved
        assert report.expert_bytes_read == plan.planned_expert_bytes - saved
        return report


def sparse(rng: np.random.Generator, base: families.Arrays, dtype: str) -> families.Arrays:
    """An expert that differs from the base in some blocks of some tensors."""
    expert = {}
    for name, array in base.items():
        values = array.astype(np.float32)
        if rng.random() < 0.8:
            start = int(rng.integers(0, max(1, len(values) // 2)))
            # Coarse values: many deltas tie at any threshold.
            values[start:] += (rng.integers(-3, 4, values[start:].shape) / 8).astype(np.float32)
        expert[name] = families.cast(values, dtype)
    return expert


def family(seed: int, experts: int, dtype: str = "BF16") -> Family:
    """A base of tensors of several blocks, and experts of it."""
    rng = np.random.default_rng(seed)
    size = BLOCK // np.dtype(families._DTYPES[dtype]).itemsize
    base = {
        name: families.cast(rng.standard_normal(elements), dtype)
        for name, elements in (("a", 3 * size + 17), ("b", 2 * size), ("c", 40), ("d", size + 1))
    }
    return Family(base, tuple(sparse(rng, base, dtype) for _ in range(experts)))


def make(root: Path, made: Family) -> Place:
    """A store with the whole family, and Fishers."""
    made = made.informed()
    made.write(root)
    store = Store.init(root / "store", block_size=BLOCK, codec="raw")
    store.add(root / "base", name="base")
    for name in made.names:
        store.add(root / name, name=name, base="base")
    for name in made.fisher_names:
        store.add(root / name, name=name)
    return Place(store, len(made.experts))


@pytest.fixture(scope="module")
def merged_nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a small family of two."""
    made = make(tmp_path_factory.mktemp("family"), family(1, 2))
    made.store.close()
    return made.store.path


@pytest.fixture
def place(merged_nothing: Path, tmp_path: Path) -> Iterator[Place]:
    """The same, for a test that merges."""
    shutil.copytree(merged_nothing, tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield Place(store, 2)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_of_the_same_reads_nothing(method: str, place: Place) -> None:
    """The same plan under another name and message: no byte is read of experts or base, and only
    records are written; `memo=False` reads all of it again and gives the same content.
    """
    plan = place.plan(method, ["e0", "e1"])
    first = place.merge(plan, "one")
    assert (first.memo_expert_bytes, first.expert_bytes_read) == (0, plan.planned_expert_bytes)
    again = place.merge(plan, "two", message="for another reason")
    assert (again.expert_bytes_read, again.base_bytes_read) == (0, 0)
    assert again.memo_expert_bytes == plan.planned_expert_bytes > 0
    assert again.bytes_written <= 3 * 4096
    assert (again.manifest, again.blocks_total) == (first.manifest, first.blocks_total)
    assert again.blocks_reused == again.blocks_total
    assert place.plan(method, ["e0", "e1"]).memo_expert_bytes == plan.planned_expert_bytes
    measured = place.merge(plan, "three", memo=False)
    assert measured.expert_bytes_read == plan.planned_expert_bytes
    assert measured.manifest == first.manifest
    assert place.store.fsck(read_data=True).problems == ()


def test_one_more_expert_costs_what_it_touches(tmp_path: Path) -> None:
    """K + 1 experts after K: only chunks that the new expert changes are read, its own bytes and
    those of the others there; for all methods in which its absence leaves no trace.
    """
    rng = np.random.default_rng(3)
    size = BLOCK // 2
    base = {"w": families.cast(rng.standard_normal(8 * size), "BF16")}
    moved = [
        {"w": families.cast(base["w"].astype("f4") + rng.standard_normal(8 * size) / 8, "BF16")}
        for _ in range(2)
    ]
    new = {"w": base["w"].copy()}
    new["w"][5 * size : 6 * size] += families.cast(np.ones(size), "BF16")
    place = make(tmp_path, Family(base, (*moved, new)))
    with place.store:
        for method in ("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "ram"):
            place.merge(place.plan(method, ["e0", "e1"]), "two")
            three = place.plan(method, ["e0", "e1", "e2"])
            report = place.merge(three, "three")
            assert report.expert_bytes_read == 3 * BLOCK
            assert report.base_bytes_read == BLOCK
            # The others are the card's and the recipe's.
            assert report.blocks_total - report.blocks_reused == 1 + 2
            assert place.merge(three, "apart", memo=False).manifest == report.manifest
        # Here the divisor is another one, so every block is.
        place.merge(place.plan("linear", ["e0", "e1"]), "two")
        assert place.merge(place.plan("linear", ["e0", "e1", "e2"]), "three").memo_expert_bytes == 0


@pytest.mark.sampled(11)
@pytest.mark.parametrize("method", METHODS)
def test_an_expert_that_changed_in_two_tensors(method: str, tmp_path: Path) -> None:
    """After one expert changed in two tensors, a merge reads and writes those two alone."""
    made = family(5, 2)
    later = {name: array.copy() for name, array in made.experts[1].items()}
    for name in ("b", "d"):
        later[name][:40] += families.cast(np.ones(40), "BF16")
    place = make(tmp_path, made)
    with place.store as store:
        place.merge(place.plan(method, ["e0", "e1"]))
        families.write_checkpoint(tmp_path / "later", later)
        store.add(tmp_path / "later", name="later", base="base")
        plan = place.plan(method, ["e0", "later"])
        report = place.merge(plan)
        tensors = {t.name: t for t in store._catalog.record(Plan, plan.plan).tensors}
        tasks = Tasks(store._catalog, store._catalog.record(Plan, plan.plan))
        read = 0
        for name in ("b", "d"):
            task = tasks.tensor(name)
            read += sum(
                tasks.chunk(task, number).expert_bytes
                for number in range(task.chunks)
                if not tasks.reused(task)[number]
            )
        # Blocks of the two that did not change may be remembered, too; nothing else is read.
        assert 0 < report.expert_bytes_read <= read < plan.planned_expert_bytes
        assert tensors.keys() >= {"b", "d"}
        assert place.merge(plan, "apart", memo=False).manifest == report.manifest


@pytest.mark.rest
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 1000), dtype=st.sampled_from(["BF16", "F32"]))
def test_the_table_changes_no_result(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int, dtype: str
) -> None:
    """For any sequence of merges, plans and manifests are those of a store without a table, and
    what is read is the plan's figure less what the table saves.
    """
    place = make(tmp_path_factory.mktemp("family"), family(seed, 3, dtype))
    with place.store as store:
        for number in range(4):
            method = data.draw(st.sampled_from(sorted(METHODS)))
            names = data.draw(st.permutations(["e0", "e1", "e2"]))[: data.draw(st.integers(1, 3))]
            sizes = [0.5, 1.0] if registry.METHODS[method].weighted else [1.0]
            weights = [data.draw(st.sampled_from(sizes)) for _ in names]
            budget = data.draw(st.sampled_from([None, 0.3, 0.7]))
            # Of so small a model, a budget may leave nothing to read.
            asked = {"budget": budget, "allow_noop": True}
            plan = place.plan(method, list(zip(names, weights, strict=True)), **asked)
            wanted = place.merge(plan, f"plain{number}", memo=False).manifest
            assert place.merge(plan, f"memo{number}").manifest == wanted
            assert place.merge(plan, f"again{number}").expert_bytes_read == 0
            again = place.plan(method, list(zip(names, weights, strict=True)), **asked)
            assert again.plan == plan.plan
        assert store.fsck().problems == ()


# -- what is gone, or is not what it was ---------------------------------------------------------


def forget(store: Store, block: BlockId) -> None:
    """Take a block out of the index, as a collection would."""
    index = store._catalog.index
    with index.env.write() as rows:
        assert rows.delete(block, db=index.db("blocks"))


def forget_outcome(store: Store, plan: PlanReport) -> None:
    """Let the table name an outcome that is not stored."""
    store._memo.put_outcome(plan.plan, ManifestId(bytes(32)), CoverageId(bytes(32)))


def test_a_merge_of_the_same_is_taken_as_a_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a plan made is published again without a run, while all of it is stored; a run comes
    to the same where the outcome, or one of its blocks, is not.
    """
    plan = place.plan("ties", ["e0", "e1"])
    first = place.merge(plan, "one")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a run")

    with monkeypatch.context() as patch:
        patch.setattr("mstore.merge.running.commit.run_plan", refuse)
        again = place.merge(plan, "two", message="for another reason")
        assert (again.manifest, again.blocks_reused) == (first.manifest, first.blocks_total)
        with pytest.raises(AssertionError, match="a run"):
            place.store.merge(plan, name="measured", memo=False)
        kept = place.store._memo.outcome(plan.plan)
        forget_outcome(place.store, plan)
        with pytest.raises(AssertionError, match="a run"):
            place.store.merge(plan, name="three")
        assert kept is not None
        place.store._memo.put_outcome(plan.plan, *kept)
        forget(place.store, next(iter(place.store.view("one").record("a").block_ids())))
        with pytest.raises(AssertionError, match="a run"):
            place.store.merge(plan, name="three")


def test_an_output_that_is_gone_is_made_again(place: Place) -> None:
    """Where an output block is not stored any more, its chunk is computed and written anew."""
    plan = place.plan("ties", ["e0", "e1"])
    first = place.merge(plan, "one")
    store = place.store
    view, base = store.view("one"), store.view("base")
    gone = next(
        block
        for block in view.record("a").block_ids()
        if block not in set(base.record("a").block_ids())
    )
    forget(store, gone)
    report = place.merge(plan, "two")
    assert 0 < report.expert_bytes_read < plan.planned_expert_bytes
    assert report.blocks_total - report.blocks_reused == 1
    assert report.manifest == first.manifest
    assert store.fsck(read_data=True).problems == ()


def test_a_row_that_lies_is_found_out(place: Place) -> None:
    """A chunk that is computed again must be what the table remembers, or the merge is Corrupt."""
    plan = place.plan("ties", ["e0"])
    record = place.store._catalog.record(Plan, plan.plan)
    tasks = Tasks(place.store._catalog, record)
    task = tasks.tensor("a")
    number = int(np.flatnonzero(~tasks.reused(task))[0])
    key = MemoKeys(tasks).chunks(task, [number])[0]
    place.merge(plan, "one")
    row = Remembered.decode(place.store._memo.outputs([key])[0] or b"")
    assert row is not None
    lie = Remembered((BlockId(bytes(32)),), row.taken, row.not_finite)
    place.store._memo.put_outputs([(key, lie.encode())])
    forget_outcome(place.store, plan)
    with pytest.raises(Corrupt, match="differs from the memo table"):
        place.store.merge(plan, name="two")
    place.store._memo.put_outputs([(key, b"nothing of the kind")])
    assert place.merge(plan, "two").manifest == place.store["one"].manifest


def test_a_failed_merge_teaches_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are put only when the output is published."""
    plan = place.plan("linear", ["e0", "e1"])

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("mstore.store.transaction.Transaction.commit", refuse)
        with pytest.raises(OSError, match="no"):
            place.store.merge(plan, name="m")
    assert place.merge(plan).memo_expert_bytes == 0


def test_rows_read_as_they_were_written() -> None:
    """A row decodes to what was encoded, and bytes that are no row decode to None."""
    ids = tuple(BlockId(bytes([n]) * 32) for n in range(3))
    for row in (
        Remembered(ids, (), ALL_FINITE),
        Remembered(ids, tuple(range(9)), NotFinite(7, 2)),
        Remembered(ids[:1], (5,), NotFinite((1 << 32) - 1, 0)),
    ):
        assert Remembered.decode(row.encode()) == row
        assert Remembered.decode(row.encode()[:-1]) != row
    for bad in (b"", b"\0", b"\0\0", b"\xff\xff", bytes(31) + b"\0\0", bytes(40)):
        assert Remembered.decode(bad) is None


def test_from_the_command_line(place: Place) -> None:
    """`merge` says what it remembered; --no-memo computes all; --memory too small says how much."""
    mstore = Program(place.store.path)
    ask = ["--base", "base", "--expert", "e0", "--method", "linear", "--json"]
    first = mstore.succeed("merge", "--name", "one", *ask).document
    again = mstore.succeed("merge", "--name", "two", "--memory", "300MiB", *ask).document
    plain = mstore.succeed("merge", "--name", "three", "--no-memo", *ask).document
    planned = first["planned_expert_bytes"]
    told = [(m["expert_bytes_read"], m["memo_expert_bytes"]) for m in (first, again, plain)]
    assert told == [(planned, 0), (0, planned), (planned, 0)]
    assert len({m["manifest"] for m in (first, again, plain)}) == 1
    little = mstore("merge", "--name", "four", "--no-memo", "--memory", "1MiB", *ask)
    assert (little.status, "--memory" in little.err) == (2, True)
    assert mstore.succeed("stats", "--json").document["memo_bytes"] > 0
