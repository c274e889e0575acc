"""What of a store is only at lazy remotes: blocks of stored tensors that have no row here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from mstore.blocks.packs import Kind
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Conflict, Corrupt, NotFound
from mstore.terms.ids import BlockId, TensorId
from mstore.terms.phrases import call
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


def lacking(catalog: Catalog, tensors: Iterable[TensorId]) -> Iterator[BlockId]:
    """Yield the blocks of stored tensors that are not here, each once.

    A virtual tensor has none of its own.  Raises NotFound, Corrupt.
    """
    seen: set[bytes] = set()
    waiting = iter(dict.fromkeys(tensors))
    while some := list(islice(waiting, _TOGETHER)):
        catalog.preload_tensors(some)
        contents = [catalog.content(id) for id in some]
        blocks = [b for one in contents if isinstance(one, Tensor) for b in one.block_ids()]
        here = catalog.has_blocks(blocks)
        for block, is_here in zip(blocks, here, strict=True):
            if not is_here and block not in seen:
                seen.add(block)
                yield block


def leaning_of(catalog: Catalog, manifest: Manifest) -> tuple[Leaning, ...]:
    """Return which remotes a manifest's tensors lean on.  Raises as `lacking`."""
    if catalog.index.elsewhere is None:
        return ()
    return leaning(catalog, (part.tensor_id() for file in manifest.files for part in file.parts))


def leaning(catalog: Catalog, tensors: Iterable[TensorId]) -> tuple[Leaning, ...]:
    """Return which remotes these tensors lean on.  Raises as `lacking`."""
    elsewhere = catalog.index.elsewhere
    if elsewhere is None:
        return ()
    found: dict[str, tuple[int, int]] = {}
    blocks = lacking(catalog, tensors)
    while some := list(islice(blocks, _TOGETHER)):
        for at in elsewhere.locate(some):
            # What is nowhere is damage, and for fsck to tell.
            name = None if at is None else elsewhere.name_of(at.pack)
            if at is not None and name is not None:
                count, size = found.get(name, (0, 0))
                found[name] = count + 1, size + at.stored_length
    return tuple(Leaning(name, *told) for name, told in sorted(found.items()))


def all_leaning(catalog: Catalog) -> tuple[Leaning, ...]:
    """Return which remotes the stored tensors lean on, as far as their records can be read."""
    if catalog.index.elsewhere is None:
        return ()
    with catalog.index.env.read() as transaction:
        ids = [TensorId(id) for id in catalog.index.record_ids(transaction, Kind.TENSOR)]
    return leaning(catalog, (id for id in ids if _is_readable(catalog, id)))


def _is_readable(catalog: Catalog, id: TensorId) -> bool:
    try:
        catalog.content(id)
    except (NotFound, Corrupt):
        return False
    return True


def require_here(found: Sequence[Leaning], what: str, name: str | None = None) -> None:
    """Raise Conflict if something leans on a remote.  what: what cannot be done with it."""
    if found:
        told = ", ".join(
            f"{one.blocks} blocks ({format_size(one.bytes)}) are only at {one.remote}"
            for one in found
        )
        raise Conflict(
            f"cannot {what}: {told}",
            where=name,
            hint=call("prefetch", every=True) if name is None else call("prefetch", name),
        )
