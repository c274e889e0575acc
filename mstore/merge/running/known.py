"""Known chunks: those whose output exists, because an earlier merge or an interrupted run made it.

Owns memo keys, the lookup of both sources, and the rows that a run adds to the memo table.  A chunk
whose remembered blocks were collected is computed again, and must come out the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mstore.blocks.packs import Kind
from mstore.errors import Corrupt
from mstore.ids import BlockId
from mstore.merge.running.jobs import Job
from mstore.merge.running.memo_hits import Hits, find_hits
from mstore.merge.running.memo_keys import Remembered
from mstore.merge.running.ready import Ready
from mstore.merge.running.resume import Leftovers
from mstore.merge.running.sink import Sink
from mstore.merge.running.slices import Result
from mstore.merge.running.task import TensorTask
from mstore.phrases import call
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo


class KnownChunks:
    """What is known of the chunks of one run, by memo key.  Belongs to one thread.

    sink: None if the output is not stored: then no chunk is known, and no key is needed. memo: None
    to use no memo table. written: the blocks that this run has written; grows by those of adopted
    packs.

    hits: chunks found in the memo table. resumed_bytes: expert bytes that an interrupted run read
    for the chunks taken from it. rows: new rows for the memo table.
    """

    def __init__(
        self,
        catalog: Catalog,
        ready: Ready,
        sink: Sink | None,
        memo: Memo | None,
        written: set[BlockId],
    ) -> None:
        self._sink = sink
        self._memo = memo
        self._written = written
        self._ready = ready
        self._leftovers = None if sink is None else Leftovers(sink.directory, catalog)
        self._adopted: set[Path] = set()
        self._expected: dict[bytes, tuple[BlockId, ...]] = {}
        self.hits = 0
        self.resumed_bytes = 0
        self.rows: list[tuple[bytes, bytes]] = []

    def keys(self, tensor: TensorTask, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the memo keys of some chunks, by number; empty keys if none is needed."""
        if self._sink is None:
            return dict.fromkeys(numbers, b"")
        return self._ready.keys(tensor, numbers)

    def find(
        self, jobs: Sequence[Job], keys: Sequence[Mapping[int, bytes]]
    ) -> list[dict[int, Remembered]]:
        """Return the known chunks of each job, by number, with one lookup for all jobs."""
        if self._sink is None:
            return [{} for _ in jobs]
        hits = [Hits({}, {}) for _ in jobs]
        if self._memo is not None:
            wanted = [(job.shape, named) for job, named in zip(jobs, keys, strict=True)]
            hits = find_hits(self._memo, self._sink.has_blocks, wanted, self._ready.rows)
        return [
            self._known_of(self._sink, job, named, found)
            for job, named, found in zip(jobs, keys, hits, strict=True)
        ]

    def _known_of(
        self, sink: Sink, job: Job, keys: Mapping[int, bytes], hits: Hits
    ) -> dict[int, Remembered]:
        rows: dict[int, Remembered] = dict(hits.known)
        self.hits += len(hits.known)
        # gc deleted their blocks: recomputing them must give the same ids.
        self._expected.update((keys[number], row.blocks) for number, row in hits.gone.items())
        if self._leftovers:
            for number in sorted(keys.keys() - rows.keys()):
                found = self._leftovers.find(keys[number])
                if found is None or not job.shape.fits(number, found.row):
                    continue
                self._adopt(sink, self._leftovers, found.pack)
                if all(sink.has_blocks(found.row.blocks)):
                    rows[number] = found.row
                    self.resumed_bytes += found.expert_bytes
                    self.rows.append((keys[number], found.row.encode()))
        return rows

    def _adopt(self, sink: Sink, leftovers: Leftovers, path: Path) -> None:
        pack = leftovers.pack(path)
        if pack is not None and path not in self._adopted:
            self._adopted.add(path)
            self._written.update(
                BlockId(entry.id) for entry in pack.entries if entry.kind == Kind.BLOCK
            )
            sink.adopt(pack)

    def learn(self, result: Result) -> None:
        """Add a computed chunk.  Raises Corrupt if the memo table remembers another output."""
        expected = self._expected.get(result.key)
        if expected is not None and expected != result.blocks:
            raise Corrupt(
                "the recomputed chunk differs from the memo table",
                where=f"{result.tensor}, chunk {result.number}",
                hint=call("fsck", read_data=True),
            )
        if result.key:
            self.rows.append((result.key, result.value))
