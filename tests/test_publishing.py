"""New packs: they end when they are full, and go where they were not published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mstore import fs
from mstore.blocks import codecs
from mstore.blocks.codecs import Policy
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import read_footer
from mstore.store import pack_list
from mstore.store.catalog import Catalog
from mstore.store.publishing import NewPacks
from mstore.terms.errors import StorageFailed
from mstore.terms.ids import BlockId

BLOCK = 1 << 16


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    yield catalog
    catalog.close()


def fill(packs: NewPacks, count: int) -> list[BlockId]:
    """Append so many blocks of 10,000 bytes."""
    ids = []
    for number in range(count):
        data = os.urandom(10_000)
        ids.append(BlockId.of(data))
        encoded = codecs.encode(data, codecs.PLAIN_BYTES, Policy.RAW)
        packs.writer.append_encoded(ids[-1], encoded, "file", 10_000 * number)
    return ids


def publish(catalog: Catalog, packs: NewPacks) -> None:
    """Publish packs, and the rows of all that is in them."""
    with packs.committing() as transaction:
        for pack in packs.sealed:
            catalog.index.insert_pack(transaction, pack)


def test_a_full_pack_is_followed_by_another(catalog: Catalog, tmp_path: Path) -> None:
    """A pack takes what comes until it has reached its size; all that was appended is published,
    each pack under its own name."""
    packs = NewPacks(catalog, tmp_path, prefix="r", max_pack=30_000)
    ids = fill(packs, 7)
    publish(catalog, packs)
    assert len(packs.sealed) == 3
    assert packs.bytes_written == sum(pack.size for pack in packs.sealed)
    found = []
    for pack in packs.sealed:
        footer = read_footer(Path(catalog.packs.where(pack.id)))
        assert footer.id == pack.id
        found += [entry.id for entry in footer.entries]
    assert sorted(found) == sorted(map(bytes, ids))
    assert not list(tmp_path.glob("*.pack"))


@pytest.mark.parametrize("kept", [False, True])
def test_what_no_commit_follows_is_taken_back(
    catalog: Catalog, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs have their names while the commit is prepared. If that fails they go again, and stay
    where the commit itself fails, which may stand."""
    packs = NewPacks(catalog, tmp_path, prefix="r")
    fill(packs, 1)
    commit = catalog.index.env.write

    @contextmanager
    def failing() -> Iterator[IndexTransaction]:
        with commit() as transaction:
            yield transaction
            raise StorageFailed("the disk is full")

    if kept:
        monkeypatch.setattr(catalog.index.env, "write", failing)

    def prepare() -> None:
        assert list(catalog.layout.packs.glob("*/*.pack"))
        # A pack without a row is a running writer's only while that writer holds the lock.
        assert not fs.LockFile(catalog.layout.lock).acquire(blocking=False)
        if not kept:
            raise StorageFailed("the block is gone")

    with pytest.raises(StorageFailed), packs.committing():
        prepare()
    assert len(list(catalog.layout.packs.glob("*/*.pack"))) == kept
    assert not list(tmp_path.glob("*.pack"))
    # Its line stays: it tells of the past.
    assert pack_list.read(catalog.layout).since.keys() == {packs.sealed[0].id}
    assert catalog.doubt() is None


def test_half_of_the_names_are_taken_back(catalog: Catalog, tmp_path: Path) -> None:
    """Where one of several packs cannot be renamed, those before it are taken back."""
    packs = NewPacks(catalog, tmp_path, prefix="r", max_pack=10_000)
    fill(packs, 3)
    packs.seal()
    packs.sealed[1].path.unlink()
    with pytest.raises(StorageFailed):
        publish(catalog, packs)
    assert not list(catalog.layout.packs.glob("*/*.pack"))


def test_a_pack_has_a_line_before_it_has_its_name(catalog: Catalog, tmp_path: Path) -> None:
    """The list is written, and its directory synced, before the first pack is renamed."""
    packs = NewPacks(catalog, tmp_path, prefix="r")
    fill(packs, 1)
    packs.seal()
    done: list[tuple[str, str]] = []

    def note(operation: fs.Operation) -> None:
        done.append((operation.kind, Path(operation.target or operation.path).parent.name))

    with fs.observed(note):
        publish(catalog, packs)
    named = done.index(("rename", packs.sealed[0].id.hex()[:2]))
    listed = done.index(("rename", "refs"))
    assert listed < named
    assert ("syncdir", "store") in done[listed:named]
