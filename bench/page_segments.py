"""The section of bench/segments.py: foreign blocks in segments and in LMDB."""

from __future__ import annotations

from typing import Any

from tables import Told, aim, machine, table

SEGMENTS = """\
{machine}
`python bench/segments.py WORK`. {rows:,} rows of foreign blocks, three in four with a
base, in one segment and in LMDB in the form of the index; half of the ids that are asked for have a
row. Each round asks in processes of their own, {rounds} rounds; *cold* has nothing of the files in
the page cache. A batch is asked twice, because a segment checks each page when it is first used.
*has* says whether there is a row, *places* also where the block lies. Mapped memory is page cache.
The machine had other load: compare the two, not the figures alone.
"""
ENDING = """\
The process that wrote and merged took {peak:.0f} MB at its peak. `add` takes {added:.2f} million
rows a second from tables in memory. Checking every byte takes {verify:.0f} s.
"""
OPEN = 0.05
ANONYMOUS = 64e6


def section(told: Told) -> str:
    """The section of bench/segments.py."""
    asked, made = told["asked"], told["segments"]
    names = {name: name.capitalize().replace("Lmdb", "LMDB") for name in asked}
    rows = [
        (
            what,
            *(f"{_middle(asked[name], key) * factor:,.{digits}f}" for name in asked),
        )
        for what, key, factor, digits in (
            ("open, ms", "open", 1e3, 1),
            ("open and the first lookup, ms", "open_and_first", 1e3, 1),
            ("anonymous memory, MB", "RssAnon", 1e-6, 0),
            ("mapped memory, MB", "RssFile", 1e-6, 0),
        )
    ]
    first = next(iter(asked.values()))
    for key in first:
        if key.startswith(("has", "places")):
            figures = (f"{_middle(of, key) / 1e3:,.0f}" for of in asked.values())
            rows.append((f"thousand ids a second, {key}", *figures))
    made_rows = [
        (
            "bytes a row",
            f"{made['bytes'] / made['rows']:.0f}",
            f"{told['lmdb']['bytes'] / made['rows']:.0f}",
        ),
        (
            "million rows a second",
            f"{made['rows'] / made['merge_seconds'] / 1e6:.2f} (merging 16 segments)",
            f"{made['rows'] / told['lmdb']['insert_seconds'] / 1e6:.2f} (inserting)",
        ),
    ]
    opens = max(_middle(asked[name], "open_and_first") for name in asked if "segments" in name)
    memory = max(_middle(asked[name], "RssAnon") for name in asked if "segments" in name)
    added = told["added"]
    return "\n".join(
        [
            "## Segments\n",
            SEGMENTS.format(machine=machine(told), rows=made["rows"], rounds=told["rounds"]),
            table(("", *names.values()), rows),
            table(("", "Segments", "LMDB"), made_rows),
            ENDING.format(
                peak=made["peak"] / 1e6,
                added=added["rows"] / added["seconds"] / 1e6,
                verify=made["verify_seconds"],
            ),
            aim(
                f"open and find a first block in under 50 ms ({opens * 1e3:.0f} ms, cold or not)",
                met=opens < OPEN,
            ),
            aim(
                f"no memory for each row (all that was asked took {memory / 1e6:.0f} MB)",
                met=memory < ANONYMOUS,
            ),
        ]
    )


def _middle(row: dict[str, Any], key: str) -> float:
    return float(row[key]["median"])
