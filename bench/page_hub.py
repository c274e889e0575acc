"""The section of bench/hub.py: a model from the Hub."""

from __future__ import annotations

from tables import Told, aim, machine, percent, span, table

HEAD = """\
## A model from the Hub

{machine} `python bench/hub.py WORK`. The Hub is the small one of the tests, in a process of its own
on the same machine; it answers from memory, and at 1 Gbit/s it is slowed down for all connections
together. The model has {size:.2f} GB in four shards, weights as those of a trained one are spread.
Each way is a process of its own, {rounds} rounds. *Directory* adds what `hf download` had brought;
*together* is the time of both.

"""
MOST_GIGABIT, MOST_LOOPBACK = 1.15, 1.5
PLAIN = "hf download"


def ratio(told: Told, link: str, codec: str) -> float:
    """How many times as long as the download alone an add from the Hub takes."""
    return float(told[link][f"mstore add, {codec}"]["ratio"]["median"])


def section(told: Told) -> str:
    """The section of bench/hub.py."""
    rows = []
    for link, words in (("loopback", "loopback"), ("gigabit", "1 Gbit/s")):
        found = told[link]
        plain = found[PLAIN]["wall"]
        rows.append((words, PLAIN, span(plain), "", span(found[PLAIN]["cpu"]), ""))
        for codec in ("raw", "auto"):
            own, then = found[f"mstore add, {codec}"], found[f"add of the directory, {codec}"]
            together = plain["median"] + then["wall"]["median"]
            rows.append(
                (
                    words,
                    f"`mstore add hf://`, {codec}",
                    span(own["wall"]),
                    f"{own['ratio']['median']:.2f}",
                    span(own["cpu"]),
                    f"{together:.2f}",
                )
            )
    head = ("link", "way", "seconds", "of the download", "CPU", "download and directory together")
    beside = max(told[link]["mstore add, raw"]["beside"] for link in ("loopback", "gigabit"))
    share = beside / told["shard"]
    return "\n".join(
        [
            HEAD.format(machine=machine(told), size=told["bytes"] / 1e9, rounds=told["rounds"]),
            table(head, rows),
            f"Beside the store lay at most {beside / 1e6:.1f} MB, {percent(share)} of a shard.\n",
            aim("at most 1.1 of a shard beside the store", met=share <= 1.1),
            aim(
                f"at most {MOST_GIGABIT:g} times the download at 1 Gbit/s",
                met=ratio(told, "gigabit", "auto") <= MOST_GIGABIT,
            ),
            aim(
                f"at most {MOST_LOOPBACK:g} times on loopback, raw",
                met=ratio(told, "loopback", "raw") <= MOST_LOOPBACK,
            ),
        ]
    )
