"""Reachability: what keeps what, over the arrays of an inventory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gc import BLOCK, write

from mstore.api import Store
from mstore.blocks.location_arrays import HEAD, LocationTable
from mstore.blocks.packs import Kind
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, SnapshotId
from mstore.upkeep.reachability import Inventory, Reach, Roots


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with three snapshots: base, a delta-coded expert of it, and another."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.configure("codec", "dense")
        store.add(write(tmp_path / "in", 1), name="base")
        store.add(write(tmp_path / "in", 1, 4), name="expert", base="base")
        store.add(write(tmp_path / "in", 2), name="other")
        yield store


def roots_of(store: Store, *names: str, pruned: tuple[str, ...] = ()) -> Roots:
    return Roots(
        frozenset(store[name].id for name in names),
        frozenset(),
        frozenset(store[name].id for name in pruned),
    )


def reached(store: Store, roots: Roots) -> Reach:
    reach = Reach(store._catalog, Inventory.read(store._catalog))
    reach.grow(roots)
    return reach


def blocks_by_walking(store: Store, *names: str) -> set[bytes]:
    """The blocks of some snapshots and their bases, found the slow way."""
    catalog = store._catalog
    found: set[bytes] = set()
    for name in names:
        for file in store.view(name).manifest.files:
            for part in file.parts:
                found.update(catalog.tensor(part.tensor_id()).block_ids())
    places = catalog.locate([type(b)(b) for b in found])  # type: ignore[misc]
    return found | {place.base for place in places if any(place.base)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "names", [("base",), ("expert",), ("other",), ("base", "other"), ("base", "expert", "other")]
)
def test_reached_blocks_are_those_that_a_walk_finds(store: Store, names: tuple[str, ...]) -> None:
    """Marks over arrays agree with a walk over records, ancestors and bases of deltas included."""
    reach = reached(store, roots_of(store, *names))
    blocks = reach.inventory.blocks
    found = {blocks.id(n) for n in np.flatnonzero(reach.live[Kind.BLOCK])}
    walked = {*names, "base"} if "expert" in names else set(names)
    assert found == blocks_by_walking(store, *walked)
    assert reach.missing == set()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [1, 3, 1 << 17])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9))
def test_any_history(seed: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any history, pruned or not, what is reached is what a walk over single records finds."""
    monkeypatch.setattr("mstore.upkeep.reachability._BATCH", batch)
    draw = random.Random(seed)
    with TemporaryDirectory() as root, Store.init(Path(root) / "store", block_size=BLOCK) as store:
        store.configure("codec", "dense")
        names = [f"r{number}" for number in range(3)]
        for _ in range(draw.randrange(1, 6)):
            there = [ref.name for ref in store.refs()]
            base = draw.choice([None, *there])
            path = write(Path(root) / "in", draw.randrange(3), draw.randrange(5))
            store.add(path, name=draw.choice(names), base=base)
        every = [SnapshotId(id) for id in store.snapshot_ids()]
        pruned = frozenset(draw.sample(every, draw.randrange(len(every))))
        asked = draw.sample(every, draw.randrange(1, len(every) + 1))
        cut = draw.randrange(len(asked) + 1)
        # A loose one that is pruned and whole counts as named, like a ref.
        reach = reached(store, Roots(frozenset(asked[:cut]), frozenset(asked[cut:]), pruned))
        snapshots, waiting = set[SnapshotId](), list(asked)
        while waiting:
            if (id := waiting.pop()) not in snapshots:
                snapshots.add(id)
                waiting += [one.snapshot_id() for one in store._catalog.snapshot(id).parents]
        whole = {id for id in snapshots if id in asked or id not in pruned}
        blocks = reach.inventory.blocks
        found = {blocks.id(number) for number in np.flatnonzero(reach.live[Kind.BLOCK])}
        assert found == blocks_by_walking(store, *(str(id) for id in whole))
        assert (reach.snapshots, reach.whole) == (snapshots, whole)
        manifests = reach.inventory.tables[Kind.MANIFEST]
        live = {manifests.id(number) for number in np.flatnonzero(reach.live[Kind.MANIFEST])}
        assert live == {store._catalog.snapshot(id).manifest for id in snapshots}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Kind.SNAPSHOT, Kind.MANIFEST, Kind.TENSOR])
