"""Usage: sums that add up exactly, and a free-to-be-gone figure that is what no root reaches."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from checkpoints import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from mstore import MergeRequest, Store
from mstore.api.reports import HeldBytes, UsageReport
from mstore.blocks.codecs import Codec
from mstore.blocks.location_arrays import HEAD, LocationTable
from mstore.store import leases
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import NotFound
from mstore.terms.ids import BlockId, SnapshotId
from mstore.upkeep.disk_usage import usage
from mstore.upkeep.sharings import Sharings, Sums, flags

BLOCK = 1 << 16
NAMES = ("a", "b", "c")
LENGTHS = (100, 10_000, BLOCK, BLOCK + 3000)


def write_model(path: Path, letters: str) -> Path:
    """A checkpoint of a tensor a letter, of one shape at one place; equal letters, equal bytes."""
    tensors = []
    for place, letter in enumerate(letters):
        draws = np.random.default_rng((place, ord(letter)))
        tensors.append((f"t{place}", "U8", (LENGTHS[place],), draws.bytes(LENGTHS[place])))
    write_safetensors(path, tensors)
    return path


Step = tuple[str, str, str | None]
"""What is done: a ref, letters of tensors or what is to be done with it, and a base."""

steps = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(NAMES),
            st.text("pqr", min_size=4, max_size=4),
            st.sampled_from((None, *NAMES)),
        ),
        st.tuples(st.sampled_from(NAMES), st.sampled_from(("rm", "back", "tag")), st.none()),
    ),
    min_size=1,
    max_size=8,
)


def do(store: Store, root: Path, number: int, step: Step) -> None:
    """One step; what cannot be done is left out."""
    name, what, base = step
    there = {ref.name for ref in store.refs()}
    if what == "rm":
        if name in there:
            store.remove(name)
    elif what == "tag":
        if name in there:
            store.tag(f"v{number}", name)
    elif what == "back":
        if name in there and any(p.role == "previous" for p in store[name].parents):
            store.reset(name, f"{name}~1")
    else:
        path = write_model(root / f"{number}.safetensors", what)
        store.add(path, name=name, base=base if base in there else None)


class Oracle:
    """The same figures by brute force: sets of blocks, and a walk for each question."""

    def __init__(self, store: Store, *, with_reflog: bool) -> None:
        self.catalog: Catalog = store._catalog
        self.refs = {ref.name: ref.snapshot for ref in store.refs()}
        self.starts: dict[str, set[SnapshotId]] = {}
        for name in {*self.refs, *NAMES}:
            if with_reflog:
                moves = store.reflog(name) if name in self.refs or self._logged(name) else []
                ends = {end for move in moves for end in (move.old, move.new) if end is not None}
                self.starts[name] = ends
        for name, tip in self.refs.items():
            self.starts.setdefault(name, set()).add(tip)

    def _logged(self, name: str) -> bool:
        with (
            self.catalog.index.env.read() as transaction,
            transaction.cursor(db=self.catalog.index.db("reflog")) as cursor,
        ):
            return any(bytes(key).startswith(name.encode() + b"\0") for key, _ in cursor)

    def blocks(self, *ids: SnapshotId) -> set[BlockId]:
        found: set[BlockId] = set()
        for id in ids:
            manifest = self.catalog.manifest(self.catalog.snapshot(id).manifest_id())
            for part in (part for file in manifest.files for part in file.parts):
                tensor = self.catalog.content(part.tensor_id())
                assert isinstance(tensor, Tensor)
                found.update(tensor.block_ids())
        bases = {place.base for place in self.catalog.locate(found)}
        return found | {BlockId(base) for base in bases if any(base)}

    def stored(self, blocks: set[BlockId]) -> int:
        return sum(place.stored_length for place in self.catalog.locate(blocks))

    def live(self, without: Collection[str] = ()) -> set[BlockId]:
        waiting = [id for name, ids in self.starts.items() if name not in without for id in ids]
        seen: set[SnapshotId] = set()
        while waiting:
            id = waiting.pop()
            if id not in seen:
                seen.add(id)
                waiting += [parent.snapshot_id() for parent in self.catalog.snapshot(id).parents]
        return self.blocks(*seen)


def compare(told: UsageReport, oracle: Oracle) -> None:
    live = oracle.live()
    for ref in told.refs:
        mine = oracle.blocks(oracle.refs[ref.name])
        others = {n: oracle.blocks(id) for n, id in oracle.refs.items() if n != ref.name}
        theirs = set[BlockId]().union(*others.values())
        assert ref.stored_bytes == oracle.stored(mine)
        assert ref.unique_bytes == oracle.stored(mine - theirs)
        assert ref.unique_bytes + ref.shared_bytes == ref.stored_bytes
        assert {one.name: one.stored_bytes for one in ref.shared_with} == {
            name: oracle.stored(mine & blocks) for name, blocks in others.items() if mine & blocks
        }
        assert ref.freed_bytes == oracle.stored(live - oracle.live({ref.name}))
        for codecs, size in ((ref.unique, ref.unique_bytes), (ref.shared, ref.shared_bytes)):
            assert sum(one.stored_bytes for one in codecs) == size
    names = {ref.name for ref in told.refs}
    taken = oracle.blocks(*(oracle.refs[name] for name in names))
    assert told.stored_bytes == oracle.stored(taken)
    assert sum(one.stored_bytes for one in told.codecs) == told.stored_bytes
    assert sum(one.blocks for one in told.codecs) == len(taken)
    assert told.freed_bytes == oracle.stored(live - oracle.live(names))
    assert told.live_bytes == oracle.stored(live)


@settings(max_examples=8)
@given(steps)
def test_sums_add_up_and_agree_with_brute_force(history: list[Step]) -> None:
    """For any history: unique + shared = total; pairs, codecs, freed alone and freed together are
    what sets of blocks and a walk from the roots give, with the reflogs and without them."""
    with TemporaryDirectory() as root, Store.init(Path(root) / "store", block_size=BLOCK) as store:
        for number, step in enumerate(history):
            do(store, Path(root), number, step)
        for days in (30, 0):
            oracle = Oracle(store, with_reflog=days > 0)
            every = usage(store._catalog, (), reflog_days=days)
            assert [ref.name for ref in every.refs] == sorted(oracle.refs)
            compare(every, oracle)
            for pair in itertools.combinations(sorted(oracle.refs), 2):
                compare(usage(store._catalog, pair, reflog_days=days), oracle)
            held = oracle.live(set(oracle.refs))
            assert every.freed_bytes == every.live_bytes - oracle.stored(held)
            assert sum(asdict(every.held).values()) == every.live_bytes
            assert every.held.refs == every.stored_bytes
            named = oracle.stored(Oracle(store, with_reflog=False).live())
            assert every.held.lineage == named - every.held.refs
            assert every.held.reflog == every.live_bytes - named
            portions = sum(ref.portion_bytes for ref in every.refs)
            assert every.stored_bytes - len(every.refs) <= portions <= every.stored_bytes


@settings(max_examples=6)
@given(steps, st.sets(st.sampled_from(NAMES)))
def test_what_is_said_to_be_freed_is_what_gc_frees(history: list[Step], gone: set[str]) -> None:
    """Removing refs and collecting takes away exactly the block bytes that were foretold, and a dry
    run foretells the same."""
    with TemporaryDirectory() as root, Store.init(Path(root) / "store", block_size=BLOCK) as store:
        store.configure("reflog_days", 0)
        for number, step in enumerate(history):
            do(store, Path(root), number, step)
        gone &= {ref.name for ref in store.refs()}
        foretold = store.usage(sorted(gone)).freed_bytes if gone else 0
        before = store.usage()
        for name in gone:
            store.remove(name)
        removed = store.usage()
        assert removed.unreachable_bytes == before.unreachable_bytes + foretold
        assert removed.live_bytes == before.live_bytes - foretold
        dry = store.gc(dry_run=True)
        assert (dry.blocks_dropped > 0) == (removed.unreachable_bytes > 0)
        assert dry.dropped_bytes >= removed.unreachable_bytes
        store.gc()
        after = store.usage()
        assert (after.live_bytes, after.unreachable_bytes) == (removed.live_bytes, 0)
        assert sum(one.stored_bytes for one in store.stats().codecs) == after.live_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def test_history_keeps_what_a_ref_does_not(store: Store, tmp_path: Path) -> None:
    """An expert keeps its base's bytes though it shares none: they are not freed with the base."""
    store.add(write_model(tmp_path / "p.safetensors", "pppp"), name="base")
    store.add(write_model(tmp_path / "q.safetensors", "qqqq"), name="expert", base="base")
    base, expert = usage(store._catalog, (), reflog_days=0).refs
    assert base.unique_bytes == sum(LENGTHS)
    assert base.freed_bytes == 0
    assert expert.freed_bytes == expert.unique_bytes
    both = usage(store._catalog, ("expert", "base"), reflog_days=0)
    assert both.freed_bytes == both.live_bytes == both.stored_bytes


