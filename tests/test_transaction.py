"""Transactions: everything or nothing, in the one order, also beside other writers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mstore import fs
from mstore.blocks.codecs import PLAIN_BYTES, Encoded, Policy, encode
from mstore.blocks.packs import PAGE, Kind
from mstore.store import mirror
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor
from mstore.store.refs import BRANCH, Ref, refs_in
from mstore.store.transaction import RefMove, Transaction, choose_moves
from mstore.terms.errors import BadRequest, Conflict, NotFound
from mstore.terms.ids import BlockId, SnapshotId, TensorId
from mstore.upkeep.check.fsck import Checker, Scope

BLOCK = 1 << 16


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty store with small blocks."""
    catalog = Catalog.create(tmp_path / "store", BLOCK)
    yield catalog
    catalog.close()


def raw(data: bytes) -> Encoded:
    """A block as it is stored raw."""
    return encode(data, PLAIN_BYTES, Policy.RAW)


def put_file(transaction: Transaction, contents: bytes, path: str = "file") -> Manifest:
    """Store one file of at most one block; returns the manifest that holds it."""
    block = BlockId.of(contents)
    transaction.put_block(block, raw(contents), path, 0)
    tensor = Tensor(BYTES, (len(contents),), len(contents), bytes(block))
    transaction.put_record(tensor)
    part = Part(None, tensor.id(), len(contents))
    manifest = Manifest((File(path, OPAQUE, len(contents), (part,)),))
    transaction.put_record(manifest)
    return manifest


def snapshot_of(manifest: Manifest, message: str = "") -> SnapshotRecord:
    """A snapshot without parents."""
    return SnapshotRecord(manifest.id(), (), "add", None, "", None, None, message, 1, "test")


def publish(
    catalog: Catalog, contents: bytes, name: str, *, expect: Ref | None = None, message: str = ""
) -> Ref:
    """One file, one snapshot, one ref; returns the ref."""
    with Transaction(catalog, "test") as transaction:
        snapshot = snapshot_of(put_file(transaction, contents), message)
        new = Ref(BRANCH, snapshot.id())
        transaction.commit(snapshots=[snapshot], moves=[RefMove(name, expect, new, "test")])
    return new


def left_over(catalog: Catalog) -> list[str]:
    """Whatever lies in packs/ and tmp/ without being part of the store."""
    report = Checker(
        catalog.layout, Scope.chosen(read_data=True, sample=None, seed=0), threads=1
    ).run()
    assert report.problems == ()
    return list(report.garbage)


# -- everything or nothing ---------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit(catalog: Catalog) -> None:
    """Blocks, records, snapshots and refs appear when `commit` returns, all at once."""
    contents = b"contents" * 1000
    with Transaction(catalog, "test") as transaction:
        manifest = put_file(transaction, contents)
        snapshot = snapshot_of(manifest)
        assert catalog.has_blocks([BlockId.of(contents)]) == [False]
        with pytest.raises(NotFound):
            catalog.manifest(manifest.id())
        new = Ref(BRANCH, snapshot.id())
        transaction.commit(snapshots=[snapshot], moves=[RefMove("a/b", None, new, "test")])
        assert catalog.read_block(BlockId.of(contents)) == contents
        assert catalog.snapshot(snapshot.id()) == snapshot
        assert catalog.manifest(manifest.id()) == manifest
        assert catalog.refs() == dict(mirror.read(catalog.layout).refs) == {"a/b": new}
    assert left_over(catalog) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, None])
def test_without_a_commit_nothing_stays(
    catalog: Catalog, error: type[BaseException] | None
) -> None:
    """An exception of any kind, or forgetting to commit, leaves packs/ and tmp/ as they were."""

    def give_up() -> None:
        with Transaction(catalog, "test", max_pack=3 * PAGE) as transaction:
            for number in range(20):
                put_file(transaction, os.urandom(PAGE), f"file {number}")
            if error is not None:
                raise error

    with suppress(*([error] if error is not None else [])):
        give_up()
    assert list(catalog.layout.tmp.iterdir()) == []
    assert list(catalog.layout.packs.iterdir()) == []
    assert catalog.refs() == {}


def test_a_lost_race_for_a_ref_leaves_nothing(catalog: Catalog) -> None:
    """Where the ref moved meanwhile the commit is a Conflict, and its packs are gone."""
    first = publish(catalog, b"first", "name")
    packs = sorted(catalog.layout.packs.glob("*/*"))
    with pytest.raises(Conflict, match="moved") as conflict:
        publish(catalog, b"second", "name", expect=None)
    assert conflict.value.where == "name"
    assert catalog.refs() == {"name": first}
    assert sorted(catalog.layout.packs.glob("*/*")) == packs
    assert left_over(catalog) == []
    assert len(catalog.snapshot_ids()) == 1


