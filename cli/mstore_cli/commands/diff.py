"""`mstore diff`: how one snapshot differs from another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mstore_cli.command import command
from mstore_cli.options import Threads
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size

if TYPE_CHECKING:
    from mstore.reports import DiffReport, TensorDiff

FILE_COLUMNS = (
    Column("FILE"),
    Column("STATUS"),
    Column("SIZE A", right=True),
    Column("SIZE B", right=True),
)
TENSOR_COLUMNS = (
    Column("TENSOR"),
    Column("STATUS"),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("BLOCKS CHANGED", right=True),
    Column("RELATIVE L2", right=True),
)


@command(example="mstore diff llama/base llama/math")
def diff(
    session: Session,
    a: Annotated[str, typer.Argument(metavar="A", help="From this.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="To this.", show_default=False)],
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Name the changed blocks of every tensor.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Compare two snapshots: files, tensors, blocks, and how far each tensor moved.

    The distance is ||b - a|| / ||a|| over a whole tensor. Equal files and tensors are counted,
    not listed. The exit status does not say whether they differ.
    """
    with session.open() as store:
        report = store.diff(a, b, blocks=blocks, threads=threads)

    def human(screen: Screen) -> None:
        _draw(screen, report, blocks=blocks)

    names = [*(one.path for one in report.files), *(one.name for one in report.tensors)]
    session.output.emit(report, ids=names, human=human)


def _draw(screen: Screen, report: DiffReport, *, blocks: bool) -> None:
    changed = format_share(report.blocks_changed, report.blocks_total)
    screen.fields(
        [
            ("a", short(report.a)),
            ("b", short(report.b)),
            ("files", f"{len(report.files)} differ, {report.files_equal} equal"),
            ("tensors", f"{len(report.tensors)} differ, {report.tensors_equal} equal"),
            ("blocks", f"{report.blocks_changed} of {report.blocks_total} changed ({changed})"),
        ]
    )
    if report.files:
        screen.line()
    screen.table(
        FILE_COLUMNS,
        (
            (one.path, one.status, format_size(one.size_a), format_size(one.size_b))
            for one in report.files
        ),
    )
    if report.tensors:
        screen.line()
    columns = (*TENSOR_COLUMNS, Column("WHICH")) if blocks else TENSOR_COLUMNS
    screen.table(columns, (_tensor_row(one, blocks=blocks) for one in report.tensors))


def _tensor_row(one: TensorDiff, *, blocks: bool) -> tuple[str, ...]:
    row = (
        one.name,
        one.status,
        one.dtype,
        "x".join(str(length) for length in one.shape) or "scalar",
        f"{one.blocks_changed}/{one.blocks_total}",
        "-" if one.relative_l2 is None else f"{one.relative_l2:.3e}",
    )
    return (*row, spans(one.changed_blocks or ())) if blocks else row


def spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers with runs drawn together: `0-3,7`; `-` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"
