"""The section of bench/planning.py: planning a large merge in a catalogue without the data."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, table

ABOUT = """\
{machine} `python bench/planning.py WORK`. {experts} experts of a model of 8 B parameters, in a
catalogue with real rows and statistics but without blocks (planning reads none).
One thread; *planning* is survey, ranking, selection and the record, without starting Python; the
first time in a process, which remembers lengths and records for the next plan.
"""
STEPS = ("survey", "rank", "select", "encode")


def section(told: Told) -> str:
    """Seconds and memory of planning."""
    requests = {name: row for name, row in told.items() if isinstance(row, dict) and "units" in row}
    rows = [
        (
            name,
            f"{row['units']:,}",
            f"{_first(row['wall_seconds']):.2f}",
            f"{_first(row['cpu_seconds']):.2f}",
            f"{row['process']['anonymous'] / MIB:.0f}",
            f"{row['plan_bytes'] / 1e6:.2f}",
        )
        for name, row in requests.items()
    ]
    slowest = max(_first(row["wall_seconds"]) for row in requests.values())
    largest = max(row["process"]["anonymous"] for row in requests.values())
    head = ("", "blocks to choose from", "planning s", "CPU s", "peak anonymous MiB", "plan MB")
    return "\n".join(
        [
            f"## Planning: {told['experts']} experts of 8 B parameters\n",
            ABOUT.format(machine=machine(told), experts=told["experts"]),
            table(head, rows),
            aim("under 2 s and 1 GiB", met=slowest < 2 and largest < 1 << 30),
        ]
    )


def _first(seconds: dict[str, float]) -> float:
    """Seconds of a plan, without "all again", which finds lengths and records in memory."""
    return sum(seconds[step] for step in STEPS)
