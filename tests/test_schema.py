"""The tables of the index: the page has them, and each holds the documented bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.blocks import location_arrays
from mstore.blocks.index import Index
from mstore.blocks.location import (
    base_of,
    codec,
    encode,
    fields,
    moved,
    pack_number,
    raw_length,
    stored_lengths,
    width,
)
from mstore.blocks.packs import NO_BASE, Entry, Kind, SealedPack
from mstore.blocks.schema import (
    BACKUP,
    CHILDREN,
    CONTENTS,
    NOTES,
    PACK_IDS,
    PACKS,
    PLANS,
    PRUNED,
    REFLOG,
    TABLES,
    BackupRow,
    Condemned,
    NamedPack,
    Risk,
    Source,
    Sources,
)
from mstore.blocks.tables import Table
from mstore.models.stats import store as stats
from mstore.store import listing, memo
from mstore.store.objects.snapshot import BASE, PREVIOUS, Parent, SnapshotRecord
from mstore.store.refs import BRANCH, Move, Ref, refs_in
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import ID_BYTES, BlockId, ManifestId, NoteId, PackId, PlanId, SnapshotId

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
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


def raw(index: Index, rows: Any, table: str) -> dict[bytes, bytes]:
    """The rows of a table, without their checks, as LMDB has them."""
    (found,) = [one for one in TABLES if one.name == table]
    with rows.cursor(db=index.db(table)) as cursor:
        stored = {bytes(key): bytes(row) for key, row in cursor}
    assert all(found.opened(key, row) is not None for key, row in stored.items())
    return {key: row[:-8] if found.has_check else row for key, row in stored.items()}


# -- the page --------------------------------------------------------------------------------------


def lines(tables: Iterable[Table[Any, Any]]) -> str:
    """These tables as docs/format.md has them."""
    head = ["| database | key | value | proof | what it says |", "|---|---|---|---|---|"]
    rows = [(one.name, one.key.text, one.value.text, one.proof, one.says) for one in tables]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


@pytest.mark.parametrize("tables", [TABLES, stats.TABLES, memo.TABLES])
def test_the_page_has_the_declared_tables(tables: tuple[Table[Any, Any], ...]) -> None:
    """The page's tables are those of the declarations, word for word: copy what this prints."""
    print(lines(tables))
    assert lines(tables) in PAGE


DECLARING = """
import sys
from pathlib import Path
from mstore.blocks import schema
from mstore.blocks.tables import Table, form, id_of, number
from mstore.terms.ids import SnapshotId

NEW = Table("new", form(id_of(SnapshotId)), form(number(8, "count")), "a count")
schema.TABLES += (NEW,)
schema.DATABASES += (NEW.name,)

from mstore.api import Store
from mstore.upkeep.check import index_file

root, id = Path(sys.argv[1]), SnapshotId(bytes(32))
with Store.init(root / "store") as store:
    index = store._catalog.index
    with index.env.write() as rows:
        index.put(rows, NEW, id, 7)
    assert store.fsck().problems == ()
Store.clone(root / "store", root / "clone")
with Store.open(root / "clone") as store:
    index = store._catalog.index
    with index.env.write() as rows:
        assert index.get(rows, NEW, id) == 7
        rows.put(bytes(id), bytes(16), db=index.db("new"))
    (problem,) = store.fsck().problems
    print(problem.where, problem.what)
    with index.env.write() as rows:
        rows.put(bytes(id), bytes(15), db=index.db("new"))
    print(*index_file.faults(store._catalog.layout))
"""


