"""The cache of a store on a disk: its limit, what is wrong in it, and a disk that is full."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore import fs
from mstore.fs import Operation
from mstore.store import disk_cache
from mstore.store.disk_cache import ComputedBlock, DiskCache, PackPart
from mstore.terms.ids import BlockId, PackId

LIMIT: Final = 40_000
CHECK: Final = 32
PACKS: Final = [PackId(bytes([number]) * 32) for number in range(3)]
SPAN: Final = 4_000
Part = tuple[int, int, int]
"""Number of a pack, offset, length; COMPUTED in place of a pack: a block that lies in none."""
COMPUTED: Final = 3
parts = st.tuples(st.integers(0, COMPUTED), st.integers(0, SPAN), st.integers(0, LIMIT // 3))


def content(part: Part) -> bytes:
    """What a pack has there, or the block."""
    pack, offset, length = part
    whole = random.Random(pack).randbytes(SPAN + LIMIT)
    return whole[offset : offset + length]


def key_of(part: Part) -> PackPart | ComputedBlock:
    """What the cache calls it."""
    if part[0] == COMPUTED:
        return ComputedBlock(BlockId.of(content(part)), part[2])
    return PackPart(PACKS[part[0]], part[1], part[2])


def cache_at(path: Path, limit: int = LIMIT) -> DiskCache:
    """A cache, as a store opens it."""
    return DiskCache(path / "cache", lambda: limit)


def used(path: Path) -> int:
    """Bytes of all parts, also of those that are being written."""
    sizes: dict[int, int] = {}
    if not (path / "cache").is_dir():
        return 0
    # Files get another name meanwhile, but none is begun.
    with fs.locked(path / "cache" / "lock"):
        for found in (path / "cache").rglob("*"):
            with suppress(FileNotFoundError):
                status = found.lstat()
                if stat.S_ISREG(status.st_mode) and found.name not in ("size", "lock"):
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def put(cache: DiskCache, part: Part) -> None:
    """Keep a part."""
    cache.put(key_of(part), content(part))


def got(cache: DiskCache, part: Part) -> bytes | None:
    """Return a part."""
    found = cache.get(key_of(part))
    return None if found is None else bytes(found)


def file_of(path: Path, part: Part) -> Path:
    """The file of a part."""
    if part[0] == COMPUTED:
        name = BlockId.of(content(part)).hex()
        return path / "cache" / "blocks" / name[:1] / name
    name = PACKS[part[0]].hex()
    return path / "cache" / name[:2] / name / f"{part[1]:x}-{part[2]:x}"


# -- the limit ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "remove", "open"]), parts)),
    limit=st.sampled_from([0, 100, LIMIT // 3, LIMIT]),
)
def test_never_over_its_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Part]], limit: int
) -> None:
    """Whatever is put and read, in one process or the next: no more than the limit, no wrong
    byte."""
    path = tmp_path_factory.mktemp("cache")
    cache = cache_at(path, limit)
    for act, part in steps:
        if act == "put":
            put(cache, part)
        elif act == "get":
            assert got(cache, part) in (None, content(part))
        elif act == "remove":
            cache.remove(key_of(part))
            assert got(cache, part) is None
        else:
            cache = cache_at(path, limit)
        assert used(path) <= limit


@pytest.mark.parametrize("limit", [0, 5000])
def test_a_lower_limit_holds_from_the_next_use_on(tmp_path: Path, limit: int) -> None:
    """Whoever lowers the limit frees the disk, though nothing new comes; 0 is no cache."""
    cache = cache_at(tmp_path)
    for number in range(5):
        put(cache, (0, number * 10, 3000))
    assert used(tmp_path) > 5000
    lower = cache_at(tmp_path, limit)
    got(lower, (0, 0, 3000))
    assert used(tmp_path) <= limit
    assert limit or got(lower, (0, 40, 3000)) is None


@pytest.mark.rest
def test_what_was_used_last_stays(tmp_path: Path) -> None:
    """Parts and blocks that are read stay, and those that nobody reads go."""
    cache = cache_at(tmp_path)
    often: list[Part] = [(0, 0, 1000), (COMPUTED, 0, 1000)]
    for part in often:
        put(cache, part)
    for number in range(1, 200):
        put(cache, (number % 2 * COMPUTED, number, 1000))
        assert [got(cache, part) for part in often] == [content(part) for part in often]
    for number, is_here in ((199, True), (198, True), (1, False), (2, False)):
        assert (got(cache, (number % 2 * COMPUTED, number, 1000)) is not None) == is_here


@pytest.mark.rest
def test_never_over_its_limit_with_threads(tmp_path: Path) -> None:
    """Several threads share one cache: no more than the limit at any time, and no wrong byte."""
    cache, wrong = cache_at(tmp_path), []
    over: list[int] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            part = (draw.randrange(4), draw.randrange(40), draw.choice([500, 3000, 9000]))
            put(cache, part)
            if got(cache, part) not in (None, content(part)):
                wrong.append(part)
            # A walk may count a file that went and the one that came for it: so while none may.
            with fs.locked(tmp_path / "lock"):
                now = used(tmp_path)
            if now > LIMIT:
                over.append(now)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert not over
    assert used(tmp_path) > 0


PROGRAM = """
import random, sys
from pathlib import Path
from test_disk_cache import cache_at, content, got, put
draw, path = random.Random(int(sys.argv[1])), Path(sys.argv[2])
caches = [cache_at(path) for _ in range(8)]
for _ in range(150):
    part = (draw.randrange(4), draw.randrange(40), draw.choice([500, 3000, 9000]))
    cache = draw.choice(caches)
    put(cache, part)
    assert got(cache, part) in (None, content(part))
