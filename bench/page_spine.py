"""The section of bench/spine.py: add, merge and mount."""

from __future__ import annotations

from typing import Any

from tables import MIB, Told, aim, machine, table, wall

ADD = """\
### Add

`cp -r`, `sync -d` and `b3sum` of the copy, against `mstore add` of the base, and of an expert with
`--base` (compares blocks, takes statistics). Whole processes, synced.
"""

MERGE = """\
### Merge

`mstore merge` of {experts} experts at full budget: planning, reading and checking {read:.0f} MB,
and writing {written:.0f} MB, synced; the whole process, imports included. TIES with density 0.2.
"""

MOUNT = """\
### Mount

One shard, read from end to end by a process that does nothing else (reads of 1 MiB; or every page
of a mapping touched in order). Cold: the plain file or the packs are evicted from the page cache,
and the mount is fresh; every block is checked against its hash. Warm: the same read again.
The reader's start, about 0.02 s, is included.
"""


def section(told: Told) -> str:
    """The section of bench/spine.py."""
    plain = told["plain_bytes"]
    about = (
        f"{machine(told)} A checkpoint is "
        f"{plain / 1e6:.0f} MB in three shards; experts differ from the base in every tensor "
        "(the worst case: nothing is free). Page cache warm unless noted. "
        f"`python bench/spine.py WORK --rounds {told['rounds']}`.\n"
    )
    parts = [
        "## Add, merge and mount: 300 M parameters, bf16, four experts\n",
        about,
        _add(told["add"], plain),
        _merge(told["merge"], plain, told["experts"]),
        _mount(told["mount"]),
    ]
    return "\n".join(parts)


def _add(told: dict[str, dict[str, Any]], plain: int) -> str:
    peer = told["cp + b3sum"]["wall"]
    rows = [
        (
            name,
            wall(row),
            f"{row['cpu']:.2f}",
            f"{plain / row['wall'] / 1e6:.0f}",
            f"{row['anonymous'] / MIB:.0f}",
            f"{row['wall'] / peer:.2f}",
        )
        for name, row in told.items()
    ]
    head = ("", "wall s", "CPU s", "MB/s", "peak anonymous MiB", "wall, times cp + b3sum")
    return ADD + "\n" + table(head, rows)


def _merge(told: dict[str, dict[str, Any]], plain: int, experts: int) -> str:
    rows = [
        (
            name,
            wall(row),
            f"{row['cpu']:.2f}",
            f"{row['anonymous'] / MIB:.0f}",
            f"{row['expert_bytes'] / 1e6:.0f}",
            f"{row['expert_bytes'] / row['cpu'] / 1e6:.0f}",
        )
        for name, row in told.items()
    ]
    ties = told["ties"]
    met = ties["cpu"] < 4 and ties["anonymous"] < 512 * MIB
    head = (
        "",
        "wall s",
        "CPU s",
        "peak anonymous MiB",
        "expert MB read",
        "expert MB a CPU second",
    )
    words = MERGE.format(experts=experts, read=(experts + 1) * plain / 1e6, written=plain / 1e6)
    verdict = aim("TIES under 4 s of CPU and 512 MiB", met=met)
    return "\n".join([words, table(head, rows), verdict])


def _mount(told: dict[str, dict[str, float]]) -> str:
    rows = []
    for state in ("cold", "warm"):
        for way in ("read", "mmap"):
            plain, mount = told[f"plain {state} {way}"], told[f"mount {state} {way}"]
            rows.append(
                (
                    f"{state} {way}",
                    f"{plain['mb_s']:.0f} ({plain['min']:.0f} to {plain['max']:.0f})",
                    f"{mount['mb_s']:.0f} ({mount['min']:.0f} to {mount['max']:.0f})",
                    f"{mount['mb_s'] / plain['mb_s']:.2f}",
                )
            )
    return MOUNT + "\n" + table(("", "plain file MB/s", "mount MB/s", "ratio"), rows)
