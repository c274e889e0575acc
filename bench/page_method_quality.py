"""The section of bench/method_quality.py: losses of merge methods, untuned and tuned."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from tables import Told, machine, table

TASK_ARITHMETIC = "task_arithmetic"
AVERAGE = "linear"
SAME = 0.001
ABOUT = """\
{machine} `python bench/method_quality.py WORK`. The family of `examples/family.py` with eight
experts ({millions:.1f} M parameters, trained in {seconds:.0f} s). Each figure is a held-out loss in
nats a byte, the mean over the domains of the experts that are merged: {groups}. *Untuned* has no
`scale`; parameters that are not named have their defaults, weights are 1. *Tuned* has the outer
`scale` that a search by grid found. Half of the held-out excerpts decides over the scale, and the
other half gives every figure here.

*Adapters*: each expert becomes a LoRA adapter (`extract-lora`; `full`: of full rank, nothing is
lost), `combine-adapters` makes one of them, and that is merged with a `scale`. (When `cat` and
`ties_svd` were measured, norms stayed as in the base.)

![Losses of merge methods](plots/method-quality.svg)
"""
LEFT_OUT = """\
Left out: {names}. `fisher`, `regmean` and `aim` know texts: they have what `examples/fisher.py`
and `examples/gram.py` make of what the experts were trained on. Below, losses that differ by less
than {same} are the same.
"""


def mean(losses: Told) -> float:
    """The mean over domains."""
    return fmean(losses.values())


def ranked(group: Told) -> dict[str, Told]:
    """The candidates of a group, those with the lowest tuned loss first."""
    return dict(sorted(group["candidates"].items(), key=lambda one: mean(one[1]["tuned"])))


def section(told: Told) -> str:
    """The section of bench/method_quality.py."""
    groups = told["groups"]
    last = list(groups.values())[-1]
    head = [""]
    for group in groups.values():
        head += [f"{len(group['base'])} experts: untuned", "tuned", "scale"]
    rows = [
        ("base", *_one(groups, lambda group: mean(group["base"]))),
        (
            "each expert on its own domain",
            *_one(groups, lambda group: fmean(own[name] for name, own in group["experts"].items())),
        ),
        (
            "the best single expert",
            *_one(groups, lambda group: min(map(mean, group["experts"].values()))),
        ),
    ]
    for name in ranked(last):
        cells: list[str] = []
        for group in groups.values():
            one = group["candidates"][name]
            cells += [f"{mean(one[key]):.4f}" for key in ("untuned", "tuned")]
            cells.append(f"{one['scale']:.2f}")
        rows.append((name, *cells))
    return "\n".join(
        [
            "## Merge methods by loss\n",
            ABOUT.format(
                machine=machine(told),
                millions=told["family"]["parameters"] / 1e6,
                seconds=told["family"]["seconds"],
                groups="; ".join(", ".join(group["base"]) for group in groups.values()),
            ),
            table(tuple(head), rows),
            LEFT_OUT.format(
                names=", ".join(f"`{name}` ({why})" for name, why in told["left_out"].items()),
                same=SAME,
            ),
            *(_said(group) for group in groups.values()),
        ]
    )


def _one(groups: Told, loss: Callable[[Told], float]) -> list[str]:
    return [cell for group in groups.values() for cell in (f"{loss(group):.4f}", "", "")]


def _said(group: Told) -> str:
    """What helps and what does not, in a group."""
    found = ranked(group)
    tuned = {name: mean(one["tuned"]) for name, one in found.items()}
    untuned = {name: mean(one["untuned"]) for name, one in found.items()}
    base, goal, average = mean(group["base"]), tuned[TASK_ARITHMETIC], untuned[AVERAGE]
    gains = [untuned[name] - loss for name, loss in tuned.items()]
    others = {name: loss - goal for name, loss in tuned.items() if name != TASK_ARITHMETIC}
    lists = {
        f"Untuned, lower than the average of the experts (`linear`, {average:.3f})": [
            name for name, loss in untuned.items() if loss < average - SAME
        ],
        f"Untuned, worse than the base ({base:.3f})": [
            name for name, loss in untuned.items() if loss > base + SAME
        ],
        f"Tuned, lower than task arithmetic ({goal:.3f})": [
            name for name, more in others.items() if more < -SAME
        ],
        "Tuned, the same": [name for name, more in others.items() if abs(more) <= SAME],
        "Tuned, higher": [name for name, more in others.items() if more > SAME],
    }
    return (
        f"### Merging {len(group['base'])} experts: what helps\n\n"
        f"- Tuning lowers the loss by {median(gains):.3f} (median; {min(gains):.3f} to "
        f"{max(gains):.3f}). Tuned losses lie from {min(tuned.values()):.3f} to "
        f"{max(tuned.values()):.3f}, half of them at most {median(tuned.values()):.3f}.\n"
        + "".join(f"- {head}: {'; '.join(names) or 'none'}.\n" for head, names in lists.items())
    )
