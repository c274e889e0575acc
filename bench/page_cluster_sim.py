"""The section of bench/cluster_sim.py: a merge on many workers, simulated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tables import MIB, Told, aim, machine, table

HEAD = """\
{machine} `python bench/cluster_sim.py WORK`.
Simulated time: the parts were measured here, with one thread; nothing ran on more than two
processes, and others used the machine. TIES at a density of 0.2, {experts} experts, shapes of Llama
3 in bf16, experts at {delta:.0f} % of their plain size. A worker has 8 cores, which count as 8
threads, one slice at a time, and 10 Gbit/s in each direction; the store has 100 Gbit/s in all and
answers a request in 10 ms, 8 of a worker at once. A store of another kind is in a table below.
The plan is there before. *Efficiency* is against one such worker. *Network alone* is the best
efficiency that the bytes allow with 128 workers, whatever else is done: they take so long from and
to the store.
"""
SINGLE = """\
The same with workers of one core.
"""
PARTS = """\
### What a thread does

For a MiB of output or of an expert, plus {unexplained:.0f} % of whole slices that no part explains.
"""
VALIDATION = """\
### Beside real workers

{experts} experts of {millions:.0f} million parameters, everything read, {slices} slices, a remote
that is a directory: workers are processes that have computed before, with one thread each. What a
merge stored here is removed after it, so that all ways encode and write the same. Medians of
{rounds} rounds, in which every way runs once; CPU seconds are of all processes, and *others took*
is their share of the processors meanwhile. DELLA, whose merges take longer than 30 s, in
{long} rounds on a quiet machine.
"""
LIMITS = """\
### What limits

Seconds that each part would need alone, and what all take; *workers* is the time of one worker,
divided by their number. A tensor whose quota of ties ends within it is never cut, which is assumed
here of all: of the merge that was measured beside real workers, {limited} of {tensors} were such.
"""
CHANGES = """\
### What would mend it

70 B, 10 %: seconds, and efficiency against one worker with the same changes. *Limited tensors cut*
is for those whose ties before the cut are known. *Slices as columns* assumes a fifth of the time to
make and to pickle a slice, *start, commit / 4* a quarter of what is before the first slice and
after the last one: nobody has written these.
"""
COORDINATOR = """\
### The coordinator

Real slices, receipts, adoption and push, with workers that pretend: 20 experts of 8 B parameters;
and {slices:,} slices of {blocks:,} blocks in all, of one expert. Seconds of a processor, the better
of two runs, and one of the last row, whose plan is made in a process of its own before: *MiB to
plan* is its peak.
"""
DEATHS = """\
Deaths an hour and worker, 405 B, 100 %: what they add, and slices that ran again; means of five
draws.
"""
COUNTS = ("1", "2", "4", "8", "16", "32", "64", "128", "256")
LIMITED = ("16", "128", "256")
LEAST = {"16": 0.8, "128": 0.6}
MOST_OTHERS = 0.3
"""Share of the processors from which on wall time says nothing."""
AIMED = "70 B, 10 %"
STORE = 100e9 / 8
MANY = "128"
MOST_SENT, MOST_RECEIVED, MOST_MEMORY, LEAST_OF_THREADS = 100, 200, 512, 0.8


def section(told: Told) -> str:
    """The section of bench/cluster_sim.py."""
    rates, scale = told["rates"]["rates"], told["scale"]
    head = HEAD.format(machine=machine(told), experts=20, delta=100 * rates["delta_share"])
    return "\n".join(
        [
            "## Merges on clusters, simulated\n",
            head,
            *_models(scale),
            *_limits(told),
            *_changes(scale),
            *_others(scale),
            *_parts(told),
            *_validation(told),
            *_coordinator(told),
        ]
    )


def _models(scale: Told) -> list[str]:
    rows, single = [], []
    for name, found in scale["models"].items():
        some = found["workers"]
        times = {count: one["seconds"] for count, one in some.items()}
        moved = some[MANY]["fetched"] + some[MANY]["put"]
        rows.append(
            (
                name,
                f"{some['1']['slices']:,} to {some['256']['slices']:,}",
                f"{found['largest']:,.0f}",
                f"{moved / 1e9:,.0f}",
                f"{times['1']:,.0f}",
                *(f"{_efficiency(times, count):.2f}" for count in COUNTS[1:]),
                _most(times["1"], moved),
            )
        )
        alone = scale["single"][name]
        cells = (f"{_efficiency(alone, count):.2f}" for count in COUNTS[1:])
        single.append((name, f"{alone['1']:,.0f}", *cells, _most(alone["1"], moved)))
    last = (*COUNTS[1:], f"network alone, {MANY}")
    head = ("", "slices", "largest, MiB", "GB moved", "1 worker, s", *last)
    aimed = {n: one["seconds"] for n, one in scale["models"][AIMED]["workers"].items()}
    alone = scale["single"][AIMED]
    return [
        table(head, rows),
        SINGLE,
        table(("", "1 worker, s", *last), single),
        *(
            aim(
                f"{least} with {count} workers, {AIMED} ({_efficiency(aimed, count):.2f}; of one "
                f"core {_efficiency(alone, count):.2f})",
                met=_efficiency(aimed, count) >= least,
            )
            for count, least in LEAST.items()
        ),
    ]


def _most(seconds: float, moved: float) -> str:
    """The efficiency at which the store's network is busy all the time."""
    return f"{min(1.0, seconds / int(MANY) / (moved / STORE)):.2f}"


