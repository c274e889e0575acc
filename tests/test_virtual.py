"""Virtual merges: blocks that are computed when they are read are those of the real merge."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK
from small_models import small_model

from mstore import MergeRequest, Store
from mstore.blocks import reader
from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.merge.running import loading
from mstore.merge.running.memo_keys import MemoKeys, Remembered
from mstore.merge.running.task import Tasks
from mstore.merge.virtual import blocks
from mstore.store.block_cache import BlockCache, VirtualBlock
from mstore.store.objects.plan import Plan
from mstore.store.objects.tensor import VirtualTensor
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest, BudgetExceeded, Corrupt
from mstore.terms.ids import BlockId

FAMILY = families.layered(rows=160).informed(dtypes=("BF16",))
FISHERS = families.fishers_for(["e0", "e1", "e2"], FAMILY.fisher_names)
MASKS = families.companions_for(["mask"], ["e0", "e1", "e2"])
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"method": "linear"},
    "task_arithmetic": {"method": "task_arithmetic", "parameters": {"lambda": 0.7}},
    "ties": {"method": "ties", "parameters": {"density": 0.3}},
    "dare_linear": {"method": "dare_linear", "parameters": {"density": 0.5, "seed": 4}},
    "dare_ties": {"method": "dare_ties", "parameters": {"density": 0.5}},
    "budget": {"method": "task_arithmetic", "budget": 0.4},
    "ties on a budget": {"method": "ties", "parameters": {"density": 0.3}, "budget": 0.5},
    "breadcrumbs": {"method": "breadcrumbs", "parameters": {"density": 0.3, "gamma": 0.2}},
    "breadcrumbs on a budget": {
        "method": "breadcrumbs",
        "parameters": {"density": 0.5, "gamma": 0.1},
        "budget": 0.5,
    },
    "breadcrumbs_ties": {"method": "breadcrumbs_ties", "parameters": {"density": 0.3}},
    "passthrough": {"method": "passthrough", "parameters": {"scale": 0.75}, "experts": ["e1"]},
    "sce on a budget": {
        "method": "sce",
        "parameters": {"select_topk": 0.3},
        "experts": ["e0", "e1", "e2"],
        "budget": 0.6,
    },
    "ram on a budget": {
        "method": "ram",
        "parameters": {"epsilon": 0.01},
        "experts": ["e0", "e1", "e2"],
        "budget": 0.6,
    },
    "train_difference on a budget": {
        "method": "train_difference",
        "experts": ["e0", "e1"],
        "budget": 0.6,
    },
    "tensor_sum": {
        "method": "tensor_sum",
        "parameters": {"width": 0.5, "offset": 0.75},
        "experts": ["e1"],
        "budget": 0.7,
    },
    "add_cosine_b": {
        "method": "add_cosine_b",
        "parameters": {"alpha": 0.4},
        "experts": ["e1"],
        "budget": 0.7,
    },
    "clamp": {
        "method": "clamp",
        "parameters": {"stiffness": 0.5},
        "experts": ["e0", "e1", "e2"],
    },
    "pcb on a budget": {"method": "pcb", "parameters": {"ratio": 0.3}, "budget": 0.6},
    "ramplus_tl": {"method": "ramplus_tl", "experts": ["e0", "e1", "e2"]},
    "consensus on a budget": {
        "method": "consensus",
        "parameters": {"tall_mask_lambda": 0.3},
        "experts": ["e0", "e1", "e2"],
        "budget": 0.6,
    },
    "fisher": {"method": "fisher", "companions": FISHERS, "dtype": "float32"},
    "fisher on a budget": {
        "method": "fisher",
        "companions": FISHERS,
        "parameters": {"floor": 0.01},
        "budget": 0.6,
    },
    "arcee_fusion": {"method": "arcee_fusion", "experts": ["e1"], "budget": 0.7},
    "lines": {"method": "lines", "parameters": {"alpha": 0.4, "beta": 0.8}, "budget": 0.6},
    "nearswap": {"method": "nearswap", "parameters": {"t": 0.02}, "experts": ["e1"]},
    "model_stock": {"method": "model_stock", "experts": ["e0", "e1", "e2"]},
    "safe_merge": {
        "method": "safe_merge",
        "companions": {"aligned": "e2", "unaligned": "base"},
        "experts": ["e0", "e1"],
    },
    "emr on a budget": {"method": "emr", "experts": ["e0", "e1", "e2"], "budget": 0.6},
    "masked": {"method": "masked", "companions": MASKS, "dtype": "float32"},
    "masked on a budget": {"method": "masked", "companions": MASKS, "budget": 0.6},
    "guarded": {
        "method": "guarded",
        "parameters": {"threshold": 0.02, "alpha": 0.5},
        "experts": ["e0", "e2"],
    },
    "multislerp on a budget": {"method": "multislerp", "budget": 0.5},
    "karcher": {"method": "karcher", "experts": ["e0", "e1", "e2"], "dtype": "float32"},
    "nuslerp": {
        "method": "nuslerp",
        "experts": ["e0", "e2"],
        "parameters": {"around_base": False},
        "budget": 0.7,
    },
    "slerp": {"method": "slerp", "parameters": {"t": 0.3}, "experts": ["e2"]},
    "slerp on a budget": {
        "method": "slerp",
        "parameters": {"t": 0.6},
        "experts": ["e1"],
        "dtype": "float32",
        "budget": 0.5,
    },
    "top p": {"method": "ties", "parameters": {"density": 0.5}, "top_p": 0.3},
    "wider": {"method": "ties", "parameters": {"density": 0.4}, "dtype": "float32"},
    "narrower": {"method": "linear", "dtype": "float16", "budget": 0.6},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in FAMILY.names:
            store.add(root / name, name=name, base="base")
        for name in FAMILY.fisher_names:
            store.add(root / name, name=name)
    shutil.copytree(root / "store", root / "clean")
    return root


@pytest.fixture(scope="module")
def shared(family: Path) -> Iterator[Store]:
    """A store that tests only add merges of their own name to; it keeps no blocks on disk."""
    with Store.open(family / "store") as store:
        # Merges share chunks.
        store.cache_bytes_on_disk = 0
        yield store


@pytest.fixture
def store(family: Path, tmp_path: Path) -> Iterator[Store]:
    """A store of one's own."""
    shutil.copytree(family / "clean", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def merged(store: Store, name: str, *, virtual: bool, **request: Any) -> Any:
    """Merge all experts, under a ref."""
    given = {"base": "base", "experts": [("e0", 1.0), ("e1", 0.5), ("e2", 0.75)]} | request
    plan = store.plan(MergeRequest(**given))
    return store.merge(plan, name=name, virtual=virtual)


def both(store: Store, name: str, **request: Any) -> tuple[Any, Any]:
    """The reports of a virtual and of a real merge of one plan."""
    return (
        merged(store, f"{name}/virtual", virtual=True, **request),
        merged(store, f"{name}/real", virtual=False, **request),
    )


def files_of(store: Store, revision: str) -> dict[str, bytes]:
    """Every file, read from front to back."""
    return {
        file.path: b"".join(store.read_file(revision, file.path)) for file in store.files(revision)
    }


def forget(store: Store) -> None:
    """Drop what the memo table has of merges."""
    store._memo.flush()
    store._memo.tidy(lambda blocks: [False] * len(blocks), lambda _: True)


def fresh(store: Store, revision: str, *, limit: int = 64 << 20) -> SnapshotView:
    """A view with a cache of its own."""
    cache = BlockCache(store._catalog, limit=limit, computing=store._computing)
    return SnapshotView(store._catalog, store[revision].id, cache)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", METHODS)
def test_a_virtual_merge_is_the_real_one(shared: Store, family: Path, kind: str) -> None:
    """Every file of a virtual merge, headers and configs too, is that of the real merge of the same
    plan; committing reads and writes no block of a tensor, and full reads cost what the plan says.
    """
    name = kind.replace(" ", "-")
    virtual, real = both(shared, name, **METHODS[kind])
    assert (virtual.virtual, real.virtual) == (True, False)
    assert virtual.plan == real.plan
    assert virtual.expert_bytes_read == virtual.base_bytes_read == 0
    assert virtual.bytes_written < 64 << 10
    assert virtual.blocks_total == real.blocks_total
    assert shared.show(f"{name}/virtual").virtual
    assert not shared.show(f"{name}/real").virtual
    assert shared.files(f"{name}/virtual") == shared.files(f"{name}/real")
    assert shared.tensors(f"{name}/virtual") == shared.tensors(f"{name}/real")
    before = shared._computing().first_expert_bytes
    found = files_of(shared, f"{name}/virtual")
    assert found == files_of(shared, f"{name}/real")
    read = shared._computing().first_expert_bytes - before
    assert read == real.planned_expert_bytes > 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["ties", "wider", "budget", "breadcrumbs on a budget", "slerp"])
