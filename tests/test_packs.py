"""Packs: what is written is found again, whole pages stay whole, and no damage goes unnoticed."""

from __future__ import annotations

import os
import random
import resource
import struct
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mstore.blocks.codecs import Codec, Encoded
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import (
    ENTRY,
    GATHERED_BYTES,
    MAGIC,
    NO_BASE,
    PAGE,
    TAIL_MAGIC,
    Kind,
    PackEntry,
    PackGone,
    PackWriter,
    SealedPack,
    read_footer,
)
from mstore.terms.errors import Corrupt, Incompatible, MstoreError
from mstore.terms.ids import BlockId, PackId

TAIL = 64


def read_table(path: Path) -> tuple[PackId, tuple[PackEntry, ...]]:
    """The id and the entries of a pack in a file."""
    found = read_footer(path)
    return found.id, found.entries


def pack_path(packs: Path, pack: PackId) -> Path:
    """Where a directory keeps a pack."""
    return Path(PackFiles(packs).where(pack))


def publish(packs: Path, writer: PackWriter) -> SealedPack:
    """Seal a pack and give it its name, as a transaction does."""
    sealed = writer.seal()
    target = pack_path(packs, sealed.id)
    target.parent.mkdir(parents=True, exist_ok=True)
    sealed.path.rename(target)
    return replace(sealed, path=target)


def small_pack(directory: Path, *payloads: bytes) -> SealedPack:
    """A pack in packs/ with these raw blocks and one record."""
    writer = PackWriter(directory / f"{os.urandom(4).hex()}.pack")
    offset = 0
    for payload in payloads:
        writer.append_raw(BlockId.of(payload), payload, 1, "file", offset)
        offset += len(payload)
    writer.append_small(bytes(range(32)), Kind.TENSOR, Codec.RAW, 1, b"a record", 8)
    return publish(directory / "packs", writer)


# -- writing and reading -----------------------------------------------------------------------


def test_the_layout_is_that_of_the_format(tmp_path: Path) -> None:
    """Header, payloads, table, padding and tail lie where docs/format.md says."""
    pack = small_pack(tmp_path, b"x" * 5000, b"y" * 300)
    data = pack.path.read_bytes()
    assert (len(data), len(data) % PAGE) == (pack.size, 0)
    assert data[:16] == MAGIC + struct.pack("<I", 3) + bytes(4)
    assert data[48:PAGE] == bytes(PAGE - 48)
    assert data[PAGE : PAGE + 5300] == b"x" * 5000 + b"y" * 300
    offset, length, digest, version, magic = struct.unpack("<QQ32sI4x8s", data[-TAIL:])
    assert (version, magic) == (3, TAIL_MAGIC)
    table = data[offset : offset + length]
    assert len(table) == 3 * 88
    assert blake3(table).digest() == digest
    assert data[offset + length : -TAIL] == bytes(len(data) - TAIL - offset - length)
    assert PackId.of(data[:48] + table) == pack.id
    assert pack.path.name == f"{pack.id}.pack"
    assert pack.path.parent.name == pack.id.hex()[:2]
    assert pack.path.stat().st_mode & 0o777 == 0o444


def test_the_table_is_sorted_and_complete(tmp_path: Path) -> None:
    """Reading the table gives the pack's id and exactly the entries that were sealed, in order."""
    pack = small_pack(tmp_path, *(bytes([n]) * 100 for n in range(40)))
    assert read_table(pack.path) == (pack.id, pack.entries)
    keys = [(entry.kind, entry.id) for entry in pack.entries]
    assert keys == sorted(keys)
    assert len(keys) == 41


def test_equal_contents_make_different_packs(tmp_path: Path) -> None:
    """Two packs of the same blocks have two names: neither takes the other's place."""
    assert small_pack(tmp_path, b"same").id != small_pack(tmp_path, b"same").id


