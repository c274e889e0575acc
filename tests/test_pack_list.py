"""The pack list: which packs are the store's, whatever happens to it or to the index."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from small_models import BLOCK, small_model

from mstore import Store
from mstore.store import pack_list, unnamed_packs
from mstore.store.layout import Layout
from mstore.terms.errors import Corrupt, MstoreError
from mstore.terms.ids import PackId


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two packs."""
    root = tmp_path / "store"
    with Store.init(root, block_size=BLOCK) as store:
        for name in ("one", "two"):
            store.add(small_model(tmp_path / name, name), name=name, threads=1)
    return root


def packs(root: Path) -> set[str]:
    return {path.stem for path in root.glob("packs/*/*.pack")}


def lists(root: Path) -> list[Path]:
    """The lists, the newest first."""
    found = root.glob("refs/packs.*")
    return sorted(found, key=lambda path: int(path.suffix[1:]), reverse=True)


def layout_of(root: Path) -> Layout:
    with Store.open(root) as store:
        return store._catalog.layout


def test_each_pack_has_a_line(root: Path) -> None:
    """The newest list has every pack, with the generation of the commit that published it, and ends
    with a hash of itself."""
    told = pack_list.read(layout_of(root))
    assert {pack.hex() for pack in told.since} == packs(root)
    assert sorted(told.since.values()) == [1, 2]
    newest = lists(root)[0]
    assert (told.generation, newest.name) == (2, "packs.2")
    *lines, last = newest.read_text().splitlines(keepends=True)
    uuid = (root / "format").read_text().split()[2]
    assert lines[:3] == ["mstore packs 1\n", "generation 2\n", f"store {uuid}\n"]
    assert lines[3:] == sorted(lines[3:])
    assert last == f"blake3 {blake3(''.join(lines).encode()).hexdigest()}\n"


def test_only_packs_make_a_list_and_few_stay(root: Path, tmp_path: Path) -> None:
    """A commit without packs writes none; the newest four stay."""
    before = lists(root)
    with Store.open(root) as store:
        store.tag("v1", "one")
        assert lists(root) == before
        for number in range(5):
            store.add(small_model(tmp_path / f"m{number}", str(number)), name="m", threads=1)
    assert len(lists(root)) == pack_list.KEPT == 4


def test_a_damaged_list_gives_way_to_the_one_before(root: Path, tmp_path: Path) -> None:
    """A list that is cut or has a bit changed anywhere counts as missing; the next commit makes it
    whole again."""
    newest, before = lists(root)
    whole = newest.read_bytes()
    layout = layout_of(root)
    older = pack_list.read_file(before)
    spoiled = [whole[:end] for end in range(len(whole))]
    spoiled += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for data in spoiled:
        newest.write_bytes(data)
        with pytest.raises(Corrupt):
            pack_list.read_file(newest)
        assert pack_list.read(layout) == older
    with Store.open(root) as store:
        assert {problem.kind for problem in store.fsck().problems} == {"pack list"}
        assert store.fsck().hint == "store.repair()"
        store.add(small_model(tmp_path / "three", "three"), name="three", threads=1)
        assert store.fsck().problems == ()
    assert {pack.hex() for pack in pack_list.read(layout).since} == packs(root)


