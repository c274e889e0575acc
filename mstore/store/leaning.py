"""What of a store is only at lazy remotes: blocks of stored tensors that have no row here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

from mstore.blocks.location import base_of
from mstore.blocks.packs import NO_BASE, Kind
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Conflict, Corrupt, NotFound
from mstore.terms.ids import BlockId, TensorId
from mstore.terms.phrases import Text, call
from mstore.terms.report import Report
from mstore.terms.sizes import format_size

_TOGETHER = 4096


class Leaning(Report, frozen=True):
    """What lies at a remote and not here."""

    remote: str
    """the remote's name"""
    blocks: int
    """blocks, each once"""
    bytes: int
    """their size there, at rest"""


def not_here(catalog: Catalog, blocks: Sequence[BlockId]) -> list[BlockId]:
    """Return those of these blocks that are not stored, and the bases of the others that are not.

    A base that is a difference itself here counts, too: another place has it alone.
    """
    index = catalog.index
    with index.env.read() as transaction:
        rows = index.block_rows(transaction, blocks)
        lacking = [block for block, row in zip(blocks, rows, strict=True) if row is None]
        named = (base_of(row) for row in rows if row is not None)
        bases = [BlockId(base) for base in dict.fromkeys(named) if base is not None]
        under = index.block_rows(transaction, bases)
    lacking += [
        base
        for base, row in zip(bases, under, strict=True)
        if row is None or base_of(row) is not None
    ]
    return lacking


def lacking(catalog: Catalog, tensors: Iterable[TensorId]) -> Iterator[BlockId]:
    """Yield what stored tensors need and is not here, each block once; bases of differences, too.

    A virtual tensor has none of its own.  Raises NotFound, Corrupt.
    """
    seen: set[bytes] = set()
    waiting = iter(dict.fromkeys(tensors))
    while some := list(islice(waiting, _TOGETHER)):
        catalog.preload_tensors(some)
        contents = [catalog.content(id) for id in some]
        blocks = [b for one in contents if isinstance(one, Tensor) for b in one.block_ids()]
        for block in not_here(catalog, blocks):
            if block not in seen:
                seen.add(block)
                yield block


def leaning_of(catalog: Catalog, manifest: Manifest) -> tuple[Leaning, ...]:
    """Return which remotes a manifest's tensors lean on.  Raises as `lacking`."""
    tensors = (part.tensor_id() for file in manifest.files for part in file.parts)
    return counted(catalog, lacking(catalog, tensors))


def counted(catalog: Catalog, blocks: Iterator[BlockId]) -> tuple[Leaning, ...]:
    """Return how much of these blocks, and of what they are differences to, remotes alone have."""
    elsewhere = catalog.index.elsewhere
    if elsewhere is None:
        return ()
    found: dict[str, tuple[int, int]] = {}
    seen: set[bytes] = set()
    while some := list(islice(blocks, _TOGETHER)):
        new = [block for block in dict.fromkeys(some) if block not in seen]
        seen.update(new)
        places = elsewhere.locate(new)
        # What a difference there is made to has to come, too, unless it is here.
        named = dict.fromkeys(BlockId(at.base) for at in places if at and at.base != NO_BASE)
        bases = [base for base in not_here(catalog, list(named)) if base not in seen]
        seen.update(bases)
        for at in (*places, *elsewhere.locate(bases, alone=True)):
            # What is nowhere is damage, and for fsck to tell.
            name = None if at is None else elsewhere.name_of(at.pack)
            if at is not None and name is not None:
                count, size = found.get(name, (0, 0))
                found[name] = count + 1, size + at.stored_length
    return tuple(Leaning(name, *told) for name, told in sorted(found.items()))


def all_leaning(catalog: Catalog) -> tuple[Leaning, ...]:
    """Return which remotes the store leans on: for stored tensors, and for bases of differences."""
    return counted(catalog, chain(lacking(catalog, _readable(catalog)), _bases(catalog)))


def _bases(catalog: Catalog) -> Iterator[BlockId]:
    """Yield the bases of stored differences that are not here, whatever needs these."""
    for batch in catalog.index.block_batches():
        stored = [BlockId(id) for id, row in batch if base_of(row) is not None]
        yield from not_here(catalog, stored)


def _readable(catalog: Catalog) -> Iterator[TensorId]:
    """Yield the stored tensors whose records can be read."""
    index = catalog.index
    with index.env.read() as transaction:
        ids = [TensorId(id) for id in index.record_ids(transaction, Kind.TENSOR)]
    for id in ids:
        with suppress(NotFound, Corrupt):
            catalog.content(id)
            yield id


def require_here(
    found: Sequence[Leaning], what: str, name: str | None = None, hint: Text | None = None
) -> None:
    """Raise Conflict if something leans on a remote.

    what: what cannot be done with it. hint: what to do, if that is more than to prefetch it.
    """
    if found:
        told = ", ".join(
            f"{one.blocks} blocks ({format_size(one.bytes)}) are only at {one.remote}"
            for one in found
        )
        raise Conflict(
            f"cannot {what}: {told}",
            where=name,
            hint=hint or (call("prefetch", every=True) if name is None else call("prefetch", name)),
        )
