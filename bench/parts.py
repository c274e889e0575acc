"""What this machine could do at best with given bytes: each part of a command's work, alone.

A part of the processors runs on all of them at once, each piece of 1 MiB in turn, over the very
bytes that a command handles: packs from the page cache, plain bytes and frames from memory.  It is
processor seconds in all, without what fetches the bytes for it, so that parts add up and other
programs on the machine count little.  `written` is wall time of the disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec, decode, decode_into
from mstore.blocks.packs import Kind, read_footer
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.methods import registry
from mstore.models.stats import deltas

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))
DENSITY = 0.2
CUT = 1.28e-3
"""About what density 0.2 keeps of moves of deviation 1e-3."""

Bytes = npt.NDArray[np.uint8]


class Own(threading.local):
    """What a thread works with."""

    def __init__(self) -> None:
        self.room = np.empty((8, MIB), dtype=np.uint8)
        self.counts = np.zeros((0x8000, 2), dtype=np.int64)


own = Own()


def processor(pieces: Iterable[Any], work: Callable[[Any], float]) -> float:
    """Sum of the seconds that `work` returns for each piece, with as many threads as processors."""
    with ThreadPoolExecutor(CORES) as pool:
        return sum(pool.map(work, pieces))


def timed(call: Callable[..., object], *given: object) -> float:
    """Processor seconds of this thread in one call."""
    began = time.thread_time()
    call(*given)
    return time.thread_time() - began


def plain(directory: Path) -> Bytes:
    """The elements of a checkpoint, in memory, in whole MiB."""
    rows = [np.fromfile(path, dtype=np.uint8) for path in sorted(directory.glob("*.safetensors"))]
    # The head of a shard holds no elements: it loses what is beyond whole MiB, or one.
    return np.concatenate([row[row.size % MIB or MIB :] for row in rows])


@dataclass(frozen=True, slots=True)
class Coded:
    """The payload of a block that is not raw. base: plain bytes, for a delta."""

    codec: Codec
    width: int
    payload: bytes
    length: int
    base: bytes | None = None


class Payloads:
    """The payloads of packs; the packs of bases are asked for before those of their deltas."""

    def __init__(self) -> None:
        self._bases: dict[bytes, bytes] = {}

    def of(self, pack: Path) -> list[Coded]:
        """What one pack has that is not raw."""
        found = []
        with pack.open("rb") as file:
            for entry in read_footer(pack).entries:
                if entry.kind != Kind.BLOCK or entry.codec in (Codec.RAW, Codec.CONSTANT):
                    continue
                file.seek(entry.offset)
                payload, length = file.read(entry.stored_length), entry.raw_length
                codec = Codec(entry.codec)
                base = self._bases[entry.base] if codec.is_delta else None
                found.append(Coded(codec, entry.width, payload, length, base))
                if base is None:
                    plain = decode(codec, payload, entry.width, length)
                    self._bases[entry.id] = bytes(plain)
        return found


def start() -> float:
    """Wall seconds of starting the interpreter and nothing else: the least of five."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        found.append(time.perf_counter() - began)
    return min(found)


def read(files: Sequence[Path]) -> float:
    """Processor seconds of pread, in pieces of 1 MiB, from the page cache into one buffer."""
    opened = {os.open(file, os.O_RDONLY): file for file in files}
    try:
        pieces = [
            (fd, offset)
            for fd, file in opened.items()
            for offset in range(0, file.stat().st_size, MIB)
        ]
        return processor(pieces, lambda at: timed(os.preadv, at[0], [own.room[0]], at[1]))
    finally:
        for fd in opened:
            os.close(fd)


def hashed(data: Bytes) -> float:
    """Processor seconds of BLAKE3 of each MiB."""

    def piece(at: int) -> float:
        own.room[0] = data[at : at + MIB]  # where pread leaves it: near the processor
        return timed(lambda: blake3.blake3(own.room[0]).digest())

    return processor(range(0, data.size, MIB), piece)


def decoded(payloads: Sequence[Coded]) -> float:
    """Processor seconds of decoding."""

    def piece(one: Coded) -> float:
        room = own.room[0][: one.length].data
        return timed(decode_into, one.codec, one.payload, one.width, room, one.base)

    return processor(payloads, piece)


def mixed(method: str, models: Sequence[Bytes]) -> float:
    """Processor seconds of the kernel of a merge of `models[1:]` upon `models[0]`."""
    count = len(models) - 1
    given = {"density": DENSITY} if method == "ties" else {}
    mix = registry.operation(method, given, [1.0] * count).mix()
    cut = np.full(count, CUT, dtype=np.float32)
    unlimited = np.full(count, UNLIMITED, dtype=np.int64)
    keys, row_of = np.zeros((count, 2), dtype=np.uint32), np.arange(count, dtype=np.int64)

    def piece(at: int) -> float:
        rows = own.room
        for row, model in zip(rows, models, strict=False):
            row[:] = model[at : at + MIB]
        base, experts, out = rows[0], rows[1 : 1 + count], rows[1 + count]
        return timed(
            mix_chunk,
            *(mix, base, "BF16", experts, ["BF16"] * count, row_of, MIB // 2, 0),
            *(cut, unlimited, keys, out, "BF16"),
        )

    return processor(range(0, models[0].size, MIB), piece)


def measured(base: Bytes, expert: Bytes) -> float:
    """Processor seconds of the pass that takes statistics of an expert's delta."""

    def piece(at: int) -> float:
        room = own.room
        room[0], room[1] = base[at : at + MIB], expert[at : at + MIB]
        return timed(deltas.measure, room[0], "BF16", room[1], "BF16", MIB // 2, 0, own.counts)

    return processor(range(0, base.size, MIB), piece)


def written(path: Path, size: int) -> float:
    """Wall seconds of writing and syncing a file of so many bytes."""
    piece = memoryview(np.random.default_rng(1).bytes(MIB))
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for at in range(0, size, MIB):
            os.pwrite(fd, piece[: min(MIB, size - at)], at)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds
