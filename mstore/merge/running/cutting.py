"""Cutting: runs of chunks, in file order, into slices of about equal output."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from mstore.merge.running.slices import Run, Slice


class Cutter:
    """Collects runs and cuts them.  Belongs to one thread.

    first: the first slice, without its runs; the others are like it, each with a pack of its own.
    slice_bytes: plain bytes of output per slice.  A tensor whose tie quota ends within it is not
    cut.
    """

    def __init__(self, first: Slice, slice_bytes: int) -> None:
        self._first = first
        self._limit = slice_bytes
        self._count = 0
        self._runs: list[Run] = []
        self._length = 0

    def add(self, run: Run) -> Iterator[Slice]:
        """Add a run, and yield the slices that are full."""
        length = sum(task.out_bytes for task in run.chunks)
        if run.tensor.limited:
            if self._runs and self._length + length > self._limit:
                yield self._cut()
            self._runs.append(run)
            self._length += length
            if self._length >= self._limit:
                yield self._cut()
            return
        start = 0
        for number, task in enumerate(run.chunks, start=1):
            self._length += task.out_bytes
            if self._length >= self._limit or number == len(run.chunks):
                part = slice(start, number)
                self._runs.append(Run(run.tensor, run.chunks[part], run.keys[part]))
                start = number
            if self._length >= self._limit:
                yield self._cut()

    def rest(self) -> Iterator[Slice]:
        """Yield the last slice, unless all runs are in slices."""
        if self._runs:
            yield self._cut()

    def _cut(self) -> Slice:
        target = self._first.target.with_name(f"{self._count}.pack")
        made = replace(self._first, target=target, runs=tuple(self._runs))
        self._count += 1
        self._runs, self._length = [], 0
        return made
