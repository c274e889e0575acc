"""fsck: sound stores pass, every kind of damage is found and named, and garbage is no damage."""

from __future__ import annotations

import shutil
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pack_lines
import pytest
from blake3 import blake3
from checkpoints import write_safetensors
from small_models import BLOCK, small_model
from test_repair import fine_tune

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks import codecs
from mstore.blocks.lmdb_env import Environment
from mstore.blocks.pack_store import HERE
from mstore.blocks.packs import PAGE, Kind
from mstore.blocks.reader import BlockReader
from mstore.blocks.schema import CONDEMNED, PRUNED
from mstore.store import mirror, refs
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.refs import BRANCH, Ref, refs_in
from mstore.terms.errors import BadRequest, Corrupt, Incompatible
from mstore.terms.ids import PackId
from mstore.terms.phrases import as_phrase, call
from mstore.terms.report import Progress
from mstore.upkeep.check.packs import payload


def build(root: Path) -> None:
    """A store with an add and a merge, closed."""
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", "expert"):
            base = None if name == "base" else "base"
            store.add(small_model(root / name, "s", changed=name), name=name, base=base, threads=1)
        plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear"), threads=1)
        store.merge(plan, name="merged", threads=1)


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def packs(store: Store) -> list[Path]:
    """Its packs, the largest first."""
    found = (store.path / "packs").glob("*/*.pack")
    return sorted(found, key=lambda path: -path.stat().st_size)


def overwrite(path: Path, place: int, data: bytes) -> None:
    """Write into a read-only file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def test_a_sound_store(store: Store) -> None:
    """Nothing is wrong with a store that was only added to and merged in; all of it was read."""
    quick, thorough = store.fsck(), store.fsck(read_data=True)
    assert quick.problems == thorough.problems == ()
    assert quick.garbage == thorough.garbage == ()
    assert (quick.refs, quick.snapshots, quick.packs) == (3, 3, len(packs(store)))
    assert quick.bytes_read == 0
    with store._catalog.index.env.read() as rows:
        stored = [where.stored_length for _, where in store._catalog.index.blocks(rows)]
    assert (thorough.bytes_read, thorough.blocks) == (sum(stored), len(stored))


def _looking() -> tuple[tuple[str, int], ...]:
    """Where in mstore this is called, from the outermost call in."""
    frames = traceback.walk_stack(None)
    found = [(frame.f_code.co_filename, line) for frame, line in frames]
    return tuple(one for one in reversed(found) if "/mstore/" in one[0])


@pytest.mark.rest
def test_what_is_collected_meanwhile_is_no_damage(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two looks into the index, refs go, come, and are pruned, and gc collects: fsck
    finds nothing wrong, for what is gone was not damaged, and what is new is whole."""
    small_model(tmp_path / "new", "new")
    shutil.copytree(template / "store", tmp_path / "t")
    with Store.open(tmp_path / "t") as store:
        store.configure("reflog_days", 0)
        store.tag("v1", "expert")
        store.remove("v1")
    real, at = Environment.read, -1
    looks: list[tuple[tuple[str, int], ...]] = []

    def meddling(env: Environment) -> AbstractContextManager[Any]:
        if env.path.name == "index":
            looks.append(_looking())
            if len(looks) - 1 == at:
                with Store.open(tmp_path / "s") as other:
                    other.remove("expert", "merged")
                    other.add(tmp_path / "new", name="base", threads=1)
                    other.add(tmp_path / "new", name="other", threads=1)
                    other.prune(["base"], keep_last=1)
                    other.gc(reflog_days=0)
        return real(env)

    def checked() -> None:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        shutil.copytree(tmp_path / "t", tmp_path / "s")
        looks.clear()
        with Store.open(tmp_path / "s") as store, monkeypatch.context() as patch:
            patch.setattr(Environment, "read", meddling)
            problems = store.fsck().problems
        assert problems == (), at

    checked()
    # Of looks from one place, the first and the last.
    first = {look: number for number, look in reversed(list(enumerate(looks)))}
    last = {look: number for number, look in enumerate(looks)}
    tried = sorted({*first.values(), *last.values()})
    assert len(tried) > 10
    for at in tried:
        checked()
        assert len(looks) > at