def _efficiency(times: Mapping[str, float], count: str) -> float:
    return times["1"] / int(count) / times[count]


def _limits(told: Told) -> list[str]:
    rows, scale = [], told["scale"]
    for name, found in scale["limits"].items():
        for count in LIMITED:
            one = found[count]
            rows.append((name, count, *(f"{value:.1f}" for value in one.values())))
    names = list(scale["limits"][AIMED]["16"])
    head = LIMITS.format(**told["validation"])
    return [head, table(("", "number", *names), rows)]


def _changes(scale: Told) -> list[str]:
    parts = [CHANGES]
    for place, found in scale["proposals"].items():
        rows = [
            (
                name,
                f"{times['1']:.0f}",
                *(f"{times[count]:.1f} ({_efficiency(times, count):.2f})" for count in LIMITED),
                *(f"{found['as it is'][count] / times[count]:.2f}" for count in LIMITED),
            )
            for name, times in found.items()
        ]
        factors = tuple(f"factor, {count}" for count in LIMITED)
        parts.append(table((place, "1 worker", *LIMITED, *factors), rows))
    return parts


def _others(scale: Told) -> list[str]:
    rows = []
    for name, found in scale["others"].items():
        times = {count: one["seconds"] for count, one in found.items()}
        cells = [f"{times[n]:.1f} ({_efficiency(times, n):.2f})" for n in LIMITED]
        rows.append((name, f"{times['1']:.0f}", *cells))
    deaths = []
    for rate, found in scale["deaths, 405 B, 100 %"].items():
        cells = []
        for count in LIMITED:
            seconds = statistics.mean(one["seconds"] for one in found[count])
            before = scale["deaths, 405 B, 100 %"]["0.0"][count][0]
            again = statistics.mean(one["runs"] for one in found[count]) - before["runs"]
            cells.append(f"{100 * (seconds / before['seconds'] - 1):.1f} % ({again:.0f})")
        deaths.append((rate, *cells))
    return [
        "### Other places, 70 B, 10 %, as it is\n",
        table(("", "1 worker", *LIMITED), rows),
        DEATHS,
        table(("deaths", *LIMITED), deaths),
    ]


def _parts(told: Told) -> list[str]:
    found, rates = told["rates"], told["rates"]["rates"]
    names = ("base", "delta", "mix_each", "hash", "encode", "write", "block")
    rows = [(name, f"{rates[name] * 1e3:.3f}") for name in names]
    rows += [
        ("seal, a pack", f"{rates['seal'] * 1e3:.1f}"),
        ("open the workplace, a slice", f"{rates['start'] * 1e3:.2f}"),
        ("unpickle, a block that is read", f"{rates['start_source'] * 1e3:.4f}"),
        ("put, a MiB", f"{MIB / found['put_bytes_s'] * 1e3:.2f}"),
    ]
    return [
        PARTS.format(unexplained=100 * found["unexplained share"]),
        table(("", "ms"), rows),
    ]


