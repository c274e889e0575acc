"""The section of bench/refs.py: what commands on names cost as refs grow."""

from __future__ import annotations

from tables import Told, aim, machine, span, table

REFS = """\
{machine} `python bench/refs.py WORK --before CHECKOUT`. Simulated stores as in "Growth": two
families, each ref a separate expert in which 3 of 300 tensors changed. Seconds of one call in
its own process, imports not counted, page cache warm, medians of {rounds} rounds; *before* is
the version in which each move of a ref read all refs, in the same rounds. The machine had other
load, which shows in wall seconds: ratios and aims use CPU seconds.
"""
LINEAR = 1.5
"""Something is linear if its seconds grow by no more than this much faster than refs do."""


def section(told: Told) -> str:
    """The section of bench/refs.py."""
    sizes = dict(sorted(told["sizes"].items(), key=lambda item: int(item[0])))
    every = list(sizes.values())
    rows = []
    for task, libraries in every[0]["tasks"].items():
        for name in ("before", "now"):
            if name in libraries:
                for clock in ("wall", "cpu"):
                    figures = (span(one["tasks"][task][name][clock], 4) for one in every)
                    rows.append((f"{task}, {name}, {clock} s", *figures))
        if "before" in libraries:
            ratios = (
                f"{_median(one, task, 'now') / _median(one, task, 'before'):.2f}" for one in every
            )
            rows.append((f"{task}, now / before, cpu", *ratios))
    few, many = every[0], every[-1]
    grew = {task: _median(many, task, "now") / _median(few, task, "now") for task in many["tasks"]}
    refs = many["refs"] / few["refs"]
    return "\n".join(
        [
            "## Refs\n",
            REFS.format(machine=machine(told), rounds=told["rounds"]),
            table(("refs", *(f"{one['refs']:,}" for one in every)), rows),
            aim(
                f"tag flat (at {many['refs']:,} refs it takes {grew['tag']:.1f} times as long as "
                f"at {few['refs']:,})",
                met=grew["tag"] <= 2,
            ),
            aim(
                f"du linear ({refs:.0f} times the refs take {grew['du']:.0f} times as long)",
                met=grew["du"] <= LINEAR * refs,
            ),
        ]
    )


def _median(one: Told, task: str, library: str) -> float:
    return float(one["tasks"][task][library]["cpu"]["median"])
