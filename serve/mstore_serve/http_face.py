"""The HTTP face: addresses, pages, JSON documents, a token.

**Pages or documents.** A request whose `Accept` names text/html, and does not want JSON more, gets
a page where an address has one; every other request gets JSON.  A directory is a page unless JSON
is asked for by name: so programs that follow links see its files.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Scope

from mstore import Store
from mstore_serve import addresses
from mstore_serve.addresses import Address, Query
from mstore_serve.documents import ErrorDocument, encoded
from mstore_serve.face import Find, Pairs, Refusal, refusal
from mstore_serve.pages import HTML, StorePages, page_headers
from mstore_serve.reports import Reports
from mstore_serve.serving import PageReader
from mstore_serve.shown import JSON, VARIES, Elsewhere, Later, Showing, Shown

_PAGE = "text/html"


class HttpFace:
    """Refs, snapshots, files and tensors at addresses of their own.

    token: what each request must bring; empty: nothing.  reader: for whom pages are made.
    """

    def __init__(self, store: Store, showing: Showing, token: str, reader: PageReader) -> None:
        self._showing = showing
        self._pages = StorePages(store, showing, reader)
        self._reports = Reports(store, showing, reader)
        self._token = token

    def close(self) -> None:
        """End the report that is computed now."""
        self._reports.close()

    def admit(self, scope: Scope, headers: Headers) -> None:
        if self._token and not _brings(self._token, headers):
            # A browser asks its user for a password, which is the token.
            asked = 'Basic realm="mstore", charset="UTF-8"' if _wants_page(headers) else "Bearer"
            what = "this server wants its token"
            raise refusal(401, "unauthorized", what, (("WWW-Authenticate", asked),))

    def asked(self, scope: Scope, headers: Headers) -> Find:
        address = addresses.parse(scope["raw_path"])
        if address is None:
            raise refusal(404, "not-found", "no such address")
        query = addresses.parse_query(scope["query_string"])
        is_page = _wants_page(headers)
        if isinstance(address, addresses.Files):
            is_page = is_page or not _qualities(headers).get(JSON)
        return partial(self._find, address, scope["raw_path"], query, is_page=is_page)

    def _find(
        self, address: Address, raw: bytes, query: Query, *, is_page: bool
    ) -> Shown | Elsewhere | Later:
        page = self._pages.find(address, raw, query) if is_page else None
        if page is not None:
            return page
        if isinstance(address, addresses.ReportOf | addresses.Comparison):
            return self._reports.find(address, raw, query, is_page=is_page)
        return self._showing.find(address, raw, query)

    def refused(self, scope: Scope, refusal: Refusal) -> tuple[Pairs, bytes]:
        if not _wants_page(Headers(scope=scope)):
            return (("Content-Type", JSON), *VARIES), encoded(ErrorDocument(refusal.report))
        query = addresses.parse_query(scope["query_string"])
        page = self._pages.refused(refusal, scope["raw_path"], query)
        return (("Content-Type", HTML), *page_headers()), page.encode()

    def query(self, scope: Scope) -> str:
        found: bytes = scope["query_string"]
        return found.decode("latin-1")


def _brings(token: str, headers: Headers) -> bool:
    """Return whether a request brings this token; takes as long for one that is nearly right.

    A browser brings it as the password of any user.
    """
    kind, _, given = headers.get("authorization", "").partition(" ")
    brought = given.strip().encode("latin-1")
    if kind.lower() == "basic":
        try:
            brought = base64.b64decode(brought, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(brought, token.encode("latin-1"))


def _wants_page(headers: Headers) -> bool:
    """Return whether a request wants a page at least as much as JSON, and names it."""
    wanted = _qualities(headers)
    return wanted.get(_PAGE, 0.0) > 0 and wanted[_PAGE] >= wanted.get(JSON, 0.0)


def _qualities(headers: Headers) -> dict[str, float]:
    """Return how much a request wants each type that its `Accept` names, from 0 to 1."""
    found: dict[str, float] = {}
    for part in ",".join(headers.getlist("accept")).split(","):
        kind, *parameters = (one.strip().lower() for one in part.split(";"))
        weight = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        try:
            quality = float(weight)
        except ValueError:
            quality = 1.0
        found[kind] = min(1.0, quality) if math.isfinite(quality) else 1.0
    return found
