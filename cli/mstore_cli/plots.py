"""Plots as SVG files: the cost curve of a sweep, a heat map of layers and experts, a treemap.

The only module that imports matplotlib, an optional extra, and only when something is drawn;
`require` reports early, before the work, that it is missing.  The same values give the same bytes
with the same matplotlib: no date, no random ids, no user settings, text as text.  Colours suit
colour-blind readers (Okabe and Ito 2008, cividis); lines also differ by marker and dash.  Files are
written whole, through mstore.fs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mstore_cli.output import elided, printable
from mstore_cli.sizes import format_percent
from mstore_cli.treemap import Box, Node, Placed, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HINT = "pip install matplotlib"
SALT = "mstore"
BLACK, ORANGE, SKY, GREEN = "#000000", "#D55E00", "#0072B2", "#009E73"
FILLS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2")
STYLE: dict[str, Any] = {
    "svg.hashsalt": SALT,
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "hatch.color": "#8C8C8C",
    # Names from checkpoints are text, not formulas.
    "text.parse_math": False,
}
LONGEST_LABEL = 28
INCHES_A_LETTER = 0.085
SHORTEST_NAME = 12
TREE_INCHES = (9.0, 5.6)
INCHES_A_ROW = 0.155
LEGEND_ROWS = 20
DECADES = 1e-4
"""A plot treats errors below this part of the largest one as zero."""
CELL_NUMBERS = 400
"""Heat maps of at most this many cells show the numbers in the cells."""


class SweepPoint(msgspec.Struct, frozen=True):
    """One budget of a sweep: bytes read from experts, and errors relative to the base's norm.

    None if the method has no such figure or it was not measured.
    """

    expert_bytes: int
    bound: float | None = None
    estimate: float | None = None
    measured: float | None = None


class HeatMap(msgspec.Struct, frozen=True):
    """A table of numbers: `cells[row][column]`, None if unknown (drawn hatched).

    axes: what rows and columns are.  `measure` names the numbers, with their unit; `unknown`
    explains None.  `top` fixes the end of the scale; otherwise the largest number does.  Between
    0.0 and 1.0 numbers are shares, written as percentages.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    measure: str
    top: float | None = None
    unknown: str = "not known"
    bottom: float = 0.0
    axes: tuple[str, str] = ("layer", "expert")

    @property
    def is_of_shares(self) -> bool:
        """Whether numbers are written as percentages."""
        return (self.bottom, self.top) == (0.0, 1.0)


