"""The section of bench/density.py: what families take, beside everybody else."""

from __future__ import annotations

from tables import Told, aim, machine, percent, span, table

DENSITY = """\
{machine} `python bench/density.py WORK`. Two families, each a base and {experts} experts in bf16:
one trained (`examples/family.py`, {trained:.0f} MB in all), one generated ({generated:.0f} MB in
all; noise of 1e-2, 3e-3 and 1e-3 of the weights' deviation, two experts with frozen layers). Base
and experts are stored one after the other, with the base named for programs that can use it.
Then each is read back and compared byte for byte. Page cache warm, {cores} threads, stores
synced. mstore's bytes are those of the whole store: packs, index, and the statistics that `add`
takes for merging. restic always encrypts. BitX is XOR with the base, byte planes and zstd,
implemented in `bench/bitx.py` from its paper; hf-xet is the Hub's own client with a local
directory.

![Stored bytes of a family](plots/density.svg)
"""
LEFT_OUT = "Left out: {0}.\n"
OURS = "mstore"


def section(told: Told) -> str:
    """The section of bench/density.py."""
    families = told["families"]
    parts = [
        "## Density: what a family takes on disk\n",
        DENSITY.format(
            machine=machine(told),
            experts=len(families["generated"]["models"]) - 1,
            trained=families["trained"]["plain_bytes"] / 1e6,
            generated=families["generated"]["plain_bytes"] / 1e6,
            cores=told["machine"]["cores"],
        ),
    ]
    for name, family in families.items():
        parts += [f"### The {name} family\n", _family(family), _aim(name, family)]
    if told["left_out"]:
        missing = "; ".join(f"{name} ({why})" for name, why in told["left_out"].items())
        parts.append(LEFT_OUT.format(missing))
    versions = ", ".join(told["versions"].values())
    return "\n".join([*parts, f"Versions: {versions}.\n"])


def _family(family: Told) -> str:
    plain = family["plain_bytes"]
    ordered = sorted(family["ways"].items(), key=lambda item: item[1]["stored_bytes"])
    rows = []
    for name, row in ordered:
        after = row["after_each"]
        expert = (after[-1] - after[0]) / max(1, len(after) - 1)
        rows.append(
            (
                name,
                f"{row['stored_bytes'] / 1e6:.1f}",
                percent(row["stored_bytes"] / plain),
                f"{after[0] / 1e6:.1f}",
                f"{expert / 1e6:.1f}",
                span(row["add_mb_s"], 0),
                span(row["read_mb_s"], 0),
                f"{row['add_cpu']:.1f}",
                f"{row['read_cpu']:.1f}",
            )
        )
    head = (
        *("", "stored MB", "of plain", "base MB", "an expert MB"),
        *("in MB/s", "out MB/s", "in CPU s", "out CPU s"),
    )
    return table(head, rows)


def _aim(name: str, family: Told) -> str:
    ours, best, other = against_best(family)
    return aim(
        f"at most 0.9 of the best other ({name}: {ours / best:.2f} of {other})",
        met=ours <= 0.9 * best,
    )


def against_best(family: Told) -> tuple[int, int, str]:
    """Stored bytes of the densest mstore, and of the densest other, and which that is."""
    ours = [w["stored_bytes"] for name, w in family["ways"].items() if name.startswith(OURS)]
    others = {n: w["stored_bytes"] for n, w in family["ways"].items() if not n.startswith(OURS)}
    other = min(others, key=lambda name: others[name])
    return min(ours), others[other], other
