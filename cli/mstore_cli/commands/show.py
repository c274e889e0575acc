"""`mstore show`: one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.graph import how
from mstore_cli.options import Revision
from mstore_cli.output import Screen, short, when
from mstore_cli.session import Session
from mstore_cli.signers import states_of, told_unknown, trusted_signers
from mstore_cli.sizes import counted, format_size

if TYPE_CHECKING:
    from mstore.reports import ParentReport, SnapshotReport

SHOWN = 5


@command(example="mstore show llama/merged")
def show(session: Session, revision: Revision) -> None:
    """Print one snapshot: content, parents, origin, message."""
    with session.open() as store:
        report = store.show(revision)
        if report.signatures:
            report = store.show(revision, signers=trusted_signers(None))

    def human(screen: Screen) -> None:
        screen.line(f"snapshot {report.snapshot}", style="yellow")
        screen.fields(
            [
                ("manifest", report.manifest),
                ("made", f"{when(report.time_ns)} by {how(report)}"),
                ("plan", report.plan),
                ("refs", ", ".join(report.refs) or None),
                (
                    "content",
                    f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}",
                ),
                ("size", format_size(report.plain_bytes)),
                ("pinned", "raw" if report.pinned else None),
                *((parent.role, _named(parent)) for parent in report.parents),
                ("overflow", _overflowed(report)),
                ("signatures", states_of(report.signatures)),
                ("message", report.message or None),
            ]
        )
        for line in told_unknown(report.signatures):
            screen.line(line)

    session.output.emit(report, ids=[report.snapshot], human=human)


def _overflowed(report: SnapshotReport) -> str | None:
    """Return what became infinite in the merge, worst first."""
    if not report.overflow:
        return None
    shown = ", ".join(
        one.tensor
        if one.elements is None
        else f"{one.tensor} {one.elements} of {one.elements_total}"
        for one in report.overflow[:SHOWN]
    )
    more = len(report.overflow) - SHOWN
    became = "may become" if report.overflow[0].elements is None else "became"
    return f"{became} infinite: {shown}" + (f" and {more} more" if more > 0 else "")


def _named(parent: ParentReport) -> str:
    names = f" ({', '.join(parent.refs)})" if parent.refs else ""
    return f"{short(parent.snapshot)}{names}"
