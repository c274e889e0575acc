"""The public face: stores, snapshots and refs as a Python program meets them."""

from __future__ import annotations

import itertools
import pickle
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_safetensors
from families import BLOCK

import mstore
from mstore import MergeRequest, MstoreError, Snapshot, SnapshotId, Store
from mstore.terms.errors import (
    BadName,
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    NotFound,
    Unavailable,
)
from mstore.terms.report import html

FAMILY = families.layered(rows=40)


def build(root: Path) -> None:
    """A family, and a store with a base, three experts and two merges under one name."""
    FAMILY.write(root)
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *FAMILY.names):
            base = None if name == "base" else "llama/base"
            store.add(root / name, name=f"llama/{name}", base=base, message=f"add {name}")
        for expert in ("llama/e0", "llama/e1"):
            plan = store.plan(MergeRequest(base="llama/base", experts=[expert], method="linear"))
            store.merge(plan, name="llama/merged", message=expert)


@pytest.fixture
def root(template: Path) -> Path:
    """What tests only read."""
    return template


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store, free to be changed."""
    with Store.open(shutil.copytree(template / "store", tmp_path / "store")) as store:
        yield store


# -- as the README says --------------------------------------------------------------------------


def test_a_snapshot_in_python(store: Store, root: Path) -> None:
    """A snapshot by name: its tensors as numpy arrays, its files, parents and lineage."""
    snapshot = store["llama/merged"]
    norm = snapshot.tensor("model.norm.weight")
    assert norm.dtype == ml_dtypes.bfloat16
    wanted = FAMILY.experts[1]["model.norm.weight"]
    assert families.bits(norm).tolist() == families.bits(wanted).tolist()
    assert sorted(snapshot.tensor_names()) == sorted(FAMILY.base)
    own = {*families.contents(root / "base"), "mergekit_config.yml"}
    assert [file.path for file in snapshot.files()] == sorted(own)
    assert [p.role for p in snapshot.parents] == ["previous", "base", "expert"]
    assert snapshot.parents[1].snapshot == store["llama/base"].id
    told = snapshot.lineage()
    assert told[0].snapshot == snapshot.id
    for name in ("manifest", "parents", "made", "origin", "author", "message", "time_ns"):
        assert getattr(snapshot, name) == getattr(told[0], name), name
    assert (snapshot.made, snapshot.origin, snapshot.author) == ("merge", None, "")
    assert snapshot.message == "llama/e1"
    assert snapshot.read("config.json") == (root / "base" / "config.json").read_bytes()
    assert b"".join(store.read_file("llama/merged", "config.json")) == snapshot.read("config.json")
    assert repr(snapshot) == f"Snapshot({snapshot.id.short})"


def test_what_the_package_offers() -> None:
    """Every name of `mstore.__all__` is there, and the version is a version."""
    assert all(hasattr(mstore, name) for name in mstore.__all__)
    assert mstore.__version__[0].isdigit()
    assert issubclass(Conflict, MstoreError)


def test_reports_are_frozen_values(store: Store) -> None:
    """Reports cannot be changed, compare by value and survive pickling; so do errors."""
    shown = store.show("llama/merged")
    with pytest.raises(AttributeError):
        shown.message = "other"  # type: ignore[misc]
    assert shown == store.show("llama/merged")
    assert pickle.loads(pickle.dumps(shown)) == shown
    with pytest.raises(NotFound) as refused:
        store["nobody"]
    again = pickle.loads(pickle.dumps(refused.value))
    assert (type(again), again.what, again.where, again.hint) == (
        NotFound,
        refused.value.what,
        "nobody",
        refused.value.hint,
    )


# -- opening and closing -------------------------------------------------------------------------


def test_init_and_open(tmp_path: Path) -> None:
    """A store keeps block size and name; a second `init`, or one in a full place, is refused."""
    path = tmp_path / "deep" / "store"
    with Store.init(path, block_size=BLOCK) as store:
        uuid = store.uuid
        assert (store.path, store.block_size) == (path, BLOCK)
    with pytest.raises(Conflict, match="a store already"):
        Store.init(path)
    with Store.open(str(path)) as store:
        assert (store.uuid, store.block_size) == (uuid, BLOCK)
    with Store.init(tmp_path / "default") as store:
        assert (store.block_size, store.author) == (1 << 20, "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(Conflict, match="not empty"):
        Store.init(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_authors(root: Path, tmp_path: Path) -> None:
    """A store says who makes its snapshots, as its opening told: a text, or what is asked each
    time, and they say so, too; also where it has travelled."""
    names = ["Ada"]
    with Store.init(tmp_path / "store", block_size=BLOCK, author=lambda: names[-1]) as store:
        store.add(root / "base", name="base")
        names.append("Bob")
        assert (store.author, store["base"].author) == ("Bob", "Ada")
        with pickle.loads(pickle.dumps(store)) as other:
            assert (other.author, other["base"].author) == ("Bob", "Ada")
    with Store.open(tmp_path / "store", author="Eve") as store:
        store.add(root / "e0", name="e0")
        assert (store.author, store["e0"].author) == ("Eve", "Eve")


@pytest.mark.parametrize("size", [0, -1, 1000, 1 << 15, (1 << 16) + 1, 1 << 25])
def test_block_sizes(size: int, tmp_path: Path) -> None:
    """A block size is a power of two from 64 KiB to 16 MiB; for another one nothing is made."""
    with pytest.raises(BadRequest, match="power of two"):
        Store.init(tmp_path / "store", block_size=size)
    assert not (tmp_path / "store").exists()


def test_stores_that_cannot_be_opened(store: Store, tmp_path: Path) -> None:
    """No store, a newer format and a damaged format file are three different errors."""
    with pytest.raises(NotFound, match="no store here") as missing:
        Store.open(tmp_path / "nowhere")
    assert "init" in (missing.value.hint or "")
    path = store.path
    store.close()
    line = (path / "format").read_text()
    (path / "format").write_text(line.replace("mstore 3 ", "mstore 4 "))
    with pytest.raises(Incompatible, match="format 4"):
        Store.open(path)
    for damaged in ("", "nonsense", line[:-5], line + "more\n", line.replace("65536", "x")):
        (path / "format").write_text(damaged)
        with pytest.raises(Corrupt, match="format"):
            Store.open(path)


def test_a_store_stays_where_it_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store opened by a relative path is the same one after the working directory changed."""
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(store.path)
    monkeypatch.chdir(store.path.parent)
    with Store.open(store.path.name) as found, Store.open(tmp_path / "link") as linked:
        before = pickle.dumps((found, found["llama/e0"]))
        monkeypatch.chdir(tmp_path / "other")
        with Store.init("store") as fresh, Store.open(found.path) as again:
            assert found.path.is_absolute()
            assert fresh.path == tmp_path / "other" / "store"
            for text in (before, pickle.dumps((found, found["llama/e0"]))):
                other, snapshot = pickle.loads(text)
                assert (other, snapshot) == (found, found["llama/e0"])
                other.close()
                snapshot._store.close()
            assert found == linked == again != fresh
            assert len({found, linked, again, fresh}) == 2
            assert found["llama/e0"] == linked["llama/e0"] == again["llama/e0"]
            assert found["llama/e0"].load()
            assert not found.fsck().problems
            assert found.add(_model(tmp_path), name="more").snapshot in found
            assert not fresh.refs()


