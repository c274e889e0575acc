"""The section of bench/first.py: the first commands of a new installation."""

from __future__ import annotations

from tables import Told, machine, table, wall

FIRST = """\
{machine} `python bench/first.py WORK`. A checkpoint of 0.16 GB, most of it embeddings; medians of
{rounds} rounds. *before*: an installation without kernels, which compiles what it needs; *ahead*:
with the kernels that come with mstore. *First* is the first time that the installation runs the
command.
"""


def section(told: Told) -> str:
    """The section of bench/first.py."""
    rows = [
        (
            name,
            *(
                wall(told[way][time][name])
                for way in ("before", "ahead")
                for time in ("first", "second")
            ),
        )
        for name in told["ahead"]["first"]
    ]
    return "\n".join(
        [
            "## The first commands of a new installation\n",
            FIRST.format(machine=machine(told), rounds=told["rounds"]),
            table(
                ("wall s", "before, first", "before, second", "ahead, first", "ahead, second"), rows
            ),
        ]
    )
