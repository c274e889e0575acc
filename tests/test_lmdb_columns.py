"""Rows gathered from LMDB's pages: those that a cursor reads, or none."""

from __future__ import annotations

import mmap
import random
from threading import Thread
from typing import Any

import numpy as np
import pytest
from lmdb_page import PAGE

from mstore.blocks import location_arrays
from mstore.blocks.index import Index
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location_arrays import LOST_BASE, NO_BASE, Pages, Unexpected
from mstore.blocks.packs import Kind
from mstore.blocks.schema import BLOCKS, RECORDS
from mstore.terms.errors import Corrupt


def fill(index: Index, draw: random.Random, rounds: int = 6) -> dict[bytes, bytes]:
    """Put and delete rows over several commits: of blocks, some deltas, and of other tables."""
    rows: dict[bytes, bytes] = {}
    for _ in range(rounds):
        with index.env.write() as transaction:
            for _ in range(draw.randrange(1, 700)):
                base = draw.choice([b"", draw.randbytes(32), *list(rows)[:3]])
                rows[draw.randbytes(32)] = draw.randbytes(22) + base
            for key, row in rows.items():
                transaction.put(key, row, db=index.db(BLOCKS.name))
                transaction.put(b"\1" + key, row[:22], db=index.db(RECORDS.name))
            for key in draw.sample(sorted(rows), len(rows) // 3):
                del rows[key]
                transaction.delete(key, db=index.db(BLOCKS.name))
    return rows


def gathered(index: Index, transaction: IndexTransaction) -> dict[bytes, bytes]:
    """All rows of blocks, by `Pages`."""
    pages = Pages(index, transaction)
    keys = [one.tobytes() for some in pages.ids() for one in some]
    rows = []
    for heads, named, joined in pages.rows():
        bases = iter([joined[at : at + 32] for at in range(0, len(joined), 32)])
        for head, is_named in zip(heads, named.tolist(), strict=True):
            rows.append(head.tobytes() + (next(bases) if is_named else b""))
    return dict(zip(keys, rows, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_pages_have_the_rows_that_a_cursor_reads(
    index: Index, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was put and deleted, the same rows come in the same order; none from no row."""
    with index.env.read() as transaction:
        assert gathered(index, transaction) == {}
    rows = fill(index, random.Random(seed))
    with index.env.read() as transaction:
        found = gathered(index, transaction)
        assert list(found.items()) == sorted(rows.items())
        # Without the other way.
        monkeypatch.setattr(location_arrays, "CursorRows", None)
        table = location_arrays.read(index, transaction)[Kind.BLOCK]
    ids = sorted(rows)
    places = {id: number for number, id in enumerate(ids)}
    bases = [rows[id][22:] for id in ids]
    assert [table.id(number) for number in range(len(table))] == ids
    assert table.base.tolist() == [
        places.get(base, LOST_BASE) if base else NO_BASE for base in bases
    ]


@pytest.mark.parametrize("pages", [2, 1 << 12])
def test_lengths_of_many_blocks_come_from_all_rows(
    index: Index, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are those of the rows, in the order asked, repeated ids too; others stay as they
    were, and so do all where the pages are not as expected.
    """
    monkeypatch.setattr(location_arrays, "_PAGES", pages)
    draw = random.Random(7)
    rows = fill(index, draw)
    ids = [*rows, draw.randbytes(32), *list(rows)[:9], bytes(32), b"\xff" * 32]
    draw.shuffle(ids)
    asked = np.frombuffer(b"".join(ids), np.dtype((np.void, 32)))
    wanted = [int.from_bytes(rows[id][12:16], "big") if id in rows else -1 for id in ids]
    with index.env.read() as transaction:
        lengths = np.full(len(ids), -1)
        location_arrays.fill_lengths(index, transaction, asked, lengths)
        assert lengths.tolist() == wanted
        monkeypatch.setattr(Environment, "mapped", refuse)
        unknown = np.full(len(ids), -1)
        location_arrays.fill_lengths(index, transaction, asked, unknown)
    assert set(unknown.tolist()) == {-1}


def test_a_reader_sees_its_own_commit(index: Index) -> None:
    """Rows that another thread commits meanwhile change nothing in an open read transaction."""
    rows = fill(index, random.Random(1))
    with index.env.read() as transaction:
        pages = Pages(index, transaction)
        before = [ids.tobytes() for ids in pages.ids()]
        writer = Thread(target=fill, args=(index, random.Random(2), 8))
        writer.start()
        writer.join()
        assert [ids.tobytes() for ids in pages.ids()] == before
        assert gathered(index, transaction) == rows
    with index.env.read() as transaction:
        assert gathered(index, transaction) != rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_a_changed_byte_is_unexpected_or_a_row_like_others(
    index: Index, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever byte of the file changes, nothing but Unexpected is raised, and no read is wild."""
    draw = random.Random(seed)
    rows = fill(index, draw)
    whole = Environment.mapped(index.env)[:]
    outcomes = set()

    def changed(self: Environment) -> Any:
        held = mmap.mmap(-1, len(whole))
        held[:] = whole
        for _ in range(draw.choice((1, 1, 8))):
            # Heads of pages and of nodes as often as anything else.
            page = draw.randrange(len(whole) // PAGE) * PAGE
            held[page + draw.choice((draw.randrange(80), draw.randrange(PAGE)))] = draw.randrange(
                256
            )
        return held

    monkeypatch.setattr(Environment, "mapped", changed)
    with index.env.read() as transaction:
        for _ in range(150):
            try:
                outcomes.add(len(gathered(index, transaction)) <= len(rows))
            except Unexpected:
                outcomes.add(False)
        assert outcomes == {True, False}


def test_what_is_unexpected_is_read_with_a_cursor(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a map, or with keys out of order, arrays are the same."""
    fill(index, random.Random(3))

    def read() -> tuple[bytes, bytes, list[int]]:
        with index.env.read() as transaction:
            table = location_arrays.read(index, transaction)[Kind.BLOCK]
        ids = b"".join(table.id(number) for number in range(len(table)))
        return ids, table.heads.tobytes(), table.base.tolist()

    expected = read()
    whole = Environment.mapped(index.env)
    with monkeypatch.context() as patch:
        patch.setattr(Environment, "mapped", refuse)
        assert read() == expected
    with monkeypatch.context() as patch:
        held = mmap.mmap(-1, len(whole))
        held[:] = whole[:]
        with index.env.read() as transaction:
            first = next(Pages(index, transaction).ids())
        at = held.find(first[1].tobytes())
        while at >= 0:
            held[at : at + 32] = bytes(32)
            at = held.find(first[1].tobytes())
        patch.setattr(Environment, "mapped", lambda self: held)
        assert read() == expected


def refuse(self: Environment) -> Any:
    raise OSError("no address space")


def test_a_replaced_file_is_not_mapped(index: Index) -> None:
    """The map is of the file that LMDB has open, or there is none."""
    data = index.path / "data.mdb"
    copy = data.read_bytes()
    with index.env.read() as transaction:
        index.env.mapped()
        data.rename(data.with_name("old"))
        data.write_bytes(copy)
        with pytest.raises(FileNotFoundError):
            index.env.mapped()
        assert gathered(index, transaction) == {}
    data.with_name("old").replace(data)


def test_rows_of_another_form_are_corrupt(index: Index) -> None:
    """A row of another length is Unexpected here, and Corrupt for who reads arrays."""
    fill(index, random.Random(4))
    with index.env.write() as transaction:
        transaction.put(b"k" * 32, b"r" * 23, db=index.db(BLOCKS.name))
    with index.env.read() as transaction:
        with pytest.raises(Unexpected):
            gathered(index, transaction)
        with pytest.raises(Corrupt):
            location_arrays.read(index, transaction)


def test_ids_that_are_no_hashes_are_found(index: Index) -> None:
    """A table whose ids begin alike, too many for a bucket, finds each of them and no other."""
    ids = [b"same" + bytes(4) + number.to_bytes(24, "big") for number in range(0, 600, 2)]
    ids += [number.to_bytes(8, "big") + bytes(24) for number in range(1, 400)]
    table = location_arrays.LocationTable(
        bytearray(b"".join(sorted(ids))), bytearray(22 * len(ids))
    )
    assert table.is_ascending()
    assert table.find(b"".join(sorted(ids))).tolist() == list(range(len(ids)))
    absent = b"same" + bytes(27) + b"\1"
    assert table.find(absent + bytes(32) + b"\xff" * 32).tolist() == [-1, -1, -1]
    wrong = location_arrays.LocationTable(bytearray(b"".join(ids)), bytearray(22 * len(ids)))
    assert not wrong.is_ascending()
    twice = location_arrays.LocationTable(bytearray(ids[0] * 2), bytearray(44))
    assert not twice.is_ascending()
    assert np.array_equal(twice.find(ids[0]), [0])
