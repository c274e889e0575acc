"""The section of bench/taking.py: what statistics cost when an expert is added."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, table, wall

ABOUT = """\
{machine} `python bench/taking.py WORK`. {millions:.0f} M parameters in bf16, {experts} experts that
differ from the base everywhere. The same expert is added to a store that holds the base, in turn
without and with `--base`.
"""


def section(told: Told) -> str:
    """Seconds of add and add --base, and bytes of statistics."""
    add = told["add"]
    rows = [
        (kind, wall(add[kind]), f"{add[kind]['cpu']:.2f}", f"{add[kind]['anonymous'] / MIB:.0f}")
        for kind in ("add", "add --base")
    ]
    rows.append(("ratio", f"{add['wall_ratio']:.2f}", f"{add['cpu_ratio']:.2f}", ""))
    sizes = told["statistics"]
    shares = [
        (size, f"{row['statistics_bytes'] / 1e6:.2f}", f"{100 * row['share']:.3f} %")
        for size, row in sizes.items()
    ]
    return "\n".join(
        [
            "## Statistics\n",
            ABOUT.format(machine=machine(told), **{k: told[k] for k in ("millions", "experts")}),
            table(("", "wall s", "CPU s", "peak anonymous MiB"), rows),
            aim("with statistics at most 1.3 times the wall", met=add["wall_ratio"] <= 1.3),
            table(("blocks of", "statistics MB", "of the family's plain bytes"), shares),
            aim(
                "statistics under 0.1 % of the plain bytes, at the default block size",
                met=sizes["1MiB"]["share"] < 1e-3,
            ),
        ]
    )
