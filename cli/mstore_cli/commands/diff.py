"""`mstore diff`: how one snapshot differs from another, or a directory from a snapshot."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore.terms.phrases import few
from mstore_cli import completion, pictures
from mstore_cli.command import command
from mstore_cli.errors import UsageError, remarks
from mstore_cli.options import Argument, Exclude, NoDefaultExcludes, Option, Threads, drawing
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import DiffReport, DirectoryDiffReport, FileDiff, TensorDiff
    from mstore_pages.matrix import Matrix

SHOWN = 3
OUTSIDE = "outside"
"""The column of tensors outside of layers, in a picture."""
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


@command(
    decodes=True, example="mstore diff llama/base llama/math\n  mstore diff llama/math ./llama-math"
)
def diff(
    session: Session,
    a: Annotated[
        str,
        Argument(
            metavar="A",
            help="From this snapshot, or from one model of it (REF:MODEL).",
            shell_complete=completion.refs,
        ),
    ],
    b: Annotated[
        str,
        Argument(
            metavar="B",
            help="To this snapshot or model; or to this directory or file, where no snapshot has "
            "the name or it begins with / or ./.",
            shell_complete=completion.refs,
        ),
    ],
    blocks: Annotated[
        bool, Option("--blocks", help="Name the changed blocks of every tensor.")
    ] = False,
    exact: Annotated[
        bool, Option("--exact", help="Read the blocks of both for exact distances.")
    ] = False,
    exclude: Exclude = (),
    no_default_excludes: NoDefaultExcludes = False,
    svg: Annotated[
        Path | None,
        drawing(help="Of two snapshots: also draw distances by layer and part, as SVG."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Compare two snapshots, or a snapshot with a directory.

    The command compares files, tensors and blocks. For two snapshots, it prints how far each tensor
    moved: ||b - a|| / ||a|| over the whole tensor. Statistics tell that where A is the base of B;
    no block is read. Where both were added with one base, statistics give an estimate (~) and
    its bounds. Otherwise blocks are read. Equal files and tensors are counted, not listed. The exit
    status does not depend on whether they differ.

    A directory is read as `mstore add` reads it, with the same exclude patterns. Every byte is
    hashed and nothing is written. With REF:MODEL, the files of the model's directory are compared.
    "removed" marks what the directory lacks, "added" what only the directory has.
    """
    with session.open() as store, session.progress() as tick:
        _require_snapshot_first(store, a, b)
        directory = _directory(store, b)
        if directory is None:
            if exclude or no_default_excludes:
                raise UsageError(
                    "--exclude and --no-default-excludes are for a directory, and "
                    f"{b} is a snapshot",
                    hint=f"mstore diff {shlex.quote(a)} {shlex.quote(f'./{b}')} --exclude PATTERN",
                )
            report = store.diff(a, b, blocks=blocks, exact=exact, threads=threads)
        else:
            if exact or svg is not None:
                option = "--exact" if exact else "--svg"
                raise UsageError(
                    f"{option} is for two snapshots, and {b} is a directory",
                    hint=f"mstore diff {shlex.quote(a)} {shlex.quote(b)}",
                )
            found = store.diff_directory(
                a,
                directory,
                exclude=exclude,
                default_excludes=not no_default_excludes,
                blocks=blocks,
                threads=threads,
                progress=tick,
            )

    if directory is not None:
        names = [*(one.path for one in found.files), *(one.name for one in found.tensors)]
        session.output.emit(
            found, ids=names, human=lambda screen: _draw_directory(screen, found, blocks=blocks)
        )
        return

    if svg is not None:
        pictures.write_matrix(svg, distances(report, f"{a} to {b}"))

    def human(screen: Screen) -> None:
        _draw(screen, report, blocks=blocks)
        if svg is not None:
            screen.line(f"drawn in {svg}")
        odd = [one.name for one in report.tensors if one.not_finite]
        if odd:
            screen.line()
            screen.line(f"remark: infinite or NaN elements in {few(odd)}")
        if any(one.relative_l2_bounds is not None for one in report.tensors):
            screen.line()
            again = shlex.join(["mstore", "diff", a, b, "--exact"])
            screen.command("~ is an estimate from statistics; exact", again)

    names = [*(one.path for one in report.files), *(one.name for one in report.tensors)]
    session.output.emit(report, ids=names, human=human)


def distances(report: DiffReport, title: str) -> Matrix:
    """Parts by layers: how far each differs; of the tensors of one part, the farthest."""
    from mstore.store.objects.shapes import parts_of
    from mstore_pages.figures import growing
    from mstore_pages.matrix import Matrix

    known = {
        one.name: one.relative_l2 if one.relative_l2 is not None else one.relative_l2_estimate
        for one in report.tensors
    }
    cells: dict[tuple[str, str], float] = {}
    for name, (layer, part) in parts_of(known).items():
        kind, _, number = layer.rpartition(".")
        where = (f"{kind}.*.{part}", number) if number.isdigit() and part else (name, OUTSIDE)
        distance = known[name]
        if distance is not None:
            cells[where] = max(distance, cells.get(where, 0.0))
    numbers = {number for _, number in cells}
    columns = sorted(numbers, key=lambda one: (one != OUTSIDE, len(one), one))
    rows = list(dict.fromkeys(part for part, _ in cells))
    return Matrix(
        title=title,
        rows=tuple(rows),
        columns=tuple(columns),
        cells=tuple(tuple(cells.get((row, column)) for column in columns) for row in rows),
        measure="norm of the difference, relative to the norm of the first",
        levels=growing(cells.values()),
        axes=("part", "layer"),
        unknown="equal, or not known",
    )


