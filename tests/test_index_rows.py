"""The tables of the index: each owner writes the documented bytes and reads back what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.blocks import location_arrays, location_rows, pack_numbers, row_batches
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_numbers import Condemned, NamedPack
from mstore.blocks.packs import NO_BASE, Entry, Kind, SealedPack
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, ManifestId, PackId, PlanId, SignatureId, SnapshotId
from mstore.objects.snapshot import BASE, PREVIOUS, Parent, SnapshotRecord
from mstore.store import backup_row, plan_rows, pruned_rows, refs, signature_rows, snapshot_rows
from mstore.store.backup_row import BackupRow
from mstore.store.plan_rows import Source, Sources
from mstore.store.refs import BRANCH, LogRow, Ref

SIZES = st.integers(0, 2**32 - 1)
ENTRIES = st.builds(
    Entry,
    st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    st.sampled_from([int(kind) for kind in Kind]),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    SIZES,
    SIZES,
    st.sampled_from([NO_BASE, b"b" * ID_BYTES]),
)
FIRST, SECOND = SnapshotId(b"\xab\xc1" + bytes(30)), SnapshotId(b"\xab\xc2" + bytes(30))


def snapshot(manifest: int, time_ns: int, *parents: Parent) -> SnapshotRecord:
    """A snapshot record."""
    content = bytes([manifest]) * ID_BYTES
    return SnapshotRecord(content, parents, "add", None, "", None, None, "", time_ns, "")


# -- locations -------------------------------------------------------------------------------------


@given(entry=ENTRIES, number=SIZES, other=SIZES)
def test_a_location_row_says_what_its_entry_says(entry: Entry, number: int, other: int) -> None:
    """A row has the pack's number and every field of the entry; only `moved` changes the number."""
    row = location_rows.encode(number, entry)
    told = (entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width)
    base = None if entry.base == NO_BASE else entry.base
    assert location_rows.fields(row) == (number, *told, entry.base)
    assert location_rows.pack_number(row) == number
    assert location_rows.raw_length(row) == entry.raw_length
    assert (location_rows.codec(row), location_rows.width(row)) == (entry.codec, entry.width)
    assert location_rows.base_of(row) == base
    assert location_rows.stored_lengths([row, row]).tolist() == [entry.stored_length] * 2
    assert location_rows.moved(row, other) == location_rows.encode(other, entry)


def test_arrays_and_batches_have_the_rows_of_the_index(index: Index) -> None:
    """A row comes out of the arrays, the batches and the index as the same bytes, base included."""
    entries = (
        Entry(b"a" * 32, Kind.BLOCK, 0, 2, 4096, 10, 20),
        Entry(b"b" * 32, Kind.BLOCK, 3, 2, 1 << 40, 11, 20, b"a" * 32),
        Entry(b"c" * 32, Kind.PLAN, 0, 1, 5000, 77, 77),
    )
    with index.env.write() as rows:
        index.insert_pack(rows, SealedPack(PackId(b"p" * 32), Path("nowhere"), 4096, entries))
    with index.env.read() as rows:
        keys = [(Kind(entry.kind), entry.id) for entry in entries]
        stored = [index.row(rows, key) for key in keys]
        tables = location_arrays.read(index, rows)
        assert index.has_records(rows, keys[2:]) == set(keys[2:])
        assert index.has_records(rows, [(Kind.TENSOR, b"c" * 32)]) == set()
        located = index.locations(rows, [row for row in stored if row is not None])
        assert located == [index.location(rows, row) for row in stored if row is not None]
        assert index.record_spans(rows, Kind.PLAN, [b"c" * 32, b"d" * 32]) == [
            (PackId(b"p" * 32), 5000, 77, 0, b"c" * 32)
        ]
    assert [*map(tables[Kind.BLOCK].row, (0, 1)), tables[Kind.PLAN].row(0)] == stored
    assert np.array_equal(tables[Kind.BLOCK].base, [location_arrays.NO_BASE, 0])
    batches = list(row_batches.locations(index))
    assert [one for batch in batches for one in batch] == [
        (kind, id, row) for (kind, id), row in zip(keys, stored, strict=True)
    ]


def test_a_row_is_deleted_only_while_it_is_the_same(index: Index) -> None:
    """`delete_row_if` leaves a row that changed since it was seen."""
    entry = Entry(b"a" * 32, Kind.BLOCK, 0, 2, 4096, 10, 20)
    seen, now = location_rows.encode(1, entry), location_rows.encode(2, entry)
    key = (Kind.BLOCK, entry.id)
    with index.env.write() as rows:
        index.put_row(rows, key, now)
        assert not index.delete_row_if(rows, key, seen)
        assert index.row(rows, key) == now
        assert index.delete_row_if(rows, key, now)
        assert index.row(rows, key) is None