def _model(place: Path) -> Path:
    write_safetensors(place / "m" / "model.safetensors", [("w", "F32", (2,), b"\0" * 8)])
    return place / "m"


def test_two_openings_are_one_store(store: Store, root: Path) -> None:
    """What one handle publishes, another of the same process sees; each is closed for itself."""
    other = Store.open(store.path)
    report = store.add(root / "e2", name="new")
    assert other["new"].id == report.snapshot
    store.close()
    assert other["new"].tensor("model.scale").shape == ()
    other.close()
    with Store.open(root / "store") as untouched, pytest.raises(NotFound):
        untouched["new"]


# -- naming snapshots ----------------------------------------------------------------------------


def test_revisions(store: Store) -> None:
    """Names, tags, id prefixes, REV~N and NAME@{N} lead to the snapshots that they should."""
    tip = store["llama/merged"]
    first = tip.parents[0].snapshot
    store.tag("v1", "llama/merged~1")
    for text, wanted in (
        (str(tip.id), tip.id),
        (str(tip.id)[:8], tip.id),
        ("llama/merged~0", tip.id),
        ("llama/merged~", first),
        ("llama/merged~1", first),
        ("llama/merged@{1}", first),
        ("llama/merged@{0}", tip.id),
        ("v1", first),
        ("v1~1", store["llama/base"].id),
        ("llama/merged~1~1", store["llama/base"].id),
    ):
        assert store[text].id == wanted
        assert isinstance(store[text], Snapshot)
    for text, kind in (
        ("nobody", NotFound),
        ("llama", NotFound),
        ("llama/merged~9", NotFound),
        ("llama/merged@{9}", NotFound),
        ("ffff", NotFound),
        ("", BadName),
    ):
        with pytest.raises(kind):
            store[text]