"""


@pytest.mark.rest
def test_a_file_that_gets_its_name_while_others_make_room_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes room counts a file that another writes, though it gets its name meanwhile."""
    limit, size = 20_000, 4_000
    for number in range(4):
        put(cache_at(tmp_path, limit), (0, number * size, size))
    begun, listed, named = (threading.Event() for _ in range(3))
    closes, lists = fs.NewFile.close, disk_cache._tree

    def close(file: fs.NewFile) -> None:
        if not begun.is_set():
            begun.set()
            assert listed.wait(60)
        closes(file)

    def listing(directory: Path) -> Iterator[tuple[Path, list[str]]]:
        for found in list(lists(directory)):
            if begun.is_set():
                listed.set()
                # Only where a name needs no lock does it come before this has counted.
                named.wait(1)
            yield found

    def write() -> None:
        put(cache_at(tmp_path, limit), (1, 0, size))
        named.set()

    monkeypatch.setattr(fs.NewFile, "close", close)
    monkeypatch.setattr(disk_cache, "_tree", listing)
    other = threading.Thread(target=write)
    other.start()
    assert begun.wait(60)
    put(cache_at(tmp_path, limit), (2, 0, size))
    other.join()
    assert 0 < used(tmp_path) <= limit


@pytest.mark.rest
def test_never_over_its_limit_with_processes(tmp_path: Path) -> None:
    """Processes that share a cache keep the limit together."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(seed), str(tmp_path)], env=env)
        for seed in range(2)
    ]
    most = 0
    while any(one.poll() is None for one in started):
        most = max(most, used(tmp_path))
    assert [one.returncode for one in started] == [0, 0]
    assert 0 < most <= LIMIT


def test_a_writer_that_was_killed_takes_room_for_a_while(tmp_path: Path) -> None:
    """What a killed process was writing is no part, counts, and goes like any other."""
    part: Part = (0, 0, 9000)
    directory = file_of(tmp_path, part).parent
    directory.mkdir(parents=True)
    begun = cache_at(tmp_path)._begun(directory, part[2], bytes(CHECK))
    assert begun is not None
    begun.close()
    os.utime(begun.path, ns=(0, 0))
    assert used(tmp_path) == part[2] + CHECK
    assert got(cache_at(tmp_path), part) is None
    for number in range(100):
        put(cache_at(tmp_path), (1, number, 1000))
        assert used(tmp_path) <= LIMIT
    assert not begun.path.exists()


# -- what is wrong there -----------------------------------------------------------------------


@settings(max_examples=60)
@given(part=parts.filter(lambda one: one[2] > 0 and one[2] < LIMIT // 5), data=st.data())
def test_a_part_that_is_wrong_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, part: Part, data: st.DataObject
) -> None:
    """A flipped, cut, longer, removed or replaced file is missing, and can be put again."""
    path = tmp_path_factory.mktemp("cache")
    cache = cache_at(path)
    put(cache, part)
    assert got(cache, part) == content(part)
    file = file_of(path, part)
    raw = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "longer", "gone", "other", "directory"])):
        case "flip":
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "longer":
            raw += b"\0"
        case "gone":
            file.unlink()
        case "other":
            other = part[0], part[1] + 1, part[2]
            put(cache, other)
            raw = bytearray(file_of(path, other).read_bytes())
        case "directory":
            file.unlink()
            file.mkdir()
    if file.is_file():
        file.write_bytes(raw)
    assert got(cache, part) is None
    if not file.is_dir():
        put(cache, part)
        assert got(cache, part) == content(part)
        assert used(path) <= LIMIT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [0, COMPUTED])
@pytest.mark.parametrize("linked", ["part", "pack", "above", "cache"])
def test_no_link_is_followed(tmp_path: Path, linked: str, kind: int) -> None:
    """A link in the place of a part, or of a directory above it, is not followed: nothing outside
    is read, written, touched or removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    part: Part = (kind, 0, 1000)
    put(cache_at(outside), part)
    kept = file_of(outside, part)
    os.utime(kept, ns=(10**9, 10**9))
    before = {one: one.lstat() for one in outside.rglob("*")}
    store = tmp_path / "store"
    (store / "packs").mkdir(parents=True)
    root = fs.Root(store)
    here = file_of(store, part)
    name = {"part": here, "pack": here.parent, "above": here.parent.parent}.get(
        linked, store / "cache"
    )
    target = {"part": kept, "pack": kept.parent, "above": kept.parent.parent}.get(
        linked, outside / "cache"
    )
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(target)
    cache = cache_at(store)
    assert got(cache, part) is None
    for number in range(60):
        put(cache, (kind, number, 1000))
        put(cache, (1, number, 1000))
    list(cache.missing(PACKS[0], 0, 10_000))
    cache.remove(key_of(part))
    after = {one: one.lstat() for one in outside.rglob("*")}
    assert after == before
    root.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [0, COMPUTED])
