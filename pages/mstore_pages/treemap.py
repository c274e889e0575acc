"""Treemaps: nested rectangles whose areas are sizes.

Uses the squarified layout of Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000): it puts
rectangles into rows along the shorter side, and closes a row as soon as one more would make its
worst rectangle narrower.  A label stands in a rectangle only where it has room as a whole; the
number of a part stands for it elsewhere, and the table beside the picture tells whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from mstore_pages.figures import TEXT, hatching, picture, text, width_of
from mstore_pages.markup import Markup, join, tag

WIDTH, HEIGHT = 960.0, 480.0
_HEAD = 22.0
"""Height of a label."""
_INSET = 8.0


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


class Share(msgspec.Struct, frozen=True):
    """One part of a whole that other wholes may share.

    number: of the part, in the table beside the picture.  told: its numbers, for the tooltip.
    """

    number: int
    name: str
    size: str
    only: float
    shared: float
    told: str


def draw(parts: Sequence[Share], title: str) -> Markup:
    """Return a treemap of what parts have alone and what they share, which is hatched."""
    root = Node(
        title,
        sum(one.only + one.shared for one in parts),
        tuple(
            Node(
                str(place),
                one.only + one.shared,
                (Node("only", one.only), Node("shared", one.shared)),
            )
            for place, one in enumerate(parts)
        ),
    )
    drawn: list[Markup] = []
    labels: list[Markup] = []
    for one in place(root, Box(0, 0, WIDTH, HEIGHT), margin=2.0)[1:]:
        if len(one.path) == 2:
            drawn.append(_area(one, parts[int(one.path[1].name)]))
        else:
            labels.append(_label(one.box, parts[int(one.node.name)]))
    keys = [
        tag("rect", x=0, y=HEIGHT + 14, width=18, height=13, class_="only"),
        text(26, HEIGHT + 25, "in this one only"),
        tag("rect", x=170, y=HEIGHT + 14, width=18, height=13, class_="shared"),
        tag("rect", x=170, y=HEIGHT + 14, width=18, height=13, fill="url(#shares)"),
        text(196, HEIGHT + 25, "shared: what n of them share is counted as an n-th in each"),
    ]
    told = "Areas are bytes. The table has the same numbers."
    return picture(WIDTH, HEIGHT + 36, title, told, hatching("shares"), *drawn, *labels, *keys)


def _area(one: Placed, share: Share) -> Markup:
    box = one.box
    place_ = {
        "x": f"{box.x:.1f}",
        "y": f"{box.y:.1f}",
        "width": f"{max(0.5, box.width - 1):.1f}",
        "height": f"{max(0.5, box.height - 1):.1f}",
    }
    is_shared = one.node.name == "shared"
    title = tag("title", share.told)
    area = tag("rect", title, **place_, class_=one.node.name)
    over = tag("rect", title, **place_, fill="url(#shares)") if is_shared else None
    return join([area, over])


def _label(box: Box, share: Share) -> Markup:
    """Return the longest label that a part has room for, on a plate of its own; it may be none."""
    room = box.width - 2 * _INSET - 8
    if box.height < _HEAD + 2 * 3:
        return Markup()
    both = f"{share.name}  {share.size}"
    for label in (both, share.name, str(share.number)):
        wide = width_of(label)
        if wide <= room:
            plate = tag(
                "rect",
                x=f"{box.x + 5:.1f}",
                y=f"{box.y + 5:.1f}",
                width=f"{wide + 10:.1f}",
                height=_HEAD - 4,
                rx=3,
                class_="paper",
            )
            return join([plate, text(box.x + 10, box.y + 5 + TEXT + 1, label, "name")])
    return Markup()
