"""The HTTP face: addresses, pages, JSON documents, a token."""

from __future__ import annotations

import hmac
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Scope

from mstore_serve import addresses
from mstore_serve.documents import ErrorDocument, encoded
from mstore_serve.face import Find, Pairs, Refusal, refusal
from mstore_serve.shown import JSON, Showing


class HttpFace:
    """Refs, snapshots, files and tensors at addresses of their own.

    token: what each request must bring; empty: nothing.
    """

    def __init__(self, showing: Showing, token: str) -> None:
        self._showing = showing
        self._token = token

    def admit(self, scope: Scope, headers: Headers) -> None:
        if self._token and not _brings(self._token, headers):
            asked = (("WWW-Authenticate", "Bearer"),)
            raise refusal(401, "unauthorized", "this server wants its token", asked)

    def asked(self, scope: Scope, headers: Headers) -> Find:
        address = addresses.parse(scope["raw_path"])
        if address is None:
            raise refusal(404, "not-found", "no such address")
        as_page = _accepts_page(headers.get("accept", ""))
        return partial(self._showing.find, address, scope["raw_path"], as_page=as_page)

    def refused(self, scope: Scope, refusal: Refusal) -> tuple[Pairs, bytes]:
        return (("Content-Type", JSON),), encoded(ErrorDocument(refusal.report))

    def query(self, scope: Scope) -> str:
        found: bytes = scope["query_string"]
        return found.decode("latin-1")


def _brings(token: str, headers: Headers) -> bool:
    """Return whether a request brings this token; takes as long for one that is nearly right."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("latin-1"), token.encode("latin-1")
    )


def _accepts_page(accept: str) -> bool:
    """Return whether to show a directory as a page: unless JSON is asked for by name."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return JSON not in kinds or "text/html" in kinds
