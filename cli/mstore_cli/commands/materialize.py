"""`mstore materialize`: compute all of a virtual merge and store it."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.merging import (
    AllowNonfinite,
    Cluster,
    ClusterPush,
    ClusterRemote,
    workers_told,
)
from mstore_cli.options import Argument, Message, Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size


@command(
    example="mstore materialize llama/merged",
    failure="an error; the branch stays where it is\n"
    "  3  a gate guards the branch, and a new snapshot is not judged yet",
)
def materialize(
    session: Session,
    branch: Annotated[
        str,
        Argument(
            metavar="REF",
            help="A branch that holds a virtual merge.",
            shell_complete=completion.refs,
        ),
    ],
    allow_nonfinite: AllowNonfinite = False,
    cluster: Cluster = None,
    remote: ClusterRemote = None,
    push: ClusterPush = False,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Compute a virtual merge and store the result.

    The branch moves to the result. The content equals that of a merge without --virtual. If the
    branch already holds stored bytes, nothing changes.
    """
    from mstore.merge.planning.warnings import not_finite_text

    with session.open() as store, session.progress() as tick:
        report = store.materialize(
            branch,
            message=message,
            allow_nonfinite=allow_nonfinite,
            threads=threads,
            cluster=cluster,
            remote=remote,
            push=push,
            progress=tick,
        )
        session.settled()

    odd = [not_finite_text(report.not_finite)] if report.not_finite else []

    def human(screen: Screen) -> None:
        if not report.new_snapshot:
            screen.line(f"nothing to do: {report.name} is stored already")
            return
        screen.line(f"materialized {report.name} {short(report.snapshot)}", style="green")
        if report.pushed_to is not None:
            screen.line(f"{report.pushed_to} has it as {report.name}")
        screen.fields(
            [
                ("plan", short(report.plan)),
                ("manifest", short(report.manifest)),
                ("experts read", format_size(report.expert_bytes_read)),
                ("base read", format_size(report.base_bytes_read)),
                ("workers", workers_told(report.workers)),
                ("written", format_size(report.bytes_written)),
                ("blocks", f"{report.blocks_total}: {report.blocks_reused} reused"),
                ("time", format_seconds(report.seconds)),
            ]
        )
        for text in odd:
            screen.line(f"warning: {text}", style="yellow")
        if report.pushed_to is not None:
            screen.command("to have it here", f"mstore pull {report.pushed_to} {report.name}")

    session.output.emit(report, ids=[report.snapshot], human=human)
    session.warn_if_quiet(odd)
