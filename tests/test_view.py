"""The snapshot view: files at any offset and tensors by name, checked against their ids."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import families
import ml_dtypes
import numpy as np
import pytest
from checkpoints import BITS, every_dtype_checkpoint
from families import BLOCK
from hypothesis import given
from hypothesis import strategies as st

from mstore import BlockId, MergeRequest, SnapshotId, Store
from mstore.blocks.codecs import PLAIN_BYTES, Codec, Policy, encode
from mstore.blocks.location import Location
from mstore.blocks.pack_files import PackFiles
from mstore.store.block_cache import BlockCache, Extent, VirtualBlock
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import File, Manifest, Part
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor
from mstore.store.transaction import Transaction
from mstore.store.view import SnapshotView
from mstore.terms.errors import Corrupt, Incompatible, NotFound
from mstore.terms.ids import Buffer, PackId, VirtualId

FAMILY = families.layered(rows=60)


@dataclass
class Place:
    """A checkpoint on disk and in a store, with a cache too small for all of it."""

    store: Store
    files: dict[str, bytes]
    small: SnapshotView


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("odd")
    path = every_dtype_checkpoint(root / "odd")
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        report = store.add(path, name="odd")
        cache = BlockCache(store._catalog, limit=2 * BLOCK + 100)
        yield Place(
            store, families.contents(path), SnapshotView(store._catalog, report.snapshot, cache)
        )


# -- files ---------------------------------------------------------------------------------------


def test_files_are_byte_exact(place: Place) -> None:
    """Every file, read at once or streamed, is what was added; sizes and order are known ahead."""
    view = place.store.view("odd")
    assert view.files == {path: len(content) for path, content in place.files.items()}
    assert list(view.files) == sorted(place.files)
    for path, content in place.files.items():
        assert view.read(path, 0, len(content) + 10) == content
        assert b"".join(view.stream(path)) == content
        assert place.store["odd"].read(path) == content


names = st.sampled_from(
    ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "empty.txt"]
)


@given(names, st.integers(0, 1_200_000), st.integers(0, 300_000))
def test_reads_anywhere(place: Place, path: str, offset: int, size: int) -> None:
    """Any range of any file is that range of the bytes added, also past the end, while blocks are
    thrown out of the cache and read again in part.
    """
    content = place.files[path]
    for start in (offset, min(offset, max(0, len(content) - 7))):
        wanted = content[start : start + size]
        assert place.small.read(path, start, size) == wanted
        extents = list(place.small.extents(path, start, size))
        assert sum(extent.length for extent in extents) == len(wanted)
        assert all(extent.length > 0 for extent in extents)
        place.small.prefetch(path, start, size)


def test_many_threads_read_the_same(place: Place) -> None:
    """Threads that share a view and its small cache get the same bytes as one alone."""
    path = "model-00002-of-00002.safetensors"
    content = place.files[path]

    def read(start: int) -> bool:
        return place.small.read(path, start, 90_001) == content[start : start + 90_001]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [n * 7919 % len(content) for n in range(400)]))


@dataclass
class Slow:
    """Reads blocks of a catalog, notes which, and holds each back until it is let go."""

    catalog: Catalog
    go: Event
    read: list[BlockId]
    fails: bool = False
    began: Event = field(default_factory=Event)

    def whole(self, block: BlockId, place: Location) -> Buffer:
        self._wait(block)
        return Catalog.read_block(self.catalog, block, place)

    def there(self, block: BlockId, place: Location) -> Buffer:
        self._wait(block)
        return Catalog.read_block_at(self.catalog, block, place)

    def _wait(self, block: BlockId) -> None:
        self.read.append(block)
        self.began.set()
        assert self.go.wait(60)
        if self.fails:
            raise Corrupt("no such luck", where=str(block))


@pytest.fixture
def slow(place: Place, monkeypatch: pytest.MonkeyPatch) -> Slow:
    catalog = place.store._catalog
    found = Slow(catalog, Event(), [])
    monkeypatch.setattr(catalog, "read_block", found.whole)
    monkeypatch.setattr(catalog, "read_block_at", found.there)
    return found


def _blocks(view: SnapshotView, path: str) -> list[Extent]:
    found = view.extents(path, 0, view.files[path])
    return [one for one in found if isinstance(one.block, BlockId)]


def test_a_block_is_read_once(place: Place, slow: Slow) -> None:
    """Threads that need a block at the same time wait for the one that reads it."""
    cache = BlockCache(place.store._catalog)
    (extent, *_) = _blocks(place.small, "nested/deeper/blob.bin")
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(cache.read, extent) for _ in range(6)]
        slow.go.set()
        (found,) = {bytes(one.result()) for one in waiting}
    assert found == place.files["nested/deeper/blob.bin"][: extent.length]
    assert slow.read == [extent.block]


def test_a_failure_is_of_those_who_wait(place: Place, slow: Slow) -> None:
    """A block that cannot be read fails for all who wait for it; the next reader tries again."""
    cache = BlockCache(place.store._catalog)
    (extent, *_) = _blocks(place.small, "nested/deeper/blob.bin")
    slow.fails = True
    slow.go.set()
    cache.prepare([(BlockId(extent.block), *place.store._catalog.locate([extent.block]))])
    for _ in range(2):
        with pytest.raises(Corrupt, match="no such luck"):
            cache.read(extent)
    slow.fails = False
    assert bytes(cache.read(extent)) == place.files["nested/deeper/blob.bin"][: extent.length]


def test_blocks_are_prepared(place: Place, slow: Slow) -> None:
    """What is prepared is read by other threads, once, and is there for the reader."""
    cache = BlockCache(place.store._catalog)
    path = "model-00002-of-00002.safetensors"
    extents = _blocks(place.small, path)
    wanted = list(dict.fromkeys(BlockId(one.block) for one in extents))
    places = list(zip(wanted, place.store._catalog.locate(wanted), strict=True))
    for _ in range(2):
        cache.prepare(places)
    # Nobody has asked for a block yet.
    assert slow.began.wait(60)
    slow.go.set()
    found = b"".join(bytes(cache.read(one)) for one in extents)
    assert found == place.files[path]
    assert sorted(slow.read) == sorted(wanted)
    cache.prepare(places)
    assert len(slow.read) == len(wanted)


@given(st.integers(0, 1_200_000), st.integers(1, 300_000))
def test_where_a_tensor_ends(place: Place, offset: int, size: int) -> None:
    """Bytes in which a tensor begins that goes on after them continue to its end; others do not."""
    view = place.small
    (file,) = (one for one in view.manifest.files if one.path == view.tensor_files()[-1])
    end = min(offset + size, file.size)
    if offset >= end:
        return
    bounds = list(
        itertools.pairwise(itertools.accumulate((p.nbytes for p in file.parts), initial=0))
    )
    reaching = [stop for start, stop in bounds if offset <= start < end < stop]
    found = view.continues_to(file.path, offset, end - offset)
    assert found == (reaching[0] if reaching else end)


def test_neighbours_are_read_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw blocks that follow each other in a pack, once checked, are one read of the pack; and
    what was checked is given without another read, as long as there is room for it."""
    catalog = place.store._catalog
    view = SnapshotView(catalog, place.small.id, BlockCache(catalog, limit=1))
    path = "model-00002-of-00002.safetensors"
    content = bytearray(place.files[path])
    assert view.read_into(path, 0, memoryview(content)) == len(content)
    runs, end = 0, (PackId(bytes(32)), 0)
    for extent in view.physical_extents(path):
        at = extent.location
        assert at is not None
        if at.codec == Codec.RAW:
            runs += (at.pack, at.offset) != end
            end = (at.pack, at.offset + extent.length)
    reads = []
    read = PackFiles.read_scattered

    def counted(self: PackFiles, *arguments: Any) -> None:
        reads.append(arguments)
        read(self, *arguments)

    monkeypatch.setattr(PackFiles, "read_scattered", counted)
    again = bytearray(len(content))
    assert view.read_into(path, 0, memoryview(again)) == len(content)
    assert bytes(again) == place.files[path]
    assert len(reads) == runs < len(list(view.extents(path, 0, len(content))))
    del reads[:]
    roomy = SnapshotView(catalog, place.small.id, BlockCache(catalog))
    for _ in range(2):
        assert b"".join(roomy.pieces(path, 0, len(content))) == place.files[path]
    assert reads == []


