"""The merge that knows nothing: flat files, every byte of every expert, our kernels.

    python bench/naive.py OUT METHOD PARAMETERS THRESHOLDS BASE EXPERT...

What a budget and a store are compared with (the paper's naive full read).  Reads the base and all
experts chunk by chunk on as many threads as there are cores, with read-ahead, mixes with the same
compiled kernels as the engine, writes plain files and syncs them.  It hashes nothing, checks
nothing, skips nothing.  For TIES it is *given* the thresholds (THRESHOLDS, a JSON file of name ->
one number an expert, or `-`), which it would otherwise need a first pass for, and keeps all ties:
its figures there flatter it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from once import disk_bytes

from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.methods import registry

CHUNK = 2 << 20  # bytes of one model
AHEAD = 4  # chunks


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's bytes in an open file."""

    fd: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one tensor, from `start`, in all models."""

    name: str
    start: int
    nbytes: int
    spans: tuple[Span, ...]
    out: Span


def spans(directory: Path) -> dict[str, Span]:
    """Every tensor of a checkpoint; files stay open.  All have to be bfloat16."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        for name, entry in json.loads(os.pread(fd, length, 8)).items():
            if name != "__metadata__":
                assert entry["dtype"] == "BF16"
                start, end = entry["data_offsets"]
                found[name] = Span(fd, 8 + length + start, end - start)
    return found


class Naive:
    """One merge."""

    def __init__(
        self,
        out: Path,
        method: str,
        given: dict[str, Any],
        thresholds: dict[str, list[float]],
        models: list[Path],
    ) -> None:
        self.out = out
        self.base = models[0]
        self.count = len(models) - 1
        operation = registry.operation(method, given, [1.0] * self.count)
        self.mix = operation.mix()
        self.keys = operation.selection.keys
        self.thresholds = thresholds
        self.models = [spans(model) for model in models]
        self.scratch = threading.local()

    def run(self) -> dict[str, int]:
        """Merge; returns what was read of experts and base, and written."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        chunks, files = list(self._chunks()), self.written
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            waiting = [pool.submit(self._chunk, chunks, number) for number in range(len(chunks))]
            for done in waiting:
                done.result()
        for fd in files:
            os.fsync(fd)
        size = sum(chunk.nbytes for chunk in chunks)
        return {"expert_bytes": size * self.count, "base_bytes": size, "written_bytes": size}

    def _chunks(self) -> Iterator[Chunk]:
        """In file order; output files are made as they come, with the base's headers."""
        self.written = []
        targets: dict[str, int] = {}
        for path in sorted(self.base.iterdir()):
            target = self.out / path.name
            if path.suffix != ".safetensors":
                shutil.copyfile(path, target)
                continue
            with path.open("rb") as file:
                raw = file.read(8)
                raw += file.read(int.from_bytes(raw, "little"))
            target.write_bytes(raw)
            fd = os.open(target, os.O_WRONLY)
            self.written.append(fd)
            targets |= dict.fromkeys(json.loads(raw[8:]), fd)
        for name, span in self.models[0].items():
            every = tuple(model[name] for model in self.models)
            out = Span(targets[name], span.offset, span.nbytes)
            for start in range(0, span.nbytes, CHUNK):
                yield Chunk(name, start, min(CHUNK, span.nbytes - start), every, out)

    def _chunk(self, chunks: list[Chunk], number: int) -> None:
        if number + AHEAD < len(chunks):
            ahead = chunks[number + AHEAD]
            for span in ahead.spans:
                where = span.offset + ahead.start
                os.posix_fadvise(span.fd, where, ahead.nbytes, os.POSIX_FADV_WILLNEED)
        chunk = chunks[number]
        if not hasattr(self.scratch, "rows"):
            self.scratch.rows = np.empty((self.count + 2, CHUNK), dtype=np.uint8)
        rows = self.scratch.rows
        for span, row in zip(chunk.spans, rows, strict=False):
            done = os.preadv(span.fd, [row[: chunk.nbytes]], span.offset + chunk.start)
            assert done == chunk.nbytes
        keys = self.keys(chunk.name)
        if keys is None:
            keys = np.zeros((self.count, 2), dtype=np.uint32)
        cut = self.thresholds.get(chunk.name, [0.0] * self.count)
        mix_chunk(
            self.mix,
            rows[0],
            "BF16",
            rows[1 : 1 + self.count],
            ["BF16"] * self.count,
            np.arange(self.count, dtype=np.int64),
            chunk.nbytes // 2,
            chunk.start // 2,
            np.array(cut, dtype=np.float32),
            np.full(self.count, UNLIMITED, dtype=np.int64),
            keys,
            rows[-1],
            "BF16",
        )
        os.pwritev(chunk.out.fd, [rows[-1][: chunk.nbytes]], chunk.out.offset + chunk.start)


def main() -> None:
    out, method, parameters, thresholds, *models = sys.argv[1:]
    given = {} if thresholds == "-" else json.loads(Path(thresholds).read_text())
    naive = Naive(Path(out), method, json.loads(parameters), given, [Path(m) for m in models])
    print(json.dumps(naive.run() | disk_bytes()))


if __name__ == "__main__":
    main()
