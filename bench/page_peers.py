"""The page that a reader sees first: mstore beside other programs, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import page_hub
import page_lazy
from tables import MIB, Told, machine, table

HEAD = """\
# Benchmarks

mstore beside other programs, each in the same round on the same machine. Read the ratios: seconds
depend on the machine. [Aims](benchmarks-aims.md) lists what was to be reached, and what falls
short; [details](benchmarks-details.md) says how each figure was made. Written by
`bench/report.py` from `bench/results`.
"""
MACHINES = """\
The rows of merges: {machine} The details name the machine of each other row.
"""

KEEPERS = {
    "borg (zstd 3)": "borg",
    "restic (auto)": "restic",
    "hf-xet": "hf-xet",
    "zipnn": "ZipNN",
}
COLUMNS = ("work", "other program", "it takes", "mstore takes", "mstore is")
Row = tuple[str, str, str, str, str]


def page(told: dict[str, Told]) -> str:
    """The page.  told: results by the names of their files; what was not measured has no row."""
    rows = [row for name, make in MAKERS if name in told for row in make(told[name])]
    under = (
        [MACHINES.format(machine=machine(told["mergekit"]).removeprefix("Machine: "))]
        if "mergekit" in told
        else []
    )
    return "\n".join([HEAD, table(COLUMNS, rows), *under])


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _times(times: float) -> str:
    """How many times as fast: digits as far as they mean something."""
    digits = 0 if times >= 10 else 1 if times >= 1 else 2
    return f"{times:.{digits}f} times as fast"


def _faster(work: str, peer: str, theirs: float, ours: float) -> Row:
    return work, peer, _seconds(theirs), _seconds(ours), _times(theirs / ours)


def _mergekit(found: Told) -> Iterator[Row]:
    for method in ("ties", "dare_ties", "linear"):
        theirs, ours = (found[method][name] for name in ("mergekit", "mstore"))
        yield (
            f"merge 4 experts of {found['millions']:.0f} M parameters, `{method}`",
            "mergekit",
            *(
                f"{one['wall']:.1f} s, {one['anonymous'] / MIB:.0f} MiB of memory"
                for one in (theirs, ours)
            ),
            _times(found[method]["times_faster"]),
        )


def _budget(found: Told) -> Iterator[Row]:
    ours = found["scaling"]["20"]["10%"]["wall"]["median"]
    work = f"merge 20 experts of {found['millions']:.0f} M parameters, reading 10 %, cold"
    yield _faster(work, "mergekit, all of them", found["mergekit"]["wall"], ours)


def _adapters(found: Told) -> Iterator[Row]:
    for key, many in (("one", "a LoRA adapter"), ("eight", "eight LoRA adapters")):
        ours = found[key]["mstore"]["wall"]
        work = f"apply {many} to {found['millions']:.0f} M parameters"
        yield _faster(work, "PEFT", found[key]["peft"]["wall"], ours)


def _moe(found: Told) -> Iterator[Row]:
    theirs, ours = (found[name]["wall"] for name in ("mergekit", "mstore"))
    yield (
        f"make a mixture of {found['experts']} experts of {found['millions']:.0f} M parameters",
        "mergekit-moe",
        f"{theirs:.1f} s, {found['mergekit_bytes'] / 1e9:.1f} GB",
        f"{ours:.1f} s, {found['mstore_bytes'] / 1e9:.3f} GB",
        _times(theirs / ours),
    )


def _draft(found: Told) -> Iterator[Row]:
    beside = found["beside"]
    if "mergekit" in beside:
        theirs, ours = (beside[name]["cpu"] for name in ("mergekit", "mstore"))
        yield (
            f"give a draft model {found['models']['target']['tokens']} other tokens, CPU",
            "mergekit-tokensurgeon",
            _seconds(theirs),
            _seconds(ours),
            _times(theirs / ours),
        )


def _search(found: Told) -> Iterator[Row]:
    yield (
        f"find 8 weights in {found['trials']} trials, the evaluator left out",
        "mergekit, each merged",
        _seconds(found["mergekit"]["wall"] * found["trials"]),
        _seconds(found["mstore"]["outside"]),
        _times(1 / found["time_share"]),
    )


def _lazy(found: Told) -> Iterator[Row]:
    theirs, ours = page_lazy.merge_seconds(found)
    experts = found["family"]["experts"]
    work = f"fetch and merge {experts} experts over 200 Mbit/s, reading 10 %"
    yield _faster(work, " and ".join(found["peer"]), theirs, ours)


def _density(found: Told) -> Iterator[Row]:
    family = found["families"]["generated"]
    ours = family["ways"]["mstore auto"]["stored_bytes"]
    work = f"keep a base and 8 fine-tunes, {family['plain_bytes'] / 1e9:.1f} GB"
    for name, label in KEEPERS.items():
        if name in family["ways"]:
            theirs = family["ways"][name]["stored_bytes"]
            sizes = (f"{theirs / 1e9:.2f} GB", f"{ours / 1e9:.2f} GB")
            yield work, label, *sizes, f"{ours / theirs:.2f} of the size"


def _image_disk(found: Told) -> Iterator[Row]:
    sums = found["wide"]["sum"]
    work = f"mix two image models of {found['wide']['model_bytes'] / 1e6:.0f} MB"
    for name, label in (("sd-mecha", "sd-mecha"), ("plain", "a plain script")):
        for way, words in (("merge", "stored"), ("virtual", "virtual")):
            if name in sums:
                yield _faster(f"{work}, {words}", label, sums[name]["wall"], sums[way]["wall"])
    work = (
        f"keep {found['originals']} image models and {found['mixes']} mixes,"
        f" {found['plain_bytes'] / 1e9:.1f} GB"
    )
    for name, one in found["beside"].items():
        if name not in KEEPERS:
            continue
        theirs = one["stored_bytes"]
        for way, words in (("added, base first", "files"), ("virtual", "mixes virtual")):
            mine = found["ways"][way]["stored_bytes"]
            sizes = (f"{theirs / 1e9:.2f} GB", f"{mine / 1e9:.2f} GB")
            yield f"{work}, {words}", KEEPERS[name], *sizes, f"{mine / theirs:.2f} of the size"


def _remote(found: Told) -> Iterator[Row]:
    for work, one in found.get("rates", {}).get("works", {}).items():
        theirs, ours = (one[name]["wall"]["median"] for name in ("s5cmd", "mstore"))
        rate = one["rate_wall"]["median"]
        yield f"{work}, raw", "s5cmd", _seconds(theirs), _seconds(ours), _times(rate)


def _hub(found: Told) -> Iterator[Row]:
    work = f"add a model of {found['bytes'] / 1e9:.1f} GB from the Hub at 1 Gbit/s"
    theirs = found["gigabit"][page_hub.PLAIN]["wall"]["median"]
    ours = found["gigabit"]["mstore add, auto"]["wall"]["median"]
    yield _faster(work, "hf download", theirs, ours)


MAKERS: tuple[tuple[str, Callable[[Told], Iterator[Row]]], ...] = (
    ("mergekit", _mergekit),
    ("budget", _budget),
    ("adapters", _adapters),
    ("moe", _moe),
    ("draft", _draft),
    ("search", _search),
    ("lazy", _lazy),
    ("density", _density),
    ("image_disk", _image_disk),
    ("remote", _remote),
    ("hub", _hub),
)
