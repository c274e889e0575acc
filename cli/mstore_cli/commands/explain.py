"""`mstore explain`: which experts made a merged snapshot, block by block."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli.command import command
from mstore_cli.merging import draw_plan
from mstore_cli.options import Revision
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore.reports import Explanation, TensorExplanation

COLUMNS = (
    Column("TENSOR"),
    Column("TREATMENT"),
    Column("BLOCKS", right=True),
    Column("REUSED", right=True),
    Column("EXPERT", style="green"),
    Column("WEIGHT", right=True),
    Column("READ", right=True),
    Column("= BASE", right=True),
    Column("SHARED", right=True),
    Column("BELOW", right=True),
    Column("OVER BUDGET", right=True),
    Column("LEFT OUT", right=True),
)


@command(example="mstore explain llama/merged model.embed_tokens.weight")
def explain(
    session: Session,
    revision: Revision,
    tensor: Annotated[
        str | None,
        typer.Argument(
            metavar="TENSOR", help="Only this tensor, with every block.", show_default=False
        ),
    ] = None,
) -> None:
    """Say which experts contributed to which blocks, what was left out and why.

    Counts are blocks: read; equal to the base; shared with an expert read before; below the
    method's threshold; over the budget. LEFT OUT is the norm of what the budget left out. A
    snapshot that was added, not merged, has nothing to explain and says so.
    """
    with session.open() as store:
        report = store.explain(revision, tensor)

    def human(screen: Screen) -> None:
        _draw(screen, report, every_block=tensor is not None)

    session.output.emit(report, ids=[one.name for one in report.tensors], human=human)


def _draw(screen: Screen, report: Explanation, *, every_block: bool) -> None:
    if report.plan is None:
        screen.line(f"{short(report.snapshot)} was not merged but made by {report.origin}")
        return
    screen.line(f"{short(report.snapshot)} was merged by plan {short(report.plan.plan)}")
    draw_plan(screen, report.plan)
    screen.line()
    screen.table(COLUMNS, (row for one in report.tensors for row in _rows(one)))
    if every_block:
        for one in report.tensors:
            for share in one.experts:
                if share.blocks is not None:
                    screen.line()
                    screen.line(f"{one.name}, blocks of {share.expert}:")
                    screen.fields(runs(share.blocks))


def _rows(one: TensorExplanation) -> list[tuple[str, ...]]:
    """A row for each expert; what is the tensor's own stands in the first."""
    head = (one.name, one.treatment, str(one.blocks_total), str(one.blocks_reused))
    if not one.experts:
        return [(*head, *("-",) * (len(COLUMNS) - len(head)))]
    return [
        (
            *(("", "", "", "") if place else head),
            share.expert,
            f"{share.weight:g}",
            str(share.blocks_read),
            str(share.blocks_equal_base),
            str(share.blocks_shared),
            str(share.blocks_below_threshold),
            str(share.blocks_over_budget),
            f"{share.omitted_norm:.3g}",
        )
        for place, share in enumerate(one.experts)
    ]


def runs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """What befell each block, neighbours of one fate together: `("0-3", "read")`."""
    found = []
    for word, group in groupby(enumerate(words), key=lambda pair: pair[1]):
        places = [place for place, _word in group]
        first, last = places[0], places[-1]
        found.append((str(first) if first == last else f"{first}-{last}", word))
    return found
