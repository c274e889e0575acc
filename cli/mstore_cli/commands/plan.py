"""`mstore plan`: choose what a merge will read, and what it will cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.merging import (
    Base,
    Budget,
    Dtype,
    Experts,
    MaxError,
    Method,
    NoAnalyze,
    Parameters,
    draw_plan,
    make_request,
    plan_document,
)
from mstore_cli.options import Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session


@command(
    example="mstore plan --base llama/base --expert llama/math --expert llama/code=0.5 "
    "--method ties --param density=0.2 --budget 30%",
    failure="an error; no plan was kept",
)
def plan(
    session: Session,
    base: Base,
    expert: Experts,
    method: Method,
    param: Parameters = None,
    budget: Budget = None,
    max_error: MaxError = None,
    dtype: Dtype = None,
    no_analyze: NoAnalyze = False,
    threads: Threads = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the plan here, as JSON."),
    ] = None,
) -> None:
    """Choose which expert blocks a merge reads, and say what it costs and how far off it can be.

    The plan is kept in the store. The same request gives the same plan.
    """
    request = make_request(
        base=base,
        experts=expert,
        method=method,
        parameters=param or [],
        budget=budget,
        max_error=max_error,
        dtype=dtype,
        no_analyze=no_analyze,
    )
    with session.open() as store:
        with session.progress() as tick:
            report = request.plan(store, threads=threads, progress=tick)
        if output is not None:
            from mstore.fs import replace_text

            replace_text(output, store.export_plan(str(report.plan)))

    def human(screen: Screen) -> None:
        screen.line(f"plan {short(report.plan)}", style="green")
        draw_plan(screen, report)
        if output is not None:
            screen.line(f"written to {output}")
        screen.line(f"next: mstore merge --plan {short(report.plan)} --name REF")

    session.output.emit(plan_document(report, output), ids=[report.plan], human=human)
