"""The section of bench/large.py: one large family from end to end."""

from __future__ import annotations

from tables import MIB, Told, machine, table

LARGE = """\
{machine} `python bench/large.py WORK`. {billions:.1f} B parameters, bf16, {plain:.1f} GB a model: a
base and {experts} experts (`generate.near`), codec `auto`, one round. Each model was in the page
cache when it was added; a merge (TIES, density 0.2) finds of the store what memory holds.
"""


def section(told: Told) -> str:
    """The section of bench/large.py."""
    plain = told["plain_bytes"]
    rows = [
        _row(f"add {name}", row, plain, stored=row["bytes"]) for name, row in told["add"].items()
    ]
    rows += [
        _row(f"merge, budget {budget}", row, plain, row["bytes"], row["expert_bytes"])
        for budget, row in told["merge"].items()
    ]
    mount = told["mount"]
    rows.append(
        (
            f"mount (ready in {mount['ready']:.2f} s), read whole",
            f"{mount['wall']:.1f}",
            "",
            f"{mount['bytes'] / mount['wall'] / 1e6:.0f}",
            "",
            "",
            "",
        )
    )
    rows.append(_row("checkout", told["checkout"], told["checkout"]["bytes"]))
    head = (
        "",
        "wall s",
        "CPU s",
        "plain MB/s",
        "peak anonymous MiB",
        "stored GB",
        "expert GB read",
    )
    return "\n".join(
        [
            f"## From end to end: {told['millions'] / 1000:.1f} B parameters\n",
            LARGE.format(
                machine=machine(told),
                billions=told["millions"] / 1000,
                plain=plain / 1e9,
                experts=told["experts"],
            ),
            table(head, rows),
        ]
    )


def _row(
    name: str, row: Told, plain: int, stored: int | None = None, read: int | None = None
) -> tuple[str, ...]:
    return (
        name,
        f"{row['wall']:.1f}",
        f"{row['cpu']:.1f}",
        f"{plain / row['wall'] / 1e6:.0f}",
        f"{row['anonymous'] / MIB:.0f}",
        "" if stored is None else f"{stored / 1e9:.2f}",
        "" if read is None else f"{read / 1e9:.2f}",
    )