@pytest.mark.parametrize("always", [False, True])
def test_a_block_is_checked_once_or_always(place: Place, slow: Slow, always: bool) -> None:
    """A raw block is checked once, and each time that it is not in memory where that is wanted."""
    cache = BlockCache(place.store._catalog, limit=1, check_always=always)
    slow.go.set()
    extents = _blocks(place.small, "nested/deeper/blob.bin")[:2]
    for _ in range(3):
        for extent in extents:
            cache.read(extent)
    assert len(slow.read) == (6 if always else 2)


def test_a_pack_that_is_exchanged_is_checked_again(tmp_path: Path) -> None:
    """A block that was right in one file is not taken for right in another one of that name."""
    source = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=1)
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        # What was checked stays for a while: here it does not.
        cache = BlockCache(store._catalog, limit=1)
        view = SnapshotView(store._catalog, store.add(source, name="a").snapshot, cache)
        (path,) = view.tensor_files()
        content = (source / path).read_bytes()
        assert view.read(path, 0, len(content)) == content
        (pack,) = {one.location.pack for one in view.physical_extents(path) if one.location}
        old = Path(store._catalog.packs.where(pack))
        data = bytearray(old.read_bytes())
        right = tmp_path / "right"
        right.write_bytes(data)
        for place in range(8192, len(data) - 8192, BLOCK // 2):
            data[place] ^= 1
        wrong = tmp_path / "wrong"
        wrong.write_bytes(data)
        wrong.rename(old)
        target = bytearray(len(content))
        for _ in range(2):
            with pytest.raises(Corrupt):
                view.read_into(path, 0, memoryview(target))
        right.rename(old)
        assert view.read_into(path, 0, memoryview(target)) == len(content)
        assert target == content


def test_preparing_keeps_within_the_cache(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is decoded ahead than the cache can keep for several readers; without threads,
    nothing is."""
    catalog = slow.catalog
    slow.go.set()
    coded = [BlockId(bytes([n]) * 32) for n in range(40)]
    place = Location(PackId(bytes(32)), 4096, 100, BLOCK, Codec.FLOATS, 2)
    cache = BlockCache(catalog, limit=16 * BLOCK)
    begun: list[BlockId] = []
    monkeypatch.setattr(cache, "_fill", lambda block, location: begun.append(block))
    cache.prepare([(block, place) for block in coded])
    assert cache._pool is not None
    cache._pool.shutdown()
    assert begun == coded[:2]
    # As an interpreter that may start no more threads.
    cache.prepare([(block, place) for block in coded])


def test_a_block_that_is_too_short_is_corrupt(place: Place) -> None:
    """A piece past the end of a raw block is never what follows it in the pack."""
    cache = BlockCache(place.store._catalog)
    (extent, *_) = _blocks(place.small, "nested/deeper/blob.bin")
    beyond = Extent(extent.block, extent.length - 1, 2)
    with pytest.raises(Corrupt, match="not as long as its place"):
        cache.read(beyond)
    with pytest.raises(Corrupt, match="not as long as its place"):
        cache.read_into([extent, beyond], memoryview(bytearray(extent.length + 2)))


def test_what_is_not_there(place: Place) -> None:
    """An unknown file or tensor is NotFound by name, before a first piece; prefetch stays quiet."""
    view = place.store.view("odd")
    for ask in (
        lambda: view.read("nothing.txt", 0, 1),
        lambda: view.tensor("nothing.txt"),
        lambda: view.record("nothing.txt"),
        lambda: view.require("nothing.txt"),
        lambda: place.store.read_file("odd", "nothing.txt"),
    ):
        with pytest.raises(NotFound) as refused:
            ask()
        assert refused.value.where == "nothing.txt"
    view.prefetch("nothing.txt", 0, 100)


def test_what_is_read_ahead_may_be_missing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ahead that is not stored is an error for its reader, and not before."""

    def missing(blocks: Iterable[BlockId]) -> list[Location]:
        raise Corrupt("the index does not have this block")

    view = place.store.view("odd")
    monkeypatch.setattr(place.store._catalog, "locate", missing)
    view.prefetch("model-00002-of-00002.safetensors", 0, 1_000_000)


# -- tensors -------------------------------------------------------------------------------------


def test_tensors_are_the_arrays(tmp_path: Path) -> None:
    """Tensors come back as read-only arrays of their dtype and shape, bit for bit."""
    path = families.write_checkpoint(tmp_path / "a", FAMILY.base, shards=3)
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(path, name="a")
        snapshot = store["a"]
        found = {name: snapshot.tensor(name) for name in snapshot.tensor_names()}
        assert families.differences(found, FAMILY.base) == []
        assert found["model.norm.weight"].dtype == ml_dtypes.bfloat16
        with pytest.raises(ValueError, match="read-only"):
            found["model.norm.weight"][0] = 1


def test_every_dtype_has_an_array_or_says_no(place: Place) -> None:
    """All dtypes of whole bytes are arrays over the stored bytes; sub-byte ones are refused."""
    view = place.store.view("odd")
    arrays = 0
    for dtype, width in BITS.items():
        name = f"z.{dtype.lower()}"
        if width % 8:
            with pytest.raises(Incompatible, match=dtype):
                view.tensor(name)
            continue
        array = view.tensor(name)
        assert array.shape == (4, 6)
        assert array.itemsize * 8 == width
        record = view.record(name)
        stored = b"".join(place.store._catalog.read_block(b) for b in record.block_ids())
        assert array.tobytes() == stored
        arrays += 1
    assert arrays > 15
    assert view.tensor("scalar").shape == ()
    assert view.tensor("a.empty.middle").shape == (4, 0, 7)


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[tuple[Store, BlockId]]:
    """A store in which one bit of the second block of the tensor `w` has flipped."""
    array = np.random.default_rng(1).standard_normal(BLOCK).astype(np.float32)
    other = array + np.float32(1)
    families.write_checkpoint(tmp_path / "a", {"w": array})
    families.write_checkpoint(tmp_path / "b", {"w": other})
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(tmp_path / "b", name="b")
        store.add(tmp_path / "a", name="a")
        block = store.view("a").record("w").block(1)
        location = store._catalog.locate([block])[0]
        assert location.codec == Codec.RAW
        path = Path(store._catalog.packs.where(location.pack))
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(location.offset + 12345)
            byte = file.read(1)[0]
            file.seek(location.offset + 12345)
            file.write(bytes([byte ^ 4]))
        yield store, block


def test_a_flipped_bit_is_never_returned(damaged: tuple[Store, BlockId], tmp_path: Path) -> None:
    """One flipped bit in a pack: every way to those bytes raises Corrupt that names the block, and
    every other byte can still be read.
    """
    store, block = damaged
    path = "model.safetensors"
    view = store.view("a")
    start = next(
        offset
        for offset in range(0, view.files[path], 1000)
        if [e.block for e in view.extents(path, offset, 1)] == [block]
    )
    for ask in (
        lambda: view.read(path, start, 1),
        lambda: view.read(path, 0, view.files[path]),
        lambda: list(view.stream(path)),
        lambda: view.tensor("w"),
        lambda: store.checkout("a", tmp_path / "out"),
        lambda: store.diff("b", "a"),
        lambda: store.plan(MergeRequest(base="b", experts=["a"], method="linear")),
    ):
        with pytest.raises(Corrupt) as found:
            ask()
        assert str(found.value.where).endswith(f":model.safetensors, tensor w, block {block}")
        assert "fsck" in (found.value.hint or "")
    assert not (tmp_path / "out").exists()
    assert len(view.read(path, 0, 1000)) == 1000
    assert store.view("b").tensor("w").shape == (BLOCK,)
    problems = store.fsck(read_data=True).problems
    assert any(str(block) in f"{problem.where} {problem.what}" for problem in problems)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_flipped_bit_stops_a_merge(
    method: str, threads: int, damaged: tuple[Store, BlockId]
) -> None:
    """A merge that comes to a damaged block fails with its name, whatever else is under way."""
    store, block = damaged
    plan = store.plan(MergeRequest(base="b", experts=["b"], method="linear"), allow_noop=True)
    assert plan.full_expert_bytes == 0
    plan = store.plan(MergeRequest(base="b", experts=["a"], method="dare_linear", analyze=False))
    if method == "ties":
        # Statistics from another store of the same content: this one cannot take them.
        with Store.init(store.path.parent / "sound", block_size=BLOCK, codec="raw") as sound:
            for name in ("b", "a"):
                base = "b" if name == "a" else None
                sound.add(store.path.parent / name, name=name, base=base)
            ask = sound.plan(
                MergeRequest(base="b", experts=["a"], method="ties", parameters={"density": 0.5})
            )
            plan = store.import_plan(sound.export_plan(str(ask.plan)))
    before = store.refs()
    with pytest.raises(Corrupt) as found:
        store.merge(plan, name="m", threads=threads)
    assert str(found.value.where).endswith(f", tensor w, block {block}")
    assert store.refs() == before
    assert list((store.path / "tmp").iterdir()) == []


def test_a_pack_that_is_cut_or_gone(damaged: tuple[Store, BlockId]) -> None:
    """A truncated or missing pack is Corrupt and named; it is not an operating system's error."""
    store, block = damaged
    pack = Path(store._catalog.packs.where(store._catalog.locate([block])[0].pack))
    os.truncate(pack, 8192)
    with pytest.raises(Corrupt, match="ends too early") as found:
        store.view("a").tensor("w")
    assert found.value.where == str(pack)
    path = store.path
    store.close()
    pack.unlink()
    with Store.open(path) as again, pytest.raises(Corrupt, match="missing") as found:
        again.view("a").tensor("w")
    assert found.value.where == str(pack)


@pytest.mark.parametrize("nbytes", [9, 11])
def test_a_block_in_the_wrong_place(nbytes: int, tmp_path: Path) -> None:
    """A manifest from a stranger, whose lengths are not its blocks': Corrupt, no made-up bytes."""
    content = b"ten bytes!"
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        catalog = store._catalog
        block = BlockId.of(content)
        tensor = Tensor("U8", (nbytes,), nbytes, block)
        head = Tensor(BYTES, (0,), 0, b"")
        with Transaction(catalog, "test") as transaction:
            transaction.put_block(block, encode(content, PLAIN_BYTES, Policy.RAW), "f", 0)
            parts = (
                Part(None, transaction.put_record(head), 0),
                Part("w", transaction.put_record(tensor), nbytes),
            )
            manifest = Manifest((File("f.safetensors", 1, nbytes, parts),))
            record = SnapshotRecord(
                manifest=transaction.put_record(manifest),
                parents=(),
                made="add",
                origin=None,
                author="",
                plan=None,
                coverage=None,
                message="",
                time_ns=0,
                tool="test",
            )
            transaction.commit(snapshots=[record])
        view = store.view(SnapshotId(record.id()))
        for ask in (lambda: view.tensor("w"), lambda: list(view.stream("f.safetensors"))):
            with pytest.raises(Corrupt) as found:
                ask()
            assert str(found.value.where).endswith(f":f.safetensors, tensor w, block {block}")
        if nbytes > len(content):
            with pytest.raises(Corrupt):
                view.read("f.safetensors", 0, nbytes)


# -- virtual blocks ------------------------------------------------------------------------------


class Watched:
    """Computes by what the store has for that, and notes what it was asked to begin."""

    def __init__(self, store: Store, ahead: int = 3) -> None:
        self._real = store._computing()
        self.ahead = ahead
        self.begun: list[tuple[VirtualId, range]] = []
        self.failure: Exception | None = None

    def place(self, block: VirtualBlock) -> BlockId | None:
        return self._real.place(block)

    def group(self, block: VirtualBlock) -> range:
        return self._real.group(block)

    def submit(self, tensor: VirtualId, group: range) -> Future[list[Buffer]]:
        self.begun.append((tensor, group))
        if self.failure is None:
            return self._real.submit(tensor, group)
        future: Future[list[Buffer]] = Future()
        future.set_exception(self.failure)
        return future


@pytest.fixture
def virtual(tmp_path: Path) -> Iterator[Store]:
    """A store with a virtual merge `m` of one tensor of 12 whole blocks, and the real one."""
    draw = np.random.default_rng(3)
    arrays = [draw.standard_normal(12 * BLOCK // 4).astype(np.float32) for _ in range(3)]
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        for name, array in zip(("base", "a", "b"), arrays, strict=True):
            families.write_checkpoint(tmp_path / name, {"w": array})
            base = None if name == "base" else "base"
            store.add(tmp_path / name, name=name, base=base)
        plan = store.plan(MergeRequest(base="base", experts=["a", "b"], method="task_arithmetic"))
        store.merge(plan, name="m", virtual=True)
        store.merge(plan, name="real")
        yield store


def test_records_are_read_together_to_count_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file takes at rest is told without a read for each tensor, virtual ones too."""
    rows = np.arange(1, 1 + BLOCK // 8, dtype=np.float32)
    arrays = {f"w{n}": rows + np.float32(n) for n in range(40)}
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        for name, grown in (("base", 0), ("a", 1)):
            moved = {key: rows * np.float32(1 + grown) for key, rows in arrays.items()}
            families.write_checkpoint(tmp_path / name, moved)
            store.add(tmp_path / name, name=name, base=None if name == "base" else "base")
        request = MergeRequest(base="base", experts={"a": 0.5}, method="task_arithmetic")
        store.merge(store.plan(request), name="m", virtual=True)
    with Store.open(tmp_path / "store") as store:
        views = [store.view(name) for name in ("a", "m")]
        alone: list[object] = []
        monkeypatch.setattr(store._catalog, "record_bytes", lambda *one: alone.append(one))
        stored, computed = (view.stored_bytes("model.safetensors") for view in views)
    assert not alone
    assert computed < stored


def test_a_stream_computes_ahead(virtual: Store) -> None:
    """A stream has a few groups under way and no more, begins each once, and ends with the real
    merge's bytes; one that is given up begins nothing else."""
    watched = Watched(virtual)
    cache = BlockCache(virtual._catalog, computing=lambda: watched)
    view = SnapshotView(virtual._catalog, virtual["m"].id, cache)
    pieces = []
    for number, piece in enumerate(view.stream("model.safetensors")):
        pieces.append(piece)
        assert len(watched.begun) <= number + watched.ahead
    assert b"".join(pieces) == b"".join(virtual.read_file("real", "model.safetensors"))
    assert [group for _, group in watched.begun] == [range(n, n + 1) for n in range(12)]
    watched.begun.clear()
    stream = view.stream("model.safetensors")
    next(stream)
    next(stream)
    stream.close()
    assert 0 < len(watched.begun) <= 2 + watched.ahead


def test_a_block_is_computed_once_while_it_is_kept(virtual: Store) -> None:
    """Reads of one block, also from many threads at once, begin it once, until it is thrown out."""
    watched = Watched(virtual)
    cache = BlockCache(virtual._catalog, limit=2 * BLOCK, computing=lambda: watched)
    view = SnapshotView(virtual._catalog, virtual["m"].id, cache)
    path = "model.safetensors"
    data = virtual["real"].read(path)
    start = len(data) - 3 * BLOCK
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: view.read(path, start + n, 10), range(200)))
    assert found == [data[start + n : start + n + 10] for n in range(200)]
    assert [group for _, group in watched.begun] == [range(9, 10)]
    view.read(path, 0, 4 * BLOCK)
    before = len(watched.begun)
    assert view.read(path, start, 10) == found[0]
    assert len(watched.begun) == before + 1


def test_prefetch_begins_to_compute(virtual: Store) -> None:
    """What was prefetched is not begun again by its reader; a failure is the reader's to hear, and
    is tried again."""
    watched = Watched(virtual)
    cache = BlockCache(virtual._catalog, computing=lambda: watched)
    view = SnapshotView(virtual._catalog, virtual["m"].id, cache)
    path = "model.safetensors"
    view.prefetch(path, 0, 3 * BLOCK)
    begun = len(watched.begun)
    assert begun >= 3
    wanted = virtual["real"].read(path)
    assert view.read(path, 0, 2 * BLOCK) == wanted[: 2 * BLOCK]
    view.prefetch(path, 0, 2 * BLOCK)
    assert len(watched.begun) == begun
    end = len(wanted) - 10
    watched.failure = Corrupt("broken", where="here")
    view.prefetch(path, end, 10)
    with pytest.raises(Corrupt, match="broken"):
        view.read(path, end, 10)
    watched.failure = None
    assert view.read(path, end, 10) == wanted[end:]


def test_physical_extents_are_where_the_bytes_lie(place: Place) -> None:
    """The pieces of every file follow each other and cover it, and the pack has a raw block's
    bytes where they say."""
    view, packs, raw = place.small, place.small._catalog.packs, 0
    for path, size in view.files.items():
        end = 0
        for extent in view.physical_extents(path):
            assert extent.offset == end
            end += extent.length
            at = extent.location
            assert at is not None
            if at.codec == Codec.RAW:
                raw += 1
                found = packs.read(at.pack, at.offset + extent.start, extent.length)
                assert found == place.files[path][extent.offset : end]
        assert end == size
        part = view.physical_extents(path, size // 3, size // 4)
        assert sum(extent.length for extent in part) == size // 4
        assert not part or part[0].offset == size // 3
    assert raw