def _require_snapshot_first(store: Store, a: str, b: str) -> None:
    """Raise UsageError if A can only be a path."""
    if not (_is_path(a) or (os.path.lexists(a) and not _is_snapshot(store, a))):
        return
    path = a if _is_path(a) else f"./{a}"
    revision = shlex.quote(b) if _is_snapshot(store, b) else "REF"
    raise UsageError(
        f"{a} is a path, and the snapshot comes first",
        hint=f"mstore diff {revision} {shlex.quote(path)}",
    )


def _is_path(name: str) -> bool:
    """Return whether a name starts or ends as only paths do."""
    return name in (".", "..") or name.startswith(("/", "./", "../")) or name.endswith("/")


def _is_snapshot(store: Store, name: str) -> bool:
    from mstore.terms.errors import BadName, NotFound

    try:
        store[_snapshot(name)]
    except (BadName, NotFound):
        return False
    return True


def _snapshot(name: str) -> str:
    """Return REF of REF:MODEL."""
    return name.partition(":")[0]


def _directory(store: Store, name: str) -> Path | None:
    """Return the directory that a name means; None if it means a snapshot.

    A name that can only be a path is one.  Otherwise a snapshot takes precedence, and a remark
    mentions a directory of the same name.
    """
    from mstore.terms.errors import BadName, NotFound

    path = Path(name)
    if _is_path(name):
        return path
    there = os.path.lexists(path)
    try:
        store[_snapshot(name)]
    except (BadName, NotFound):
        if there:
            return path
        raise
    if there:
        remarks([f"{name} is taken as the snapshot; the directory is ./{name}"])
    return None


def _draw_directory(screen: Screen, report: DirectoryDiffReport, *, blocks: bool) -> None:
    if not report.files and not report.tensors:
        screen.line(f"{report.directory} is what {short(report.snapshot)} holds", style="green")
    changed = format_share(report.blocks_changed, report.blocks_total)
    screen.fields(
        [
            ("snapshot", short(report.snapshot)),
            ("directory", report.directory),
            ("files", f"{len(report.files)} differ, {report.files_equal} equal"),
            ("tensors", f"{len(report.tensors)} differ, {report.tensors_equal} equal"),
            ("blocks", f"{report.blocks_changed} of {report.blocks_total} changed ({changed})"),
            ("no part", ", ".join(report.excluded) or None),
        ]
    )
    _tables(screen, report.files, report.tensors, blocks=blocks, moved=False)
    for remark in report.remarks:
        screen.line(f"remark: {screen.typed(remark)}")


def _draw(screen: Screen, report: DiffReport, *, blocks: bool) -> None:
    changed = format_share(report.blocks_changed, report.blocks_total)
    # Of one model no files are compared.
    some = report.files or report.files_equal
    files = f"{len(report.files)} differ, {report.files_equal} equal" if some else None
    screen.fields(
        [
            ("a", short(report.a)),
            ("b", short(report.b)),
            ("files", files),
            ("tensors", f"{len(report.tensors)} differ, {report.tensors_equal} equal"),
            ("blocks", f"{report.blocks_changed} of {report.blocks_total} changed ({changed})"),
        ]
    )
    _tables(screen, report.files, report.tensors, blocks=blocks, moved=True)


def _tables(
    screen: Screen,
    files: Sequence[FileDiff],
    tensors: Sequence[TensorDiff],
    *,
    blocks: bool,
    moved: bool,
) -> None:
    if files:
        screen.line()
    screen.table(
        FILE_COLUMNS,
        ((one.path, one.status, format_size(one.size_a), format_size(one.size_b)) for one in files),
    )
    if tensors:
        screen.line()
    columns = TENSOR_COLUMNS if moved else TENSOR_COLUMNS[:-1]
    columns = (*columns, Column("WHICH")) if blocks else columns
    screen.table(columns, (_tensor_row(one, blocks=blocks, moved=moved) for one in tensors))


def _tensor_row(one: TensorDiff, *, blocks: bool, moved: bool) -> tuple[str, ...]:
    row: tuple[str, ...] = (
        one.name,
        one.status,
        _both(one.dtype_a, one.dtype),
        _both(_shape(one.shape_a), _shape(one.shape)),
        f"{one.blocks_changed}/{one.blocks_total}",
    )
    if moved:
        row = (*row, _moved(one))
    return (*row, spans(one.changed_blocks or ())) if blocks else row


def _moved(one: TensorDiff) -> str:
    if one.relative_l2_bounds is not None:
        low, high = one.relative_l2_bounds
        return f"~{one.relative_l2_estimate:.1e} ({low:.1e} to {high:.1e})"
    return "-" if one.relative_l2 is None else f"{one.relative_l2:.3e}"


def _both(a: str | None, b: str | None) -> str:
    """Format a value of both sides, or both values if they differ: `BF16>F16`."""
    sides = dict.fromkeys(one for one in (a, b) if one is not None)
    return ">".join(sides)


def _shape(lengths: tuple[int, ...] | None) -> str | None:
    return None if lengths is None else "x".join(str(one) for one in lengths) or "scalar"


def spans(numbers: tuple[int, ...]) -> str:
    """Format ascending numbers with runs joined: `0-3,7`; `-` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"
