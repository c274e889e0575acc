"""Segments: every row that was added is found, no other is, and no damage gives a wrong answer."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from crash_disk import Recording
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore import fs
from mstore.blocks import segment, segments
from mstore.blocks.location import Location
from mstore.blocks.pack_tables import FIELDS, PackTable, entries_of
from mstore.blocks.packs import NO_BASE, Kind, PackEntry
from mstore.blocks.segment import PAGE
from mstore.blocks.segments import Segments
from mstore.terms.errors import Corrupt, Incompatible, MstoreError, StorageFailed, Unreadable
from mstore.terms.ids import ID_BYTES, PackId, SegmentId

Answer = dict[tuple[int, bytes], set[Location]]
"""Every place of each block and record: what a dict knows, to compare with."""

ALIKE = [bytes(31) + b"\1", bytes(32), b"\xff" * 32, b"\xff" * 31 + b"\0", b"\1" + bytes(31)]
IDS = st.one_of(st.sampled_from(ALIKE), st.binary(min_size=ID_BYTES, max_size=ID_BYTES))
U32 = st.integers(0, 2**32 - 1)
ENTRIES = st.builds(
    PackEntry,
    IDS,
    st.sampled_from([int(kind) for kind in Kind]),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    U32,
    U32,
    st.one_of(st.just(NO_BASE), IDS),
)
PACKS = st.sampled_from([PackId(bytes([number]) * ID_BYTES) for number in range(8)])


def table(entries: Sequence[PackEntry]) -> PackTable:
    """The table of a pack, as an array."""
    return np.frombuffer(b"".join(one.encode() for one in entries), FIELDS)


TABLES = st.lists(st.tuples(PACKS, st.lists(ENTRIES, max_size=12).map(table)), max_size=5)
CHANGES = st.lists(st.one_of(TABLES, st.sets(PACKS, max_size=3)), max_size=8)


def location(pack: PackId, entry: PackEntry) -> Location:
    """What a row says of an entry."""
    return Location(
        pack,
        entry.offset,
        entry.stored_length,
        entry.raw_length,
        entry.codec,
        entry.width,
        entry.base,
    )


def known(tables: Mapping[PackId, PackTable]) -> Answer:
    """What all rows of these packs say."""
    found: Answer = defaultdict(set)
    for pack, entries in tables.items():
        for entry in entries_of(entries):
            found[entry.kind, entry.id].add(location(pack, entry))
    return dict(found)


def told(of: Segments) -> Answer:
    """What all rows say, in the order in which they are."""
    found: Answer = defaultdict(set)
    order = []
    for kind, id, place in of.walk():
        order.append((id, kind, place.pack, place.offset))
        assert place not in found[kind, id]
        found[kind, id].add(place)
    assert order == sorted(order)
    return dict(found)


def require_same(of: Segments, expected: Answer) -> None:
    """Every way to ask gives the rows that a dict gives."""
    assert told(of) == expected
    assert len(of) == sum(map(len, expected.values())) == sum(of.sizes())
    named = {place.pack for places in expected.values() for place in places}
    for number in range(20):
        assert of.has_pack(pack(number)) == (pack(number) in named)
    for kind in Kind:
        ids = [id for other, id in expected if other == kind]
        asked = [*ids, *ALIKE, *(bytes([*id[:-1], id[-1] ^ 1]) for id in ids), *ids]
        random.Random(len(asked)).shuffle(asked)
        there = [(int(kind), id) in expected for id in asked]
        assert of.has(kind, b"".join(asked)).tolist() == there
        for id, found in zip(asked, of.locations(kind, b"".join(asked)), strict=True):
            assert found in expected.get((int(kind), id), {None})
            assert of.locations(kind, id) == [found]
            assert set(of.places(kind, id)) == expected.get((int(kind), id), set())


@pytest.fixture(scope="module", autouse=True)
def few_rows_in_memory() -> Iterator[None]:
    """Small limits, so that few rows already need several runs, batches and merges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_GATHERED", 20)
        patch.setattr(segments, "_MERGED", 60)
        patch.setattr(segments, "_MOST_RUNS", 3)
        patch.setattr(segment, "_MOST_STARTS", 5)
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "segments"


