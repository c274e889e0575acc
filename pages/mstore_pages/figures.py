"""Figures: what all pictures share: sizes of labels, scales of colours, axes, SVG files.

Labels are measured before they are placed, so none is cut.  Sizes are in pixels, and are those of
the widest common fonts, so a label never needs more room than it got.  Colours are classes, which
`figures.css` fills for light and dark.
"""

from __future__ import annotations

import json
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from decimal import Decimal
from importlib.resources import files

import msgspec

from mstore_pages.markup import Child, Markup, join, tag, visible

TEXT = 12
"""Size of labels."""
_MONO = 0.605
"""Width of a letter relative to the size of a monospaced font."""
_SANS = 0.6
"""The same of common letters of other fonts, on average, rounded up."""
DASH, MINUS, TIMES, NO_BREAK = "\u2013", "\u2212", "\u00d7", "\u00a0"
DIGITS = 3
"""Significant digits of numbers."""
ESTIMATED = 2
"""The same of estimates, which are good for no more."""


def width_of(text: object, size: float = TEXT, *, mono: bool = True) -> float:
    """Return the room that a label needs, at most."""
    units = sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in visible(text)
    )
    return units * size * (_MONO if mono else _SANS)


def number(value: float | None, digits: int = DIGITS) -> str:
    """Format a number without a unit; None: a dash."""
    return DASH if value is None else f"{value:.{digits}g}".replace("-", MINUS)


def percent(value: float | None, digits: int = DIGITS) -> str:
    """Format a share of 1 as a percentage; None: a dash."""
    if value is None:
        return DASH
    scaled = 100 * value
    if abs(scaled) < 1e-6:
        scaled = 0.0
    # Never with an exponent, and never with more digits: the page's script has no more of them.
    text = format(Decimal(f"{scaled:.{digits}g}"), "f")
    return f"{text}{NO_BREAK}%".replace("-", MINUS)


class Levels(msgspec.Struct, frozen=True):
    """A scale of colours: numbers below `edges[n]` and not below the one before are of class n.

    classes: one more than edges.  form: how numbers are written; empty: as percentages.
    """

    edges: tuple[float, ...]
    classes: tuple[str, ...]
    form: str = ""

    def class_of(self, value: float | None) -> str | None:
        """Return the class of a number; None if it is unknown."""
        if value is None or not math.isfinite(value):
            return None
        return self.classes[bisect_right(self.edges, value)]

    def told(self, value: float | None) -> str:
        """Format a number of this scale."""
        if value is None or not self.form:
            return percent(value)
        return f"{value:{self.form}}".replace("-", MINUS)

    def short(self, value: float) -> str:
        """Format a number for a small cell, without its unit."""
        if self.form:
            return self.told(value)
        return f"{100 * value:{'z.0f' if abs(value) >= 0.1 else '.2g'}}".replace("-", MINUS)


_STEPS = 7
"""The most edges of a scale above zero."""
SHARES = Levels((1e-9, 0.2, 0.4, 0.6, 0.8, 1.0), ("h0", "h1", "h3", "h4", "h6", "h7", "h8"))
"""Shares from 0 to 1: none, fifths, and all."""
SIGNED = Levels(
    (-0.5, -0.2, -0.05, -0.01, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    ("n4", "n3", "n2", "n1", "h0", "h1", "h2", "h3", "h4", "h6", "h7", "h8"),
)
"""Shares that may be negative, or larger than 1."""
COSINES = Levels(
    (-0.5, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.5, 0.8),
    ("n4", "n3", "n2", "n1", "h0", "h1", "h2", "h4", "h6", "h8"),
    "z.2f",
)


def growing(values: Iterable[float | None], form: str = "") -> Levels:
    """Return a scale from zero to the largest of some numbers, with round edges.

    Its steps are equal; where most numbers are far below the largest, each is 2 or 2.5 times the
    one before: 1, 2, 5, 10 and so on.
    """
    known = sorted(value for value in values if value is not None and 0 < value < math.inf)
    if not known:
        return Levels((), ("h0",), form)
    top = known[-1]
    if known[len(known) // 2] > top / 8:
        edges = [one for one in ticks(top, _STEPS) if 0 < one < top]
    else:
        power = math.floor(math.log10(top))
        series = [float(f"{n}e{at}") for at in (power - 2, power - 1, power) for n in (1, 2, 5)]
        edges = [one for one in series if known[0] < one < top][-_STEPS:]
    # The first class is of numbers that are zero.
    names = tuple(f"h{round(n * 8 / (len(edges) + 1))}" for n in range(len(edges) + 2))
    return Levels((math.ulp(0.0), *edges), names, form)


def legend(levels: Levels) -> list[tuple[str, str]]:
    """Return the classes of a scale with the numbers that they stand for, the least first."""
    edges, told = levels.edges, levels.told
    if not edges:
        return [(levels.classes[0], told(0.0))]
    rows = []
    for n, name in enumerate(levels.classes):
        if n == 0:
            is_zero = 0 < edges[0] < 1e-8
            rows.append((name, "0" if is_zero else f"< {told(edges[0])}"))
        elif n == len(edges):
            rows.append((name, f"≥ {told(edges[-1])}"))
        elif edges[n - 1] < 1e-8 and edges[n - 1] > 0:
            rows.append((name, f"< {told(edges[n])}"))
        else:
            rows.append((name, f"{told(edges[n - 1])} to {told(edges[n])}"))
    return rows


def ticks(top: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to about `top`, the last not below it."""
    if top <= 0 or not math.isfinite(top):
        return [0.0, 1.0]
    raw = top / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(step for n in (1, 2, 2.5, 5, 10) if (step := n * magnitude) >= raw * (1 - 1e-9))
    return [float(f"{step * n:.12g}") for n in range(math.ceil(top / step - 1e-9) + 1)]


def text(x: float, y: float, content: Child, kind: str = "label", **more: object) -> Markup:
    """Return a text; its `y` is the base line."""
    return tag("text", content, x=_short(x), y=_short(y), class_=kind, **more)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points, as the `d` of a path."""
    pairs = [f"{_short(x)} {_short(y)}" for x, y in points]
    return f"M{'L'.join(pairs)}"


def picture(
    width: float, height: float, title: str, told: str, *children: Child, kind: str = "figure"
) -> Markup:
    """Return a picture for a page or a file.

    title: its name.  told: what it shows, for those who do not see it.
    """
    return tag(
        "svg",
        tag("title", title),
        tag("desc", told),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        class_=kind,
        role="img",
        width=math.ceil(width),
        height=math.ceil(height),
        viewBox=f"0 0 {math.ceil(width)} {math.ceil(height)}",
    )


def hatching(id: str) -> Markup:
    """Return what `fill="url(#ID)"` draws: lines across, for what is not known."""
    return tag(
        "defs",
        tag(
            "pattern",
            tag("path", d="M0 6L6 0", class_="hatch"),
            id=id,
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        ),
    )


def style() -> str:
    """Return the style of all pictures."""
    return files("mstore_pages").joinpath("figures.css").read_text()


def svg_file(drawn: Markup) -> str:
    """Return a picture as the text of an SVG file, with its style and a background."""
    opening, _, rest = drawn.partition(">")
    background = tag("rect", width="100%", height="100%", class_="paper")
    return join(
        [
            Markup(f"{opening}>"),
            tag("style", Markup(style())),
            background,
            Markup(rest),
            Markup("\n"),
        ]
    )


def brief(value: object) -> str:
    """Format a value of JSON: text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
