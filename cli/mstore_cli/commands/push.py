"""`mstore push`: send models to a remote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, NoReturn

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import REFUSED, Ended, UsageError
from mstore_cli.exchange import (
    left_out,
    rate_of,
    remote_for,
    require_names,
    resumable,
    show_moved,
)
from mstore_cli.judging import Checks, draw_verdicts, judged
from mstore_cli.options import JOBS, Argument, Jobs, LimitRate, MaybeRemote, Option
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import PushReport, VerdictReport


@command(
    decodes=True,
    example="mstore push origin llama/merged",
    failure="a branch has other commits there, or another error; no ref moved\n"
    "  3  a ref did not pass a check, or a gate that guards it; nothing was sent",
)
def push(
    session: Session,
    checks: Checks,
    name: MaybeRemote = None,
    refs: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Branches and tags, or patterns of them.",
            shell_complete=completion.named,
        ),
    ] = (),
    every: Annotated[bool, Option("--all", help="All branches and tags.")] = False,
    ancestors: Annotated[
        bool,
        Option("--ancestors", help="Also the contents of ancestors, not only their records."),
    ] = False,
    force_with_lease: Annotated[
        bool,
        Option(
            "--force-with-lease",
            help="Replace a branch that has other commits there, if it did not move since this "
            "store last looked.",
        ),
    ] = False,
    delete: Annotated[
        tuple[str, ...],
        Option(
            "--delete",
            metavar="REF",
            help="Remove this ref of the remote. Repeatable.",
            shell_complete=completion.refs_of_remote,
        ),
    ] = (),
    dry_run: Annotated[
        bool,
        Option("--dry-run", "-n", help="Only print what would be sent, and in how many requests."),
    ] = False,
    jobs: Jobs = JOBS,
    limit_rate: LimitRate = None,
) -> None:
    """Send what refs need to a remote, and move its refs.

    Its refs of the same names move at the end, all in one step.

    Blocks and records that the remote has are not sent again. Of ancestors only the records go,
    so that the lineage is known there; the bases of differences go with their contents.

    A branch moves if its place there is an ancestor of its place here. Otherwise nothing moves: get
    the other commits with `mstore fetch`, or replace them with --force-with-lease. Tags do not
    move. An interrupted push goes on when it is run again.

    With --check, nothing is sent unless each of these refs passes the command; see `mstore merge`.
    """
    from mstore.terms.report import fields

    with session.open_to_exchange() as store, session.progress() as tick, resumable():
        remote = remote_for(store, "push", name)
        if delete and refs:
            options = " ".join(f"--delete {one}" for one in (*delete, *refs))
            raise UsageError(
                "--delete takes one name each time, and goes without refs to push",
                hint=f"mstore push {remote} {options}",
            )
        require_names("push", remote, refs)
        by_ref = {} if dry_run else _judged(session, store, refs, checks)
        verdicts = list(chain.from_iterable(by_ref.values()))
        if any(not one.passed for one in verdicts):
            _refuse(session, by_ref)
        report = store.push(
            remote,
            refs,
            every=every,
            ancestors=ancestors,
            force_with_lease=force_with_lease,
            delete=delete,
            dry_run=dry_run,
            jobs=jobs,
            limit_rate=rate_of(limit_rate),
            progress=tick,
        )
        session.settled()

    def human(screen: Screen) -> None:
        _draw_verdicts(screen, by_ref)
        _show(screen, report)

    document = {**fields(report), "verdicts": verdicts}
    session.output.emit(document, ids=[one.name for one in report.moved], human=human)


def _judged(
    session: Session, store: Store, names: Sequence[str], checks: Checks
) -> dict[str, tuple[VerdictReport, ...]]:
    """Run the gates that are asked for on each ref to push, until one does not pass."""
    gates = checks.gates(store)
    found: dict[str, tuple[VerdictReport, ...]] = {}
    for ref in store.refs(*names) if gates else ():
        found[ref.name] = judged(session, store, ref.name, gates, checks)
        if not all(one.passed for one in found[ref.name]):
            break
    return found


def _draw_verdicts(screen: Screen, by_ref: Mapping[str, Sequence[VerdictReport]]) -> None:
    for name, verdicts in by_ref.items():
        draw_verdicts(screen, verdicts, name)


def _refuse(session: Session, by_ref: Mapping[str, Sequence[VerdictReport]]) -> NoReturn:
    def human(screen: Screen) -> None:
        _draw_verdicts(screen, by_ref)
        screen.line("nothing was pushed", style="red")

    verdicts = list(chain.from_iterable(by_ref.values()))
    session.output.emit({"moved": [], "verdicts": verdicts}, ids=[], human=human)
    raise Ended(REFUSED)


def _show(screen: Screen, report: PushReport) -> None:
    if not report.moved and not report.packs:
        screen.line(f"{report.remote} is up to date", style="green")
        return
    done = "would be pushed" if report.dry_run else "pushed"
    screen.line(f"{done} to {report.remote}, {report.url}", style="green")
    show_moved(screen, report.moved)
    screen.fields(
        [
            ("snapshots", report.snapshots or None),
            ("left out", left_out(report.without_contents)),
            ("blocks", report.blocks or None),
            ("size", _sent(report)),
            ("requests", report.requests if report.dry_run else None),
            ("time", format_seconds(report.seconds)),
        ]
    )


def _sent(report: PushReport) -> str | None:
    if not report.packs:
        return None
    return f"{counted(report.packs, 'pack')}, {format_size(report.bytes_sent)}"