# -- refs ----------------------------------------------------------------------------------------


def test_tags_stay(store: Store, root: Path) -> None:
    """A tag names a snapshot for good: it is not moved by tag, reset, add or merge."""
    plan = store.plan(MergeRequest(base="llama/base", experts=["llama/e0"], method="linear"))
    made = store.tag("v1", "llama/merged~1")
    assert (made.name, made.kind, made.snapshot) == ("v1", "tag", store["llama/merged~1"].id)
    moves: list[Callable[[], object]] = [
        lambda: store.tag("v1", "llama/base"),
        lambda: store.tag("llama/base", "v1"),
        lambda: store.reset("v1", "llama/base"),
        lambda: store.add(root / "e0", name="v1"),
        lambda: store.merge(plan, name="v1"),
    ]
    for move in moves:
        with pytest.raises(Conflict):
            move()
    assert store["v1"].id == made.snapshot
    store.remove("v1")
    assert store.tag("v1", "llama/base").snapshot == store["llama/base"].id


def test_reset_and_the_way_back(store: Store) -> None:
    """A branch goes where it is told, also a new one; the reflog keeps every old position."""
    old, new = store["llama/merged"].id, store["llama/e0"].id
    assert store.reset("llama/merged", "llama/e0").snapshot == new
    assert store.reset("llama/merged", "llama/e0").snapshot == new
    moves = store.reflog("llama/merged")
    assert [(move.position, move.old, move.new) for move in moves[:1]] == [(0, old, new)]
    assert (len(moves), moves[0].action) == (3, "reset: llama/e0")
    assert store.reset("llama/merged", "llama/merged@{1}").snapshot == old
    assert store.reset("fresh", "llama/base").kind == "branch"
    with pytest.raises(NotFound):
        store.reset("fresh", "nobody")
    with pytest.raises(BadName):
        store.reset("a b", "llama/base")


def test_remove_and_bring_back(store: Store) -> None:
    """A removed ref is gone from the names, not from the store: its reflog brings it back."""
    old = store["llama/e2"].id
    store.remove("llama/e2")
    assert "llama/e2" not in [ref.name for ref in store.refs()]
    with pytest.raises(NotFound):
        store["llama/e2"]
    with pytest.raises(NotFound):
        store.remove("llama/e2")
    last = store.reflog("llama/e2")[0]
    assert (last.old, last.new, last.action) == (old, None, "rm")
    assert store.reset("llama/e2", "llama/e2@{1}").snapshot == old
    with pytest.raises(NotFound):
        store.reflog("never was")


# -- many at once --------------------------------------------------------------------------------