def test_a_record_may_be_longer_than_a_block(tmp_path: Path) -> None:
    """A manifest of many tensors is longer than a small block; that is no finding."""
    names = [f"layer.{number}.{'x' * 60}" for number in range(1000)]
    write_safetensors(
        tmp_path / "m" / "model.safetensors", [(name, "U8", (3,), b"abc") for name in names]
    )
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "m", name="m")
        assert len(store._catalog.record(Manifest, store["m"].manifest).encode()) > BLOCK
        assert store.fsck(read_data=True).problems == ()


def test_progress_reaches_the_end(store: Store) -> None:
    """A thorough check tells how far it is, up to all of it."""
    ticks: list[Progress] = []
    report = store.fsck(read_data=True, progress=ticks.append)
    assert [tick.done for tick in ticks] == sorted(tick.done for tick in ticks)
    assert ticks[-1].done == ticks[-1].total == report.bytes_read


def test_garbage_is_listed_and_harmless(store: Store) -> None:
    """A pack that no row names and leftovers in tmp/ are garbage, not problems."""
    orphan = store.path / "packs" / "00" / f"{'00' * 32}.pack"
    orphan.parent.mkdir(exist_ok=True)
    shutil.copy(packs(store)[0], orphan)
    pack_lines.give(store.path, orphan.stem)
    (store.path / "tmp" / "0123456789abcdef").mkdir()
    report = store.fsck(read_data=True)
    assert report.problems == ()
    assert set(report.garbage) == {
        str(orphan.relative_to(store.path)),
        "tmp/0123456789abcdef",
    }


def test_a_flipped_payload_bit(store: Store) -> None:
    """Damage of a payload is found by reading the data, not by the quick check, and named."""
    with store._catalog.index.env.read() as rows:
        id, where = max(store._catalog.index.blocks(rows), key=lambda block: block[1].stored_length)
    path = Path(store._catalog.packs.where(where.pack))
    overwrite(path, where.offset + 99, bytes([path.read_bytes()[where.offset + 99] ^ 1]))
    assert store.fsck().problems == ()
    (problem,) = store.fsck(read_data=True).problems
    assert (problem.kind, problem.where) == ("block", str(id))


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(data[: -2 * PAGE])


def _stretch(path: Path) -> None:
    data = path.read_bytes()
    path.chmod(0o600)
    # The same pack with a page more between its table and its tail.
    path.write_bytes(data[:-64] + bytes(PAGE) + data[-64:])


def _break_table(path: Path) -> None:
    data = path.read_bytes()
    offset = struct.unpack_from("<Q", data, len(data) - 64)[0]
    overwrite(path, offset, bytes([data[offset] ^ 1]))


def _rename_store(path: Path) -> None:
    overwrite(path, 20, bytes([path.read_bytes()[20] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_remove, "the file is missing"),
        (_truncate, "damaged at an end"),
        (_break_table, "does not match its hash"),
        (_rename_store, "header and footer are those of"),
        (_stretch, "bytes long"),
        (lambda path: path.chmod(0o600) or path.write_bytes(b""), "truncated pack"),
    ],
)
def test_a_damaged_pack(store: Store, damage: Callable[[Path], object], what: str) -> None:
    """A pack that is missing, cut, stretched, renamed or broken is named, also by a quick check."""
    path = packs(store)[0]
    damage(path)
    store._catalog.packs.close()
    problems = store.fsck().problems
    named = [problem for problem in problems if problem.where == path.stem]
    assert any(what in problem.what for problem in named), problems
    assert all(problem.kind == "pack" for problem in named)


def test_a_damaged_pack_is_told_once(store: Store) -> None:
    """The hundred rows of a missing pack are one problem, and what needs it is named besides."""
    path = packs(store)[0]
    path.unlink()
    store._catalog.packs.close()
    problems = store.fsck().problems
    assert [problem.kind for problem in problems].count("pack") == 1
    assert not any("not in the footer" in problem.what for problem in problems)


