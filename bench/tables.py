"""Figures as words and tables: what all sections of the page share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
Told = dict[str, Any]


def machine(told: Told) -> str:
    """What the results were measured on."""
    found = told["machine"]
    # Older results do not say it.
    wide = {None: "", True: " with AVX-512", False: " without AVX-512"}[found.get("avx512")]
    return (
        f"Machine: {found['processor']}{wide}, {found['cores']} cores, {found['memory_gib']} GiB, "
        f"Linux {found['kernel']}, Python {found['python']}."
    )


def aim(words: str, *, met: bool) -> str:
    """An aim, and whether the figures met it."""
    return f"Aim: {words}: {'met' if met else 'missed (see below)'}.\n"


def span(row: Told, digits: int = 2) -> str:
    """Median and extremes of a figure; the median alone where there was one run."""
    text = f"{row['median']:.{digits}f}"
    if row["min"] == row["max"]:
        return text
    return f"{text} ({row['min']:.{digits}f} to {row['max']:.{digits}f})"


def percent(value: float, digits: int = 1) -> str:
    """A share in percent."""
    return f"{100 * value:.{digits}f} %"


def wall(row: Told) -> str:
    """Wall seconds of `measure.median`."""
    return span({"median": row["wall"], "min": row["wall_min"], "max": row["wall_max"]})


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