def test_threads_share_a_store(store: Store, root: Path) -> None:
    """Adds, merges and reads of one store at the same time: each is as if it were alone."""
    wanted = {}
    for k, name in enumerate(FAMILY.names):
        plan = store.plan(
            MergeRequest(base="llama/base", experts=[f"llama/{name}"], method="task_arithmetic")
        )
        wanted[k] = (plan.plan, store.merge(plan, name="alone").manifest)

    def work(number: int) -> bool:
        k = number % 3
        if number % 4 == 0:
            return store.add(root / f"e{k}", name=f"added/{number}").blocks_new == 0
        if number % 4 == 1:
            array = store["llama/base"].tensor("model.embed.weight")
            return array.tobytes() == FAMILY.base["model.embed.weight"].tobytes()
        plan = store.plan(
            MergeRequest(base="llama/base", experts=[f"llama/e{k}"], method="task_arithmetic"),
            threads=1,
        )
        report = store.merge(plan, name=f"merged/{number}", threads=1)
        return (plan.plan, report.manifest) == wanted[k]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
    assert sum(ref.name.startswith(("added/", "merged/")) for ref in store.refs()) == 12
    assert store.fsck(read_data=True).problems == ()


def test_one_name_for_two(store: Store) -> None:
    """Of two merges into one name at a time each lands, or says that the ref moved meanwhile."""
    plans = [
        store.plan(MergeRequest(base="llama/base", experts=[f"llama/{name}"], method="linear"))
        for name in FAMILY.names
    ]

    def merge(number: int) -> SnapshotId | None:
        try:
            return store.merge(plans[number % 3], name="contended").snapshot
        except Conflict as error:
            conflicts.append(error.what)
            return None

    conflicts: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        landed = {id for id in pool.map(merge, range(9)) if id is not None}
    moves = store.reflog("contended")
    assert {move.new for move in moves} == landed
    assert all(move.old == earlier.new for move, earlier in itertools.pairwise(moves))
    assert set(conflicts) <= {"the ref moved while this command was running"}


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_threads_within_reason(threads: int, store: Store, root: Path, tmp_path: Path) -> None:
    """A number of threads is from 1 to 256, in every call that takes one."""
    plan = store.plan(MergeRequest(base="llama/base", experts=["llama/e0"], method="linear"))
    for ask in (
        lambda: store.add(root / "e0", name="x", threads=threads),
        lambda: store.merge(plan, name="x", threads=threads),
        lambda: store.replay("llama/merged", threads=threads),
        lambda: store.diff("llama/base", "llama/e0", threads=threads),
        lambda: store.checkout("llama/base", tmp_path / "x", threads=threads),
    ):
        with pytest.raises(BadRequest, match="threads must be between"):
            ask()


def test_stats_count_what_is_there(store: Store) -> None:
    """Counts are those of the refs and packs on disk; deduplication shows in the sizes."""
    stats = store.stats()
    packs = list((store.path / "packs").rglob("*.pack"))
    assert (stats.packs, stats.stored_bytes) == (
        len(packs),
        sum(path.stat().st_size for path in packs),
    )
    assert (stats.refs, stats.snapshots) == (5, 6) == (len(store.refs()), len(store.snapshot_ids()))
    plain = {item.snapshot: item.plain_bytes for item in store.log()}
    assert stats.plain_bytes == sum(plain.values())
    assert stats.unique_bytes < stats.plain_bytes
    assert np.all([stats.blocks > 0, stats.tensors > len(FAMILY.base), stats.statistics_bytes > 0])


def test_merging_a_plan_by_its_id(store: Store) -> None:
    """`merge` takes the report, the id or its first digits, and does the same with each."""
    plan = store.plan(MergeRequest(base="llama/base", experts=["llama/e2"], method="linear"))
    manifests = {store.merge(given, name="m").manifest for given in (plan, plan.plan)}
    manifests.add(store.merge(str(plan.plan)[:9], name="m").manifest)
    assert len(manifests) == 1


