"""What is reported of elements of a merge that are not finite, and are finite in its base."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mstore.blocks.schema import PLANS, Risk
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.plan import Coverage
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.objects.tensor import Tensor
from mstore.terms.report import Report


class NotFiniteTensor(Report, frozen=True):
    """A tensor of a merge with elements that are infinite or NaN, and are finite in the base."""

    tensor: str
    """its name"""
    elements: int | None
    """how many; None: some may be"""
    elements_total: int
    """number of elements"""


def may_be(risks: tuple[Risk, ...]) -> tuple[NotFiniteTensor, ...]:
    """Return the tensors of which a plan says that some elements may not be finite."""
    return tuple(NotFiniteTensor(one.tensor, None, one.of) for one in risks)


def counted(
    counts: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> tuple[NotFiniteTensor, ...]:
    """Return the tensors with such elements, worst first.  tensors: those of the merge."""
    found = [
        NotFiniteTensor(name, count, math.prod(tensors[name].shape))
        for name, count in counts.items()
    ]
    return tuple(sorted(found, key=lambda one: (-(one.elements or 0), one.tensor)))


def of_merge(catalog: Catalog, record: SnapshotRecord) -> tuple[NotFiniteTensor, ...] | None:
    """Return the counts of a merged snapshot; None of a virtual one.  Raises Corrupt, NotFound."""
    id = record.coverage_id()
    if id is None:
        return None
    counts = dict(catalog.record(Coverage, id).not_finite)
    if not counts:
        return ()
    tensors = tensors_of(catalog, catalog.manifest(record.manifest_id()))
    return counted(counts, {name: catalog.tensor(tensors[name]) for name in counts})


def of_snapshot(catalog: Catalog, record: SnapshotRecord) -> tuple[NotFiniteTensor, ...]:
    """Return the counts of a snapshot; what its plan says may be if it is a virtual merge."""
    plan = record.plan_id()
    found = of_merge(catalog, record)
    if found is not None or plan is None:
        return found or ()
    with catalog.index.env.read() as transaction:
        told = catalog.index.get(transaction, PLANS, plan)
    return () if told is None else may_be(told.risks)
