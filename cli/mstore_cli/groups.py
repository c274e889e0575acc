"""Tables in groups that fit a terminal of 80 columns: a heading, and rows of numbers under it.

Owns the layout of `explain` and `blame`.  Headings stand in full, however long; names in rows are
shortened in the middle where there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mstore_cli.output import Screen, elided, printable

WIDTH = 80
INDENT = "  "
GAP = "  "
SHORTEST_NAME = 12


class By(StrEnum):
    """What sums are over."""

    TENSOR = "tensor"
    LAYER = "layer"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Group:
    """A heading, a note behind it, and rows: a name, and a cell for each column of the table."""

    heading: str
    note: str
    rows: tuple[tuple[str, ...], ...]


def draw_groups(
    screen: Screen, title: str, columns: Sequence[str], groups: Sequence[Group]
) -> None:
    """Draw groups under one line of headings.  Nothing at all where there are none."""
    if not groups:
        return
    rows = [row for group in groups for row in group.rows]
    widths = [
        max([len(column), *(len(row[number]) for row in rows)])
        for number, column in enumerate(columns, start=1)
    ]
    room = WIDTH - len(INDENT) - sum(len(GAP) + width for width in widths)
    longest = max([len(title) - len(INDENT), *(len(printable(row[0])) for row in rows)])
    name = max(SHORTEST_NAME, min(room, longest))

    def cells(values: Sequence[str]) -> str:
        pairs = zip(values, widths, strict=True)
        return "".join(f"{GAP}{value:>{width}}" for value, width in pairs)

    screen.line(f"{title:<{len(INDENT) + name}}{cells(columns)}", style="bold")
    for group in groups:
        screen.line(f"{group.heading}{GAP}{group.note}" if group.note else group.heading)
        for row in group.rows:
            screen.line(f"{INDENT}{elided(row[0], name):<{name}}{cells(row[1:])}".rstrip())