def test_packs_keep_their_numbers_until_they_are_condemned(index: Index) -> None:
    """A named pack is found both ways; a condemned one only among the condemned, with leases."""
    pack = NamedPack(7, PackId(b"p" * 32), 1 << 33)
    leases = ("0123456789abcdef", "fedcba9876543210")
    with index.env.write() as rows:
        index.name_packs(rows, [pack])
        number = (7).to_bytes(4, "big")
        assert index.get(rows, "packs", number) == pack.id + (1 << 33).to_bytes(8, "big")
        assert index.get(rows, "pack_ids", pack.id) == number
        assert (index.pack_number(rows, pack.id), index.numbered_pack(rows, 7)) == (7, pack)
        assert list(index.named_packs(rows)) == [pack]
        index.condemn(rows, pack.id, leases)
        assert index.get(rows, "condemned", number) == (
            pack.id + (1 << 33).to_bytes(8, "big") + "".join(leases).encode()
        )
        assert index.condemned(rows) == [Condemned(7, pack.id, 1 << 33, leases)]
        assert index.pack_number(rows, pack.id) is None
        assert not index.has_number(rows, 7)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_pack_row_is_parsed_back(number: int, size: int) -> None:
    """What is written of a pack is read again."""
    pack = NamedPack(number, PackId(b"p" * 32), size)
    key = pack_numbers.encode_number(number)
    assert pack_numbers.decode_pack(key, pack_numbers.encode_pack(pack)) == pack


# -- snapshots -------------------------------------------------------------------------------------


def test_snapshots_are_listed_by_content_parent_and_prefix(index: Index) -> None:
    """The rows of snapshots answer each question, and hold the documented bytes."""
    first = snapshot(1, 5)
    child = snapshot(1, 9, Parent(PREVIOUS, first.id()), Parent(BASE, first.id()))
    with index.env.write() as rows:
        for record in (first, child):
            snapshot_rows.insert(index, rows, record)
        content = ManifestId(b"\1" * 32)
        assert index.get(rows, "snapshots", child.id()) == content + (9).to_bytes(8, "big")
        assert set(index.keys(rows, "edges")) == {
            b"m" + content + first.id(),
            b"m" + content + child.id(),
            b"p" + first.id() + child.id() + b"previous",
            b"p" + first.id() + child.id() + b"base",
        }
        assert set(snapshot_rows.ids(index, rows)) == {first.id(), child.id()}
        assert snapshot_rows.children(index, rows, first.id()) == {child.id()}
        assert set(snapshot_rows.with_content(index, rows, content)) == {first.id(), child.id()}
        assert snapshot_rows.times(index, rows, [child.id(), FIRST]) == {child.id(): 9}
        for id in (first.id(), child.id()):
            assert snapshot_rows.with_prefix(index, rows, id.hex()[:20]) == [id]
        assert snapshot_rows.agree(index, rows, child.id(), child)
        assert not snapshot_rows.agree(index, rows, child.id(), snapshot(1, 8))
        snapshot_rows.unlist(index, rows, first.id())
        assert snapshot_rows.children(index, rows, first.id()) == {child.id()}
        assert snapshot_rows.with_content(index, rows, content) == [child.id()]
        snapshot_rows.remove(index, rows, [child.id()])
        assert (index.count(rows, "snapshots"), index.count(rows, "edges")) == (0, 0)


def test_marks_and_signatures_belong_to_one_snapshot(index: Index) -> None:
    """Removing those of one snapshot leaves those of the next, whose id begins alike."""
    with index.env.write() as rows:
        pruned_rows.mark(index, rows, [FIRST, SECOND], 5)
        pruned_rows.mark(index, rows, [SECOND], 6)
        value = index.get(rows, "pruned", SECOND)
        assert value == (5).to_bytes(8, "big")
        assert pruned_rows.parse(SECOND, value) == (SECOND, 5)
        pruned_rows.unmark(index, rows, FIRST)
        assert pruned_rows.ids(index, rows) == {SECOND}
        assert not pruned_rows.is_marked(index, rows, FIRST)
        signatures = [SignatureId(bytes([n]) * 32) for n in (1, 2, 3)]
        for signed, id in zip((FIRST, FIRST, SECOND), signatures, strict=True):
            signature_rows.insert(index, rows, signed, id)
        assert list(index.keys(rows, "signatures", SECOND)) == [SECOND + signatures[2]]
        assert signature_rows.of(index, rows, FIRST) == signatures[:2]
        signature_rows.remove(index, rows, FIRST)
        assert signature_rows.of(index, rows, FIRST) == []
        index.put(rows, "signatures", b"too short", b"")
    assert list(signature_rows.all_rows(index)) == [b"too short", (SECOND, signatures[2])]


