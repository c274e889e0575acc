"""`mstore blame`: each expert's share of what a merge changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import pictures
from mstore_cli.command import command
from mstore_cli.groups import By, Group, draw_groups, layer_note
from mstore_cli.options import Argument, Option, Revision, Threads, drawing
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_percent, format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import BlameReport, ExpertBlame, LayerBlame, TensorBlame
    from mstore_pages.matrix import Matrix

COLUMNS = ("SHARE", "NORM", "MOVED")


@command(
    example="mstore blame llama/merged --by layer",
)
def blame(
    session: Session,
    revision: Revision,
    tensor: Annotated[str | None, Argument(metavar="TENSOR", help="Only this tensor.")] = None,
    by: Annotated[
        By, Option("--by", help="Shares of each tensor, of each layer, or of the whole.")
    ] = By.TENSOR,
    svg: Annotated[
        Path | None, drawing(help="Also draw the norms by layer and expert as a heat map, as SVG.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Print how much of a merge's change came from which expert.

    The command measures: it reads the blocks of the plan and merges them again, without publishing
    anything. SHARE is the part of the merged delta that an expert contributed (its contribution
    projected on that delta). Shares add up to 100 %; the share of an expert that worked against the
    result is negative. NORM is the norm of the contribution, MOVED the number of elements that it
    changed.
    """
    with session.open() as store, session.progress() as tick:
        report = store.blame(revision, tensor, threads=threads, progress=tick)
    if svg is not None:
        pictures.write_matrix(svg, norms(report, revision))

    def human(screen: Screen) -> None:
        _draw(screen, report, by)
        if svg is not None:
            screen.line(f"drawn in {svg}")

    session.output.emit(report, ids=[one.name for one in report.tensors], human=human)


def norms(report: BlameReport, name: str) -> Matrix:
    """Layers by experts: the norm of each expert's contribution."""
    from mstore_pages.figures import growing
    from mstore_pages.matrix import Matrix

    cells = tuple(tuple(expert.norm for expert in layer.experts) for layer in report.layers)
    return Matrix(
        title=f"{name}: what each expert contributed",
        rows=tuple(layer.name for layer in report.layers),
        columns=tuple(expert.expert for expert in report.experts),
        cells=cells,
        measure="norm of the contribution, in the units of the weights",
        levels=growing((norm for row in cells for norm in row), ".2g"),
        axes=("layer", "expert"),
    )


def _draw(screen: Screen, report: BlameReport, by: By) -> None:
    screen.line(
        f"{short(report.snapshot)} was merged by plan {short(report.plan)} ({report.method})"
    )
    screen.line(
        f"read {format_size(report.expert_bytes_read)} of experts and "
        f"{format_size(report.base_bytes_read)} of the base in {format_seconds(report.seconds)}"
    )
    if report.culprit is not None:
        screen.line(f"a bisection found to blame: {report.culprit}", style="red")
    screen.line()
    ones: Sequence[TensorBlame | LayerBlame] = ()
    if by is By.TENSOR:
        ones = report.tensors
    elif by is By.LAYER:
        ones = report.layers
    told = layer_note if by is By.LAYER else lambda _, aside: aside
    groups = [
        Group(one.name, told(one.name, _aside(one)), _rows(one.experts, one.base_share))
        for one in ones
    ]
    # With a single tensor, the total repeats it.
    if len(report.tensors) != 1 or by is By.EXPERT:
        whole = _rows(report.experts, report.base_share)
        groups.append(Group("all", _aside(report), whole))
    draw_groups(screen, "" if by is By.EXPERT else by.name, COLUMNS, groups)


def _aside(one: TensorBlame | LayerBlame | BlameReport) -> str:
    odd = f", {one.not_finite} not finite" if one.not_finite else ""
    return f"norm {one.norm:.3g}, {one.changed} of {one.elements} elements changed{odd}"


def _rows(experts: Sequence[ExpertBlame], base_share: float | None) -> tuple[tuple[str, ...], ...]:
    rows = [
        (
            f"{one.expert}={one.weight:g}",
            format_percent(one.share),
            f"{one.norm:.3g}",
            str(one.moved),
        )
        for one in experts
    ]
    if base_share:
        rows.append(("(the base, scaled)", format_percent(base_share), "", ""))
    return tuple(rows)
