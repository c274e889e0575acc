"""`mstore reset`: point a branch somewhere else."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument, Option, Revision
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(
    example="mstore reset llama/merged 'llama/merged@{1}'",
    failure="an error; the branch is where it was\n"
    "  3  a gate guards the branch, and the snapshot has not passed it",
)
def reset(
    session: Session,
    name: Annotated[
        str, Argument(metavar="NAME", help="The branch.", shell_complete=completion.ever)
    ],
    revision: Revision,
    expect: Annotated[
        str | None,
        Option(
            "--expect",
            metavar="REV",
            help="Only if the branch points at this now; '': if there is no such branch.",
        ),
    ] = None,
) -> None:
    """Point a branch at another snapshot.

    The old position stays in the reflog. A candidate of `mstore merge --candidate` becomes the
    branch's state in this way; --expect refuses if another command moved the branch meanwhile.
    """
    from mstore.store.refs import is_candidate

    with session.open() as store:
        refs = store.ref_ids()
        was = refs.get(name)
        if expect is None:
            report = store.reset(name, revision)
        else:
            report = store.move(name, expect or None, revision)
        session.settled()
        moves = store.reflog(name)
        was_nowhere = moves[0].old is None

    def human(screen: Screen) -> None:
        if was == report.snapshot:
            screen.line(f"nothing changed: {report.name} was at {short(report.snapshot)} already")
            return
        is_new = len(moves) == 1
        done = f"new branch {report.name}: " if is_new else f"{report.name} is now "
        screen.line(done + short(report.snapshot), style="green")
        if not (is_new or was_nowhere):
            screen.command("where it was", f"mstore reflog {report.name}")
        if is_candidate(revision) and revision in refs:
            screen.command("the candidate stays; to drop it", f"mstore rm {revision}")

    session.output.emit(report, ids=[report.snapshot], human=human)
