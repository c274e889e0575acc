"""A table of numbers as a picture: a coloured cell each, with its number where there is room."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mstore_pages.figures import (
    TEXT,
    Levels,
    hatching,
    legend,
    picture,
    text,
    width_of,
)
from mstore_pages.markup import Markup, join, tag

CELL = 22.0
WIDE = 46.0
"""Width of a cell that shows its number."""
NUMBERS = 400
"""At most this many cells show numbers."""
_DARK = frozenset({"h5", "h6", "h7", "h8", "n4"})
_LEGEND_ROW = 20.0
_PADDING = 16.0


class Matrix(msgspec.Struct, frozen=True):
    """`cells[row][column]`: a number, None if unknown, which is drawn hatched.

    axes: what rows and columns are.  measure: what the numbers are, with their unit.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    measure: str
    levels: Levels
    axes: tuple[str, str]
    unknown: str = "not known"


def draw(matrix: Matrix) -> Markup:
    """Return the picture: names of columns stand upright above them, the scale lies below."""
    told = f"{matrix.measure}; rows: {matrix.axes[0]}, columns: {matrix.axes[1]}"
    has_numbers = len(matrix.rows) * len(matrix.columns) <= NUMBERS
    across = WIDE if has_numbers else CELL
    left = _PADDING + max((width_of(one) for one in matrix.rows), default=0.0) + 10
    rise = max((width_of(one) for one in matrix.columns), default=0.0) + 12
    top = 64 + rise
    right = left + across * len(matrix.columns)
    scale = legend(matrix.levels)
    has_unknown = any(cell is None for row in matrix.cells for cell in row)
    entries = [*scale, *([("unknown", matrix.unknown)] if has_unknown else [])]
    bottom = top + CELL * len(matrix.rows)
    per_row, step = _columns(entries, max(right, 640.0) - 2 * _PADDING)
    rows = -(-len(entries) // per_row)
    width = max(
        right + _PADDING,
        _PADDING * 2 + width_of(matrix.title, 14, mono=False),
        _PADDING * 2 + width_of(told, mono=False),
        _PADDING * 2 + step * min(per_row, len(entries)),
    )
    height = bottom + 24 + rows * _LEGEND_ROW + 8
    return picture(
        width,
        height,
        matrix.title,
        told,
        hatching("unknown") if has_unknown else None,
        text(_PADDING, 24, matrix.title, "big"),
        text(_PADDING, 44, told, "quiet"),
        *(_column(left + across * (n + 0.5), top - 6, one) for n, one in enumerate(matrix.columns)),
        *(
            text(left - 10, top + CELL * (n + 0.5) + 4, one, "name end")
            for n, one in enumerate(matrix.rows)
        ),
        *(
            _cell(matrix, n, k, (left + across * k, top + CELL * n, across), has_numbers)
            for n in range(len(matrix.rows))
            for k in range(len(matrix.columns))
        ),
        *(
            _entry(
                entry,
                _PADDING + step * (n % per_row),
                bottom + 24 + _LEGEND_ROW * (n // per_row),
            )
            for n, entry in enumerate(entries)
        ),
    )


def _column(x: float, y: float, name: str) -> Markup:
    return text(x + 4, y, name, "name", transform=f"rotate(-90 {x + 4:.1f} {y:.1f})")


def _cell(
    matrix: Matrix, row: int, column: int, at: tuple[float, float, float], has_number: bool
) -> Markup:
    x, y, across = at
    value = matrix.cells[row][column]
    name = matrix.levels.class_of(value)
    told = matrix.unknown if name is None else matrix.levels.told(value)
    label = f"{matrix.rows[row]}, {matrix.columns[column]}: {told}"
    fill = {"class_": name} if name else {"fill": "url(#unknown)"}
    parts = [
        tag(
            "rect",
            tag("title", label),
            x=f"{x:.0f}",
            y=f"{y:.0f}",
            width=f"{across - 1:.0f}",
            height=f"{CELL - 1:.0f}",
            **fill,
        )
    ]
    if has_number and name:
        ink = "on-dark" if name in _DARK else "on-light"
        short = matrix.levels.short(value or 0.0)
        parts.append(text(x + across / 2, y + CELL / 2 + 4, short, f"middle {ink}"))
    return join(parts)


def _columns(entries: Sequence[tuple[str, str]], room: float) -> tuple[int, float]:
    """Return how many entries of the legend stand in a row, and how far apart."""
    step = max(width_of(told, TEXT, mono=False) for _, told in entries) + 36
    return max(1, int(room // step)), step


def _entry(entry: tuple[str, str], x: float, y: float) -> Markup:
    name, told = entry
    fill = {"fill": "url(#unknown)"} if name == "unknown" else {"class_": name}
    swatch = tag("rect", x=f"{x:.0f}", y=f"{y - 11:.0f}", width=18, height=13, **fill)
    return join([swatch, text(x + 24, y, told)])
