"""The section of bench/small.py: what a tensor costs that is small."""

from __future__ import annotations

from tables import Told, aim, machine, span, table

SMALL = """\
{machine} `python bench/small.py WORK --before CHECKOUT`. Families of tensors of {kilobytes} KB in
bfloat16, a base and {experts} experts that moved every tensor; whole commands, page cache warm,
each merge on a copy of the store. *ms a tensor* is processor time minus that of the same command
on 10 tensors, divided by the tensors, so it excludes start-up. *before* is the version that
looked up, planned, computed and recorded each tensor separately. *raw* is a store of
`--codec raw`; the others are `auto`, which compresses blocks and tries each codec. Before and now
come from the same rounds (how many: {rounds}), except those of 4,000 tensors, measured separately.
The machine had other load (about 4 on 2 cores): wall seconds say little, and processor seconds
are longer than on an idle machine, so ratios say more than aims.
"""
FEW = "10"
GOAL = 0.2
"""Milliseconds of processor time a tensor."""
AIMED = ("add", "add --base", "plan", "merge")


def section(told: Told) -> str:
    """The section of bench/small.py."""
    sizes = dict(sorted(told["tensors"].items(), key=lambda item: int(item[0])))
    many = {size: found for size, found in sizes.items() if size != FEW}
    labels = list(dict.fromkeys(label for found in many.values() for label in found))
    columns = [
        (label, size)
        for label in sorted(labels, key=_order)
        for size in many
        if label in sizes[size]
    ]
    tasks = [task for task in sizes[FEW]["now"] if task != "rounds"]
    slopes = [
        (task, *(_shown(sizes, label, size, task) for label, size in columns)) for task in tasks
    ]
    seconds = [
        (task, *(span(sizes[size][label][task]["cpu"], 1) for label, size in columns))
        for task in tasks
    ]
    heads = [f"{int(size):,}, {label}" for label, size in columns]
    largest = max(many, key=int)
    worst = max(
        (_slope(sizes, "now", largest, task), task) for task in tasks if task.startswith(AIMED)
    )
    small, large = (_slope(sizes, "now", size, "plan --sweep") for size in ("2000", largest))
    return "\n".join(
        [
            "## Small tensors\n",
            SMALL.format(
                machine=machine(told),
                kilobytes=told["tensor_bytes"] // 1000,
                experts=told["experts"],
                rounds=min(sizes["2000"][label]["rounds"] for label in labels),
            ),
            table(("ms a tensor", *heads), slopes),
            table(("processor seconds", *heads), seconds),
            aim(
                f"under {GOAL} ms a tensor in add, plan and merge (the most is {worst[0]:.2f}, "
                f"{worst[1]})",
                met=worst[0] < GOAL,
            ),
            aim(
                f"no cliff (a sweep costs {large:.2f} ms a tensor at {int(largest):,}, "
                f"{small:.2f} at 2,000)",
                met=large < 1.5 * small,
            ),
        ]
    )


def _order(label: str) -> tuple[bool, bool]:
    return "raw" in label, label.startswith("now")


def _slope(sizes: Told, label: str, size: str, task: str) -> float:
    more, few = (sizes[one][label][task]["cpu"]["median"] for one in (size, FEW))
    return 1000 * float(more - few) / (int(size) - int(FEW))


def _shown(sizes: Told, label: str, size: str, task: str) -> str:
    return f"{_slope(sizes, label, size, task):.2f}"