def require() -> None:
    """Raise Unavailable, with what to install, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        from mstore.terms.errors import Unavailable

        raise Unavailable("drawing needs matplotlib, which is not installed", hint=HINT)


def sweep(points: Sequence[SweepPoint], path: Path, *, title: str = "Cost against error") -> None:
    """Draw error against expert bytes, a line each for bound, estimate and measured, as SVG.

    Raises Unavailable without matplotlib, StorageFailed if the file cannot be written.
    """

    def draw(figure: Figure) -> None:
        figure.set_size_inches(7.0, 4.2)
        axes = figure.add_subplot()
        ordered = sorted(points, key=lambda point: point.expert_bytes)
        unit, name = _unit(max((point.expert_bytes for point in ordered), default=0))
        curves = (
            ("certified bound", "bound", SKY, "-", "o"),
            ("estimate", "estimate", ORANGE, "--", "s"),
            ("measured", "measured", BLACK, ":", "^"),
        )
        seen: list[float] = []
        for label, field, colour, dash, marker in curves:
            known = [(p.expert_bytes / unit, getattr(p, field)) for p in ordered]
            drawn = [(x, y) for x, y in known if y is not None and math.isfinite(y)]
            if drawn:
                xs, ys = zip(*drawn, strict=True)
                seen += ys
                axes.plot(
                    xs, ys, dash, marker=marker, markersize=5, color=colour, label=label, alpha=0.9
                )
        axes.set_title(_label(title, 80))
        axes.set_xlabel(f"read from experts ({name})")
        axes.set_ylabel("error relative to the base's norm (no unit)")
        axes.set_xlim(left=0)
        _error_scale(axes, seen)
        if seen:
            axes.legend()

    _write(draw, path)


def heat_map(table: HeatMap, path: Path, form: str = "svg") -> None:
    """Draw a table as SVG, or as PNG.

    Raises Unavailable without matplotlib, StorageFailed if the file cannot be written.
    """

    def draw(figure: Figure) -> None:
        import numpy as np
        from matplotlib.patches import Patch

        rows, columns = len(table.rows), len(table.columns)
        figure.set_size_inches(*_heat_map_inches(table))
        axes = figure.add_subplot()
        values = np.full((rows, columns), np.nan)
        for number, cells in enumerate(table.cells):
            values[number] = [np.nan if cell is None else cell for cell in cells]
        known = values[np.isfinite(values)]
        top = table.top or float(known.max(initial=0.0)) or 1.0
        mesh = axes.pcolormesh(
            np.ma.masked_invalid(values),
            cmap="cividis",
            vmin=table.bottom,
            vmax=top,
            edgecolors="white",
            linewidth=0.5,
        )
        unknown = np.argwhere(~np.isfinite(values))
        for row, column in unknown.tolist():
            axes.add_patch(_hatched(column, row))
        if rows * columns <= CELL_NUMBERS:
            for row, column in np.argwhere(np.isfinite(values)).tolist():
                value = float(values[row, column])
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    _number(value, is_share=table.is_of_shares),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value < (table.bottom + top) / 2 else "black",
                )
        axes.set_xticks([n + 0.5 for n in range(columns)], [_label(c) for c in table.columns])
        axes.tick_params(axis="x", rotation=40)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
        axes.set_yticks([n + 0.5 for n in range(rows)], [_label(r) for r in table.rows])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.invert_yaxis()
        axes.set_xlabel(table.axes[1])
        axes.set_ylabel(table.axes[0])
        figure.suptitle(f"{_label(table.title, 60)}\n{table.measure}", fontsize=10)
        percent = (
            (lambda value, _position: format_percent(value, ".0f")) if table.is_of_shares else None
        )
        figure.colorbar(mesh, ax=axes, format=percent)
        if len(unknown):
            figure.legend(
                handles=[Patch(facecolor="white", edgecolor="#8C8C8C", hatch="///")],
                labels=[table.unknown],
                loc="outside lower right",
            )

    _write(draw, path, form=form)


class TreeMap(msgspec.Struct, frozen=True):
    """Nested sizes.  The leaves whose name is in `hatched` are drawn hatched.

    Boxes show their numbers if there is room, and always in their titles; the legend also lists the
    parts of the root.

    measure: what the areas are; hatching: what it means.
    """

    title: str
    root: Node
    measure: str
    describe: Callable[[float], str]
    hatched: frozenset[str] = frozenset()
    hatching: str = ""


def tree_map(tree: TreeMap, path: Path) -> None:
    """Draw a treemap as SVG: each part of the root has its own colour.

    Raises Unavailable without matplotlib, StorageFailed if the file cannot be written.
    """

    width, height = TREE_INCHES
    placed = place(tree.root, Box(0, 0, width, height), margin=0.03)[1:]

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch, Rectangle

        colours = {id(part): _fill(n) for n, part in enumerate(tree.root.parts)}
        labels = _legend(tree)
        below = INCHES_A_ROW * len(labels)
        whole = height + below + 0.8
        figure.set_size_inches(width, whole)
        axes = figure.add_axes((0.01, (below + 0.1) / whole, 0.98, height / whole))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        for number, one in enumerate(placed):
            top = (*one.path, one.node)[1]
            is_hatched = any(node.name in tree.hatched for node in (*one.path, one.node))
            box = one.box
            axes.add_patch(
                Rectangle(
                    (box.x, box.y),
                    box.width,
                    box.height,
                    facecolor=colours[id(top)] if not one.node.parts else "none",
                    edgecolor="white" if not one.node.parts else BLACK,
                    hatch="///" if is_hatched and not one.node.parts else None,
                    linewidth=0.8 if len(one.path) > 1 else 1.6,
                    gid=f"box-{number}",
                )
            )
        for one in placed:
            _name_box(axes, one, tree)
        figure.suptitle(f"{_label(tree.title, 80)}\n{tree.measure}", fontsize=10)
        figure.legend(
            handles=[
                Patch(facecolor=colours[id(part)] if part else "none") for part, _label in labels
            ],
            labels=[label for _part, label in labels],
            loc="lower left",
            fontsize=8,
            labelspacing=0.2,
        )
        if tree.hatched:
            figure.legend(
                handles=[Patch(facecolor="white", edgecolor="#8C8C8C", hatch="///")],
                labels=[tree.hatching],
                loc="upper right",
                fontsize=8,
            )

    titles = {f"box-{number}": _told(one, tree) for number, one in enumerate(placed)}
    _write(draw, path, layout=None, titles=titles)


def _fill(number: int) -> str:
    """Return the colour of a part: those of FILLS, then the same lighter, three times in all."""
    from matplotlib.colors import to_hex, to_rgb

    white = number // len(FILLS) % 3 / 3
    red, green, blue = (one + (1 - one) * white for one in to_rgb(FILLS[number % len(FILLS)]))
    return to_hex((red, green, blue))


def _told(one: Placed, tree: TreeMap) -> str:
    """Return a box's name and size in full: a browser shows it beside the pointer."""
    names = ", ".join(printable(node.name) for node in (*one.path[1:], one.node))
    share = f" ({format_percent(one.node.size / tree.root.size)})" if tree.root.size else ""
    return f"{names}: {tree.describe(one.node.size)}{share}"


