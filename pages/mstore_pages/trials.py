"""The trials of a search: the best so far, all numbers side by side, and what each one did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mstore.terms.sizes import counted
from mstore_pages.document import Cell, scroll, table
from mstore_pages.figures import number, path, picture, text
from mstore_pages.markup import Child, Markup, join, tag

if TYPE_CHECKING:
    from mstore.api.reports import FreeNumber, SearchedReport, TrialReport

DRAWN = 100
"""The most trials in a picture: the best ones."""
LISTED = 50
"""The most rows of the table."""
_WIDTH, _HEIGHT = 640.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 24.0, 52.0, 40.0
_AXIS = 92.0
"""Room for one axis of parallel coordinates."""
_SHOWN = 14
"""Letters of a name at an axis; the whole name is its title."""


def sections(found: SearchedReport) -> Iterator[Markup]:
    """Yield what a page shows of a search."""
    scored = [one for one in found.trials if one.score is not None][:DRAWN]
    if len(scored) > 1:
        yield scroll("Best so far", _so_far(found, scored))
    if _is_of_experts(found):
        yield _experts(found, scored)
    elif len(scored) > 1 and found.numbers:
        yield scroll("Numbers of each trial", _parallel(found, scored))
        yield _effects(found, scored)
    yield _listed(found)


def _is_of_experts(found: SearchedReport) -> bool:
    """Return whether experts were chosen, with weights that follow from how many they are."""
    return any(one.experts is not None for one in found.trials)


def lead(found: SearchedReport) -> str:
    """Return what was searched, in a sentence or two."""
    better = "less" if found.minimize else "more"
    shown = (
        "" if len(found.trials) == found.tried else f" The page has the best {len(found.trials)}."
    )
    same = (
        " The same command reports, so the winner is likely less good than its score says."
        if found.reported_by == found.decided_by
        else ""
    )
    return (
        f"{found.sampler} tried {counted(found.tried, 'merge')}, and this one is the best by "
        f"{found.score}, of which {better} is better.{shown}{same}"
    )


# -- pictures ------------------------------------------------------------------------------------


class _Scale:
    """Where scores lie: the better ones higher."""

    def __init__(self, found: SearchedReport, trials: Sequence[TrialReport], foot: float) -> None:
        scores = [one.score or 0.0 for one in trials]
        self.low, self.high = min(scores), max(scores)
        self._is_less = found.minimize
        self._foot = foot

    def y(self, score: float | None) -> float:
        """Return the height of a score."""
        span = self.high - self.low
        share = ((score or 0.0) - self.low) / span if span else 0.5
        return _TOP + (self._foot - _TOP) * (share if self._is_less else 1 - share)

    def ends(self, x: float) -> Iterator[Markup]:
        """Yield the numbers at the ends of the axis, left of x."""
        for value in dict.fromkeys((self.low, self.high)):
            yield text(x - 8, self.y(value) + 4, number(value, 4), "end")


def _so_far(found: SearchedReport, trials: Sequence[TrialReport]) -> Markup:
    """Draw the score of each trial, and the best one until then."""
    foot, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    scale = _Scale(found, trials, foot)
    last = max(1, *(one.number for one in trials))

    def x(at: int) -> float:
        return _LEFT + (right - _LEFT) * at / last

    steps: list[tuple[float, float]] = []
    best = math.inf
    for one in sorted(trials, key=lambda one: one.number):
        signed = (one.score or 0.0) * (1 if found.minimize else -1)
        if signed < best:
            if steps:
                steps.append((x(one.number), steps[-1][1]))
            steps.append((x(one.number), scale.y(one.score)))
            best = signed
    steps.append((right, steps[-1][1]))
    dots = join(
        [
            tag(
                "circle",
                tag("title", f"trial {one.number}: {number(one.score, 4)}"),
                cx=f"{x(one.number):.1f}",
                cy=f"{scale.y(one.score):.1f}",
                r=3,
                class_="dot-3",
            )
            for one in trials
        ]
    )
    title = f"{found.score} of each trial"
    return picture(
        _WIDTH,
        _HEIGHT,
        title,
        "Scores of the trials in order, better ones higher, and the best so far as a line.",
        text(16, 22, title, "big"),
        text(16, 40, "better is higher; the line is the best so far", "quiet"),
        *scale.ends(_LEFT),
        tag("path", d=path([(_LEFT, foot), (right, foot)]), class_="axis"),
        dots,
        tag("path", d=path(steps), class_="line-1"),
        text(_LEFT, foot + 18, "0", "middle"),
        text(right, foot + 18, str(last), "middle"),
        text((_LEFT + right) / 2, foot + 18, "trial", "quiet middle"),
        kind="figure fits",
    )


def _share(one: FreeNumber, value: float) -> float:
    """Return where in its range a value is, from 0 to 1."""
    if one.log:
        place = math.log(max(value, one.low) / one.low) / math.log(one.high / one.low)
    else:
        place = (value - one.low) / (one.high - one.low)
    return min(max(place, 0.0), 1.0)


def _named(x: float, name: str) -> Markup:
    shown = name if len(name) <= _SHOWN else f"{name[: _SHOWN - 1]}…"
    return text(x, _TOP - 8, join([tag("title", name), shown]), "name middle")


def _parallel(found: SearchedReport, trials: Sequence[TrialReport]) -> Markup:
    """Draw each trial as a line over one axis for each number and one for the score."""
    top, foot = _TOP + 22, _HEIGHT
    axes = len(found.numbers)
    width = max(_WIDTH, _LEFT + _AXIS * axes + _RIGHT + _AXIS / 2)
    xs = [_AXIS / 2 + _AXIS * at for at in range(axes + 1)]
    scores = [one.score or 0.0 for one in trials]
    low, high = min(scores), max(scores)

    def y(share: float) -> float:
        return foot - (foot - top) * share

    def score_share(score: float | None) -> float:
        share = ((score or 0.0) - low) / (high - low) if high > low else 0.5
        return 1 - share if found.minimize else share

    def line(one: TrialReport) -> str:
        shares = [
            _share(free, value) for free, value in zip(found.numbers, one.values, strict=True)
        ]
        places = [*map(y, shares), y(score_share(one.score))]
        return path(list(zip(xs, places, strict=True)))

    drawn: list[Child] = []
    for x, free in zip(xs, found.numbers, strict=False):
        drawn += [
            tag("path", d=path([(x, top), (x, foot)]), class_="axis"),
            _named(x, free.name),
            text(x, _TOP + 8, number(free.high), "quiet middle"),
            text(x, foot + 18, number(free.low), "quiet middle"),
        ]
    worst, best = (low, high) if not found.minimize else (high, low)
    drawn += [
        tag("path", d=path([(xs[-1], top), (xs[-1], foot)]), class_="axis"),
        _named(xs[-1], found.score),
        text(xs[-1], _TOP + 8, number(best, 4), "strong middle"),
        text(xs[-1], foot + 18, number(worst, 4), "quiet middle"),
    ]
    few = max(1, len(trials) // 10)
    return picture(
        width,
        _HEIGHT + 28,
        "Numbers of each trial",
        "Each line is a trial; it crosses each axis at that number's value, and the last at its "
        "score. The best tenth is coloured.",
        text(16, 22, "Numbers of each trial", "big"),
        tag("path", d="".join(line(one) for one in trials[few:]), class_="trace"),
        tag("path", d="".join(line(one) for one in trials[1:few]), class_="trace-good"),
        tag("path", d=line(trials[0]), class_="line-1"),
        *drawn,
    )


_CELL_WIDTH, _CELL_HEIGHT = 190.0, 120.0


def _effects(found: SearchedReport, trials: Sequence[TrialReport]) -> Markup:
    """Return a small picture of each number: its values against the scores of the trials."""
    scores = [one.score or 0.0 for one in trials]
    low, high = min(scores), max(scores)
    few = trials[: max(1, len(trials) // 4)]
    items = []
    for at, free in enumerate(found.numbers):

        def place(one: TrialReport, at: int = at, free: FreeNumber = free) -> tuple[float, float]:
            share = ((one.score or 0.0) - low) / (high - low) if high > low else 0.5
            share = share if found.minimize else 1 - share
            x = 6 + (_CELL_WIDTH - 12) * _share(free, one.values[at])
            return x, 6 + (_CELL_HEIGHT - 12) * share

        dots = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in map(place, trials))
        x, y = place(trials[0])
        good = sorted(one.values[at] for one in few)
        drawn = picture(
            _CELL_WIDTH,
            _CELL_HEIGHT,
            f"{found.score} by {free.name}",
            "Each point is a trial, better ones higher; the ring is the winner.",
            tag("rect", width=_CELL_WIDTH, height=_CELL_HEIGHT, class_="plate"),
            tag("path", d=dots, class_="points"),
            tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=5, class_="chosen"),
            kind="figure fits",
        )
        told = (
            f"{number(free.low)} to {number(free.high)}; winner {number(trials[0].values[at])}, "
            f"best quarter {number(good[0])} to {number(good[-1])}"
        )
        caption = tag("figcaption", tag("span", free.name, class_="name"))
        items.append(tag("li", tag("figure", caption, drawn, tag("small", told, class_="quiet"))))
    return join([tag("h3", "What each number did"), tag("ul", *items, class_="gallery")])


# -- tables --------------------------------------------------------------------------------------


def _experts(found: SearchedReport, trials: Sequence[TrialReport]) -> Markup:
    """Return the mean scores of trials with and without each expert."""
    names = list(dict.fromkeys(name for one in trials for name in one.experts or ()))
    rows = []
    for name in names:
        with_it = [one.score or 0.0 for one in trials if name in (one.experts or ())]
        without = [one.score or 0.0 for one in trials if name not in (one.experts or ())]
        means = [sum(own) / len(own) if own else None for own in (with_it, without)]
        is_chosen = "yes" if name in (trials[0].experts or ()) else "no"
        rows.append((name, is_chosen, *(Cell(number(one, 4), "n", one) for one in means)))
    columns = [("Expert", "name"), ("In the winner", ""), ("Mean with it", "n"), ("Without", "n")]
    return join(
        [tag("h3", "What each expert did"), table(f"{found.score} by expert", columns, rows)]
    )


def _listed(found: SearchedReport) -> Markup:
    """Return the table of the best trials."""
    is_of_experts = _is_of_experts(found)
    columns = [("Trial", "n"), (found.score, "n")]
    columns += [("Experts", "")] if is_of_experts else [(one.name, "n") for one in found.numbers]
    rows = [
        (
            Cell(str(one.number), "n", one.number),
            Cell(number(one.score, 6), "n", one.score),
            *(
                [", ".join(one.experts or ())]
                if is_of_experts
                else [Cell(number(value, 4), "n", value) for value in one.values]
            ),
        )
        for one in found.trials[:LISTED]
    ]
    left = len(found.trials) - len(rows)
    more = f"; {left} worse ones are left out" if left > 0 else ""
    return table(f"Trials, the best first{more}", columns, rows, sortable=True)
