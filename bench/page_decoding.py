"""The section of bench/decoding.py: what a block costs to decode and to encode."""

from __future__ import annotations

from tables import Told, machine, percent, table

DECODING = """\
{machine} `python bench/decoding.py WORK`. One thread, blocks of 1 MiB in memory, the base given;
the best of {rounds} rounds, GB/s of plain bytes by processor time. *By class*: the code by class,
which bf16 has. *Own*: ordered by class and compressed, as others are and bf16 was, with the
ordering that this processor has{wide}. *One*: the same, one element at a time. *Checked* includes
BLAKE3 of the result.
"""

KEYS = ("decode", "decode checked", "encode")


def section(told: Told) -> str:
    """The section of bench/decoding.py."""
    rows = []
    for name, found in told.items():
        if not isinstance(found, dict) or "own" not in found:
            continue
        ways = {way: each["delta"] for way, each in found.items()}
        for way, label in (("by class", "by class"), ("own", "own"), ("one at a time", "one")):
            if way in ways:
                rates = (f"{ways[way][key]:.2f}" for key in KEYS)
                rows.append((name, label, percent(ways[way]["share"]), *rates))
    head = ("difference, noise", "", "stored", "decode", "checked", "encode")
    wide = " (AVX-512 VBMI2)" if told["wide"] else " (not AVX-512 VBMI2)"
    return "\n".join(
        [
            "## Decoding and encoding, a processor\n",
            DECODING.format(machine=machine(told), rounds=told["rounds"], wide=wide),
            table(head, rows),
        ]
    )
