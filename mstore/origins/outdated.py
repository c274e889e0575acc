"""Whether snapshots that came from elsewhere are what their origins have now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

from mstore.checkpoint.origin import Origin
from mstore.origins import places
from mstore.store.catalog import Catalog
from mstore.store.objects.snapshot import PREVIOUS, SnapshotRecord
from mstore.terms.errors import MstoreError
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Text
from mstore.terms.report import Report

UP_TO_DATE: Final = "up to date"
OUTDATED: Final = "outdated"
PINNED: Final = "pinned"
UNKNOWN: Final = "unknown"
_AT_ONCE: Final = 8
_MOST: Final = 10_000
"""Snapshots of a lineage that are looked at."""


class OriginState(Report, frozen=True):
    """An origin of a ref: what it was when it was added, and what it is now."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot that came from there: the ref's, or one that it was made of"""
    address: str
    """what `add` takes to add what is there now; of a pinned one, the same commit"""
    url: str
    """the repository"""
    revision: str
    """branch or tag that was added; empty if that is not known"""
    commit: str
    """the commit that was added"""
    newest: str | None
    """the commit that the revision is now; None if that is not known"""
    state: str
    """up to date, outdated, pinned (a commit was added, or nobody knows of which branch), or
    unknown: the origin could not be asked"""
    reason: Text
    """why it is unknown; else empty"""


def states(catalog: Catalog, named: Iterable[tuple[str, SnapshotId]]) -> list[OriginState]:
    """Return the state of each origin of these refs; nothing for a ref that has none.

    The origins of a snapshot are its own, or else those of the snapshots that it was made of.  An
    origin that cannot be asked is one in the list.  Raises NotFound, Corrupt.
    """
    found = [(name, id, one) for name, start in named for id, one in _origins(catalog, start)]
    with ThreadPoolExecutor(_AT_ONCE, "origins") as pool:
        unique = {(one.url, one.revision): one for _, _, one in found}
        asked = {key: pool.submit(_now, one) for key, one in unique.items()}
        return [
            _state(name, id, one, *asked[one.url, one.revision].result()) for name, id, one in found
        ]


def _origins(catalog: Catalog, start: SnapshotId) -> Iterator[tuple[SnapshotId, Origin]]:
    def follow(record: SnapshotRecord) -> list[SnapshotId]:
        parents = () if record.origin is not None else record.parents
        return [one.snapshot_id() for one in parents if one.role != PREVIOUS]

    for id, record in islice(catalog.nearest_first(start, follow), _MOST):
        if record.origin is not None:
            yield id, record.origin


def _now(origin: Origin) -> tuple[str | None, Text]:
    """Return what an origin's revision is now; or None, and why nobody knows."""
    if _is_pinned(origin):
        return None, ""
    try:
        return places.now(origin), ""
    except MstoreError as error:
        return None, error.texts[0]


def _is_pinned(origin: Origin) -> bool:
    return origin.revision in ("", origin.commit)


def _state(
    name: str, id: SnapshotId, origin: Origin, newest: str | None, reason: Text
) -> OriginState:
    if _is_pinned(origin):
        state = PINNED
    elif newest is None:
        state = UNKNOWN
    else:
        state = UP_TO_DATE if newest == origin.commit else OUTDATED
    own = (str(places.recorded(origin)), origin.url, origin.revision, origin.commit)
    return OriginState(name, id, *own, newest=newest, state=state, reason=reason)
