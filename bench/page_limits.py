"""The section of bench/limits.py: each command beside the least that this machine could take."""

from __future__ import annotations

from tables import Told, machine, span, table, wall

LIMITS = """\
{machine} `python bench/limits.py WORK`. The family is `generate.near`, {plain:.0f} MB a checkpoint,
{experts} experts; medians of {rounds} rounds. Each part is measured alone on these bytes: `read` is
pread from the page cache, `hash` BLAKE3, `decode` the codecs alone, `kernel` the merge alone,
`write` writing and fdatasync. The limit is the start of an interpreter and the larger of the
processor's parts, shared by {cores} processors, and the disk's. A limit does not count planning,
looking up, coding what a dense store writes, or publishing.
"""


def section(told: Told) -> str:
    """The section of bench/limits.py."""
    parts = told["parts"]
    disk = {name for work in told["works"].values() for name in work["disk"]}
    what = [
        (name, span(row, 3), "disk, wall" if name in disk | {"start"} else "processor")
        for name, row in parts.items()
    ]
    rows = [
        (
            name,
            wall(work),
            f"{work['cpu']:.2f}",
            f"{work['limit']:.2f}",
            span(work["ratio"]),
        )
        for name, work in told["works"].items()
    ]
    return "\n".join(
        [
            "## How near the limit of the machine\n",
            LIMITS.format(
                machine=machine(told),
                plain=told["plain_bytes"] / 1e6,
                experts=told["experts"],
                rounds=told["rounds"],
                cores=told["cores"],
            ),
            table(("part", "seconds", "of"), what),
            table(("command", "wall s", "CPU s", "limit s", "times the limit"), rows),
        ]
    )
