"""Files that commands draw besides what they print: pictures as SVG, pages as HTML.

`mstore_pages` draws; here it is written, whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstore.api.reports import DiffReport
    from mstore_pages.markup import Markup
    from mstore_pages.matrix import Matrix

OUTSIDE = "outside"
"""The column of tensors outside of layers."""


def write_svg(path: Path, drawn: Markup) -> None:
    """Write a picture.  Raises StorageFailed."""
    from mstore_pages.figures import svg_file

    write(path, svg_file(drawn))


def write_matrix(path: Path, matrix: Matrix) -> None:
    """Draw a table of numbers and write it.  Raises StorageFailed."""
    from mstore_pages import matrix as pictures

    write_svg(path, pictures.draw(matrix))


def write(path: Path, text: str) -> None:
    """Write a page or a picture.  Raises StorageFailed."""
    from mstore.fs import replace_file

    replace_file(path, text)


def changes(report: DiffReport, title: str) -> Matrix:
    """Parts by layers: how far each differs; of the tensors of one part, the farthest."""
    from mstore.store.objects.shapes import parts_of
    from mstore_pages.figures import growing
    from mstore_pages.matrix import Matrix

    distances = {
        one.name: one.relative_l2 if one.relative_l2 is not None else one.relative_l2_estimate
        for one in report.tensors
    }
    cells: dict[tuple[str, str], float] = {}
    for name, (layer, part) in parts_of(distances).items():
        kind, _, number = layer.rpartition(".")
        where = (f"{kind}.*.{part}", number) if number.isdigit() and part else (name, OUTSIDE)
        distance = distances[name]
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


def shared_path(names: Sequence[str]) -> Path:
    """Return the file that a report of these names is written to, if no other is named."""
    safe = "-".join(
        "".join(one if one.isalnum() or one in "._" else "-" for one in name) for name in names
    )
    return Path(f"mstore-report-{safe[:100]}.html")