def test_a_failing_addition_stops_the_commit(catalog: Catalog) -> None:
    """An exception in the rows that a caller adds leaves neither its rows nor the transaction's."""

    def also(rows: Any) -> None:
        rows.put(b"key", b"value", db=catalog.index.db("plans"))
        raise ZeroDivisionError

    def commit() -> None:
        with Transaction(catalog, "test") as transaction:
            snapshot = snapshot_of(put_file(transaction, b"contents"))
            transaction.commit(snapshots=[snapshot], also=also)

    with pytest.raises(ZeroDivisionError):
        commit()
    assert catalog.snapshot_ids() == []
    assert left_over(catalog) == []
    with catalog.index.env.read() as rows:
        assert catalog.index.count(rows, "plans") == catalog.index.count(rows, "blocks") == 0


# -- what is stored ----------------------------------------------------------------------------


def test_a_block_is_stored_once(catalog: Catalog) -> None:
    """A block is new the first time, and not again in the same or in a later transaction."""
    data = os.urandom(100)
    id = BlockId.of(data)
    with Transaction(catalog, "test") as transaction:
        assert transaction.put_block(id, raw(data), "f", 0)
        assert not transaction.put_block(id, raw(data), "g", 0)
        transaction.commit()
        assert transaction.blocks_new == 1
    with Transaction(catalog, "test") as transaction:
        assert not transaction.put_block(id, raw(data), "f", 0)
        transaction.commit()
        assert (transaction.blocks_new, transaction.bytes_written) == (0, 0)
    assert len(list(catalog.layout.packs.glob("*/*"))) == 1


def test_packs_have_a_size(catalog: Catalog) -> None:
    """A transaction begins a new pack when one has grown to the limit; all of them count."""
    blocks = [os.urandom(PAGE) for _ in range(12)]
    with Transaction(catalog, "test", max_pack=4 * PAGE) as transaction:
        for number, data in enumerate(blocks):
            transaction.put_block(BlockId.of(data), raw(data), "f", number * PAGE)
        transaction.commit()
        packs = list(catalog.layout.packs.glob("*/*"))
        assert transaction.bytes_written == sum(pack.stat().st_size for pack in packs)
    assert len(packs) == 4
    assert all(pack.stat().st_size <= 6 * PAGE for pack in packs)
    assert [catalog.read_block(BlockId.of(data)) for data in blocks] == blocks


def test_what_is_relied_on_must_still_be_there(catalog: Catalog) -> None:
    """A block or record that was counted as present and has gone by the commit is a Conflict."""
    publish(catalog, b"contents", "name")
    block, tensor = BlockId.of(b"contents"), TensorId(_only_part(catalog).tensor)
    for database, key in (("blocks", block), ("records", bytes([Kind.TENSOR]) + tensor)):
        with catalog.index.env.read() as rows:
            value = bytes(rows.get(key, db=catalog.index.db(database)))

        def lose(database: str = database, key: bytes = key) -> None:
            with Transaction(catalog, "test") as transaction:
                snapshot = snapshot_of(put_file(transaction, b"contents"), "again")
                with catalog.index.env.write() as rows:
                    rows.delete(key, db=catalog.index.db(database))
                transaction.commit(snapshots=[snapshot])

        with pytest.raises(Conflict, match="collected") as conflict:
            lose()
        assert conflict.value.hint == "run the command again"
        with catalog.index.env.write() as rows:
            rows.put(key, value, db=catalog.index.db(database))
    assert len(catalog.snapshot_ids()) == 1
    assert left_over(catalog) == []


def test_a_tensor_that_goes_before_its_manifest_comes_is_a_conflict(catalog: Catalog) -> None:
    """A record that was counted as present and is collected before the manifest is relied on is a
    Conflict, too: the command can be run again."""
    publish(catalog, b"contents", "name")
    tensor = TensorId(_only_part(catalog).tensor)
    with Transaction(catalog, "test") as transaction:
        manifest = put_file(transaction, b"contents")
        with catalog.index.env.write() as rows:
            rows.delete(bytes([Kind.TENSOR]) + tensor, db=catalog.index.db("records"))
        with pytest.raises(Conflict, match="collected") as conflict:
            transaction.rely_on_manifest(manifest)
    assert conflict.value.hint == "run the command again"


