"""The local runner: computes slices on threads of this process.

One slice's pack is sealed while the next is computed.  The last pack stays open for the records of
the output.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from mstore.blocks.packs import SealedPack
from mstore.ids import BlockId
from mstore.merge.running.computer import Computer
from mstore.merge.running.resume import write_receipt
from mstore.merge.running.sink import Sink
from mstore.merge.running.slice_writer import SliceWriter
from mstore.merge.running.slices import Bounds
from mstore.merge.running.stream import Stream
from mstore.merge.running.work_list import WorkList

_SEALING: Final = 2
"""Number of packs that may be syncing while the next one is filled."""


class LocalRunner:
    """Runs a work list here.

    sink: None to compute without storing. written: the blocks that this run has written; grows.
    """

    def __init__(
        self, computer: Computer, bounds: Bounds, sink: Sink | None, written: set[BlockId]
    ) -> None:
        self._computer = computer
        self._bounds = bounds
        self._sink = sink
        self._written = written

    def run(self, work: WorkList) -> None:
        """Compute everything.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        with ThreadPoolExecutor(1, "seal") as sealer:
            sealing: deque[Future[SealedPack | None]] = deque()
            writer: SliceWriter | None = None
            stream = Stream(self._computer, self._bounds).run(work.slices())
            try:
                for computed in stream:
                    work.take(computed.results)
                    if self._sink is not None:
                        if writer is None or writer.slice is not computed.slice:
                            full, writer = writer, SliceWriter(computed.slice, self._written)
                            if full is not None:
                                sealing.append(sealer.submit(_seal, full))
                            while len(sealing) > _SEALING:
                                self._publish(sealing.popleft().result())
                        writer.put(computed)
                    self._computer.recycle(computed)
                while sealing:
                    self._publish(sealing.popleft().result())
                if writer is not None:
                    self._keep_open(writer)
            except BaseException:
                stream.close()
                if writer is not None:
                    writer.abandon()
                raise

    def _publish(self, pack: SealedPack | None) -> None:
        if pack is not None:
            assert self._sink is not None
            self._sink.adopt(pack)

    def _keep_open(self, writer: SliceWriter) -> None:
        """Put the records into the last pack, too: one file less to sync and to open."""
        pack = writer.release()
        if pack is not None:
            assert self._sink is not None
            self._sink.go_on_with(pack, writer.new)


def _seal(writer: SliceWriter) -> SealedPack | None:
    """Sync a slice's pack and record its purpose, in a thread of its own."""
    pack = writer.seal()
    if pack is not None:
        write_receipt(pack, writer.results)
    return pack