def test_after_close_nothing_pretends(store: Store) -> None:
    """A closed store raises an error of the library's, and closing twice is no error."""
    store.close()
    store.close()
    with pytest.raises(MstoreError):
        store.refs()


@pytest.mark.rest
def test_all_tensors_at_once(store: Store) -> None:
    """`load` has every tensor as numpy, `load_torch` the same elements as torch has them."""
    torch = pytest.importorskip("torch")
    snapshot = store[store.refs()[0].name]
    arrays = snapshot.load()
    assert list(arrays) == snapshot.tensor_names()
    tensors = snapshot.load_torch()
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tuple(tensor.shape) == array.shape
        assert str(tensor.dtype) == f"torch.{array.dtype.name}"
        found = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found == array.tobytes()
        if tensor.numel():
            # Its own memory: nothing of the store's can be changed by it.
            tensor.zero_()
    assert all(snapshot.tensor(name).tobytes() == a.tobytes() for name, a in arrays.items())


def test_tensors_without_torch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is not installed, its tensors are unavailable, with what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable) as refused:
        store[store.refs()[0].name].load_torch()
    assert refused.value.hint == "pip install torch"


# -- what callers hand in ------------------------------------------------------------------------


def test_weights_by_revision(store: Store) -> None:
    """Experts given as a mapping have the weights that it says, as pairs have."""
    weights = {"llama/e0": 0.5, "llama/e1": 0.25}
    either: tuple[Any, ...] = (weights, list(weights.items()))
    ways = [
        store.plan(MergeRequest(base="llama/base", experts=experts, method="linear"))
        for experts in either
    ]
    assert ways[0].experts == tuple(weights.items())
    assert ways[0].plan == ways[1].plan
    plain = store.plan(MergeRequest(base="llama/base", experts=list(weights), method="linear"))
    assert plain.plan != ways[0].plan


def test_a_snapshot_is_named_by_its_id_too(store: Store) -> None:
    """A SnapshotId is taken wherever a revision is; one that is not stored is NotFound."""
    base, expert = store["llama/base"].id, store["llama/e0"].id
    assert store[base].id == base
    assert store.show(expert).snapshot == expert
    assert store.diff(base, expert).tensors == store.diff("llama/base", "llama/e0").tensors
    plan = store.plan(MergeRequest(base=base, experts=[(expert, 0.5)], method="linear"))
    named = store.plan(
        MergeRequest(base="llama/base", experts=[("llama/e0", 0.5)], method="linear")
    )
    assert plan.plan == named.plan
    assert store.merge(plan, name="llama/by-id").planned_expert_bytes > 0
    with pytest.raises(NotFound):
        store[SnapshotId(bytes(32))]


def test_a_snapshot_is_a_revision(store: Store, tmp_path: Path) -> None:
    """A Snapshot is taken wherever a revision is, and is no list of its tensors' names."""
    base, expert = store["llama/base"], store["llama/e0"]
    named = store.plan(MergeRequest(base=base.id, experts={expert.id: 0.5}, method="linear"))
    ways: list[Any] = [{expert: 0.5}, [(expert, 0.5)]]
    for experts in ways:
        plan = store.plan(MergeRequest(base=base, experts=experts, method="linear"))
        assert plan.plan == named.plan
    assert store.diff(base, expert).tensors == store.diff("llama/base", "llama/e0").tensors
    assert store.tag("v1", expert).snapshot == store[expert].id == expert.id
    assert store.view(expert).id == expert.id
    assert expert in store
    assert store.checkout(expert, tmp_path / "out").files == len(expert.files())
    assert str(expert) == str(expert.id)
    one: Any = expert
    with pytest.raises(BadRequest, match="experts are a list"):
        store.plan(MergeRequest(base=base, experts=one, method="linear"))
    with pytest.raises(BadRequest, match="names of tensors are a list"):
        base.load(one)


