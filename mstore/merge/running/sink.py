"""The sink: where the output of a merge goes.

`mstore.store.transaction.Transaction` is one.  Nothing is published until its owner commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mstore.blocks.codecs import Encoded
from mstore.blocks.packs import PackWriter, SealedPack
from mstore.ids import BlockId, Id
from mstore.objects.canonical import Record


class Sink(Protocol):
    """Where output goes.  Called from one thread."""

    @property
    def directory(self) -> Path:
        """The directory for packs that `adopt` takes."""

    @property
    def blocks_new(self) -> int:
        """Number of blocks that it took and that were not stored yet."""

    def has_blocks(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Return which blocks are already stored."""

    def put_block(self, block: BlockId, encoded: Encoded, file: str, file_offset: int) -> bool:
        """Store a block; return True if it was new."""

    def put_records(self, records: Sequence[Record]) -> list[Id]:
        """Store records."""

    def adopt(self, pack: SealedPack) -> int:
        """Add a sealed pack; return how many of its blocks are new."""

    def go_on_with(self, writer: PackWriter, blocks: Sequence[BlockId]) -> None:
        """Continue an unfinished pack that holds these blocks, all of them new."""