def _only_part(catalog: Catalog) -> Part:
    (snapshot,) = catalog.snapshot_ids()
    return catalog.manifest(catalog.snapshot(snapshot).manifest_id()).files[0].parts[0]


def test_a_manifest_is_relied_on_with_all_it_holds(catalog: Catalog) -> None:
    """`rely_on_manifest` takes stored and own tensors, and refuses one that is neither."""
    publish(catalog, b"stored", "name")
    stored = _only_part(catalog)
    with Transaction(catalog, "test") as transaction:
        own = put_file(transaction, b"own", "own").files[0]
        both = Manifest((File("a", OPAQUE, 6, (stored,)), own))
        transaction.rely_on_manifest(both)
        transaction.put_record(both)
        transaction.commit(snapshots=[snapshot_of(both)])
    foreign = Part(None, TensorId(b"x" * 32), 1)
    with Transaction(catalog, "test") as transaction, pytest.raises(NotFound):
        transaction.rely_on_manifest(Manifest((File("a", OPAQUE, 1, (foreign,)),)))
    assert left_over(catalog) == []


# -- the order ---------------------------------------------------------------------------------


def test_the_commit_order(catalog: Catalog) -> None:
    """Data, list, name, directories, index, mirror: nothing points at what is not yet durable."""
    steps: list[tuple[str, str]] = []
    root = catalog.layout.root
    publish(catalog, b"before", "before")

    def listen(operation: fs.Operation) -> None:
        path = Path(operation.target or operation.path).relative_to(root)
        steps.append((operation.kind, path.parts[0]))

    # The directory of the new pack is there already; another writer may not have synced its name.
    for number in range(256):
        fs.make_directory(catalog.layout.packs / f"{number:02x}", exist_ok=True)
    with fs.observed(listen):
        publish(catalog, b"contents", "name")
    told = [step for step in steps if step[0] not in ("create", "write", "mkdir")]
    assert told == [
        ("commit", "index"),  # the lease
        ("committed", "index"),
        ("fsync", "tmp"),
        ("fsync", "tmp"),
        ("rename", "refs"),  # the list, which has a line of the pack
        ("syncdir", "refs"),
        ("rename", "packs"),
        ("syncdir", "packs"),  # packs/ab
        ("syncdir", "packs"),  # packs
        ("commit", "index"),
        ("committed", "index"),
        ("link", "refs"),
        ("fsync", "tmp"),
        ("rename", "refs"),
        ("syncdir", "refs"),
        ("rmtree", "tmp"),
        ("unlink", "tmp"),
    ]


def test_the_mirror_follows(catalog: Catalog) -> None:
    """The text mirror is what the refs are after each publication."""
    first = publish(catalog, b"first", "one")
    choose_moves(catalog, lambda _: [RefMove("two", None, first, "tag")])
    assert dict(mirror.read(catalog.layout).refs) == {"one": first, "two": first}
    choose_moves(catalog, lambda _: [RefMove("one", first, None, "rm")])
    assert dict(mirror.read(catalog.layout).refs) == {"two": first}


# -- beside others -----------------------------------------------------------------------------


def test_two_writers_of_the_same_blocks(catalog: Catalog) -> None:
    """Both commit; each believed the block to be new, one copy is used, and the store is sound."""
    same = os.urandom(5000)
    with Transaction(catalog, "one") as one, Transaction(catalog, "two") as two:
        manifests = [put_file(transaction, same) for transaction in (one, two)]
        assert one.blocks_new == two.blocks_new == 1
        for number, (transaction, manifest) in enumerate(zip((one, two), manifests, strict=True)):
            snapshot = snapshot_of(manifest, str(number))
            new = Ref(BRANCH, snapshot.id())
            move = RefMove(f"name{number}", None, new, "test")
            transaction.commit(snapshots=[snapshot], moves=[move])
    assert catalog.read_block(BlockId.of(same)) == same
    assert len(list(catalog.layout.packs.glob("*/*"))) == 2
    assert left_over(catalog) == []


def test_readers_see_the_old_state_during_a_write(catalog: Catalog) -> None:
    """A store opened by another process during a transaction shows what was there before it."""
    old = publish(catalog, b"old", "name")
    with Transaction(catalog, "test") as transaction:
        snapshot = snapshot_of(put_file(transaction, b"new"))
        new = Ref(BRANCH, snapshot.id())
        assert seen_by_another(catalog) == f"name {old.snapshot_id()} 1"
        transaction.commit(snapshots=[snapshot], moves=[RefMove("name", old, new, "test")])
    assert seen_by_another(catalog) == f"name {snapshot.id()} 2"


