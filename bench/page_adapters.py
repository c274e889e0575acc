"""The section of bench/adapters.py."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, table, wall

ABOUT = """\
A model of {millions:.0f} M parameters in bf16 ({plain:.0f} MB) and LoRA adapters of rank {rank} on
all linear layers, {adapter:.0f} MB each in float32. Both are fresh processes that read the same
files from the page cache and write a whole model; they run in turn. mstore reads the adapters
twice: for the norms of their products, to plan (not with `--no-analyze`), and to merge. PEFT loads
the model, applies the adapters with `merge_and_unload` and saves it.

With one adapter most of PEFT's time is the start of its program.
"""


def section(told: Told) -> str:
    """The section of bench/adapters.py."""
    rows = []
    for name, words in (("one", "one adapter"), ("eight", "eight adapters, added")):
        found = told[name]
        for program in ("peft", "mstore"):
            row = found[program]
            mine = program == "mstore"
            rows.append(
                (
                    words,
                    "PEFT" if program == "peft" else "mstore",
                    wall(row),
                    f"{row['cpu']:.2f}",
                    f"{row['anonymous'] / MIB:.0f}",
                    f"{found['times_faster']:.1f}x" if mine else "",
                    f"{found['times_less_cpu']:.1f}x" if mine else "",
                )
            )
    for name, words in (("unmeasured", "eight, --no-analyze"), ("virtual", "eight, virtual")):
        row = told[name]["mstore"]
        memory = f"{row['anonymous'] / MIB:.0f}"
        rows.append((words, "mstore", wall(row), f"{row['cpu']:.2f}", memory, "", ""))
    head = ("", "", "wall s", "CPU s", "peak anonymous MiB", "wall", "CPU")
    about = ABOUT.format(
        millions=told["millions"],
        plain=told["plain_bytes"] / 1e6,
        rank=told["rank"],
        adapter=told["adapter_bytes"] / 1e6,
    )
    eight = told["eight"]
    return "\n".join(
        [
            "## Adapters, compared with PEFT\n",
            f"{machine(told)} `python bench/adapters.py WORK --peft ...`.\n",
            about,
            table(head, rows),
            aim("eight adapters at least 10 times as fast", met=eight["times_faster"] >= 10),
            aim("under 512 MiB", met=eight["mstore"]["anonymous"] < 512 * MIB),
        ]
    )
