"""The table of docs/merge-methods.md: measured over estimated errors of merges under a budget."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from tables import Told, table

from mstore.merge.methods.registry import METHODS

BEGIN = "<!-- made by bench/report.py from bench/results/estimates.json -->\n"
END = "<!-- end of what bench/report.py makes -->\n"
TRAINED = "trained"
# Made so that heavy experts cancel, which no norm tells.
CANCELLING = "undecided"

Ask = tuple[str, str, str]


def ratios_of(told: Told, wanted: Callable[[str], bool]) -> dict[tuple[Ask, bool], list[float]]:
    """Measured over estimated, by (method, options, density) and by whether weights are equal."""
    found: dict[tuple[Ask, bool], list[float]] = {}
    for family, figures in told.items():
        if not isinstance(figures, dict) or "merges" not in figures or not wanted(family):
            continue
        for merge in figures["merges"]:
            key = _asked(merge), merge["weights"] == "equal"
            found.setdefault(key, []).extend(merge["ratios"])
    return found


def part(told: Told) -> str:
    """The table, between its marks."""
    columns = [
        ratios_of(told, lambda family: family not in (TRAINED, CANCELLING)),
        ratios_of(told, lambda family: family == TRAINED),
    ]
    asks = list(dict.fromkeys(ask for ask, _ in columns[0]))
    rows = [
        (
            *ask,
            *(_span(column.get((ask, equal), [])) for column in columns for equal in (True, False)),
        )
        for ask in asks
    ]
    head = ("method", "options", "density", "random, equal weights", "random, unequal")
    return BEGIN + table((*head, "trained, equal weights", "trained, unequal"), rows) + END


def placed(page: str, told: Told) -> str:
    """The page with the table of these results in place of its own."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + part(told) + after


def extremes(told: Told) -> tuple[float, float]:
    """The smallest and the largest ratio of families that are not made to cancel.

    Of the methods that have no bound: of the others the bound is what counts.  Without those of
    which no norm tells how much they select: plans have a note of their own for them.
    """
    found = ratios_of(told, lambda family: family != CANCELLING)
    unbounded = {
        f"`{name}`"
        for name, method in METHODS.items()
        if not method.has_bound and method.select.sized_by_norms
    }
    ratios = [own for ((method, _, _), _), own in found.items() if method in unbounded]
    every = list(itertools.chain.from_iterable(ratios))
    return min(every), max(every)


def _asked(merge: dict[str, Any]) -> Ask:
    options = dict(merge["parameters"])
    density = options.pop("density", None)
    told = ", ".join(f"`{name}={str(value).lower()}`" for name, value in options.items())
    return f"`{merge['method']}`", told, "" if density is None else f"{density:g}"


def _span(ratios: list[float]) -> str:
    if not ratios:
        return ""
    return " / ".join(
        f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios))
    )