def seen_by_another(catalog: Catalog) -> str:
    """Refs and the number of snapshots, as another process finds them."""
    code = (
        "import sys; from pathlib import Path; from mstore.store.catalog import Catalog\n"
        "catalog = Catalog.open(Path(sys.argv[1]))\n"
        "refs = [f'{name} {ref.snapshot_id()}' for name, ref in catalog.refs().items()]\n"
        "print(*refs, len(catalog.snapshot_ids()))"
    )
    return run_python(code, str(catalog.layout.root)).strip()


def run_python(code: str, *arguments: str) -> str:
    """What another Python process prints."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout


def publish_many(root: str, who: str, count: int) -> int:
    """In a process of its own: move one ref `count` times, whoever else does so; lost races."""
    catalog = Catalog.open(Path(root))
    lost = moved = 0
    while moved < count:
        expect = catalog.ref("shared")
        try:
            publish(catalog, f"{who} {moved}".encode(), "shared", expect=expect, message=who)
            moved += 1
        except Conflict:
            lost += 1
    catalog.close()
    return lost


def test_writers_in_many_processes(catalog: Catalog) -> None:
    """Processes that move one ref at the same time: every move that was acknowledged is in the
    reflog, each from where the one before it ended, and nothing is left over."""
    code = "import sys, test_transaction as t; print(t.publish_many(*sys.argv[1:3], 10))"
    root = str(catalog.layout.root)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, root, who],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        for who in ("a", "b", "c")
    ]
    for child in children:
        child.communicate(timeout=600)
        assert child.returncode == 0
    with catalog.index.env.read() as rows:
        moves = refs_in(catalog.index, rows).reflog("shared")
    assert len(moves) == 30
    assert [move.old for move in moves] == [None, *(move.new for move in moves[:-1])]
    makers = [catalog.snapshot(SnapshotId(move.new or b"")).message for move in moves]
    assert sorted(makers) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert left_over(catalog) == []


def test_many_records_are_refused_as_one_is(tmp_path: Path) -> None:
    """Of many records one that no reader would take is refused by name, and nothing is published;
    what is stored already is relied on and not written again."""
    catalog = Catalog.create(tmp_path / "store", 1 << 16)
    good = [Tensor("F32", (number, 0), 0, b"") for number in range(5)]
    with Transaction(catalog, "test") as transaction:
        ids = transaction.put_records([*good[:3], good[0]])
        assert ids == [record.id() for record in (*good[:3], good[0])]
        transaction.commit()
    bad = Tensor("F32", (1,) * 65, 4, bytes(32))
    with pytest.raises(BadRequest) as caught, Transaction(catalog, "test") as transaction:
        transaction.put_records([*good, bad])
    assert str(bad.id()) in str(caught.value.where)
    with catalog.index.env.read() as rows:
        assert catalog.index.count(rows, "records") == 3
    with Transaction(catalog, "test") as transaction:
        transaction.put_records(good)
        transaction.commit()
    assert catalog.tensors([TensorId(record.id()) for record in good]) == good
    with catalog.index.env.read() as rows:
        assert catalog.index.count(rows, "records") == 5
    catalog.close()


def test_many_blocks_are_stored_once(tmp_path: Path) -> None:
    """Blocks that occur twice among many, or are there already, are stored once and counted once;
    one that was only said to be there must be there at the commit."""
    catalog = Catalog.create(tmp_path / "store", 1 << 16)
    plain = [bytes([number]) * 100 + bytes(4) for number in range(4)]
    blocks = [BlockId.of(data) for data in plain]
    coded = [encode(data, PLAIN_BYTES, Policy.RAW) for data in plain]
    with Transaction(catalog, "test") as transaction:
        assert transaction.put_blocks([(blocks[0], coded[0], 0)], "f") == 1
        transaction.commit()
    items = [(blocks[k], coded[k], 104 * k) for k in (0, 1, 2, 1)]
    with Transaction(catalog, "test") as transaction:
        assert transaction.put_blocks([*items, (blocks[2], None, 0)], "f") == 2
        assert transaction.relied_blocks == {blocks[0]}
        transaction.commit()
    assert catalog.has_blocks(blocks) == [True, True, True, False]
    with Transaction(catalog, "test") as transaction:
        transaction.put_blocks([(blocks[3], None, 0)], "f")
        with pytest.raises(Conflict):
            transaction.commit()
    catalog.close()
