"""Drop rows of the memo table and of statistics whose subject was collected.

This only saves space. Do not run it while others are at work: their new rows may describe tensors
and blocks that they have not published yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstore.blocks.packs import Kind
from mstore.ids import PlanId
from mstore.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo


def memo(catalog: Catalog, table: Memo) -> None:
    """Drop outputs whose blocks are gone, and requests whose plan is gone."""
    index = catalog.index
    with index.env.read() as transaction:

        def stored(blocks: Sequence[bytes]) -> list[bool]:
            return index.has_blocks(transaction, blocks)

        def planned(plan: PlanId) -> bool:
            return index.has_record(transaction, Kind.PLAN, plan)

        table.tidy(stored, planned)


def statistics(catalog: Catalog, store: StatsStore) -> None:
    """Drop the statistics of tensors that are gone."""
    index = catalog.index
    with index.env.read() as transaction:

        def stored(tensors: Sequence[bytes]) -> list[bool]:
            rows = (index.row(transaction, (Kind.TENSOR, tensor)) for tensor in tensors)
            return [row is not None for row in rows]

        store.tidy(stored)
