"""The section of bench/paper.py: the paper's figures and tables."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, percent, span, table

PAPER = """\
{machine} `python bench/paper.py WORK`. {millions:.0f} M parameters in bf16, {plain:.2f} GB a
model. Every run is its own process and starts with nothing of the store or the plain files in
the page cache. The experts are of five kinds, in turn: all layers moved, the upper third,
attention only, the MLPs of the upper half, and one that continues from the first kind in the upper
third. Within one expert, layers moved by deviations from 1e-4 to 1e-3. On average an expert differs
from the base in {share} of its blocks.

`naive` reads all bytes of all experts from plain files with the same kernels on the same threads,
checks nothing and skips nothing (bench/naive.py). `100%` is this engine at full read: it writes
the same bytes (the script compares them), reads no block that equals the base, and reads shared
blocks once. The others read at most that share of what `100%` reads. Figures are from {runs}
rounds.
"""


PLANNING = """\
Seconds of planning, with a cold catalogue and the statistics taken when the experts were added,
and planning's share of the whole process.
"""


def section(told: Told) -> str:
    """The section of bench/paper.py."""
    shares = [expert["share"] for expert in told["experts"]]
    scaling = told["scaling"]
    most = max(scaling, key=int)
    about = PAPER.format(
        machine=machine(told),
        millions=told["millions"],
        plain=told["plain_bytes"] / 1e9,
        share=percent(sum(shares) / len(shares), 0),
        runs=scaling[most]["naive"]["runs"],
    )
    smallest = scaling[most]["10%"]
    planning = max(
        row["planning_share"]["median"]
        for variants in scaling.values()
        for row in variants.values()
        if "planning_share" in row
    )
    parts = [
        "## The figures of MergePipe, at this machine's size\n",
        about,
        "### Cost against the number of experts (Figures 4 and 5)\n",
        "![Bytes and seconds against experts](plots/paper-scaling.svg)\n",
        "Averaging (`linear`, equal weights).\n",
        _paper_table([(f"K={k}", variants) for k, variants in scaling.items()]),
        aim(
            f"K={most} at a 10 % budget at least 8 times as fast as naive "
            f"({span(smallest['times_faster'], 1)})",
            met=smallest["times_faster"]["median"] >= 8,
        ),
        f"### Cost against the budget, K={most} (Figure 6)\n",
        "![Bytes and seconds against budget](plots/paper-budgets.svg)\n",
        f"### Operators, K={told['operators']['experts']} (Table 4)\n",
        "The naive TIES is given its thresholds, which would otherwise take a pass.\n",
        _paper_table(
            [(k, variants) for k, variants in told["operators"].items() if k != "experts"]
        ),
        "### Planning (Table 5)\n",
        PLANNING,
        _planning(scaling),
        aim(
            f"planning at most 0.5 % of the wall time (here at most {percent(planning)})",
            met=planning <= 0.005,
        ),
        f"### Block size, K={told['blocks']['experts']} (Table 6)\n",
        "![Seconds and catalogue against block size](plots/paper-blocks.svg)\n",
        _blocks(told["blocks"]),
        "### From run to run (Figure 7)\n",
        "![Seconds of each run](plots/paper-spread.svg)\n",
        _spread(told["spread"]),
    ]
    return "\n".join(parts)


def _paper_table(groups: list[tuple[str, dict[str, Told]]]) -> str:
    rows = []
    for label, variants in groups:
        for variant in sorted(variants, key=_rank):
            row = variants[variant]
            total = row["expert_bytes"] + row["base_bytes"] + row["written_bytes"]
            rows.append(
                (
                    label,
                    variant,
                    f"{row['expert_bytes'] / 1e9:.2f}",
                    f"{total / 1e9:.2f}",
                    f"{row['disk_read']['median'] / 1e9:.2f}",
                    span(row["wall"]),
                    f"{row['cpu']['median']:.2f}",
                    f"{row['anonymous']['median'] / MIB:.0f}",
                    span(row["times_faster"], 1),
                )
            )
    head = (
        "",
        "reads",
        "expert GB",
        "expert + base + output GB",
        "GB from disk, by the kernel",
        "wall s",
        "CPU s",
        "peak anonymous MiB",
        "times as fast as naive",
    )
    return table(head, rows)


def _rank(variant: str) -> float:
    """The naive merge first, then the most bytes."""
    return -1000.0 if variant == "naive" else -float(variant.rstrip("%"))


def _planning(scaling: dict[str, dict[str, Told]]) -> str:
    rows = [
        (
            f"K={k}",
            variant,
            span(row["plan_seconds"], 3),
            span(row["merge_seconds"]),
            percent(row["planning_share"]["median"]),
        )
        for k, variants in scaling.items()
        for variant, row in variants.items()
        if variant in ("10%", "100%")
    ]
    return table(("", "reads", "planning s", "merging s", "planning's share"), rows)


def _blocks(told: Told) -> str:
    rows = []
    for size, found in told.items():
        if size == "experts":
            continue
        for variant in ("100%", "30%"):
            row = found[variant]
            bound = row["error_bound"]
            rows.append(
                (
                    f"{int(size) // 1024} KiB",
                    variant,
                    f"{row['expert_bytes'] / 1e9:.3f}",
                    span(row["wall"]),
                    span(row["plan_seconds"], 3),
                    f"{bound:.3g}" if variant != "100%" else "",
                    f"{found['catalog_bytes'] / 1e6:.1f}",
                )
            )
    head = (
        "block",
        "reads",
        "expert GB",
        "wall s",
        "planning s",
        "error bound",
        "index and statistics MB",
    )
    return table(head, rows)


def _spread(told: Told) -> str:
    return (
        f"{told['runs']} runs of K={told['experts']} at 30 %: {span(told['wall'])} s, standard "
        f"deviation {percent(told['deviation'])} of the mean. Bytes read and written, the plan "
        "and the content were the same in every run (the script stops otherwise).\n"
    )
