"""Location: where a payload is stored, and how."""

from __future__ import annotations

import msgspec

from mstore.blocks.packs import NO_BASE
from mstore.ids import PackId


class Location(msgspec.Struct, frozen=True, gc=False):
    """Where a payload is stored.  `pack` is resolved, so a location outlives its transaction."""

    pack: PackId
    offset: int
    stored_length: int
    raw_length: int
    codec: int
    width: int
    base: bytes = NO_BASE

    def follows(self, before: Location) -> bool:
        """Return whether the payload lies right behind another one."""
        return (self.pack, self.offset) == (before.pack, before.offset + before.stored_length)
