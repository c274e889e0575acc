"""Bundles: a remote in one file. What goes in comes out; what a stranger made harms nothing."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.remotes import bundle as bundles
from mstore.remotes.bundle import Bundle, NewBundle
from mstore.remotes.objects import ROOT
from mstore.terms.errors import BadRequest, Conflict, Corrupt, Incompatible, MstoreError, NotFound


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a base, and of a branch with two models on it; and a bundle of that branch."""
    root = tmp_path_factory.mktemp("bundle")
    small_model(root / "in" / "base", "base")
    small_model(root / "in" / "old", "base", changed="old")
    small_model(root / "in" / "new", "base", changed="new")
    with Store.init(root / "store", block_size=BLOCK, author="me") as store:
        store.add(root / "in" / "base", name="base")
        store.add(root / "in" / "old", name="tuned", base="base")
        store.add(root / "in" / "new", name="tuned", base="base")
        store.note("tuned", {"score": 1})
        store.bundle(root / "tuned.mbundle", ["tuned"])
    return root


def taken_out(family: Path, path: Path, to: Path) -> None:
    """Clone a bundle; the clone has the branch, byte for byte, and is sound."""
    Store.clone(f"bundle:{path}", to)
    with Store.open(to) as clone:
        clone.checkout("tuned", to.with_name(f"{to.name}-out"))
        assert files_of(to.with_name(f"{to.name}-out")) == files_of(family / "in" / "new")
        assert clone.fsck(read_data=True).problems == ()


# -- writing -----------------------------------------------------------------------------------


