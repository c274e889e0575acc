"""What is reported of the tensors of a merge whose element type cannot hold all results."""

from __future__ import annotations

from mstore.frozen import frozen
from mstore.ids import PlanId
from mstore.store import plan_rows
from mstore.store.catalog import Catalog
from mstore.store.plan_rows import Overflow


@frozen
class TensorOverflow:
    """A tensor of a merge whose element type cannot hold all results."""

    tensor: str
    """its name"""
    elements: int | None
    """how many became infinite and are finite in the base; None: some may"""
    elements_total: int
    """number of elements"""


def overflow_of(catalog: Catalog, id: PlanId) -> tuple[TensorOverflow, ...]:
    """Return the known overflow of a plan's output, if its row exists.  Raises Corrupt."""
    with catalog.index.env.read() as transaction:
        told = plan_rows.get(catalog.index, transaction, id)
    return () if told is None else reported(told.overflow)


def reported(overflow: tuple[Overflow, ...] | None) -> tuple[TensorOverflow, ...]:
    """Convert overflow to its report form."""
    return tuple(TensorOverflow(one.tensor, one.elements, one.of) for one in overflow or ())