def _validation(told: Told) -> list[str]:
    found = told["validation"]
    rows = [
        (what, *_times(runs))
        for name, ways in (("", found["ways"]), (", DELLA", told["long"]["ways"]))
        for what, runs in ((f"{way}{name}", runs) for way, runs in ways.items())
    ]
    compared = [
        (
            name,
            *(f"{one[key]:.1f}" for key in ("measured", "simulated")),
            f"{one['error']:+.0f} %",
            *(f"{one[key]:.1f}" for key in ("measured busy", "simulated busy")),
            f"{one['error of busy']:+.0f} %",
        )
        for name, one in found["compared"].items()
    ]
    rounds, long = (len(one["ways"]["2 threads"]) for one in (found, told["long"]))
    return [
        VALIDATION.format(**told["family"], slices=found["slices"], rounds=rounds, long=long),
        table(("", "s", "others took", "CPU s"), rows),
        table(
            ("slices only", "s", "simulated", "error", "workers' CPU s", "simulated", "error"),
            compared,
        ),
        _speed(told["long"]["ways"]),
    ]


def _speed(ways: Told) -> str:
    wall, spent = (_of_threads(ways, key) for key in ("wall", "cpu"))
    others = max(_median(ways[name], "others") for name in ("2 threads", "2 workers"))
    what = f"two workers at {LEAST_OF_THREADS} of the speed of two threads"
    if others > MOST_OTHERS:
        return (
            f"Aim: {what}: not settled, others had the machine. In processor time they are at "
            f"{spent:.2f}.\n"
        )
    return aim(f"{what} ({wall:.2f}; in processor time {spent:.2f})", met=wall >= LEAST_OF_THREADS)


def _times(runs: Sequence[Told]) -> tuple[str, str, str]:
    wall, others, cpu = (_median(runs, key) for key in ("wall", "others", "cpu"))
    return f"{wall:.1f}", f"{100 * others:.0f} %", f"{cpu:.1f}"


def _median(runs: Sequence[Told], key: str) -> float:
    return statistics.median(float(one[key]) for one in runs)


def _of_threads(ways: Told, key: str) -> float:
    """What two workers reach of two threads: the median of what they did one after the other."""
    pairs = zip(ways["2 threads"], ways["2 workers"], strict=True)
    return statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)


PHASES = ("plan", "start", "run", "commit")


def _coordinator(told: Told) -> list[str]:
    some = told["coordinator"] | {"10,000 slices": told["receipts"]}
    names = ("start", "make", "hand out", "receive", "commit")
    rows = [
        (
            name,
            f"{one['slices']:,}",
            f"{one['sources']:,}",
            *(f"{one['seconds'][part]:.1f}" for part in names),
            f"{one['bytes sent for a block read']:.0f}",
            f"{one['bytes received for a block']:.0f}",
            *(f"{one['anonymous'][part] / MIB:.0f}" for part in PHASES),
        )
        for name, one in some.items()
    ]
    held = told["receipts"]["held"]
    blocks, kept = told["receipts"]["blocks"], told["receipts"]["held blocks"]
    sent = max(one["bytes sent for a block read"] for one in some.values())
    received = max(one["bytes received for a block"] for one in some.values())
    peak = max(one["anonymous"][part] for one in some.values()
               for part in ("start", "run", "commit")) / MIB  # fmt: skip
    head = (
        *("", "slices", "blocks read", *(f"{part}, s" for part in names)),
        *("bytes sent, a block read", "bytes received, an output block"),
        *("MiB to plan", "at start", "in the run", "in the commit"),
    )
    return [
        COORDINATOR.format(slices=told["receipts"]["slices"], blocks=blocks),
        table(head, rows),
        table(
            (f"holds, of {told['receipts']['held slices']:,} slices", "MiB", "bytes, a block"),
            [(name, f"{size / MIB:.1f}", f"{size / kept:.0f}") for name, size in held.items()],
        ),
        aim(f"{MOST_SENT} bytes for a block that is read ({sent:.0f})", met=sent <= MOST_SENT),
        aim(
            f"{MOST_RECEIVED} bytes for an output block ({received:.0f})",
            met=received <= MOST_RECEIVED,
        ),
        aim(f"under {MOST_MEMORY} MiB of memory ({peak:.0f})", met=peak < MOST_MEMORY),
    ]