@given(st.binary(max_size=200))
def test_no_list_is_a_surprise(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """Any bytes give lines of packs, or an error of ours."""
    path = tmp_path_factory.getbasetemp() / "packs.7"
    body = b"mstore packs 1\ngeneration 7\nstore 00010203-0405-0607-0809-0a0b0c0d0e0f\n" + text
    for data in (text, body + b"blake3 " + blake3(body).hexdigest().encode() + b"\n"):
        path.write_bytes(data)
        try:
            told = pack_list.read_file(path)
            assert all(isinstance(pack, PackId) for pack in told.since)
        except MstoreError:
            pass


def test_a_flipped_name_of_the_store_is_found(root: Path) -> None:
    """The list says a second time which store it is: fsck finds another one in `format`."""
    path = root / "format"
    line = path.read_text()
    digit = line[10]
    path.write_text(f"{line[:10]}{'0' if digit != '0' else '1'}{line[11:]}")
    with Store.open(root) as store:
        assert store.doubt() is None
        assert [problem.kind for problem in store.fsck().problems] == ["format"]


def test_repair_writes_a_list_that_is_lost(root: Path) -> None:
    """Without any list the store goes on; fsck tells of it, and repair writes it."""
    for path in lists(root):
        path.unlink()
    with Store.open(root) as store:
        assert store.doubt() is None
        assert [problem.kind for problem in store.fsck().problems] == ["pack list"]
        assert store.repair().after.problems == ()
        assert store.doubt() is None
    assert {pack.hex() for pack in pack_list.read(layout_of(root)).since} == packs(root)


def test_a_line_goes_with_the_pack(root: Path, tmp_path: Path) -> None:
    """The line of a pack that gc removed is in no list that is written afterwards."""
    gone = packs(root)
    with Store.open(root) as store:
        store.remove("one", "two")
        store.gc(reflog_days=0)
        assert not packs(root)
        store.add(small_model(tmp_path / "three", "three"), name="three", threads=1)
    found = {pack.hex() for pack in pack_list.read(layout_of(root)).since}
    assert found == packs(root)
    assert not found & gone


def test_an_index_two_commits_behind_the_list(root: Path, tmp_path: Path) -> None:
    """Where an older index and mirror came over newer ones, the newest list tells of it."""
    shutil.copytree(root / "index", tmp_path / "index")
    shutil.copy(root / "refs" / "mirror", tmp_path / "mirror")
    with Store.open(root) as store:
        for name in ("three", "four"):
            store.add(small_model(tmp_path / name, name), name=name, threads=1)
    shutil.rmtree(root / "index")
    shutil.copytree(tmp_path / "index", root / "index")
    for path in root.glob("refs/mirror*"):
        path.unlink()
    shutil.copy(tmp_path / "mirror", root / "refs" / "mirror")
    with Store.open(root) as store:
        assert "older than the pack list" in (store.doubt() or "")
    Store.reindex(root)
    with Store.open(root) as store:
        assert store.doubt() is None
        assert store.fsck(read_data=True).problems == ()
        assert len(store.snapshot_ids()) == 4


def foreign(directory: Path, block_size: int) -> Path:
    """The pack of another store."""
    with Store.init(directory / "other", block_size=block_size) as store:
        store.add(small_model(directory / "model", "foreign"), name="foreign", threads=1)
    [path] = directory.glob("other/packs/*/*.pack")
    return path


def put(root: Path, pack: Path) -> None:
    target = root / "packs" / pack.parent.name / pack.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy(pack, target)


def test_a_pack_without_a_line_is_unknown(root: Path, tmp_path: Path) -> None:
    """Nothing that writes packs goes on beside it, gc least of all; reindex takes it, says so, and
    gives it a line."""
    pack = foreign(tmp_path, BLOCK)
    put(root, pack)
    there = packs(root)
    with Store.open(root) as store:
        assert store.doubt() is None
        for write in (store.gc, store.repair):
            with pytest.raises(Corrupt, match="no line in the pack list"):
                write()
        with pytest.raises(Corrupt, match="no line in the pack list"):
            store.add(small_model(tmp_path / "three", "three"), name="three", threads=1)
    assert packs(root) == there
    report = Store.reindex(root)
    assert any(pack.stem in remark and "no line" in remark for remark in report.remarks)
    assert len(report.recovered) == 1
    with Store.open(root) as store:
        assert store.fsck(read_data=True).problems == ()
        store.gc()
    assert packs(root) >= {pack.stem}


def test_a_pack_of_another_block_size_is_left_out(root: Path, tmp_path: Path) -> None:
    """It cannot be the store's: reindex says so, gc puts it aside, and there it stays."""
    pack = foreign(tmp_path, BLOCK * 2)
    put(root, pack)
    for _ in range(2):
        report = Store.reindex(root)
        assert report.recovered == ()
        with Store.open(root) as store:
            assert store.fsck(read_data=True).problems == ()
            store.gc()
        assert pack.stem not in packs(root)
    assert any(root.glob(f"lost+found/*/{pack.name}"))
    with Store.open(root) as store:
        unnamed_packs.empty_aside(store._catalog.layout)
