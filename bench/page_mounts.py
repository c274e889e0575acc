"""The section of bench/mounts.py."""

from __future__ import annotations

from tables import Told, aim, machine, table

ABOUT = """\
A fine-tune of {millions:.0f} M parameters in bf16 ({plain:.0f} MB); every element differs from
its base: as plain files, checked out, from a store without compression (raw) and from a dense one,
each through FUSE; the raw one through EROFS; from Python without a mount; and through the mounts
of {peers}, each of which has the fine-tune alone. Cold: nothing in the page cache. Cached: the
plain files or the packs are, and the mount is new. Warm: read through the mount before. Every block
is checked against its hash once a mount (EROFS: before it is ready), and at each load from Python;
plain files are not checked. MB/s; in brackets the share of plain, of the same round.
"""
ABOUT_LIFE = """
Ready: seconds of the command that mounts. First byte: milliseconds from open(2), cold. Then seconds
of a processor that the mount's process takes for 1 GiB, read from front to back, and its
anonymous memory after that.
"""
LISTINGS = """
`ls -l` of a new mount of a whole store with {snapshots} snapshots (simulated): {root:.0f} ms; of
its directory `snapshots`: {snapshots_directory:.0f} ms.
"""
WAYS = {
    "read": "sequential, 1 MiB",
    "mmap": "mapped, in order",
    "random": "128 KiB at random, 4 threads",
    "load": "arrays of numpy",
    "safe_open": "`safe_open`, each tensor, torch",
    "from_pretrained": "`from_pretrained`",
}
STATES = ("cold", "cached", "warm")
PLACES = {
    "plain": "plain files",
    "checkout": "checkout",
    "raw": "raw, FUSE",
    "dense": "dense, FUSE",
    "erofs": "raw, EROFS",
    "python raw": "raw, Python",
    "python dense": "dense, Python",
    "restic": "restic",
    "borg": "borg",
}
MOUNTS = ("raw", "dense", "erofs", "restic", "borg")
CACHE = 64 << 20
MIB = 1 << 20


def section(told: Told) -> str:
    """The section of bench/mounts.py."""
    figures, shares = told["figures"], told["of_plain"]

    def median(name: str) -> float | None:
        return figures[name]["median"] if name in figures else None

    def cell(way: str, place: str, state: str) -> str:
        name = f"{way} {place} {state}"
        speed = median(name)
        if speed is None:
            return ""
        return f"{speed:.0f}" + (f" ({shares[name]:.2f}x)" if name in shares else "")

    def taken(name: str, unit: float, digits: int) -> str:
        value = median(name)
        return "" if value is None else f"{value * unit:.{digits}f}"

    places = [name for name in PLACES if any(f" {name} " in one for one in figures)]
    rows = [
        (words, state, *(cell(way, place, state) for place in places))
        for way, words in WAYS.items()
        for state in STATES
        if f"{way} plain {state}" in figures
    ]
    mounts = [name for name in MOUNTS if f"ready {name}" in figures]
    life = [
        (
            PLACES[name],
            taken(f"ready {name}", 1, 2),
            taken(f"first byte {name}", 1000, 1),
            taken(f"cpu {name} cold", 1, 2),
            taken(f"cpu {name} cached", 1, 2),
            taken(f"memory {name} cold", 1 / MIB, 0),
        )
        for name in mounts
    ]
    peers = " and ".join(told["versions"].values()) or "no other program"
    about = ABOUT.format(millions=told["millions"], plain=told["plain_bytes"] / 1e6, peers=peers)
    return "\n".join(
        [
            "## Mounts and loading\n",
            f"{machine(told)} `python bench/mounts.py WORK`, {told['rounds']} rounds.\n",
            about,
            table(("", "", *(PLACES[name] for name in places)), rows),
            ABOUT_LIFE,
            table(
                ("mount", "ready, s", "first byte, ms", "s/GiB, cold", "s/GiB, cached", "MiB"), life
            ),
            LISTINGS.format(
                snapshots=told["snapshots"],
                root=1000 * told["listings"]["root"]["median"],
                snapshots_directory=1000 * told["listings"]["snapshots"]["median"],
            ),
            *_aims(told),
        ]
    )


def _aims(told: Told) -> list[str]:
    figures, shares = told["figures"], told["of_plain"]

    def median(name: str) -> float:
        return float(figures[name]["median"])

    aims = [
        ("a raw mount reads at 0.75 of plain, cold", shares["read raw cold"] >= 0.75),
        ("at 0.9, warm", shares["read raw warm"] >= 0.9),
        (
            "`from_pretrained` from it takes 1.1 times as long, cold",
            shares["from_pretrained raw cold"] >= 1 / 1.1,
        ),
        ("a dense mount reads at 1.5 GB/s, cold", median("read dense cold") >= 1500),
        (
            "and at 0.8 of what all processors decode (arrays, from Python)",
            median("read dense cold") >= 0.8 * median("load python dense cold"),
        ),
        (
            "the process of a mount takes its cache (64 MiB) and 100 MiB",
            max(median(f"memory {name} cold") for name in ("raw", "dense")) <= CACHE + 100 * MIB,
        ),
        ("a mount is ready in 0.3 s", median("ready raw") <= 0.3),
        (
            "`ls -l` of a whole store takes 50 ms",
            max(one["median"] for one in told["listings"].values()) <= 0.05,
        ),
    ]
    if "read erofs cold" in shares:
        aims += [
            ("EROFS reads at 0.95 of plain, cold", shares["read erofs cold"] >= 0.95),
            ("at 1.0, warm", shares["read erofs warm"] >= 1.0),
        ]
    aims += [
        (
            f"{PLACES[name]} is 3 times as fast as {peer}, cold",
            median(f"read {name} cold") >= 3 * median(f"read {peer} cold"),
        )
        for name in ("raw", "dense")
        for peer in ("restic", "borg")
        if f"read {peer} cold" in figures
    ]
    return [aim(words, met=met) for words, met in aims]
