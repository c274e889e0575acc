"""mstore_fuse.erofs: images and maps, read back by a reader of their own (erofs_reader)."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from erofs_reader import PAGE, Reader
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.terms.errors import Corrupt, Incompatible, Unavailable
from mstore.terms.ids import BlockId, PackId
from mstore_fuse.erofs.image import CopiedPages, Image
from mstore_fuse.erofs.mapping import COPIED_BYTES, FileMap, MappedPiece, page_map

NAME = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30
).filter(lambda name: name not in (".", ".."))
PATH = st.lists(NAME, min_size=1, max_size=3).map("/".join)
TIME = 1_700_000_000_123_456_789


class Part(NamedTuple):
    """A piece of a synthetic file: what it is, its bytes, its pack, and the gap before it there."""

    kind: str
    data: bytes
    pack: int
    gap: int


@st.composite
def parts(draw: st.DrawFn) -> Part:
    kind = draw(st.sampled_from(["aligned", "aligned", "follows", "odd", "zeros", "ones", "coded"]))
    length = draw(st.integers(1, 5 * PAGE) | st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1]))
    if kind in ("zeros", "ones"):
        data = bytes([kind == "ones", 0]) * (length // 2 + 1)
    else:
        data = random.Random(draw(st.integers(0, 255))).randbytes(length)
    return Part(kind, data, draw(st.integers(0, 2)), draw(st.integers(0, 5000)))


TREE = st.dictionaries(PATH, st.lists(parts(), max_size=6), max_size=12).filter(
    lambda tree: not any(a != b and b.startswith(a + "/") for a in tree for b in tree)
)


def laid_out(
    tree: Mapping[str, list[Part]],
) -> tuple[dict[str, list[MappedPiece]], dict[str, bytes], list[bytes]]:
    """Lay synthetic files out in three packs; return pieces, contents and packs."""
    packs = [bytearray(b"P" * PAGE) for _ in range(3)]
    pieces: dict[str, list[MappedPiece]] = {}
    contents: dict[str, bytes] = {}
    for path, file in tree.items():
        offset, found = 0, []
        for part in file:
            pack = packs[part.pack]
            codec, stored = Codec.RAW, part.data
            if part.kind == "aligned":
                pack += b"g" * ((offset - len(pack)) % PAGE)
            elif part.kind == "odd":
                pack += b"g" * part.gap
            elif part.kind in ("zeros", "ones"):
                codec, stored = Codec.CONSTANT, part.data[:2]
            elif part.kind == "coded":
                codec, stored = Codec.FLOATS, b"not what is shown"
            at = Location(pack_id(part.pack), len(pack), len(stored), len(part.data), codec, 2)
            pack += stored
            found.append(MappedPiece(offset, len(part.data), 0, BlockId.of(part.data), at))
            offset += len(part.data)
        pieces[path], contents[path] = found, b"".join(part.data for part in file)
    return (
        pieces,
        contents,
        [bytes(pack.ljust(-(-len(pack) // PAGE) * PAGE, b"e")) for pack in packs],
    )


def labels_of(contents: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """Give every second file labels of different lengths, and the directories one."""
    some = {path: {"name": path, "size": str(len(contents[path]))} for path in [*contents][::2]}
    return {"": {"mstore.snapshot": "abc"}} | some


def pack_id(number: int) -> PackId:
    return PackId(bytes([number]) * 32)


def written(
    pieces: Mapping[str, list[MappedPiece]], contents: Mapping[str, bytes], packs: list[bytes]
) -> tuple[bytes, int]:
    """Write an image as the driver does; return it, and how many pages were copied."""
    sizes = {path: len(content) for path, content in contents.items()}
    image = Image(sizes, [len(pack) for pack in packs], TIME, labels=labels_of(contents))
    made = bytearray()

    def write(offset: int, data: bytes) -> None:
        made.extend(bytes(max(0, offset + len(data) - len(made))))
        made[offset : offset + len(data)] = data

    def read(path: str, offset: int, size: int) -> bytes:
        data = contents[path][offset : offset + size]
        assert len(data) == size
        return data

    copied = CopiedPages(image.data_block, write)
    devices = {pack_id(number): number + 1 for number in range(len(packs))}
    for path, content in contents.items():
        write(*image.file(path, page_map(path, len(content), pieces[path], devices, copied, read)))
    copied.flush()
    for offset, data in image.head(copied.count):
        write(offset, data)
    return bytes(made), copied.count


@settings(max_examples=20)
@given(TREE)
def test_an_image_shows_every_file(tree: dict[str, list[Part]]) -> None:
    """Any tree, in whatever way its bytes lie in packs, is read back from image and packs."""
    pieces, contents, packs = laid_out(tree)
    image, _ = written(pieces, contents, packs)
    reader = Reader(image, packs)
    assert reader.blocks * PAGE == len(image)
    for path, content in contents.items():
        inode = reader.find(path)
        shown = reader.read(inode)
        assert shown[: inode.size] == content
        assert not shown[inode.size :].strip(b"\0"), "what follows the end of a file shows in maps"
        assert (inode.mode, inode.links) == (0o100444, 1)
        assert inode.mtime == divmod(TIME, 1_000_000_000)
        assert inode.labels == labels_of(contents).get(path, {})


@settings(max_examples=20)
@given(TREE)
def test_directories_hold_exactly_their_names(tree: dict[str, list[Part]]) -> None:
    """Every directory lists its names in the order of their bytes, itself and its parent."""
    pieces, contents, packs = laid_out(tree)
    reader = Reader(written(pieces, contents, packs)[0], packs)
    seen, waiting = set(), [("", reader.root, reader.root)]
    while waiting:
        folder, nid, parent = waiting.pop()
        entries = reader.names(nid)
        names = [name for name, _, _ in entries]
        assert names == sorted(set(names))
        by_name = {name: (child, kind) for name, child, kind in entries}
        assert by_name.pop(b".") == (nid, 2)
        assert by_name.pop(b"..") == (parent, 2)
        assert reader.inode(nid).mode == 0o040555
        assert reader.inode(nid).labels == {"mstore.snapshot": "abc"}
        for name, (child, kind) in by_name.items():
            path = f"{folder}/{name.decode()}".lstrip("/")
            if kind == 2:
                waiting.append((path, child, nid))
            else:
                seen.add(path)
    assert seen == set(contents)


@settings(max_examples=20)
@given(TREE)
def test_inode_numbers_follow_from_names_and_sizes(tree: dict[str, list[Part]]) -> None:
    """Wherever the bytes lie, and in however many packs, a file has the same inode number."""
    contents = {path: b"".join(part.data for part in file) for path, file in tree.items()}
    sizes = {path: len(content) for path, content in contents.items()}
    one, other = Image(sizes, [PAGE], 0), Image(dict(reversed(sizes.items())), [PAGE] * 100, 1)
    assert {path: one.inode(path) for path in sizes} == {path: other.inode(path) for path in sizes}


def test_many_long_names() -> None:
    """A directory of more names than one page holds is searched across its pages."""
    contents = {f"{'n' * 200}{number:04}": b"%d" % number for number in range(200)}
    pieces: dict[str, list[MappedPiece]] = {path: [] for path in contents}
    reader = Reader(written(pieces, contents, [])[0], [])
    assert all(reader.read(reader.find(p)).rstrip(b"\0") == c for p, c in contents.items())


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a//b"], ["../a"], ["a/."], [""], ["n" * 256]])
def test_paths_that_form_no_tree_are_refused(paths: list[str]) -> None:
    """A file in a file, empty, `.` and `..` names, and names too long are damage."""
    with pytest.raises(Corrupt):
        Image(dict.fromkeys(paths, 1), [], 0)


def test_more_packs_than_the_format_numbers() -> None:
    """A device has a number of 16 bits."""
    with pytest.raises(Unavailable, match="70000 packs"):
        Image({}, [PAGE] * 70000, 0)


def test_constants_cost_one_page_and_zeros_none() -> None:
    """However long a constant is, only its pattern is copied."""
    tree = {
        "ones": [Part("ones", b"\1\0" * (50 * PAGE), 0, 0)],
        "zeros": [Part("zeros", bytes(9999), 0, 0)],
    }
    _, copied = written(*laid_out(tree))
    assert copied == 1


def test_much_that_is_coded_is_refused_with_its_size() -> None:
    """Beyond the limit the error says how much is coded, and how much lies at odd offsets."""

    def piece(offset: int, codec: Codec, at: int) -> MappedPiece:
        place = Location(pack_id(0), at, 1 << 20, 1 << 20, codec, 2)
        return MappedPiece(offset, 1 << 20, 0, BlockId(bytes(32)), place)

    mib = 1 << 20
    few = COPIED_BYTES // mib
    raw = [piece(n * mib, Codec.RAW, n * mib) for n in range(few)]
    coded = [piece((few + n) * mib, Codec.FLOATS, 0) for n in range(few)]
    FileMap({"a": raw + coded}, []).require_few_copies("main")
    odd = [piece((2 * few + n) * mib, Codec.RAW, 3 + n * mib) for n in range(2)]
    with pytest.raises(Incompatible) as caught:
        FileMap({"a": raw + coded + odd}, []).require_few_copies("main")
    assert "64.0 MiB of 130.0 MiB are stored compressed" in caught.value.what
    assert "2.0 MiB of 130.0 MiB lie where" in caught.value.what


@settings(max_examples=10)
@given(tree=TREE)
def test_fsck_erofs_agrees(tree: dict[str, list[Part]]) -> None:
    """The filesystem's own checker finds nothing wrong, and extracts the same files."""
    program = shutil.which("fsck.erofs")
    if program is None:
        pytest.skip("no fsck.erofs (apt install erofs-utils)")
    pieces, contents, packs = laid_out(tree)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number, pack in enumerate(packs):
            (root / f"pack{number}").write_bytes(pack)
        (root / "image").write_bytes(written(pieces, contents, packs)[0])
        devices = [f"--device={root}/pack{number}" for number in range(len(packs))]
        command = [program, *devices, f"--extract={root}/out", "--no-preserve", f"{root}/image"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        for path, content in contents.items():
            # Versions before 1.6 extract files with holes wrongly.
            if all(content[at : at + PAGE].strip(b"\0") for at in range(0, len(content), PAGE)):
                assert (root / "out" / path).read_bytes() == content
