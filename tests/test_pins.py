"""Pins: after `pin` a snapshot's files are long raw pieces of packs, after `unpin` they are coded
again, and nothing else ever differs."""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from proof_models import model_files, write_files
from small_models import BLOCK

from mstore import MergeRequest, Store, fs
from mstore.blocks.codecs import PLAIN_BYTES, Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE, Kind
from mstore.blocks.schema import PINNED
from mstore.store.catalog import Catalog
from mstore.terms.errors import BadRequest, Conflict, Corrupt, MstoreError, StorageFailed
from mstore.terms.ids import BlockId, PackId, SnapshotId
from mstore.terms.report import Progress
from mstore.upkeep.pins.pin import pin, unpin
from mstore.upkeep.pins.positions import Position, is_mappable, positions_in, runs_in, to_copy

NAMES = ("base", "t1", "t2")


def build(root: Path) -> None:
    """Three models, and a dense store with the base and two fine-tunes, most of whose blocks are
    differences."""
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        for number, name in enumerate(NAMES):
            source = write_files(root / name, model_files(7, number))
            store.add(source, name=name, base="base" if number else None, threads=1)


@pytest.fixture
def path(copied: Path) -> Path:
    """The store; the models are beside it."""
    return copied / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


def places(store: Store) -> dict[BlockId, Location]:
    """Where every block lies."""
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        return dict(catalog.index.blocks(transaction))


def codecs(store: Store) -> dict[BlockId, int]:
    """How every block is stored."""
    return {block: place.codec for block, place in places(store).items()}


def positions(store: Store, name: str) -> dict[str, list[Position]]:
    """The blocks of every file of a snapshot."""
    catalog = store._catalog
    manifest = catalog.manifest(catalog.snapshot(store[name].id).manifest_id())
    return {file.path: list(positions_in(catalog, file)) for file in manifest.files}


def runs_of(store: Store, name: str) -> dict[str, int]:
    """The runs of each file; fails if a byte of it cannot be mapped."""
    found = {}
    for file, blocks in positions(store, name).items():
        lies = runs_in(blocks, store._catalog.locate([position.block for position in blocks]))
        assert lies.unmapped_bytes == 0, file
        found[file] = lies.runs
    return found


def contents(store: Store, name: str) -> dict[str, bytes]:
    view = store.view(name)
    return {file: b"".join(view.stream(file)) for file in view.files}


def require_whole(store: Store) -> None:
    """Everything is as it was added, and fsck finds nothing."""
    for number, name in enumerate(NAMES):
        assert contents(store, name) == model_files(7, number)
    assert store.fsck(read_data=True).problems == ()


# -- pin ---------------------------------------------------------------------------------------


def test_files_are_pieces_of_packs(store: Store) -> None:
    """After pin each file is one piece of a pack, page for page, whatever its blocks were before:
    differences, planes or constants."""
    before = codecs(store)
    report = store.pin("t1", raw=True)
    own = {position.block for blocks in positions(store, "t1").values() for position in blocks}
    assert {Codec.CONSTANT, Codec.FLOATS, Codec.DELTA} <= {before[block] for block in own}
    assert runs_of(store, "t1") == {"model.safetensors": 1, "config.json": 1}
    for file, data in model_files(7, 1).items():
        first = store.view("t1").physical_extents(file)[0].location
        assert first is not None
        assert first.offset % PAGE == 0
        assert store._catalog.packs.read(first.pack, first.offset, len(data)) == data
    assert report.runs == 2
    assert report.unmapped_bytes == 0
    assert report.bytes_before < report.bytes_after == report.plain_bytes
    assert report.bytes_written > report.plain_bytes - PAGE
    require_whole(store)


def test_nothing_else_changes(store: Store) -> None:
    """Ids, lineage, refs and the places of all other blocks stay; others' differences decode."""
    logged, refs, before = store.log(), store.refs(), places(store)
    store.pin("base", raw=True)
    own = {position.block for blocks in positions(store, "base").values() for position in blocks}
    assert {one for one, place in places(store).items() if place != before[one]} <= own
    assert [one.snapshot for one in store.log()] == [one.snapshot for one in logged]
    assert [(one.name, one.snapshot) for one in store.refs()] == [
        (one.name, one.snapshot) for one in refs
    ]
    assert Codec.DELTA in codecs(store).values()
    require_whole(store)


