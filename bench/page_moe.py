"""The section of bench/moe.py."""

from __future__ import annotations

from tables import Told, aim, machine, table, wall

ABOUT = """\
{machine} `python bench/moe.py WORK`. {experts} experts of {millions:.0f} M parameters in bf16, all
of whose elements differ from the base's, become a Mixtral with random routers. Both programs are
whole processes, in turn, in {runs}.
"""


def section(told: Told) -> str:
    """The section of bench/moe.py."""
    about = ABOUT.format(
        machine=machine(told),
        experts=told["experts"],
        millions=told["millions"],
        runs=f"{told['mstore']['runs']} round" + "s" * (told["mstore"]["runs"] > 1),
    )
    rows = [
        (
            name,
            wall(told[key]),
            f"{told[key]['cpu']:.2f}",
            f"{told[f'{key}_bytes'] / 1e6:,.1f}",
        )
        for key, name in (("mergekit", "mergekit-moe"), ("mstore", "mstore"))
    ]
    share = told["mstore_bytes"] / told["mergekit_bytes"]
    seconds = told["mstore"]["wall"]
    return "\n".join(
        [
            "## Mixtures of experts\n",
            about,
            table(("program", "wall s", "CPU s", "MB written"), rows),
            aim(
                f"at most 0.1 % of the bytes, in 2 s ({100 * share:.3f} %, {seconds:.2f} s)",
                met=share <= 0.001 and seconds <= 2,
            ),
        ]
    )
