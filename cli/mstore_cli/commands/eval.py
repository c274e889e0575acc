"""`mstore eval`: run a command on a snapshot, and note what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import REFUSED, Ended, UsageError
from mstore_cli.judging import Checkout, Timeout, Words, output_of, seconds_of, show_of
from mstore_cli.options import Option, Revision
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds

if TYPE_CHECKING:
    from mstore.api.reports import EvaluationReport


@command(
    example="mstore eval llama/merged --score results.json:acc -- python /srv/score.py {}",
    failure="an error, or the command failed, hung or left no score\n"
    "  3  without --score: the command failed, and that was noted",
)
def eval(
    session: Session,
    revision: Revision,
    words: Words = (),
    score: Annotated[
        tuple[str, ...],
        Option(
            "--score",
            metavar="[NAME=]FILE:POINTER",
            help="A number in a file of JSON that the command writes; the newest file that "
            "matches, as '**/results_*.json:results.mmlu.acc,none' [default: the exit status]. "
            "Repeatable.",
        ),
    ] = (),
    name: Annotated[
        str | None,
        Option("--as", metavar="NAME", help="The key of the note [default: the command]."),
    ] = None,
    timeout: Timeout = None,
    checkout: Checkout = False,
) -> None:
    """Run a command on a snapshot and note its scores.

    The scores become a note of kind evaluation. The command sees the snapshot as read-only files,
    at {} and $MSTORE_DIR. No shell reads it. It runs in an empty directory of its own, $MSTORE_OUT,
    where --score looks for files: so name your own files by absolute paths, as "$PWD/score.py".
    When it has ended, or its time is over, all processes that it started are ended.

    Keys of a POINTER are separated by dots; keys that hold dots are found, too. /a/b is a JSON
    pointer.
    """
    if not words:
        raise UsageError(
            "no command to run", hint=f"mstore eval {revision} -- python /path/to/score.py {{}}"
        )
    with session.open() as store:
        report = store.evaluate(
            revision,
            words,
            scores=score,
            name=name,
            timeout=None if timeout is None else seconds_of(timeout),
            show=show_of(session, checkout=checkout),
            output=output_of(session),
        )
        session.settled()
    session.output.emit(report, ids=[report.note], human=lambda screen: _show(screen, report))
    if report.exit_status:
        raise Ended(REFUSED)


def _show(screen: Screen, report: EvaluationReport) -> None:
    style = "red" if report.exit_status else "green"
    screen.line(f"evaluated {short(report.snapshot)}, note {short(report.note)}", style=style)
    screen.fields(
        [
            *((name, f"{value:g}") for name, value in report.scores.items()),
            ("exit status", report.exit_status or None),
            ("time", format_seconds(report.seconds)),
        ]
    )
