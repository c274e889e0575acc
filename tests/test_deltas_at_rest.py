"""Blocks that are stored as differences to others: read back, and never further than one step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.numpy import save_file

from mstore.api import Store
from mstore.blocks.codecs import Codec, Elements, Encoded, Policy, encode
from mstore.blocks.location import Location
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import NO_BASE, PackGone, read_footer
from mstore.blocks.reader import BlockReader, Meter
from mstore.store.catalog import Catalog
from mstore.store.transaction import Transaction
from mstore.terms.errors import Conflict, Corrupt, MstoreError
from mstore.terms.ids import BlockId

BLOCK = 1 << 16
FLOATS = Elements(4, True)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty store with small blocks."""
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    yield catalog
    catalog.close()


def block(seed: int, length: int = BLOCK) -> bytes:
    """Weights that compress alone, and differ from those of the next seed in their last places."""
    values = np.random.default_rng(0).standard_normal(length // 4).astype(np.float32)
    return (values.view(np.int32) + seed).tobytes()


def delta(data: bytes, base: bytes) -> Encoded:
    """The block as a difference, whatever it saves."""
    found = encode(data, FLOATS, Policy.DENSE, (BlockId.of(base), base))
    assert found.codec is Codec.DELTA
    return found


def put(catalog: Catalog, *blocks: tuple[bytes, Encoded]) -> list[BlockId]:
    """Publish blocks as they are encoded, in one pack."""
    ids = [BlockId.of(data) for data, _ in blocks]
    with Transaction(catalog, "test") as transaction:
        for number, (id, (_, encoded)) in enumerate(zip(ids, blocks, strict=True)):
            transaction.put_block(id, encoded, "file", number * BLOCK)
        transaction.commit()
    return ids


def stored(data: bytes, policy: Policy = Policy.RAW) -> tuple[bytes, Encoded]:
    """A block by itself."""
    return data, encode(data, FLOATS, policy)


@pytest.mark.parametrize("policy", [Policy.RAW, Policy.DENSE])
def test_a_delta_is_read_through_its_base(catalog: Catalog, policy: Policy) -> None:
    """In the same pack or another one, whichever way it is asked for; the base costs no meter."""
    base, one, two = block(0), block(1), block(2)
    put(catalog, stored(base, policy), (one, delta(one, base)))
    put(catalog, (two, delta(two, base)))
    for data in (base, one, two):
        id = BlockId.of(data)
        location = catalog.locate([id])[0]
        meter = Meter("expert", location.stored_length)
        assert bytes(catalog.read_block(id, meter=meter)) == data
        assert meter.total == location.stored_length
        target = bytearray(BLOCK)
        catalog.read_block_into(id, location, memoryview(target))
        assert target == data
        assert (location.base == NO_BASE) == (data is base)


Forge = Callable[..., Location]


@pytest.fixture
def forged(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Forge:
    """`forged(id, ...)`: where a block lies, with some of that changed, as the index says now."""

    def forge(id: BlockId, **changes: object) -> Location:
        lie = structs.replace(Catalog.locate(catalog, [id])[0], **changes)
        monkeypatch.setattr(catalog, "locate", lambda blocks: [lie])
        return lie

    return forge


def test_a_location_that_is_out_of_date_is_looked_up(catalog: Catalog) -> None:
    """A block that was stored in another form since it was looked up is read where it is now."""
    base, one = block(0), block(1)
    (_, id) = put(catalog, stored(base), (one, delta(one, base)))
    before = structs.replace(catalog.locate([id])[0], base=bytes(range(32)))
    assert bytes(catalog.read_block(id, before)) == one


def test_a_base_that_is_a_delta_is_refused(catalog: Catalog, forged: Forge) -> None:
    """One step and no more: an index that says otherwise is not followed, and both are named."""
    base, one, two = block(0), block(1), block(2)
    put(catalog, stored(base), (one, delta(one, base)), (two, delta(two, base)))
    first, second = BlockId.of(one), BlockId.of(two)
    for lie in (bytes(first), bytes(second)):
        with pytest.raises(Corrupt, match=BlockId(lie).hex()) as refusal:
            catalog.read_block(second, forged(second, base=lie))
        assert refusal.value.where == f"block {second}"


def test_a_missing_base_is_named(catalog: Catalog, forged: Forge) -> None:
    """Corrupt says which block cannot be read and which one it lacks."""
    base, one = block(0), block(1)
    (_, id) = put(catalog, stored(base), (one, delta(one, base)))
    nowhere = bytes(range(32))
    with pytest.raises(Corrupt, match=nowhere.hex()) as refusal:
        catalog.read_block(id, forged(id, base=nowhere))
    assert refusal.value.where == f"block {id}"
    with pytest.raises(Corrupt):
        catalog.read_block(id, forged(id, base=NO_BASE))


def test_another_base_never_gives_other_bytes(catalog: Catalog, forged: Forge) -> None:
    """A wrong base of the right length, or one of another length: Corrupt."""
    base, one, short = block(0), block(1), block(0, BLOCK // 2)
    _, id, _, small = put(
        catalog, stored(base), (one, delta(one, base)), stored(block(9)), stored(short)
    )
    for other in (BlockId.of(block(9)), small):
        with pytest.raises(Corrupt) as refusal:
            catalog.read_block(id, forged(id, base=bytes(other)))
        assert refusal.value.where == f"block {id}"


def test_a_damaged_base_is_told_from_a_damaged_delta(catalog: Catalog) -> None:
    """Where the base's bytes are wrong, the error of a block that needs it names the base."""
    base, one = block(0), block(1)
    first, second = put(catalog, stored(base), (one, delta(one, base)))
    location = catalog.locate([first])[0]
    path = Path(catalog.packs.where(location.pack))
    os.chmod(path, 0o600)
    with path.open("r+b") as file:
        file.seek(location.offset + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt, match=first.hex()) as refusal:
        catalog.read_block(second)
    assert refusal.value.where == f"block {second}"


def test_a_block_that_moved_is_found_again(catalog: Catalog) -> None:
    """Whoever holds an old location of a block, of its base or of a record asks the index again."""
    base, one = block(0), block(1)
    first, second = put(catalog, stored(base), (one, delta(one, base)))
    gone = type(catalog.locate([first])[0].pack)(bytes(range(32)))
    old = structs.replace(catalog.locate([second])[0], pack=gone)
    assert bytes(catalog.read_block(second, old)) == one
    target = bytearray(BLOCK)
    moved = structs.replace(catalog.locate([first])[0], pack=gone)
    catalog.read_block_into(first, moved, memoryview(target))
    assert target == base
    # Where the index knows no better, the pack is missing, and that is Corrupt.
    location = catalog.locate([first])[0]
    path = Path(catalog.packs.where(location.pack))
    catalog.packs.close()
    catalog.packs = PackFiles(catalog.layout.packs)
    catalog._reader = BlockReader(catalog.packs, catalog.block_size)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(PackGone) as refusal:
        catalog.read_block(second)
    assert isinstance(refusal.value, Corrupt)
    path.with_suffix(".away").rename(path)
    assert bytes(catalog.read_block(second)) == one


def test_deltas_stand_in_file_order(catalog: Catalog, tmp_path: Path) -> None:
    """Deltas that are neighbours in their file touch in the pack, also beside constants."""
    base = block(0)
    put(catalog, stored(base))
    blocks = [block(seed) for seed in range(1, 7)]
    encoded = [(data, delta(data, base)) for data in blocks]
    constant = bytes(BLOCK)
    ids = put(
        catalog, *encoded[:3], (constant, encode(constant, FLOATS, Policy.DENSE)), *encoded[3:]
    )
    places = catalog.locate([id for id in ids if id != BlockId.of(constant)])
    for before, after in itertools.pairwise(places):
        assert before.offset + before.stored_length == after.offset
    entries = read_footer(Path(catalog.packs.where(places[0].pack))).entries
    assert {entry.base for entry in entries if entry.codec == Codec.DELTA} == {BlockId.of(base)}


def test_a_commit_sees_to_its_bases(catalog: Catalog) -> None:
    """A base that is not there, or that another writer stored as a delta meanwhile: Conflict."""
    base, one, two = block(0), block(1), block(2)
    with pytest.raises(Conflict):
        put(catalog, (one, delta(one, base)))
    put(catalog, stored(base))
    with Transaction(catalog, "slow") as transaction:
        # `one` is no delta here, and `two` is the difference to it ...
        for data, encoded in (stored(one), (two, delta(two, one))):
            transaction.put_block(BlockId.of(data), encoded, "file", 0)
        # ... but whoever comes first says how a block is stored.
        put(catalog, (one, delta(one, base)))
        with pytest.raises(Conflict):
            transaction.commit()
    assert catalog.has_blocks([BlockId.of(two)]) == [False]
    assert bytes(catalog.read_block(BlockId.of(one))) == one


# -- adding ------------------------------------------------------------------------------------


def codecs_of(store: Store) -> set[int]:
    """Every codec in use."""
    with store._catalog.index.env.read() as transaction:
        return {place.codec for _, place in store._catalog.index.blocks(transaction)}


def checkpoint(path: Path, seed: int) -> Path:
    """Tensors of several kinds; those of another seed are a fine-tune."""
    rng, step = np.random.default_rng(7), np.random.default_rng(seed)
    tensors = {}
    for number, kind in enumerate((np.float16, np.float32, np.float64)):
        values = rng.standard_normal((50, 1000))
        tensors[f"w{number}"] = (values + 1e-4 * step.standard_normal(values.shape)).astype(kind)
    tensors["ids"] = rng.integers(0, 1000, 30_000) + step.integers(0, 2, 30_000)
    tensors["zeros"] = np.zeros(50_000, np.int8)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "notes.txt").write_text(f"{seed}, and words, and words, " * 5000)
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", list(Policy))
def test_a_family_comes_back_under_any_policy(tmp_path: Path, policy: Policy) -> None:
    """A base, its fine-tune and a fine-tune of that one are read byte for byte; a chain of bases
    is no chain of deltas."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec=policy) as store:
        paths = {}
        for seed, (name, of) in enumerate((("a", None), ("b", "a"), ("c", "b"))):
            paths[name] = checkpoint(tmp_path / name, seed)
            store.add(paths[name], name=name, base=of)
        for name, path in paths.items():
            for file in path.iterdir():
                assert store[name].read(file.name) == file.read_bytes()
        assert store.fsck(read_data=True).problems == ()
        found = codecs_of(store)
        if policy is Policy.RAW:
            assert found == {Codec.RAW, Codec.CONSTANT}
        else:
            assert found >= {Codec.CONSTANT, Codec.ZSTD, Codec.FLOATS, Codec.DELTA}
        catalog = store._catalog
        with catalog.index.env.read() as transaction:
            for _, place in list(catalog.index.blocks(transaction)):
                if Codec(place.codec).is_delta:
                    base = catalog.index.block(transaction, BlockId(place.base))
                    assert base is not None
                    assert not Codec(base.codec).is_delta


def test_add_may_choose_another_policy(tmp_path: Path) -> None:
    """One add is coded as it asks, and the store stays as it is set."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(checkpoint(tmp_path / "a", 1), name="a", codec="dense")
        assert Codec.FLOATS in codecs_of(store)
        before = codecs_of(store)
        assert store.config["codec"] == "raw"
        store.add(checkpoint(tmp_path / "b", 2), name="b", base="a")
        assert codecs_of(store) == before | {Codec.RAW}


def test_only_like_is_coded_against_like(tmp_path: Path) -> None:
    """A tensor whose dtype is not the base's is stored by itself."""
    values = np.random.default_rng(1).standard_normal((100, 1000))
    for name, kind in (("base", np.float32), ("cast", np.float16)):
        (tmp_path / name).mkdir()
        save_file({"w": values.astype(kind)}, tmp_path / name / "model.safetensors")
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="dense") as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "cast", name="cast", base="base")
        assert Codec.DELTA not in codecs_of(store)
        plain = (tmp_path / "cast" / "model.safetensors").read_bytes()
        assert store["cast"].read("model.safetensors") == plain


