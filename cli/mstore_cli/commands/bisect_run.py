"""`mstore bisect run`: let a command say what is good and bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore_cli.bisecting import roughly, tell
from mstore_cli.command import command
from mstore_cli.commands.bisect_start import Experts, Good, Layers
from mstore_cli.errors import UsageError
from mstore_cli.judging import Checkout, Timeout, Words, output_of, seconds_of, showing
from mstore_cli.options import Revision
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore.api.reports import BisectReport


@command(
    example="mstore bisect run --experts llama/merged -- python /srv/works.py {}",
    failure="an error, or the command ended with 128 or more; the marks stay\n"
    "  2  too much was skipped to tell",
)
def bisect_run(
    session: Session,
    revision: Revision,
    words: Words = (),
    good: Good = (),
    experts: Experts = False,
    layers: Layers = False,
    timeout: Timeout = None,
    checkout: Checkout = False,
) -> None:
    """Let a command say what is good and what is bad.

    One snapshot after another is tried, until it is found what is to blame.

    The exit status of the command is the answer, as for git bisect run: 0 is good, 125 cannot be
    judged, others from 1 to 127 are bad, 128 or more stop the search. If the first is 126 or 127,
    the command also runs on what is good: if it ends the same, it is the command that fails.

    The command sees each snapshot as for `mstore eval`. A search that was stopped goes on where it
    was: type the same line again.
    """
    if not words:
        raise UsageError(
            "no command to run",
            hint=f"mstore bisect run {revision} -- python /path/to/test.py {{}}",
        )

    def told(report: BisectReport, status: int) -> None:
        judged = {0: "good", 125: "skipped"}.get(status, f"bad ({status})")
        tried = (report.next or "")[:12] if report.probe is None else report.probe
        session.output.tell(f"{tried}: {judged}{roughly(report, 1)}")

    with session.open() as store, showing(session, checkout=checkout) as show:
        report = store.bisect_run(
            revision,
            words,
            good=good,
            experts=experts,
            layers=layers,
            timeout=None if timeout is None else seconds_of(timeout),
            show=show,
            output=output_of(session),
            tell=told,
        )
        session.settled()
    tell(session, report, words)