def test_a_ref_that_was_removed_is_kept_by_its_reflog(store: Store, tmp_path: Path) -> None:
    """Within the window its bytes are live and freed by nothing; after it they are unreachable."""
    store.add(write_model(tmp_path / "p.safetensors", "pppp"), name="a")
    store.remove("a")
    young = usage(store._catalog, (), reflog_days=30)
    assert young.live_bytes > 0 == young.unreachable_bytes == young.freed_bytes
    old = usage(store._catalog, (), reflog_days=0)
    assert old.unreachable_bytes == young.live_bytes
    assert old.live_bytes == 0


def test_pairs_of_refs_are_counted_for_who_looks(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of all refs take no look at pairs of refs, which are the square of their number;
    whoever looks at one ref's pairs has those of that one counted, once."""
    for number, letters in enumerate(("pppp", "pppq", "pqqq")):
        store.add(write_model(tmp_path / f"{number}.safetensors", letters), name=f"r{number}")
    asked = []
    common = Sums.common

    def counted(sums: Sums, owner: int) -> object:
        asked.append(owner)
        return common(sums, owner)

    monkeypatch.setattr(Sums, "common", counted)
    told = store.usage()
    assert sum(ref.unique_bytes + ref.shared_bytes for ref in told.refs) > told.stored_bytes
    assert asked == []
    assert [one.name for one in told.refs[0].shared_with] == ["r1", "r2"]
    assert told.refs[0].shared_with[0].stored_bytes == told.refs[0].shared_bytes
    assert asked == [0]


def test_an_empty_store_uses_nothing(store: Store) -> None:
    """No refs, no bytes, no error."""
    told = store.usage()
    assert (told.refs, told.stored_bytes, told.freed_bytes, told.live_bytes) == ((), 0, 0, 0)
    assert store.stats().codecs == ()


def test_pins_and_virtual_merges_hold_what_no_ref_names(store: Store, tmp_path: Path) -> None:
    """What a virtual merge is computed from, pruned or not, and what an operation reads, is told as
    held by them; what they came from as held by lineage."""
    base = store.add(write_model(tmp_path / "p.safetensors", "pppp"), name="base").snapshot
    store.add(write_model(tmp_path / "q.safetensors", "qqqq"), name="other")
    store.remove("other")
    other = store.reflog("other")[0].old
    assert other is not None
    with leases.holding(store._catalog.layout, [other]):
        held = usage(store._catalog, (), reflog_days=0).held
    assert held.refs == store.usage(["base"]).stored_bytes
    assert held == HeldBytes(held.refs, 0, 0, 0, sum(LENGTHS))
    write_safetensors(tmp_path / "f.safetensors", [("t", "F32", (100,), bytes(range(1, 101)) * 4)])
    write_safetensors(tmp_path / "g.safetensors", [("t", "F32", (100,), bytes(range(2, 102)) * 4)])
    base = store.add(tmp_path / "f.safetensors", name="base", base=None).snapshot
    store.add(tmp_path / "g.safetensors", name="expert", base="base")
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="task_arithmetic"))
    store.merge(plan, name="m", virtual=True)
    store.remove("base", "expert")
    assert base in store.snapshot_ids()
    found = usage(store._catalog, (), reflog_days=0)
    assert found.held.virtual_inputs > 0
    assert found.held.lineage >= sum(LENGTHS), "the base's earlier version"
    store.prune(keep_last=1, unnamed_inputs=True)
    assert usage(store._catalog, (), reflog_days=0).held.virtual_inputs > 0
    assert sum(asdict(found.held).values()) == found.live_bytes


