"""The section of bench/rates.py: add and checkout beside plain tools; dense families in use."""

from __future__ import annotations

from tables import Told, aim, machine, span, table, wall

RATES = """\
{machine} `python bench/rates.py WORK`. A checkpoint is {plain:.0f} MB in three shards (300 M
parameters, bf16, `generate.near`); page cache warm, {threads} threads in every program, medians
of {rounds} rounds, peers in the same round. `cp` copies and syncs, `b3sum` hashes the copy. `raw`
and `dense` are the store's policy. A base has no block to be stored as a difference to. An expert
is added with `--base`: its blocks are compared, its statistics taken, and, if dense, its deltas
coded.
"""
OUT = """\
`mstore checkout` of a snapshot against `cp -r` of the same files, both followed by `sync -d`. For
a dense expert, two blocks are read and decoded for each block written.
"""
USE = """\
The same family ({raw:.0f} MB of packs if raw, {dense:.0f} MB if dense) merged (TIES, density
0.2, and linear; {experts} experts, full budget, synced) and mounted (one shard of an expert, read
by a process that does nothing else, packs in the page cache; *again* is from the kernel's cache).
*Before* is the version before blocks had one code (design 040), in the same rounds.
"""


def section(told: Told) -> str:
    """The section of bench/rates.py."""
    plain, add, out = told["plain_bytes"], told["add"], told["checkout"]
    raw = max(add[name]["ratio"]["median"] for name in ("raw base", "raw expert"))
    dense = max(add[name]["ratio"]["median"] for name in ("dense base", "dense expert"))
    slowest = min(1 / out[n]["ratio"]["median"] for n in out if n != "cp -r")
    return "\n".join(
        [
            "## Add, checkout, and a dense family in use\n",
            RATES.format(
                machine=machine(told),
                plain=plain / 1e6,
                threads=told["threads"],
                rounds=told["rounds"],
            ),
            _beside(add, plain, "wall, times cp + b3sum"),
            aim(
                f"raw at most 1.3 times cp + b3sum (the slower of the two: {raw:.2f})",
                met=raw <= 1.3,
            ),
            aim(f"dense at most 2 times (the slower of the two: {dense:.2f})", met=dense <= 2),
            "### Checkout\n",
            OUT,
            _beside(out, plain, "wall, times cp -r"),
            aim(
                f"at least 0.8 times the speed of cp -r (the slowest: {slowest:.2f})",
                met=slowest >= 0.8,
            ),
            "### A dense family in use\n",
            USE.format(
                raw=told["stored_bytes"]["raw"] / 1e6,
                dense=told["stored_bytes"]["dense"] / 1e6,
                experts=told["experts"],
            ),
            _beside(told["ties"], (told["experts"] + 1) * plain, "TIES: wall, times raw"),
            _beside(told["linear"], (told["experts"] + 1) * plain, "linear: wall, times raw"),
            _mount(told["mount"]),
        ]
    )


def _beside(rows: Told, plain: int, ratio: str) -> str:
    found = [
        (
            name,
            wall(row),
            f"{row['cpu']:.2f}",
            f"{plain / row['wall'] / 1e6:.0f}",
            f"{row['anonymous'] / (1 << 20):.0f}",
            span(row["ratio"]),
        )
        for name, row in rows.items()
    ]
    return table(("", "wall s", "CPU s", "plain MB/s", "peak anonymous MiB", ratio), found)


def _mount(rates: Told) -> str:
    rows = []
    for way in ("read", "mmap"):
        for time in ("first", "again"):
            raw, dense = rates[f"raw {time} {way}"], rates[f"dense {time} {way}"]
            ratio = f"{dense['median'] / raw['median']:.2f}"
            rows.append((f"{way}, {time}", span(raw, 0), span(dense, 0), ratio))
    return table(("mount", "raw MB/s", "dense MB/s", "dense, times raw"), rows)
