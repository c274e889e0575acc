"""The blocks of a snapshot in file order, where each lies, and which to copy for long runs.

In a run, blocks of a file lie side by side, raw and page-congruent. A block has one place, also
where several files or positions have it: its *own* position is the first one in the snapshot. At
every other position it breaks the run, and so does a block that another pinned snapshot needs where
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from mstore.blocks.codecs import Codec, Elements, elements_of
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE
from mstore.blocks.schema import PINNED
from mstore.store.ahead import in_groups
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import File
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import BlockId, SnapshotId

GROUP_BYTES: Final = 4 << 20
_OF_RAW: Final = frozenset({Codec.RAW, Codec.CONSTANT})
_UNREADABLE: Final = (NotFound, Corrupt)


class Position(NamedTuple):
    """A block at one position: block `number` of tensor `tensor`, at `offset` of a file."""

    block: BlockId
    offset: int
    length: int
    tensor: str | None
    number: int
    elements: Elements


class Neighbours(NamedTuple):
    """Neighbouring blocks of one file, to be read together."""

    file: str
    positions: list[Position]


def neighbours(file: str, positions: Iterable[Position]) -> Iterator[Neighbours]:
    """Return the blocks of a file in groups of up to GROUP_BYTES, or of a longer one."""
    return (
        Neighbours(file, group)
        for group in in_groups(positions, lambda one: one.length, GROUP_BYTES)
    )


def positions_in(catalog: Catalog, file: File) -> Iterator[Position]:
    """Yield the blocks of a file.  Raises BadRequest for a virtual tensor, NotFound, Corrupt."""
    start = 0
    records = catalog.tensors([part.tensor_id() for part in file.parts])
    for part, record in zip(file.parts, records, strict=True):
        yield from _of_tensor(catalog, part.name, record, start)
        start += part.nbytes


def _of_tensor(
    catalog: Catalog, name: str | None, record: Tensor, start: int
) -> Iterator[Position]:
    elements = elements_of(record.dtype)
    for number, block in enumerate(record.block_ids()):
        length = record.block_length(number, catalog.block_size)
        offset = start + number * catalog.block_size
        yield Position(block, offset, length, name, number, elements)


def coded_blocks(catalog: Catalog, files: Iterable[File]) -> set[BlockId]:
    """Return the blocks of some files that the policy `raw` would not have stored so.

    Raises NotFound, Corrupt.
    """
    found: set[BlockId] = set()
    for file in files:
        blocks = [position.block for position in positions_in(catalog, file)]
        places = zip(blocks, catalog.locate(blocks), strict=True)
        found.update(block for block, place in places if place.codec not in _OF_RAW)
    return found


def blocks_of_other_pins(catalog: Catalog, id: SnapshotId) -> set[BlockId]:
    """Return the blocks of all pinned snapshots but this one, as far as their records can be read.

    Damage in another one must not stop work on this one, and its whole blocks stay protected.
    """
    found: set[BlockId] = set()
    for other in catalog.index.marked(PINNED) - {id}:
        # A version that knows nothing of pins leaves their marks when it collects a snapshot.
        # And the contents of a pruned one may be gone.
        with suppress(*_UNREADABLE):
            manifest = catalog.manifest_of(other)
            for file in manifest.files:
                found.update(_readable(catalog, file))
    return found


def _readable(catalog: Catalog, file: File) -> Iterator[BlockId]:
    """Yield the blocks of a file, without those of tensors whose records cannot be read."""
    try:
        records = catalog.tensors([part.tensor_id() for part in file.parts])
    except _UNREADABLE:
        records = []
        for part in file.parts:
            with suppress(*_UNREADABLE):
                records.append(catalog.tensor(part.tensor_id()))
    for record in records:
        yield from record.block_ids()


LONG_RUN: Final = 16 << 20
"""A run of so many bytes stays where it is; a shorter one joins its neighbours if they move.

Reading it takes ten times as long as finding it, on any disk; and a file of 5 GB then has at most
300 runs.
"""


class FileRuns(msgspec.Struct, frozen=True):
    """How a file lies: the number of its raw runs, and bytes that no page can be mapped from.

    unmapped_bytes: of blocks that are not raw, or not page-congruent with the file.
    """

    runs: int
    unmapped_bytes: int


def is_mappable(position: Position, place: Location) -> bool:
    """Return whether whole pages of the file are whole pages of the pack here."""
    return place.codec == Codec.RAW and (place.offset - position.offset) % PAGE == 0


def runs_in(positions: Sequence[Position], places: Sequence[Location]) -> FileRuns:
    """Return how a file lies; one position and place per block, in file order."""
    runs = unmapped = 0
    before: Location | None = None
    for position, place in zip(positions, places, strict=True):
        if not is_mappable(position, place):
            unmapped += position.length
            before = None
            continue
        runs += before is None or not place.follows(before)
        before = place
    return FileRuns(runs, unmapped)


def to_copy(
    positions: Sequence[Position],
    places: Sequence[Location],
    taken: AbstractSet[BlockId],
    *,
    long_run: int = LONG_RUN,
) -> list[Position]:
    """Return the blocks of a file to write anew, in file order.

    taken: blocks that keep their place: of earlier files, and raw ones of other pinned snapshots.
    Runs of `long_run` bytes stay, and so does a run whose neighbours stay: writing it anew would
    lengthen nothing.  So nothing is left to copy after everything was copied once.
    """
    found: list[Position] = []
    group: list[Position] = []
    is_lone = True
    for run, is_good in _stretches(positions, places, taken):
        if run and not (is_good and sum(position.length for position in run) >= long_run):
            is_lone = is_good and not group
            group += run
            continue
        found += [] if is_lone else group
        group = []
        is_lone = True
    return found if is_lone else found + group


def _stretches(
    positions: Sequence[Position], places: Sequence[Location], taken: AbstractSet[BlockId]
) -> Iterator[tuple[list[Position], bool]]:
    """Yield stretches of blocks that are one run, or no run at all, and which of the two.

    Yields an empty stretch for blocks that keep their place whatever is around them.
    """
    seen: set[BlockId] = set()
    run: list[Position] = []
    before: Location | None = None
    for position, place in zip(positions, places, strict=True):
        if position.block in taken or position.block in seen:
            if run:
                yield run, before is not None
            yield [], False
            run, before = [], None
            continue
        seen.add(position.block)
        is_good = is_mappable(position, place)
        goes_on = _goes_on(before, place) if is_good else before is None
        if run and not goes_on:
            yield run, before is not None
            run = []
        run.append(position)
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
