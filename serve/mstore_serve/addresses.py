"""The grammar of addresses: what the path of a URL names.  Pure.

    /                                     what this server is
    /refs                                 branches and tags
    /refs/NAME                            one of them
    /refs/NAME/-                          the snapshot that it names now, as below
    /refs/NAME/-/files/PATH
    /refs/NAME/-/tensors/TENSOR
    /snapshots                            the ids of all snapshots
    /snapshots/ID                         one snapshot
    /snapshots/ID/files/                  a directory of it: PATH is empty or ends in a slash
    /snapshots/ID/files/PATH              a file
    /snapshots/ID/tensors/                its tensors
    /snapshots/ID/tensors/TENSOR          the bytes of one
    /snapshots/ID/report                  what it is, what changed in it, and what that cost
    /snapshots/ID/plan                    what a merge read of each expert
    /compare?a=REVISION&b=REVISION        two snapshots, compared
    /reflog                               where refs have pointed; of one: ?ref=NAME
    /remote/NAME                          an object of the store as a remote (`mstore.remotes`)

A NAME has slashes, and no part of a name begins with a dash: so the first segment `-` ends it.
Segments are decoded first and joined with slashes after that, so that `%2F` is a slash of a name,
a path or a tensor.  Clients shorten `..` and `//` themselves; a tensor that is called so needs
`%2F`.  Nothing here or later looks at a disk: a path is a key of a manifest.

What follows a `?` chooses within an address (`Query`).
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec

_END_OF_NAME: Final = "-"
_MOST_FIELDS: Final = 16
_PAGES: Final = 10**6


class SnapshotName(msgspec.Struct, frozen=True):
    """A snapshot: by a text that may be its id, or by a ref."""

    name: str
    is_ref: bool


class ThisServer(msgspec.Struct, frozen=True):
    """What this server is."""


class Refs(msgspec.Struct, frozen=True):
    """All refs, or the one of a name."""

    name: str | None = None


class Snapshots(msgspec.Struct, frozen=True):
    """The ids of all snapshots."""


class OneSnapshot(msgspec.Struct, frozen=True):
    """What one snapshot is."""

    place: SnapshotName


class Files(msgspec.Struct, frozen=True):
    """A file; or a directory, if `path` is empty or ends in a slash.

    `path` is None for `files` itself, without a slash.
    """

    place: SnapshotName
    path: str | None


class Tensors(msgspec.Struct, frozen=True):
    """A tensor, or all of them if `name` is empty."""

    place: SnapshotName
    name: str


class ReportOf(msgspec.Struct, frozen=True):
    """The report of a snapshot."""

    place: SnapshotName


class PlanOf(msgspec.Struct, frozen=True):
    """The plan of the merge that made a snapshot."""

    place: SnapshotName


class Comparison(msgspec.Struct, frozen=True):
    """Two snapshots, which the query names."""


class Reflog(msgspec.Struct, frozen=True):
    """Moves of refs; of one, if the query names it."""


class RemoteObject(msgspec.Struct, frozen=True):
    """An object of the store as a remote; of no other name than those that it has."""

    name: str


InSnapshot = OneSnapshot | Files | Tensors | ReportOf | PlanOf
Address = ThisServer | Refs | Snapshots | InSnapshot | Comparison | Reflog | RemoteObject


class Query(msgspec.Struct, frozen=True):
    """What a request chooses within an address; other fields and nonsense count for nothing."""

    q: str = ""
    """words to look for"""
    page: int = 1
    """the page of a long list"""
    a: str = ""
    """the first revision of a comparison"""
    b: str = ""
    """the second one"""
    ref: str = ""
    """the ref whose moves are wanted"""
    quick: bool = False
    """whether a report or comparison reads no weights"""


def parse_query(raw: bytes) -> Query:
    """Return what a query chooses; `raw` is as it came, encoded."""
    try:
        found = dict(parse_qsl(raw.decode("ascii"), max_num_fields=_MOST_FIELDS))
    except ValueError:
        return Query()
    page = found.get("page", "")
    number = int(page) if page.isascii() and page.isdigit() and len(page) < 8 else 1
    return Query(
        q=found.get("q", ""),
        page=max(1, min(number, _PAGES)),
        a=found.get("a", "").strip(),
        b=found.get("b", "").strip(),
        ref=found.get("ref", ""),
        quick=found.get("quick") == "yes",
    )


def parse(raw: bytes) -> Address | None:
    """Return what the path of a request names, None if nothing; `raw` is as it came, encoded."""
    try:
        segments = [unquote_to_bytes(one).decode() for one in path_of(raw).split(b"/")[1:]]
    except UnicodeDecodeError:
        return None
    match segments:
        case [""]:
            return ThisServer()
        case ["refs"] | ["refs", ""]:
            return Refs()
        case ["refs", *rest] if _END_OF_NAME in rest:
            end = rest.index(_END_OF_NAME)
            return _inside(SnapshotName("/".join(rest[:end]), is_ref=True), rest[end + 1 :])
        case ["refs", *rest]:
            return Refs("/".join(rest))
        case ["snapshots"] | ["snapshots", ""]:
            return Snapshots()
        case ["snapshots", id, *rest]:
            return _inside(SnapshotName(id, is_ref=False), rest)
        case ["compare"]:
            return Comparison()
        case ["reflog"]:
            return Reflog()
        case ["remote", *rest] if rest:
            return RemoteObject("/".join(rest))
    return None


def path_of(raw: bytes) -> bytes:
    """Return the path alone: a proxy may send the whole URL."""
    if raw.startswith(b"/"):
        return raw
    _, found, rest = raw.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if found else raw


def _inside(place: SnapshotName, segments: list[str]) -> Address | None:
    match segments:
        case [] | [""]:
            return OneSnapshot(place)
        case ["files"]:
            return Files(place, None)
        case ["files", *rest]:
            return Files(place, "/".join(rest))
        case ["tensors", *rest]:
            return Tensors(place, "/".join(rest))
        case ["report"]:
            return ReportOf(place)
        case ["plan"]:
            return PlanOf(place)
    return None


def segment(name: str) -> str:
    """Return one name, encoded as a segment of an address."""
    # A name with a colon would begin like a URL.
    return quote(name, safe="")


def up(raw: bytes) -> str:
    """Return the relative address of the root, as seen from an address."""
    return "../" * (path_of(raw).count(b"/") - 1) or "./"


def elsewhere(raw: bytes, id: str) -> str:
    """Return the relative address of the same thing in the snapshot of this id.

    raw: an address below `/snapshots/`. Relative, because a proxy may show this server below a path
    of its own.
    """
    below = path_of(raw).decode("ascii").split("/")[3:]
    return "/".join([*[".."] * len(below), id, *below])


def with_slash(raw: bytes) -> str:
    """Return the relative address of the directory that an address names without its last slash.

    Slashes that came as `%2F` become such, so that the links of its page lead on.
    """
    last = unquote_to_bytes(path_of(raw).rpartition(b"/")[2]).decode()
    return "".join(f"{segment(part)}/" for part in last.split("/"))