def test_a_second_pin_copies_nothing(store: Store) -> None:
    """Blocks that lie raw, congruent and in file order stay where they are: also after gc."""
    store.pin("t1", raw=True)
    before = places(store)
    assert store.pin("t1", raw=True).blocks_copied == 0
    assert places(store) == before
    store.gc(dead_share=0.0)
    again = store.pin("t1", raw=True)
    assert (again.blocks_copied, again.bytes_written) == (0, 0)


def test_what_was_added_raw_lies_so_already(tmp_path: Path) -> None:
    """In a store whose setting is raw, pin copies nothing of a file without constants."""
    data = np.random.default_rng(1).bytes(5 * BLOCK + 77)
    tensors = [("a", "U8", (len(data),), data), ("b", "U8", (9,), bytes(range(9)))]
    write_safetensors(tmp_path / "raw" / "model.safetensors", tensors)
    with Store.init(tmp_path / "other", block_size=BLOCK, codec="raw") as store:
        store.add(tmp_path / "raw", name="raw")
        report = store.pin("raw", raw=True)
        assert (report.blocks_copied, report.runs, report.bytes_written) == (0, 1, 0)


def test_full_packs_break_runs_and_need_no_second_pin(store: Store) -> None:
    """A run goes on in the next pack where one is full; pinning again has nothing to lengthen."""
    id = store["t1"].id
    report = pin(store._catalog, id, threads=2, max_pack=2 * BLOCK)
    assert report.runs == 3
    runs_of(store, "t1")
    assert pin(store._catalog, id, threads=2, max_pack=2 * BLOCK).blocks_copied == 0
    require_whole(store)


def test_a_shared_block_has_one_place(store: Store, tmp_path: Path) -> None:
    """A block at several positions lies at the first; runs break at the others, and the report
    says which bytes no page can be mapped from."""
    whole = np.random.default_rng(0).bytes(BLOCK)
    tensors = [("a", "U8", (BLOCK,), whole), ("b", "U8", (10,), bytes(range(10)))]
    tensors += [("c", "U8", (BLOCK,), whole), ("d", "U8", (10,), bytes(range(10, 20)))]
    write_safetensors(tmp_path / "twice" / "model.safetensors", tensors)
    store.add(tmp_path / "twice", name="twice")
    report = store.pin("twice", raw=True)
    assert report.blocks == 4
    assert report.runs == 2
    assert report.unmapped_bytes == BLOCK
    assert store["twice"].tensor("c").tobytes() == whole


def test_pinned_neighbours_keep_what_they_share(store: Store) -> None:
    """A second pinned snapshot leaves the shared blocks where the first one has them."""
    store.pin("t1", raw=True)
    before = places(store)
    report = store.pin("t2", raw=True)
    assert runs_of(store, "t1") == {"model.safetensors": 1, "config.json": 1}
    shared = {s.block for b in positions(store, "t1").values() for s in b}
    assert all(places(store)[block] == before[block] for block in shared)
    assert 0 < report.blocks_copied < report.blocks
    require_whole(store)


def test_load_maps_what_is_pinned(store: Store) -> None:
    """Snapshot.load of a pinned dense snapshot maps each large tensor from its pack."""

    def is_mapped(array: np.ndarray) -> bool:
        base = array
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)

    large = [name for name, one in store["t1"].load().items() if one.nbytes >= 1 << 16]
    assert large
    assert not any(is_mapped(store["t1"].load()[name]) for name in large)
    store.pin("t1", raw=True)
    loaded = store["t1"].load()
    assert all(is_mapped(loaded[name]) for name in large)
    for name, array in loaded.items():
        assert array.tobytes() == store["t1"].tensor(name).tobytes()


