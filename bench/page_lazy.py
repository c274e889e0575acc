"""The section of bench/lazy.py: lazy stores over a slow link."""

from __future__ import annotations

import statistics

from tables import MIB, Told, aim, machine, percent, span, table

HEAD = """\
{machine} `python bench/lazy.py WORK`. {versions}.
A bucket in memory (`bench/bucket_server.py`) in a network namespace, behind a link of {megabits}
Mbit/s and {milliseconds} ms (`bench/link.py`, which delays packets; TCP is the kernel's). Measured:
a round trip of {trip:.1f} ms, {rate:.1f} MB/s by eight ranges. Each step is a process of its own,
{rounds} rounds; *CPU* is that of user and system. *Link* is the time of the bytes at the link's
full rate. Other programs used the processors (a load of {least:.0f} to {most:.0f}), so wall
seconds are longer than alone, those of the peers, too.

The family: a base and {experts} fine-tunes, each the base with noise of {noise:g} of the weights'
deviation everywhere, {each:.0f} MB of plain files each; {plain:.2f} GB plain, {stored:.2f} GB at
rest.
"""
MERGE = """\
### A merge from nothing

TIES of {experts} experts at a budget of {budget} and a density of 0.5, which is at hand from a lazy
clone; then again with one expert more, which another store pushed meanwhile.
"""
PEER = """\
The peer downloads all plain files from the same bucket by s5cmd, then merges by mergekit, once.
"""
BYTES = """\
What came, MB. Of packs, a clone brings records; a merge reads experts and base blocks. *Of
experts* and *of the base* are bytes at rest that the merge read, from the cache or the link.
"""
LOAD = """\
### A whole expert

Its differences and the base's blocks, with an empty cache: {stored:.0f} MB at rest. The mount's
process counts as CPU. s5cmd downloads {plain:.0f} MB of plain files, which Python then loads.
"""
SMALL = """\
### Small things

With an empty cache; each with the start of Python.
"""
SCALE = """\
### A large remote

A lazy clone of a simulated remote of {blocks:,} blocks in {packs:,} packs. Its tables and lists
are {got:.0f} MB, so the link needs {link:.1f} s.
"""
LEAST_TIMES, MOST_SHARE, MOST_LINK, MOST_SMALL = 8, 0.003, 1.15, 2.0
MOST_SCALE, MOST_OPEN, MOST_MEMORY = 1.3, 0.05, 256
WHOLE = ("mount, cat", "mount, safetensors", "Snapshot.load")
LITTLE = ("cat config.json", "cat tokenizer.json", "safe_open, one tensor")
PEERS = ("s5cmd", "mergekit", "torch")
STEPS = ("clone", "plan", "merge")


def section(told: Told) -> str:
    """The section of bench/lazy.py."""
    link, family = told["link"], told["family"]
    head = HEAD.format(
        machine=machine(told),
        versions=", ".join(
            f"{name} {told['versions'][name]}" for name in PEERS if name in told["versions"]
        ),
        megabits=link["megabits"],
        milliseconds=link["milliseconds"],
        trip=link["round_trip"] * 1e3,
        rate=link["rate"] / 1e6,
        rounds=len(told["merges"]),
        least=min(told["load_average"].values()),
        most=max(told["load_average"].values()),
        experts=family["experts"],
        noise=told["noise"],
        each=family["plain_bytes"] / (family["experts"] + 1) / 1e6,
        plain=family["plain_bytes"] / 1e9,
        stored=family["stored_bytes"] / 1e9,
    )
    return "\n".join(
        ["## Lazy stores over a slow link\n", head, *_merge(told), *_load(told), *_scale(told)]
    )


def merge_seconds(told: Told) -> tuple[float, float]:
    """Seconds of the peer, and the median of those from nothing to a merge."""
    rounds = told["merges"]
    own = statistics.median(sum(one[step]["wall"] for step in STEPS) for one in rounds)
    return sum(one["wall"] for one in told["peer"].values()), own


def load_times(told: Told) -> dict[str, float]:
    """Multiples of the link's time, of each way to load a whole expert."""
    seconds = _link_seconds(told, _needed(told))
    return {name: told["loads"][name]["wall"]["median"] / seconds for name in WHOLE}


def _needed(told: Told) -> int:
    """Bytes at rest of a whole expert: what a load brings, which brings nothing else."""
    return int(told["loads"]["Snapshot.load"]["traffic"]["packs"]["bytes"])


def _link_seconds(told: Told, size: float) -> float:
    return size / (told["link"]["megabits"] * 1e6 / 8)


def _bytes(step: Told, *kinds: str) -> int:
    found = step["traffic"]
    return sum(one["bytes"] for kind, one in found.items() if not kinds or kind in kinds)


def _requests(step: Told) -> int:
    return sum(one["requests"] for one in step["traffic"].values())