def entries(count: int, seed: int) -> PackTable:
    """Entries with random ids, every third with a base, some of records."""
    rng = random.Random(seed)
    return table(
        [
            PackEntry(
                rng.randbytes(32),
                Kind.TENSOR if number % 5 == 4 else Kind.BLOCK,
                number % 7,
                2,
                rng.getrandbits(50),
                rng.getrandbits(20),
                rng.getrandbits(20),
                rng.randbytes(32) if number % 3 == 0 else NO_BASE,
            )
            for number in range(count)
        ]
    )


def pack(number: int) -> PackId:
    return PackId(bytes([number]) * ID_BYTES)


# -- rows ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(changes=CHANGES)
def test_rows_are_those_of_a_dict(changes: list[Any]) -> None:
    """After packs are added and dropped, each row is found in every way, in order, and no other;
    each segment has at least twice the rows of the next."""
    with tempfile.TemporaryDirectory() as temporary:
        of = Segments.create(Path(temporary) / "segments")
        tables: dict[PackId, PackTable] = {}
        for change in changes:
            if isinstance(change, set):
                of.drop(change)
                tables = {name: some for name, some in tables.items() if name not in change}
            else:
                of.add(change)
                for name, some in change:
                    # An empty table leaves no trace, so it may come again.
                    if not len(tables.get(name, ())):
                        tables[name] = some
            assert all(one >= 2 * other for one, other in pairwise(of.sizes()))
        expected = known(tables)
        require_same(of, expected)
        require_same(Segments(of.directory), expected)
        of.verify()
        assert of.packs() == {name for name, some in tables.items() if len(some)}
        names = {path.name for path in of.directory.iterdir()}
        assert len(names) == len(of.sizes()) + 2


@pytest.mark.rest
def test_many_rows(directory: Path) -> None:
    """Rows on many pages, added pack by pack and at once, are found; few segments have them."""
    tables = {pack(number): entries(40, number) for number in range(12)}
    one_by_one, at_once = Segments.create(directory), Segments.create(directory.with_name("other"))
    for item in tables.items():
        one_by_one.add([item])
    at_once.add(iter(tables.items()))
    assert at_once.sizes() == [480]
    assert len(one_by_one.sizes()) <= 5
    for of in (one_by_one, at_once):
        require_same(of, known(tables))
    one_by_one.drop({pack(number) for number in range(11)})
    require_same(one_by_one, known({pack(11): tables[pack(11)]}))


def test_a_block_of_several_packs_stays_with_each(directory: Path) -> None:
    """A block keeps its other places when a pack goes; a pack that is there is not added twice."""
    alone = entries(1, 1)
    (one,) = entries_of(alone)
    of = Segments.create(directory)
    of.add([(pack(1), alone), (pack(2), alone), (pack(1), alone[:0])])
    of.add([(pack(3), alone), (pack(2), entries(3, 2))])
    assert {place.pack for place in of.places(Kind.BLOCK, one.id)} == {pack(1), pack(2), pack(3)}
    assert len(of) == 3
    of.drop({pack(1), pack(3)})
    assert of.locations(Kind.BLOCK, one.id) == [location(pack(2), one)]
    of.drop({pack(2)})
    assert of.sizes() == []
    assert of.locations(Kind.BLOCK, one.id) == [None]


def test_ids_that_are_no_hashes(directory: Path) -> None:
    """Thousands of ids with one beginning are found in few steps, like others."""
    same = [
        PackEntry(b"x" * 30 + number.to_bytes(2, "big"), 0, 0, 1, 0, 1, 1) for number in range(4000)
    ]
    of = Segments.create(directory)
    of.add([(pack(1), table(same))])
    assert of.has(Kind.BLOCK, b"".join(one.id for one in same)).all()
    assert not of.has(Kind.BLOCK, b"x" * 30 + b"\xff\xff" + b"y" * 32).any()
    of.verify()


def test_threads_ask_at_once(directory: Path) -> None:
    """Threads that use pages for the first time together get the same answers."""
    tables = {pack(number): entries(300, number) for number in range(4)}
    Segments.create(directory).add(tables.items())
    of = Segments(directory)
    ids = b"".join(entry.id for some in tables.values() for entry in entries_of(some))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: of.locations(Kind.BLOCK, ids), range(16)))
    assert all(one == found[0] for one in found)