def test_stores_and_snapshots_are_collections(store: Store, tmp_path: Path) -> None:
    """A store is one of its branches and tags, a snapshot of its tensors; snapshots are equal by
    store and id; and none is false for being empty."""
    assert list(store) == [ref.name for ref in store.refs()]
    assert len(store) == len(store.refs())
    assert "llama/e0" in store
    assert "llama/e9" not in store
    snapshot = store["llama/e0"]
    assert list(snapshot) == snapshot.tensor_names()
    assert len(snapshot) == len(snapshot.tensor_names())
    assert next(iter(snapshot)) in snapshot
    assert "nothing" not in snapshot
    assert {snapshot, store[snapshot.id], store["llama/e1"]} == {snapshot, store["llama/e1"]}
    assert snapshot != snapshot.id
    with Store.open(shutil.copytree(store.path, tmp_path / "copy")) as other:
        assert other[snapshot.id] != snapshot
    with Store.init(tmp_path / "empty") as empty:
        assert (bool(empty), len(empty), list(empty)) == (True, 0, [])


def test_they_travel(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores, snapshots and what safe_open gives are pickled as place and id, and opened when they
    are first used, wherever that is; a place that is gone by then is NotFound."""
    monkeypatch.chdir(store.path.parent)
    with Store.open(store.path.name, verify="always", cache_bytes=1 << 20) as near:
        snapshot = near["llama/e0"]
        name = next(iter(snapshot))
        opened = snapshot.safe_open()
        bytes_ = [pickle.dumps(one) for one in (near, snapshot, opened, opened.get_slice(name))]
        want = snapshot.tensor(name).tobytes()
        given = snapshot.id
    monkeypatch.chdir("/")
    came, of_store, file, part = (pickle.loads(one) for one in bytes_)
    assert (came["llama/e0"].id, of_store.id) == (given, given)
    assert (came._verify, came._cache_bytes) == ("always", 1 << 20)
    assert of_store == came[given]
    assert of_store.tensor(name).tobytes() == file.get_tensor(name).tobytes() == want
    assert part[...].tobytes() == want
    assert of_store._store._statistics is not None
    for one in (came, of_store._store, file._snapshot._store, part._file._snapshot._store):
        one.close()
        with pytest.raises(Unavailable):
            one.refs()
    late = pickle.loads(bytes_[0])
    store.close()
    shutil.rmtree(store.path)
    with pytest.raises(NotFound):
        late.refs()
    late.close()


FORKING = """
import os, sys
from mstore import MstoreError, Store
from mstore.api.integrations.fsspec import MstoreFileSystem

path = sys.argv[1]
store = Store.open(path)
Store.open(path)["llama/e0"].load()
files = MstoreFileSystem(store=path)
snapshot = store["llama/e0"]
opened = snapshot.safe_open()
name = next(iter(snapshot))
want = [snapshot.tensor(name).tobytes()]
handle = files.open("llama/e0/config.json")

def told(call):
    try:
        return call()
    except MstoreError as error:
        return str(error.hint)

def child():
    yield told(lambda: Store.open(path)["llama/e0"].tensor(name).tobytes() in want)
    yield told(lambda: Store.open(path).tag("of-child", snapshot).name)
    yield told(lambda: files.cat_file("llama/e0/config.json") == handle.read() != b"")
    yield told(lambda: store.refs())
    yield told(lambda: snapshot.load())
    yield told(lambda: opened.get_tensor(name))
    yield told(lambda: store.close())

if os.fork() == 0:
    for line in child():
        print(line, flush=True)
    sys.exit(0)
os.wait()
print("of-child" in store, snapshot.tensor(name).tobytes() in want)
"""


@pytest.mark.rest
def test_forked_children(store: Store) -> None:
    """A forked child opens its own store, whatever the parent has open, closed or not, and so does
    a filesystem of fsspec; objects of the parent say so; and the parent goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, store.path], capture_output=True, text=True, check=False
    )
    refused = ["open the store in the child"] * 3
    said = ["True", "of-child", "True", *refused, "None", "True True"]
    assert done.stdout.splitlines() == said, done.stderr


