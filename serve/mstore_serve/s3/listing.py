"""The keys of the bucket, in order, from any key on.

    refs/NAME/PATH           a file of the snapshot that a branch or tag names now
    snapshots/ID/PATH        a file of a snapshot, by its whole id

No ref lies below another, so each key has one meaning.  Remote refs and candidates are listed only
below their own directories, `refs/remotes/` and `refs/candidates/`, as everywhere.

A page reads no more snapshots than it has keys of: a directory that stands for all keys of a
snapshot is listed without opening it, so it may be one whose contents were pruned.  In memory are
the names of refs, a 256th of the ids of snapshots, and one page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Final

import msgspec

from mstore.store.refs import DIRECTORIES, MAX_KEY_BYTES
from mstore.terms.errors import NotFound
from mstore_serve.addresses import SnapshotName
from mstore_serve.s3.documents import S3Object
from mstore_serve.shown import ServedSnapshot, Showing

_REFS: Final = "refs/"
_SNAPSHOTS: Final = "snapshots/"
_ID: Final = re.compile(r"[0-9a-f]{64}")
_NS: Final = 1_000_000_000


class ServedFolder(msgspec.Struct, frozen=True):
    """The keys of one snapshot below one name.

    prefix: what they begin with; ends in a slash. modified: when it came to have these files, in
    seconds since 1970; called only once the snapshot is there.
    """

    prefix: str
    place: SnapshotName
    modified: Callable[[ServedSnapshot], int]


def folder_of(showing: Showing, key: str) -> tuple[ServedFolder, str] | None:
    """Return where a key lies, and the path of its file there; None if it cannot be a key."""
    if key.startswith(_SNAPSHOTS):
        id, _, path = key.removeprefix(_SNAPSHOTS).partition("/")
        return (_of_snapshot(id), path) if _ID.fullmatch(id) else None
    if not key.startswith(_REFS):
        return None
    refs = showing.refs()
    rest = key.removeprefix(_REFS)
    # Whatever a client sends, few names are tried.
    parts = rest[: MAX_KEY_BYTES + 1].split("/")
    for length in range(1, len(parts)):
        name = "/".join(parts[:length])
        if name in refs:
            return _of_ref(showing, name), rest[len(name) + 1 :]
    return None


def keys(showing: Showing, prefix: str, delimiter: str, after: str) -> Iterator[S3Object | str]:
    """Yield the objects and common prefixes that come after a text.

    delimiter: what ends a common prefix, after `prefix`; empty: nothing does.

    Raises Corrupt and others, not NotFound: a snapshot that is gone or was pruned has no keys.
    """
    last = after
    for folder in chain(_refs(showing, prefix, after), _snapshots(showing, prefix, after)):
        shared = _shared(folder.prefix, prefix, delimiter)
        found = [shared] if shared else _objects(showing, folder)
        for one in found:
            key = one if isinstance(one, str) else one.key
            if not key.startswith(prefix):
                continue
            item = _shared(key, prefix, delimiter) or one
            text = item if isinstance(item, str) else item.key
            if text > last:
                last = text
                yield item


def page(
    showing: Showing, prefix: str, delimiter: str, after: str, most: int
) -> tuple[list[S3Object | str], bool]:
    """Return the first of `keys`, and whether there are more."""
    found = list(islice(keys(showing, prefix, delimiter, after), most + 1 if most else 0))
    return found[:most], len(found) > most


def _shared(key: str, prefix: str, delimiter: str) -> str | None:
    """Return the common prefix that stands for a key, None if the key is listed itself."""
    if not delimiter or not key.startswith(prefix):
        return None
    end = key.find(delimiter, len(prefix))
    return None if end < 0 else key[: end + len(delimiter)]


def _refs(showing: Showing, prefix: str, after: str) -> Iterator[ServedFolder]:
    if not _may_have(_REFS, prefix, after):
        return
    hidden = tuple(
        f"{one}/" for one in DIRECTORIES.values() if not prefix.startswith(f"{_REFS}{one}/")
    )
    # In the order of keys: the slash counts.
    for below in sorted(f"{name}/" for name in showing.refs()):
        if not below.startswith(hidden) and _may_have(f"{_REFS}{below}", prefix, after):
            yield _of_ref(showing, below.removesuffix("/"))


def _snapshots(showing: Showing, prefix: str, after: str) -> Iterator[ServedFolder]:
    for number in range(256):
        digits = f"{number:02x}"
        if not _may_have(f"{_SNAPSHOTS}{digits}", prefix, after):
            continue
        for id in showing.snapshot_ids(digits):
            folder = _of_snapshot(id.hex())
            if _may_have(folder.prefix, prefix, after):
                yield folder


def _may_have(begin: str, prefix: str, after: str) -> bool:
    """Return whether a key that begins so can have the prefix, and come after a text."""
    is_asked = begin.startswith(prefix) or prefix.startswith(begin)
    return is_asked and (begin > after or after.startswith(begin))


def _of_ref(showing: Showing, name: str) -> ServedFolder:
    modified = partial(_moved, showing, name)
    return ServedFolder(f"{_REFS}{name}/", SnapshotName(name, is_ref=True), modified)


def _moved(showing: Showing, name: str, found: ServedSnapshot) -> int:
    """Return when a ref came to name its snapshot; if nothing says it, when that was made."""
    return (showing.ref(name).time_ns or found.view.time_ns) // _NS


def _of_snapshot(id: str) -> ServedFolder:
    place = SnapshotName(id, is_ref=False)
    return ServedFolder(f"{_SNAPSHOTS}{id}/", place, lambda found: found.view.time_ns // _NS)


def _objects(showing: Showing, folder: ServedFolder) -> Iterator[S3Object]:
    try:
        found = showing.snapshot(folder.place)
        modified = folder.modified(found)
    except NotFound:
        return
    # Manifests have them in order.
    for path in found.files:
        yield S3Object(f"{folder.prefix}{path}", found.files[path].size, found.etag(path), modified)
