"""Which rows of an inventory are dead, and what to do with each pack.

A pack's use is counted over its footer: of the payload bytes that it was sealed with, those that
live rows point at are used. All others are dead: rows that are gone or about to go, and copies of
blocks that another pack has. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from mstore.blocks.id_search import Flags
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import ENTRY, PAGE, Kind
from mstore.terms.errors import Corrupt
from mstore.terms.ids import PackId, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.sizes import format_size
from mstore.upkeep.reachability import Inventory, Reach

DEAD_SHARE = 0.3
"""Default share of dead payload bytes from which a pack is rewritten."""
SMALL_BYTES = 8 << 20
SMALL_PACKS = 8
"""Packs below SMALL_BYTES are joined if there are at least so many."""
_STEP = 1 << 20


class PackUse(msgspec.Struct, frozen=True):
    """A pack and its rows; `rows` includes dead ones.

    dead_bytes: None if the pack is damaged.
    """

    number: int
    pack: PackId
    size: int
    rows: int
    live_rows: int
    live_bytes: int
    dead_bytes: int | None

    @property
    def dead_share(self) -> float:
        dead = self.dead_bytes or 0
        return dead / (dead + self.live_bytes) if dead else 0.0


class Choice(msgspec.Struct, frozen=True):
    """What to do: remove packs without a live row, rewrite some others.

    joined: numbers of packs that are rewritten only because there are many small ones. stays: dead
    bytes of packs that are left as they are.
    """

    remove: tuple[PackUse, ...]
    rewrite: tuple[PackUse, ...]
    left: tuple[str, ...]
    short_of_room: bool
    joined: frozenset[int]
    stays: int


class DeadRows(msgspec.Struct, frozen=True):
    """The rows to delete, by kind."""

    rows: dict[Kind, Flags]
    snapshots: tuple[SnapshotId, ...]
    stored_bytes: int

    @classmethod
    def of(cls, reach: Reach) -> DeadRows:
        """Collect everything that is not reached."""
        rows = {kind: ~live for kind, live in reach.live.items()}
        stored = sum(
            int(table.heads["stored"][rows[kind]].astype(np.int64).sum())
            for kind, table in reach.inventory.tables.items()
        )
        gone = reach.inventory.snapshots - reach.snapshots
        return cls(rows, tuple(sorted(gone)), stored)

    def count(self, *kinds: Kind) -> int:
        """Return how many rows of these kinds are dead."""
        return sum(int(self.rows[kind].sum()) for kind in kinds)


def uses(reach: Reach, packs: Packs) -> list[PackUse]:
    """Return how each pack is used, by pack number.

    Reads the table of a footer only if it lists more rows than are live.
    """
    inventory = reach.inventory
    rows, _ = inventory.count_by_pack()
    live_rows, live_bytes = inventory.count_by_pack(reach.live)
    found = []
    for number, (pack, size) in sorted(inventory.packs.items()):
        live = int(live_rows[number])
        used = int(live_bytes[number])
        dead = _dead_bytes(packs, pack, size, live, used)
        found.append(PackUse(number, pack, size, int(rows[number]), live, used, dead))
    return found


def _dead_bytes(
    packs: Packs, pack: PackId, size: int, live_rows: int, live_bytes: int
) -> int | None:
    if not live_rows:
        return max(0, size - PAGE)
    try:
        return packs.dead_bytes(pack, live_rows, live_bytes)
    except Corrupt:
        return None


def choose(found: Sequence[PackUse], room: int, dead_share: float = DEAD_SHARE) -> Choice:
    """Choose packs to remove and to rewrite, with `room` bytes for copies."""
    remove, wanted, small = [], [], []
    left: list[str] = []
    for use in found:
        if use.live_rows == 0:
            remove.append(use)
        elif use.dead_bytes is None:
            repair = call("repair")
            what = "pack {pack}: damaged; next: {repair}"
            left.append(phrase(what, pack=use.pack.hex(), repair=repair))
        elif use.dead_bytes and use.dead_share >= dead_share:
            wanted.append(use)
        elif use.size < SMALL_BYTES:
            small.append(use)
    # Copies may be small too, and would be joined with these the next time.
    joined = small if len(small) + bool(wanted) >= SMALL_PACKS else []
    wanted += joined
    rewrite = []
    short = False
    for use in sorted(wanted, key=lambda use: (-use.dead_share, use.number)):
        needed = use.live_bytes + 2 * PAGE + ENTRY.size * use.live_rows
        if needed <= room:
            room -= needed
            rewrite.append(use)
        else:
            short = True
            size = format_size(use.live_bytes)
            left.append(f"pack {use.pack.hex()}: no room for a copy of {size}")
    done = {use.number for use in (*remove, *rewrite)}
    return Choice(
        tuple(remove),
        tuple(sorted(rewrite, key=lambda use: use.number)),
        tuple(left),
        short,
        frozenset(use.number for use in joined),
        sum(use.dead_bytes or 0 for use in found if use.number not in done),
    )


def places(inventory: Inventory, live: dict[Kind, Flags], packs: Iterable[PackUse]) -> list[Place]:
    """Return the live rows of some packs, in the order in which their payloads lie."""
    numbers = np.array([use.number for use in packs], np.int64)
    found = []
    for kind, table in inventory.tables.items():
        for start in range(0, len(table), _STEP):
            heads = table.heads[start : start + _STEP]
            inside = live[kind][start : start + _STEP] & np.isin(heads["pack"], numbers)
            found += [
                Place(pack, offset, kind, start + row)
                for row, (pack, offset) in zip(
                    np.flatnonzero(inside).tolist(),
                    heads[inside][["pack", "offset"]].tolist(),
                    strict=True,
                )
            ]
    return sorted(found, key=lambda place: (place.pack, place.offset))


class Place(msgspec.Struct, frozen=True):
    """A row by kind and number, and where its payload lies."""

    pack: int
    offset: int
    kind: Kind
    row: int
