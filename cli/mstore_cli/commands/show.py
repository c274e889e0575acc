"""`mstore show`: one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore.snapshots.notes import SHORT_DIGITS, digested_path
from mstore.terms.phrases import few
from mstore_cli.command import command
from mstore_cli.graph import how, revision_of
from mstore_cli.options import Option, Revision
from mstore_cli.output import Screen, named, noted, when
from mstore_cli.session import Session
from mstore_cli.signers import lines_on_unknown_keys, signatures_of, states_of, trusted_signers
from mstore_cli.sizes import counted, format_size, not_here

if TYPE_CHECKING:
    from mstore.api.reports import NoteReport, ParentReport, SnapshotReport

SHOWN = 5


@command(example="mstore show llama/merged")
def show(
    session: Session,
    revision: Revision,
    digest: Annotated[
        bool,
        Option(
            "--digest",
            help="Compute the SHA-256 of its single-file models, and note it, where `add` did not.",
        ),
    ] = False,
) -> None:
    """Print one snapshot: content, parents, author, message."""
    if digest:
        with session.open() as store, session.progress() as tick:
            store.digests(revision, progress=tick)
    with session.open_to_look() as store:
        report = store.show(revision)
        if any(signatures_of(report)):
            report = store.show(revision, signers=trusted_signers(None))

    def human(screen: Screen) -> None:
        screen.line(f"snapshot {report.snapshot}", style="yellow")
        screen.fields(
            [
                ("manifest", report.manifest),
                ("made", f"{when(report.time_ns)} by {how(report)}"),
                ("origin", _told_origin(report)),
                ("author", report.author or None),
                ("plan", report.plan),
                ("refs", named(report.refs) or None),
                (
                    "content",
                    f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}",
                ),
                ("models", _models(report)),
                ("size", format_size(report.plain_bytes)),
                ("pinned", "raw" if report.pinned else None),
                *(("not here", not_here(one)) for one in report.leans_on),
                *((parent.role, _named(parent)) for parent in report.parents),
                ("not finite", _not_finite(report)),
                *(_note_or_digest(one) for one in report.notes),
                ("signatures", states_of(report.signatures)),
                ("message", report.message or None),
            ]
        )
        for line in lines_on_unknown_keys(signatures_of(report)):
            screen.line(line)

    session.output.emit(report, ids=[report.snapshot], human=human)


def _models(report: SnapshotReport) -> str | None:
    """Return what its models are called, None if it is one model."""
    names = [name or "(top)" for name in report.models]
    return ", ".join(names) if len(names) > 1 else None


def _told_origin(report: SnapshotReport) -> str | None:
    """Return where it came from: the address, then the commit and what named it."""
    found = report.origin
    if found is None:
        return None
    return f"{found.url} {found.commit}" + (f" ({found.revision})" if found.revision else "")


def _not_finite(report: SnapshotReport) -> str | None:
    """Return which tensors have elements that are infinite or NaN, worst first."""
    if not report.not_finite:
        return None
    if report.not_finite[0].elements is None:
        shown = few([one.tensor for one in report.not_finite], SHOWN)
        return f"some elements may be infinite or NaN: {shown}"
    total = sum(one.elements or 0 for one in report.not_finite)
    each = [f"{one.tensor} {one.elements} of {one.elements_total}" for one in report.not_finite]
    return f"{counted(total, 'element')}, infinite or NaN: {few(each, SHOWN)}"


def _note_or_digest(note: NoteReport) -> tuple[str, str]:
    path = digested_path(note.key)
    if path is None or not isinstance(note.value, str):
        return "note", _noted(note)
    return "sha256", f"{note.value} (AutoV2 {note.value[:SHORT_DIGITS]}) {path}"


def _noted(note: NoteReport) -> str:
    signed = states_of(note.signatures)
    return f"{noted(note)} ({signed})" if signed else noted(note)


def _named(parent: ParentReport) -> str:
    names = f" ({named(parent.refs)})" if parent.refs else ""
    return f"{revision_of(parent)}{names}"
