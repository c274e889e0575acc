"""The section of bench/mergekit.py."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, table, wall

MERGEKIT = """\
Both are fresh processes that read the same checkpoints from the page cache (mergekit the plain
files, mstore its packs) and write a whole model; they run in turn. mstore plans, checks every
block against its hash and syncs its output; mergekit {mergekit} (torch {torch}, transformers
{transformers}, its command line with its defaults) does none of these.
{about}

![Seconds and memory of both](plots/mergekit.svg)
"""


def section(told: Told) -> str:
    """The section of bench/mergekit.py."""
    methods = [name for name in ("ties", "dare_ties", "linear") if name in told]
    rows = []
    for method in methods:
        found = told[method]
        density = found["parameters"].get("density")
        label = method if density is None else f"{method}, density {density}"
        for program in ("mergekit", "mstore"):
            row = found[program]
            mine = program == "mstore"
            rows.append(
                (
                    label,
                    program,
                    wall(row),
                    f"{row['cpu']:.2f}",
                    f"{row['anonymous'] / MIB:.0f}",
                    str(row["runs"]),
                    f"{found['times_faster']:.0f}x" if mine else "",
                    f"{found['times_less_cpu']:.0f}x" if mine else "",
                )
            )
    head = ("", "", "wall s", "CPU s", "peak anonymous MiB", "rounds", "wall", "CPU")
    about = f"A checkpoint is {told['plain_bytes'] / 1e6:.0f} MB; experts differ everywhere."
    ties, linear = told["ties"]["times_faster"], told["linear"]["times_faster"]
    size = f"{told['millions']:.0f} M parameters, bf16, {told['experts']} experts"
    return "\n".join(
        [
            f"## Compared with mergekit: {size}, full read\n",
            f"{machine(told)} `python bench/mergekit.py WORK --mergekit ...`.\n",
            MERGEKIT.format(**told["versions"], about=about),
            table(head, rows),
            aim("TIES at least 50 times as fast", met=ties >= 50),
            aim("linear at least 8 times as fast", met=linear >= 8),
        ]
    )