def test_a_name_that_is_no_ref(store: Store) -> None:
    """It is named, with where to look."""
    with pytest.raises(NotFound, match="no such ref") as caught:
        store.usage(["nobody"])
    assert caught.value.where == "nobody"


def test_stats_account_for_every_byte_of_the_packs(store: Store, tmp_path: Path) -> None:
    """Blocks by codec, records, dead payloads and overhead add up to the size of the packs."""
    store.add(write_model(tmp_path / "p.safetensors", "pqrs"), name="a")
    store.remove("a")
    told = store.stats()
    with store._catalog.index.env.read() as transaction:
        rows = [place.stored_length for _, _, place in store._catalog.index.records(transaction)]
    blocks = sum(one.stored_bytes for one in told.codecs)
    assert blocks + sum(rows) + told.dead_bytes + told.overhead_bytes == told.stored_bytes
    assert sum(one.plain_bytes for one in told.codecs) == told.unique_bytes
    assert told.dead_bytes == 0, "headers, tables and padding are not dead"
    assert told.overhead_bytes >= 4096


@given(st.lists(st.tuples(st.integers(1, 15), st.sets(st.integers(0, 9), max_size=6)), max_size=6))
def test_a_sharing_is_the_blocks_of_the_same_owners(groups: list[tuple[int, set[int]]]) -> None:
    """A block's owners are all whose groups have it, whatever the order of the groups."""
    sharings = Sharings(10, 4)
    for who, some in groups:
        sharings.add(who, np.array(sorted(some), int))
    for block in range(10):
        wanted = 0
        for who, some in groups:
            wanted |= who if block in some else 0
        assert sharings.owners[sharings.labels[block]] == wanted


