"""What a face of the server decides about a request: who may ask, what is asked, how errors read.

`App` does all that the faces share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from mstore_serve.documents import ErrorReport
from mstore_serve.shown import Elsewhere, Later, Shown

Pairs = Sequence[tuple[str, str]]
Find = Callable[[], Shown | Elsewhere | Later]


class Refusal(Exception):
    """A request that gets no more than a status and a document."""

    def __init__(self, status: int, report: ErrorReport, headers: Pairs = ()) -> None:
        super().__init__(report.what)
        self.status = status
        self.report = report
        self.headers = headers


class Face(Protocol):
    """A kind of clients, and how the server speaks to them."""

    def admit(self, scope: Scope, headers: Headers) -> None:
        """Raise Refusal for who may not ask."""

    def asked(self, scope: Scope, headers: Headers) -> Find:
        """Return what finds the answer, on a thread that may read the index.  Raises Refusal."""

    def refused(self, scope: Scope, refusal: Refusal) -> tuple[Pairs, bytes]:
        """Return the headers and the document of a refusal; the headers have its type."""

    def query(self, scope: Scope) -> str:
        """Return what the log may show of the query, without credentials."""


def refusal(
    status: int, code: str, what: str, headers: Pairs = (), *, where: str | None = None
) -> Refusal:
    """Return a refusal; `code` is the kind of the error."""
    return Refusal(status, ErrorReport(code, what, where), headers)