def test_a_bundle_has_the_model_and_says_what_it_lacks(family: Path, tmp_path: Path) -> None:
    """A clone has the models that were named, byte for byte, with notes; of ancestors the records,
    and these are what the report names."""
    path = tmp_path / "one.mbundle"
    with Store.open(family / "store") as store:
        report = store.bundle(path, ["tuned"])
        old, base = (store.show(one).snapshot for one in ("tuned~1", "base"))
    assert set(report.without_contents) == {old, base}
    assert (report.refs, report.snapshots, report.bytes) == (("tuned",), 3, path.stat().st_size)
    taken_out(family, path, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as clone:
        assert list(clone) == ["tuned"]
        assert [one.value for one in clone.notes_of("tuned")] == [1]
        with pytest.raises(MstoreError):
            clone.checkout(old, tmp_path / "old")


def test_it_is_a_plain_zip_whose_root_is_last(family: Path) -> None:
    """Other programs read it: nothing is compressed, every checksum is right, names are relative;
    and the root comes after what it names."""
    with zipfile.ZipFile(family / "tuned.mbundle") as opened:
        assert opened.testzip() is None
        members = opened.infolist()
    assert {one.compress_type for one in members} == {zipfile.ZIP_STORED}
    assert [one.filename.partition("/")[0] for one in members] == [
        *("packs", "tables", "lists", "lists", "lists", "lists", ROOT)
    ]


def test_a_file_that_exists_is_never_replaced(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a file that was there before, nor one that appears while the bundle is written."""
    path = tmp_path / "one.mbundle"
    path.write_bytes(b"mine")
    with Store.open(family / "store") as store:
        with pytest.raises(Conflict):
            store.bundle(path, ["tuned"])
        path.unlink()
        finish = NewBundle.finish

        def late(self: NewBundle) -> None:
            path.write_bytes(b"mine")
            finish(self)

        monkeypatch.setattr(NewBundle, "finish", late)
        with pytest.raises(Conflict):
            store.bundle(path, ["tuned"])
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"one.mbundle": b"mine"}


def test_a_failure_leaves_no_file(family: Path, tmp_path: Path) -> None:
    """Of a store with a damaged block there is no bundle, no part of one, and nothing in tmp/."""
    shutil.copytree(family / "store", tmp_path / "store")
    for pack in (tmp_path / "store").rglob("*.pack"):
        pack.chmod(0o644)
        changed(pack, 4096, bytes(64))
    (tmp_path / "out").mkdir()
    with Store.open(tmp_path / "store") as store:
        with pytest.raises(Corrupt):
            store.bundle(tmp_path / "out" / "x.mbundle", ["tuned"])
        with pytest.raises(NotFound):
            store.bundle(tmp_path / "out" / "x.mbundle", ["nobody"])
        with pytest.raises(BadRequest):
            store.bundle(tmp_path / "out" / "x.mbundle", [])
    assert list((tmp_path / "out").iterdir()) == []
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_this_store_remembers_no_remote(family: Path) -> None:
    """Making a bundle moves no ref below remotes/ and keeps nothing of it."""
    with Store.open(family / "store") as store:
        assert [one for one in store.refs() if one.kind == "remote"] == []
        assert store.remotes() == []
    assert not (family / "store" / "remotes").exists()


# -- reading -----------------------------------------------------------------------------------


def test_a_bundle_is_fetched_by_name(family: Path, tmp_path: Path, cwd: Path) -> None:
    """`add_remote` takes a bundle, also by a relative path with signs of URLs in its name."""
    name = "a b?c#d%20.mbundle"
    shutil.copy(family / "tuned.mbundle", cwd / name)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        assert store.add_remote("x", f"bundle:{name}").url == f"bundle:{cwd / name}"
        store.fetch("x")
        store.checkout("remotes/x/tuned", tmp_path / "out")
        assert store.fetch("x").fetched == ()
        assert store.remote_fsck("x", read_data=True).problems == ()
    assert files_of(tmp_path / "out") == files_of(family / "in" / "new")


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, for the length of a test."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def test_a_bundle_is_read_only(family: Path, tmp_path: Path) -> None:
    """A push to it, and every call that changes objects, is refused; the file stays as it was."""
    path = tmp_path / "x.mbundle"
    shutil.copy(family / "tuned.mbundle", path)
    before = path.read_bytes()
    Store.clone(f"bundle:{path}", tmp_path / "clone")
    with Store.open(tmp_path / "clone") as clone:
        with pytest.raises(Incompatible, match="read-only"):
            clone.push("origin", every=True)
        with pytest.raises(Incompatible, match="read-only"):
            clone.push("origin", delete=["tuned"])
        with pytest.raises(Incompatible, match="read-only"):
            clone.remote_gc("origin")
    opened = Bundle(path)
    calls: list[Callable[[], object]] = [
        lambda: opened.swap_root(b"{}", None),
        lambda: opened.probe("x"),
        lambda: opened.put_bytes("lists/00", b""),
        lambda: opened.remove(ROOT),
    ]
    for call in calls:
        with pytest.raises(Incompatible, match="read-only"):
            call()
    opened.close()
    assert path.read_bytes() == before


def test_another_bundle_of_the_same_name_is_noticed(family: Path, tmp_path: Path) -> None:
    """A remote that is a bundle stays that bundle: another one at its address is refused."""
    path = tmp_path / "x.mbundle"
    shutil.copy(family / "tuned.mbundle", path)
    Store.clone(f"bundle:{path}", tmp_path / "clone")
    path.unlink()
    with Store.open(family / "store") as store:
        store.bundle(path, ["base"])
    with Store.open(tmp_path / "clone") as clone:
        with pytest.raises(Conflict, match="another remote"):
            clone.fetch("origin")
        path.unlink()
        with pytest.raises(NotFound):
            clone.fetch("origin")


@pytest.mark.parametrize("url", ["bundle:", "bundle:a\nb", f"bundle:{'x' * 2000}"])
def test_what_is_no_address(url: str, tmp_path: Path) -> None:
    """An empty, unprintable or endless path is refused, and so is an endpoint of a bundle."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        with pytest.raises(BadRequest):
            store.add_remote("x", url)
        with pytest.raises(BadRequest):
            store.add_remote("x", "bundle:/a", endpoint="http://127.0.0.1:1")
        assert store.remotes() == []


# -- bundles of strangers ----------------------------------------------------------------------


def written(
    path: Path,
    members: list[tuple[str, bytes]],
    *,
    compression: int = zipfile.ZIP_STORED,
    is_long: bool = False,
) -> Path:
    """Write a zip with Python's own writer."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            with made.open(info, "w", force_zip64=is_long) as member:
                member.write(data)
    return path


def members_of(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as opened:
        return [(one.filename, opened.read(one)) for one in opened.infolist()]


def central(data: bytes, number: int = 0) -> int:
    """Where the entry of a member begins in the zip's directory."""
    at = struct.unpack_from("<I", data, data.rindex(b"PK\x05\x06") + 16)[0]
    for _ in range(number):
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        at += 46 + name + extra + comment
    return int(at)


def changed(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../x", "packs/../../x", "packs\\..\\x", "C:/x", "packs//x", "lists/"),
        *("Lists/00", "", "ünï", "lists/00.pack.exe"),
    ],
)
def test_names_that_no_object_has(family: Path, tmp_path: Path, name: str) -> None:
    """A member whose name is absolute, leads upward or is no object's makes it no bundle."""
    known = members_of(family / "tuned.mbundle")
    path = written(tmp_path / "x.mbundle", [*known, (name, b"x")])
    with pytest.raises(Corrupt, match="a member is called"):
        Bundle(path)


def test_two_members_of_one_name(family: Path, tmp_path: Path) -> None:
    """Which of two would be read is for nobody to say."""
    known = members_of(family / "tuned.mbundle")
    with pytest.warns(UserWarning, match="Duplicate"):
        path = written(tmp_path / "x.mbundle", [*known, known[0]])
    with pytest.raises(Corrupt, match="two members"):
        Bundle(path)


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members(family: Path, tmp_path: Path, how: int) -> None:
    """A compressed member is refused before anything is decoded: there are no zip bombs."""
    path = written(tmp_path / "x.mbundle", members_of(family / "tuned.mbundle"), compression=how)
    with pytest.raises(Corrupt, match="compressed"):
        Bundle(path)


def _flags(data: bytes) -> tuple[int, bytes]:
    return central(data) + 8, struct.pack("<H", 1)


def _long_member(data: bytes) -> tuple[int, bytes]:
    return central(data) + 20, struct.pack("<II", 1 << 30, 1 << 30)


def _two_sizes(data: bytes) -> tuple[int, bytes]:
    return central(data) + 24, struct.pack("<I", 1)


def _far_header(data: bytes) -> tuple[int, bytes]:
    return central(data) + 42, struct.pack("<I", len(data) - 10)


def _many_entries(data: bytes) -> tuple[int, bytes]:
    return data.rindex(b"PK\x05\x06") + 8, struct.pack("<HHI", 65534, 65534, 1 << 30)


def _no_directory(data: bytes) -> tuple[int, bytes]:
    return data.rindex(b"PK\x05\x06"), b"PKxx"


def _no_root(data: bytes) -> tuple[int, bytes]:
    return central(data, 6) + 46, b"nstore-remote"


@pytest.mark.parametrize(
    "change",
    [_flags, _long_member, _two_sizes, _far_header, _many_entries, _no_directory, _no_root],
)
def test_a_directory_that_lies(
    family: Path, tmp_path: Path, change: Callable[[bytes], tuple[int, bytes]]
) -> None:
    """Encrypted members, sizes beyond the file, sizes that differ, headers elsewhere, directories
    that are longer than the file or missing, and no root: Corrupt, at once."""
    path = tmp_path / "x.mbundle"
    shutil.copy(family / "tuned.mbundle", path)
    changed(path, *change(path.read_bytes()))
    with pytest.raises(Corrupt):
        Bundle(path)


def test_a_member_is_read_where_its_own_header_is(family: Path, tmp_path: Path) -> None:
    """An entry of the directory that points at another member's header reads nothing."""
    path = tmp_path / "x.mbundle"
    shutil.copy(family / "tuned.mbundle", path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        first, second = opened.infolist()[:2]
    changed(path, central(data, 1) + 42, struct.pack("<I", first.header_offset))
    opened_bundle = Bundle(path)
    with pytest.raises(Corrupt, match="not where"):
        opened_bundle.read_each(second.filename, [(0, 1)])
    opened_bundle.close()


def test_ranges_end_with_their_member(family: Path) -> None:
    """A range beyond a member's end gives no byte of the next one."""
    opened = Bundle(family / "tuned.mbundle")
    size = opened.size(ROOT)
    for span in ((0, size + 1), (size, 1), (-1, 1), (0, -1)):
        with pytest.raises(Corrupt):
            opened.read_each(ROOT, [span])
    assert opened.read_each(ROOT, [(size, 0), (0, 1)]) == [b"", b"{"]
    opened.close()


def test_the_directory_is_read_within_a_limit(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that is longer than the limit is not read into memory; a long comment neither."""
    monkeypatch.setattr(bundles, "MOST_DIRECTORY_BYTES", 70_000)
    known = members_of(family / "tuned.mbundle")
    many = [(f"lists/{number:064x}", b"") for number in range(1000)]
    path = written(tmp_path / "x.mbundle", [*known, *many])
    with pytest.raises(Corrupt, match="too long"):
        Bundle(path)
    Bundle(written(tmp_path / "y.mbundle", [*known, *many[:500]])).close()


def test_a_zip_of_long_offsets_is_a_bundle(family: Path, tmp_path: Path) -> None:
    """Zip64, as for packs of many GiB, is read like any other."""
    known = members_of(family / "tuned.mbundle")
    path = written(tmp_path / "x.mbundle", known, is_long=True)
    assert path.read_bytes().startswith(b"PK\x03\x04\x2d")
    taken_out(family, path, tmp_path / "clone")


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"PK\x05\x06" + bytes(18)])
def test_no_zip_at_all(tmp_path: Path, data: bytes) -> None:
    """An empty file, text and an empty zip are no bundles; a directory is none either."""
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(Corrupt):
        Bundle(tmp_path / "x")
    with pytest.raises(MstoreError):
        Bundle(tmp_path)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_bundle_gives_the_model_or_an_error(
    family: Path, tmp_path: Path, seed: int
) -> None:
    """With a flipped byte anywhere, or cut off anywhere, a clone is right or there is none."""
    draw = random.Random(seed)
    path = tmp_path / "x.mbundle"
    data = bytearray((family / "tuned.mbundle").read_bytes())
    if seed % 4 == 0:
        del data[draw.randrange(len(data)) :]
    else:
        # Most of a pack is padding and payloads: half of the flips are in what leads to them.
        begin = len(data) * 9 // 10 if seed % 2 else 0
        data[draw.randrange(begin, len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    try:
        Store.clone(f"bundle:{path}", tmp_path / "clone")
    except MstoreError:
        assert not (tmp_path / "clone").exists()
        return
    with Store.open(tmp_path / "clone") as clone:
        for name in clone:
            clone.checkout(name, tmp_path / "out")
            assert files_of(tmp_path / "out") == files_of(family / "in" / "new")
