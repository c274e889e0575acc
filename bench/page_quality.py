"""The section of bench/quality.py: errors and losses under budgets."""

from __future__ import annotations

from tables import Told, aim, machine, percent, table

QUALITY = """\
{machine} `python bench/quality.py WORK`. The family of `examples/family.py` with eight experts
({millions:.1f} M parameters, trained in {seconds:.0f} s), in a store with blocks of 64 KiB. Every
merge is compared with the one at full budget. *Error* is ||merged - full|| / ||full - base||: 1 is
the error of merging nothing. `random` draws blocks at random.

Groups: `alike` ({alike}) were trained with one step size, two of them with frozen lower layers;
`differ` ({differ}) changed attention only, the top only, or all layers with steps that decrease
from the top down or from the bottom up; `all` is all eight.

![Error against budget](plots/quality-error.svg)
"""

OF_PLAIN = """\
### Of all bytes

The same, with budgets as a share of all bytes of all experts, as a reader of flat files counts
them. Blocks that equal the base cost nothing here. A blind draw also pays for them, so it
reads that share of the changed ones: its column is `random` at that share.
"""

LOSSES = """\
### Losses

The largest increase of the held-out loss over the full merge's, over all eight domains.

![Largest rise of a loss against budget](plots/quality-loss.svg)
"""


def section(told: Told) -> str:
    """The section of bench/quality.py (Table 7)."""
    about = QUALITY.format(
        machine=machine(told),
        millions=told["family"]["parameters"] / 1e6,
        seconds=told["family"]["seconds"],
        alike=", ".join(told["groups"]["alike"]),
        differ=", ".join(told["groups"]["differ"]),
    )
    methods = list(told["parameters"])
    rises = [
        told[method][group]["scores"][score]["0.3"]["worst_rise"]
        for method in methods
        for group in ("differ", "all")
        for score in [next(iter(told[method][group]["scores"]))]
    ]
    ratios, plain = [], []
    never_worse = True
    for method in methods:
        for name, group in told[method].items():
            scores = group["scores"]
            random = scores["random"]
            own = scores[next(iter(scores))]
            never_worse &= all(own[b]["of_delta"] <= random[b]["of_delta"] for b in own)
            if name == "differ":
                ratios.append(own["0.3"]["of_delta"] / random["0.3"]["of_delta"])
                plain.append(group["of_plain"]["0.3"]["of_delta"] / random["0.3"]["of_delta"])
    parts = [
        "## Quality under a budget: a trained family of eight (Table 7)\n",
        about,
        *(_errors(method, told[method], told["parameters"][method]) for method in methods),
        OF_PLAIN,
        _of_plain(told, methods),
        aim(
            "where experts changed different places, at 30 % of what a full merge reads at "
            f"most a tenth of random's error (here {_list(ratios)} of it)",
            met=max(ratios) <= 0.1,
        ),
        aim(
            f"the same at 30 % of all bytes (here {_list(plain)} of a blind draw's)",
            met=max(plain) <= 0.1,
        ),
        aim("never worse than random", met=never_worse),
        LOSSES,
        _losses(told, methods),
        aim(
            "at 30 % of what a full merge reads no loss more than 1 % above that of the full merge "
            f"(largest: {percent(max(rises))})",
            met=max(rises) <= 0.01,
        ),
    ]
    return "\n".join(parts)


def _list(ratios: list[float]) -> str:
    return " and ".join(f"{ratio:.2f}" for ratio in ratios)


def _errors(method: str, groups: dict[str, Told], parameters: Told) -> str:
    rows = []
    for name, group in groups.items():
        for score, found in group["scores"].items():
            cells = [
                f"{point['of_delta']:.3f} / {100 * point['block_p95']:.2f} %"
                for point in found.values()
            ]
            rows.append((name, score, *cells))
    budgets = next(iter(next(iter(groups.values()))["scores"].values()))
    words = ", ".join(f"{key} {value}" for key, value in parameters.items())
    head = ("experts", "score", *(f"{100 * float(b):.0f} %" for b in budgets))
    return (
        f"### {method} ({words})\n\n"
        "Error / 95th percentile over blocks of ||merged - full|| / ||full||, by share of the "
        "bytes that the full merge reads. At 100 % all are zero: the same plan.\n\n"
        + table(head, rows)
    )


def _of_plain(told: Told, methods: list[str]) -> str:
    rows = []
    for method in methods:
        for name, group in told[method].items():
            random = group["scores"]["random"]
            cells = [
                f"{point['of_delta']:.3f} / {random[budget]['of_delta']:.3f}"
                for budget, point in group["of_plain"].items()
            ]
            share = group["full"]["full_bytes"] / group["plain_bytes"]
            rows.append((method, name, percent(share, 0), *cells))
    budgets = told[methods[0]]["all"]["of_plain"]
    head = (
        "",
        "experts",
        "a full merge reads",
        *(f"{100 * float(b):.0f} %: error / blind" for b in budgets),
    )
    return table(head, rows)


def _losses(told: Told, methods: list[str]) -> str:
    rows = []
    budgets: list[str] = []
    for method in methods:
        for name, group in told[method].items():
            found = {**group["scores"], "of all bytes": group["of_plain"]}
            for score, points in found.items():
                shown = {b: p["worst_rise"] for b, p in points.items() if "worst_rise" in p}
                if shown:
                    budgets = list(shown)
                    cells = [percent(rise, 2) for rise in shown.values()]
                    rows.append((method, name, score, *cells))
    head = ("", "experts", "score", *(f"{100 * float(b):.0f} %" for b in budgets))
    return table(head, rows)
