"""The lineage as a picture: parents on the left, what was made from them on the right.

Snapshots stand in columns by the longest way to them, in an order with few crossings (barycentres,
as Sugiyama, Tagawa and Toda 1981); an edge over several columns keeps a lane in each between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from mstore.terms.sizes import counted
from mstore_pages.figures import TEXT, picture, text, width_of
from mstore_pages.markup import Markup, join, tag

if TYPE_CHECKING:
    from mstore.api.reports import PlanReport, SignatureReport, SnapshotReport

ROLES = ("base", "expert", "previous", "companion")
NAMES_SHOWN = 3
MANY = 10
"""Of more snapshots, the details of each stand on one line."""
_GAP, _ACROSS, _LINE, _PADDING, _INSIDE = 12.0, 72.0, 17.0, 16.0, 10.0
_LANE = 6.0
_SWEEPS = 8


class Node(msgspec.Struct, frozen=True):
    """A snapshot: its names, details below them, and its parents by role."""

    key: str
    names: tuple[str, ...]
    details: tuple[str, ...]
    parents: tuple[tuple[str, str], ...]
    """pairs of role and key"""
    is_chosen: bool = False

    @property
    def width(self) -> float:
        """Return the width of its box, in which every line has room."""
        names = max(width_of(one) * 1.04 for one in self.names)
        details = max((width_of(one, mono=False) for one in self.details), default=0.0)
        return max(names, details) + 2 * _INSIDE

    @property
    def height(self) -> float:
        """Return the height of its box."""
        return _LINE * (len(self.names) + len(self.details)) + 12


def node_of(snapshot: SnapshotReport, licence: str | None = None, *, is_chosen: bool) -> Node:
    """Return a snapshot as it is drawn."""
    names = list(snapshot.refs[:NAMES_SHOWN])
    if len(snapshot.refs) > NAMES_SHOWN:
        names.append(f"and {len(snapshot.refs) - NAMES_SHOWN} more names")
    details = [how(snapshot) if not names else f"{how(snapshot)}, {snapshot.snapshot.short}"]
    if snapshot.origin:
        details.append(f"from {snapshot.origin.url}")
    if licence:
        details.append(f"licence {licence}")
    if snapshot.author:
        details.append(f"by {snapshot.author}")
    if snapshot.signatures:
        details.append(f"signed: {signed(snapshot.signatures)}")
    return Node(
        key=str(snapshot.snapshot),
        names=tuple(names) or (snapshot.snapshot.short,),
        details=tuple(details),
        parents=tuple((one.role, str(one.snapshot)) for one in snapshot.parents),
        is_chosen=is_chosen,
    )


def how(snapshot: SnapshotReport) -> str:
    """Return how a snapshot came to be, in a few words."""
    if snapshot.missing:
        return "missing"
    if snapshot.method is None:
        return snapshot.made
    kind = "virtual merge" if snapshot.virtual else "merge"
    return f"{kind} by {snapshot.method}"


def told_assembly(plan: PlanReport) -> str:
    """Return what a plan makes of tensors as they are, as a sentence."""
    models = counted(len(plan.experts) + 1, "model")
    if plan.layers:
        return f"A stack of layers of {models}, as they are."
    if plan.experts:
        return f"A mixture of {counted(len(plan.experts), 'expert')} with the rest of {plan.base}."
    return f"An expert of {plan.base}, as a dense model."


def signed(signatures: Sequence[SignatureReport]) -> str:
    """Return the states of signatures, with the names of trusted signers."""
    told = (f"{one.state} ({one.signer})" if one.signer else one.state for one in signatures)
    return ", ".join(dict.fromkeys(told))


class _Slot(msgspec.Struct):
    """A place in a column: of a node, or of an edge that passes."""

    key: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def draw(nodes: Sequence[Node], title: str = "Lineage") -> Markup:
    """Return the picture of these snapshots; parents that are not among them are left out."""
    if len(nodes) > MANY:
        # Each on two lines: who sees many looks for names.
        nodes = [replace(node, details=(", ".join(node.details),)) for node in nodes]
    by_key = {node.key: node for node in nodes}
    columns, ways = _placed(by_key)
    slots = {slot.key: slot for column in columns for slot in column}
    right = max((slot.x + slot.width for slot in slots.values()), default=0.0) + _PADDING
    bottom = max((slot.y + slot.height for slot in slots.values()), default=0.0)
    used = [role for role in ROLES if any(way[0] == role for way in ways)]
    keys, room = _keys(used, bottom + 30)
    return picture(
        max(right, room),
        bottom + (46 if used else _PADDING),
        title,
        "Snapshots and what each was made from. The table below has the same.",
        *(_edge(role, [slots[key] for key in way]) for role, way in ways),
        *(_box(node, slots[node.key]) for node in nodes),
        *keys,
    )


def _placed(nodes: dict[str, Node]) -> tuple[list[list[_Slot]], list[tuple[str, list[str]]]]:
    """Return the columns with all places, and each edge as its role and the places on its way."""
    ranks = _ranks(nodes)
    columns: list[list[str]] = [[] for _ in range(max(ranks.values(), default=-1) + 1)]
    sizes: dict[str, tuple[float, float]] = {}
    for key, node in nodes.items():
        columns[ranks[key]].append(key)
        sizes[key] = node.width, node.height
    ways: list[tuple[str, list[str]]] = []
    for key, node in nodes.items():
        for number, (role, parent) in enumerate(node.parents):
            if parent not in nodes or parent == key:
                continue
            lanes = []
            for rank in range(ranks[parent] + 1, ranks[key]):
                lane = f"{key}/{number}/{rank}"
                columns[rank].append(lane)
                sizes[lane] = 0.0, _LANE
                lanes.append(lane)
            ways.append((role, [parent, *lanes, key]))
    _order(columns, ways)
    return _stacked(columns, sizes), ways


def _ranks(nodes: dict[str, Node]) -> dict[str, int]:
    """Return the length of the longest way to each node, without recursion."""
    ranks: dict[str, int] = {}
    waiting = list(nodes)
    on_way: set[str] = set()
    while waiting:
        key = waiting[-1]
        parents = [parent for _, parent in nodes[key].parents if parent in nodes and parent != key]
        later = [one for one in parents if one not in ranks and one not in on_way]
        if later:
            on_way.add(key)
            waiting += later
            continue
        waiting.pop()
        if key not in ranks:
            ranks[key] = 1 + max((ranks.get(one, -1) for one in parents), default=-1)
    return ranks


def _order(columns: list[list[str]], ways: Sequence[tuple[str, list[str]]]) -> None:
    """Sort each column by where its neighbours stand, forth and back."""
    left, right = defaultdict(list), defaultdict(list)
    for _, way in ways:
        for one, other in pairwise(way):
            left[other].append(one)
            right[one].append(other)
    for sweep in range(_SWEEPS):
        neighbours = left if sweep % 2 == 0 else right
        for column in columns if sweep % 2 == 0 else reversed(columns):
            at = {key: place / max(1, len(one)) for one in columns for place, key in enumerate(one)}
            weight = {
                key: sum(at[one] for one in neighbours[key]) / len(neighbours[key])
                if neighbours[key]
                else at[key]
                for key in column
            }
            column.sort(key=lambda key: weight[key])


def _stacked(
    columns: Sequence[Sequence[str]], sizes: dict[str, tuple[float, float]]
) -> list[list[_Slot]]:
    placed = [[_Slot(key, *sizes[key]) for key in column] for column in columns]
    tall = [sum(slot.height + _GAP for slot in column) - _GAP for column in placed]
    x = _PADDING
    for column, height in zip(placed, tall, strict=True):
        width = max(slot.width for slot in column)
        y = _PADDING + (max(tall) - height) / 2
        for slot in column:
            slot.x, slot.y, slot.width = x, y, slot.width or width
            y += slot.height + _GAP
        x += width + _ACROSS
    return placed


def _edge(role: str, way: Sequence[_Slot]) -> Markup:
    drawn = [f"M{way[0].x + way[0].width:.1f} {way[0].middle:.1f}"]
    for one, other in pairwise(way):
        x, y = one.x + one.width, one.middle
        bend = (other.x - x) / 2
        drawn.append(
            f"C{x + bend:.1f} {y:.1f} {other.x - bend:.1f} {other.middle:.1f} "
            f"{other.x:.1f} {other.middle:.1f}"
        )
        if other is not way[-1]:
            drawn.append(f"H{other.x + other.width:.1f}")
    return tag("path", tag("title", role), d="".join(drawn), class_=f"edge role-{role}")


def _box(node: Node, slot: _Slot) -> Markup:
    x, y = slot.x + _INSIDE, slot.y + 18
    lines = [
        *((name, "name strong") for name in node.names),
        *((fact, "quiet") for fact in node.details),
    ]
    box = tag(
        "rect",
        x=f"{slot.x:.1f}",
        y=f"{slot.y:.1f}",
        width=f"{node.width:.1f}",
        height=f"{node.height:.1f}",
        rx=6,
        class_="chosen-box" if node.is_chosen else "box",
    )
    return join([box, *(text(x, y + _LINE * n, *line) for n, line in enumerate(lines))])


def _keys(roles: Sequence[str], y: float) -> tuple[list[Markup], float]:
    """Return what the lines mean, and the room that it takes."""
    drawn, x = [], _PADDING
    for role in roles:
        line = f"M{x:.0f} {y - 4:.0f}h34"
        drawn += [tag("path", d=line, class_=f"edge role-{role}"), text(x + 42, y, role)]
        x += 42 + width_of(role, TEXT, mono=False) + 24
    return drawn, x
