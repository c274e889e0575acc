"""Pages: what an address shows a person with a browser.

Asks the store what a page needs, and has `mstore_pages` draw it.  Addresses of bytes, and of
objects of a remote, have no pages; reports are in `reports`.  Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from mstore import Store
from mstore.api.reports import RefReport, SnapshotReport
from mstore.store.refs import CANDIDATE, DIRECTORIES
from mstore.terms.errors import MstoreError
from mstore.terms.ids import SnapshotId
from mstore_pages import browse, site, snapshot
from mstore_pages.browse import DirectoryEntry, MoveRow, RefRow
from mstore_pages.card import MAX_CHARS
from mstore_pages.document import served_policy
from mstore_pages.gather import card_of, lineage_of
from mstore_pages.site import Links, SnapshotPath, below
from mstore_serve import addresses
from mstore_serve.addresses import Address, Query, SnapshotName
from mstore_serve.face import Refusal
from mstore_serve.serving import PageReader
from mstore_serve.shown import (
    SHORT,
    VARIES,
    Elsewhere,
    Later,
    Showing,
    Shown,
    made,
    merge_of,
)

HTML: Final = "text/html; charset=utf-8"
_KEPT: Final = 4096
"""Snapshots whose size, author and so on are remembered for lists."""
_CHOICES: Final = 500
"""Names that the fields of a comparison offer."""
_BYTES_A_CHAR: Final = 4


def page_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers of every page."""
    return (
        *VARIES,
        ("Content-Security-Policy", served_policy()),
        ("Referrer-Policy", "no-referrer"),
    )


def as_page(html: str) -> Shown:
    """Return a page as it is sent."""
    return made(html.encode(), HTML, page_headers())


