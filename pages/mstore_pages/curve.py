"""The curve of a sweep: what a merge would read at each budget, against its error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from mstore.terms.sizes import format_size
from mstore_pages.figures import DIGITS, ESTIMATED, path, percent, picture, text, ticks, width_of
from mstore_pages.markup import Markup, join, tag

WIDTH, HEIGHT = 640.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 24.0, 82.0, 52.0
_KEYS = 64.0
"""Height of the line of keys."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECADES = 30
"""Errors that span more than this factor are drawn on a logarithmic scale."""
LEAST = 1e-4
"""Errors below this part of the largest one are drawn as zero: rounding must not set the scale."""
KINDS = ("certified bound", "estimate", "measured")


class BudgetPoint(msgspec.Struct, frozen=True):
    """One budget: bytes read from experts, and errors relative to the base's norm.

    An error is None if the method has no such figure or it was not measured.
    """

    expert_bytes: int
    bound: float | None = None
    estimate: float | None = None
    measured: float | None = None

    def errors(self) -> tuple[float | None, ...]:
        """Return the errors in the order of KINDS."""
        return self.bound, self.estimate, self.measured


def draw(points: Sequence[BudgetPoint], title: str, chosen: BudgetPoint | None = None) -> Markup:
    """Return the picture; chosen: the point of a merge, marked with a ring."""
    ordered = sorted(points, key=lambda point: point.expert_bytes)
    every = [*ordered, *([chosen] if chosen else [])]
    seen = [e for point in every for e in point.errors() if e is not None and math.isfinite(e)]
    scale = _Scale(max((point.expert_bytes for point in every), default=0), seen)
    lines, keys = [], []
    for n, kind in enumerate(KINDS, 1):
        errors = [(point.expert_bytes, point.errors()[n - 1]) for point in ordered]
        known = [(size, error) for size, error in errors if _is_known(error)]
        if known:
            places = [scale.place(size, error) for size, error in known]
            lines.append(tag("path", d=path(places), class_=f"line-{n}"))
            lines += [
                _mark(n, place, f"{kind} at {format_size(size)}: {percent(error, _digits(kind))}")
                for place, (size, error) in zip(places, known, strict=True)
            ]
            keys.append((n, kind))
    return picture(
        max(WIDTH, 32 + width_of(title, 14, mono=False)),
        HEIGHT,
        title,
        "Error of the merge against bytes read from experts. The table has the numbers.",
        text(16, 22, title, "big"),
        text(16, 42, "error relative to the norm of the base", "quiet"),
        *scale.axes(),
        *lines,
        _ring(chosen, scale),
        *_keys(keys),
        text(
            (_LEFT + WIDTH - _RIGHT) / 2,
            HEIGHT - 10,
            f"read from experts ({scale.unit})",
            "quiet middle",
        ),
        kind="figure fits",
    )


def _digits(kind: str) -> int:
    return ESTIMATED if kind == KINDS[1] else DIGITS


def _is_known(error: float | None) -> bool:
    return error is not None and math.isfinite(error)


class _Scale:
    """Where bytes and errors lie."""

    def __init__(self, largest: int, seen: Sequence[float]) -> None:
        power = 0
        while power < len(_UNITS) - 1 and largest >= 1024 ** (power + 1):
            power += 1
        self.unit, self._unit = _UNITS[power], 1024**power
        self._xs = ticks(largest / self._unit)
        top = max(seen, default=0.0) or 1.0
        positive = [one for one in seen if one > LEAST * top]
        self._is_log = bool(positive) and top > DECADES * min(positive)
        if self._is_log:
            low = math.floor(math.log10(min(positive)))
            high = math.ceil(math.log10(top) - 1e-9)
            self._low, self._high = float(low), float(high)
            # Zero has a place of its own below the lowest decade.
            self._ys = [0.0, *(10.0**n for n in range(low, high + 1))]
        else:
            self._ys = ticks(top)

    def place(self, size: int, error: float | None) -> tuple[float, float]:
        """Return where a point lies."""
        right = WIDTH - _RIGHT
        return _LEFT + (right - _LEFT) * size / self._unit / self._xs[-1], self._y(error or 0.0)

    def _y(self, error: float) -> float:
        foot = HEIGHT - _BOTTOM
        if not self._is_log:
            return foot - (foot - _TOP) * error / self._ys[-1]
        zero = 28.0
        lowest = math.pow(10.0, self._low)
        if error < lowest:
            return foot - zero * error / lowest
        return (
            foot
            - zero
            - (foot - zero - _TOP) * (math.log10(error) - self._low) / (self._high - self._low)
        )

    def axes(self) -> list[Markup]:
        """Return lines and numbers of both axes."""
        foot, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        drawn = []
        for one in self._ys:
            y = self._y(one)
            drawn.append(tag("path", d=path([(_LEFT, y), (right, y)]), class_="grid"))
            drawn.append(text(_LEFT - 8, y + 4, percent(one), "end"))
        for one in self._xs:
            x = _LEFT + (right - _LEFT) * one / self._xs[-1]
            drawn.append(tag("path", d=path([(x, foot), (x, foot + 5)]), class_="axis"))
            drawn.append(text(x, foot + 20, f"{one:g}", "middle"))
        drawn.append(tag("path", d=path([(_LEFT, foot), (right, foot)]), class_="axis"))
        return drawn


def _mark(n: int, place: tuple[float, float], told: str) -> Markup:
    """Return the mark of a point: a circle, a square, or a triangle."""
    x, y = place
    title = tag("title", told)
    if n == 1:
        return tag("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.5, class_="dot-1")
    if n == 2:
        return tag(
            "rect", title, x=f"{x - 3:.1f}", y=f"{y - 3:.1f}", width=6, height=6, class_="dot-2"
        )
    triangle = [(x, y - 4), (x + 4, y + 3.5), (x - 4, y + 3.5), (x, y - 4)]
    return tag("path", title, d=path(triangle), class_="dot-3")


def _ring(chosen: BudgetPoint | None, scale: _Scale) -> Markup | None:
    if chosen is None:
        return None
    error = next((one for one in chosen.errors() if _is_known(one)), None)
    if error is None:
        return None
    x, y = scale.place(chosen.expert_bytes, error)
    digits = _digits(KINDS[0] if _is_known(chosen.bound) else KINDS[1])
    label = f"this merge: {format_size(chosen.expert_bytes)}, {percent(error, digits)}"
    room = width_of(label, mono=False)
    # To the right, where the curve is lower; as far as there is room.
    is_last = x + 14 + room > WIDTH - _RIGHT
    kind = "strong halo end" if is_last else "strong halo"
    return join(
        [
            tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=8, class_="chosen"),
            text(WIDTH - _RIGHT if is_last else x + 14, y - 14, label, kind),
        ]
    )


def _keys(keys: Sequence[tuple[int, str]]) -> list[Markup]:
    drawn, x = [], _LEFT
    for n, kind in keys:
        drawn.append(tag("path", d=path([(x, _KEYS), (x + 28, _KEYS)]), class_=f"line-{n}"))
        drawn.append(_mark(n, (x + 14, _KEYS), kind))
        drawn.append(text(x + 36, _KEYS + 4, kind))
        x += 36 + width_of(kind, mono=False) + 24
    return drawn
