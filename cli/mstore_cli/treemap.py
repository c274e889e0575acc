"""Treemaps: nested rectangles whose areas are sizes.

Uses the squarified layout of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000): it puts
rectangles into rows along the shorter side, and closes a row as soon as one more would make its
worst rectangle narrower.  Pure; `plots` draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class Node(msgspec.Struct, frozen=True):
    """A part: its name, its size, and its subparts, whose sizes add up to its own.

    A part without subparts is a leaf.
    """

    name: str
    size: float
    parts: tuple[Node, ...] = ()


class Box(msgspec.Struct, frozen=True):
    """A rectangle, given by its lower left corner."""

    x: float
    y: float
    width: float
    height: float

    def inside(self, margin: float) -> Box:
        """Return the box without a margin; at least half of each side is left."""
        across, along = min(margin, self.width / 4), min(margin, self.height / 4)
        return Box(
            self.x + across, self.y + along, self.width - 2 * across, self.height - 2 * along
        )


class Placed(msgspec.Struct, frozen=True):
    """A node in its rectangle; `path` are the nodes above it, the outermost first."""

    node: Node
    path: tuple[Node, ...]
    box: Box


def place(node: Node, box: Box, margin: float = 0.0, path: tuple[Node, ...] = ()) -> list[Placed]:
    """Place all nodes, each before its parts; parts keep `margin` from the edge of theirs.

    A node of size zero gets no rectangle.
    """
    found = [Placed(node, path, box)]
    parts = sorted((part for part in node.parts if part.size > 0), key=lambda part: -part.size)
    boxes = squarified([part.size for part in parts], box.inside(margin) if path else box)
    for part, within in zip(parts, boxes, strict=True):
        found += place(part, within, margin, (*path, node))
    return found


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Return a rectangle per size, filling the box; sizes are positive and descending."""
    scale = box.width * box.height / sum(sizes) if sizes else 0.0
    areas = [size * scale for size in sizes]
    found: list[Box] = []
    while areas:
        side = min(box.width, box.height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(
            areas[:count], side
        ):
            count += 1
        row, areas = areas[:count], areas[count:]
        found += _row(row, box)
        box = _rest(sum(row), box)
    return found


def _worst(row: Sequence[float], side: float) -> float:
    """Return the largest aspect ratio among the rectangles of a row."""
    total = sum(row)
    return max(side**2 * row[0] / total**2, total**2 / (side**2 * row[-1]))


def _row(row: Sequence[float], box: Box) -> Iterator[Box]:
    """Return the rectangles of a row along the shorter side of the box."""
    total, at = sum(row), 0.0
    for area in row:
        if box.width >= box.height:
            depth, length = total / box.height, area * box.height / total
            yield Box(box.x, box.y + at, depth, length)
        else:
            depth, length = total / box.width, area * box.width / total
            yield Box(box.x + at, box.y, length, depth)
        at += length


def _rest(taken: float, box: Box) -> Box:
    """Return what a row leaves of the box."""
    if box.width >= box.height:
        depth = min(taken / box.height, box.width)
        return Box(box.x + depth, box.y, box.width - depth, box.height)
    depth = min(taken / box.width, box.height)
    return Box(box.x, box.y + depth, box.width, box.height - depth)