def test_a_row_that_lies(store: Store) -> None:
    """An index row that differs from its pack's footer, or has no entry there, is named."""
    index = store._catalog.index
    with index.env.write() as rows:
        with rows.cursor(db=index.db("blocks")) as cursor:
            assert cursor.first()
            key, value = bytes(cursor.key()), bytes(cursor.value())
        rows.put(key, value[:11] + bytes([value[11] ^ 1]) + value[12:], db=index.db("blocks"))
        rows.put(b"\x01" * 32, value, db=index.db("blocks"))
    problems = {(problem.where, problem.what) for problem in store.fsck().problems}
    told = "index and pack footer do not agree"
    assert (key.hex(), told) in problems
    assert any(where == "01" * 32 and "not in the footer" in what for where, what in problems)


def test_a_missing_row(store: Store) -> None:
    """A block that a snapshot needs and the index does not have is named with its tensor."""
    index = store._catalog.index
    with index.env.read() as rows:
        id, where = max(index.blocks(rows), key=lambda block: block[1].raw_length)
    assert where.raw_length == BLOCK
    with index.env.write() as rows:
        rows.delete(id, db=index.db("blocks"))
    problems = store.fsck().problems
    assert ("block", str(id)) in {(problem.kind, problem.where) for problem in problems}
    assert any("model.safetensors: a: missing" in problem.what for problem in problems)


def test_a_ref_to_nowhere(store: Store) -> None:
    """A ref at a snapshot that is not there is named."""
    nowhere = Ref(BRANCH, bytes(32))
    index = store._catalog.index
    with index.env.write() as rows:
        refs_in(index, rows).move("lost", expect=None, new=nowhere, action="test", time_ns=0)
    problems = store.fsck().problems
    assert ("ref", "lost") in {(problem.kind, problem.where) for problem in problems}


def test_a_mirror_that_says_other_things(store: Store) -> None:
    """A mirror that names another snapshot than the index is named; repair leaves both alone."""
    catalog = store._catalog
    other = {**catalog.refs(), "expert": refs.Ref(refs.BRANCH, store["base"].id)}
    replace_mirror(catalog, mirror.Mirror(mirror.read(catalog.layout).generation, other))
    whole = catalog.layout.mirror.read_bytes()
    (problem,) = store.fsck().problems
    assert problem.kind == "mirror"
    assert store.fsck().hint == as_phrase(call("reindex"))
    with pytest.raises(Corrupt):
        store.repair()
    assert catalog.layout.mirror.read_bytes() == whole


def replace_mirror(catalog: Catalog, told: mirror.Mirror) -> None:
    """Write a mirror that says this, with a hash that is right."""
    lines = "".join(f"{r.kind} {r.snapshot_id()} {name}\n" for name, r in told.refs.items())
    body = f"mstore refs 2\ngeneration {told.generation}\n{lines}".encode()
    hash = blake3(body).hexdigest().encode()
    catalog.layout.mirror.write_bytes(body + b"blake3 " + hash + b"\n")


def test_a_parent_that_is_missing(store: Store) -> None:
    """A snapshot whose parent is not there is named, with the parent's role."""
    index = store._catalog.index
    with index.env.write() as rows:
        rows.delete(store["expert"].id, db=index.db("snapshots"))
    problems = store.fsck().problems
    merged = str(store["merged"].id)
    assert any(p.where == merged and "its expert" in p.what for p in problems)


@pytest.mark.parametrize(
    "contents", [None, b"", b"mstore refs 2", b"mstore refs 2\nbranch", b"\xff" * 50]
)
def test_a_damaged_mirror(store: Store, contents: bytes | None) -> None:
    """A mirror that is missing, cut or overwritten is a problem; one a move behind is not."""
    mirror = store.path / "refs" / "mirror"
    behind = mirror.read_bytes()
    store.tag("v1", "merged")
    mirror.write_bytes(behind)
    assert store.fsck().problems == ()
    mirror.unlink()
    if contents is not None:
        mirror.write_bytes(contents)
    (problem,) = store.fsck().problems
    assert (problem.kind, problem.where) == ("mirror", str(mirror))


