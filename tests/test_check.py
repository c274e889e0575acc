"""fsck: sound stores pass, every kind of damage is found and named, and garbage is no damage."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_models import BLOCK, small_model

from mstore.api import Store
from mstore.blocks.packs import PAGE
from mstore.reports import Progress
from mstore.store.refs import BRANCH, Ref
from mstore.store.transaction import RefMove, move_refs


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an add and a merge, closed."""
    root = tmp_path_factory.mktemp("template")
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", "expert"):
            base = None if name == "base" else "base"
            store.add(small_model(root / name, "s", changed=name), name=name, base=base, threads=1)
        plan = store.plan(base="base", experts=["expert"], method="linear", threads=1)
        store.merge(plan, name="merged", threads=1)
    return root / "store"


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of it, open."""
    shutil.copytree(template, tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
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
    path = store._catalog.packs.path(where.pack)
    overwrite(path, where.offset + 99, bytes([path.read_bytes()[where.offset + 99] ^ 1]))
    assert store.fsck().problems == ()
    (problem,) = store.fsck(read_data=True).problems
    assert (problem.kind, problem.where) == ("block", str(id))
    assert where.pack.short in problem.what


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
    overwrite(path, offset, b"\xff")


def _rename_store(path: Path) -> None:
    overwrite(path, 20, b"\xff")


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
    told = "index and pack footer do not agree; needed by base:model.safetensors a"
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
    move_refs(store._catalog, [RefMove("lost", None, nowhere, "test")])
    problems = store.fsck().problems
    assert ("ref", "lost") in {(problem.kind, problem.where) for problem in problems}
    assert any(problem.kind == "mirror" and "lost" in problem.what for problem in problems)


def test_a_parent_that_is_missing(store: Store) -> None:
    """A snapshot whose parent is not there is named, with the parent's role."""
    index = store._catalog.index
    with index.env.write() as rows:
        rows.delete(store["expert"].id, db=index.db("snapshots"))
    problems = store.fsck().problems
    merged = str(store["merged"].id)
    assert any(p.where == merged and "its expert" in p.what for p in problems)


@pytest.mark.parametrize(
    "contents", [None, b"", b"mstore refs 1", b"mstore refs 1\nbranch", b"\xff" * 50]
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


def test_checking_changes_nothing(store: Store) -> None:
    """fsck leaves every file of a store as it was."""
    (store.path / "tmp" / "junk").touch()

    def state() -> list[tuple[str, int, int]]:
        paths = sorted(path for path in store.path.rglob("*") if path.name != "lock.mdb")
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]

    before = state()
    store.fsck(read_data=True)
    assert state() == before
