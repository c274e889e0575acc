"""The section of bench/small_calls.py: what a small tensor costs without starting Python."""

from __future__ import annotations

from tables import Told, aim, machine, span, table

CALLS = """\
{machine} `python bench/small_calls.py WORK --before CHECKOUT`. Calls within one process: what
starting Python and compiled code takes is not in them. Families as above. Processor time a tensor,
before and now in turn (rounds: {rounds}). *before* is the version in which small tensors were
already taken together, but their values made one by one. Both gave the same plans, stores, sweeps
and differences. The machine did much other work beside (a load of about 14 on 2 cores), which
lengthens processor seconds, too: ratios say more.
"""
GOAL = 0.2
"""Milliseconds of processor time a tensor."""


def section(told: Told) -> str:
    """The section of bench/small_calls.py."""
    families = dict(sorted(told["families"].items(), key=lambda item: ("auto" in item[0], item[0])))
    heads = [
        f"{int(size):,} {codec}{side}"
        for size, codec in (name.split(", ") for name in families)
        for side in (", before", ", now", ", ratio")
    ]
    tasks = list(next(iter(families.values()))["tasks"])
    rows = [
        (
            task,
            *(
                text
                for family in families.values()
                for one in (family["tasks"][task],)
                for text in (span(one["before"]), span(one["now"]), f"{one['ratio']:.2f}")
            ),
        )
        for task in tasks
    ]
    worst = max(
        (one["now"]["median"], task, name)
        for name, family in families.items()
        for task, one in family["tasks"].items()
        if task.startswith(("add", "plan")) and task != "plan --sweep"
    )
    rounds = ", ".join(f"{family['rounds']} of {name}" for name, family in families.items())
    return "\n".join(
        [
            "## Small tensors: adding and planning within a process\n",
            CALLS.format(machine=machine(told), rounds=rounds),
            table(("ms a tensor", *heads), rows),
            aim(
                f"under {GOAL} ms a tensor in add and plan (the most is {worst[0]:.2f}, "
                f"{worst[1]}, {worst[2]})",
                met=worst[0] < GOAL,
            ),
        ]
    )
