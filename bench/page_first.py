"""The section of bench/first.py: the first commands of a new installation."""

from __future__ import annotations

from tables import Told, machine, table, wall

FIRST = """\
{machine} `python bench/first.py WORK`. A checkpoint of 0.16 GB, most of it embeddings; medians of
{rounds} rounds. *First* is the first time that the installation runs the command.
"""


def section(told: Told) -> str:
    """The section of bench/first.py."""
    rows = [
        (name, *(wall(told[time][name]) for time in ("first", "second"))) for name in told["first"]
    ]
    return "\n".join(
        [
            "## The first commands of a new installation\n",
            FIRST.format(machine=machine(told), rounds=told["rounds"]),
            table(("wall s", "first", "second"), rows),
        ]
    )
