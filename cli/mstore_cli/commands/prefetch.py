"""`mstore prefetch`: bring what is only at a lazy remote."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.exchange import rate_of, resumable
from mstore_cli.options import JOBS, Argument, Jobs, LimitRate, Option
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size


@command(
    decodes=True,
    example="mstore prefetch llama/base",
    failure="the remote does not answer, or another error; what came stays",
)
def prefetch(
    session: Session,
    refs: Annotated[
        tuple[str, ...],
        Argument(
            metavar="[REF]...",
            help="Snapshots to bring.",
            shell_complete=completion.named,
        ),
    ] = (),
    every: Annotated[bool, Option("--all", help="All that branches and tags name.")] = False,
    only: Annotated[
        tuple[str, ...],
        Option("--only", metavar="PATTERN", help="Only tensors whose names match; repeatable."),
    ] = (),
    dry_run: Annotated[bool, Option("--dry-run", help="Only say how much would come.")] = False,
    jobs: Jobs = JOBS,
    limit_rate: LimitRate = None,
) -> None:
    """Bring blocks that are only at a lazy remote.

    Then they are read without it. They come into packs of this store and stay, until `mstore drop`.
    What something reads without a prefetch comes too, and is kept in a cache of limited size.
    """
    with session.open() as store, session.progress() as tick, resumable():
        report = store.prefetch(
            refs,
            every=every,
            only=only,
            dry_run=dry_run,
            jobs=jobs,
            limit_rate=rate_of(limit_rate),
            progress=tick,
        )
        session.settled()

    def human(screen: Screen) -> None:
        if not report.blocks:
            screen.line("all of it is here already", style="green")
            return
        what = counted(report.blocks, "block")
        if report.dry_run:
            screen.line(f"would bring {what}, {format_size(report.bytes)}", style="green")
            return
        screen.line(f"brought {what}, {format_size(report.bytes_received)}", style="green")
        screen.fields([("time", format_seconds(report.seconds))])

    session.output.emit(report, ids=list(report.snapshots), human=human)
