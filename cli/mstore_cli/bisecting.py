"""The common part of `mstore bisect ...`: how a report is told, and what a mark does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.errors import Ended
from mstore_cli.options import Argument
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import BisectReport
    from mstore.terms.ids import SnapshotId

Position = Annotated[
    str | None,
    Argument(
        metavar="[REF]",
        help="A position of the branch [default: what is to be tried now].",
        shell_complete=completion.refs,
    ),
]
MARK_FAILURE = "an error; the mark does not count\n  2  too much was skipped to tell"
"""When the exit status of a mark is 1, or 2."""
ONLY_SKIPPED = 2
"""The exit status if too much was skipped, as git's."""


def mark(session: Session, answer: str, revision: str | None) -> None:
    """Say what a revision is, or what is tried now; tell what is next."""
    with session.open() as store:
        report = store.bisect_mark(answer, revision)
        session.settled()
    tell(session, report)


def tell(session: Session, report: BisectReport, words: Sequence[str] = ()) -> None:
    """Print where a bisection stands; end with status 2 if only skipped positions are left.

    words: the command that judges, if there is one.
    """
    ids = [report.first_bad] if report.first_bad else [report.next] if report.next else []
    session.output.emit(report, ids=ids, human=lambda screen: draw(screen, report, words))
    if report.suspects or (report.by and report.is_done and report.rest == "skip"):
        raise Ended(ONLY_SKIPPED)


def draw(screen: Screen, report: BisectReport, words: Sequence[str] = ()) -> None:
    """Draw where a bisection stands.  words: the command that judges, if there is one."""
    from mstore.terms.ids import SnapshotId

    if report.lacks is not None:
        screen.line(
            f"{counted(report.left, 'earlier position')} of {report.name}; none is good yet"
        )
        screen.command("which there are", f"mstore log {report.name}")
        screen.command("to name a good one", "mstore bisect good REF")
    elif report.next is not None and report.by:
        screen.line(f"bisecting {report.name}: {counted(report.left, 'unit')}{roughly(report)}")
        screen.line(f"try {report.next}: {report.probe}")
        # The mount shows each probe in turn.
        _draw_how(screen, f"--follow {report.next}")
    elif report.next is not None:
        screen.line(
            f"bisecting {report.name}: {counted(report.left, 'position')} left{roughly(report)}"
        )
        shown = short(SnapshotId.fromhex(report.next))
        screen.line(f"try {shown}")
        _draw_how(screen, shown)
    elif report.first_bad is not None:
        _draw_first_bad(screen, report, report.first_bad, words)
    elif report.suspects:
        screen.line("only skipped positions are left; the first bad one may be any of:")
        for one in report.suspects:
            screen.line(f"  {short(one)}")
    else:
        _draw_culprits(screen, report)


def roughly(report: BisectReport, done: int = 0) -> str:
    """Return about how many probes are left after so many more, as words that follow others."""
    left = report.steps - done
    return f"; roughly {counted(left, 'probe')} left" if left > 0 else ""


def _draw_how(screen: Screen, shown: str) -> None:
    screen.command("look at it", f"mstore mount {shown} DIR")
    screen.command("then say", "mstore bisect good (or bad, or skip)")


def _draw_first_bad(
    screen: Screen, report: BisectReport, first: SnapshotId, words: Sequence[str]
) -> None:
    screen.line(f"{short(first)} is the first bad snapshot: {report.what}", style="green")
    for change in report.changes:
        screen.line(f"  {change}")
    if report.is_merge:
        name = report.name if first == report.snapshot else short(first)
        # The braces need no quotes.
        judged = f" -- {shlex.join(words)}".replace("'{}'", "{}") if words else ""
        how = "run" if words else "start"
        screen.command("which expert broke it", f"mstore bisect {how} --experts {name}{judged}")
    if report.before is not None:
        screen.command("what differs", f"mstore diff {short(report.before)} {short(first)}")


def _draw_culprits(screen: Screen, report: BisectReport) -> None:
    if not report.culprits:
        screen.line(report.text())
        return
    screen.line(f"to blame: {report.text()}", style="green")
    screen.line(f"{counted(report.probes, 'probe')}, {report.skipped} skipped")
