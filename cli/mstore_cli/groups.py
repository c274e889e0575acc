"""Grouped tables that fit a terminal: a heading, and rows of numbers under it.

Owns the layout of `explain` and `blame`.  Headings are never shortened.  Names in rows are
shortened in the middle if space is short.  If a terminal is too narrow for that, or two short names
would be equal, names stay whole, and their numbers go on the next line.  A single group with a
title has its heading above the table: a long one would stand across its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from mstore_cli.output import Column, Screen, distinct, printable

WIDTH = 80
"""The width if the output is not a terminal."""
INDENT = "  "
GAP = "  "
SHORTEST_NAME = 12
EXPERT = "EXPERT"


class By(StrEnum):
    """What sums are over."""

    TENSOR = "tensor"
    LAYER = "layer"
    EXPERT = "expert"


class Group(msgspec.Struct, frozen=True):
    """A heading, a note behind it, and rows: a name, and a cell for each column of the table."""

    heading: str
    note: str
    rows: tuple[tuple[str, ...], ...]


def layer_note(layer: str, note: str) -> str:
    """Return the note behind a layer, with the network block that it is, if it is one."""
    from mstore.models.network_blocks import block_of_layer

    block = block_of_layer(layer)
    return note if block is None else f"{block}, {note}"


def draw_groups(
    screen: Screen, title: str, columns: Sequence[str], groups: Sequence[Group]
) -> None:
    """Draw groups under one line of headings.  Draws nothing if there are none."""
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

    is_one = bool(title) and len(groups) == 1
    if is_one:
        screen.line(f"{title} {_heading(groups[0])}", style="bold")
        title = EXPERT
    screen.line(f"{title:<{len(INDENT) + name}}{cells(columns)}", style="bold")
    for group, names in zip(groups, shown, strict=True):
        if not is_one:
            screen.line(_heading(group))
        for row, first in zip(group.rows, names, strict=True):
            screen.line(f"{INDENT}{first:<{name}}{cells(row[1:])}".rstrip())


def _draw_folded(
    screen: Screen, title: str, columns: Sequence[str], groups: Sequence[Group]
) -> None:
    """Draw each group as its own table, whose rows continue on the next line."""
    for number, group in enumerate(groups):
        if number:
            screen.line()
        heading = _heading(group)
        screen.line(f"{title} {heading}" if title else heading, style="bold")
        screen.table(
            [Column(EXPERT), *(Column(column, right=True) for column in columns)], group.rows
        )


def _heading(group: Group) -> str:
    return f"{group.heading}{GAP}{group.note}" if group.note else group.heading
