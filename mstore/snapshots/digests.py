"""SHA-256 of single-file models: how sites and user interfaces name such a file.

A digest of a file's bytes is noted about its snapshot, under the key `sha256 of PATH`.  `add` takes
it as it reads the file; for what was made here, it is computed when somebody asks.  AutoV2, the
short name that A1111's and Civitai's tools show, is its first ten digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstore import fs
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.checkpoint.header import read_header
from mstore.snapshots import notes
from mstore.snapshots.notes import (
    SHORT_DIGITS,
    digest_key,
    digested_path,
    notes_on,
    stored,
    value_of,
)
from mstore.store import contents
from mstore.store.block_cache import BlockCache, Computing
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.note import COUNTS, VALUE, Note, states
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadCheckpoint, BadName, NotFound, StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

SNAPSHOT_KEY: Final = "mstore.snapshot"
"""Of the header of a file that was written with a card: the snapshot that it is."""
_LEAST_DIGITS: Final = 8
DIGITS: Final = re.compile(rf"(0x)?([0-9a-f]{{{_LEAST_DIGITS},64}})", re.IGNORECASE)
"""A digest, or the beginning of one, as people give it."""


class FileDigest(Report, frozen=True):
    """A file of one model, and its digest."""

    snapshot: SnapshotId
    """the snapshot's id"""
    path: str
    """of the file in the snapshot"""
    sha256: str
    """the digest of the file's bytes, in hexadecimal digits"""
    autov2: str
    """its first ten digits, as A1111's and Civitai's tools name a file"""
    refs: tuple[str, ...] = ()
    """refs that point at the snapshot"""


def paths_of(catalog: Catalog, manifest: Manifest) -> list[str]:
    """Return the paths of single-file models."""
    models = models_in(catalog, manifest).named.values()
    return [path for model in models if model.is_single_file for path in model.files]


def noted(catalog: Catalog, snapshot: SnapshotId) -> dict[str, str]:
    """Return the digests that are noted about a snapshot, by path.  Raises Corrupt, NotFound."""
    found = notes_on(catalog, snapshot)
    state_of = states(found)
    counting = (note for id, note in found.items() if state_of[id] == COUNTS)
    return {path: digest for note in counting for path, digest in _told(note)}


def news(
    catalog: Catalog, snapshot: SnapshotId, digests: Mapping[str, str], *, is_new: bool
) -> list[Note]:
    """Return notes of the digests that a snapshot has not yet.  is_new: it has no notes at all."""
    known = {} if is_new or not digests else noted(catalog, snapshot)
    return [
        value_of(catalog, snapshot, digest_key(path), digest)
        for path, digest in digests.items()
        if path not in known
    ]


def insert(catalog: Catalog, told: Iterable[Note], rows: IndexTransaction) -> None:
    """Link stored notes to their snapshots, in the commit that publishes these."""
    for note in told:
        notes.insert(catalog.index, rows, note)


def completed(
    catalog: Catalog,
    snapshot: SnapshotId,
    computing: Callable[[], Computing],
    progress: ProgressCallback | None,
) -> dict[str, str]:
    """Return the digest of each single-file model, by path; those that are not noted are now.

    computing: returns what computes blocks of a virtual snapshot.  Raises Corrupt, NotFound,
    StorageFailed.
    """
    known = noted(catalog, snapshot)
    paths = paths_of(catalog, catalog.manifest_of(snapshot))
    missing = [path for path in paths if path not in known]
    if missing:
        with contents.held(catalog, [snapshot]):
            view = SnapshotView(catalog, snapshot, BlockCache(catalog, computing=computing))
            total = sum(view.files[path] for path in missing)
            tick = ProgressCounter("digest", total, progress)
            new = {path: _computed(view, path, tick) for path in missing}
        _note(catalog, snapshot, new)
        known |= new
    return {path: known[path] for path in paths}


def _computed(view: SnapshotView, path: str, tick: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for block in view.stream(path):
        digest.update(block)
        tick(len(block))
    return digest.hexdigest()


def note_file(catalog: Catalog, snapshot: SnapshotId, path: Path, *, anew: bool) -> None:
    """Note the digest of a file that was written of a snapshot, so that `found` knows it.

    anew: its header is another than the stored one.
    """
    known = noted(catalog, snapshot)
    stored_paths = paths_of(catalog, catalog.manifest_of(snapshot))
    if not anew and not known.keys().isdisjoint(stored_paths):
        return
    digest = of_file(path)
    if digest not in known.values():
        _note(catalog, snapshot, {path.name: digest})


def _note(catalog: Catalog, snapshot: SnapshotId, digests: Mapping[str, str]) -> None:
    """Note digests by path.  Who may only read is told them all the same."""
    told = {digest_key(path): digest for path, digest in digests.items()}
    with suppress(StorageFailed):
        notes.write(catalog, snapshot, told, VALUE)


def named_in(path: Path) -> str | None:
    """Return the snapshot that the header of a file names, None if it names none."""
    with suppress(BadCheckpoint, StorageFailed):
        return read_header(path).metadata.get(SNAPSHOT_KEY)
    return None


def of_file(path: Path) -> str:
    """Return the digest of a file outside the store.  Raises NotFound, StorageFailed."""
    if not path.is_file():
        raise NotFound("no such file", where=str(path), hint=call("find", help=True))
    with fs.reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def found(
    catalog: Catalog, digits: str, names: Mapping[SnapshotId, Sequence[str]]
) -> list[FileDigest]:
    """Return the files of which such a digest is noted; those that refs point at come first.

    digits: the digest, or at least its first eight digits. names: the refs of snapshots. Raises
    BadName.
    """
    asked = DIGITS.fullmatch(digits)
    if asked is None:
        raise BadName(
            f"is no SHA-256: that is 64 hexadecimal digits, or the first {SHORT_DIGITS} of them",
            where=digits,
            hint=call("find", help=True),
        )
    wanted = asked[2].lower()
    snapshots = {
        note.snapshot_id()
        for note in stored(catalog).values()
        for _, digest in _told(note)
        if digest.startswith(wanted)
    }
    files = [
        file_digest(id, path, digest, names)
        for id in snapshots
        for path, digest in noted(catalog, id).items()
        if digest.startswith(wanted)
    ]
    return sorted(files, key=lambda one: (not one.refs, one.refs, one.snapshot, one.path))


def file_digest(
    snapshot: SnapshotId, path: str, digest: str, names: Mapping[SnapshotId, Sequence[str]]
) -> FileDigest:
    """Report the digest of one file."""
    return FileDigest(snapshot, path, digest, digest[:SHORT_DIGITS], tuple(names.get(snapshot, ())))


def _told(note: Note) -> Iterator[tuple[str, str]]:
    """Yield path and digest if a note tells one."""
    path = digested_path(note.key)
    if note.form == VALUE and path is not None and isinstance(note.value, str):
        yield path, note.value
