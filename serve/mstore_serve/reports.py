"""Reports of snapshots and comparisons: computed when they are asked for, and remembered.

A report may read all weights of several models.  So one is computed at a time, on a thread of its
own, and those that were sent are kept, up to a number of bytes.  A kept report is sent again while
nothing that it tells of has changed: the snapshots of its lineage, their names, notes and
signatures.  Thread-safe.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from blake3 import blake3

from mstore import Store
from mstore.terms.errors import BadRequest, Conflict, Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.report import Progress
from mstore_pages import report, site
from mstore_pages.gather import LINEAGE_SHOWN, comparison_summary, snapshot_summary
from mstore_pages.site import Links
from mstore_serve import addresses
from mstore_serve.addresses import Query, SnapshotName
from mstore_serve.documents import encoded
from mstore_serve.face import refusal
from mstore_serve.pages import as_page, placed
from mstore_serve.serving import PageReader
from mstore_serve.shown import JSON, VARIES, Elsewhere, Later, Showing, Shown, made

_KEPT_BYTES: Final = 32 << 20

Key = tuple[bytes, bool, bool, tuple[str, ...], tuple[SnapshotId, ...]]
"""The address, whether it is a page, whether it reads no weights, names, and the snapshots."""


class ServerEnds(Exception):
    """The server ends, so nobody waits for the report any more."""


class _Kept(msgspec.Struct):
    """A report, and the state of the store that it is of."""

    shown: Shown
    generation: int
    told_of: bytes


class Reports:
    """The reports of a store."""

    def __init__(self, store: Store, showing: Showing, reader: PageReader) -> None:
        self._store = store
        self._reader = reader
        self._showing = showing
        self._threads = max(1, len(os.sched_getaffinity(0)) // 2)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._bytes = 0
        self._ended = threading.Event()

    def close(self) -> None:
        """End the report that is computed now, as soon as it tells how far it is."""
        self._ended.set()

    def find(
        self,
        address: addresses.ReportOf | addresses.Comparison,
        raw: bytes,
        query: Query,
        *,
        is_page: bool,
    ) -> Shown | Elsewhere | Later:
        """Return a report, as a page or as JSON; takes milliseconds if it is known.

        raw: the address as it came.  Raises NotFound, BadName, Refusal.
        """
        self._showing.follow()
        if isinstance(address, addresses.ReportOf):
            place = address.place
            id = self._showing.id_of(place)
            if not place.is_ref and place.name != id.hex():
                return Elsewhere(addresses.elsewhere(raw, id.hex()))
            names: tuple[str, ...] = ()
            ids: tuple[SnapshotId, ...] = (id,)
            compute = partial(self._report, id, place, raw, query, is_page=is_page)
        else:
            if not query.a or not query.b:
                raise refusal(400, "bad-request", "name two snapshots: compare?a=REF&b=REF")
            names = query.a, query.b
            a, b = ids = self._store[query.a].id, self._store[query.b].id
            compute = partial(self._comparison, a, b, raw, query, is_page=is_page)
        key = raw, is_page, query.quick, names, ids
        known = self._known(key, ids, only_now=True)
        return known or Later(partial(self._computed, key, ids, compute), is_report=True)

    # -- computing -----------------------------------------------------------------------------

    def _computed(self, key: Key, ids: Sequence[SnapshotId], compute: Callable[[], Shown]) -> Shown:
        # Another request may have computed it while this one waited.
        known = self._known(key, ids)
        if known is not None:
            return known
        generation, told_of = self._store.generation(), self._told_of(ids)
        try:
            shown = compute()
        except ServerEnds as error:
            raise refusal(503, "busy", "the server ends") from error
        except (BadRequest, Incompatible) as error:
            code = "incompatible" if isinstance(error, Incompatible) else "bad-request"
            raise refusal(409, code, error.what, where=error.where) from error
        self._keep(key, _Kept(shown, generation, told_of))
        return shown

    def _report(
        self, id: SnapshotId, place: SnapshotName, raw: bytes, query: Query, *, is_page: bool
    ) -> Shown:
        where = placed(place, id)
        summary = snapshot_summary(
            self._store,
            id,
            measure=not query.quick,
            signers=self._reader.signers,
            threads=self._threads,
            progress=self._check,
            name=where.name,
        )
        if not is_page:
            return made(encoded(summary, self._reader.typed), JSON, VARIES)
        links = Links(addresses.up(raw))
        top = site.top(links, back={where.name: links.at(where.path)})
        return as_page(report.snapshot_page(summary, self._reader.typed, top))

    def _comparison(
        self, a: SnapshotId, b: SnapshotId, raw: bytes, query: Query, *, is_page: bool
    ) -> Shown:
        summary = comparison_summary(
            self._store,
            query.a,
            query.b,
            measure=not query.quick,
            signers=self._reader.signers,
            threads=self._threads,
            progress=self._check,
        )
        if (summary.a.snapshot, summary.b.snapshot) != (a, b):
            raise Conflict("a ref moved meanwhile", where=f"{query.a}, {query.b}")
        if not is_page:
            return made(encoded(summary, self._reader.typed), JSON, VARIES)
        links = Links(addresses.up(raw))
        back = {query.a: links.snapshot(a), query.b: links.snapshot(b)}
        top = site.top(links, "Compare", back=back)
        return as_page(report.comparison_page(summary, self._reader.typed, top))

    def _check(self, progress: Progress) -> None:
        if self._ended.is_set():
            raise ServerEnds

    # -- remembering ---------------------------------------------------------------------------

    def _known(
        self, key: Key, ids: Sequence[SnapshotId], *, only_now: bool = False
    ) -> Shown | None:
        """Return a kept report that still holds; only_now: if nothing at all has changed."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            return None
        generation = self._store.generation()
        if kept.generation == generation:
            return kept.shown
        if only_now or kept.told_of != self._told_of(ids):
            return None
        kept.generation = generation
        return kept.shown

    def _told_of(self, ids: Sequence[SnapshotId]) -> bytes:
        """Return the hash of what may change about a report of these snapshots."""
        told = [self._store.log(id, LINEAGE_SHOWN + 1, signers=self._reader.signers) for id in ids]
        return blake3(encoded(told)).digest()

    def _keep(self, key: Key, new: _Kept) -> None:
        if new.shown.size > _KEPT_BYTES:
            return
        with self._lock:
            old = self._kept.pop(key, None)
            self._bytes += new.shown.size - (0 if old is None else old.shown.size)
            self._kept[key] = new
            while self._bytes > _KEPT_BYTES:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.shown.size
