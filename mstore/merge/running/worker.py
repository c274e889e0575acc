"""The worker: computes one slice, in any process that sees the store's packs and its tmp directory.

Needs no index, no lease and no catalog.  Publishes nothing: the merge that made the slice takes the
receipt, and the pack is garbage until then.

Memory: a slice says how many threads compute it and how many batches they work ahead
(`slices.Bounds`).  Buffers and outputs then stay within the merge's `memory`, of which
`memory.RESERVE` is for the process itself.
"""

from __future__ import annotations

import os
from contextlib import closing

from msgspec.structs import replace

from mstore import fs
from mstore.blocks.pack_files import places_of
from mstore.blocks.packs import PackWriter, SealedPack
from mstore.blocks.reader import Meter
from mstore.merge.running.computer import Computed, Computer
from mstore.merge.running.slices import Receipt, Result, Slice
from mstore.merge.running.stream import computed
from mstore.terms.ids import BlockId


class SliceWriter:
    """Takes the chunks of one slice in order and writes the new blocks into its pack.

    written: the blocks in this pack or in another of the same run; grows.  For one thread only.
    """

    def __init__(self, slice: Slice, written: set[BlockId]) -> None:
        self.slice = slice
        self._written = written
        self._writer: PackWriter | None = None
        self.results: list[Result] = []
        self.new: list[BlockId] = []

    def put(self, computed: Computed) -> None:
        """Write a batch's new blocks.  Raises StorageFailed."""
        self.results += computed.results
        for output in computed.outputs:
            encoded = output.encoded
            if encoded is not None and output.id not in self._written:
                self._open().append_encoded(output.id, encoded, output.file, output.offset)
                self._written.add(output.id)
                self.new.append(output.id)

    def _open(self) -> PackWriter:
        if self._writer is None:
            self._writer = PackWriter(self.slice.target)
        return self._writer

    def seal(self) -> SealedPack | None:
        """Finish the pack; None if no block was new.  May be called from another thread."""
        writer, self._writer = self._writer, None
        return None if writer is None else writer.seal()

    def release(self) -> PackWriter | None:
        """Return the unfinished pack for the caller to continue; None if no block was new."""
        writer, self._writer = self._writer, None
        return writer

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


def execute(slice: Slice) -> Receipt:
    """Compute a slice and write its pack, within the bounds of the slice.

    For any concurrent.futures.Executor: needs only the paths that the slice names.  Each attempt
    writes a pack with a unique name, so a slice may run again after a worker died, or twice at
    once: one receipt counts, and the packs of other attempts are garbage in the same directory.
    Raises BudgetExceeded, Corrupt, StorageFailed; then nothing is left behind.
    """
    # In a process of its own, nobody else has the store open.
    root = fs.Root(slice.store)
    expert_meter, base_meter = Meter("expert", slice.expert_bytes), Meter("base")
    packs = places_of(slice.store)[slice.place]
    attempt = slice.target.with_name(f"{slice.target.stem}-{os.urandom(4).hex()}.pack")
    writer = SliceWriter(replace(slice, target=attempt), set())
    computer = Computer(packs, expert_meter, base_meter)
    try:
        with closing(computed(computer, slice.bounds, [slice])) as batches:
            for one in batches:
                writer.put(one)
                computer.recycle(one)
        pack = writer.seal()
    except BaseException:
        writer.abandon()
        raise
    finally:
        packs.close()
        root.close()
    return Receipt(pack, tuple(writer.results), expert_meter.total, base_meter.total)
