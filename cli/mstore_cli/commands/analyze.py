"""`mstore analyze`: statistics of two snapshots that are stored already."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument, OnlyCompared, Option, SkipCompared, Threads
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size


@command(
    example="mstore analyze llama/math --base llama/base",
    failure="an error; finished statistics are kept",
)
def analyze(
    session: Session,
    expert: Annotated[
        str,
        Argument(metavar="EXPERT", help="The fine-tuned snapshot.", shell_complete=completion.refs),
    ],
    base: Annotated[
        str,
        Option(
            "--base",
            metavar="REF",
            help="The snapshot to compare it with.",
            shell_complete=completion.refs,
        ),
    ],
    only: OnlyCompared = (),
    skip: SkipCompared = (),
    threads: Threads = None,
) -> None:
    """Measure how an expert differs from a base, for merges.

    Plans under a budget need these statistics. `add --base` of a model already computes them; use
    `analyze` for other pairs and for adapters. It measures only what is missing. After an
    interruption the same command continues.
    """
    with session.open() as store, session.progress() as tick:
        report = store.analyze(expert, base, only=only, skip=skip, threads=threads, progress=tick)

    def human(screen: Screen) -> None:
        if report.tensors_measured:
            screen.line(f"analyzed {report.expert} against {report.base}", style="green")
        else:
            screen.line(f"nothing to do: {report.expert} against {report.base} is known")
        measured, known = report.tensors_measured, report.tensors_known
        equal = report.tensors_equal
        screen.fields(
            [
                ("tensors", f"{measured} measured, {known} known, {equal} equal to the base's"),
                ("experts read", format_size(report.expert_bytes_read)),
                ("statistics", format_size(report.statistics_bytes)),
                ("time", format_seconds(report.seconds)),
            ]
        )

    session.output.emit(report, ids=[], human=human)
