"""`mstore log --graph`: the lineage as text.

Pure: takes snapshots, returns lines.  A snapshot is a `*` in a column.  Below it is one line per
parent with its role, drawn towards the column in which that parent will appear.  Plain ASCII, so
that it reads the same in a file, a mail and any terminal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mstore_cli.output import named, noted, printable, short

if TYPE_CHECKING:
    from mstore.api.reports import ParentReport, SnapshotReport
    from mstore.terms.ids import SnapshotId

Lanes = list["SnapshotId | None"]
GAP = "  "
NARROWEST = 20


def draw(
    snapshots: Sequence[SnapshotReport], width: int | None = None, *, notes: bool = False
) -> list[str]:
    """Return the lines of the graph, children before parents, otherwise newest first.

    A parent that is not among `snapshots` is named and marked `(not shown)`.  Text beside a
    snapshot wraps if it is longer than `width`. notes: below each, what was noted about it.
    """
    shown = {snapshot.snapshot: snapshot for snapshot in snapshots}
    lanes: Lanes = []
    rows: list[tuple[str, str]] = []
    for snapshot in _children_first(snapshots):
        column = _lane_of(lanes, snapshot.snapshot)
        rows.append((_bars(lanes, {column: "*"}), _title(snapshot)))
        if notes:
            passing = _bars(lanes, {column: "|" if snapshot.parents else " "})
            rows.extend((passing, f"{'note':<8} {noted(note)}") for note in snapshot.notes)
        rows.extend(_edges(lanes, column, snapshot.parents, shown))
    # Imported here because `mstore --help` must not pay for it.
    from mstore_cli.tables import wrapped

    beside = max((len(drawn) for drawn, _text in rows), default=0)
    room = None if width is None else max(NARROWEST, width - beside - len(GAP))
    lines = []
    for number, (drawn, text) in enumerate(rows):
        below = rows[number + 1][0] if number + 1 < len(rows) else ""
        first, *others = [text] if room is None else wrapped(printable(text), room)
        lines.append(f"{drawn:<{beside}}{GAP}{first}")
        lines += [f"{_passed(drawn, below):<{beside}}{GAP}{other}" for other in others]
    return lines


def _passed(above: str, below: str) -> str:
    """Return the bars between two rows: lanes that are in both."""
    pairs = zip(above, below.ljust(len(above)), strict=False)
    return "".join("|" if a in "*|+." and b in "*|+'" else " " for a, b in pairs)


def _children_first(snapshots: Sequence[SnapshotReport]) -> list[SnapshotReport]:
    shown = {snapshot.snapshot: snapshot for snapshot in snapshots}
    children = dict.fromkeys(shown, 0)
    for snapshot in shown.values():
        for parent in _distinct(snapshot.parents):
            if parent.snapshot in shown:
                children[parent.snapshot] += 1
    ready = [
        (-one.time_ns, place, one.snapshot)
        for place, one in enumerate(shown.values())
        if not children[one.snapshot]
    ]
    places = {identity: place for place, identity in enumerate(shown)}
    heapq.heapify(ready)
    ordered = []
    while ready:
        snapshot = shown[heapq.heappop(ready)[2]]
        ordered.append(snapshot)
        for parent in _distinct(snapshot.parents):
            if parent.snapshot not in shown:
                continue
            children[parent.snapshot] -= 1
            if not children[parent.snapshot]:
                one = shown[parent.snapshot]
                heapq.heappush(ready, (-one.time_ns, places[one.snapshot], one.snapshot))
    return ordered


def _distinct(parents: Sequence[ParentReport]) -> list[ParentReport]:
    """Return one edge per parent, even if it has two roles."""
    return list({parent.snapshot: parent for parent in parents}.values())


def _lane_of(lanes: Lanes, identity: SnapshotId) -> int:
    """Return the column waiting for this snapshot, or else the first free one, now taken."""
    if identity not in lanes:
        free = lanes.index(None) if None in lanes else len(lanes)
        lanes[free : free + 1] = [identity]
    return lanes.index(identity)


def _edges(
    lanes: Lanes,
    column: int,
    parents: Sequence[ParentReport],
    shown: dict[SnapshotId, SnapshotReport],
) -> list[tuple[str, str]]:
    """Return a row per parent; afterwards `lanes` waits for the parents instead of the child."""
    # The child's own column stays taken while edges leave it, then goes to the first parent that
    # has no column yet.
    heirs = [p.snapshot for p in parents if p.snapshot in shown and p.snapshot not in lanes]
    heir = heirs[0] if heirs else None
    rows = []
    for place, parent in enumerate(parents):
        continues = heir is not None or place + 1 < len(parents)
        marks = {column: "|" if continues else "'"}
        text = f"{parent.role:<8} {revision_of(parent)}"
        if parent.snapshot not in shown:
            rows.append((_bars(lanes, marks), f"{text} (not shown)"))
            continue
        names = named(shown[parent.snapshot].refs)
        if parent.snapshot == heir:
            lane = column
        else:
            joins = parent.snapshot in lanes
            lane = _lane_of(lanes, parent.snapshot)
            marks |= {column: "+" if continues else "'", lane: "+" if joins else "."}
        rows.append((_bars(lanes, marks, sorted((column, lane))), f"{text} {names}".rstrip()))
    lanes[column] = heir
    while lanes and lanes[-1] is None:
        lanes.pop()
    return rows


def _bars(lanes: Lanes, marks: dict[int, str], span: Sequence[int] = (0, 0)) -> str:
    """Draw one row of columns two apart: marks, waiting lanes, and dashes along the span."""
    first, last = span
    cells = []
    for column, waiting in enumerate(lanes):
        inside = first < column < last
        bar = "|" if waiting is not None else "-" if inside else " "
        cells.append(marks.get(column, bar))
        cells.append("-" if first <= column < last else " ")
    return "".join(cells).rstrip()


def revision_of(parent: ParentReport) -> str:
    """Return the short id of a parent, with the model that a merge took of it."""
    return short(parent.snapshot) + ("" if parent.model is None else f":{parent.model}")


def how(snapshot: SnapshotReport) -> str:
    """Describe how a snapshot was made, in one to three words."""
    if snapshot.missing:
        return f"{snapshot.made} (missing)".lstrip()
    made = f"{snapshot.made} {snapshot.method or ''}".rstrip()
    if snapshot.virtual:
        made = f"{made}, virtual"
    return f"{made} (pruned)" if snapshot.pruned else made


def subject(snapshot: SnapshotReport) -> str:
    """Return the first line of the message; without one, where the snapshot came from."""
    if not snapshot.message and snapshot.origin is not None:
        return f"{snapshot.origin.url} {snapshot.origin.commit[:12]}"
    return snapshot.message.partition("\n")[0]


def _title(snapshot: SnapshotReport) -> str:
    refs = f" ({named(snapshot.refs)})" if snapshot.refs else ""
    return f"{short(snapshot.snapshot)} {how(snapshot)}{refs} {subject(snapshot)}".rstrip()
