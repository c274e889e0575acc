"""The section of bench/decoding.py: what a block costs to decode and to encode."""

from __future__ import annotations

from tables import Told, machine, percent, table

DECODING = """\
{machine} `python bench/decoding.py WORK`. One thread, blocks of 1 MiB in memory, the base given;
the best of {rounds} rounds, GB/s of plain bytes by processor time. *Checked* includes BLAKE3 of
the result; *encode* includes the choice of a codec and the check by decoding. *Before* is the
version that had a code by class for bf16 and zstd over byte planes for all else, in the same run;
a name is that of the code for lesser processors (x86-64-v3: AVX2), on this one.
"""

KEYS = ("decode", "decode checked", "encode")


def section(told: Told) -> str:
    """The section of bench/decoding.py."""
    rows = []
    for name, found in told.items():
        if not isinstance(found, dict) or "now" not in found:
            continue
        for way in ("delta", "alone"):
            for version in ("before", "now", *sorted(found.keys() - {"before", "now"})):
                if version not in found or (way == "alone" and not name.endswith(("0.01", "0.03"))):
                    continue
                each = found[version][way]
                rates = (f"{each[key]:.2f}" for key in KEYS)
                what = f"{name}, {way}" if way == "delta" else f"{name.split()[0]}, no base"
                rows.append((what, version, percent(each["share"]), *rates))
    head = ("elements, noise", "", "stored", "decode", "checked", "encode")
    return "\n".join(
        [
            "## Decoding and encoding, a processor\n",
            DECODING.format(machine=machine(told), rounds=told["rounds"]),
            table(head, rows),
        ]
    )
