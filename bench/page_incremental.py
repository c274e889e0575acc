"""The section of bench/incremental.py: the memo table and virtual merges."""

from __future__ import annotations

from tables import Told, aim, machine, span, table, wall

INCREMENTAL = """\
{machine} `python bench/incremental.py WORK`. Models in bf16; every expert moved every weight. A
store holds a TIES merge of {experts} experts. Three more merges are measured with and without the
memo table, in turn, page cache warm: with a ninth expert that moved the attention of two layers,
with one expert trained further in two layers, and the same merge with another message. *Process*
is the whole command, the start of Python included; *merge* is the time that the command reports,
planning included.

![Seconds with and without the memo table](plots/incremental.svg)
"""
SIMULATED = """\
Planning alone, where the data would not fit: catalogs of the shapes of Llama 3 whose index,
records and statistics are real, and whose blocks are not there (`bench/planning.py`). {experts}
experts are planned first; the store then plans nine.
"""
VIRTUAL = """\
The plan already exists. `merge --virtual` of it reports {commit} s, and the first checkout
computes what it reads. Both steps together run at {speed} times the speed of a materialised merge
and its checkout, in {runs} rounds.
"""
LARGE = 3000
"""Million parameters from which the time inside has an aim: the start does not count there."""
CASES = {"ninth": "a ninth expert", "changed": "one expert changed", "repeated": "again"}


def section(told: Told) -> str:
    """The section of bench/incremental.py."""
    rows = []
    for size in told["sizes"]:
        for case, label in CASES.items():
            for way in ("no memo", "memo"):
                row = size[case][way]
                mine = way == "memo"
                rows.append(
                    (
                        f"{size['millions']:.0f} M, {size['layers']} layers",
                        label,
                        way,
                        wall(row),
                        span(row["seconds"]),
                        f"{row['expert_bytes_read'] / 1e6:.0f}",
                        f"{row['bytes_written'] / 1e6:.0f}",
                        span(size[case]["times_faster"], 1) if mine else "",
                        span(size[case]["times_faster_inside"], 1) if mine else "",
                    )
                )
    head = (
        "parameters",
        "",
        "",
        "process s",
        "merge s",
        "expert MB read",
        "MB written",
        "process, times",
        "merge, times",
    )
    small, large = told["sizes"][0], told["sizes"][-1]
    process = min(small[case]["times_faster"]["median"] for case in CASES)
    inside = min(large[case]["times_faster_inside"]["median"] for case in CASES)
    again = small["repeated"]["memo"]["wall"]
    of_large = (
        aim(
            f"at least 20 times as fast inside at {large['millions']:.0f} M "
            f"(the least: {inside:.1f})",
            met=inside >= 20,
        ),
    )
    virtual = told["virtual"]
    steps = [(step, wall(row)) for step, row in virtual.items() if " " in step]
    commit = virtual["virtual merge"]["seconds"]
    plans = [
        (size, f"{one['bytes'] / 1e9:.0f}", span(one["eight"]["wall"]), span(one["ninth"]["wall"]))
        for size, one in told["simulated"].items()
    ]
    simulated = (
        "### Planning one expert more, simulated\n",
        SIMULATED.format(experts=told["experts"]),
        table(("size", "GB of experts", "eight, s", "then nine, s"), plans),
    )
    return "\n".join(
        [
            "## The next merge, and merges that are not computed yet\n",
            INCREMENTAL.format(machine=machine(told), experts=told["experts"]),
            table(head, rows),
            aim(
                f"at least 10 times as fast as a process at {small['millions']:.0f} M "
                f"(the least: {process:.1f})",
                met=process >= 10,
            ),
            *(of_large if large["millions"] >= LARGE else ()),
            aim(f"the same merge again in 0.25 s, as a process ({again:.2f})", met=again <= 0.25),
            *(simulated if plans else ()),
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
