"""The JSON documents, as their readers see them.

The text below a field is the meaning of its key: docs/serving.md has them as tables, and a test
compares the two. As with the `--json` objects of the command line, keys are added and never
changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from mstore.api.reports import OriginReport, ReflogReport, RefReport, TensorReport
from mstore.terms.phrases import Text
from mstore.terms.report import plain


class RootDocument(msgspec.Struct, frozen=True):
    """What `/` shows."""

    service: str
    """mstore"""
    version: str
    """the version of mstore"""
    store: str
    """the store's UUID"""
    links: dict[str, str]
    """refs and snapshots, each with its address"""


class RefsDocument(msgspec.Struct, frozen=True):
    """What `/refs` shows."""

    refs: tuple[RefReport, ...]
    """branches and tags, by name"""


class SnapshotsDocument(msgspec.Struct, frozen=True):
    """What `/snapshots` shows."""

    snapshots: tuple[str, ...]
    """the ids of all snapshots"""


class ServedParent(msgspec.Struct, frozen=True):
    """An edge of the lineage."""

    role: str
    """previous, base or expert"""
    snapshot: str
    """the snapshot's id"""


class ServedFile(msgspec.Struct, frozen=True):
    """A file of a snapshot."""

    path: str
    """path inside the snapshot; its address is files/PATH, each segment percent-encoded"""
    size: int
    """bytes"""
    tensors: int
    """tensors in it; 0 if not safetensors"""
    etag: str
    """its ETag: equal ones mean equal bytes"""


class SnapshotDocument(msgspec.Struct, frozen=True):
    """What `/snapshots/ID` shows."""

    snapshot: str
    """the snapshot's id"""
    manifest: str
    """id of the content: same bytes, same id"""
    parents: tuple[ServedParent, ...]
    """what it was made from"""
    made: str
    """by what it came to be: add, merge, prepare, cast, align, extract or combine"""
    origin: OriginReport | None
    """where it came from; None if that is not known, or it was made here"""
    author: str
    """who made it; empty if nobody said"""
    plan: str | None
    """id of its merge plan; None if it was added"""
    method: str | None
    """the plan's method; None if it was added"""
    virtual: bool
    """whether its merged tensors are computed on read"""
    message: str
    """the message given with it"""
    time_ns: int
    """when, in nanoseconds since 1970 (UTC)"""
    plain_bytes: int
    """size of the files together"""
    tensors: int
    """number of tensors"""
    files: tuple[ServedFile, ...]
    """every file, by path"""


class ServedEntry(msgspec.Struct, frozen=True):
    """A file or directory in a directory."""

    name: str
    """its name; that of a directory ends in a slash"""
    size: int | None
    """bytes; None for a directory"""
    etag: str | None
    """its ETag; None for a directory"""


class DirectoryDocument(msgspec.Struct, frozen=True):
    """What a directory shows to who accepts application/json."""

    path: str
    """the directory's path inside the snapshot, with a slash at its end; empty for the top"""
    entries: tuple[ServedEntry, ...]
    """files and directories in it, by name"""


class TensorsDocument(msgspec.Struct, frozen=True):
    """What `/snapshots/ID/tensors/` shows."""

    tensors: tuple[TensorReport, ...]
    """every tensor, in file and data order; its address is tensors/NAME"""


class ReflogDocument(msgspec.Struct, frozen=True):
    """What `/reflog` shows."""

    name: str | None
    """the ref; None for all that ever were"""
    entries: tuple[ReflogReport, ...]
    """moves, newest first"""


class ErrorReport(msgspec.Struct, frozen=True):
    """What went wrong."""

    code: str
    """the kind: bad-request, not-found, corrupt and so on"""
    what: str
    """what is wrong"""
    where: str | None
    """the ref, snapshot, path or tensor, if one is to name"""


class ErrorDocument(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorReport
    """what went wrong"""


def encoded(document: object, typed: Callable[[Text], str] = str) -> bytes:
    """Return a document as JSON: ids in hex, tuples as lists; typed: as in `plain`."""
    return json.dumps(plain(document, typed), indent=2, allow_nan=False).encode() + b"\n"