# -- plans, refs, backups ----------------------------------------------------------------------


def test_plans_keep_the_names_of_their_inputs(index: Index) -> None:
    """Inputs are read back, in the documented bytes; an old index's row is kept as it was."""
    id, older = PlanId(FIRST), PlanId(SECOND)
    sources = Sources(Source(bytes(32), "base"), (Source(b"e" * 32, "expert"),), 0.25)
    short = msgspec.msgpack.encode([[bytes(32), "base"], []])
    with index.env.write() as rows:
        plan_rows.put(index, rows, id, sources)
        plan_rows.restore(index, rows, older, short)
        assert index.get(rows, "plans", id) == msgspec.msgpack.encode(
            [[bytes(32), "base"], [[b"e" * 32, "expert"]], 0.25]
        )
        assert index.get(rows, "plans", older) == short
        assert plan_rows.get(index, rows, id) == sources
        assert [one for one, _ in plan_rows.walk(index, rows)] == [id, older]
        assert plan_rows.has_prefix(index, rows, "abc2")
        assert not plan_rows.has_prefix(index, rows, "abc3")
        index.put(rows, "plans", id, b"\xc1")
    assert [name for name, _ in plan_rows.unreadable(index)] == [id.hex()]


def test_refs_that_cannot_be_read_are_named(index: Index) -> None:
    """`readable` returns the others; a reflog's line goes to another index as it was."""
    with index.env.write() as rows:
        for name in ("a", "b"):
            refs.put(index, rows, name, Ref(BRANCH, bytes(32)))
            refs.append(index, rows, name, old=None, new=None, action="x", time_ns=1)
        index.put(rows, "refs", b"b", b"\xc1")
        line = LogRow(b"a\0" + bytes(8), index.get(rows, "reflog", b"a\0" + bytes(8)) or b"")
        index.put(rows, "reflog", b"b\0" + bytes(8), b"\xc1")
        refs.restore_log(index, rows, [LogRow(b"c\0" + bytes(8), line.value)])
        assert refs.reflog(index, rows, "c") == refs.reflog(index, rows, "a")
    told: list[str] = []
    assert refs.readable(index, told.append) == {"a": Ref(BRANCH, bytes(32))}
    assert told == refs.unreadable_reflogs(index) == ["b"]
    assert refs.parse_log(line)[0] == "a"
    with pytest.raises(ValueError, match="position"):
        refs.parse_log(LogRow(b"short", line.value))


def test_a_backup_says_what_it_is_of(index: Index) -> None:
    """The row of a backup has its generation and its damaged packs, until it is removed."""
    damaged = (PackId(b"p" * 32), PackId(b"q" * 32))
    with index.env.write() as rows:
        assert backup_row.get(index, rows) is None
        backup_row.put(index, rows, 9, damaged)
        value = (9).to_bytes(8, "big") + b"p" * 32 + b"q" * 32
        assert index.get(rows, "counters", b"backup") == value
        assert backup_row.get(index, rows) == BackupRow(9, damaged)
        backup_row.remove(index, rows)
        assert backup_row.get(index, rows) is None


READS: dict[str, Callable[[Index, IndexTransaction], Any]] = {
    "packs": lambda index, rows: index.numbered_pack(rows, 0),
    "pack_ids": lambda index, rows: index.pack_number(rows, PackId(bytes(32))),
    "condemned": lambda index, rows: index.condemned(rows),
    "snapshots": lambda index, rows: snapshot_rows.is_listed(index, rows, bytes(32)),
    "edges": lambda index, rows: snapshot_rows.children(index, rows, SnapshotId(bytes(32))),
    "plans": lambda index, rows: plan_rows.get(index, rows, PlanId(bytes(32))),
    "pruned": pruned_rows.ids,
    "signatures": lambda index, rows: signature_rows.of(index, rows, SnapshotId(bytes(32))),
    "counters": backup_row.get,
    "refs": lambda index, rows: refs.get(index, rows, "a"),
    "reflog": lambda index, rows: refs.reflog(index, rows, "a"),
}
KEYS = {
    "packs": bytes(4),
    "condemned": bytes(4),
    "edges": b"p" + bytes(64) + b"base",
    "signatures": bytes(64),
    "counters": b"backup",
    "refs": b"a",
    "reflog": b"a\0" + bytes(8),
}


@pytest.mark.parametrize("table", READS)
def test_a_damaged_row_is_no_answer(index: Index, table: str) -> None:
    """A row that does not match its check is an error for the typed reader of its table."""
    with index.env.write() as rows:
        rows.put(KEYS.get(table, bytes(32)), bytes(60), db=index.db(table))
    with index.env.read() as rows, pytest.raises(Corrupt, match="does not match its check"):
        READS[table](index, rows)
