"""The section of bench/methods.py."""

from __future__ import annotations

from methods import CODECS, OTHERS, SELECTING
from tables import MIB, Told, aim, machine, table

ABOUT = """\
The same recipe in both programs: four experts where a method takes several, {plain:.0f} MB each,
which differ everywhere. Both are fresh processes that read the same checkpoints from the page cache
and write a whole model, in turn; mergekit {mergekit} (torch {torch}) has its defaults. mstore reads
packs without compression (raw) or dense ones, plans, checks every block against its hash and syncs
its output. Where a method needs facts about whole tensors, mstore measures them before it merges; a
store keeps them, but here each round begins without. `times` is mergekit's wall time over mstore's.
"""


def section(told: Told) -> str:
    """The section of bench/methods.py."""
    found = told["methods"]
    rows = []
    for method, row in found.items():
        parameters = ", ".join(
            f"{name} {value}"
            for name, value in row["parameters"].items()
            if value not in (True, False)
        )
        cells = [f"`{method}`", parameters]
        for program in ("mergekit", *CODECS):
            own = row[program]
            cells += [f"{own['wall']:.1f}", f"{own['cpu']:.1f}", f"{own['anonymous'] / MIB:.0f}"]
        cells += [f"{row['times_faster'][codec]:.1f}x" for codec in CODECS]
        rows.append(tuple(cells))
    programs = ("mergekit", "raw", "dense")
    measured = [f"{one}: {what}" for one in programs for what in ("wall s", "CPU s", "MiB")]
    head = ("method", "parameters", *measured, "times, raw", "times, dense")
    size = f"{told['millions']:.0f} M parameters, bf16, {told['experts']} experts"
    about = ABOUT.format(plain=told["plain_bytes"] / 1e6, **told["versions"])

    def least(methods: dict[str, object]) -> float:
        return min(found[one]["times_faster"]["raw"] for one in methods if one in found)

    most = max(row[codec]["anonymous"] for row in found.values() for codec in CODECS)
    return "\n".join(
        [
            f"## Every method of mergekit: {size}, full read\n",
            f"{machine(told)} `python bench/methods.py WORK --mergekit ...`.\n",
            about,
            table(head, rows),
            aim("methods that select at least 10 times as fast", met=least(SELECTING) >= 10),
            aim("the others at least 5 times as fast", met=least(OTHERS) >= 5),
            aim("under 512 MiB", met=most < 512 * MIB),
        ]
    )
