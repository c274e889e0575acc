"""The section of bench/decoding.py: what a block costs to decode and to encode."""

from __future__ import annotations

from tables import Told, machine, percent, table

DECODING = """\
{machine} `python bench/decoding.py WORK`. One thread, blocks of 1 MiB in memory, the base given;
the best of {rounds} rounds, GB/s of plain bytes by processor time. *Own*: the ordering that this
processor has{wide}. *One*: one element at a time. *Checked* includes BLAKE3 of the result.
"""


def section(told: Told) -> str:
    """The section of bench/decoding.py."""
    rows = []
    for name, found in told.items():
        if not isinstance(found, dict) or "own" not in found:
            continue
        own, one = found["own"]["delta"], found["one at a time"]["delta"]
        rows.append(
            (
                name,
                percent(own["share"]),
                *(f"{own[key]:.2f}" for key in ("decode", "decode checked", "encode")),
                *(f"{one[key]:.2f}" for key in ("decode", "decode checked", "encode")),
            )
        )
    keys = ("decode", "checked", "encode")
    head = ("difference, noise", "stored", *(f"own {k}" for k in keys), *(f"one {k}" for k in keys))
    wide = " (AVX-512 VBMI2)" if told["wide"] else ""
    return "\n".join(
        [
            "## Decoding and encoding, a processor\n",
            DECODING.format(machine=machine(told), rounds=told["rounds"], wide=wide),
            table(head, rows),
        ]
    )
