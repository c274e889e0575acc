"""The section of bench/growth.py: stores of up to 10^7 blocks."""

from __future__ import annotations

from tables import Told, aim, machine, percent, span, table

GROWTH = """\
{machine} `python bench/growth.py WORK`. Simulated stores with a real structure: index rows,
records, refs and pack footers are written as commits write them; block payloads are holes in
sparse packs. {snapshots} snapshots in ten families; each changed 3 of 300 tensors against its
base, and the blocks of these are deltas. Each task runs in its own process, imports not counted,
page cache warm; memory is the anonymous memory that the task adds to its process.

![Seconds and memory against blocks](plots/growth.svg)
"""
FLAT = 2.0
"""Something is flat if it grows by no more than this while blocks grow a hundredfold."""


def section(told: Told) -> str:
    """The section of bench/growth.py."""
    sizes = dict(sorted(told["sizes"].items(), key=lambda item: int(item[0])))
    every = list(sizes.values())
    tasks = list(every[0]["tasks"])
    stores = [
        (
            f"{one['blocks']:,}",
            f"{one['snapshots']:,}",
            f"{one['refs']:,}",
            f"{one['records']:,}",
            f"{one['index_bytes'] / 1e6:.0f}",
            f"{one['index_bytes'] / one['blocks']:.0f}",
            percent(one["index_bytes"] / one["plain_bytes_of_blocks"], 4),
        )
        for one in every
    ]
    seconds = [(task, *(span(one["tasks"][task]["seconds"], 3) for one in every)) for task in tasks]
    memory = [
        (
            task,
            *(
                f"{one['tasks'][task]['anonymous']['median'] / 1e6:.0f} "
                f"({one['tasks'][task]['anonymous']['median'] / one['blocks']:.0f})"
                for one in every
            ),
        )
        for task in tasks
    ]
    share = max(one["index_bytes"] / one["plain_bytes_of_blocks"] for one in every)
    mark = [one["tasks"]["gc mark"]["anonymous"]["median"] / one["blocks"] for one in every]
    grew = {task: _median(every[-1], task) / _median(every[0], task) for task in ("open", "add")}
    return "\n".join(
        [
            "## Growth\n",
            GROWTH.format(machine=machine(told), snapshots=f"{every[0]['snapshots']:,}"),
            table(
                (
                    *("blocks", "snapshots", "refs", "records"),
                    *("index MB", "index bytes a block", "index, of plain bytes"),
                ),
                stores,
            ),
            "Seconds:\n",
            table(("blocks", *(f"{one['blocks']:,}" for one in every)), seconds),
            "Memory in MB (bytes a block):\n",
            table(("blocks", *(f"{one['blocks']:,}" for one in every)), memory),
            aim(
                f"open and commit flat (the largest store takes {grew['open']:.1f} and "
                f"{grew['add']:.1f} times the smallest's seconds)",
                met=max(grew.values()) <= FLAT,
            ),
            aim(f"index at most 0.1 % of plain bytes ({percent(share, 3)})", met=share <= 1e-3),
            aim(
                f"gc's mark in at most 100 bytes a block (largest store: {mark[-1]:.0f})",
                met=mark[-1] <= 100,
            ),
        ]
    )


def _median(one: Told, task: str) -> float:
    return float(one["tasks"][task]["seconds"]["median"])
