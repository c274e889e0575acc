"""The section of bench/incremental.py: the memo table and virtual merges."""

from __future__ import annotations

from tables import Told, aim, machine, span, table, wall

INCREMENTAL = """\
{machine} `python bench/incremental.py WORK`. {millions:.0f} M parameters ({layers} layers), bf16;
every expert moved every weight. A store holds a TIES merge of {experts} experts. Three more merges
are measured with and without the memo table, in turn, page cache warm: with a ninth expert that
moved the attention of two layers, with one expert trained further in two layers, and the same
merge with another message. *Process* is the whole command, the start of Python included; *merge*
is the time that the command reports, planning included.

![Seconds with and without the memo table](plots/incremental.svg)
"""
VIRTUAL = """\
The plan already exists. `merge --virtual` of it reports {commit} s, and the first checkout
computes what it reads. Both steps together run at {speed} times the speed of a materialised merge
and its checkout, in {runs} rounds.
"""
CASES = {"ninth": "a ninth expert", "changed": "one expert changed", "repeated": "again"}


def section(told: Told) -> str:
    """The section of bench/incremental.py."""
    rows = []
    for case, label in CASES.items():
        for way in ("no memo", "memo"):
            row = told[case][way]
            mine = way == "memo"
            rows.append(
                (
                    label,
                    way,
                    wall(row),
                    span(row["seconds"]),
                    f"{row['expert_bytes_read'] / 1e6:.0f}",
                    f"{row['bytes_written'] / 1e6:.0f}",
                    span(told[case]["times_faster"], 1) if mine else "",
                    span(told[case]["times_faster_inside"], 1) if mine else "",
                )
            )
    head = (
        "",
        "",
        "process s",
        "merge s",
        "expert MB read",
        "MB written",
        "process, times",
        "merge, times",
    )
    slowest = min(told[case]["times_faster"]["median"] for case in CASES)
    inside = min(told[case]["times_faster_inside"]["median"] for case in CASES)
    virtual = told["virtual"]
    steps = [(step, wall(row)) for step, row in virtual.items() if " " in step]
    commit = virtual["virtual merge"]["seconds"]
    return "\n".join(
        [
            "## The next merge, and merges that are not computed yet\n",
            INCREMENTAL.format(machine=machine(told), **{k: told[k] for k in PLAIN_KEYS}),
            table(head, rows),
            aim(
                f"at least 20 times as fast with the memo table (the least: {slowest:.1f} of the "
                f"process, {inside:.1f} of the merge)",
                met=slowest >= 20,
            ),
            "### Virtual merges\n",
            VIRTUAL.format(
                commit=span(commit, 3),
                speed=span(virtual["speed"]),
                runs=virtual["virtual merge"]["runs"],
            ),
            table(("", "process s"), steps),
            aim("the commit in under 0.3 s", met=commit["median"] < 0.3),
            aim(
                "the first full read at least 0.8 times the speed of a materialised merge",
                met=virtual["speed"]["median"] >= 0.8,
            ),
        ]
    )


PLAIN_KEYS = ("millions", "layers", "experts")
