"""`mstore plan`: choose what a merge will read, and what it will cost."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import pictures
from mstore_cli.command import Mistakes, command
from mstore_cli.errors import UsageError
from mstore_cli.merging import (
    MISTAKEN,
    RECIPE_HINT,
    RECIPES,
    AllowNoop,
    Wanted,
    as_options,
    hinting_at_directories,
    missing_of,
)
from mstore_cli.options import RESULT, Option, Threads, drawing, file_of
from mstore_cli.output import Screen, short
from mstore_cli.plan_output import Link, draw_plan, draw_sweep, plan_document
from mstore_cli.session import Session
from mstore_cli.sizes import counted, parse_rate, parse_seconds

if TYPE_CHECKING:
    from mstore import MergeRequest

HELP = "mstore plan --help"
_LACKS = missing_of("--recipe")


@command(
    example="mstore plan --base llama/base --expert llama/math --expert llama/code=0.5 "
    "--method ties --param density=0.2 --budget 30%",
    failure="an error; no plan was kept",
    mistakes=Mistakes(MISTAKEN, RECIPES, f"mstore plan {RECIPE_HINT}", as_options, _LACKS),
)
def plan(
    session: Session,
    *,
    wanted: Wanted,
    allow_noop: AllowNoop = False,
    threads: Threads = None,
    output: Annotated[
        Path | None,
        Option(
            *("--output", "-o"),
            metavar="FILE",
            help="Also write the plan to FILE, as JSON.",
            type=file_of("json"),
            group=RESULT,
        ),
    ] = None,
    sweep: Annotated[
        bool,
        Option(
            "--sweep", help="Print cost and error at budgets of 5 % to 100 %, instead of one plan."
        ),
    ] = False,
    measure: Annotated[
        bool,
        Option(
            "--measure", help="With --sweep: also measure the real error; reads all experts once."
        ),
    ] = False,
    rate: Annotated[
        str | None,
        Option(
            "--rate",
            metavar="RATE",
            help="With --sweep: also print how long the download of what is not here takes, at so "
            "many bytes a second: 200Mbit, 20MiB.",
        ),
    ] = None,
    latency: Annotated[
        str,
        Option(
            "--latency",
            metavar="TIME",
            help="With --rate: the time from a request to its answer, as 20ms.",
        ),
    ] = "20ms",
    svg: Annotated[Path | None, drawing(help="With --sweep: also draw it to FILE, as SVG.")] = None,
) -> None:
    """Choose what a merge reads, and print its cost and error.

    Give the base, the experts and a method, or a recipe with --recipe. The store keeps
    the plan. If you may only read the store, use -o to write the plan to a file.
    The same request always gives the same plan. With --sweep, no plan is kept: each line describes
    the plan with that budget, and -q prints the bytes that each plan reads from experts.
    """
    if sweep and (wanted.budget is not None or wanted.max_error is not None or output is not None):
        raise UsageError(
            "--sweep goes over budgets itself; leave out --budget, --max-error and -o", hint=HELP
        )
    if not sweep and (measure or svg is not None or rate is not None):
        raise UsageError("--measure, --rate and --svg belong to --sweep", hint=HELP)
    link = None
    if rate is not None:
        trip = parse_seconds(latency, option="--latency")
        link = Link(parse_rate(rate, option="--rate"), trip)
    wanted.require(_LACKS, HELP)
    request = wanted.limits()
    if len(wanted.steps()) > 1:
        raise UsageError(
            "the file has several recipes, and a later one may need the merge of an earlier one",
            hint=f"mstore merge --recipe {shlex.quote(wanted.recipe or 'FILE')} --name REF",
        )
    if sweep:
        _sweep(session, wanted, request, measure=measure, svg=svg, link=link, threads=threads)
        return
    with session.open() as store:
        request = wanted.request(session, store, request)
        with session.planning(store) as tick, hinting_at_directories(request):
            report = store.plan(request, allow_noop=allow_noop, threads=threads, progress=tick)
        if output is not None:
            from mstore.fs import replace_file

            replace_file(output, store.export_plan(str(report.plan)))

    def human(screen: Screen) -> None:
        screen.line(f"plan {short(report.plan)}", style="green")
        draw_plan(screen, report)
        if output is not None:
            screen.line(f"written to {output}")
        if report.kept:
            screen.command("next", f"mstore merge --plan {short(report.plan)} --name REF")
        elif output is None:
            screen.command("to hand it to whoever may write", "mstore plan ... -o plan.json")

    session.output.emit(plan_document(report, output), ids=[report.plan], human=human)
    session.warn_if_quiet(warning.text for warning in report.warnings)


def _sweep(
    session: Session,
    wanted: Wanted,
    request: MergeRequest,
    *,
    measure: bool,
    svg: Path | None,
    link: Link | None,
    threads: int | None,
) -> None:
    with session.open() as store:
        request = wanted.request(session, store, request)
        with session.planning(store) as tick, hinting_at_directories(request):
            report = store.sweep(request, measure=measure, threads=threads, progress=tick)
    if svg is not None:
        from mstore_pages import curve
        from mstore_pages.curve import BudgetPoint

        points = [
            BudgetPoint(
                point.planned_expert_bytes,
                point.error_bound,
                point.error_estimate,
                point.measured_error,
            )
            for point in report.points
        ]
        title = f"{report.method} of {counted(len(report.experts), 'expert')} into {report.base}"
        pictures.write_svg(svg, curve.draw(points, title))

    def human(screen: Screen) -> None:
        draw_sweep(screen, report, link)
        if svg is not None:
            screen.line(f"drawn in {svg}")

    session.output.emit(
        report, ids=[point.planned_expert_bytes for point in report.points], human=human
    )
