"""LMDB files read without LMDB: the same rows, and every damage that matters told in words."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb_page import PAGE

from mstore.blocks.lmdb_pages import LmdbFile
from mstore.terms.errors import Corrupt

NAMES = (b"blocks", b"big", b"empty")


def fill(path: Path, seed: int, rounds: int = 8) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """An environment with rows put and deleted over several transactions, some of many pages."""
    draw = random.Random(seed)
    env = lmdb.open(str(path), map_size=1 << 30, max_dbs=8)
    databases = {name: env.open_db(name) for name in NAMES}
    keys: list[bytes] = []
    for round_ in range(rounds):
        with env.begin(write=True) as transaction:
            for _ in range(draw.randrange(400)):
                keys.append(draw.randbytes(32))
                value = draw.randbytes(draw.choice((22, 54)))
                transaction.put(keys[-1], value, db=databases[b"blocks"])
            transaction.put(
                b"%d" % round_, draw.randbytes(draw.randrange(30_000)), db=databases[b"big"]
            )
            for key in draw.sample(keys, len(keys) // 3):
                transaction.delete(key, db=databases[b"blocks"])
    with env.begin() as transaction:
        rows = {
            name: [(bytes(key), bytes(value)) for key, value in transaction.cursor(db=database)]
            for name, database in databases.items()
        }
    env.close()
    return rows


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_it_reads_what_lmdb_reads(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whatever was put and deleted, both see the same rows in the same order, and no fault."""
    path = tmp_path_factory.mktemp("env")
    rows = fill(path, seed)
    told: list[str] = []
    seen: dict[bytes, list[tuple[bytes, bytes]]] = {name: [] for name in NAMES}
    with LmdbFile(path / "data.mdb") as file:
        names = file.check(told.append, lambda name, key, value: seen[name].append((key, value)))
        trees = file.databases(told.append)
        again = {name: list(file.rows(name, trees[name], told.append)) for name in NAMES}
    assert told == []
    assert names == set(NAMES)
    assert seen == again == rows


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damage_of_pages_ends_in_anything_but_words(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes may be wrong: the answer is a list of faults, or Corrupt, in bounded time."""
    path = tmp_path_factory.mktemp("env")
    fill(path, 1, rounds=3)
    whole = bytearray((path / "data.mdb").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        page = data.draw(st.integers(0, len(whole) // PAGE - 1))
        at = page * PAGE + data.draw(st.integers(0, 160))
        whole[at] = data.draw(st.integers(0, 255))
    (path / "data.mdb").write_bytes(whole)
    told: list[str] = []
    try:
        with LmdbFile(path / "data.mdb") as file:
            file.check(told.append, lambda *_: None)
            for name, tree in file.databases(told.append).items():
                list(file.rows(name, tree, told.append))
    except Corrupt:
        return
    assert all(isinstance(word, str) for word in told)


def test_a_free_page_that_is_in_use_is_told(tmp_path: Path) -> None:
    """A page that is used and listed as free would be written over: it is told."""
    fill(tmp_path, 2)
    whole = bytearray((tmp_path / "data.mdb").read_bytes())
    metas = [struct.unpack_from("<Q", whole, n * PAGE + 144)[0] for n in (0, 1)]
    at = metas.index(max(metas)) * PAGE
    free_root = struct.unpack_from("<Q", whole, at + 40 + 40)[0]
    main_root = struct.unpack_from("<Q", whole, at + 88 + 40)[0]
    page = free_root * PAGE
    (node,) = struct.unpack_from("<H", whole, page + 16)
    # Node head, a key of eight bytes, the count, and then the first free page.
    struct.pack_into("<Q", whole, page + node + 8 + 8 + 8, main_root)
    (tmp_path / "data.mdb").write_bytes(whole)
    told: list[str] = []
    with LmdbFile(tmp_path / "data.mdb") as file:
        file.check(told.append, lambda *_: None)
    assert any(f"page {main_root} has two owners" in word for word in told)


@pytest.mark.parametrize("data", [b"", b"\0" * 8192, b"\xff" * 40_000, b"short"])
def test_what_is_no_lmdb_file_is_refused(tmp_path: Path, data: bytes) -> None:
    """A file without a head of LMDB's is damaged, whatever it is."""
    (tmp_path / "data.mdb").write_bytes(data)
    with pytest.raises(Corrupt, match="damaged index"):
        LmdbFile(tmp_path / "data.mdb")


def test_a_page_is_read_for_one_owner(tmp_path: Path) -> None:
    """Rows that share their pages are read once, so that no file makes a reader go on and on."""
    env = lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=8)
    with env.begin(write=True) as transaction:
        big = env.open_db(b"big", txn=transaction)
        for number in range(9):
            transaction.put(b"key %d" % number, bytes(20_000), db=big)
    env.close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    places = [data.index(b"key %d" % number) + 5 for number in range(9)]
    for place in places[1:]:
        data[place : place + 8] = data[places[0] : places[0] + 8]
    (tmp_path / "data.mdb").write_bytes(data)
    told: list[str] = []
    with LmdbFile(tmp_path / "data.mdb") as file:
        tree = file.databases(told.append)[b"big"]
        assert told == []
        assert list(file.rows(b"big", tree, told.append)) == [(b"key 0", bytes(20_000))]
    assert len(told) == 8
    assert all("has two owners" in line for line in told)


def test_it_knows_when_the_file_has_moved_on(tmp_path: Path) -> None:
    """A commit by somebody else shows, so that a reader can look again."""
    fill(tmp_path, 3)
    with LmdbFile(tmp_path / "data.mdb") as file:
        assert not file.moved()
        env = lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=8)
        with env.begin(write=True) as transaction:
            transaction.put(b"k", b"v", db=env.open_db(b"empty", txn=transaction))
        env.close()
        assert file.moved()
