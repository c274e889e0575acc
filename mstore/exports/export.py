"""An export: the files of a snapshot and its card go to the place that an address names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from mstore.exports.destination import (
    ChangesThere,
    Export,
    ExportDestination,
    OutgoingFile,
    TextFile,
    ViewFile,
    Wishes,
)
from mstore.exports.hub import HubDestination
from mstore.exports.registry import RegistryDestination
from mstore.store.catalog import Catalog
from mstore.store.memo import Memo
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

_KINDS: Final[Mapping[str, Callable[[str, Wishes], ExportDestination]]] = {
    "hf": HubDestination,
    "oci": RegistryDestination,
}
"""By the scheme of an address, which kind of place it names."""


class ExportedFile(Report, frozen=True):
    """A file of an export, or one that it removes."""

    path: str
    """its path"""
    size: int
    """size in bytes; of a file that is removed, 0"""
    what: str
    """added, changed, removed, or there: the place has it already"""


class ExportReport(Report, frozen=True):
    """What `export` sent, or would send."""

    snapshot: SnapshotId
    """the snapshot's id"""
    address: str
    """where it went"""
    is_new: bool
    """whether the export makes the place, or the branch there"""
    commit: str | None
    """what the place calls the state with these files: a commit; None for a dry run"""
    url: str | None
    """where people see it; None for a dry run"""
    files: tuple[ExportedFile, ...]
    """the files, and what becomes of each"""
    plain_bytes: int
    """size of all files"""
    bytes_to_send: int
    """size of the files that the place lacks"""
    bytes_sent: int
    """what was sent of them: less where the place had parts"""
    card: str
    """the text of README.md as it is there; empty if there is none"""
    dry_run: bool
    """whether nothing was sent because of that"""
    seconds: float
    """how long it took"""


def destination(address: str, wishes: Wishes) -> ExportDestination:
    """Return the place that an address names.

    Raises BadRequest (an address of no kind that is known, or a wish that the kind cannot fulfil),
    Unavailable.
    """
    kind = _KINDS.get(address.partition(":")[0])
    if kind is None:
        addresses = (
            "hf://ORG/NAME names a model of the Hugging Face Hub, "
            "oci://HOST/REPOSITORY:TAG an artifact in a registry"
        )
        raise BadRequest(
            "is no address of a place to export to",
            where=address,
            hint=addresses
            if "://" in address
            else phrase(
                "{addresses}; for a directory: {checkout}",
                addresses=addresses,
                checkout=call("checkout", "REF", address),
            ),
        )
    return kind(address, wishes)


def export(
    view: SnapshotView,
    place: ExportDestination,
    *,
    catalog: Catalog,
    memo: Memo,
    made: Mapping[str, bytes],
    message: str,
    dry_run: bool,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Send the files of a view to a place.

    made: files in place of the view's, or beside them: the card.

    Raises as `ExportDestination`, and Corrupt.
    """
    began = time.monotonic()
    own = [ViewFile(view, path, memo) for path in view.files if path not in made]
    files: list[OutgoingFile] = [*own, *(TextFile(path, data) for path, data in made.items())]
    ordered = tuple(sorted(files, key=lambda one: one.path))
    outgoing = Export(view.id, ordered, message, catalog, memo)
    sent = None
    try:
        changes = place.compare(outgoing)
        to_send = sum(file.size for file in changes.to_send)
        # Whoever is killed while files go does not read them all again.
        memo.flush()
        if not dry_run:
            sent = place.send(outgoing, changes, ProgressCounter("export", to_send, progress))
    finally:
        # Digests that were computed count, whatever became of the export.
        memo.flush()
    return ExportReport(
        snapshot=view.id,
        address=place.shown,
        is_new=changes.is_new,
        commit=None if sent is None else sent.commit,
        url=None if sent is None else sent.url,
        files=_listed(changes),
        plain_bytes=sum(file.size for file in files),
        bytes_to_send=to_send,
        bytes_sent=0 if sent is None else sent.bytes_sent,
        card=outgoing.card,
        dry_run=dry_run,
        seconds=time.monotonic() - began,
    )


def _listed(changes: ChangesThere) -> tuple[ExportedFile, ...]:
    found = [ExportedFile(path, 0, "removed") for path in changes.removed]
    for what, files in (
        ("added", changes.added),
        ("changed", changes.changed),
        ("there", changes.there),
    ):
        found += [ExportedFile(file.path, file.size, what) for file in files]
    return tuple(sorted(found, key=lambda one: one.path))
