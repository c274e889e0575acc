"""The section of bench/start.py: what commands cost before their work."""

from __future__ import annotations

from tables import Told, aim, machine, span, table

START = """\
{machine} `python bench/start.py WORK`. Whole processes, page cache warm, medians of {rounds}
rounds in which everything runs in turn: a store of a base, four experts and their merge, of
{tensors} tensors each, beside a git repository of the same files with a branch each, and Python
that does nothing, which is the limit. Processor time is that of the process, as a multiple of
Python's in the same round.
"""
REACH_MS = 120
LOOKS = ("refs", "log", "show", "ls")


def section(told: Told) -> str:
    """The section of bench/start.py."""
    commands = told["commands"]
    rows = [
        (
            f"`{name}`",
            span(one["wall_ms"], 0),
            span(one["cpu_ms"], 0),
            f"{one['times_python']['median']:.1f}x",
        )
        for name, one in commands.items()
    ]
    walls = [commands[f"mstore {name}, now"]["wall_ms"]["median"] for name in LOOKS]
    return "\n".join(
        [
            "## Start\n",
            START.format(machine=machine(told), rounds=told["rounds"], tensors=told["tensors"]),
            table(("command", "wall ms", "CPU ms", "of Python alone"), rows),
            aim(
                f"refs, log, show and ls in {REACH_MS} ms at most",
                met=max(walls) <= REACH_MS,
            ),
        ]
    )