def test_random_access(shared: Store, kind: str) -> None:
    """Any range, in any order, from a cache too small for it, is that range of the real merge."""
    name = f"random-{kind.replace(' ', '-')}"
    both(shared, name, **METHODS[kind])
    forget(shared)
    wanted = files_of(shared, f"{name}/real")
    view = fresh(shared, f"{name}/virtual", limit=3 * BLOCK)
    draw = random.Random(kind)
    for _ in range(60):
        path = draw.choice([path for path in wanted if path.endswith(".safetensors")])
        start = draw.randrange(len(wanted[path]))
        size = draw.choice([1, 1000, BLOCK, 3 * BLOCK + 7])
        view.prefetch(path, start, size)
        assert view.read(path, start, size) == wanted[path][start : start + size]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["ties", "narrower", "breadcrumbs on a budget"])
def test_many_threads(store: Store, kind: str) -> None:
    """Threads that read one snapshot from everywhere at once get the real merge's bytes."""
    both(store, "m", **METHODS[kind])
    forget(store)
    wanted = files_of(store, "m/real")
    view = fresh(store, "m/virtual", limit=4 * BLOCK)
    draw = random.Random(7)
    jobs = []
    for path, content in wanted.items():
        jobs += [(path, start) for start in range(0, len(content), BLOCK // 2)]
    draw.shuffle(jobs)

    def same(job: tuple[str, int]) -> bool:
        path, start = job
        return view.read(path, start, BLOCK) == wanted[path][start : start + BLOCK]

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(files_of, store, "m/virtual") for _ in range(3)]
        assert all(pool.map(same, jobs))
        assert all(stream.result() == wanted for stream in streams)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("kind", ["ties", "breadcrumbs", "breadcrumbs on a budget"])
def test_backwards(store: Store, kind: str, *, is_remembered: bool) -> None:
    """From the last block to the first: the ties of the gap are counted first, and once, or are
    those of the memo table."""
    both(store, "m", **METHODS[kind])
    if not is_remembered:
        forget(store)
    wanted = files_of(store, "m/real")
    view = fresh(store, "m/virtual")
    for path, content in wanted.items():
        for start in reversed(range(0, len(content), BLOCK)):
            assert view.read(path, start, BLOCK) == content[start : start + BLOCK]


def test_tensors_and_ties(store: Store) -> None:
    """Tensors by name are the real merge's; tied names stay one virtual tensor."""
    both(store, "m", **METHODS["ties"])
    for name in store["m/real"].tensor_names():
        ours, theirs = store["m/virtual"].tensor(name), store["m/real"].tensor(name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(families.bits(ours), families.bits(theirs))
    ids = store.view("m/virtual").tensors
    assert ids["model.tied.embed_in"] == ids["model.tied.embed_out"]
    record = store.view("m/virtual").record("model.tied.embed_out")
    assert isinstance(record, VirtualTensor)
    assert record.tensor == "model.tied.embed_in"


def test_what_no_expert_changes_is_the_base(store: Store) -> None:
    """Blocks without an expert are the base's own, by id, and nothing is computed for them."""
    merged(store, "m", virtual=True, **METHODS["task_arithmetic"])
    view = store.view("m")
    name = "model.parts.weight"
    id = store._computing()
    record = view.record(name)
    base = store.view("base").record(name)
    last = base.block_count() - 1
    block = VirtualBlock(record.id(), last)
    assert id.place(block) == base.block(last)
    assert id.place(VirtualBlock(record.id(), 0)) is None
    assert view.tensors["model.frozen.weight"] == store.view("base").tensors["model.frozen.weight"]


def test_a_checkout_is_the_real_one(store: Store, tmp_path: Path) -> None:
    """A checkout of a virtual merge equals one of the real merge, for any number of threads."""
    both(store, "m", **METHODS["dare_ties"])
    store.checkout("m/real", tmp_path / "real")
    for threads in (1, 3):
        store.checkout("m/virtual", tmp_path / str(threads), threads=threads)
        assert families.contents(tmp_path / str(threads)) == families.contents(tmp_path / "real")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["ties", "breadcrumbs", "slerp"])
def test_another_process_reads_the_same(store: Store, kind: str) -> None:
    """What was computed once is remembered: a later session compares, and finds it the same."""
    merged(store, "m", virtual=True, **METHODS[kind])
    wanted = files_of(store, "m")
    path = store.path
    store.close()
    with Store.open(path) as again:
        assert files_of(again, "m") == wanted


# -- damage ----------------------------------------------------------------------------------------


def rows_of(store: Store, revision: str, tensor: str) -> list[bytes]:
    """The memo keys of a merged tensor's chunks."""
    plan = store._catalog.record(Plan, store.show(revision).plan)
    tasks = Tasks(store._catalog, plan)
    task = tasks.tensor(tensor)
    return MemoKeys(tasks).chunks(task, range(task.chunks))


def test_a_memo_row_that_says_otherwise(store: Store) -> None:
    """A block that does not come out as it is remembered is Corrupt, named by plan, tensor and
    block; the other blocks are not affected."""
    both(store, "m", **METHODS["ties"])
    keys = rows_of(store, "m/virtual", "model.embed.weight")
    row = store._memo.outputs([keys[2]])[0]
    if row is None:
        files_of(store, "m/virtual")
        row = store._memo.outputs([keys[2]])[0]
    assert row is not None
    assert Remembered.decode(row) is not None
    store._memo.put_outputs([(keys[2], bytes([row[0] ^ 1]) + row[1:])])
    view = fresh(store, "m/virtual")
    for ask in (lambda: view.tensor("model.embed.weight"), lambda: files_of(store, "m/virtual")):
        with pytest.raises(Corrupt) as found:
            ask()
        where = f"plan {store.show('m/virtual').plan}, tensor model.embed.weight, block 2"
        assert found.value.where == where
    assert np.array_equal(
        families.bits(view.tensor("model.parts.weight")),
        families.bits(store["m/real"].tensor("model.parts.weight")),
    )


def test_an_input_that_is_damaged(store: Store, tmp_path: Path) -> None:
    """A flipped bit in an expert's block is Corrupt with that block's name, wherever it is met; it
    is met again, not remembered, and nothing is left of a checkout."""
    merged(store, "m", virtual=True, **METHODS["ties"])
    block = store.view("e1").record("model.embed.weight").block(3)
    place = store._catalog.locate([block])[0]
    pack = Path(store._catalog.packs.where(place.pack))
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(place.offset + 100)
        byte = file.read(1)[0]
        file.seek(place.offset + 100)
        file.write(bytes([byte ^ 8]))
    view = fresh(store, "m")
    for ask in (
        lambda: view.tensor("model.embed.weight"),
        lambda: files_of(store, "m"),
        lambda: store.checkout("m", tmp_path / "out"),
        lambda: store.diff("base", "m"),
        lambda: store.materialize("m"),
    ):
        with pytest.raises(Corrupt) as found:
            ask()
        assert str(found.value.where).endswith(f", tensor model.embed.weight, block {block}")
    assert not (tmp_path / "out").exists()
    assert view.tensor("model.norm.weight").shape == (37,)
    assert store.show("m").virtual


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("verify", "is_checked_again"), [("once", False), ("always", True)])
def test_when_an_input_is_checked(
    verify: str,
    is_checked_again: bool,
    family: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A raw block that merges of one session read again is checked the first time, or always."""
    with Store.init(tmp_path / "raw", block_size=BLOCK, codec="raw") as store:
        for name in ("base", *FAMILY.names):
            store.add(family / name, name=name)
        for number, scale in enumerate((0.5, 0.6)):
            request = {"method": "task_arithmetic", "parameters": {"lambda": scale}}
            merged(store, f"m{number}", virtual=True, **request)
    checked: list[BlockId] = []

    def verified(id: BlockId, at: Location, *rest: Any) -> None:
        # Blocks of one value have no bytes of their own.
        if at.codec == Codec.RAW:
            checked.append(id)
        reader.verify(id, at, *rest)

    monkeypatch.setattr(loading, "verify", verified)
    with Store.open(store.path, verify=verify) as session:
        session.cache_bytes_on_disk = 0
        files_of(session, "m0")
        first = len(checked)
        assert len(set(checked)) > 20
        files_of(session, "m1")
        assert sorted(checked[first:]) == (sorted(checked[:first]) if is_checked_again else [])
        every = set(checked)
    checked.clear()
    with Store.open(store.path, verify=verify) as session:
        session.cache_bytes_on_disk = 0
        files_of(session, "m1")
    assert set(checked) == every


def test_reads_beyond_the_plan_stop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more is read for a chunk than what its plan reads for it, the reads stop."""
    plan = store.plan(MergeRequest(base="base", experts=["e0"], method="linear"))
    assert plan.planned_expert_bytes > BLOCK
    store.merge(plan, name="m", virtual=True)
    monkeypatch.setattr(blocks, "READ", -1)
    with pytest.raises(BudgetExceeded):
        files_of(store, "m")


def test_without_anything_to_compute_with(store: Store) -> None:
    """A view that was given nothing to compute with says so instead of making bytes up."""
    merged(store, "m", virtual=True, **METHODS["linear"])
    view = SnapshotView(store._catalog, store["m"].id)
    with pytest.raises(BadRequest, match="virtual"):
        view.tensor("model.embed.weight")
    assert view.read("tokenizer.json", 0, 5) == b'{"ver'


def test_adding_the_bytes_of_a_virtual_merge_stores_them(tmp_path: Path) -> None:
    """Where all of a virtual merge is the base's own, its manifest is that of the same bytes added;
    adding those under its name makes a snapshot that is not virtual, and once more makes none."""
    source = small_model(tmp_path / "model", "s")
    with Store.init(tmp_path / "trivial", block_size=BLOCK) as store:
        for name in ("base", "expert"):
            base = None if name == "base" else "base"
            store.add(source, name=name, base=base, threads=1)
        asked = {"base": "base", "experts": ["expert"], "method": "task_arithmetic"}
        plan = store.plan(MergeRequest(**asked), allow_noop=True, threads=1)
        virtual = store.merge(plan, name="merged", virtual=True, threads=1)
        assert virtual.virtual
        added = store.add(source, name="merged", threads=1)
        assert added.new_snapshot
        assert added.manifest == virtual.manifest
        assert not store.show("merged").virtual
        assert [parent.snapshot for parent in store.show("merged").parents] == [virtual.snapshot]
        assert not store.add(source, name="merged", threads=1).new_snapshot
        assert store.fsck(read_data=True).problems == ()