@pytest.mark.parametrize("how", ["flipped", "cut off", "no row"])
def test_a_record_that_is_lost_is_named(store: Store, kind: Kind, how: str) -> None:
    """A needed record that is damaged, beyond its pack's end or without a row is Corrupt."""
    catalog = store._catalog
    record = catalog.snapshot(store["other"].id)
    manifest = catalog.manifest(record.manifest_id())
    tensor = manifest.files[0].parts[-1].tensor
    id = {Kind.SNAPSHOT: store["other"].id, Kind.MANIFEST: record.manifest, Kind.TENSOR: tensor}[
        kind
    ]
    with catalog.index.env.read() as transaction:
        location = catalog.index.record(transaction, kind, id)
    assert location is not None
    path = Path(catalog.packs.where(location.pack))
    path.chmod(0o644)
    if how == "no row":
        with catalog.index.env.write() as transaction:
            catalog.index.delete_row(transaction, (kind, id))
    else:
        with path.open("r+b") as file:
            if how == "flipped":
                file.seek(location.offset + location.stored_length - 1)
                file.write(b"\xc1")
            else:
                file.truncate(location.offset + 1)
    roots = Roots(frozenset([store["other"].id]), frozenset(), frozenset())
    with pytest.raises(Corrupt, match=id.hex()[:12] if how == "no row" else None):
        reached(store, roots)


def test_only_what_has_a_row_and_is_reached_is_live(store: Store) -> None:
    """Of ids that nothing reaches, that have no row, or whose kind has none, none is live."""
    reach = reached(store, roots_of(store, "base"))
    base, other = (store[name].id for name in ("base", "other"))
    assert reach.live_among(Kind.SNAPSHOT, [other, bytes(32), base]) == [base]
    assert len(reach.inventory.tables[Kind.NOTE]) == 0
    assert reach.live_among(Kind.NOTE, [bytes(32)]) == []


def test_a_base_of_deltas_lives_without_its_snapshot(store: Store) -> None:
    """The base snapshot pruned, the blocks that deltas refer to stay, and the others do not."""
    reach = reached(store, roots_of(store, "expert", pruned=("base",)))
    blocks = reach.inventory.blocks
    found = {blocks.id(n) for n in np.flatnonzero(reach.live[Kind.BLOCK])}
    assert found == blocks_by_walking(store, "expert")
    assert not reach.live[Kind.BLOCK].all()
    assert (reach.inventory.blocks.base >= 0).any(), "the expert has deltas"
    assert store["base"].id in reach.snapshots


def test_the_cache_of_the_catalog_is_left_alone(store: Store) -> None:
    """Records are decoded past the cache: a walk over a large store must not fill it."""
    ids = [store[name].id for name in ("base", "expert")]
    with Store.open(store.path) as other:
        reach = Reach(other._catalog, Inventory.read(other._catalog))
        reach.grow(Roots(frozenset(ids), frozenset(), frozenset()))
        assert not len(other._catalog._records)


def test_growing_reads_nothing_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing again by the same roots reads no record."""
    roots = roots_of(store, "expert", "other")
    reach = reached(store, roots)
    before = {kind: flags.copy() for kind, flags in reach.live.items()}

    def refuse(*_: object) -> bytes:
        raise AssertionError("read again")

    plans = reach.live[Kind.PLAN]
    assert plans.all()
    monkeypatch.setattr(store._catalog, "record_bytes", refuse)
    monkeypatch.setattr(store._catalog.packs, "read_each", refuse)
    reach.grow(roots)
    assert all((reach.live[kind] == flags).all() for kind, flags in before.items())


def test_a_needed_record_that_is_damaged_stops_it(store: Store) -> None:
    """With a record that cannot be read nobody can say what is needed: gc drops nothing."""
    catalog = store._catalog
    manifest = store["other"].manifest
    with catalog.index.env.read() as transaction:
        location = catalog.index.record(transaction, Kind.MANIFEST, manifest)
    assert location is not None
    path = Path(catalog.packs.where(location.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(location.offset)
        file.write(b"\xc1")
    store.remove("base", "expert")
    with Store.open(store.path) as other:
        with pytest.raises(Corrupt):
            other.gc(reflog_days=0)
        assert len(other.snapshot_ids()) == 3


ONE = st.sampled_from([b"\0" * 31 + b"\1", b"\0" * 32, b"\xff" * 32, b"\0" * 8 + b"\2" * 24])
IDS = st.lists(st.one_of(ONE, st.binary(min_size=ID_BYTES, max_size=ID_BYTES)), max_size=30)


@given(stored=IDS, asked=IDS)
def test_find(stored: list[bytes], asked: list[bytes]) -> None:
    """Each id is found at its place in the order, also among those that begin alike; others are
    not."""
    ordered = sorted(set(stored))
    table = LocationTable(bytearray(b"".join(ordered)), bytearray(HEAD.itemsize * len(ordered)))
    places = {id: number for number, id in enumerate(ordered)}
    asked = asked + ordered
    assert table.find(b"".join(asked)).tolist() == [places.get(id, -1) for id in asked]


def test_ids_with_one_beginning(tmp_path: Path) -> None:
    """Many ids with the same first eight bytes are still told apart."""
    ordered = sorted(b"12345678" + os.urandom(24) for _ in range(300))
    table = LocationTable(bytearray(b"".join(ordered)), bytearray(HEAD.itemsize * 300))
    assert table.find(b"".join(reversed(ordered))).tolist() == list(range(299, -1, -1))
