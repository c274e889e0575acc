"""BitX of ZipLLM, written anew for `density.py`: XOR with the base, byte planes, zstd.

    python bench/bitx.py pack MODEL OUT [--base BASE] [--level 1]
    python bench/bitx.py unpack PACKED OUT [--base PACKED]

After "ZipLLM: Efficient LLM Storage via Model-Aware Synergistic Data Deduplication and
Compression" (NSDI 2026): a tensor that the base has bit by bit is not stored again; one that has
the name, dtype and length of the base's is XORed with it; what is left is split into byte planes,
each one zstd frame.  A base (or a tensor without a partner) is split and compressed as it is.  As
many threads as cores, as mstore.

OUT of `pack` is a directory: `<file>.bitx` for each file, which is `count u32`, then for each run
of bytes `length u64, how u8, width u8, packed length u64 a plane`, then the planes.  Whatever is
no tensor is one run.  Files are synced.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

ALONE, XORED, SAME = range(3)
WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8}
HEAD = struct.Struct("<QBB")
SUFFIX = ".bitx"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a file: a tensor by name, dtype and length, or plain bytes (no name)."""

    name: str
    dtype: str
    start: int
    end: int


def runs_of(data: Bytes, *, safetensors: bool) -> list[Run]:
    """The tensors of a file in data order, and the header before them; or all as one run."""
    if not safetensors:
        return [Run("", "", 0, len(data))]
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = [
        Run(name, t["dtype"], start + t["data_offsets"][0], start + t["data_offsets"][1])
        for name, t in header.items()
    ]
    return [Run("", "", 0, start), *sorted(tensors, key=lambda run: run.start)]


def mapped(path: Path) -> tuple[Bytes, list[Run]]:
    """A file's bytes and its runs."""
    data = np.memmap(path, np.uint8, "r")
    return data, runs_of(data, safetensors=path.suffix == ".safetensors")


def partners(runs: list[Run], path: Path) -> list[Bytes | None]:
    """For each run the base's tensor at its place, if name, dtype and length are the same."""
    if not path.exists() or not path.stat().st_size:
        return [None] * len(runs)
    data, others = mapped(path)
    found: list[Bytes | None] = []
    for number, run in enumerate(runs):
        other = others[number] if number < len(others) else Run("", "", 0, 0)
        size = other.end - other.start
        same = (run.name, run.dtype, run.end - run.start) == (other.name, other.dtype, size)
        found.append(data[other.start : other.end] if run.name and same else None)
    return found


def pack_run(run: Run, data: Bytes, base: Bytes | None, level: int) -> list[bytes]:
    """The head of a run, and its planes."""
    plain = data[run.start : run.end]
    width = WIDTHS.get(run.dtype, 1)
    how = ALONE
    if base is not None:
        plain, how = plain ^ base, XORED
        if not plain.any():
            return [HEAD.pack(len(plain), SAME, width)]
    compress = zstandard.ZstdCompressor(level).compress
    planes = np.ascontiguousarray(plain.reshape(-1, width).T)
    packed = [compress(plane) for plane in planes]
    lengths = b"".join(len(plane).to_bytes(8, "little") for plane in packed)
    return [HEAD.pack(len(plain), how, width) + lengths, *packed]


def pack(model: Path, out: Path, base: Path | None, level: int) -> None:
    """All files of a model."""
    out.mkdir(parents=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for path in sorted(model.iterdir()):
            if not path.stat().st_size:
                (out / (path.name + SUFFIX)).write_bytes(bytes(4))
                continue
            data, runs = mapped(path)
            bases = [None] * len(runs) if base is None else partners(runs, base / path.name)
            jobs = [
                pool.submit(pack_run, run, data, other, level)
                for run, other in zip(runs, bases, strict=True)
            ]
            with (out / (path.name + SUFFIX)).open("wb") as file:
                file.write(len(runs).to_bytes(4, "little"))
                for job in jobs:
                    file.writelines(job.result())
                file.flush()
                os.fsync(file.fileno())


def unpacked(path: Path, base: dict[int, Bytes], pool: ThreadPoolExecutor) -> Iterator[Bytes]:
    """The runs of a file; `base` are those of the base's file, by number."""
    data = path.read_bytes()
    at = 4
    jobs = []
    for number in range(int.from_bytes(data[:4], "little")):
        length, how, width = HEAD.unpack_from(data, at)
        at += HEAD.size
        planes: list[memoryview] = []
        if how != SAME:
            sizes = struct.unpack_from(f"<{width}Q", data, at)
            at += 8 * width
            for size in sizes:
                planes.append(memoryview(data)[at : at + size])
                at += size
        jobs.append(pool.submit(_unpack_run, length, how, width, planes, base.get(number)))
    return (job.result() for job in jobs)


def _unpack_run(
    length: int, how: int, width: int, planes: list[memoryview], base: Bytes | None
) -> Bytes:
    if how == SAME:
        assert base is not None
        return base
    plain = np.empty((length // width, width), np.uint8)
    for number, plane in enumerate(planes):
        raw = zstandard.ZstdDecompressor().decompress(plane, max_output_size=length)
        plain[:, number] = np.frombuffer(raw, np.uint8)
    flat = plain.reshape(-1)
    if how == XORED:
        assert base is not None
        flat ^= base
    return flat


def unpack(packed: Path, out: Path, base: Path | None) -> None:
    """All files of a model; a base is unpacked in memory, as its runs are needed."""
    out.mkdir(parents=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for path in sorted(packed.iterdir()):
            other: dict[int, Bytes] = {}
            if base is not None and (base / path.name).exists():
                other = dict(enumerate(unpacked(base / path.name, {}, pool)))
            with (out / path.name.removesuffix(SUFFIX)).open("wb") as file:
                for run in unpacked(path, other, pool):
                    file.write(run.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--level", type=int, default=1)
    given = parser.parse_args()
    if given.verb == "pack":
        pack(given.source, given.out, given.base, given.level)
    else:
        unpack(given.source, given.out, given.base)


if __name__ == "__main__":
    main()
