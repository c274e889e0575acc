"""A remote that a web server shows: what `mstore serve` has below /remote/. Read-only.

Requests are plain GET and HEAD, so a proxy or a mirror may stand between. A token goes with each of
them to the server of the address, and to none to which that server redirects.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from mstore.remotes.bucket import CLIENT, Bucket, store_of
from mstore.remotes.objects import ReadOnly
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Text

SCHEMES: Final = ("http", "https")
_TOKEN: Final = re.compile(r"[!-~]{16,1024}")


def server_of(url: str) -> str:
    """Return the server of an address: what a token may be sent to."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def checked_token(token: str) -> str:
    """Return a token that a header can carry and nobody guesses. Raises BadRequest, without it."""
    if not _TOKEN.fullmatch(token):
        raise BadRequest(
            "a token has 16 letters, digits and signs or more, and no spaces",
            hint='python -c "import secrets; print(secrets.token_urlsafe())"',
        )
    return token


class Web(ReadOnly, Bucket):
    """Objects below an address.

    token: says who asks; empty: nothing does. denied: what to do if the server refuses.
    """

    def __init__(self, url: str, token: str, denied: Text) -> None:
        options: dict[str, Any] = {}
        if token:
            given = {"authorization": f"Bearer {token}"}
            options["client_options"] = {**CLIENT, "default_headers": given}
        super().__init__(store_of(url, options), url, denied)

    def how_to_begin(self, name: str) -> Text:
        """Name the address at which a served store is a remote, where this is another one."""
        if self.where.endswith("/remote"):
            return "check the address"
        return f"a served store is a remote at {self.where}/remote"

    def names(self, below: str) -> NoReturn:
        """Raise Incompatible: HTTP has no listing."""
        raise Incompatible(
            "a web server does not list its objects",
            where=self.where,
            hint="check the store that it serves",
        )