@given(
    st.lists(st.tuples(st.integers(1, 15), st.sets(st.integers(0, 9), max_size=6)), max_size=9),
    st.lists(
        st.tuples(st.sampled_from(list(Codec)), st.integers(0, 1 << 20)), min_size=10, max_size=10
    ),
)
def test_figures_of_each_owner_are_those_of_its_blocks(
    groups: list[tuple[int, set[int]]], rows: list[tuple[Codec, int]]
) -> None:
    """All that one pass over sharings tells of each owner is what its set of blocks gives."""
    heads = np.zeros(len(rows), HEAD)
    heads["codec"], heads["stored"] = zip(*rows, strict=True)
    heads["plain"] = 1 << 20
    blocks = LocationTable(bytearray(32 * len(rows)), bytearray(heads.tobytes()))
    sharings = Sharings(len(rows), 4)
    has: list[set[int]] = [set() for _ in range(4)]
    for who, some in groups:
        sharings.add(who, np.array(sorted(some), int))
        for owner in range(4):
            has[owner] |= some if who >> owner & 1 else set()
    sums = Sums(sharings, blocks)

    def told(some: set[int]) -> list[list[int]]:
        by_codec = {codec: [row for row in some if rows[row][0] == codec] for codec in Codec}
        return [
            [len(some), len(some) << 20, sum(rows[row][1] for row in some)]
            for some in by_codec.values()
        ]

    asked = [2, 0, 3, 1]
    for owner, figures in zip(asked, sums.each(asked), strict=True):
        mine = has[owner]
        alone = mine - set().union(*(has[other] for other in range(4) if other != owner))
        assert figures.all.tolist() == told(mine)
        assert figures.unique.tolist() == told(alone)
        portions = [rows[row][1] / sum(row in one for one in has) for row in mine]
        assert abs(figures.portion - sum(portions)) <= 1
        common = [sum(rows[row][1] for row in mine & other) for other in has]
        assert sums.common(owner).tolist() == common


@given(st.lists(st.sets(st.integers(0, 40)), min_size=1))
def test_sets_as_flags(sets: list[set[int]]) -> None:
    """A set of numbers has a flag for each of them."""
    found = flags([sum(1 << number for number in one) for one in sets], 41)
    assert [set(np.flatnonzero(row).tolist()) for row in found] == sets


@pytest.mark.parametrize("unnamed_inputs", [False, True])
def test_pruned_contents_that_are_gone_count_nothing(
    tmp_path: Path, *, unnamed_inputs: bool
) -> None:
    """Once gc took what was pruned, a reflog that still names it is no reason to fail."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        for number, letters in enumerate(("pppp", "pqpp", "pqrp", "rrrr")):
            path = write_model(tmp_path / f"{number}.safetensors", letters)
            store.add(path, name="a" if number else "b", base="b" if number else None)
        if unnamed_inputs:
            store.remove("b")
        store.prune(keep_last=1, unnamed_inputs=unnamed_inputs)
        store.gc(reflog_days=0)
        every = store.usage()
        assert every.unreachable_bytes == 0
        assert store.usage(["a"]).stored_bytes == every.refs[0].stored_bytes
        assert store.stats().unreachable_bytes == 0
        with pytest.raises(NotFound, match="a~1"):
            store.usage(["a~1"])