RUNS = st.lists(
    st.tuples(
        st.integers(0, 3 * PAGE),
        st.lists(st.integers(1, 2 * PAGE + 10), min_size=1, max_size=5),
        st.lists(st.integers(0, 200), max_size=3),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(runs=RUNS, limit=st.sampled_from([0, 100, 1 << 20]))
def test_pages_of_a_file_are_pages_of_the_pack(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[int, list[int], list[int]]],
    limit: int,
) -> None:
    """A run lies at its file's offset modulo 4096, its blocks touch, and all payloads read back."""
    directory = tmp_path_factory.mktemp("pack")
    draw = random.Random(0)
    writer = PackWriter(directory / "t.pack", held_limit=limit)
    told: dict[bytes, tuple[bytes, int, bytes | None]] = {}
    for number, (start, lengths, smalls) in enumerate(runs):
        previous: bytes | None = None
        offset = start
        for length in lengths:
            payload = draw.randbytes(length)
            id = bytes(BlockId.of(payload + bytes([number])))
            writer.append_raw(id, payload, 2, f"file {number}", offset)
            told[id] = (payload, offset, previous)
            previous, offset = id, offset + length
        for length in smalls:
            payload, id = draw.randbytes(length), draw.randbytes(32)
            writer.append_small(id, Kind.MANIFEST, Codec.RAW, 1, payload, length)
            told[id] = (payload, -1, None)
    pack = publish(directory, writer)
    files = PackFiles(directory)
    entries = {entry.id: entry for entry in read_table(pack.path)[1]}
    assert entries.keys() == told.keys()
    for id, (payload, at, previous) in told.items():
        entry = entries[id]
        assert files.read(pack.id, entry.offset, entry.stored_length) == payload
        assert entry.raw_length == len(payload)
        if at >= 0:
            assert (entry.offset - at) % PAGE == 0
        if previous is not None:
            before = entries[previous]
            assert before.offset + before.stored_length == entry.offset
    files.close()


def test_small_payloads_wait_for_the_end_of_a_run(tmp_path: Path) -> None:
    """A record put between two neighbours does not part them."""
    writer = PackWriter(tmp_path / "t.pack")
    writer.append_raw(b"1" * 32, b"a" * 700, 1, "f", 0)
    writer.append_small(b"2" * 32, Kind.TENSOR, Codec.RAW, 1, b"record", 6)
    assert writer.size == PAGE + 700 + 6
    writer.append_raw(b"3" * 32, b"b" * 700, 1, "f", 700)
    first, third, _ = writer.seal().entries
    assert third.offset == first.offset + 700


def test_abandon_leaves_nothing(tmp_path: Path) -> None:
    """An abandoned pack, and one whose disk is full at any write, leaves no file."""
    writer = PackWriter(tmp_path / "t.pack")
    writer.append_raw(b"1" * 32, b"a" * 700, 1, "f", 0)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


# -- damage ------------------------------------------------------------------------------------


def test_every_flipped_bit_of_table_and_tail_is_found(tmp_path: Path) -> None:
    """One flipped bit in table, tail or the header's magic and version is refused; one in the
    header's identity makes it another pack."""
    pack = small_pack(tmp_path, b"x" * 50, b"y" * 300)
    data = pack.path.read_bytes()
    offset, length = struct.unpack_from("<QQ", data, len(data) - TAIL)
    unused = {len(data) - TAIL + 52 + n for n in range(4)}
    places = [
        *range(offset, offset + length),
        *(place for place in range(len(data) - TAIL, len(data)) if place not in unused),
        *range(48),
    ]
    bad = tmp_path / "bad.pack"
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        bad.write_bytes(damaged)
        if place >= 48 or place < 12:
            with pytest.raises((Corrupt, Incompatible)) as refusal:
                read_table(bad)
            assert refusal.value.where == str(bad)
        else:
            assert read_table(bad)[0] != pack.id


@pytest.fixture(scope="module")
def sound_pack(tmp_path_factory: pytest.TempPathFactory) -> SealedPack:
    """A pack to damage."""
    return small_pack(tmp_path_factory.mktemp("sound"), b"x" * 50, b"y" * 300)


@settings(max_examples=100)
@given(data=st.data())
def test_random_damage_is_refused_or_harmless(sound_pack: SealedPack, data: st.DataObject) -> None:
    """Cut, stretched, spliced and overwritten packs: an error of ours, or the very same table."""
    raw = bytearray(sound_pack.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw)))
        new = data.draw(st.binary(max_size=100))
        end = place + data.draw(st.sampled_from([0, len(new), 1, PAGE]))
        raw[place:end] = new
    bad = sound_pack.path.parent / "bad"
    bad.write_bytes(raw)
    try:
        id, entries = read_table(bad)
    except MstoreError:
        return
    assert entries == sound_pack.entries or id != sound_pack.id


def entry(id: int, *, kind: int = Kind.BLOCK, offset: int = PAGE, stored: int = 100) -> PackEntry:
    """An entry as a forger would write it."""
    return PackEntry(bytes([id]) * 32, kind, Codec.RAW, 1, offset, stored, stored)


@pytest.mark.parametrize(
    "entries",
    [
        [entry(1, offset=0)],
        [entry(1, offset=PAGE - 1)],
        [entry(1, stored=PAGE + 1)],
        [entry(1, offset=2 * PAGE)],
        [entry(1, offset=(1 << 64) - 1)],
        [entry(1, stored=(1 << 32) - 1)],
        [entry(2), entry(1)],
        [entry(1), entry(1)],
        [entry(1, kind=Kind.TENSOR), entry(2)],
    ],
)
def test_a_forged_table_is_refused(entries: list[PackEntry], tmp_path: Path) -> None:
    """Entries out of bounds, out of order or twice are refused, whatever hash the table has."""
    table = b"".join(entry.encode() for entry in entries)
    path = tmp_path / "forged.pack"
    path.write_bytes(forged(table, 2 * PAGE, len(table)))
    with pytest.raises(Corrupt, match="out of bounds or order"):
        read_table(path)