def test_what_cannot_be_pinned(store: Store) -> None:
    """A virtual merge names materialize; without raw, and for what is not pinned, it says so."""
    plan = store.plan(MergeRequest(base="base", experts=["t1"], method="linear", skip=["i"]))
    store.merge(plan, name="later", virtual=True)
    with pytest.raises(BadRequest, match="virtual") as refused:
        store.pin("later", raw=True)
    assert "materialize" in (refused.value.hint or "")
    with pytest.raises(BadRequest, match="raw") as refused:
        store.pin("t1", raw=False)
    assert "raw=True" in (refused.value.hint or "")
    with pytest.raises(BadRequest, match="not pinned"):
        store.unpin("t1")


def test_a_full_disk_is_told_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk lacks room for the copies, pin says how much and writes nothing."""
    monkeypatch.setattr(fs, "free_bytes", lambda path: (8 << 20) + 100_000)
    seen: list[str] = []
    watched = fs.observed(lambda operation: seen.append(operation.path))
    with watched, pytest.raises(StorageFailed, match="disk has") as refused:
        store.pin("t1", raw=True)
    assert "gc" in (refused.value.hint or "")
    assert not any(path.endswith(".pack") for path in seen)
    assert not store.refs()[1].pinned


def test_a_damaged_block_stops_it(store: Store) -> None:
    """Every block is checked when it is read: a flipped bit is an error that names the block."""
    before = places(store)
    block = next(
        position
        for position in positions(store, "t1")["model.safetensors"]
        if position.length > 1000
    )
    place = before[block.block]
    path = Path(store._catalog.packs.where(place.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place.offset + place.stored_length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Corrupt, match=r"match|coded block"):
        store.pin("t1", raw=True)
    assert places(store) == before
    assert store.fsck().garbage == ()
    assert not any((store.path / "tmp").iterdir())


def damage(store: Store, part: bytes) -> None:
    """Flip a byte of a tensor's record."""
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        place = catalog.index.record(transaction, Kind.TENSOR, part)
    assert place is not None
    path = Path(catalog.packs.where(place.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place.offset + 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_neighbour_is_in_nobodys_way(path: Path) -> None:
    """While a record of a pinned snapshot is damaged, others can be pinned and unpinned, and the
    blocks of its other tensors stay where they are."""
    with Store.open(path) as store:
        for name in ("base", "t1"):
            store.pin(name, raw=True)
        mine, others = (store.view(name).tensors for name in ("base", "t1"))
        lost = next(name for name, id in mine.items() if id not in others.values())
        shared = [id for id in mine.values() if id in others.values()]
        kept = {b for id in shared for b in store._catalog.tensor(id).block_ids()}
        damage(store, mine[lost])
        before = places(store)
    assert kept
    with Store.open(path) as store:
        store.pin("t2", raw=True)
        store.unpin("t1")
        assert all(places(store)[block] == before[block] for block in kept)


def test_damage_found_too_late_says_that_it_is_pinned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what was pinned cannot be read back, the error says that it is pinned."""
    from mstore.upkeep.pins import pin as pinning

    def fails(*_: object) -> object:
        raise Corrupt("no", where="block x")

    monkeypatch.setattr(pinning, "runs_in", fails)
    with pytest.raises(Corrupt, match="it is pinned now"):
        store.pin("t1", raw=True)
    assert store.show("t1").pinned


# -- unpin -------------------------------------------------------------------------------------


def test_a_lost_row_names_its_block(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose row goes while unpin runs is named, and nothing is changed."""
    from mstore.upkeep.pins import pin as pinning

    store.pin("t1", raw=True)
    lost: list[BlockId] = []

    def loses(catalog: Catalog, candidates: set[BlockId]) -> set[bytes]:
        # The last of its group: an earlier one would be found by its neighbour's bytes.
        model = positions(store, "t1")["model.safetensors"]
        lost.append([position.block for position in model if position.block in candidates][-1])
        with catalog.index.env.write() as transaction:
            catalog.index.delete_row(transaction, (Kind.BLOCK, lost[0]))
        return set()

    monkeypatch.setattr(pinning, "_referred", loses)
    with pytest.raises(Corrupt) as failed:
        store.unpin("t1")
    assert failed.value.block == lost[0]
    assert store.show("t1").pinned


@pytest.mark.parametrize("collected", [False, True])
def test_unpin_undoes_pin(store: Store, collected: bool) -> None:
    """Every block is coded as add had coded it, differences to the base included."""
    before = codecs(store)
    store.pin("t1", raw=True)
    if collected:
        store.gc()
    report = store.unpin("t1")
    assert codecs(store) == before
    assert report.base == store["base"].id
    assert report.bytes_after < report.bytes_before
    assert report.blocks_kept == 0
    assert not store.show("t1").pinned
    store.gc(dead_share=0.0)
    require_whole(store)


def test_unpin_keeps_to_the_setting(store: Store) -> None:
    """In a store whose setting is raw, pinning only forgets; constants become constants."""
    store.pin("t1", raw=True)
    store.configure("codec", "raw")
    report = store.unpin("t1")
    assert report.blocks_coded == 1
    own = {position.block for blocks in positions(store, "t1").values() for position in blocks}
    assert {codecs(store)[block] for block in own} == {Codec.RAW, Codec.CONSTANT}


def test_shared_blocks_stay_raw_until_the_last_unpin(store: Store) -> None:
    """What another pinned snapshot has stays where that one needs it."""
    before = codecs(store)
    for name in ("t1", "t2"):
        store.pin(name, raw=True)
    assert store.unpin("t2").blocks_kept > 0
    assert runs_of(store, "t1") == {"model.safetensors": 1, "config.json": 1}
    require_whole(store)
    assert store.unpin("t1").blocks_kept == 0
    assert codecs(store) == before
    require_whole(store)


def tuned(store: Store, tmp_path: Path, name: str) -> SnapshotId:
    """A fine-tune of t1, stored as differences to its blocks."""
    files = model_files(7, 1)
    data = bytearray(files["model.safetensors"])
    data[-3000] ^= 1
    data[-40_000] ^= 1
    data[40_000] ^= 1
    source = write_files(tmp_path / name, {"model.safetensors": bytes(data)})
    return store.add(source, name=name, base="t1", threads=1).snapshot


def bases(store: Store) -> set[bytes]:
    return {place.base for place in places(store).values() if any(place.base)}


def test_a_base_is_never_made_a_difference(store: Store, tmp_path: Path) -> None:
    """A block that became the base of a difference while it was pinned is coded without a base."""
    store.pin("t1", raw=True)
    tuned(store, tmp_path, "finer")
    own = {position.block for blocks in positions(store, "t1").values() for position in blocks}
    assert bases(store) & own
    store.unpin("t1")
    assert all(not Codec(codecs(store)[BlockId(base)]).is_delta for base in bases(store))
    assert store.fsck(read_data=True).problems == ()


def test_no_two_differences_in_a_row(store: Store, tmp_path: Path) -> None:
    """Where the base's block is also a block of the snapshot, elsewhere, only one of the two
    becomes a difference."""
    draw = np.random.default_rng(5)
    first = draw.normal(size=BLOCK // 4).astype("f4")
    second, third = first * np.float32(1 + 2**-20), first * np.float32(1 + 2**-19)
    for name, one, other in (("left", first, second), ("right", third, first)):
        shape = (BLOCK // 4,)
        tensors = [("a", "F32", shape, one.tobytes()), ("b", "F32", shape, other.tobytes())]
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
        store.add(tmp_path / name, name=name, base="left" if name == "right" else None)
    assert any(any(place.base) for place in places(store).values())
    store.pin("right", raw=True)
    store.unpin("right")
    assert all(not Codec(codecs(store)[BlockId(base)]).is_delta for base in bases(store))
    assert store["right"].tensor("a").tobytes() == third.tobytes()
    require_whole(store)


def test_an_add_meanwhile_keeps_its_bases(store: Store, tmp_path: Path) -> None:
    """An add that refers to a block while unpin codes it finds the block as it was."""
    store.pin("t1", raw=True)
    added: list[SnapshotId] = []

    def meanwhile(progress: Progress) -> None:
        if progress.done == progress.total and not added:
            with Store.open(store.path) as other:
                added.append(tuned(other, tmp_path, "finer"))

    before = codecs(store)
    report = store.unpin("t1", progress=meanwhile)
    assert added
    assert report.blocks_coded > 0
    after = codecs(store)
    assert report.blocks_coded == sum(after[block] != before[block] for block in before)
    own = {position.block for blocks in positions(store, "t1").values() for position in blocks}
    assert bases(store) & own
    assert all(not Codec(codecs(store)[BlockId(base)]).is_delta for base in bases(store))
    assert store.fsck(read_data=True).problems == ()


def test_an_outdated_place_is_looked_up_again(store: Store) -> None:
    """A reader that found a difference before its block became raw, and its base a difference,
    reads the block where it lies now."""
    own = positions(store, "t1")["model.safetensors"]
    found = store._catalog.locate([position.block for position in own])
    position, place = next((s, p) for s, p in zip(own, found, strict=True) if any(p.base))
    store.pin("t1", raw=True)
    catalog = store._catalog
    with catalog.index.env.write() as transaction:
        base = (0, place.base)
        row = catalog.index.row(transaction, base)
        assert row is not None
        catalog.index.delete_row(transaction, base)
    assert BlockId.of(catalog.read_block(position.block, place)) == position.block
    with catalog.index.env.write() as transaction:
        catalog.index.put_row(transaction, base, row)


# -- the rest of the store ---------------------------------------------------------------------


def test_gc_keeps_runs_and_frees_what_was_replaced(store: Store) -> None:
    """A pack of which only raw runs are needed is copied as it lies, and never coded again."""
    store.configure("reflog_days", 0)
    for name in ("t1", "t2"):
        store.pin(name, raw=True)
    store.remove("t1")
    before = runs_of(store, "t2"), codecs(store)
    assert store.gc(dead_share=0.0).packs_rewritten
    own = {position.block for blocks in positions(store, "t2").values() for position in blocks}
    assert runs_of(store, "t2") == before[0]
    assert {codecs(store)[block] for block in own} == {Codec.RAW}
    assert contents(store, "t2") == model_files(7, 2)
    assert store.fsck(read_data=True).problems == ()


def test_a_pin_keeps_nothing(store: Store) -> None:
    """When the last ref goes, gc takes a pinned snapshot like any other, and the mark with it."""
    store.configure("reflog_days", 0)
    id = store.pin("t1", raw=True).snapshot
    assert [ref.name for ref in store.refs() if ref.pinned] == ["t1"]
    assert store.show("t1").pinned
    assert [one.snapshot for one in store.log() if one.pinned] == [id]
    store.remove("t1")
    assert id in store.gc().snapshots_dropped
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        assert list(catalog.index.keys(transaction, PINNED)) == []


def test_pruning_drops_the_mark(store: Store, tmp_path: Path) -> None:
    """A snapshot whose contents were pruned is no longer pinned, once gc has run."""
    store.configure("reflog_days", 0)
    id = store.pin("t1", raw=True).snapshot
    store.add(tmp_path / "t2", name="t1", base="base")
    store.prune(keep_last=1)
    store.gc()
    assert store.show(id).pruned
    assert not store.show(id).pinned


@pytest.mark.sampled(2)
@pytest.mark.parametrize("collected", [False, True])
def test_reindex_keeps_pins(path: Path, collected: bool) -> None:
    """A new index knows what is pinned, and has the raw copies of it."""
    with Store.open(path) as store:
        store.pin("t1", raw=True)
        store.unpin("t1")
        store.pin("base", raw=True)
        store.pin("t2", raw=True)
        if collected:
            store.gc(dead_share=0.0)
    report = Store.reindex(path)
    assert report.remarks == ()
    with Store.open(path) as store:
        assert [ref.name for ref in store.refs() if ref.pinned] == ["base", "t2"]
        assert store.pin("base", raw=True).blocks_copied == 0
        assert store.pin("t2", raw=True).blocks_copied == 0
        require_whole(store)


def test_a_lost_index_loses_the_mark_only(path: Path) -> None:
    """Without the old index blocks still lie raw; pin copies nothing and sets the mark."""
    with Store.open(path) as store:
        store.pin("t1", raw=True)
    Store.reindex(path, use_old_index=False)
    with Store.open(path) as store:
        assert not store.show("t1").pinned
        assert store.pin("t1", raw=True).blocks_copied == 0
        assert store.show("t1").pinned


def test_copies_of_a_store_are_pinned_as_well(path: Path, tmp_path: Path) -> None:
    """backup and clone keep what is pinned, and where it lies; repair finds nothing to do."""
    with Store.open(path) as store:
        store.backup(tmp_path / "backup")
        store.pin("t1", raw=True)
        store.backup(tmp_path / "backup")
        assert store.fsck(read_data=True).problems == ()
        assert store.repair(read_data=True).healed == ()
    Store.clone(path, tmp_path / "clone")
    for copy in (tmp_path / "backup", tmp_path / "clone"):
        with Store.open(copy) as store:
            assert store.show("t1").pinned
            assert runs_of(store, "t1") == {"model.safetensors": 1, "config.json": 1}
            require_whole(store)


def test_repair_makes_a_pinned_store_whole(path: Path, tmp_path: Path) -> None:
    """A raw block that is damaged is repaired from the checkpoint, and pin mends its run."""
    with Store.open(path) as store:
        store.pin("t1", raw=True)
        store.gc(dead_share=0.0)
        position = positions(store, "t1")["model.safetensors"][1]
        place = places(store)[position.block]
        damaged = Path(store._catalog.packs.where(place.pack))
    damaged.chmod(0o644)
    with damaged.open("r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with Store.open(path) as store:
        store.repair(sources=[tmp_path / "t1", tmp_path / "base"], read_data=True)
        require_whole(store)
        store.pin("t1", raw=True)
        assert runs_of(store, "t1") == {"model.safetensors": 1, "config.json": 1}
        require_whole(store)


def test_sizes_tell_what_is_stored(store: Store) -> None:
    """du counts a pinned snapshot's blocks as raw ones, and as coded ones after unpin."""
    before = store.usage(["t1"])
    store.pin("t1", raw=True)
    raw = {use.codec: use.stored_bytes for use in store.usage(["t1"]).codecs}
    assert raw.get("raw", 0) >= store.show("t1").plain_bytes
    store.unpin("t1")
    assert store.usage(["t1"]).codecs == before.codecs


@pytest.mark.rest
def test_others_work_meanwhile(path: Path, tmp_path: Path) -> None:
    """While one pins and unpins, others add, read and collect: every byte is right, always."""
    over = threading.Event()
    failures: list[Exception] = []

    def forever(work: Callable[[Store, int], object]) -> threading.Thread:
        def run() -> None:
            number = 0
            try:
                with Store.open(path) as store:
                    while not over.is_set():
                        work(store, number)
                        number += 1
            except (MstoreError, AssertionError, OSError) as error:
                failures.append(error)
                over.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def add(store: Store, number: int) -> None:
        source = write_files(tmp_path / f"more{number}", model_files(7, 10 + number))
        base = "t1" if number % 2 else "base"
        while True:
            try:
                store.add(source, name="more", base=base, threads=1)
                break
            except Conflict as error:
                # It found blocks of an earlier "more", which gc removed before it could commit.
                if "were collected while" not in error.what:
                    raise
        shutil.rmtree(source)
        assert contents(store, "more") == model_files(7, 10 + number)

    def read(store: Store, number: int) -> None:
        for at, name in enumerate(NAMES):
            assert contents(store, name) == model_files(7, at)

    def collect(store: Store, number: int) -> None:
        store.gc(reflog_days=0, dead_share=0.0)

    threads = [forever(work) for work in (add, read, collect)]
    try:
        with Store.open(path) as store:
            for _ in range(2):
                for name in ("t1", "t2"):
                    store.pin(name, raw=True)
                for name in ("t1", "t2"):
                    store.unpin(name)
                if over.is_set():
                    break
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    with Store.open(path) as store:
        require_whole(store)


def test_memory_is_bounded_by_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """pin and unpin read groups of a few blocks, never a whole file, however large it is."""
    from mstore.upkeep.pins import pin as pinning
    from mstore.upkeep.pins import positions as positioning

    monkeypatch.setattr(pinning, "GROUP_BYTES", BLOCK)
    monkeypatch.setattr(positioning, "GROUP_BYTES", BLOCK)
    largest: list[int] = []
    read = pinning._read

    def measured(catalog: Catalog, some: list[Position], room: memoryview) -> object:
        largest.append(sum(position.length for position in some))
        return read(catalog, some, room)

    monkeypatch.setattr(pinning, "_read", measured)
    store.pin("t1", raw=True, threads=3)
    assert len(largest) > 1
    assert max(largest) <= BLOCK
    unpin(store._catalog, store["t1"].id, "t1", threads=3)
    require_whole(store)


# -- which blocks to copy ----------------------------------------------------------------------

PACKS = [PackId(bytes([number]) * 32) for number in range(3)]


@st.composite
def files(draw: st.DrawFn) -> tuple[list[Position], list[Location]]:
    """A file of some blocks, and where they lie: at random, or one after the other."""
    found, where = [], []
    offset = draw(st.integers(0, 2)) * 100
    last: Location | None = None
    for number in range(draw(st.integers(1, 12))):
        block = BlockId(bytes([draw(st.integers(0, 9))]) * 32)
        length = 3 * PAGE
        known = next((p for s, p in zip(found, where, strict=True) if s.block == block), None)
        if known is not None:
            place = known
        elif last is not None and draw(st.booleans()):
            place = Location(last.pack, last.offset + length, length, length, last.codec, 1)
        else:
            codec = draw(st.sampled_from([Codec.RAW, Codec.RAW, Codec.FLOATS]))
            start = draw(st.integers(1, 60)) * PAGE + draw(st.sampled_from([0, 0, 7])) + offset
            place = Location(draw(st.sampled_from(PACKS)), start, length, length, codec, 1)
        found.append(Position(block, offset, length, None, number, PLAIN_BYTES))
        where.append(place)
        last, offset = place, offset + length
    return found, where


@given(files(), st.sets(st.integers(0, 9), max_size=3), st.sampled_from([1, 6, 100]))
@settings(max_examples=100)
def test_copying_once_is_enough(
    file: tuple[list[Position], list[Location]], taken: set[int], long_pages: int
) -> None:
    """What is copied is never taken and never copied twice; afterwards each block that is not
    taken lies raw and congruent at its first position, in a run with its neighbours that moved, and
    nothing is left to copy."""
    found, where = file
    fixed = {BlockId(bytes([number]) * 32) for number in taken}
    long_run = long_pages * 3 * PAGE
    chosen = to_copy(found, where, fixed, long_run=long_run)
    moved = [position.block for position in chosen]
    assert len(moved) == len(set(moved))
    assert not fixed & set(moved)
    places: dict[BlockId, Location] = {
        position.block: place for position, place in zip(found, where, strict=True)
    }
    end, pack = 2 * PAGE, PackId(bytes([9]) * 32)
    before: Position | None = None
    for position in chosen:
        if before is None or before.offset + before.length != position.offset:
            end += (position.offset - end) % PAGE
        places[position.block] = Location(pack, end, position.length, position.length, Codec.RAW, 1)
        end += position.length
        before = position
    after = [places[position.block] for position in found]
    own = {position.block: number for number, position in reversed(list(enumerate(found)))}
    for block, number in own.items():
        if block not in fixed:
            assert is_mappable(found[number], after[number])
    for one in range(len(found) - 1):
        pair = found[one].block, found[one + 1].block
        if set(pair) <= set(moved) and [own[block] for block in pair] == [one, one + 1]:
            assert after[one + 1].follows(after[one])
    assert to_copy(found, after, fixed, long_run=long_run) == []


def test_long_runs_stay() -> None:
    """A run that is long enough is not copied, whatever lies beside it."""
    length = 3 * PAGE
    found = [
        Position(BlockId(bytes([n]) * 32), n * length, length, None, n, PLAIN_BYTES)
        for n in range(6)
    ]
    where = [Location(PACKS[0], PAGE + n * length, length, length, Codec.RAW, 1) for n in range(6)]
    where[4] = Location(PACKS[0], 0, 10, length, Codec.FLOATS, 2)
    assert to_copy(found, where, set(), long_run=4 * length) == found[4:]
    assert to_copy(found, where, set(), long_run=5 * length) == found
