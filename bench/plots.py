"""Draw docs/plots/*.svg from the results that the scripts here left.

    python bench/plots.py [--results DIR] [--plots DIR]

The same results give the same bytes: no dates, no random ids, text as text.  Colours are Okabe and
Ito's, told apart by colour-blind eyes; lines differ by marker too.  A script that has not been run
has no plots.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import page_method_quality
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PLOTS = HERE.parent / "docs" / "plots"
MIB = 1 << 20
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "mstore",
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
VARIANTS = ("naive", "100%", "50%", "30%", "10%")
SCORES = ("norm", "trimmed", "conflict", "random")
PLAIN = "own score, % of all bytes"
Told = dict[str, Any]
Drawing = dict[str, Figure]


def panels(count: int, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with some axes side by side."""
    columns = -(-count // rows)
    figure = Figure(figsize=(3.4 * columns, 2.8 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def line(axes: Axes, number: int, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    """One line of its own colour and marker."""
    axes.plot(x, y, label=label, color=COLOURS[number], marker=MARKERS[number], markersize=4)


def banded(axes: Axes, number: int, label: str, x: Sequence[float], rows: Sequence[Told]) -> None:
    """A line through medians, with the extremes as bars."""
    middle = [row["median"] for row in rows]
    below = [row["median"] - row["min"] for row in rows]
    above = [row["max"] - row["median"] for row in rows]
    axes.errorbar(
        x,
        middle,
        yerr=(below, above),
        label=label,
        color=COLOURS[number],
        marker=MARKERS[number],
        markersize=4,
        capsize=2,
        linewidth=1.5,
    )


def from_zero(axes: Axes, x: str, y: str) -> None:
    """Label axes that begin at zero."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def bars(axes: Axes, groups: Sequence[str], series: dict[str, list[float]], unit: str) -> None:
    """Groups of horizontal bars from zero, each with its value."""
    height = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [at + (number - (len(series) - 1) / 2) * height for at in range(len(groups))]
        drawn = axes.barh(places, values, height, label=label, color=COLOURS[number + 1])
        texts = [f" {value:.{0 if value >= 100 else 2}f}" for value in values]
        axes.bar_label(drawn, texts, fontsize=8)
    axes.set_xlim(0, max(max(values) for values in series.values()) * 1.2)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)


# Drawings ----------------------------------------------------------------------------------------


def mergekit(told: Told) -> Drawing:
    """Seconds and memory of both programs."""
    methods = [name for name in ("ties", "dare_ties", "linear") if name in told]
    figure, (wall, memory) = panels(2)
    for axes, key, scale, unit in (
        (wall, "wall", 1.0, "wall seconds"),
        (memory, "anonymous", MIB, "peak anonymous MiB"),
    ):
        programs = {
            program: [told[method][program][key] / scale for method in methods]
            for program in ("mergekit", "mstore")
        }
        bars(axes, methods, programs, unit)
    figure.legend(*wall.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return {"mergekit": figure}


def paper(told: Told) -> Drawing:
    """Costs against experts, budget and block size; spread of runs."""
    return {
        "paper-scaling": _scaling(told["scaling"]),
        "paper-budgets": _budgets(told["scaling"]),
        "paper-blocks": _blocks(told["blocks"]),
        "paper-spread": _spread(told["spread"]),
    }


def _scaling(scaling: Told) -> Figure:
    figure, (experts, total, wall) = panels(3)
    counts = sorted(map(int, scaling))
    for number, variant in enumerate(VARIANTS):
        rows = [scaling[str(count)][variant] for count in counts]
        line(experts, number, variant, counts, [row["expert_bytes"] / 1e9 for row in rows])
        line(total, number, variant, counts, [_total(row) / 1e9 for row in rows])
        banded(wall, number, variant, counts, [row["wall"] for row in rows])
    from_zero(experts, "experts K", "expert bytes read, GB")
    from_zero(total, "experts K", "expert + base + output, GB")
    from_zero(wall, "experts K", "wall seconds, cold")
    figure.legend(*experts.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def _total(row: Told) -> float:
    return float(row["expert_bytes"] + row["base_bytes"] + row["written_bytes"])


def _budgets(scaling: Told) -> Figure:
    most = scaling[max(scaling, key=int)]
    shares = sorted((v for v in most if v != "naive"), key=lambda v: float(v.rstrip("%")))
    x = [float(share.rstrip("%")) for share in shares]
    naive = most["naive"]
    figure, (experts, wall) = panels(2)
    line(experts, 1, "this engine", x, [most[share]["expert_bytes"] / 1e9 for share in shares])
    banded(wall, 1, "this engine", x, [most[share]["wall"] for share in shares])
    for axes, value in ((experts, naive["expert_bytes"] / 1e9), (wall, naive["wall"]["median"])):
        axes.axhline(value, color=COLOURS[0], linestyle="--", label="naive")
    budget = "budget, % of what full read costs"
    from_zero(experts, budget, "expert bytes read, GB")
    from_zero(wall, budget, "wall seconds, cold")
    figure.legend(*wall.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _blocks(told: Told) -> Figure:
    sizes = sorted(int(size) for size in told if size != "experts")
    figure, (wall, catalog) = panels(2)
    for number, variant in enumerate(("100%", "30%"), start=1):
        banded(wall, number, variant, sizes, [told[str(size)][variant]["wall"] for size in sizes])
    line(catalog, 1, "", sizes, [told[str(size)]["catalog_bytes"] / 1e6 for size in sizes])
    for axes, label in ((wall, "wall seconds, cold"), (catalog, "index and statistics, MB")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size >> 10} KiB" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("block size (logarithmic)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    wall.legend(title="budget")
    return figure


def _spread(told: Told) -> Figure:
    figure, (axes,) = panels(1)
    walls = told["walls"]
    line(axes, 1, "runs", list(range(1, len(walls) + 1)), walls)
    axes.axhline(statistics.median(walls), color=COLOURS[0], linestyle="--", label="median")
    from_zero(axes, "run", "wall seconds, cold")
    axes.legend(loc="lower right")
    return figure


def quality(told: Told) -> Drawing:
    """Errors and losses against budget."""
    methods, groups = list(told["parameters"]), ("alike", "differ", "all")
    error, axes = panels(len(methods) * len(groups), rows=len(methods))
    places = [(method, group) for method in methods for group in groups]
    for place, (method, group) in zip(axes, places, strict=True):
        found = told[method][group]
        for score, points in found["scores"].items():
            _points(place, SCORES.index(score), score, points, "of_delta", 1.0)
        _points(place, len(SCORES), PLAIN, found["of_plain"], "of_delta", 1.0)
        place.set_yscale("log")
        # What all blocks within a budget give is no error at all, and has no logarithm.
        place.set_ylim(1e-3, 1.3)
        place.set_title(f"{method}, {group}", fontsize=9)
        place.set_xlabel("bytes read, %")
        place.set_ylabel("error, of the merged delta")
    _legend_below(error, axes)
    shown = [(method, group) for method in methods for group in ("differ", "all")]
    loss, axes = panels(len(shown), rows=len(methods))
    for place, (method, group) in zip(axes, shown, strict=True):
        found = told[method][group]
        for score, points in [*found["scores"].items(), (PLAIN, found["of_plain"])]:
            measured = {b: p for b, p in points.items() if "worst_rise" in p}
            number = SCORES.index(score) if score in SCORES else len(SCORES)
            if measured:
                _points(place, number, score, measured, "worst_rise", 100.0)
        place.axhline(1, color="#7F7F7F", linestyle=":", label="1 %")
        place.set_title(f"{method}, {group}", fontsize=9)
        place.set_xlabel("bytes read, %")
        place.set_ylabel("largest rise of a loss, %")
    _legend_below(loss, axes)
    return {"quality-error": error, "quality-loss": loss}


def _points(axes: Axes, number: int, label: str, points: Told, key: str, scale: float) -> None:
    shares = [100 * float(budget) for budget in points]
    line(axes, number, label, shares, [point[key] * scale for point in points.values()])


def _legend_below(figure: Figure, axes: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for place in axes:
        handles, labels = place.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=len(found))


def method_quality(told: Told) -> Drawing:
    """Losses of each method, untuned and tuned, a panel a group."""
    groups = told["groups"]
    figure, places = panels(len(groups))
    for place, group in zip(places, groups.values(), strict=True):
        found = page_method_quality.ranked(group)
        base = page_method_quality.mean(group["base"])
        low = min(page_method_quality.mean(one["tuned"]) for one in found.values())
        # What is far worse than the base is drawn at the right edge, with an arrow.
        edge = base + 0.3 * (base - low)
        for number, key in ((1, "untuned"), (2, "tuned")):
            losses = [page_method_quality.mean(one[key]) for one in found.values()]
            place.scatter(
                [min(loss, edge) for loss in losses],
                range(len(losses)),
                label=key,
                color=COLOURS[number],
                marker=MARKERS[number],
                s=18,
            )
        for row, one in enumerate(found.values()):
            if page_method_quality.mean(one["untuned"]) > edge:
                place.annotate("→", (edge, row), (3, 0), textcoords="offset points", va="center")
        place.axvline(base, color=COLOURS[0], linestyle="--", label="base")
        place.set_yticks(range(len(found)), list(found), fontsize=7)
        place.invert_yaxis()
        place.set_title(f"{len(group['base'])} experts", fontsize=9)
        place.set_xlabel("held-out loss, nats a byte")
    figure.set_size_inches(10, 1.2 + 0.18 * len(found))
    _legend_below(figure, places)
    return {"method-quality": figure}


def incremental(told: Told) -> Drawing:
    """Seconds with and without the memo table."""
    cases = {"ninth": "a ninth expert", "changed": "one expert changed", "repeated": "again"}
    figure, (axes,) = panels(1)
    figure.set_size_inches(6.4, 2.8)
    size = told["sizes"][0]
    series = {way: [size[case][way]["wall"] for case in cases] for way in ("no memo", "memo")}
    bars(axes, list(cases.values()), series, "wall seconds of the process")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return {"incremental": figure}


def density(told: Told) -> Drawing:
    """Stored bytes of each way, a panel a family."""
    families = told["families"]
    figure, places = panels(len(families))
    for place, (name, family) in zip(places, families.items(), strict=True):
        ways = sorted(family["ways"].items(), key=lambda item: item[1]["stored_bytes"])
        shares = [100 * way["stored_bytes"] / family["plain_bytes"] for _, way in ways]
        bars(place, [way for way, _ in ways], {"stored": shares}, "stored, % of plain bytes")
        for patch, (way, _) in zip(place.patches, ways, strict=True):
            patch.set_facecolor(COLOURS[2 if way.startswith("mstore") else 1])
        place.set_title(f"the {name} family", fontsize=9)
    figure.set_size_inches(4.6 * len(families), 4.0)
    return {"density": figure}


def growth(told: Told) -> Drawing:
    """Seconds of tasks, and memory of marking, against blocks."""
    sizes = sorted(told["sizes"].values(), key=lambda one: one["blocks"])
    blocks = [one["blocks"] for one in sizes]
    figure, (seconds, memory) = panels(2)
    # Commands are the same tasks, with the program's start.
    tasks = [task for task in sizes[0]["tasks"] if not task.startswith("mstore ")]
    for number, task in enumerate(tasks):
        banded(seconds, number, task, blocks, [one["tasks"][task]["seconds"] for one in sizes])
    seconds.set_yscale("log")
    seconds.set_ylabel("seconds (logarithmic)")
    for number, task in ((4, "gc mark"), (5, "du")):
        found = [one["tasks"][task]["anonymous"]["median"] / one["blocks"] for one in sizes]
        line(memory, number, task, blocks, found)
    memory.axhline(100, color="#7F7F7F", linestyle=":", label="aim for gc mark")
    memory.set_ylabel("bytes of memory a block (logarithmic)")
    memory.set_yscale("log")
    for axes in (seconds, memory):
        axes.set_xscale("log")
        axes.set_xlabel("blocks (logarithmic)")
        axes.legend(fontsize=7)
    return {"growth": figure}


DRAWINGS: dict[str, Callable[[Told], Drawing]] = {
    "density": density,
    "growth": growth,
    "mergekit": mergekit,
    "paper": paper,
    "quality": quality,
    "method_quality": method_quality,
    "incremental": incremental,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--plots", type=Path, default=PLOTS)
    arguments = parser.parse_args()
    arguments.plots.mkdir(exist_ok=True)
    mpl.rcdefaults()
    with mpl.rc_context(STYLE):
        for name, draw in DRAWINGS.items():
            file = arguments.results / f"{name}.json"
            if file.exists():
                for title, figure in draw(json.loads(file.read_text())).items():
                    figure.savefig(arguments.plots / f"{title}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
