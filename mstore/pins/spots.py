"""The blocks of a snapshot in file order, and where each lies in its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from mstore.blocks.codecs import Codec, Elements, elements_of
from mstore.blocks.schema import PINNED
from mstore.errors import Corrupt, NotFound
from mstore.ids import BlockId, SnapshotId
from mstore.objects.manifest import File
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog

GROUP_BYTES: Final = 4 << 20
_OF_RAW: Final = frozenset({Codec.RAW, Codec.CONSTANT})
_UNREADABLE: Final = (NotFound, Corrupt)


class Spot(NamedTuple):
    """A block at one position: block `number` of tensor `tensor`, at `offset` of a file."""

    block: BlockId
    offset: int
    length: int
    tensor: str | None
    number: int
    elements: Elements


class Group(NamedTuple):
    """Neighbouring blocks of one file, to be read together."""

    file: str
    spots: list[Spot]


def groups(file: str, spots: Iterable[Spot]) -> Iterator[Group]:
    """Yield the blocks of a file in groups of up to GROUP_BYTES, or of a longer one."""
    group: list[Spot] = []
    size = 0
    for spot in spots:
        if group and size + spot.length > GROUP_BYTES:
            yield Group(file, group)
            group, size = [], 0
        group.append(spot)
        size += spot.length
    if group:
        yield Group(file, group)


def of_file(catalog: Catalog, file: File) -> Iterator[Spot]:
    """Yield the blocks of a file.  Raises BadRequest for a virtual tensor, NotFound, Corrupt."""
    start = 0
    records = catalog.tensors([part.tensor_id() for part in file.parts])
    for part, record in zip(file.parts, records, strict=True):
        yield from _of_tensor(catalog, part.name, record, start)
        start += part.nbytes


def _of_tensor(catalog: Catalog, name: str | None, record: Tensor, start: int) -> Iterator[Spot]:
    elements = elements_of(record.dtype)
    for number, block in enumerate(record.block_ids()):
        length = record.block_length(number, catalog.block_size)
        offset = start + number * catalog.block_size
        yield Spot(block, offset, length, name, number, elements)


def coded(catalog: Catalog, files: Iterable[File]) -> set[BlockId]:
    """Return the blocks of some files that the policy `raw` would not have stored so.

    Raises NotFound, Corrupt.
    """
    found: set[BlockId] = set()
    for file in files:
        blocks = [spot.block for spot in of_file(catalog, file)]
        places = zip(blocks, catalog.locate(blocks), strict=True)
        found.update(block for block, place in places if place.codec not in _OF_RAW)
    return found


def of_others(catalog: Catalog, id: SnapshotId) -> set[BlockId]:
    """Return the blocks of all pinned snapshots but this one, as far as their records can be read.

    What is damaged there must neither stop work on this one nor bare what is whole there.
    """
    with catalog.index.env.read() as transaction:
        pinned = {id for id, _ in catalog.index.walk(transaction, PINNED)}
    found: set[BlockId] = set()
    for other in pinned - {id}:
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