def test_one_declaration_makes_a_table(tmp_path: Path) -> None:
    """A table that the schema lists is created, checked by fsck, and copied; nothing else is
    needed."""
    done = subprocess.run(
        [sys.executable, "-c", DECLARING, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        f"new {'00' * 32} the row does not match its check",
        f"new: the row {'00' * 8} has another form",
    ], done.stderr


# -- locations -------------------------------------------------------------------------------------


@given(entry=ENTRIES, number=SIZES, other=SIZES)
def test_a_location_row_says_what_its_entry_says(entry: Entry, number: int, other: int) -> None:
    """A row has the pack's number and every field of the entry; only `moved` changes the number."""
    row = encode(number, entry)
    told = (entry.offset, entry.stored_length, entry.raw_length, entry.codec, entry.width)
    base = None if entry.base == NO_BASE else entry.base
    assert fields(row) == (number, *told, entry.base)
    assert pack_number(row) == number
    assert raw_length(row) == entry.raw_length
    assert (codec(row), width(row)) == (entry.codec, entry.width)
    assert base_of(row) == base
    assert stored_lengths([row, row]).tolist() == [entry.stored_length] * 2
    assert moved(row, other) == encode(other, entry)


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
    batches = list(index.location_batches())
    assert [one for batch in batches for one in batch] == [
        (kind, id, row) for (kind, id), row in zip(keys, stored, strict=True)
    ]


def test_a_row_is_deleted_only_while_it_is_the_same(index: Index) -> None:
    """`delete_row_if` leaves a row that changed since it was seen."""
    entry = Entry(b"a" * 32, Kind.BLOCK, 0, 2, 4096, 10, 20)
    seen, now = encode(1, entry), encode(2, entry)
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
        assert raw(index, rows, "packs") == {
            number: pack.id + (1 << 33).to_bytes(8, "big") + bytes(4)
        }
        assert raw(index, rows, "pack_ids") == {pack.id: number}
        assert (index.pack_number(rows, pack.id), index.numbered_pack(rows, 7)) == (7, pack)
        assert list(index.named_packs(rows)) == [pack]
        index.condemn(rows, pack.id, leases)
        assert raw(index, rows, "condemned") == {
            number: pack.id + (1 << 33).to_bytes(8, "big") + bytes(4) + "".join(leases).encode()
        }
        assert index.condemned(rows) == [Condemned(7, pack.id, 1 << 33, leases)]
        assert index.pack_number(rows, pack.id) is None
        assert not index.has_number(rows, 7)


def test_a_pack_elsewhere_is_refused(index: Index) -> None:
    """No row of a pack at a place that is not known is read; a known place is told."""
    pack, key = PackId(b"p" * 32), BlockId(b"a" * 32)
    with index.env.write() as rows:
        index.put(rows, PACKS, 7, (pack, 4096, 1))
        index.put(rows, PACK_IDS, pack, 7)
        index.put_row(rows, (Kind.BLOCK, key), encode(7, Entry(key, Kind.BLOCK, 0, 2, 4096, 1, 1)))
    with index.env.read() as rows:
        for read in (
            lambda: index.block(rows, key),
            lambda: list(index.packs(rows)),
            lambda: list(index.named_packs(rows)),
            lambda: index.numbered_pack(rows, 7),
        ):
            with pytest.raises(Incompatible, match=r"(?s)place 1.*pip install -U mstore"):
                read()
        index.places = (0, 1)
        assert index.numbered_pack(rows, 7) == NamedPack(7, pack, 4096, 1)
    with index.env.write() as rows:
        index.condemn(rows, pack, ())
        assert index.condemned(rows) == [Condemned(7, pack, 4096, (), 1)]


# -- snapshots -------------------------------------------------------------------------------------


def test_snapshots_are_listed_by_content_parent_and_prefix(index: Index) -> None:
    """The rows of snapshots answer each question, and hold the documented bytes."""
    first = snapshot(1, 5)
    child = snapshot(1, 9, Parent(PREVIOUS, first.id()), Parent(BASE, first.id()))
    with index.env.write() as rows:
        for record in (first, child):
            listing.insert(index, rows, record)
        content = ManifestId(b"\1" * 32)
        assert raw(index, rows, "snapshots")[child.id()] == content + (9).to_bytes(8, "big")
        assert raw(index, rows, "contents") == {
            content + first.id(): b"",
            content + child.id(): b"",
        }
        assert raw(index, rows, "children") == {
            first.id() + child.id() + b"previous": b"",
            first.id() + child.id() + b"base": b"",
        }
        assert set(listing.ids(index, rows)) == {first.id(), child.id()}
        assert listing.children(index, rows, first.id()) == {child.id()}
        assert set(listing.with_content(index, rows, content)) == {first.id(), child.id()}
        assert listing.times(index, rows, [child.id(), FIRST]) == {child.id(): 9}
        for id in (first.id(), child.id()):
            assert listing.with_prefix(index, rows, id.hex()[:20]) == [id]
        assert listing.agree(index, rows, child.id(), child)
        assert not listing.agree(index, rows, child.id(), snapshot(1, 8))
        listing.unlist(index, rows, first.id())
        assert listing.children(index, rows, first.id()) == {child.id()}
        assert listing.with_content(index, rows, content) == [child.id()]
        listing.remove(index, rows, [child.id()])
        assert [index.count(rows, name) for name in ("snapshots", "contents", "children")] == [
            0
        ] * 3


def test_an_edge_that_is_missing_is_no_agreement(index: Index) -> None:
    """A snapshot whose content or parent is not in the lists does not agree with its record."""
    first = snapshot(1, 5)
    child = snapshot(2, 9, Parent(BASE, first.id()))
    with index.env.write() as rows:
        for record in (first, child):
            listing.insert(index, rows, record)
        index.delete_all(rows, CHILDREN, first.id())
        assert not listing.agree(index, rows, child.id(), child)
        index.delete(rows, CONTENTS, (first.manifest_id(), first.id()))
        assert not listing.agree(index, rows, first.id(), first)


def test_marks_and_notes_belong_to_one_snapshot(index: Index) -> None:
    """Removing those of one snapshot leaves those of the next, whose id begins alike."""
    with index.env.write() as rows:
        for id, time_ns in ((FIRST, 5), (SECOND, 5), (SECOND, 6)):
            index.put(rows, PRUNED, id, time_ns, overwrite=False)
        assert raw(index, rows, "pruned")[SECOND] == (5).to_bytes(8, "big")
        index.delete(rows, PRUNED, FIRST)
        assert list(index.walk(rows, PRUNED)) == [(SECOND, 5)]
        assert index.get(rows, PRUNED, FIRST) is None
        notes = [NoteId(bytes([n]) * 32) for n in (1, 2, 3)]
        for about, one in zip((FIRST, FIRST, SECOND), notes, strict=True):
            index.put(rows, NOTES, (about, one), None)
        assert list(index.keys(rows, NOTES, SECOND)) == [SECOND + notes[2]]
        assert [one for (_, one), _ in index.walk(rows, NOTES, FIRST)] == notes[:2]
        index.delete_all(rows, NOTES, FIRST)
        assert list(index.walk(rows, NOTES)) == [((SECOND, notes[2]), None)]


# -- plans, refs, backups ----------------------------------------------------------------------


@pytest.mark.parametrize("risks", [(), (Risk("w", 10, (0,)),)])
def test_plans_keep_the_names_of_their_inputs(index: Index, risks: tuple[Risk, ...]) -> None:
    """Inputs are read back, in the documented bytes: always four elements."""
    id = PlanId(FIRST)
    sources = Sources(Source(bytes(32), "base"), (Source(b"e" * 32, "expert"),), 0.25, risks)
    with index.env.write() as rows:
        index.put(rows, PLANS, id, sources)
        told = [[one.tensor, one.of, list(one.experts)] for one in risks]
        assert raw(index, rows, "plans")[id] == msgspec.msgpack.encode(
            [[bytes(32), "base"], [[b"e" * 32, "expert"]], 0.25, told]
        )
        assert index.get(rows, PLANS, id) == sources
        assert list(index.keys_with(rows, PLANS, "abc")) == [id]
        assert list(index.keys_with(rows, PLANS, "abc1")) == [id]
        assert list(index.keys_with(rows, PLANS, "abc2")) == []


def test_moves_are_in_the_order_of_their_positions(index: Index) -> None:
    """A name's reflog is its own, though the next name begins alike; positions go on."""
    with index.env.write() as rows:
        for name in ("a", "ab", "a"):
            refs_in(index, rows).restore(
                name, Ref(BRANCH, bytes(32)), old=None, action=name, time_ns=1
            )
        assert set(raw(index, rows, "reflog")) == {
            b"a\0" + bytes(8),
            b"a\0" + (1).to_bytes(8, "big"),
            b"ab\0" + bytes(8),
        }
        assert refs_in(index, rows).reflog("a") == [Move(None, bytes(32), "a", 1, 0, BRANCH)] * 2
        assert [refs_in(index, rows).count_moves(name) for name in ("a", "ab", "b")] == [2, 1, 0]
        assert index.last(rows, REFLOG) == ("ab", 0)


def test_a_backup_says_what_it_is_of(index: Index) -> None:
    """The row of a backup has its generation and its damaged packs."""
    damaged = (PackId(b"p" * 32), PackId(b"q" * 32))
    with index.env.write() as rows:
        assert index.backup(rows) is None
        index.put(rows, BACKUP, 9, damaged)
        assert raw(index, rows, "backup") == {(9).to_bytes(8, "big"): b"p" * 32 + b"q" * 32}
        assert index.backup(rows) == BackupRow(9, damaged)


@pytest.mark.parametrize(
    "table", [table for table in TABLES if table.has_check], ids=lambda t: t.name
)
@pytest.mark.parametrize("what", ["zeros", "another form"])
def test_a_damaged_row_is_no_answer(index: Index, table: Table[Any, Any], what: str) -> None:
    """A row that does not match its check, or matches it and has another form, is an error."""
    key = b"a\0" + bytes(66 if table.key.lengths is None else min(table.key.lengths) - 2)
    row = bytes(60) if what == "zeros" else table.sealed(key, b"\xc1" * 61)
    with index.env.write() as rows:
        rows.put(key, row, db=index.db(table.name))
    with index.env.read() as rows, pytest.raises(Corrupt, match=r"check|cannot be read"):
        list(index.walk(rows, table))
    assert list(index.unsound()) == [(table, key)]
