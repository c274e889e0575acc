"""Plots: SVG files that say what they show, the same bytes each time, whatever the names are."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from mstore.terms.errors import StorageFailed, Unavailable
from mstore_cli import plots
from mstore_cli.plots import HeatMap, SweepPoint, heat_map, sweep

POINTS = (
    SweepPoint(3 << 30, 0.0, 0.0, 0.0),
    SweepPoint(1 << 30, 0.2, 0.1, 0.08),
    SweepPoint(2 << 30, 0.004, 0.001, 0.0005),
)
NASTY = "a$b$<&\"'>\x1b[31m" + 40 * "x" + "_end"
TABLE = HeatMap(
    title="who made it",
    rows=("embed", "layer 0", "layer 1"),
    columns=("math", NASTY),
    cells=((0.25, 1.0), (None, 0.5), (0.0, None)),
    measure="share of blocks read",
    top=1.0,
)


def texts(path: Path) -> list[str]:
    """Every piece of text in an SVG, which must be well-formed XML."""
    found = ET.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(one.itertext()) for one in found]


def test_a_sweep_shows_its_curves_and_units(tmp_path: Path) -> None:
    """Axes name quantity and unit, and each kind of error that is known has a line in the key."""
    sweep(POINTS, tmp_path / "sweep.svg", title="llama")
    shown = texts(tmp_path / "sweep.svg")
    assert {"llama", "read from experts (GiB)", "certified bound", "estimate", "measured"} <= {
        *shown
    }
    assert any("relative to the base's norm" in text for text in shown)
    assert not any("$" in text for text in shown), "ticks are numbers, not formulas"


def test_curves_that_nobody_knows_are_not_drawn(tmp_path: Path) -> None:
    """A method without a bound has none in the plot, and a sweep of nothing is still a plot."""
    sweep([SweepPoint(10, estimate=0.1), SweepPoint(20, estimate=0.0)], tmp_path / "a.svg")
    assert {"certified bound", "measured"}.isdisjoint(texts(tmp_path / "a.svg"))
    assert "read from experts (B)" in texts(tmp_path / "a.svg")
    sweep([SweepPoint(0)], tmp_path / "b.svg")
    assert "estimate" not in texts(tmp_path / "b.svg")


def test_a_heat_map_shows_layers_experts_and_numbers(tmp_path: Path) -> None:
    """Layers, experts and the numbers of known cells are there as text, unknown ones in the key."""
    heat_map(TABLE, tmp_path / "map.svg")
    shown = texts(tmp_path / "map.svg")
    assert {"embed", "layer 0", "layer 1", "math", "share of blocks read"} <= {*shown}
    assert {"25 %", "100 %", "0 %", "not known"} <= {*shown}
    assert any(text.startswith("a$b$<&\"'>\\x1b") and text.endswith("x_end") for text in shown)
    assert max(map(len, shown)) < 64


def test_equal_values_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No date, no random id, and no setting of the user's in the file; it is replaced whole."""
    import matplotlib as mpl

    for number in range(2):
        heat_map(TABLE, tmp_path / "map.svg")
        sweep(POINTS, tmp_path / "sweep.svg")
        found = [(tmp_path / name).read_bytes() for name in ("map.svg", "sweep.svg")]
        if number == 0:
            first = found
            monkeypatch.setitem(mpl.rcParams, "lines.linewidth", 9.0)
            monkeypatch.setitem(mpl.rcParams, "font.size", 30.0)
    assert found == first
    assert not any(re.search(rb"20\d\d-\d\d-\d\d", svg) for svg in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.svg", "sweep.svg"]


def test_large_maps_have_no_numbers_in_their_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what can be read, a map is colours only."""
    monkeypatch.setattr(plots, "CELL_NUMBERS", 4)
    for count, has_numbers in ((4, True), (5, False)):
        rows = tuple(f"layer {n}" for n in range(count))
        table = HeatMap("m", rows, ("e",), tuple((0.37,) for _ in rows), "share", top=1.0)
        heat_map(table, tmp_path / "map.svg")
        assert ("37 %" in texts(tmp_path / "map.svg")) == has_numbers


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the extra is missing, the error names the command that installs it."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    for draw in (plots.require, lambda: sweep(POINTS, tmp_path / "sweep.svg")):
        with pytest.raises(Unavailable) as refused:
            draw()
        assert refused.value.hint == "pip install matplotlib"
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A directory that is not there is the disk's no, with the path."""
    with pytest.raises(StorageFailed) as refused:
        sweep(POINTS, tmp_path / "no" / "sweep.svg")
    assert "no" in str(refused.value)
