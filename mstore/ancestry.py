"""Ancestry: snapshots and all that they came from, children before parents, newest first.

The order is that of Kahn's algorithm with a heap: of all snapshots whose reached children were all
listed, the newest comes next, and ids decide among equal times.  To know all reached children, the
whole lineage would have to be read.  Where only the first few are wanted, the index's rows tell the
times of the starts and the children of each snapshot, and records are read only of what is listed
(`docs/design/036-bulk-reads.md`).  Both ways give the same list.  Records are the truth about
times: a row with a later time than its record changes nothing; one with an earlier time, which only
a faulty index has, is noticed when its snapshot is reached, and not beyond the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress

from mstore.errors import Corrupt
from mstore.ids import SnapshotId
from mstore.store.catalog import Catalog

_WALKED = 8
_WALKED_ANYWAY = 64
"""A lineage is walked whole if it has at most `_WALKED * limit + _WALKED_ANYWAY` snapshots."""


def ancestry(
    catalog: Catalog, starts: Iterable[SnapshotId], limit: int | None = None
) -> list[SnapshotId]:
    """Return the snapshots reached from `starts`: children before parents, newest first.

    A parent never comes before its child, even if clocks disagree. Missing snapshots are included,
    and their own parents are unknown.

    limit: the most to return; then it takes time linear in the starts and in what is returned, but
    for snapshots that are older than their parents, or not reached themselves.
    """
    roots = sorted(set(starts))
    if limit is not None:
        counts = _children_count(catalog, roots, _WALKED * limit + _WALKED_ANYWAY)
        if counts is not None:
            return _ordered(catalog, roots, counts, limit)
        # Records say what a damaged or faulty row of the index does not.
        with suppress(Corrupt):
            return _newest(catalog, roots, limit)
    counts = _children_count(catalog, roots, None)
    assert counts is not None
    return _ordered(catalog, roots, counts, limit)


def parents_of(catalog: Catalog, id: SnapshotId) -> set[SnapshotId]:
    """Return the parents of a snapshot; none if it is missing."""
    record = catalog.snapshot_if_there(id)
    return set() if record is None else {parent.snapshot_id() for parent in record.parents}


def _ordered(
    catalog: Catalog, roots: list[SnapshotId], waiting: dict[SnapshotId, int], limit: int | None
) -> list[SnapshotId]:
    ready = [(-_time_ns(catalog, id), id) for id in roots if waiting[id] == 0]
    heapq.heapify(ready)
    found: list[SnapshotId] = []
    while ready and (limit is None or len(found) < limit):
        _, id = heapq.heappop(ready)
        found.append(id)
        for parent in parents_of(catalog, id):
            waiting[parent] -= 1
            if waiting[parent] == 0:
                heapq.heappush(ready, (-_time_ns(catalog, parent), parent))
    return found


def _time_ns(catalog: Catalog, id: SnapshotId) -> int:
    record = catalog.snapshot_if_there(id)
    return 0 if record is None else record.time_ns


def _children_count(
    catalog: Catalog, roots: list[SnapshotId], at_most: int | None
) -> dict[SnapshotId, int] | None:
    """Return how many reached children each reached snapshot has; None if more are reached."""
    counts: dict[SnapshotId, int] = dict.fromkeys(roots, 0)
    stack = list(roots)
    seen = set(roots)
    while at_most is None or len(counts) <= at_most:
        if not stack:
            return counts
        for parent in parents_of(catalog, stack.pop()):
            counts[parent] = counts.get(parent, 0) + 1
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return None


def _newest(catalog: Catalog, roots: list[SnapshotId], limit: int) -> list[SnapshotId]:
    """Return the first snapshots of the same list.  Raises Corrupt at a damaged or faulty row.

    Candidates are the roots and the parents of what was listed.  The newest is listed unless it has
    a reached child that is not; it is a candidate again once such a child is listed.
    """
    tips = set(roots)
    times = catalog.times(roots)
    # Of a snapshot without a row only its record has a time.
    waiting = [(-(times[id] if id in times else _time_ns(catalog, id)), id) for id in roots]
    heapq.heapify(waiting)
    queued = set(roots)
    listed: dict[SnapshotId, None] = {}
    led_to: dict[SnapshotId, bool] = {}
    while waiting and len(listed) < limit:
        before, id = heapq.heappop(waiting)
        now = -_time_ns(catalog, id)
        if now != before:
            # Its row has another time than its record, which may be lost.
            if now < before:
                raise Corrupt("the index has an earlier time for this snapshot", where=str(id))
            heapq.heappush(waiting, (now, id))
            continue
        queued.remove(id)
        if any(
            child not in listed
            and catalog.snapshot_if_there(child) is not None
            and is_led_to(catalog, child, tips, led_to)
            for child in catalog.children(id)
        ):
            continue
        listed[id] = None
        for parent in parents_of(catalog, id) - queued - listed.keys():
            queued.add(parent)
            heapq.heappush(waiting, (-_time_ns(catalog, parent), parent))
    return list(listed)


def is_led_to(
    catalog: Catalog, id: SnapshotId, tips: AbstractSet[SnapshotId], known: dict[SnapshotId, bool]
) -> bool:
    """Return whether a tip is this snapshot or a descendant, searching from parent to child.

    known: results of earlier calls with the same tips, to be reused and extended.
    """
    passed: list[SnapshotId] = []
    waiting = [id]
    while waiting:
        one = waiting.pop()
        if one in known and not known[one]:
            continue
        # The parents of a missing snapshot are unknown.
        if one != id and catalog.snapshot_if_there(one) is None:
            continue
        if one in tips or one in known:
            for other in passed:
                del known[other]
            known[id] = True
            return True
        known[one] = False
        passed.append(one)
        waiting += sorted(catalog.children(one), key=tips.__contains__)
    return False
