"""Rows that name the inputs of plans: the table `plans`.

    plans    PlanId -> [[base snapshot, name], [[expert snapshot, name], ...], change?, risks?]

The only module that knows these bytes.  The row of a plan may be missing (a rebuilt index, an
imported plan).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mstore.blocks import row_batches
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import Corrupt
from mstore.ids import ID_BYTES, PlanId, SnapshotId
from mstore.objects.canonical import plain_id
from mstore.phrases import call

_PLANS = "plans"


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot and the name it was given."""

    snapshot: bytes
    name: str

    def snapshot_id(self) -> SnapshotId:
        """The snapshot."""
        return SnapshotId(self.snapshot)


class Risk(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a plan's output that may get elements that are infinite or NaN.

    of: its number of elements. experts: the numbers, from 0, of experts whose differences from the
    base are not finite; none: the output's type may not hold all results.
    """

    tensor: str
    of: int
    experts: tuple[int, ...]


class Sources(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of a plan, experts in plan order.

    change: the planner's estimate of what the full merge changes, ||full - base|| / ||base||; None
    if unknown, and in rows of earlier versions. risks: worst first.
    """

    base: Source
    experts: tuple[Source, ...]
    change: float | None = None
    risks: tuple[Risk, ...] = ()


_encode = msgspec.msgpack.Encoder(enc_hook=plain_id).encode
_sources = msgspec.msgpack.Decoder(Sources)


def decode(id: PlanId, value: bytes) -> Sources:
    """Parse the value of a row.  Raises Corrupt."""
    try:
        sources = _sources.decode(value)
        for source in (sources.base, *sources.experts):
            source.snapshot_id()
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(
            "the index's row of this plan's inputs cannot be read",
            where=f"plan {id.short}",
            hint=call("reindex"),
        ) from error
    return sources


def get(index: Index, transaction: IndexTransaction, id: PlanId) -> Sources | None:
    """Return the inputs that the row of a plan names; None if it has none.  Raises Corrupt."""
    value = index.get(transaction, _PLANS, id)
    return None if value is None else decode(id, value)


def put(index: Index, transaction: IndexTransaction, id: PlanId, sources: Sources) -> None:
    """Write the row of a plan."""
    told = (sources.base, sources.experts, sources.change)
    value = _encode((*told, sources.risks) if sources.risks else told)
    index.put(transaction, _PLANS, id, value)


def restore(index: Index, transaction: IndexTransaction, id: PlanId, value: bytes) -> None:
    """Write the row of a plan exactly as another index had it; `decode` has accepted it."""
    index.put(transaction, _PLANS, id, value)


def remove(index: Index, transaction: IndexTransaction, id: PlanId) -> None:
    """Remove the row of a plan."""
    index.delete(transaction, _PLANS, id)


def walk(index: Index, transaction: IndexTransaction) -> Iterator[tuple[PlanId, Sources]]:
    """Yield every plan that has a row, with its inputs.  Raises Corrupt."""
    for key, value in index.walk(transaction, _PLANS):
        id = PlanId(key)
        yield id, decode(id, value)


def has_prefix(index: Index, transaction: IndexTransaction, digits: str) -> bool:
    """Return whether the id of a plan that has a row starts with these hex digits."""
    start = bytes.fromhex(digits.ljust(2 * ID_BYTES, "0"))
    first = next(index.keys(transaction, _PLANS, start), b"")
    return first.hex().startswith(digits)


def unreadable(index: Index) -> Iterator[tuple[str, Corrupt]]:
    """Yield the id, in hex digits, and the error of each row that cannot be read."""
    for batch in row_batches.of_table(index, _PLANS):
        for key, _ in batch:
            try:
                with index.env.read() as transaction:
                    get(index, transaction, PlanId(key))
            except Corrupt as error:
                yield key.hex(), error