def test_a_directory_in_the_place_of_a_part_ends_nothing(tmp_path: Path, kind: int) -> None:
    """What cannot be removed is passed over when room is made."""
    cache = cache_at(tmp_path)
    odd = file_of(tmp_path, (kind, 0, 1000))
    odd.mkdir(parents=True)
    os.utime(odd, ns=(0, 0))
    for number in range(1, 200):
        put(cache, (1, number, 1000))
    assert got(cache, (1, 199, 1000)) is not None
    assert used(tmp_path) <= LIMIT


# -- the disk ----------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["create", "write", "rename", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails(tmp_path: Path, kind: str, code: int) -> None:
    """A disk that is full or fails keeps no more parts, raises nothing, and leaves no half part;
    when it works again, parts are kept again."""
    cache = cache_at(tmp_path)
    kept: Part = (2, 0, 1000)
    put(cache, kept)

    def fail(operation: Operation) -> None:
        if operation.kind == kind:
            raise OSError(code, os.strerror(code), operation.path)

    with fs.observed(fail):
        for number in range(80):
            put(cache, (0, number, 1000))
            cache.remove(key_of((1, number, 1000)))
            assert got(cache, (0, number, 1000)) in (None, content((0, number, 1000)))
        if kind != "unlink":
            assert got(cache, (0, 79, 1000)) is None
        assert used(tmp_path) <= LIMIT
    for number in range(80):
        put(cache, (1, number, 1000))
        assert used(tmp_path) <= LIMIT
    assert got(cache, (1, 79, 1000)) == content((1, 79, 1000))


# -- what is missing ---------------------------------------------------------------------------


@pytest.mark.rest
@settings(max_examples=80)
@given(
    kept=st.lists(st.tuples(st.just(0), st.integers(0, 60), st.integers(1, 30)), max_size=8),
    removed=st.integers(0, 3),
    start=st.integers(0, 80),
    length=st.integers(0, 40),
    is_new=st.booleans(),
)
def test_missing_names_the_gaps(
    tmp_path_factory: pytest.TempPathFactory,
    kept: list[Part],
    removed: int,
    start: int,
    length: int,
    *,
    is_new: bool,
) -> None:
    """`missing` yields the bytes of a range that no part has: all, in order, none twice."""
    path = tmp_path_factory.mktemp("cache")
    cache = cache_at(path)
    list(cache.missing(PACKS[0], 0, 1))
    for part in kept:
        put(cache, part)
    for part in kept[:removed]:
        cache.remove(key_of(part))
    there = set(kept) - set(kept[:removed])
    covered = {at for _, offset, size in there for at in range(offset, offset + size)}
    if is_new:
        cache = cache_at(path)
    gaps = list(cache.missing(PACKS[0], start, start + length))
    told = [at for begin, end in gaps for at in range(begin, end)]
    assert told == [at for at in range(start, start + length) if at not in covered]
    assert all(begin < end for begin, end in gaps)
    assert all(one[1] < two[0] for one, two in pairwise(gaps))
