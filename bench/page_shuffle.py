"""The section of bench/shuffle.py."""

from __future__ import annotations

from statistics import mean, median

from tables import Told, machine, table

ABOUT = """\
{machine} `python bench/shuffle.py WORK`. Two experts of one base (`examples/family.py` with two),
their average, and stacks of layers drawn from both with equal weights, {seeds} seeds each: of
{layers} layers as they stand (`mstore shuffle`), and of as many in any order (`--full-random`).
Held-out losses in nats a byte; of the shuffles the median, with the extremes in brackets. None
was trained afterwards.
"""


def _told(losses: list[float]) -> str:
    middle = f"{median(losses):.3f}"
    return middle if len(losses) == 1 else f"{middle} ({min(losses):.3f} to {max(losses):.3f})"


def section(told: Told) -> str:
    """The section of bench/shuffle.py."""
    about = ABOUT.format(
        machine=machine(told), seeds=len(told["losses"]["shuffle"]), layers=told["layers"]
    )
    domains = told["experts"]
    rows = [
        (
            kind,
            *(_told([one[domain] for one in losses]) for domain in domains),
            _told([mean(one[domain] for domain in domains) for one in losses]),
        )
        for kind, losses in told["losses"].items()
    ]
    return "\n".join(["## Shuffles of layers\n", about, table(("model", *domains, "mean"), rows)])
