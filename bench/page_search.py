"""The section of bench/search.py: searching weights, and finding what broke a merge."""

from __future__ import annotations

from tables import Told, aim, machine, percent, table

HEAD = """\
## Searching weights, and finding what broke a merge

{machine} `python bench/search.py WORK --mergekit PATH`. Eight experts of {millions:.0f} million
parameters, a task arithmetic with eight free weights, {trials} trials by TPE in one process, and
the winner merged. mergekit {mergekit} merged {peer_trials} candidates whole, one after another;
its time for all is the median of those times {trials}. An evaluation takes {evaluator:.2f} s and is
not counted: *seconds* is all other time, the computing of blocks while the evaluator reads
included.

"""

CULPRIT = """\

One of the experts has a tensor of large values, and the merge is bad for it. `mstore bisect run`
finds it by virtual merges. *One by one* leaves out each unit in turn: as many merges by mergekit,
and as many runs of the test. Times here include the test, {judge:.2f} s a run.

"""
MOST_TIME, MOST_BYTES = 1 / 3, 1 / 20


def section(told: Told) -> str:
    """The section of bench/search.py."""
    ours, theirs, trials = told["mstore"], told["mergekit"], told["trials"]
    head = ("way", "seconds", "GB written")
    rows = [
        (
            f"mergekit, {trials} merges",
            f"{theirs['wall'] * trials:.1f}",
            _gb(theirs["bytes"] * trials),
        ),
        ("`mstore search`", f"{ours['outside']:.1f}", _gb(ours["written"])),
        ("share", percent(told["time_share"]), percent(told["bytes_share"])),
    ]
    culprits = [
        (
            what,
            str(found["units"]),
            str(found["probes"]),
            f"{found['wall']:.1f}",
            f"{found['one_by_one']:.0f}",
            f"{found['one_by_one'] / found['wall']:.0f}",
        )
        for what, found in told["bisections"].items()
    ]
    columns = ("searched", "units", "runs of the test", "seconds", "one by one, seconds", "ratio")
    return "\n".join(
        [
            HEAD.format(
                machine=machine(told),
                millions=told["millions"],
                trials=trials,
                mergekit=told["versions"]["mergekit"],
                peer_trials=told["peer_trials"],
                evaluator=told["evaluator"],
            ),
            table(head, rows),
            aim("at most a third of the time", met=told["time_share"] <= MOST_TIME),
            aim("at most a twentieth of the bytes", met=told["bytes_share"] <= MOST_BYTES),
            CULPRIT.format(judge=told["judge"]),
            table(columns, culprits),
        ]
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