def test_the_home_directory(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that begins with ~ is in the home directory of the account, in every call that takes
    one; a file of a snapshot is not."""
    account = SimpleNamespace(pw_dir=str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "~").write_text("odd")
    shutil.copy(root / "e0" / "model.safetensors", tmp_path / "model")
    Store.init(Path("~/store"), block_size=BLOCK).close()
    with Store.open("~/store") as store:
        assert store.path == tmp_path / "store"
        store.add("~/model", name="m")
        assert store["m"].read("~") == b"odd"
        store.checkout("m", directory="~/out")
        assert (tmp_path / "out" / "~").read_text() == "odd"
        store.repair(sources=["~/model"])


def test_notebooks(store: Store) -> None:
    """Stores, snapshots and reports show themselves as tables, with what users wrote escaped."""
    store.tag(
        "v1",
        "llama/e0",
    )
    snapshot = store["llama/e0"]
    for one in (store, snapshot, store.show(snapshot), store.refs()[0]):
        shown: str = one._repr_html_()  # type: ignore[attr-defined]
        assert shown.startswith("<table>")
        assert snapshot.id.short in shown or store.refs()[0].snapshot.short in shown
        assert snapshot.id.hex() not in shown
    assert re.search(r"<td>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC</td>", html(store.show(snapshot)))
    assert html([1, "<b>"]) == "1, &lt;b&gt;"


def test_one_text_is_no_list(store: Store, root: Path, tmp_path: Path) -> None:
    """A text where a list is due is refused, not read letter by letter; nothing is made of it."""
    before = store.snapshot_ids()
    calls: list[Callable[..., object]] = [
        lambda: store.add(root / "e2", name="x", exclude="*.bin"),
        lambda: store.add(root / "e2", name="x", exclude=[""]),
        lambda: store.add(root / "e2", name="x", exclude=[5]),  # type: ignore[list-item]
        lambda: store.add(root / "e2", name="x", base="llama/base", only="lm_head*"),
        lambda: store.plan(MergeRequest(base="llama/base", experts="llama/e0", method="linear")),
        lambda: store.checkout("llama/base", tmp_path / "out", only="*"),
        lambda: store.checkout("llama/base", tmp_path / "out", only=[5]),  # type: ignore[list-item]
        lambda: store.diff_directory("llama/base", root / "base", exclude="*.bin"),
    ]
    for call in calls:
        with pytest.raises(BadRequest, match="list of"):
            call()
    assert store.snapshot_ids() == before
    assert not (tmp_path / "out").exists()


def test_other_types_are_refused(store: Store) -> None:
    """What is of no type that a call takes is BadRequest, as every error is an MstoreError."""
    made: Any = store["llama/base"]
    wrong: list[Any] = [None, 7, made.manifest]
    for one in wrong:
        with pytest.raises(BadRequest, match="text, a SnapshotId or a Snapshot"):
            store[one]
        with pytest.raises(BadRequest, match="text, a SnapshotId or a Snapshot"):
            store.plan(MergeRequest(base=one, experts=["llama/e0"], method="linear"))
        with pytest.raises(BadRequest, match="text, a SnapshotId or a Snapshot"):
            store.plan(MergeRequest(base="llama/base", experts=[one], method="linear"))
    pairs: list[Any] = [("llama/e0",), ("llama/e0", "x"), ("llama/e0", 1.0, 2.0), (("a", 1), 1)]
    for pair in pairs:
        with pytest.raises(BadRequest, match="an expert is a revision, or a pair"):
            store.plan(MergeRequest(base="llama/base", experts=[pair], method="linear"))
    number: Any = 7
    with pytest.raises(BadName, match="it is no text"):
        store.tag(number, "llama/base")
    assert made.read(Path("config.json")) == made.read("config.json")


def test_a_path_is_no_store(tmp_path: Path) -> None:
    """Who makes a Store of a path is told how to open one."""
    path: Any = tmp_path
    with pytest.raises(BadRequest, match=r"Store\.open"):
        Store(path)