class StorePages:
    """The pages of a store."""

    def __init__(self, store: Store, showing: Showing, reader: PageReader) -> None:
        self._store = store
        self._reader = reader
        self._showing = showing
        self._lock = threading.Lock()
        self._known: OrderedDict[SnapshotId, SnapshotReport] = OrderedDict()

    def find(self, address: Address, raw: bytes, query: Query) -> Shown | Elsewhere | Later | None:
        """Return the page of an address; None if it has none here.  Takes milliseconds.

        raw: the address as it came.

        Raises NotFound, Corrupt, StorageFailed and others.
        """
        self._showing.follow()
        links = Links(addresses.up(raw))
        match address:
            case addresses.ThisServer() | addresses.Refs(None):
                return _later(self._refs, links, query)
            case addresses.Refs(str(name)):
                return self._inside(SnapshotName(name, is_ref=True), raw, self._snapshot, links)
            case addresses.Snapshots():
                return _later(self._snapshots, links, query)
            case addresses.Reflog():
                return _later(self._reflog, links, query)
            case addresses.Comparison() if not (query.a and query.b):
                return _later(self._form, links, query)
            case addresses.OneSnapshot(place):
                return self._inside(place, raw, self._snapshot, links)
            case addresses.Tensors(place, ""):
                return self._inside(place, raw, self._tensors, links, query)
            case addresses.PlanOf(place):
                return self._inside(place, raw, self._plan, links, query)
            case addresses.Files(place, str(path)) if not path or path.endswith("/"):
                return self._directory(place, path, raw, links)
        return None

    def refused(self, refusal: Refusal, raw: bytes, query: Query) -> str:
        """Return the page of a request that failed."""
        links, report = Links(addresses.up(raw)), refusal.report
        if isinstance(addresses.parse(raw), addresses.Comparison):
            why = report.what if report.where is None else f"{report.what}: {report.where}"
            return browse.compare_page(links, query.a, query.b, (), why)
        return browse.error_page(links, refusal.status, report.what, report.where, query.q)

    # -- lists ---------------------------------------------------------------------------------

    def _refs(self, links: Links, query: Query) -> str:
        every = [*self._store.refs(), *self._candidates()]
        wanted = site.words(query.q)
        found = [one for one in every if site.matches(browse.searched(one), wanted)]
        part, at = site.paged(found, len(every), query.page)
        rows = [RefRow(one, self._of(one.snapshot)) for one in found[part]]
        return browse.refs_page(links, rows, at, query.q)

    def _candidates(self) -> list[RefReport]:
        begin = f"{DIRECTORIES[CANDIDATE]}/"
        if not any(name.startswith(begin) for name in self._showing.refs()):
            return []
        return self._store.refs(f"{begin}*")

    def _of(self, id: SnapshotId) -> SnapshotReport | None:
        """Return what never changes of a snapshot; None if it is lost."""
        with self._lock:
            known = self._known.get(id)
            if known is not None:
                self._known.move_to_end(id)
        if known is None:
            with suppress(MstoreError):
                known = self._store.show(id)
            if known is None:
                return None
            with self._lock:
                self._known[id] = known
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return known

    def _snapshots(self, links: Links, query: Query) -> str:
        start = (query.page - 1) * site.PER_PAGE
        found = self._store.log(limit=start + site.PER_PAGE + 1)[start:]
        has_more = len(found) > site.PER_PAGE
        shown = found[: site.PER_PAGE]
        return browse.snapshots_page(links, shown, query.page, has_more=has_more)

    def _reflog(self, links: Links, query: Query) -> str:
        moves = self._store.reflog(query.ref or None)
        part, at = site.paged(moves, len(moves), query.page)
        rows = [MoveRow(one, self._author(one.new)) for one in moves[part]]
        return browse.reflog_page(links, rows, at, query.ref)

    def _author(self, id: SnapshotId | None) -> str:
        author = ""
        if id is not None:
            # A snapshot that gc removed has taken its author along.
            with suppress(MstoreError):
                author = self._store[id].author
        return author

    def _form(self, links: Links, query: Query) -> str:
        return browse.compare_page(links, query.a, query.b, self._names())

    def _names(self) -> tuple[str, ...]:
        return tuple(sorted(self._showing.refs())[:_CHOICES])

    # -- one snapshot --------------------------------------------------------------------------

    def _inside(
        self, place: SnapshotName, raw: bytes, draw: Callable[..., str], *given: object
    ) -> Elsewhere | Later:
        """Return a page of a snapshot, or its address if only the beginning of its id was given."""
        id = self._showing.id_of(place)
        if not place.is_ref and place.name != id.hex():
            return Elsewhere(addresses.elsewhere(raw, id.hex()))
        return _later(draw, id, placed(place, id), *given)

    def _snapshot(self, id: SnapshotId, place: SnapshotPath, links: Links) -> str:
        signers = self._reader.signers
        shown = self._store.show(id, signers=signers)
        lineage, complete = lineage_of(self._store, id, signers)
        card = None
        # What cannot be read is missing on the page: the other parts of it are not.
        with suppress(MstoreError):
            card = card_of(self._store, id, MAX_CHARS * _BYTES_A_CHAR)
        told = snapshot.ShownSnapshot(
            snapshot=shown,
            lineage=lineage,
            lineage_complete=complete,
            files=tuple(self._store.files(id)),
            card=card,
            names=self._names(),
        )
        return snapshot.snapshot_page(links, place, told)

    def _tensors(self, id: SnapshotId, place: SnapshotPath, links: Links, query: Query) -> str:
        every = self._store.tensors(id)
        found = _found(every, query)
        part, at = site.paged(found, len(every), query.page)
        return snapshot.tensors_page(links, place, found[part], at, query.q)

    def _plan(self, id: SnapshotId, place: SnapshotPath, links: Links, query: Query) -> str:
        merge = merge_of(self._store, id)
        found = _found(merge.tensors, query)
        part, at = site.paged(found, len(merge.tensors), query.page)
        return snapshot.plan_page(links, place, merge, found[part], at, query.q)

    def _directory(
        self, place: SnapshotName, path: str, raw: bytes, links: Links
    ) -> Shown | Elsewhere | Later | None:
        found = self._showing.snapshot(place)
        id = found.view.id
        if not place.is_ref and place.name != id.hex():
            return Elsewhere(addresses.elsewhere(raw, id.hex()))
        if path in found.files:
            return None

        def draw() -> str:
            listed = found.listed(path, raw)
            assert not isinstance(listed, Elsewhere)
            entries = [DirectoryEntry(one.name, one.size, _link(one.name)) for one in listed]
            return browse.directory_page(links, placed(place, id), path, entries)

        return _later(draw) if len(found.files) > SHORT else as_page(draw())


def placed(place: SnapshotName, id: SnapshotId) -> SnapshotPath:
    """Return where a snapshot is shown, and what it is called there."""
    if place.is_ref:
        return SnapshotPath(below("refs", *place.name.split("/"), "-"), place.name)
    return SnapshotPath(f"snapshots/{id}", id.short)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def _found(every: Iterable[T], query: Query) -> list[T]:
    """Return the tensors that a search finds, as people count layers."""
    wanted = site.words(query.q)
    found = (one for one in every if site.matches(one.name.lower(), wanted))
    return sorted(found, key=lambda one: site.in_order(one.name))


def _link(name: str) -> str:
    """Return the address of an entry of a directory, as seen from there."""
    return below(name.removesuffix("/")) + ("/" if name.endswith("/") else "")


def _later(draw: Callable[..., str], *given: object) -> Later:
    return Later(lambda: as_page(draw(*given)))
