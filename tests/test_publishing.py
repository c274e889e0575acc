"""New packs: they end when they are full, and go where they were not published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstore.blocks import codecs
from mstore.blocks.codecs import Policy
from mstore.blocks.packs import pack_path, read_table
from mstore.errors import StorageFailed
from mstore.ids import BlockId
from mstore.store.catalog import Catalog
from mstore.store.publishing import NewPacks

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


def test_a_full_pack_is_followed_by_another(catalog: Catalog, tmp_path: Path) -> None:
    """A pack takes what comes until it has reached its size; all that was appended is published,
    each pack under its own name, and each is told of when it is sealed."""
    told = []
    packs = NewPacks(catalog, tmp_path, prefix="r", max_pack=30_000, sealing=told.append)
    ids = fill(packs, 7)
    packs.publish()
    assert packs.sealed == told
    assert len(told) == 3
    found = []
    for pack in told:
        id, entries = read_table(pack_path(catalog.layout.packs, pack.id))
        assert id == pack.id
        found += [entry.id for entry in entries]
    assert sorted(found) == sorted(map(bytes, ids))
    assert not list(tmp_path.glob("*.pack"))


@pytest.mark.parametrize("kept", [False, True])
def test_what_no_commit_follows_is_taken_back(catalog: Catalog, tmp_path: Path, kept: bool) -> None:
    """Published packs go again, unless a commit began that may stand; one that was begun is
    abandoned; and both are as good as nothing the second time."""
    packs = NewPacks(catalog, tmp_path, prefix="r")
    fill(packs, 1)
    packs.publish()
    fill(packs, 1)
    if kept:
        packs.keep()
    for _ in range(2):
        packs.abandon()
        packs.take_back()
    assert len(list(catalog.layout.packs.glob("*/*.pack"))) == kept
    assert not list(tmp_path.glob("*.pack"))


def test_half_of_the_names_are_taken_back(catalog: Catalog, tmp_path: Path) -> None:
    """Where one of several packs cannot be renamed, those before it are taken back."""
    packs = NewPacks(catalog, tmp_path, prefix="r", max_pack=10_000)
    fill(packs, 3)
    packs.seal()
    packs.sealed[1].path.unlink()
    with pytest.raises(StorageFailed):
        packs.publish()
    packs.take_back()
    assert not list(catalog.layout.packs.glob("*/*.pack"))
