"""`mstore compare`: how far models moved from their common base, and in which directions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion, pictures
from mstore_cli.command import command
from mstore_cli.groups import Group, draw_groups
from mstore_cli.merging import with_patterns
from mstore_cli.options import Argument, OnlyCompared, Option, SkipCompared, Threads, drawing
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_percent, format_size

if TYPE_CHECKING:
    from mstore.api.reports import ComparedPair, ComparedPart, CompareReport
    from mstore_pages.matrix import Matrix


class By(StrEnum):
    """What is compared."""

    TENSOR = "tensor"
    PART = "part"
    LAYER = "layer"
    MODEL = "model"


@command(example="mstore compare llama/math llama/code llama/chat")
def compare(
    session: Session,
    models: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF[:MODEL]",
            help="The models; 'runs/*' means all refs that match.",
            shell_complete=completion.refs,
        ),
    ],
    base: Annotated[
        str | None,
        Option(
            "--base",
            metavar="REF[:MODEL]",
            help="The model that they were made from [default: the nearest one that the lineage of "
            "all of them names].",
            shell_complete=completion.refs,
        ),
    ] = None,
    by: Annotated[
        By,
        Option(
            "--by",
            help="Compare each tensor, each part of a layer, each layer, or whole models.",
        ),
    ] = By.LAYER,
    only: OnlyCompared = (),
    skip: SkipCompared = (),
    exact: Annotated[
        bool, Option("--exact", help="Read blocks where statistics only estimate a cosine.")
    ] = False,
    svg: Annotated[
        Path | None, drawing(help="Also draw the cosines of whole models as a matrix, as SVG.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Print how far models moved from a base, and how alike.

    CHANGE is the norm of the difference from the base, relative to the norm of the base. EQUAL is
    the share of blocks that are the base's. COS is the cosine of two changes: 1 in one direction, 0
    nothing in common, -1 opposite; the number after it is that of the other model. Statistics tell
    these, or estimate cosines (~). Blocks are read only of models that have no statistics, or with
    --exact; what was measured is kept.
    """
    with session.open() as store, session.progress() as tick:
        chosen = with_patterns(store, [(one, 1.0) for one in models], *([base] if base else []))
        report = store.compare(
            *(name for name, _ in chosen),
            base=base,
            by=str(by),
            only=only,
            skip=skip,
            exact=exact,
            threads=threads,
            progress=tick,
        )
    if svg is not None:
        pictures.write_matrix(svg, cosines(report))

    def human(screen: Screen) -> None:
        number = counted(len(report.models), "model")
        screen.line(f"{number} and the base {report.base}, {counted(report.tensors, 'tensor')}")
        screen.line()
        draw_parts(screen, (*report.parts, report.whole), "" if by is By.MODEL else by.name)
        if any(pair.deviation for pair in report.whole.pairs):
            screen.line("   --exact reads the blocks and tells it")
        if report.bytes_read:
            screen.line(f"read {format_size(report.bytes_read)} of models without statistics")
        for remark in report.remarks:
            screen.line(f"remark: {screen.typed(remark)}")
        if svg is not None:
            screen.line(f"drawn in {svg}")

    session.output.emit(report, ids=report.models, human=human)


def draw_parts(screen: Screen, parts: tuple[ComparedPart, ...], title: str = "") -> None:
    """Print changes and cosines: a group of lines for each part, the whole last."""
    models = parts[-1].models
    columns = ("CHANGE", "EQUAL", *(f"COS {n}" for n in range(1, len(models))))
    draw_groups(
        screen, title, columns, [Group(part.name or "all", "", _rows(part)) for part in parts]
    )
    deviations = [pair.deviation for pair in parts[-1].pairs if pair.deviation]
    if deviations:
        screen.line(
            f"~: an estimate from statistics, whose standard deviation is {max(deviations):.2g} at "
            "most for whole models"
        )


def _rows(part: ComparedPart) -> tuple[tuple[str, ...], ...]:
    cosines = {(pair.a, pair.b): _cosine(pair) for pair in part.pairs}
    rows = []
    for k, one in enumerate(part.models):
        earlier = [cosines[other.model, one.model] for other in part.models[:k]]
        rest = [""] * (len(part.models) - 1 - len(earlier))
        change = "unknown" if one.change is None else format_percent(one.change, ".3g")
        name = f"{k + 1} {one.model}"
        rows.append((name, change, format_percent(one.equal_blocks, ".0f"), *earlier, *rest))
    return tuple(rows)


def _cosine(pair: ComparedPair) -> str:
    if pair.cosine is None:
        return "-"
    return f"{'~' if pair.deviation else ''}{pair.cosine:.2f}"


def cosines(report: CompareReport) -> Matrix:
    """Models by models: the cosine of their changes."""
    from mstore_pages.figures import COSINES
    from mstore_pages.matrix import Matrix

    known = {frozenset((pair.a, pair.b)): pair.cosine for pair in report.whole.pairs}
    return Matrix(
        title=f"changes of {report.base}",
        rows=report.models,
        columns=report.models,
        cells=tuple(
            tuple(1.0 if a == b else known[frozenset((a, b))] for b in report.models)
            for a in report.models
        ),
        measure="cosine of two changes",
        levels=COSINES,
        axes=("model", "model"),
    )
