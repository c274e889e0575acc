"""Runs: which blocks of a file lie side by side, raw and page-congruent, and which to copy.

A block has one place, also where several files or positions have it: its *own* position is the
first one in the snapshot.  At every other position it breaks the run, and so does a block that
another pinned snapshot needs where it is.  Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE
from mstore.frozen import frozen
from mstore.ids import BlockId
from mstore.pins.spots import Spot

LONG_RUN: Final = 16 << 20
"""A run of so many bytes stays where it is; a shorter one joins its neighbours if they move.

Reading it takes ten times as long as finding it, on any disk; and a file of 5 GB then has at most
300 runs.
"""


@frozen
class Layout:
    """How a file lies: the number of its raw runs, and bytes that no page can be mapped from.

    unmapped_bytes: of blocks that are not raw, or not page-congruent with the file.
    """

    runs: int
    unmapped_bytes: int


def is_mappable(spot: Spot, place: Location) -> bool:
    """Return whether whole pages of the file are whole pages of the pack here."""
    return place.codec == Codec.RAW and (place.offset - spot.offset) % PAGE == 0


def layout(spots: Sequence[Spot], places: Sequence[Location]) -> Layout:
    """Return how a file lies; one spot and place per block, in file order."""
    runs = unmapped = 0
    before: Location | None = None
    for spot, place in zip(spots, places, strict=True):
        if not is_mappable(spot, place):
            unmapped += spot.length
            before = None
            continue
        runs += before is None or not place.follows(before)
        before = place
    return Layout(runs, unmapped)


def to_copy(
    spots: Sequence[Spot],
    places: Sequence[Location],
    taken: AbstractSet[BlockId],
    *,
    long_run: int = LONG_RUN,
) -> list[Spot]:
    """Return the blocks of a file to write anew, in file order.

    taken: blocks that keep their place: of earlier files, and raw ones of other pinned snapshots.
    Runs of `long_run` bytes stay, and so does a run whose neighbours stay: writing it anew would
    lengthen nothing.  So nothing is left to copy after everything was copied once.
    """
    found: list[Spot] = []
    group: list[Spot] = []
    is_lone = True
    for run, is_good in _stretches(spots, places, taken):
        if run and not (is_good and sum(spot.length for spot in run) >= long_run):
            is_lone = is_good and not group
            group += run
            continue
        found += [] if is_lone else group
        group = []
        is_lone = True
    return found if is_lone else found + group


def _stretches(
    spots: Sequence[Spot], places: Sequence[Location], taken: AbstractSet[BlockId]
) -> Iterator[tuple[list[Spot], bool]]:
    """Yield stretches of blocks that are one run, or no run at all, and which of the two.

    Yields an empty stretch for blocks that keep their place whatever is around them.
    """
    seen: set[BlockId] = set()
    run: list[Spot] = []
    before: Location | None = None
    for spot, place in zip(spots, places, strict=True):
        if spot.block in taken or spot.block in seen:
            if run:
                yield run, before is not None
            yield [], False
            run, before = [], None
            continue
        seen.add(spot.block)
        is_good = is_mappable(spot, place)
        goes_on = _goes_on(before, place) if is_good else before is None
        if run and not goes_on:
            yield run, before is not None
            run = []
        run.append(spot)
        before = place if is_good else None
    if run:
        yield run, before is not None


def _goes_on(before: Location | None, place: Location) -> bool:
    """Return whether copying could not bring two blocks closer together.

    That is also where a pack was full, and the run goes on at the beginning of the next one.
    """
    if before is None:
        return False
    return place.follows(before) or (place.pack != before.pack and place.offset < 2 * PAGE)
