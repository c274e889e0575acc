"""The sections of bench/moe.py and bench/moe_quality.py."""

from __future__ import annotations

from statistics import fmean

from tables import Told, aim, machine, percent, table, wall

ABOUT = """\
{machine} `python bench/moe.py WORK`. {experts} experts of {millions:.0f} M parameters in bf16, all
of whose elements differ from the base's, become a Mixtral with random routers. Both programs are
whole processes, in turn, in {runs}.
"""


def section(told: Told) -> str:
    """The section of bench/moe.py."""
    about = ABOUT.format(
        machine=machine(told),
        experts=told["experts"],
        millions=told["millions"],
        runs=f"{told['mstore']['runs']} round" + "s" * (told["mstore"]["runs"] > 1),
    )
    rows = [
        (
            name,
            wall(told[key]),
            f"{told[key]['cpu']:.2f}",
            f"{told[f'{key}_bytes'] / 1e6:,.1f}",
        )
        for key, name in (("mergekit", "mergekit-moe"), ("mstore", "mstore"))
    ]
    share = told["mstore_bytes"] / told["mergekit_bytes"]
    seconds = told["mstore"]["wall"]
    return "\n".join(
        [
            "## Mixtures of experts\n",
            about,
            table(("program", "wall s", "CPU s", "MB written"), rows),
            aim(
                f"at most 0.1 % of the bytes, in 2 s ({100 * share:.3f} %, {seconds:.2f} s)",
                met=share <= 0.001 and seconds <= 2,
            ),
        ]
    )


QUALITY = """\
{machine} `python bench/moe_quality.py WORK`. The family of `examples/family.py` ({millions:.1f} M
parameters a model, trained in {seconds:.0f} s): the mean over the experts' domains of the held-out
loss, in nats a byte. Routers are made of {prompts} excerpts of {length} bytes of each domain's
training text; random ones are the mean of two seeds. *Own* is the share of held-out tokens whose
experts are among others their domain's own, over layers. *The right MLPs* are those of a domain's
own expert with the base's attention, norms and embeddings: the mixture whose routers never err.
"""


def quality(told: Told) -> str:
    """The section of bench/moe_quality.py."""
    groups = told["groups"]

    def mean(one: Told) -> float:
        return fmean(one["losses"].values())

    heads, columns = [], []
    for group in groups.values():
        count = len(group["base"]["losses"])
        rows = {
            "base": group["base"],
            "each expert on its own domain": group["dense"],
            "the right MLPs": group["right"],
            **{f"merged by {name}": one for name, one in group["merges"].items()},
        }
        for name, one in group["mixtures"].items():
            mode, per_token = name.split()
            rows[f"mixture, `{mode}`, {per_token} for each token"] = one
        heads += [f"loss, {count} experts", "own"]
        columns.append(rows)
    cells: list[tuple[str, ...]] = []
    for name in columns[0]:
        cells.append((name,))
        for rows in columns:
            own = rows[name].get("own")
            cells[-1] += (f"{mean(rows[name]):.3f}", percent(fmean(own.values()), 0) if own else "")

    def best(kind: str, start: str = "") -> list[float]:
        return [
            min(mean(one) for name, one in group[kind].items() if name.startswith(start))
            for group in groups.values()
        ]

    lda, merged, hidden = best("mixtures", "lda"), best("merges"), best("mixtures", "hidden")
    pairs = list(zip(lda, merged, strict=True))
    shown = ", ".join(f"{ours:.3f} and {theirs:.3f}" for ours, theirs in pairs)
    return "\n".join(
        [
            "## What mixtures are good for\n",
            QUALITY.format(
                machine=machine(told),
                millions=told["family"]["parameters"] / 1e6,
                seconds=told["family"]["seconds"],
                prompts=told["prompts"],
                length=told["prompt_bytes"],
            ),
            table(("", *heads), cells),
            aim(
                "a mixture with routers by `lda` has a lower loss than any single merge "
                f"({shown}), and than with `hidden`",
                met=all(a < b for a, b in pairs)
                and all(a < b for a, b in zip(lda, hidden, strict=True)),
            ),
        ]
    )
