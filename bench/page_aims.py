"""The page of aims: each piece of work, its peer, its limit, its aim; a table for each machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import page_hub
import page_image_disk
import page_incremental
import page_lazy
import page_search
from tables import Told, table

HEAD = """\
# Benchmarks: aims

What was to be reached, and what was. *Ratio* is mstore against the peer in the same run. *Limit* is
mstore's wall time in multiples of the least that the machine could take, where `bench/limits.py`
measured that. A row with two aims stands twice. The [details](benchmarks-details.md) say how each
figure was made, how the [machines](benchmarks-details.md#what-falls-short-and-why) differ, and
what falls short. Written by `bench/report.py` from `bench/results`.
"""

NOW = """\
## A processor {words} AVX-512, newest figures
"""

EARLIER = """\
## A processor with AVX-512, an earlier version

Before blocks had one code ([040](design/040-rans.md)). Aims in seconds were set for this machine.
"""

COLUMNS = ("work", "peer", "peer s", "mstore s", "ratio", "limit", "aim", "")


class Row(NamedTuple):
    """One piece of work.  met: whether its figures reach the aim."""

    work: str
    peer: str
    peer_s: float | None
    mstore_s: float | None
    ratio: str
    limit: float | None
    aim: str
    met: bool


def page(told: dict[str, Told], earlier: dict[str, Told]) -> str:
    """A table for each machine, of the results (by the names of their files) that are there.

    told: results of this version, with the rest that is on the page; older ones do not say whether
    the processor has AVX-512, and have no row. earlier: results of a version before.
    """
    tables = []
    for has, words in ((True, "with"), (False, "without")):
        own = {name: one for name, one in told.items() if one["machine"].get("avx512") is has}
        tables.append((NOW.format(words=words), own))
    tables.append((EARLIER, earlier))
    parts = [HEAD]
    for words, results in tables:
        rows = [row for name, make in MAKERS if name in results for row in make(results)]
        if rows:
            parts += [words, table(COLUMNS, [_line(row) for row in rows])]
    return "\n".join(parts)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.work,
        row.peer,
        _seconds(row.peer_s),
        _seconds(row.mstore_s),
        row.ratio,
        "" if row.limit is None else f"{row.limit:.1f} times",
        row.aim,
        "met" if row.met else "[missed](benchmarks-details.md#what-falls-short-and-why)",
    )


def _limit(told: dict[str, Told], work: str) -> float | None:
    found = told.get("limits", {}).get("works", {}).get(work)
    return None if found is None else float(found["ratio"]["median"])


def _mergekit(told: dict[str, Told]) -> Iterator[Row]:
    for method, least in (("ties", 50), ("linear", 8)):
        found = told["mergekit"][method]
        times = found["times_faster"]
        limit = _limit(told, f"{method} raw")
        shown = ("mergekit", found["mergekit"]["wall"], found["mstore"]["wall"])
        ratio = f"{times:.1f} times as fast"
        work = f"{method}, 4 experts, raw"
        yield Row(work, *shown, ratio, limit, f"{least} times as fast", met=times >= least)
        if limit is not None:
            yield Row(work, *shown, ratio, limit, "1.4 times the limit", met=limit <= 1.4)


def _dense(told: dict[str, Told]) -> Iterator[Row]:
    works = told["limits"]["works"]
    for method in ("ties", "linear"):
        raw = works[f"{method} raw"]["wall"]
        for work, of in (("", ""), (", output raw", ", raw output")):
            dense = works[f"{method} dense{of}"]["wall"]
            yield Row(
                f"{method}, 4 experts, dense{work}",
                "mstore, raw",
                raw,
                dense,
                f"{dense / raw:.2f} times as long",
                _limit(told, f"{method} dense{of}"),
                "1.5 times as long",
                met=dense / raw <= 1.5,
            )


def _rates(told: dict[str, Told]) -> Iterator[Row]:
    for part, peer, work, aim in (
        ("add", "cp + b3sum", "dense expert", 2.0),
        ("add", "cp + b3sum", "raw expert", 1.3),
        ("checkout", "cp -r", "dense expert", 1.25),
    ):
        found = told["rates"][part]
        times = found[work]["ratio"]["median"]
        name = f"add {work}" if part == "add" else f"checkout {work.replace(' expert', ' expert0')}"
        yield Row(
            f"{part}, {work}",
            peer,
            found[peer]["wall"],
            found[work]["wall"],
            f"{times:.2f} times as long",
            _limit(told, name),
            f"{aim:g} times as long",
            met=times <= aim,
        )


def _incremental(told: dict[str, Told]) -> Iterator[Row]:
    sizes = told["incremental"]["sizes"]
    wanted = [(sizes[0], "times_faster", 10)]
    if sizes[-1]["millions"] >= page_incremental.LARGE:
        wanted.append((sizes[-1], "times_faster_inside", 20))
    for size, key, least in wanted:
        for case, work in (("ninth", "a ninth expert"), ("changed", "one expert changed")):
            found = size[case]
            times = found[key]["median"]
            inside = key == "times_faster_inside"
            seconds = [
                found[way]["seconds"]["median"] if inside else found[way]["wall"]
                for way in ("no memo", "memo")
            ]
            where = "inside" if inside else "process"
            yield Row(
                f"TIES again, {work}, {size['millions']:.0f} M, {where}",
                "mstore, no memo",
                *seconds,
                f"{times:.1f} times as fast",
                None,
                f"{least} times as fast",
                met=times >= least,
            )


def _budget(told: dict[str, Told]) -> Iterator[Row]:
    found = told["budget"]["scaling"]["20"]
    ours = found["10%"]
    times = ours["times_faster"]["median"]
    yield Row(
        "20 experts at a 10 % budget, cold",
        "naive full read",
        found["naive"]["wall"]["median"],
        ours["wall"]["median"],
        f"{times:.1f} times as fast",
        None,
        "11 times as fast",
        met=times >= 11,
    )
    if "mergekit" not in told["budget"]:
        return
    times, limit = (told["budget"][key]["median"] for key in ("times_faster", "limit"))
    yield Row(
        "20 experts at a 10 % budget, cold",
        "mergekit",
        told["budget"]["mergekit"]["wall"],
        ours["wall"]["median"],
        f"{times:.0f} times as fast",
        None,
        "60 times as fast",
        met=times >= 60,
    )
    yield Row(
        "20 experts at a 10 % budget, cold",
        "the disk alone, the same bytes",
        found["disk"]["wall"]["median"],
        ours["wall"]["median"],
        f"{limit:.2f} times as long",
        None,
        "1.3 times as long",
        met=limit <= 1.3,
    )


def _decoding(told: dict[str, Told]) -> Iterator[Row]:
    decoding = told["decoding"]
    blocks = [found for name, found in decoding.items() if name.startswith("bf16")]
    rates = [found["now"]["delta"]["decode"] for found in blocks]
    is_wide = decoding["machine"]["avx512"]
    least = 2.4 if is_wide else 1.6
    yield Row(
        f"decode a difference of bf16, {'AVX-512' if is_wide else 'no AVX-512'}",
        "",
        None,
        None,
        f"{min(rates):.2f} to {max(rates):.2f} GB/s",
        None,
        f"{least:g} GB/s",
        met=min(rates) >= least,
    )


def _first(told: dict[str, Told]) -> Iterator[Row]:
    for name in ("add", "merge"):
        found = told["first"]["first"][name]["wall"]
        yield Row(
            f"first {name} of an installation", "", None, found, "", None, "1 s", met=found <= 1
        )


def _start(told: dict[str, Told]) -> Iterator[Row]:
    commands = told["start"]["commands"]
    python = commands["python -c pass"]["wall_ms"]["median"]
    for name in ("refs", "log", "show", "ls"):
        found = commands[f"mstore {name}, now"]["wall_ms"]["median"]
        yield Row(
            f"`mstore {name}`",
            "python -c pass",
            python / 1000,
            found / 1000,
            f"{found / python:.1f} times as long",
            None,
            "0.12 s",
            met=found <= 120,
        )


def _growth(told: dict[str, Told]) -> Iterator[Row]:
    largest = max(told["growth"]["sizes"].values(), key=lambda one: one["blocks"])
    for name, task in largest["tasks"].items():
        reach = task.get("aim_seconds")
        if reach is not None:
            seconds = task["seconds"]["median"]
            yield Row(
                f"{name}, {largest['blocks']:.0e} blocks",
                "",
                None,
                seconds,
                "",
                None,
                f"{reach:g} s",
                met=seconds <= reach,
            )


def _remote(told: dict[str, Told]) -> Iterator[Row]:
    remote = told["remote"]
    for work, found in remote.get("rates", {}).get("works", {}).items():
        rate = found["rate_wall"]["median"]
        yield Row(
            f"{work}, raw packs",
            "s5cmd, plain files",
            found["s5cmd"]["wall"]["median"],
            found["mstore"]["wall"]["median"],
            f"{rate:.2f} of its rate",
            None,
            "0.9 of its rate",
            met=rate >= 0.9,
        )
    family = remote.get("family")
    if family is not None:
        share = family["sent_bytes"]["mstore"] / family["plain_bytes"]
        yield Row(
            f"bytes of a base and {family['experts']} fine-tunes, pushed",
            "plain files",
            None,
            None,
            f"{share:.2f} of the bytes",
            None,
            "0.35 of the bytes",
            met=share <= 0.35,
        )
        for name in ("push", "fetch"):
            found = family["again"][f"{name}, unchanged"]
            seconds, requests = found["wall"]["median"], found["requests"]
            yield Row(
                f"{name} of an unchanged family",
                "",
                None,
                seconds,
                f"{requests:.0f} request{'s' * (requests != 1)}",
                None,
                "1 s, 3 requests",
                met=seconds < 1 and requests <= 3,
            )


def _lazy(told: dict[str, Told]) -> Iterator[Row]:
    found = told["lazy"]
    peer, own = page_lazy.merge_seconds(found)
    yield Row(
        f"{found['family']['experts']} experts at a 10 % budget, from a lazy clone, 200 Mbit/s",
        " and ".join(found["peer"]),
        peer,
        own,
        f"{peer / own:.1f} times as soon",
        None,
        f"{page_lazy.LEAST_TIMES} times as soon",
        met=peer / own >= page_lazy.LEAST_TIMES,
    )
    for name, times in page_lazy.load_times(found).items():
        seconds = found["loads"][name]["wall"]["median"]
        yield Row(
            f"{name} of a lazy expert, 200 Mbit/s",
            "the link",
            seconds / times,
            seconds,
            f"{times:.2f} times as long",
            None,
            f"{page_lazy.MOST_LINK:g} times as long",
            met=times <= page_lazy.MOST_LINK,
        )


def _hub(told: dict[str, Told]) -> Iterator[Row]:
    found = told["hub"]
    for link, codec, words, most in (
        ("gigabit", "auto", "1 Gbit/s", page_hub.MOST_GIGABIT),
        ("loopback", "raw", "loopback, raw", page_hub.MOST_LOOPBACK),
    ):
        times = page_hub.ratio(found, link, codec)
        yield Row(
            f"add a model of {found['bytes'] / 1e9:.1f} GB from the Hub, {words}",
            "hf download",
            found[link][page_hub.PLAIN]["wall"]["median"],
            found[link][f"mstore add, {codec}"]["wall"]["median"],
            f"{times:.2f} times as long",
            None,
            f"{most:g} times as long",
            met=times <= most,
        )


def _search(told: dict[str, Told]) -> Iterator[Row]:
    found = told["search"]
    share = found["time_share"]
    yield Row(
        f"search eight weights, {found['trials']} trials, the evaluator left out",
        "mergekit, each merged",
        found["mergekit"]["wall"] * found["trials"],
        found["mstore"]["outside"],
        f"{share:.2f} times as long",
        None,
        "a third",
        met=share <= page_search.MOST_TIME,
    )


def _image_disk(told: dict[str, Told]) -> Iterator[Row]:
    found = told["image_disk"]
    plain, most = found["plain_bytes"], page_image_disk.MOST_BYTES
    models = f"{found['originals']} image models and {found['mixes']} mixes"
    for way, words in (("added, base first", "added"), ("virtual", "mixes virtual")):
        share = found["ways"][way]["stored_bytes"] / plain
        ratio, aim = f"{share:.2f} of the bytes", f"{most:g} of the bytes"
        work = f"bytes of {models}, {words}"
        yield Row(work, "plain files", None, None, ratio, None, aim, met=share <= most)
    share = found["ways"]["virtual"]["bytes_a_mix"] / found["wide"]["model_bytes"]
    size = f"{found['wide']['model_bytes'] / 1e6:.0f} MB"
    yield Row(
        f"bytes of a virtual mix of image models of {size}",
        "plain file",
        None,
        None,
        f"{share:.4f} of the bytes",
        None,
        f"{page_image_disk.MOST_VIRTUAL:g} of the bytes",
        met=share <= page_image_disk.MOST_VIRTUAL,
    )


MAKERS: tuple[tuple[str, Callable[[dict[str, Told]], Iterator[Row]]], ...] = (
    ("mergekit", _mergekit),
    ("limits", _dense),
    ("decoding", _decoding),
    ("rates", _rates),
    ("incremental", _incremental),
    ("budget", _budget),
    ("first", _first),
    ("start", _start),
    ("growth", _growth),
    ("remote", _remote),
    ("lazy", _lazy),
    ("hub", _hub),
    ("search", _search),
    ("image_disk", _image_disk),
)