def test_an_empty_store_is_sound(tmp_path: Path) -> None:
    """A new store has nothing to find, with or without its mirror."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        assert store.fsck(read_data=True).problems == ()
        (tmp_path / "store" / "refs" / "mirror").unlink()
        report = store.fsck(read_data=True)
    assert (report.problems, report.garbage, report.blocks, report.refs) == ((), (), 0, 0)


def delta_rows(store: Store) -> dict[bytes, bytes]:
    """The rows of blocks that are stored as deltas."""
    index = store._catalog.index
    with index.env.read() as rows, rows.cursor(db=index.db("blocks")) as cursor:
        return {bytes(key): bytes(value) for key, value in cursor if len(value) > 22}


@pytest.fixture
def dense(tmp_path: Path) -> Iterator[Store]:
    """A store in which a fine-tune is stored as deltas."""
    base = small_model(tmp_path / "base", "s")
    with Store.init(tmp_path / "dense", block_size=BLOCK, codec="dense") as store:
        store.add(base, name="base", threads=1)
        store.add(fine_tune(tmp_path / "tuned", base, 3), name="tuned", base="base", threads=1)
        assert delta_rows(store)
        yield store


def test_deltas_are_read_through_their_bases(dense: Store) -> None:
    """A store of deltas is sound, and a broken base is told with the deltas that need it."""
    assert dense.fsck(read_data=True).problems == ()
    base = next(iter(delta_rows(dense).values()))[22:]
    index = dense._catalog.index
    with index.env.read() as rows:
        where = index.location(rows, rows.get(base, db=index.db("blocks")))
    path = Path(dense._catalog.packs.where(where.pack))
    place = where.offset + where.stored_length // 2
    overwrite(path, place, bytes([path.read_bytes()[place] ^ 1]))
    report = dense.fsck(read_data=True)
    told = {problem.where for problem in report.problems}
    assert base.hex() in told
    assert {key.hex() for key, row in delta_rows(dense).items() if row[22:] == base} <= told
    assert {affected.refs for affected in report.affected} == {("base",), ("tuned",)}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda rows, db, delta, base: rows.delete(base, db=db), "is missing"),
        (lambda rows, db, delta, base: rows.put(base, delta, db=db), "is a delta itself"),
        (
            lambda rows, db, delta, base: rows.put(
                base, (row := rows.get(base, db=db))[:19] + bytes([row[19] ^ 1]) + row[20:], db=db
            ),
            "has another length",
        ),
    ],
)
def test_a_delta_whose_base_cannot_be_one(
    dense: Store, damage: Callable[..., object], what: str
) -> None:
    """A base is there, as long as its delta, and no delta itself; else the delta is named, and is
    not read."""
    key, row = next(iter(delta_rows(dense).items()))
    index = dense._catalog.index
    with index.env.write() as rows:
        damage(rows, index.db("blocks"), row, row[22:])
    problems = dense.fsck().problems
    assert any(p.where == key.hex() and what in p.what for p in problems), problems
    reader = BlockReader(dense._catalog.packs, dense._catalog.block_size)
    with pytest.raises(Corrupt):
        payload(index, reader, (Kind.BLOCK, key), row)


def test_a_base_in_an_unknown_pack(dense: Store) -> None:
    """A base whose row names a pack that nobody has is named, and does not end the check."""
    base = next(iter(delta_rows(dense).values()))[22:]
    index = dense._catalog.index
    with index.env.write() as rows:
        row = rows.get(base, db=index.db("blocks"))
        rows.put(base, b"\0\0\xff\xff" + row[4:], db=index.db("blocks"))
    problems = {(problem.where, problem.what) for problem in dense.fsck().problems}
    assert (base.hex(), "the index names an unknown pack 65535") in problems


def test_a_row_with_another_base(dense: Store) -> None:
    """The base in a row is that of the footer."""
    key, row = next(iter(delta_rows(dense).items()))
    index = dense._catalog.index
    with index.env.write() as rows:
        rows.put(key, row[:22] + bytes([row[22] ^ 1]) + row[23:], db=index.db("blocks"))
    problems = dense.fsck().problems
    assert ("block", key.hex(), "index and pack footer do not agree") in {
        (p.kind, p.where, p.what) for p in problems
    }


def test_a_sample_reads_its_share(store: Store) -> None:
    """A sample reads some blocks: the same for the same seed, others for another, all for 100 %."""
    reports = [store.fsck(sample=0.4, seed=seed) for seed in (1, 1, 2, 3, 4, 5)]
    assert reports[0].bytes_read == reports[1].bytes_read
    assert len({report.bytes_read for report in reports}) > 1
    assert all(0 <= report.bytes_read < report.bytes_total for report in reports)
    assert [(report.sample, report.seed) for report in reports[:3]] == [
        (0.4, 1),
        (0.4, 1),
        (0.4, 2),
    ]
    whole = store.fsck(sample=1.0)
    assert whole.bytes_read == whole.bytes_total == store.fsck(read_data=True).bytes_read


@pytest.mark.parametrize("sample", [0, -0.1, 1.01])
def test_a_sample_is_a_share(store: Store, sample: float) -> None:
    """A share that is none is refused, and so is a sample of all."""
    with pytest.raises(BadRequest):
        store.fsck(sample=sample)
    with pytest.raises(BadRequest):
        store.fsck(sample=0.5, read_data=True)


def test_a_sample_finds_damage_that_it_reads(store: Store) -> None:
    """With every block broken, any sample that reads anything finds a problem."""
    with store._catalog.index.env.read() as rows:
        places = [
            (Path(store._catalog.packs.where(where.pack)), where.offset)
            for _, where in store._catalog.index.blocks(rows)
        ]
    for path, place in places:
        overwrite(path, place, bytes([path.read_bytes()[place] ^ 1]))
    reports = [store.fsck(sample=0.5, seed=seed) for seed in range(4)]
    assert any(report.bytes_read for report in reports)
    assert all(bool(report.problems) == bool(report.bytes_read) for report in reports)


@pytest.mark.parametrize("kind", ["tensor", "manifest", "snapshot", "plan", "coverage"])
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_record_that_is_broken_or_missing(store: Store, kind: str, is_missing: bool) -> None:
    """Every kind of record is found broken and found missing, also after it was read before."""
    store.explain("merged")
    index = store._catalog.index
    number = Kind[kind.upper()]
    with index.env.read() as rows:
        id, where = next((id, at) for k, id, at in index.records(rows) if k == number)
    if is_missing:
        with index.env.write() as rows:
            rows.delete(bytes([number]) + id, db=index.db("records"))
    else:
        path = Path(store._catalog.packs.where(where.pack))
        overwrite(path, where.offset + 1, bytes([path.read_bytes()[where.offset + 1] ^ 1]))
    problems = store.fsck().problems
    assert (kind, id.hex()) in {(problem.kind, problem.where) for problem in problems}


def test_everyone_who_is_hurt_is_named(store: Store) -> None:
    """A block that several refs need hurts all of them, by file and tensor."""
    index = store._catalog.index
    shared = set(_blocks(store, "base")) & set(_blocks(store, "expert"))
    with index.env.write() as rows:
        for block in shared:
            rows.delete(block, db=index.db("blocks"))
    report = store.fsck()
    affected = {(name, one.path, one.tensor) for one in report.affected for name in one.refs}
    for name in ("base", "expert", "merged"):
        assert {(name, "model.safetensors", "a"), (name, "config.json", None)} <= affected
    assert str(report.hint).startswith("store.repair(sources=[PLACE])")


def _blocks(store: Store, name: str) -> list[bytes]:
    catalog = store._catalog
    return [
        block
        for file in catalog.manifest(store[name].manifest).files
        for part in file.parts
        for block in catalog.tensor(part.tensor_id()).block_ids()
    ]


def test_a_pruned_snapshot_needs_no_contents(store: Store) -> None:
    """What was pruned needs its record and manifest; what a ref names needs everything."""
    index = store._catalog.index
    id = store["expert"].id
    only = (
        set(_blocks(store, "expert")) - set(_blocks(store, "base")) - set(_blocks(store, "merged"))
    )
    with index.env.write() as rows:
        index.put(rows, PRUNED, id, 0)
        for block in only or _blocks(store, "expert")[-1:]:
            rows.delete(block, db=index.db("blocks"))
    assert store.fsck().problems
    with index.env.write() as rows:
        for name in ("expert", "merged"):
            rows.delete(name.encode(), db=index.db("refs"))
        index.put(rows, PRUNED, _merge_of(store), 0)
        # A mirror with other refs is of another commit.
        index.set_generation(rows, index.generation(rows) + 1)
    mirror.write(store._catalog.layout, index)
    assert store.fsck().problems == ()
    with index.env.write() as rows:
        rows.delete(bytes([Kind.MANIFEST]) + store[str(id)].manifest, db=index.db("records"))
    assert {problem.kind for problem in store.fsck().problems} == {"manifest"}


def _merge_of(store: Store) -> bytes:
    ids = store.snapshot_ids()
    return next(id for id in ids if store._catalog.snapshot(id).made == "merge")


def test_a_condemned_pack_is_garbage(store: Store) -> None:
    """A pack that no row names and that waits to be removed is no problem."""
    (store.path / "packs" / "ff").mkdir(exist_ok=True)
    pack = PackId(b"\xff" * 32)
    path = Path(store._catalog.packs.where(pack))
    path.write_bytes(b"anything")
    index = store._catalog.index
    with index.env.write() as rows:
        index.put(rows, CONDEMNED, 256, (pack, 0, HERE, ()))
    report = store.fsck(read_data=True)
    assert report.problems == ()
    assert str(path.relative_to(store.path)) in report.garbage


@pytest.mark.parametrize("database", ["snapshots", "contents", "children"])
def test_rows_of_a_snapshot_that_are_missing(store: Store, database: str) -> None:
    """A snapshot record without its row, or without its edges, is named, and repair writes them."""
    index = store._catalog.index
    with index.env.write() as rows, rows.cursor(db=index.db(database)) as cursor:
        assert cursor.first()
        before = bytes(cursor.key())
        cursor.delete()
    problems = store.fsck().problems
    assert any(problem.kind == "snapshot" for problem in problems)
    assert store.repair().after.problems == ()
    with index.env.read() as rows:
        assert rows.get(before, db=index.db(database)) is not None


def test_a_row_of_an_unknown_pack(store: Store) -> None:
    """A row that names a pack number which nobody has is named."""
    index = store._catalog.index
    with index.env.write() as rows, rows.cursor(db=index.db("blocks")) as cursor:
        assert cursor.first()
        key, value = bytes(cursor.key()), bytes(cursor.value())
        rows.put(key, b"\0\0\xff\xff" + value[4:], db=index.db("blocks"))
    problems = {(problem.where, problem.what) for problem in store.fsck().problems}
    assert (key.hex(), "the index names an unknown pack 65535") in problems


@pytest.mark.parametrize("database", ["refs", "reflog"])
def test_a_name_that_cannot_be_read(store: Store, database: str) -> None:
    """A row of a ref or a reflog that does not decode is a finding, and no crash."""
    index = store._catalog.index
    with index.env.write() as rows, rows.cursor(db=index.db(database)) as cursor:
        assert cursor.first()
        key = bytes(cursor.key())
        rows.put(key, b"\xc1nonsense", db=index.db(database))
    report = store.fsck()
    assert ("ref" if database == "refs" else "reflog") in {p.kind for p in report.problems}
    assert report.hint is not None


def test_checking_changes_nothing(store: Store) -> None:
    """fsck leaves every file of a store as it was."""
    (store.path / "tmp" / "junk").touch()

    def state() -> list[tuple[str, int, int]]:
        paths = sorted(path for path in store.path.rglob("*") if path.name != "lock.mdb")
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]

    before = state()
    store.fsck(read_data=True)
    assert state() == before


def test_a_codec_that_is_not_known_is_no_damage(
    dense: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a newer program stop fsck and repair with what to do; none is dropped."""
    known = codecs._check

    def check(codec: int, *given: Any) -> None:
        known(99 if codec == codecs.Codec.FLOATS else codec, *given)

    with monkeypatch.context() as older:
        older.setattr(codecs, "_check", check)
        with pytest.raises(Incompatible, match="newer mstore"):
            dense.fsck(read_data=True)
        with pytest.raises(Incompatible, match="newer mstore"):
            dense.repair(read_data=True)
    assert not dense.fsck(read_data=True).problems
    with pytest.raises(Incompatible, match="codec 99 needs a newer mstore"):
        codecs.Codec(99)