def _merge(told: Told) -> list[str]:
    rounds, peers = told["merges"], told["peer"]
    experts = told["family"]["experts"]
    peer_seconds, own = merge_seconds(told)
    rows = []
    for words, of in (("", rounds), (", one more", [one["one more"] for one in rounds])):
        steps = STEPS if not words else ("pull", *STEPS[1:])
        for name in (*steps, "all"):
            some = steps if name == "all" else (name,)
            wall, cpu = (
                [sum(one[step][key] for step in some) for one in of] for key in ("wall", "cpu")
            )
            rows.append((f"{name}{words}", _spread(wall), _spread(cpu)))
    rows += [(name, f"{one['wall']:.2f}", f"{one['cpu']:.2f}") for name, one in peers.items()]
    last = rounds[-1]
    more = last["one more"]
    kinds = ("lists", "tables", "stats", "packs")
    came = [
        (
            name,
            *(f"{_bytes(step, kind) / 1e6:.2f}" for kind in kinds),
            str(_requests(step)),
            read,
            base,
        )
        for name, step, read, base in (
            ("clone", last["clone"], "", ""),
            ("plan", last["plan"], "", ""),
            ("merge", last["merge"], *_read(last)),
            ("pull, one more", more["pull"], "", ""),
            ("plan, one more", more["plan"], "", ""),
            ("merge, one more", more["merge"], *_read(more)),
        )
    ]
    share = _bytes(last["clone"]) / told["family"]["stored_bytes"]
    read, budget = last["expert_bytes_read"], last["budget_bytes"]
    return [
        MERGE.format(experts=experts, budget=percent(budget / last["full_expert_bytes"], 0)),
        PEER,
        table(("", "s", "CPU s"), rows),
        aim(
            f"{LEAST_TIMES} times as soon as {' and '.join(peers)} ({peer_seconds / own:.1f})",
            met=peer_seconds / own >= LEAST_TIMES,
        ),
        BYTES,
        table(("", *kinds, "requests", "of experts", "of the base"), came),
        aim(
            f"a merge reads its budget at most ({read / 1e6:.1f}, {budget / 1e6:.1f} MB)",
            met=read <= budget,
        ),
        aim(
            f"the clone in {percent(MOST_SHARE)} of the family at rest ({percent(share, 2)})",
            met=share <= MOST_SHARE,
        ),
        aim(
            f"a plan reads no weights ({last['analyze_bytes_read']} bytes of experts)",
            met=not _bytes(last["plan"]) and not last["analyze_bytes_read"],
        ),
    ]


def _read(merged: Told) -> tuple[str, str]:
    keys = ("expert_bytes_read", "base_bytes_read")
    read, base = (f"{merged[key] / 1e6:.2f}" for key in keys)
    return read, base


def _spread(values: list[float]) -> str:
    return span({"median": statistics.median(values), "min": min(values), "max": max(values)})


def _load(told: Told) -> list[str]:
    loads, needed = told["loads"], _needed(told)
    peer = loads["s5cmd, safetensors"]
    times = load_times(told)
    rows = []
    for name in (*WHOLE, "s5cmd, safetensors"):
        got = _bytes(loads[name])
        seconds = _link_seconds(told, needed if name in times else got)
        rows.append(
            (
                name,
                span(loads[name]["wall"]),
                span(loads[name]["cpu"]),
                f"{got / 1e6:.1f}",
                str(_requests(loads[name])),
                f"{seconds:.2f}",
                f"{loads[name]['wall']['median'] / seconds:.2f}",
            )
        )
    seconds = _link_seconds(told, _bytes(peer))
    down = peer["download"]["median"]
    rows.append(
        ("of it the download", span(peer["download"]), "", "", "", "", f"{down / seconds:.2f}")
    )
    little = [
        (name, span(loads[name]["wall"]), span(loads[name]["cpu"]), str(_requests(loads[name])))
        for name in LITTLE
    ]
    slowest = max(loads[name]["wall"]["median"] for name in LITTLE)
    return [
        LOAD.format(stored=needed / 1e6, plain=loads["plain_bytes"] / 1e6),
        table(("", "s", "CPU s", "MB", "requests", "link s", "times the link"), rows),
        *(
            aim(f"{name} in {MOST_LINK} of the link's time ({one:.2f})", met=one <= MOST_LINK)
            for name, one in times.items()
        ),
        SMALL,
        table(("", "s", "CPU s", "requests"), little),
        aim(f"each in {MOST_SMALL:g} s ({slowest:.2f})", met=slowest <= MOST_SMALL),
    ]


def _scale(told: Told) -> list[str]:
    found = told["scale"]
    clone = found["clone"]
    seconds = _link_seconds(told, _bytes(clone))
    ratio, opened = clone["wall"] / seconds, found["open"]["median"]
    memory = clone["anonymous"] / MIB
    rows = [
        ("clone, s", f"{clone['wall']:.2f}"),
        ("clone, CPU s", f"{clone['cpu']:.2f}"),
        ("requests", str(_requests(clone))),
        ("anonymous memory at its peak, MiB", f"{memory:.0f}"),
        ("open the tables and look a block up, ms", f"{opened * 1e3:.1f}"),
        ("tables on the disk, MB", f"{found['segments_bytes'] / 1e6:.0f}"),
    ]
    text = SCALE.format(
        blocks=found["blocks"], packs=found["packs"], got=_bytes(clone) / 1e6, link=seconds
    )
    return [
        text,
        table(("", ""), rows),
        aim(f"{MOST_SCALE} times the link's time ({ratio:.2f})", met=ratio <= MOST_SCALE),
        aim(f"open in {MOST_OPEN * 1e3:.0f} ms", met=opened <= MOST_OPEN),
        aim(f"under {MOST_MEMORY} MiB of memory", met=memory < MOST_MEMORY),
    ]
