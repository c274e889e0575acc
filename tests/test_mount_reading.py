"""Every way to read a file, at random places, on every kind of mount: fsx, for readers.

The file that was added is the model.  Both files are open at once, each step is done on both, and
what comes back must be equal: bytes, positions and errors.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path

import pytest
from mount_drivers import BLOCK, ODD, SHARDS, Driver, Family, Mount, on_disk, write_family

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk

PAGE = 4096
FILES = (*SHARDS, ODD, "empty", "config.json")
LIBC = ctypes.CDLL(None, use_errno=True)

Outcome = bytes | int | str | None


@pytest.fixture(scope="module")
def family(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A store that nobody damages."""
    return write_family(tmp_path_factory.mktemp("reading"), driver)


@pytest.fixture(scope="module")
def pair(family: Family, mounted: Mount) -> tuple[Path, Path]:
    """`tuned` mounted, and the directory it came from."""
    return mounted(family.store, "tuned", family.store.parent / "mnt"), family.sources["tuned"]


@dataclass(frozen=True)
class Step:
    """One call, with all its arguments drawn."""

    name: str
    offset: int
    size: int
    other: int


class Reader:
    """One open file, and the ways to read it; each returns what a caller sees."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.scratch = scratch

    def close(self) -> None:
        os.close(self.fd)

    def pread(self, step: Step) -> Outcome:
        return os.pread(self.fd, step.size, step.offset)

    def preadv(self, step: Step) -> Outcome:
        buffers = [bytearray(step.size // 3 + 1), bytearray(step.other % 5000), bytearray(1)]
        got = os.preadv(self.fd, buffers, step.offset)
        return b"".join(buffers)[:got]

    def preadv2(self, step: Step) -> Outcome:
        """What is in memory already, or nothing: never anything else."""
        buffer = bytearray(step.size)
        try:
            got = os.preadv(self.fd, [buffer], step.offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            got = 0
        # The rest in the ordinary way: all of it is what `pread` would have returned.
        return bytes(buffer[:got]) + os.pread(self.fd, step.size - got, step.offset + got)

    def read(self, step: Step) -> Outcome:
        """From the file's own position, which moves."""
        data = os.read(self.fd, step.size)
        return data + b" then at %d" % os.lseek(self.fd, 0, os.SEEK_CUR)

    def readv(self, step: Step) -> Outcome:
        buffers = [bytearray(step.size), bytearray(7)]
        return os.readv(self.fd, buffers).to_bytes(8, "big") + b"".join(buffers)

    def seek(self, step: Step) -> Outcome:
        return os.lseek(self.fd, step.offset, os.SEEK_SET)

    def seek_on(self, step: Step) -> Outcome:
        return os.lseek(self.fd, step.offset - step.other, os.SEEK_CUR)

    def seek_back(self, step: Step) -> Outcome:
        return os.lseek(self.fd, -step.other, os.SEEK_END)

    def seek_data(self, step: Step) -> Outcome:
        return os.lseek(self.fd, step.offset, os.SEEK_DATA)

    def seek_hole(self, step: Step) -> Outcome:
        return os.lseek(self.fd, step.offset, os.SEEK_HOLE)

    def mapped(self, step: Step) -> Outcome:
        """A part of the file, mapped from the page before it."""
        start = step.offset - step.offset % mmap.ALLOCATIONGRANULARITY
        length = min(step.offset + step.size, os.fstat(self.fd).st_size) - start
        if length <= 0:
            return None
        flags = (mmap.MAP_SHARED, mmap.MAP_PRIVATE)[step.other % 2]
        with mmap.mmap(self.fd, length, flags, mmap.PROT_READ, offset=start) as found:
            advice = (mmap.MADV_RANDOM, mmap.MADV_SEQUENTIAL, mmap.MADV_WILLNEED)
            found.madvise(advice[step.other % 3])
            return found[step.offset - start :]

    def private(self, step: Step) -> Outcome:
        """A private map may be written, and the file stays as it is."""
        size = os.fstat(self.fd).st_size
        if not size:
            return None
        with mmap.mmap(self.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as found:
            at = step.offset % size
            found[at] ^= 0xFF
            return found[at : at + step.size] + os.pread(self.fd, step.size, at)

    def sendfile(self, step: Step) -> Outcome:
        with self._empty() as out:
            while step.size and os.sendfile(out.fileno(), self.fd, step.offset + out.tell(), 65536):
                if out.seek(0, os.SEEK_END) >= step.size:
                    break
            out.seek(0)
            return out.read(step.size)

    def splice(self, step: Step) -> Outcome:
        inlet, outlet = os.pipe()
        try:
            wanted = min(step.size, 60_000)
            moved = os.splice(self.fd, outlet, wanted, offset_src=step.offset)
            data = os.read(inlet, moved) if moved else b""
            # Pipes may be full of short pages; the rest in the ordinary way.
            return data + os.pread(self.fd, wanted - moved, step.offset + moved)
        finally:
            os.close(inlet)
            os.close(outlet)

    def copy_file_range(self, step: Step) -> Outcome:
        with self._empty() as out:
            try:
                moved = os.copy_file_range(self.fd, out.fileno(), step.size, step.offset)
            except OSError as error:
                # Between filesystems the kernel may refuse, and cp goes on by reading.
                if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP):
                    raise
                moved = 0
            out.seek(0)
            data = out.read()
            assert len(data) == moved
            return data + os.pread(self.fd, step.size - moved, step.offset + moved)

    def direct(self, step: Step) -> Outcome:
        """Past the page cache, in whole pages."""
        size = -(-step.size // PAGE) * PAGE
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            # A map of no file begins at a page.
            with mmap.mmap(-1, size or PAGE) as buffer:
                got = os.preadv(fd, [buffer], step.offset - step.offset % PAGE)
                return buffer[:got]
        finally:
            os.close(fd)

    def readahead(self, step: Step) -> Outcome:
        got: int = LIBC.readahead(self.fd, ctypes.c_int64(step.offset), ctypes.c_size_t(step.size))
        return got

    def advise(self, step: Step) -> Outcome:
        advice = (
            os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED, os.POSIX_FADV_RANDOM,
            os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_NORMAL, os.POSIX_FADV_NOREUSE,
        )  # fmt: skip
        os.posix_fadvise(self.fd, step.offset, step.size, advice[step.other % 6])
        return None

    def forget(self, step: Step) -> Outcome:
        """The next reads are cold."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return None

    def open_again(self, step: Step) -> Outcome:
        self.close()
        self.fd = os.open(self.path, os.O_RDONLY | os.O_NOATIME * (step.other % 2))
        return os.fstat(self.fd).st_size

    def _empty(self) -> FileIO:
        return FileIO(self.scratch / "out", "w+b")


WAYS: tuple[Callable[[Reader, Step], Outcome], ...] = (
    *[Reader.pread] * 4, *[Reader.mapped] * 4, *[Reader.forget] * 3, Reader.preadv, Reader.preadv2,
    Reader.read, Reader.read, Reader.readv, Reader.seek, Reader.seek, Reader.seek_on,
    Reader.seek_back, Reader.seek_data, Reader.seek_hole, Reader.private, Reader.sendfile,
    Reader.splice, Reader.copy_file_range, Reader.direct, Reader.readahead, Reader.advise,
    Reader.advise, Reader.open_again,
)  # fmt: skip


def steps(draw: random.Random, path: Path, driver: Driver) -> Iterator[Step]:
    """Calls at and around all that has a boundary: pages, blocks, tensors, the header, the end."""
    size = path.stat().st_size
    edges = _edges(path)
    ways = [way for way in WAYS if way is not Reader.direct or driver.reads_directly]
    while True:
        way = draw.choice(ways)
        near = draw.choice(edges) + draw.choice((0, 0, -1, 1, -17, 17, PAGE, -PAGE))
        offset = max(0, draw.choice((near, draw.randrange(size + 1))))
        length = draw.choice((0, 1, 2, 17, 511, PAGE, PAGE + 1, BLOCK, BLOCK + 3, 300_000))
        length = draw.choice((length, abs(draw.choice(edges) - offset)))
        yield Step(way.__name__, offset, length, draw.randrange(size + 2))


def _edges(path: Path) -> list[int]:
    size = path.stat().st_size
    edges = [0, size, size + PAGE, size - size % PAGE]
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(header - 8))
        for name, slot in told.items():
            if name != "__metadata__":
                begin, stop = (header + at for at in slot["data_offsets"])
                # Blocks are counted from where a tensor begins.
                edges += [begin, stop, *range(begin, stop, BLOCK)]
    return edges + list(range(0, size, BLOCK))


def outcome(reader: Reader, step: Step) -> Outcome:
    """What a call returns, or the name of its error."""
    try:
        return getattr(reader, step.name)(step)  # type: ignore[no-any-return]
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def compare(
    driver: Driver, shown: Path, original: Path, scratch: Path, seed: int, number: int
) -> None:
    """That many calls on both files, each with the same outcome."""
    draw = random.Random(f"{seed} {original.name}")
    readers = []
    for folder, path in (("ours", shown), ("theirs", original)):
        (scratch / folder).mkdir(exist_ok=True)
        readers.append(Reader(path, scratch / folder))
    ours, theirs = readers
    done: list[Step] = []
    for step in islice(steps(draw, original, driver), number):
        done.append(step)
        found, wanted = outcome(ours, step), outcome(theirs, step)
        if found != wanted:
            told = [each if not isinstance(each, bytes) else len(each) for each in (found, wanted)]
            raise AssertionError(f"seed {seed}, {original.name}: {told} after {done[-5:]}")
    ours.close()
    theirs.close()


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", FILES)
def test_every_way_to_read_agrees_with_the_file(
    driver: Driver, pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """pread, preadv, preadv2, read, readv, lseek to data, holes and ends, maps of all kinds,
    sendfile, splice, copy_file_range, O_DIRECT, readahead and fadvise return, in random order and
    around every boundary, what they return for the original: bytes, positions and errors."""
    shown, original = pair
    compare(driver, shown / name, original / name, tmp_path, 1, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_way_to_read_agrees_for_long(
    driver: Driver, pair: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    """The same for 10,000 calls from a new seed, which a failure tells."""
    shown, original = pair
    seed = random.SystemRandom().randrange(1 << 30)
    compare(driver, shown / name, original / name, tmp_path, seed, 10_000)
