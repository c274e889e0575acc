"""The slice writer: puts the new blocks of one slice into its pack.

The pack is garbage until it is published.  Data is synced by `seal`, not before.
"""

from __future__ import annotations

from mstore.blocks.packs import PackWriter, SealedPack
from mstore.ids import BlockId
from mstore.merge.running.computer import Computed
from mstore.merge.running.slices import Result, Slice


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