def forged(table: bytes, offset: int, length: int, version: int = 3) -> bytes:
    """A pack of four pages with this table at its third, and a tail that says what it is told."""
    head = struct.pack("<8sI4x32s", MAGIC, version, bytes(32))
    tail = struct.pack("<QQ32sI4x8s", offset, length, blake3(table).digest(), version, TAIL_MAGIC)
    return (head.ljust(2 * PAGE, b"\0") + table).ljust(4 * PAGE - TAIL, b"\0") + tail


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 88),
        (2 * PAGE, 87),
        (2 * PAGE, 88 * (1 << 40)),
        ((1 << 64) - 88, 88),
        (4 * PAGE - TAIL, 88),
        (4 * PAGE, 0),
    ],
)
def test_a_forged_tail_is_refused(offset: int, length: int, tmp_path: Path) -> None:
    """A table that lies outside the file, in the header or the tail, or ends inside an entry."""
    path = tmp_path / "forged.pack"
    path.write_bytes(forged(entry(1).encode(), offset, length))
    with pytest.raises(Corrupt, match="does not fit"):
        read_table(path)


def test_a_sound_forgery_is_read(tmp_path: Path) -> None:
    """The forger's tools make packs that are accepted when nothing is wrong with them."""
    path = tmp_path / "sound.pack"
    path.write_bytes(forged(entry(1).encode(), 2 * PAGE, ENTRY.size))
    assert read_table(path)[1] == (entry(1),)
    path.write_bytes(forged(b"", 2 * PAGE, 0))
    assert read_table(path)[1] == ()


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Empty, short, foreign and missing files, and packs of a newer version, are told apart."""
    path = tmp_path / "x.pack"
    for contents in (b"", b"short", bytes(PAGE), bytes(3 * PAGE), os.urandom(2 * PAGE)):
        path.write_bytes(contents)
        with pytest.raises(Corrupt):
            read_table(path)
    path.write_bytes(forged(entry(1).encode(), 2 * PAGE, 88, version=4))
    with pytest.raises(Incompatible, match="version 4"):
        read_table(path)
    two_versions = bytearray(forged(entry(1).encode(), 2 * PAGE, 88, version=3))
    two_versions[len(MAGIC)] = 4
    path.write_bytes(two_versions)
    with pytest.raises(Corrupt, match="of version 4, and of 3"):
        read_table(path)
    with pytest.raises(PackGone):
        read_table(tmp_path / "missing.pack")
    with pytest.raises(PackGone):
        read_table(path / "below a file.pack")


# -- reading payloads --------------------------------------------------------------------------


def test_missing_and_short_packs_are_corrupt(tmp_path: Path) -> None:
    """A pack that is gone, or ends before its payload, is an error that names the file."""
    pack = small_pack(tmp_path, b"x" * 100)
    files = PackFiles(tmp_path / "packs")
    with pytest.raises(Corrupt, match="too early") as short:
        files.read(pack.id, pack.size - 10, 20)
    assert short.value.where == str(pack.path)
    with pytest.raises(Corrupt, match="too early"):
        files.read_scattered(pack.id, pack.size - 10, [memoryview(bytearray(20))])
    for nowhere in (1 << 63, 1 << 64):
        with pytest.raises(Corrupt, match="too early"):
            files.read(pack.id, nowhere, 1)
        files.will_need(pack.id, nowhere, 1)
    other = PackId(bytes(32))
    files.will_need(other, 0, 1)
    with pytest.raises(Corrupt, match="missing") as gone:
        files.read(other, 0, 1)
    assert gone.value.where == str(pack_path(tmp_path / "packs", other))
    files.close()


def test_neighbours_are_scattered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring bytes fill many targets, more than one call takes, however little each call
    brings; a pack that ends before the last is Corrupt.
    """
    payload = os.urandom(5000)
    pack = small_pack(tmp_path, payload)
    entry = next(entry for entry in pack.entries if entry.stored_length == 5000)
    files = PackFiles(tmp_path / "packs")
    honest = os.preadv

    def meagre(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        whole = honest(fd, targets, offset)
        return min(whole, 333)

    for lengths in ([5000], [1, 0, 4999], [2] * 2500):
        for preadv in (honest, meagre):
            monkeypatch.setattr(os, "preadv", preadv)
            targets = [memoryview(bytearray(length)) for length in lengths]
            files.read_scattered(pack.id, entry.offset, targets)
            assert b"".join(targets) == payload
    monkeypatch.undo()
    with pytest.raises(Corrupt, match="too early"):
        files.read_scattered(pack.id, pack.size - 10, [memoryview(bytearray(7))] * 2)
    files.close()


def test_a_link_is_not_a_pack(tmp_path: Path) -> None:
    """A symlink under a pack's name is not followed, and a fifo there is not waited for."""
    pack = small_pack(tmp_path, b"x" * 100)
    pack.path.rename(tmp_path / "elsewhere")
    pack.path.symlink_to(tmp_path / "elsewhere")
    for name in ("link", "fifo", "directory"):
        if name != "link":
            pack.path.unlink()
            os.mkfifo(pack.path) if name == "fifo" else pack.path.mkdir()
        with pytest.raises(Corrupt, match="not a regular file"):
            PackFiles(tmp_path / "packs").read(pack.id, PAGE, 100)
        with pytest.raises(Corrupt, match="not a regular file"):
            read_table(pack.path)


@pytest.mark.parametrize(
    ("may_open", "stay_open"), [(resource.RLIM_INFINITY, 20), (1 << 20, 20), (40, 5), (4, 1)]
)
def test_few_descriptors_keep_few_packs_open(
    may_open: int, stay_open: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of what the process may open stays open, and one pack at least."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (may_open, may_open))
    files = PackFiles(tmp_path / "packs")
    for number in range(20):
        pack = small_pack(tmp_path, bytes([number]) * 300)
        place = pack_path(tmp_path / "packs", pack.id)
        place.parent.mkdir(parents=True, exist_ok=True)
        pack.path.rename(place)
        entry = pack.entries[0]
        assert files.read(pack.id, entry.offset, 300) == bytes([number]) * 300
    assert len(files._open) == stay_open
    files.close()


def test_open_packs_are_bounded(tmp_path: Path) -> None:
    """However many packs are read by however many threads, few stay open, none after close."""
    payloads = [bytes([n]) * 500 for n in range(20)]
    packs = [small_pack(tmp_path, payload) for payload in payloads]
    files = PackFiles(tmp_path / "packs", max_open=3)

    def read(number: int) -> bool:
        which = number * 7 % len(packs)
        files.will_need(packs[which].id, PAGE, 500)
        target = bytearray(500)
        files.read_scattered(packs[which].id, PAGE, [memoryview(target)])
        return files.read(packs[which].id, PAGE, 500) == bytes(target) == payloads[which]

    before = descriptors()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(400)))
    # One more for each thread that was reading when a pack should have been closed.
    assert descriptors() - before <= 3 + 4
    files.close()
    assert descriptors() == before