def _legend(tree: TreeMap) -> list[tuple[Node | None, str]]:
    """Return the parts of the root with their numbers, the largest first, and their own parts."""
    ordered = sorted(tree.root.parts, key=lambda part: -part.size)
    lines: list[tuple[Node | None, str]] = []
    for part in ordered[:LEGEND_ROWS]:
        parts = ", ".join(f"{one.name} {tree.describe(one.size)}" for one in part.parts)
        detail = f" ({parts})" if parts else ""
        lines.append((part, f"{_label(part.name, 60)}: {tree.describe(part.size)}{detail}"))
    more = ordered[LEGEND_ROWS:]
    if more:
        size = tree.describe(sum(part.size for part in more))
        lines.append((None, f"and {len(more)} more, together {size}: the boxes say theirs"))
    lines.append((None, f"all: {tree.describe(tree.root.size)}"))
    return lines


def _name_box(axes: Axes, one: Placed, tree: TreeMap) -> None:
    """Write name and size into a leaf and a part of the root, if there is room.

    Only the name of a part of the root is shortened: the legend has it in full.
    """
    is_top = len(one.path) == 1
    if one.node.parts and not is_top:
        return
    name, size = printable(one.node.name), tree.describe(one.node.size)
    room = int(one.box.width / INCHES_A_LETTER)
    # A truncated size would be a wrong size.
    if len(name) + 2 + len(size) <= room:
        name = f"{name}  {size}"
    elif len(name) > room and (not is_top or room < SHORTEST_NAME):
        return
    if one.box.height < 0.4:
        return
    text = axes.text(
        one.box.x + 0.06,
        one.box.y + (one.box.height - 0.06 if is_top else 0.06),
        elided(name, room),
        fontsize=8,
        fontweight="bold" if is_top else "normal",
        va="top" if is_top else "bottom",
    )
    # Keeps text readable on hatching.
    text.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0})


def _write(
    draw: Any,
    path: Path,
    *,
    layout: Literal["constrained"] | None = "constrained",
    titles: Mapping[str, str] = MappingProxyType({}),
    form: str = "svg",
) -> None:
    """Draw and write, as SVG or PNG. titles: the tooltip of the element with this id, in SVG."""
    require()
    import matplotlib.style
    from matplotlib.figure import Figure

    from mstore import fs

    drawn = BytesIO()
    # "default" first: a user's matplotlibrc must not change the plot.
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(layout=layout)
        draw(figure)
        told = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
        figure.savefig(drawn, format=form, metadata=told)
    if form == "png":
        fs.replace_file(path, drawn.getvalue())
        return
    svg = "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().decode().splitlines())
    # matplotlib has no titles; each id occurs once.
    for id, title in titles.items():
        head = f'<g id="{id}">\n'
        svg = svg.replace(head, f"{head}<title>{escape(title, quote=False)}</title>\n", 1)
    fs.replace_file(path, svg)


def _heat_map_inches(table: HeatMap) -> tuple[float, float]:
    """Return width and height: cells of one size, plus room for the labels."""
    left = max((len(_label(row)) for row in table.rows), default=0) * INCHES_A_LETTER
    below = max((len(_label(column)) for column in table.columns), default=0) * INCHES_A_LETTER
    title = max(len(_label(table.title, 60)), len(table.measure)) * INCHES_A_LETTER
    # Column labels are rotated by 40 degrees.
    width = 0.77 * below + left + 0.6 * len(table.columns) + 1.4
    return max(width, title + 0.4), 0.65 * below + 0.26 * len(table.rows) + 1.5


def _hatched(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column, row), 1, 1, facecolor="white", edgecolor="#8C8C8C", hatch="///", lw=0)


def _error_scale(axes: Axes, seen: Sequence[float]) -> None:
    """Use a logarithmic scale if errors span decades, extended to zero, the full read."""
    largest = max(seen, default=0.0)
    # The error at full read is rounding: it must not squeeze everything else into a corner.
    positive = [value for value in seen if value > DECADES * largest]
    if positive and largest >= 30 * min(positive):
        lowest = 10.0 ** math.floor(math.log10(min(positive)))
        axes.set_yscale("symlog", linthresh=lowest, linscale=0.5)
        axes.set_ylim(0, 2 * largest)
    else:
        axes.set_ylim(0, 1.08 * largest or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:.3g}")


def _unit(largest: int) -> tuple[int, str]:
    """Return the binary unit in which the largest size has at most four digits before the point."""
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while power < len(names) - 1 and largest >= 1024 ** (power + 1):
        power += 1
    return 1024**power, names[power]


def _number(value: float, *, is_share: bool) -> str:
    return format_percent(value, ".0f") if is_share else f"{value:.2g}"


def _label(name: str, longest: int = LONGEST_LABEL) -> str:
    return elided(name, longest)
