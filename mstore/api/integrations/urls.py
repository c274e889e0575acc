"""`mstore://REVISION?store=STORE`: a snapshot, as programs name it that take URLs.

Owns what a URL may say, and whose store may be used without being named.  What follows the revision
in a URL of a file is a matter of `fsspec`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from mstore.api import Snapshot, Store
from mstore.fs import owners
from mstore.terms.errors import BadRequest, Conflict

PROTOCOL: Final = "mstore"
HEAD: Final = f"{PROTOCOL}://"
DEFAULT_STORE: Final = ".mstore"


def store_of(url: str) -> str | None:
    """Return the store that a URL names, None if it names none.

    Raises BadRequest for another query.
    """
    asked = parse_qs(url.partition("?")[2], keep_blank_values=True)
    if asked.keys() - {"store"} or any(len(values) != 1 for values in asked.values()):
        raise BadRequest("a URL of mstore may say ?store=DIRECTORY, nothing else", where=url)
    return asked["store"][0] if asked else None


def open_store(path: str | None) -> Store:
    """Open a store; without a path that of the current directory, if it is this user's.

    Raises as `Store.open`, and Conflict for a store of another user that was not named.
    """
    if path is None:
        _require_own(Path(DEFAULT_STORE))
    return Store.open(path or DEFAULT_STORE)


@contextmanager
def snapshot_at(source: Snapshot | str) -> Iterator[Snapshot]:
    """Give the snapshot of a URL, whose store is open for the time of the block.

    source: a URL, or a snapshot of an open store, which stays as it is.  Raises BadRequest,
    NotFound, and as `open_store`.
    """
    if isinstance(source, Snapshot):
        yield source
        return
    if not source.startswith(HEAD):
        raise BadRequest(
            f"not a snapshot, and not a URL of one: {source!r}",
            hint="store[REF], or mstore://REF?store=DIRECTORY",
        )
    revision = source.removeprefix(HEAD).partition("?")[0].strip("/")
    with open_store(store_of(source)) as store:
        yield store[revision]


def _require_own(store: Path) -> None:
    with suppress(FileNotFoundError):
        if set(owners(store)) - {os.geteuid()}:
            raise Conflict(
                "this store belongs to another user, and was only found, not named",
                where=str(store),
                hint="if you trust it, name it: ?store=DIRECTORY",
            )
