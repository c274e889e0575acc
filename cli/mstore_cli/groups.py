"""Tables in groups that fit a terminal: a heading, and rows of numbers under it.

Owns the layout of `explain` and `blame`.  Headings stand in full, however long; names in rows are
shortened in the middle where there is no room.  On a terminal that is too narrow for that, or
where two would read alike, they stand in full, and their numbers in the next line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mstore_cli.output import Column, Screen, distinct, printable

WIDTH = 80
"""Of what is no terminal."""
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
    room = (screen.width or WIDTH) - len(INDENT) - sum(len(GAP) + width for width in widths)
    longest = max([len(title) - len(INDENT), *(len(printable(row[0])) for row in rows)])
    name = max(SHORTEST_NAME, min(room, longest))
    shown = [distinct([row[0] for row in group.rows], name) for group in groups]
    widest = max([name, *(len(one) for names in shown for one in names)])
    if screen.width is not None and widest > room:
        _draw_folded(screen, title, columns, groups)
        return
    name = widest

    def cells(values: Sequence[str]) -> str:
        pairs = zip(values, widths, strict=True)
        return "".join(f"{GAP}{value:>{width}}" for value, width in pairs)

    screen.line(f"{title:<{len(INDENT) + name}}{cells(columns)}", style="bold")
    for group, names in zip(groups, shown, strict=True):
        screen.line(_heading(group))
        for row, first in zip(group.rows, names, strict=True):
            screen.line(f"{INDENT}{first:<{name}}{cells(row[1:])}".rstrip())


def _draw_folded(
    screen: Screen, title: str, columns: Sequence[str], groups: Sequence[Group]
) -> None:
    """Each group as a table of its own, whose rows go on in the next line."""
    for number, group in enumerate(groups):
        if number:
            screen.line()
        heading = _heading(group)
        screen.line(f"{title} {heading}" if title else heading, style="bold")
        screen.table(
            [Column("EXPERT"), *(Column(column, right=True) for column in columns)], group.rows
        )


def _heading(group: Group) -> str:
    return f"{group.heading}{GAP}{group.note}" if group.note else group.heading