@settings(max_examples=20)
@given(reads=st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 70_000)), max_size=20))
def test_views_read_deltas(dense: Store, reads: list[tuple[int, int]]) -> None:
    """Any range of a delta-coded file through cache and prefetch is the file's."""
    view = dense.view("b")
    plain = b"".join(view.stream("model.safetensors"))
    for offset, length in reads:
        view.prefetch("model.safetensors", offset, length)
        found = view.read("model.safetensors", offset, length)
        assert found == plain[offset : offset + length]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A base and its fine-tune, as small as they get."""
    root = tmp_path_factory.mktemp("dense")
    with Store.init(root / "store", block_size=BLOCK, codec="dense") as store:
        store.add(checkpoint(root / "a", 0), name="a")
        store.add(checkpoint(root / "b", 1), name="b", base="a")
        yield store


def test_flipped_bytes_of_deltas_are_found(dense: Store, tmp_path: Path) -> None:
    """Any byte of a delta's payload: the very block, or an error."""
    catalog = dense._catalog
    with catalog.index.env.read() as transaction:
        rows = [row for row in catalog.index.blocks(transaction) if row[1].base != NO_BASE]
    id, place = rows[0]
    path = Path(catalog.packs.where(place.pack))
    os.chmod(path, 0o600)
    plain = bytes(catalog.read_block(id))
    for at in range(0, place.stored_length, max(1, place.stored_length // 50)):
        with path.open("r+b") as file:
            file.seek(place.offset + at)
            byte = file.read(1)
            for other in (bytes([byte[0] ^ 0x10]), byte):
                file.seek(place.offset + at)
                file.write(other)
                file.flush()
                try:
                    assert bytes(catalog.read_block(id)) == plain
                except MstoreError as error:
                    assert other != byte
                    assert id.hex() in str(error)  # noqa: PT017