def test_merging_holds_a_batch_of_each_segment(directory: Path) -> None:
    """While segments are merged, no step has more rows than one batch of each of them."""
    of = Segments.create(directory)
    of.add([(pack(1), entries(3000, 1))])
    of.add([(pack(2), entries(1000, 2))])
    (large, small) = of._segments
    names = [one.packs() for one in (large, small)]
    steps = list(map(len, segments._joined((large, small), names, [pack(1), pack(2)])))
    assert sum(steps) == 4000
    assert max(steps) <= 60 + 2 * 46


# -- the layout ------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_format(directory: Path) -> None:
    """A program that knows only the format page finds every row of a segment."""
    table = entries(200, 3)
    of = Segments.create(directory)
    of.add([(pack(7), table[:100])])
    of.add([(pack(3), table[100:])])
    lines = (directory / "list").read_bytes().splitlines(keepends=True)
    assert lines[0] == b"mstore segments 1\n"
    assert len(lines) == 3
    name, rows = lines[1].split()
    assert rows == b"200"
    assert lines[2] == b"blake3 " + blake3(b"".join(lines[:2])).hexdigest().encode() + b"\n"
    path = directory / f"{name.decode()}.segment"
    assert path.stat().st_mode & 0o222 == 0
    pages = [path.read_bytes()[at : at + 4096] for at in range(0, path.stat().st_size, 4096)]
    head = pages[0]
    magic, version, bits, count, packs = struct.unpack_from(">8sIIQQ", head)
    assert (magic, version, count, packs) == (b"MSTORESG", 1, 200, 2)
    nonce, digests = head[32:64], [head[at : at + 32] for at in (64, 96, 128)]
    assert not any(head[160:4064])
    context = "mstore 1 segment"
    assert blake3(head[:4064], derive_key_context=context).hexdigest() == name.decode()
    key = blake3(nonce, derive_key_context="mstore 1 segment page").digest()
    for number, page in enumerate(pages):
        assert page[4064:] == blake3(page[:4064] + number.to_bytes(32, "big"), key=key).digest()
    buckets = (1 << bits) + 1
    cuts = [1, 1 - (-buckets // 1016)]
    cuts += [cuts[1] - (-count // 46), len(pages)]
    sections = [pages[start:end] for start, end in pairwise(cuts)]
    assert len(sections[2]) == 1
    for section, digest in zip(sections, digests, strict=True):
        assert blake3(b"".join(page[4064:] for page in section)).digest() == digest
    starts = [at for page in sections[0] for at in struct.unpack(">1016I", page[:4064])][:buckets]
    stored = [page[at * 88 : (at + 1) * 88] for page in sections[1] for at in range(46)][:count]
    assert stored == sorted(stored)
    leading = [int.from_bytes(row[:8], "big") >> (64 - bits) for row in stored]
    assert starts == [sum(one < value for one in leading) for value in range(buckets)]
    names = [sections[2][0][:32], sections[2][0][32:64]]
    assert names == [pack(3), pack(7)]
    found: Answer = defaultdict(set)
    for row in stored:
        id, kind, number, offset, length, plain, codec, width, base, zero = struct.unpack(
            ">32sBIQIIBB32sB", row
        )
        assert zero == 0
        place = Location(PackId(names[number]), offset, length, plain, codec, width, base)
        found[kind, id].add(place)
    assert found == known({pack(7): table[:100], pack(3): table[100:]})


# -- damage ----------------------------------------------------------------------------------------


def small(directory: Path) -> tuple[Answer, Path]:
    """A directory with one segment of few rows."""
    tables = {pack(1): entries(6, 1), pack(2): entries(5, 2)}
    Segments.create(directory).add(tables.items())
    (path,) = directory.glob("*.segment")
    return known(tables), path


def ask(directory: Path, expected: Answer, *, singly: bool = False) -> None:
    """Ask for everything, each id by itself or all at once, then check everything; each answer is
    right, or there is an error."""
    of = Segments(directory)
    if singly:
        for (kind, id), places in expected.items():
            assert set(of.places(Kind(kind), id)) == places
    else:
        for kind in Kind:
            ids = [id for other, id in expected if other == kind]
            for id, found in zip(ids, of.locations(kind, b"".join(ids)), strict=True):
                assert found in expected[kind, id]
        assert not of.has(Kind.BLOCK, bytes(32)).any()
    of.verify()


PADDING = re.compile(rb"\0{40,}")
"""What fills pages up, and the fields that are empty: one byte of it is like the next."""


def flipped(content: bytes, of_padding: int) -> list[int]:
    """Every byte, but of padding the first, the last, and one in so many."""
    left_out = {
        at
        for run in PADDING.finditer(content)
        for at in range(run.start() + 1, run.end() - 1)
        if (at - run.start()) % of_padding
    }
    return [at for at in range(len(content)) if at not in left_out]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bits", "of_padding"),
    [
        *((0x01, 61), (0xFF, 61)),
        *(pytest.param(bits, 1, marks=pytest.mark.rest) for bits in (0x01, 0xFF)),
    ],
)
def test_every_flipped_byte_is_an_error(directory: Path, bits: int, of_padding: int) -> None:
    """A flipped byte anywhere in list or segment is an error that names the file, and no answer
    before it is wrong."""
    expected, path = small(directory)
    path.chmod(0o644)
    for file in (directory / "list", path):
        with file.open("r+b", buffering=0) as opened:
            whole = opened.read()
            for at in flipped(whole, of_padding):
                os.pwrite(opened.fileno(), bytes([whole[at] ^ bits]), at)
                with pytest.raises(Corrupt) as caught:
                    ask(directory, expected, singly=bits == 1)
                assert caught.value.where == str(file)
                os.pwrite(opened.fileno(), whole[at : at + 1], at)
    ask(directory, expected)


def test_a_cut_or_missing_file_is_an_error(directory: Path) -> None:
    """A file that is cut, grown, empty, missing, or something else is an error that names it."""
    expected, path = small(directory)
    for file in (directory / "list", path):
        whole = file.read_bytes()
        damaged = [whole[:cut] for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
        for content in (*damaged, whole + b"\0", whole + whole):
            file.unlink()
            file.write_bytes(content)
            with pytest.raises(Corrupt) as caught:
                ask(directory, expected)
            assert caught.value.where == str(file)
        file.unlink()
        with pytest.raises(Corrupt, match="missing") as caught:
            ask(directory, expected)
        assert caught.value.where == str(file)
        os.mkfifo(file)
        with pytest.raises(MstoreError) as other:
            Segments(directory)
        assert other.value.where == str(file)
        file.unlink()
        file.write_bytes(whole)
    ask(directory, expected)


def test_a_file_cut_while_it_is_open(directory: Path) -> None:
    """A page that was not used yet, of a file that somebody cuts, is an error and no signal."""
    expected, path = small(directory)
    of = Segments(directory)
    path.chmod(0o644)
    os.truncate(path, PAGE)
    with pytest.raises(Corrupt, match="ends too early"):
        of.has(Kind.BLOCK, next(iter(expected))[1])


def test_a_page_of_another_place_is_an_error(directory: Path) -> None:
    """A sound page where another belongs, of this segment or of one with equal rows, is refused."""
    tables = [(pack(1), entries(200, 1))]
    Segments.create(directory).add(tables)
    (path,) = directory.glob("*.segment")
    Segments.create(directory.with_name("other")).add(tables)
    (other,) = directory.with_name("other").glob("*.segment")
    assert path.name != other.name
    whole, path_mode = path.read_bytes(), path.chmod(0o644)
    assert path_mode is None
    assert len(whole) == len(other.read_bytes()) == 8 * PAGE
    for target in range(8):
        for source, content in (((target + 1) % 8, whole), (target, other.read_bytes())):
            page = content[source * PAGE : (source + 1) * PAGE]
            path.write_bytes(whole[: target * PAGE] + page + whole[(target + 1) * PAGE :])
            with pytest.raises(Corrupt):
                ask(directory, known(dict(tables)))


def test_a_disk_that_cannot_read_a_page(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the disk has lost is Unreadable and names the file; too few descriptors are not
    damage."""
    expected, path = small(directory)
    of = Segments(directory)

    def sick(*_: object) -> bytes:
        raise OSError(errno.EIO, "sick")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", sick)
        with pytest.raises(Unreadable) as caught:
            of.has(Kind.BLOCK, bytes(32))
        assert caught.value.where == str(path)

    def few(*_: object) -> int:
        raise OSError(errno.EMFILE, "few")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "open_file", few)
        with pytest.raises(StorageFailed):
            Segments(directory)
    ask(directory, expected)


# -- forgeries -------------------------------------------------------------------------------------


def forge(directory: Path, *sections: Sequence[bytes], bits: int = 1, **head: int) -> None:
    """A segment with these bodies of pages and sound checks, and a list that names it."""
    key = blake3(bytes(32), derive_key_context="mstore 1 segment page").digest()
    pages: list[bytes] = []
    digests = []
    for section in sections:
        hasher = blake3()
        for given_body in section:
            body = given_body.ljust(4064, b"\0")
            check = blake3(body + (len(pages) + 1).to_bytes(32, "big"), key=key).digest()
            hasher.update(check)
            pages.append(body + check)
        digests.append(hasher.digest())
    rows, packs = head.get("rows", 2), head.get("packs", 1)
    body = struct.pack(
        ">8sIIQQ32s32s32s32s",
        b"MSTORESG",
        head.get("version", 1),
        bits,
        rows,
        packs,
        bytes(32),
        *digests,
    )
    body = body.ljust(4064, b"\0")
    id = SegmentId.of(body)
    directory.mkdir()
    check = blake3(body + bytes(32), key=key).digest()
    (directory / f"{id}.segment").write_bytes(body + check + b"".join(pages))
    listed = f"mstore segments 1\n{id} {head.get('listed', rows)}\n".encode()
    (directory / "list").write_bytes(listed + f"blake3 {blake3(listed).hexdigest()}\n".encode())


LOW, HIGH = b"\x11" * 32, b"\xee" * 32


def row(id: bytes, number: int = 0) -> bytes:
    return struct.pack(">32sBIQIIBB32sx", id, 0, number, 7, 8, 9, 0, 1, NO_BASE)


PLACE = Location(pack(1), 7, 8, 9, 0, 1, NO_BASE)
SOUND = ([struct.pack(">3I", 0, 1, 2)], [row(LOW) + row(HIGH)], [pack(1)])


def test_a_sound_forgery_is_read(directory: Path) -> None:
    """What the tests below change is read unchanged."""
    forge(directory, *SOUND)
    of = Segments(directory)
    of.verify()
    assert of.locations(Kind.BLOCK, LOW + HIGH + bytes(32)) == [PLACE, PLACE, None]


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    "head",
    [
        {"rows": HUGE},
        {"packs": HUGE},
        {"rows": HUGE, "packs": HUGE},
        {"rows": 2**32},
        {"rows": 0},
        {"packs": 0},
        {"packs": 3},
        {"bits": 0},
        {"bits": 31},
        {"bits": 64},
        {"bits": 2**32 - 1},
        {"rows": 47},
        {"listed": 3},
    ],
)
def test_a_header_with_impossible_numbers_is_refused(directory: Path, head: dict[str, int]) -> None:
    """Counts that the file cannot have are an error, without memory for them."""
    forge(directory, *SOUND, **head)
    with pytest.raises(Corrupt) as caught:
        Segments(directory)
    assert str(directory) in (caught.value.where or "")


@pytest.mark.parametrize(
    "sections",
    [
        ([struct.pack(">3I", 0, 3, 2)], *SOUND[1:]),
        ([struct.pack(">3I", 2, 1, 2)], *SOUND[1:]),
        ([struct.pack(">3I", 0, 2, 2**32 - 1)], *SOUND[1:]),
        ([struct.pack(">3I", 0, 0, 0)], *SOUND[1:]),
        (SOUND[0], [row(HIGH) + row(LOW)], SOUND[2]),
        (SOUND[0], [row(LOW) + row(LOW)], SOUND[2]),
        ([struct.pack(">3I", 0, 2, 2)], [row(LOW) + row(bytes(32))], SOUND[2]),
        (SOUND[0], [row(LOW, 1) + row(HIGH, 2**32 - 1)], SOUND[2]),
    ],
    ids=["end", "start", "huge", "hidden", "order", "twice", "bucket", "packs"],
)
def test_a_forged_segment_is_refused(directory: Path, sections: Any) -> None:
    """Sound checks over nonsense: a search ends, with a row that is there, none or an error;
    verifying and merging find it."""
    forge(directory, *sections)
    of = Segments(directory)
    for id in (LOW, HIGH, bytes(32), b"\xff" * 32):
        ways = (partial(of.locations, Kind.BLOCK, id), partial(of.places, Kind.BLOCK, id))
        for way in ways:
            try:
                found = set(way())
            except Corrupt:
                continue
            assert found <= {None, PLACE}
    with pytest.raises(Corrupt) as caught:
        of.verify()
    assert caught.value.where == str(next(directory.glob("*.segment")))


def test_another_version_is_refused(directory: Path) -> None:
    """A segment of a later version is not read, and not damaged."""
    forge(directory, *SOUND, version=2)
    with pytest.raises(Incompatible, match="version 2"):
        Segments(directory)


def test_files_are_closed_with_their_last_user(directory: Path) -> None:
    """Segments that nobody has any more, or that were replaced, keep no file open."""

    def open_files() -> list[str]:
        # One that a listing of descriptors opens is closed by the time it is looked at.
        links = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
        named = (os.readlink(link) for link in links if os.path.lexists(link))
        return [name for name in named if name.startswith(f"{directory}/")]

    of = Segments.create(directory)
    for number in range(5):
        of.add([(pack(number), entries(30, number))])
    assert 0 < len(open_files()) <= 2 * len(of.sizes())
    del of
    assert open_files() == []


def test_packs_that_do_not_ascend_are_refused(directory: Path) -> None:
    """A forged table of packs cannot make a merge wait for ever."""
    forge(directory, *SOUND[:2], [pack(2) + pack(1)], packs=2)
    of = Segments(directory)
    for act in (of.packs, lambda: of.add([(pack(3), entries(3, 1))]), lambda: of.drop({pack(1)})):
        with pytest.raises(Corrupt, match="do not ascend"):
            act()


# -- changes ---------------------------------------------------------------------------------------

CHANGE: dict[str, Callable[[Segments], None]] = {
    "add": lambda of: of.add([(pack(8), entries(30, 8)), (pack(9), entries(25, 9))]),
    "drop": lambda of: of.drop({pack(1)}),
}


def before_change(directory: Path) -> dict[PackId, PackTable]:
    """Segments of several sizes."""
    tables = {pack(number): entries(count, number) for number, count in ((1, 90), (2, 30), (3, 9))}
    of = Segments.create(directory)
    for item in tables.items():
        of.add([item])
    assert of.sizes() == [90, 30, 9]
    return tables


@pytest.mark.rest
@pytest.mark.parametrize("change", list(CHANGE))
def test_a_power_loss_leaves_rows_of_before_or_after(tmp_path: Path, change: str) -> None:
    """Whatever a power loss leaves at any step of a change, the rows are those of before it or of
    after it, every byte is sound, and the next change leaves no garbage."""
    root = tmp_path / "root"
    root.mkdir()
    before = known(before_change(root / "segments"))
    recording = Recording(root)
    with fs.observed(recording.observe):
        of = Segments(root / "segments")
        CHANGE[change](of)
    after = told(of)
    assert before != after
    seen = set()
    outcomes = []
    for number, crash in enumerate(recording.crashes()):
        if crash.digest() in seen:
            continue
        seen.add(crash.digest())
        place = tmp_path / f"crash{number}"
        crash.build(place)
        left = Segments(place / "segments")
        left.verify()
        outcomes.append(told(left))
        assert outcomes[-1] in (before, after)
        left.add([(pack(20), entries(3, 20))])
        files = {path.name for path in (place / "segments").iterdir()}
        assert files == {"list", "lock", *(one.path.name for one in left._segments)}
        shutil.rmtree(place)
    assert before in outcomes
    assert after in outcomes


def test_a_power_loss_after_a_list_that_was_not_synced(tmp_path: Path) -> None:
    """A change that failed before its new list was durable is followed by another one: whatever a
    power loss then leaves, the list has its segments."""
    root = tmp_path / "root"
    root.mkdir()
    outcomes = [known(before_change(root / "segments"))]
    recording = Recording(root)
    renamed = False

    def fail(operation: fs.Operation) -> None:
        nonlocal renamed
        if renamed:
            renamed = False
            raise OSError(errno.EIO, "sick", operation.path)
        recording.observe(operation)
        renamed = operation.target.endswith("/list")

    with fs.observed(fail), pytest.raises(StorageFailed):
        Segments(root / "segments").drop({pack(1)})
    outcomes.append(told(Segments(root / "segments")))
    with fs.observed(recording.observe):
        CHANGE["add"](of := Segments(root / "segments"))
    outcomes.append(told(of))
    seen = set()
    for number, crash in enumerate(recording.crashes()):
        if crash.digest() in seen:
            continue
        seen.add(crash.digest())
        place = tmp_path / f"crash{number}"
        crash.build(place)
        left = Segments(place / "segments")
        left.verify()
        assert told(left) in outcomes
        shutil.rmtree(place)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", list(CHANGE))
def test_a_failed_step_leaves_rows_of_before_or_after(tmp_path: Path, change: str) -> None:
    """If any step of a change fails, the change is an error, the rows are those of before it or
    after it, here and for whoever opens the directory, and the same change then works."""
    steps = 0
    before = known(before_change(tmp_path / "before"))
    while True:
        place = tmp_path / f"try{steps}"
        shutil.copytree(tmp_path / "before", place)
        of = Segments(place)
        left = steps

        def fail(operation: fs.Operation) -> None:
            nonlocal left
            if left == 0:
                left -= 1
                raise OSError(errno.ENOSPC, "full", operation.path)
            left -= 1

        try:
            with fs.observed(fail):
                CHANGE[change](of)
        except StorageFailed:
            assert left < 0
        else:
            assert left >= 0
            break
        other = Segments(place)
        now = told(other)
        CHANGE[change](of)
        after = told(of)
        assert now in (before, after)
        assert before != after
        files = {path.name for path in place.iterdir()}
        assert files == {"list", "lock", *(one.path.name for one in of._segments)}
        steps += 1
    assert steps > 10


@pytest.mark.rest
def test_a_reader_stays_while_others_change(directory: Path) -> None:
    """What a reader has open answers as before while segments are replaced and removed."""
    tables = before_change(directory)
    reader, writer = Segments(directory), Segments(directory)
    writer.drop({pack(1)})
    writer.add([(pack(9), entries(40, 9))])
    require_same(reader, known(tables))
    reader.drop(set())
    del tables[pack(1)]
    require_same(reader, known(tables | {pack(9): entries(40, 9)}))


def test_a_list_that_is_replaced_while_it_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a list and finds its segments removed reads the new list."""
    tables = before_change(directory)
    stale = segments._read_list(directory)
    Segments(directory).drop({pack(1)})
    read = segments._read_list
    answers = iter([stale])
    monkeypatch.setattr(segments, "_read_list", lambda of: next(answers, None) or read(of))
    del tables[pack(1)]
    require_same(Segments(directory), known(tables))


def test_strangers_are_left_alone(directory: Path) -> None:
    """A change removes only what has the name of a segment or of a file being written."""
    of = Segments.create(directory)
    (directory / "notes.txt").write_text("mine")
    (directory / f"{'a' * 64}.segment").write_text("left by a crash")
    of.add([(pack(1), entries(3, 1))])
    names = {path.name for path in directory.iterdir()}
    assert names == {"list", "lock", "notes.txt", of._segments[0].path.name}


def test_numbers_of_searches(directory: Path) -> None:
    """A search of no ids, and one in no segment, find nothing."""
    of = Segments.create(directory)
    assert of.locations(Kind.BLOCK, b"") == []
    assert not of.has(Kind.BLOCK, bytes(64)).any()
    of.add([(pack(1), entries(3, 1))])
    assert of.locations(Kind.BLOCK, b"") == []
    assert np.array_equal(of.has(Kind.BLOCK, b""), [])
