"""The section of bench/mounts.py."""

from __future__ import annotations

from tables import Told, aim, machine, table

ABOUT = """\
A fine-tune of {millions:.0f} M parameters in bf16 ({plain:.0f} MB); every element differs from
its base: as plain files, from a store without compression (raw) and from a dense one. Cold: nothing
in the page cache. Cached: the plain files or the packs are, and the mount is new. Warm: read
through the mount before. `read` goes through the files 1 MiB a call; `load` makes arrays of all
tensors, with `safetensors.numpy.load_file` or `Snapshot.load`. Every block is checked against its
hash once a mount, and at each load; plain files are not checked. MB/s; in brackets the share of
plain, of the same round.
"""
WAYS = {
    "read": ("sequential read", ("cold", "cached", "warm")),
    "load": ("arrays in Python", ("cold", "cached")),
}


def section(told: Told) -> str:
    """The section of bench/mounts.py."""
    speeds, shares = told["speeds"], told["of_plain"]

    def cell(way: str, codec: str, state: str) -> str:
        name = f"{way} {codec} {state}"
        speed = f"{speeds[name]['median']:.0f}"
        return speed if codec == "plain" else f"{speed} ({shares[name]:.2f}x)"

    rows = [
        (words, state, *(cell(way, codec, state) for codec in ("plain", "raw", "dense")))
        for way, (words, states) in WAYS.items()
        for state in states
    ]
    about = ABOUT.format(millions=told["millions"], plain=told["plain_bytes"] / 1e6)
    return "\n".join(
        [
            "## Mounts and loading\n",
            f"{machine(told)} `python bench/mounts.py WORK`, {told['rounds']} rounds.\n",
            about,
            table(("", "", "plain files", "raw store", "dense store"), rows),
            aim(
                "a raw mount, cold, reads at 0.75 of plain",
                met=shares["read raw cold"] >= 0.75,
            ),
            aim("warm at 0.9", met=shares["read raw warm"] >= 0.9),
            aim(
                "a dense mount, cold, reads at 1.5 GB/s",
                met=speeds["read dense cold"]["median"] >= 1500,
            ),
        ]
    )