def test_a_pack_in_use_is_not_closed(tmp_path: Path) -> None:
    """Where there is no room for one more open pack, the one that is just opened is still read."""
    pack = small_pack(tmp_path, b"x" * 100)
    files = PackFiles(tmp_path / "packs", max_open=0)
    assert files.read(pack.id, PAGE, 100) == b"x" * 100
    files.close()


def descriptors() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_an_entry_of_no_base_has_none() -> None:
    """The base field of an entry that is no delta is zero."""
    assert entry(1).encode()[32:64] == NO_BASE == bytes(32)


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 60, 4096, 70_000, GATHERED_BYTES, 1_300_000]), st.booleans()),
        max_size=12,
    )
)
@settings(max_examples=25, deadline=None)
def test_gathered_payloads_lie_where_entries_say(sizes: list[tuple[int, bool]]) -> None:
    """Short and long payloads in any order are read back as they were given, also where the
    caller used his memory again, and runs of raw ones begin where their file's pages do."""
    with tempfile.TemporaryDirectory() as directory:
        writer = PackWriter(Path(directory) / "one.pack")
        room = bytearray(2 << 20)
        wanted, file_offset = {}, 100
        for number, (size, is_raw) in enumerate(sizes):
            data = bytes([number + 1]) * size
            id = bytes([number]) * 32
            room[:size] = data
            view = memoryview(room)[:size]
            codec = Codec.RAW if is_raw else Codec.ZSTD
            before = writer.size
            writer.append_encoded(id, Encoded(codec, 1, view, size, None), "f", file_offset)
            assert writer.size >= before + size
            wanted[id] = data, file_offset if is_raw else None
            file_offset += size
        pack = writer.seal()
        raw = pack.path.read_bytes()
        for entry in pack.entries:
            data, at = wanted[entry.id]
            assert raw[entry.offset : entry.offset + entry.stored_length] == data
            assert at is None or entry.offset % 4096 == at % 4096
        assert len(pack.entries) == len(wanted)
        assert read_table(pack.path)[1] == pack.entries
