"""The record cache is bounded by bytes, and records are read together without losing an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstore.blocks.packs import Kind
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.store.remembered import RecordCache
from mstore.store.transaction import Transaction
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import TensorId

BLOCK = 64 << 10


def key(number: int) -> bytes:
    return bytes([Kind.TENSOR]) + number.to_bytes(32, "big")


def empty(number: int) -> Tensor:
    return Tensor("F32", (number, 0), 0, b"")


def test_what_was_asked_for_last_stays() -> None:
    """Beyond its bytes the cache lets go of what nobody asked for longest, and of no more."""
    cache = RecordCache(3 * (512 + 100))
    for number in range(3):
        cache.put([(key(number), empty(number), 100)])
    assert cache.get(key(0)) == empty(0)
    cache.put([(key(3), empty(3), 100)])
    found = cache.get_many([key(number) for number in range(4)])
    assert found == {key(number): empty(number) for number in (0, 2, 3)}


def test_small_records_of_a_whole_checkpoint_stay() -> None:
    """Twenty thousand small records of five checkpoints fit: a second pass reads none again."""
    cache = RecordCache()
    cache.put((key(number), empty(number), 60) for number in range(100_000))
    assert len(cache) == 100_000


def test_a_record_put_twice_counts_once() -> None:
    """Putting a record again does not use up room that others have."""
    cache = RecordCache(2 * (512 + 100))
    cache.put([(key(0), empty(0), 100)])
    for _ in range(5):
        cache.put([(key(1), empty(1), 100)])
    assert len(cache) == 2


def test_a_large_record_is_kept_alone() -> None:
    """One record of more bytes than the cache may have is kept until the next one comes."""
    cache = RecordCache(1000)
    cache.put([(key(0), empty(0), 10_000)])
    assert cache.get(key(0)) is not None
    cache.put([(key(1), empty(1), 10)])
    assert cache.get(key(0)) is None
    assert cache.get(key(1)) is not None


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[TensorId]]:
    """A store of 500 records, and their ids."""
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    with Transaction(catalog, "test") as transaction:
        ids = [TensorId(transaction.put_record(empty(number))) for number in range(500)]
        transaction.commit()
    catalog.close()
    return tmp_path / "store", ids


def test_many_records_take_few_reads(
    stored: tuple[Path, list[TensorId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that lie together are read together, and asked for again are not read at all."""
    path, ids = stored
    catalog = Catalog.open(path)
    reads = 0
    read = catalog.packs.read

    def counted(*arguments: object) -> bytes:
        nonlocal reads
        reads += 1
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog.packs, "read", counted)
    assert catalog.tensors(ids[::-1]) == [empty(number) for number in range(499, -1, -1)]
    assert reads == 1
    assert catalog.tensors(ids) == [empty(number) for number in range(500)]
    assert reads == 1
    catalog.close()


def test_a_damaged_record_among_many_is_named(stored: tuple[Path, list[TensorId]]) -> None:
    """A flipped bit in one of many records that are read together: its id is in the error."""
    path, ids = stored
    catalog = Catalog.open(path)
    with catalog.index.env.read() as transaction:
        place = catalog.index.record(transaction, Kind.TENSOR, ids[123])
    assert place is not None
    pack = Path(catalog.packs.where(place.pack))
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    data[place.offset + 3] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt) as caught:
        catalog.tensors(ids)
    assert str(ids[123]) in str(caught.value.where)
    assert len(catalog.tensors(ids[:123] + ids[124:])) == 499
    catalog.close()


def test_a_missing_record_among_many_is_not_found(stored: tuple[Path, list[TensorId]]) -> None:
    """An id that nothing has, in the middle of many, is NotFound and named."""
    path, ids = stored
    catalog = Catalog.open(path)
    nobody = TensorId.of(b"nobody")
    with pytest.raises(NotFound) as caught:
        catalog.tensors([*ids[:200], nobody, *ids[200:]])
    assert str(nobody) in str(caught.value.where)
    catalog.close()
